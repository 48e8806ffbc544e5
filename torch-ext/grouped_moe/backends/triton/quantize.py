"""Rows as 8-bit floats: which products take them, and how rows become such."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...block_scaled import CODES, BlockScaled, Weight
from ...rows import Rows
from ..kernels.quantize import quantize_rows_kernel
from .launch import Kernel

BLOCK = 128  # columns that have one scale
_ROWS, _BLOCKS = 8, 4  # of a program


class QuantizedRows(NamedTuple):
    """Rows (rows, K) of 8-bit floats, each times the scale of its block of 128 columns.

    codes: (rows, K) float8_e4m3fn, scales: (rows, ceil(K / 128)) fp32, both contiguous. dtype: that products with them
    are returned in.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """(rows, K)."""
        return self.codes.shape


def empty_rows(num_rows: int, k: int, like: Tensor) -> QuantizedRows:
    """Unwritten rows."""
    codes = like.new_empty(num_rows, k, dtype=CODES)
    return QuantizedRows(codes, like.new_empty(num_rows, -(-k // BLOCK), dtype=torch.float32), like.dtype)


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Rows (rows, K), any strides, as codes: each scale lets the largest magnitude of its columns reach 448."""
    num_rows, k = x.shape
    rows = empty_rows(num_rows, k, x)
    grid = -(-num_rows // _ROWS), -(-k // (_BLOCKS * BLOCK)), 1
    _kernel(k)(grid, x, *x.stride(), rows.codes, rows.scales, num_rows)
    return rows


@lru_cache(maxsize=None)
def _kernel(k: int) -> Kernel:
    return Kernel(quantize_rows_kernel, {"K": k, "BLOCK_M": _ROWS, "NUM_BLOCKS": _BLOCKS})


def takes_quantized_rows(weight: Weight, rows: Rows, dtype: torch.dtype) -> bool:
    """Whether products of a weight with such rows are to be made with rows of 8-bit floats, if there is a kernel.

    Few rows wait for weights, so that narrower rows gain nothing.
    """
    if not isinstance(weight, BlockScaled) or weight.products == "w8a16":
        return False
    tall = rows.block_m >= BLOCK and dtype.itemsize == 2
    return tall and tuple(weight.block) == (BLOCK, BLOCK)
