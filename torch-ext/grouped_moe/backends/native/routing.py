"""Routing and the schedule of groups, each in one native launch."""

from typing import Optional

import torch
from torch import Tensor

from ..._ops import ops
from ...rows import Rows, schedule_size
from ...tuning.heuristic import choose_block_m
from .. import triton
from ..triton.routing import assert_room
from .fakes import IS_BUILT

_SLOTS_OF_SM = 8192  # in a launch whose blocks all run at once: 1024 threads, 8 slots of each
# With more, the Triton backend routes, in one launch or, above 2048 slots, in three, which take the host 7 to 40 us
# longer. What they save the GPU, an H100, is at most 2.4 us up to here, and often less than nothing.
_MAX_EXPERTS = 512
_ROUTE, _SPLIT = (ops.route_rows.default, ops.split_rows.default) if IS_BUILT else (None, None)


def takes_slots(num_slots: int, num_sms: int) -> bool:
    """Whether one native launch routes so many slots on a GPU of so many multiprocessors."""
    return num_slots <= _SLOTS_OF_SM * num_sms


def route(
    top_k_index: Tensor, num_experts: int, dtype: torch.dtype, capacity: Optional[int] = None, quantizes: bool = False
) -> Rows:
    """As `route` of the Triton backend, which routes what one launch would be slower with or cannot do."""
    if num_experts > _MAX_EXPERTS:
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


def split_rows(splits: Tensor, num_groups: int, num_rows: int, dtype: torch.dtype, quantizes: bool = False) -> Rows:
    """As `split_rows` of the Triton backend."""
    block_m = choose_block_m(num_rows, num_groups, dtype, quantizes)
    if splits.shape[0] > num_groups + 1:
        return Rows(splits.contiguous(), num_groups, num_rows, block_m)
    schedule = _SPLIT(splits, num_groups, num_rows, block_m, schedule_size(num_rows, num_groups))
    if schedule is None:  # no memory: PyTorch raises its error
        return triton.split_rows(splits, num_groups, num_rows, dtype, quantizes)
    return Rows(schedule, num_groups, num_rows, block_m)
