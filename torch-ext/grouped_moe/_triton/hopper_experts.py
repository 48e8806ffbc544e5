"""The two fused grouped GEMMs of experts for Hopper in Gluon: the epilogues of `.experts` hidden behind products.

As in `.hopper_gemm` one warp fills a ring of operands, and two warp groups take its tiles in turn. Rows are in place,
sorted by expert: to gather them here takes longer than a pass that sorts them. `.hopper_gathered` gathers those of the
up-projection, a tile at a time for both groups; the dgrad's longer epilogue would then hide behind little.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from .activation import act, act_grad, glu, glu_grad, zero_past
from .hopper import allocate_barriers, previous_slot, ragged_coordinates, tma_store, wait_for_stream
from .hopper_boxes import box_places, column_pieces, load_boxes, read_boxes, refill_boxes, store_box, write_boxes
from .hopper_gemm import load_expert, load_group, locate_tile, multiply, produce

# TILING: NUM_EXPERTS, NUM_N_TILES, BLOCK_M, GROUP_M. KIND: ACTIVATION, ALPHA, LIMIT, UP_OFFSET, GATED, INTERLEAVED.


@gluon.jit
def find_tile(tile, num_tiles, schedule_ptr, TILING: gl.constexpr):
    """Expert, first row, the row past the expert's last one, n tile; past the last tile, anything."""
    expert = load_expert(tile, num_tiles, schedule_ptr, TILING[0], TILING[1])
    first, end, before = load_group(expert, schedule_ptr, TILING[0])
    row, n_tile = locate_tile(tile, first, end, before, TILING[1], TILING[2], TILING[3])
    return expert, row, end, n_tile


@gluon.jit
def load_slots(row_to_slot_ptr, row, end, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """Slots of a tile's rows, or the rows themselves; those past the expert's last one repeat it."""
    rows = gl.minimum(row + gl.arange(0, BLOCK_M, layout=LAYOUT), end - 1)
    if row_to_slot_ptr is None:
        return rows
    else:
        return gl.load(row_to_slot_ptr + rows)


@gluon.jit
def load_bias(ptr, stride_bn, columns, N: gl.constexpr):
    """Bias of some columns as a row in fp32."""
    return gl.load(ptr + columns.to(gl.int64) * stride_bn, mask=columns < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def scale_rows(value, scales_ptr, row, end):
    """value times one factor per row, or value itself without scales."""
    if scales_ptr is None:
        return value
    else:
        rows = row + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
        return value * gl.load(scales_ptr + gl.minimum(rows, end - 1)).to(gl.float32)[:, None]


@gluon.jit
def up_epilogue(
    acc, outputs, bufs, row, end, column, bias_ptr, stride_bn, scales_ptr, N: gl.constexpr, KIND: gl.constexpr
):
    """Adds the bias and stores pre-activation and activation of a tile, either if it has a descriptor.

    A tile is [gate | up], or columns of gate and up in turn, of which a thread has both, or no more than the gate.
    """
    gate_desc, up_desc, act_desc = outputs
    GATED: gl.constexpr = KIND[4]
    WIDTH: gl.constexpr = 2 if GATED else 1
    INTERLEAVED: gl.constexpr = KIND[5]
    COLUMNS: gl.constexpr = bufs.shape[4]
    PIECES: gl.constexpr = acc.shape[1] // (WIDTH * COLUMNS)
    SAVED: gl.constexpr = 0 if gate_desc is None else WIDTH
    BOXES: gl.constexpr = SAVED + (act_desc is not None)
    gl.static_assert(PIECES * BOXES % bufs.shape[0] == 0)  # the buffers' turn goes on with the next tile
    pieces = column_pieces(acc, PIECES if INTERLEAVED else WIDTH * PIECES)
    for i in gl.static_range(PIECES):
        first = column + i * COLUMNS
        if INTERLEAVED:
            pair = pieces[i]
            if bias_ptr is not None:
                columns = 2 * first + gl.arange(0, 2 * COLUMNS, layout=gl.SliceLayout(0, pair.type.layout))
                pair += load_bias(bias_ptr, stride_bn, columns, 2 * N)
            gate, up = pair.reshape([pair.shape[0], COLUMNS, 2]).split()
            if gate_desc is not None:
                left, right = column_pieces(pair, 2)
                store_box(left, gate_desc, bufs, row, end, 2 * first, i * BOXES)
                store_box(right, up_desc, bufs, row, end, 2 * first + COLUMNS, i * BOXES + 1)
        else:
            gate = pieces[i]
            up = pieces[PIECES + i] if GATED else None
            if bias_ptr is not None:
                columns = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gate.type.layout))
                gate += load_bias(bias_ptr, stride_bn, columns, N)
                if GATED:
                    up += load_bias(bias_ptr + gl.to_tensor(N).to(gl.int64) * stride_bn, stride_bn, columns, N)
            if gate_desc is not None:
                store_box(gate, gate_desc, bufs, row, end, first, i * BOXES)
                if GATED:
                    store_box(up, up_desc, bufs, row, end, first, i * BOXES + 1)
        if act_desc is not None:
            if GATED:
                value = glu(gate, up, KIND[0], KIND[1], KIND[2], KIND[3])
            else:
                value = act(gate, KIND[0], KIND[1], KIND[2])
            store_box(scale_rows(value, scales_ptr, row, end), act_desc, bufs, row, end, first, i * BOXES + SAVED)


@gluon.jit
def consume_up(
    GROUP: gl.constexpr, ring, turns, outputs, bufs, bias, scales_ptr, schedule_ptr, num_tiles,
    N: gl.constexpr, STEPS: gl.constexpr, W_KN: gl.constexpr, BLOCK_N: gl.constexpr, KIND: gl.constexpr,
    TILING: gl.constexpr,
):  # fmt: skip
    """One of two warp groups: up-projects every other tile; one stores its tile while the other one multiplies."""
    bias_ptr, stride_be, stride_bn = bias
    STAGES: gl.constexpr = ring[0].shape[0]
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    COLUMNS: gl.constexpr = BLOCK_N // 2 if KIND[4] else BLOCK_N  # of the activation
    step = 2 * gl.num_programs(0)
    tile0 = gl.program_id(0) + GROUP * gl.num_programs(0)
    position = GROUP * STEPS  # in the sequence of all slots that the program fills
    turn = 1 - GROUP  # group 0 begins
    for tile in range(tile0, num_tiles, step):
        expert, row, end, n_tile = find_tile(tile, num_tiles, schedule_ptr, TILING)
        # Without turns both would multiply, then both store.
        mbarrier.wait(turns.index(GROUP), turn)
        acc, slot, _ = multiply(ring, position % STAGES, (position // STAGES) & 1, W_KN, BLOCK_N, STEPS, 0, BLOCK_M)
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(ring[3].index(previous_slot(slot, STAGES)), count=1)
        expert_bias_ptr = bias_ptr + expert.to(gl.int64) * stride_be if bias_ptr is not None else None
        up_epilogue(acc, outputs, bufs, row, end, n_tile * COLUMNS, expert_bias_ptr, stride_bn, scales_ptr, N, KIND)
        position += 2 * STEPS
        turn ^= 1
    tma.store_wait(0)


@gluon.jit
def dgrad_epilogue(acc, inputs, outputs, position, tile, next_tile, weights, KIND: gl.constexpr):
    """Stores dpreact in the place of gate and up, then the weighted activation in that of gate.

    Returns <acc, activation> per row. Boxes that have been stored are filled again: with columns of this tile, then of
    the next one. A loop over halves of the tile keeps the code of both warp groups within 128 KB: more than that ran at
    half the speed.
    """
    gate_desc, up_desc, boxes, loaded = inputs
    dgate_desc, dup_desc, act_desc = outputs
    GATED: gl.constexpr = KIND[4]
    INTERLEAVED: gl.constexpr = KIND[5]
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = boxes.shape[4]
    BOXES: gl.constexpr = boxes.shape[0] // loaded.shape[0]
    SLOTS: gl.constexpr = loaded.shape[0]
    PIECES: gl.constexpr = acc.shape[1] // COLUMNS
    gl.static_assert(SLOTS <= PIECES and PIECES % 2 == 0)
    row, end, column = tile
    half, other_half = column_pieces(acc, 2)
    inner = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, column_pieces(acc, PIECES)[0].type.layout))
    for first in range(0, PIECES, PIECES // 2):
        pieces = column_pieces(half, PIECES // 2)
        for i in gl.static_range(PIECES // 2):
            piece = first + i
            grad = pieces[i]
            slot = (position + piece) % SLOTS
            mbarrier.wait(loaded.index(slot), ((position + piece) // SLOTS) & 1)
            gate_box = boxes.index(BOXES * slot).reshape([ROWS, COLUMNS])
            if GATED:
                up_box = boxes.index(BOXES * slot + 1).reshape([ROWS, COLUMNS])
                gate, up = read_boxes(gate_box, up_box, grad, INTERLEAVED)
                value, d_gate, d_up = glu_grad(gate, up, KIND[0], KIND[1], KIND[2], KIND[3])
            else:
                preact = gate_box.load(grad.type.layout).to(gl.float32)
                value, d_gate = act_grad(preact, KIND[0], KIND[1], KIND[2])
            inner += gl.sum(grad * value, 1)
            if weights is not None:
                grad *= weights[:, None]
                value *= weights[:, None]
            # Rounded before the wait: they take half of the registers across it.
            if GATED:
                d_gate = (grad * d_gate).to(gate_desc.dtype)
                d_up = (grad * d_up).to(gate_desc.dtype)
            else:
                d_gate = zero_past(grad * d_gate, preact, KIND[2]).to(gate_desc.dtype)
            value = value.to(gate_desc.dtype)
            tma.store_wait(0)
            if piece > 0:
                refill_boxes(inputs, position, piece - 1, tile, next_tile, PIECES, INTERLEAVED)
            if dgate_desc is not None:
                if GATED:
                    write_boxes(d_gate, d_up, gate_box, up_box, INTERLEAVED)
                else:
                    gate_box.store(d_gate)
                fence_async_shared()
                left, right = box_places(row, end, column + piece * COLUMNS, COLUMNS, INTERLEAVED)
                tma_store(dgate_desc, left, boxes.index(BOXES * slot))
                if GATED:
                    tma_store(dup_desc, right, boxes.index(BOXES * slot + 1))
            if act_desc is not None:
                if dgate_desc is not None:
                    tma.store_wait(0)  # until the gate's gradient has left
                gate_box.store(value)
                fence_async_shared()
                place = ragged_coordinates(row, end, column + piece * COLUMNS)
                tma_store(act_desc, place, boxes.index(BOXES * slot))
        half = gl.where(first == 0, other_half, 0.0)  # Triton 3.6 does not carry a plain copy
    tma.store_wait(0)
    refill_boxes(inputs, position, PIECES - 1, tile, next_tile, PIECES, INTERLEAVED)
    return inner


@gluon.jit
def consume_dgrad(
    GROUP: gl.constexpr, ring, turns, inputs, outputs, weights_ptr, row_to_slot_ptr, partials,
    schedule_ptr, num_tiles, STEPS: gl.constexpr, BLOCK_N: gl.constexpr, W_KN: gl.constexpr, KIND: gl.constexpr,
    TILING: gl.constexpr,
):  # fmt: skip
    """The same for the dgrad. The groups share boxes, so their epilogues take turns as well."""
    products, epilogues = turns
    partials_ptr, stride_pn = partials
    STAGES: gl.constexpr = ring[0].shape[0]
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    SLOTS: gl.constexpr = inputs[3].shape[0]
    COLUMNS: gl.constexpr = inputs[2].shape[4]
    PIECES: gl.constexpr = BLOCK_N // COLUMNS
    programs = gl.num_programs(0)
    tile0 = gl.program_id(0) + GROUP * programs
    if GROUP == 0:
        _, row0, end0, n_tile0 = find_tile(tile0, num_tiles, schedule_ptr, TILING)
        for i in gl.static_range(SLOTS):
            load_boxes(inputs, i, row0, end0, n_tile0 * BLOCK_N + i * COLUMNS, tile0 < num_tiles, KIND[5])
    position = GROUP * STEPS  # in the sequence of all slots that the program fills
    box = GROUP * PIECES  # in that of all boxes
    turn = 1 - GROUP  # group 0 begins
    for tile in range(tile0, num_tiles, 2 * programs):
        _, row, end, n_tile = find_tile(tile, num_tiles, schedule_ptr, TILING)
        _, row1, end1, n_tile1 = find_tile(tile + programs, num_tiles, schedule_ptr, TILING)
        # Without turns both would multiply, then both store.
        mbarrier.wait(products.index(GROUP), turn)
        acc, slot, _ = multiply(ring, position % STAGES, (position // STAGES) & 1, W_KN, BLOCK_N, STEPS, 0, BLOCK_M)
        mbarrier.arrive(products.index(1 - GROUP), count=1)
        LAYOUT: gl.constexpr = gl.SliceLayout(1, column_pieces(acc, PIECES)[0].type.layout)
        weights = None
        if weights_ptr is not None:
            slots = load_slots(row_to_slot_ptr, row, end, BLOCK_M, LAYOUT)
            weights = gl.load(weights_ptr + slots).to(gl.float32)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(ring[3].index(previous_slot(slot, STAGES)), count=1)
        mbarrier.wait(epilogues.index(GROUP), turn)
        this_tile = (row, end, n_tile * BLOCK_N)
        next_tile = (row1, end1, n_tile1 * BLOCK_N, tile + programs < num_tiles)
        inner = dgrad_epilogue(acc, inputs, outputs, box, this_tile, next_tile, weights, KIND)
        mbarrier.arrive(epilogues.index(1 - GROUP), count=1)
        if partials_ptr is not None:
            rows = row + gl.arange(0, BLOCK_M, layout=LAYOUT)
            gl.store(partials_ptr + n_tile.to(gl.int64) * stride_pn + rows, inner, mask=rows < end)
        position += 2 * STEPS
        box += 2 * PIECES
        turn ^= 1


@gluon.jit
def allocate_ring(
    w_desc, ARRIVALS: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """Buffers of rows and of weights, and their barriers. ARRIVALS: how many fill a slot, and how many empty it."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], w_desc.dtype)
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    return x_ring, w_ring, allocate_barriers(STAGES, ARRIVALS), allocate_barriers(STAGES, ARRIVALS)


@gluon.jit
def hopper_up_proj_kernel(
    x_desc,  # (rows, K), blocks of (BLOCK_M, BLOCK_K)
    w_desc,  # (E, 2, N, K), blocks of both halves; INTERLEAVED: (E, 2 N, K) or, W_KN, (E, K, 2 N); BLOCK_N columns
    #          without a gate: (E, N, K) or, W_KN, (E, K, N)
    bias_ptr, stride_be, stride_bn,  # (E, 2 N), or N without a gate, or None
    gate_desc, up_desc,  # (rows, N) each, the halves of preact, both (rows, 2 N) if INTERLEAVED, or None, out
    #                      without a gate: all of preact, and None
    act_desc,  # (rows, N) or None, out; those for output are ragged, blocks of BLOCK_M rows and some columns
    scales_ptr,  # (rows,) or None
    schedule_ptr,
    NUM_EXPERTS: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    W_KN: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """preact[r] = W[e] x[r] + bias[e]; act[r] = scales[r] activation(preact[r]), from the unrounded preact.

    Grid: (programs,), persistent. The caller guarantees a schedule made for BLOCK_M; rows past R are not written.
    """
    wait_for_stream()
    WIDTH: gl.constexpr = 2 * N if GATED else N
    NUM_N_TILES: gl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILING: gl.constexpr = (NUM_EXPERTS, NUM_N_TILES, BLOCK_M, GROUP_M)
    KIND: gl.constexpr = (ACTIVATION, ALPHA, LIMIT, UP_OFFSET, GATED, INTERLEAVED)
    out_desc = gate_desc if act_desc is None else act_desc
    ring = allocate_ring(w_desc, 1, STAGES, BLOCK_M, BLOCK_K)
    bufs0 = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    bufs1 = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    turns = allocate_barriers(2, 1)
    num_tiles = gl.load(schedule_ptr + (2 * NUM_EXPERTS + 1)) * NUM_N_TILES
    outputs = (gate_desc, up_desc, act_desc)
    bias = (bias_ptr, stride_be, stride_bn)
    # Registers of a thread: a consumer's holds 128 sums of products.
    gl.warp_specialize([
        (consume_up, (0, ring, turns, outputs, bufs0, bias, scales_ptr, schedule_ptr, num_tiles,
                      N, STEPS, W_KN, BLOCK_N, KIND, TILING)),
        (consume_up, (1, ring, turns, outputs, bufs1, bias, scales_ptr, schedule_ptr, num_tiles,
                      N, STEPS, W_KN, BLOCK_N, KIND, TILING)),
        (produce, (x_desc, w_desc, out_desc, ring[0], ring[1], bufs0, ring[2], ring[3], schedule_ptr, num_tiles, 0,
                   NUM_EXPERTS, WIDTH, K, False, W_KN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
    ], [4, 1], [232, 40])  # fmt: skip


@gluon.jit(do_not_specialize=["stride_pn"])
def hopper_down_dgrad_kernel(
    dout_desc,  # (rows, K), blocks of (BLOCK_M, BLOCK_K)
    w_desc,  # (E, K, N), blocks of (1, BLOCK_K, BLOCK_N), if W_KN; else (E, N, K), blocks of (1, BLOCK_N, BLOCK_K)
    weights_ptr,  # routing weight per slot, or None
    gate_desc, up_desc,  # (rows, N) each, the halves of preact, both (rows, 2 N) if INTERLEAVED; up only if GATED
    dgate_desc, dup_desc,  # the same of dpreact, out, or None; it may be preact
    act_desc,  # (rows, N) or None, out; all of rows are ragged, blocks of BLOCK_M rows and some columns
    partials_ptr, stride_pn,  # (n tiles, rows) fp32 or None, out
    row_to_slot_ptr,  # (rows,) int32, or None
    schedule_ptr,
    NUM_EXPERTS: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    W_KN: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
    SLOTS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """With g[r] = dout[r] W[e] and the routing weight w[r], from the activation a[r] recomputed out of preact:

    dpreact[r] = w[r] g[r] * a'(preact[r]); act[r] = w[r] a[r]; partials[n tile, r] = <g[r], a[r]> in the tile.
    Grid: (programs,), persistent. The caller guarantees a schedule made for BLOCK_M; rows past R are not written.
    """
    wait_for_stream()
    NUM_N_TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILING: gl.constexpr = (NUM_EXPERTS, NUM_N_TILES, BLOCK_M, GROUP_M)
    KIND: gl.constexpr = (ACTIVATION, ALPHA, LIMIT, UP_OFFSET, GATED, INTERLEAVED)
    BOXES: gl.constexpr = 2 if GATED else 1
    ring = allocate_ring(w_desc, 1, STAGES, BLOCK_M, BLOCK_K)
    boxes = gl.allocate_shared_memory(w_desc.dtype, [BOXES * SLOTS] + gate_desc.block_type.shape, gate_desc.layout)
    inputs = (gate_desc, up_desc, boxes, allocate_barriers(SLOTS, 1))
    outputs = (dgate_desc, dup_desc, act_desc)
    turns = (allocate_barriers(2, 1), allocate_barriers(2, 1))
    partials = (partials_ptr, stride_pn)
    num_tiles = gl.load(schedule_ptr + (2 * NUM_EXPERTS + 1)) * NUM_N_TILES
    # Registers of a thread: a consumer's holds 128 sums of products.
    gl.warp_specialize([
        (consume_dgrad, (0, ring, turns, inputs, outputs, weights_ptr, row_to_slot_ptr, partials,
                         schedule_ptr, num_tiles, STEPS, BLOCK_N, W_KN, KIND, TILING)),
        (consume_dgrad, (1, ring, turns, inputs, outputs, weights_ptr, row_to_slot_ptr, partials,
                         schedule_ptr, num_tiles, STEPS, BLOCK_N, W_KN, KIND, TILING)),
        (produce, (dout_desc, w_desc, gate_desc, ring[0], ring[1], boxes, ring[2], ring[3], schedule_ptr, num_tiles,
                   0, NUM_EXPERTS, N, K, False, W_KN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
    ], [4, 1], [232, 40])  # fmt: skip
