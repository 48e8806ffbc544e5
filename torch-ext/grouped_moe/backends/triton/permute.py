"""From token order to row order and back."""

from functools import lru_cache
from typing import Optional, Tuple

import torch
from torch import Tensor

from ...common.numbers import power_of_two
from ...rows import Rows, unit_rows
from ..kernels.rows import combine_grad_kernel, combine_kernel, gather_rows_kernel, sort_rows_kernel
from .gemm import zero_ungrouped
from .launch import Kernel

_MAX_BLOCK_H = 2048
_COMBINE_BYTES = 2048  # of a row that two warps sum up
_SORT_BYTES = 2048  # of a row that one warp copies

# One warp per program where a program's share of a row is that of a warp.
_FUNCTIONS = {
    "sort_rows": (sort_rows_kernel, {"num_warps": 1}),
    "gather_rows": (gather_rows_kernel, {}),
    "combine_grad": (combine_grad_kernel, {}),
}


@lru_cache(maxsize=None)
def _kernel(name: str, h: int, top_k: int, block_h: int) -> Kernel:
    function, options = _FUNCTIONS[name]
    return Kernel(function, {"H": h, "TOP_K": top_k, "BLOCK_H": block_h}, options)


@lru_cache(maxsize=None)
def _combine_kernel(h: int, top_k: int, itemsize: int, num_dots: int) -> Kernel:
    constants = {
        "H": h, "TOP_K": top_k, "BLOCK_H": min(power_of_two(h), _COMBINE_BYTES // itemsize), "NUM_DOTS": num_dots,
        "BLOCK_K": power_of_two(top_k),
    }  # fmt: skip
    return Kernel(combine_kernel, constants, {"num_warps": 2})


def combine(
    y: Tensor, weights: Optional[Tensor], rows: Rows, dots: Optional[Tensor] = None, dscales: Optional[Tensor] = None
) -> Tensor:
    """out[t] = sum over the routed slots of token t, in order, of weights[slot] y[row], in fp32.

    y: (rows, H), contiguous. weights: (S,) or (T, top_k), contiguous, None for ones. Returns (T, H) in the dtype of y.
    With dots (parts, rows), of H above 0, also writes dscales, (S,) or (T, top_k), contiguous: what `sum_dots` writes.
    """
    num_tokens, h = rows.slot_to_row.shape[0] // rows.top_k, y.shape[1]
    out = y.new_empty(num_tokens, h)
    if num_tokens:
        num_dots, stride = (0, 0) if dots is None else (dots.shape[0], dots.stride(0))
        kernel = _combine_kernel(h, rows.top_k, y.element_size(), num_dots)
        grid = num_tokens, -(-h // kernel.constants["BLOCK_H"]), 1
        kernel(grid, y, weights, dots, stride, rows.slot_to_row, out, dscales)
    return out


def sort_rows(x: Tensor, rows: Rows) -> Tensor:
    """out[r] = x[token of r] for routed rows; the rest is unwritten. x: (T, H), columns contiguous."""
    h = x.shape[1]
    out = x.new_empty(rows.num_rows, h)
    block_h = min(power_of_two(h), _MAX_BLOCK_H, _SORT_BYTES // x.element_size())
    kernel = _kernel("sort_rows", h, rows.top_k, block_h)
    kernel((x.shape[0], -(-h // block_h), 1), x, x.stride(0), rows.slot_to_row, out)
    return out


def gather_rows(x: Tensor, rows: Rows) -> Tensor:
    """out[r] = x[token of r] for routed rows, 0 for the rest. x: (T, H). Returns (rows, H)."""
    x = unit_rows(x)
    h = x.shape[1]
    out = x.new_empty(rows.num_rows, h)
    if rows.num_rows:
        block_h = min(power_of_two(h), _MAX_BLOCK_H)
        kernel = _kernel("gather_rows", h, rows.top_k, block_h)
        num_routed = rows.group_offsets[-1:]
        kernel((rows.num_rows, -(-h // block_h), 1), x, x.stride(0), rows.row_to_slot, num_routed, out)
    return out


def combine_grad(
    dout: Tensor, y: Optional[Tensor], weights: Tensor, rows: Rows, needs_dy: bool
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """(dy, dweights) of `combine`, dy if it is needed and dweights if y is given; dy of rows that no slot owns is 0."""
    dout, num_slots, h = unit_rows(dout), rows.slot_to_row.shape[0], dout.shape[1]
    y = None if y is None else y.contiguous()
    dy = dout.new_empty(num_slots, h) if needs_dy else None
    dweights = None if y is None else torch.empty_like(weights)
    if num_slots:
        kernel = _kernel("combine_grad", h, rows.top_k, min(power_of_two(h), 1024))
        kernel((num_slots, 1, 1), dout, dout.stride(0), y, weights, rows.slot_to_row, dy, dweights)
        if needs_dy:
            zero_ungrouped(dy, rows)
    return dy, dweights
