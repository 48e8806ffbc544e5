"""Grouped GEMM for Hopper in Gluon: loads, products and stores overlap.

One warp fills a ring of operands. Two warp groups take its tiles in turn, so that one stores while one multiplies, or
share tiles twice as wide, for which less is read, and of which one group ends its half before the other.
A tile's last rows may be the next group's: they are multiplied, too, and cut off by a ragged store.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper import (
    allocate_barriers,
    next_slot,
    previous_slot,
    ragged_coordinates,
    tma_load,
    tma_store,
    wait_for_stream,
)
from .tiles import grouped_order


@gluon.jit
def load_expert(tile, num_tiles, schedule_ptr, NUM_EXPERTS: gl.constexpr, NUM_N_TILES: gl.constexpr):
    """The expert of a tile; 0 past the last tile."""
    return gl.load(schedule_ptr + (2 * NUM_EXPERTS + 2) + tile // NUM_N_TILES, mask=tile < num_tiles, other=0)


@gluon.jit
def load_group(expert, schedule_ptr, NUM_EXPERTS: gl.constexpr):
    """An expert's first row, the row past its last one, the m tiles before it."""
    first = gl.load(schedule_ptr + expert)
    return first, gl.load(schedule_ptr + expert + 1), gl.load(schedule_ptr + (NUM_EXPERTS + 1) + expert)


@gluon.jit
def locate_tile(
    tile, first, end, m_tiles_before, NUM_N_TILES: gl.constexpr, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr
):
    """First row and n tile of a tile, in the order of `tiles.find_tile`."""
    num_m_tiles = (end - first + BLOCK_M - 1) // BLOCK_M
    m_tile, n_tile = grouped_order(tile - m_tiles_before * NUM_N_TILES, num_m_tiles, NUM_N_TILES, GROUP_M)
    return first + m_tile * BLOCK_M, n_tile


@gluon.jit
def zero_boxes(
    y_desc, zeros, begin, end, first_row, last_row, total_rows,
    N: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Zeros boxes of rows of no group, from `begin` to `end` in steps of the grid; those past the last group first."""
    NUM_COLUMNS: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    trailing = (total_rows - last_row + ROWS - 1) // ROWS
    for box in range(begin, end, gl.num_programs(0)):
        row_box = box // NUM_COLUMNS
        column = (box - row_box * NUM_COLUMNS) * COLUMNS
        past = row_box < trailing
        row = gl.where(past, last_row + row_box * ROWS, (row_box - trailing) * ROWS)
        tma_store(y_desc, ragged_coordinates(row, gl.where(past, total_rows, first_row), column), zeros)


@gluon.jit
def load_weight(w_desc, expert, n_tile, k, landed, buf, W_KN: gl.constexpr, BLOCK_N: gl.constexpr):
    """Starts to load a weight's block for a tile of BLOCK_N columns, or a block of each half of the columns."""
    if len(w_desc.block_shape) == 4:
        tma_load(w_desc, [expert, 0, n_tile * (BLOCK_N // 2), k], landed, buf)
    elif W_KN:
        tma_load(w_desc, [expert, k, n_tile * BLOCK_N], landed, buf)
    else:
        tma_load(w_desc, [expert, n_tile * BLOCK_N, k], landed, buf)


@gluon.jit
def produce(
    x_desc, w_desc, y_desc, x_bufs, w_bufs, zeros, full, empty, schedule_ptr, num_tiles, total_rows,
    NUM_EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, ZERO_UNGROUPED: gl.constexpr, W_KN: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: fills the ring with the operands of each tile in turn, and zeros rows of no group meanwhile."""
    NUM_N_TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ROWS: gl.constexpr = y_desc.block_type.shape[2]
    COLUMNS: gl.constexpr = y_desc.block_type.shape[3]
    pid = gl.program_id(0)
    step = gl.num_programs(0)
    if ZERO_UNGROUPED:
        first_row = gl.load(schedule_ptr)
        last_row = gl.load(schedule_ptr + NUM_EXPERTS)
        row_boxes = (total_rows - last_row + ROWS - 1) // ROWS + (first_row + ROWS - 1) // ROWS
        boxes = row_boxes * ((N + COLUMNS - 1) // COLUMNS)
        tiles_here = gl.maximum((num_tiles - pid + step - 1) // step, 1)
        boxes_per_tile = ((boxes + step - 1) // step + tiles_here - 1) // tiles_here * step
        box = pid + 0  # Triton 3.6 does not carry a variable that begins as another one
    slot = 0
    phase = 1
    # What a tile needs to be found is loaded one and two tiles ahead.
    expert = load_expert(pid, num_tiles, schedule_ptr, NUM_EXPERTS, NUM_N_TILES)
    first, end, before = load_group(expert, schedule_ptr, NUM_EXPERTS)
    expert1 = load_expert(pid + step, num_tiles, schedule_ptr, NUM_EXPERTS, NUM_N_TILES)
    for tile in range(pid, num_tiles, step):
        row, n_tile = locate_tile(tile, first, end, before, NUM_N_TILES, BLOCK_M, GROUP_M)
        first1, end1, before1 = load_group(expert1, schedule_ptr, NUM_EXPERTS)
        expert2 = load_expert(tile + 2 * step, num_tiles, schedule_ptr, NUM_EXPERTS, NUM_N_TILES)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma_load(x_desc, [row, k], bar, x_bufs.index(slot))
            load_weight(w_desc, expert, n_tile, k, bar, w_bufs.index(slot), W_KN, BLOCK_N)
            slot, phase = next_slot(slot, phase, STAGES)
        if ZERO_UNGROUPED:
            last = gl.minimum(box + boxes_per_tile, boxes)
            zero_boxes(y_desc, zeros, box, last, first_row, last_row, total_rows, N, ROWS, COLUMNS)
            box += boxes_per_tile
        expert = expert1
        first = first1
        end = end1
        before = before1
        expert1 = expert2
    if ZERO_UNGROUPED:
        zero_boxes(y_desc, zeros, box, boxes, first_row, last_row, total_rows, N, ROWS, COLUMNS)
        tma.store_wait(0)


@gluon.jit
def multiply(
    ring, slot, phase, W_KN: gl.constexpr, BLOCK_N: gl.constexpr, STEPS: gl.constexpr,
    FIRST_ROW: gl.constexpr, ROWS: gl.constexpr, sums=None,
):  # fmt: skip
    """ROWS of x, from FIRST_ROW on, times w over STEPS slots of the ring, and the slot and phase after them.

    sums: of earlier steps, or none. The last products are under way, and their slot is not given back.
    """
    x_bufs, w_bufs, full, empty = ring
    STAGES: gl.constexpr = x_bufs.shape[0]
    BLOCK_K: gl.constexpr = x_bufs.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout) if sums is None else sums
    for k in range(STEPS):
        mbarrier.wait(full.index(slot), phase)
        if W_KN:
            w = w_bufs.index(slot).reshape([BLOCK_K, BLOCK_N])
        else:
            w = w_bufs.index(slot).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
        x = x_bufs.index(slot).slice(FIRST_ROW, ROWS)
        acc = warpgroup_mma(x, w, acc, use_acc=True if sums is not None else k > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index(previous_slot(slot, STAGES)), count=1, pred=k > 0)
        slot, phase = next_slot(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def multiply_half(
    GROUP: gl.constexpr, ring, slot, phase, ahead, turn,
    W_KN: gl.constexpr, BLOCK_N: gl.constexpr, STEPS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """`multiply`, to its end, of the GROUP-th half of the rows of a tile that two warp groups share.

    Group 0 leads: group 1 makes a tile's last LEAD steps after it, and so hides group 0's epilogue, as the next tile's
    first steps of group 0 hide group 1's. ahead: the barrier by which group 0 lets it go on, in phase `turn`, or None:
    nobody leads. In tiles of few steps group 0 could end a second one before group 1 has seen the first. LEAD: half of
    the ring, into which all of a tile's steps have to come while group 1 holds back, or all would wait for ever: with
    the steps by which slots are handed over late, no more than the ring has.
    """
    STAGES: gl.constexpr = ring[0].shape[0]
    LEAD: gl.constexpr = STAGES // 2
    gl.static_assert(ahead is None or STEPS > STAGES)
    empty = ring[3]
    if GROUP == 0 or ahead is None:
        acc, slot, phase = multiply(ring, slot, phase, W_KN, BLOCK_N, STEPS, GROUP * ROWS, ROWS)
        if ahead is not None:
            mbarrier.arrive(ahead, count=1)
    else:
        acc, slot, phase = multiply(ring, slot, phase, W_KN, BLOCK_N, STEPS - LEAD, GROUP * ROWS, ROWS)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(previous_slot(slot, STAGES)), count=1)
        mbarrier.wait(ahead, turn)
        acc, slot, phase = multiply(ring, slot, phase, W_KN, BLOCK_N, LEAD, GROUP * ROWS, ROWS, acc)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(previous_slot(slot, STAGES)), count=1)
    return acc, slot, phase


@gluon.jit
def store_tile(acc, y_desc, y_buf, row, end, column, bias_ptr, stride_bn, scales_ptr, N: gl.constexpr):
    """Stores the rows from `row` to `end`, with their bias, as many columns at once as the buffer has."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    if COLUMNS > y_buf.shape[3]:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = acc.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
        store_tile(left, y_desc, y_buf, row, end, column, bias_ptr, stride_bn, scales_ptr, N)
        store_tile(right, y_desc, y_buf, row, end, column + HALF, bias_ptr, stride_bn, scales_ptr, N)
    else:
        if bias_ptr is not None:
            layout: gl.constexpr = acc.type.layout
            columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
            bias = gl.load(bias_ptr + columns.to(gl.int64) * stride_bn, mask=columns < N, other=0.0)
            bias = bias.to(gl.float32)[None, :]
            if scales_ptr is not None:
                rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
                scales = gl.load(scales_ptr + gl.minimum(rows, end - 1))
                bias = scales.to(gl.float32)[:, None] * bias
            acc += bias
        tma.store_wait(0)  # until what the buffer held was read
        y_buf.reshape([ROWS, COLUMNS]).store(acc.to(y_desc.dtype))
        fence_async_shared()
        tma_store(y_desc, ragged_coordinates(row, end, column), y_buf)


@gluon.jit
def consume(
    GROUP: gl.constexpr, x_bufs, w_bufs, y_buf, full, empty, turns, y_desc,
    bias_ptr, stride_be, stride_bn, scales_ptr, schedule_ptr, num_tiles,
    NUM_EXPERTS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, W_KN: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One of two warp groups, which take tiles in turn or share them: one stores while one multiplies."""
    NUM_N_TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    ROWS: gl.constexpr = y_buf.shape[2]
    TURNS: gl.constexpr = 1 if ROWS < BLOCK_M else 2
    FIRST: gl.constexpr = GROUP * (TURNS - 1)  # of the program's tiles
    step = TURNS * gl.num_programs(0)
    tile0 = gl.program_id(0) + FIRST * gl.num_programs(0)
    position = FIRST * STEPS  # in the sequence of all slots that the program fills
    turn = 1 - GROUP  # group 0 begins
    expert = load_expert(tile0, num_tiles, schedule_ptr, NUM_EXPERTS, NUM_N_TILES)
    first, end, before = load_group(expert, schedule_ptr, NUM_EXPERTS)
    expert1 = load_expert(tile0 + step, num_tiles, schedule_ptr, NUM_EXPERTS, NUM_N_TILES)
    for tile in range(tile0, num_tiles, step):
        row, n_tile = locate_tile(tile, first, end, before, NUM_N_TILES, BLOCK_M, GROUP_M)
        first1, end1, before1 = load_group(expert1, schedule_ptr, NUM_EXPERTS)
        expert2 = load_expert(tile + 2 * step, num_tiles, schedule_ptr, NUM_EXPERTS, NUM_N_TILES)
        slot = position % STAGES
        phase = (position // STAGES) & 1
        ring = (x_bufs, w_bufs, full, empty)
        if TURNS == 1:
            acc, _, _ = multiply_half(GROUP, ring, slot, phase, turns.index(0), turn, W_KN, BLOCK_N, STEPS, ROWS)
            row += GROUP * ROWS
        else:
            # Without turns both would multiply, then both store.
            mbarrier.wait(turns.index(GROUP), turn)
            acc, slot, _ = multiply(ring, slot, phase, W_KN, BLOCK_N, STEPS, 0, ROWS)
            mbarrier.arrive(turns.index(1 - GROUP), count=1)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index(previous_slot(slot, STAGES)), count=1)
        expert_bias_ptr = bias_ptr + expert.to(gl.int64) * stride_be if bias_ptr is not None else None
        store_tile(acc, y_desc, y_buf, row, end, n_tile * BLOCK_N, expert_bias_ptr, stride_bn, scales_ptr, N)
        position += TURNS * STEPS
        turn ^= 1
        expert = expert1
        first = first1
        end = end1
        before = before1
        expert1 = expert2
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total_rows"])
def hopper_gemm_kernel(
    x_desc,  # (rows, K), blocks of (BLOCK_M, BLOCK_K)
    w_desc,  # (E, K, N), blocks of (1, BLOCK_K, BLOCK_N), if W_KN; else (E, N, K), blocks of (1, BLOCK_N, BLOCK_K)
    bias_ptr, stride_be, stride_bn,  # (E, N) or None
    scales_ptr,  # (rows,) or None
    y_desc,  # (rows, N), out; ragged, blocks of some columns and BLOCK_M rows or, of shared tiles, half of them
    schedule_ptr,
    total_rows,
    NUM_EXPERTS: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    ZERO_UNGROUPED: gl.constexpr,
    W_KN: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """y[r] = W[e] x[r] + scales[r] bias[e] for the rows r of expert e; rows of no expert are 0, or not written.

    Grid: (programs,), persistent. The caller guarantees a schedule made for BLOCK_M and four warps.
    """
    wait_for_stream()
    NUM_N_TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    dtype: gl.constexpr = x_desc.dtype
    x_bufs = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    y_buf0 = gl.allocate_shared_memory(dtype, y_desc.block_type.shape, y_desc.layout)
    y_buf1 = gl.allocate_shared_memory(dtype, y_desc.block_type.shape, y_desc.layout)
    full = allocate_barriers(STAGES, 1)
    ROWS: gl.constexpr = y_desc.block_type.shape[2]
    empty = allocate_barriers(STAGES, 2 if ROWS < BLOCK_M else 1)
    turns = allocate_barriers(2, 1)
    zeros = y_buf0
    if ZERO_UNGROUPED:
        COLUMNS: gl.constexpr = y_desc.block_type.shape[3]
        zeros = gl.allocate_shared_memory(dtype, y_desc.block_type.shape, y_desc.layout)
        layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 1, 8, 4], [1, 1, gl.num_warps(), 1], [3, 2, 1, 0])
        zeros.store(gl.zeros([1, 1, ROWS, COLUMNS], dtype, layout))
        fence_async_shared()
    num_tiles = gl.load(schedule_ptr + (2 * NUM_EXPERTS + 1)) * NUM_N_TILES
    # Registers: 232 for each thread of a consumer, which holds 128 sums of products; 40 for the producer.
    gl.warp_specialize(
        [
            (consume, (0, x_bufs, w_bufs, y_buf0, full, empty, turns, y_desc,
                       bias_ptr, stride_be, stride_bn, scales_ptr, schedule_ptr, num_tiles,
                       NUM_EXPERTS, N, K, W_KN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
            (consume, (1, x_bufs, w_bufs, y_buf1, full, empty, turns, y_desc,
                       bias_ptr, stride_be, stride_bn, scales_ptr, schedule_ptr, num_tiles,
                       NUM_EXPERTS, N, K, W_KN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
            (produce, (x_desc, w_desc, y_desc, x_bufs, w_bufs, zeros, full, empty, schedule_ptr, num_tiles, total_rows,
                       NUM_EXPERTS, N, K, ZERO_UNGROUPED, W_KN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
