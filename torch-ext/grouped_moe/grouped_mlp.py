"""Two grouped linear layers with an activation between them, over rows that are sorted by expert already."""

from typing import NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from . import _checks as checks
from ._ops import add_op_namespace_prefix, ops
from ._torch import grouped_mlp as _torch_mlp
from .activation import Activation, as_activation
from .block import Block, make_block, pack_kind
from .define import once_differentiable, refuse_forward_mode
from .fused import launch_down_dgrad, launch_up_proj
from .gemm import (
    launch_bias_backward,
    launch_gemm,
    launch_sum_partials,
    launch_wgrad,
    nk_strides,
    unit_rows,
)
from .schedule import Splits, as_splits, schedule_for
from .tuning import on_device_of


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    act_scales: bool
    bias_scales: bool
    up: bool
    down: bool
    up_bias: bool
    down_bias: bool

    @property
    def preact(self) -> bool:
        """Whether any of them is made of the pre-activation: all but those of the second bias and its scales are."""
        return any(self._replace(bias_scales=False, down_bias=False))


class Grads(NamedTuple):
    """The gradients; an empty tensor stands for one that is not asked for."""

    x: Tensor
    act_scales: Tensor
    bias_scales: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor
    down_bias: Tensor


def forward_triton(
    block: Block,
    x: Tensor,
    splits: Tensor,
    act_scales: Optional[Tensor],
    bias_scales: Optional[Tensor],
    save: bool,
) -> Tuple[Tensor, Tensor]:
    """(y (rows, H), preact (rows, P) or empty) by the Triton kernels."""
    schedule = schedule_for(splits, block.num_experts, x.shape[0], x.dtype)
    preact, a = launch_up_proj(block, x, schedule, save, activate=True, scales=act_scales)
    strides = nk_strides(block.down, block.transposed)
    y = launch_gemm(a, block.down, strides, x.shape[1], block.down_bias, schedule, bias_scales, zero_rest=True)
    return y, preact if save else x.new_empty(0)


def backward_triton(
    block: Block,
    dy: Tensor,
    x: Optional[Tensor],
    splits: Tensor,
    act_scales: Optional[Tensor],
    bias_scales: Optional[Tensor],
    preact: Tensor,
    needs: Needs,
) -> Grads:
    """The gradients by the Triton kernels. Those of the weights come last, that of down once dpreact is gone."""
    dy = unit_rows(dy)
    schedule = schedule_for(splits, block.num_experts, dy.shape[0], dy.dtype)
    grads = _empty_grads(needs._replace(x=False, up=False, down=False), block, dy, act_scales, bias_scales)
    dpreact = scaled_act = partials = None
    if needs.preact:
        if block.recompute:
            preact, _ = launch_up_proj(block, x, schedule, save=True, activate=False)
        dpreact, scaled_act, partials = launch_down_dgrad(
            block, dy, act_scales, preact, schedule,
            dpreact=needs.x or needs.up or needs.up_bias, scaled_act=needs.down, partials=needs.act_scales,
        )  # fmt: skip
    if needs.act_scales:
        launch_sum_partials(partials, schedule, grads.act_scales)
    if needs.down_bias or needs.bias_scales:
        dbias, dscales = grads.down_bias if needs.down_bias else None, grads.bias_scales if needs.bias_scales else None
        launch_bias_backward(dy, bias_scales, block.down_bias, schedule, dbias, dscales)
    del partials
    if needs.x:
        strides = nk_strides(block.up, not block.transposed)
        dx = launch_gemm(dpreact, block.up, strides, dy.shape[1], None, schedule, zero_rest=True)
        grads = grads._replace(x=dx)
    if needs.up_bias:
        launch_bias_backward(dpreact, None, None, schedule, grads.up_bias, None)
    if needs.up:
        grads = grads._replace(up=torch.empty_like(block.up))
        dw = grads.up.transpose(1, 2) if block.transposed else grads.up
        launch_wgrad(dpreact, 0, x, 0, None, schedule.map, dw)
    del dpreact
    if needs.down:
        grads = grads._replace(down=torch.empty_like(block.down))
        dw = grads.down.transpose(1, 2) if block.transposed else grads.down
        launch_wgrad(dy, 0, scaled_act, 0, None, schedule.map, dw)
    return grads


def _empty_grads(
    needs: Needs, block: Block, dy: Tensor, act_scales: Optional[Tensor], bias_scales: Optional[Tensor]
) -> Grads:
    """Unwritten gradients. A weight's keeps its strides; the others are contiguous, which is what the kernels write."""

    def like(tensor: Optional[Tensor], need: bool, keep_strides: bool = False) -> Tensor:
        if not need:
            return dy.new_empty(0)
        return torch.empty_like(tensor) if keep_strides else tensor.new_empty(tensor.shape)

    return Grads(
        x=like(dy, needs.x),
        act_scales=like(act_scales, needs.act_scales),
        bias_scales=like(bias_scales, needs.bias_scales),
        up=like(block.up, needs.up, keep_strides=True),
        down=like(block.down, needs.down, keep_strides=True),
        up_bias=like(block.up_bias, needs.up_bias),
        down_bias=like(block.down_bias, needs.down_bias),
    )


@torch.library.custom_op(add_op_namespace_prefix("grouped_mlp"), mutates_args=())
def _grouped_mlp(
    x: Tensor,
    splits: Tensor,
    act_scales: Optional[Tensor],
    bias_scales: Optional[Tensor],
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    activation: str,
    parameters: Sequence[float],
    flags: Sequence[bool],
    save: bool,
) -> Tuple[Tensor, Tensor]:
    block = make_block(up, down, up_bias, down_bias, activation, parameters, flags)
    if x.device.type == "cpu":
        return _torch_mlp.forward(block, x, splits, act_scales, bias_scales, save)
    with on_device_of(x):
        return forward_triton(block, x, splits, act_scales, bias_scales, save)


@torch.library.register_fake(add_op_namespace_prefix("grouped_mlp"))
def _grouped_mlp_fake(
    x, splits, act_scales, bias_scales, up, down, up_bias, down_bias, activation, parameters, flags, save
):  # fmt: skip
    block = make_block(up, down, up_bias, down_bias, activation, parameters, flags)
    return x.new_empty(x.shape), x.new_empty((x.shape[0], block.preact_width) if save else (0,))


@torch.library.custom_op(add_op_namespace_prefix("grouped_mlp_backward"), mutates_args=())
def _grouped_mlp_backward(
    dy: Tensor,
    x: Optional[Tensor],
    splits: Tensor,
    act_scales: Optional[Tensor],
    bias_scales: Optional[Tensor],
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    preact: Tensor,
    activation: str,
    parameters: Sequence[float],
    flags: Sequence[bool],
    needs: Sequence[bool],
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    block, wanted = make_block(up, down, up_bias, down_bias, activation, parameters, flags), Needs(*needs)
    if dy.device.type == "cpu":
        grads = _empty_grads(wanted, block, dy, act_scales, bias_scales)
        _torch_mlp.backward(block, dy, x, splits, act_scales, bias_scales, preact, wanted, grads)
        return tuple(grads)
    with on_device_of(dy):
        return tuple(backward_triton(block, dy, x, splits, act_scales, bias_scales, preact, wanted))


@torch.library.register_fake(add_op_namespace_prefix("grouped_mlp_backward"))
def _grouped_mlp_backward_fake(
    dy, x, splits, act_scales, bias_scales, up, down, up_bias, down_bias, preact, activation, parameters, flags, needs
):
    block = make_block(up, down, up_bias, down_bias, activation, parameters, flags)
    return tuple(_empty_grads(Needs(*needs), block, dy, act_scales, bias_scales))


_DIFFERENTIABLE = (0, 2, 3, 4, 5, 6, 7)  # of the op's arguments those that `Needs` is of


def _setup_context(ctx, inputs, output):
    x, splits, act_scales, bias_scales, up, down, up_bias, down_bias, activation, parameters, flags, save = inputs
    *flags, recompute = flags
    if not (recompute or save):  # under vmap the caller cannot know what wants a gradient
        recompute = Needs(*(ctx.needs_input_grad[i] for i in _DIFFERENTIABLE)).preact
    preact = output[1]  # differentiable, though nobody uses it: see `experts._Experts`
    ctx.kind = activation, parameters, [*flags, recompute]
    ctx.set_materialize_grads(False)
    reads_x = ctx.needs_input_grad[4] or recompute
    saved = x if reads_x else None, splits, act_scales, bias_scales, up, down, up_bias, down_bias, preact
    ctx.save_for_backward(*saved)


@once_differentiable
def _backward(ctx, saved, dy, _):
    wanted = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
    if dy is None:
        return (None,) * len(ctx.needs_input_grad)
    grads = ops.grouped_mlp_backward(dy, *saved, *ctx.kind, wanted)
    dx, *others = (grad if want else None for grad, want in zip(grads, wanted))
    return (dx, None, *others) + (None,) * 4


torch.library.register_autograd(add_op_namespace_prefix("grouped_mlp"), _backward, setup_context=_setup_context)


def grouped_mlp(
    x: Tensor,
    splits: Splits,
    activation_scales: Optional[Tensor],
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    bias_scales: Optional[Tensor] = None,
    gate_up_proj_bias: Optional[Tensor] = None,
    down_proj_bias: Optional[Tensor] = None,
    activation: Union[str, Activation] = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    recompute: bool = False,
) -> Tensor:
    """The experts on rows that are sorted already: for the rows r of group g

    y[r] = down_proj[g] (activation_scales[r] a(gate_up_proj[g] x[r] + gate_up_proj_bias[g]))
         + bias_scales[r] down_proj_bias[g], with the activation a of `Activation`.

    x: (rows, H). splits: as for `grouped_linear`; rows of no group are written as 0, left out of every gradient and
    never contribute. activation_scales, bias_scales: (rows,), of any floating dtype, kept as they are; None for ones.
    They may be one tensor or two: each use has its own gradient. Weights, biases, activation and layout flags: as for
    `grouped_mm_experts`, but that one bias may come without the other. Returns (rows, H) in the dtype of x.

    Differentiable once, in reverse mode, in all floating tensors, each only when asked for; fp32 accumulation; bitwise
    repeatable; no host sync. Saved for backward: x (not if gate_up_proj is frozen) and the pre-activation, (rows, 2 I)
    or (rows, I); with recompute=True x alone. Raises TypeError or ValueError that names the argument.
    """
    checks.check_flags(gated=gated, interleaved=interleaved, transposed=transposed, recompute=recompute)
    kind = as_activation(activation, gated, interleaved)
    dtype = checks.autocast_dtype(x.device.type) if isinstance(x, Tensor) else None
    x, up, down, up_bias, down_bias = (
        checks.autocast(tensor, dtype) for tensor in (x, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
    )
    checks.check_experts("x", x, up, down, up_bias, down_bias, gated, transposed)
    scales = {"activation_scales": activation_scales, "bias_scales": bias_scales}
    for name, tensor in scales.items():
        if tensor is not None:
            checks.check_scales(name, tensor, x)
            scales[name] = tensor.contiguous()
    if bias_scales is not None and down_bias is None:
        raise ValueError("bias_scales: expected None without down_proj_bias, which they scale")
    splits = as_splits(splits, up.shape[0], x.shape[0], x.device)
    tensors = (x, *scales.values(), up, down, up_bias, down_bias)
    refuse_forward_mode("grouped_mlp", *tensors)
    needs = Needs(*(t is not None and t.requires_grad for t in tensors))
    y, _ = ops.grouped_mlp(
        x, splits, *scales.values(), up, down, up_bias, down_bias,
        *pack_kind(kind, gated, interleaved, transposed, recompute),
        torch.is_grad_enabled() and needs.preact and not recompute,
    )  # fmt: skip
    return y
