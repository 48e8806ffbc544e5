"""Rows as 8-bit floats, and how rows become such."""

from functools import lru_cache
from typing import NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from ...block_scaled import CODES
from ...common.numbers import power_of_two
from ...rows import Rows
from ..kernels import quantize as kernels
from .launch import Kernel

BLOCK = kernels.BLOCK.value  # columns that have one scale
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


def values_and_scales(rows: Union[Tensor, QuantizedRows, None]) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """Rows as arguments of a kernel: codes and their scales, or plain rows and None; None twice without rows."""
    return (rows.codes, rows.scales) if isinstance(rows, QuantizedRows) else (rows, None)


def empty_rows(num_rows: int, k: int, like: Tensor) -> QuantizedRows:
    """Unwritten rows."""
    codes = like.new_empty(num_rows, k, dtype=CODES)
    return QuantizedRows(codes, like.new_empty(num_rows, -(-k // BLOCK), dtype=torch.float32), like.dtype)


def quantize_rows(x: Tensor, rows: Optional[Rows] = None, sorts: bool = False) -> QuantizedRows:
    """x (rows, K), any strides, as codes: each scale lets the largest magnitude of its columns reach 448.

    rows: if they are routed, x is (T, K), and tokens without a routed slot are neither read nor written. sorts: each of
    these rows then gets the codes of its token, instead of one row for each token; the rest is unwritten.
    """
    num_rows, k = x.shape
    sorts = sorts and rows.top_k > 0
    made = empty_rows(rows.num_rows if sorts else num_rows, k, x)
    grid = -(-num_rows // _ROWS), -(-k // (_BLOCKS * BLOCK)), 1
    slot_to_row, top_k = (None, 0) if rows is None or not rows.top_k else (rows.slot_to_row, rows.top_k)
    _kernel(k, top_k, sorts)(grid, x, *x.stride(), slot_to_row, made.codes, made.scales, num_rows)
    return made


@lru_cache(maxsize=None)
def _kernel(k: int, top_k: int, sorts: bool) -> Kernel:
    choices = power_of_two(top_k) if top_k else 0
    constants = {"K": k, "TOP_K": top_k, "TOP_K_POW2": choices, "SORTED": sorts}
    return Kernel(kernels.quantize_rows_kernel, {**constants, "BLOCK_M": _ROWS, "NUM_BLOCKS": _BLOCKS})
