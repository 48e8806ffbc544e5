"""Forward and backward of the experts block, step by step, for routed rows and for rows in place.

`kernels` is a module of `backends`, which lists its functions. Routed rows (`rows.top_k` > 0) come from tokens and go
back to them: x, dout and the gradient of x have one row per token, the scales one per slot, and all else one per row.
Rows in place are sorted by expert already, so that all of these have one per row.
"""

from types import ModuleType
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor

from .block import Block, Grads, Needs, Saved
from .common.numbers import wide_dtype
from .operands import grad_of_a, project, project_backward, read_factors, unpack_grads
from .rows import Rows, unit_rows


def forward(
    kernels: ModuleType,
    block: Block,
    x: Tensor,
    rows: Rows,
    act_scales: Optional[Tensor],
    bias_scales: Optional[Tensor],
    save: bool,
) -> Tuple[Tensor, Saved]:
    """The output, and what a backward needs of it if that is to be saved.

    Rows in place: out[r] = W2[e] (act_scales[r] a(W1[e] x[r] + b1[e])) + bias_scales[r] b2[e], 0 for rows of no group.
    Routed rows: out[t] = sum over the slots of token t of act_scales[slot] (W2[e] a(W1[e] x[t] + b1[e]) + b2[e]).
    """
    routed, save_preact, x = rows.top_k > 0, save and not block.recompute, unit_rows(x)
    up_factors, down_factors = read_factors(kernels, (block.up_lora, block.down_lora), rows, x.dtype)
    low_rank, up_rows = project(kernels, up_factors, x, rows, of_tokens=routed)
    preact, act = kernels.up_proj(
        block, x, rows, None if routed else act_scales, save=save_preact, activate=True, low_rank=low_rank
    )
    del x  # which may be a copy
    # The activation of rows in place has its scales already.
    low_rank, down_rows = project(kernels, down_factors, act, rows, scales=act_scales if save and routed else None)
    y = kernels.gemm(
        act, block.down, rows, transposed=block.transposed, bias=block.down_bias,
        scales=None if routed else bias_scales, zero_rest=not routed, low_rank=low_rank,
    )  # fmt: skip
    del act, low_rank
    out = kernels.combine(y, act_scales, rows) if routed else y
    return out, Saved(preact, up_rows if save_preact else None, down_rows if save else None)


def backward(
    kernels: ModuleType,
    block: Block,
    dout: Tensor,
    x: Optional[Tensor],
    rows: Rows,
    act_scales: Optional[Tensor],
    bias_scales: Optional[Tensor],
    saved: Saved,
    needs: Needs,
    overwrite: bool = False,
) -> Grads:
    """The gradients that are asked for. The gradient of the pre-activation leads to those of x and of the first weight.

    x: for the gradients of the first weight and of its LoRA, and for recomputing alone. overwrite: the gradient of the
    pre-activation takes its place, and its memory is given back at the end. To keep the peak low, each buffer is freed
    before the next one is made. Gradients of weights stay, so they are made last; those of b are small, and are made
    where the same rows are read.
    """
    routed, transposed = rows.top_k > 0, block.transposed
    dout, x = unit_rows(dout), None if x is None else unit_rows(x)
    # Routing weights scale the second bias, too: parts of <dout, bias> are in their gradient.
    scales_bias = routed and needs.act_scales and block.down_bias is not None
    more_dots = kernels.num_bias_dots(dout.shape[1]) if scales_bias else 0
    preact, up_rows, down_rows = saved
    dpreact = codes = act = dots = up_b = down_b = None
    grads, loras = {}, (block.up_lora, block.down_lora)
    up_factors, down_factors = read_factors(kernels, loras, rows, dout.dtype)
    if needs.preact and block.recompute:
        low_rank, up_rows = project(kernels, up_factors, x, rows, of_tokens=routed)
        preact, _ = kernels.up_proj(block, x, rows, None, save=True, activate=False, low_rank=low_rank)
    if needs.preact or needs.down_b:
        low_rank, down_b = project_backward(
            kernels, down_factors, dout, rows, down_rows if needs.down_b else None, of_tokens=routed
        )
    if needs.preact:
        dpreact, codes, act, dots = kernels.down_dgrad(
            block, dout, rows, act_scales, preact, needs, more_dots=more_dots, overwrite=overwrite or block.recompute,
            low_rank=low_rank,
        )  # fmt: skip
    if dpreact is None:  # else it may be in the memory of preact
        if overwrite:
            preact.untyped_storage().resize_(0)
        preact = None
    grads.update(_scale_and_bias_grads(kernels, block, dout, rows, act_scales, bias_scales, dots, more_dots, needs))
    dots = dots if _combines_dots(rows, needs) else None
    if needs.down_a:
        grads["down_a"] = grad_of_a(kernels, block.down_lora, low_rank, act, rows)
    act = act if needs.down else None
    low_rank = None
    if needs.x or needs.up_a or needs.up_b:
        low_rank, up_b = project_backward(
            kernels, up_factors, codes if dpreact is None else dpreact, rows, up_rows if needs.up_b else None
        )
    if up_b is not None or down_b is not None:
        grads["up_b"], grads["down_b"] = unpack_grads(kernels, "b", loras, (up_b, down_b))
        del up_b, down_b
    if needs.x:
        # Where the product is made with rows of 8-bit floats, dpreact came as such.
        source = dpreact if codes is None else codes
        dx = kernels.gemm(source, block.up, rows, transposed=not transposed, zero_rest=not routed, low_rank=low_rank)
        del source, codes
        grads["x"] = kernels.combine(dx, None, rows, dots, grads["act_scales"]) if routed else dx
        del dx
    del dots
    if needs.up_bias:
        grads["up_bias"] = dout.new_empty(*block.up_bias.shape)
        in_place = Rows(rows.schedule, rows.num_groups, rows.num_rows, rows.block_m)  # as those of dpreact are
        kernels.bias_grads(dpreact, in_place, None, None, grads["up_bias"], None)
    if needs.up_a:
        grads["up_a"] = grad_of_a(kernels, block.up_lora, low_rank, x, rows, of_tokens=routed)
    if needs.up:
        grads["up"] = torch.empty_like(block.up)
        kernels.wgrad(dpreact, x, rows, _as_nk(grads["up"], block), rhs_of_tokens=routed)
    del dpreact
    if overwrite and preact is not None:
        preact.untyped_storage().resize_(0)
    del preact
    if needs.down:
        grads["down"] = torch.empty_like(block.down)
        kernels.wgrad(dout, act, rows, _as_nk(grads["down"], block), lhs_of_tokens=routed)
    return Grads(**grads)


def _combines_dots(rows: Rows, needs: Needs) -> bool:
    """Whether the kernel that combines the gradient of x sums up the dots, too: that is one launch less."""
    return rows.top_k > 0 and needs.x and needs.act_scales


def _scale_and_bias_grads(
    kernels: ModuleType,
    block: Block,
    dout: Tensor,
    rows: Rows,
    act_scales: Optional[Tensor],
    bias_scales: Optional[Tensor],
    dots: Optional[Tensor],
    more_dots: int,
    needs: Needs,
) -> Dict[str, Optional[Tensor]]:
    """The gradients of act_scales, of bias_scales and of the second bias; the first is unwritten if `_combines_dots`.

    dots: the parts of <gradient of the activation, activation> of each row, and room for more_dots, of <dout, bias>.
    """
    dbias = dout.new_empty(*block.down_bias.shape) if needs.down_bias else None
    d_act_scales = d_bias_scales = bias_dots = None
    if more_dots:
        bias_dots = dots[-more_dots:]
    elif needs.bias_scales:
        num_parts = kernels.num_bias_dots(dout.shape[1])
        bias_dots = dout.new_empty(num_parts, rows.num_rows, dtype=wide_dtype(dout.dtype))
    if needs.down_bias or bias_dots is not None:
        scales = act_scales if rows.top_k else bias_scales
        kernels.bias_grads(dout, rows, scales, block.down_bias, dbias, bias_dots)
    if needs.act_scales:
        d_act_scales = act_scales.new_empty(*act_scales.shape)
        if not _combines_dots(rows, needs):
            kernels.sum_dots(dots, rows, d_act_scales)
    if needs.bias_scales:
        d_bias_scales = bias_scales.new_empty(*bias_scales.shape)
        kernels.sum_dots(bias_dots, rows, d_bias_scales)
    return {"act_scales": d_act_scales, "bias_scales": d_bias_scales, "down_bias": dbias}


def _as_nk(weight: Tensor, block: Block) -> Tensor:
    """A weight or its gradient as a view (E, N, K), however it is laid out."""
    return weight.transpose(1, 2) if block.transposed else weight
