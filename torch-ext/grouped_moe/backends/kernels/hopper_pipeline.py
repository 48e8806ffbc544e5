"""The producer and the ping-pong consumers of the Gluon kernels for Hopper whose tiles come from a schedule.

One producer warp fills the ring with the operands of the program's tiles. Two consumer warp groups take the tiles in
turn, so that one runs its epilogue while the other one multiplies. A tile's last rows may be those of the next group:
they are multiplied all the same, and a ragged store leaves them out.

Values travel between these functions in named tuples, compile-time values in tuples of their own that are annotated as
constexpr: an assignment without the annotation makes tensors of all constexprs in a tuple, and so does a return.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .hopper import ragged_coordinates, tma_load, tma_store
from .hopper_ring import load_weight, multiply, multiply_half, next_slot, slot_at
from .tiles import end_of_rows, expert_rows, grouped_order, tile_experts, tile_offset


class Tiling(NamedTuple):
    """How a grouped GEMM is cut into tiles: compile-time values."""

    NUM_EXPERTS: gl.constexpr
    NUM_N_TILES: gl.constexpr
    BLOCK_M: gl.constexpr
    GROUP_M: gl.constexpr


class Tile(NamedTuple):
    """One tile: its expert, its first row, the row past the expert's last one, and its n tile."""

    expert: gl.tensor
    row: gl.tensor
    end: gl.tensor
    n_tile: gl.tensor


class Turn(NamedTuple):
    """Where a tile comes among the program's tiles, for epilogues that take turns as well."""

    phase: gl.tensor  # of the barriers by which groups take turns
    piece: gl.tensor  # number of pieces of the program's earlier tiles
    next_tile: Tile  # the program's next tile, which the other group takes
    has_next: gl.tensor  # whether there is one


class Bias(NamedTuple):
    """A bias by its pointer, or None, and its strides along experts and columns."""

    ptr: gl.tensor
    stride_e: gl.tensor
    stride_n: gl.tensor


@gluon.jit
def load_expert(tile, num_tiles, schedule_ptr, TILING: gl.constexpr):
    """The expert of a tile; 0 past the last tile."""
    experts_ptr = tile_experts(schedule_ptr, TILING.NUM_EXPERTS)
    return gl.load(experts_ptr + tile // TILING.NUM_N_TILES, mask=tile < num_tiles, other=0)


@gluon.jit
def load_group(expert, schedule_ptr, TILING: gl.constexpr):
    """An expert's first row, the row past its last one, and the number of m tiles before it."""
    first, end = expert_rows(expert, schedule_ptr)
    return first, end, tile_offset(expert, schedule_ptr, TILING.NUM_EXPERTS)


@gluon.jit
def locate_tile(tile, first, end, m_tiles_before, TILING: gl.constexpr):
    """(first row, n tile) of a tile whose expert has the rows [first, end); the order is that of `tiles.find_tile`."""
    num_m_tiles = (end - first + TILING.BLOCK_M - 1) // TILING.BLOCK_M
    within = tile - m_tiles_before * TILING.NUM_N_TILES
    m_tile, n_tile = grouped_order(within, num_m_tiles, TILING.NUM_N_TILES, TILING.GROUP_M)
    return first + m_tile * TILING.BLOCK_M, n_tile


@gluon.jit
def find_tile(tile, num_tiles, schedule_ptr, TILING: gl.constexpr):
    """Tile number -> Tile; of no meaning past the last tile."""
    expert = load_expert(tile, num_tiles, schedule_ptr, TILING)
    first, end, before = load_group(expert, schedule_ptr, TILING)
    row, n_tile = locate_tile(tile, first, end, before, TILING)
    return Tile(expert, row, end, n_tile)


@gluon.jit
def zero_blocks(
    y_desc, zeros, begin, end, first_row, last_row, total_rows,
    N: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Zeros blocks of rows of no group, numbers `begin` to `end` in steps of the grid; first those past last_row."""
    NUM_COLUMNS: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    trailing = (total_rows - last_row + ROWS - 1) // ROWS
    for block in range(begin, end, gl.num_programs(0)):
        row_block = block // NUM_COLUMNS
        column = (block - row_block * NUM_COLUMNS) * COLUMNS
        past = row_block < trailing
        row = gl.where(past, last_row + row_block * ROWS, (row_block - trailing) * ROWS)
        tma_store(y_desc, ragged_coordinates(row, gl.where(past, total_rows, first_row), column), zeros)


@gluon.jit
def produce(
    x_desc, w_desc, y_desc, zeros, ring, schedule_ptr, num_tiles, total_rows, TILING: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, ZERO_UNGROUPED: gl.constexpr, W_KN: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The producer warp: fills the ring with x and w of each tile, and meanwhile zeros the rows of no group.

    y_desc, zeros, total_rows: of no use without ZERO_UNGROUPED; `zeros` is a block of y_desc in shared memory.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    ROWS: gl.constexpr = y_desc.block_type.shape[2]
    COLUMNS: gl.constexpr = y_desc.block_type.shape[3]
    pid = gl.program_id(0)
    step = gl.num_programs(0)
    if ZERO_UNGROUPED:
        first_row = gl.load(schedule_ptr)
        last_row = end_of_rows(schedule_ptr, TILING.NUM_EXPERTS)
        row_blocks = (total_rows - last_row + ROWS - 1) // ROWS + (first_row + ROWS - 1) // ROWS
        blocks = row_blocks * ((N + COLUMNS - 1) // COLUMNS)
        tiles_here = gl.maximum((num_tiles - pid + step - 1) // step, 1)
        blocks_per_tile = ((blocks + step - 1) // step + tiles_here - 1) // tiles_here * step
        block = pid + 0  # Triton 3.6 does not carry a variable that begins as a copy of another one
    slot = 0
    phase = 1
    # The loads that locate a tile are started one and two tiles ahead.
    expert = load_expert(pid, num_tiles, schedule_ptr, TILING)
    first, end, before = load_group(expert, schedule_ptr, TILING)
    expert1 = load_expert(pid + step, num_tiles, schedule_ptr, TILING)
    for tile in range(pid, num_tiles, step):
        row, n_tile = locate_tile(tile, first, end, before, TILING)
        first1, end1, before1 = load_group(expert1, schedule_ptr, TILING)
        expert2 = load_expert(tile + 2 * step, num_tiles, schedule_ptr, TILING)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(ring.empty.index(slot), phase)
            full = ring.full.index(slot)
            mbarrier.expect(full, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma_load(x_desc, [row, k], full, ring.lhs.index(slot))
            load_weight(w_desc, expert, n_tile, k, full, ring.rhs.index(slot), W_KN, BLOCK_N)
            slot, phase = next_slot(slot, phase, STAGES)
        if ZERO_UNGROUPED:
            last = gl.minimum(block + blocks_per_tile, blocks)
            zero_blocks(y_desc, zeros, block, last, first_row, last_row, total_rows, N, ROWS, COLUMNS)
            block += blocks_per_tile
        expert, first, end, before, expert1 = expert1, first1, end1, before1, expert2
    if ZERO_UNGROUPED:
        zero_blocks(y_desc, zeros, block, blocks, first_row, last_row, total_rows, N, ROWS, COLUMNS)
        tma.store_wait(0)


@gluon.jit
def consume(
    GROUP: gl.constexpr, first_tile, step, ring, pingpong, schedule_ptr, num_tiles, TILING: gl.constexpr,
    STEPS: gl.constexpr, W_KN: gl.constexpr, BLOCK_N: gl.constexpr,
    EPILOGUE: gl.constexpr, output, OPTIONS: gl.constexpr,
    PREFETCH: gl.constexpr = False,  # start the loads that locate a tile one and two tiles ahead
    SHARED: gl.constexpr = False,  # with PREFETCH: both groups take every tile, half of its rows each (`multiply_half`)
    PIECES: gl.constexpr = 0,  # pieces of a tile in the epilogue; without any, turn.next_tile is not found
):  # fmt: skip
    """Consumer warp group GROUP, 0 or 1: multiplies every step-th tile from first_tile on, and runs the epilogue on it.

    pingpong: two mbarriers of one arrival. A group multiplies once its own has completed a phase, then lets the other
    group multiply. Without them both would multiply, then both run their epilogues.
    EPILOGUE(GROUP, acc, ring, slot, tile, turn, output, OPTIONS) has to call `finish_products` before it reads acc.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_M: gl.constexpr = ring.lhs.shape[1]
    STRIDE: gl.constexpr = 1 if SHARED else 2  # from this group's tile to its next one, in tiles of the program
    position = GROUP * (STRIDE - 1) * STEPS  # among all slots that the program fills
    piece = GROUP * (STRIDE - 1) * PIECES
    pingpong_phase = 1 - GROUP  # group 0 begins
    if PREFETCH:
        expert = load_expert(first_tile, num_tiles, schedule_ptr, TILING)
        first, end, before = load_group(expert, schedule_ptr, TILING)
        expert1 = load_expert(first_tile + step, num_tiles, schedule_ptr, TILING)
    for number in range(first_tile, num_tiles, step):
        if PREFETCH:
            row, n_tile = locate_tile(number, first, end, before, TILING)
            if SHARED:
                row += GROUP * (BLOCK_M // 2)
            tile = Tile(expert, row, end, n_tile)
            first1, end1, before1 = load_group(expert1, schedule_ptr, TILING)
            expert2 = load_expert(number + 2 * step, num_tiles, schedule_ptr, TILING)
        else:
            tile = find_tile(number, num_tiles, schedule_ptr, TILING)
        next_tile = tile
        next_number = number + gl.num_programs(0)
        if PIECES > 0:
            next_tile = find_tile(next_number, num_tiles, schedule_ptr, TILING)
        if SHARED:
            slot, phase = slot_at(position, STAGES)
            acc, slot, _ = multiply_half(
                GROUP, ring, slot, phase, pingpong.index(0), pingpong_phase, W_KN, BLOCK_N, STEPS, BLOCK_M // 2
            )
        else:
            mbarrier.wait(pingpong.index(GROUP), pingpong_phase)
            slot, phase = slot_at(position, STAGES)
            acc, slot, _ = multiply(ring, slot, phase, W_KN, BLOCK_N, STEPS, 0, BLOCK_M)
            mbarrier.arrive(pingpong.index(1 - GROUP), count=1)
        turn = Turn(pingpong_phase, piece, next_tile, next_number < num_tiles)
        EPILOGUE(GROUP, acc, ring, slot, tile, turn, output, OPTIONS)
        position += STRIDE * STEPS
        piece += STRIDE * PIECES
        pingpong_phase ^= 1
        if PREFETCH:
            expert, first, end, before, expert1 = expert1, first1, end1, before1, expert2
