"""The experts block on the CPU: one GEMM per expert that has rows, elementwise passes in fp32 or wider."""

from typing import Tuple

import torch
from torch import Tensor

from .. import activation as act
from .grouped_linear import groups_with_rows, matmul_groups, rows_of, sum_groups, wgrad_groups
from .permute import combine

Indices = Tuple[Tensor, Tensor, Tensor]  # expert_offsets, row_to_slot, slot_to_row

_CHUNK = 256  # rows per elementwise pass: its temporaries stay in the cache


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _source_tokens(row_to_slot: Tensor, num_rows: int, top_k: int) -> Tensor:
    """(R,) token of each routed row."""
    return row_to_slot[:num_rows] // top_k


@torch.autocast("cpu", enabled=False)  # inputs have their dtype already, and sums are meant to be wide
def forward(block, x: Tensor, weights: Tensor, routing: Indices, save: bool) -> Tuple[Tensor, Tensor]:
    """(out (T, H), preact (S, P) or empty); `block` is a `grouped_moe.block.Block`."""
    offsets, row_to_slot, slot_to_row = routing
    top_k, num_rows = weights.shape[1], int(offsets[-1])
    tokens = _source_tokens(row_to_slot, num_rows, top_k)
    preact = _up_proj(block, x, tokens, offsets, row_to_slot.shape[0] if save else num_rows)
    a = x.new_empty((num_rows, block.intermediate))
    for start in range(0, num_rows, _CHUNK):
        rows = slice(start, min(start + _CHUNK, num_rows))
        wide = preact[rows].to(_wide(preact.dtype))
        a[rows] = act.forward(wide, block.activation, block.gated, block.interleaved)
    y = matmul_groups(a, block.down_nk(), offsets, block.down_bias, x.new_empty((num_rows, x.shape[1])))
    return combine(y, weights, slot_to_row, top_k), preact if save else x.new_empty(0)


def _up_proj(block, x: Tensor, tokens: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """preact (rows, P); rows past R stay unwritten."""
    up_nk = block.up_nk()
    return matmul_groups(x, up_nk, offsets, block.up_bias, x.new_empty((rows, up_nk.shape[1])), tokens)


@torch.autocast("cpu", enabled=False)
def backward(block, dout: Tensor, x: Tensor, weights: Tensor, preact: Tensor, routing: Indices, needs, grads) -> None:
    """Fills `grads`, allocated by `grouped_moe.block.empty_grads`, where `needs` asks for them."""
    offsets, row_to_slot, slot_to_row = routing
    top_k, num_rows = weights.shape[1], int(offsets[-1])
    slots = row_to_slot[:num_rows]
    tokens = _source_tokens(row_to_slot, num_rows, top_k)
    row_weights = weights.reshape(-1)[slots].to(_wide(dout.dtype))[:, None]
    if block.recompute:
        preact = _up_proj(block, x, tokens, offsets, num_rows)
    dpreact, scaled_act, inner = _down_dgrad(block, dout, tokens, row_weights, preact, offsets)
    if needs.weights:
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


def _down_dgrad(block, dout: Tensor, tokens: Tensor, row_weights: Tensor, preact: Tensor, offsets: Tensor):
    """(dpreact (R, P), weighted activation (R, I), <dout, y> (R,)) of the down-projection; y is never formed."""
    num_rows = tokens.shape[0]
    wide = _wide(preact.dtype)
    grad = preact.new_empty((num_rows, block.intermediate))
    matmul_groups(dout, block.down_nk().transpose(1, 2), offsets, None, grad, tokens)
    dpreact = preact.new_empty((num_rows, preact.shape[1]))
    inner = torch.empty(num_rows, dtype=wide)
    for start in range(0, num_rows, _CHUNK):
        rows = slice(start, min(start + _CHUNK, num_rows))
        wide_grad = grad[rows].to(wide)
        value, dpreact[rows] = act.forward_and_vjp(
            preact[rows].to(wide), row_weights[rows] * wide_grad, block.activation, block.gated, block.interleaved
        )
        inner[rows] = (wide_grad * value).sum(1)
        grad[rows] = value.mul_(row_weights[rows])
    if block.down_bias is not None:
        for expert, start, end in groups_with_rows(offsets):
            dout_rows = rows_of(dout, start, end, tokens).to(wide)
            inner[start:end] += dout_rows @ block.down_bias[expert].to(wide)
    return dpreact, grad, inner
