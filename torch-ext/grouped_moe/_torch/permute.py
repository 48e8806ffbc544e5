"""Gather and combine on the CPU."""

from typing import Optional, Tuple

import torch
from torch import Tensor

_TOKENS = 64  # tokens combined at a time: their rows in fp32 stay in the cache


def gather_rows(x: Tensor, row_to_slot: Tensor, num_rows: int, top_k: int) -> Tensor:
    """(num_rows, H): x[token of r] for the routed rows r."""
    return x.index_select(0, row_to_slot[:num_rows] // top_k)


def combine(
    y: Tensor, weights: Optional[Tensor], slot_to_row: Tensor, top_k: int, out: Optional[Tensor] = None
) -> Tensor:
    """out[t] = sum over the routed slots of token t, in order, of weights[slot] y[row], in fp32 or wider."""
    num_tokens = slot_to_row.shape[0] // top_k
    out = y.new_empty((num_tokens, y.shape[1])) if out is None else out
    for start in range(0, num_tokens, _TOKENS):
        end = min(start + _TOKENS, num_tokens)
        chunk = slot_to_row[start * top_k : end * top_k]
        slots = (chunk >= 0).nonzero().squeeze(1)
        rows = y.index_select(0, chunk[slots]).to(torch.promote_types(y.dtype, torch.float32))
        # A bag per token: a slot without a row is in none, and a token without rows has an empty one, whose sum is 0.
        counts = torch.bincount(slots // top_k, minlength=end - start)
        row_weights = None
        if weights is not None:
            row_weights = weights.reshape(-1)[start * top_k : end * top_k][slots].to(rows.dtype)
        ids = torch.arange(slots.shape[0], device=slots.device)
        out[start:end] = torch.nn.functional.embedding_bag(
            ids, rows, counts.cumsum(0) - counts, mode="sum", per_sample_weights=row_weights
        )
    return out


def combine_grad(
    dout: Tensor, y: Optional[Tensor], weights: Tensor, slot_to_row: Tensor, needs_dy: bool
) -> Tuple[Tensor, Tensor]:
    """(dy, dweights) of `combine`, dweights only with y; rows of dy that no slot owns are 0."""
    slots = (slot_to_row >= 0).nonzero().squeeze(1)
    rows = slot_to_row[slots]
    wide = torch.promote_types(dout.dtype, torch.float32)
    dout_rows = dout.index_select(0, slots // weights.shape[1]).to(wide)
    dy, dweights = dout.new_empty(0), weights.new_empty(0)
    if needs_dy:
        dy = dout.new_zeros((slot_to_row.shape[0], dout.shape[1]))
        dy[rows] = (dout_rows * weights.reshape(-1)[slots, None].to(wide)).to(dy.dtype)
    if y is not None:
        dweights = torch.zeros_like(weights)
        dweights.view(-1)[slots] = (dout_rows * y.index_select(0, rows).to(wide)).sum(1).to(weights.dtype)
    return dy, dweights
