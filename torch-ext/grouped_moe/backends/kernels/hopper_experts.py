"""The two fused grouped GEMMs of experts for Hopper in Gluon: `.hopper_pipeline` with an activation in the epilogue.

Rows are in place, sorted by expert: gathering them here takes longer than a pass that sorts them. `.hopper_gathered`
gathers the rows of the up-projection, for tiles that both consumers share; the longer epilogue of the dgrad would then
overlap with too few products.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .activation import act, act_grad, glu, glu_grad, zero_past
from .dependent import wait_for_stream
from .hopper import allocate_barriers, ragged_coordinates, tma_store
from .hopper_pipeline import Bias, Tiling, consume, find_tile, produce
from .hopper_ring import allocate_ring, finish_products
from .hopper_staging import (
    Preact,
    load_preact,
    pair_coordinates,
    read_pair,
    refill_preact,
    store_piece,
    write_pair,
)
from .tiles import column_pieces, load_bias, load_scales, load_slots, num_row_tiles


class Options(NamedTuple):
    """Compile-time values of an epilogue: the number of the activation's columns, and what the activation is."""

    N: gl.constexpr
    ACTIVATION: gl.constexpr
    ALPHA: gl.constexpr
    LIMIT: gl.constexpr
    UP_OFFSET: gl.constexpr
    GATED: gl.constexpr
    INTERLEAVED: gl.constexpr


class UpOutput(NamedTuple):
    """What the epilogue of an up-projection needs. Descriptors are ragged; those of what is not stored are None."""

    gate_desc: object
    up_desc: object
    act_desc: object
    staging: gl.shared_memory_descriptor  # staging tiles of one warp group
    bias: Bias
    scales_ptr: object


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
def store_up(acc, tile, column, bias_ptr, output, OPTIONS: gl.constexpr):
    """Adds the bias, and stores pre-activation and activation, either if it has a descriptor.

    Columns of acc: [gate | up]; INTERLEAVED, gate and up in turn, of which a thread has both; without a gate, those of
    the pre-activation. tile.row: row of acc's first one. column: the activation's first one. bias_ptr: the expert's.
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
    stride_bn = output.bias.stride_n
    pieces = column_pieces(acc, PIECES if INTERLEAVED else WIDTH * PIECES)
    for i in gl.static_range(PIECES):
        first = column + i * COLUMNS
        if INTERLEAVED:
            pair = pieces[i]
            if bias_ptr is not None:
                columns = 2 * first + gl.arange(0, 2 * COLUMNS, layout=gl.SliceLayout(0, pair.type.layout))
                pair += load_bias(bias_ptr, stride_bn, columns, 2 * N)[None, :]
            gate, up = pair.reshape([pair.shape[0], COLUMNS, 2]).split()
            if gate_desc is not None:
                left, right = column_pieces(pair, 2)
                store_piece(left, gate_desc, staging, tile.row, tile.end, 2 * first, i * STORES)
                store_piece(right, up_desc, staging, tile.row, tile.end, 2 * first + COLUMNS, i * STORES + 1)
        else:
            gate = pieces[i]
            up = pieces[PIECES + i] if GATED else None
            if bias_ptr is not None:
                columns = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gate.type.layout))
                gate += load_bias(bias_ptr, stride_bn, columns, N)[None, :]
                if GATED:
                    up_bias_ptr = bias_ptr + gl.to_tensor(N).to(gl.int64) * stride_bn
                    up += load_bias(up_bias_ptr, stride_bn, columns, N)[None, :]
            if gate_desc is not None:
                store_piece(gate, gate_desc, staging, tile.row, tile.end, first, i * STORES)
                if GATED:
                    store_piece(up, up_desc, staging, tile.row, tile.end, first, i * STORES + 1)
        if output.act_desc is not None:
            if GATED:
                value = glu(gate, up, OPTIONS.ACTIVATION, OPTIONS.ALPHA, OPTIONS.LIMIT, OPTIONS.UP_OFFSET)
            else:
                value = act(gate, OPTIONS.ACTIVATION, OPTIONS.ALPHA, OPTIONS.LIMIT)
            if output.scales_ptr is not None:
                rows = tile.row + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
                value = value * load_scales(output.scales_ptr, gl.minimum(rows, tile.end - 1))[:, None]
            store_piece(value, output.act_desc, staging, tile.row, tile.end, first, i * STORES + SAVED)


@gluon.jit
def up_epilogue(GROUP: gl.constexpr, acc, ring, slot, tile, turn, output, OPTIONS: gl.constexpr):
    """Finishes and stores a tile of an up-projection."""
    acc = finish_products(acc, ring, slot)
    COLUMNS: gl.constexpr = acc.shape[1] // 2 if OPTIONS.GATED else acc.shape[1]  # of the activation
    bias = output.bias
    bias_ptr = bias.ptr + tile.expert.to(gl.int64) * bias.stride_e if bias.ptr is not None else None
    store_up(acc, tile, tile.n_tile * COLUMNS, bias_ptr, output, OPTIONS)


@gluon.jit
def consume_up(
    GROUP: gl.constexpr, ring, pingpong, output, schedule_ptr, num_tiles,
    TILING: gl.constexpr, STEPS: gl.constexpr, W_KN: gl.constexpr, BLOCK_N: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """A consumer warp group of the up-projection."""
    step = 2 * gl.num_programs(0)
    first_tile = gl.program_id(0) + GROUP * gl.num_programs(0)
    consume(
        GROUP, first_tile, step, ring, pingpong, schedule_ptr, num_tiles, TILING, STEPS, W_KN, BLOCK_N,
        up_epilogue, output, OPTIONS,
    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def differentiate_piece(grad, inner, weights, gate_tile, up_tile, OPTIONS: gl.constexpr, dtype: gl.constexpr):
    """From the pre-activation in staging tiles: (d_gate, d_up, activation times weight, inner plus <grad, activation>).

    All but the last are in dtype. Without a gate d_gate is the gradient of the pre-activation, and d_up is d_gate.
    """
    if OPTIONS.GATED:
        gate, up = read_pair(gate_tile, up_tile, grad, OPTIONS.INTERLEAVED)
        value, d_gate, d_up = glu_grad(gate, up, OPTIONS.ACTIVATION, OPTIONS.ALPHA, OPTIONS.LIMIT, OPTIONS.UP_OFFSET)
    else:
        preact = gate_tile.load(grad.type.layout).to(gl.float32)
        value, d_gate = act_grad(preact, OPTIONS.ACTIVATION, OPTIONS.ALPHA, OPTIONS.LIMIT)
    inner += gl.sum(grad * value, 1)
    if weights is not None:
        grad *= weights[:, None]
        value *= weights[:, None]
    # In dtype they take half as many registers across the wait that follows.
    if OPTIONS.GATED:
        d_gate = (grad * d_gate).to(dtype)
        d_up = (grad * d_up).to(dtype)
    else:
        d_gate = zero_past(grad * d_gate, preact, OPTIONS.LIMIT).to(dtype)
        d_up = d_gate
    return d_gate, d_up, value.to(dtype), inner


@gluon.jit
def store_dgrad(acc, output, tile, turn, weights, OPTIONS: gl.constexpr):
    """Stores dpreact by way of the staging tiles of gate and up, then the weighted activation by that of the gate.

    Returns <acc, activation> per row. Once stores have read a staging tile, it is filled again, for this tile or the
    next one. The loop over halves keeps the code of both warp groups within 128 KB: beyond, it took twice as long.
    """
    preact = output.preact
    GATED: gl.constexpr = OPTIONS.GATED
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
            gate_tile = preact.staging.index(TILES * slot).reshape([ROWS, COLUMNS])
            up_tile = preact.staging.index(TILES * slot + TILES - 1).reshape([ROWS, COLUMNS])
            d_gate, d_up, value, inner = differentiate_piece(
                pieces[i], inner, weights, gate_tile, up_tile, OPTIONS, preact.gate_desc.dtype
            )
            tma.store_wait(0)
            if piece > 0:
                refill_preact(
                    preact, turn.piece, piece - 1, tile, column, turn.next_tile, next_column, turn.has_next,
                    PIECES, INTERLEAVED,
                )  # fmt: skip
            if output.dgate_desc is not None:
                if GATED:
                    write_pair(d_gate, d_up, gate_tile, up_tile, INTERLEAVED)
                else:
                    gate_tile.store(d_gate)
                fence_async_shared()
                left, right = pair_coordinates(tile.row, tile.end, column + piece * COLUMNS, COLUMNS, INTERLEAVED)
                tma_store(output.dgate_desc, left, preact.staging.index(TILES * slot))
                if GATED:
                    tma_store(output.dup_desc, right, preact.staging.index(TILES * slot + 1))
            if output.act_desc is not None:
                if output.dgate_desc is not None:
                    tma.store_wait(0)  # until the store of the gate's gradient has read the staging tile
                gate_tile.store(value)
                fence_async_shared()
                coordinates = ragged_coordinates(tile.row, tile.end, column + piece * COLUMNS)
                tma_store(output.act_desc, coordinates, preact.staging.index(TILES * slot))
        half = gl.where(first == 0, other_half, 0.0)  # Triton 3.6 does not carry a plain copy
    tma.store_wait(0)
    refill_preact(
        preact, turn.piece, PIECES - 1, tile, column, turn.next_tile, next_column, turn.has_next, PIECES, INTERLEAVED
    )
    return inner


@gluon.jit
def dgrad_epilogue(GROUP: gl.constexpr, acc, ring, slot, tile, turn, output, OPTIONS: gl.constexpr):
    """Stores a tile of a dgrad. The groups share the staging tiles of the pre-activation, so their epilogues, too, take
    turns.
    """
    BLOCK_M: gl.constexpr = acc.shape[0]
    PIECES: gl.constexpr = acc.shape[1] // output.preact.staging.shape[4]
    LAYOUT: gl.constexpr = gl.SliceLayout(1, column_pieces(acc, PIECES)[0].type.layout)
    weights = None
    if output.weights_ptr is not None:
        rows = gl.minimum(tile.row + gl.arange(0, BLOCK_M, layout=LAYOUT), tile.end - 1)
        weights = load_scales(output.weights_ptr, load_slots(output.row_to_slot_ptr, rows))
    acc = finish_products(acc, ring, slot)
    mbarrier.wait(output.pingpong.index(GROUP), turn.phase)
    inner = store_dgrad(acc, output, tile, turn, weights, OPTIONS)
    mbarrier.arrive(output.pingpong.index(1 - GROUP), count=1)
    if output.partials_ptr is not None:
        rows = tile.row + gl.arange(0, BLOCK_M, layout=LAYOUT)
        gl.store(output.partials_ptr + tile.n_tile.to(gl.int64) * output.stride_pn + rows, inner, mask=rows < tile.end)


@gluon.jit
def consume_dgrad(
    GROUP: gl.constexpr, ring, pingpong, output, schedule_ptr, num_tiles,
    TILING: gl.constexpr, STEPS: gl.constexpr, W_KN: gl.constexpr, BLOCK_N: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """A consumer warp group of the dgrad. Group 0 starts to load the first tile's pre-activation."""
    SLOTS: gl.constexpr = output.preact.full.shape[0]
    COLUMNS: gl.constexpr = output.preact.staging.shape[4]
    first_tile = gl.program_id(0) + GROUP * gl.num_programs(0)
    if GROUP == 0:
        tile = find_tile(first_tile, num_tiles, schedule_ptr, TILING)
        for i in gl.static_range(SLOTS):
            column = tile.n_tile * BLOCK_N + i * COLUMNS
            load_preact(output.preact, i, tile.row, tile.end, column, first_tile < num_tiles, OPTIONS.INTERLEAVED)
    consume(
        GROUP, first_tile, 2 * gl.num_programs(0), ring, pingpong, schedule_ptr, num_tiles, TILING, STEPS, W_KN,
        BLOCK_N, dgrad_epilogue, output, OPTIONS, PIECES=BLOCK_N // COLUMNS,
    )  # fmt: skip


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

    Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, and four warps.
    """
    wait_for_stream()
    WIDTH: gl.constexpr = 2 * N if GATED else N
    TILING: gl.constexpr = Tiling(NUM_EXPERTS, (WIDTH + BLOCK_N - 1) // BLOCK_N, BLOCK_M, GROUP_M)
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    OPTIONS: gl.constexpr = Options(N, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, GATED, INTERLEAVED)
    out_desc = gate_desc if act_desc is None else act_desc
    ring = allocate_ring(x_desc, w_desc, STAGES, 1)
    staging0 = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    staging1 = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    pingpong = allocate_barriers(2, 1)
    num_tiles = num_row_tiles(schedule_ptr, NUM_EXPERTS) * TILING.NUM_N_TILES
    bias = Bias(bias_ptr, stride_be, stride_bn)
    output0 = UpOutput(gate_desc, up_desc, act_desc, staging0, bias, scales_ptr)
    output1 = UpOutput(gate_desc, up_desc, act_desc, staging1, bias, scales_ptr)
    # Registers of a thread: a consumer's holds 128 sums of products.
    gl.warp_specialize([
        (consume_up, (0, ring, pingpong, output0, schedule_ptr, num_tiles, TILING, STEPS, W_KN, BLOCK_N, OPTIONS)),
        (consume_up, (1, ring, pingpong, output1, schedule_ptr, num_tiles, TILING, STEPS, W_KN, BLOCK_N, OPTIONS)),
        (produce, (x_desc, w_desc, out_desc, staging0, ring, schedule_ptr, num_tiles, 0, TILING,
                   WIDTH, K, False, W_KN, BLOCK_N)),
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
    """With g[r] = dout[r] W[e], the routing weight w[r] and a[r], the activation recomputed from preact[r]:

    dpreact[r] = w[r] g[r] * a'(preact[r]); act[r] = w[r] a[r]; partials[n tile, r] = <g[r], a[r]> in the tile.
    Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, and four warps.
    """
    wait_for_stream()
    TILING: gl.constexpr = Tiling(NUM_EXPERTS, (N + BLOCK_N - 1) // BLOCK_N, BLOCK_M, GROUP_M)
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILES: gl.constexpr = (2 if GATED else 1) * SLOTS
    OPTIONS: gl.constexpr = Options(N, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, GATED, INTERLEAVED)
    ring = allocate_ring(dout_desc, w_desc, STAGES, 1)
    staging = gl.allocate_shared_memory(w_desc.dtype, [TILES] + gate_desc.block_type.shape, gate_desc.layout)
    preact = Preact(gate_desc, up_desc, staging, allocate_barriers(SLOTS, 1))
    pingpong = allocate_barriers(2, 1)
    output = DgradOutput(
        preact, dgate_desc, dup_desc, act_desc, weights_ptr, row_to_slot_ptr, partials_ptr, stride_pn,
        pingpong=allocate_barriers(2, 1),
    )  # fmt: skip
    num_tiles = num_row_tiles(schedule_ptr, NUM_EXPERTS) * TILING.NUM_N_TILES
    # Registers of a thread: a consumer's holds 128 sums of products.
    gl.warp_specialize([
        (consume_dgrad, (0, ring, pingpong, output, schedule_ptr, num_tiles, TILING, STEPS, W_KN, BLOCK_N, OPTIONS)),
        (consume_dgrad, (1, ring, pingpong, output, schedule_ptr, num_tiles, TILING, STEPS, W_KN, BLOCK_N, OPTIONS)),
        (produce, (dout_desc, w_desc, gate_desc, staging, ring, schedule_ptr, num_tiles, 0, TILING,
                   N, K, False, W_KN, BLOCK_N)),
    ], [4, 1], [232, 40])  # fmt: skip
