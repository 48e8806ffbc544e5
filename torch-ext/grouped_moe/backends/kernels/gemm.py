"""Grouped GEMM over rows that are sorted by expert, and the weight gradient over an expert's rows."""

import triton
import triton.language as tl

from .dependent import wait_for_stream
from .epilogues import gemm_epilogue
from .low_rank import LowRank, add_low_rank
from .products import Weights, dot_rows_advancing, load_w, locate_rows
from .tiles import column_pieces, end_of_rows, expert_rows, find_tile, grouped_order, num_row_tiles, source_rows


@triton.jit
def zero_chunk(y_ptr, first_row, end_row, chunk, N: tl.constexpr, CHUNK: tl.constexpr):
    """Zeros the chunk-th CHUNK elements of the rows [first_row, end_row) of a contiguous (rows, N) tensor."""
    index = tl.cast(chunk, tl.int64) * CHUNK + tl.arange(0, CHUNK)
    size = tl.cast(end_row - first_row, tl.int64) * N
    zeros = tl.zeros((CHUNK,), y_ptr.dtype.element_ty)
    tl.store(y_ptr + tl.cast(first_row, tl.int64) * N + index, zeros, mask=index < size)


@triton.jit
def zero_rows(y_ptr, first_row, end_row, first_chunk, N: tl.constexpr, CHUNK: tl.constexpr):
    """Zeros the rows [first_row, end_row) from chunk first_chunk on; the programs of axis 0 share the chunks."""
    size = tl.cast(end_row - first_row, tl.int64) * N
    for chunk in tl.range(first_chunk + tl.program_id(0), tl.cdiv(size, CHUNK), tl.num_programs(0)):
        zero_chunk(y_ptr, first_row, end_row, chunk, N, CHUNK)


@triton.jit(do_not_specialize=["total_rows"])
def zero_ungrouped_kernel(
    y_ptr, offsets_ptr, total_rows, NUM_GROUPS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr
):
    """y[r] = 0 for r < offsets[0] and for offsets[G] <= r < total_rows.

    Grid: (programs,).
    The caller guarantees 0 <= offsets[0] <= offsets[G] <= total_rows.
    """
    wait_for_stream()
    zero_rows(y_ptr, tl.load(offsets_ptr) * 0, tl.load(offsets_ptr), 0, N, CHUNK)
    zero_rows(y_ptr, end_of_rows(offsets_ptr, NUM_GROUPS), total_rows, 0, N, CHUNK)


@triton.jit(do_not_specialize=["total_rows"])
def grouped_gemm_kernel(
    x_ptr, stride_xr, stride_xk,  # (rows, K); with TMA its descriptor
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, N, K) by strides; with TMA its descriptor, (E, K, N) if W_KN
    bias_ptr, stride_be, stride_bn,  # (E, N) or None
    scales_ptr,  # (rows,) or None
    projected_ptr, factor_ptr,  # the low-rank part, as `.low_rank.LowRank` has it, or None
    y_ptr,  # (rows, N), out
    schedule_ptr,
    total_rows,
    N: tl.constexpr, ZERO_UNGROUPED: tl.constexpr, BLOCK_N: tl.constexpr,
    TILING: tl.constexpr, PRODUCT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """y[r] = W[e] x[r] + scales[r] bias[e] for the rows r of expert e.

    The low-rank part is in W. Rows of no expert are set to 0 if ZERO_UNGROUPED, else not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M.
    """
    wait_for_stream()
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    BLOCK_K: tl.constexpr = PRODUCT.BLOCK_K
    w, low_rank = Weights(w_ptr, stride_we, stride_wn, stride_wk), LowRank(projected_ptr, factor_ptr)
    num_tiles = num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES
    last_row = end_of_rows(schedule_ptr, TILING.NUM_EXPERTS)
    # Flattened, a tile's loads start before the previous tile is stored. Without TMA, each step would compute pointers.
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=PRODUCT.TMA and FACTOR.R == 0):
        expert, n_tile, first_row, rows, row_mask = find_tile(tile, schedule_ptr, TILING)
        column = n_tile * BLOCK_N
        if PRODUCT.TMA:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(0, PRODUCT.K, BLOCK_K):
                # Rows past the expert's last one are the next expert's: their results are not stored.
                x_tile = x_ptr.load([first_row, k])
                acc = tl.dot(x_tile, load_w(w, expert, column, k, N, N % BLOCK_N == 0, BLOCK_N, PRODUCT), acc)
        else:
            x = locate_rows(x_ptr, stride_xr, stride_xk, rows.to(tl.int64), row_mask, BLOCK_K)
            acc = dot_rows_advancing(x, w, expert, column, N, BLOCK_N, PRODUCT)
        acc = add_low_rank(acc, low_rank, expert, rows, row_mask, column, N, FACTOR, PRODUCT)
        gemm_epilogue(
            acc, bias_ptr, stride_be, stride_bn, scales_ptr, y_ptr, expert, rows, first_row, row_mask, column, N
        )
        if ZERO_UNGROUPED:
            # As many zeros as results with each tile: they are stored while the next tile is computed.
            zero_chunk(y_ptr, last_row, total_rows, tile, N, BLOCK_M * BLOCK_N)
    if ZERO_UNGROUPED:
        zero_rows(y_ptr, last_row, total_rows, num_tiles, N, BLOCK_M * BLOCK_N)
        first_row = tl.load(schedule_ptr)
        zero_rows(y_ptr, first_row * 0, first_row, 0, N, BLOCK_M * BLOCK_N)


@triton.jit
def load_transposed_pair(
    p_ptr, stride_pr, q_ptr, stride_qr, row_to_slot_ptr, start, end, m, n,
    M: tl.constexpr, N: tl.constexpr, P_TOP_K: tl.constexpr, Q_TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """p^T (BLOCK_M, BLOCK_K) and q (BLOCK_K, BLOCK_N) of the BLOCK_K rows from `start` on.

    Rows from `end` on are 0 in both: 0 * NaN is NaN.
    """
    rows = start + tl.arange(0, BLOCK_K)
    mask = rows < end
    rows = tl.minimum(rows, end - 1)
    p_ptrs = p_ptr + source_rows(rows, row_to_slot_ptr, P_TOP_K)[None, :] * stride_pr + m[:, None]
    q_ptrs = q_ptr + source_rows(rows, row_to_slot_ptr, Q_TOP_K)[:, None] * stride_qr + n[None, :]
    p = tl.load(p_ptrs, mask=mask[None, :] & (m < M)[:, None], other=0.0)
    q = tl.load(q_ptrs, mask=mask[:, None] & (n < N)[None, :], other=0.0)
    return p, q


# To compute one group alone, the launcher passes a pointer into the offsets, of any alignment.
@triton.jit(do_not_specialize_on_alignment=["expert_offsets_ptr"])
def wgrad_kernel(
    p_ptr, stride_pr,  # (rows, M), or (T, M) read at row_to_slot[row] // P_TOP_K; columns contiguous
    q_ptr, stride_qr,  # (rows, N), or (T, N) read at row_to_slot[row] // Q_TOP_K; columns contiguous
    p_desc, q_desc,  # with TMA: the same, in blocks of (BLOCK_K, BLOCK_M) and (BLOCK_K, BLOCK_N); else None
    dw_ptr, stride_de, stride_dm, stride_dn,  # (E, M, N) by strides, out
    dw_desc,  # the same in blocks of (1, BLOCK_M, BLOCK_N), or None
    row_to_slot_ptr,  # (rows,) int32 or None
    expert_offsets_ptr,  # (E + 1,) int32
    M: tl.constexpr, N: tl.constexpr, P_TOP_K: tl.constexpr, Q_TOP_K: tl.constexpr,
    ROW_UNIT: tl.constexpr,  # that divides stride_pr and stride_qr
    ACCUMULATE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    TILING: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dw[e] = sum over the rows r of expert e of p[r] q[r]^T; with ACCUMULATE the sum is added to dw[e].

    An expert without rows gets 0, with ACCUMULATE it keeps its values.
    Grid: (programs,), persistent.
    The caller guarantees dw_desc is None with ACCUMULATE.
    """
    wait_for_stream()
    BLOCK_M: tl.constexpr = TILING.BLOCK_M
    NUM_M_TILES: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    NUM_TILES: tl.constexpr = NUM_M_TILES * TILING.NUM_N_TILES
    # Triton knows by itself which arguments are multiples of 16: rows of 8 columns would be read element by element.
    stride_pr, stride_qr = stride_pr // ROW_UNIT * ROW_UNIT, stride_qr // ROW_UNIT * ROW_UNIT
    for tile in tl.range(tl.program_id(0), TILING.NUM_EXPERTS * NUM_TILES, tl.num_programs(0)):
        expert = tile // NUM_TILES
        m_tile, n_tile = grouped_order(tile % NUM_TILES, NUM_M_TILES, TILING.NUM_N_TILES, TILING.GROUP_M)
        m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        start, end = expert_rows(expert, expert_offsets_ptr)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if TMA:
            # Full steps go by descriptor. The rest goes by pointer: a descriptor cannot mask the next expert's rows.
            whole = start + (end - start) // BLOCK_K * BLOCK_K
            for k in tl.range(start, whole, BLOCK_K):
                acc = tl.dot(p_desc.load([k, m_tile * BLOCK_M]).T, q_desc.load([k, n_tile * BLOCK_N]), acc)
            if whole < end:
                p, q = load_transposed_pair(
                    p_ptr, stride_pr, q_ptr, stride_qr, row_to_slot_ptr, whole, end, m, n,
                    M, N, P_TOP_K, Q_TOP_K, BLOCK_K,
                )  # fmt: skip
                acc = tl.dot(p, q, acc, input_precision=PRECISION)
        else:
            for k in tl.range(start, end, BLOCK_K):
                p, q = load_transposed_pair(
                    p_ptr, stride_pr, q_ptr, stride_qr, row_to_slot_ptr, k, end, m, n,
                    M, N, P_TOP_K, Q_TOP_K, BLOCK_K,
                )  # fmt: skip
                acc = tl.dot(p, q, acc, input_precision=PRECISION)
        if dw_desc is not None:
            value = acc.to(dw_ptr.dtype.element_ty).reshape(1, BLOCK_M, BLOCK_N)
            dw_desc.store([expert, m_tile * BLOCK_M, n_tile * BLOCK_N], value)
        else:
            # An expert without rows has nothing to add.
            columns_end = tl.where(start < end, N, 0) if ACCUMULATE else N
            expert_ptr = dw_ptr + expert.to(tl.int64) * stride_de + m.to(tl.int64)[:, None] * stride_dm
            halves = column_pieces(acc, 2)
            for i in tl.static_range(2):
                columns = n_tile * BLOCK_N + tl.arange(0, BLOCK_N // 2) + i * (BLOCK_N // 2)
                dw_ptrs = expert_ptr + columns.to(tl.int64)[None, :] * stride_dn
                mask = (m < M)[:, None] & (columns < columns_end)[None, :]
                value = halves[i]
                if ACCUMULATE:
                    value += tl.load(dw_ptrs, mask=mask, other=0.0).to(tl.float32)
                tl.store(dw_ptrs, value.to(dw_ptr.dtype.element_ty), mask=mask)
