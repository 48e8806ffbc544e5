"""Two grouped linear layers with an activation between them, over rows that are sorted by group already."""

from typing import List, Optional, Tuple, Union

import torch
from torch import Tensor

from . import pipeline
from ._ops import ops
from .backends import backend_of
from .block import BLOCK_SCHEMA, Grads, Needs, fake_grads, kind_arguments, make_block
from .common import checks
from .common.activation import Activation, as_activation
from .common.autograd import (
    define_differentiable_op,
    define_op,
    is_plain,
    mark_as_own,
    once_differentiable,
    or_empty,
    refuse_forward_mode,
    spread,
    take_over,
    wanted,
)
from .common.device import on_device
from .rows import schedule_size
from .splits import Splits, as_splits

_ARGUMENTS = (
    f"Tensor x, Tensor splits, Tensor? act_scales, Tensor? bias_scales, {BLOCK_SCHEMA}"
)  # fmt: skip
_NUM_ARGUMENTS = 12


def _forward(
    x: Tensor, splits: Tensor, act_scales: Optional[Tensor], bias_scales: Optional[Tensor], *block_and_save: object
) -> Tuple[Tensor, Tensor, Tensor]:
    """(y, preact, the schedule of the rows); preact is empty unless it is to be saved."""
    *arguments, save = block_and_save
    block, kernels = make_block(*arguments), backend_of(x)
    with on_device(x):
        rows = kernels.split_rows(splits, block.num_experts, x.shape[0], x.dtype)
        y, preact = pipeline.forward(kernels, block, x, rows, act_scales, bias_scales, save=save)
    return y, x.new_empty(0) if preact is None else preact, rows.schedule


def _forward_fake(x, splits, act_scales, bias_scales, *block_and_save):
    *arguments, save = block_and_save
    block, num_rows = make_block(*arguments), x.shape[0]
    schedule = splits.new_empty(schedule_size(num_rows, block.num_experts), dtype=torch.int32)
    return x.new_empty(x.shape), x.new_empty((num_rows, block.preact_width) if save else 0), schedule


def _backward(dy, x, act_scales, bias_scales, *rest, overwrite: bool) -> Grads:
    """The gradients that are asked for. rest: the block, what was saved, needs."""
    *arguments, preact, schedule, needs = rest
    block, kernels = make_block(*arguments), backend_of(dy)
    # Hooks on what was saved may return it in other strides.
    act_scales, bias_scales = (None if scales is None else scales.contiguous() for scales in (act_scales, bias_scales))
    with on_device(dy):
        rows = kernels.split_rows(schedule, block.num_experts, dy.shape[0], dy.dtype)
        return pipeline.backward(
            kernels, block, dy, x, rows, act_scales, bias_scales, preact.contiguous(), Needs(*needs), overwrite
        )


def _backward_op(dy, *rest) -> Tuple[Tensor, ...]:
    return or_empty(_backward(dy, *rest, overwrite=False), dy)


def _backward_overwriting_op(*args) -> List[Tensor]:
    return wanted(_backward(*args, overwrite=True), args[-1])


def _fake_grads(dy, x, act_scales, bias_scales, *rest) -> Grads:
    *arguments, _, _, needs = rest
    return fake_grads(Needs(*needs), make_block(*arguments), dy, act_scales, bias_scales)


def _plain(*args) -> Tensor:
    return ops.grouped_mlp_forward.default(*args, False)[0]


def _recorded(*args) -> Tensor:
    return _GroupedMLP.apply(*args)[0]


define_op(
    "grouped_mlp_forward",
    f"({_ARGUMENTS}, bool save) -> (Tensor y, Tensor preact, Tensor schedule)",
    _forward,
    _forward_fake,
)
_BACKWARD = (
    f"(Tensor dy, Tensor? x, Tensor? act_scales, Tensor? bias_scales, {BLOCK_SCHEMA}, Tensor%s preact,"
    " Tensor schedule, bool[] needs)"
)
define_op(
    "grouped_mlp_backward",
    f"{_BACKWARD % ''} -> ({', '.join(f'Tensor d{name}' for name in Needs._fields)})",
    _backward_op,
    lambda dy, *rest: or_empty(_fake_grads(dy, *rest), dy),
)
# Overwrites preact and gives its memory back.
define_op(
    "grouped_mlp_backward_overwriting",
    f"{_BACKWARD % '(a!)'} -> Tensor[]",
    _backward_overwriting_op,
    lambda *args: wanted(_fake_grads(*args), args[-1]),
)
_grouped_mlp = define_differentiable_op(
    "grouped_mlp", f"({_ARGUMENTS}) -> Tensor", _plain, _recorded, lambda x, *_: x.new_empty(x.shape)
)


class _GroupedMLP(torch.autograd.Function):
    """The autograd of the op, whose inputs these are. Why preact is an output: see `experts._Experts`."""

    @staticmethod
    def forward(ctx, *inputs):
        x, _, act_scales, bias_scales, up, down, up_bias, down_bias, *kind = inputs
        needs = ctx.needs = _needs_of(ctx)
        _, _, (_, _, _, recompute), _ = kind
        y, preact, schedule = ops.grouped_mlp_forward.default(*inputs, needs.preact and not recompute)
        ctx.set_materialize_grads(False)
        ctx.kind = kind
        mark_as_own(preact)
        reads_x = needs.up or (recompute and needs.preact)
        ctx.save_for_backward(
            x if reads_x else None, act_scales, bias_scales, up, down, up_bias, down_bias, preact, schedule
        )  # fmt: skip
        return y, preact

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy, _):
        if dy is None:
            return (None,) * _NUM_ARGUMENTS
        *tensors, preact, schedule = saved
        arguments = dy, *tensors, *ctx.kind, preact, schedule, list(ctx.needs)
        if ctx.needs.preact and is_plain(dy) and take_over(preact):
            made = ops.grouped_mlp_backward_overwriting.default(*arguments)
        else:
            made = wanted(ops.grouped_mlp_backward.default(*arguments), ctx.needs)
        dx, *grads = spread(made, ctx.needs)
        return (dx, None, *grads) + (None,) * (_NUM_ARGUMENTS - 8)


def _needs_of(ctx) -> Needs:
    """What the autograd function has to compute: the gradients of all its floating inputs that ask for one."""
    x, _, act_scales, bias_scales, up, down, up_bias, down_bias, *_ = ctx.needs_input_grad
    return Needs(x, act_scales, bias_scales, up, down, up_bias, down_bias)


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
    activation = as_activation(activation, gated, interleaved)
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
    tensors = *scales.values(), up, down, up_bias, down_bias
    refuse_forward_mode("grouped_mlp", x, *tensors)
    kind = kind_arguments(activation, gated, interleaved, transposed, recompute)
    return _grouped_mlp(x, splits, *tensors, *kind, None)
