"""From token order to expert order and back: `gather_rows` and `combine_rows`."""

from functools import lru_cache
from typing import Optional, Tuple

import torch
from torch import Tensor

from . import _checks as checks
from ._ops import add_op_namespace_prefix, ops
from ._torch import permute as _torch_permute
from .define import once_differentiable, refuse_forward_mode
from .gemm import unit_rows, zero_ungrouped
from .launch import MAX_KEPT, Form, Launch, Ref, bind, form_of, launch, ref
from .routing import Routing
from .tuning import on_device_of

_MAX_BLOCK_H = 2048
_WARP_BYTES = 1024  # of a row that one warp sums up: few enough for the loads of all top_k rows to be under way
_SORT_BYTES = 2048  # of a row that one warp copies


def _block_h(h: int) -> int:
    return min(_MAX_BLOCK_H, 1 << max(0, h - 1).bit_length())


def launch_combine(
    y: Tensor, weights: Optional[Tensor], slot_to_row: Tensor, top_k: int, out: Optional[Tensor] = None
) -> Tensor:
    """out (T, H): the sum over a token's routed slots of weights[slot] y[row]; weights None counts as ones."""
    num_tokens, h = slot_to_row.shape[0] // top_k, y.shape[1]
    out = y.new_empty((num_tokens, h)) if out is None else out
    if num_tokens:
        kept = combine_launch(form_of(y), form_of(weights), slot_to_row.shape[0], top_k, y.device)
        kept((y, weights, slot_to_row, out))
    return out


@lru_cache(maxsize=MAX_KEPT)
def combine_launch(
    y: Form, weights: Optional[Form], num_slots: int, top_k: int, device: torch.device
) -> Launch:  # fmt: skip
    """The launch for (y, weights, slot_to_row, out)."""
    from ._triton.rows import combine_kernel

    h = y.shape[1]
    block_h = min(_block_h(h), _WARP_BYTES // y.dtype.itemsize)
    kernel = bind(combine_kernel, H=h, TOP_K=top_k, BLOCK_H=block_h, num_warps=1)
    grid = (num_slots // top_k, -(-h // block_h), 1)
    return Launch(device, kernel, grid, Ref(0), ref(1, weights), Ref(2), Ref(3))


@lru_cache(maxsize=MAX_KEPT)
def sort_rows_launch(x: Form, num_slots: int, top_k: int, device: torch.device) -> Launch:
    """The launch for (x, slot_to_row, out): rows of tokens to where each of their slots is. Columns are contiguous."""
    from ._triton.rows import sort_rows_kernel

    h = x.shape[1]
    block_h = min(_block_h(h), _SORT_BYTES // x.dtype.itemsize)
    kernel = bind(sort_rows_kernel, H=h, TOP_K=top_k, BLOCK_H=block_h, num_warps=1)
    return Launch(device, kernel, (num_slots // top_k, -(-h // block_h), 1), Ref(0), x.strides[0], Ref(1), Ref(2))


def gather_rows_triton(x: Tensor, row_to_slot: Tensor, expert_offsets: Tensor, top_k: int) -> Tensor:
    """out (S, H) by the Triton kernel."""
    from ._triton.rows import gather_rows_kernel

    x = unit_rows(x)
    num_slots, h = row_to_slot.shape[0], x.shape[1]
    out = x.new_empty((num_slots, h))
    if num_slots:
        block_h = _block_h(h)
        launch(
            gather_rows_kernel, (num_slots, -(-h // block_h)),
            x, x.stride(0), row_to_slot, expert_offsets[-1:], out, H=h, TOP_K=top_k, BLOCK_H=block_h,
        )  # fmt: skip
    return out


def combine_grad_triton(
    dout: Tensor, y: Optional[Tensor], weights: Tensor, expert_offsets: Tensor, slot_to_row: Tensor, needs_dy: bool
) -> Tuple[Tensor, Tensor]:
    """(dy, dweights) by the Triton kernel, dweights only with y; rows of dy past R are 0."""
    from ._triton.rows import combine_grad_kernel

    dout, num_slots, h = unit_rows(dout), slot_to_row.shape[0], dout.shape[1]
    y = None if y is None else y.contiguous()
    dy = dout.new_empty((num_slots, h)) if needs_dy else None
    dweights = None if y is None else torch.empty_like(weights)
    if num_slots:
        launch(
            combine_grad_kernel, (num_slots,), dout, dout.stride(0), y, weights, slot_to_row, dy, dweights,
            H=h, TOP_K=weights.shape[1], BLOCK_H=min(1024, _block_h(h)),
        )  # fmt: skip
        if needs_dy:
            zero_ungrouped(dy, expert_offsets)
    return (
        dout.new_empty(0) if dy is None else dy,
        weights.new_empty(0) if dweights is None else dweights,
    )


@torch.library.custom_op(add_op_namespace_prefix("gather_rows"), mutates_args=())
def _gather_rows(x: Tensor, expert_offsets: Tensor, row_to_slot: Tensor, slot_to_row: Tensor, top_k: int) -> Tensor:
    if x.device.type == "cpu":
        out = x.new_zeros((row_to_slot.shape[0], x.shape[1]))
        rows = _torch_permute.gather_rows(x, row_to_slot, int(expert_offsets[-1]), top_k)
        out[: rows.shape[0]] = rows
        return out
    with on_device_of(x):
        return gather_rows_triton(x, row_to_slot, expert_offsets, top_k)


@torch.library.register_fake(add_op_namespace_prefix("gather_rows"))
def _gather_rows_fake(
    x: Tensor, expert_offsets: Tensor, row_to_slot: Tensor, slot_to_row: Tensor, top_k: int
) -> Tensor:
    return x.new_empty((row_to_slot.shape[0], x.shape[1]))


@torch.library.custom_op(add_op_namespace_prefix("gather_rows_backward"), mutates_args=())
def _gather_rows_backward(dout: Tensor, slot_to_row: Tensor, top_k: int) -> Tensor:
    return _combine(dout, None, slot_to_row, top_k)


@torch.library.register_fake(add_op_namespace_prefix("gather_rows_backward"))
def _gather_rows_backward_fake(dout: Tensor, slot_to_row: Tensor, top_k: int) -> Tensor:
    return dout.new_empty((slot_to_row.shape[0] // top_k, dout.shape[1]))


@torch.library.custom_op(add_op_namespace_prefix("combine_rows"), mutates_args=())
def _combine_rows(y: Tensor, weights: Tensor, expert_offsets: Tensor, slot_to_row: Tensor) -> Tensor:
    return _combine(y, weights, slot_to_row, weights.shape[1])


@torch.library.register_fake(add_op_namespace_prefix("combine_rows"))
def _combine_rows_fake(y: Tensor, weights: Tensor, expert_offsets: Tensor, slot_to_row: Tensor) -> Tensor:
    return y.new_empty((weights.shape[0], y.shape[1]))


def _combine(y: Tensor, weights: Optional[Tensor], slot_to_row: Tensor, top_k: int) -> Tensor:
    if y.device.type == "cpu":
        return _torch_permute.combine(y, weights, slot_to_row, top_k)
    with on_device_of(y):
        return launch_combine(y.contiguous(), weights, slot_to_row, top_k)


@torch.library.custom_op(add_op_namespace_prefix("combine_rows_backward"), mutates_args=())
def _combine_rows_backward(
    dout: Tensor, y: Optional[Tensor], weights: Tensor, expert_offsets: Tensor, slot_to_row: Tensor, needs_dy: bool
) -> Tuple[Tensor, Tensor]:
    if dout.device.type == "cpu":
        return _torch_permute.combine_grad(dout, y, weights, slot_to_row, needs_dy)
    with on_device_of(dout):
        return combine_grad_triton(dout, y, weights, expert_offsets, slot_to_row, needs_dy)


@torch.library.register_fake(add_op_namespace_prefix("combine_rows_backward"))
def _combine_rows_backward_fake(
    dout: Tensor, y: Optional[Tensor], weights: Tensor, expert_offsets: Tensor, slot_to_row: Tensor, needs_dy: bool
) -> Tuple[Tensor, Tensor]:
    dy_shape = (slot_to_row.shape[0], dout.shape[1]) if needs_dy else (0,)
    return dout.new_empty(dy_shape), weights.new_empty((0,) if y is None else weights.shape)


def _gather_setup_context(ctx, inputs, output):
    _, _, _, slot_to_row, ctx.top_k = inputs
    ctx.save_for_backward(slot_to_row)


@once_differentiable
def _gather_backward(ctx, saved, dout):
    return ops.gather_rows_backward(dout, *saved, ctx.top_k), None, None, None, None


def _combine_setup_context(ctx, inputs, output):
    y, weights, expert_offsets, slot_to_row = inputs
    # y is for the gradient of the weights alone.
    ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, weights, expert_offsets, slot_to_row)


@once_differentiable
def _combine_backward(ctx, saved, dout):
    needs_dy, needs_dweights = ctx.needs_input_grad[:2]
    dy, dweights = ops.combine_rows_backward(dout, *saved, needs_dy)
    return dy if needs_dy else None, dweights if needs_dweights else None, None, None


torch.library.register_autograd(
    add_op_namespace_prefix("gather_rows"), _gather_backward, setup_context=_gather_setup_context
)
torch.library.register_autograd(
    add_op_namespace_prefix("combine_rows"), _combine_backward, setup_context=_combine_setup_context
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
    return ops.gather_rows(x, routing.expert_offsets, routing.row_to_slot, routing.slot_to_row, routing.top_k)


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
    weights = top_k_weights.contiguous()
    return ops.combine_rows(y, weights, routing.expert_offsets, routing.slot_to_row)
