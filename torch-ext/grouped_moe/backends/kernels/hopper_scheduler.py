"""The tile scheduler of the weight gradient on Hopper, whose tiles take as long as their experts have rows.

Each program gets its tiles by their numbers alone. If asked to, experts are ordered by falling number of rows, and
programs that begin with a long tile are given fewer tiles (`schedule_experts`).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .tiles import grouped_order

# The cost of a tile besides its steps, in rows.
TILE_COST = gl.constexpr(128)


class WgradTiling(NamedTuple):
    """How weight gradients are cut into tiles: compile-time values."""

    NUM_EXPERTS: gl.constexpr
    M_TILES: gl.constexpr  # of one expert, as N_TILES
    N_TILES: gl.constexpr
    GROUP_M: gl.constexpr
    ORDER_SIZE: gl.constexpr  # a power of two, at least NUM_EXPERTS and 32; or 0, experts in their own order


class Scheduler(NamedTuple):
    """Which tiles a program gets.

    Each of the first `num_long` programs begins with the tile of its own number. The other programs share the tiles
    after those in `rounds` rounds. What remains goes round all programs, forth and back, so that long tiles spread.
    """

    program: gl.tensor
    num_programs: gl.tensor
    num_long: gl.tensor
    rounds: gl.tensor
    offsets_ptr: gl.tensor  # expert offsets (E + 1,)
    order: gl.shared_memory_descriptor  # (ORDER_SIZE,) experts by falling number of rows


class WgradTile(NamedTuple):
    """One tile of a weight gradient, and the rows [start, end) of its expert."""

    expert: gl.tensor
    m_tile: gl.tensor
    n_tile: gl.tensor
    start: gl.tensor
    end: gl.tensor


@gluon.jit
def schedule_experts(offsets_ptr, TILING: gl.constexpr):
    """The program's Scheduler, with the order of the experts."""
    NUM_EXPERTS: gl.constexpr = TILING.NUM_EXPERTS
    TILES: gl.constexpr = TILING.M_TILES * TILING.N_TILES
    SIZE: gl.constexpr = TILING.ORDER_SIZE
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if SIZE == 0:
        order = gl.allocate_shared_memory(gl.int32, [1], SHARED)
        return Scheduler(program, programs, program * 0, program * 0, offsets_ptr, order)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        i = gl.arange(0, SIZE, gl.SliceLayout(1, LAYOUT))
        j = gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))
        # Numbers past the last expert have no rows and rank last.
        starts = gl.load(offsets_ptr + gl.minimum(i, NUM_EXPERTS))
        size_i = gl.load(offsets_ptr + gl.minimum(i + 1, NUM_EXPERTS)) - starts
        starts = gl.load(offsets_ptr + gl.minimum(j, NUM_EXPERTS))
        size_j = (gl.load(offsets_ptr + gl.minimum(j + 1, NUM_EXPERTS)) - starts)[None, :]
        before = (size_j > size_i[:, None]) | ((size_j == size_i[:, None]) & (j[None, :] < i[:, None]))
        rank = gl.sum(before.to(gl.int32), axis=1)
        order = gl.sum(gl.where(rank[:, None] == j[None, :], i[:, None], 0), axis=0)
        # A tile is long if it costs at least half of the longest one. If only some programs begin with a long tile, the
        # others get as many rounds of shorter tiles as are done when the shortest long tile is.
        cost = (size_i + TILE_COST).to(gl.float32)
        is_long = (i < NUM_EXPERTS) & (2 * cost >= gl.max(cost, axis=0))
        num_long = TILES * gl.sum(is_long.to(gl.int32), axis=0)
        others = programs - num_long
        time = gl.min(gl.where(is_long, cost, float("inf")), axis=0)
        costs_before = gl.sum(gl.where(before, (size_j + TILE_COST).to(gl.float32), 0.0), axis=1) * TILES
        begin = gl.sum(gl.where(is_long, cost, 0.0), axis=0) * TILES
        fit = gl.floor((begin + time * others.to(gl.float32) - costs_before) / cost)
        fit = gl.where(is_long | (i >= NUM_EXPERTS), 0.0, gl.minimum(gl.maximum(fit, 0.0), TILES))
        rounds = gl.maximum(gl.sum(fit.to(gl.int32), axis=0) // gl.maximum(others, 1), 1)
        pays = (others > 0) & (rounds > 1)
        num_long, rounds = gl.where(pays, num_long, 0), gl.where(pays, rounds, 0)
        order = gl.allocate_shared_memory(gl.int32, [SIZE], SHARED, order)
        return Scheduler(program, programs, num_long, rounds, offsets_ptr, order)


@gluon.jit
def ordered_expert(position, order):
    """The expert at a position of the order."""
    SIZE: gl.constexpr = order.shape[0]
    # Each warp reads the whole order, so that no warp waits for another.
    LAYOUT: gl.constexpr = gl.BlockedLayout([SIZE // 32], [32], [gl.num_warps()], [0])
    here = gl.arange(0, SIZE, LAYOUT) == position
    return gl.sum(gl.where(here, order.load(LAYOUT), 0), axis=0)


@gluon.jit
def position_in_round(number, scheduler):
    """The program's position in a round of all programs: programs that began with a long tile come last in round 0."""
    forth = (number + gl.where(scheduler.num_long > 0, 1, 0)) % 2 == 0
    return gl.where(forth, scheduler.program, scheduler.num_programs - 1 - scheduler.program)


@gluon.jit
def num_program_tiles(scheduler, TILING: gl.constexpr):
    """The number of tiles that the program gets."""
    NUM_TILES: gl.constexpr = TILING.NUM_EXPERTS * TILING.M_TILES * TILING.N_TILES
    num_programs, num_long, rounds = scheduler.num_programs, scheduler.num_long, scheduler.rounds
    remaining = NUM_TILES - num_long - rounds * (num_programs - num_long)
    last = remaining // num_programs
    position = position_in_round(last, scheduler)
    own = gl.where(scheduler.program < num_long, 1, rounds)
    return own + last + gl.where(position < remaining - last * num_programs, 1, 0)


@gluon.jit
def tile_number(index, scheduler):
    """The program's index-th tile, as a number among all tiles."""
    program, num_programs, num_long, rounds = (
        scheduler.program, scheduler.num_programs, scheduler.num_long, scheduler.rounds
    )  # fmt: skip
    others = num_programs - num_long
    own = num_long + index * others + gl.where(index % 2 == 0, program - num_long, num_programs - 1 - program)
    own = gl.where(program < num_long, program, own)
    number = index - gl.where(program < num_long, 1, rounds)
    common = num_long + rounds * others + number * num_programs + position_in_round(number, scheduler)
    return gl.where(number < 0, own, common)


@gluon.jit
def find_tile(index, scheduler, TILING: gl.constexpr):
    """The program's index-th tile as a WgradTile; past its last tile, any tile."""
    TILES: gl.constexpr = TILING.M_TILES * TILING.N_TILES
    tile = gl.minimum(tile_number(index, scheduler), TILING.NUM_EXPERTS * TILES - 1)
    expert = tile // TILES
    m_tile, n_tile = grouped_order(tile - expert * TILES, TILING.M_TILES, TILING.N_TILES, TILING.GROUP_M)
    if TILING.ORDER_SIZE:
        expert = ordered_expert(expert, scheduler.order)
    start = gl.load(scheduler.offsets_ptr + expert)
    end = gl.load(scheduler.offsets_ptr + expert + 1)
    return WgradTile(expert, m_tile, n_tile, start, end)
