"""The forward of the experts block for a few tokens, without gradients: two launches that stream weights."""

from functools import lru_cache
from typing import Tuple

from torch import Tensor

from .activation import Activation
from .block import Block
from .gemm import bias_strides, nk_strides, unit_rows
from .launch import Kernel

_UP_TILE = (4, 2048, 4)  # BLOCK_N, BLOCK_K, num_warps
_DOWN_TILE = (32, 256, 2)  # rows (BLOCK_N times the choices), BLOCK_K, num_warps
_MAX_TOP_K = 32  # sums of all choices of a token lie in the registers of one program


def is_decode(block: Block, num_tokens: int, top_k: int) -> bool:
    """Whether the kernels for a few tokens win: slots hardly ever share an expert; weights are contiguous along K.

    Of wide types the sums of long rows do not fit the registers everywhere.
    """
    k = 1 if block.transposed else 2
    few = (num_tokens == 1 or 4 * num_tokens * top_k <= block.num_experts) and top_k <= _MAX_TOP_K
    return few and block.up.dtype.itemsize == 2 and block.up.stride(k) == 1 and block.down.stride(k) == 1


def _describe(block_n: int, block_k: int, warps: int) -> str:
    return f"Triton for a few tokens, tile {block_n}x{block_k}, {warps} warps, heuristic"


@lru_cache(maxsize=None)
def _decode_kernels(
    num_experts: int,
    h: int,
    i: int,
    top_k: int,
    gated: bool,
    interleaved: bool,
    activation: Activation,
) -> Tuple[Kernel, int, Kernel, int]:
    """Up- and down-projection with their constants, each with how many tiles of columns there are."""
    from ._triton import decode as kernels

    block_n, block_k, warps = _UP_TILE
    block_k = min(block_k, 1 << (h - 1).bit_length())
    up = Kernel(
        kernels.slot_up_proj_kernel, _describe(block_n, block_k, warps),
        NUM_EXPERTS=num_experts, N=i, K=h, TOP_K=top_k, GATED=gated, INTERLEAVED=interleaved,
        ACTIVATION=activation.name, ALPHA=activation.alpha, LIMIT=activation.limit, UP_OFFSET=activation.up_offset,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip
    up_tiles = -(-i // block_n)
    rows, block_k, warps = _DOWN_TILE
    block_k = min(block_k, 1 << (i - 1).bit_length())
    choices = 1 << (top_k - 1).bit_length()
    block_n = max(1, rows // choices)
    down = Kernel(
        kernels.slot_down_proj_kernel, _describe(block_n, block_k, warps),
        NUM_EXPERTS=num_experts, N=h, K=i, TOP_K=top_k, TOP_K_POW2=choices, BLOCK_N=block_n,
        BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip
    return up, up_tiles, down, -(-h // block_n)


def decode_triton(block: Block, x: Tensor, top_k_index: Tensor, weights: Tensor) -> Tensor:
    """out (T, H) by the Triton kernels, for blocks that `is_decode` takes; T above 0."""
    (num_tokens, top_k), x = top_k_index.shape, unit_rows(x)
    ids = top_k_index if top_k_index.is_contiguous() else top_k_index.contiguous()
    up, up_tiles, down, down_tiles = _decode_kernels(
        block.num_experts, x.shape[1], block.intermediate, top_k, block.gated, block.interleaved, block.activation
    )
    act = x.new_empty((num_tokens * top_k, block.intermediate))
    up_strides, down_strides = nk_strides(block.up, block.transposed), nk_strides(block.down, block.transposed)
    up(
        (up_tiles, num_tokens * top_k, 1),
        x, x.stride(0), ids, block.up, *up_strides[:2], block.up_bias, *bias_strides(block.up_bias), act,
    )  # fmt: skip
    out = x.new_empty((num_tokens, x.shape[1]))
    down(
        (down_tiles, num_tokens, 1),
        act, ids, weights, block.down, *down_strides[:2], block.down_bias, *bias_strides(block.down_bias), out,
    )  # fmt: skip
    return out
