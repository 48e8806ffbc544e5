"""Reductions of the backward in a fixed order, without atomics: partial sums of each tile, then their sum."""

import triton
import triton.language as tl

from .dependent import wait_for_stream
from .tiles import (
    end_of_rows,
    expert_tiles,
    find_expert,
    load_bias,
    load_scales,
    load_slots,
    num_row_tiles,
    rows_of_tile,
    source_rows,
    tile_offsets,
)


# Where the dots begin among those of the activation is aligned for some numbers of rows, and not for others.
@triton.jit(do_not_specialize=["stride_pn"], do_not_specialize_on_alignment=["dots_ptr"])
def bias_grads_kernel(
    dy_ptr, stride_dt,  # (rows, N), or (T, N) read at row_to_slot[row] // TOP_K; columns contiguous
    scales_ptr,  # (rows,), or (S,) read at row_to_slot[row], or None
    bias_ptr, stride_be, stride_bn,  # (E, N), or None if dots are not asked for
    sums_ptr,  # (max_tiles, N) fp32 or None, out: the first num_row_tiles are written
    dots_ptr, stride_pn,  # (n tiles, rows) fp32 or None, out: routed rows are written
    row_to_slot_ptr,  # (rows,) int32, or None if TOP_K is 0
    schedule_ptr,
    NUM_EXPERTS: tl.constexpr, N: tl.constexpr,
    TOP_K: tl.constexpr,  # 0: rows in place
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """sums[tile] = sum over the tile's rows r of scales[r] dy[r]; dots[n tile, r] = <dy[r], bias[e]> over its columns.

    Grid: (max_tiles, n tiles).
    The caller guarantees a schedule made for BLOCK_M.
    """
    wait_for_stream()
    tile = tl.program_id(0)
    n_tile = tl.program_id(1)
    if tile < num_row_tiles(schedule_ptr, NUM_EXPERTS):
        expert = find_expert(tile, schedule_ptr, NUM_EXPERTS)
        before, _ = expert_tiles(expert, schedule_ptr, NUM_EXPERTS)
        first_row, rows, row_mask = rows_of_tile(expert, tile - before, schedule_ptr, BLOCK_M)
        columns = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        dy_ptrs = dy_ptr + source_rows(rows, row_to_slot_ptr, TOP_K)[:, None] * stride_dt + columns[None, :]
        dy = tl.load(dy_ptrs, mask=row_mask[:, None] & (columns < N)[None, :], other=0.0).to(tl.float32)
        if dots_ptr is not None:
            bias = load_bias(bias_ptr + expert.to(tl.int64) * stride_be, stride_bn, columns, N)
            dots_ptrs = dots_ptr + n_tile.to(tl.int64) * stride_pn + first_row + tl.arange(0, BLOCK_M)
            tl.store(dots_ptrs, tl.sum(dy * bias[None, :], 1), mask=row_mask)
        if sums_ptr is not None:
            if scales_ptr is not None:
                scales = load_scales(scales_ptr, load_slots(row_to_slot_ptr, rows))
                dy *= tl.where(row_mask, scales, 0.0)[:, None]  # past the last row its own is repeated, maybe Inf
            tl.store(sums_ptr + tile.to(tl.int64) * N + columns, tl.sum(dy, 0), mask=columns < N)


@triton.jit
def sum_tiles_kernel(
    sums_ptr,  # (max_tiles, N) fp32
    out_ptr,  # (E, N) contiguous, out
    schedule_ptr,
    NUM_EXPERTS: tl.constexpr, N: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e] = sum over the m tiles of expert e of sums[tile], in order; with ACCUMULATE it is added to out[e].

    Grid: (E, n tiles).
    """
    wait_for_stream()
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile_offsets_ptr = tile_offsets(schedule_ptr, NUM_EXPERTS)
    end = tl.load(tile_offsets_ptr + expert + 1)
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for start in tl.range(tl.load(tile_offsets_ptr + expert), end, BLOCK_R):
        tiles = start + tl.arange(0, BLOCK_R)
        mask = (tiles < end)[:, None] & (columns < N)[None, :]
        acc += tl.load(sums_ptr + tiles.to(tl.int64)[:, None] * N + columns[None, :], mask=mask, other=0.0)
    total = tl.sum(acc, 0)
    out_ptrs = out_ptr + expert.to(tl.int64) * N + columns
    if ACCUMULATE:
        total += tl.load(out_ptrs, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=columns < N)


@triton.jit(do_not_specialize=["stride_pn", "num_slots"])
def sum_partials_kernel(
    partials_ptr, stride_pn,  # (num_partials, rows) fp32
    slot_to_row_ptr,  # (S,) int32, -1 for a sentinel; None: a slot is its row
    offsets_ptr,  # (E + 1,) int32: rows outside [offsets[0], offsets[E]) have no partials
    out_ptr,  # (S,), out
    num_slots,
    NUM_EXPERTS: tl.constexpr, NUM_PARTIALS: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[s] = sum of partials[:, row of s], in order, 0 for a slot without a row; with ACCUMULATE added to out[s].

    Grid: (slot blocks,).
    """
    wait_for_stream()
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slots < num_slots
    if slot_to_row_ptr is None:
        rows = slots
        routed = inside & (rows >= tl.load(offsets_ptr)) & (rows < end_of_rows(offsets_ptr, NUM_EXPERTS))
    else:
        rows = tl.load(slot_to_row_ptr + slots, mask=inside, other=-1)
        routed = rows >= 0
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in range(NUM_PARTIALS):
        acc += tl.load(partials_ptr + rows, mask=routed, other=0.0)
        partials_ptr += stride_pn
    if ACCUMULATE:
        acc += tl.load(out_ptr + slots, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + slots, acc.to(out_ptr.dtype.element_ty), mask=inside)
