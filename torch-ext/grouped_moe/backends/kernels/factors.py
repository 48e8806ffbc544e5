"""Factors of low-rank pairs whose experts lie side by side in memory, copied to where their ranks do."""

import triton
import triton.language as tl

from .dependent import wait_for_stream


@triton.jit
def pack_factor_kernel(
    factor_ptr,  # (E, N, RANK) by strides
    packed_ptr,  # (E, N, R), contiguous, out
    NUM_EXPERTS: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr,
    STRIDE_FE: tl.constexpr, STRIDE_FN: tl.constexpr, STRIDE_FR: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_NR: tl.constexpr,
):  # fmt: skip
    """packed[e, n] = factor[e, n], 0 past the last rank.

    Grid: (blocks of the N R numbers of an expert, expert blocks).
    """
    wait_for_stream()
    numbers = tl.program_id(0) * BLOCK_NR + tl.arange(0, BLOCK_NR)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    n, ranks, inside = numbers // R, numbers % R, (experts < NUM_EXPERTS)[:, None] & (numbers < N * R)[None, :]
    experts = experts.to(tl.int64)[:, None]
    factor_ptrs = factor_ptr + experts * STRIDE_FE + (n.to(tl.int64) * STRIDE_FN + ranks.to(tl.int64) * STRIDE_FR)
    values = tl.load(factor_ptrs, mask=inside & (ranks < RANK)[None, :], other=0.0)
    tl.store(packed_ptr + experts * (N * R) + numbers, values.to(packed_ptr.dtype.element_ty), mask=inside)
