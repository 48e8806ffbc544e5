"""What an experts module of transformers computes between and after its GEMMs, found out by asking its own methods.

A step that is found to be the fused block's own is left to it; any other step stays the module's. A module with a step
that this package does not know is refused.
"""

import inspect
from functools import lru_cache, partial
from types import MethodType
from typing import Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.nn.utils.parametrize import type_before_parametrizations

from ..common import _compat
from ..common import activation as formulas
from ..common.activation import Activation, known_fields

# Class of a module's act_fn (torch.nn and transformers.activations) -> the name of the activation it computes.
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "QuickGELUActivation": "quick_gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}

# What experts modules call the limit and the alpha of their gates. A gate with soft caps is ours where these are None.
_PARAMETERS = {
    "limit": "limit", "swiglu_limit": "limit", "alpha": "alpha", "swiglu_alpha": "alpha", "gate_softcap": None,
    "up_softcap": None,
}  # fmt: skip
_TRIALS = ({"limit": 0.75, "alpha": 1.3}, {"limit": 2.5, "alpha": 0.8})  # to see what a gate makes of them

# Where a module keeps its hooks, whose backward ones may change gradients.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# Options of transformers' @use_experts_implementation that are honoured here.
_OPTIONS = (
    "experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate",
    "has_post_expert_norm",
)  # fmt: skip


def constant(function: Callable) -> Callable:
    """Caches what a function finds out, of real values, and makes that a constant for torch.compile.

    A compiler has to see the mark outside of the cache, and arguments that are constants: named tuples are not, nor are
    floats that differ between layers. Its fake tensors, or an exporter's, have no values to compare.
    """

    @lru_cache(maxsize=None)
    def cached(*args):
        with _compat.real_values():
            return function(*args)

    @torch.compiler.assume_constant_result
    def constant_of(*args):
        return cached(*args)

    constant_of.cache_clear = cached.cache_clear
    return constant_of


def local_part(parameter: Tensor) -> Tensor:
    """The rank's own part of a DTensor, differentiably; any other tensor as it is."""
    # Dynamo, which knows the placements of one, finds no to_local by getattr or hasattr.
    return parameter if getattr(parameter, "placements", None) is None else parameter.to_local()


def local_parameter(experts: torch.nn.Module, name: str) -> Tensor:
    """The parameter of that name; of a DTensor the rank's own part, differentiably.

    Raises TypeError for one of a subclass with operations of its own, as those for quantization have: the block would
    not call them. torchao's for FP8 training replace one, which is never called here, and pass for plain in all others.
    Raises ValueError for a part of gate and up, one after the other, that has not as much of both.
    """
    whole = getattr(experts, name)
    parameter = local_part(whole)
    if parameter is not whole and name.startswith("gate_up_proj") and getattr(experts, "is_concatenated", True):
        _check_halves(name, whole, whole.dim() - 1 if getattr(experts, "is_transposed", False) else 1)
    kind = type(parameter)
    if kind is not torch.nn.Parameter and kind is not Tensor and _has_operations(kind):
        raise TypeError(
            f"{name}: expected a plain tensor or a DTensor, got {kind.__name__}, whose own operations (quantization, "
            "FP8 training) are not supported; leave this parameter out of the conversion, dequantize it, or choose "
            "another experts_implementation, such as 'eager'"
        )
    return parameter


def _check_halves(name: str, whole: Tensor, dim: int) -> None:
    """Raises ValueError for a DTensor of gate and up in `dim` that is cut across both; strided ones are cut in each."""
    for i, placement in enumerate(whole.placements):
        cut = type(placement).__name__ == "Shard" and placement.is_shard(dim)
        if cut and whole.device_mesh.size(i) > 1:
            raise ValueError(
                f"{name}: expected parts with as much of gate as of up, got Shard({dim}), by which a rank has"
                " one of them; let transformers shard the model (DistributedConfig(tp_size=...)), or shard the experts"
            )


@constant
def _has_operations(kind: type) -> bool:
    """Whether a class of tensors, but PyTorch's own for tracing and sharding, overrides what operations do."""
    if _compat.is_transparent(kind):
        return False
    # Tensor's keeps the class of results; Parameter's does nothing.
    function, *plain = (
        getattr(each.__torch_function__, "__func__", each.__torch_function__)
        for each in (kind, Tensor, torch.nn.Parameter)
    )
    return function not in plain or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


@constant
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


@constant
def _unknown_methods(experts_class: type) -> Tuple[str, ...]:
    """The class's methods named as transformers names the steps of an experts module, but for those called here."""
    known = ("_apply_gate", "_apply_post_expert")
    return tuple(name for name in dir(experts_class) if name.startswith("_apply_") and name not in known)


def check_known(experts: torch.nn.Module) -> None:
    """Raises ValueError for a module whose output depends on steps or options that this package does not know."""
    options = _unknown_options()
    unknown = [name for name, default in options if getattr(experts, name, default) != default]
    # Parametrizations give each module a class of its own.
    unknown = [*_unknown_methods(type_before_parametrizations(experts)), *unknown]
    if unknown:
        raise _refusal(experts, unknown)


def _refusal(experts: torch.nn.Module, unknown: Sequence[str]) -> ValueError:
    return ValueError(
        f"{type(experts).__name__}: expected an experts module of a kind that this version of grouped_moe knows, "
        f"got one with {' and '.join(unknown)}; choose another experts_implementation, such as 'eager'"
    )


class _Attributes:
    """Stands in for a module whose methods may read these attributes alone.

    It lacks the parameters of gates as its module does. Whatever else a method asks for ends it, also where `getattr`
    and `hasattr` would take an AttributeError for an answer.
    """

    def __init__(self, **attributes: object):
        self.__dict__.update(attributes)

    def __getattr__(self, name: str):
        raise AttributeError(name) if name in _PARAMETERS else LookupError(name)


@constant
def _returns_its_argument(method: Callable) -> bool:
    """Whether a method of a class, without a norm, hands on the rows that it gets."""
    values = torch.linspace(-2.0, 3.0, 12, device="cpu").reshape(3, 4)
    rows = values.clone()
    try:
        return method(_Attributes(has_post_expert_norm=False), rows) is rows and torch.equal(rows, values)
    except Exception:  # it reads what is not there
        return False


def post_expert(experts: torch.nn.Module) -> Optional[Callable]:
    """What is applied to the experts' output rows before the routing weights, or None.

    transformers 5.23 has an option for a norm there. A method in its place, as a later one may have, is any step. Of a
    module with both it is not clear what applies: ValueError.
    """
    flagged = getattr(experts, "has_post_expert_norm", False)
    method = getattr(type(experts), "_apply_post_expert", None)
    if "_apply_post_expert" not in experts.__dict__ and (method is None or _returns_its_argument(method)):
        return experts.post_expert_norm if flagged else None
    if flagged:
        raise _refusal(experts, ("has_post_expert_norm", "_apply_post_expert"))
    return experts._apply_post_expert


def apply_gate(experts: torch.nn.Module, gate_up: Tensor, interleaved: bool) -> Tensor:
    """What the module makes of the rows of its up-projection.

    A class that transformers did not mark may have no gate of its own: then it is act_fn(gate) * up, silu without one.
    """
    own = getattr(experts, "_apply_gate", None)
    if own is not None:
        return own(gate_up)
    (gate, up), act_fn = formulas.split(gate_up, True, interleaved), getattr(experts, "act_fn", None)
    return (torch.nn.functional.silu if act_fn is None else act_fn)(gate) * up


def _gate_candidates(act: Activation, limit: Optional[float] = None, alpha: Optional[float] = None) -> List[Activation]:
    """The gates that experts modules are known to compute from their activation, limit and alpha."""
    if limit is None:
        return [act]
    clamped = Activation(act.name, act.alpha, limit, act.up_offset)
    return [act, clamped] if alpha is None else [act, clamped, Activation("silu", alpha, limit, 1.0)]


@constant
def _probe_gate(
    apply_gate: Callable, act_name: str, attributes: Tuple[Tuple[str, bool], ...], interleaved: bool
) -> Optional[int]:
    """Which of `_gate_candidates` a class's `_apply_gate` is, or None. attributes: names, and whether not None.

    Found by evaluating the gate in fp64, for several limits and alphas, on a grid that is fine where activations differ
    and wide enough to see constants at which it clamps, the largest number of fp16 among them. A gate that reads
    anything but its activation, limit and alpha, or computes anything else on them, is left to the module.
    """
    act, fine = Activation(*known_fields(act_name)), torch.linspace(-3.0, 3.0, 41, dtype=torch.float64, device="cpu")
    points = torch.cat((fine, 4.0 * fine, 1e3 * fine, 1e5 * fine))
    gate, up = (grid.reshape(1, -1) for grid in torch.meshgrid(points, points * 0.9 + 0.01, indexing="ij"))
    gate_up = torch.stack((gate, up), dim=-1).reshape(1, -1) if interleaved else torch.cat((gate, up), dim=-1)
    act_fn = partial(formulas.activate, name=act.name, alpha=act.alpha)
    found = []
    for trial in _TRIALS:
        values = {name: trial[_PARAMETERS[name]] if is_set else None for name, is_set in attributes}
        given = {_PARAMETERS[name]: value for name, value in values.items() if value is not None}
        try:
            rows = apply_gate(_Attributes(act_fn=act_fn, **values), gate_up).to(gate.dtype)
        except Exception:  # whatever it lacks there
            return None
        expected = [formulas.forward(gate_up, each, True, interleaved) for each in _gate_candidates(act, **given)]
        # 1e-6: a gate evaluated in fp32 is the same function, another constant is not.
        found.append([rows.shape == e.shape and torch.allclose(rows, e, rtol=1e-6, atol=1e-6) for e in expected])
    matches = [all(trials) for trials in zip(*found)]
    return matches.index(True) if True in matches else None


def _name_of(act_fn: object) -> Optional[str]:
    """The name of the activation that a module's act_fn computes, or None if it is not one of ours."""
    if act_fn is None or act_fn is torch.nn.functional.silu:
        return "silu"
    kind = type(act_fn)
    known = kind.__module__.startswith(("torch.nn.", "transformers.activations"))
    known = known and not _is_patched(act_fn) and _is_method_of(kind, kind.forward)
    return _ACTIVATIONS.get(kind.__name__) if known else None


def _is_patched(act_fn: torch.nn.Module) -> bool:
    """Whether it has a forward of its own, but for one that the kernels package put there to compute the same."""
    forward = act_fn.__dict__.get("forward")
    return forward is not None and not (isinstance(forward, MethodType) and hasattr(act_fn, "kernel_layer_name"))


@constant
def _is_method_of(kind: type, function: Callable) -> bool:
    """Whether a function is a method that the class was written with, and none that somebody put in its place."""
    return (function.__module__, function.__qualname__) == (kind.__module__, f"{kind.__qualname__}.{function.__name__}")


def fused_activation(experts: torch.nn.Module, interleaved: bool) -> Optional[Activation]:
    """The activation with which the fused block computes what `experts` does up to its down-projection, or None."""
    act_fn = getattr(experts, "act_fn", None)
    if any(getattr(act_fn, hooks, None) for hooks in _HOOKS):
        return None  # the fused block would not call them
    act_name = _name_of(act_fn)
    act = None if act_name is None else Activation(*known_fields(act_name))
    if act is None or not getattr(experts, "has_gate", True):
        return act if act_fn is not None else None
    if "_apply_gate" in experts.__dict__:  # set on this very module, not by its class
        return None
    if not hasattr(type(experts), "_apply_gate"):
        return act  # see `apply_gate`
    given, attributes = {}, []
    for name, role in _PARAMETERS.items():
        # Not hasattr(experts, name): what a module lacks takes it long to look for.
        if not (name in experts.__dict__ or hasattr(type(experts), name)):
            continue
        value = getattr(experts, name)
        if value is None:
            attributes.append((name, False))
        elif role is not None:
            # Of two limits or two alphas it is not known which the gate reads.
            if not isinstance(value, (int, float)) or given.setdefault(role, value) != value:
                return None
            attributes.append((name, True))
    index = _probe_gate(type(experts)._apply_gate, act_name, tuple(attributes), interleaved)
    if index is None:
        return None
    gate = _gate_candidates(act, **given)[index]
    return gate if gate.limit is None or gate.limit > 0 else None
