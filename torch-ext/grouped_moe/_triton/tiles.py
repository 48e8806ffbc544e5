"""What every grouped kernel shares: which expert and which rows a tile covers, and where a row comes from.

Row offsets: a row index is int32 (fewer than 2^31 rows); the product with a stride is int64 (more than 2^31 elements).
"""

import triton
import triton.language as tl


@triton.jit
def num_row_tiles(schedule_ptr, NUM_EXPERTS: tl.constexpr):
    """How many m tiles there are. A schedule is laid out as `grouped_moe.schedule.Schedule` says."""
    return tl.load(schedule_ptr + (2 * NUM_EXPERTS + 1))


@triton.jit
def find_row_tile(tile, schedule_ptr, NUM_EXPERTS: tl.constexpr):
    """Number of an m tile -> its expert. The caller has checked that there is such a tile."""
    return tl.load(schedule_ptr + (2 * NUM_EXPERTS + 2) + tile)


@triton.jit
def find_tile(tile, schedule_ptr, NUM_EXPERTS: tl.constexpr, NUM_N_TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile number -> (expert, m tile within the expert, n tile).

    Experts come in order. Within one, some m tiles go through the n tiles together, so that a weight tile is read
    from L2 by its neighbours. The caller has checked that tile < num_row_tiles * NUM_N_TILES.
    """
    tile_offsets_ptr = schedule_ptr + (NUM_EXPERTS + 1)
    expert = find_row_tile(tile // NUM_N_TILES, schedule_ptr, NUM_EXPERTS)
    first = tl.load(tile_offsets_ptr + expert)
    num_m_tiles = tl.load(tile_offsets_ptr + expert + 1) - first
    within = tile - first * NUM_N_TILES
    m_tile, n_tile = grouped_order(within, num_m_tiles, NUM_N_TILES, GROUP_M)
    return expert, m_tile, n_tile


@triton.jit
def grouped_order(tile, num_m_tiles, NUM_N_TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile number -> (m tile, n tile): GROUP_M m tiles go through the n tiles together.

    Those left over go with the group before them if they are fewer than half: they would read all weights again.
    """
    last = tl.maximum((num_m_tiles + GROUP_M // 2) // GROUP_M - 1, 0)
    group = tl.minimum(tile // (GROUP_M * NUM_N_TILES), last)
    group_size = tl.where(group == last, num_m_tiles - last * GROUP_M, GROUP_M)
    group_size = tl.maximum(group_size, 1)  # of no m tiles: what is returned then is not used
    within_group = tile - group * (GROUP_M * NUM_N_TILES)
    return group * GROUP_M + within_group % group_size, within_group // group_size


@triton.jit
def tile_rows(expert, m_tile, expert_offsets_ptr, BLOCK_M: tl.constexpr):
    """Rows of a tile: (first row, rows in range, mask).

    Rows past the expert's last one repeat it, so that every address is valid; the mask keeps them out of every store
    and out of loads, which would read that one row many times.
    """
    first = tl.load(expert_offsets_ptr + expert) + m_tile * BLOCK_M
    count = tl.load(expert_offsets_ptr + expert + 1) - first
    index = tl.arange(0, BLOCK_M)
    return first, first + tl.minimum(index, count - 1), index < count


@triton.jit
def tile_ptrs(ptr, first_row, first_column, ROW_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to a (BLOCK_M, BLOCK_N) tile of a contiguous (rows, ROW_SIZE) tensor: int64 to it, int32 within."""
    offsets = tl.arange(0, BLOCK_M)[:, None] * ROW_SIZE + tl.arange(0, BLOCK_N)[None, :]
    return ptr + (first_row.to(tl.int64) * ROW_SIZE + first_column) + offsets


@triton.jit
def add_bias(acc, bias_ptr, stride_bn, first_column, scales, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """acc plus BLOCK_N of an expert's N bias values, times the row's scale if given; acc itself without a bias."""
    if bias_ptr is None:
        return acc
    else:
        columns = first_column + tl.arange(0, BLOCK_N)
        bias = tl.load(bias_ptr + columns.to(tl.int64) * stride_bn, mask=columns < N, other=0.0)
        bias = bias.to(tl.float32)[None, :]
        return acc + (bias if scales is None else scales[:, None] * bias)


@triton.jit
def load_scales(scales_ptr, rows):
    """One fp32 factor per row."""
    return tl.load(scales_ptr + rows).to(tl.float32)


@triton.jit
def store_columns(
    ptr, value, first_row, row_mask, first_column, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Stores BLOCK_N columns of a tile to a contiguous (rows, N) tensor."""
    inside = first_column + tl.arange(0, BLOCK_N) < N
    ptrs = tile_ptrs(ptr, first_row, first_column, N, BLOCK_M, BLOCK_N)
    tl.store(ptrs, value.to(ptr.dtype.element_ty), mask=row_mask[:, None] & inside[None, :])


@triton.jit
def column_halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and right half of a tile: an epilogue that takes them in turn keeps half the values in registers."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def source_rows(rows, row_to_slot_ptr, TOP_K: tl.constexpr):
    """Where routed rows are read: TOP_K == 0, in place; else at their token, slot // TOP_K."""
    if TOP_K == 0:
        return rows.to(tl.int64)
    else:
        return (tl.load(row_to_slot_ptr + rows) // TOP_K).to(tl.int64)


@triton.jit
def load_weights(w_ptrs, k_mask, n_mask, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr):
    """A (BLOCK_K, BLOCK_N) weight tile, 0 past either extent. An unneeded mask would cost vectorized loads."""
    if EVEN_K and EVEN_N:
        return tl.load(w_ptrs)
    elif EVEN_N:
        return tl.load(w_ptrs, mask=k_mask[:, None], other=0.0)
    elif EVEN_K:
        return tl.load(w_ptrs, mask=n_mask[None, :], other=0.0)
    else:
        return tl.load(w_ptrs, mask=k_mask[:, None] & n_mask[None, :], other=0.0)


@triton.jit
def dot_tile(
    x_ptrs,  # (BLOCK_M, BLOCK_K) pointers at k = 0
    row_mask,  # (BLOCK_M,) rows to read; the others, which point at the expert's last one, count as 0
    stride_xk,
    w_ptrs,  # (BLOCK_K, BLOCK_N) pointers at k = 0
    stride_wk,
    n_mask,  # (BLOCK_N,) columns in range
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x @ w over K, in fp32. A K tail is masked in both operands."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs, mask=row_mask[:, None] & (k < K - start)[None, :], other=0.0)
        w = load_weights(w_ptrs, k < K - start, n_mask, K % BLOCK_K == 0, N % BLOCK_N == 0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
        w_ptrs += tl.cast(stride_wk, tl.int64) * BLOCK_K
    return acc


@triton.jit
def dot_tile_tma(
    x_desc,  # (rows, K), blocks of (BLOCK_M, BLOCK_K)
    first_row,
    w_desc,  # (E, K, N), blocks of (1, BLOCK_K, BLOCK_N), if W_KN; else (E, N, K), blocks of (1, BLOCK_N, BLOCK_K)
    expert,
    first_column,
    K: tl.constexpr,
    W_KN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The same by the tensor memory accelerator, which reads 0 past every extent.

    Rows past the expert's last one are the next expert's, or unwritten: the caller must not store their results.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([first_row, k])
        if W_KN:
            w = w_desc.load([expert, k, first_column]).reshape(BLOCK_K, BLOCK_N)
        else:
            w = w_desc.load([expert, first_column, k]).reshape(BLOCK_N, BLOCK_K).T
        acc = tl.dot(x, w, acc)
    return acc
