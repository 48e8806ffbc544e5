"""The tile schedule of a grouped GEMM."""

import triton
import triton.language as tl

from .dependent import wait_for_stream
from .tiles import tile_experts, tile_offsets


@triton.jit
def larger(a, b):
    """The operation of a running maximum."""
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["total_rows"])
def schedule_kernel(
    splits_ptr,  # (G,) sizes or (G + 1,) offsets, int32 or int64, of any value
    schedule_ptr,  # out: a schedule, laid out as `.tiles` says
    total_rows,
    SIZES: tl.constexpr,  # whether splits are sizes
    NUM_GROUPS: tl.constexpr,
    GROUPS_POW2: tl.constexpr,  # power of two, NUM_GROUPS or more
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Offsets in [0, total_rows] that do not decrease, and the m tiles of BLOCK_M rows that each group has.

    Offsets from sizes are their running sum, with negative sizes counted as 0; from offsets, their running maximum.
    Grid: (G,).
    """
    wait_for_stream()
    group = tl.program_id(0)
    bins = tl.arange(0, GROUPS_POW2)
    inside = bins < NUM_GROUPS
    limit = total_rows.to(tl.int64)
    if SIZES:
        sizes = tl.load(splits_ptr + bins, mask=inside, other=0).to(tl.int64)
        sizes = tl.minimum(tl.maximum(sizes, 0), limit)
        ends = tl.cumsum(sizes, 0)
        starts = tl.minimum(ends - sizes, limit)
        ends = tl.minimum(ends, limit)
    else:
        first = tl.minimum(tl.maximum(tl.load(splits_ptr).to(tl.int64), 0), limit)
        ends = tl.load(splits_ptr + 1 + bins, mask=inside, other=0).to(tl.int64)
        ends = tl.maximum(tl.minimum(tl.maximum(ends, 0), limit), first)
        ends = tl.associative_scan(ends, 0, larger)
        # A group starts where the one before it ends: the same maximum, one group less.
        starts = tl.load(splits_ptr + bins, mask=inside, other=0).to(tl.int64)
        starts = tl.maximum(tl.minimum(tl.maximum(starts, 0), limit), first)
        starts = tl.associative_scan(starts, 0, larger)
    starts, ends = starts.to(tl.int32), ends.to(tl.int32)
    tiles = tl.where(inside, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    tile_offsets_ptr = tile_offsets(schedule_ptr, NUM_GROUPS)
    tile_groups_ptr = tile_experts(schedule_ptr, NUM_GROUPS)
    before = tl.sum(tl.where(bins < group, tiles, 0))
    mine = tl.sum(tl.where(bins == group, tiles, 0))
    tl.store(schedule_ptr + group, tl.sum(tl.where(bins == group, starts, 0)))
    tl.store(tile_offsets_ptr + group, before)
    if group == NUM_GROUPS - 1:
        tl.store(schedule_ptr + NUM_GROUPS, tl.sum(tl.where(bins == group, ends, 0)))
        tl.store(tile_offsets_ptr + NUM_GROUPS, before + mine)
    for begin in range(0, mine, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        tl.store(tile_groups_ptr + before + index, tl.zeros((BLOCK,), tl.int32) + group, mask=index < mine)
