"""Which tensors NVIDIA's tensor memory accelerator takes, and the descriptors that it takes them by."""

from functools import lru_cache
from typing import Optional, Tuple

from torch import Tensor

from .tuning import DeviceSpec

_BYTES = 16  # of which addresses and strides are multiples

Strides = Tuple[int, int, int]


@lru_cache(maxsize=4096)  # of shapes, whose rows may change with every call
def _strides(shape: Tuple[int, ...], strides: Tuple[int, ...], itemsize: int) -> Optional[Tuple[int, ...]]:
    """The strides of a tensor with contiguous columns if the accelerator takes them, else None.

    A dimension of one step may have any, but is given one that the hardware wants.
    """
    unit = _BYTES // itemsize
    taken = [stride if size > 1 else -(-shape[-1] // unit) * unit for size, stride in zip(shape[:-1], strides)]
    return None if any(stride <= 0 or stride % unit for stride in taken) else (*taken, 1)


def descriptor_strides(tensor: Tensor) -> Optional[Tuple[int, ...]]:
    """The strides for a descriptor of a tensor with contiguous columns, or None if there is none."""
    return _strides(tensor.shape, tensor.stride(), tensor.dtype.itemsize)


def tma_fits(tensor: Tensor) -> bool:
    """Whether the accelerator takes a tensor with contiguous columns."""
    return tensor.data_ptr() % _BYTES == 0 and descriptor_strides(tensor) is not None


def rows_tma(x: Tensor, spec: DeviceSpec) -> bool:
    """Whether rows x (rows, K) can be read by descriptor."""
    return spec.wide_tiles and x.dtype.itemsize == 2 and x.stride(1) == 1 and tma_fits(x)


def weight_tma(weight: Tensor, strides: Strides) -> Optional[bool]:
    """None if a weight cannot be read by descriptor; else whether it lies (E, K, N) in memory, not (E, N, K).

    strides: over (E, N, K).
    """
    first, second = strides[1:]
    if weight.stride(2) != 1 or not tma_fits(weight):
        return None
    return first == 1 if first != second else None


@lru_cache(maxsize=None)
def _descriptor_type():
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


def descriptor(tensor: Tensor, *block: int):
    """A descriptor of the tensor in such blocks, for Triton's kernels; `tma_fits` must hold.

    Made without the constructor's checks, which would take longer than all else of it and repeat those of `tma_fits`.
    """
    kind = _descriptor_type()
    made = kind.__new__(kind)
    made.base, made.shape, made.strides, made.block_shape = (
        tensor,
        tensor.shape,
        descriptor_strides(tensor),
        list(block),
    )
    return made
