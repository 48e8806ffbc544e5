"""Products of 8-bit rows with 8-bit weights for Hopper in Gluon, scaled by blocks of 128 along K.

The tensor cores add up one step, 128 wide, which has one scale for each row and one for each 128 columns; its sums then
enter an fp32 accumulator times both scales. So DeepSeek-V3 promotes sums of FP8 products (DeepSeek-AI, 2024,
"DeepSeek-V3 Technical Report", section 3.3.2). Two consumer warp groups share each tile, half of its rows each: one
multiplies while the other one promotes. A tile has 256 columns in two halves that have scales of their own: neighbours,
or gate and up.

A low-rank part, of the results' dtype, is more of K in the same accumulator. Its steps come first, through the same
slots of shared memory: 64 ranks take as many bytes as 128 codes.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.runtime.jit import constexpr_function

from .block_scaled import widen_scales
from .hopper import thread_barrier
from .hopper_pipeline import Tile, find_tile
from .hopper_ring import narrow_columns, next_slot, num_steps, previous_slot, slot_as
from .hopper_up_proj import load_tokens

HALF = gl.constexpr(128)  # columns of half a tile: those of a weight's scale


class Scales(NamedTuple):
    """Scales of rows, (rows, blocks of K), contiguous, and of weights, (E, blocks of N, blocks of K), by strides."""

    x_ptr: gl.tensor
    row_to_slot_ptr: object  # as `Tokens` has it
    w_ptr: gl.tensor
    stride_e: gl.tensor
    stride_n: gl.tensor
    stride_k: gl.tensor


class TileScales(NamedTuple):
    """Pointers to the scales of one step of a tile: of rows, and of the left and the right half of its columns."""

    rows: gl.tensor
    left: gl.tensor
    right: gl.tensor


@gluon.jit
def locate_scales(scales, tile, source, BLOCKS: gl.constexpr, RIGHT: gl.constexpr, K_BLOCKS: gl.constexpr):
    """`TileScales` of a tile's first step.

    source: the rows of x that it multiplies. BLOCKS, K_BLOCKS: of weights along N and K. RIGHT: blocks from the left
    half to the right one; 1: these are neighbours, and the last tile may have but one.
    """
    left_block = tile.n_tile * (2 if RIGHT == 1 else 1)
    right_block = gl.minimum(left_block + RIGHT, BLOCKS - 1)
    w_ptr = scales.w_ptr + tile.expert.to(gl.int64) * scales.stride_e
    rows = scales.x_ptr + source.to(gl.int64) * K_BLOCKS
    return TileScales(rows, w_ptr + left_block * scales.stride_n, w_ptr + right_block * scales.stride_n)


@gluon.jit
def start_codes(sums, ring, slot, FIRST_ROW: gl.constexpr, FIRST_COLUMN: gl.constexpr):
    """Starts x @ w of a step, for half of the rows and half of the columns of a tile.

    sums: of the step before, whose registers are written. Not to name them lets the compiler keep both, and spill.
    """
    ROWS: gl.constexpr = sums.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    x = ring.lhs.index(slot).slice(FIRST_ROW, ROWS)
    w = ring.rhs.index(slot).reshape([2 * HALF, BLOCK_K]).slice(FIRST_COLUMN, HALF).permute((1, 0))
    return warpgroup_mma(x, w, sums, use_acc=False, is_async=True)


@constexpr_function
def used_columns(step, R, BLOCK_R):
    """Ranks that a step multiplies: a power of two that covers those that are left, at most BLOCK_R."""
    return narrow_columns(R, BLOCK_R) or BLOCK_R if (step + 1) * BLOCK_R >= R else BLOCK_R


@gluon.jit
def multiply_ranks(
    sums, ring, slot, PRODUCT: gl.constexpr, STEP: gl.constexpr, FIRST_ROW: gl.constexpr, FIRST_COLUMN: gl.constexpr
):
    """rows @ factor of a step of the low-rank part, for half of the rows and half of the columns of a tile.

    Plus sums, of the steps before. Waits for it: with the products of both halves under way, ptxas spills sums.
    """
    OF_RANKS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 16])
    OF_CODES: gl.constexpr = sums.type.layout
    BLOCK_R: gl.constexpr = ring.ranks.rows_desc.block_type.shape[1]
    x = slot_as(ring.lhs, ring.ranks.rows_desc, slot).slice(FIRST_ROW, sums.shape[0])
    w = slot_as(ring.rhs, ring.ranks.factor_desc, slot)
    if PRODUCT.FACTOR_KN:
        w = w.reshape([BLOCK_R, 2 * HALF]).slice(FIRST_COLUMN, HALF, dim=1)
    else:
        w = w.reshape([2 * HALF, BLOCK_R]).slice(FIRST_COLUMN, HALF).permute((1, 0))
    USED: gl.constexpr = used_columns(STEP, PRODUCT.R, BLOCK_R)
    x, w = x.slice(0, USED, dim=1), w.slice(0, USED)
    sums = gl.convert_layout(sums, OF_RANKS, assert_trivial=True)
    sums = warpgroup_mma(x, w, sums, use_acc=STEP > 0, is_async=True)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    return gl.convert_layout(sums, OF_CODES, assert_trivial=True)


@gluon.jit
def load_step_scales(scales):
    """The scales of a step: of rows, of the left half and of the right half of the columns."""
    return gl.load(scales.rows), widen_scales(gl.load(scales.left)), widen_scales(gl.load(scales.right))


@gluon.jit
def advance_scales(scales, steps, stride_k):
    """The same pointers so many steps further.

    They are carried: addresses computed from a step's number take more registers. ptxas then puts the loads behind the
    wait for the product, where the registers of its sums are free.
    """
    return TileScales(scales.rows + steps, scales.left + steps * stride_k, scales.right + steps * stride_k)


@gluon.jit
def multiply_promoted(
    GROUP: gl.constexpr, ring, slot, phase, lead_barrier, lead_phase, scales, stride_k, PRODUCT: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """x @ w over the next slots for half GROUP of the rows of a tile: (left half, right half, slot, phase).

    scales: TileScales of the first step. stride_k: from one block of a weight's K to the next. lead_barrier,
    lead_phase: as in `multiply_half`; steps of ranks come before and only make a tile longer. While group 1 waits it
    holds one slot more than there: the lead, this slot and those committed late must not exceed STAGES.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    STEPS: gl.constexpr = num_steps(PRODUCT.K, 0, ring.lhs.shape[2])
    ROWS: gl.constexpr = ring.lhs.shape[1] // 2
    FIRST_ROW: gl.constexpr = GROUP * ROWS
    left = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    right = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    if PRODUCT.R > 0:
        for step in gl.static_range(num_steps(PRODUCT.R, 0, ring.ranks.rows_desc.block_type.shape[1])):
            mbarrier.wait(ring.full.index(slot), phase)
            left = multiply_ranks(left, ring, slot, PRODUCT, step, FIRST_ROW, 0)
            right = multiply_ranks(right, ring, slot, PRODUCT, step, FIRST_ROW, HALF)
            mbarrier.arrive(ring.empty.index(slot), count=1)
            slot, phase = next_slot(slot, phase, STAGES)
    # From the end of a product to the start of the next one a group only promotes. The rest it does while a product is
    # under way: it releases the slot before, loads the scales of the next step, and waits for the next slot.
    sums = gl.zeros([ROWS, HALF], gl.float32, LAYOUT)
    of_rows, of_left, of_right = load_step_scales(scales)
    left_scale, right_scale = of_rows * of_left, of_rows * of_right
    mbarrier.wait(ring.full.index(slot), phase)
    for k in range(STEPS):
        products = start_codes(sums, ring, slot, FIRST_ROW, 0)
        mbarrier.arrive(ring.empty.index(previous_slot(slot, STAGES)), count=1, pred=k > 0)
        scales = advance_scales(scales, gl.where(k + 1 < STEPS, 1, 0), stride_k)
        of_rows, of_left, of_right = load_step_scales(scales)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(products,))
        left += sums * left_scale[:, None]
        # Nothing is under way. A product that began before the promotion ends would need other registers, and spill.
        sums, left = warpgroup_mma_wait(num_outstanding=0, deps=(sums, left))
        thread_barrier()  # products of warps that start together take less time: 0.96 (H100, DeepSeek)
        products = start_codes(sums, ring, slot, FIRST_ROW, HALF)
        slot, phase = next_slot(slot, phase, STAGES)
        if lead_barrier is not None and GROUP == 1:
            mbarrier.wait(lead_barrier, lead_phase, pred=k + 1 == STEPS - STAGES // 2)
        mbarrier.wait(ring.full.index(slot), phase, pred=k + 1 < STEPS)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(products,))
        right += sums * right_scale[:, None]
        left_scale, right_scale = of_rows * of_left, of_rows * of_right
    mbarrier.arrive(ring.empty.index(previous_slot(slot, STAGES)), count=1)
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
    index = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    step = gl.num_programs(0)
    slot = 0
    phase = 0
    lead_phase = 0
    expert, row, end, n_tile = find_tile(gl.program_id(0), schedule, TILING)
    source = load_tokens(scales.row_to_slot_ptr, row + GROUP * ROWS, end, index, TOP_K)
    for number in range(gl.program_id(0), schedule.num_tiles, step):
        tile = Tile(expert + 0, row + GROUP * ROWS, end + 0, n_tile + 0)  # Triton 3.6 does not carry a plain copy
        tile_scales = locate_scales(scales, tile, source, BLOCKS, RIGHT, STEPS)
        expert, row, end, n_tile = find_tile(number + step, schedule, TILING)
        source = load_tokens(scales.row_to_slot_ptr, row + GROUP * ROWS, end, index, TOP_K)
        left, right, slot, phase = multiply_promoted(
            GROUP, ring, slot, phase, lead_barrier, lead_phase, tile_scales, scales.stride_k, PRODUCT, LAYOUT
        )
        lead_phase ^= 1
        EPILOGUE(left, right, tile, output, OPTIONS)
    tma.store_wait(0)
