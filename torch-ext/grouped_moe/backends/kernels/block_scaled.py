"""Grouped GEMMs with block-scaled weights: codes are widened in registers, sums of each block scaled in fp32.

The codes are exact in the dtype of the rows, so that the weight is never rounded: what is between two scales of K is
summed up by itself, and enters the accumulator times its scale. That is how DeepSeek-V3 promotes sums of FP8 products
(DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", section 3.3.2).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from .dependent import wait_for_stream
from .epilogues import down_dgrad_epilogue, gemm_epilogue, load_preact, up_epilogue
from .gemm import zero_chunk, zero_rows
from .low_rank import LowRank, add_low_rank
from .products import load_masked, locate_rows
from .quantize import BLOCK, row_scale_ptrs, widen_codes
from .tiles import (
    column_pieces,
    end_of_rows,
    find_tile,
    load_scales,
    load_slots,
    num_row_tiles,
    scale_rows,
    store_parts,
    tokens_of,
)


class ScaledWeights(NamedTuple):
    """Codes (E, N, K) and scales (E, blocks along N, blocks along K), by pointer and strides."""

    ptr: tl.tensor
    stride_e: tl.tensor
    stride_n: tl.tensor
    stride_k: tl.tensor
    scale_ptr: tl.tensor
    stride_se: tl.tensor
    stride_sn: tl.tensor
    stride_sk: tl.tensor


class ScaleBlocks(NamedTuple):
    """Which scale an element of a weight has: compile-time values.

    N_BLOCK, K_BLOCK: extents of the block of a scale. N_PARTS, K_PARTS: equal parts with blocks of their own.
    """

    N_BLOCK: tl.constexpr
    K_BLOCK: tl.constexpr
    N_PARTS: tl.constexpr
    K_PARTS: tl.constexpr


class ScaledProduct(NamedTuple):
    """How products with scaled weights are made: compile-time values.

    N_BLOCK to K_PARTS: as of `ScaleBlocks`. HALVES: 2 if tiles lie in either half of N, gate or up, and start at
    multiples of their width there; else 1.
    """

    N: tl.constexpr
    K: tl.constexpr
    N_BLOCK: tl.constexpr
    K_BLOCK: tl.constexpr
    N_PARTS: tl.constexpr
    K_PARTS: tl.constexpr
    PRECISION: tl.constexpr
    BLOCK_K: tl.constexpr
    HALVES: tl.constexpr


@triton.jit
def widen_scales(scales):
    """Scales in fp32; bytes are the exponents of float8_e8m0fnu: 2^(byte - 127), 255 is NaN."""
    if scales.dtype == tl.uint8:
        power = tl.where(scales == 0, 1 << 22, scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        return tl.where(scales == 255, float("nan"), power)
    else:
        return scales.to(tl.float32)


@triton.jit
def block_of(index, EXTENT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The block of an index below EXTENT."""
    PART: tl.constexpr = EXTENT // PARTS
    if PARTS == 1:
        return index // BLOCK
    else:
        return index // PART * ((PART + BLOCK - 1) // BLOCK) + index % PART // BLOCK


class Columns(NamedTuple):
    """Columns of a product: pointers to their codes at K = 0 and to their first scales, and which ones there are.

    All have one scale where a tile lies within a block (`share_scale`).
    """

    w_ptrs: tl.tensor
    scale_ptrs: tl.tensor
    inside: tl.tensor


@constexpr_function
def share_scale(TILE, EXTENT, BLOCK, PARTS, HALVES=1):
    """Whether tiles of a dimension of so many parts, which start at multiples of TILE in its halves, have one scale."""
    return BLOCK % TILE == 0 and EXTENT // PARTS % TILE == 0 and EXTENT // HALVES % TILE == 0


@triton.jit
def locate_columns(w, expert, first_column, BLOCK_N: tl.constexpr, PRODUCT: tl.constexpr):
    """The BLOCK_N columns of an expert's weights from the first one on."""
    columns = first_column + tl.arange(0, BLOCK_N)
    w_ptrs = w.ptr + expert.to(tl.int64) * w.stride_e + columns.to(tl.int64)[None, :] * w.stride_n
    ONE: tl.constexpr = share_scale(BLOCK_N, PRODUCT.N, PRODUCT.N_BLOCK, PRODUCT.N_PARTS, PRODUCT.HALVES)
    n_block = block_of(first_column if ONE else columns, PRODUCT.N, PRODUCT.N_BLOCK, PRODUCT.N_PARTS)
    scale_ptrs = w.scale_ptr + expert.to(tl.int64) * w.stride_se + n_block.to(tl.int64) * w.stride_sn
    return Columns(w_ptrs, scale_ptrs, columns < PRODUCT.N)


@triton.jit
def load_k_scales(columns, w, start, BLOCK_N: tl.constexpr, PRODUCT: tl.constexpr):
    """The scales of columns at K = start, or their common one; past K, the last ones."""
    k_block = block_of(tl.minimum(start, PRODUCT.K - 1), PRODUCT.K, PRODUCT.K_BLOCK, PRODUCT.K_PARTS)
    ptrs = columns.scale_ptrs + k_block.to(tl.int64) * w.stride_sk
    if share_scale(BLOCK_N, PRODUCT.N, PRODUCT.N_BLOCK, PRODUCT.N_PARTS, PRODUCT.HALVES):
        return widen_scales(tl.load(ptrs))
    else:
        return widen_scales(tl.load(ptrs, mask=columns.inside, other=0))[None, :]


@triton.jit
def load_row_scales(ptrs, start, PRODUCT: tl.constexpr):
    """The scales of rows of codes at K = start, by pointers to their first ones; past K, the last ones."""
    return tl.load(ptrs + tl.minimum(start, PRODUCT.K - 1) // BLOCK)


@triton.jit
def multiply_scaled(x_tile, columns, w, k, k_inside, scales, BLOCK_N: tl.constexpr, PRODUCT: tl.constexpr):
    """One step of a product: x_tile times the codes at k, times the scales."""
    EVEN_K: tl.constexpr = PRODUCT.K // PRODUCT.K_PARTS % PRODUCT.BLOCK_K == 0
    EVEN_N: tl.constexpr = PRODUCT.N // PRODUCT.HALVES % BLOCK_N == 0
    codes = load_masked(columns.w_ptrs + k[:, None] * w.stride_k, k_inside, columns.inside, EVEN_K, EVEN_N)
    sums = tl.dot(x_tile, widen_codes(codes, x_tile.dtype), input_precision=PRODUCT.PRECISION)
    return sums * scales


@triton.jit
def dot_scaled(
    x, x_scale_ptrs, w, expert, first_column, up_column,
    BLOCK_N: tl.constexpr, PRODUCT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """x @ W^T over K for BLOCK_N columns, (BLOCK_M, BLOCK_N) fp32, and, GATED, for those from up_column on.

    x: `TileRows`. x_scale_ptrs: of rows of codes, to their first scales; else None. Not GATED, both results are the
    same. The scales of a step are loaded in the one before it.
    The caller guarantees that no BLOCK_K columns from a multiple of it on, of a part of K, have two scales.
    """
    BLOCK_K: tl.constexpr = PRODUCT.BLOCK_K
    K_PARTS: tl.constexpr = PRODUCT.K_PARTS
    PART: tl.constexpr = PRODUCT.K // K_PARTS
    offsets = tl.arange(0, BLOCK_K)
    columns = locate_columns(w, expert, first_column, BLOCK_N, PRODUCT)
    acc = tl.zeros((x.mask.shape[0], BLOCK_N), tl.float32)
    scales = load_k_scales(columns, w, 0, BLOCK_N, PRODUCT)
    x_scales = load_row_scales(x_scale_ptrs, 0, PRODUCT) if x_scale_ptrs is not None else None
    if GATED:
        up_columns = locate_columns(w, expert, up_column, BLOCK_N, PRODUCT)
        up_acc = tl.zeros((x.mask.shape[0], BLOCK_N), tl.float32)
        up_scales = load_k_scales(up_columns, w, 0, BLOCK_N, PRODUCT)
    for part in tl.static_range(K_PARTS):
        for start in range(part * PART, (part + 1) * PART, BLOCK_K):
            k_inside = offsets < (part + 1) * PART - start
            k = (start + offsets).to(tl.int64)
            next_start = min(start + BLOCK_K, (part + 1) * PART)
            x_ptrs = x.ptrs + tl.cast(start, tl.int64) * x.stride_k
            x_tile = load_masked(x_ptrs, x.mask, k_inside, False, PART % BLOCK_K == 0)
            if x_scale_ptrs is not None:
                next_x_scales = load_row_scales(x_scale_ptrs, next_start, PRODUCT)
            next_scales = load_k_scales(columns, w, next_start, BLOCK_N, PRODUCT)
            acc += multiply_scaled(x_tile, columns, w, k, k_inside, scale_rows(scales, x_scales), BLOCK_N, PRODUCT)
            scales = next_scales
            if GATED:
                next_scales = load_k_scales(up_columns, w, next_start, BLOCK_N, PRODUCT)
                step_scales = scale_rows(up_scales, x_scales)
                up_acc += multiply_scaled(x_tile, up_columns, w, k, k_inside, step_scales, BLOCK_N, PRODUCT)
                up_scales = next_scales
            if x_scale_ptrs is not None:
                x_scales = next_x_scales
    if GATED:
        return acc, up_acc
    else:
        return acc, acc


@triton.jit(do_not_specialize=["total_rows"])
def scaled_gemm_kernel(
    x_ptr, stride_xr, stride_xk,  # (rows, K), or codes, contiguous
    x_scale_ptr,  # (rows, blocks of 128 of K), contiguous, of codes; else None
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, N, K) codes, by strides
    w_scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks along N, blocks along K)
    bias_ptr, stride_be, stride_bn,  # (E, N) or None
    scales_ptr,  # (rows,) or None
    projected_ptr, factor_ptr,  # the low-rank part, as `.low_rank.LowRank` has it, or None
    y_ptr,  # (rows, N), out
    schedule_ptr,
    total_rows,
    ZERO_UNGROUPED: tl.constexpr, BLOCK_N: tl.constexpr,
    TILING: tl.constexpr, PRODUCT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """y[r] = W[e] x[r] + scales[r] bias[e] for the rows r of expert e.

    W: codes times their scales, and the low-rank part. Rows of no expert are set to 0 if ZERO_UNGROUPED, else not
    written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, what `dot_scaled` needs, and of codes that BLOCK_K divides 128.
    """
    wait_for_stream()
    N: tl.constexpr = PRODUCT.N
    K: tl.constexpr = PRODUCT.K
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    w = ScaledWeights(w_ptr, stride_we, stride_wn, stride_wk, w_scale_ptr, stride_se, stride_sn, stride_sk)
    low_rank = LowRank(projected_ptr, factor_ptr)
    num_tiles = num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES
    last_row = end_of_rows(schedule_ptr, TILING.NUM_EXPERTS)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, n_tile, first_row, rows, row_mask = find_tile(tile, schedule_ptr, TILING)
        sources = rows.to(tl.int64)
        column = n_tile * BLOCK_N
        x = locate_rows(x_ptr, stride_xr if x_scale_ptr is None else K, stride_xk, sources, row_mask, PRODUCT.BLOCK_K)
        x_scale_ptrs = row_scale_ptrs(x_scale_ptr, sources, K) if x_scale_ptr is not None else None
        acc, _ = dot_scaled(x, x_scale_ptrs, w, expert, column, column, BLOCK_N, PRODUCT, False)
        acc = add_low_rank(acc, low_rank, expert, rows, row_mask, column, N, FACTOR, PRODUCT)
        gemm_epilogue(
            acc, bias_ptr, stride_be, stride_bn, scales_ptr, y_ptr, expert, rows, first_row, row_mask, column, N
        )
        if ZERO_UNGROUPED:
            zero_chunk(y_ptr, last_row, total_rows, tile, N, BLOCK_M * BLOCK_N)
    if ZERO_UNGROUPED:
        zero_rows(y_ptr, last_row, total_rows, num_tiles, N, BLOCK_M * BLOCK_N)
        first_row = tl.load(schedule_ptr)
        zero_rows(y_ptr, first_row * 0, first_row, 0, N, BLOCK_M * BLOCK_N)


@triton.jit
def scaled_up_proj_kernel(
    x_ptr, stride_xt, stride_xk,  # (T, K)
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, 2 N or N, K) codes, by strides
    w_scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks along 2 N or N, blocks along K)
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

    W: codes times their scales, and the low-rank part. Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, and what `dot_scaled` needs.
    """
    wait_for_stream()
    N: tl.constexpr = OPTIONS.N
    WIDTH: tl.constexpr = 2 if OPTIONS.GATED else 1
    w = ScaledWeights(w_ptr, stride_we, stride_wn, stride_wk, w_scale_ptr, stride_se, stride_sn, stride_sk)
    low_rank = LowRank(projected_ptr, factor_ptr)
    num_tiles = num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, n_tile, row, rows, row_mask = find_tile(tile, schedule_ptr, TILING)
        tokens = tokens_of(load_slots(row_to_slot_ptr, rows), TOP_K)
        x = locate_rows(x_ptr, stride_xt, stride_xk, tokens, row_mask, PRODUCT.BLOCK_K)
        expert_bias_ptr = bias_ptr + expert.to(tl.int64) * stride_be if bias_ptr is not None else None
        scales = load_scales(scales_ptr, rows) if scales_ptr is not None else None
        column = n_tile * BLOCK_N
        if OPTIONS.GATED and not OPTIONS.INTERLEAVED:
            gate, up = dot_scaled(x, None, w, expert, column, N + column, BLOCK_N, PRODUCT, True)
            gate = add_low_rank(gate, low_rank, expert, rows, row_mask, column, 2 * N, FACTOR, PRODUCT)
            up = add_low_rank(up, low_rank, expert, rows, row_mask, N + column, 2 * N, FACTOR, PRODUCT)
        else:
            # One product of WIDTH columns per output column: gate and up in turn, or the one column itself.
            gate, _ = dot_scaled(x, None, w, expert, WIDTH * column, 0, WIDTH * BLOCK_N, PRODUCT, False)
            gate = add_low_rank(gate, low_rank, expert, rows, row_mask, WIDTH * column, WIDTH * N, FACTOR, PRODUCT)
            up = gate
        up_epilogue(gate, up, expert_bias_ptr, stride_bn, preact_ptr, act_ptr, scales, row, row_mask, column, OPTIONS)


@triton.jit(do_not_specialize=["stride_pn"])
def scaled_down_dgrad_kernel(
    dout_ptr, stride_dt, stride_dk,  # (T, K) gradient of the output
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, N, K) codes, by strides: N intermediate, K hidden
    w_scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks along N, blocks along K)
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
    W: codes times their scales, and the low-rank part. Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, and what `dot_scaled` needs.
    """
    wait_for_stream()
    PIECES: tl.constexpr = 2
    PIECE: tl.constexpr = BLOCK_N // PIECES
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    w = ScaledWeights(w_ptr, stride_we, stride_wn, stride_wk, w_scale_ptr, stride_se, stride_sn, stride_sk)
    low_rank = LowRank(projected_ptr, factor_ptr)
    num_tiles = num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, n_tile, row, rows, row_mask = find_tile(tile, schedule_ptr, TILING)
        slots = load_slots(row_to_slot_ptr, rows)
        dout = locate_rows(dout_ptr, stride_dt, stride_dk, tokens_of(slots, TOP_K), row_mask, PRODUCT.BLOCK_K)
        weights = load_scales(weights_ptr, slots) if weights_ptr is not None else None
        column = n_tile * BLOCK_N
        grad, _ = dot_scaled(dout, None, w, expert, column, column, BLOCK_N, PRODUCT, False)
        grads = column_pieces(
            add_low_rank(grad, low_rank, expert, rows, row_mask, column, PRODUCT.N, FACTOR, PRODUCT), PIECES
        )
        inner = tl.zeros((BLOCK_M,), tl.float32)
        for i in tl.static_range(PIECES):
            gate, up = load_preact(preact_ptr, row, row_mask, column + i * PIECE, OPTIONS, PIECE)
            inner += down_dgrad_epilogue(
                grads[i], gate, up, weights, dpreact_ptr, scaled_act_ptr, row, row_mask, column + i * PIECE, OPTIONS,
                PIECE,
            )  # fmt: skip
        store_parts(partials_ptr, stride_pn, inner, n_tile, row, row_mask)
