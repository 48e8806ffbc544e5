"""Grouped GEMM over rows that are sorted by expert, and the weight gradient over an expert's rows."""

import triton
import triton.language as tl

from .tiles import add_bias, column_halves, dot_tile, find_tile, source_rows, store_columns, tile_rows


@triton.jit
def grouped_gemm_kernel(
    x_ptr, stride_xr, stride_xk,  # (rows, K)
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, N, K) by strides
    bias_ptr, stride_be, stride_bn,  # (E, N) or None
    y_ptr,  # (rows, N), out: rows of no expert are not written
    expert_offsets_ptr,  # (E + 1,) int32
    tile_offsets_ptr,  # (E + 1,) int32
    tile_to_expert_ptr,  # (max_tiles,) int32
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """y[r] = W[e] x[r] + bias[e] for the rows r of expert e.

    Grid: (programs,), persistent. The caller guarantees a schedule made for BLOCK_M.
    """
    NUM_N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_tiles = tl.load(tile_offsets_ptr + NUM_EXPERTS) * NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, m_tile, n_tile = find_tile(tile, tile_to_expert_ptr, tile_offsets_ptr, NUM_N_TILES, GROUP_M)
        first_row, rows, row_mask = tile_rows(expert, m_tile, expert_offsets_ptr, BLOCK_M)
        columns = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = columns < N
        k = tl.arange(0, BLOCK_K).to(tl.int64)
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_xr + k[None, :] * stride_xk
        w_ptrs = (
            w_ptr + expert.to(tl.int64) * stride_we + columns.to(tl.int64)[None, :] * stride_wn + k[:, None] * stride_wk
        )
        acc = dot_tile(x_ptrs, stride_xk, w_ptrs, stride_wk, n_mask, N, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
        expert_bias_ptr = bias_ptr + expert.to(tl.int64) * stride_be if bias_ptr is not None else None
        left, right = column_halves(acc, BLOCK_M, BLOCK_N)
        column = n_tile * BLOCK_N
        left = add_bias(left, expert_bias_ptr, stride_bn, column, N, BLOCK_N // 2)
        store_columns(y_ptr, left, first_row, row_mask, column, N, BLOCK_M, BLOCK_N // 2)
        column += BLOCK_N // 2
        right = add_bias(right, expert_bias_ptr, stride_bn, column, N, BLOCK_N // 2)
        store_columns(y_ptr, right, first_row, row_mask, column, N, BLOCK_M, BLOCK_N // 2)


@triton.jit
def wgrad_kernel(
    p_ptr, stride_pr,  # (rows, M), or (T, M) read at row_to_slot[row] // P_TOP_K; columns contiguous
    q_ptr, stride_qr,  # (rows, N), or (T, N) read at row_to_slot[row] // Q_TOP_K; columns contiguous
    dw_ptr, stride_de, stride_dm, stride_dn,  # (E, M, N) by strides, out: all of it is written
    row_to_slot_ptr,  # (rows,) int32 or None
    expert_offsets_ptr,  # (E + 1,) int32
    M: tl.constexpr,
    N: tl.constexpr,
    P_TOP_K: tl.constexpr,
    Q_TOP_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """dw[e] = sum over the rows r of expert e of p[r] q[r]^T, zero for an expert without rows.

    Grid: (E * m tiles * n tiles,). Rows past the expert's last one are masked in both operands: 0 * NaN is NaN.
    """
    NUM_M_TILES: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    NUM_N_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert = tl.program_id(0) // (NUM_M_TILES * NUM_N_TILES)
    within = tl.program_id(0) % (NUM_M_TILES * NUM_N_TILES)
    group = within // (GROUP_M * NUM_N_TILES)
    group_size = tl.minimum(NUM_M_TILES - group * GROUP_M, GROUP_M)
    within_group = within - group * (GROUP_M * NUM_N_TILES)
    m = (group * GROUP_M + within_group % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (within_group // group_size) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(expert_offsets_ptr + expert)
    end = tl.load(expert_offsets_ptr + expert + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(start, end, BLOCK_K):
        rows = k + tl.arange(0, BLOCK_K)
        mask = rows < end
        rows = tl.minimum(rows, end - 1)
        p_rows = source_rows(rows, row_to_slot_ptr, P_TOP_K)
        q_rows = source_rows(rows, row_to_slot_ptr, Q_TOP_K)
        p_ptrs = p_ptr + p_rows[None, :] * stride_pr + m[:, None]
        q_ptrs = q_ptr + q_rows[:, None] * stride_qr + n[None, :]
        p = tl.load(p_ptrs, mask=mask[None, :] & (m < M)[:, None], other=0.0)
        q = tl.load(q_ptrs, mask=mask[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(p, q, acc, input_precision=PRECISION)
    dw_ptrs = (
        dw_ptr
        + expert.to(tl.int64) * stride_de
        + m.to(tl.int64)[:, None] * stride_dm
        + n.to(tl.int64)[None, :] * stride_dn
    )
    tl.store(dw_ptrs, acc.to(dw_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
