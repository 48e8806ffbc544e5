"""The experts block as straight lines, for sorted rows in place and for rows that are routed from tokens.

`kernels` is a module of `backends`, which lists its functions. Rows that are routed (`rows.top_k` > 0) come from tokens
and go back to them: x, dout and the gradient of x have one row per token, the scales one per slot, and all else one
per row.
"""

from types import ModuleType
from typing import Optional, Tuple

import torch
from torch import Tensor

from .block import Block, Grads, Needs
from .rows import Rows, unit_rows


def forward(
    kernels: ModuleType,
    block: Block,
    x: Tensor,
    rows: Rows,
    act_scales: Optional[Tensor],
    bias_scales: Optional[Tensor],
    save: bool,
) -> Tuple[Tensor, Optional[Tensor]]:
    """(out, preact (rows, P) if it is to be saved).

    Rows in place: out[r] = W2[e] (act_scales[r] a(W1[e] x[r] + b1[e])) + bias_scales[r] b2[e], 0 for rows of no group.
    Routed rows: out[t] = sum over the slots of token t of act_scales[slot] (W2[e] a(W1[e] x[t] + b1[e]) + b2[e]).
    """
    routed = rows.top_k > 0
    preact, act = kernels.up_proj(block, x, rows, None if routed else act_scales, save=save, activate=True)
    y = kernels.gemm(
        act, block.down, rows, transposed=block.transposed, bias=block.down_bias,
        scales=None if routed else bias_scales, zero_rest=not routed,
    )  # fmt: skip
    del act
    return (kernels.combine(y, act_scales, rows) if routed else y), preact


def backward(
    kernels: ModuleType,
    block: Block,
    dout: Tensor,
    x: Optional[Tensor],
    rows: Rows,
    act_scales: Optional[Tensor],
    bias_scales: Optional[Tensor],
    preact: Optional[Tensor],
    needs: Needs,
    overwrite: bool = False,
) -> Grads:
    """The gradients that are asked for. The gradient of the pre-activation leads to those of x and of the first weight.

    x: for the gradient of the first weight and for recomputing alone. preact: None for a block that recomputes it.
    overwrite: the gradient of the pre-activation takes its place, and its memory is given back at the end. Each buffer
    goes before the next one comes, and the gradients of weights, which stay, come last.
    """
    routed, hidden = rows.top_k > 0, dout.shape[-1]
    dout, x = unit_rows(dout), unit_rows(x) if needs.up else x
    dbias = dout.new_empty(block.down_bias.shape) if needs.down_bias else None
    dpreact = act = d_act_scales = d_bias_scales = None
    # Routing weights scale the bias, too: the inner products <dout, bias> belong to their gradient.
    bias_dots = kernels.num_bias_dots(hidden) if routed and needs.act_scales and block.down_bias is not None else 0
    if needs.preact:
        if block.recompute:
            preact, _ = kernels.up_proj(block, x, rows, None, save=True, activate=False)
        dpreact, act, dots = kernels.down_dgrad(
            block, dout, rows, act_scales, preact,
            needs_dpreact=needs.dpreact, needs_act=needs.down, needs_dots=needs.act_scales, more_dots=bias_dots,
            overwrite=overwrite or block.recompute,
        )  # fmt: skip
        if bias_dots:
            kernels.bias_grads(dout, rows, act_scales, block.down_bias, dbias, dots[-bias_dots:])
        if needs.act_scales:
            d_act_scales = act_scales.new_empty(act_scales.shape)
            kernels.sum_dots(dots, rows, d_act_scales)
        del dots
    if needs.bias_scales:
        dots = dout.new_empty((kernels.num_bias_dots(hidden), rows.num_rows), dtype=_sum_dtype(dout))
        kernels.bias_grads(dout, rows, bias_scales, block.down_bias, dbias, dots)
        d_bias_scales = bias_scales.new_empty(bias_scales.shape)
        kernels.sum_dots(dots, rows, d_bias_scales)
        del dots
    elif needs.down_bias and not bias_dots:
        kernels.bias_grads(dout, rows, act_scales if routed else bias_scales, None, dbias, None)
    dx = dup = dup_bias = ddown = None
    if needs.x:
        dx = kernels.gemm(dpreact, block.up, rows, transposed=not block.transposed, zero_rest=not routed)
        dx = kernels.combine(dx, None, rows) if routed else dx
    if needs.up_bias:
        dup_bias = dout.new_empty(block.up_bias.shape)
        kernels.bias_grads(dpreact, rows.in_place(), None, None, dup_bias, None)
    if needs.up:
        dup = torch.empty_like(block.up)
        kernels.wgrad(dpreact, x, rows, _as_nk(dup, block), rhs_of_tokens=routed)
    del dpreact
    if overwrite and not block.recompute and preact is not None:
        preact.untyped_storage().resize_(0)
    del preact
    if needs.down:
        ddown = torch.empty_like(block.down)
        kernels.wgrad(dout, act, rows, _as_nk(ddown, block), lhs_of_tokens=routed)
    return Grads(dx, d_act_scales, d_bias_scales, dup, ddown, dup_bias, dbias)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _as_nk(weight: Tensor, block: Block) -> Tensor:
    """A weight or its gradient as a view (E, N, K), however it is laid out."""
    return weight.transpose(1, 2) if block.transposed else weight
