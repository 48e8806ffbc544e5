"""Routing in one native launch."""

from typing import Optional

import torch
from torch import Tensor

from ..._ops import ops
from ...rows import Rows, schedule_size
from ...tuning.heuristic import choose_block_m
from .. import triton
from ..triton.routing import assert_room


def route(
    top_k_index: Tensor, num_experts: int, dtype: torch.dtype, capacity: Optional[int] = None, quantizes: bool = False
) -> Rows:
    """As `route` of the Triton backend, which routes what is too much for one launch."""
    ids = top_k_index if top_k_index.is_contiguous() else top_k_index.contiguous()
    num_slots, block_m = ids.numel(), choose_block_m(ids.numel(), num_experts, dtype, quantizes)
    num_rows = num_slots if capacity is None else min(num_slots, capacity)
    size = schedule_size(num_rows, num_experts)
    schedule, row_to_slot, slot_to_row, num_routed = ops.route_rows.default(ids, num_experts, num_rows, block_m, size)
    if schedule is None:
        return triton.route(top_k_index, num_experts, dtype, capacity, quantizes)
    if num_rows < num_slots:
        assert_room(num_routed, num_rows)
    return Rows(schedule, num_experts, num_rows, block_m, top_k_index.shape[1], row_to_slot, slot_to_row)
