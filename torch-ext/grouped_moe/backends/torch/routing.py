"""Routing and groups on the CPU."""

from typing import Optional

import torch
from torch import Tensor

from ...rows import Rows, schedule_size


def route(
    top_k_index: Tensor, num_experts: int, dtype: torch.dtype, capacity: Optional[int] = None, quantizes: bool = False
) -> Rows:
    """Sorts slots by expert. Raises RuntimeError if more than `capacity` slots are routed."""
    ids = top_k_index.reshape(-1)
    routed = (ids >= 0) & (ids < num_experts)
    experts = torch.where(routed, ids, num_experts)
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=num_experts + 1)[:num_experts]
    num_rows = ids.shape[0] if capacity is None else min(ids.shape[0], capacity)
    schedule = ids.new_zeros(schedule_size(num_rows, num_experts), dtype=torch.int32)
    offsets = schedule[: num_experts + 1]
    torch.cumsum(counts, 0, out=offsets[1:])
    num_routed = int(offsets[-1])
    if num_routed > num_rows:
        raise RuntimeError(
            f"capacity: expected at least the {num_routed} slots that are routed to local experts, got {capacity}"
        )
    slot_to_row = ids.new_empty(ids.shape[0], dtype=torch.int32)
    slot_to_row[order] = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
    slot_to_row.masked_fill_(~routed, -1)
    row_to_slot = order[:num_rows].to(torch.int32)
    return Rows(schedule, num_experts, num_rows, 0, top_k_index.shape[1], row_to_slot, slot_to_row)


def split_rows(splits: Tensor, num_groups: int, num_rows: int, dtype: torch.dtype, quantizes: bool = False) -> Rows:
    """Rows in place. splits: (G,) sizes or (G + 1,) offsets of any values, or the schedule of earlier rows."""
    if splits.shape[0] > num_groups + 1:
        return Rows(splits, num_groups, num_rows)
    clamped = splits.clamp(0, num_rows)
    schedule = splits.new_zeros(schedule_size(num_rows, num_groups), dtype=torch.int32)
    if splits.shape[0] == num_groups:
        schedule[1 : num_groups + 1] = clamped.to(torch.int64).cumsum(0).clamp_(max=num_rows)
    else:
        schedule[: num_groups + 1] = clamped.cummax(0).values
    return Rows(schedule, num_groups, num_rows)
