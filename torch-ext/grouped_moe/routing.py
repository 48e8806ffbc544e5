"""Routing: which rows of a grouped GEMM come from which slot. The sentinel contract lives here.

A slot s = t * top_k + k is the k-th choice of token t. A slot whose expert id lies outside [0, E) -- E and beyond, or
negative, any int32 or int64 value -- is a sentinel (under expert parallelism: an expert of another rank). A sentinel
1. contributes exactly 0 to the output; its routing weight is never read, and the hidden row of a token that has
   nothing but sentinels has no effect;
2. receives exactly 0 gradient for its routing weight, and gives none to hidden states, weights or biases;
3. has no row: memory that was not written has no effect, in the forward, the backward or a graph replay;
4. costs its routing entry: time follows the R routed rows, not the S slots.
No token, no routed row, an expert without rows and all rows on one expert are valid.

Rows are sorted by expert and, within an expert, by slot (a stable counting sort), so every sum over rows has one order.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Tuple, Union

import torch
from torch import Tensor

from .common import checks
from .registration import define_op
from .rows import Rows


@dataclass(frozen=True)
class Routing:
    """The two index maps between slots and rows, and where each expert's rows lie. All int32, on one device.

    expert_offsets: (E + 1,), rows [expert_offsets[e], expert_offsets[e + 1]) belong to expert e; the last entry is R.
    row_to_slot: (S,), row -> slot for the first R rows; the rest is unspecified.
    slot_to_row: (S,), slot -> row; -1 for a sentinel.
    top_k: slots per token, so that slot // top_k is the token.
    """

    expert_offsets: Tensor
    row_to_slot: Tensor
    slot_to_row: Tensor
    top_k: int

    @property
    def num_experts(self) -> int:
        """E, the local experts."""
        return self.expert_offsets.shape[0] - 1


def _route(kernels: ModuleType, top_k_index: Tensor, num_experts: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(expert_offsets, row_to_slot, slot_to_row)"""
    rows = kernels.route(top_k_index, num_experts, torch.float32)  # any dtype: nothing reads its tiles
    return rows.group_offsets.clone(), rows.row_to_slot, rows.slot_to_row


def _route_fake(top_k_index: Tensor, num_experts: int) -> Tuple[Tensor, Tensor, Tensor]:
    sizes = num_experts + 1, top_k_index.numel(), top_k_index.numel()
    return tuple(top_k_index.new_empty(size, dtype=torch.int32) for size in sizes)


_run_route = define_op(
    "route", "(Tensor top_k_index, SymInt num_experts) -> (Tensor, Tensor, Tensor)", _route, _route_fake
)


def rows_of(expert_offsets: Tensor, row_to_slot: Tensor, slot_to_row: Tensor, top_k: int) -> Rows:
    """The rows of a routing, for passes that need no tiles. Its maps may have any strides, as hooks may give them."""
    expert_offsets, row_to_slot, slot_to_row = (
        tensor.contiguous() for tensor in (expert_offsets, row_to_slot, slot_to_row)
    )
    return Rows(expert_offsets, expert_offsets.shape[0] - 1, row_to_slot.shape[0], 0, top_k, row_to_slot, slot_to_row)


def _as_number(size: Union[int, Tensor]) -> int:
    """A size as it is, symbolic ones too; in a trace of `torch.jit`, which has tensors for them, its number."""
    return int(size) if torch.jit.is_tracing() and isinstance(size, Tensor) else size


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sorts slots by expert, without a host sync; not differentiable.

    top_k_index: (T, top_k) int32 or int64; slots whose id is outside [0, num_experts) are sentinels, which get no row.
    num_experts: E, 1 to 1024. Raises TypeError for other dtypes, ValueError for other shapes, E out of range or more
    than 2^31 - 129 slots.
    """
    num_experts = _as_number(num_experts)
    checks.check_ids(top_k_index)
    if not isinstance(num_experts, (int, torch.SymInt)) or isinstance(num_experts, bool):
        raise TypeError(f"num_experts: expected an int, got {type(num_experts).__name__}")
    checks.check_num_groups("num_experts", num_experts, "experts")
    return Routing(*_run_route(top_k_index, num_experts), _as_number(top_k_index.shape[1]))
