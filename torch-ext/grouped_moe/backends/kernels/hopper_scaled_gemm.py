"""Grouped GEMM with block-scaled weights for Hopper in Gluon: a warp group widens codes while others multiply.

The matrix instructions take operands of one dtype, and those of 8 bits along K alone. So codes land in slots of their
own, from where they are written, times their scale and rounded to the dtype of the rows, to the ring of `.hopper_ring`.
All else is the GEMM of `.hopper_gemm`, and so are the results: those of the weight made plain.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .block_scaled import block_of, widen_codes, widen_scales
from .dependent import wait_for_stream
from .hopper import allocate_barriers
from .hopper_gemm import consume_gemm
from .hopper_pipeline import Schedule, Zeros, find_tile, produce
from .hopper_ring import Product, WideningRing, next_slot
from .tiles import Tiling, num_row_tiles


class WeightScales(NamedTuple):
    """The scales of weights, (E, blocks of N, blocks of K), by pointer and strides."""

    ptr: gl.tensor
    stride_e: gl.tensor
    stride_n: gl.tensor
    stride_k: gl.tensor


class Blocks(NamedTuple):
    """The extents of the block of a scale, and the parts of K that have blocks of their own: compile-time values."""

    N_BLOCK: gl.constexpr
    K_BLOCK: gl.constexpr
    K_PARTS: gl.constexpr


@gluon.jit
def widen(scales, ring, schedule, TILING: gl.constexpr, PRODUCT: gl.constexpr, BLOCKS: gl.constexpr):
    """The warp group that widens: from codes to rhs, slot by slot. Steps of the low-rank part need none."""
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    BLOCK_N: gl.constexpr = PRODUCT.BLOCK_N
    W_KN: gl.constexpr = PRODUCT.W_KN
    ROWS: gl.constexpr = BLOCK_K if W_KN else BLOCK_N
    COLUMNS: gl.constexpr = BLOCK_N if W_KN else BLOCK_K
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [512 // COLUMNS, COLUMNS // 16], [gl.num_warps(), 1], [1, 0])
    step = gl.num_programs(0)
    slot = 0
    phase = 0  # of codes that have landed
    expert, _, _, n_tile = find_tile(gl.program_id(0), schedule, TILING)
    for number in range(gl.program_id(0), schedule.num_tiles, step):
        n_block = n_tile * BLOCK_N // BLOCKS.N_BLOCK
        scale_ptr = scales.ptr + expert.to(gl.int64) * scales.stride_e + n_block * scales.stride_n
        expert, _, _, n_tile = find_tile(number + step, schedule, TILING)
        for k in range(0, PRODUCT.K, BLOCK_K):
            k_block = block_of(k, PRODUCT.K, BLOCKS.K_BLOCK, BLOCKS.K_PARTS)
            scale = widen_scales(gl.load(scale_ptr + k_block * scales.stride_k))
            mbarrier.wait(ring.landed.index(slot), phase)
            codes = ring.codes.index(slot).reshape([ROWS, COLUMNS]).load(LAYOUT)
            values = (widen_codes(codes, gl.float32) * scale).to(ring.rhs.dtype)
            ring.rhs.index(slot).reshape([ROWS, COLUMNS]).store(values)
            fence_async_shared()
            mbarrier.arrive(ring.full.index(slot), count=1)
            slot, phase = next_slot(slot, phase, STAGES)
        for k in range(0, PRODUCT.R, BLOCK_K):
            mbarrier.wait(ring.landed.index(slot), phase)
            mbarrier.arrive(ring.full.index(slot), count=1)
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit(do_not_specialize=["total_rows"])
def hopper_scaled_gemm_kernel(
    x_desc,  # (rows, K), blocks of (BLOCK_M, BLOCK_K)
    codes_desc,  # (E, K, N), blocks of (1, BLOCK_K, BLOCK_N), if W_KN; else (E, N, K), blocks of (1, BLOCK_N, BLOCK_K)
    w_scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks of N, blocks of K)
    bias_ptr, stride_be, stride_bn,  # (E, N) or None
    scales_ptr,  # factors of the bias, (rows,), or None
    projected_desc, factor_desc,  # the low-rank part, in blocks as x and w: (rows, R), (E, N, R) or, W_KN, (E, R, N)
    y_desc,  # (rows, N), out; ragged, blocks of BLOCK_M rows and some columns
    schedule_ptr,
    total_rows,
    NUM_EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, R: gl.constexpr, ZERO_UNGROUPED: gl.constexpr,
    W_KN: gl.constexpr, N_BLOCK: gl.constexpr, K_BLOCK: gl.constexpr, K_PARTS: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """y[r] = W[e] x[r] + scales[r] bias[e] for the rows r of expert e, with W = codes times their scales.

    Rows of no expert are set to 0 if ZERO_UNGROUPED, else not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, four warps, and one scale for each step of each tile.
    """
    wait_for_stream()
    NUM_N_TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILING: gl.constexpr = Tiling(NUM_EXPERTS, NUM_N_TILES, BLOCK_M, GROUP_M)
    PRODUCT: gl.constexpr = Product(N, K, R, W_KN, BLOCK_N)
    BLOCKS: gl.constexpr = Blocks(N_BLOCK, K_BLOCK, K_PARTS)
    dtype: gl.constexpr = x_desc.dtype
    w_shape: gl.constexpr = [BLOCK_K, BLOCK_N] if W_KN else [BLOCK_N, BLOCK_K]
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(w_shape, dtype)
    lhs = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    rhs = gl.allocate_shared_memory(dtype, [STAGES] + w_shape, w_layout)
    codes = gl.allocate_shared_memory(codes_desc.dtype, [STAGES] + codes_desc.block_type.shape, codes_desc.layout)
    # A slot is full after the arrivals of the load of rows and of the warps that widen.
    full = allocate_barriers(STAGES, 2)
    ring = WideningRing(lhs, rhs, full, allocate_barriers(STAGES, 1), codes, landed=allocate_barriers(STAGES, 1))
    staging = gl.allocate_shared_memory(dtype, [2] + y_desc.block_type.shape, y_desc.layout)
    pingpong = allocate_barriers(2, 1)
    if ZERO_UNGROUPED:
        ZERO_COLUMNS: gl.constexpr = y_desc.block_type.shape[3]
        block = gl.allocate_shared_memory(dtype, y_desc.block_type.shape, y_desc.layout)
        layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 1, 8, 4], [1, 1, gl.num_warps(), 1], [3, 2, 1, 0])
        block.store(gl.zeros([1, 1, BLOCK_M, ZERO_COLUMNS], dtype, layout))
        fence_async_shared()
        zeros = Zeros(y_desc, block, total_rows)
    else:
        zeros: gl.constexpr = None
    schedule = Schedule(schedule_ptr, num_row_tiles(schedule_ptr, NUM_EXPERTS) * NUM_N_TILES)
    scales = WeightScales(w_scale_ptr, stride_se, stride_sn, stride_sk)
    # Registers of a thread: a consumer's holds 128 sums of products.
    gl.warp_specialize([
        (consume_gemm, (0, ring, pingpong, y_desc, staging, bias_ptr, stride_be, stride_bn, scales_ptr, schedule,
                        TILING, PRODUCT, False)),
        (consume_gemm, (1, ring, pingpong, y_desc, staging, bias_ptr, stride_be, stride_bn, scales_ptr, schedule,
                        TILING, PRODUCT, False)),
        (widen, (scales, ring, schedule, TILING, PRODUCT, BLOCKS)),
        (produce, (x_desc, codes_desc, projected_desc, factor_desc, ring, schedule, zeros, TILING, PRODUCT, True)),
    ], [4, 4, 1], [184, 96, 40])  # fmt: skip
