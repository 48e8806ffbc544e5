"""Descriptors of the tensor memory accelerator (TMA) for the Gluon kernels."""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...block_scaled import CODES
from ...common.numbers import power_of_two
from ...operands import LowRank
from ..kernels.hopper import reinterpret
from ..kernels.tiles import MAX_RAGGED_ROWS
from ..triton.descriptors import tma_strides

_EXTENT = 0x7FFF0000


class TmaDescriptor(TensorDescriptor):
    """A descriptor without Triton's own checks: `tma_strides` has made them, and they cost as much as a launch."""

    def __post_init__(self):
        pass


class TmaBlock:
    """A block of a tensor that a kernel reads or writes at once, and its layout in shared memory, as wgmma reads it."""

    def __init__(self, dtype: torch.dtype, *shape: int):
        self.dtype, self.shape = dtype, list(shape)
        name = "float8e4nv" if dtype is CODES else str(dtype).replace("torch.", "")
        self.layout = gl.NVMMASharedLayout.get_default_for(self.shape, getattr(gl, name))

    def of(self, tensor: Tensor) -> TmaDescriptor:
        """The descriptor of a tensor that TMA takes, in such blocks."""
        # A dimension of one step may have a stride that the hardware does not want.
        strides = tma_strides(tensor) if 1 in tensor.shape else tensor.stride()
        return TmaDescriptor(tensor, tensor.shape, strides, self.shape, self.layout)


class RaggedTmaBlock(TmaBlock):
    """A block of rows (R, C), columns contiguous, in whose reads the rows from any end on are 0.

    The hardware writes 0 past a dimension's extent. The descriptor has two more dimensions of rows, whose offsets
    cancel modulo 2^64, so that an extent can end at any row: `ragged_coordinates` says where. As in
    triton.tools.ragged_tma.
    """

    def __init__(self, dtype: torch.dtype, rows: int, columns: int):
        super().__init__(dtype, 1, 1, rows, columns)

    def of_rows(self, rows: Tensor, columns: Optional[int] = None) -> TmaDescriptor:
        """The descriptor of the first columns of some rows, all by default."""
        stride = tma_strides(rows)[0] if 1 in rows.shape else rows.stride(0)
        shape = (_EXTENT, _EXTENT, MAX_RAGGED_ROWS, columns or rows.shape[1])
        return TmaDescriptor(rows, shape, (2**34 - stride, stride, stride, 1), self.shape, self.layout)


class RankBlocks:
    """The blocks of a low-rank part, in the rows' dtype: those of a product's own operands with ranks in place of K.

    A step's ranks are a power of two that covers all, if the ring has room for as many. TMA takes longer to fill the
    rest of a wider block with zeros: H100, Qwen3, r = 16, 413 us for 380.
    """

    def __init__(self, problem: NamedTuple, rows: TmaBlock, weights: TmaBlock, transposed: bool):
        """rows, weights: the operands' blocks, which take the ring's room. transposed: as `pack` takes it."""
        dtype, (block_m, room) = problem.dtype, rows.shape
        room = room * rows.dtype.itemsize // dtype.itemsize
        columns = room if reinterpret is None else min(room, power_of_two(problem.low_rank.R, 16))
        block = [*weights.shape]
        block[-2 if transposed else -1] = columns
        self.transposed, self.rows, self.factor = transposed, TmaBlock(dtype, block_m, columns), TmaBlock(dtype, *block)

    def of(self, low_rank: Optional[LowRank]) -> Tuple[object, object]:
        """The descriptors of the rows and of the factor, None twice without a low-rank part.

        Where the weight's blocks hold gate and up columns, each a half of the weight, so do the factor's.
        """
        if low_rank is None:
            return None, None
        factor = pack(low_rank, self.transposed)
        halves = factor.unflatten(1, (2, -1)) if len(self.factor.shape) == 4 else factor
        return self.rows.of(low_rank.rows), self.factor.of(halves)


def pack(low_rank: LowRank, transposed: bool) -> Tensor:
    """The factor (E, N, R) or, transposed, (E, R, N), as TMA takes it, in the dtype of the rows.

    What is past the last adapter's rank is 0. It is not copied if it is so already.
    """
    rows, factor = low_rank
    (num_adapters, num_experts, n, rank), padded = factor.shape, rows.shape[1]
    view, rank_dim = (factor.permute(1, 0, 3, 2), 1) if transposed else (factor.permute(1, 2, 0, 3), 2)
    if num_adapters == 1 and rank == padded:
        alone = view.squeeze(rank_dim)
        if factor.dtype == rows.dtype and tma_strides(alone) is not None:
            return alone
        return rows.new_empty(alone.shape).copy_(alone)
    ranks = num_adapters * rank
    packed = rows.new_empty((num_experts, padded, n) if transposed else (num_experts, n, padded))
    packed.narrow(rank_dim, 0, ranks).unflatten(rank_dim, (num_adapters, rank)).copy_(view)
    packed.narrow(rank_dim, ranks, padded - ranks).zero_()
    return packed
