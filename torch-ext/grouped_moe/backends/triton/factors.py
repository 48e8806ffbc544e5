"""How factors of low-rank pairs lie, and copies of them, and of their gradients, between layouts."""

from functools import lru_cache
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ...operands import pad_rank
from ...rows import Rows
from ..kernels.factors import copy_factors_kernel
from ..kernels.low_rank import Factor
from .launch import Kernel

_BLOCK_E, _BLOCK_NR = 32, 128  # experts, and numbers of each, that a program copies
_NO_FACTOR = Factor(0, 0, 0, 0, 0, 0, 0)


def factor_of(factor: Optional[Tensor]) -> Factor:
    """How a factor (L, E, N, r) lies, with strides that are 0 where an extent is 1; all is 0 without a factor.

    Strides that are compile-time values keep its loads wide at any rank.
    """
    return _NO_FACTOR if factor is None else _factor_of(factor.shape, factor.stride())


@lru_cache(maxsize=None)
def _factor_of(shape: Tuple[int, ...], strides: Tuple[int, ...]) -> Factor:
    strides = [0 if n == 1 else step for n, step in zip(shape, strides)]
    return Factor(pad_rank(shape[0] * shape[3]), shape[0], shape[3], *strides)


def pack_factors(factors: Sequence[Optional[Tensor]], rows: Rows, dtype: torch.dtype) -> List[Optional[Tensor]]:
    """Factors as kernels for these rows read them: each itself, or a contiguous copy (1, E, N, R).

    factors: (L, E, N, r), of at most two products. dtype: of copies, which are 0 past the last rank. A tile reads the
    factor of one expert. Where experts lie side by side, as in peft's b, (N, r E), each number that it reads is a
    transaction of its own. Copied are those of one adapter, if there are as many rows as experts: fewer do not read
    them all.
    """
    packed, copied = list(factors), []
    for i, factor in enumerate(factors):
        if factor is not None and rows.num_rows >= factor.shape[1] and _has_experts_side_by_side(factor):
            *shape, rank = factor.shape
            packed[i] = factor.new_empty(*shape, pad_rank(rank), dtype=dtype)
            copied.append((factor, packed[i]))
    _copy(copied)
    return packed


def unpack_grads(packed: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Writes gradients of factors, of at most two products, from packed ones of the same shapes (L, E, N, r)."""
    pairs = []
    for source, grad in zip(packed, grads):
        if _has_experts_side_by_side(grad):
            pairs.append((source, grad))
        else:
            grad.copy_(source)
    _copy(pairs)


def _has_experts_side_by_side(factor: Tensor) -> bool:
    """Whether it is of one adapter, and neighbours in memory are of different experts."""
    _, expert_stride, *strides = factor.stride()
    return factor.shape[0] == 1 and 0 < expert_stride < min(strides)


def _copy(pairs: Sequence[Tuple[Tensor, Tensor]]) -> None:
    """Copies the first of each pair to the second, of one pair or two in one launch."""
    if not pairs:
        return
    blocks, tensors, layouts = 0, [], []
    for source, target in pairs:
        _, num_experts, n, rank = target.shape
        blocks += -(-n * pad_rank(rank) // _BLOCK_NR)
        tensors += source, target
        # To make a `Factor` takes the host longer than to find the kernel.
        layouts.append((n, source.shape[3], source.stride(), rank, target.stride()))
    tensors += (None,) * (4 - len(tensors))
    _kernel(num_experts, *layouts)((blocks, -(-num_experts // _BLOCK_E), 1), *tensors)


_Copied = Tuple[int, int, Tuple[int, ...], int, Tuple[int, ...]]  # N, then ranks and strides of source and target


@lru_cache(maxsize=None)
def _kernel(num_experts: int, first: _Copied, second: Optional[_Copied] = None) -> Kernel:
    constants = {"NUM_EXPERTS": num_experts, "BLOCK_E": _BLOCK_E, "BLOCK_NR": _BLOCK_NR}
    constants.update({"SECOND_N": 0, "SECOND_SOURCE": None, "SECOND_TARGET": None})
    for prefix, copied in (("", first), ("SECOND_", second)):
        if copied is not None:
            n, rank, strides, target_rank, target_strides = copied
            source, target = _factor(rank, strides), _factor(target_rank, target_strides)
            constants.update({f"{prefix}N": n, f"{prefix}SOURCE": source, f"{prefix}TARGET": target})
    return Kernel(copy_factors_kernel, constants)


def _factor(rank: int, strides: Tuple[int, ...]) -> Factor:
    """Of one adapter."""
    return Factor(pad_rank(rank), 1, rank, 0, *strides[1:])
