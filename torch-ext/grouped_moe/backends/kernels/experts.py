"""The two fused grouped GEMMs of experts: up-projection with activation, and its backward counterpart.

Rows are sorted by expert. Operands are read at the token of a row's slot, slot // TOP_K (the experts block), or with
TOP_K == 0 at the row itself (the grouped MLP).
"""

import triton
import triton.language as tl

from .dependent import wait_for_stream
from .epilogues import down_dgrad_epilogue, load_preact, up_epilogue
from .low_rank import LowRank, add_low_rank
from .products import Weights, dot_gate_up, dot_rows, locate_rows
from .tiles import (
    column_pieces,
    expert_rows,
    expert_tiles,
    find_expert,
    grouped_order,
    load_scales,
    load_slots,
    num_row_tiles,
    store_parts,
    tile_rows,
    tokens_of,
)

# To locate a tile takes a chain of dependent loads: tile -> expert -> rows -> slots. The kernels below prefetch: while
# they compute a tile, they load the slots of the next one (1), the rows of the one after that (2) and the expert of the
# third (3). No load then waits for another one, nor the tile for a load.


@triton.jit
def find_rows(expert, tile, schedule_ptr, TILING: tl.constexpr):
    """A tile number and its expert -> its place: (n tile, first row, number of rows of the expert from there on).

    All loads come before what is computed from them.
    """
    before, num_m_tiles = expert_tiles(expert, schedule_ptr, TILING.NUM_EXPERTS)
    begin, end = expert_rows(expert, schedule_ptr)
    within = tile - before * TILING.NUM_N_TILES
    m_tile, n_tile = grouped_order(within, num_m_tiles, TILING.NUM_N_TILES, TILING.GROUP_M)
    first_row = begin + m_tile * TILING.BLOCK_M
    return n_tile, first_row, end - first_row


@triton.jit
def load_tile_slots(row_to_slot_ptr, place, TILING: tl.constexpr):
    """Slots of a tile's rows, or without row_to_slot_ptr the rows."""
    _, first_row, count = place
    rows, _ = tile_rows(first_row, count, TILING.BLOCK_M)
    return load_slots(row_to_slot_ptr, rows)


@triton.jit
def start_prefetch(tile, step, last, row_to_slot_ptr, schedule_ptr, TILING: tl.constexpr):
    """The whole chain for a program's first tile; expert and rows for its second one, and the expert of its third."""
    tile1, tile2 = tl.minimum(tile + step, last), tl.minimum(tile + 2 * step, last)
    expert = find_expert(tile // TILING.NUM_N_TILES, schedule_ptr, TILING.NUM_EXPERTS)
    expert1 = find_expert(tile1 // TILING.NUM_N_TILES, schedule_ptr, TILING.NUM_EXPERTS)
    expert2 = find_expert(tile2 // TILING.NUM_N_TILES, schedule_ptr, TILING.NUM_EXPERTS)
    place = find_rows(expert, tile, schedule_ptr, TILING)
    place1 = find_rows(expert1, tile1, schedule_ptr, TILING)
    slots = load_tile_slots(row_to_slot_ptr, place, TILING)
    return expert, place, slots, expert1, place1, expert2


@triton.jit
def prefetch(place1, expert2, tile, step, last, row_to_slot_ptr, schedule_ptr, TILING: tl.constexpr):
    """The next load of the chain for each of the three tiles after `tile`: slots, rows, expert."""
    tile2, tile3 = tl.minimum(tile + 2 * step, last), tl.minimum(tile + 3 * step, last)
    slots1 = load_tile_slots(row_to_slot_ptr, place1, TILING)
    place2 = find_rows(expert2, tile2, schedule_ptr, TILING)
    expert3 = find_expert(tile3 // TILING.NUM_N_TILES, schedule_ptr, TILING.NUM_EXPERTS)
    return slots1, place2, expert3


@triton.jit
def up_proj_kernel(
    x_ptr, stride_xt, stride_xk,  # (T, K)
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, 2 N or N, K) by strides; with TMA its descriptor, (E, K, ...) if W_KN
    bias_ptr, stride_be, stride_bn,  # (E, 2 N or N) or None
    projected_ptr, factor_ptr,  # the low-rank part, as `.low_rank.LowRank` has it, or None
    preact_ptr,  # (rows, 2 N or N) or None, out
    act_ptr,  # (rows, N) or None, out
    scales_ptr,  # (rows,) or None
    row_to_slot_ptr,  # (rows,) int32, or None if TOP_K is 0
    schedule_ptr,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, TILING: tl.constexpr,
    PRODUCT: tl.constexpr, FACTOR: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """preact[r] = W[e] x[token of r] + bias[e]; act[r] = scales[r] activation(preact[r]), from the unrounded preact.

    The low-rank part is in W. Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M. With TMA, gate and up of an (E, 2 N, K) weight that are not
    interleaved are a dimension of the descriptor: (E, 2, N, K).
    """
    wait_for_stream()
    N: tl.constexpr = OPTIONS.N
    w, low_rank = Weights(w_ptr, stride_we, stride_wn, stride_wk), LowRank(projected_ptr, factor_ptr)
    num_tiles = num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES
    tile, step, last = tl.program_id(0), tl.num_programs(0), num_tiles - 1
    if tile < num_tiles:
        expert, place, slots, expert1, place1, expert2 = start_prefetch(
            tile, step, last, row_to_slot_ptr, schedule_ptr, TILING
        )
        for tile in tl.range(tl.program_id(0), num_tiles, step):
            slots1, place2, expert3 = prefetch(place1, expert2, tile, step, last, row_to_slot_ptr, schedule_ptr, TILING)
            n_tile, row, count = place
            rows, row_mask = tile_rows(row, count, TILING.BLOCK_M)
            x = locate_rows(x_ptr, stride_xt, stride_xk, tokens_of(slots, TOP_K), row_mask, PRODUCT.BLOCK_K)
            expert_bias_ptr = bias_ptr + expert.to(tl.int64) * stride_be if bias_ptr is not None else None
            scales = load_scales(scales_ptr, rows) if scales_ptr is not None else None
            column = n_tile * BLOCK_N
            if OPTIONS.GATED and not OPTIONS.INTERLEAVED:
                gate, up = dot_gate_up(x, w, expert, column, N, BLOCK_N, PRODUCT)
                gate = add_low_rank(gate, low_rank, expert, rows, row_mask, column, 2 * N, FACTOR, PRODUCT)
                up = add_low_rank(up, low_rank, expert, rows, row_mask, N + column, 2 * N, FACTOR, PRODUCT)
            else:
                # One product of WIDTH columns per output column: gate and up in turn, or the one column itself.
                WIDTH: tl.constexpr = 2 if OPTIONS.GATED else 1
                gate = dot_rows(x, w, expert, WIDTH * column, WIDTH * N, WIDTH * BLOCK_N, PRODUCT)
                gate = add_low_rank(gate, low_rank, expert, rows, row_mask, WIDTH * column, WIDTH * N, FACTOR, PRODUCT)
                up = gate
            up_epilogue(
                gate, up, expert_bias_ptr, stride_bn, preact_ptr, act_ptr, scales, row, row_mask, column, OPTIONS
            )
            expert, place, slots, expert1, place1, expert2 = expert1, place1, slots1, expert2, place2, expert3


@triton.jit(do_not_specialize=["stride_pn"])
def down_dgrad_kernel(
    dout_ptr, stride_dt, stride_dk,  # (T, K) gradient of the output
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, N, K) by strides: N intermediate, K hidden; with TMA its descriptor
    projected_ptr, factor_ptr,  # the low-rank part, as `.low_rank.LowRank` has it, or None
    weights_ptr,  # (S,) routing weights, or (rows,) if TOP_K is 0, or None
    preact_ptr,  # (rows, 2 N or N)
    dpreact_ptr,  # (rows, 2 N or N) or None, out; may be preact_ptr
    scaled_act_ptr,  # (rows, N) or None, out
    partials_ptr, stride_pn,  # (n tiles, rows) fp32 or None, out
    row_to_slot_ptr,  # (rows,) int32, or None if TOP_K is 0
    schedule_ptr,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, TILING: tl.constexpr,
    PRODUCT: tl.constexpr, FACTOR: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """With g[r] = dout[token of r] W[e], the routing weight w[r] and a[r], the activation recomputed from preact[r]:

    dpreact[r] = w[r] g[r] * a'(preact[r]); scaled_act[r] = w[r] a[r]; partials[n tile, r] = <g[r], a[r]> in the tile.
    The low-rank part is in W. Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M.
    """
    wait_for_stream()
    PIECES: tl.constexpr = 2 if BLOCK_N <= 64 else BLOCK_N // 32
    PIECE: tl.constexpr = BLOCK_N // PIECES
    N: tl.constexpr = OPTIONS.N
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    w, low_rank = Weights(w_ptr, stride_we, stride_wn, stride_wk), LowRank(projected_ptr, factor_ptr)
    num_tiles = num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES
    tile, step, last = tl.program_id(0), tl.num_programs(0), num_tiles - 1
    if tile < num_tiles:
        expert, place, slots, expert1, place1, expert2 = start_prefetch(
            tile, step, last, row_to_slot_ptr, schedule_ptr, TILING
        )
        for tile in tl.range(tl.program_id(0), num_tiles, step):
            n_tile, row, count = place
            rows, row_mask = tile_rows(row, count, BLOCK_M)
            dout = locate_rows(dout_ptr, stride_dt, stride_dk, tokens_of(slots, TOP_K), row_mask, PRODUCT.BLOCK_K)
            weights = load_scales(weights_ptr, slots) if weights_ptr is not None else None
            column = n_tile * BLOCK_N
            grad = dot_rows(dout, w, expert, column, N, BLOCK_N, PRODUCT)
            grad = add_low_rank(grad, low_rank, expert, rows, row_mask, column, N, FACTOR, PRODUCT)
            # The pre-activation of a piece is loaded while the piece before it is computed.
            gate, up = load_preact(preact_ptr, row, row_mask, column, OPTIONS, PIECE)
            grads = column_pieces(grad, PIECES)
            inner = tl.zeros((BLOCK_M,), tl.float32)
            for i in tl.static_range(PIECES):
                if i == PIECES // 2:
                    # Now: the first pieces no longer take registers.
                    slots1, place2, expert3 = prefetch(
                        place1, expert2, tile, step, last, row_to_slot_ptr, schedule_ptr, TILING
                    )
                next_gate, next_up = gate, up
                if i + 1 < PIECES:
                    next_gate, next_up = load_preact(
                        preact_ptr, row, row_mask, column + (i + 1) * PIECE, OPTIONS, PIECE
                    )
                inner += down_dgrad_epilogue(
                    grads[i], gate, up, weights, dpreact_ptr, scaled_act_ptr, row, row_mask, column + i * PIECE,
                    OPTIONS, PIECE,
                )  # fmt: skip
                gate, up = next_gate, next_up
            store_parts(partials_ptr, stride_pn, inner, n_tile, row, row_mask)
            expert, place, slots, expert1, place1, expert2 = expert1, place1, slots1, expert2, place2, expert3
