"""Stable counting sort of slots by expert, and the tile schedule of the sorted rows.

Worked example, E = 2, top_k = 2, expert ids of 3 tokens [[1, 0], [2, 1], [0, -1]] (2 and -1 are sentinels):
slots by expert: expert 0: slots 1, 4; expert 1: slots 0, 3. Hence expert_offsets = [0, 2, 4], row_to_slot =
[1, 4, 0, 3, -, -] and slot_to_row = [2, 0, -1, 3, 1, -1].
"""

import triton
import triton.language as tl

from .dependent import wait_for_stream
from .tiles import tile_experts, tile_offsets


@triton.jit
def load_experts(ids_ptr, slots, end, NUM_EXPERTS: tl.constexpr):
    """Expert of each slot; -1 for a sentinel and for slots from `end` on."""
    ids = tl.load(ids_ptr + slots, mask=slots < end, other=-1)
    return tl.where((ids >= 0) & (ids < NUM_EXPERTS), ids, -1).to(tl.int32)


@triton.jit
def count_experts(ids_ptr, begin, end, NUM_EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, STEP: tl.constexpr):
    """counts[e] = slots of expert e among slots [begin, end)."""
    counts = tl.zeros((EXPERTS_POW2,), tl.int32)
    for start in range(begin, end, STEP):
        experts = load_experts(ids_ptr, start + tl.arange(0, STEP), end, NUM_EXPERTS)
        counts += tl.histogram(tl.maximum(experts, 0), EXPERTS_POW2, mask=experts >= 0)
    return counts


@triton.jit
def rank_in_chunk(experts, CHUNK: tl.constexpr):
    """For each of CHUNK slots, the number of slots of its expert before it; for a sentinel, anything."""
    index = tl.arange(0, CHUNK)
    keys = experts * CHUNK + index
    # Earlier slots of the same expert have one of the `index` keys below the slot's own: one unsigned comparison. The
    # other slots lie along the axis that a thread holds whole, so that no sum crosses threads.
    distance = (keys[None, :] - 1 - keys[:, None]).to(tl.uint32, bitcast=True)
    return tl.sum((distance < index[None, :].to(tl.uint32, bitcast=True)).to(tl.int32), 0)


@triton.jit
def store_offsets(ptr, ends, NUM_EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr):
    """Stores offsets, (E + 1,): 0, then the ends of all experts."""
    experts = tl.arange(0, EXPERTS_POW2)
    tl.store(ptr, 0)
    tl.store(ptr + 1 + experts, ends, mask=experts < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_slots"])
def count_slots_kernel(
    ids_ptr,  # (S,) int32 or int64
    counts_ptr,  # (chunks, E) int32, out
    num_slots,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,  # power of two, NUM_EXPERTS or more
    CHUNK: tl.constexpr,
):
    """counts[c, e] = slots of expert e in chunk c. Grid: (chunks,)."""
    wait_for_stream()
    begin = tl.program_id(0) * CHUNK
    end = tl.minimum(num_slots, begin + CHUNK)
    counts = count_experts(ids_ptr, begin, end, NUM_EXPERTS, EXPERTS_POW2, CHUNK)
    experts = tl.arange(0, EXPERTS_POW2)
    row_ptr = counts_ptr + tl.program_id(0).to(tl.int64) * NUM_EXPERTS
    tl.store(row_ptr + experts, counts, mask=experts < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_chunks"])
def scan_counts_kernel(
    counts_ptr,  # (chunks, E) int32, in; out: slots of the expert in earlier chunks
    totals_ptr,  # (E,) int32, out: slots of the expert
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,  # chunks added up at a time
    WIDTH: tl.constexpr,  # experts of one program
):
    """counts[c, e] <- sum of counts[:c, e]; totals[e] = sum of counts[:, e]. Grid: (expert blocks,)."""
    wait_for_stream()
    experts = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    totals = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, num_chunks, BLOCK):
        chunks = start + tl.arange(0, BLOCK)
        ptrs = counts_ptr + chunks.to(tl.int64)[:, None] * NUM_EXPERTS + experts[None, :]
        mask = (chunks < num_chunks)[:, None] & (experts < NUM_EXPERTS)[None, :]
        counts = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, totals[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        totals += tl.sum(counts, 0)
    tl.store(totals_ptr + experts, totals, mask=experts < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def place_slots_kernel(
    ids_ptr,  # (S,) int32 or int64
    counts_ptr,  # (chunks, E) int32, slots of the expert in earlier chunks, or None
    totals_ptr,  # (E,) int32, slots of the expert, or None
    schedule_ptr,  # out
    row_to_slot_ptr,  # (rows,) int32, out: the first R are written
    slot_to_row_ptr,  # (S,) int32, out
    num_routed_ptr,  # () int32, out: R; None if there are as many rows as slots
    num_slots,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,  # power of two, NUM_EXPERTS or more
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,  # slots counted at a time
):
    """row = offsets[e] + slots of e in earlier chunks + slots of e before this one in its chunk.

    Slots whose row would be num_rows or more get none, and offsets and schedule end there; R counts them all the same.
    Every program scans the experts' totals again; without counts it counts all slots itself, and this is the only
    launch. The slot of a tile's first row writes the tile's expert.
    Grid: (chunks,); one program if there are no slots.
    The caller guarantees counts and totals by `count_slots_kernel` and `scan_counts_kernel`, or None for both.
    """
    wait_for_stream()
    begin = tl.program_id(0) * CHUNK
    if counts_ptr is None:
        earlier = count_experts(ids_ptr, 0, tl.minimum(begin, num_slots), NUM_EXPERTS, EXPERTS_POW2, STEP)
        totals = earlier + count_experts(ids_ptr, begin, num_slots, NUM_EXPERTS, EXPERTS_POW2, STEP)
    else:
        bins = tl.arange(0, EXPERTS_POW2)
        totals = tl.load(totals_ptr + bins, mask=bins < NUM_EXPERTS, other=0)
    slots = begin + tl.arange(0, CHUNK)
    experts = load_experts(ids_ptr, slots, num_slots, NUM_EXPERTS)
    rank = rank_in_chunk(experts, CHUNK)
    routed = experts >= 0
    experts = tl.maximum(experts, 0)
    if counts_ptr is None:
        rank += tl.gather(earlier, experts, 0)
    else:
        row_ptr = counts_ptr + tl.program_id(0).to(tl.int64) * NUM_EXPERTS
        rank += tl.load(row_ptr + experts, mask=routed, other=0)
    ends = tl.cumsum(totals, 0)
    rows = tl.gather(ends - totals, experts, 0) + rank
    if num_routed_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(num_routed_ptr, tl.sum(totals, 0))
        routed = routed & (rows < num_rows)
        starts = tl.minimum(ends - totals, num_rows)
        ends = tl.minimum(ends, num_rows)
        totals = ends - starts
    tl.store(row_to_slot_ptr + rows, slots, mask=routed)
    tl.store(slot_to_row_ptr + slots, tl.where(routed, rows, -1), mask=slots < num_slots)
    if tl.program_id(0) == 0:
        store_offsets(schedule_ptr, ends, NUM_EXPERTS, EXPERTS_POW2)
    tiles = (totals + (BLOCK_M - 1)) // BLOCK_M
    tile_ends = tl.cumsum(tiles, 0)
    tile = tl.gather(tile_ends - tiles, experts, 0) + rank // BLOCK_M
    tl.store(tile_experts(schedule_ptr, NUM_EXPERTS) + tile, experts, mask=routed & (rank % BLOCK_M == 0))
    if tl.program_id(0) == 0:
        store_offsets(tile_offsets(schedule_ptr, NUM_EXPERTS), tile_ends, NUM_EXPERTS, EXPERTS_POW2)


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
