"""From token order to expert order and back: `gather_rows` and `combine_rows`."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ._ops import ops
from .backends import backend_of
from .common import checks
from .common.autograd import define_differentiable_op, define_op, once_differentiable, refuse_forward_mode
from .common.device import on_device
from .routing import Routing, rows_of

_ROUTING = "Tensor expert_offsets, Tensor row_to_slot, Tensor slot_to_row, int top_k"


def _gather(x: Tensor, expert_offsets: Tensor, row_to_slot: Tensor, slot_to_row: Tensor, top_k: int) -> Tensor:
    with on_device(x):
        return backend_of(x).gather_rows(x, rows_of(expert_offsets, row_to_slot, slot_to_row, top_k))


def _gather_fake(x, expert_offsets, row_to_slot, slot_to_row, top_k):
    return x.new_empty((row_to_slot.shape[0], x.shape[1]))


def _combine(
    y: Tensor, weights: Optional[Tensor], expert_offsets: Tensor, row_to_slot: Tensor, slot_to_row: Tensor, top_k: int
) -> Tensor:
    with on_device(y):
        rows = rows_of(expert_offsets, row_to_slot, slot_to_row, top_k)
        return backend_of(y).combine(y.contiguous(), weights, rows)


def _combine_fake(y, weights, expert_offsets, row_to_slot, slot_to_row, top_k):
    return y.new_empty((slot_to_row.shape[0] // top_k, y.shape[1]))


def _combine_backward(
    dout: Tensor,
    y: Optional[Tensor],
    weights: Tensor,
    expert_offsets: Tensor,
    row_to_slot: Tensor,
    slot_to_row: Tensor,
    top_k: int,
    needs_dy: bool,
) -> Tuple[Tensor, Tensor]:
    """(dy, dweights), empty where not needed; dweights is where y is given."""
    with on_device(dout):
        rows = rows_of(expert_offsets, row_to_slot, slot_to_row, top_k)
        dy, dweights = backend_of(dout).combine_grad(dout, y, weights.contiguous(), rows, needs_dy)
    return dout.new_empty(0) if dy is None else dy, weights.new_empty(0) if dweights is None else dweights


def _combine_backward_fake(dout, y, weights, expert_offsets, row_to_slot, slot_to_row, top_k, needs_dy):
    dy_shape = (slot_to_row.shape[0], dout.shape[1]) if needs_dy else (0,)
    return dout.new_empty(dy_shape), weights.new_empty((0,) if y is None else weights.shape)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, expert_offsets, row_to_slot, slot_to_row, top_k):
        ctx.save_for_backward(expert_offsets, row_to_slot, slot_to_row)
        ctx.top_k = top_k
        return ops.gather_rows_forward.default(x, expert_offsets, row_to_slot, slot_to_row, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dout):
        return ops.combine_rows_forward.default(dout, None, *saved, ctx.top_k), None, None, None, None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weights, expert_offsets, row_to_slot, slot_to_row, top_k):
        # y is for the gradient of the weights alone.
        saved_y = y if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved_y, weights, expert_offsets, row_to_slot, slot_to_row)
        ctx.top_k = top_k
        return ops.combine_rows_forward.default(y, weights, expert_offsets, row_to_slot, slot_to_row, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dout):
        needs_dy, needs_dweights, *_ = ctx.needs_input_grad
        dy, dweights = ops.combine_rows_backward.default(dout, *saved, ctx.top_k, needs_dy)
        return dy if needs_dy else None, dweights if needs_dweights else None, None, None, None, None


define_op("gather_rows_forward", f"(Tensor x, {_ROUTING}) -> Tensor", _gather, _gather_fake)
define_op("combine_rows_forward", f"(Tensor y, Tensor? weights, {_ROUTING}) -> Tensor", _combine, _combine_fake)
define_op(
    "combine_rows_backward",
    f"(Tensor dout, Tensor? y, Tensor weights, {_ROUTING}, bool needs_dy) -> (Tensor dy, Tensor dweights)",
    _combine_backward,
    _combine_backward_fake,
)
_gather_rows = define_differentiable_op(
    "gather_rows",
    f"(Tensor x, {_ROUTING}) -> Tensor",
    lambda *args: ops.gather_rows_forward.default(*args),
    lambda *args: _GatherRows.apply(*args),
    _gather_fake,
)
_combine_rows = define_differentiable_op(
    "combine_rows",
    f"(Tensor y, Tensor weights, {_ROUTING}) -> Tensor",
    lambda *args: ops.combine_rows_forward.default(*args),
    lambda *args: _CombineRows.apply(*args),
    _combine_fake,
)


def _check_routing(routing: object) -> None:
    """Raises TypeError or ValueError unless routing has the form that `route` gives it; its values are trusted."""
    if not isinstance(routing, Routing):
        raise TypeError(f"routing: expected a Routing, got {type(routing).__name__}")
    num_slots = routing.slot_to_row.shape[0]
    if routing.top_k < 1 or num_slots % routing.top_k:
        raise ValueError(f"routing: expected top_k to divide {num_slots} slots, got {routing.top_k}")
    for name in ("expert_offsets", "row_to_slot", "slot_to_row"):
        tensor = getattr(routing, name)
        size = None if name == "expert_offsets" else num_slots
        checks.check_shape(f"routing.{name}", tensor, (size,), "(E + 1,)" if size is None else "(S,)")
        checks.check_same_dtype(f"routing.{name}", tensor, torch.int32, "route makes it")
        checks.check_device(f"routing.{name}", tensor, routing.slot_to_row.device, "slot_to_row")


def _maps(routing: Routing) -> Tuple[Tensor, Tensor, Tensor, int]:
    """A routing as arguments of the ops."""
    return routing.expert_offsets, routing.row_to_slot, routing.slot_to_row, routing.top_k


def gather_rows(x: Tensor, routing: Routing) -> Tensor:
    """out[r] = x[token of row r], rows sorted by expert; rows past the routed ones are 0.

    x: (T, H). Returns (S, H) in the dtype of x; differentiable in x. Raises TypeError or ValueError that names the
    argument.
    """
    _check_routing(routing)
    checks.check_tensor("x", x)
    checks.check_compute_dtype("x", x)
    num_slots = routing.row_to_slot.shape[0]
    checks.check_shape("x", x, (num_slots // routing.top_k, None), "(T, H)")
    checks.check_device("x", x, routing.row_to_slot.device, "routing")
    refuse_forward_mode("gather_rows", x)
    return _gather_rows(x, *_maps(routing))


def combine_rows(y: Tensor, top_k_weights: Tensor, routing: Routing) -> Tensor:
    """out[t] = sum over the routed slots of token t of top_k_weights[slot] y[row of slot], in fp32 and fixed order.

    y: (S, H), rows sorted by expert; rows past the routed ones are not read. top_k_weights: (T, top_k), any floating
    dtype. Returns (T, H) in the dtype of y; differentiable in y and top_k_weights, whose sentinels get exactly 0.
    Raises TypeError or ValueError that names the argument.
    """
    _check_routing(routing)
    for name, tensor in (("y", y), ("top_k_weights", top_k_weights)):
        checks.check_tensor(name, tensor)
        checks.check_device(name, tensor, routing.slot_to_row.device, "routing")
    checks.check_compute_dtype("y", y)
    checks.check_compute_dtype("top_k_weights", top_k_weights)
    num_slots = routing.slot_to_row.shape[0]
    checks.check_shape("y", y, (num_slots, None), "(S, H)")
    checks.check_shape("top_k_weights", top_k_weights, (num_slots // routing.top_k, routing.top_k), "(T, top_k)")
    refuse_forward_mode("combine_rows", y, top_k_weights)
    return _combine_rows(y, top_k_weights.contiguous(), *_maps(routing))
