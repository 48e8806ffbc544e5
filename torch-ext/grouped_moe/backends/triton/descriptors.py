"""Descriptors of the tensor memory accelerator (TMA): which tensors it takes, and how kernels get them."""

import math
from typing import Optional, Sequence, Tuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...block_scaled import Weight
from ...common.device import DeviceSpec
from ..kernels.tiles import MAX_RAGGED_ROWS
from .launch import ALIGNMENT


def tma_strides(tensor: Tensor) -> Optional[Tuple[int, ...]]:
    """The strides of a tensor if TMA takes it, else None: contiguous columns, all else in steps of 16 bytes.

    A dimension of one step may have any stride, but is given one that the hardware wants.
    """
    strides, unit = tensor.stride(), ALIGNMENT // tensor.element_size()
    if strides[-1] != 1 or tensor.data_ptr() % ALIGNMENT:
        return None
    if min(strides) > 0 and math.gcd(*strides[:-1]) % unit == 0:
        return strides
    shape = tensor.shape
    taken = [stride if size > 1 else -(-shape[-1] // unit) * unit for size, stride in zip(shape[:-1], strides)]
    return None if any(stride <= 0 or stride % unit for stride in taken) else (*taken, 1)


def takes_rows(x: Tensor, num_rows: int, spec: DeviceSpec) -> bool:
    """Whether x (rows, K), or (T, K) of so many routed rows, can be read by descriptor, and it pays."""
    return spec.wide_tiles and x.element_size() == 2 and num_rows <= MAX_RAGGED_ROWS and tma_strides(x) is not None


def takes_weight(weight: Weight) -> bool:
    """Whether a weight, or its codes, can be read by descriptor."""
    return tma_strides(weight if isinstance(weight, Tensor) else weight.data) is not None


class TmaDescriptor(TensorDescriptor):
    """A descriptor without Triton's own checks: `tma_strides` has made them, and they cost as much as a launch."""

    def __post_init__(self):
        pass


def describe(tensor: Tensor, block: Sequence[int]) -> TmaDescriptor:
    """A descriptor for Triton's kernels."""
    return TmaDescriptor(tensor, tensor.shape, tma_strides(tensor), list(block))
