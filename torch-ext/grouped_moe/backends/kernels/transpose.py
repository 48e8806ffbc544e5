"""Codes of weights, transposed in memory."""

import triton
import triton.language as tl

from .dependent import wait_for_stream
from .products import load_masked


@triton.jit
def transpose_kernel(
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, N, K) bytes, by strides
    out_ptr,  # (E, K, N) bytes, contiguous, out
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[e, k, n] = w[e, n, k].

    Grid: (n tiles, k tiles, E).
    """
    wait_for_stream()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    expert, n_inside, k_inside = tl.program_id(2).to(tl.int64), n < N, k < K
    w_ptrs = w_ptr + expert * stride_we + n.to(tl.int64)[:, None] * stride_wn + k.to(tl.int64)[None, :] * stride_wk
    codes = load_masked(w_ptrs, n_inside, k_inside, N % BLOCK_N == 0, K % BLOCK_K == 0)
    out_ptrs = out_ptr + (expert * K + k.to(tl.int64)[:, None]) * N + n[None, :]
    tl.store(out_ptrs, tl.trans(codes), mask=k_inside[:, None] & n_inside[None, :])
