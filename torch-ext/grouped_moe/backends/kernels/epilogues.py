"""Epilogues of the two fused grouped GEMMs of experts: the activation or its gradient, and stores."""

import triton
import triton.language as tl

from .activation import act, act_grad, glu, glu_grad, zero_past
from .tiles import add_bias, scale_rows, store_columns, tile_ptrs


@triton.jit
def split_pairs(pairs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_M, 2 BLOCK_N), columns of gate and up in turn -> (gate, up), (BLOCK_M, BLOCK_N) each."""
    return tl.split(tl.reshape(pairs, (BLOCK_M, BLOCK_N, 2)))


@triton.jit
def load_preact(
    ptr, first_row, row_mask, first_column, N: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The pre-activation of BLOCK_N columns of the activation, as `down_dgrad_epilogue` takes it.

    (gate, up) if they lie apart. Otherwise twice the same tile: gate and up in turn, or the columns without a gate.
    """
    if GATED and not INTERLEAVED:
        ptrs = tile_ptrs(ptr, first_row, first_column, 2 * N, BLOCK_M, BLOCK_N)
        inside = first_column + tl.arange(0, BLOCK_N) < N
        gate = tl.load(ptrs, mask=row_mask[:, None] & inside[None, :], other=0.0)
        return gate, tl.load(ptrs + N, mask=row_mask[:, None] & inside[None, :], other=0.0)
    else:
        WIDTH: tl.constexpr = 2 if GATED else 1
        ptrs = tile_ptrs(ptr, first_row, WIDTH * first_column, WIDTH * N, BLOCK_M, WIDTH * BLOCK_N)
        inside = WIDTH * first_column + tl.arange(0, WIDTH * BLOCK_N) < WIDTH * N
        preact = tl.load(ptrs, mask=row_mask[:, None] & inside[None, :], other=0.0)
        return preact, preact


@triton.jit
def store_gate_up(
    ptr, gate, up, first_row, row_mask, first_column, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Stores gate and up of one tile to a (rows, 2 N) tensor."""
    if INTERLEAVED:
        pairs = tl.interleave(gate.to(ptr.dtype.element_ty), up.to(ptr.dtype.element_ty))
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
    """Adds the bias to BLOCK_N columns of gate and of up, and stores the pre-activation [gate | up] and the activation.

    preact_ptr, act_ptr: None for what is not stored. scales: factors of the activation's rows, or None.
    """
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
    """`pair_epilogue` for a pre-activation of gate and up in turn or, not GATED, of one column per output column."""
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
            value = act(preact, ACTIVATION, ALPHA, LIMIT)
        store_columns(act_ptr, scale_rows(value, scales), first_row, row_mask, first_column, N, BLOCK_M, BLOCK_N)


@triton.jit
def down_dgrad_epilogue(
    grad, gate, up, weights, dpreact_ptr, scaled_act_ptr, first_row, row_mask, first_column, N: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores dpreact and the weighted activation of BLOCK_N columns, and returns <grad, activation> per row.

    gate, up: as `load_preact` returns them. dpreact_ptr, scaled_act_ptr: None for what is not stored.
    """
    inside = first_column + tl.arange(0, BLOCK_N) < N
    if GATED:
        if INTERLEAVED:
            gate, up = split_pairs(gate, BLOCK_M, BLOCK_N)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        value, d_gate, d_up = glu_grad(gate, up, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
        if dpreact_ptr is not None:
            weighted = scale_rows(grad, weights)
            d_gate *= weighted
            d_up *= weighted
            store_gate_up(
                dpreact_ptr, d_gate, d_up, first_row, row_mask, first_column, N, BLOCK_M, BLOCK_N, INTERLEAVED
            )
    else:
        preact = gate.to(tl.float32)
        value, d_act = act_grad(preact, ACTIVATION, ALPHA, LIMIT)
        if dpreact_ptr is not None:
            d_preact = zero_past(d_act * scale_rows(grad, weights), preact, LIMIT)
            store_columns(dpreact_ptr, d_preact, first_row, row_mask, first_column, N, BLOCK_M, BLOCK_N)
    if scaled_act_ptr is not None:
        store_columns(
            scaled_act_ptr, scale_rows(value, weights), first_row, row_mask, first_column, N, BLOCK_M, BLOCK_N
        )
    products = grad * value if N % BLOCK_N == 0 else tl.where(inside[None, :], grad * value, 0.0)
    return tl.sum(products, 1)
