"""Factors of low-rank pairs whose experts lie side by side in memory, copied to where their ranks do."""

import triton
import triton.language as tl

from .dependent import wait_for_stream


@triton.jit
def pack_factor_kernel(
    factor_ptr,  # (E, N, RANK), as `low_rank.Factor` has it
    packed_ptr,  # (E, N, R), contiguous, out
    NUM_EXPERTS: tl.constexpr, N: tl.constexpr, FACTOR: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_NR: tl.constexpr,
):  # fmt: skip
    """packed[e, n] = factor[e, n], 0 past the last rank.

    Grid: (blocks of the N R numbers of an expert, expert blocks).
    """
    wait_for_stream()
    R: tl.constexpr = FACTOR.R
    numbers = tl.program_id(0) * BLOCK_NR + tl.arange(0, BLOCK_NR)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    n, ranks, inside = numbers // R, numbers % R, (experts < NUM_EXPERTS)[:, None] & (numbers < N * R)[None, :]
    experts = experts.to(tl.int64)[:, None]
    factor_ptrs = factor_ptr + experts * FACTOR.STRIDE_E
    factor_ptrs += n.to(tl.int64) * FACTOR.STRIDE_N + ranks.to(tl.int64) * FACTOR.STRIDE_R
    values = tl.load(factor_ptrs, mask=inside & (ranks < FACTOR.RANK)[None, :], other=0.0)
    tl.store(packed_ptr + experts * (N * R) + numbers, values.to(packed_ptr.dtype.element_ty), mask=inside)
