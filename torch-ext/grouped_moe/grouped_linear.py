"""Linear layer with one weight per group of consecutive rows."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .block_scaled import Weight, as_weight, check_scaled, parts_of
from .common import checks
from .common.autograd import once_differentiable, refuse_forward_mode, where_needed
from .common.numbers import wide_dtype
from .operands import LoRA, check_loras, grad_of_a, project, project_backward, read_factors, unpack_grads
from .registration import define_differentiable_op, define_op
from .rows import schedule_size, unit_rows
from .splits import Splits, as_splits

# The functions of ops below have the arguments, and these the types, of their schemas; implementations have the backend
# before them.
_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor splits, Tensor? bias, Tensor? bias_scales, Tensor? a, Tensor? b, Tensor? adapters,"
    " Tensor? weight_scale, int[]? block, float scaling, bool transposed"
)


def _forward(
    kernels, x, weight, splits, bias, bias_scales, a, b, adapters, weight_scale, block, scaling, transposed
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """(y, the schedule of its rows, which a backward takes as splits, x projected on the ranks of a LoRA or None)."""
    x = unit_rows(x)
    rows = kernels.split_rows(splits, weight.shape[0], x.shape[0], x.dtype)
    low_rank = projected = None
    if a is not None:
        rows = rows if adapters is None else rows._replace(adapters=adapters)
        (factors,) = read_factors(kernels, [LoRA(a, b, scaling)], rows, x.dtype)
        low_rank, projected = project(kernels, factors, x, rows)
    y = kernels.gemm(
        x, as_weight(weight, weight_scale, block), rows, transposed=transposed, bias=bias, scales=bias_scales,
        zero_rest=True, low_rank=low_rank, quantizes=weight_scale is not None,
    )  # fmt: skip
    return y, rows.schedule, projected


def _forward_fake(x, weight, splits, bias, bias_scales, a, b, adapters, weight_scale, block, scaling, transposed):
    y = x.new_empty((x.shape[0], weight.shape[2 if transposed else 1]))
    schedule = splits.new_empty(schedule_size(x.shape[0], weight.shape[0]), dtype=torch.int32)
    return y, schedule, None if a is None else x.new_empty((x.shape[0], LoRA(a, b).padded_rank))


def _backward(
    kernels, dy, x, weight, splits, a, b, adapters, projected, weight_scale, block, scaling, transposed, needs
) -> Tuple[Optional[Tensor], ...]:
    """The gradients of x, weight, a and b, None where not asked for.

    splits: also the schedule of the forward. x: for the gradients of weight and a alone, projected: for that of b.
    """
    needs_x, needs_weight, needs_a, needs_b = needs
    dx = dweight = da = db = low_rank = None
    dy = unit_rows(dy)
    rows = kernels.split_rows(splits, weight.shape[0], dy.shape[0], dy.dtype)
    if a is not None:
        lora = LoRA(a, b, scaling)
        if adapters is not None:  # hooks on saved tensors may change strides
            rows = rows._replace(adapters=adapters.contiguous())
        if needs_x or needs_a or needs_b:
            (factors,) = read_factors(kernels, [lora], rows, dy.dtype)
            low_rank, db = project_backward(kernels, factors, dy, rows, projected.contiguous() if needs_b else None)
            (db,) = unpack_grads(kernels, "b", [lora], [db])
    if needs_x:
        dx = kernels.gemm(
            dy, as_weight(weight, weight_scale, block), rows, transposed=not transposed, zero_rest=True,
            low_rank=low_rank, quantizes=weight_scale is not None,
        )  # fmt: skip
    if needs_weight:
        dweight = torch.empty_like(weight)
        kernels.wgrad(dy, x, rows, dweight.transpose(1, 2) if transposed else dweight)
    if needs_a:
        da = grad_of_a(kernels, lora, low_rank, x, rows)
    return dx, dweight, da, db


def _backward_fake(dy, x, weight, splits, a, b, adapters, projected, weight_scale, block, scaling, transposed, needs):
    needs_x, needs_weight, needs_a, needs_b = needs
    dx = dy.new_empty((dy.shape[0], weight.shape[1 if transposed else 2])) if needs_x else None
    laid_out = (weight, needs_weight), (a, needs_a), (b, needs_b)
    return dx, *(torch.empty_like(tensor) if need else None for tensor, need in laid_out)


def _bias_backward(
    kernels, dy, splits, num_groups, bias, scales, needs_bias
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """The gradients of bias, None if not asked for, and of its scales, None without a bias.

    splits: also the schedule of the forward. bias: for the gradient of its scales alone.
    """
    dbias, dscales = _bias_backward_fake(dy, splits, num_groups, bias, scales, needs_bias)
    rows = kernels.split_rows(splits, num_groups, dy.shape[0], dy.dtype)
    scales, dots = None if scales is None else scales.contiguous(), None
    if bias is not None:
        dots = dy.new_empty(kernels.num_bias_dots(dy.shape[1]), dy.shape[0], dtype=wide_dtype(dy.dtype))
    kernels.bias_grads(unit_rows(dy), rows, scales, bias, dbias, dots)
    if bias is not None:
        kernels.sum_dots(dots, rows, dscales)
    return dbias, dscales


def _bias_backward_fake(dy, splits, num_groups, bias, scales, needs_bias):
    dbias = dy.new_empty(num_groups, dy.shape[1]) if needs_bias else None
    return dbias, None if bias is None else scales.new_empty(*scales.shape)


_run_forward = define_op(
    "grouped_linear_forward",
    f"({_ARGUMENTS}) -> (Tensor y, Tensor schedule, Tensor projected)",
    _forward,
    _forward_fake,
)
_run_backward = define_op(
    "grouped_linear_backward",
    "(Tensor dy, Tensor? x, Tensor weight, Tensor splits, Tensor? a, Tensor? b, Tensor? adapters, Tensor? projected,"
    " Tensor? weight_scale, int[]? block, float scaling, bool transposed, bool[] needs)"
    " -> (Tensor dx, Tensor dweight, Tensor da, Tensor db)",
    _backward,
    _backward_fake,
)
run_bias_backward = define_op(
    "grouped_linear_bias_backward",
    "(Tensor dy, Tensor splits, SymInt num_groups, Tensor? bias, Tensor? scales, bool needs_bias)"
    " -> (Tensor dbias, Tensor dscales)",
    _bias_backward,
    _bias_backward_fake,
)


class _GroupedLinear(torch.autograd.Function):
    """The autograd of the op. run: what runs the forward. kind: block, scaling, transposed; tensors: the rest.

    projected is an output if it is saved, though nobody uses it, so that a second derivative raises by whatever it is
    made of: x may not be saved.
    """

    @staticmethod
    def forward(ctx, run, kind, *tensors):
        x, weight, _, bias, bias_scales, a, b, adapters, weight_scale = tensors
        ctx.kind, (y, schedule, projected) = kind, run(*tensors, *kind)
        _, _, needs_x, needs_weight, _, needs_bias, needs_scales, needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        projected = projected if needs_b else None
        # What the backward does not read may change until then. Of a weight it then needs the shape.
        saved_weight = weight if needs_x or not weight.is_contiguous() else weight.new_empty(1).expand(weight.shape)
        ctx.save_for_backward(
            x if needs_weight or needs_a else None, saved_weight, schedule, a, b, adapters,
            projected, bias if needs_scales else None, bias_scales if needs_bias or needs_scales else None,
            weight_scale,
        )  # fmt: skip
        return y, projected

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy, _):
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        _, _, needs_x, needs_weight, _, needs_bias, needs_scales, needs_a, needs_b, *_ = ctx.needs_input_grad
        x, weight, schedule, a, b, adapters, projected, bias, bias_scales, weight_scale = saved
        needs = [needs_x, needs_weight, needs_a, needs_b]
        dx = dweight = da = db = dbias = dscales = None
        if any(needs):
            grads = _run_backward(dy, x, weight, schedule, a, b, adapters, projected, weight_scale, *ctx.kind, needs)
            dx, dweight, da, db = where_needed(grads, needs)
        if needs_bias or needs_scales:
            grads = run_bias_backward(dy, schedule, weight.shape[0], bias, bias_scales, needs_bias)
            dbias, dscales = where_needed(grads, (needs_bias, needs_scales))
        return None, None, dx, dweight, None, dbias, dscales, da, db, None, None


_grouped_linear = define_differentiable_op(
    "grouped_linear",
    f"({_ARGUMENTS}) -> Tensor",
    lambda *args: _forward(*args)[0],
    lambda run, *args: _GroupedLinear.apply(run, args[-3:], *args[:-3])[0],
    _run_forward,
    lambda *args: _run_forward(*args)[0],
    lambda *args: _forward_fake(*args)[0],
)


def grouped_linear(
    x: Tensor,
    weight: Weight,
    splits: Splits,
    bias: Optional[Tensor] = None,
    bias_scales: Optional[Tensor] = None,
    *,
    lora: Optional[LoRA] = None,
    adapter_index: Optional[Tensor] = None,
    transposed: bool = False,
) -> Tensor:
    """y[r] = (W[g] + scaling b[g] a[g]) x[r] + bias[g] * bias_scales[r] for the rows r of group g.

    x: (rows, K) bf16, fp16 or fp32 (fp64, too, on CPU). weight: (G, N, K) or, transposed, (G, K, N), in the dtype of x,
    of any strides, G up to 1024; or a `BlockScaled` one (G, N, K), which is frozen. splits: which rows are whose, int32
    or int64 on the device: `GroupSizes` (G,), `GroupOffsets` (G + 1,), or a tensor of one of these shapes, which tells
    the two apart; or a list of sizes, which has to fit the rows and is copied to the device in each call (RuntimeError
    under CUDA graph capture). bias: (G, N), in the dtype of x. bias_scales: (rows,), of any floating dtype. Returns
    (rows, N) in the dtype of x.

    lora: a and b with their scaling, for all groups, or None; the sum of weights is never made. Several adapters: a
    (L, G, r, K) and b (L, G, N, r); then adapter_index (rows,), int32 or int64, says which adapter a row has, and any
    number outside [0, L), such as -1, that it has none. Factors are rounded to the dtype of x, their gradients come in
    their own. If b is not frozen, rows times L r elements, rounded up to a multiple of 8, are saved for the backward.

    Rows of no group are written as 0 and left out of every gradient, also where they hold NaN; their scales get 0.
    In tensors negative sizes count as 0, offsets that decrease as the largest before them, and what lies past the last
    row is cut off: no memory out of bounds is touched. Lists that do not fit raise. Up to 2^31 - 129 rows.
    Differentiable once, in reverse mode, in x, weight, bias, bias_scales and factors, each only when asked for, in its
    own dtype; fp32 accumulation; bitwise repeatable; autocast applies as to `F.linear`, scales stay as they are. Raises
    TypeError or ValueError that names the argument, and NotImplementedError as `grouped_mm_experts` does.
    """
    checks.check_flags(transposed=transposed)
    checks.check_tensor("x", x)
    scaled = check_scaled("weight", weight, x, "x", transposed)
    weight, weight_scale, block = parts_of(weight)
    checks.check_tensor("weight", weight)
    dtype = checks.autocast_dtype(x)
    if dtype is not None:
        x, weight, bias = (checks.autocast(tensor, dtype) for tensor in (x, weight, bias))
    checks.check_linear(x, weight, bias, bias_scales, transposed, scaled)
    splits = as_splits(splits, weight.shape[0], x.shape[0], x.device)
    bias_scales = None if bias_scales is None else bias_scales.contiguous()
    factors, scaling = (None, None, None), 0.0
    if lora is not None or adapter_index is not None:
        check_loras({"lora": (lora, weight)}, transposed, x, adapter_index)
        factors = lora.a, lora.b, None if adapter_index is None else adapter_index.contiguous()
        scaling = float(lora.scaling)
    tensors = weight, splits, bias, bias_scales, *factors, weight_scale
    refuse_forward_mode("grouped_linear", x, *tensors)
    return _grouped_linear(x, *tensors, block, scaling, transposed)
