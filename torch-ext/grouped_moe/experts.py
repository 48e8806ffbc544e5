"""The whole experts block: route, up-projection with activation, down-projection, combine."""

from typing import List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from . import pipeline
from ._ops import ops
from .backends import backend_of
from .block import BLOCK_SCHEMA, Block, Grads, Needs, fake_grads, kind_arguments, make_block
from .common import _compat, checks
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
from .rows import Rows, schedule_size
from .tuning.heuristic import choose_block_m

_ARGUMENTS = f"Tensor x, Tensor top_k_index, Tensor top_k_weights, {BLOCK_SCHEMA}"
_SAVED = "Tensor schedule, Tensor row_to_slot, Tensor slot_to_row"
_NUM_ARGUMENTS = 11


def _inference(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *arguments: object) -> Tensor:
    """out (T, H), with nothing kept for a backward."""
    block, kernels = make_block(*arguments), backend_of(x)
    num_tokens, top_k = top_k_index.shape
    with on_device(x):
        if num_tokens and kernels.is_decode(block, num_tokens, top_k):
            return kernels.decode(block, x, top_k_index, top_k_weights)
        rows = kernels.route(top_k_index, block.num_experts, x.dtype, block.capacity)
        return pipeline.forward(kernels, block, x, rows, top_k_weights, None, save=False)[0]


def _forward(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *arguments: object
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, preact, schedule, row_to_slot, slot_to_row); preact is empty if it is recomputed."""
    block, kernels = make_block(*arguments), backend_of(x)
    with on_device(x):
        rows = kernels.route(top_k_index, block.num_experts, x.dtype, block.capacity)
        out, preact = pipeline.forward(kernels, block, x, rows, top_k_weights, None, save=not block.recompute)
    return out, x.new_empty(0) if preact is None else preact, rows.schedule, rows.row_to_slot, rows.slot_to_row


def _forward_fake(x, top_k_index, top_k_weights, *arguments):
    block = make_block(*arguments)
    num_slots = top_k_index.shape[0] * top_k_index.shape[1]
    num_rows = block.num_rows(num_slots)
    sizes = schedule_size(num_rows, block.num_experts), num_rows, num_slots
    preact = x.new_empty(0 if block.recompute else (num_rows, block.preact_width))
    return x.new_empty(x.shape), preact, *(top_k_index.new_empty(size, dtype=torch.int32) for size in sizes)


def _backward(
    dout: Tensor,
    x: Optional[Tensor],
    top_k_weights: Tensor,
    block: Block,
    preact: Tensor,
    indices: Sequence[Tensor],
    needs: Needs,
    overwrite: bool,
) -> Grads:
    """The gradients that are asked for. indices: schedule, row_to_slot, slot_to_row."""
    # Hooks on what was saved may return it in other strides.
    schedule, row_to_slot, slot_to_row = (tensor.contiguous() for tensor in indices)
    block_m = choose_block_m(slot_to_row.shape[0], block.num_experts, dout.dtype)
    num_rows, top_k = row_to_slot.shape[0], top_k_weights.shape[1]
    rows = Rows(schedule, block.num_experts, num_rows, block_m, top_k, row_to_slot, slot_to_row)
    with on_device(dout):
        return pipeline.backward(
            backend_of(dout), block, dout, x, rows, top_k_weights.contiguous(), None, preact.contiguous(), needs,
            overwrite,
        )  # fmt: skip


def _backward_op(dout, x, top_k_weights, *rest) -> Tuple[Tensor, ...]:
    *arguments, preact, schedule, row_to_slot, slot_to_row, needs = rest
    indices = schedule, row_to_slot, slot_to_row
    grads = _backward(dout, x, top_k_weights, make_block(*arguments), preact, indices, Needs(*needs), False)
    return or_empty(grads, dout)


def _backward_overwriting_op(dout, x, top_k_weights, *rest) -> List[Tensor]:
    *arguments, preact, schedule, row_to_slot, slot_to_row, needs = rest
    indices = schedule, row_to_slot, slot_to_row
    grads = _backward(dout, x, top_k_weights, make_block(*arguments), preact, indices, Needs(*needs), True)
    return wanted(grads, needs)


def _fake_grads(dout, x, top_k_weights, *rest) -> Grads:
    *arguments, _, _, _, _, needs = rest
    return fake_grads(Needs(*needs), make_block(*arguments), dout, top_k_weights, None)


def _plain(*args) -> Tensor:
    return ops.experts_inference.default(*args)


def _recorded(*args) -> Tensor:
    return _Experts.apply(*args)[0]


define_op("experts_inference", f"({_ARGUMENTS}) -> Tensor", _inference, lambda x, *_: x.new_empty(x.shape))
define_op(
    "experts_forward", f"({_ARGUMENTS}) -> (Tensor out, Tensor preact, {_SAVED})", _forward, _forward_fake
)  # fmt: skip
_BACKWARD = (
    f"(Tensor dout, Tensor? x, Tensor top_k_weights, {BLOCK_SCHEMA}, Tensor%s preact, {_SAVED}, bool[] needs)"
)  # fmt: skip
define_op(
    "experts_backward",
    f"{_BACKWARD % ''} -> ({', '.join(f'Tensor d{name}' for name in Needs._fields)})",
    _backward_op,
    lambda dout, *rest: or_empty(_fake_grads(dout, *rest), dout),
)
# Overwrites preact and gives its memory back.
define_op(
    "experts_backward_overwriting",
    f"{_BACKWARD % '(a!)'} -> Tensor[]",
    _backward_overwriting_op,
    lambda *args: wanted(_fake_grads(*args), args[-1]),
)
_experts = define_differentiable_op(
    "experts", f"({_ARGUMENTS}) -> Tensor", _plain, _recorded, lambda x, *_: x.new_empty(x.shape)
)


class _Experts(torch.autograd.Function):
    """The autograd of the op, whose inputs these are.

    preact is an output, though nobody uses it, so that a second derivative raises by whatever it is made of: x may not
    be saved.
    """

    @staticmethod
    def forward(ctx, *inputs):
        x, _, top_k_weights, up, down, up_bias, down_bias, *kind = inputs
        _, _, (_, _, _, recompute), _ = kind
        out, preact, *indices = ops.experts_forward.default(*inputs)
        ctx.set_materialize_grads(False)
        ctx.kind = kind
        mark_as_own(preact)
        reads_x = ctx.needs_input_grad[3] or recompute
        ctx.save_for_backward(x if reads_x else None, top_k_weights, up, down, up_bias, down_bias, preact, *indices)
        return out, preact

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dout, _):
        if dout is None:
            return (None,) * _NUM_ARGUMENTS
        x, top_k_weights, up, down, up_bias, down_bias, preact, *indices = saved
        wants_x, _, wants_weights, wants_up, wants_down, wants_up_bias, wants_down_bias, *_ = ctx.needs_input_grad
        needs = Needs(wants_x, wants_weights, False, wants_up, wants_down, wants_up_bias, wants_down_bias)
        arguments = (
            dout, x, top_k_weights, up, down, up_bias, down_bias, *ctx.kind, preact, *indices, list(needs)
        )  # fmt: skip
        if is_plain(dout) and take_over(preact):
            made = ops.experts_backward_overwriting.default(*arguments)
        else:
            made = wanted(ops.experts_backward.default(*arguments), needs)
        grads = Grads(*spread(made, needs))
        given = grads.x, None, grads.act_scales, grads.up, grads.down, grads.up_bias, grads.down_bias
        return given + (None,) * (_NUM_ARGUMENTS - len(given))


def grouped_mm_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    gate_up_proj_bias: Optional[Tensor] = None,
    down_proj_bias: Optional[Tensor] = None,
    activation: Union[str, Activation] = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    recompute: bool = False,
    capacity: Optional[int] = None,
) -> Tensor:
    """The experts block: out[t] = sum over k of top_k_weights[t, k] * expert(top_k_index[t, k], hidden_states[t]),

    expert(e, x) = down_proj[e] a(gate_up_proj[e] x + gate_up_proj_bias[e]) + down_proj_bias[e], with the activation a
    of `Activation`. Ids outside [0, E) are sentinels: the contract is that of `route`.

    hidden_states: (T, H) bf16, fp16 or fp32 (fp64, too, on CPU). top_k_index: (T, top_k) int32 or int64.
    top_k_weights: (T, top_k), any of these floating dtypes, kept as it is. gate_up_proj: (E, 2 I, H), or (E, I, H)
    if not gated; down_proj: (E, H, I); with transposed=True (E, H, 2 I) and (E, I, H); of any strides, in the dtype of
    hidden_states. Biases: (E, 2 I) or (E, I), and (E, H); gated blocks take both or none. interleaved: gate and up
    columns alternate instead of [gate | up]. E up to 1024. Returns (T, H) in the dtype of hidden_states. Under autocast
    hidden states, weights and biases are cast as `F.linear` does.

    Differentiable once, in reverse mode, in all floating tensors; only gradients that are asked for are computed.
    Sums are in fp32 (fp64 for fp64) and in fixed order: results repeat bitwise. No host sync.

    Memory in elements of the dtype, with the rows S = T top_k or, if that is less, capacity, P = 2 I (I if not gated),
    small index tensors apart. Saved for backward: T H (hidden_states itself; not if gate_up_proj is frozen) + S P; with
    recompute=True T H. Transient in forward: S (I + H), or S H + T H with
    the output, if that is more; in backward, on an accelerator, S (I + H) beside the gradient
    of hidden_states, then S I beside all, those of the weights last. The pre-activation becomes its own gradient in
    place and goes before down_proj's gradient comes. Up to there it is S P more if it is recomputed, or must stay as it
    is: where the backward keeps the graph, under torch.compile or a profiler, and behind hooks that move what is saved.
    Whoever keeps it beyond the backward, as hooks that hand it on or `grad_fn.saved_tensors` allow, is left without its
    memory, and has to copy it before.

    capacity: a promise that at most so many slots (1 or more) are routed to local experts; it sizes buffers. If more
    are, nothing is accessed out of bounds, and an error comes instead of a wrong result: on CPU RuntimeError with both
    numbers; on an accelerator, which counts them without telling the host, an assertion on the device, in a graph's
    replay as well: CUDA reports it at the next sync and prints a message that names grouped_mm_experts and capacity.
    ROCm, whose PyTorch is built without such assertions, makes room for all slots instead.
    Calls of a few tokens without gradients make no rows there: they are right whatever it is, and not checked.

    Raises TypeError or ValueError that names the argument, before anything is launched.
    """
    checks.check_flags(gated=gated, interleaved=interleaved, transposed=transposed, recompute=recompute)
    activation = as_activation(activation, gated, interleaved)
    checks.check_capacity("capacity", capacity)
    dtype = checks.autocast_dtype(hidden_states.device.type) if isinstance(hidden_states, Tensor) else None
    x, up, down, up_bias, down_bias = (
        checks.autocast(tensor, dtype)
        for tensor in (hidden_states, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
    )
    checks.check_block(x, top_k_index, top_k_weights, up, down, up_bias, down_bias, gated, transposed)
    refuse_forward_mode("grouped_mm_experts", x, top_k_weights, up, down, up_bias, down_bias)
    if not _compat.has_device_assertions():  # an overflow would go unseen
        capacity = capacity if x.device.type == "cpu" else None
    kind = kind_arguments(activation, gated, interleaved, transposed, recompute)
    return _experts(x, top_k_index, top_k_weights.contiguous(), up, down, up_bias, down_bias, *kind, capacity)
