"""Copies of factors of low-rank pairs that kernels would read badly."""

from functools import lru_cache

import torch
from torch import Tensor

from ...operands import FactorLayout, layout_of
from ...rows import Rows
from ..kernels.factors import pack_factor_kernel
from .launch import Kernel
from .low_rank import factor_of

_BLOCK_E, _BLOCK_NR = 32, 128  # experts, and numbers of each


def pack_factor(factor: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
    """The factor as kernels for these rows read it: itself, or a contiguous copy (1, E, N, R), 0 past the last rank.

    factor: (L, E, N, r). dtype: of a copy. A tile reads the factor of one expert. Where experts lie side by side, as in
    peft's b, (N, r E), each number that it reads is a transaction of its own. Copied are those of one adapter, if there
    are as many rows as experts: fewer do not read them all.
    """
    num_adapters, num_experts, n, _ = factor.shape
    _, expert_stride, *strides = factor.stride()
    if num_adapters > 1 or not 0 < expert_stride < min(strides) or rows.num_rows < num_experts:
        return factor
    layout = layout_of(factor)
    packed = factor.new_empty((1, num_experts, n, layout.padded_rank), dtype=dtype)
    blocks = -(-n * layout.padded_rank // _BLOCK_NR), -(-num_experts // _BLOCK_E), 1
    _kernel(num_experts, n, layout)(blocks, factor, packed)
    return packed


@lru_cache(maxsize=None)
def _kernel(num_experts: int, n: int, layout: FactorLayout) -> Kernel:
    blocks = {"BLOCK_E": _BLOCK_E, "BLOCK_NR": _BLOCK_NR}
    return Kernel(pack_factor_kernel, {"NUM_EXPERTS": num_experts, "N": n, "FACTOR": factor_of(layout), **blocks})
