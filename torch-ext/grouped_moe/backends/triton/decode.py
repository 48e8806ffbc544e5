"""The forward of the experts block for a few tokens, without gradients: two launches that stream weights."""

from functools import lru_cache
from typing import NamedTuple, Tuple

import torch
from torch import Tensor

from ...block import Block
from ...common.activation import Activation
from ...rows import unit_rows
from ..kernels.decode import slot_down_proj_kernel, slot_up_proj_kernel
from .gemm import bias_and_strides
from .launch import Kernel

_MAX_TOP_K = 32  # sums of all choices of a token lie in the registers of one program
_MAX_SHARED_BYTES = 28 << 20  # of weights that slots read again, on average: in as much time slots are routed


def is_decode(block: Block, num_tokens: int, top_k: int) -> bool:
    """Whether the kernels for a few tokens win: slots hardly ever share an expert; weights are contiguous along K.

    Of wide types the sums of long rows do not fit the registers everywhere.
    """
    k = 1 if block.transposed else 2
    if top_k > _MAX_TOP_K or block.up.dtype.itemsize != 2 or block.up.stride(k) != 1 or block.down.stride(k) != 1:
        return False
    if num_tokens == 1:
        return True
    # Two tokens of random routing share top_k^2 / E experts.
    shared = num_tokens * (num_tokens - 1) // 2 * top_k * top_k
    weights = (block.up.numel() + block.down.numel()) * block.up.dtype.itemsize
    few = 4 * num_tokens * top_k <= block.num_experts
    return few and shared * weights <= _MAX_SHARED_BYTES * block.num_experts**2


class _Problem(NamedTuple):
    """What both kernels are compiled for; num_choices: top_k."""

    dtype: torch.dtype
    num_experts: int
    num_choices: int
    h: int
    i: int
    gated: bool
    interleaved: bool
    activation: Activation


def _up_tile(k: int) -> Tuple[int, int, int]:
    """BLOCK_N, BLOCK_K, num_warps: long steps, but where they would leave a long tail."""
    return (4, 1024, 2) if k > 2048 and k % 2048 else (4, 2048, 4)


def _down_tile(k: int, choices: int) -> Tuple[int, int, int]:
    """The same, of BLOCK_N columns for each choice: fewer in a program where K is long or has a tail.

    A thread has 128 products or fewer.
    """
    rows, block_k = (32, 256) if k % 256 == 0 and k <= 1536 else (8, 512 if choices <= 8 else 256)
    block_n = max(1, rows // choices)
    return block_n, block_k, max(1, choices * block_n * block_k // 4096)


def _narrowed(block_k: int, k: int) -> int:
    """No more than K needs, nor less than the kernels add up at once."""
    return min(block_k, max(8, 1 << (k - 1).bit_length()))


def _describe(block_n: int, block_k: int, warps: int) -> str:
    return f"Triton for a few tokens, tile {block_n}x{block_k}, {warps} warps, heuristic"


@lru_cache(maxsize=None)
def _up_kernel(problem: _Problem) -> Kernel:
    block_n, block_k, warps = _up_tile(problem.h)
    block_k, activation = _narrowed(block_k, problem.h), problem.activation
    constants = {
        "NUM_EXPERTS": problem.num_experts, "N": problem.i, "K": problem.h, "TOP_K": problem.num_choices,
        "GATED": problem.gated, "INTERLEAVED": problem.interleaved, "ACTIVATION": activation.name,
        "ALPHA": activation.alpha, "LIMIT": activation.limit, "UP_OFFSET": activation.up_offset,
        "BLOCK_N": block_n, "BLOCK_K": block_k,
    }  # fmt: skip
    return Kernel(slot_up_proj_kernel, constants, {"num_warps": warps}, _describe(block_n, block_k, warps))


@lru_cache(maxsize=None)
def _down_kernel(problem: _Problem) -> Kernel:
    choices = 1 << (problem.num_choices - 1).bit_length()
    block_n, block_k, warps = _down_tile(problem.i, choices)
    block_k = _narrowed(block_k, problem.i)
    constants = {
        "NUM_EXPERTS": problem.num_experts, "N": problem.h, "K": problem.i, "TOP_K": problem.num_choices,
        "TOP_K_POW2": choices, "BLOCK_N": block_n, "BLOCK_K": block_k,
    }  # fmt: skip
    return Kernel(slot_down_proj_kernel, constants, {"num_warps": warps}, _describe(block_n, block_k, warps))


def decode(block: Block, x: Tensor, top_k_index: Tensor, weights: Tensor) -> Tensor:
    """out (T, H) of the experts block, for calls that `is_decode` takes; T above 0."""
    x, ids = unit_rows(x), top_k_index if top_k_index.is_contiguous() else top_k_index.contiguous()
    (num_tokens, top_k), h, i, n_dim = ids.shape, x.shape[1], block.intermediate, 2 if block.transposed else 1
    problem = _Problem(
        x.dtype, block.num_experts, top_k, h, i, block.gated, block.interleaved, block.activation
    )  # fmt: skip
    up, down, up_kernel, down_kernel = block.up, block.down, _up_kernel(problem), _down_kernel(problem)
    act = x.new_empty((num_tokens * top_k, i))
    up_kernel(
        (-(-i // up_kernel.constants["BLOCK_N"]), num_tokens * top_k, 1), x, x.stride(0), ids, up, up.stride(0),
        up.stride(n_dim), *bias_and_strides(block.up_bias), act,
    )  # fmt: skip
    out = x.new_empty((num_tokens, h))
    down_kernel(
        (-(-h // down_kernel.constants["BLOCK_N"]), num_tokens, 1), act, ids, weights, down, down.stride(0),
        down.stride(n_dim), *bias_and_strides(block.down_bias), out,
    )  # fmt: skip
    return out
