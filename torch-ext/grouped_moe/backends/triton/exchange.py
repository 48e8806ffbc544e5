"""Tokens in the places of other ranks: two launches send them, one receives them."""

from functools import lru_cache
from typing import Optional, Tuple

import torch
from torch import Tensor

from ...common.numbers import power_of_two
from ...packed import PackedRow
from ...rows import unit_rows
from ..kernels.exchange import pack_rows_kernel, plan_exchange_kernel, take_slots_kernel, unpack_rows_kernel
from .launch import Kernel

_PLANNED = 4096  # slots that a program of the plan looks at together
_MAX_CHUNKS = 16  # of tokens; each is read by those after it
_MAX_BLOCK_H = 2048  # columns that a program copies
_BLOCK = 512  # slots of a program


@lru_cache(maxsize=None)
def _plan_kernel(num_local: int, top_k: int) -> Kernel:
    columns = power_of_two(top_k)
    constants = {"NUM_LOCAL": num_local, "TOP_K": top_k, "TOP_K_POW2": columns}
    return Kernel(plan_exchange_kernel, {**constants, "BLOCK_T": max(1, _PLANNED // columns)}, {"num_warps": 8})


@lru_cache(maxsize=None)
def _pack_kernel(h: int, row: Optional[PackedRow], num_local: int, empty: int, row_bytes: int = 0) -> Kernel:
    """row: None for rows of hidden states alone, of row_bytes."""
    top_k = 1 if row is None else row.top_k
    weights_at, ids_at, row_bytes = (0, 0, row_bytes) if row is None else row.starts
    constants = {
        "H": h, "TOP_K": top_k, "TOP_K_POW2": power_of_two(top_k), "NUM_LOCAL": num_local, "EMPTY": empty,
        "WEIGHTS_AT": weights_at, "IDS_AT": ids_at, "ROW": row_bytes, "BLOCK_H": min(_MAX_BLOCK_H, power_of_two(h)),
    }  # fmt: skip
    return Kernel(pack_rows_kernel, constants)


@lru_cache(maxsize=None)
def _unpack_kernel(row: PackedRow, refusal: int) -> Kernel:
    constants = dict(zip(("WEIGHTS_AT", "IDS_AT", "ROW"), row.starts))
    return Kernel(unpack_rows_kernel, {"TOP_K": row.top_k, "REFUSAL": refusal, **constants, "BLOCK": _BLOCK})


@lru_cache(maxsize=None)
def _take_kernel(top_k: int) -> Kernel:
    return Kernel(take_slots_kernel, {"TOP_K": top_k, "BLOCK": _BLOCK})


def plan_exchange(ids: Tensor, num_local: int, ranks: int, capacity: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(source (ranks * capacity,), places (T, top_k), dropped (ranks,)), all int32: see `places.Plan`.

    ids: (T, top_k), contiguous, over the num_local experts of each rank.
    """
    source, places, dropped = (
        ids.new_empty(shape, dtype=torch.int32) for shape in (ranks * capacity, ids.shape, ranks)
    )
    kernel = _plan_kernel(num_local, ids.shape[1])
    chunks = min(_MAX_CHUNKS, max(1, -(-ids.shape[0] // kernel.constants["BLOCK_T"])))
    kernel((ranks, chunks, 1), ids, source, places, dropped, ids.shape[0], capacity)
    return source, places, dropped


def pack_rows(
    x: Tensor, weights: Tensor, ids: Tensor, source: Tensor, num_local: int, capacity: int, empty: int
) -> Tensor:
    """(places, words) int64: the `PackedRow` of each place's token, ids as its rank numbers its own, num_local if none.

    A place without a token is 0, and `empty` in its ids. x: (T, H). weights, ids: (T, top_k), contiguous. source:
    (places,).
    """
    x, row = unit_rows(x), PackedRow(x.shape[1], x.dtype, weights.shape[1], weights.dtype)
    rows = ids.new_empty(source.shape[0], row.words, dtype=torch.int64)
    kernel = _pack_kernel(row.hidden, row, num_local, empty)
    grid = source.shape[0], -(-row.hidden // kernel.constants["BLOCK_H"]), 1
    kernel(grid, x, x.stride(0), weights, ids, source, rows, capacity)
    return rows


def unpack_rows(rows: Tensor, row: PackedRow, capacity: int, refusal: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(weights (places, top_k), ids (places, top_k) int64, fits () int32) of rows that `pack_rows` has packed.

    fits: 0 if the first id of any rank's places is `refusal`, else 1.
    """
    shape = rows.shape[0], row.top_k
    weights, ids = rows.new_empty(shape, dtype=row.weights_dtype), rows.new_empty(shape)
    fits = rows.new_empty((), dtype=torch.int32)
    grid = -(-ids.numel() // _BLOCK), 1, 1
    _unpack_kernel(row, refusal)(grid, rows, weights, ids, fits, rows.shape[0], capacity)
    return weights, ids, fits


def place_rows(x: Tensor, source: Tensor) -> Tensor:
    """out[p] = x[source[p]], 0 where that is -1. x: (T, H). Returns (places, H)."""
    x, h = unit_rows(x), x.shape[1]
    out = x.new_empty(source.shape[0], h)
    kernel = _pack_kernel(h, None, 1, 0, h * x.element_size())
    grid = source.shape[0], -(-h // kernel.constants["BLOCK_H"]), 1
    kernel(grid, x, x.stride(0), None, None, source, out, 1)
    return out


def take_slots(values: Tensor, places: Tensor) -> Tensor:
    """out[t, k] = values[place of the token's slot, k], 0 for slots without one.

    values: (places, top_k), contiguous.
    """
    out = values.new_empty(places.shape)
    if places.numel():
        grid = -(-places.numel() // _BLOCK), 1, 1
        _take_kernel(places.shape[1])(grid, values, places, out, places.numel())
    return out
