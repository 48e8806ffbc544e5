"""Block-scaled weights: as arguments and constexprs of kernels, made plain for products of many rows, or transposed."""

from functools import lru_cache
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ...block_scaled import MULTIPLE, BlockScaled, Weight
from ...common.device import DeviceSpec, spec_of
from ..kernels.block_scaled import ScaleBlocks
from ..kernels.weights import dequantize_kernel, transpose_kernel
from .launch import ALIGNMENT, Kernel

_MANY_ROWS = 128  # of a tile
_DEQUANTIZED = 64, 128  # rows and columns that a program makes plain
_TRANSPOSED = 128  # rows, and columns, that a program transposes


def for_rows(weight: Weight, block_m: int, dtype: torch.dtype) -> Weight:
    """The weight as a product with tiles of so many rows reads it.

    To widen codes in registers saves bytes, which few rows wait for. Tall tiles would widen the same codes many times,
    and wait for that: the weight is made plain once, and goes after the product.
    """
    if not isinstance(weight, BlockScaled) or block_m < _MANY_ROWS:
        return weight
    spec, (num_experts, n, k) = spec_of(weight.data), weight.shape
    plain = weight.data.new_empty(num_experts, n, k, dtype=dtype)
    block_n, block_k = _DEQUANTIZED
    grid = -(-n // block_n), -(-k // block_k), num_experts
    _dequantize_kernel(n, k, scale_blocks(weight, False))(grid, *codes_and_scales(weight, False, spec), plain)
    return plain


@lru_cache(maxsize=None)
def _dequantize_kernel(n: int, k: int, scales: ScaleBlocks) -> Kernel:
    block_n, block_k = _DEQUANTIZED
    constants = {"N": n, "K": k, "SCALES": scales, "BLOCK_N": block_n, "BLOCK_K": block_k}
    return Kernel(dequantize_kernel, constants)


def scale_blocks(weight: Weight, transposed: bool) -> Optional[ScaleBlocks]:
    """Which scale an element of a weight (E, N, K) or, transposed, (E, K, N) has; None if it is plain."""
    if not isinstance(weight, BlockScaled):
        return None
    (n_block, k_block), parts = weight.block, weight.parts
    return ScaleBlocks(k_block, n_block, 1, parts) if transposed else ScaleBlocks(n_block, k_block, parts, 1)


def step_of(scales: ScaleBlocks, k: int) -> int:
    """Columns of K that a step of a product can have at most: a power of two, within one block."""
    if scales.K_BLOCK >= k // scales.K_PARTS:
        return 1 << 30
    return scales.K_BLOCK & -scales.K_BLOCK


def codes_and_scales(weight: Weight, transposed: bool, spec: DeviceSpec) -> Tuple[Any, ...]:
    """A weight (E, N, K) or, transposed, (E, K, N), with its strides over (E, N, K), and its scales with theirs.

    Bytes stand for codes where Triton has no such type, and for scales that are exponents. A plain weight has none.
    """
    if not isinstance(weight, BlockScaled):
        return weight, *nk_strides(weight, transposed), None, 0, 0, 0
    codes = weight.data if spec.float8 else weight.data.view(torch.uint8)
    return codes, *nk_strides(codes, transposed), *scale_arguments(weight, transposed)


def scale_arguments(weight: BlockScaled, transposed: bool = False) -> Tuple[Any, ...]:
    """The scales alone, with their strides over (E, blocks of N, blocks of K)."""
    scales = weight.scale_inv
    scales = scales.view(torch.uint8) if scales.dtype is torch.float8_e8m0fnu else scales
    return scales, *nk_strides(scales, transposed)


def nk_strides(weight: Tensor, transposed: bool) -> tuple:
    """Strides over (E, N, K) of a weight (E, N, K) or, transposed, (E, K, N)."""
    stride_e, first, second = weight.stride()
    return (stride_e, second, first) if transposed else (stride_e, first, second)


def can_transpose(weight: BlockScaled) -> bool:
    """Whether the transposed weight is a `BlockScaled`, whose K has no parts: blocks of N must not end within parts."""
    block_n, parts = weight.block[0], weight.parts
    return parts == 1 or (weight.shape[1] % (parts * block_n) == 0 and block_n % MULTIPLE == 0)


def transpose_codes(weight: BlockScaled) -> BlockScaled:
    """The weight (E, K, N) of a weight (E, N, K) that `can_transpose`: codes are contiguous, scales are a view.

    Codes that lie so already, and begin at 16 bytes, are not copied.
    """
    data, scales, (block_n, block_k), _, products = weight
    codes = data.transpose(1, 2)
    if not codes.is_contiguous() or codes.data_ptr() % ALIGNMENT:  # descriptors do not take others
        num_experts, n, k = data.shape
        codes = data.new_empty(num_experts, k, n)
        given, grid = data.view(torch.uint8), (-(-n // _TRANSPOSED), -(-k // _TRANSPOSED), num_experts)
        _transpose_kernel(n, k)(grid, given, *nk_strides(given, False), codes.view(torch.uint8))
    return BlockScaled(codes, scales.transpose(1, 2), (block_k, block_n), 1, products)


@lru_cache(maxsize=None)
def _transpose_kernel(n: int, k: int) -> Kernel:
    return Kernel(transpose_kernel, {"N": n, "K": k, "BLOCK_N": _TRANSPOSED, "BLOCK_K": _TRANSPOSED}, {"num_warps": 8})
