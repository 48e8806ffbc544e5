"""The whole experts block, one op per direction: route, up-projection with activation, down-projection, combine."""

import operator
from typing import Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from . import _checks as checks
from ._ops import ops
from ._torch import experts as _torch_experts
from ._torch.routing import route as _route_torch
from .activation import Activation, as_activation
from .block import Block, Needs, empty_grads, make_block, pack_kind
from .decode import decode_triton, is_decode
from .define import (
    below_autograd,
    define_op,
    is_plain,
    mark_as_own,
    needs_autograd,
    once_differentiable,
    plain_apply,
    plan_key,
    register_autograd,
    take_over,
)
from .experts_plans import Call, backward_plan, call_plan, forward_plan
from .gemm import unit_rows
from .launch import form_of
from .plan import Plans
from .routing import TiledRouting, route_tiles_triton
from .schedule import map_size, schedule_of_map
from .tuning import choose_block_m, on_device_of, spec_of


def forward_triton(
    block: Block, x: Tensor, weights: Tensor, routing: TiledRouting, save: bool
) -> Tuple[Tensor, Optional[Tensor]]:
    """(out (T, H), preact (rows, P) if save) by the Triton kernels."""
    (tile_map, *sizes), row_to_slot, slot_to_row = routing
    spec = spec_of(x)
    tensors = x, weights, *block[:4]
    plan = forward_plan(
        *map(form_of, tensors), row_to_slot.shape[0], save, block.transposed, block.kind(spec), tuple(sizes),
        spec, x.device,
    )  # fmt: skip
    preact, _, _, out = plan(*tensors, row_to_slot, slot_to_row, tile_map)[9:]
    return out, preact


def backward_triton(
    block: Block,
    dout: Tensor,
    x: Optional[Tensor],
    weights: Tensor,
    preact: Optional[Tensor],
    routing: TiledRouting,
    needs: Needs,
    spent: bool = False,
) -> Tuple[Optional[Tensor], ...]:
    """The gradients in the order of `Needs` by the Triton kernels, None where not asked for.

    x is for the gradient of the up-projection and for recomputing alone, preact for a block that does not recompute.
    spent: preact is overwritten and its memory given back.
    """
    (tile_map, *sizes), row_to_slot, slot_to_row = routing
    dout, spec = unit_rows(dout), spec_of(dout)
    x = unit_rows(x) if needs.up else x
    # Hooks on what was saved may return it in other strides.
    weights, row_to_slot, slot_to_row = weights.contiguous(), row_to_slot.contiguous(), slot_to_row.contiguous()
    tile_map, preact = tile_map.contiguous(), None if block.recompute else preact.contiguous()
    tensors = dout, x, weights, *block[:4]
    plan = backward_plan(
        *map(form_of, tensors), row_to_slot.shape[0], needs, block.recompute, spent, block.transposed,
        block.kind(spec), tuple(sizes), spec, dout.device,
    )  # fmt: skip
    return plan(*tensors, preact, row_to_slot, slot_to_row, tile_map)[11:17]


def _route_tiles(block: Block, x: Tensor, top_k_index: Tensor, specified: bool) -> TiledRouting:
    block_m = choose_block_m(top_k_index.numel(), block.num_experts, x.dtype)
    return route_tiles_triton(top_k_index, block.num_experts, block_m, block.capacity, specified)


def _infer(block: Block, x: Tensor, top_k_index: Tensor, weights: Tensor) -> Tensor:
    """out (T, H), with nothing kept for a backward."""
    if x.device.type == "cpu":
        indices = _route_torch(top_k_index, block.num_experts, block.capacity)
        return _torch_experts.forward(block, x, weights, indices, save=False)[0]
    with on_device_of(x):
        num_tokens, top_k = top_k_index.shape
        if num_tokens and is_decode(block, num_tokens, top_k):
            return decode_triton(block, x, top_k_index, weights)
        return forward_triton(block, x, weights, _route_tiles(block, x, top_k_index, specified=False), save=False)[0]


def _experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    activation: str,
    parameters: Sequence[float],
    flags: Sequence[int],
    record: bool,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, preact, tile_map, row_to_slot, slot_to_row); all but out are empty unless a backward may follow."""
    block = make_block(up, down, up_bias, down_bias, activation, parameters, flags)
    if not record:
        out = _infer(block, x, top_k_index, top_k_weights)
        return out, x.new_empty(0), *(top_k_index.new_empty(0, dtype=torch.int32) for _ in range(3))
    save = not block.recompute
    if x.device.type == "cpu":
        offsets, *indices = _route_torch(top_k_index, block.num_experts, block.capacity)
        tile_map = offsets.new_zeros(map_size(indices[0].shape[0], block.num_experts))
        tile_map[: offsets.shape[0]] = offsets
        return (*_torch_experts.forward(block, x, top_k_weights, (offsets, *indices), save), tile_map, *indices)
    with on_device_of(x):
        routing = _route_tiles(block, x, top_k_index, specified=True)
        out, preact = forward_triton(block, x, top_k_weights, routing, save)
        preact = x.new_empty(0) if preact is None else preact
        return out, preact, routing.schedule.map, routing.row_to_slot, routing.slot_to_row


def _experts_fake(x, top_k_index, top_k_weights, up, down, up_bias, down_bias, activation, parameters, flags, record):
    block = make_block(up, down, up_bias, down_bias, activation, parameters, flags)
    num_slots = top_k_index.shape[0] * top_k_index.shape[1] if record else 0
    num_rows = block.num_rows(num_slots)
    return (
        x.new_empty((x.shape[0], x.shape[1])),
        x.new_empty((num_rows, block.preact_width) if record and not block.recompute else (0,)),
        x.new_empty(map_size(num_rows, up.shape[0]) if record else 0, dtype=torch.int32),
        x.new_empty(num_rows, dtype=torch.int32),
        x.new_empty(num_slots, dtype=torch.int32),
    )


def _backward(
    dout: Tensor,
    x: Optional[Tensor],
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    preact: Tensor,
    tile_map: Tensor,
    row_to_slot: Tensor,
    slot_to_row: Tensor,
    activation: str,
    parameters: Sequence[float],
    flags: Sequence[int],
    needs: Sequence[bool],
    spent: bool = False,
) -> Tuple[Optional[Tensor], ...]:
    """The gradients in the order of `Needs`, None or empty where not asked for. spent: preact may be overwritten."""
    block = make_block(up, down, up_bias, down_bias, activation, parameters, flags)
    wanted = Needs(*needs)
    num_rows, num_experts = row_to_slot.shape[0], block.num_experts
    if dout.device.type == "cpu":
        grads = empty_grads(wanted, block, dout, top_k_weights)
        indices = (tile_map[: num_experts + 1], row_to_slot, slot_to_row)
        _torch_experts.backward(block, dout, x, top_k_weights, preact, indices, wanted, grads, spent)
        return tuple(grads)
    with on_device_of(dout):
        block_m = choose_block_m(slot_to_row.shape[0], num_experts, dout.dtype)
        schedule = schedule_of_map(tile_map, num_experts, num_rows, block_m)
        routing = TiledRouting(schedule, row_to_slot, slot_to_row)
        return backward_triton(block, dout, x, top_k_weights, preact, routing, wanted, spent)


def _experts_backward(dout, *args):
    return tuple(dout.new_empty(0) if grad is None else grad for grad in _backward(dout, *args))


def _experts_backward_fake(
    dout, x, top_k_weights, up, down, up_bias, down_bias, preact, tile_map, row_to_slot, slot_to_row,
    activation, parameters, flags, needs,
):  # fmt: skip
    block = make_block(up, down, up_bias, down_bias, activation, parameters, flags)
    return tuple(empty_grads(Needs(*needs), block, dout, top_k_weights))


define_op(
    "experts",
    "(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias,"
    " str activation, float[] parameters, SymInt[] flags, bool record) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _experts,
    _experts_fake,
)
define_op(
    "experts_backward",
    "(Tensor dout, Tensor? x, Tensor top_k_weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias,"
    " Tensor preact, Tensor tile_map, Tensor row_to_slot, Tensor slot_to_row, str activation, float[] parameters,"
    " SymInt[] flags, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _experts_backward,
    _experts_backward_fake,
)


class _Experts(torch.autograd.Function):
    """The autograd of the op, whose inputs, but for the last, these are, and whose outputs, in plain calls two of them.

    The last: whether the call is plain, or its plan. What is saved is the same either way: activation checkpointing
    compares that. preact is differentiable, though nobody uses it, so that a second derivative raises by whatever it is
    made of: x may not be saved. Hooks that return the saved tensor itself keep the node until a backward frees it, as
    with any op that saves its output.
    """

    @staticmethod
    def forward(ctx, x, top_k_index, top_k_weights, up, down, up_bias, down_bias, *kind):
        *ctx.kind, _, plain = kind
        kind = *ctx.kind, True  # recorded it is, also where the caller could not know: under vmap
        ctx.set_materialize_grads(False)
        tensors = x, top_k_index, top_k_weights, up, down, up_bias, down_bias
        if isinstance(plain, Call):
            with on_device_of(x):
                made = plain.plan(*tensors)
            out, (preact, *others) = made[-1], (made[number] for number in plain.saved)
            others = [x.new_empty(0) if preact is None else preact, *others]
        elif plain:
            out, *others = _experts(*tensors, *kind)
        else:
            with below_autograd():
                out, *others = ops.experts.default(*tensors, *kind)
            ctx.mark_non_differentiable(*others[1:])
        recompute = ctx.kind[2][3]
        if plain and not recompute:  # an op's caller has its outputs
            mark_as_own(others[0])
        reads_x = ctx.needs_input_grad[3] or recompute
        ctx.save_for_backward(x if reads_x else None, top_k_weights, up, down, up_bias, down_bias, *others)
        return (out, others[0]) if plain else (out, *others)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dout, *_):
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        wanted = [ctx.needs_input_grad[i] for i in (0, 2, 3, 4, 5, 6)]
        if is_plain(dout, *saved):
            preact = saved[6]
            grads = _backward(dout, *saved, *ctx.kind, wanted, take_over(preact))
        else:
            grads = ops.experts_backward.default(dout, *saved, *ctx.kind, wanted)
        dx, dweights, dup, ddown, dup_bias, ddown_bias = (g if want else None for g, want in zip(grads, wanted))
        return (dx, None, dweights, dup, ddown, dup_bias, ddown_bias) + (None,) * 5


register_autograd("experts", _Experts)
_apply_plain = plain_apply(_Experts)


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
    recompute=True T H. Transient in forward: S (I + H); in backward, on an accelerator, S (I + H) beside the gradient
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
    tensors = hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias
    checks.check_flags(gated=gated, interleaved=interleaved, transposed=transposed, recompute=recompute)
    activation = as_activation(activation, gated, interleaved)
    return _call(tensors, activation, gated, interleaved, transposed, recompute, capacity)


def _call(tensors, activation, gated, interleaved, transposed, recompute, capacity) -> Tensor:
    """`grouped_mm_experts`: by a plan that is kept, else checked and by the op or what stands in for it."""
    checks.check_capacity("capacity", capacity)  # before it is part of a key
    record = needs_autograd(*tensors)
    key = plan_key(tensors, activation, gated, interleaved, transposed, recompute, capacity, record)
    call = None if key is None else _plans.get(key)
    if call is None:
        given, tensors = tensors, _checked(*tensors, gated, transposed)
    if torch.version.hip is not None:  # no device assertions there: an overflow would go unseen
        capacity = None
    kind = pack_kind(activation, gated, interleaved, transposed, recompute, capacity)
    if call is None:
        if not is_plain(*tensors):
            return ops.experts.default(*tensors, *kind, record)[0]
        if key is not None and all(map(operator.is_, given, tensors)):
            call = _plans.keep(key, call_plan(make_block(*tensors[3:], *kind), *tensors[:3], record))
    if record:
        return _apply_plain(*tensors, *kind, record, call or True)[0]
    if call is None:
        return _infer(make_block(*tensors[3:], *kind), *tensors[:3])
    with on_device_of(tensors[0]):
        return call.plan(*tensors)[-1]


_plans = Plans()


def _checked(x, top_k_index, top_k_weights, up, down, up_bias, down_bias, gated, transposed):
    """The op's tensors. Raises what `grouped_mm_experts` raises."""
    dtype = checks.autocast_dtype(x.device.type) if isinstance(x, Tensor) else None
    x, up, down, up_bias, down_bias = (checks.autocast(tensor, dtype) for tensor in (x, up, down, up_bias, down_bias))
    checks.check_block(x, top_k_index, top_k_weights, up, down, up_bias, down_bias, gated, transposed)
    return x, top_k_index, top_k_weights.contiguous(), up, down, up_bias, down_bias
