"""The grouped MLP on the CPU: one GEMM per group that has rows, elementwise passes in fp32 or wider."""

from typing import Optional, Tuple

from torch import Tensor

from . import without_autocast
from .experts import activate, down_dgrad, up_proj
from .grouped_linear import dot_groups, matmul_groups, sum_groups, wgrad_groups, zero_ungrouped
from .schedule import safe_offsets


@without_autocast
def forward(
    block, x: Tensor, splits: Tensor, act_scales: Optional[Tensor], bias_scales: Optional[Tensor], save: bool
) -> Tuple[Tensor, Tensor]:
    """(y (rows, H), preact (rows, P) or empty); `block` is a `grouped_moe.block.Block`."""
    offsets = safe_offsets(splits, block.num_experts, x.shape[0])
    preact = up_proj(block, x, None, offsets, x.shape[0])
    a = activate(block, preact, offsets, act_scales)
    y = matmul_groups(a, block.down_nk(), offsets, block.down_bias, x.new_empty(x.shape), scales=bias_scales)
    return zero_ungrouped(y, offsets), preact if save else x.new_empty(0)


@without_autocast
def backward(
    block,
    dy: Tensor,
    x: Tensor,
    splits: Tensor,
    act_scales: Optional[Tensor],
    bias_scales: Optional[Tensor],
    preact: Tensor,
    needs,
    grads,
) -> None:
    """Fills `grads` where `needs` asks for them."""
    offsets = safe_offsets(splits, block.num_experts, dy.shape[0])
    dpreact = scaled_act = inner = None
    if needs.preact:
        preact = up_proj(block, x, None, offsets, dy.shape[0]) if block.recompute else preact
        dpreact, scaled_act, inner = down_dgrad(block, dy, None, act_scales, preact, offsets, block.recompute)
    if needs.act_scales:
        grads.act_scales.zero_()
        rows = slice(int(offsets[0]), int(offsets[-1]))
        grads.act_scales[rows] = inner[rows].to(grads.act_scales.dtype)
    if needs.bias_scales:
        dot_groups(dy, block.down_bias, offsets, grads.bias_scales)
    if needs.down:
        wgrad_groups(dy, scaled_act, offsets, grads.down.transpose(1, 2) if block.transposed else grads.down)
    if needs.down_bias:
        sum_groups(dy, offsets, grads.down_bias, weights=bias_scales)
    if needs.up:
        wgrad_groups(dpreact, x, offsets, grads.up.transpose(1, 2) if block.transposed else grads.up)
    if needs.up_bias:
        sum_groups(dpreact, offsets, grads.up_bias)
    if needs.x:
        matmul_groups(dpreact, block.up_nk().transpose(1, 2), offsets, None, grads.x)
        zero_ungrouped(grads.x, offsets)
