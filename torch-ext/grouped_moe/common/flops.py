"""FLOPs of the ops, for `torch.utils.flop_counter.FlopCounterMode`.

Every slot counts as routed, and every row as one of a group: how many are is known on the device only.
"""

from math import prod
from typing import Callable, Dict, Optional, Sequence

from torch.utils.flop_counter import register_flop_formula

from .._ops import ops

Shape = Optional[Sequence[int]]


def _experts_forward(x: Shape, index: Shape, _act_scales, _bias_scales, up: Shape, down: Shape, *_, **__) -> int:
    rows = prod(index) if len(index) == 2 else x[0]
    return 2 * rows * (_elements(up) + _elements(down))


def _elements(weight: Shape) -> int:
    """Elements of the weight of one expert."""
    return prod(weight[1:])


def _experts_backward(dout: Shape, _x, _act_scales, _bias_scales, up: Shape, down: Shape, *rest, **__) -> int:
    """The products of `pipeline.backward`. needs: as `block.Needs`."""
    _, _, _, _, flags, _, _, _, _, slot_to_row, needs = rest
    rows = dout[0] if slot_to_row is None else slot_to_row[0]
    *_, recompute = flags
    x, act_scales, _, needs_up, needs_down, up_bias, _ = needs
    dgrad = x or act_scales or needs_up or needs_down or up_bias
    times_up, times_down = x + needs_up + (recompute and dgrad), dgrad + needs_down
    return 2 * rows * (times_up * _elements(up) + times_down * _elements(down))


def _linear_forward(x: Shape, weight: Shape, *_, **__) -> int:
    return 2 * x[0] * _elements(weight)


def _linear_backward(dy: Shape, _x, weight: Shape, _splits, _transposed, needs_x: bool, needs_weight: bool, **_) -> int:
    return 2 * dy[0] * _elements(weight) * (needs_x + needs_weight)


def _accumulate_wgrad(dw: Shape, dy: Shape, *_, **__) -> int:
    return 2 * dy[0] * _elements(dw)


def _accumulate_wgrads(dws: Sequence[Shape], dy: Shape, *_, **__) -> int:
    return 2 * dy[0] * prod(dws[0]) if dws else 0


_FORMULAS: Dict[str, Callable[..., int]] = {
    "experts_inference": _experts_forward,
    "experts_forward": _experts_forward,
    "experts_backward": _experts_backward,
    "experts_backward_overwriting": _experts_backward,
    "grouped_linear_forward": _linear_forward,
    "grouped_linear_backward": _linear_backward,
    "accumulate_wgrad": _accumulate_wgrad,
    "accumulate_wgrads": _accumulate_wgrads,
}


def register_formulas() -> None:
    """Tells PyTorch's counter the formulas of all ops with products."""
    for name, formula in _FORMULAS.items():
        register_flop_formula(getattr(ops, name))(formula)
