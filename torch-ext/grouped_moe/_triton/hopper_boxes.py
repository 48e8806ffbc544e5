"""Boxes of some columns by which epilogues on Hopper read and write rows: shared memory, then bulk copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .hopper import ragged_coordinates, tma_load, tma_store


@gluon.jit
def column_pieces(acc, PIECES: gl.constexpr):
    """A tile as a tuple of PIECES tiles of neighbouring columns."""
    if PIECES == 1:
        return (acc,)
    else:
        ROWS: gl.constexpr = acc.shape[0]
        left, right = acc.reshape([ROWS, 2, acc.shape[1] // 2]).permute((0, 2, 1)).split()
        return column_pieces(left, PIECES // 2) + column_pieces(right, PIECES // 2)


@gluon.jit
def store_box(value, desc, bufs, row, end, column, BOX: gl.constexpr):
    """Starts to store some columns of a tile, by way of the BOX-th in turn of some buffers."""
    tma.store_wait(bufs.shape[0] - 1)  # until what the buffer held was read
    buf = bufs.index(BOX % bufs.shape[0])
    buf.reshape(value.shape).store(value.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, ragged_coordinates(row, end, column), buf)


@gluon.jit
def box_places(row, end, column, COLUMNS: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Where the two boxes of gate and up of COLUMNS columns are: one of each or, interleaved, neighbours."""
    if INTERLEAVED:
        return ragged_coordinates(row, end, 2 * column), ragged_coordinates(row, end, 2 * column + COLUMNS)
    else:
        place = ragged_coordinates(row, end, column)
        return place, place


@gluon.jit
def load_boxes(inputs, slot, row, end, column, inside, INTERLEAVED: gl.constexpr):
    """Starts to load gate and up of some columns of a tile into the slot-th boxes, if there is such a tile."""
    gate_desc, up_desc, boxes, loaded = inputs
    BOXES: gl.constexpr = 1 if up_desc is None else 2
    landed = loaded.index(slot)
    mbarrier.expect(landed, BOXES * gate_desc.block_type.nbytes, pred=inside)
    left, right = box_places(row, end, column, boxes.shape[4], INTERLEAVED)
    tma_load(gate_desc, left, landed, boxes.index(BOXES * slot), pred=inside)
    if up_desc is not None:
        tma_load(up_desc, right, landed, boxes.index(BOXES * slot + 1), pred=inside)


@gluon.jit
def refill_boxes(inputs, position, piece, tile, next_tile, PIECES: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Loads into the boxes of a tile's piece, which were read, what comes as many pieces later as there are boxes.

    position: of the tile's first piece in the sequence of all. tile: first row, end of rows, first column. Past the
    tile's PIECES come those of the next one, if the last of next_tile, which is as tile before that, says that it is.
    """
    _, _, boxes, loaded = inputs
    row, end, column = tile
    next_row, next_end, next_column, next_inside = next_tile
    COLUMNS: gl.constexpr = boxes.shape[4]
    SLOTS: gl.constexpr = loaded.shape[0]
    here = piece + SLOTS < PIECES
    ahead = (piece + SLOTS) * COLUMNS
    first_row, last_row = gl.where(here, row, next_row), gl.where(here, end, next_end)
    first_column = gl.where(here, column + ahead, next_column + ahead - PIECES * COLUMNS)
    slot = (position + piece) % SLOTS
    load_boxes(inputs, slot, first_row, last_row, first_column, here | next_inside, INTERLEAVED)


@gluon.jit
def read_boxes(left_box, right_box, like, INTERLEAVED: gl.constexpr):
    """gate and up out of their two boxes, in the layout of `like`, which has their shape."""
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    if INTERLEAVED:
        # Either box holds both of half of the columns. Each thread reads those of its own.
        LAYOUT: gl.constexpr = column_pieces(gl.join(like, like).reshape([ROWS, 2 * COLUMNS]), 2)[0].type.layout
        both = gl.join(left_box.load(LAYOUT), right_box.load(LAYOUT)).permute((0, 2, 1))
        gate, up = both.reshape([ROWS, COLUMNS, 2]).to(gl.float32).split()
        return gl.convert_layout(gate, like.type.layout), gl.convert_layout(up, like.type.layout)
    else:
        return left_box.load(like.type.layout).to(gl.float32), right_box.load(like.type.layout).to(gl.float32)


@gluon.jit
def write_boxes(gate, up, left_box, right_box, INTERLEAVED: gl.constexpr):
    """The inverse of `read_boxes`."""
    if INTERLEAVED:
        left, right = column_pieces(gl.join(gate, up).reshape([gate.shape[0], 2 * gate.shape[1]]), 2)
        left_box.store(left)
        right_box.store(right)
    else:
        left_box.store(gate)
        right_box.store(up)
