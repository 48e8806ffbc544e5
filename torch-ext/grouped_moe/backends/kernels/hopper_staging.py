"""Staging tiles: shared-memory blocks of some columns through which epilogues on Hopper store and load rows by TMA.

Interleaved, gate and up of COLUMNS columns are 2 COLUMNS neighbouring columns: the left staging tile has the first half
of those, the right one the second half. Otherwise the left one has the gate and the right one has up.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .hopper import ragged_coordinates, tma_load, tma_store
from .tiles import column_pieces


class Preact(NamedTuple):
    """The pre-activation that an epilogue reads: ragged descriptors, and a ring of staging tiles with its barriers."""

    gate_desc: object
    up_desc: object  # None without a gate
    staging: gl.shared_memory_descriptor  # (1 or 2 tiles for each slot, ...), left before right
    full: gl.shared_memory_descriptor  # a barrier for each slot


@gluon.jit
def write_staging(value, staging):
    """Writes a tile to `staging` for a TMA store to read."""
    staging.reshape(value.shape).store(value.to(staging.dtype))
    fence_async_shared()


@gluon.jit
def store_piece(value, desc, staging, row, end, column, NUMBER: gl.constexpr):
    """Starts to store a piece of a tile, NUMBER in its order, by way of the staging tiles, which take turns."""
    tma.store_wait(staging.shape[0] - 1)  # until the earlier store has read the staging tile
    write_staging(value, staging.index(NUMBER % staging.shape[0]))
    tma_store(desc, ragged_coordinates(row, end, column), staging.index(NUMBER % staging.shape[0]))


@gluon.jit
def pair_coordinates(row, end, column, COLUMNS: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Coordinates of the left and the right staging tile of COLUMNS columns of the activation."""
    if INTERLEAVED:
        return ragged_coordinates(row, end, 2 * column), ragged_coordinates(row, end, 2 * column + COLUMNS)
    else:
        coordinates = ragged_coordinates(row, end, column)
        return coordinates, coordinates


@gluon.jit
def load_preact(preact, slot, row, end, column, pred, INTERLEAVED: gl.constexpr):
    """Starts to load the pre-activation of a piece into the staging tiles of `slot`, if `pred`."""
    TILES: gl.constexpr = 1 if preact.up_desc is None else 2
    full = preact.full.index(slot)
    mbarrier.expect(full, TILES * preact.gate_desc.block_type.nbytes, pred=pred)
    left, right = pair_coordinates(row, end, column, preact.staging.shape[4], INTERLEAVED)
    tma_load(preact.gate_desc, left, full, preact.staging.index(TILES * slot), pred=pred)
    if preact.up_desc is not None:
        tma_load(preact.up_desc, right, full, preact.staging.index(TILES * slot + 1), pred=pred)


@gluon.jit
def refill_preact(
    preact, first_piece, piece, tile, tile_column, next_tile, next_column, has_next,
    PIECES: gl.constexpr, INTERLEAVED: gl.constexpr,
):  # fmt: skip
    """Reuses the slot of a piece that is done: starts to load the piece that comes as many pieces later as slots exist.

    That piece is the tile's or, past its PIECES, the next tile's, if there is one. first_piece: number of the tile's
    first piece among all of the program's. tile_column, next_column: the tiles' first columns.
    """
    COLUMNS: gl.constexpr = preact.staging.shape[4]
    SLOTS: gl.constexpr = preact.full.shape[0]
    here = piece + SLOTS < PIECES
    ahead = (piece + SLOTS) * COLUMNS
    row, end = gl.where(here, tile.row, next_tile.row), gl.where(here, tile.end, next_tile.end)
    column = gl.where(here, tile_column + ahead, next_column + ahead - PIECES * COLUMNS)
    slot = (first_piece + piece) % SLOTS
    load_preact(preact, slot, row, end, column, here | has_next, INTERLEAVED)


@gluon.jit
def read_pair(left_tile, right_tile, like, INTERLEAVED: gl.constexpr):
    """(gate, up) in fp32 from two staging tiles, in the layout of `like`, which has their shape."""
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    if INTERLEAVED:
        # Each staging tile has gate and up of half of the columns. Each thread reads those of its own columns.
        LAYOUT: gl.constexpr = column_pieces(gl.join(like, like).reshape([ROWS, 2 * COLUMNS]), 2)[0].type.layout
        both = gl.join(left_tile.load(LAYOUT), right_tile.load(LAYOUT)).permute((0, 2, 1))
        gate, up = both.reshape([ROWS, COLUMNS, 2]).to(gl.float32).split()
        return gl.convert_layout(gate, like.type.layout), gl.convert_layout(up, like.type.layout)
    else:
        return left_tile.load(like.type.layout).to(gl.float32), right_tile.load(like.type.layout).to(gl.float32)


@gluon.jit
def write_pair(gate, up, left_tile, right_tile, INTERLEAVED: gl.constexpr):
    """The inverse of `read_pair`."""
    if INTERLEAVED:
        left, right = column_pieces(gl.join(gate, up).reshape([gate.shape[0], 2 * gate.shape[1]]), 2)
        left_tile.store(left)
        right_tile.store(right)
    else:
        left_tile.store(gate)
        right_tile.store(up)
