"""The low-rank part of grouped GEMMs: rows projected on the ranks of a LoRA, and their product as more of K."""

from typing import NamedTuple

import triton
import triton.language as tl

from .dependent import let_next_start, wait_for_stream
from .products import load_masked
from .quantize import BLOCK, row_scale_ptrs, widen_codes
from .tiles import (
    expert_rows,
    expert_tiles,
    find_expert,
    load_scales,
    load_slots,
    num_row_tiles,
    scale_rows,
    store_columns,
    tile_rows,
    tokens_of,
)


class Factor(NamedTuple):
    """How the factors of all adapters, (L, E, N, RANK) by strides, lie side by side as R columns: compile-time values.

    Column c is rank c % RANK of the adapter c // RANK; those from L RANK on are 0.
    """

    R: tl.constexpr
    NUM_ADAPTERS: tl.constexpr
    RANK: tl.constexpr
    STRIDE_L: tl.constexpr
    STRIDE_E: tl.constexpr
    STRIDE_N: tl.constexpr
    STRIDE_R: tl.constexpr


@triton.jit
def factor_ptrs(factor_ptr, expert, n, columns, FACTOR: tl.constexpr):
    """Pointers to an expert's factor: n and columns are tiles of two dimensions that broadcast."""
    ptrs = factor_ptr + expert.to(tl.int64) * FACTOR.STRIDE_E + n.to(tl.int64) * FACTOR.STRIDE_N
    if FACTOR.NUM_ADAPTERS == 1:
        return ptrs + columns.to(tl.int64) * FACTOR.STRIDE_R
    else:
        ptrs += (columns // FACTOR.RANK).to(tl.int64) * FACTOR.STRIDE_L
        return ptrs + (columns % FACTOR.RANK).to(tl.int64) * FACTOR.STRIDE_R


@triton.jit(do_not_specialize=["scaling"])
def project_kernel(
    x_ptr, stride_xr, stride_xk,  # (rows, K) or, OF_TOKENS, (T, K)
    x_scale_ptr,  # (rows, blocks of 128 of K) fp32, contiguous, if x is of codes, which are rows in place; else None
    factor_ptr,  # (L, E, K, RANK), as `Factor` has it
    adapters_ptr,  # adapter of each token, or of each row in place, or None
    z_ptr,  # (rows, R), out
    scales_ptr, scaled_ptr,  # factor of each slot, (S,); z times these, (rows, R), out; or None twice
    row_to_slot_ptr,  # (rows,) int32, or None for rows in place
    schedule_ptr,
    scaling,
    NUM_EXPERTS: tl.constexpr, K: tl.constexpr, FACTOR: tl.constexpr,
    TOP_K: tl.constexpr,  # 0 for rows in place
    OF_TOKENS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """z[r] = scaling factor[l, e]^T x[r] for each adapter l, or of x[token of r]; with adapters 0 where l is not r's.

    scaled[r] = scales[slot of r] z[r], of z before it is rounded.
    Codes times the scales of their blocks are rounded to the dtype of z. A tile of columns whose adapters no row has
    costs its zeros. Rows of no expert are not written.
    Grid: (m tiles at most, tiles of BLOCK_N columns).
    The caller guarantees a schedule made for BLOCK_M and, with x_scale_ptr, that BLOCK_K divides 128.
    """
    wait_for_stream()
    RANK: tl.constexpr = FACTOR.RANK
    RANKS: tl.constexpr = FACTOR.NUM_ADAPTERS * RANK
    tile = tl.program_id(0)
    if tile < num_row_tiles(schedule_ptr, NUM_EXPERTS):
        expert = find_expert(tile, schedule_ptr, NUM_EXPERTS)
        tiles_before, _ = expert_tiles(expert, schedule_ptr, NUM_EXPERTS)
        begin, end = expert_rows(expert, schedule_ptr)
        first_row = begin + (tile - tiles_before) * BLOCK_M
        rows, row_mask = tile_rows(first_row, end - first_row, BLOCK_M)
        slots = load_slots(row_to_slot_ptr, rows)
        tokens = tokens_of(slots, TOP_K)
        sources = tokens if OF_TOKENS else rows.to(tl.int64)
        first_column = tl.program_id(1) * BLOCK_N
        columns = first_column + tl.arange(0, BLOCK_N)
        length = K
        if adapters_ptr is not None:
            adapters = tl.load(adapters_ptr + tokens)
            used = (adapters >= first_column // RANK) & (adapters <= (first_column + BLOCK_N - 1) // RANK)
            length = tl.where(tl.max(used.to(tl.int32), 0) > 0, K, 0)
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + sources[:, None] * stride_xr + k.to(tl.int64)[None, :] * stride_xk
        w_ptrs = factor_ptrs(factor_ptr, expert, k[:, None], columns[None, :], FACTOR)
        if x_scale_ptr is not None:
            tl.static_assert(not OF_TOKENS and BLOCK % BLOCK_K == 0, "codes are rows in place, a step has one scale")
            scale_ptrs = row_scale_ptrs(x_scale_ptr, sources, K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, length, BLOCK_K):
            inside = k < K - start
            x = load_masked(x_ptrs, row_mask, inside, False, K % BLOCK_K == 0)
            if x_scale_ptr is not None:
                x_scales = tl.load(scale_ptrs + start // BLOCK, mask=row_mask, other=0.0)
                x = (widen_codes(x, tl.float32) * x_scales[:, None]).to(z_ptr.dtype.element_ty)
            w = load_masked(w_ptrs, inside, columns < RANKS, K % BLOCK_K == 0, RANKS % BLOCK_N == 0)
            acc = tl.dot(x, w.to(x.dtype), acc, input_precision=PRECISION)
            x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
            w_ptrs += BLOCK_K * FACTOR.STRIDE_N
        acc *= scaling
        if adapters_ptr is not None:
            acc = tl.where(adapters[:, None] == (columns // RANK)[None, :], acc, 0.0)
        store_columns(z_ptr, acc, first_row, row_mask, first_column, FACTOR.R)
        if scaled_ptr is not None:
            scaled = scale_rows(acc, load_scales(scales_ptr, slots))
            store_columns(scaled_ptr, scaled, first_row, row_mask, first_column, FACTOR.R)


class LowRank(NamedTuple):
    """The low-rank part of a product, or None twice: rows (rows, R), and the factor, as `Factor` has it."""

    rows_ptr: object
    factor_ptr: object


@triton.jit
def add_low_rank(
    acc, low_rank, expert, rows, row_mask, first_column,
    N: tl.constexpr, FACTOR: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """acc plus the low-rank part for its columns, if there is one: more of K in the same accumulator."""
    if low_rank.rows_ptr is None:
        return acc
    else:
        R: tl.constexpr = FACTOR.R
        RANKS: tl.constexpr = FACTOR.NUM_ADAPTERS * FACTOR.RANK
        BLOCK_R: tl.constexpr = 16 if R <= 16 else 32 if R <= 32 else 64
        columns = first_column + tl.arange(0, acc.shape[1])
        row_ptrs = low_rank.rows_ptr + rows.to(tl.int64)[:, None] * R
        for start in tl.static_range(0, R, BLOCK_R):
            ranks = start + tl.arange(0, BLOCK_R)
            z = tl.load(row_ptrs + ranks[None, :], mask=row_mask[:, None] & (ranks < R)[None, :], other=0.0)
            w_ptrs = factor_ptrs(low_rank.factor_ptr, expert, columns[None, :], ranks[:, None], FACTOR)
            w = tl.load(w_ptrs, mask=(ranks < RANKS)[:, None] & (columns < N)[None, :], other=0.0)
            acc = tl.dot(z, w.to(z.dtype), acc, input_precision=PRODUCT.PRECISION)
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

    Grid: (rank blocks, S). The next kernel may start beside it: the caller guarantees that it waits before it reads z.
    """
    wait_for_stream()
    let_next_start()
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
