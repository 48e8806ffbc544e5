"""Factors of low-rank pairs, copied to memory of another layout."""

import triton
import triton.language as tl

from .dependent import wait_for_stream
from .low_rank import factor_ptrs


@triton.jit
def copy_factors_kernel(
    source_ptr, target_ptr,  # (E, N, r), as SOURCE and TARGET have them; target out
    second_source_ptr, second_target_ptr,  # of another N; or None twice
    NUM_EXPERTS: tl.constexpr, N: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr,
    SECOND_N: tl.constexpr, SECOND_SOURCE: tl.constexpr, SECOND_TARGET: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_NR: tl.constexpr,
):  # fmt: skip
    """target[e, n] = source[e, n], 0 past the last rank of the source, and the same of the second factor.

    Grid: (blocks of the N R numbers of an expert, then those of the second factor, expert blocks).
    The caller guarantees one adapter in each.
    """
    wait_for_stream()
    block, num_blocks = tl.program_id(0), (N * TARGET.R + BLOCK_NR - 1) // BLOCK_NR
    if block < num_blocks:
        copy_block(source_ptr, target_ptr, block, NUM_EXPERTS, N, SOURCE, TARGET, BLOCK_E, BLOCK_NR)
    elif second_source_ptr is not None:
        copy_block(
            second_source_ptr, second_target_ptr, block - num_blocks,
            NUM_EXPERTS, SECOND_N, SECOND_SOURCE, SECOND_TARGET, BLOCK_E, BLOCK_NR,
        )  # fmt: skip


@triton.jit
def copy_block(
    source_ptr, target_ptr, block,
    NUM_EXPERTS: tl.constexpr, N: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_NR: tl.constexpr,
):  # fmt: skip
    """A block of the numbers of BLOCK_E experts."""
    R: tl.constexpr = TARGET.R
    numbers = block * BLOCK_NR + tl.arange(0, BLOCK_NR)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = (experts < NUM_EXPERTS)[:, None] & (numbers < N * R)[None, :]
    experts, n, ranks = experts[:, None], (numbers // R)[None, :], (numbers % R)[None, :]
    source_ptrs = factor_ptrs(source_ptr, experts, n, ranks, SOURCE)
    values = tl.load(source_ptrs, mask=inside & (ranks < SOURCE.RANK), other=0.0)
    target_ptrs = factor_ptrs(target_ptr, experts, n, ranks, TARGET)
    tl.store(target_ptrs, values.to(target_ptr.dtype.element_ty), mask=inside & (ranks < TARGET.RANK))
