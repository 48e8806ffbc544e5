"""What an experts module of transformers computes between and after its GEMMs, found out by asking its own methods.

A step that is found to be the fused block's own is left to it; any other step stays the module's. A module with a step
that this package does not know is refused.
"""

import inspect
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Callable, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ..common import _compat
from ..common import activation as formulas
from ..common.activation import Activation

# Class of a module's act_fn (torch.nn and transformers.activations) -> the activation it computes.
_ACTIVATIONS = {
    "SiLU": Activation("silu"),
    "SiLUActivation": Activation("silu"),
    "QuickGELUActivation": Activation("silu", alpha=1.702),
    "GELUActivation": Activation("gelu"),
    "GELUTanh": Activation("gelu_tanh"),
    "NewGELUActivation": Activation("gelu_tanh"),
    "FastGELUActivation": Activation("gelu_tanh"),
    "AccurateGELUActivation": Activation("gelu_tanh"),
    "ReLU": Activation("relu"),
    "ReLUSquaredActivation": Activation("relu2"),
}

# What experts modules call the limit and the alpha of their gates, and values to see what a gate makes of them.
_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
_SOFTCAPS = ("gate_softcap", "up_softcap")  # of gates that are ours where these are None
_TRIALS = ({"limit": 0.75, "alpha": 1.3}, {"limit": 2.5, "alpha": 0.8})

# Options of transformers' @use_experts_implementation that are honoured here.
_OPTIONS = (
    "experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate",
    "has_post_expert_norm",
)  # fmt: skip


def check_no_operations(name: str, tensor: Tensor) -> None:
    """Raises TypeError for a parameter of a subclass with operations of its own, as those for quantization have.

    torchao's for FP8 training replace one operation, which is never called here, and pass for plain in all others.
    """
    kind = type(tensor)
    if kind is not torch.nn.Parameter and kind is not Tensor and _has_operations(kind):
        raise TypeError(
            f"{name}: expected a plain tensor or a DTensor, got {kind.__name__}, whose own operations (quantization, "
            "FP8 training) are not supported; leave this parameter out of the conversion, dequantize it, or choose "
            "another experts_implementation, such as 'grouped_mm'"
        )


@torch.compiler.assume_constant_result
def _has_operations(kind: type) -> bool:
    return _overrides_operations(kind)


@lru_cache(maxsize=None)
def _overrides_operations(kind: type) -> bool:
    """Whether a class of tensors, but PyTorch's own for tracing and sharding, overrides what operations do."""
    if _compat.is_transparent(kind):
        return False
    # Tensor's keeps the class of results; Parameter's does nothing.
    function, *plain = (
        getattr(each.__torch_function__, "__func__", each.__torch_function__)
        for each in (kind, Tensor, torch.nn.Parameter)
    )
    return function not in plain or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


@lru_cache(maxsize=None)
def _unknown_options() -> Tuple[Tuple[str, object], ...]:
    """Options of the installed transformers' decorator beyond `_OPTIONS`, with their defaults.

    The decorator writes each option on the module as an attribute of that name.
    """
    try:
        from transformers.integrations.moe import use_experts_implementation
    except ImportError:  # the Hub layer runs without transformers, too
        return ()
    parameters = inspect.signature(use_experts_implementation).parameters.values()
    return tuple((p.name, p.default) for p in parameters if p.name not in _OPTIONS)


@lru_cache(maxsize=None)
def _unknown_methods(experts_class: type) -> Tuple[str, ...]:
    """The class's methods named as transformers names the steps of an experts module, but for those called here."""
    known = ("_apply_gate", "_apply_post_expert")
    return tuple(name for name in dir(experts_class) if name.startswith("_apply_") and name not in known)


@torch.compiler.assume_constant_result
def _unknown_steps(experts_class: type) -> Tuple[Tuple[str, ...], Tuple[Tuple[str, object], ...]]:
    return _unknown_methods(experts_class), _unknown_options()


def check_known(experts: torch.nn.Module) -> None:
    """Raises ValueError for a module whose output depends on steps or options that this package does not know."""
    methods, options = _unknown_steps(type(experts))
    unknown = [*methods, *(name for name, default in options if getattr(experts, name, default) != default)]
    if unknown:
        raise _refusal(experts, unknown)


def _refusal(experts: torch.nn.Module, unknown: Sequence[str]) -> ValueError:
    return ValueError(
        f"{type(experts).__name__}: expected an experts module of a kind that this version of grouped_moe knows, "
        f"got one with {' and '.join(unknown)}; choose another experts_implementation, such as 'grouped_mm'"
    )


@lru_cache(maxsize=None)
def _returns_its_argument(method: Callable) -> bool:
    """Whether a method of a class, without a norm, hands on the rows that it gets."""
    with _compat.real_values():
        values = torch.linspace(-2.0, 3.0, 12, device="cpu").reshape(3, 4)
        rows = values.clone()
        try:
            return method(SimpleNamespace(has_post_expert_norm=False), rows) is rows and torch.equal(rows, values)
        except Exception:  # it reads what the namespace lacks
            return False


@torch.compiler.assume_constant_result
def _has_post_step(experts_class: type) -> bool:
    method = getattr(experts_class, "_apply_post_expert", None)
    return method is not None and not _returns_its_argument(method)


def post_expert(experts: torch.nn.Module) -> Optional[Callable]:
    """What is applied to the experts' output rows before the routing weights, or None.

    transformers 5.23 has an option for a norm there. A method in its place, as a later one may have, is any step. Of a
    module with both it is not clear what applies: ValueError.
    """
    flagged = getattr(experts, "has_post_expert_norm", False)
    if "_apply_post_expert" not in experts.__dict__ and not _has_post_step(type(experts)):
        return experts.post_expert_norm if flagged else None
    if flagged:
        raise _refusal(experts, ("has_post_expert_norm", "_apply_post_expert"))
    return experts._apply_post_expert


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


def _has(experts: torch.nn.Module, name: str) -> bool:
    # Not hasattr(experts, name): what a module lacks takes it long to look for.
    return name in experts.__dict__ or hasattr(type(experts), name)


def fused_activation(experts: torch.nn.Module, interleaved: bool) -> Optional[Activation]:
    """The activation with which the fused block computes what `experts` does up to its down-projection, or None."""
    act_fn = getattr(experts, "act_fn", None)
    if getattr(act_fn, "_forward_hooks", None) or getattr(act_fn, "_forward_pre_hooks", None):
        return None  # the fused block would not call them
    act = _activation_of(act_fn)
    if act is None or not getattr(experts, "has_gate", True):
        return act if act_fn is not None else None
    if "_apply_gate" in experts.__dict__:  # set on this very module, not by its class
        return None
    values = {name: getattr(experts, name) for name in _LIMITS + _ALPHAS if _has(experts, name)}
    if not all(value is None or isinstance(value, (int, float)) for value in values.values()):
        return None
    limit, alpha = _number(values, _LIMITS), _number(values, _ALPHAS)
    for name, value in values.items():
        if value is not None and value != (limit if name in _LIMITS else alpha):
            return None  # two limits or two alphas: which of them the gate reads is not known
    values.update((name, None) for name in _SOFTCAPS if _has(experts, name) and getattr(experts, name) is None)
    attributes = tuple((name, value is not None) for name, value in values.items())
    index = _fused_gate(type(experts), tuple(act), attributes, interleaved)
    if index is None:
        return None
    gate = _gate_candidates(act, limit, alpha)[index]
    return gate if gate.limit is None or gate.limit > 0 else None
