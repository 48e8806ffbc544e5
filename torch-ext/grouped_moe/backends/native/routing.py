"""Routing in one native launch."""

from typing import Optional

import torch
from torch import Tensor

from ..._ops import ops
from ...rows import Rows, schedule_size
from ...tuning.heuristic import choose_block_m
from .. import triton
from ..triton.routing import assert_room
from .fakes import IS_BUILT

# Where one launch is no slower than the Triton backend's. That has one as well up to 2048 slots, in which each program
# counts all of them; above it has three, which take the host 36 us longer.
_FEW_SLOTS, _MANY_SLOTS, _MAX_EXPERTS = 128, 2048, 256
_ROUTE = ops.route_rows.default if IS_BUILT else None


def route(
    top_k_index: Tensor, num_experts: int, dtype: torch.dtype, capacity: Optional[int] = None, quantizes: bool = False
) -> Rows:
    """As `route` of the Triton backend, which routes what one launch would be slower with or cannot do."""
    if num_experts > _MAX_EXPERTS or _FEW_SLOTS < top_k_index.numel() <= _MANY_SLOTS:
        return triton.route(top_k_index, num_experts, dtype, capacity, quantizes)
    ids = top_k_index if top_k_index.is_contiguous() else top_k_index.contiguous()
    num_slots, block_m = ids.numel(), choose_block_m(ids.numel(), num_experts, dtype, quantizes)
    num_rows = num_slots if capacity is None else min(num_slots, capacity)
    size = schedule_size(num_rows, num_experts)
    schedule, row_to_slot, slot_to_row, num_routed = _ROUTE(ids, num_experts, num_rows, block_m, size)
    if schedule is None:
        return triton.route(top_k_index, num_experts, dtype, capacity, quantizes)
    if num_rows < num_slots:
        assert_room(num_routed, num_rows)
    return Rows(schedule, num_experts, num_rows, block_m, top_k_index.shape[1], row_to_slot, slot_to_row)
