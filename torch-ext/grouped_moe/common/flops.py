"""FLOPs of the ops, for `torch.utils.flop_counter.FlopCounterMode`.

Every slot counts as routed, and every row as one of a group: how many are is known on the device only.
"""

from math import prod
from typing import Callable, Dict, Optional, Sequence

from torch.utils.flop_counter import register_flop_formula

from .._ops import ops

Shape = Optional[Sequence[int]]


def _experts_forward(x: Shape, top_k_index: Shape, _weights: Shape, up: Shape, down: Shape, *_, **__) -> int:
    return 2 * prod(top_k_index) * _weight_elements(up, down)


def _mlp_forward(x: Shape, _splits: Shape, _act_scales: Shape, _bias_scales: Shape, up: Shape, down: Shape, *_, **__):
    return 2 * x[0] * _weight_elements(up, down)


def _weight_elements(*weights: Shape) -> int:
    """Elements of the weights of one expert."""
    return sum(prod(weight[1:]) for weight in weights)


def _block_backward(rows: int, up: Shape, down: Shape, recompute: bool, needs: Sequence[bool]) -> int:
    """The products of `pipeline.backward`. needs: as `block.Needs`."""
    x, act_scales, _, needs_up, needs_down, up_bias, _ = needs
    dgrad = x or act_scales or needs_up or needs_down or up_bias
    times_up, times_down = x + needs_up + (recompute and dgrad), dgrad + needs_down
    return 2 * rows * (times_up * _weight_elements(up) + times_down * _weight_elements(down))


def _experts_backward(_dout: Shape, _x: Shape, top_k_weights: Shape, up: Shape, down: Shape, *rest, **__) -> int:
    flags, needs = rest[4], rest[-1]
    return _block_backward(prod(top_k_weights), up, down, flags[-1], needs)


def _mlp_backward(dy: Shape, _x: Shape, _act: Shape, _bias: Shape, up: Shape, down: Shape, *rest, **__) -> int:
    flags, needs = rest[4], rest[-1]
    return _block_backward(dy[0], up, down, flags[-1], needs)


def _linear_forward(x: Shape, weight: Shape, *_, **__) -> int:
    return 2 * x[0] * _weight_elements(weight)


def _linear_backward(dy: Shape, _x, weight: Shape, _splits, _transposed, needs_x: bool, needs_weight: bool, **_) -> int:
    return 2 * dy[0] * _weight_elements(weight) * (needs_x + needs_weight)


def _accumulate_wgrad(dw: Shape, dy: Shape, *_, **__) -> int:
    return 2 * dy[0] * _weight_elements(dw)


def _accumulate_wgrads(dws: Sequence[Shape], dy: Shape, *_, **__) -> int:
    return 2 * dy[0] * prod(dws[0]) if dws else 0


_FORMULAS: Dict[str, Callable[..., int]] = {
    "experts_inference": _experts_forward,
    "experts_forward": _experts_forward,
    "experts_backward": _experts_backward,
    "experts_backward_overwriting": _experts_backward,
    "grouped_mlp_forward": _mlp_forward,
    "grouped_mlp_backward": _mlp_backward,
    "grouped_mlp_backward_overwriting": _mlp_backward,
    "grouped_linear_forward": _linear_forward,
    "grouped_linear_backward": _linear_backward,
    "accumulate_wgrad": _accumulate_wgrad,
    "accumulate_wgrads": _accumulate_wgrads,
}


def register_formulas() -> None:
    """Tells PyTorch's counter the formulas of all ops with products."""
    for name, formula in _FORMULAS.items():
        register_flop_formula(getattr(ops, name))(formula)
