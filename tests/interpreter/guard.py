"""Every address that a kernel reads or writes, checked against the tensors that its launch is given."""

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder


class Bounds:
    """Within it kernels access no other memory than that of tensors, or behind descriptors, among these arguments."""

    def __init__(self, *args):
        tensors = [arg if isinstance(arg, Tensor) else getattr(arg, "base", None) for arg in args]
        spans = sorted(map(_span, filter(lambda tensor: tensor is not None and tensor.numel(), tensors)))
        self.starts, ends = np.array(spans, np.uint64).reshape(-1, 2).T
        self.ends = np.maximum.accumulate(ends)

    def check(self, what: str, pointers, mask) -> np.ndarray:
        """The addresses that the mask lets through. Fails if one lies in no tensor."""
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.uint64)
        place = np.searchsorted(self.starts, addresses, side="right")
        inside = place > 0
        inside[inside] = addresses[inside] < self.ends[place[inside] - 1]
        assert inside.all(), f"{what} {int((~inside).sum())} of {addresses.size} addresses out of bounds"
        return addresses

    def __enter__(self):
        self.originals = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        load, store = self.originals

        def checked_load(builder, pointers, mask, *others, **named):
            self.check("reads", pointers, mask)
            return load(builder, pointers, mask, *others, **named)

        def checked_store(builder, pointers, value, mask, *others, **named):
            addresses = np.sort(self.check("writes", pointers, mask))
            assert (addresses[1:] != addresses[:-1]).all(), "writes an address twice at once: either value may stay"
            return store(builder, pointers, value, mask, *others, **named)

        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = checked_load, checked_store

    def __exit__(self, *exception):
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = self.originals


def _span(tensor: Tensor) -> tuple:
    """The addresses of a tensor's first element and past its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
