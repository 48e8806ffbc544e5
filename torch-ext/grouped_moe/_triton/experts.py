"""The two fused grouped GEMMs of experts: up-projection with activation, and its backward counterpart.

Rows are read at the token of their slot (the experts block), or with TOP_K == 0 in place (the grouped MLP); scales and
weights lie accordingly.
"""

import triton
import triton.language as tl

from .activation import activate, activate_grad, clamp_gate, glu, glu_grad
from .tiles import (
    add_bias,
    column_halves,
    dot_tile,
    find_tile,
    load_scales,
    load_weights,
    num_row_tiles,
    source_rows,
    store_columns,
    tile_ptrs,
    tile_rows,
)


@triton.jit
def split_pairs(pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_M, 2 BLOCK_N) columns in turn of gate and up -> both."""
    return tl.split(tl.reshape(pairs, (BLOCK_M, BLOCK_N, 2)))


@triton.jit
def scale_rows(value, scales):
    """value times one factor per row, or value itself without scales."""
    if scales is None:
        return value
    else:
        return scales[:, None] * value


@triton.jit
def load_gate_up(
    ptr, first_row, row_mask, first_column, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Gate and up of one tile of an (rows, 2 N) tensor, in fp32."""
    if INTERLEAVED:
        ptrs = tile_ptrs(ptr, first_row, 2 * first_column, 2 * N, BLOCK_M, 2 * BLOCK_N)
        inside = 2 * first_column + tl.arange(0, 2 * BLOCK_N) < 2 * N
        pairs = tl.load(ptrs, mask=row_mask[:, None] & inside[None, :], other=0.0)
        gate, up = split_pairs(pairs.to(tl.float32), BLOCK_M, BLOCK_N)
    else:
        ptrs = tile_ptrs(ptr, first_row, first_column, 2 * N, BLOCK_M, BLOCK_N)
        inside = first_column + tl.arange(0, BLOCK_N) < N
        gate = tl.load(ptrs, mask=row_mask[:, None] & inside[None, :], other=0.0).to(tl.float32)
        up = tl.load(ptrs + N, mask=row_mask[:, None] & inside[None, :], other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def store_gate_up(
    ptr, gate, up, first_row, row_mask, first_column, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Stores gate and up of one tile to an (rows, 2 N) tensor."""
    if INTERLEAVED:
        pairs = tl.interleave(gate, up)
        store_columns(ptr, pairs, first_row, row_mask, 2 * first_column, 2 * N, BLOCK_M, 2 * BLOCK_N)
    else:
        ptrs = tile_ptrs(ptr, first_row, first_column, 2 * N, BLOCK_M, BLOCK_N)
        inside = first_column + tl.arange(0, BLOCK_N) < N
        tl.store(ptrs, gate.to(ptr.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])
        tl.store(ptrs + N, up.to(ptr.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])


@triton.jit
def pair_epilogue(
    gate, up, bias_ptr, stride_bn, preact_ptr, act_ptr, scales, first_row, row_mask, first_column, N: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the bias and stores pre-activation [gate | up] and activation of BLOCK_N columns of an up-projection."""
    gate = add_bias(gate, bias_ptr, stride_bn, first_column, None, N, BLOCK_N)
    up_bias_ptr = bias_ptr + tl.cast(N, tl.int64) * stride_bn if bias_ptr is not None else None
    up = add_bias(up, up_bias_ptr, stride_bn, first_column, None, N, BLOCK_N)
    if preact_ptr is not None:
        store_gate_up(preact_ptr, gate, up, first_row, row_mask, first_column, N, BLOCK_M, BLOCK_N, False)
    if act_ptr is not None:
        value = scale_rows(glu(gate, up, ACTIVATION, ALPHA, LIMIT, UP_OFFSET), scales)
        store_columns(act_ptr, value, first_row, row_mask, first_column, N, BLOCK_M, BLOCK_N)


@triton.jit
def wide_epilogue(
    preact, bias_ptr, stride_bn, preact_ptr, act_ptr, scales, first_row, row_mask, first_column,
    N: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same for a pre-activation whose columns are gate and up in turn or, not GATED, one per output column."""
    WIDTH: tl.constexpr = 2 if GATED else 1
    wide_column = WIDTH * first_column
    preact = add_bias(preact, bias_ptr, stride_bn, wide_column, None, WIDTH * N, WIDTH * BLOCK_N)
    if preact_ptr is not None:
        store_columns(preact_ptr, preact, first_row, row_mask, wide_column, WIDTH * N, BLOCK_M, WIDTH * BLOCK_N)
    if act_ptr is not None:
        if GATED:
            gate, up = split_pairs(preact, BLOCK_M, BLOCK_N)
            value = glu(gate, up, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
        else:
            value = activate(clamp_gate(preact, LIMIT), ACTIVATION, ALPHA)
        store_columns(act_ptr, scale_rows(value, scales), first_row, row_mask, first_column, N, BLOCK_M, BLOCK_N)


@triton.jit
def down_dgrad_epilogue(
    grad, weights, preact_ptr, dpreact_ptr, scaled_act_ptr, first_row, row_mask, first_column, N: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Stores dpreact and the weighted activation of BLOCK_N columns; returns <grad, activation> per row."""
    inside = first_column + tl.arange(0, BLOCK_N) < N
    if GATED:
        gate, up = load_gate_up(preact_ptr, first_row, row_mask, first_column, N, BLOCK_M, BLOCK_N, INTERLEAVED)
        value, d_gate, d_up = glu_grad(gate, up, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
        if dpreact_ptr is not None:
            weighted = scale_rows(grad, weights)
            d_gate *= weighted
            d_up *= weighted
            store_gate_up(
                dpreact_ptr, d_gate, d_up, first_row, row_mask, first_column, N, BLOCK_M, BLOCK_N, INTERLEAVED
            )
    else:
        ptrs = tile_ptrs(preact_ptr, first_row, first_column, N, BLOCK_M, BLOCK_N)
        preact = tl.load(ptrs, mask=row_mask[:, None] & inside[None, :], other=0.0).to(tl.float32)
        clamped = clamp_gate(preact, LIMIT)
        value = activate(clamped, ACTIVATION, ALPHA)
        if dpreact_ptr is not None:
            d_act = scale_rows(grad, weights) * activate_grad(clamped, ACTIVATION, ALPHA)
            if LIMIT is not None:
                d_act = tl.where(preact > LIMIT, 0.0, d_act)
            store_columns(dpreact_ptr, d_act, first_row, row_mask, first_column, N, BLOCK_M, BLOCK_N)
    if scaled_act_ptr is not None:
        store_columns(
            scaled_act_ptr, scale_rows(value, weights), first_row, row_mask, first_column, N, BLOCK_M, BLOCK_N
        )
    return tl.sum(tl.where(inside[None, :], grad * value, 0.0), 1)


@triton.jit
def up_proj_kernel(
    x_ptr, stride_xt, stride_xk,  # (T, K)
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, 2 N or N, K) by strides
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

    Grid: (programs,), persistent. The caller guarantees a schedule made for BLOCK_M; rows past R are not written.
    """
    NUM_N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_tiles = num_row_tiles(schedule_ptr, NUM_EXPERTS) * NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, m_tile, n_tile = find_tile(tile, schedule_ptr, NUM_EXPERTS, NUM_N_TILES, GROUP_M)
        first_row, rows, row_mask = tile_rows(expert, m_tile, schedule_ptr, BLOCK_M)
        tokens = source_rows(rows, row_to_slot_ptr, TOP_K)
        k = tl.arange(0, BLOCK_K).to(tl.int64)
        x_ptrs = x_ptr + tokens[:, None] * stride_xt + k[None, :] * stride_xk
        w_ptrs = w_ptr + expert.to(tl.int64) * stride_we + k[:, None] * stride_wk
        expert_bias_ptr = bias_ptr + expert.to(tl.int64) * stride_be if bias_ptr is not None else None
        columns = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = columns < N
        scales = load_scales(scales_ptr, rows) if scales_ptr is not None else None
        if GATED and not INTERLEAVED:
            gate_ptrs = w_ptrs + columns.to(tl.int64)[None, :] * stride_wn
            up_ptrs = gate_ptrs + tl.cast(N, tl.int64) * stride_wn
            gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(0, K, BLOCK_K):
                if K % BLOCK_K == 0:
                    x = tl.load(x_ptrs)
                else:
                    x = tl.load(x_ptrs, mask=(k < K - start)[None, :], other=0.0)
                w_gate = load_weights(gate_ptrs, k < K - start, n_mask, K % BLOCK_K == 0, N % BLOCK_N == 0)
                w_up = load_weights(up_ptrs, k < K - start, n_mask, K % BLOCK_K == 0, N % BLOCK_N == 0)
                gate = tl.dot(x, w_gate, gate, input_precision=PRECISION)
                up = tl.dot(x, w_up, up, input_precision=PRECISION)
                x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
                gate_ptrs += tl.cast(stride_wk, tl.int64) * BLOCK_K
                up_ptrs += tl.cast(stride_wk, tl.int64) * BLOCK_K
            gate_left, gate_right = column_halves(gate, BLOCK_M, BLOCK_N)
            up_left, up_right = column_halves(up, BLOCK_M, BLOCK_N)
            pair_epilogue(
                gate_left, up_left, expert_bias_ptr, stride_bn, preact_ptr, act_ptr, scales, first_row, row_mask,
                n_tile * BLOCK_N, N,
                ACTIVATION, ALPHA, LIMIT, UP_OFFSET, BLOCK_M, BLOCK_N // 2,
            )  # fmt: skip
            pair_epilogue(
                gate_right, up_right, expert_bias_ptr, stride_bn, preact_ptr, act_ptr, scales, first_row, row_mask,
                n_tile * BLOCK_N + BLOCK_N // 2, N,
                ACTIVATION, ALPHA, LIMIT, UP_OFFSET, BLOCK_M, BLOCK_N // 2,
            )  # fmt: skip
        else:
            # One GEMM of WIDTH columns per output column: gate and up in turn, or the one column itself.
            WIDTH: tl.constexpr = 2 if GATED else 1
            wide_columns = WIDTH * n_tile * BLOCK_N + tl.arange(0, WIDTH * BLOCK_N)
            wide_mask = wide_columns < WIDTH * N
            w_ptrs += wide_columns.to(tl.int64)[None, :] * stride_wn
            preact = dot_tile(
                x_ptrs, stride_xk, w_ptrs, stride_wk, wide_mask,
                WIDTH * N, K, BLOCK_M, WIDTH * BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
            left, right = column_halves(preact, BLOCK_M, WIDTH * BLOCK_N)
            wide_epilogue(
                left, expert_bias_ptr, stride_bn, preact_ptr, act_ptr, scales, first_row, row_mask, n_tile * BLOCK_N, N,
                GATED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, BLOCK_M, BLOCK_N // 2,
            )  # fmt: skip
            wide_epilogue(
                right, expert_bias_ptr, stride_bn, preact_ptr, act_ptr, scales, first_row, row_mask,
                n_tile * BLOCK_N + BLOCK_N // 2, N,
                GATED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, BLOCK_M, BLOCK_N // 2,
            )  # fmt: skip


@triton.jit(do_not_specialize=["stride_pn"])
def down_dgrad_kernel(
    dout_ptr, stride_dt, stride_dk,  # (T, K) gradient of the output
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, N, K) by strides: N intermediate, K hidden
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
    """With g[r] = dout[token of r] W[e] and the routing weight w[r], from the activation a[r] recomputed out of preact:

    dpreact[r] = w[r] g[r] * a'(preact[r]); scaled_act[r] = w[r] a[r]; partials[n tile, r] = <g[r], a[r]> in the tile.
    Grid: (programs,), persistent. The caller guarantees a schedule made for BLOCK_M; rows past R are not written.
    """
    NUM_N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_tiles = num_row_tiles(schedule_ptr, NUM_EXPERTS) * NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, m_tile, n_tile = find_tile(tile, schedule_ptr, NUM_EXPERTS, NUM_N_TILES, GROUP_M)
        first_row, rows, row_mask = tile_rows(expert, m_tile, schedule_ptr, BLOCK_M)
        slots = rows if TOP_K == 0 else tl.load(row_to_slot_ptr + rows)
        tokens = slots.to(tl.int64) if TOP_K == 0 else (slots // TOP_K).to(tl.int64)
        columns = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = columns < N
        k = tl.arange(0, BLOCK_K).to(tl.int64)
        dout_ptrs = dout_ptr + tokens[:, None] * stride_dt + k[None, :] * stride_dk
        w_ptrs = (
            w_ptr + expert.to(tl.int64) * stride_we + columns.to(tl.int64)[None, :] * stride_wn + k[:, None] * stride_wk
        )
        grad = dot_tile(dout_ptrs, stride_dk, w_ptrs, stride_wk, n_mask, N, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
        weights = load_scales(weights_ptr, slots) if weights_ptr is not None else None
        left, right = column_halves(grad, BLOCK_M, BLOCK_N)
        inner = down_dgrad_epilogue(
            left, weights, preact_ptr, dpreact_ptr, scaled_act_ptr, first_row, row_mask, n_tile * BLOCK_N, N,
            GATED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, BLOCK_M, BLOCK_N // 2, INTERLEAVED,
        )  # fmt: skip
        inner += down_dgrad_epilogue(
            right, weights, preact_ptr, dpreact_ptr, scaled_act_ptr, first_row, row_mask,
            n_tile * BLOCK_N + BLOCK_N // 2, N,
            GATED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, BLOCK_M, BLOCK_N // 2, INTERLEAVED,
        )  # fmt: skip
        if partials_ptr is not None:
            partial_ptrs = partials_ptr + n_tile.to(tl.int64) * stride_pn + first_row + tl.arange(0, BLOCK_M)
            tl.store(partial_ptrs, inner, mask=row_mask)
