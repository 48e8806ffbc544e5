"""Which tensors NVIDIA's tensor memory accelerator takes, and the boxes and descriptors that it takes them by."""

from functools import lru_cache
from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .launch import MAX_KEPT, Form
from .tuning import DeviceSpec

_BYTES = 16  # of which addresses and strides are multiples
_RAGGED_EXTENT = 0x7FFF0000

Strides = Tuple[int, int, int]


@lru_cache(maxsize=MAX_KEPT)
def descriptor_strides(form: Form) -> Optional[Tuple[int, ...]]:
    """The strides of a tensor with contiguous columns if the accelerator takes them, else None.

    A dimension of one step may have any, but is given one that the hardware wants.
    """
    shape, unit = form.shape, _BYTES // form.dtype.itemsize
    taken = [stride if size > 1 else -(-shape[-1] // unit) * unit for size, stride in zip(shape[:-1], form.strides)]
    return None if any(stride <= 0 or stride % unit for stride in taken) else (*taken, 1)


def tma_fits(form: Form) -> bool:
    """Whether the accelerator takes a tensor with contiguous columns."""
    return form.aligned and descriptor_strides(form) is not None


def rows_tma(x: Form, spec: DeviceSpec) -> bool:
    """Whether rows x (rows, K) can be read by descriptor."""
    return spec.wide_tiles and x.dtype.itemsize == 2 and x.strides[1] == 1 and tma_fits(x)


def weight_tma(weight: Form, strides: Strides) -> Optional[bool]:
    """None if a weight cannot be read by descriptor; else whether it lies (E, K, N) in memory, not (E, N, K).

    strides: over (E, N, K).
    """
    first, second = strides[1:]
    if weight.strides[2] != 1 or not tma_fits(weight):
        return None
    return first == 1 if first != second else None


class Box(NamedTuple):
    """A descriptor but for its address: what of a tensor is read or written at once."""

    dtype: torch.dtype
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    block: Tuple[int, ...]
    gluon: bool

    def describe(self, tensor: Tensor):
        """The descriptor, for Triton.

        Made without the constructor's checks, which would take longer than all else of it and repeat those here.
        """
        kind = _descriptor_type(self.gluon)
        made = kind.__new__(kind)
        made.base, made.shape, made.strides, made.block_shape = tensor, self.shape, self.strides, list(self.block)
        if self.gluon:
            made.layout = _gluon().shared_layout(self.block, self.dtype)
        return made


def box(form: Form, *block: int, gluon: bool = False) -> Box:
    """Blocks of a tensor for which `tma_fits` holds."""
    return Box(form.dtype, tuple(form.shape), descriptor_strides(form), block, gluon)


def ragged_box(form: Form, block_rows: int, block_columns: int) -> Box:
    """Blocks of rows (R, C), columns contiguous, in whose reads rows from any end on are 0; for Gluon's kernels.

    The hardware writes 0 past a dimension's extent. Two more dimensions of rows, whose steps cancel modulo 2^64, let
    that extent fall on any row: `_triton.hopper.ragged_coordinates` says where. As in triton.tools.ragged_tma.
    """
    stride, end = descriptor_strides(form)[0], _gluon().RAGGED_END.value
    shape = (_RAGGED_EXTENT, _RAGGED_EXTENT, end, form.shape[1])
    return Box(form.dtype, shape, (2**34 - stride, stride, stride, 1), (1, 1, block_rows, block_columns), True)


@lru_cache(maxsize=None)
def _gluon():
    from ._triton import hopper

    return hopper


@lru_cache(maxsize=None)
def _descriptor_type(gluon: bool):
    if gluon:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    else:
        from triton.tools.tensor_descriptor import TensorDescriptor
    return TensorDescriptor
