"""Block-scaled weights: as arguments and constexprs of kernels, or made plain for a product of many rows."""

from functools import lru_cache
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ...block_scaled import BlockScaled, Weight
from ...common.device import DeviceSpec, spec_of
from ..kernels.block_scaled import ScaleBlocks
from ..kernels.dequantize import dequantize_kernel
from .launch import Kernel

_MANY_ROWS = 128  # of a tile
_DEQUANTIZED = 64, 128  # rows and columns that a program makes plain


def for_rows(weight: Weight, block_m: int, dtype: torch.dtype) -> Weight:
    """The weight as a product with tiles of so many rows reads it.

    To widen codes in registers saves bytes, which few rows wait for. Tall tiles would widen the same codes many times,
    and wait for that: the weight is made plain once, and goes after the product.
    """
    if not isinstance(weight, BlockScaled) or block_m < _MANY_ROWS:
        return weight
    spec, (num_experts, n, k) = spec_of(weight.data), weight.shape
    plain = weight.data.new_empty(weight.shape, dtype=dtype)
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
