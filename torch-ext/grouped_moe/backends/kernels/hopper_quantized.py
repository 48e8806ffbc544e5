"""Grouped GEMMs of 8-bit rows with 8-bit weights for Hopper in Gluon, scaled by blocks of 128 along K.

The tensor cores add up one step, 128 wide, which has one scale for each row and one for each 128 columns; its sums then
enter an fp32 accumulator times both scales. So DeepSeek-V3 promotes sums of FP8 products (DeepSeek-AI, 2024,
"DeepSeek-V3 Technical Report", section 3.3.2). Two consumer warp groups share each tile, half of its rows each: one
multiplies while the other one promotes. A tile has 256 columns in two halves that have scales of their own: neighbours,
or gate and up.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .activation import Options, glu
from .block_scaled import widen_scales
from .dependent import wait_for_stream
from .hopper import Tokens, allocate_barriers, ragged_coordinates, tma_store, write_staging
from .hopper_gemm import Output
from .hopper_pipeline import Bias, Schedule, Tile, Zeros, allocate_zeros, find_tile, produce
from .hopper_ring import Product, Ring, allocate_ring, next_slot, num_steps
from .hopper_up_proj import load_tokens, produce_gathered, store_piece
from .quantize import scale_of
from .tiles import Tiling, column_pieces, load_bias, load_scales, num_row_tiles

HALF = gl.constexpr(128)  # columns of half a tile: those of a weight's scale


class Scales(NamedTuple):
    """The scales of rows, (rows, blocks of K), contiguous, and of weights, (E, blocks of N, blocks of K), by strides.

    row_to_slot_ptr: as `Tokens` has it, or None for rows in place.
    """

    x_ptr: gl.tensor
    row_to_slot_ptr: object
    w_ptr: gl.tensor
    stride_e: gl.tensor
    stride_n: gl.tensor
    stride_k: gl.tensor


class TileScales(NamedTuple):
    """Pointers to the scales of a tile's first step: of rows, and of the left and the right half of its columns."""

    rows: gl.tensor
    left: gl.tensor
    right: gl.tensor


@gluon.jit
def locate_scales(scales, tile, source, BLOCKS: gl.constexpr, RIGHT: gl.constexpr, K_BLOCKS: gl.constexpr):
    """The scales of a tile. source: the rows of x that it multiplies. BLOCKS, K_BLOCKS: of weights along N and K.

    RIGHT: blocks from the left half to the right one; 1: these are neighbours, and the last tile may have but one.
    """
    left_block = tile.n_tile * (2 if RIGHT == 1 else 1)
    right_block = gl.minimum(left_block + RIGHT, BLOCKS - 1)
    w_ptr = scales.w_ptr + tile.expert.to(gl.int64) * scales.stride_e
    rows = scales.x_ptr + source.to(gl.int64) * K_BLOCKS
    return TileScales(rows, w_ptr + left_block * scales.stride_n, w_ptr + right_block * scales.stride_n)


@gluon.jit
def multiply_step(sums, ring, slot, FIRST_ROW: gl.constexpr, FIRST_COLUMN: gl.constexpr):
    """x @ w of a step, for half of the rows and half of the columns of a tile; waits for it.

    sums: of the step before, whose registers are written. Not to name them lets the compiler keep both, and spill.
    """
    ROWS: gl.constexpr = sums.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    x = ring.lhs.index(slot).slice(FIRST_ROW, ROWS)
    w = ring.rhs.index(slot).reshape([2 * HALF, BLOCK_K]).slice(FIRST_COLUMN, HALF).permute((1, 0))
    sums = warpgroup_mma(x, w, sums, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(sums,))


@gluon.jit
def load_step_scales(scales, stride_k, k):
    """The scales of step k: of rows, of the left half and of the right half of the columns."""
    return (
        gl.load(scales.rows + k), widen_scales(gl.load(scales.left + k * stride_k)),
        widen_scales(gl.load(scales.right + k * stride_k)),
    )  # fmt: skip


@gluon.jit
def multiply_promoted(
    GROUP: gl.constexpr, ring, slot, phase, lead_barrier, lead_phase, scales, stride_k, STEPS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """x @ w over the next STEPS slots for half GROUP of the rows of a tile: (left half, right half, slot, phase).

    scales: TileScales. stride_k: from one block of a weight's K to the next. lead_barrier, lead_phase: as in
    `multiply_half`.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    ROWS: gl.constexpr = ring.lhs.shape[1] // 2
    FIRST_ROW: gl.constexpr = GROUP * ROWS
    left = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    right = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    sums = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    # The scales of a step are loaded in the one before it.
    next_rows, next_left, next_right = load_step_scales(scales, stride_k, 0)
    for k in range(STEPS):
        of_rows, of_left, of_right = next_rows + 0.0, next_left + 0.0, next_right + 0.0
        next_rows, next_left, next_right = load_step_scales(scales, stride_k, gl.minimum(k + 1, STEPS - 1))
        if lead_barrier is not None and GROUP == 1:
            mbarrier.wait(lead_barrier, lead_phase, pred=k == STEPS - STAGES // 2)
        mbarrier.wait(ring.full.index(slot), phase)
        sums = multiply_step(sums, ring, slot, FIRST_ROW, 0)
        left += sums * (of_rows * of_left)[:, None]
        sums = multiply_step(sums, ring, slot, FIRST_ROW, HALF)
        mbarrier.arrive(ring.empty.index(slot), count=1)
        right += sums * (of_rows * of_right)[:, None]
        slot, phase = next_slot(slot, phase, STAGES)
    if lead_barrier is not None and GROUP == 0:
        mbarrier.arrive(lead_barrier, count=1)
    return left, right, slot, phase


@gluon.jit
def consume_promoted(
    GROUP: gl.constexpr, ring, lead_barrier, scales, schedule, TILING: gl.constexpr, PRODUCT: gl.constexpr,
    TOP_K: gl.constexpr, GATED: gl.constexpr, EPILOGUE: gl.constexpr, output, OPTIONS: gl.constexpr,
):  # fmt: skip
    """A consumer warp group, of half GROUP of the rows of each tile; the next tile is located meanwhile.

    lead_barrier: as in `multiply_half`, or None.
    EPILOGUE(left, right, tile, output, OPTIONS) ends a tile, whose row is then the group's first one.
    """
    ROWS: gl.constexpr = ring.lhs.shape[1] // 2
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    STEPS: gl.constexpr = num_steps(PRODUCT.K, 0, BLOCK_K)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 32])
    BLOCKS: gl.constexpr = num_steps(PRODUCT.N // 2, 0, HALF) * 2 if GATED else num_steps(PRODUCT.N, 0, HALF)
    RIGHT: gl.constexpr = BLOCKS // 2 if GATED else 1
    tokens = Tokens(scales.x_ptr, 1, scales.row_to_slot_ptr)
    index = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    step = gl.num_programs(0)
    slot = 0
    phase = 0
    lead_phase = 0
    expert, row, end, n_tile = find_tile(gl.program_id(0), schedule, TILING)
    source = load_tokens(tokens, row + GROUP * ROWS, end, index, TOP_K)
    for number in range(gl.program_id(0), schedule.num_tiles, step):
        tile = Tile(expert + 0, row + GROUP * ROWS, end + 0, n_tile + 0)  # Triton 3.6 does not carry a plain copy
        tile_scales = locate_scales(scales, tile, source, BLOCKS, RIGHT, STEPS)
        expert, row, end, n_tile = find_tile(number + step, schedule, TILING)
        source = load_tokens(tokens, row + GROUP * ROWS, end, index, TOP_K)
        left, right, slot, phase = multiply_promoted(
            GROUP, ring, slot, phase, lead_barrier, lead_phase, tile_scales, scales.stride_k, STEPS, LAYOUT
        )
        lead_phase ^= 1
        EPILOGUE(left, right, tile, output, OPTIONS)
    tma.store_wait(0)


@gluon.jit
def store_half(half, tile, column, output, NUMBER: gl.constexpr, N: gl.constexpr):
    """Stores half of a tile plus its bias, in pieces of as many columns as a staging tile has, from NUMBER on."""
    COLUMNS: gl.constexpr = output.staging.shape[4]
    PIECES: gl.constexpr = HALF // COLUMNS
    layout: gl.constexpr = half.type.layout
    bias = output.bias
    if bias.ptr is not None:
        bias_ptr = bias.ptr + tile.expert.to(gl.int64) * bias.stride_e
        columns = column + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
        added = load_bias(bias_ptr, bias.stride_n, columns, N)[None, :]
        if output.scales_ptr is not None:
            rows = tile.row + gl.arange(0, half.shape[0], layout=gl.SliceLayout(1, layout))
            added = load_scales(output.scales_ptr, gl.minimum(rows, tile.end - 1))[:, None] * added
        half += added
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
    GROUP: gl.constexpr, ring, lead_barrier, scales, schedule, TILING: gl.constexpr, PRODUCT: gl.constexpr, output
):
    """A consumer warp group of a GEMM of rows in place."""
    consume_promoted(
        GROUP, ring, lead_barrier, scales, schedule, TILING, PRODUCT, 0, False, gemm_epilogue, output, PRODUCT.N
    )


@gluon.jit(do_not_specialize=["total_rows"])
def hopper_quantized_gemm_kernel(
    x_desc,  # (rows, K) codes, blocks of (BLOCK_M, BLOCK_K)
    w_desc,  # (E, N, K) codes, blocks of (1, BLOCK_N, BLOCK_K)
    x_scale_ptr,  # (rows, blocks of K), contiguous
    w_scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks of N, blocks of K)
    bias_ptr, stride_be, stride_bn,  # (E, N) or None
    scales_ptr,  # factors of the bias, (rows,), or None
    y_desc,  # (rows, N), out; ragged, blocks of BLOCK_M / 2 rows and some columns
    schedule_ptr,
    total_rows,
    NUM_EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, ZERO_UNGROUPED: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """y[r] = W[e] x[r] + scales[r] bias[e] for the rows r of expert e, of codes times their scales.

    Rows of no expert are set to 0 if ZERO_UNGROUPED, else not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, four warps, and blocks of scales of 128 x 128.
    """
    wait_for_stream()
    NUM_N_TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILING: gl.constexpr = Tiling(NUM_EXPERTS, NUM_N_TILES, BLOCK_M, GROUP_M)
    PRODUCT: gl.constexpr = Product(N, K, 0, False, BLOCK_N)
    gl.static_assert(BLOCK_N == 2 * HALF and BLOCK_K == HALF)
    dtype: gl.constexpr = y_desc.dtype
    ring = allocate_ring(x_desc, w_desc, STAGES, 2)
    staging0 = gl.allocate_shared_memory(dtype, [2] + y_desc.block_type.shape, y_desc.layout)
    staging1 = gl.allocate_shared_memory(dtype, [2] + y_desc.block_type.shape, y_desc.layout)
    if num_steps(K, 0, BLOCK_K) > STAGES:  # only where it is waited for: see `allocate_barriers`
        lead_barrier = allocate_barriers(1, 1).index(0)
    else:
        lead_barrier: gl.constexpr = None
    if ZERO_UNGROUPED:
        zeros = Zeros(y_desc, allocate_zeros(y_desc), total_rows)
    else:
        zeros: gl.constexpr = None
    schedule = Schedule(schedule_ptr, num_row_tiles(schedule_ptr, NUM_EXPERTS) * NUM_N_TILES)
    scales = Scales(x_scale_ptr, None, w_scale_ptr, stride_se, stride_sn, stride_sk)
    bias = Bias(bias_ptr, stride_be, stride_bn)
    output0 = Output(y_desc, staging0, bias, scales_ptr)
    output1 = Output(y_desc, staging1, bias, scales_ptr)
    # Registers of a thread: a consumer's holds 128 sums, and 64 of one step.
    gl.warp_specialize([
        (consume_gemm, (0, ring, lead_barrier, scales, schedule, TILING, PRODUCT, output0)),
        (consume_gemm, (1, ring, lead_barrier, scales, schedule, TILING, PRODUCT, output1)),
        (produce, (x_desc, w_desc, None, None, ring, schedule, zeros, TILING, PRODUCT)),
    ], [4, 1], [232, 40])  # fmt: skip


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
def quantizing_epilogue(gate, up, tile, output, OPTIONS: gl.constexpr):
    """Stores pre-activations as they are, if asked to, and the codes and the scales of the activation."""
    N: gl.constexpr = OPTIONS.N
    layout: gl.constexpr = gate.type.layout
    column = tile.n_tile * HALF
    bias = output.bias
    if bias.ptr is not None:
        bias_ptr = bias.ptr + tile.expert.to(gl.int64) * bias.stride_e
        columns = column + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
        gate += load_bias(bias_ptr, bias.stride_n, columns, N)[None, :]
        up_bias_ptr = bias_ptr + gl.to_tensor(N).to(gl.int64) * bias.stride_n
        up += load_bias(up_bias_ptr, bias.stride_n, columns, N)[None, :]
    if output.gate_desc is not None:
        store_preact(gate, up, tile, column, output)
    if output.act_desc is not None:
        value = glu(gate, up, OPTIONS)
        rows = tile.row + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, layout))
        if output.scales_ptr is not None:
            value = value * load_scales(output.scales_ptr, gl.minimum(rows, tile.end - 1))[:, None]
        scale = scale_of(gl.max(gl.abs(value), axis=1))
        tma.store_wait(0)  # until the earlier store has read the staging tile
        write_staging(value * (1.0 / scale)[:, None], output.act_staging)
        tma_store(output.act_desc, ragged_coordinates(tile.row, tile.end, column), output.act_staging)
        scale_ptrs = output.act_scale_ptr + rows.to(gl.int64) * ((N + HALF - 1) // HALF) + tile.n_tile
        gl.store(scale_ptrs, scale, mask=rows < tile.end)


@gluon.jit
def consume_up(
    GROUP: gl.constexpr, ring, lead_barrier, scales, schedule, TILING: gl.constexpr, PRODUCT: gl.constexpr,
    TOP_K: gl.constexpr, output, OPTIONS: gl.constexpr,
):  # fmt: skip
    """A consumer warp group of an up-projection."""
    consume_promoted(
        GROUP, ring, lead_barrier, scales, schedule, TILING, PRODUCT, TOP_K, True, quantizing_epilogue, output, OPTIONS
    )


@gluon.jit
def hopper_quantized_up_proj_kernel(
    x_ptr, unit_stride,  # (T, K) codes, columns contiguous, read at the token of a row; steps of 16 bytes
    w_desc,  # (E, 2, N, K) codes, blocks of gate and up: (1, 2, BLOCK_N / 2, BLOCK_K)
    x_scale_ptr,  # (T, blocks of K), contiguous
    w_scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks of N of gate and of up, blocks of K)
    bias_ptr, stride_be, stride_bn,  # (E, 2 N) or None
    gate_desc, up_desc,  # (rows, N) each, the halves of preact, or None, out
    act_desc, act_scale_ptr,  # (rows, N) codes, and (rows, blocks of N), contiguous, or None, out
    scales_ptr,  # (rows,) or None
    row_to_slot_ptr,  # (rows,) int32, or None if TOP_K is 0
    schedule_ptr,
    NUM_EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr,
    GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, UP_OFFSET: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """preact[r] = W[e] x[token of r] + bias[e], of codes times their scales; act[r] = scales[r] activation(preact[r]).

    act, from the unrounded preact, is quantized: its scale is the largest magnitude of 128 columns over 448. What is
    written by descriptor is so in blocks of BLOCK_M / 2 rows. Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, four warps, [gate | up], and blocks of scales of 128 x 128.
    """
    wait_for_stream()
    NUM_N_TILES: gl.constexpr = (2 * N + BLOCK_N - 1) // BLOCK_N
    TILING: gl.constexpr = Tiling(NUM_EXPERTS, NUM_N_TILES, BLOCK_M, GROUP_M)
    PRODUCT: gl.constexpr = Product(2 * N, K, 0, False, BLOCK_N)
    OPTIONS: gl.constexpr = Options(N, GATED, INTERLEAVED, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
    gl.static_assert(GATED and not INTERLEAVED and BLOCK_N == 2 * HALF and BLOCK_K == HALF)
    lhs_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], w_desc.dtype)
    lhs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], lhs_layout)
    rhs = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    # A slot is full after the arrivals of the load of weights and of the warps that copy.
    ring = Ring(lhs, rhs, full=allocate_barriers(STAGES, 2), empty=allocate_barriers(STAGES, 2))
    if act_desc is not None:
        act_shape: gl.constexpr = act_desc.block_type.shape
        act_staging0 = gl.allocate_shared_memory(act_desc.dtype, act_shape, act_desc.layout)
        act_staging1 = gl.allocate_shared_memory(act_desc.dtype, act_shape, act_desc.layout)
    else:
        act_staging0: gl.constexpr = None
        act_staging1: gl.constexpr = None
    if gate_desc is not None:
        shape: gl.constexpr = [2] + gate_desc.block_type.shape
        preact_staging0 = gl.allocate_shared_memory(gate_desc.dtype, shape, gate_desc.layout)
        preact_staging1 = gl.allocate_shared_memory(gate_desc.dtype, shape, gate_desc.layout)
    else:
        preact_staging0: gl.constexpr = None
        preact_staging1: gl.constexpr = None
    if num_steps(K, 0, BLOCK_K) > STAGES:  # only where it is waited for: see `allocate_barriers`
        lead_barrier = allocate_barriers(1, 1).index(0)
    else:
        lead_barrier: gl.constexpr = None
    schedule = Schedule(schedule_ptr, num_row_tiles(schedule_ptr, NUM_EXPERTS) * NUM_N_TILES)
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
        (produce_gathered, (tokens, w_desc, None, None, ring, schedule, TILING, PRODUCT, TOP_K, 1)),
    ], [4, 4], [224, 56])  # fmt: skip
