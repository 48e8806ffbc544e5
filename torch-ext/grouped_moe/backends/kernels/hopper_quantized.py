"""Grouped GEMM and up-projection of 8-bit rows with 8-bit weights for Hopper in Gluon (`.hopper_promoted`)."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .activation import glu
from .dependent import wait_for_stream
from .hopper import Tokens, allocate_barriers, allocate_blocks, ragged_coordinates, tma_store, write_staging
from .hopper_gemm import Output
from .hopper_pipeline import Bias, Schedule, Zeros, add_bias, allocate_zeros, produce
from .hopper_promoted import HALF, Scales, consume_promoted
from .hopper_ring import Ranks, Ring, num_steps
from .hopper_transposed import produce_transposed
from .hopper_up_proj import produce_gathered, store_piece
from .quantize import scale_of
from .tiles import column_pieces, load_scales, num_row_tiles


@gluon.jit
def store_half(half, tile, column, output, NUMBER: gl.constexpr, N: gl.constexpr):
    """Stores half of a tile plus its bias, in pieces of as many columns as a staging tile has, from NUMBER on."""
    COLUMNS: gl.constexpr = output.staging.shape[4]
    PIECES: gl.constexpr = HALF // COLUMNS
    half = add_bias(half, output.bias, tile, column, N, scales_ptr=output.scales_ptr)
    pieces = column_pieces(half, PIECES)
    for i in gl.static_range(PIECES):
        store_piece(pieces[i], output.desc, output.staging, tile, column + i * COLUMNS, NUMBER + i)


@gluon.jit
def gemm_epilogue(left, right, tile, output, N: gl.constexpr):
    """Stores both halves."""
    column = tile.n_tile * (2 * HALF)
    store_half(left, tile, column, output, 0, N)
    store_half(right, tile, column + HALF, output, HALF // output.staging.shape[4], N)


@gluon.jit
def consume_gemm(
    GROUP: gl.constexpr, ring, lead_barrier, scales, schedule, TILING: gl.constexpr, PRODUCT: gl.constexpr,
    output,
):  # fmt: skip
    """A consumer warp group of a GEMM of rows in place."""
    consume_promoted(
        GROUP, ring, lead_barrier, scales, schedule, TILING, PRODUCT, 0, False, gemm_epilogue, output, PRODUCT.N
    )


@gluon.jit
def produce_gemm(x_desc, w_desc, ring, landed, schedule, zeros, TILING: gl.constexpr, PRODUCT: gl.constexpr):
    """The producer warps of a GEMM, four that transpose weights or one. landed: for those that do."""
    if PRODUCT.W_KN:
        produce_transposed(x_desc, w_desc, ring, landed, schedule, zeros, TILING, PRODUCT)
    else:
        produce(x_desc, w_desc, ring, schedule, zeros, TILING, PRODUCT)


@gluon.jit(do_not_specialize=["total_rows"])
def hopper_quantized_gemm_kernel(
    x_desc,  # (rows, K) codes, blocks of (BLOCK_M, BLOCK_K)
    w_desc,  # (E, N, K) codes, blocks of (1, BLOCK_N, BLOCK_K), or, W_KN, (E, K, N), blocks of (1, BLOCK_K, BLOCK_N)
    projected_desc, factor_desc,  # the low-rank part, (rows, R) and (E, N, R) or, FACTOR_KN, (E, R, N), or None
    x_scale_ptr,  # (rows, blocks of K), contiguous
    w_scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks of N, blocks of K)
    bias_ptr, stride_be, stride_bn,  # (E, N) or None
    scales_ptr,  # factors of the bias, (rows,), or None
    y_desc,  # (rows, N), out; ragged, blocks of BLOCK_M / 2 rows and some columns
    schedule_ptr,
    total_rows,
    ZERO_UNGROUPED: gl.constexpr, TILING: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """y[r] = W[e] x[r] + F[e] p[r] + scales[r] bias[e] for the rows r of expert e, of codes times their scales.

    p and F: the low-rank part. Rows of no expert are set to 0 if ZERO_UNGROUPED, else not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, four warps, and blocks of scales of 128 x 128.
    """
    wait_for_stream()
    BLOCK_N: gl.constexpr = PRODUCT.BLOCK_N
    BLOCK_K: gl.constexpr = PRODUCT.BLOCK_K
    W_KN: gl.constexpr = PRODUCT.W_KN
    gl.static_assert(BLOCK_N == 2 * HALF and BLOCK_K == HALF)
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, BLOCK_N, BLOCK_K], w_desc.dtype)
    lhs = allocate_blocks(x_desc, STAGES)
    rhs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 1, BLOCK_N, BLOCK_K], w_layout)
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2)
    ring = Ring(lhs, rhs, full, empty, Ranks(projected_desc, factor_desc))
    staging0, staging1 = allocate_blocks(y_desc, 2), allocate_blocks(y_desc, 2)
    if num_steps(PRODUCT.K, 0, BLOCK_K) > STAGES:  # only where it is waited for: see `allocate_barriers`
        lead_barrier = allocate_barriers(1, 1).index(0)
    else:
        lead_barrier: gl.constexpr = None
    if ZERO_UNGROUPED:
        zeros = Zeros(y_desc, allocate_zeros(y_desc), total_rows)
    else:
        zeros: gl.constexpr = None
    schedule = Schedule(schedule_ptr, num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES)
    scales = Scales(x_scale_ptr, None, w_scale_ptr, stride_se, stride_sn, stride_sk)
    bias = Bias(bias_ptr, stride_be, stride_bn)
    output0 = Output(y_desc, staging0, bias, scales_ptr)
    output1 = Output(y_desc, staging1, bias, scales_ptr)
    if W_KN:
        landed = allocate_barriers(STAGES, 1)
    else:
        landed: gl.constexpr = None
    # Registers of a thread: a consumer's holds 128 sums, and 64 of one step. Those of ranks need all that transposing
    # can do without.
    REGISTERS: gl.constexpr = [232, 40] if not W_KN else [216, 72] if PRODUCT.R == 0 else [224, 56]
    gl.warp_specialize([
        (consume_gemm, (0, ring, lead_barrier, scales, schedule, TILING, PRODUCT, output0)),
        (consume_gemm, (1, ring, lead_barrier, scales, schedule, TILING, PRODUCT, output1)),
        (produce_gemm, (x_desc, w_desc, ring, landed, schedule, zeros, TILING, PRODUCT)),
    ], [4, 4 if W_KN else 1], REGISTERS)  # fmt: skip


class QuantizedOutput(NamedTuple):
    """What the epilogue of an up-projection needs. Descriptors are ragged; those of what is not stored are None."""

    gate_desc: object
    up_desc: object
    preact_staging: object  # staging tiles of gate and up
    act_desc: object  # of the activation's codes
    act_staging: object
    act_scale_ptr: object  # (rows, blocks of N)
    bias: Bias
    scales_ptr: object


@gluon.jit
def store_preact(gate, up, tile, column, output):
    """Stores gate and up in pieces of as many columns as their staging tiles have."""
    COLUMNS: gl.constexpr = output.preact_staging.shape[4]
    PIECES: gl.constexpr = gate.shape[1] // COLUMNS
    gates = column_pieces(gate, PIECES)
    ups = column_pieces(up, PIECES)
    for i in gl.static_range(PIECES):
        store_piece(gates[i], output.gate_desc, output.preact_staging, tile, column + i * COLUMNS, 2 * i)
        store_piece(ups[i], output.up_desc, output.preact_staging, tile, column + i * COLUMNS, 2 * i + 1)


@gluon.jit
def store_quantized(gate, up, tile, output, OPTIONS: gl.constexpr):
    """Stores pre-activations as they are, if asked to, and the codes and the scales of the activation."""
    N: gl.constexpr = OPTIONS.N
    column = tile.n_tile * HALF
    gate = add_bias(gate, output.bias, tile, column, N)
    up = add_bias(up, output.bias, tile, column, N, SKIPPED=N)
    if output.gate_desc is not None:
        store_preact(gate, up, tile, column, output)
    if output.act_desc is not None:
        value = glu(gate, up, OPTIONS)
        rows = tile.row + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
        if output.scales_ptr is not None:
            value = value * load_scales(output.scales_ptr, gl.minimum(rows, tile.end - 1))[:, None]
        scale = scale_of(gl.max(gl.abs(value), axis=1))
        tma.store_wait(0)  # until the earlier store has read the staging tile
        write_staging(value * (1.0 / scale)[:, None], output.act_staging)
        tma_store(output.act_desc, ragged_coordinates(tile.row, tile.end, column), output.act_staging)
        scale_ptrs = output.act_scale_ptr + rows.to(gl.int64) * ((N + HALF - 1) // HALF) + tile.n_tile
        gl.store(scale_ptrs, scale, mask=rows < tile.end)


@gluon.jit
def quantizing_epilogue(gate, up, tile, output, OPTIONS: gl.constexpr):
    """`store_quantized`, if a tile has rows in this half.

    The branch keeps the arithmetic behind the arrivals that end the products. Within one block ptxas puts it before
    them, and the other group, which waits for one of them, stands still.
    """
    if tile.row < tile.end:
        store_quantized(gate, up, tile, output, OPTIONS)


@gluon.jit
def consume_up(
    GROUP: gl.constexpr, ring, lead_barrier, scales, schedule, TILING: gl.constexpr, PRODUCT: gl.constexpr,
    TOP_K: gl.constexpr, output, OPTIONS: gl.constexpr,
):  # fmt: skip
    """A consumer warp group of an up-projection."""
    consume_promoted(
        GROUP, ring, lead_barrier, scales, schedule, TILING, PRODUCT, TOP_K, True, quantizing_epilogue, output,
        OPTIONS,
    )  # fmt: skip


@gluon.jit
def hopper_quantized_up_proj_kernel(
    x_ptr, unit_stride,  # (T, K) codes, columns contiguous, read at the token of a row; steps of 16 bytes
    w_desc,  # (E, 2, N, K) codes, blocks of gate and up: (1, 2, BLOCK_N / 2, BLOCK_K)
    projected_desc, factor_desc,  # the low-rank part, (rows, R) and (E, 2, N, R), or None
    x_scale_ptr,  # (T, blocks of K), contiguous
    w_scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks of N of gate and of up, blocks of K)
    bias_ptr, stride_be, stride_bn,  # (E, 2 N) or None
    gate_desc, up_desc,  # (rows, N) each, the halves of preact, or None, out
    act_desc, act_scale_ptr,  # (rows, N) codes, and (rows, blocks of N), contiguous, or None, out
    scales_ptr,  # (rows,) or None
    row_to_slot_ptr,  # (rows,) int32, or None if TOP_K is 0
    schedule_ptr,
    TOP_K: gl.constexpr,
    TILING: gl.constexpr, PRODUCT: gl.constexpr, OPTIONS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """preact[r] = W[e] x[token of r] + F[e] p[r] + bias[e], of codes times their scales.

    act[r] = scales[r] activation(preact[r]), from the unrounded preact, is quantized: its scale is the largest
    magnitude of 128 columns over 448. p and F: the low-rank part. What is written by descriptor is so in blocks of
    BLOCK_M / 2 rows. Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, four warps, [gate | up], and blocks of scales of 128 x 128.
    """
    wait_for_stream()
    BLOCK_M: gl.constexpr = TILING.BLOCK_M
    BLOCK_K: gl.constexpr = PRODUCT.BLOCK_K
    gl.static_assert(OPTIONS.GATED and not OPTIONS.INTERLEAVED and PRODUCT.BLOCK_N == 2 * HALF and BLOCK_K == HALF)
    lhs_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], w_desc.dtype)
    lhs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], lhs_layout)
    rhs = allocate_blocks(w_desc, STAGES)
    # A slot is full after the arrivals of the load of weights and of the warps that copy.
    full, empty = allocate_barriers(STAGES, 2), allocate_barriers(STAGES, 2)
    ring = Ring(lhs, rhs, full, empty, Ranks(projected_desc, factor_desc))
    if act_desc is not None:
        act_shape: gl.constexpr = act_desc.block_type.shape
        act_staging0 = gl.allocate_shared_memory(act_desc.dtype, act_shape, act_desc.layout)
        act_staging1 = gl.allocate_shared_memory(act_desc.dtype, act_shape, act_desc.layout)
    else:
        act_staging0: gl.constexpr = None
        act_staging1: gl.constexpr = None
    if gate_desc is not None:
        preact_staging0, preact_staging1 = allocate_blocks(gate_desc, 2), allocate_blocks(gate_desc, 2)
    else:
        preact_staging0: gl.constexpr = None
        preact_staging1: gl.constexpr = None
    if num_steps(PRODUCT.K, 0, BLOCK_K) > STAGES:  # only where it is waited for: see `allocate_barriers`
        lead_barrier = allocate_barriers(1, 1).index(0)
    else:
        lead_barrier: gl.constexpr = None
    schedule = Schedule(schedule_ptr, num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES)
    scales = Scales(x_scale_ptr, row_to_slot_ptr, w_scale_ptr, stride_se, stride_sn, stride_sk)
    bias = Bias(bias_ptr, stride_be, stride_bn)
    output0 = QuantizedOutput(
        gate_desc, up_desc, preact_staging0, act_desc, act_staging0, act_scale_ptr, bias, scales_ptr
    )
    output1 = QuantizedOutput(
        gate_desc, up_desc, preact_staging1, act_desc, act_staging1, act_scale_ptr, bias, scales_ptr
    )
    tokens = Tokens(x_ptr, unit_stride, row_to_slot_ptr)
    # Registers of a thread: a consumer's holds 128 sums, and 64 of one step.
    gl.warp_specialize([
        (consume_up, (0, ring, lead_barrier, scales, schedule, TILING, PRODUCT, TOP_K, output0, OPTIONS)),
        (consume_up, (1, ring, lead_barrier, scales, schedule, TILING, PRODUCT, TOP_K, output1, OPTIONS)),
        (produce_gathered, (tokens, w_desc, ring, schedule, TILING, PRODUCT, TOP_K, 1)),
    ], [4, 4], [224, 56])  # fmt: skip
