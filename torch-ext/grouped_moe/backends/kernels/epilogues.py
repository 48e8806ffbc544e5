"""Epilogues of the two fused grouped GEMMs of experts: the activation or its gradient, and stores."""

import triton
import triton.language as tl

from .activation import act_grad, glu, glu_grad, zero_past
from .tiles import add_bias, column_pieces, load_scales, scale_rows, store_columns, tile_ptrs

# Gate and up of a tile travel as two values. If they lie apart, these are (gate, up); otherwise both are the same tile,
# which has gate and up in turn or, without a gate, the columns themselves.


@triton.jit
def split_pairs(pairs):
    """(rows, 2 columns), gate and up in turn -> (gate, up), (rows, columns) each."""
    return tl.split(tl.reshape(pairs, (pairs.shape[0], pairs.shape[1] // 2, 2)))


@triton.jit
def load_preact(ptr, first_row, row_mask, first_column, OPTIONS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pre-activation, gate and up, of BLOCK_N columns of the activation."""
    N: tl.constexpr = OPTIONS.N
    BLOCK_M: tl.constexpr = row_mask.shape[0]
    if OPTIONS.GATED and not OPTIONS.INTERLEAVED:
        ptrs = tile_ptrs(ptr, first_row, first_column, 2 * N, BLOCK_M, BLOCK_N)
        inside = first_column + tl.arange(0, BLOCK_N) < N
        gate = tl.load(ptrs, mask=row_mask[:, None] & inside[None, :], other=0.0)
        return gate, tl.load(ptrs + N, mask=row_mask[:, None] & inside[None, :], other=0.0)
    else:
        WIDTH: tl.constexpr = 2 if OPTIONS.GATED else 1
        ptrs = tile_ptrs(ptr, first_row, WIDTH * first_column, WIDTH * N, BLOCK_M, WIDTH * BLOCK_N)
        inside = WIDTH * first_column + tl.arange(0, WIDTH * BLOCK_N) < WIDTH * N
        preact = tl.load(ptrs, mask=row_mask[:, None] & inside[None, :], other=0.0)
        return preact, preact


@triton.jit
def store_halves(ptr, gate, up, first_row, row_mask, first_column, N: tl.constexpr):
    """Stores gate and up of one tile to a (rows, 2 N) tensor whose halves they are columns of."""
    ptrs = tile_ptrs(ptr, first_row, first_column, 2 * N, gate.shape[0], gate.shape[1])
    inside = first_column + tl.arange(0, gate.shape[1]) < N
    tl.store(ptrs, gate.to(ptr.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])
    tl.store(ptrs + N, up.to(ptr.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])


@triton.jit
def gemm_epilogue(
    acc, bias_ptr, stride_be, stride_bn, scales_ptr, y_ptr, expert, rows, first_row, row_mask, first_column,
    N: tl.constexpr,
):  # fmt: skip
    """Adds the bias, each row's times its scale, and stores a tile of a (rows, N) tensor.

    bias_ptr: (E, N) or None. scales_ptr: (rows,) or None.
    """
    expert_bias_ptr = bias_ptr + expert.to(tl.int64) * stride_be if bias_ptr is not None else None
    scales = load_scales(scales_ptr, rows) if scales_ptr is not None else None
    halves = column_pieces(acc, 2)
    for i in tl.static_range(2):
        column = first_column + i * (acc.shape[1] // 2)
        half = add_bias(halves[i], expert_bias_ptr, stride_bn, column, scales, N)
        store_columns(y_ptr, half, first_row, row_mask, column, N)


@triton.jit
def preact_epilogue(
    gate, up, bias_ptr, stride_bn, preact_ptr, first_row, row_mask, first_column, OPTIONS: tl.constexpr
):
    """Adds the bias to gate and up, and stores the pre-activation if there is preact_ptr: (gate, up), apart."""
    N: tl.constexpr = OPTIONS.N
    if OPTIONS.GATED and not OPTIONS.INTERLEAVED:
        gate = add_bias(gate, bias_ptr, stride_bn, first_column, None, N)
        up_bias_ptr = bias_ptr + tl.cast(N, tl.int64) * stride_bn if bias_ptr is not None else None
        up = add_bias(up, up_bias_ptr, stride_bn, first_column, None, N)
        if preact_ptr is not None:
            store_halves(preact_ptr, gate, up, first_row, row_mask, first_column, N)
    else:
        WIDTH: tl.constexpr = 2 if OPTIONS.GATED else 1
        gate = add_bias(gate, bias_ptr, stride_bn, WIDTH * first_column, None, WIDTH * N)
        if preact_ptr is not None:
            store_columns(preact_ptr, gate, first_row, row_mask, WIDTH * first_column, WIDTH * N)
        if OPTIONS.GATED:
            gate, up = split_pairs(gate)
    return gate, up


@triton.jit
def up_epilogue(
    gate, up, bias_ptr, stride_bn, preact_ptr, act_ptr, scales, first_row, row_mask, first_column,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Adds the bias to gate and up, and stores the pre-activation and the activation.

    preact_ptr, act_ptr: None for what is not stored. scales: factors of the activation's rows, or None.
    """
    HALF: tl.constexpr = gate.shape[1] // (4 if OPTIONS.INTERLEAVED else 2)  # columns of the activation
    gates, ups = column_pieces(gate, 2), column_pieces(up, 2)
    for i in tl.static_range(2):
        column = first_column + i * HALF
        gate, up = preact_epilogue(
            gates[i], ups[i], bias_ptr, stride_bn, preact_ptr, first_row, row_mask, column, OPTIONS
        )
        if act_ptr is not None:
            value = scale_rows(glu(gate, up, OPTIONS), scales)
            store_columns(act_ptr, value, first_row, row_mask, column, OPTIONS.N)


@triton.jit
def down_dgrad_epilogue(
    grad, gate, up, weights, dpreact_ptr, scaled_act_ptr, first_row, row_mask, first_column,
    OPTIONS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores dpreact and the weighted activation, and returns <grad, activation> per row.

    gate, up: the pre-activation. dpreact_ptr, scaled_act_ptr: None for what is not stored.
    """
    N: tl.constexpr = OPTIONS.N
    inside = first_column + tl.arange(0, BLOCK_N) < N
    if OPTIONS.GATED:
        if OPTIONS.INTERLEAVED:
            gate, up = split_pairs(gate)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        value, d_gate, d_up = glu_grad(gate, up, OPTIONS)
        if dpreact_ptr is not None:
            weighted = scale_rows(grad, weights)
            d_gate *= weighted
            d_up *= weighted
            if OPTIONS.INTERLEAVED:
                pairs = tl.interleave(d_gate.to(dpreact_ptr.dtype.element_ty), d_up.to(dpreact_ptr.dtype.element_ty))
                store_columns(dpreact_ptr, pairs, first_row, row_mask, 2 * first_column, 2 * N)
            else:
                store_halves(dpreact_ptr, d_gate, d_up, first_row, row_mask, first_column, N)
    else:
        preact = gate.to(tl.float32)
        value, d_act = act_grad(preact, OPTIONS)
        if dpreact_ptr is not None:
            d_preact = zero_past(d_act * scale_rows(grad, weights), preact, OPTIONS)
            store_columns(dpreact_ptr, d_preact, first_row, row_mask, first_column, N)
    if scaled_act_ptr is not None:
        store_columns(scaled_act_ptr, scale_rows(value, weights), first_row, row_mask, first_column, N)
    products = grad * value if N % BLOCK_N == 0 else tl.where(inside[None, :], grad * value, 0.0)
    return tl.sum(products, 1)
