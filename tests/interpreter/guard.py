"""Fresh memory full of NaN, and every address that a kernel reads or writes checked against the tensors there are."""

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import InterpreterBuilder

MARGIN, ALIGNED_MARGIN = 517, 512  # elements: the first gives addresses that descriptors do not take
ALLOCATIONS = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


def poison_value(dtype: torch.dtype):
    """NaN, or an index that leads far away."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max // 2


class GuardedAllocations(TorchFunctionMode):
    """What Python code allocates within it is poisoned, and a kernel may access no other memory than that of tensors.

    Those are the given ones and what torch functions return within it. The backend must be called directly: an op
    runs below this mode. Memory around an allocation is poisoned as well, so that a neighbour is not mistaken for it.
    margin: elements of that on either side.
    """

    def __init__(self, *tensors, margin=MARGIN):
        super().__init__()
        self.margin = margin
        self.starts, self.ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        for tensor in tensors:
            self._allow(tensor)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel():
            result = _poisoned(result, self.margin) if function in ALLOCATIONS else result
            self._allow(result)
        return result

    def _allow(self, tensor) -> None:
        if tensor is None or not tensor.numel():
            return
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        start = tensor.data_ptr()
        self.starts = np.append(self.starts, np.uint64(start))
        self.ends = np.append(self.ends, np.uint64(start + span * tensor.element_size()))
        order = np.argsort(self.starts)
        self.starts, self.ends = self.starts[order], np.maximum.accumulate(self.ends[order])

    def check(self, what: str, pointers, mask) -> None:
        """Fails if an address that the mask lets through lies in no tensor."""
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.uint64)
        if not addresses.size:
            return
        place = np.searchsorted(self.starts, addresses, side="right")
        inside = (place > 0) & (addresses < self.ends[np.maximum(place, 1) - 1])
        assert inside.all(), f"{what} {int((~inside).sum())} of {addresses.size} addresses out of bounds"

    def __enter__(self):
        self.originals = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        load, store = self.originals

        def checked_load(builder, pointers, mask, *others, **named):
            self.check("reads", pointers, mask)
            return load(builder, pointers, mask, *others, **named)

        def checked_store(builder, pointers, value, mask, *others, **named):
            self.check("writes", pointers, mask)
            return store(builder, pointers, value, mask, *others, **named)

        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = checked_load, checked_store
        return super().__enter__()

    def __exit__(self, *exception):
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = self.originals
        return super().__exit__(*exception)


def _poisoned(tensor, margin):
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = torch.full((size + 2 * margin,), poison_value(tensor.dtype), dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), margin)
