"""Routing: which rows of a grouped GEMM come from which slot. The sentinel contract lives here.

A slot s = t * top_k + k is the k-th choice of token t. A slot whose expert id lies outside [0, E) -- E and beyond, or
negative, any int32 or int64 value -- is a sentinel (under expert parallelism: an expert of another rank). A sentinel
1. contributes exactly 0 to the output; its routing weight is never read, nor is the hidden row of a token that has
   nothing but sentinels;
2. receives exactly 0 gradient for its routing weight, and gives none to hidden states, weights or biases;
3. has no row: memory that was not written has no effect, in the forward, the backward or a graph replay;
4. costs its routing entry: time follows the R routed rows, not the S slots.
No token, no routed row, an expert without rows and all rows on one expert are valid.

Rows are sorted by expert and, within an expert, by slot (a stable counting sort), so every sum over rows has one order.
"""

from dataclasses import dataclass
from typing import Tuple

import torch
from torch import Tensor

from ._checks import check_routing
from ._ops import add_op_namespace_prefix, ops
from ._torch.routing import route as _route_torch
from .launch import launch
from .tuning import on_device_of

_SMALL_SLOTS = 4096  # up to here one launch compares all slots with all
_SMALL_BLOCK = 128  # slots per program of that launch
_BLOCK = 512  # slots per program of the sort in three launches
_STEP = 16  # slots compared with a whole block at a time
_SCAN_ELEMENTS = 16384  # counts that scan_counts_kernel holds at a time


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


def _power_of_two_above(n: int) -> int:
    return 1 << n.bit_length()


def route_triton(top_k_index: Tensor, num_experts: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(expert_offsets, row_to_slot, slot_to_row) by the Triton kernels: one launch for few slots, else three."""
    from ._triton import routing as kernels

    ids = top_k_index.contiguous().view(-1)
    num_slots = ids.shape[0]
    expert_offsets = ids.new_empty(num_experts + 1, dtype=torch.int32)
    row_to_slot = ids.new_empty(num_slots, dtype=torch.int32)
    slot_to_row = ids.new_empty(num_slots, dtype=torch.int32)
    experts_pow2 = _power_of_two_above(num_experts)
    sizes = {"NUM_EXPERTS": num_experts, "EXPERTS_POW2": experts_pow2}
    if num_slots <= _SMALL_SLOTS:
        grid = (max(1, -(-num_slots // _SMALL_BLOCK)),)
        launch(
            kernels.route_kernel, grid, ids, expert_offsets, row_to_slot, slot_to_row, num_slots,
            **sizes, BLOCK=_SMALL_BLOCK, STEP=_STEP,
        )  # fmt: skip
        return expert_offsets, row_to_slot, slot_to_row
    num_blocks = -(-num_slots // _BLOCK)
    counts = ids.new_empty((num_blocks, num_experts), dtype=torch.int32)
    launch(kernels.count_slots_kernel, (num_blocks,), ids, counts, num_slots, **sizes, BLOCK=_BLOCK)
    launch(
        kernels.scan_counts_kernel, (1,), counts, expert_offsets, num_blocks,
        **sizes, BLOCK=_SCAN_ELEMENTS // experts_pow2, num_warps=8,
    )  # fmt: skip
    launch(
        kernels.place_slots_kernel, (num_blocks,),
        ids, counts, expert_offsets, row_to_slot, slot_to_row, num_slots,
        NUM_EXPERTS=num_experts, BLOCK=_BLOCK, STEP=_STEP, num_warps=8,
    )  # fmt: skip
    return expert_offsets, row_to_slot, slot_to_row


def route_indices(top_k_index: Tensor, num_experts: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(expert_offsets, row_to_slot, slot_to_row) on the device of top_k_index."""
    if top_k_index.device.type == "cpu":
        return _route_torch(top_k_index, num_experts)
    with on_device_of(top_k_index):
        return route_triton(top_k_index, num_experts)


@torch.library.custom_op(add_op_namespace_prefix("route"), mutates_args=())
def _route(top_k_index: Tensor, num_experts: int) -> Tuple[Tensor, Tensor, Tensor]:
    return route_indices(top_k_index, num_experts)


@torch.library.register_fake(add_op_namespace_prefix("route"))
def _route_fake(top_k_index: Tensor, num_experts: int) -> Tuple[Tensor, Tensor, Tensor]:
    num_slots = top_k_index.shape[0] * top_k_index.shape[1]
    return (
        top_k_index.new_empty(num_experts + 1, dtype=torch.int32),
        top_k_index.new_empty(num_slots, dtype=torch.int32),
        top_k_index.new_empty(num_slots, dtype=torch.int32),
    )


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sorts slots by expert, without a host sync; not differentiable.

    top_k_index: (T, top_k) int32 or int64; ids outside [0, num_experts) are sentinels. num_experts: E, 1 to 1024.
    Raises TypeError for other dtypes, ValueError for other shapes or E out of range.
    """
    check_routing(top_k_index, num_experts)
    return Routing(*ops.route(top_k_index, num_experts), top_k=top_k_index.shape[1])
