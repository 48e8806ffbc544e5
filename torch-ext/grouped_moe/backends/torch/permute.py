"""From token order to row order and back on the CPU."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ...common.numbers import wide_dtype
from ...rows import Rows
from .linear import sum_dots, tokens_of

_TOKENS = 64  # tokens combined at a time: their rows in fp32 stay in the cache


def gather_rows(x: Tensor, rows: Rows) -> Tensor:
    """out[r] = x[token of r] for routed rows, 0 for the rest. x: (T, H). Returns (rows, H)."""
    out = x.new_zeros((rows.num_rows, x.shape[1]))
    end = int(rows.group_offsets[-1])
    out[:end] = x.index_select(0, tokens_of(rows)[:end])
    return out


def combine(
    y: Tensor, weights: Optional[Tensor], rows: Rows, dots: Optional[Tensor] = None, dscales: Optional[Tensor] = None
) -> Tensor:
    """out[t] = sum over the routed slots of token t, in order, of weights[slot] y[row], in fp32 or wider."""
    if dots is not None:
        sum_dots(dots, rows, dscales)
    top_k, slot_to_row = rows.top_k, rows.slot_to_row
    num_tokens = slot_to_row.shape[0] // top_k
    out = y.new_empty((num_tokens, y.shape[1]))
    for start in range(0, num_tokens if y.shape[1] else 0, _TOKENS):  # embedding_bag takes no rows without columns
        end = min(start + _TOKENS, num_tokens)
        index = slot_to_row[start * top_k : end * top_k]
        factors = None if weights is None else weights.reshape(-1)[start * top_k : end * top_k]
        begins, routed = torch.arange(0, index.shape[0], top_k, device=y.device), index >= 0
        if not routed.all():
            # A bag per token: a slot without a row is in none, and a token without rows has an empty one, of sum 0.
            slots = routed.nonzero().squeeze(1)
            counts = torch.bincount(slots // top_k, minlength=end - start)
            index, begins = index[slots], counts.cumsum(0) - counts
            factors = None if factors is None else factors[slots]
        values = y.index_select(0, index).to(wide_dtype(y.dtype))
        out[start:end] = torch.nn.functional.embedding_bag(
            torch.arange(index.shape[0], device=y.device), values, begins, mode="sum",
            per_sample_weights=None if factors is None else factors.to(values.dtype),
        )  # fmt: skip
    return out


def combine_grad(
    dout: Tensor, y: Optional[Tensor], weights: Tensor, rows: Rows, needs_dy: bool
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """(dy, dweights) of `combine`, dy if it is needed and dweights if y is given; dy of rows that no slot owns is 0."""
    slots = (rows.slot_to_row >= 0).nonzero().squeeze(1)
    index = rows.slot_to_row[slots]
    dout_rows = dout.index_select(0, slots // rows.top_k).to(wide_dtype(dout.dtype))
    dy = dweights = None
    if needs_dy:
        dy = dout.new_zeros((rows.num_rows, dout.shape[1]))
        dy[index] = (dout_rows * weights.reshape(-1)[slots, None].to(dout_rows.dtype)).to(dy.dtype)
    if y is not None:
        dweights = torch.zeros_like(weights)
        inner = (dout_rows * y.index_select(0, index).to(dout_rows.dtype)).sum(1)
        dweights.view(-1)[slots] = inner.to(weights.dtype)
    return dy, dweights
