"""The up-projection of experts for Hopper in Gluon, of rows that are gathered while the products are made.

Two warp groups share a tile, half of its rows each; four warps copy rows for them into a ring, and weights come there
by the tensor memory accelerator. A step is long enough for the copies, which two tiles in turn would outrun.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .hopper import allocate_barriers, cp_async, next_slot, wait_for_stream
from .hopper_experts import allocate_ring, find_tile, load_slots, up_epilogue
from .hopper_gemm import load_weight, multiply_half


@gluon.jit
def hand_over(full, slot, filled, LAG: gl.constexpr, STAGES: gl.constexpr):
    """Ends a step of threads that copy into the ring: hands over the slot of LAG steps ago, if there was one.

    What threads copied becomes visible to wgmma, which reads by another proxy, by a fence of theirs after the copies
    are complete. So that none waits for its latest copies, slots are handed over late. filled: steps before this one.
    """
    gl.static_assert(STAGES >= LAG + 2)  # a slot is free only once the next one is full
    async_copy.commit_group()
    async_copy.wait_group(LAG)
    fence_async_shared()
    mbarrier.arrive(full.index(gl.where(slot < LAG, slot + STAGES - LAG, slot - LAG)), pred=filled >= LAG)


@gluon.jit
def hand_over_rest(full, slot, filled, LAG: gl.constexpr, STAGES: gl.constexpr):
    """After the last step: hands over the slots that are left. slot: the next one."""
    async_copy.wait_group(0)
    fence_async_shared()
    for back in gl.static_range(1, LAG + 1):
        mbarrier.arrive(full.index(gl.where(slot < back, slot + STAGES - back, slot - back)), pred=filled >= back)


@gluon.jit
def load_tokens(row_to_slot_ptr, row, end, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """Tokens of a tile's rows; past the last tile, where `find_tile` may have found an expert without rows, any."""
    return load_slots(row_to_slot_ptr, gl.maximum(row, 0), gl.maximum(end, 1), BLOCK_M, LAYOUT) // TOP_K


@gluon.jit
def gather_tiles(
    tokens, w_desc, ring, schedule_ptr, num_tiles,
    K: gl.constexpr, TOP_K: gl.constexpr, W_KN: gl.constexpr, BLOCK_N: gl.constexpr, TILING: gl.constexpr,
):  # fmt: skip
    """Fills the ring with rows and weights of all steps of a program's tiles, those of the next tile found ahead."""
    x_ptr, stride8, row_to_slot_ptr = tokens
    x_ring, w_ring, full, empty = ring
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    LAG: gl.constexpr = STAGES // 2
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    index = gl.arange(0, BLOCK_M, ROWS)
    step = gl.num_programs(0)
    slot = 0
    phase = 1
    filled = 0
    expert, row, end, n_tile = find_tile(gl.program_id(0), num_tiles, schedule_ptr, TILING)
    token = load_tokens(row_to_slot_ptr, row, end, TOP_K, BLOCK_M, ROWS)
    for tile in range(gl.program_id(0), num_tiles, step):
        source = x_ptr + (token.to(gl.int64) * 8 * stride8)[:, None] + columns[None, :]
        # Past the expert's last row nothing is read: to repeat one row took longer than to read as many others.
        inside = (index < end - row)[:, None]
        this_expert, this_n_tile = expert + 0, n_tile + 0  # Triton 3.6 does not carry a plain copy
        expert, row, end, n_tile = find_tile(tile + step, num_tiles, schedule_ptr, TILING)
        token = load_tokens(row_to_slot_ptr, row, end, TOP_K, BLOCK_M, ROWS)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            landed = full.index(slot)
            mbarrier.expect(landed, w_desc.block_type.nbytes)
            load_weight(w_desc, this_expert, this_n_tile, k, landed, w_ring.index(slot), W_KN, BLOCK_N)
            if K % BLOCK_K == 0:
                cp_async(x_ring.index(slot), source + k, mask=inside)
            else:
                cp_async(x_ring.index(slot), source + k, mask=inside & (columns < K - k)[None, :])
            hand_over(full, slot, filled, LAG, STAGES)
            filled += 1
            slot, phase = next_slot(slot, phase, STAGES)
    hand_over_rest(full, slot, filled, LAG, STAGES)


@gluon.jit
def multiply_tiles(
    GROUP: gl.constexpr, ring, ahead, outputs, bufs, bias, scales_ptr, schedule_ptr, num_tiles,
    N: gl.constexpr, STEPS: gl.constexpr, W_KN: gl.constexpr, BLOCK_N: gl.constexpr, KIND: gl.constexpr,
    TILING: gl.constexpr,
):  # fmt: skip
    """One of two warp groups: up-projects the GROUP-th half of each tile's rows."""
    bias_ptr, stride_be, stride_bn = bias
    ROWS: gl.constexpr = ring[0].shape[1] // 2
    COLUMNS: gl.constexpr = BLOCK_N // 2 if KIND[4] else BLOCK_N  # of the activation
    step = gl.num_programs(0)
    slot = 0
    phase = 0
    turn = 0
    expert1, row1, end1, n_tile1 = find_tile(gl.program_id(0), num_tiles, schedule_ptr, TILING)
    for tile in range(gl.program_id(0), num_tiles, step):
        expert, row, end, column = expert1 + 0, row1 + GROUP * ROWS, end1 + 0, n_tile1 * COLUMNS
        # Where the next tile is has been read by the time this one is done.
        expert1, row1, end1, n_tile1 = find_tile(tile + step, num_tiles, schedule_ptr, TILING)
        acc, slot, phase = multiply_half(GROUP, ring, slot, phase, ahead, turn, W_KN, BLOCK_N, STEPS, ROWS)
        expert_bias_ptr = bias_ptr + expert.to(gl.int64) * stride_be if bias_ptr is not None else None
        up_epilogue(acc, outputs, bufs, row, end, column, expert_bias_ptr, stride_bn, scales_ptr, N, KIND)
        turn ^= 1
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
    BUFFERS: gl.constexpr,  # of each warp group, for boxes of results
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """preact[r] = W[e] x[token of r] + bias[e]; act[r] = scales[r] activation(preact[r]), from the unrounded preact.

    Grid: (programs,), persistent. The caller guarantees a schedule made for BLOCK_M; rows past R are not written.
    """
    wait_for_stream()
    NUM_N_TILES: gl.constexpr = ((2 * N if GATED else N) + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILING: gl.constexpr = (NUM_EXPERTS, NUM_N_TILES, BLOCK_M, GROUP_M)
    KIND: gl.constexpr = (ACTIVATION, ALPHA, LIMIT, UP_OFFSET, GATED, INTERLEAVED)
    out_desc = gate_desc if act_desc is None else act_desc
    ring = allocate_ring(w_desc, 2, STAGES, BLOCK_M, BLOCK_K)
    bufs0 = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS] + out_desc.block_type.shape, out_desc.layout)
    bufs1 = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS] + out_desc.block_type.shape, out_desc.layout)
    # Only where it is waited for: see `allocate_barriers`.
    if STEPS > STAGES:
        ahead = allocate_barriers(1, 1).index(0)
    else:
        ahead: gl.constexpr = None
    num_tiles = gl.load(schedule_ptr + (2 * NUM_EXPERTS + 1)) * NUM_N_TILES
    outputs = (gate_desc, up_desc, act_desc)
    bias = (bias_ptr, stride_be, stride_bn)
    tokens = (x_ptr, stride8, row_to_slot_ptr)
    # Registers of a thread: a consumer's holds 128 sums of products.
    gl.warp_specialize([
        (multiply_tiles, (0, ring, ahead, outputs, bufs0, bias, scales_ptr, schedule_ptr, num_tiles,
                          N, STEPS, W_KN, BLOCK_N, KIND, TILING)),
        (multiply_tiles, (1, ring, ahead, outputs, bufs1, bias, scales_ptr, schedule_ptr, num_tiles,
                          N, STEPS, W_KN, BLOCK_N, KIND, TILING)),
        (gather_tiles, (tokens, w_desc, ring, schedule_ptr, num_tiles, K, TOP_K, W_KN, BLOCK_N, TILING)),
    ], [4, 4], [208, 88])  # fmt: skip
