"""Kernel launches at a fraction of the host time: what Triton works out per call is looked up by a smaller key."""

from functools import lru_cache
from typing import Any, Dict, List, Tuple

import torch
from torch import Tensor

_OPTIONS = ("num_warps", "num_stages")


class Kernel:
    """A kernel with its constants bound: called with a grid and the arguments before them.

    Triton specializes a variant on more than the constants: dtypes and 16-byte alignment of pointers, and whether an
    int is 1, a multiple of 16 or needs 64 bits. That is the key to its compiled variants here. Backends other than CUDA
    look at more: their launches go through Triton, as does each variant's first.
    """

    def __init__(self, kernel, **constants):
        """constants: in the order of the kernel's parameters, then num_warps and num_stages."""
        names = [name for name in constants if name not in _OPTIONS]
        if kernel.arg_names[len(kernel.arg_names) - len(names) :] != names:
            raise TypeError(f"{kernel.__name__}: expected the constants {kernel.arg_names}, got {names}")
        self.kernel = kernel
        self.constants = constants
        self.values = [constants[name] for name in names]
        self.variants: Dict[tuple, Any] = {}

    def __call__(self, grid: Tuple[int, int, int], *args) -> None:
        """The first argument is a tensor or a descriptor."""
        key = []
        for arg in args:
            if isinstance(arg, Tensor):
                key.append((arg.dtype, arg.data_ptr() & 15))
            elif isinstance(arg, int):
                key.append((arg == 1, arg & 15, arg >> 31))
            else:
                key.append(None if arg is None else arg.base.dtype)  # a descriptor's block is among the constants
        first = args[0] if isinstance(args[0], Tensor) else args[0].base
        key.append(first.get_device())
        key = tuple(key)
        compiled = self.variants.get(key)
        if compiled is not None:
            compiled[grid](*args, *self.values)
            return
        compiled = self.kernel[grid](*args, **self.constants)
        if first.is_cuda and torch.version.hip is None:
            self.variants[key] = compiled


@lru_cache(maxsize=None)
def _bind(kernel, names: Tuple[str, ...], values: Tuple[Any, ...]) -> Kernel:
    return Kernel(kernel, **dict(zip(names, values)))


def launch(kernel, grid: Tuple[int, ...], *args, **constants) -> None:
    """kernel[grid](*args, **constants), through a `Kernel` that is kept."""
    _bind(kernel, tuple(constants), tuple(constants.values()))((*grid, 1, 1)[:3], *args)


def descriptor_strides(tensor: Tensor) -> List[int]:
    """Strides for a descriptor: a dimension of one step may have any, of which the hardware would want 16 bytes."""
    strides = [
        stride if size > 1 else -(-tensor.shape[-1] // 8) * 8 for size, stride in zip(tensor.shape, tensor.stride())
    ]
    return [*strides[:-1], 1]
