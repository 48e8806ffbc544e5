"""Kernel launches at a fraction of the host time: what Triton works out per call is looked up by a smaller key."""

import logging
from functools import lru_cache
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

_OPTIONS = ("num_warps", "num_stages")

_log = logging.getLogger("grouped_moe")


class Kernel:
    """A kernel with its constants bound: called with a grid and the arguments before them.

    Triton specializes a variant on more than the constants: dtypes and 16-byte alignment of pointers, and whether an
    int is 1, a multiple of 16 or needs 64 bits. That is the key to its compiled variants here. Backends other than CUDA
    look at more: their launches go through Triton, as do each variant's first and those that a profiler's hook watches.
    """

    def __init__(self, kernel, choice: Optional[str] = None, **constants):
        """choice: path and config, to be logged by the first call.

        constants: in the order of the kernel's parameters, then num_warps and num_stages.
        """
        from triton import knobs

        names = [name for name in constants if name not in _OPTIONS]
        if kernel.arg_names[len(kernel.arg_names) - len(names) :] != names:
            raise TypeError(f"{kernel.__name__}: expected the constants {kernel.arg_names}, got {names}")
        self.kernel = kernel
        self.choice = choice
        self.constants = constants
        self.values = [constants[name] for name in names]
        self.variants: Dict[tuple, Any] = {}
        self.runtime = knobs.runtime

    def is_watched(self) -> bool:
        """Whether a profiler wants to see launches."""
        hook = self.runtime.launch_enter_hook
        return hook is not None and bool(getattr(hook, "calls", True))

    def __call__(self, grid: Tuple[int, int, int], *args) -> None:
        """The first argument is a tensor or a descriptor."""
        first = args[0] if isinstance(args[0], Tensor) else args[0].base
        device = first.get_device()
        key, operands = [device], []
        for arg in args:
            if type(arg) is int:
                key += (-1 if arg == 1 else arg & 15, arg >> 31)
            elif arg is None:
                key.append(None)
            elif isinstance(arg, Tensor):
                address = arg.data_ptr()
                key += (arg.dtype, address & 15)
                arg = address  # which Triton's launcher would ask for again
            else:
                key.append(arg.base.dtype)  # a descriptor's block is among the constants
            operands.append(arg)
        key = tuple(key)
        variant = self.variants.get(key)
        if variant is not None and not self.is_watched():
            stream = torch._C._cuda_getCurrentRawStream(device)
            launch_arguments = (stream, variant.function, variant.packed_metadata, None, None, None)
            variant.run(*grid, *launch_arguments, *operands, *self.values)
            return
        if self.choice is not None and _log.isEnabledFor(logging.INFO):
            _log_once(f"{self.kernel.__name__} on {_name_of(first)}: {self.choice}")
            self.choice = None
        compiled = self.kernel[grid](*args, **self.constants)
        if first.is_cuda and torch.version.hip is None:
            self.variants[key] = compiled


@lru_cache(maxsize=None)
def _log_once(line: str) -> None:
    """Other shapes make the same choice, which is worth one line."""
    _log.info(line)


def _name_of(tensor: Tensor) -> str:
    """Of the device that holds it."""
    name_of = getattr(getattr(torch, tensor.device.type), "get_device_name", None)
    return name_of(tensor.device) if name_of else str(tensor.device)


@lru_cache(maxsize=None)
def _bind(kernel, names: Tuple[str, ...], values: Tuple[Any, ...]) -> Kernel:
    return Kernel(kernel, **dict(zip(names, values)))


def launch(kernel, grid: Tuple[int, ...], *args, **constants) -> None:
    """kernel[grid](*args, **constants), through a `Kernel` that is kept."""
    _bind(kernel, tuple(constants), tuple(constants.values()))((*grid, 1, 1)[:3], *args)
