"""The up-projection of experts for Hopper in Gluon: `.hopper_pipeline` with an activation in the epilogue.

Rows are in place, sorted by expert, or are gathered while the products are made. To gather them, four producer warps
copy rows into the ring by cp.async, and load weights by TMA. Two consumer warp groups share each tile, half of its rows
each: a step is then long enough for the copies, which two tiles in turn would outrun.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .activation import glu
from .dependent import wait_for_stream
from .hopper import Tokens, allocate_barriers, allocate_blocks, cp_async, ragged_coordinates, tma_store, write_staging
from .hopper_pipeline import Bias, Schedule, Tile, add_bias, consume, find_tile, load_step, produce
from .hopper_ring import Ranks, Ring, allocate_slots, finish_products, load_weight, multiply_half, next_slot, num_steps
from .tiles import column_pieces, load_scales, load_slots, num_row_tiles


class UpOutput(NamedTuple):
    """What the epilogue of an up-projection needs. Descriptors are ragged; those of what is not stored are None."""

    gate_desc: object
    up_desc: object
    act_desc: object
    staging: gl.shared_memory_descriptor  # staging tiles of one warp group
    bias: Bias
    scales_ptr: object


@gluon.jit
def store_piece(value, desc, staging, tile, column, NUMBER: gl.constexpr):
    """Starts to store a piece of a tile, NUMBER in its order, by way of the staging tiles, which take turns."""
    tma.store_wait(staging.shape[0] - 1)  # until the earlier store has read the staging tile
    write_staging(value, staging.index(NUMBER % staging.shape[0]))
    tma_store(desc, ragged_coordinates(tile.row, tile.end, column), staging.index(NUMBER % staging.shape[0]))


@gluon.jit
def store_up(acc, tile, column, output, OPTIONS: gl.constexpr):
    """Adds the bias, and stores pre-activation and activation, either if it has a descriptor.

    Columns of acc: [gate | up]; INTERLEAVED, gate and up in turn, of which a thread has both; without a gate, those of
    the pre-activation. tile.row: row of acc's first one. column: the activation's first one.
    """
    N: gl.constexpr = OPTIONS.N
    staging = output.staging
    gate_desc = output.gate_desc
    up_desc = output.up_desc
    GATED: gl.constexpr = OPTIONS.GATED
    INTERLEAVED: gl.constexpr = OPTIONS.INTERLEAVED
    WIDTH: gl.constexpr = 2 if GATED else 1
    COLUMNS: gl.constexpr = staging.shape[4]
    PIECES: gl.constexpr = acc.shape[1] // (WIDTH * COLUMNS)
    SAVED: gl.constexpr = 0 if gate_desc is None else WIDTH
    STORES: gl.constexpr = SAVED + (output.act_desc is not None)  # of each piece
    gl.static_assert(PIECES * STORES % staging.shape[0] == 0)  # the next tile goes on with the first staging tile
    pieces = column_pieces(acc, PIECES if INTERLEAVED else WIDTH * PIECES)
    for i in gl.static_range(PIECES):
        first = column + i * COLUMNS
        if INTERLEAVED:
            pair = add_bias(pieces[i], output.bias, tile, 2 * first, 2 * N)
            gate, up = pair.reshape([pair.shape[0], COLUMNS, 2]).split()
            if gate_desc is not None:
                left, right = column_pieces(pair, 2)
                store_piece(left, gate_desc, staging, tile, 2 * first, i * STORES)
                store_piece(right, up_desc, staging, tile, 2 * first + COLUMNS, i * STORES + 1)
        else:
            gate = add_bias(pieces[i], output.bias, tile, first, N)
            up = add_bias(pieces[PIECES + i], output.bias, tile, first, N, SKIPPED=N) if GATED else None
            if gate_desc is not None:
                store_piece(gate, gate_desc, staging, tile, first, i * STORES)
                if GATED:
                    store_piece(up, up_desc, staging, tile, first, i * STORES + 1)
        if output.act_desc is not None:
            value = glu(gate, up, OPTIONS)
            if output.scales_ptr is not None:
                rows = tile.row + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
                value = value * load_scales(output.scales_ptr, gl.minimum(rows, tile.end - 1))[:, None]
            store_piece(value, output.act_desc, staging, tile, first, i * STORES + SAVED)


@gluon.jit
def up_epilogue(GROUP: gl.constexpr, acc, ring, slot, tile, turn, output, OPTIONS: gl.constexpr):
    """Finishes and stores a tile."""
    acc = finish_products(acc, ring, slot)
    store_up(acc, tile, tile.n_tile * (acc.shape[1] // (2 if OPTIONS.GATED else 1)), output, OPTIONS)


@gluon.jit
def consume_up(
    GROUP: gl.constexpr, ring, pingpong, output, schedule,
    TILING: gl.constexpr, PRODUCT: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """A consumer warp group of rows in place."""
    consume(GROUP, ring, pingpong, schedule, TILING, PRODUCT, up_epilogue, output, OPTIONS)
    tma.store_wait(0)


@gluon.jit
def hopper_up_proj_kernel(
    x_desc,  # (rows, K), blocks of (BLOCK_M, BLOCK_K)
    w_desc,  # (E, 2, N, K), blocks of both halves; INTERLEAVED: (E, 2 N, K) or, W_KN, (E, K, 2 N); BLOCK_N columns
    #          without a gate: (E, N, K) or, W_KN, (E, K, N)
    projected_desc, factor_desc,  # the low-rank part, in blocks as x and w: (rows, R), and w's shape with R for K
    bias_ptr, stride_be, stride_bn,  # (E, 2 N), or N without a gate, or None
    gate_desc, up_desc,  # (rows, N) each, the halves of preact, both (rows, 2 N) if INTERLEAVED, or None, out
    #                      without a gate: all of preact, and None
    act_desc,  # (rows, N) or None, out; those for output are ragged, blocks of BLOCK_M rows and some columns
    scales_ptr,  # (rows,) or None
    schedule_ptr,
    TILING: gl.constexpr, PRODUCT: gl.constexpr, OPTIONS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """preact[r] = W[e] x[r] + bias[e]; act[r] = scales[r] activation(preact[r]), from the unrounded preact.

    The low-rank part is in W. Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, and four warps.
    """
    wait_for_stream()
    out_desc = gate_desc if act_desc is None else act_desc
    lhs, rhs, full, empty = allocate_slots(x_desc, w_desc, STAGES, 1)
    ring = Ring(lhs, rhs, full, empty, Ranks(projected_desc, factor_desc))
    staging0, staging1 = allocate_blocks(out_desc, 2), allocate_blocks(out_desc, 2)
    pingpong = allocate_barriers(2, 1)
    schedule = Schedule(schedule_ptr, num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES)
    bias = Bias(bias_ptr, stride_be, stride_bn)
    output0 = UpOutput(gate_desc, up_desc, act_desc, staging0, bias, scales_ptr)
    output1 = UpOutput(gate_desc, up_desc, act_desc, staging1, bias, scales_ptr)
    # Registers of a thread: a consumer's holds 128 sums of products.
    gl.warp_specialize([
        (consume_up, (0, ring, pingpong, output0, schedule, TILING, PRODUCT, OPTIONS)),
        (consume_up, (1, ring, pingpong, output1, schedule, TILING, PRODUCT, OPTIONS)),
        (produce, (x_desc, w_desc, ring, schedule, None, TILING, PRODUCT)),
    ], [4, 1], [232, 40])  # fmt: skip


@gluon.jit
def commit_slot(full, slot, filled, LAG: gl.constexpr, STAGES: gl.constexpr):
    """Ends a step of threads that copy into the ring: commits its copies, and the slot filled LAG steps ago, if any.

    wgmma reads shared memory through the async proxy, and sees what threads copied once they have fenced after their
    copies completed. So that no thread waits for its latest copies, slots are committed LAG steps late. filled: the
    number of steps before this one.
    """
    gl.static_assert(STAGES >= LAG + 2)  # consumers release a slot only once the next one is full
    async_copy.commit_group()
    async_copy.wait_group(LAG)
    fence_async_shared()
    mbarrier.arrive(full.index(gl.where(slot < LAG, slot + STAGES - LAG, slot - LAG)), pred=filled >= LAG)


@gluon.jit
def commit_remaining(full, slot, filled, LAG: gl.constexpr, STAGES: gl.constexpr):
    """After the last step: commits the slots that are left. slot: the one after the last."""
    async_copy.wait_group(0)
    fence_async_shared()
    for back in gl.static_range(1, LAG + 1):
        mbarrier.arrive(full.index(gl.where(slot < back, slot + STAGES - back, slot - back)), pred=filled >= back)


@gluon.jit
def load_tokens(row_to_slot_ptr, row, end, index, TOP_K: gl.constexpr):
    """Tokens of the rows `index` of a tile; past the last tile, which may have found an expert without rows, any.

    With TOP_K == 0, the rows themselves.
    """
    row, end = gl.maximum(row, 0), gl.maximum(end, 1)
    slots = load_slots(row_to_slot_ptr, gl.minimum(row + index, end - 1))
    return slots if TOP_K == 0 else slots // TOP_K


@gluon.jit
def load_ranks_in_turn(expert, row, n_tile, ring, slot, phase, filled, PRODUCT: gl.constexpr, LAG: gl.constexpr):
    """`load_ranks` by threads that copy other steps: these slots, too, are committed late. Returns `filled` as well."""
    if PRODUCT.R > 0:
        STAGES: gl.constexpr = ring.lhs.shape[0]
        rows_desc, factor_desc = ring.ranks
        for k in range(0, PRODUCT.R, rows_desc.block_type.shape[1]):
            load_step(
                rows_desc, factor_desc, expert, row, n_tile, k, ring, slot, phase, PRODUCT.BLOCK_N, PRODUCT.FACTOR_KN
            )
            commit_slot(ring.full, slot, filled, LAG, STAGES)
            filled += 1
            slot, phase = next_slot(slot, phase, STAGES)
    return slot, phase, filled


@gluon.jit
def produce_gathered(
    tokens, w_desc, ring, schedule,
    TILING: gl.constexpr, PRODUCT: gl.constexpr, TOP_K: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """The producer warps: fill the ring with rows and weights of each tile. The next tile is located meanwhile.

    LAG: steps by which slots are committed late.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    K: gl.constexpr = PRODUCT.K
    UNIT: gl.constexpr = 128 // tokens.ptr.dtype.element_ty.primitive_bitwidth  # elements of 16 bytes
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, UNIT], [4, 8], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    index = gl.arange(0, TILING.BLOCK_M, gl.SliceLayout(1, LAYOUT))
    step = gl.num_programs(0)
    slot = 0
    phase = 1
    filled = 0
    expert, row, end, n_tile = find_tile(gl.program_id(0), schedule, TILING)
    token = load_tokens(tokens.row_to_slot_ptr, row, end, index, TOP_K)
    for number in range(gl.program_id(0), schedule.num_tiles, step):
        source = tokens.ptr + (token.to(gl.int64) * UNIT * tokens.unit_stride)[:, None] + columns[None, :]
        # Past the expert's last row nothing is read: repeating one row took longer than reading as many others.
        inside = (index < end - row)[:, None]
        this_expert, this_row, this_n_tile = expert + 0, row + 0, n_tile + 0  # Triton 3.6 does not carry a plain copy
        expert, row, end, n_tile = find_tile(number + step, schedule, TILING)
        token = load_tokens(tokens.row_to_slot_ptr, row, end, index, TOP_K)
        if PRODUCT.RANKS_FIRST:
            slot, phase, filled = load_ranks_in_turn(
                this_expert, this_row, this_n_tile, ring, slot, phase, filled, PRODUCT, LAG
            )
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(ring.empty.index(slot), phase)
            full = ring.full.index(slot)
            mbarrier.expect(full, w_desc.block_type.nbytes)
            w = ring.rhs.index(slot)
            load_weight(w_desc, this_expert, this_n_tile, k, full, w, PRODUCT.BLOCK_N, PRODUCT.W_KN)
            if K % BLOCK_K == 0:
                cp_async(ring.lhs.index(slot), source + k, mask=inside)
            else:
                cp_async(ring.lhs.index(slot), source + k, mask=inside & (columns < K - k)[None, :])
            commit_slot(ring.full, slot, filled, LAG, STAGES)
            filled += 1
            slot, phase = next_slot(slot, phase, STAGES)
        if not PRODUCT.RANKS_FIRST:
            slot, phase, filled = load_ranks_in_turn(
                this_expert, this_row, this_n_tile, ring, slot, phase, filled, PRODUCT, LAG
            )
    commit_remaining(ring.full, slot, filled, LAG, STAGES)


@gluon.jit
def consume_shared(
    GROUP: gl.constexpr, ring, lead_barrier, output, schedule,
    TILING: gl.constexpr, PRODUCT: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """A consumer warp group of gathered rows, half GROUP of each tile's. The next tile is located meanwhile."""
    COLUMNS: gl.constexpr = PRODUCT.BLOCK_N // (2 if OPTIONS.GATED else 1)  # of the activation
    step = gl.num_programs(0)
    slot = 0
    phase = 0
    lead_phase = 0
    expert1, row1, end1, n_tile1 = find_tile(gl.program_id(0), schedule, TILING)
    for number in range(gl.program_id(0), schedule.num_tiles, step):
        tile = Tile(expert1 + 0, row1 + GROUP * (TILING.BLOCK_M // 2), end1 + 0, n_tile1)
        column = n_tile1 * COLUMNS
        expert1, row1, end1, n_tile1 = find_tile(number + step, schedule, TILING)
        acc, slot, phase = multiply_half(GROUP, ring, slot, phase, lead_barrier, lead_phase, PRODUCT)
        store_up(finish_products(acc, ring, slot), tile, column, output, OPTIONS)
        lead_phase ^= 1
    tma.store_wait(0)


@gluon.jit
def hopper_gathered_up_proj_kernel(
    x_ptr, unit_stride,  # (T, K), columns contiguous, read at row_to_slot[row] // TOP_K; steps of 16 bytes
    w_desc, projected_desc, factor_desc, bias_ptr, stride_be, stride_bn,  # as above
    gate_desc, up_desc, act_desc,  # as above, in blocks of BLOCK_M / 2 rows
    scales_ptr,  # (rows,) or None
    row_to_slot_ptr,  # (rows,) int32
    schedule_ptr,
    TOP_K: gl.constexpr,
    BUFFERS: gl.constexpr,  # staging tiles of each warp group
    TILING: gl.constexpr, PRODUCT: gl.constexpr, OPTIONS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`hopper_up_proj_kernel` with x[token of r] in place of x[r].

    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, four warps, and K a multiple of 8.
    """
    wait_for_stream()
    out_desc = gate_desc if act_desc is None else act_desc
    lhs_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILING.BLOCK_M, PRODUCT.BLOCK_K], w_desc.dtype)
    lhs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, TILING.BLOCK_M, PRODUCT.BLOCK_K], lhs_layout)
    rhs = allocate_blocks(w_desc, STAGES)
    # A slot is full after the arrivals of the load of weights and of the warps that copy.
    full, empty = allocate_barriers(STAGES, 2), allocate_barriers(STAGES, 2)
    ring = Ring(lhs, rhs, full, empty, Ranks(projected_desc, factor_desc))
    staging0, staging1 = allocate_blocks(out_desc, BUFFERS), allocate_blocks(out_desc, BUFFERS)
    # Only where it is waited for: see `allocate_barriers`.
    if num_steps(PRODUCT.K, PRODUCT.R, PRODUCT.BLOCK_K) > STAGES:
        lead_barrier = allocate_barriers(1, 1).index(0)
    else:
        lead_barrier: gl.constexpr = None
    schedule = Schedule(schedule_ptr, num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES)
    bias = Bias(bias_ptr, stride_be, stride_bn)
    output0 = UpOutput(gate_desc, up_desc, act_desc, staging0, bias, scales_ptr)
    output1 = UpOutput(gate_desc, up_desc, act_desc, staging1, bias, scales_ptr)
    tokens = Tokens(x_ptr, unit_stride, row_to_slot_ptr)
    # Registers of a thread: a consumer's holds 128 sums of products.
    gl.warp_specialize([
        (consume_shared, (0, ring, lead_barrier, output0, schedule, TILING, PRODUCT, OPTIONS)),
        (consume_shared, (1, ring, lead_barrier, output1, schedule, TILING, PRODUCT, OPTIONS)),
        (produce_gathered, (tokens, w_desc, ring, schedule, TILING, PRODUCT, TOP_K, STAGES // 2)),
    ], [4, 4], [208, 88])  # fmt: skip
