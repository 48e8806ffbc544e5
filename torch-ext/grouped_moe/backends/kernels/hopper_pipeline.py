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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .hopper import ragged_coordinates, tma_load, tma_store
from .hopper_ring import load_weight, multiply, multiply_half, next_slot, num_steps, slot_as, slot_at
from .tiles import end_of_rows, expert_rows, expert_tiles, grouped_order, load_bias, load_scales, tile_experts


class Schedule(NamedTuple):
    """The tiles that programs share: a schedule, as `.tiles` lays it out, and the number of its tiles."""

    ptr: gl.tensor
    num_tiles: gl.tensor


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
def add_bias(acc, bias, tile, first_column, N: gl.constexpr, SKIPPED: gl.constexpr = 0, scales_ptr=None):
    """acc, of a tile's rows, plus its columns of the expert's bias, N behind SKIPPED ones; acc without a bias.

    scales_ptr: factors of the bias for each row, or None.
    """
    if bias.ptr is None:
        return acc
    else:
        layout: gl.constexpr = acc.type.layout
        bias_ptr = bias.ptr + tile.expert.to(gl.int64) * bias.stride_e
        columns = first_column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
        if SKIPPED > 0:
            bias_ptr += gl.to_tensor(SKIPPED).to(gl.int64) * bias.stride_n
        values = load_bias(bias_ptr, bias.stride_n, columns, N)[None, :]
        if scales_ptr is not None:
            rows = tile.row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
            values = load_scales(scales_ptr, gl.minimum(rows, tile.end - 1))[:, None] * values
        return acc + values


class Zeros(NamedTuple):
    """What a producer zeros rows of no group with: a ragged descriptor of the rows, and zeros in shared memory."""

    desc: object
    block: gl.shared_memory_descriptor
    total_rows: gl.tensor


@gluon.jit
def load_expert(tile, schedule, TILING: gl.constexpr):
    """The expert of a tile; 0 past the last tile."""
    experts_ptr = tile_experts(schedule.ptr, TILING.NUM_EXPERTS)
    return gl.load(experts_ptr + tile // TILING.NUM_N_TILES, mask=tile < schedule.num_tiles, other=0)


@gluon.jit
def load_group(expert, schedule, TILING: gl.constexpr):
    """An expert's first row, the row past its last one, and the number of m tiles before it."""
    first, end = expert_rows(expert, schedule.ptr)
    before, _ = expert_tiles(expert, schedule.ptr, TILING.NUM_EXPERTS)
    return first, end, before


@gluon.jit
def locate_tile(tile, group, TILING: gl.constexpr):
    """(first row, the row past the expert's last one, n tile) of a tile, in the order of `tiles.find_tile`.

    group: what `load_group` returns for its expert.
    """
    first, end, m_tiles_before = group
    num_m_tiles = (end - first + TILING.BLOCK_M - 1) // TILING.BLOCK_M
    within = tile - m_tiles_before * TILING.NUM_N_TILES
    m_tile, n_tile = grouped_order(within, num_m_tiles, TILING.NUM_N_TILES, TILING.GROUP_M)
    return first + m_tile * TILING.BLOCK_M, end, n_tile


@gluon.jit
def find_tile(tile, schedule, TILING: gl.constexpr):
    """Tile number -> Tile; of no meaning past the last tile."""
    expert = load_expert(tile, schedule, TILING)
    row, end, n_tile = locate_tile(tile, load_group(expert, schedule, TILING), TILING)
    return Tile(expert, row, end, n_tile)


@gluon.jit
def allocate_zeros(desc):
    """A block of zeros in shared memory. desc: the ragged descriptor by which it is stored."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 1, 8, 4], [1, 1, gl.num_warps(), 1], [3, 2, 1, 0])
    block = gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)
    block.store(gl.zeros([1, 1, ROWS, COLUMNS], desc.dtype, LAYOUT))
    fence_async_shared()
    return block


@gluon.jit
def zero_blocks(zeros, begin, end, first_row, last_row, N: gl.constexpr):
    """Zeros blocks of rows of no group, numbers `begin` to `end` in steps of the grid; first those past last_row."""
    ROWS: gl.constexpr = zeros.desc.block_type.shape[2]
    COLUMNS: gl.constexpr = zeros.desc.block_type.shape[3]
    NUM_COLUMNS: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    trailing = (zeros.total_rows - last_row + ROWS - 1) // ROWS
    for block in range(begin, end, gl.num_programs(0)):
        row_block = block // NUM_COLUMNS
        column = (block - row_block * NUM_COLUMNS) * COLUMNS
        past = row_block < trailing
        row = gl.where(past, last_row + row_block * ROWS, (row_block - trailing) * ROWS)
        end_row = gl.where(past, zeros.total_rows, first_row)
        tma_store(zeros.desc, ragged_coordinates(row, end_row, column), zeros.block)


@gluon.jit
def share_zeros(zeros, schedule, TILING: gl.constexpr, PRODUCT: gl.constexpr):
    """The first row of a group, the row past the last one, the blocks to zero, and how many go with each tile.

    The last two are for `zero_blocks`, from this program's number on.
    """
    ROWS: gl.constexpr = zeros.desc.block_type.shape[2]
    COLUMNS: gl.constexpr = zeros.desc.block_type.shape[3]
    step = gl.num_programs(0)
    first_row = gl.load(schedule.ptr)
    last_row = end_of_rows(schedule.ptr, TILING.NUM_EXPERTS)
    row_blocks = (zeros.total_rows - last_row + ROWS - 1) // ROWS + (first_row + ROWS - 1) // ROWS
    blocks = row_blocks * ((PRODUCT.N + COLUMNS - 1) // COLUMNS)
    tiles_here = gl.maximum((schedule.num_tiles - gl.program_id(0) + step - 1) // step, 1)
    return first_row, last_row, blocks, ((blocks + step - 1) // step + tiles_here - 1) // tiles_here * step


@gluon.jit
def load_step(x_desc, w_desc, expert, row, n_tile, k, ring, slot, phase, BLOCK_N: gl.constexpr, KN: gl.constexpr):
    """Waits for a slot and starts to load the operands of the step at k into it. KN: as in `load_weight`."""
    mbarrier.wait(ring.empty.index(slot), phase)
    full = ring.full.index(slot)
    mbarrier.expect(full, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
    tma_load(x_desc, [row, k], full, slot_as(ring.lhs, x_desc, slot))
    load_weight(w_desc, expert, n_tile, k, full, slot_as(ring.rhs, w_desc, slot), BLOCK_N, KN)


@gluon.jit
def load_ranks(expert, row, n_tile, ring, slot, phase, PRODUCT: gl.constexpr):
    """Loads the steps of the low-rank part, if there is one, as slots come to be free: the next (slot, phase)."""
    if PRODUCT.R > 0:
        rows_desc, factor_desc = ring.ranks
        for k in range(0, PRODUCT.R, rows_desc.block_type.shape[1]):
            load_step(
                rows_desc, factor_desc, expert, row, n_tile, k, ring, slot, phase, PRODUCT.BLOCK_N, PRODUCT.FACTOR_KN
            )
            slot, phase = next_slot(slot, phase, ring.lhs.shape[0])
    return slot, phase


@gluon.jit
def produce(x_desc, w_desc, ring, schedule, zeros, TILING: gl.constexpr, PRODUCT: gl.constexpr):
    """The producer warp: fills the ring with x and w of each tile, and meanwhile zeros the rows of no group.

    zeros: None to leave rows of no group as they are.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    pid = gl.program_id(0)
    step = gl.num_programs(0)
    num_tiles = schedule.num_tiles
    if zeros is not None:
        first_row, last_row, blocks, blocks_per_tile = share_zeros(zeros, schedule, TILING, PRODUCT)
        block = pid + 0  # Triton 3.6 does not carry a variable that begins as a copy of another one
    slot = 0
    phase = 1
    # The loads that locate a tile are started one and two tiles ahead.
    expert = load_expert(pid, schedule, TILING)
    group = load_group(expert, schedule, TILING)
    expert1 = load_expert(pid + step, schedule, TILING)
    for tile in range(pid, num_tiles, step):
        row, _, n_tile = locate_tile(tile, group, TILING)
        group1 = load_group(expert1, schedule, TILING)
        expert2 = load_expert(tile + 2 * step, schedule, TILING)
        if PRODUCT.RANKS_FIRST:
            slot, phase = load_ranks(expert, row, n_tile, ring, slot, phase, PRODUCT)
        for k in range(0, PRODUCT.K, BLOCK_K):
            load_step(x_desc, w_desc, expert, row, n_tile, k, ring, slot, phase, PRODUCT.BLOCK_N, PRODUCT.W_KN)
            slot, phase = next_slot(slot, phase, STAGES)
        if not PRODUCT.RANKS_FIRST:
            slot, phase = load_ranks(expert, row, n_tile, ring, slot, phase, PRODUCT)
        if zeros is not None:
            last = gl.minimum(block + blocks_per_tile, blocks)
            zero_blocks(zeros, block, last, first_row, last_row, PRODUCT.N)
            block += blocks_per_tile
        expert, group, expert1 = expert1, group1, expert2
    if zeros is not None:
        zero_blocks(zeros, block, blocks, first_row, last_row, PRODUCT.N)
        tma.store_wait(0)


@gluon.jit
def consume(
    GROUP: gl.constexpr, ring, pingpong, schedule, TILING: gl.constexpr, PRODUCT: gl.constexpr,
    EPILOGUE: gl.constexpr, output, OPTIONS: gl.constexpr,
    PREFETCH: gl.constexpr = False,  # start the loads that locate a tile one and two tiles ahead
    SHARED: gl.constexpr = False,  # with PREFETCH: both groups take every tile, half of its rows each (`multiply_half`)
    PIECES: gl.constexpr = 0,  # pieces of a tile in the epilogue; without any, turn.next_tile is not found
):  # fmt: skip
    """Consumer warp group GROUP, 0 or 1: multiplies its tiles and runs the epilogue on each.

    pingpong: two mbarriers of one arrival. A group multiplies once its own has completed a phase, then lets the other
    group multiply. Without them both would multiply, then both run their epilogues.
    EPILOGUE(GROUP, acc, ring, slot, tile, turn, output, OPTIONS) has to call `finish_products` before it reads acc.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_M: gl.constexpr = ring.lhs.shape[1]
    STEPS: gl.constexpr = num_steps(PRODUCT.K, PRODUCT.R, ring.lhs.shape[2])
    STRIDE: gl.constexpr = 1 if SHARED else 2  # from this group's tile to its next one, in tiles of the program
    step = STRIDE * gl.num_programs(0)
    first_tile = gl.program_id(0) + GROUP * (STRIDE - 1) * gl.num_programs(0)
    position = GROUP * (STRIDE - 1) * STEPS  # among all slots that the program fills
    piece = GROUP * (STRIDE - 1) * PIECES
    pingpong_phase = 1 - GROUP  # group 0 begins
    if PREFETCH:
        expert = load_expert(first_tile, schedule, TILING)
        group = load_group(expert, schedule, TILING)
        expert1 = load_expert(first_tile + step, schedule, TILING)
    for number in range(first_tile, schedule.num_tiles, step):
        if PREFETCH:
            row, end, n_tile = locate_tile(number, group, TILING)
            if SHARED:
                row += GROUP * (BLOCK_M // 2)
            tile = Tile(expert, row, end, n_tile)
            group1 = load_group(expert1, schedule, TILING)
            expert2 = load_expert(number + 2 * step, schedule, TILING)
        else:
            tile = find_tile(number, schedule, TILING)
        next_tile = tile
        next_number = number + gl.num_programs(0)
        if PIECES > 0:
            next_tile = find_tile(next_number, schedule, TILING)
        if SHARED:
            slot, phase = slot_at(position, STAGES)
            acc, slot, _ = multiply_half(GROUP, ring, slot, phase, pingpong.index(0), pingpong_phase, PRODUCT)
        else:
            mbarrier.wait(pingpong.index(GROUP), pingpong_phase)
            slot, phase = slot_at(position, STAGES)
            acc, slot, _ = multiply(ring, slot, phase, PRODUCT, STEPS, 0, BLOCK_M)
            mbarrier.arrive(pingpong.index(1 - GROUP), count=1)
        turn = Turn(pingpong_phase, piece, next_tile, next_number < schedule.num_tiles)
        EPILOGUE(GROUP, acc, ring, slot, tile, turn, output, OPTIONS)
        position += STRIDE * STEPS
        piece += STRIDE * PIECES
        pingpong_phase ^= 1
        if PREFETCH:
            expert, group, expert1 = expert1, group1, expert2
