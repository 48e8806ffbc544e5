"""Gradients of the pre-activation out of those of the activation, which a product of its own has made."""

import triton
import triton.language as tl

from .activation import act_grad, glu_grad, zero_past
from .dependent import wait_for_stream
from .epilogues import down_dgrad_epilogue, load_preact, split_pairs
from .quantize import BLOCK, quantize
from .tiles import end_of_rows, load_scales, load_slots, scale_rows, store_columns, store_parts, tile_ptrs, tile_rows


@triton.jit
def store_twice(plain_ptr, codes_ptr, scale_ptr, value, first_row, row_mask, first_column, N: tl.constexpr):
    """Stores whole blocks of columns of a (rows, N) tensor as codes and scales, and plain if there is plain_ptr."""
    if plain_ptr is not None:
        store_columns(plain_ptr, value, first_row, row_mask, first_column, N)
    codes, scale = quantize(value)
    store_columns(codes_ptr, codes, first_row, row_mask, first_column, N)
    scale_ptrs = tile_ptrs(scale_ptr, first_row, first_column // BLOCK, N // BLOCK, scale.shape[0], scale.shape[1])
    tl.store(scale_ptrs, scale, mask=row_mask[:, None])


@triton.jit
def quantizing_grad_epilogue(
    grad, gate, up, weights, dpreact_ptr, codes_ptr, scale_ptr, act_ptr, first_row, row_mask, first_column,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """`down_dgrad_epilogue` with dpreact also as codes and scales, of columns that are all there."""
    N: tl.constexpr = OPTIONS.N
    weighted = scale_rows(grad, weights)
    if OPTIONS.GATED:
        if OPTIONS.INTERLEAVED:
            gate, up = split_pairs(gate)
        value, d_gate, d_up = glu_grad(gate.to(tl.float32), up.to(tl.float32), OPTIONS)
        d_gate *= weighted
        d_up *= weighted
        if OPTIONS.INTERLEAVED:
            pairs = tl.interleave(d_gate, d_up)
            store_twice(dpreact_ptr, codes_ptr, scale_ptr, pairs, first_row, row_mask, 2 * first_column, 2 * N)
        else:
            store_twice(dpreact_ptr, codes_ptr, scale_ptr, d_gate, first_row, row_mask, first_column, 2 * N)
            store_twice(dpreact_ptr, codes_ptr, scale_ptr, d_up, first_row, row_mask, N + first_column, 2 * N)
    else:
        preact = gate.to(tl.float32)
        value, d_act = act_grad(preact, OPTIONS)
        d_preact = zero_past(d_act * weighted, preact, OPTIONS)
        store_twice(dpreact_ptr, codes_ptr, scale_ptr, d_preact, first_row, row_mask, first_column, N)
    if act_ptr is not None:
        store_columns(act_ptr, scale_rows(value, weights), first_row, row_mask, first_column, N)
    return tl.sum(grad * value, 1)


@triton.jit(do_not_specialize=["stride_pn"])
def activation_grad_kernel(
    dact_ptr,  # (rows, N)
    weights_ptr,  # (rows,) or, with row_to_slot_ptr, one per slot, or None
    preact_ptr,  # (rows, 2 N or N)
    dpreact_ptr,  # (rows, 2 N or N) or None, out; may be preact_ptr
    codes_ptr, scale_ptr,  # dpreact quantized: as many e4m3, and (rows, blocks of 128 columns) fp32, or None, out
    scaled_act_ptr,  # (rows, N) or None, out
    partials_ptr, stride_pn,  # (n tiles, rows) fp32 or None, out
    row_to_slot_ptr,  # (rows,) int32, or None
    schedule_ptr,
    NUM_EXPERTS: tl.constexpr, OPTIONS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """With the weight w[r] of a row or of its slot, and a[r], the activation recomputed from preact[r]:

    dpreact[r] = w[r] dact[r] * a'(preact[r]); scaled_act[r] = w[r] a[r]; partials[n tile, r] = <dact[r], a[r]> in the
    tile. A scale of dpreact quantized is the largest magnitude of 128 columns over 448. Rows of no expert are neither
    read nor written.
    Grid: (programs,), persistent.
    The caller guarantees contiguous rows and, with codes_ptr, that N is a multiple of BLOCK_N, and this of 128.
    """
    wait_for_stream()
    N: tl.constexpr = OPTIONS.N
    NUM_N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    begin, end = tl.load(schedule_ptr), end_of_rows(schedule_ptr, NUM_EXPERTS)
    # Tiles of the same rows run at the same time, so that all of a row is read at once.
    for tile in range(tl.program_id(0), tl.cdiv(end - begin, BLOCK_M) * NUM_N_TILES, tl.num_programs(0)):
        row, n_tile = begin + tile // NUM_N_TILES * BLOCK_M, tile % NUM_N_TILES
        column = n_tile * BLOCK_N
        rows, row_mask = tile_rows(row, end - row, BLOCK_M)
        inside = column + tl.arange(0, BLOCK_N) < N
        dact_ptrs = tile_ptrs(dact_ptr, row, column, N, BLOCK_M, BLOCK_N)
        grad = tl.load(dact_ptrs, mask=row_mask[:, None] & inside[None, :], other=0.0)
        gate, up = load_preact(preact_ptr, row, row_mask, column, OPTIONS, BLOCK_N)
        weights = None
        if weights_ptr is not None:
            weights = load_scales(weights_ptr, load_slots(row_to_slot_ptr, rows))
        grad = grad.to(tl.float32)
        if codes_ptr is not None:
            tl.static_assert(N % BLOCK_N == 0, "gate and up share blocks of dpreact")
            inner = quantizing_grad_epilogue(
                grad, gate, up, weights, dpreact_ptr, codes_ptr, scale_ptr, scaled_act_ptr, row, row_mask, column,
                OPTIONS,
            )  # fmt: skip
        else:
            inner = down_dgrad_epilogue(
                grad, gate, up, weights, dpreact_ptr, scaled_act_ptr, row, row_mask, column, OPTIONS, BLOCK_N
            )
        store_parts(partials_ptr, stride_pn, inner, n_tile, row, row_mask)
