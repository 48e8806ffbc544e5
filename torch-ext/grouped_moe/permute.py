"""From token order to expert order and back: `gather_rows` and `combine_rows`."""

from types import ModuleType
from typing import Optional, Tuple

import torch
from torch import Tensor

from .common import checks
from .common.autograd import once_differentiable, refuse_forward_mode, where_needed
from .registration import define_differentiable_op, define_op
from .routing import Routing, rows_of

# In the schema of ops: the arguments of `rows_of`.
_ROUTING = "Tensor expert_offsets, Tensor row_to_slot, Tensor slot_to_row, SymInt top_k"


def _gather(kernels: ModuleType, x: Tensor, *routing: object) -> Tensor:
    return kernels.gather_rows(x, rows_of(*routing))


def _gather_fake(x, expert_offsets, row_to_slot, slot_to_row, top_k):
    return x.new_empty((row_to_slot.shape[0], x.shape[1]))


def _combine(kernels: ModuleType, y: Tensor, weights: Optional[Tensor], *routing: object) -> Tensor:
    return kernels.combine(y.contiguous(), weights, rows_of(*routing))


def _combine_fake(y, weights, expert_offsets, row_to_slot, slot_to_row, top_k):
    return y.new_empty((slot_to_row.shape[0] // top_k, y.shape[1]))


def _combine_backward(
    kernels: ModuleType, dout: Tensor, y: Optional[Tensor], weights: Tensor, *routing_and_needs: object
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """(dy, dweights), None where not needed. dweights is made if y is given."""
    *routing, needs_dy = routing_and_needs
    return kernels.combine_grad(dout, y, weights.contiguous(), rows_of(*routing), needs_dy)


def _combine_backward_fake(dout, y, weights, expert_offsets, row_to_slot, slot_to_row, top_k, needs_dy):
    dy = dout.new_empty((slot_to_row.shape[0], dout.shape[1])) if needs_dy else None
    return dy, None if y is None else weights.new_empty(weights.shape)


_run_gather = define_op("gather_rows_forward", f"(Tensor x, {_ROUTING}) -> Tensor", _gather, _gather_fake)
sum_rows = define_op(
    "combine_rows_forward", f"(Tensor y, Tensor? weights, {_ROUTING}) -> Tensor", _combine, _combine_fake
)
_run_combine_backward = define_op(
    "combine_rows_backward",
    f"(Tensor dout, Tensor? y, Tensor weights, {_ROUTING}, bool needs_dy) -> (Tensor dy, Tensor dweights)",
    _combine_backward,
    _combine_backward_fake,
)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x, *routing):
        *maps, ctx.top_k = routing
        ctx.save_for_backward(*maps)
        return run(x, *routing)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dout):
        return None, sum_rows(dout, None, *saved, ctx.top_k), None, None, None, None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, y, weights, *routing):
        *maps, ctx.top_k = routing
        # y is for the gradient of the weights alone.
        ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, weights, *maps)
        return run(y, weights, *routing)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dout):
        _, needs_dy, needs_dweights, *_ = ctx.needs_input_grad
        grads = _run_combine_backward(dout, *saved, ctx.top_k, needs_dy)
        return None, *where_needed(grads, (needs_dy, needs_dweights)), None, None, None, None


_gather_rows = define_differentiable_op(
    "gather_rows",
    f"(Tensor x, {_ROUTING}) -> Tensor",
    _gather,
    _GatherRows.apply,
    _run_gather,
    _run_gather,
    _gather_fake,
)
_combine_rows = define_differentiable_op(
    "combine_rows",
    f"(Tensor y, Tensor weights, {_ROUTING}) -> Tensor",
    _combine,
    _CombineRows.apply,
    sum_rows,
    sum_rows,
    _combine_fake,
)


def _maps(routing: object) -> Tuple[Tensor, Tensor, Tensor, int]:
    """A routing as arguments of the ops.

    Raises TypeError or ValueError unless it has the form that `route` gives it; its values are trusted.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"routing: expected a Routing, got {type(routing).__name__}")
    slots, top_k, made = routing.slot_to_row, routing.top_k, "the maps that route makes"
    checks.check_tensor("routing.slot_to_row", slots)
    checks.check_operand("routing.slot_to_row", slots, (None,), "(S,)", slots.device, torch.int32, made)
    (num_slots,), device = slots.shape, slots.device
    if not isinstance(top_k, (int, torch.SymInt)) or isinstance(top_k, bool):
        raise TypeError(f"routing.top_k: expected an int, got {type(top_k).__name__}")
    if top_k < 1 or num_slots % top_k:
        raise ValueError(f"routing: expected top_k to divide {num_slots} slots, got {top_k}")
    for name, size, legend in (("expert_offsets", None, "(E + 1,)"), ("row_to_slot", num_slots, "(S,)")):
        checks.check_operand(f"routing.{name}", getattr(routing, name), (size,), legend, device, torch.int32, made)
    if routing.expert_offsets.shape[0] < 2:
        raise checks.wrong_shape("routing.expert_offsets", routing.expert_offsets, (None,), "(E + 1,) with E from 1 on")
    return routing.expert_offsets, routing.row_to_slot, routing.slot_to_row, routing.top_k


def gather_rows(x: Tensor, routing: Routing) -> Tensor:
    """out[r] = x[token of row r], rows sorted by expert; rows past the routed ones are 0.

    x: (T, H) bf16, fp16 or fp32 (fp64, too, on CPU). Returns (S, H) in that dtype; differentiable in x, once. Raises
    TypeError or ValueError that names the argument, and NotImplementedError as `grouped_mm_experts` does.
    """
    maps, (num_slots,) = _maps(routing), routing.slot_to_row.shape
    shape, device = (num_slots // routing.top_k, None), routing.slot_to_row.device
    checks.check_operand("x", x, shape, "(T, H)", device, None, "routing")
    refuse_forward_mode("gather_rows", x)
    return _gather_rows(x, *maps)


def combine_rows(y: Tensor, top_k_weights: Tensor, routing: Routing) -> Tensor:
    """out[t] = sum over the routed slots of token t of top_k_weights[slot] y[row of slot], in fp32 and fixed order.

    y: (S, H), rows sorted by expert; rows past the routed ones are not read. top_k_weights: (T, top_k). Each has bf16,
    fp16, fp32 or, on CPU, fp64. Returns (T, H) in the dtype of y; differentiable, once, in both; the gradient of a
    sentinel's weight is exactly 0. Raises TypeError or ValueError that names the argument, and NotImplementedError as
    `grouped_mm_experts` does.
    """
    maps, (num_slots,) = _maps(routing), routing.slot_to_row.shape
    shape, device = (num_slots // routing.top_k, routing.top_k), routing.slot_to_row.device
    checks.check_operand("y", y, (num_slots, None), "(S, H)", device, None, "routing")
    checks.check_operand("top_k_weights", top_k_weights, shape, "(T, top_k)", device, None, "routing")
    refuse_forward_mode("combine_rows", y, top_k_weights)
    return _combine_rows(y, top_k_weights.contiguous(), *maps)
