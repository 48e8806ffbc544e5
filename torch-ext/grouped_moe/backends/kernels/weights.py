"""Block-scaled weights, made plain, and their codes, transposed."""

import triton
import triton.language as tl

from .block_scaled import block_of, share_scale, widen_scales
from .dependent import wait_for_stream
from .products import load_masked
from .quantize import widen_codes


@triton.jit
def dequantize_kernel(
    w_ptr, stride_we, stride_wn, stride_wk,  # (E, N, K) codes, by strides
    scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks along N, blocks along K)
    out_ptr,  # (E, N, K), contiguous, out
    N: tl.constexpr, K: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[e, n, k] = w[e, n, k] scale[e, block of n, block of k], rounded once.

    Grid: (n tiles, k tiles, E).
    """
    wait_for_stream()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    expert, n_inside, k_inside = tl.program_id(2).to(tl.int64), n < N, k < K
    w_ptrs = w_ptr + expert * stride_we + n.to(tl.int64)[:, None] * stride_wn + k.to(tl.int64)[None, :] * stride_wk
    codes = load_masked(w_ptrs, n_inside, k_inside, N % BLOCK_N == 0, K % BLOCK_K == 0)
    mask = n_inside[:, None] & k_inside[None, :]
    scale_ptr += expert * stride_se
    N_BLOCK: tl.constexpr = SCALES.N_BLOCK
    K_BLOCK: tl.constexpr = SCALES.K_BLOCK
    if share_scale(BLOCK_N, N, N_BLOCK, SCALES.N_PARTS) and share_scale(BLOCK_K, K, K_BLOCK, SCALES.K_PARTS):
        n_block = block_of(tl.program_id(0) * BLOCK_N, N, N_BLOCK, SCALES.N_PARTS)
        k_block = block_of(tl.program_id(1) * BLOCK_K, K, K_BLOCK, SCALES.K_PARTS)
        scales = tl.load(scale_ptr + n_block.to(tl.int64) * stride_sn + k_block.to(tl.int64) * stride_sk)
    else:
        n_block, k_block = block_of(n, N, N_BLOCK, SCALES.N_PARTS), block_of(k, K, K_BLOCK, SCALES.K_PARTS)
        scale_ptrs = scale_ptr + n_block.to(tl.int64)[:, None] * stride_sn
        scales = tl.load(scale_ptrs + k_block.to(tl.int64)[None, :] * stride_sk, mask=mask, other=0)
    value = widen_codes(codes, tl.float32) * widen_scales(scales)
    out_ptrs = out_ptr + (expert * N + n.to(tl.int64)[:, None]) * K + k[None, :]
    tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=mask)


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
