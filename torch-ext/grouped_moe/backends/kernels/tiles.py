"""Device functions that all grouped kernels share, Gluon's included: the layout of a schedule, tiles, loads and stores.

A schedule (`grouped_moe.rows.Rows`) is one int32 array of three parts:
    expert offsets (E + 1,): the first row of each expert, and the row past the last expert's last one;
    tile offsets (E + 1,): the number of m tiles before each expert, and the number of all m tiles;
    tile experts: the expert of each m tile.
Only the functions below know where the parts begin. A pointer to expert offsets alone serves where no tiles are needed.

A row index is int32 (fewer than 2^31 rows); its product with a stride is int64 (2^31 elements or more).
"""

from typing import NamedTuple

import triton
import triton.language as tl

MAX_RAGGED_ROWS = 1 << 30  # that the ragged descriptors of Gluon's kernels count


class Tiling(NamedTuple):
    """How a grouped GEMM is cut into tiles: compile-time values."""

    NUM_EXPERTS: tl.constexpr
    NUM_N_TILES: tl.constexpr
    BLOCK_M: tl.constexpr
    GROUP_M: tl.constexpr


@triton.jit
def expert_rows(expert, schedule_ptr):
    """(first row, the row past the last one) of an expert."""
    return tl.load(schedule_ptr + expert), tl.load(schedule_ptr + expert + 1)


@triton.jit
def end_of_rows(schedule_ptr, NUM_EXPERTS: tl.constexpr):
    """The row past the last expert's last one."""
    return tl.load(schedule_ptr + NUM_EXPERTS)


@triton.jit
def tile_offsets(schedule_ptr, NUM_EXPERTS: tl.constexpr):
    """Pointer to the tile offsets."""
    return schedule_ptr + (NUM_EXPERTS + 1)


@triton.jit
def expert_tiles(expert, schedule_ptr, NUM_EXPERTS: tl.constexpr):
    """(number of m tiles before an expert, number of its m tiles)."""
    tile_offsets_ptr = tile_offsets(schedule_ptr, NUM_EXPERTS)
    before = tl.load(tile_offsets_ptr + expert)
    return before, tl.load(tile_offsets_ptr + expert + 1) - before


@triton.jit
def tile_experts(schedule_ptr, NUM_EXPERTS: tl.constexpr):
    """Pointer to the expert of each m tile."""
    return schedule_ptr + (2 * NUM_EXPERTS + 2)


@triton.jit
def num_row_tiles(schedule_ptr, NUM_EXPERTS: tl.constexpr):
    """The number of m tiles."""
    return tl.load(schedule_ptr + (2 * NUM_EXPERTS + 1))


@triton.jit
def find_expert(m_tile, schedule_ptr, NUM_EXPERTS: tl.constexpr):
    """The expert of an m tile, which must be less than num_row_tiles."""
    return tl.load(tile_experts(schedule_ptr, NUM_EXPERTS) + m_tile)


@triton.jit
def find_tile(tile, schedule_ptr, TILING: tl.constexpr):
    """Tile number -> (expert, n tile, first row, rows, mask).

    Experts come in order; `grouped_order` orders the tiles of one. The caller guarantees that
    tile < num_row_tiles * NUM_N_TILES.
    """
    expert = find_expert(tile // TILING.NUM_N_TILES, schedule_ptr, TILING.NUM_EXPERTS)
    before, num_m_tiles = expert_tiles(expert, schedule_ptr, TILING.NUM_EXPERTS)
    within = tile - before * TILING.NUM_N_TILES
    m_tile, n_tile = grouped_order(within, num_m_tiles, TILING.NUM_N_TILES, TILING.GROUP_M)
    first_row, rows, mask = rows_of_tile(expert, m_tile, schedule_ptr, TILING.BLOCK_M)
    return expert, n_tile, first_row, rows, mask


@triton.jit
def grouped_order(tile, num_m_tiles, NUM_N_TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """Number of a tile within its expert -> (m tile, n tile).

    GROUP_M m tiles go through the n tiles together, so that they read a weight tile from L2. If fewer than half of
    GROUP_M are left over, they go with the last group: on their own they would read all weights again.
    """
    last = tl.maximum((num_m_tiles + GROUP_M // 2) // GROUP_M - 1, 0)
    group = tl.minimum(tile // (GROUP_M * NUM_N_TILES), last)
    group_size = tl.where(group == last, num_m_tiles - last * GROUP_M, GROUP_M)
    group_size = tl.maximum(group_size, 1)  # an expert without tiles: the result is not used
    within_group = tile - group * (GROUP_M * NUM_N_TILES)
    return group * GROUP_M + within_group % group_size, within_group // group_size


@triton.jit
def rows_of_tile(expert, m_tile, schedule_ptr, BLOCK_M: tl.constexpr):
    """(first row, rows, mask) of an expert's m tile."""
    first_row = tl.load(schedule_ptr + expert) + m_tile * BLOCK_M
    rows, mask = tile_rows(first_row, tl.load(schedule_ptr + expert + 1) - first_row, BLOCK_M)
    return first_row, rows, mask


@triton.jit
def tile_rows(first_row, count, BLOCK_M: tl.constexpr):
    """(rows, mask) of a tile whose expert has `count` rows from its first one on.

    Rows past the expert's last one repeat it, so that every address is valid. The mask leaves them out of stores, and
    out of loads, which would read that one row many times.
    """
    index = tl.arange(0, BLOCK_M)
    return first_row + tl.minimum(index, count - 1), index < count


@triton.jit
def tile_ptrs(ptr, first_row, first_column, ROW_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to a (BLOCK_M, BLOCK_N) tile of a contiguous (rows, ROW_SIZE) tensor; offsets in the tile are int32."""
    offsets = tl.arange(0, BLOCK_M)[:, None] * ROW_SIZE + tl.arange(0, BLOCK_N)[None, :]
    return ptr + (first_row.to(tl.int64) * ROW_SIZE + first_column) + offsets


@triton.jit
def add_bias(acc, bias_ptr, stride_bn, first_column, scales, N: tl.constexpr):
    """acc plus its columns of an expert's bias, (N,), each times the row's scale if given; acc without bias_ptr."""
    if bias_ptr is None:
        return acc
    else:
        columns = first_column + tl.arange(0, acc.shape[1])
        bias = load_bias(bias_ptr, stride_bn, columns, N)[None, :]
        return acc + (bias if scales is None else scales[:, None] * bias)


@triton.jit
def load_bias(bias_ptr, stride_bn, columns, N: tl.constexpr):
    """Values of an expert's bias, (N,), in fp32; 0 for columns from N on."""
    return tl.load(bias_ptr + columns.to(tl.int64) * stride_bn, mask=columns < N, other=0.0).to(tl.float32)


@triton.jit
def load_slots(row_to_slot_ptr, rows):
    """The slot of each row; the row itself without row_to_slot_ptr."""
    return rows if row_to_slot_ptr is None else tl.load(row_to_slot_ptr + rows)


@triton.jit
def load_scales(scales_ptr, rows):
    """One factor per row, in fp32."""
    return tl.load(scales_ptr + rows).to(tl.float32)


@triton.jit
def store_columns(ptr, value, first_row, row_mask, first_column, N: tl.constexpr):
    """Stores columns of a tile to a contiguous (rows, N) tensor."""
    inside = first_column + tl.arange(0, value.shape[1]) < N
    ptrs = tile_ptrs(ptr, first_row, first_column, N, value.shape[0], value.shape[1])
    tl.store(ptrs, value.to(ptr.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])


@triton.jit
def store_parts(ptr, stride_pn, parts, n_tile, first_row, row_mask):
    """Stores an n tile's part of an inner product of each row to a (n tiles, rows) tensor; nothing without ptr."""
    if ptr is not None:
        ptrs = ptr + tl.cast(n_tile, tl.int64) * stride_pn + first_row + tl.arange(0, parts.shape[0])
        tl.store(ptrs, parts, mask=row_mask)


@triton.jit
def column_pieces(acc, PIECES: tl.constexpr):
    """A tile as a tuple of PIECES tiles of neighbouring columns.

    An epilogue that takes them one after the other needs fewer registers.
    """
    if PIECES == 1:
        return (acc,)
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))
        return column_pieces(left, PIECES // 2) + column_pieces(right, PIECES // 2)


@triton.jit
def scale_rows(value, scales):
    """value times one factor per row; value itself without scales."""
    return value if scales is None else scales[:, None] * value


@triton.jit
def tokens_of(slots, TOP_K: tl.constexpr):
    """The token of each slot, slot // TOP_K, or with TOP_K == 0, where slots are rows, the row itself. int64."""
    return (slots if TOP_K == 0 else slots // TOP_K).to(tl.int64)


@triton.jit
def source_rows(rows, row_to_slot_ptr, TOP_K: tl.constexpr):
    """The row of the operand that each routed row reads: its token or, with TOP_K == 0, itself. int64."""
    return tokens_of(rows if TOP_K == 0 else tl.load(row_to_slot_ptr + rows), TOP_K)
