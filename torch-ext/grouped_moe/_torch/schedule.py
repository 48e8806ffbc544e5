"""Safe offsets on the CPU."""

import torch
from torch import Tensor


def safe_offsets(splits: Tensor, num_groups: int, rows: int) -> Tensor:
    """(G + 1,) int32 offsets within [0, rows] that do not decrease, whatever the caller's splits hold."""
    clamped = splits.clamp(0, rows)
    if splits.shape[0] == num_groups:
        ends = clamped.to(torch.int64).cumsum(0).clamp_(max=rows)
        return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    return clamped.cummax(0).values.to(torch.int32)
