"""The up-projection of experts for Hopper in Gluon, of rows that are gathered while the products are made.

Four producer warps copy rows into the ring by cp.async, and load weights by TMA. Two consumer warp groups share each
tile, half of its rows each: a step is then long enough for the copies, which two tiles in turn would outrun.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .dependent import wait_for_stream
from .hopper import allocate_barriers, cp_async
from .hopper_experts import Options, UpOutput, store_up
from .hopper_pipeline import Bias, Tile, Tiling, find_tile
from .hopper_ring import Ring, finish_products, load_weight, multiply_half, next_slot
from .tiles import load_slots, num_row_tiles


class Tokens(NamedTuple):
    """Tokens to gather: (T, K) by pointer and row stride, the latter in units of 8 elements, and the rows' slots."""

    ptr: gl.tensor
    stride8: gl.tensor
    row_to_slot_ptr: gl.tensor


@gluon.jit
def commit_slot(full, slot, filled, LAG: gl.constexpr, STAGES: gl.constexpr):
    """Ends a step of threads that copy into the ring: commits its copies, and the slot filled LAG steps ago, if any.

    wgmma reads shared memory through the async proxy, and sees what threads copied once they have fenced after their
    copies completed. So that no thread waits for its latest copies, slots are committed LAG steps late. filled: the
    number of steps before this one.
    """
    gl.static_assert(STAGES >= LAG + 2)  # consumers release a slot only once the next one is full
    async_copy.commit_group()
    async_copy.wait_group(LAG)
    fence_async_shared()
    mbarrier.arrive(full.index(gl.where(slot < LAG, slot + STAGES - LAG, slot - LAG)), pred=filled >= LAG)


@gluon.jit
def commit_remaining(full, slot, filled, LAG: gl.constexpr, STAGES: gl.constexpr):
    """After the last step: commits the slots that are left. slot: the one after the last."""
    async_copy.wait_group(0)
    fence_async_shared()
    for back in gl.static_range(1, LAG + 1):
        mbarrier.arrive(full.index(gl.where(slot < back, slot + STAGES - back, slot - back)), pred=filled >= back)


@gluon.jit
def load_tokens(tokens, tile, index, TOP_K: gl.constexpr):
    """Tokens of the rows `index` of a tile; past the last tile, which may have found an expert without rows, any."""
    row, end = gl.maximum(tile.row, 0), gl.maximum(tile.end, 1)
    return load_slots(tokens.row_to_slot_ptr, gl.minimum(row + index, end - 1)) // TOP_K


@gluon.jit
def produce_gathered(
    tokens, w_desc, ring, schedule_ptr, num_tiles, TILING: gl.constexpr,
    K: gl.constexpr, TOP_K: gl.constexpr, W_KN: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The producer warps: fill the ring with rows and weights of each tile. The next tile is located meanwhile."""
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_M: gl.constexpr = ring.lhs.shape[1]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    LAG: gl.constexpr = STAGES // 2
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    index = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    step = gl.num_programs(0)
    slot = 0
    phase = 1
    filled = 0
    expert, row, end, n_tile = find_tile(gl.program_id(0), num_tiles, schedule_ptr, TILING)
    token = load_tokens(tokens, Tile(expert, row, end, n_tile), index, TOP_K)
    for number in range(gl.program_id(0), num_tiles, step):
        source = tokens.ptr + (token.to(gl.int64) * 8 * tokens.stride8)[:, None] + columns[None, :]
        # Past the expert's last row nothing is read: repeating one row took longer than reading as many others.
        inside = (index < end - row)[:, None]
        this_expert, this_n_tile = expert + 0, n_tile + 0  # Triton 3.6 does not carry a plain copy
        expert, row, end, n_tile = find_tile(number + step, num_tiles, schedule_ptr, TILING)
        token = load_tokens(tokens, Tile(expert, row, end, n_tile), index, TOP_K)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(ring.empty.index(slot), phase)
            full = ring.full.index(slot)
            mbarrier.expect(full, w_desc.block_type.nbytes)
            load_weight(w_desc, this_expert, this_n_tile, k, full, ring.rhs.index(slot), W_KN, BLOCK_N)
            if K % BLOCK_K == 0:
                cp_async(ring.lhs.index(slot), source + k, mask=inside)
            else:
                cp_async(ring.lhs.index(slot), source + k, mask=inside & (columns < K - k)[None, :])
            commit_slot(ring.full, slot, filled, LAG, STAGES)
            filled += 1
            slot, phase = next_slot(slot, phase, STAGES)
    commit_remaining(ring.full, slot, filled, LAG, STAGES)


@gluon.jit
def consume_shared(
    GROUP: gl.constexpr, ring, lead_barrier, output, schedule_ptr, num_tiles, TILING: gl.constexpr,
    STEPS: gl.constexpr, W_KN: gl.constexpr, BLOCK_N: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: up-projects half GROUP of each tile's rows. The next tile is located meanwhile."""
    ROWS: gl.constexpr = ring.lhs.shape[1] // 2
    COLUMNS: gl.constexpr = BLOCK_N // 2 if OPTIONS.GATED else BLOCK_N  # of the activation
    bias = output.bias
    step = gl.num_programs(0)
    slot = 0
    phase = 0
    lead_phase = 0
    expert1, row1, end1, n_tile1 = find_tile(gl.program_id(0), num_tiles, schedule_ptr, TILING)
    for number in range(gl.program_id(0), num_tiles, step):
        tile = Tile(expert1 + 0, row1 + GROUP * ROWS, end1 + 0, n_tile1)
        column = n_tile1 * COLUMNS
        expert1, row1, end1, n_tile1 = find_tile(number + step, num_tiles, schedule_ptr, TILING)
        acc, slot, phase = multiply_half(GROUP, ring, slot, phase, lead_barrier, lead_phase, W_KN, BLOCK_N, STEPS, ROWS)
        acc = finish_products(acc, ring, slot)
        bias_ptr = bias.ptr + tile.expert.to(gl.int64) * bias.stride_e if bias.ptr is not None else None
        store_up(acc, tile, column, bias_ptr, output, OPTIONS)
        lead_phase ^= 1
    tma.store_wait(0)


@gluon.jit
def hopper_gathered_up_proj_kernel(
    x_ptr, stride8,  # (T, K), columns contiguous, read at row_to_slot[row] // TOP_K; steps of 8 elements
    w_desc,  # BLOCK_N columns of gate and up: as in `.hopper_experts.hopper_up_proj_kernel`
    bias_ptr, stride_be, stride_bn,  # (E, 2 N), or N without a gate, or None
    gate_desc, up_desc,  # (rows, N) each, the halves of preact, both (rows, 2 N) if INTERLEAVED, or None, out
    #                      without a gate: all of preact, and None
    act_desc,  # (rows, N) or None, out; those for output are ragged, blocks of BLOCK_M / 2 rows and some columns
    scales_ptr,  # (rows,) or None
    row_to_slot_ptr,  # (rows,) int32
    schedule_ptr,
    NUM_EXPERTS: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    W_KN: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
    BUFFERS: gl.constexpr,  # staging tiles of each warp group
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """preact[r] = W[e] x[token of r] + bias[e]; act[r] = scales[r] activation(preact[r]), from the unrounded preact.

    Rows past the last expert's are not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, and four warps.
    """
    wait_for_stream()
    NUM_N_TILES: gl.constexpr = ((2 * N if GATED else N) + BLOCK_N - 1) // BLOCK_N
    TILING: gl.constexpr = Tiling(NUM_EXPERTS, NUM_N_TILES, BLOCK_M, GROUP_M)
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    OPTIONS: gl.constexpr = Options(N, ACTIVATION, ALPHA, LIMIT, UP_OFFSET, GATED, INTERLEAVED)
    out_desc = gate_desc if act_desc is None else act_desc
    lhs_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], w_desc.dtype)
    lhs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], lhs_layout)
    rhs = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    # A slot is full after the arrivals of the load of weights and of the warps that copy.
    ring = Ring(lhs, rhs, full=allocate_barriers(STAGES, 2), empty=allocate_barriers(STAGES, 2))
    staging0 = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS] + out_desc.block_type.shape, out_desc.layout)
    staging1 = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS] + out_desc.block_type.shape, out_desc.layout)
    # Only where it is waited for: see `allocate_barriers`.
    if STEPS > STAGES:
        lead_barrier = allocate_barriers(1, 1).index(0)
    else:
        lead_barrier: gl.constexpr = None
    num_tiles = num_row_tiles(schedule_ptr, NUM_EXPERTS) * NUM_N_TILES
    bias = Bias(bias_ptr, stride_be, stride_bn)
    output0 = UpOutput(gate_desc, up_desc, act_desc, staging0, bias, scales_ptr)
    output1 = UpOutput(gate_desc, up_desc, act_desc, staging1, bias, scales_ptr)
    tokens = Tokens(x_ptr, stride8, row_to_slot_ptr)
    # Registers of a thread: a consumer's holds 128 sums of products.
    gl.warp_specialize([
        (consume_shared, (0, ring, lead_barrier, output0, schedule_ptr, num_tiles, TILING, STEPS, W_KN, BLOCK_N,
                          OPTIONS)),
        (consume_shared, (1, ring, lead_barrier, output1, schedule_ptr, num_tiles, TILING, STEPS, W_KN, BLOCK_N,
                          OPTIONS)),
        (produce_gathered, (tokens, w_desc, ring, schedule_ptr, num_tiles, TILING, K, TOP_K, W_KN, BLOCK_N)),
    ], [4, 4], [208, 88])  # fmt: skip
