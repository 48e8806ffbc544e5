"""The experts block on the CPU: one GEMM per expert that has rows, elementwise passes in fp32 or wider."""

from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor

from .. import activation as act
from . import without_autocast
from .grouped_linear import dot_groups, matmul_groups, sum_groups, wgrad_groups
from .permute import combine

Indices = Tuple[Tensor, Tensor, Tensor]  # expert_offsets, row_to_slot, slot_to_row

_CHUNK = 256  # rows per elementwise pass: its temporaries stay in the cache


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _source_tokens(row_to_slot: Tensor, num_rows: int, top_k: int) -> Tensor:
    """(R,) token of each routed row."""
    return row_to_slot[:num_rows] // top_k


@without_autocast
def forward(block, x: Tensor, weights: Tensor, routing: Indices, save: bool) -> Tuple[Tensor, Tensor]:
    """(out (T, H), preact (S, P) or empty); `block` is a `grouped_moe.block.Block`."""
    offsets, row_to_slot, slot_to_row = routing
    top_k, num_rows = weights.shape[1], int(offsets[-1])
    tokens = _source_tokens(row_to_slot, num_rows, top_k)
    preact = up_proj(block, x, tokens, offsets, row_to_slot.shape[0] if save else num_rows)
    a = activate(block, preact, offsets, None)
    y = matmul_groups(a, block.down_nk(), offsets, block.down_bias, x.new_empty((num_rows, x.shape[1])))
    return combine(y, weights, slot_to_row, top_k), preact if save else x.new_empty(0)


def up_proj(block, x: Tensor, tokens: Optional[Tensor], offsets: Tensor, rows: int) -> Tensor:
    """preact (rows, P) of x read at tokens, or in place; rows of no expert stay unwritten."""
    up_nk = block.up_nk()
    return matmul_groups(x, up_nk, offsets, block.up_bias, x.new_empty((rows, up_nk.shape[1])), tokens)


def _chunks(offsets: Tensor) -> Iterator[slice]:
    """The rows that any expert has, some at a time."""
    end = int(offsets[-1])
    for start in range(int(offsets[0]), end, _CHUNK):
        yield slice(start, min(start + _CHUNK, end))


def activate(block, preact: Tensor, offsets: Tensor, scales: Optional[Tensor]) -> Tensor:
    """scales * activation, (R, I); rows of no expert stay unwritten. scales: (R,), None for ones."""
    a = preact.new_empty((int(offsets[-1]), block.intermediate))
    for rows in _chunks(offsets):
        wide = preact[rows].to(_wide(preact.dtype))
        value = act.forward(wide, block.activation, block.gated, block.interleaved)
        a[rows] = value if scales is None else value * scales[rows, None].to(value.dtype)
    return a


@without_autocast
def backward(
    block, dout: Tensor, x: Tensor, weights: Tensor, preact: Tensor, routing: Indices, needs, grads, spent: bool
) -> None:
    """Fills `grads`, allocated by `grouped_moe.block.empty_grads`, where `needs` asks for them.

    spent: preact may be overwritten.
    """
    offsets, row_to_slot, slot_to_row = routing
    top_k, num_rows = weights.shape[1], int(offsets[-1])
    slots = row_to_slot[:num_rows]
    tokens = _source_tokens(row_to_slot, num_rows, top_k)
    row_weights = weights.reshape(-1)[slots].to(_wide(dout.dtype))
    if block.recompute:
        preact = up_proj(block, x, tokens, offsets, num_rows)
    dpreact, scaled_act, inner = down_dgrad(block, dout, tokens, row_weights, preact, offsets, spent or block.recompute)
    if needs.weights:
        if block.down_bias is not None:
            dot_groups(dout, block.down_bias, offsets, inner, tokens, accumulate=True)
        grads.weights.zero_()
        grads.weights.view(-1)[slots] = inner.to(weights.dtype)
    if needs.down:
        down_nk = grads.down.transpose(1, 2) if block.transposed else grads.down
        wgrad_groups(dout, scaled_act, offsets, down_nk, p_sources=tokens)
    if needs.down_bias:
        sum_groups(dout, offsets, grads.down_bias, tokens, row_weights)
    if needs.up:
        up_nk = grads.up.transpose(1, 2) if block.transposed else grads.up
        wgrad_groups(dpreact, x, offsets, up_nk, q_sources=tokens)
    if needs.up_bias:
        sum_groups(dpreact, offsets, grads.up_bias)
    if needs.x:
        dx_rows = dout.new_empty((num_rows, dout.shape[1]))
        matmul_groups(dpreact, block.up_nk().transpose(1, 2), offsets, None, dx_rows)
        combine(dx_rows, None, slot_to_row, top_k, out=grads.x)


def down_dgrad(
    block,
    dout: Tensor,
    tokens: Optional[Tensor],
    weights: Optional[Tensor],
    preact: Tensor,
    offsets: Tensor,
    spent: bool,
) -> Tuple[Tensor, Tensor, Tensor]:
    """(dpreact (R, P), weights * activation (R, I), <dout W, activation> (R,)), of dout read at tokens or in place.

    weights: (R,), None for ones. Rows of no expert stay unwritten. spent: dpreact takes the place of preact.
    """
    num_rows, wide = int(offsets[-1]), _wide(preact.dtype)
    grad = preact.new_empty((num_rows, block.intermediate))
    matmul_groups(dout, block.down_nk().transpose(1, 2), offsets, None, grad, tokens)
    dpreact = preact[:num_rows] if spent else preact.new_empty((num_rows, preact.shape[1]))
    inner = preact.new_empty(num_rows, dtype=wide)
    for rows in _chunks(offsets):
        wide_grad = grad[rows].to(wide)
        weighted = wide_grad if weights is None else weights[rows, None].to(wide) * wide_grad
        value, dpreact[rows] = act.forward_and_vjp(
            preact[rows].to(wide), weighted, block.activation, block.gated, block.interleaved
        )
        inner[rows] = (wide_grad * value).sum(1)
        grad[rows] = value if weights is None else value.mul_(weights[rows, None].to(wide))
    return dpreact, grad, inner
