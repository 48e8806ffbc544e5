"""The weight gradient on Hopper in Gluon: separate warps load and multiply, and stores overlap with products.

Two consumer warp groups multiply, half of a tile's rows each, from a ring that producer warps fill ahead of them, into
the next tile. Results are stored through staging tiles while the products of the next tile are made.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .dependent import wait_for_stream
from .hopper import Tokens, allocate_barriers, cp_async, ragged_coordinates, tma_load, tma_store, write_staging
from .hopper_ring import Ranks, Ring, allocate_slots, finish_products, multiply_step, next_slot
from .hopper_scheduler import find_tile, num_program_tiles, schedule_experts


class WgradOutput(NamedTuple):
    """Where consumers store their rows."""

    desc: object  # the descriptor of dw
    staging: gl.shared_memory_descriptor  # a block of dw for each consumer
    loaded: object  # barriers for loads into those; None if nothing is added to dw


@gluon.jit
def produce(lhs_desc, rhs_desc, ring, scheduler, TILING: gl.constexpr):
    """The producer warp: fills the ring by TMA, which reads rows past the expert's last one as 0."""
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[-2]
    BLOCK_M: gl.constexpr = ring.lhs.shape[-1]
    BLOCK_N: gl.constexpr = ring.rhs.shape[-1]
    BYTES: gl.constexpr = BLOCK_K * (BLOCK_M + BLOCK_N) * 2
    slot = 0
    phase = 1
    expert, m_tile, n_tile, start, end = find_tile(0, scheduler, TILING)
    for index in range(num_program_tiles(scheduler, TILING)):
        first_row, end_row = start, end
        m, n = m_tile * BLOCK_M, n_tile * BLOCK_N
        # The next tile is located while this one is loaded.
        expert, m_tile, n_tile, start, end = find_tile(index + 1, scheduler, TILING)
        # Not `range(first_row, ...)`: Triton 3.6 drops what a loop carries only for the bounds of an inner loop.
        for k in range((end_row - first_row + BLOCK_K - 1) // BLOCK_K):
            row = first_row + k * BLOCK_K
            mbarrier.wait(ring.empty.index(slot), phase)
            full = ring.full.index(slot)
            mbarrier.expect(full, BYTES)
            tma_load(lhs_desc, ragged_coordinates(row, end_row, m), full, ring.lhs.index(slot))
            tma_load(rhs_desc, ragged_coordinates(row, end_row, n), full, ring.rhs.index(slot))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def load_step_slots(tokens, rows, end, BLOCK_K: gl.constexpr, STEPS: gl.constexpr):
    """Slots of the rows of STEPS steps as a tuple; `rows` are those of the first step. 0 for rows from `end` on."""
    slots = ()
    for step in gl.static_range(STEPS):
        step_rows = rows + step * BLOCK_K
        slots = slots + (gl.load(tokens.row_to_slot_ptr + step_rows, mask=step_rows < end, other=0),)
    return slots


@gluon.jit
def produce_gathered(
    tokens, rows_desc, ring, scheduler, TILING: gl.constexpr,
    COLUMNS: gl.constexpr,  # of tokens
    LHS_GATHERED: gl.constexpr,  # whether tokens are the left operand, else the right one
    TOP_K: gl.constexpr,
):  # fmt: skip
    """The producer warps if one operand is gathered: their threads copy it, with 0 for rows past the expert's last one.

    No thread waits for its copies, which arrive at the barrier of their slot by themselves. The slots of rows are
    loaded AHEAD steps at a time, one such batch early, also across tiles, so that they have mostly arrived when needed.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[-2]
    BLOCK_M: gl.constexpr = ring.lhs.shape[-1]
    BLOCK_N: gl.constexpr = ring.rhs.shape[-1]
    BLOCK: gl.constexpr = BLOCK_M if LHS_GATHERED else BLOCK_N
    AHEAD: gl.constexpr = 4
    gl.static_assert(STAGES >= 2)  # consumers release a slot only once the next one is full
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    index_in_step = gl.arange(0, BLOCK_K, gl.SliceLayout(1, LAYOUT))
    slot = 0
    phase = 1
    expert, m_tile, n_tile, start, end = find_tile(0, scheduler, TILING)
    next_slots = load_step_slots(tokens, start + index_in_step, end, BLOCK_K, AHEAD)
    for index in range(num_program_tiles(scheduler, TILING)):
        first_row, end_row = start, end
        m, n = m_tile * BLOCK_M, n_tile * BLOCK_N
        expert, m_tile, n_tile, start, end = find_tile(index + 1, scheduler, TILING)
        column = (m if LHS_GATHERED else n) + columns
        # An expert without rows has one batch all the same, which loads the slots of the next tile.
        for batch in range(gl.maximum((end_row - first_row + AHEAD * BLOCK_K - 1) // (AHEAD * BLOCK_K), 1)):
            batch_row = first_row + batch * (AHEAD * BLOCK_K)
            slots = next_slots
            next_row = batch_row + AHEAD * BLOCK_K
            is_last = next_row >= end_row
            next_rows = gl.where(is_last, start, next_row) + index_in_step
            next_slots = load_step_slots(tokens, next_rows, gl.where(is_last, end, end_row), BLOCK_K, AHEAD)
            for step in gl.static_range(AHEAD):
                row = batch_row + step * BLOCK_K
                if row < end_row:
                    token = slots[step] // TOP_K
                    offset = token.to(gl.int64) * 8 * tokens.unit_stride
                    source = tokens.ptr + offset[:, None] + column[None, :]
                    mask = (row + index_in_step < end_row)[:, None]
                    if COLUMNS % BLOCK != 0:
                        mask = mask & (column < COLUMNS)[None, :]
                    mbarrier.wait(ring.empty.index(slot), phase)
                    full = ring.full.index(slot)
                    mbarrier.expect(full, rows_desc.block_shape[2] * rows_desc.block_shape[3] * 2)
                    if LHS_GATHERED:
                        tma_load(rows_desc, ragged_coordinates(row, end_row, n), full, ring.rhs.index(slot))
                        cp_async(ring.lhs.index(slot), source, mask=mask)
                    else:
                        tma_load(rows_desc, ragged_coordinates(row, end_row, m), full, ring.lhs.index(slot))
                        cp_async(ring.rhs.index(slot), source, mask=mask)
                    async_copy.mbarrier_arrive(full, increment_count=False)
                    slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def consume(GROUP: gl.constexpr, ring, scheduler, output, TILING: gl.constexpr, GATHERED: gl.constexpr):
    """A consumer warp group: multiplies half GROUP of the rows of each tile and stores the results, or adds them.

    GATHERED: threads copied an operand, which they wrote through the generic proxy. wgmma reads through the async
    proxy, so each consumer fences between its wait for the copies and wgmma.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[-2]
    BLOCK_M: gl.constexpr = ring.lhs.shape[-1]
    ROWS: gl.constexpr = output.staging.shape[2]
    BLOCK_N: gl.constexpr = output.staging.shape[3]
    BYTES: gl.constexpr = ROWS * BLOCK_N * output.desc.dtype.primitive_bitwidth // 8
    FIRST_ROW: gl.constexpr = GROUP * ROWS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    staging = output.staging.index(GROUP)
    if output.loaded is not None:
        loaded = output.loaded.index(GROUP)
    slot = 0
    phase = 0
    loaded_phase = 0
    expert, m_tile, n_tile, start, end = find_tile(0, scheduler, TILING)
    for index in range(num_program_tiles(scheduler, TILING)):
        steps = (end - start + BLOCK_K - 1) // BLOCK_K
        coordinates = [expert, m_tile * BLOCK_M + FIRST_ROW, n_tile * BLOCK_N]
        # The next tile is located while this one is multiplied.
        expert, m_tile, n_tile, start, end = find_tile(index + 1, scheduler, TILING)
        if output.loaded is not None:
            tma.store_wait(0)
            mbarrier.expect(loaded, BYTES, pred=steps > 0)
            tma_load(output.desc, coordinates, loaded, staging, pred=steps > 0)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
        for k in range(steps):
            mbarrier.wait(ring.full.index(slot), phase)
            if GATHERED:
                fence_async_shared()
            lhs = ring.lhs.index(slot).reshape([BLOCK_K, BLOCK_M]).slice(FIRST_ROW, ROWS, dim=1).permute((1, 0))
            rhs = ring.rhs.index(slot).reshape([BLOCK_K, BLOCK_N])
            acc = multiply_step(acc, lhs, rhs, ring, slot, k, ADD=True)
            slot, phase = next_slot(slot, phase, STAGES)
        acc = finish_products(acc, ring, slot, steps)
        if output.loaded is not None:
            if steps > 0:
                mbarrier.wait(loaded, loaded_phase)
                loaded_phase ^= 1
                acc += staging.reshape([ROWS, BLOCK_N]).load(LAYOUT).to(gl.float32)
                write_staging(acc, staging)
                tma_store(output.desc, coordinates, staging)
        else:
            tma.store_wait(0)
            write_staging(acc, staging)
            tma_store(output.desc, coordinates, staging)
    tma.store_wait(0)


# To compute one group alone, the launcher passes a pointer into the offsets, of any alignment.
@gluon.jit(do_not_specialize_on_alignment=["offsets_ptr"])
def hopper_wgrad_kernel(
    p_desc, q_desc,  # ragged, (rows, M) and (rows, N)
    dw_desc,  # (E, M, N), out, in blocks of a warp group's rows
    offsets_ptr,  # (E + 1,) int32
    ACCUMULATE: gl.constexpr, TILING: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dw[e] = sum over the rows r of expert e of p[r] q[r]^T; with ACCUMULATE the sum is added to dw[e].

    An expert without rows gets 0, with ACCUMULATE it keeps its values.
    Grid: (programs,), persistent.
    The caller guarantees four warps, and blocks of dw of half as many rows as p_desc has columns.
    """
    wait_for_stream()
    scheduler = schedule_experts(offsets_ptr, TILING)
    staging = gl.allocate_shared_memory(dw_desc.dtype, [2] + dw_desc.block_shape, dw_desc.layout)
    # Only where it is waited for: see `allocate_barriers`.
    output = WgradOutput(dw_desc, staging, allocate_barriers(2, 1) if ACCUMULATE else None)
    lhs, rhs, full, empty = allocate_slots(p_desc, q_desc, STAGES, 2)
    ring = Ring(lhs, rhs, full, empty, Ranks(None, None))
    gl.warp_specialize([
        (consume, (0, ring, scheduler, output, TILING, False)),
        (consume, (1, ring, scheduler, output, TILING, False)),
        (produce, (p_desc, q_desc, ring, scheduler, TILING)),
    ], [4, 1], [232, 40])  # fmt: skip


@gluon.jit
def hopper_gathered_wgrad_kernel(
    tokens_ptr, unit_stride,  # (T, M) if P_GATHERED, else (T, N), read at row_to_slot[row] // TOP_K; steps of 16 bytes
    row_to_slot_ptr,  # (rows,) int32
    rows_desc,  # the other operand, ragged, (rows, N) or (rows, M)
    dw_desc,  # (E, M, N), out, in blocks of a warp group's rows
    offsets_ptr,  # (E + 1,) int32
    TOP_K: gl.constexpr, P_GATHERED: gl.constexpr,
    COLUMNS: gl.constexpr,  # of tokens
    ACCUMULATE: gl.constexpr, TILING: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`hopper_wgrad_kernel` with one operand gathered: the tokens of the rows.

    Grid: (programs,), persistent.
    The caller guarantees four warps.
    """
    wait_for_stream()
    BLOCK_K: gl.constexpr = rows_desc.block_shape[2]
    BLOCK_M: gl.constexpr = 2 * dw_desc.block_shape[1]
    BLOCK_N: gl.constexpr = dw_desc.block_shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    WARPS: gl.constexpr = 4  # of the producer
    scheduler = schedule_experts(offsets_ptr, TILING)
    staging = gl.allocate_shared_memory(dw_desc.dtype, [2] + dw_desc.block_shape, dw_desc.layout)
    # Only where it is waited for: see `allocate_barriers`.
    output = WgradOutput(dw_desc, staging, allocate_barriers(2, 1) if ACCUMULATE else None)
    if P_GATHERED:
        lhs = gl.allocate_shared_memory(rows_desc.dtype, [STAGES, BLOCK_K, BLOCK_M], LAYOUT)
        rhs = gl.allocate_shared_memory(rows_desc.dtype, [STAGES] + rows_desc.block_shape, rows_desc.layout)
    else:
        lhs = gl.allocate_shared_memory(rows_desc.dtype, [STAGES] + rows_desc.block_shape, rows_desc.layout)
        rhs = gl.allocate_shared_memory(rows_desc.dtype, [STAGES, BLOCK_K, BLOCK_N], LAYOUT)
    # A slot is full when the other operand has landed and each thread of the producer has arrived.
    full, empty = allocate_barriers(STAGES, 1 + 32 * WARPS), allocate_barriers(STAGES, 2)
    ring = Ring(lhs, rhs, full, empty, Ranks(None, None))
    tokens = Tokens(tokens_ptr, unit_stride, row_to_slot_ptr)
    gl.warp_specialize([
        (consume, (0, ring, scheduler, output, TILING, True)),
        (consume, (1, ring, scheduler, output, TILING, True)),
        (produce_gathered, (tokens, rows_desc, ring, scheduler, TILING, COLUMNS, P_GATHERED, TOP_K)),
    ], [4, WARPS], [208, 88])  # fmt: skip
