"""The two fused grouped GEMMs of experts: up-projection with activation, and its backward counterpart.

Rows are sorted by expert. Operands are read at the token of a row's slot, slot // TOP_K (the experts block), or with
TOP_K == 0 at the row itself (the grouped MLP).
"""

import triton
import triton.language as tl

from .dependent import wait_for_stream
from .epilogues import down_dgrad_epilogue, load_preact, pair_epilogue, wide_epilogue
from .tiles import (
    column_halves,
    column_pieces,
    expert_rows,
    expert_tiles,
    find_expert,
    grouped_order,
    load_scales,
    load_slots,
    load_weights,
    num_row_tiles,
)


@triton.jit
def find_rows(
    expert, tile, schedule_ptr,
    NUM_EXPERTS: tl.constexpr, NUM_N_TILES: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A tile number and its expert -> (n tile, first row, number of rows that the expert has from there on)."""
    before, num_m_tiles = expert_tiles(expert, schedule_ptr, NUM_EXPERTS)
    begin, end = expert_rows(expert, schedule_ptr)
    m_tile, n_tile = grouped_order(tile - before * NUM_N_TILES, num_m_tiles, NUM_N_TILES, GROUP_M)
    first_row = begin + m_tile * BLOCK_M
    return n_tile, first_row, end - first_row


@triton.jit
def load_tile_slots(row_to_slot_ptr, first_row, count, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr):
    """Slots of a tile's rows, or with TOP_K == 0 the rows; those past the expert's last one repeat it."""
    rows = first_row + tl.minimum(tl.arange(0, BLOCK_M), count - 1)
    return load_slots(row_to_slot_ptr if TOP_K > 0 else None, rows)


# To locate a tile takes a chain of dependent loads: tile -> expert -> rows -> slots. The kernels below prefetch: while
# they compute a tile, they load the slots of the next one (1), the rows of the one after that (2) and the expert of the
# third (3). No load then waits for another one, nor the tile for a load.


@triton.jit
def start_prefetch(
    tile, step, last, row_to_slot_ptr, schedule_ptr,
    NUM_EXPERTS: tl.constexpr, NUM_N_TILES: tl.constexpr, TOP_K: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The whole chain for a program's first tile; expert and rows for its second one, and the expert of its third."""
    tile1, tile2 = tl.minimum(tile + step, last), tl.minimum(tile + 2 * step, last)
    expert = find_expert(tile // NUM_N_TILES, schedule_ptr, NUM_EXPERTS)
    expert1 = find_expert(tile1 // NUM_N_TILES, schedule_ptr, NUM_EXPERTS)
    expert2 = find_expert(tile2 // NUM_N_TILES, schedule_ptr, NUM_EXPERTS)
    n_tile, row, count = find_rows(expert, tile, schedule_ptr, NUM_EXPERTS, NUM_N_TILES, GROUP_M, BLOCK_M)
    n_tile1, row1, count1 = find_rows(expert1, tile1, schedule_ptr, NUM_EXPERTS, NUM_N_TILES, GROUP_M, BLOCK_M)
    slots = load_tile_slots(row_to_slot_ptr, row, count, TOP_K, BLOCK_M)
    return expert, n_tile, row, count, slots, expert1, n_tile1, row1, count1, expert2


@triton.jit
def prefetch(
    row1, count1, expert2, tile, step, last, row_to_slot_ptr, schedule_ptr,
    NUM_EXPERTS: tl.constexpr, NUM_N_TILES: tl.constexpr, TOP_K: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The next load of the chain for each of the three tiles after `tile`: slots, rows, expert."""
    tile2, tile3 = tl.minimum(tile + 2 * step, last), tl.minimum(tile + 3 * step, last)
    slots1 = load_tile_slots(row_to_slot_ptr, row1, count1, TOP_K, BLOCK_M)
    n_tile2, row2, count2 = find_rows(expert2, tile2, schedule_ptr, NUM_EXPERTS, NUM_N_TILES, GROUP_M, BLOCK_M)
    expert3 = find_expert(tile3 // NUM_N_TILES, schedule_ptr, NUM_EXPERTS)
    return slots1, n_tile2, row2, count2, expert3


@triton.jit
def row_ptrs(ptr, slots, stride_r, stride_k, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """(BLOCK_M, BLOCK_K) pointers to the first columns of the slots' tokens."""
    rows = slots.to(tl.int64) if TOP_K == 0 else (slots // TOP_K).to(tl.int64)
    return ptr + rows[:, None] * stride_r + tl.arange(0, BLOCK_K).to(tl.int64)[None, :] * stride_k


@triton.jit
def load_x(x_ptrs, row_mask, stride_xk, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The BLOCK_K columns from `start` on, 0 past K and past the expert's last row."""
    x_ptrs += start * tl.cast(stride_xk, tl.int64)
    if K % BLOCK_K == 0:
        return tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
    else:
        mask = row_mask[:, None] & (tl.arange(0, BLOCK_K) < K - start)[None, :]
        return tl.load(x_ptrs, mask=mask, other=0.0)


@triton.jit
def load_w(
    w_ptr, stride_we, stride_wn, stride_wk, expert, first_column, start, N: tl.constexpr, K: tl.constexpr,
    TMA: tl.constexpr, W_KN: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A (BLOCK_K, BLOCK_N) tile of an expert's weights, 0 past K and, without TMA, past N."""
    if TMA and W_KN:
        return w_ptr.load([expert, start, first_column]).reshape(BLOCK_K, BLOCK_N)
    elif TMA:
        return w_ptr.load([expert, first_column, start]).reshape(BLOCK_N, BLOCK_K).T
    else:
        k = start + tl.arange(0, BLOCK_K)
        columns = first_column + tl.arange(0, BLOCK_N)
        w_ptrs = w_ptr + expert.to(tl.int64) * stride_we + columns.to(tl.int64)[None, :] * stride_wn
        return load_weights(w_ptrs + k.to(tl.int64)[:, None] * stride_wk, k < K, columns < N, K % BLOCK_K == 0, EVEN_N)


@triton.jit
def dot_wide(
    x_ptrs, row_mask, stride_xk, w_ptr, stride_we, stride_wn, stride_wk, expert, first_column,
    N: tl.constexpr, K: tl.constexpr, TMA: tl.constexpr, W_KN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x @ w over K for BLOCK_N columns: (BLOCK_M, BLOCK_N) fp32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = load_x(x_ptrs, row_mask, stride_xk, start, K, BLOCK_K)
        w = load_w(
            w_ptr, stride_we, stride_wn, stride_wk, expert, first_column, start, N, K,
            TMA, W_KN, N % BLOCK_N == 0, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def dot_gate_up(
    x_ptrs, row_mask, stride_xk, w_ptr, stride_we, stride_wn, stride_wk, expert, first_column,
    N: tl.constexpr, K: tl.constexpr, TMA: tl.constexpr, W_KN: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(x @ w_gate, x @ w_up) over K for BLOCK_N columns of each; w has the columns of gate, then those of up."""
    if TMA and not W_KN:
        # One product for gate and up: wgmma reads x once for up to 256 columns.
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            x = load_x(x_ptrs, row_mask, stride_xk, start, K, BLOCK_K)
            w = w_ptr.load([expert, 0, first_column, start]).reshape(2 * BLOCK_N, BLOCK_K)
            acc = tl.dot(x, w.T, acc)
        return column_halves(acc)
    else:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            x = load_x(x_ptrs, row_mask, stride_xk, start, K, BLOCK_K)
            w_gate = load_w(
                w_ptr, stride_we, stride_wn, stride_wk, expert, first_column, start, N, K,
                TMA, W_KN, N % BLOCK_N == 0, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            w_up = load_w(
                w_ptr, stride_we, stride_wn, stride_wk, expert, N + first_column, start, 2 * N, K,
                TMA, W_KN, N % BLOCK_N == 0, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            gate = tl.dot(x, w_gate, gate, input_precision=PRECISION)
            up = tl.dot(x, w_up, up, input_precision=PRECISION)
        return gate, up


@triton.jit
def up_proj_kernel(
    x_ptr, stride_xt, stride_xk,  # (T, K)
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, 2 N or N, K) by strides; with TMA its descriptor, (E, K, ...) if W_KN
    bias_ptr, stride_be, stride_bn,  # (E, 2 N or N) or None
    preact_ptr,  # (S, 2 N or N) or None, out
    act_ptr,  # (S, N) or None, out
    scales_ptr,  # (rows,) or None
    row_to_slot_ptr,  # (S,) int32 or None
    schedule_ptr,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TMA: tl.constexpr,
    W_KN: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """preact[r] = W[e] x[token of r] + bias[e]; act[r] = scales[r] activation(preact[r]), from the unrounded preact.

    Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M. With TMA, gate and up of an (E, 2 N, K) weight that are not
    interleaved are a dimension of the descriptor: (E, 2, N, K).
    """
    wait_for_stream()
    NUM_N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_tiles = num_row_tiles(schedule_ptr, NUM_EXPERTS) * NUM_N_TILES
    tile, step, last = tl.program_id(0), tl.num_programs(0), num_tiles - 1
    if tile < num_tiles:
        expert, n_tile, row, count, slots, expert1, n_tile1, row1, count1, expert2 = start_prefetch(
            tile, step, last, row_to_slot_ptr, schedule_ptr, NUM_EXPERTS, NUM_N_TILES, TOP_K, GROUP_M, BLOCK_M
        )
        for tile in tl.range(tl.program_id(0), num_tiles, step):
            slots1, n_tile2, row2, count2, expert3 = prefetch(
                row1, count1, expert2, tile, step, last, row_to_slot_ptr, schedule_ptr,
                NUM_EXPERTS, NUM_N_TILES, TOP_K, GROUP_M, BLOCK_M,
            )  # fmt: skip
            x_ptrs = row_ptrs(x_ptr, slots, stride_xt, stride_xk, TOP_K, BLOCK_K)
            row_mask = tl.arange(0, BLOCK_M) < count
            expert_bias_ptr = bias_ptr + expert.to(tl.int64) * stride_be if bias_ptr is not None else None
            scales = None
            if scales_ptr is not None:
                scales = load_scales(scales_ptr, row + tl.minimum(tl.arange(0, BLOCK_M), count - 1))
            column = n_tile * BLOCK_N
            if GATED and not INTERLEAVED:
                gate, up = dot_gate_up(
                    x_ptrs, row_mask, stride_xk, w_ptr, stride_we, stride_wn, stride_wk, expert, column, N, K,
                    TMA, W_KN, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                gates, ups = column_pieces(gate, 2), column_pieces(up, 2)
                for i in tl.static_range(2):
                    pair_epilogue(
                        gates[i], ups[i], expert_bias_ptr, stride_bn, preact_ptr, act_ptr, scales, row, row_mask,
                        column + i * (BLOCK_N // 2), N, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, BLOCK_M, BLOCK_N // 2,
                    )  # fmt: skip
            else:
                # One product of WIDTH columns per output column: gate and up in turn, or the one column itself.
                WIDTH: tl.constexpr = 2 if GATED else 1
                preact = dot_wide(
                    x_ptrs, row_mask, stride_xk, w_ptr, stride_we, stride_wn, stride_wk, expert,
                    WIDTH * column, WIDTH * N, K, TMA, W_KN, PRECISION, BLOCK_M, WIDTH * BLOCK_N, BLOCK_K,
                )  # fmt: skip
                preacts = column_pieces(preact, 2)
                for i in tl.static_range(2):
                    wide_epilogue(
                        preacts[i], expert_bias_ptr, stride_bn, preact_ptr, act_ptr, scales, row, row_mask,
                        column + i * (BLOCK_N // 2), N, GATED,
                        ACTIVATION, ALPHA, LIMIT, UP_OFFSET, BLOCK_M, BLOCK_N // 2,
                    )  # fmt: skip
            expert, n_tile, row, count, slots = expert1, n_tile1, row1, count1, slots1
            expert1, n_tile1, row1, count1, expert2 = expert2, n_tile2, row2, count2, expert3


@triton.jit(do_not_specialize=["stride_pn"])
def down_dgrad_kernel(
    dout_ptr, stride_dt, stride_dk,  # (T, K) gradient of the output
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, N, K) by strides: N intermediate, K hidden; with TMA its descriptor
    weights_ptr,  # (S,) routing weight per slot, or None
    preact_ptr,  # (S, 2 N or N)
    dpreact_ptr,  # (S, 2 N or N) or None, out; may be preact_ptr
    scaled_act_ptr,  # (S, N) or None, out
    partials_ptr, stride_pn,  # (n tiles, S) fp32 or None, out
    row_to_slot_ptr,  # (S,) int32 or None
    schedule_ptr,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TMA: tl.constexpr,
    W_KN: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """With g[r] = dout[token of r] W[e], the routing weight w[r] and a[r], the activation recomputed from preact[r]:

    dpreact[r] = w[r] g[r] * a'(preact[r]); scaled_act[r] = w[r] a[r]; partials[n tile, r] = <g[r], a[r]> in the tile.
    Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M.
    """
    wait_for_stream()
    PIECES: tl.constexpr = 2 if BLOCK_N <= 64 else BLOCK_N // 32
    PIECE: tl.constexpr = BLOCK_N // PIECES
    NUM_N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_tiles = num_row_tiles(schedule_ptr, NUM_EXPERTS) * NUM_N_TILES
    tile, step, last = tl.program_id(0), tl.num_programs(0), num_tiles - 1
    if tile < num_tiles:
        expert, n_tile, row, count, slots, expert1, n_tile1, row1, count1, expert2 = start_prefetch(
            tile, step, last, row_to_slot_ptr, schedule_ptr, NUM_EXPERTS, NUM_N_TILES, TOP_K, GROUP_M, BLOCK_M
        )
        for tile in tl.range(tl.program_id(0), num_tiles, step):
            dout_ptrs = row_ptrs(dout_ptr, slots, stride_dt, stride_dk, TOP_K, BLOCK_K)
            weights = load_scales(weights_ptr, slots) if weights_ptr is not None else None
            row_mask = tl.arange(0, BLOCK_M) < count
            column = n_tile * BLOCK_N
            grad = dot_wide(
                dout_ptrs, row_mask, stride_dk, w_ptr, stride_we, stride_wn, stride_wk, expert, column, N, K,
                TMA, W_KN, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            # The pre-activation of a piece is loaded while the piece before it is computed.
            gate, up = load_preact(preact_ptr, row, row_mask, column, N, GATED, INTERLEAVED, BLOCK_M, PIECE)
            grads = column_pieces(grad, PIECES)
            inner = tl.zeros((BLOCK_M,), tl.float32)
            for i in tl.static_range(PIECES):
                if i == PIECES // 2:
                    # Now: the first pieces no longer take registers.
                    slots1, n_tile2, row2, count2, expert3 = prefetch(
                        row1, count1, expert2, tile, step, last, row_to_slot_ptr, schedule_ptr,
                        NUM_EXPERTS, NUM_N_TILES, TOP_K, GROUP_M, BLOCK_M,
                    )  # fmt: skip
                next_gate, next_up = gate, up
                if i + 1 < PIECES:
                    next_gate, next_up = load_preact(
                        preact_ptr, row, row_mask, column + (i + 1) * PIECE, N, GATED, INTERLEAVED, BLOCK_M, PIECE
                    )
                inner += down_dgrad_epilogue(
                    grads[i], gate, up, weights, dpreact_ptr, scaled_act_ptr, row, row_mask, column + i * PIECE, N,
                    GATED, INTERLEAVED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, BLOCK_M, PIECE,
                )  # fmt: skip
                gate, up = next_gate, next_up
            if partials_ptr is not None:
                partial_ptrs = partials_ptr + n_tile.to(tl.int64) * stride_pn + row + tl.arange(0, BLOCK_M)
                tl.store(partial_ptrs, inner, mask=row_mask)
            expert, n_tile, row, count, slots = expert1, n_tile1, row1, count1, slots1
            expert1, n_tile1, row1, count1, expert2 = expert2, n_tile2, row2, count2, expert3
