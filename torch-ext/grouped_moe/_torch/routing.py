"""Routing on the CPU."""

from typing import Optional, Tuple

import torch
from torch import Tensor


def route(top_k_index: Tensor, num_experts: int, capacity: Optional[int] = None) -> Tuple[Tensor, Tensor, Tensor]:
    """(expert_offsets, row_to_slot, slot_to_row), all int32; see `grouped_moe.Routing`.

    row_to_slot has at most `capacity` entries. Raises RuntimeError if more slots are routed.
    """
    ids = top_k_index.reshape(-1)
    routed = (ids >= 0) & (ids < num_experts)
    experts = torch.where(routed, ids, num_experts)
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=num_experts + 1)[:num_experts]
    expert_offsets = ids.new_zeros(num_experts + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, out=expert_offsets[1:])
    num_routed = int(expert_offsets[-1])
    if capacity is not None and num_routed > capacity:
        raise RuntimeError(
            f"capacity: expected at least the {num_routed} slots that are routed to local experts, got {capacity}"
        )
    slot_to_row = ids.new_empty(ids.shape[0], dtype=torch.int32)
    slot_to_row[order] = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
    return expert_offsets, order[:capacity].to(torch.int32), slot_to_row.masked_fill_(~routed, -1)
