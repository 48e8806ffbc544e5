"""Linear layer with one weight per group of consecutive rows."""

import operator
from functools import lru_cache
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import _checks as checks
from ._ops import ops
from ._torch import grouped_linear as _torch_linear
from ._torch import without_autocast
from ._torch.schedule import safe_offsets
from .define import (
    below_autograd,
    define_op,
    is_plain,
    needs_autograd,
    once_differentiable,
    plain_apply,
    plan_key,
    register_autograd,
)
from .gemm import bias_backward_plan, gemm_launch, has_unit_rows, nk_order, unit_rows, wgrad_launch
from .launch import MAX_KEPT, Form, form_of
from .plan import Plan, Plans, like, unwritten
from .schedule import Splits, as_splits, map_form, schedule_launch, schedule_sizes
from .tuning import DeviceSpec, dot_precision, on_device_of, spec_of

Grads = Tuple[Optional[Tensor], ...]  # of x, weight, bias, bias_scales; None where not asked for


def forward_triton(
    x: Tensor, weight: Tensor, splits: Tensor, bias: Optional[Tensor], scales: Optional[Tensor], transposed: bool
) -> Tuple[Tensor, Tensor]:
    """y, and the map of its schedule, by the Triton kernels."""
    splits = splits if splits.is_contiguous() else splits.contiguous()
    tile_map, y = _plan_of(x, weight, splits, bias, scales, transposed)(x, weight, splits, bias, scales)[5:]
    return y, tile_map


def _plan_of(
    x: Tensor, weight: Tensor, splits: Tensor, bias: Optional[Tensor], scales: Optional[Tensor], transposed: bool
) -> Plan:
    """The plan of the forward; splits and scales are contiguous."""
    spec = spec_of(x)
    return _forward_plan(
        *map(form_of, (x, weight, splits, bias, scales)), transposed, spec, dot_precision(x.dtype, spec), x.device
    )


@lru_cache(maxsize=MAX_KEPT)
def _forward_plan(
    x: Form, weight: Form, splits: Form, bias: Optional[Form], scales: Optional[Form], transposed: bool,
    spec: DeviceSpec, precision: str, device: torch.device,
) -> Plan:  # fmt: skip
    """x, weight, splits, bias, scales -> map, y."""
    rows, num_groups, n = x.shape[0], weight.shape[0], weight.shape[2 if transposed else 1]
    sizes = schedule_sizes(rows, num_groups, x.dtype)
    plan = Plan(device, 5)
    tile_map, y = plan.make(map_form(sizes)), plan.make(unwritten(x.dtype, rows, n))
    plan.add(schedule_launch(splits, rows, sizes, device), 2, tile_map)
    if rows:
        strides = nk_order(weight.strides, transposed)
        gemm = gemm_launch(x, weight, strides, n, bias, scales, sizes, True, spec, precision, device)
        plan.add(gemm, 0, 1, 3, 4, y, tile_map)
    return plan


def backward_triton(
    dy: Tensor,
    x: Optional[Tensor],
    weight: Tensor,
    splits: Tensor,
    bias: Optional[Tensor],
    scales: Optional[Tensor],
    transposed: bool,
    needs: Sequence[bool],
) -> Grads:
    """The backward by the Triton kernels. splits may also be the map that `forward_triton` made of them."""
    _, needs_weight, needs_bias, needs_scales = needs
    dy, x, bias = unit_rows(dy), unit_rows(x) if needs_weight else None, bias if needs_scales else None
    scales = scales.contiguous() if scales is not None and (needs_bias or needs_scales) else None
    splits = splits if splits.is_contiguous() else splits.contiguous()
    given = dy, x, weight, splits, bias, scales
    return tuple(_backward_plan_of(given, transposed, tuple(needs))(*given)[_MADE])


def _backward_plan_of(given: Sequence[Optional[Tensor]], transposed: bool, needs: Tuple[bool, ...]) -> Plan:
    """Its plan; dy and x have contiguous columns, splits and scales are contiguous, and what is not needed is None."""
    dy, spec = given[0], spec_of(given[0])
    return _backward_plan(*map(form_of, given), transposed, needs, spec, dot_precision(dy.dtype, spec), dy.device)


_GIVEN = 6  # to the backward's plan
_MADE = slice(_GIVEN + 1, _GIVEN + 5)  # by it, after the map


@lru_cache(maxsize=MAX_KEPT)
def _backward_plan(
    dy: Form, x: Optional[Form], weight: Form, splits: Form, bias: Optional[Form], scales: Optional[Form],
    transposed: bool, needs: Tuple[bool, ...], spec: DeviceSpec, precision: str, device: torch.device,
) -> Plan:  # fmt: skip
    """dy, x, weight, splits, bias, scales -> map, unless splits are one, dx, dw, dbias, dscales; None if not needed."""
    rows, num_groups, k = dy.shape[0], weight.shape[0], weight.shape[1 if transposed else 2]
    needs_x, needs_weight, needs_bias, needs_scales = needs
    sizes = schedule_sizes(rows, num_groups, dy.dtype)
    is_map = splits.shape[0] > num_groups + 1
    plan = Plan(device, _GIVEN)
    made_map = plan.make(None if is_map else map_form(sizes))
    dx = plan.make(unwritten(dy.dtype, rows, k) if needs_x else None)
    dw = plan.make(like(weight) if needs_weight else None)
    dbias_form = unwritten(dy.dtype, num_groups, dy.shape[1]) if needs_bias else None
    dscales_form = unwritten(scales.dtype, rows) if needs_scales else None
    dbias, dscales = plan.make(dbias_form), plan.make(dscales_form)
    tile_map = 3 if is_map else made_map
    if not is_map:
        plan.add(schedule_launch(splits, rows, sizes, device), 3, tile_map)
    if needs_x and rows:
        strides = nk_order(weight.strides, not transposed)
        gemm = gemm_launch(dy, weight, strides, k, None, None, sizes, True, spec, precision, device)
        plan.add(gemm, 0, 2, None, None, dx, tile_map)
    if needs_weight:
        (p, p_number), (q, q_number) = ((x, 1), (dy, 0)) if transposed else ((dy, 0), (x, 1))
        wgrad = wgrad_launch(p, 0, q, 0, None, like(weight), False, spec, precision, device)
        plan.add(wgrad, p_number, q_number, dw, None, tile_map)
    if needs_bias or needs_scales:
        sums = bias_backward_plan(dy, scales, bias, dbias_form, dscales_form, sizes, (False, False), device)
        plan.include(sums, 0, 5, 4, tile_map, dbias, dscales)
    return plan


@without_autocast
def forward_torch(
    x: Tensor, weight: Tensor, splits: Tensor, bias: Optional[Tensor], scales: Optional[Tensor], transposed: bool
) -> Tuple[Tensor, Tensor]:
    """y and its offsets, on the CPU."""
    offsets = safe_offsets(splits, weight.shape[0], x.shape[0])
    nk = weight.transpose(1, 2) if transposed else weight
    y = x.new_empty((x.shape[0], nk.shape[1]))
    _torch_linear.matmul_groups(x, nk, offsets, bias, y, scales=scales)
    return _torch_linear.zero_ungrouped(y, offsets), offsets


@without_autocast
def backward_torch(
    dy: Tensor,
    x: Optional[Tensor],
    weight: Tensor,
    splits: Tensor,
    bias: Optional[Tensor],
    scales: Optional[Tensor],
    transposed: bool,
    needs: Sequence[bool],
) -> Grads:
    """The backward on the CPU."""
    offsets = safe_offsets(splits, weight.shape[0], dy.shape[0])
    grads = dx, dw, dbias, dscales = _empty_grads(dy, weight, scales, transposed, needs)
    if needs[0]:
        _torch_linear.matmul_groups(dy, weight if transposed else weight.transpose(1, 2), offsets, None, dx)
        _torch_linear.zero_ungrouped(dx, offsets)
    if needs[1]:
        p, q = (x, dy) if transposed else (dy, x)
        _torch_linear.wgrad_groups(p, q, offsets, dw)
    if needs[2]:
        _torch_linear.sum_groups(dy, offsets, dbias, weights=scales)
    if needs[3]:
        _torch_linear.dot_groups(dy, bias, offsets, dscales)
    return grads


def _empty_grads(
    dy: Tensor, weight: Tensor, scales: Optional[Tensor], transposed: bool, needs: Sequence[bool]
) -> Grads:
    """Unwritten gradients."""
    k, n = (weight.shape[1], weight.shape[2]) if transposed else (weight.shape[2], weight.shape[1])
    return (
        dy.new_empty((dy.shape[0], k)) if needs[0] else None,
        torch.empty_like(weight) if needs[1] else None,
        dy.new_empty((weight.shape[0], n)) if needs[2] else None,
        scales.new_empty(scales.shape) if needs[3] else None,
    )


def _forward(
    x: Tensor,
    weight: Tensor,
    splits: Tensor,
    bias: Optional[Tensor],
    bias_scales: Optional[Tensor],
    transposed: bool,
) -> Tuple[Tensor, Tensor]:
    """y, and what the backward takes as splits at less cost."""
    if x.device.type == "cpu":
        return forward_torch(x, weight, splits, bias, bias_scales, transposed)
    with on_device_of(x):
        return forward_triton(x, weight, splits, bias, bias_scales, transposed)


def _backward(
    dy: Tensor,
    x: Optional[Tensor],
    weight: Tensor,
    splits: Tensor,
    bias: Optional[Tensor],
    bias_scales: Optional[Tensor],
    transposed: bool,
    needs: Sequence[bool],
) -> Grads:
    if dy.device.type == "cpu":
        return backward_torch(dy, x, weight, splits, bias, bias_scales, transposed, needs)
    with on_device_of(dy):
        return backward_triton(dy, x, weight, splits, bias, bias_scales, transposed, needs)


def _grouped_linear(x, weight, splits, bias, bias_scales, transposed):
    return _forward(x, weight, splits, bias, bias_scales, transposed)[0]


def _grouped_linear_fake(x, weight, splits, bias, bias_scales, transposed):
    return x.new_empty((x.shape[0], weight.shape[2] if transposed else weight.shape[1]))


def _grouped_linear_backward(dy, x, weight, splits, bias, bias_scales, transposed, needs):
    grads = _backward(dy, x, weight, splits, bias, bias_scales, transposed, needs)
    return tuple(dy.new_empty(0) if grad is None else grad for grad in grads)


def _grouped_linear_backward_fake(dy, x, weight, splits, bias, bias_scales, transposed, needs):
    grads = _empty_grads(dy, weight, bias_scales, transposed, needs)
    return tuple(dy.new_empty(0) if grad is None else grad for grad in grads)


define_op(
    "grouped_linear",
    "(Tensor x, Tensor weight, Tensor splits, Tensor? bias, Tensor? bias_scales, bool transposed) -> Tensor",
    _grouped_linear,
    _grouped_linear_fake,
)
define_op(
    "grouped_linear_backward",
    "(Tensor dy, Tensor? x, Tensor weight, Tensor splits, Tensor? bias, Tensor? bias_scales, bool transposed,"
    " bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    _grouped_linear_backward,
    _grouped_linear_backward_fake,
)


class _GroupedLinear(torch.autograd.Function):
    """The autograd of the op, whose inputs these are, but for the last: whether the call is plain, or all it made."""

    @staticmethod
    def forward(ctx, x, weight, splits, bias, scales, transposed, plain):
        ctx.transposed = transposed
        needs_x, needs_weight, _, needs_bias, needs_scales, *_ = ctx.needs_input_grad
        # What the backward does not read may change until then. Of a weight it then needs the shape.
        saved_weight = weight if needs_x or not weight.is_contiguous() else weight.new_empty(1).expand(weight.shape)
        saved_scales = scales if needs_bias or needs_scales else None
        # The schedule is beside what is saved: activation checkpointing compares that between calls of either way.
        if isinstance(plain, list):
            *_, ctx.schedule, y = plain
        elif plain:
            y, ctx.schedule = _forward(x, weight, splits, bias, scales, transposed)
        else:
            ctx.schedule = None
            with below_autograd():
                y = ops.grouped_linear.default(x, weight, splits, bias, scales, transposed)
        ctx.save_for_backward(
            x if needs_weight else None, saved_weight, splits, bias if needs_scales else None, saved_scales
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy):
        needs_x, needs_weight, _, needs_bias, needs_scales, *_ = ctx.needs_input_grad
        needs = needs_x, needs_weight, needs_bias, needs_scales
        x, weight, splits, bias, scales = saved
        made = None
        if ctx.schedule is not None:
            made = _backward_by_plan(dy, x, weight, ctx.schedule, bias, scales, ctx.transposed, needs)
        if made is not None:
            dx, dw, dbias, dscales = made[_MADE]
        elif is_plain(dy, x, weight, splits, bias, scales):
            splits = splits if ctx.schedule is None else ctx.schedule
            dx, dw, dbias, dscales = _backward(dy, x, weight, splits, bias, scales, ctx.transposed, needs)
        else:
            grads = ops.grouped_linear_backward.default(dy, x, weight, splits, bias, scales, ctx.transposed, needs)
            dx, dw, dbias, dscales = (grad if need else None for grad, need in zip(grads, needs))
        return dx, dw, None, dbias, dscales, None, None


register_autograd("grouped_linear", _GroupedLinear)
_apply_plain = plain_apply(_GroupedLinear)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    splits: Splits,
    bias: Optional[Tensor] = None,
    bias_scales: Optional[Tensor] = None,
    *,
    transposed: bool = False,
) -> Tensor:
    """y[r] = W[g] x[r] + bias[g] * bias_scales[r] for the rows r of group g.

    x: (rows, K). weight: (G, N, K) or, transposed, (G, K, N), of any strides, G up to 1024. splits: which rows are
    whose, int32 or int64 on the device: `GroupSizes` (G,), `GroupOffsets` (G + 1,), or a tensor of one of these shapes,
    which tells the two apart; or a list of sizes, which has to fit the rows and is copied to the device once
    (RuntimeError under CUDA graph capture). bias: (G, N). bias_scales: (rows,), of any floating dtype. Returns
    (rows, N) in the dtype of x.

    Rows of no group are written as 0 and left out of every gradient, also where they hold NaN; their scales get 0.
    In tensors negative sizes count as 0, offsets that decrease as the largest before them, and what lies past the last
    row is cut off: no memory out of bounds is touched. Lists that do not fit raise. Fewer than 2^31 rows.
    Differentiable once, in reverse mode, in x, weight, bias and bias_scales, each only when asked for, in its own
    dtype; fp32 accumulation; bitwise repeatable; autocast applies as to `F.linear`, scales stay as they are. Raises
    TypeError or ValueError that names the argument.
    """
    checks.check_flags(transposed=transposed)
    tensors = x, weight, splits, bias, bias_scales
    # Dynamo must not see the plans: it would guard on them, and compile again whenever an eager call has made one.
    options = None if is_compiling() else (transposed, bias is None, bias_scales is None)
    present = tensors[:3] if bias is None else tensors[:4] if bias_scales is None else tensors
    made = options and _plans.again(options, weight, present, tensors)
    if made is None:
        key = plan_key(tensors, transposed)
        plan = None if key is None else _plans.get(key)
        if plan is None:
            given, tensors = tensors, _checked(*tensors, transposed)
            if not is_plain(*tensors):
                return ops.grouped_linear.default(*tensors, transposed)
            if key is not None and all(map(operator.is_, given, tensors)) and tensors[2].is_contiguous():
                plan = _plans.keep(key, _plan_of(*tensors, transposed))
        if plan is not None:
            with on_device_of(x):
                made = plan(*tensors)
            if options:
                _plans.note(options, weight, present, plan)
    if needs_autograd(*tensors):
        return _apply_plain(*tensors, transposed, made or True)
    return _forward(*tensors, transposed)[0] if made is None else made[-1]


_plans = Plans()
_backward_plans = Plans()


def _backward_by_plan(
    dy: Tensor, x: Optional[Tensor], weight: Tensor, tile_map: Tensor, bias: Optional[Tensor],
    scales: Optional[Tensor], transposed: bool, needs: Tuple[bool, ...],
) -> Optional[List[Optional[Tensor]]]:  # fmt: skip
    """What `_backward_plan_of` makes; None in calls that are not plain, and where a tensor has to be copied first.

    tile_map, the forward's, is not in the key: its size follows from the rows of dy, the groups and the dtype.
    """
    given = dy, x, weight, tile_map, bias, scales
    present, options = [tensor for tensor in given if tensor is not None], (transposed, needs, scales is None)
    # Where x needs no gradient, what stands for the weight may be another tensor in every step.
    made = _backward_plans.again(options, weight, present, given) if needs[0] else None
    if made is not None:
        return made
    key = plan_key((dy, x, weight, bias, scales), transposed, needs)
    plan = None if key is None else _backward_plans.get(key)
    if plan is None:
        ready = has_unit_rows(dy) and (x is None or has_unit_rows(x)) and (scales is None or scales.is_contiguous())
        if key is None or not ready:
            return None
        plan = _backward_plans.keep(key, _backward_plan_of(given, transposed, needs))
    with on_device_of(dy):
        made = plan(*given)
    if needs[0]:
        _backward_plans.note(options, weight, present, plan)
    return made


def _checked(x, weight, splits, bias, bias_scales, transposed) -> Tuple[Tensor, ...]:
    """The op's tensors. Raises what `grouped_linear` raises."""
    checks.check_tensor("x", x)
    checks.check_tensor("weight", weight)
    if bias is not None:
        checks.check_tensor("bias", bias)
    if bias_scales is not None:
        checks.check_tensor("bias_scales", bias_scales)
    dtype = checks.autocast_dtype(x.device.type)
    if dtype is not None:
        x, weight, bias = (checks.autocast(tensor, dtype) for tensor in (x, weight, bias))
    checks.check_linear(x, weight, bias, bias_scales, transposed)
    splits = as_splits(splits, weight.shape[0], x.shape[0], x.device)
    return x, weight, splits, bias, None if bias_scales is None else bias_scales.contiguous()
