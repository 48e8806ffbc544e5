"""Stable counting sort of slots by expert.

Worked example, E = 2, top_k = 2, expert ids of 3 tokens [[1, 0], [2, 1], [0, -1]] (2 and -1 are sentinels):
slots by expert: expert 0: slots 1, 4; expert 1: slots 0, 3. Hence expert_offsets = [0, 2, 4], row_to_slot =
[1, 4, 0, 3, -, -] and slot_to_row = [2, 0, -1, 3, 1, -1].
"""

import triton
import triton.language as tl


@triton.jit
def load_experts(ids_ptr, slots, num_slots, NUM_EXPERTS: tl.constexpr):
    """Expert of each slot; NUM_EXPERTS stands for every sentinel and for slots past the end."""
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    return tl.where((ids >= 0) & (ids < NUM_EXPERTS), ids, NUM_EXPERTS).to(tl.int32)


@triton.jit
def count_before(experts, slots, ids_ptr, begin, end, num_slots, NUM_EXPERTS: tl.constexpr, STEP: tl.constexpr):
    """For each slot, among slots [begin, end): (those of the same expert before it, those of lower experts)."""
    equal = tl.zeros_like(experts)
    lower = tl.zeros_like(experts)
    for start in range(begin, end, STEP):
        other_slots = start + tl.arange(0, STEP)
        others = load_experts(ids_ptr, other_slots, num_slots, NUM_EXPERTS)
        same_before = (experts[:, None] == others[None, :]) & (other_slots[None, :] < slots[:, None])
        equal += tl.sum(same_before.to(tl.int32), 1)
        lower += tl.sum((others[None, :] < experts[:, None]).to(tl.int32), 1)
    return equal, lower


@triton.jit
def store_places(slots, experts, rows, row_to_slot_ptr, slot_to_row_ptr, num_slots, NUM_EXPERTS: tl.constexpr):
    """slot_to_row[slot] = row or -1; row_to_slot[row] = slot."""
    routed = experts < NUM_EXPERTS
    tl.store(row_to_slot_ptr + rows, slots, mask=routed)
    tl.store(slot_to_row_ptr + slots, tl.where(routed, rows, -1), mask=slots < num_slots)


@triton.jit(do_not_specialize=["num_slots"])
def route_kernel(
    ids_ptr,  # (S,) int32 or int64, expert id per slot
    expert_offsets_ptr,  # (E + 1,) int32, out
    row_to_slot_ptr,  # (S,) int32, out: the first R are written
    slot_to_row_ptr,  # (S,) int32, out
    num_slots,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,  # power of two above NUM_EXPERTS
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """The whole routing in one launch, by comparing every slot with every other: for few slots.

    Grid: (slot blocks,). row = slots of lower experts + slots of the same expert before this one.
    """
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    experts = load_experts(ids_ptr, slots, num_slots, NUM_EXPERTS)
    equal, lower = count_before(experts, slots, ids_ptr, 0, num_slots, num_slots, NUM_EXPERTS, STEP)
    store_places(slots, experts, equal + lower, row_to_slot_ptr, slot_to_row_ptr, num_slots, NUM_EXPERTS)
    if tl.program_id(0) == 0:
        # Sentinels sit in bin NUM_EXPERTS, whose exclusive prefix is the number of routed rows.
        counts = tl.zeros((EXPERTS_POW2,), tl.int32)
        for start in range(0, num_slots, BLOCK):
            block_experts = load_experts(ids_ptr, start + tl.arange(0, BLOCK), num_slots, NUM_EXPERTS)
            counts += tl.histogram(block_experts, EXPERTS_POW2)
        bins = tl.arange(0, EXPERTS_POW2)
        tl.store(expert_offsets_ptr + bins, tl.cumsum(counts, 0) - counts, mask=bins <= NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_slots"])
def count_slots_kernel(
    ids_ptr,  # (S,) int32 or int64
    counts_ptr,  # (num_blocks, E) int32, out: slots of each expert in each block
    num_slots,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """counts[b, e] = slots of expert e in block b. Grid: (num_blocks,)."""
    block = tl.program_id(0)
    experts = load_experts(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), num_slots, NUM_EXPERTS)
    bins = tl.arange(0, EXPERTS_POW2)
    counts = tl.histogram(experts, EXPERTS_POW2)
    tl.store(counts_ptr + block.to(tl.int64) * NUM_EXPERTS + bins, counts, mask=bins < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_blocks"])
def scan_counts_kernel(
    counts_ptr,  # (num_blocks, E) int32, in; out: slots of the expert in earlier blocks
    expert_offsets_ptr,  # (E + 1,) int32, out
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """counts[b, e] <- sum of counts[:b, e]; expert_offsets = exclusive prefix sum over the totals. Grid: (1,)."""
    bins = tl.arange(0, EXPERTS_POW2)
    total = tl.zeros((EXPERTS_POW2,), tl.int32)
    for start in range(0, num_blocks, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        ptrs = counts_ptr + blocks.to(tl.int64)[:, None] * NUM_EXPERTS + bins[None, :]
        mask = (blocks < num_blocks)[:, None] & (bins < NUM_EXPERTS)[None, :]
        counts = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, tl.cumsum(counts, 0) - counts + total[None, :], mask=mask)
        total += tl.sum(counts, 0)
    tl.store(expert_offsets_ptr + bins, tl.cumsum(total, 0) - total, mask=bins <= NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_slots"])
def place_slots_kernel(
    ids_ptr,  # (S,) int32 or int64
    counts_ptr,  # (num_blocks, E) int32, slots of the expert in earlier blocks
    expert_offsets_ptr,  # (E + 1,) int32
    row_to_slot_ptr,  # (S,) int32, out: the first R are written
    slot_to_row_ptr,  # (S,) int32, out
    num_slots,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """row = expert_offsets[e] + slots of e in earlier blocks + slots of e before this one in its block.

    Grid: (num_blocks,).
    """
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    experts = load_experts(ids_ptr, slots, num_slots, NUM_EXPERTS)
    begin = block * BLOCK
    equal, _ = count_before(experts, slots, ids_ptr, begin, begin + BLOCK, num_slots, NUM_EXPERTS, STEP)
    routed = experts < NUM_EXPERTS
    earlier = tl.load(counts_ptr + block.to(tl.int64) * NUM_EXPERTS + experts, mask=routed, other=0)
    rows = tl.load(expert_offsets_ptr + experts, mask=routed, other=0) + earlier + equal
    store_places(slots, experts, rows, row_to_slot_ptr, slot_to_row_ptr, num_slots, NUM_EXPERTS)
