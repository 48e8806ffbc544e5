"""The low-rank part of grouped GEMMs: rows projected on the ranks of a LoRA, and their product as more of K."""

from typing import NamedTuple

import triton
import triton.language as tl

from .dependent import wait_for_stream
from .tiles import expert_rows, expert_tiles, find_expert, load_slots, num_row_tiles, tile_rows, tokens_of


@triton.jit(do_not_specialize=["scaling"])
def project_kernel(
    x_ptr, stride_xr, stride_xk,  # (rows, K) or, OF_TOKENS, (T, K)
    w_ptr,  # (E, R, K) or, KN, (E, K, R), contiguous
    adapters_ptr,  # adapter of each token, or of each row in place, or None
    z_ptr,  # (rows, R), out
    row_to_slot_ptr,  # (rows,) int32, or None for rows in place
    schedule_ptr,
    scaling,
    NUM_EXPERTS: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,  # of one adapter
    TOP_K: tl.constexpr,  # 0 for rows in place
    OF_TOKENS: tl.constexpr,
    KN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """z[r] = scaling W[e] x[r], or x[token of r]; with adapters z[r, c] = 0 unless c // RANK is the row's adapter.

    Rows of no expert are not written.
    Grid: (m tiles at most, tiles of BLOCK_N columns).
    The caller guarantees a schedule made for BLOCK_M.
    """
    wait_for_stream()
    tile = tl.program_id(0)
    if tile < num_row_tiles(schedule_ptr, NUM_EXPERTS):
        expert = find_expert(tile, schedule_ptr, NUM_EXPERTS)
        tiles_before, _ = expert_tiles(expert, schedule_ptr, NUM_EXPERTS)
        begin, end = expert_rows(expert, schedule_ptr)
        first_row = begin + (tile - tiles_before) * BLOCK_M
        rows, row_mask = tile_rows(first_row, end - first_row, BLOCK_M)
        tokens = tokens_of(load_slots(row_to_slot_ptr, rows), TOP_K)
        sources = tokens if OF_TOKENS else rows.to(tl.int64)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + sources[:, None] * stride_xr + k.to(tl.int64)[None, :] * stride_xk
        w_ptrs = w_ptr + expert.to(tl.int64) * (R * K) + low_rank_offsets(columns, k, R, K, KN)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            inside = k < K - start
            x = tl.load(x_ptrs, mask=row_mask[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=inside[:, None] & (columns < R)[None, :], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
            x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
            w_ptrs += BLOCK_K * (R if KN else 1)
        acc *= scaling
        if adapters_ptr is not None:
            adapters = tl.load(adapters_ptr + tokens)
            acc = tl.where(adapters[:, None] == (columns // RANK)[None, :], acc, 0.0)
        z_ptrs = z_ptr + rows.to(tl.int64)[:, None] * R + columns[None, :]
        tl.store(z_ptrs, acc.to(z_ptr.dtype.element_ty), mask=row_mask[:, None] & (columns < R)[None, :])


@triton.jit
def low_rank_offsets(columns, k, N: tl.constexpr, K: tl.constexpr, KN: tl.constexpr):
    """(BLOCK_K, BLOCK_N) offsets within an expert's contiguous (N, K) or, KN, (K, N) matrix."""
    if KN:
        return k[:, None] * N + columns[None, :]
    else:
        return columns[None, :] * K + k[:, None]


class LowRank(NamedTuple):
    """The low-rank part of a product, or None twice: rows (rows, R), and weights (E, N, R) or, R_KN, (E, R, N)."""

    rows_ptr: object
    weights_ptr: object


@triton.jit
def add_low_rank(
    acc, low_rank, expert, rows, row_mask, first_column,
    N: tl.constexpr, R: tl.constexpr, R_KN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc plus the low-rank part for its columns, if there is one: more of K in the same accumulator."""
    if low_rank.rows_ptr is None:
        return acc
    else:
        BLOCK_R: tl.constexpr = 16 if R <= 16 else 32 if R <= 32 else 64
        columns = first_column + tl.arange(0, acc.shape[1])
        k = tl.arange(0, BLOCK_R)
        row_ptrs = low_rank.rows_ptr + rows.to(tl.int64)[:, None] * R + k[None, :]
        w_ptrs = low_rank.weights_ptr + expert.to(tl.int64) * (N * R) + low_rank_offsets(columns, k, N, R, R_KN)
        for start in tl.static_range(0, R, BLOCK_R):
            inside = k < R - start
            z = tl.load(row_ptrs + start, mask=row_mask[:, None] & inside[None, :], other=0.0)
            w_mask = inside[:, None] & (columns < N)[None, :]
            w = tl.load(w_ptrs + start * (N if R_KN else 1), mask=w_mask, other=0.0)
            acc = tl.dot(z, w, acc, input_precision=PRECISION)
        return acc


@triton.jit(do_not_specialize=["scaling"])
def slot_project_kernel(
    x_ptr, stride_xr,  # (T, K) or, BY_SLOT, (S, K), columns contiguous
    ids_ptr,  # (S,) int32 or int64, expert id per slot
    adapters_ptr,  # (T,) adapter of each token, or None
    a_ptr, stride_al, stride_ae, stride_ar, stride_ak,  # (L, E, R, K)
    z_ptr,  # (S, R) fp32, out: rows of sentinels stay unwritten
    scaling,
    NUM_EXPERTS: tl.constexpr, NUM_ADAPTERS: tl.constexpr, R: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    BY_SLOT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """z[s] = scaling A[l, e] x[token of s] or x[s], l and e being the adapter and the expert of slot s; 0 without one.

    Grid: (rank blocks, S).
    """
    wait_for_stream()
    slot = tl.program_id(1)
    token = slot // TOP_K
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    if (expert >= 0) & (expert < NUM_EXPERTS):
        adapter, has_adapter = find_adapter(adapters_ptr, token, NUM_ADAPTERS)
        ranks = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
        k = tl.arange(0, BLOCK_K)
        x_row_ptr = x_ptr + (slot if BY_SLOT else token).to(tl.int64) * stride_xr
        a_ptrs = a_ptr + adapter * stride_al + expert * stride_ae + ranks.to(tl.int64)[:, None] * stride_ar
        acc = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
        for start in range(0, K, BLOCK_K):
            columns = start + k
            x = tl.load(x_row_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
            mask = (ranks < tl.where(has_adapter, R, 0))[:, None] & (columns < K)[None, :]
            a = tl.load(a_ptrs + columns.to(tl.int64)[None, :] * stride_ak, mask=mask, other=0.0).to(tl.float32)
            acc += x[None, :] * a
        tl.store(z_ptr + slot.to(tl.int64) * R + ranks, scaling * tl.sum(acc, 1), mask=ranks < R)


@triton.jit
def find_adapter(adapters_ptr, tokens, NUM_ADAPTERS: tl.constexpr):
    """(adapter of each token, whether it has one); the only adapter without adapters_ptr. int64."""
    adapters = tokens.to(tl.int64) * 0
    if adapters_ptr is not None:
        adapters = tl.load(adapters_ptr + tokens).to(tl.int64)
    has_one = (adapters >= 0) & (adapters < NUM_ADAPTERS)
    return tl.where(has_one, adapters, 0), has_one


@triton.jit
def inner_ranks(row_ptrs, factor_ptrs, stride_fr, mask, R: tl.constexpr, R_POW2: tl.constexpr):
    """<row, factor> over the ranks for each pair of pointers to their first ones, fp32; 0 where masked."""
    ranks = tl.arange(0, R_POW2)
    inside = mask[:, None] & (ranks < R)[None, :]
    rows = tl.load(row_ptrs[:, None] + ranks[None, :], mask=inside, other=0.0)
    factors = tl.load(factor_ptrs[:, None] + ranks.to(tl.int64)[None, :] * stride_fr, mask=inside, other=0.0)
    return tl.sum(rows * factors.to(tl.float32), 1)
