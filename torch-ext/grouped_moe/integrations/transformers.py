"""The experts implementation for transformers: reads an experts module and calls the block on its weights.

The fused block runs where it computes the very same function as the module; otherwise the grouped building blocks run
with the module's own gate (and post-expert norm) between them.
"""

from fractions import Fraction
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Callable, Dict, Optional, Tuple

import torch
from torch import Tensor

from ..common import _compat, checks
from ..common import activation as formulas
from ..common.activation import Activation
from ..experts import grouped_mm_experts
from ..grouped_linear import grouped_linear
from ..permute import combine_rows, gather_rows
from ..routing import route

# Class of a module's act_fn (torch.nn and transformers.activations) -> the activation it computes.
_ACTIVATIONS = {
    "SiLU": Activation("silu"),
    "SiLUActivation": Activation("silu"),
    "QuickGELUActivation": Activation("silu", alpha=1.702),
    "GELUActivation": Activation("gelu"),
    "GELUTanh": Activation("gelu_tanh"),
    "NewGELUActivation": Activation("gelu_tanh"),
    "ReLU": Activation("relu"),
    "ReLUSquaredActivation": Activation("relu2"),
}

# What experts modules call the limit and the alpha of their gates, and values to see what a gate makes of them.
_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
_TRIALS = ({"limit": 0.75, "alpha": 1.3}, {"limit": 2.5, "alpha": 0.8})


def _activation_of(act_fn: object) -> Optional[Activation]:
    """The activation of a module's act_fn, or None if it is not one of ours."""
    if act_fn is None or act_fn is torch.nn.functional.silu:
        return Activation("silu")
    kind = type(act_fn)
    known = kind.__module__.startswith(("torch.nn.", "transformers.activations"))
    return _ACTIVATIONS.get(kind.__name__) if known else None


def _gate_candidates(act: Activation, limit: Optional[float], alpha: Optional[float]) -> Tuple[Activation, ...]:
    """The gates that experts modules are known to compute from their activation, limit and alpha."""
    if limit is None:
        return (act,)
    clamped = Activation(act.name, act.alpha, limit)
    return (act, clamped) if alpha is None else (act, clamped, Activation("silu", alpha, limit, 1.0))


def _same(actual: Tensor, expected: Tensor) -> bool:
    # 1e-6: a gate evaluated in fp32 is the same function, another constant is not.
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-6, atol=1e-6)


@lru_cache(maxsize=None)
def _probe_gate(
    apply_gate: Callable, act: Activation, attributes: Tuple[Tuple[str, bool], ...], interleaved: bool
) -> Optional[int]:
    """Which of `_gate_candidates` a class's `_apply_gate` is, or None. attributes: names, and whether not None.

    Found by evaluating the gate in fp64, for several limits and alphas, on a grid that is fine where activations differ
    and wide enough to see constants at which it clamps. A gate that reads anything but its activation, limit and alpha,
    or computes anything else on them, is left to the module.
    """
    # Also under a compiler's or an exporter's fake tensors, which have no values to compare.
    with _compat.real_values():
        return _matching_gate(apply_gate, act, attributes, interleaved)


def _matching_gate(
    apply_gate: Callable, act: Activation, attributes: Tuple[Tuple[str, bool], ...], interleaved: bool
) -> Optional[int]:
    fine = torch.linspace(-3.0, 3.0, 41, dtype=torch.float64, device="cpu")
    points = torch.cat((fine, 4.0 * fine, 1e3 * fine))
    gate, up = (grid.reshape(1, -1) for grid in torch.meshgrid(points, points * 0.9 + 0.01, indexing="ij"))
    gate_up = torch.stack((gate, up), dim=-1).reshape(1, -1) if interleaved else torch.cat((gate, up), dim=-1)
    matches = None
    for trial in _TRIALS:
        values = {name: trial[name.split("_")[-1]] if is_set else None for name, is_set in attributes}
        act_fn = partial(formulas.activate, name=act.name, alpha=act.alpha)
        try:
            expected = apply_gate(SimpleNamespace(act_fn=act_fn, **values), gate_up).to(gate.dtype)
        except Exception:  # whatever it lacks in the namespace
            return None
        candidates = _gate_candidates(act, *(_number(values, names) for names in (_LIMITS, _ALPHAS)))
        outcomes = (formulas.forward(gate_up, candidate, True, interleaved) for candidate in candidates)
        same = [_same(outcome, expected) for outcome in outcomes]
        matches = same if matches is None else [both and now for both, now in zip(matches, same)]
    return matches.index(True) if True in matches else None


@torch.compiler.assume_constant_result
def _fused_gate(
    experts_class: type, act: Tuple, attributes: Tuple[Tuple[str, bool], ...], interleaved: bool
) -> Optional[int]:
    """`_probe_gate` as torch.compile takes it for a constant.

    The mark has to be outside of lru_cache, and the arguments constants themselves: named tuples are not, nor are
    floats that differ between layers.
    """
    return _probe_gate(experts_class._apply_gate, Activation(*act), attributes, interleaved)


def _number(values: Dict[str, Optional[float]], names: Tuple[str, ...]) -> Optional[float]:
    """The first of the named values that is there."""
    for name in names:
        if values.get(name) is not None:
            return values[name]
    return None


def _fused_activation(experts: torch.nn.Module, interleaved: bool) -> Optional[Activation]:
    """The activation with which the fused block computes what `experts` does, or None."""
    if getattr(experts, "has_post_expert_norm", False):
        return None
    act_fn = getattr(experts, "act_fn", None)
    if getattr(act_fn, "_forward_hooks", None) or getattr(act_fn, "_forward_pre_hooks", None):
        return None  # the fused block would not call them
    act = _activation_of(act_fn)
    if act is None or not getattr(experts, "has_gate", True):
        return act if act_fn is not None else None
    if "_apply_gate" in experts.__dict__:  # set on this very module, not by its class
        return None
    values = {name: getattr(experts, name) for name in _LIMITS + _ALPHAS if hasattr(experts, name)}
    if not all(value is None or isinstance(value, (int, float)) for value in values.values()):
        return None
    limit, alpha = _number(values, _LIMITS), _number(values, _ALPHAS)
    for name, value in values.items():
        if value is not None and value != (limit if name in _LIMITS else alpha):
            return None  # two limits or two alphas: which of them the gate reads is not known
    attributes = tuple((name, value is not None) for name, value in values.items())
    index = _fused_gate(type(experts), tuple(act), attributes, interleaved)
    if index is None:
        return None
    gate = _gate_candidates(act, limit, alpha)[index]
    return gate if gate.limit is None or gate.limit > 0 else None


def _local(parameter: Optional[Tensor]) -> Optional[Tensor]:
    """The rank's own part of a DTensor, differentiably; any other tensor as it is."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _capacity(top_k_index: Tensor, share: Optional[Tuple[int, int]]) -> Optional[int]:
    """The slots' share (numerator, denominator), rounded up, or 1 without slots; integers, which may be symbolic."""
    if share is None:
        return None
    num_slots = top_k_index.shape[0] * top_k_index.shape[1]
    return max(1, -(-num_slots * share[0] // share[1]))


def experts_forward(
    self: torch.nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    share: Optional[Tuple[int, int]] = None,
) -> Tensor:
    """The forward of a transformers experts module; signature and attributes are transformers'.

    hidden_states: (T, H). top_k_index, top_k_weights: (T, top_k); ids outside the module's num_experts are sentinels.
    share: numerator and denominator of the share of the slots that is the fused block's capacity; None for none.
    Returns (T, H) in the dtype of hidden_states.
    """
    gated = getattr(self, "has_gate", True)
    name = "gate_up_proj" if gated else "up_proj"
    up, down = _local(getattr(self, name)), _local(self.down_proj)
    has_bias = getattr(self, "has_bias", False)
    up_bias = _local(getattr(self, name + "_bias")) if has_bias else None
    down_bias = _local(self.down_proj_bias) if has_bias else None
    transposed = getattr(self, "is_transposed", False)
    interleaved = gated and not getattr(self, "is_concatenated", True)
    if self.num_experts != up.shape[0]:
        raise ValueError(f"num_experts: expected {up.shape[0]} as in {name}, got {self.num_experts}")
    checks.check_compute_dtype(name, up)
    x = hidden_states.to(up.dtype)
    activation = _fused_activation(self, interleaved)
    if activation is not None:
        out = grouped_mm_experts(
            x, top_k_index, top_k_weights, up, down, gate_up_proj_bias=up_bias, down_proj_bias=down_bias,
            activation=activation, gated=gated, interleaved=interleaved, transposed=transposed,
            capacity=_capacity(top_k_index, share),
        )  # fmt: skip
        return out.to(hidden_states.dtype)
    routing = route(top_k_index, self.num_experts)
    rows = grouped_linear(gather_rows(x, routing), up, routing.expert_offsets, up_bias, transposed=transposed)
    rows = self._apply_gate(rows) if gated else self.act_fn(rows)
    rows = grouped_linear(rows.to(down.dtype), down, routing.expert_offsets, down_bias, transposed=transposed)
    if getattr(self, "has_post_expert_norm", False):
        rows = self.post_expert_norm(rows)
    return combine_rows(rows, top_k_weights, routing).to(hidden_states.dtype)


def _fp8_experts_forward(self: torch.nn.Module, *args, **kwargs) -> Tensor:
    raise ValueError(
        "grouped_moe: FP8 experts are not supported by version 1; load the model without FP8 quantization or choose "
        "another experts_implementation, such as 'grouped_mm'"
    )


def _share(capacity: object) -> Optional[Tuple[int, int]]:
    """A share as (numerator, denominator): the nearest fraction with a denominator up to 2^16, not rounded to 0."""
    if capacity is None:
        return None
    if not isinstance(capacity, (int, float)) or isinstance(capacity, bool):
        raise TypeError(f"capacity: expected a float or None, got {type(capacity).__name__}")
    if not 0 < capacity <= 1:
        raise ValueError(f"capacity: expected a share of the slots above 0 and up to 1, got {capacity}")
    fraction = max(Fraction(capacity).limit_denominator(2**16), Fraction(1, 2**16))
    return fraction.numerator, fraction.denominator


def register_experts_implementation(name: str = "grouped_moe", capacity: Optional[float] = None) -> str:
    """Registers the package with transformers as experts_implementation=`name` and returns the name.

    Then `AutoModelForCausalLM.from_pretrained(..., experts_implementation=name)` or
    `model.set_experts_implementation(name)` use it, in training and inference. Calling it twice is harmless. FP8
    experts raise ValueError when they run.

    capacity: the share of the T top_k slots, above 0 and up to 1, that the fused block makes room for, rounded up to
    whole slots: see `grouped_mm_experts`, of which more slots than that are an error. For expert parallelism with
    sentinels, where a rank has a share of the experts: that share with headroom, of which small batches need more. Not
    for all-to-all dispatch, where every slot that arrives is local. Modules that the fused block does not compute take
    the room of all slots.

    Raises TypeError or ValueError that names the argument, ImportError without a transformers that has an
    ExpertsInterface.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {type(name).__name__}")
    share = _share(capacity)
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise ImportError(
            "register_experts_implementation: expected transformers 5.9 or later to be installed "
            "(pip install 'transformers>=5.9')"
        ) from error
    ExpertsInterface.register(name, experts_forward if share is None else partial(experts_forward, share=share))
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    except ImportError:  # older versions have no registry of their own for FP8 experts
        return name
    FP8ExpertsInterface.register(name, _fp8_experts_forward)
    return name
