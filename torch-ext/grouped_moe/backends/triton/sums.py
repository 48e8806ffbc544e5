"""Reductions of the backward, in two steps of fixed order: partial sums per tile, then their sum."""

from functools import lru_cache
from typing import Optional

import torch
from torch import Tensor

from ...rows import Rows, max_tiles
from ..kernels.sums import bias_grads_kernel, sum_partials_kernel, sum_tiles_kernel
from .launch import Kernel
from .launchers import bias_and_strides

_BLOCK_N = 64
_BLOCK_SLOTS = 256


def num_bias_dots(n: int) -> int:
    """Into how many parts `bias_grads` cuts an inner product over N columns."""
    return -(-n // _BLOCK_N)


def bias_grads(
    dy: Tensor, rows: Rows, scales: Optional[Tensor], bias: Optional[Tensor], dbias: Optional[Tensor],
    dots: Optional[Tensor], accumulate: bool = False,
) -> None:  # fmt: skip
    """dbias[e] = sum over the rows r of e of scales[r] dy[r], or plus that; dots[:, r] = parts of <dy[r], bias[e]>.

    dy: (rows, N), or (T, N) of routed rows, whose scales are per slot; columns contiguous. bias: (E, N). dbias: (E, N)
    or None. dots: (`num_bias_dots`, rows) fp32, or None without a bias.
    """
    n, groups = dy.shape[1], rows.num_groups
    tiles = max_tiles(rows.num_rows, groups, rows.block_m)
    sums = None if dbias is None else dy.new_empty(tiles, n, dtype=torch.float32)
    if tiles:
        # Triton 3.9 fuses one or the other of two products into their sum, by whether dbias is made as well: without
        # the option the last bits of routing weights' gradients would depend on that.
        kernel = _bias_grads_kernel(groups, n, rows.top_k, rows.block_m)
        kernel(
            (tiles, num_bias_dots(n), 1), dy, dy.stride(0), scales, *bias_and_strides(None if dots is None else bias),
            sums, dots, 0 if dots is None else dots.stride(0), rows.row_to_slot, rows.schedule,
        )  # fmt: skip
    if dbias is not None:
        kernel = _sum_tiles_kernel(groups, n, accumulate)
        kernel((groups, num_bias_dots(n), 1), sums, dbias, rows.schedule)


@lru_cache(maxsize=None)
def _bias_grads_kernel(num_groups: int, n: int, top_k: int, block_m: int) -> Kernel:
    constants = {"NUM_EXPERTS": num_groups, "N": n, "TOP_K": top_k, "BLOCK_M": block_m, "BLOCK_N": _BLOCK_N}
    return Kernel(bias_grads_kernel, constants, {"enable_fp_fusion": False})


@lru_cache(maxsize=None)
def _sum_tiles_kernel(num_groups: int, n: int, accumulate: bool) -> Kernel:
    constants = {"NUM_EXPERTS": num_groups, "N": n, "ACCUMULATE": accumulate, "BLOCK_R": 32, "BLOCK_N": _BLOCK_N}
    return Kernel(sum_tiles_kernel, constants)


@lru_cache(maxsize=None)
def _sum_dots_kernel(num_groups: int, num_dots: int, accumulate: bool) -> Kernel:
    constants = {"NUM_EXPERTS": num_groups, "NUM_PARTIALS": num_dots, "ACCUMULATE": accumulate, "BLOCK": _BLOCK_SLOTS}
    return Kernel(sum_partials_kernel, constants)


def sum_dots(dots: Tensor, rows: Rows, out: Tensor, accumulate: bool = False) -> None:
    """out[r] = sum of dots[:, r], or plus that; out[s] = that of the slot's row for routed rows; 0 without a row."""
    size = out.numel()
    if size:
        kernel, grid = _sum_dots_kernel(rows.num_groups, dots.shape[0], accumulate), (-(-size // _BLOCK_SLOTS), 1, 1)
        kernel(grid, dots, dots.stride(0), rows.slot_to_row, rows.schedule, out, size)
