"""The up-projection of 8-bit rows with 8-bit weights, for any GPU whose tensor cores multiply e4m3.

The sums of 128 columns of K, a block of both scales, or of a half of it enter the accumulator times these scales
(`.block_scaled`).
"""

import triton
import triton.language as tl

from .activation import glu
from .block_scaled import ScaledWeights, dot_scaled
from .dependent import wait_for_stream
from .epilogues import preact_epilogue
from .low_rank import LowRank, add_low_rank
from .products import locate_rows
from .quantize import BLOCK, row_scale_ptrs, scale_of
from .tiles import (
    column_pieces,
    find_tile,
    load_scales,
    num_row_tiles,
    scale_rows,
    source_rows,
    store_columns,
    tile_ptrs,
)


@triton.jit
def quantized_up_proj_kernel(
    x_ptr,  # (T, K) codes, contiguous
    x_scale_ptr,  # (T, blocks of K), contiguous
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, 2 N or N, K) codes, by strides
    w_scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks along 2 N or N, blocks of K)
    bias_ptr, stride_be, stride_bn,  # (E, 2 N or N) or None
    projected_ptr, factor_ptr,  # the low-rank part, as `.low_rank.LowRank` has it, or None
    preact_ptr,  # (rows, 2 N or N) or None, out
    act_ptr, act_scale_ptr,  # (rows, N) codes and (rows, blocks of N), contiguous, or None, out
    scales_ptr,  # (rows,) or None
    row_to_slot_ptr,  # (rows,) int32, or None if TOP_K is 0
    schedule_ptr,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, TILING: tl.constexpr,
    PRODUCT: tl.constexpr, FACTOR: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """preact[r] = W[e] x[token of r] + bias[e] of codes times their scales; act[r] = scales[r] activation(preact[r]).

    act comes of the unrounded preact, and becomes codes: a scale is the largest magnitude of 128 columns over 448.
    The low-rank part is in W. Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, one part of K, and that BLOCK_K divides its blocks of 128.
    """
    wait_for_stream()
    N: tl.constexpr = OPTIONS.N
    WIDTH: tl.constexpr = 2 if OPTIONS.GATED else 1
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    tl.static_assert(not OPTIONS.INTERLEAVED and BLOCK_N == BLOCK, "gate and up of the columns of one scale lie apart")
    # Gate and up of all columns, beside the sums of a step, would not fit the registers: each piece has a loop over K.
    PIECE: tl.constexpr = BLOCK_N // WIDTH
    HALF: tl.constexpr = PIECE // 2
    w = ScaledWeights(w_ptr, stride_we, stride_wn, stride_wk, w_scale_ptr, stride_se, stride_sn, stride_sk)
    low_rank = LowRank(projected_ptr, factor_ptr)
    num_tiles = num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, n_tile, row, rows, row_mask = find_tile(tile, schedule_ptr, TILING)
        tokens = source_rows(rows, row_to_slot_ptr, TOP_K)
        x = locate_rows(x_ptr, PRODUCT.K, 1, tokens, row_mask, PRODUCT.BLOCK_K)
        x_scale_ptrs = row_scale_ptrs(x_scale_ptr, tokens, PRODUCT.K)
        expert_bias_ptr = bias_ptr + expert.to(tl.int64) * stride_be if bias_ptr is not None else None
        scales = load_scales(scales_ptr, rows) if scales_ptr is not None else None
        largest = tl.zeros((BLOCK_M,), tl.float32)
        # Of the halves of a piece, and of the piece before. Each begins as a tensor of its own: Triton would not carry
        # `earlier` through the loop if it began as the one that it becomes.
        values = (tl.zeros((BLOCK_M, HALF), tl.float32), tl.zeros((BLOCK_M, HALF), tl.float32))
        earlier = (tl.zeros((BLOCK_M, HALF), tl.float32), tl.zeros((BLOCK_M, HALF), tl.float32))
        # Not unrolled: ptxas would mix both loops over K, and spill.
        for i in tl.range(WIDTH):
            earlier = values
            column = n_tile * BLOCK_N + i * PIECE
            # A whole piece past the last column multiplies the last ones again, and is not stored.
            source = tl.minimum(column, N - PIECE) if N % PIECE == 0 and N % BLOCK_N != 0 else column
            gate, up = dot_scaled(x, x_scale_ptrs, w, expert, source, N + source, PIECE, PRODUCT, OPTIONS.GATED)
            gate = add_low_rank(gate, low_rank, expert, rows, row_mask, column, WIDTH * N, FACTOR, PRODUCT)
            if OPTIONS.GATED:
                up = add_low_rank(up, low_rank, expert, rows, row_mask, N + column, 2 * N, FACTOR, PRODUCT)
            gates, ups = column_pieces(gate, 2), column_pieces(up, 2)
            made = ()
            for j in tl.static_range(2):
                column = n_tile * BLOCK_N + i * PIECE + j * HALF
                gate, up = preact_epilogue(
                    gates[j], ups[j], expert_bias_ptr, stride_bn, preact_ptr, row, row_mask, column, OPTIONS
                )
                if act_ptr is not None:
                    value = scale_rows(glu(gate, up, OPTIONS), scales)
                    if N % BLOCK_N != 0:  # what a gate has past its last column is of up
                        value = tl.where((column + tl.arange(0, HALF) < N)[None, :], value, 0.0)
                    largest = tl.maximum(largest, tl.max(tl.abs(value), axis=1))
                    made += (value,)
            if act_ptr is not None:
                values = made
        if act_ptr is not None:
            scale = scale_of(largest)
            halves = earlier + values if OPTIONS.GATED else values
            for i in tl.static_range(2 * WIDTH):
                codes = halves[i] * (1.0 / scale)[:, None]
                store_columns(act_ptr, codes, row, row_mask, n_tile * BLOCK_N + i * HALF, N)
            scale_ptrs = tile_ptrs(act_scale_ptr, row, n_tile, (N + BLOCK - 1) // BLOCK, BLOCK_M, 1)
            tl.store(scale_ptrs, scale[:, None], mask=row_mask[:, None])
