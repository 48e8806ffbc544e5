"""What the directions of the experts block launch and allocate."""

from functools import lru_cache
from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .block import Block, Kind, Needs
from .decode import decode_plan, is_decode
from .fused import dgrad_launch, up_launch
from .gemm import bias_grads_plan, gemm_launch, has_unit_rows, nk_order, num_dots, sum_partials_launch, wgrad_launch
from .hopper_fused import hopper_down_dgrad
from .launch import MAX_KEPT, Form, form_of
from .permute import combine_launch, sort_rows_launch
from .plan import Plan, Within, like, unwritten
from .routing import route_plan
from .schedule import Sizes, map_size, schedule_sizes
from .tuning import DeviceSpec, spec_of


@lru_cache(maxsize=MAX_KEPT)
def forward_plan(
    x: Form, weights: Form, up: Form, down: Form, up_bias: Optional[Form], down_bias: Optional[Form], rows: int,
    save: bool, transposed: bool, kind: Kind, sizes: Sizes, spec: DeviceSpec, device: torch.device,
) -> Plan:  # fmt: skip
    """x, routing weights, up, down, their biases, row_to_slot, slot_to_row, map -> preact if it is to be saved,
    activation and rows of the result as scratch memory, out.
    """
    (tokens, h), top_k, n = x.shape, weights.shape[1], down.shape[1 if transposed else 2]
    preact = unwritten(x.dtype, rows, up.shape[2 if transposed else 1]) if save else None
    a, y, out = unwritten(x.dtype, rows, n), unwritten(x.dtype, rows, h), unwritten(x.dtype, tokens, h)
    plan = Plan(device, 9)
    numbers = plan.make(preact), plan.make(a, scratch=True), plan.make(y, scratch=True), plan.make(out)
    if rows:
        given = (save, True, True)
        up_proj = up_launch(x, up, up_bias, None, given, rows, n, top_k, transposed, kind, sizes, spec, device)
        plan.add(up_proj, 0, 2, 4, *numbers[:2], None, 6, 8)
        strides, precision = nk_order(down.strides, transposed), kind.precision
        down_proj = gemm_launch(a, down, strides, h, down_bias, None, sizes, False, spec, precision, device)
        plan.add(down_proj, numbers[1], 3, 5, None, numbers[2], 8)
    if tokens:
        plan.add(combine_launch(y, weights, tokens * top_k, top_k, device), numbers[2], 1, 7, numbers[3])
    return plan


class Call(NamedTuple):
    """The plan of a whole call for x, ids, routing weights, up, down and their biases -> out, the last.

    saved: the numbers of preact, the schedule's map, row_to_slot and slot_to_row, if a backward may follow.
    """

    plan: Plan
    saved: Tuple[int, ...]


def call_plan(block: Block, x: Tensor, top_k_index: Tensor, weights: Tensor, record: bool) -> Optional[Call]:
    """None for what is copied first, or counted because of a capacity. record: whether a backward may follow."""
    forms = [*map(form_of, (x, top_k_index, weights, *block[:4]))]
    (num_tokens, top_k), num_experts, num_slots = top_k_index.shape, block.num_experts, top_k_index.numel()
    if not top_k_index.is_contiguous() or block.num_rows(num_slots) < num_slots:
        return None
    if not record and num_tokens and is_decode(block, num_tokens, top_k):
        kind = block.activation, block.gated, block.interleaved, block.transposed
        return Call(decode_plan(*forms, kind, x.device), ()) if has_unit_rows(x) else None
    spec, plan, save = spec_of(x), Plan(x.device, 7), record and not block.recompute
    sizes = schedule_sizes(num_slots, num_experts, x.dtype)
    tile_map = plan.make(unwritten(torch.int32, map_size(num_slots, num_experts)), scratch=not record)
    route = route_plan(num_slots, top_k_index.dtype, num_experts, sizes[1], num_slots, False, x.device)
    row_to_slot, slot_to_row = plan.include(route, 1, tile_map, None, keep=(3, 4) if record else ())[3:5]
    forward = forward_plan(
        forms[0], *forms[2:], num_slots, save, block.transposed, block.kind(spec), sizes, spec, x.device
    )  # fmt: skip
    given = 0, *range(2, 7), row_to_slot, slot_to_row, tile_map
    preact = plan.include(forward, *given, keep=(len(given), forward.last))[len(given)]
    return Call(plan, (preact, tile_map, row_to_slot, slot_to_row) if record else ())


@lru_cache(maxsize=MAX_KEPT)
def backward_plan(
    dout: Form, x: Optional[Form], weights: Form, up: Form, down: Form, up_bias: Optional[Form],
    down_bias: Optional[Form], rows: int, needs: Needs, recompute: bool, spent: bool, transposed: bool, kind: Kind,
    sizes: Sizes, spec: DeviceSpec, device: torch.device,
) -> Plan:  # fmt: skip
    """dout, x, routing weights, up, down, their biases, preact (None: recompute it), row_to_slot, slot_to_row, map ->

    the gradients in the order of `Needs`, None where not asked for. Each buffer goes before the next one comes, the
    gradients of weights last: they stay. spent: preact is overwritten, then its memory is given back.
    Columns of dout, and of x for the gradient of up, are contiguous.
    """
    plan, top_k, (num_experts, *_), precision = Plan(device, 11), weights.shape[1], sizes, kind.precision
    (tokens, h), dtype, n = dout.shape, dout.dtype, down.shape[1 if transposed else 2]
    preact, row_to_slot, slot_to_row, tile_map = range(7, 11)
    grads = _make_grads(plan, needs, dout, weights, up, down, up_bias, down_bias)
    preact_form, act_form = unwritten(dtype, rows, up.shape[2 if transposed else 1]), unwritten(dtype, rows, n)
    if recompute:
        preact = plan.make(preact_form)
        if rows:
            up_proj = up_launch(
                x, up, up_bias, None, (True, False, True), rows, n, top_k, transposed, kind, sizes, spec, device
            )  # fmt: skip
            plan.add(up_proj, 1, 3, 5, preact, None, None, row_to_slot, tile_map)
    needs_dpreact, has_dots = needs.x or needs.up or needs.up_bias, needs.weights and down_bias is not None
    given, rows_form = (needs_dpreact, needs.down, needs.weights, True), unwritten(dtype, rows, h)
    on_rows = hopper_down_dgrad(rows_form, down, weights, given, n, transposed, kind, sizes, spec, device)
    dgrad, num_sums = on_rows or dgrad_launch(
        dout, down, weights, given, rows, n, top_k, transposed, kind, sizes, spec, device
    )  # fmt: skip
    dout_rows = None
    if on_rows is not None:
        dout_rows = plan.make(rows_form)
        plan.add(sort_rows_launch(dout, tokens * top_k, top_k, device), 0, slot_to_row, dout_rows)
    dpreact = preact if recompute or spent else plan.make(preact_form if needs_dpreact else None)
    act = plan.make(act_form if needs.down else None)
    sums_shape = num_sums + (num_dots(h) if has_dots else 0), rows
    sums = plan.make(unwritten(torch.float32, *sums_shape) if needs.weights else None)
    if rows:
        plan.add(dgrad, dout_rows or 0, 4, 2, preact, dpreact, act, sums, row_to_slot, tile_map)
    if dout_rows is not None:
        plan.drop(dout_rows)
    if needs.down_bias or has_dots:
        bias_grads = bias_grads_plan(
            dout, top_k, weights, down_bias, rows if has_dots else None, True,
            unwritten(dtype, *down_bias.shape) if needs.down_bias else None, sizes, False, device,
        )  # fmt: skip
        plan.include(bias_grads, 0, 2, 6, Within(sums, num_sums * rows), row_to_slot, tile_map, grads.down_bias)
    if needs.weights and tokens:
        slots = tokens * top_k
        sum_up = sum_partials_launch(sums_shape, True, weights.dtype, slots, num_experts, False, device)
        plan.add(sum_up, sums, slot_to_row, tile_map, grads.weights)
    plan.drop(sums)
    rows_given = preact_form, dpreact, x, rows, tokens, h, top_k
    _add_up_grads(plan, needs, grads, rows_given, up, up_bias, transposed, sizes, spec, precision, device)
    if spent:
        plan.give_back(preact)
    else:
        plan.drop(dpreact)
    if needs.down:
        dw = _wgrad_form(down, transposed)
        wgrad = wgrad_launch(dout, top_k, act_form, 0, rows, dw, False, spec, precision, device)
        plan.add(wgrad, 0, act, grads.down, row_to_slot, tile_map)
    plan.drop(act)
    return plan


def _add_up_grads(
    plan: Plan, needs: Needs, grads: Needs, rows_given: tuple, up: Form, up_bias: Optional[Form], transposed: bool,
    sizes: Sizes, spec: DeviceSpec, precision: str, device: torch.device,
) -> None:  # fmt: skip
    """Adds what makes the gradients of x, up and its bias of dpreact."""
    preact, dpreact, x, rows, tokens, h, top_k = rows_given
    _, row_to_slot, slot_to_row, tile_map = range(7, 11)
    if needs.x:
        dx_form = unwritten(preact.dtype, rows, h)
        dx_rows = plan.make(dx_form)
        if rows:
            strides = nk_order(up.strides, not transposed)
            dx_gemm = gemm_launch(preact, up, strides, h, None, None, sizes, False, spec, precision, device)
            plan.add(dx_gemm, dpreact, 3, None, None, dx_rows, tile_map)
        if tokens:
            plan.add(combine_launch(dx_form, None, tokens * top_k, top_k, device), dx_rows, None, slot_to_row, grads.x)
        plan.drop(dx_rows)
    if needs.up:
        dw = _wgrad_form(up, transposed)
        wgrad = wgrad_launch(preact, 0, x, top_k, rows, dw, False, spec, precision, device)
        plan.add(wgrad, dpreact, 1, grads.up, row_to_slot, tile_map)
    if needs.up_bias:
        dbias = unwritten(preact.dtype, *up_bias.shape)
        bias_grads = bias_grads_plan(preact, 0, None, None, None, False, dbias, sizes, False, device)
        plan.include(bias_grads, dpreact, None, None, None, None, tile_map, grads.up_bias)


def _make_grads(plan: Plan, needs: Needs, dout: Form, weights: Form, *others: Optional[Form]) -> Needs:
    """The numbers of the gradients. A weight's keeps its strides; the others are contiguous."""
    up, down, up_bias, down_bias = others
    forms = (
        unwritten(dout.dtype, *dout.shape), unwritten(weights.dtype, *weights.shape), like(up), like(down),
        up_bias and unwritten(dout.dtype, *up_bias.shape), down_bias and unwritten(dout.dtype, *down_bias.shape),
    )  # fmt: skip
    return Needs(*(plan.make(form if need else None) for form, need in zip(forms, needs)))


def _wgrad_form(weight: Form, transposed: bool) -> Form:
    """The gradient of a weight (E, N, K), or of the transposed one as a view of this shape."""
    grad = like(weight)
    if not transposed:
        return grad
    (e, k, n), (stride_e, stride_k, stride_n) = grad.shape, grad.strides
    return grad._replace(shape=(e, n, k), strides=(stride_e, stride_n, stride_k))
