"""The dgrad of the down-projection of experts for Hopper in Gluon: `.hopper_pipeline` with the activation's gradient.

Rows are in place, sorted by expert before. To gather them here takes longer: both consumers share gathered tiles, as in
`.hopper_up_proj`, and this epilogue is too long for that.

Interleaved, gate and up of COLUMNS columns are 2 COLUMNS neighbouring columns: the left staging tile has the first half
of those, the right one the second half. Otherwise the left one has the gate and the right one has up.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .activation import act_grad, glu_grad, zero_past
from .dependent import wait_for_stream
from .hopper import allocate_barriers, allocate_blocks, ragged_coordinates, tma_load, tma_store
from .hopper_pipeline import Schedule, consume, find_tile, produce
from .hopper_ring import Ranks, Ring, allocate_slots, finish_products
from .tiles import column_pieces, load_scales, load_slots, num_row_tiles


class Preact(NamedTuple):
    """The pre-activation that an epilogue reads: ragged descriptors, and a ring of staging tiles with its barriers."""

    gate_desc: object
    up_desc: object  # None without a gate
    staging: gl.shared_memory_descriptor  # (1 or 2 tiles for each slot, ...), left before right
    full: gl.shared_memory_descriptor  # a barrier for each slot


class DgradOutput(NamedTuple):
    """What the epilogue of a dgrad needs. Descriptors are ragged; those of what is not stored are None."""

    preact: Preact
    dgate_desc: object
    dup_desc: object
    act_desc: object
    weights_ptr: object
    row_to_slot_ptr: object
    partials_ptr: object
    stride_pn: gl.tensor
    pingpong: gl.shared_memory_descriptor  # barriers by which the groups' epilogues take turns


@gluon.jit
def pair_coordinates(row, end, column, COLUMNS: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Coordinates of the left and the right staging tile of COLUMNS columns of the activation."""
    left = 2 * column if INTERLEAVED else column
    right = left + COLUMNS if INTERLEAVED else left
    return ragged_coordinates(row, end, left), ragged_coordinates(row, end, right)


@gluon.jit
def load_preact(preact, slot, row, end, column, pred, INTERLEAVED: gl.constexpr):
    """Starts to load the pre-activation of a piece into the staging tiles of `slot`, if `pred`."""
    TILES: gl.constexpr = 1 if preact.up_desc is None else 2
    full = preact.full.index(slot)
    mbarrier.expect(full, TILES * preact.gate_desc.block_type.nbytes, pred=pred)
    left, right = pair_coordinates(row, end, column, preact.staging.shape[4], INTERLEAVED)
    tma_load(preact.gate_desc, left, full, preact.staging.index(TILES * slot), pred=pred)
    if preact.up_desc is not None:
        tma_load(preact.up_desc, right, full, preact.staging.index(TILES * slot + 1), pred=pred)


@gluon.jit
def refill_preact(preact, piece, tile, column, turn, next_column, PIECES: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Reuses the slot of a piece that is done: starts to load the piece that comes as many pieces later as slots exist.

    That piece is the tile's or, past its PIECES, the next tile's, if there is one. column, next_column: the tiles'
    first columns.
    """
    COLUMNS: gl.constexpr = preact.staging.shape[4]
    SLOTS: gl.constexpr = preact.full.shape[0]
    here = piece + SLOTS < PIECES
    ahead = (piece + SLOTS) * COLUMNS
    row, end = gl.where(here, tile.row, turn.next_tile.row), gl.where(here, tile.end, turn.next_tile.end)
    column = gl.where(here, column + ahead, next_column + ahead - PIECES * COLUMNS)
    slot = (turn.piece + piece) % SLOTS
    load_preact(preact, slot, row, end, column, here | turn.has_next, INTERLEAVED)


@gluon.jit
def read_pair(left_tile, right_tile, like, INTERLEAVED: gl.constexpr):
    """(gate, up) in fp32 from two staging tiles, in the layout of `like`, which has their shape."""
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    if INTERLEAVED:
        # Each staging tile has gate and up of half of the columns. Each thread reads those of its own columns.
        LAYOUT: gl.constexpr = column_pieces(gl.join(like, like).reshape([ROWS, 2 * COLUMNS]), 2)[0].type.layout
        both = gl.join(left_tile.load(LAYOUT), right_tile.load(LAYOUT)).permute((0, 2, 1))
        gate, up = both.reshape([ROWS, COLUMNS, 2]).to(gl.float32).split()
        return gl.convert_layout(gate, like.type.layout), gl.convert_layout(up, like.type.layout)
    else:
        return left_tile.load(like.type.layout).to(gl.float32), right_tile.load(like.type.layout).to(gl.float32)


@gluon.jit
def write_pair(gate, up, left_tile, right_tile, OPTIONS: gl.constexpr):
    """The inverse of `read_pair`; without a gate, writes the left staging tile alone."""
    if OPTIONS.INTERLEAVED:
        gate, up = column_pieces(gl.join(gate, up).reshape([gate.shape[0], 2 * gate.shape[1]]), 2)
    left_tile.store(gate)
    if OPTIONS.GATED:
        right_tile.store(up)


@gluon.jit
def differentiate_piece(grad, inner, weights, gate_tile, up_tile, OPTIONS: gl.constexpr, dtype: gl.constexpr):
    """From the pre-activation in staging tiles: (d_gate, d_up, activation times weight, inner plus <grad, activation>).

    All but the last are in dtype. Without a gate d_gate is the gradient of the pre-activation, and d_up is d_gate.
    """
    if OPTIONS.GATED:
        gate, up = read_pair(gate_tile, up_tile, grad, OPTIONS.INTERLEAVED)
        value, d_gate, d_up = glu_grad(gate, up, OPTIONS)
    else:
        preact = gate_tile.load(grad.type.layout).to(gl.float32)
        value, d_gate = act_grad(preact, OPTIONS)
    inner += gl.sum(grad * value, 1)
    if weights is not None:
        grad *= weights[:, None]
        value *= weights[:, None]
    # In dtype they take half as many registers across the wait that follows.
    if OPTIONS.GATED:
        d_gate = (grad * d_gate).to(dtype)
        d_up = (grad * d_up).to(dtype)
    else:
        d_gate = zero_past(grad * d_gate, preact, OPTIONS).to(dtype)
        d_up = d_gate
    return d_gate, d_up, value.to(dtype), inner


@gluon.jit
def store_dgrad(acc, output, tile, turn, weights, OPTIONS: gl.constexpr):
    """Stores dpreact by way of the staging tiles of gate and up, then the weighted activation by that of the gate.

    Returns <acc, activation> per row. Once stores have read a staging tile, it is filled again, for this tile or the
    next one. The loop over halves keeps the code of both warp groups within 128 KB: beyond, it took twice as long.
    """
    preact = output.preact
    INTERLEAVED: gl.constexpr = OPTIONS.INTERLEAVED
    ROWS: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = acc.shape[1]
    COLUMNS: gl.constexpr = preact.staging.shape[4]
    SLOTS: gl.constexpr = preact.full.shape[0]
    TILES: gl.constexpr = preact.staging.shape[0] // SLOTS  # staging tiles of a slot
    PIECES: gl.constexpr = BLOCK_N // COLUMNS
    gl.static_assert(SLOTS <= PIECES and PIECES % 2 == 0)
    column = tile.n_tile * BLOCK_N
    next_column = turn.next_tile.n_tile * BLOCK_N
    half, other_half = column_pieces(acc, 2)
    inner = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, column_pieces(acc, PIECES)[0].type.layout))
    for first in range(0, PIECES, PIECES // 2):
        pieces = column_pieces(half, PIECES // 2)
        for i in gl.static_range(PIECES // 2):
            piece = first + i
            slot = (turn.piece + piece) % SLOTS
            mbarrier.wait(preact.full.index(slot), ((turn.piece + piece) // SLOTS) & 1)
            left_block, right_block = preact.staging.index(TILES * slot), preact.staging.index(TILES * slot + TILES - 1)
            gate_tile, up_tile = left_block.reshape([ROWS, COLUMNS]), right_block.reshape([ROWS, COLUMNS])
            d_gate, d_up, value, inner = differentiate_piece(
                pieces[i], inner, weights, gate_tile, up_tile, OPTIONS, preact.gate_desc.dtype
            )
            tma.store_wait(0)
            if piece > 0:
                refill_preact(preact, piece - 1, tile, column, turn, next_column, PIECES, INTERLEAVED)
            if output.dgate_desc is not None:
                write_pair(d_gate, d_up, gate_tile, up_tile, OPTIONS)
                fence_async_shared()
                left, right = pair_coordinates(tile.row, tile.end, column + piece * COLUMNS, COLUMNS, INTERLEAVED)
                tma_store(output.dgate_desc, left, left_block)
                if OPTIONS.GATED:
                    tma_store(output.dup_desc, right, right_block)
            if output.act_desc is not None:
                if output.dgate_desc is not None:
                    tma.store_wait(0)  # until the store of the gate's gradient has read the staging tile
                gate_tile.store(value)
                fence_async_shared()
                coordinates = ragged_coordinates(tile.row, tile.end, column + piece * COLUMNS)
                tma_store(output.act_desc, coordinates, left_block)
        half = gl.where(first == 0, other_half, 0.0)  # Triton 3.6 does not carry a plain copy
    tma.store_wait(0)
    refill_preact(preact, PIECES - 1, tile, column, turn, next_column, PIECES, INTERLEAVED)
    return inner


@gluon.jit
def dgrad_epilogue(GROUP: gl.constexpr, acc, ring, slot, tile, turn, output, OPTIONS: gl.constexpr):
    """Stores a tile of a dgrad. The groups share the staging tiles of the pre-activation, so their epilogues, too, take
    turns.
    """
    PIECES: gl.constexpr = acc.shape[1] // output.preact.staging.shape[4]
    LAYOUT: gl.constexpr = gl.SliceLayout(1, column_pieces(acc, PIECES)[0].type.layout)
    weights = None
    if output.weights_ptr is not None:
        rows = gl.minimum(tile.row + gl.arange(0, acc.shape[0], layout=LAYOUT), tile.end - 1)
        weights = load_scales(output.weights_ptr, load_slots(output.row_to_slot_ptr, rows))
    acc = finish_products(acc, ring, slot)
    mbarrier.wait(output.pingpong.index(GROUP), turn.phase)
    inner = store_dgrad(acc, output, tile, turn, weights, OPTIONS)
    mbarrier.arrive(output.pingpong.index(1 - GROUP), count=1)
    if output.partials_ptr is not None:
        rows = tile.row + gl.arange(0, acc.shape[0], layout=LAYOUT)
        gl.store(output.partials_ptr + tile.n_tile.to(gl.int64) * output.stride_pn + rows, inner, mask=rows < tile.end)


@gluon.jit
def consume_dgrad(
    GROUP: gl.constexpr, ring, pingpong, output, schedule,
    TILING: gl.constexpr, PRODUCT: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """A consumer warp group. Group 0 starts to load the first tile's pre-activation."""
    SLOTS: gl.constexpr = output.preact.full.shape[0]
    COLUMNS: gl.constexpr = output.preact.staging.shape[4]
    if GROUP == 0:
        first_tile = gl.program_id(0)
        tile = find_tile(first_tile, schedule, TILING)
        for i in gl.static_range(SLOTS):
            column = tile.n_tile * PRODUCT.BLOCK_N + i * COLUMNS
            has_tile = first_tile < schedule.num_tiles
            load_preact(output.preact, i, tile.row, tile.end, column, has_tile, OPTIONS.INTERLEAVED)
    PIECES: gl.constexpr = PRODUCT.BLOCK_N // COLUMNS
    consume(GROUP, ring, pingpong, schedule, TILING, PRODUCT, dgrad_epilogue, output, OPTIONS, PIECES=PIECES)


@gluon.jit(do_not_specialize=["stride_pn"])
def hopper_down_dgrad_kernel(
    dout_desc,  # (rows, K), blocks of (BLOCK_M, BLOCK_K)
    w_desc,  # (E, K, N), blocks of (1, BLOCK_K, BLOCK_N), if W_KN; else (E, N, K), blocks of (1, BLOCK_N, BLOCK_K)
    projected_desc, factor_desc,  # the low-rank part: (rows, R), and (E, R, N) if W_KN, else (E, N, R); or None
    weights_ptr,  # routing weight per slot, or None
    gate_desc, up_desc,  # (rows, N) each, the halves of preact, both (rows, 2 N) if INTERLEAVED; up only if GATED
    dgate_desc, dup_desc,  # the same of dpreact, out, or None; it may be preact
    act_desc,  # (rows, N) or None, out; all of rows are ragged, blocks of BLOCK_M rows and some columns
    partials_ptr, stride_pn,  # (n tiles, rows) fp32 or None, out
    row_to_slot_ptr,  # (rows,) int32, or None
    schedule_ptr,
    SLOTS: gl.constexpr,  # pieces of the pre-activation in shared memory
    TILING: gl.constexpr, PRODUCT: gl.constexpr, OPTIONS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """With g[r] = dout[r] W[e], the routing weight w[r] and a[r], the activation recomputed from preact[r]:

    dpreact[r] = w[r] g[r] * a'(preact[r]); act[r] = w[r] a[r]; partials[n tile, r] = <g[r], a[r]> in the tile.
    The low-rank part is in W. Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, and four warps.
    """
    wait_for_stream()
    TILES: gl.constexpr = (2 if OPTIONS.GATED else 1) * SLOTS
    lhs, rhs, full, empty = allocate_slots(dout_desc, w_desc, STAGES, 1)
    ring = Ring(lhs, rhs, full, empty, Ranks(projected_desc, factor_desc))
    preact = Preact(gate_desc, up_desc, allocate_blocks(gate_desc, TILES), allocate_barriers(SLOTS, 1))
    pingpong = allocate_barriers(2, 1)
    output = DgradOutput(
        preact, dgate_desc, dup_desc, act_desc, weights_ptr, row_to_slot_ptr, partials_ptr, stride_pn,
        pingpong=allocate_barriers(2, 1),
    )  # fmt: skip
    schedule = Schedule(schedule_ptr, num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES)
    # Registers of a thread: a consumer's holds 128 sums of products.
    gl.warp_specialize([
        (consume_dgrad, (0, ring, pingpong, output, schedule, TILING, PRODUCT, OPTIONS)),
        (consume_dgrad, (1, ring, pingpong, output, schedule, TILING, PRODUCT, OPTIONS)),
        (produce, (dout_desc, w_desc, ring, schedule, None, TILING, PRODUCT)),
    ], [4, 1], [232, 40])  # fmt: skip
