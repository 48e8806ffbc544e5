"""The weight gradient on Hopper: warps that load, multiply and store at once, by the tensor memory accelerator.

Two consumer warp groups multiply, each half of a tile's rows, out of a ring that other warps fill ahead of them, into
the next tile. Results leave through staging buffers while the next tile's products are made.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper import (
    allocate_barriers,
    cp_async,
    next_slot,
    previous_slot,
    ragged_coordinates,
    tma_load,
    tma_store,
    wait_for_stream,
)
from .tiles import grouped_order

# What a tile takes besides its steps, in rows.
TILE_COST = gl.constexpr(128)


@gluon.jit
def order_experts(offsets_ptr, NUM_EXPERTS: gl.constexpr, TILES: gl.constexpr, SIZE: gl.constexpr):
    """Numbers of the experts in shared memory, most rows first, for `ordered_expert`, and a deal for `find_tile`.

    TILES: of an expert. SIZE: power of two, NUM_EXPERTS or more, 32 or more; 0: in vain.
    """
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    if SIZE == 0:
        return gl.allocate_shared_memory(gl.int32, [1], SHARED), (worker, workers, worker * 0, worker * 0)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        i = gl.arange(0, SIZE, gl.SliceLayout(1, LAYOUT))
        j = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
        # Whatever lies past the last expert ranks last.
        starts = gl.load(offsets_ptr + gl.minimum(i, NUM_EXPERTS))
        size_i = gl.load(offsets_ptr + gl.minimum(i + 1, NUM_EXPERTS)) - starts
        starts = gl.load(offsets_ptr + gl.minimum(j, NUM_EXPERTS))
        size_j = (gl.load(offsets_ptr + gl.minimum(j + 1, NUM_EXPERTS)) - starts)[None, :]
        before = (size_j > size_i[:, None]) | ((size_j == size_i[:, None]) & (j[None, :] < i[:, None]))
        rank = gl.sum(before.to(gl.int32), axis=1)
        order = gl.sum(gl.where(rank[:, None] == j[None, :], i[:, None], 0), axis=0)
        # Workers that begin with a tile of the longest kind, half of the longest one or more, if not all do, let the
        # others have as many rounds of tiles alone as fit under the shortest of these.
        cost = (size_i + TILE_COST).to(gl.float32)
        is_long = (i < NUM_EXPERTS) & (2 * cost >= gl.max(cost, axis=0))
        longs = TILES * gl.sum(is_long.to(gl.int32), axis=0)
        others = workers - longs
        time = gl.min(gl.where(is_long, cost, float("inf")), axis=0)
        costs_before = gl.sum(gl.where(before, (size_j + TILE_COST).to(gl.float32), 0.0), axis=1) * TILES
        begin = gl.sum(gl.where(is_long, cost, 0.0), axis=0) * TILES
        fit = gl.floor((begin + time * others.to(gl.float32) - costs_before) / cost)
        fit = gl.where(is_long | (i >= NUM_EXPERTS), 0.0, gl.minimum(gl.maximum(fit, 0.0), TILES))
        rounds = gl.maximum(gl.sum(fit.to(gl.int32), axis=0) // gl.maximum(others, 1), 1)
        pays = (others > 0) & (rounds > 1)
        deal = worker, workers, gl.where(pays, longs, 0), gl.where(pays, rounds, 0)
        return gl.allocate_shared_memory(gl.int32, [SIZE], SHARED, order), deal


@gluon.jit
def ordered_expert(position, order):
    """The expert at a place of the order."""
    SIZE: gl.constexpr = order.shape[0]
    # All of it in each warp, so that no warp waits for another.
    LAYOUT: gl.constexpr = gl.BlockedLayout([SIZE // 32], [32], [gl.num_warps()], [0])
    here = gl.arange(0, SIZE, LAYOUT) == position
    return gl.sum(gl.where(here, order.load(LAYOUT), 0), axis=0)


@gluon.jit
def num_tiles(deal, NUM_TILES: gl.constexpr):
    """How many tiles a worker gets.

    Each of the first `longs` workers begins with the tile of its number; the others share the next ones in `rounds`.
    What is left is dealt to all. Tiles are dealt back and forth, so that long ones spread over all.
    """
    worker, workers, longs, rounds = deal
    left = NUM_TILES - longs - rounds * (workers - longs)
    last = left // workers
    place = place_of(last, longs, worker, workers)
    return gl.where(worker < longs, 1, rounds) + last + gl.where(place < left - last * workers, 1, 0)


@gluon.jit
def place_of(turn, longs, worker, workers):
    """A worker's place in a round that is dealt to all: who had a long tile comes last in the first one."""
    return gl.where((turn + gl.where(longs > 0, 1, 0)) % 2 == 0, worker, workers - 1 - worker)


@gluon.jit
def deal_tile(index, deal):
    """A worker's index-th tile."""
    worker, workers, longs, rounds = deal
    others = workers - longs
    own = longs + index * others + gl.where(index % 2 == 0, worker - longs, workers - 1 - worker)
    own = gl.where(worker < longs, worker, own)
    turn = index - gl.where(worker < longs, 1, rounds)
    common = longs + rounds * others + turn * workers + place_of(turn, longs, worker, workers)
    return gl.where(turn < 0, own, common)


@gluon.jit
def find_tile(index, deal, offsets_ptr, order, TILING: gl.constexpr):
    """A worker's index-th tile: expert, m tile, n tile, first row of the expert, its end; past the last, any tile."""
    M_TILES: gl.constexpr = TILING[1]
    N_TILES: gl.constexpr = TILING[2]
    GROUP_M: gl.constexpr = TILING[3]
    tile = gl.minimum(deal_tile(index, deal), TILING[0] - 1)
    expert = tile // (M_TILES * N_TILES)
    m_tile, n_tile = grouped_order(tile - expert * (M_TILES * N_TILES), M_TILES, N_TILES, GROUP_M)
    if TILING[4]:
        expert = ordered_expert(expert, order)
    start = gl.load(offsets_ptr + expert)
    end = gl.load(offsets_ptr + expert + 1)
    return expert, m_tile, n_tile, start, end


@gluon.jit
def fill_ring(deal, p_desc, q_desc, ring, offsets_ptr, order, TILING: gl.constexpr):
    """Loads p and q of all steps of a worker's tiles. Rows past the expert's last one come as 0, by the hardware."""
    p_ring, q_ring, full, empty = ring
    STAGES: gl.constexpr = p_ring.shape[0]
    BLOCK_K: gl.constexpr = p_ring.shape[-2]
    BLOCK_M: gl.constexpr = p_ring.shape[-1]
    BLOCK_N: gl.constexpr = q_ring.shape[-1]
    BYTES: gl.constexpr = BLOCK_K * (BLOCK_M + BLOCK_N) * 2
    slot = 0
    phase = 1
    expert, m_tile, n_tile, start, end = find_tile(0, deal, offsets_ptr, order, TILING)
    for index in range(num_tiles(deal, TILING[0])):
        first_row, end_row = start, end
        m, n = m_tile * BLOCK_M, n_tile * BLOCK_N
        # Where the next tile is has been read by the time this one is loaded.
        expert, m_tile, n_tile, start, end = find_tile(index + 1, deal, offsets_ptr, order, TILING)
        # Not `range(first_row, ...)`: Triton 3.6 drops what a loop carries for nothing but the bounds of another.
        for k in range((end_row - first_row + BLOCK_K - 1) // BLOCK_K):
            row = first_row + k * BLOCK_K
            mbarrier.wait(empty.index(slot), phase)
            landed = full.index(slot)
            mbarrier.expect(landed, BYTES)
            tma_load(p_desc, ragged_coordinates(row, end_row, m), landed, p_ring.index(slot))
            tma_load(q_desc, ragged_coordinates(row, end_row, n), landed, q_ring.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def load_step_slots(row_to_slot_ptr, rows, end, BLOCK_K: gl.constexpr, STEPS: gl.constexpr):
    """Slots of `rows`, those of a step, and of each later step's; from `end` on 0."""
    slots = ()
    for step in gl.static_range(STEPS):
        step_rows = rows + step * BLOCK_K
        slots = slots + (gl.load(row_to_slot_ptr + step_rows, mask=step_rows < end, other=0),)
    return slots


@gluon.jit
def gather_ring(
    deal,
    gathered,  # the first arguments of `hopper_gathered_wgrad_kernel`
    ring, offsets_ptr, order,
    TOP_K: gl.constexpr,
    COLUMNS: gl.constexpr,  # of tokens
    P_GATHERED: gl.constexpr,  # whether tokens is p, else q
    TILING: gl.constexpr,
):  # fmt: skip
    """`fill_ring` with one operand gathered, by threads; they, too, write 0 for rows past the expert's last one.

    They never wait for copies, which arrive at their slot's barrier by themselves; nor, mostly, for what says where
    rows come from: it is loaded for a turn of AHEAD steps in the turn before, be that the last one of another tile.
    """
    tokens_ptr, stride8, row_to_slot_ptr, rows_desc = gathered
    p_ring, q_ring, full, empty = ring
    STAGES: gl.constexpr = p_ring.shape[0]
    BLOCK_K: gl.constexpr = p_ring.shape[-2]
    BLOCK_M: gl.constexpr = p_ring.shape[-1]
    BLOCK_N: gl.constexpr = q_ring.shape[-1]
    BLOCK: gl.constexpr = BLOCK_M if P_GATHERED else BLOCK_N
    AHEAD: gl.constexpr = 4
    gl.static_assert(STAGES >= 2)  # a slot is free only once the next one is full
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    index_in_step = gl.arange(0, BLOCK_K, gl.SliceLayout(1, LAYOUT))
    slot = 0
    phase = 1
    expert, m_tile, n_tile, start, end = find_tile(0, deal, offsets_ptr, order, TILING)
    sources = load_step_slots(row_to_slot_ptr, start + index_in_step, end, BLOCK_K, AHEAD)
    for index in range(num_tiles(deal, TILING[0])):
        first_row, end_row = start, end
        m, n = m_tile * BLOCK_M, n_tile * BLOCK_N
        expert, m_tile, n_tile, start, end = find_tile(index + 1, deal, offsets_ptr, order, TILING)
        column = (m if P_GATHERED else n) + columns
        # An expert without rows has a turn, too, which loads for the next tile.
        for turn in range(gl.maximum((end_row - first_row + AHEAD * BLOCK_K - 1) // (AHEAD * BLOCK_K), 1)):
            turn_row = first_row + turn * (AHEAD * BLOCK_K)
            these = sources
            next_row = turn_row + AHEAD * BLOCK_K
            is_last = next_row >= end_row
            next_rows = gl.where(is_last, start, next_row) + index_in_step
            sources = load_step_slots(row_to_slot_ptr, next_rows, gl.where(is_last, end, end_row), BLOCK_K, AHEAD)
            for step in gl.static_range(AHEAD):
                row = turn_row + step * BLOCK_K
                if row < end_row:
                    token = these[step] // TOP_K
                    source = tokens_ptr + (token.to(gl.int64) * 8 * stride8)[:, None] + column[None, :]
                    mask = (row + index_in_step < end_row)[:, None]
                    if COLUMNS % BLOCK != 0:
                        mask = mask & (column < COLUMNS)[None, :]
                    mbarrier.wait(empty.index(slot), phase)
                    landed = full.index(slot)
                    mbarrier.expect(landed, rows_desc.block_shape[2] * rows_desc.block_shape[3] * 2)
                    if P_GATHERED:
                        tma_load(rows_desc, ragged_coordinates(row, end_row, n), landed, q_ring.index(slot))
                        cp_async(p_ring.index(slot), source, mask=mask)
                    else:
                        tma_load(rows_desc, ragged_coordinates(row, end_row, m), landed, p_ring.index(slot))
                        cp_async(q_ring.index(slot), source, mask=mask)
                    async_copy.mbarrier_arrive(landed, increment_count=False)
                    slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def multiply(
    deal, ring, out, offsets_ptr, order,
    ROW: gl.constexpr,  # first row of the tile that is this warp group's
    TILING: gl.constexpr,
    GATHERED: gl.constexpr,
    ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """Multiplies what comes into the ring and stores the results, of this warp group's rows of each tile.

    What threads copy (GATHERED) is written by the generic proxy: between the wait for it and wgmma, which reads by the
    async one, each reader fences.
    """
    p_ring, q_ring, full, empty = ring
    dw_desc, staging = out[0], out[1]
    STAGES: gl.constexpr = p_ring.shape[0]
    BLOCK_K: gl.constexpr = p_ring.shape[-2]
    BLOCK_M: gl.constexpr = p_ring.shape[-1]
    ROWS: gl.constexpr = staging.shape[1]
    BLOCK_N: gl.constexpr = staging.shape[2]
    BYTES: gl.constexpr = ROWS * BLOCK_N * dw_desc.dtype.primitive_bitwidth // 8
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    slot = 0
    phase = 0
    loaded_phase = 0
    expert, m_tile, n_tile, start, end = find_tile(0, deal, offsets_ptr, order, TILING)
    for index in range(num_tiles(deal, TILING[0])):
        steps = (end - start + BLOCK_K - 1) // BLOCK_K
        place = [expert, m_tile * BLOCK_M + ROW, n_tile * BLOCK_N]
        # Where the next tile is has been read by the time this one is done.
        expert, m_tile, n_tile, start, end = find_tile(index + 1, deal, offsets_ptr, order, TILING)
        if ACCUMULATE:
            tma.store_wait(0)
            mbarrier.expect(out[2], BYTES, pred=steps > 0)
            tma_load(dw_desc, place, out[2], staging, pred=steps > 0)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
        for k in range(steps):
            mbarrier.wait(full.index(slot), phase)
            if GATHERED:
                fence_async_shared()
            p = p_ring.index(slot).reshape([BLOCK_K, BLOCK_M]).slice(ROW, ROWS, dim=1).permute((1, 0))
            q = q_ring.index(slot).reshape([BLOCK_K, BLOCK_N])
            acc = warpgroup_mma(p, q, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index(previous_slot(slot, STAGES)), count=1, pred=k > 0)
            slot, phase = next_slot(slot, phase, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(previous_slot(slot, STAGES)), count=1, pred=steps > 0)
        if ACCUMULATE:
            if steps > 0:
                mbarrier.wait(out[2], loaded_phase)
                loaded_phase ^= 1
                acc += staging.reshape([ROWS, BLOCK_N]).load(LAYOUT).to(gl.float32)
                store_tile(dw_desc, place, staging, acc)
        else:
            tma.store_wait(0)
            store_tile(dw_desc, place, staging, acc)
    tma.store_wait(0)


@gluon.jit
def store_tile(dw_desc, place, staging, acc):
    """Starts to store a tile, by way of a staging buffer that nothing else uses until the store is waited for."""
    staging.reshape(acc.shape).store(acc.to(dw_desc.dtype))
    fence_async_shared()
    tma_store(dw_desc, place, staging)


@gluon.jit
def allocate_outputs(dw_desc, ACCUMULATE: gl.constexpr):
    """For each consumer: the descriptor of results, a staging buffer and, to ACCUMULATE, a barrier for its loads."""
    staging = gl.allocate_shared_memory(dw_desc.dtype, [2] + dw_desc.block_shape, dw_desc.layout)
    if ACCUMULATE:
        loaded = allocate_barriers(2, 1)
        return (dw_desc, staging.index(0), loaded.index(0)), (dw_desc, staging.index(1), loaded.index(1))
    else:
        return (dw_desc, staging.index(0)), (dw_desc, staging.index(1))


# A group alone is launched at its place among the offsets, whatever its alignment.
@gluon.jit(do_not_specialize_on_alignment=["offsets_ptr"])
def hopper_wgrad_kernel(
    p_desc, q_desc,  # ragged, (rows, M) and (rows, N)
    dw_desc,  # (E, M, N), out, in blocks of a warp group's rows
    offsets_ptr,  # (E + 1,) int32
    NUM_EXPERTS: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    ORDER_SIZE: gl.constexpr,  # experts come by falling number of rows: power of two, NUM_EXPERTS and 32 or more; or 0
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """dw[e] = sum over the rows r of expert e of p[r] q[r]^T, or is added to dw[e].

    Grid: (programs,), persistent. An expert without rows gets 0, or keeps what it has.
    """
    wait_for_stream()
    M_TILES: gl.constexpr = (M + p_desc.block_shape[3] - 1) // p_desc.block_shape[3]
    N_TILES: gl.constexpr = (N + q_desc.block_shape[3] - 1) // q_desc.block_shape[3]
    TILING: gl.constexpr = (NUM_EXPERTS * M_TILES * N_TILES, M_TILES, N_TILES, GROUP_M, ORDER_SIZE)
    ROWS: gl.constexpr = dw_desc.block_shape[1]
    order, deal = order_experts(offsets_ptr, NUM_EXPERTS, M_TILES * N_TILES, ORDER_SIZE)
    out0, out1 = allocate_outputs(dw_desc, ACCUMULATE)
    p_ring = gl.allocate_shared_memory(p_desc.dtype, [STAGES] + p_desc.block_shape, p_desc.layout)
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_shape, q_desc.layout)
    ring = (p_ring, q_ring, allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2))
    gl.warp_specialize([
        (multiply, (deal, ring, out0, offsets_ptr, order, 0, TILING, False, ACCUMULATE)),
        (multiply, (deal, ring, out1, offsets_ptr, order, ROWS, TILING, False, ACCUMULATE)),
        (fill_ring, (deal, p_desc, q_desc, ring, offsets_ptr, order, TILING)),
    ], [4, 1], [232, 40])  # fmt: skip


@gluon.jit
def hopper_gathered_wgrad_kernel(
    tokens_ptr, stride8,  # (T, M) if P_GATHERED, else (T, N), read at row_to_slot[row] // TOP_K; steps of 8 elements
    row_to_slot_ptr,  # (rows,) int32
    rows_desc,  # the other operand, ragged, (rows, N) or (rows, M)
    dw_desc,  # (E, M, N), out, in blocks of a warp group's rows
    offsets_ptr,  # (E + 1,) int32
    NUM_EXPERTS: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    TOP_K: gl.constexpr,
    P_GATHERED: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    ORDER_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """`hopper_wgrad_kernel` with one operand gathered, by four warps. Grid: the same."""
    wait_for_stream()
    ROWS: gl.constexpr = dw_desc.block_shape[1]
    BLOCK_K: gl.constexpr = rows_desc.block_shape[2]
    BLOCK_M: gl.constexpr = 2 * ROWS
    BLOCK_N: gl.constexpr = dw_desc.block_shape[2]
    M_TILES: gl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    N_TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILING: gl.constexpr = (NUM_EXPERTS * M_TILES * N_TILES, M_TILES, N_TILES, GROUP_M, ORDER_SIZE)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    COPIERS: gl.constexpr = 4  # warps
    order, deal = order_experts(offsets_ptr, NUM_EXPERTS, M_TILES * N_TILES, ORDER_SIZE)
    out0, out1 = allocate_outputs(dw_desc, ACCUMULATE)
    if P_GATHERED:
        p_ring = gl.allocate_shared_memory(rows_desc.dtype, [STAGES, BLOCK_K, BLOCK_M], LAYOUT)
        q_ring = gl.allocate_shared_memory(rows_desc.dtype, [STAGES] + rows_desc.block_shape, rows_desc.layout)
    else:
        p_ring = gl.allocate_shared_memory(rows_desc.dtype, [STAGES] + rows_desc.block_shape, rows_desc.layout)
        q_ring = gl.allocate_shared_memory(rows_desc.dtype, [STAGES, BLOCK_K, BLOCK_N], LAYOUT)
    # A slot is full when the other operand has landed and each thread of the warps that copy has arrived.
    ring = (p_ring, q_ring, allocate_barriers(STAGES, 1 + 32 * COPIERS), allocate_barriers(STAGES, 2))
    gathered = (tokens_ptr, stride8, row_to_slot_ptr, rows_desc)
    COLUMNS: gl.constexpr = M if P_GATHERED else N
    gl.warp_specialize([
        (multiply, (deal, ring, out0, offsets_ptr, order, 0, TILING, True, ACCUMULATE)),
        (multiply, (deal, ring, out1, offsets_ptr, order, ROWS, TILING, True, ACCUMULATE)),
        (gather_ring, (deal, gathered, ring, offsets_ptr, order, TOP_K, COLUMNS, P_GATHERED, TILING)),
    ], [4, COPIERS], [208, 88])  # fmt: skip
