"""From token order to expert order and back: `gather_rows` and `combine_rows`."""

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _checks as checks
from ._ops import add_op_namespace_prefix, ops
from ._torch import permute as _torch_permute
from .grouped_linear import unit_rows, zero_ungrouped
from .routing import Routing

_MAX_BLOCK_H = 2048


def _block_h(h: int) -> int:
    return min(_MAX_BLOCK_H, 1 << max(0, h - 1).bit_length())


def launch_combine(
    y: Tensor, weights: Optional[Tensor], slot_to_row: Tensor, top_k: int, out: Optional[Tensor] = None
) -> Tensor:
    """out (T, H): the sum over a token's routed slots of weights[slot] y[row]; weights None counts as ones."""
    from ._triton.rows import combine_kernel

    num_tokens, h = slot_to_row.shape[0] // top_k, y.shape[1]
    out = y.new_empty((num_tokens, h)) if out is None else out
    if num_tokens:
        block_h = _block_h(h)
        combine_kernel[(num_tokens, -(-h // block_h))](
            y, weights, slot_to_row, out, H=h, TOP_K=top_k, BLOCK_H=block_h, num_warps=4 if block_h <= 1024 else 8
        )
    return out


def gather_rows_triton(x: Tensor, row_to_slot: Tensor, expert_offsets: Tensor, top_k: int) -> Tensor:
    """out (S, H) by the Triton kernel."""
    from ._triton.rows import gather_rows_kernel

    x = unit_rows(x)
    num_slots, h = row_to_slot.shape[0], x.shape[1]
    out = x.new_empty((num_slots, h))
    if num_slots:
        block_h = _block_h(h)
        gather_rows_kernel[(num_slots, -(-h // block_h))](
            x, x.stride(0), row_to_slot, expert_offsets[-1:], out, H=h, TOP_K=top_k, BLOCK_H=block_h
        )
    return out


def combine_grad_triton(
    dout: Tensor, y: Tensor, weights: Tensor, expert_offsets: Tensor, slot_to_row: Tensor, needs: Sequence[bool]
) -> Tuple[Tensor, Tensor]:
    """(dy, dweights) by the Triton kernel; rows of dy past R are 0."""
    from ._triton.rows import combine_grad_kernel

    dout, y = unit_rows(dout), y.contiguous()
    dy = torch.empty_like(y) if needs[0] else y.new_empty(0)
    dweights = torch.empty_like(weights) if needs[1] else weights.new_empty(0)
    num_slots, h = y.shape
    if num_slots:
        combine_grad_kernel[(num_slots,)](
            dout, dout.stride(0), y if needs[1] else None, weights, slot_to_row,
            dy if needs[0] else None, dweights if needs[1] else None,
            H=h, TOP_K=weights.shape[1], BLOCK_H=min(1024, _block_h(h)),
        )  # fmt: skip
        if needs[0]:
            zero_ungrouped(dy, expert_offsets)
    return dy, dweights


@torch.library.custom_op(add_op_namespace_prefix("gather_rows"), mutates_args=())
def _gather_rows(x: Tensor, expert_offsets: Tensor, row_to_slot: Tensor, slot_to_row: Tensor, top_k: int) -> Tensor:
    if x.device.type == "cpu":
        out = x.new_zeros((row_to_slot.shape[0], x.shape[1]))
        rows = _torch_permute.gather_rows(x, row_to_slot, int(expert_offsets[-1]), top_k)
        out[: rows.shape[0]] = rows
        return out
    with getattr(torch, x.device.type).device(x.device):
        return gather_rows_triton(x, row_to_slot, expert_offsets, top_k)


@torch.library.register_fake(add_op_namespace_prefix("gather_rows"))
def _gather_rows_fake(
    x: Tensor, expert_offsets: Tensor, row_to_slot: Tensor, slot_to_row: Tensor, top_k: int
) -> Tensor:
    return x.new_empty((row_to_slot.shape[0], x.shape[1]))


@torch.library.custom_op(add_op_namespace_prefix("combine_rows"), mutates_args=())
def _combine_rows(
    y: Tensor, weights: Optional[Tensor], expert_offsets: Tensor, slot_to_row: Tensor, top_k: int
) -> Tensor:
    if y.device.type == "cpu":
        return _torch_permute.combine(y, weights, slot_to_row, top_k)
    with getattr(torch, y.device.type).device(y.device):
        return launch_combine(y.contiguous(), weights, slot_to_row, top_k)


@torch.library.register_fake(add_op_namespace_prefix("combine_rows"))
def _combine_rows_fake(
    y: Tensor, weights: Optional[Tensor], expert_offsets: Tensor, slot_to_row: Tensor, top_k: int
) -> Tensor:
    return y.new_empty((slot_to_row.shape[0] // top_k, y.shape[1]))


@torch.library.custom_op(add_op_namespace_prefix("combine_rows_backward"), mutates_args=())
def _combine_rows_backward(
    dout: Tensor, y: Tensor, weights: Tensor, expert_offsets: Tensor, slot_to_row: Tensor, needs: Sequence[bool]
) -> Tuple[Tensor, Tensor]:
    if y.device.type == "cpu":
        return _torch_permute.combine_grad(dout, y, weights, slot_to_row, weights.shape[1], needs)
    with getattr(torch, y.device.type).device(y.device):
        return combine_grad_triton(dout, y, weights, expert_offsets, slot_to_row, needs)


@torch.library.register_fake(add_op_namespace_prefix("combine_rows_backward"))
def _combine_rows_backward_fake(
    dout: Tensor, y: Tensor, weights: Tensor, expert_offsets: Tensor, slot_to_row: Tensor, needs: Sequence[bool]
) -> Tuple[Tensor, Tensor]:
    return y.new_empty(y.shape if needs[0] else (0,)), weights.new_empty(weights.shape if needs[1] else (0,))


def _gather_setup_context(ctx, inputs, output):
    _, expert_offsets, _, slot_to_row, ctx.top_k = inputs
    ctx.save_for_backward(expert_offsets, slot_to_row)


def _gather_backward(ctx, dout):
    return ops.combine_rows(dout, None, *ctx.saved_tensors, ctx.top_k), None, None, None, None


def _combine_setup_context(ctx, inputs, output):
    y, weights, expert_offsets, slot_to_row, ctx.top_k = inputs
    ctx.save_for_backward(y, weights, expert_offsets, slot_to_row)


def _combine_backward(ctx, dout):
    needs = list(ctx.needs_input_grad[:2])
    dy, dweights = ops.combine_rows_backward(dout, *ctx.saved_tensors, needs)
    return dy if needs[0] else None, dweights if needs[1] else None, None, None, None


torch.library.register_autograd(
    add_op_namespace_prefix("gather_rows"), _gather_backward, setup_context=_gather_setup_context
)
torch.library.register_autograd(
    add_op_namespace_prefix("combine_rows"), _combine_backward, setup_context=_combine_setup_context
)


def _check_routing(routing: object) -> None:
    if not isinstance(routing, Routing):
        raise TypeError(f"routing: expected a Routing, got {type(routing).__name__}")


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
    weights = top_k_weights.contiguous()
    return ops.combine_rows(y, weights, routing.expert_offsets, routing.slot_to_row, routing.top_k)
