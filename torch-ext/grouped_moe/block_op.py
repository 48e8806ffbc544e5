"""The experts block as an op, for rows that are routed from tokens and for rows that are sorted already.

`experts` is what public functions call. It is made of `experts_inference`, which keeps nothing for a backward,
`experts_forward` and `experts_backward`. Their argument `index` says which rows are whose: expert ids (T, top_k), or
the splits of sorted rows, (G,) sizes or (G + 1,) offsets.
"""

from types import ModuleType
from typing import Optional, Tuple

import torch
from torch import Tensor

from . import pipeline
from .block import BLOCK_SCHEMA, Block, Grads, Needs, Saved, make_block
from .common.autograd import is_plain, mark_as_own, once_differentiable, take_over, where_needed
from .registration import define_differentiable_op, define_op
from .rows import Rows, schedule_size
from .tuning.heuristic import choose_block_m

_TENSORS = "Tensor? act_scales, Tensor? bias_scales, Tensor? adapters"
_NUM_KINDS = 5  # the last arguments: activation, parameters, flags, blocks, capacity
_ARGUMENTS = f"Tensor x, Tensor index, {_TENSORS}, {BLOCK_SCHEMA}"


def _make_rows(
    kernels: ModuleType, index: Tensor, block: Block, x: Tensor, adapters: Optional[Tensor], trains: bool
) -> Rows:
    """The rows of all products. trains: a backward follows, which has the same tiles."""
    routed = index.dim() == 2
    num_rows = block.num_rows(index.numel()) if routed else x.shape[0]
    quantizes = kernels.quantizes(block, x, num_rows, trains)
    if routed:
        rows = kernels.route(index, block.num_experts, x.dtype, block.capacity, quantizes)
    else:
        rows = kernels.split_rows(index, block.num_experts, num_rows, x.dtype, quantizes)
    return rows if adapters is None else rows._replace(adapters=adapters)


def _inference(kernels, x, index, act_scales, bias_scales, adapters, *arguments) -> Tensor:
    """out, with nothing kept for a backward."""
    block = make_block(*arguments)
    if index.dim() == 2 and index.shape[0] and kernels.is_decode(block, *index.shape):
        out = kernels.decode(block, x, index, act_scales, adapters)
        if out is not None:
            return out
    rows = _make_rows(kernels, index, block, x, adapters, trains=False)
    out, _ = pipeline.forward(kernels, block, x, rows, act_scales, bias_scales, save=False)
    return out


def _forward(kernels, x, index, act_scales, bias_scales, adapters, *arguments_and_save) -> Tuple[Optional[Tensor], ...]:
    """(out, *Saved, schedule, row_to_slot, slot_to_row).

    What is not saved is None, and so are the maps for rows that are sorted already.
    """
    *arguments, save = arguments_and_save
    block = make_block(*arguments)
    rows = _make_rows(kernels, index, block, x, adapters, trains=True)
    out, saved = pipeline.forward(kernels, block, x, rows, act_scales, bias_scales, save=save)
    return out, *saved, rows.schedule, rows.row_to_slot, rows.slot_to_row


def _forward_fake(x, index, act_scales, bias_scales, adapters, *arguments_and_save) -> Tuple[Optional[Tensor], ...]:
    *arguments, save = arguments_and_save
    block, num_slots = make_block(*arguments), index.numel() if index.dim() == 2 else x.shape[0]
    num_rows = block.num_rows(num_slots)
    save_preact = save and not block.recompute
    widths = (  # of `Saved`
        block.preact_width if save_preact else None,
        block.up_lora.padded_rank if save_preact and block.up_lora is not None else None,
        block.down_lora.padded_rank if save and block.down_lora is not None else None,
    )
    saved = (None if width is None else x.new_empty((num_rows, width)) for width in widths)
    sizes = schedule_size(num_rows, block.num_experts), *((num_rows, num_slots) if index.dim() == 2 else (None, None))
    schedule_and_maps = (None if size is None else index.new_empty(size, dtype=torch.int32) for size in sizes)
    return x.new_empty(x.shape), *saved, *schedule_and_maps


def _backward(kernels, dout, x, act_scales, bias_scales, adapters, *rest, overwrite: bool = False) -> Grads:
    """The gradients that are asked for. rest: the block's arguments, what was saved, and which gradients are needed."""
    *arguments, preact, up_rows, down_rows, schedule, row_to_slot, slot_to_row, needs = rest
    block = make_block(*arguments)
    # Hooks on what was saved may return it in other strides, and at other addresses.
    saved = Saved(*map(_as_made, (preact, up_rows, down_rows)))
    act_scales, bias_scales, adapters, schedule, row_to_slot, slot_to_row = map(
        _as_made, (act_scales, bias_scales, adapters, schedule, row_to_slot, slot_to_row)
    )
    num_rows, num_slots, top_k = dout.shape[0], dout.shape[0], 0
    if row_to_slot is not None:
        num_rows, num_slots, top_k = row_to_slot.shape[0], slot_to_row.shape[0], act_scales.shape[1]
    quantizes = kernels.quantizes(block, dout, num_rows, trains=True)
    block_m = choose_block_m(num_slots, block.num_experts, dout.dtype, quantizes)  # as the schedule was made for
    rows = Rows(schedule, block.num_experts, num_rows, block_m, top_k, row_to_slot, slot_to_row, adapters)
    return pipeline.backward(kernels, block, dout, x, rows, act_scales, bias_scales, saved, Needs(*needs), overwrite)


def _as_made(tensor: Optional[Tensor]) -> Optional[Tensor]:
    """The tensor as a forward makes it: contiguous, from a multiple of 16 bytes on."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _fake_grads(dout, x, act_scales, bias_scales, adapters, *rest) -> Grads:
    weights, needs = rest[:8], rest[-1]  # with their biases and factors, as the last fields of `Grads`
    like = Grads(dout, act_scales, bias_scales, *weights)
    contiguous = ("x", "act_scales", "bias_scales", "up_bias", "down_bias")
    made = (
        None if not need else tensor.new_empty(tensor.shape) if name in contiguous else torch.empty_like(tensor)
        for name, tensor, need in zip(Grads._fields, like, needs)
    )
    return Grads(*made)


def _like_x(x: Tensor, *_) -> Tensor:
    return x.new_empty(x.shape)


_infer = define_op("experts_inference", f"({_ARGUMENTS}) -> Tensor", _inference, _like_x)
_run_forward = define_op(
    "experts_forward",
    f"({_ARGUMENTS}, bool save)"
    " -> (Tensor out, Tensor preact, Tensor up_rows, Tensor down_rows, Tensor schedule, Tensor row_to_slot,"
    " Tensor slot_to_row)",
    _forward,
    _forward_fake,
)
_BACKWARD = (
    f"(Tensor dout, Tensor? x, {_TENSORS}, {BLOCK_SCHEMA}, Tensor%s preact, Tensor? up_rows,"
    " Tensor? down_rows, Tensor schedule, Tensor? row_to_slot, Tensor? slot_to_row, bool[] needs)"
    f" -> ({', '.join(f'Tensor d{name}' for name in Needs._fields)})"
)
_run_backward = define_op("experts_backward", _BACKWARD % "?", _backward, _fake_grads)
# Overwrites preact and gives its memory back.
_run_backward_overwriting = define_op(
    "experts_backward_overwriting", _BACKWARD % "(a!)", lambda *args: _backward(*args, overwrite=True), _fake_grads
)


class _Experts(torch.autograd.Function):
    """The autograd of the op. run: what runs the forward. kind: the last arguments, tensors: those before them.

    preact is an output, though nobody uses it, so that a second derivative raises by whatever it is made of: x may not
    be saved.
    """

    @staticmethod
    def forward(ctx, run, kind, *tensors):
        x, index, act_scales, bias_scales, adapters, *weights = tensors
        _, _, needs_x, _, needs_act_scales, needs_bias_scales, _, *needs_weights, _, _ = ctx.needs_input_grad
        needs = ctx.needs = Needs(needs_x, needs_act_scales, needs_bias_scales, *needs_weights)
        ctx.kind, (_, _, (_, _, _, recompute), *_) = kind, kind
        out, preact, up_rows, down_rows, schedule, *maps = run(*tensors, *kind, needs.preact or needs.down_b)
        ctx.set_materialize_grads(False)
        mark_as_own(preact)
        reads_x = needs.up or needs.up_a or (recompute and needs.preact)
        maps = maps if index.dim() == 2 else (None, None)
        ctx.save_for_backward(
            x if reads_x else None, act_scales, bias_scales, adapters, *weights,
            preact if needs.preact and not recompute else None, up_rows if needs.up_b and not recompute else None,
            down_rows if needs.down_b else None, schedule, *maps,
        )  # fmt: skip
        return out, preact

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dout, _):
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        *tensors, preact, up_rows, down_rows, schedule, row_to_slot, slot_to_row = saved
        made_by_forward = preact, up_rows, down_rows, schedule, row_to_slot, slot_to_row
        arguments = dout, *tensors, *ctx.kind, *made_by_forward, list(ctx.needs)
        overwrites = is_plain(dout) and take_over(preact)
        grads = (_run_backward_overwriting if overwrites else _run_backward)(*arguments)
        dx, d_act_scales, d_bias_scales, *dweights = where_needed(grads, ctx.needs)
        return None, None, dx, None, d_act_scales, d_bias_scales, None, *dweights, None, None


experts_op = define_differentiable_op(
    "experts",
    f"({_ARGUMENTS}) -> Tensor",
    _inference,
    lambda run, *args: _Experts.apply(run, args[-_NUM_KINDS:], *args[:-_NUM_KINDS])[0],
    _run_forward,
    _infer,
    _like_x,
)
