"""Block-scaled weights, transposed: products of 8-bit floats read both operands along K."""

from functools import lru_cache

import torch

from ...block_scaled import BlockScaled
from ..kernels.transpose import transpose_kernel
from .launch import ALIGNMENT, Kernel
from .scales import nk_strides

_TILE = 128  # bytes of either dimension
_MULTIPLE = 16  # of blocks that do not span K


def can_transpose(weight: BlockScaled) -> bool:
    """Whether the transposed weight is a `BlockScaled`, whose K has no parts: blocks of N must not end within parts."""
    block_n, parts = weight.block[0], weight.parts
    return parts == 1 or (weight.shape[1] % (parts * block_n) == 0 and block_n % _MULTIPLE == 0)


def transpose_codes(weight: BlockScaled) -> BlockScaled:
    """The weight (E, K, N) of a weight (E, N, K) that `can_transpose`: codes are contiguous, scales are a view.

    Codes that lie so already, and begin at 16 bytes, are not copied.
    """
    data, scales, (block_n, block_k), _, products = weight
    codes = data.transpose(1, 2)
    if not codes.is_contiguous() or codes.data_ptr() % ALIGNMENT:  # descriptors do not take others
        num_experts, n, k = data.shape
        codes = data.new_empty((num_experts, k, n))
        given, grid = data.view(torch.uint8), (-(-n // _TILE), -(-k // _TILE), num_experts)
        _kernel(n, k)(grid, given, *nk_strides(given, False), codes.view(torch.uint8))
    return BlockScaled(codes, scales.transpose(1, 2), (block_k, block_n), 1, products)


@lru_cache(maxsize=None)
def _kernel(n: int, k: int) -> Kernel:
    return Kernel(transpose_kernel, {"N": n, "K": k, "BLOCK_N": _TILE, "BLOCK_K": _TILE}, {"num_warps": 8})
