"""FLOPs of the ops, for `torch.utils.flop_counter.FlopCounterMode`.

Every slot counts as routed, and every row as one of a group: how many are is known on the device only.
"""

from functools import lru_cache
from math import prod
from typing import Optional, Sequence

from torch.utils.flop_counter import register_flop_formula

from ._ops import ops
from .block import Needs

Shape = Optional[Sequence[int]]


def _experts_forward(x: Shape, index: Shape, _scales, _bias_scales, _adapters, *block, **__) -> int:
    rows = prod(index) if len(index) == 2 else x[0]
    up, down, _, _, up_a, up_b, down_a, down_b, *_ = block
    return 2 * rows * sum(map(_elements, (up, down, up_a, up_b, down_a, down_b)))


def _elements(weight: Shape) -> int:
    """Elements of the weight, or of the factors of all adapters, of one expert; 0 for None."""
    return 0 if weight is None else prod(weight[1:] if len(weight) == 3 else (weight[0], *weight[2:]))


def _experts_backward(dout: Shape, _x, _scales, _bias_scales, _adapters, *block_and_rest, **__) -> int:
    """The products of `pipeline.backward`."""
    *block, _preact, _up_rows, _down_rows, _schedule, _row_to_slot, slot_to_row, needs = block_and_rest
    *weights, _activation, _parameters, flags, _blocks, _capacity = block
    up, down, _, _, up_a, up_b, down_a, down_b, _, _ = map(_elements, weights)
    (_, _, _, recompute), needs = flags, Needs(*needs)
    rows = dout[0] if slot_to_row is None else slot_to_row[0]
    recomputed = recompute and needs.preact
    products = recomputed * (up + up_a + up_b) + needs.x * (up + up_a) + needs.preact * (down + down_a)
    products += (needs.x or needs.up_a or needs.up_b) * up_b + (needs.preact or needs.down_b) * down_b
    products += needs.up * up + needs.up_a * up_a + needs.up_b * up_b
    products += needs.down * down + needs.down_a * down_a + needs.down_b * down_b
    return 2 * rows * products


def _linear_forward(x: Shape, weight: Shape, _splits, _bias, _bias_scales, a: Shape, b: Shape, *_, **__) -> int:
    return 2 * x[0] * sum(map(_elements, (weight, a, b)))


def _linear_backward(dy: Shape, _x, weight: Shape, _splits, a: Shape, b: Shape, *rest, **_) -> int:
    weight, a, b = map(_elements, (weight, a, b))
    needs_x, needs_weight, needs_a, needs_b = rest[-1]
    products = needs_x * (weight + a) + (needs_x or needs_a or needs_b) * b
    return 2 * dy[0] * (products + needs_weight * weight + needs_a * a + needs_b * b)


def _accumulate_wgrad(dy: Shape, _x, _splits, _num_groups, dws: Sequence[Shape], *_, **__) -> int:
    return 2 * dy[0] * prod(dws[0][-2:]) if dws else 0


@lru_cache(maxsize=None)
def register_formulas() -> None:
    """Tells PyTorch's counter the formulas of all ops with products: once, also where a build loads again."""
    # It sees `experts` and `grouped_linear` in inference mode alone, else the ops that they call.
    register_flop_formula([ops.experts, ops.experts_inference, ops.experts_forward])(_experts_forward)
    register_flop_formula([ops.experts_backward, ops.experts_backward_overwriting])(_experts_backward)
    register_flop_formula([ops.grouped_linear, ops.grouped_linear_forward])(_linear_forward)
    register_flop_formula(ops.grouped_linear_backward)(_linear_backward)
    register_flop_formula(ops.accumulate_wgrad)(_accumulate_wgrad)
