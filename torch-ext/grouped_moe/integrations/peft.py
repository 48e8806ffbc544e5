"""LoRA of peft on the weights of experts (`LoraConfig(target_parameters=...)`), handed to the block as factors.

peft wraps an experts module in one ParamWrapper per weight, whose forward puts W + scaling B A in the place of W. A
wrapper that is built around experts of transformers becomes one of a subclass here, whose forward passes A and B to the
experts instead. Where it does not know what the wrapper computes, peft's own forward runs, and a warning says why.
"""

import inspect
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import MethodType
from typing import Callable, Dict, List, Optional, Set, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..block_scaled import CODES
from ..common import _compat
from ..common.autograd import is_plain
from ..operands import MAX_RANK, LoRA
from .transformers_fp8 import is_fp8
from .transformers_gate import constant
from .transformers_load import goes_by_interface, implementation_of

# Weight of an experts module -> the argument of `experts_forward` that takes its LoRA.
_ARGUMENTS = {"gate_up_proj": "gate_up_lora", "up_proj": "gate_up_lora", "down_proj": "down_lora"}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_OTHER_FORWARD = "the experts have another forward, which takes no factors"

_warned: Set[str] = set()


class Handed:
    """A LoRA on its way from a wrapper to the experts. taken: whether it has arrived."""

    def __init__(self, lora: LoRA):
        self.lora, self.taken = lora, False


def take(given: Union[LoRA, Handed, None]) -> Optional[LoRA]:
    """The LoRA that experts were called with; a wrapper that has handed it over learns of it."""
    if not hasattr(given, "taken"):
        return given
    given.taken = True
    return LoRA(*given.lora)  # the wrapper may be that of another build of this package


@lru_cache(maxsize=None)
def watch_wrappers() -> None:
    """Has peft's wrappers that are built from now on looked at."""
    register_module_module_registration_hook(_look_at)


def _look_at(parent: nn.Module, name: str, module: Optional[nn.Module]) -> None:
    """The hook: `module` becomes the child `name` of `parent`, which a compiler that traces this knows half-built."""
    if torch.compiler.is_compiling() or type(module).__name__ != "ParamWrapper" or type(module) is not _wrapper_class():
        return
    if goes_by_interface(module.get_base_layer()):
        module.__class__ = _subclass(type(module))


def _wrapper_class() -> Optional[type]:
    """peft's ParamWrapper, if peft is imported and has it."""
    return getattr(sys.modules.get("peft.tuners.lora"), "ParamWrapper", None)


@lru_cache(maxsize=None)
def _subclass(kind: type) -> type:
    """A class of wrappers that pass factors on, by the name of `kind`: peft tells its wrappers by that.

    An attribute `forward` of each wrapper would make it refer to itself, so that a model that is let go of stays until
    the next garbage collection.
    """

    class FusedWrapper(kind):
        def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
            experts = self.get_base_layer()
            lora = _lora_of(self, experts, kwargs)
            if lora is not None:
                handed = Handed(lora)
                out = _call(self.base_layer, experts, x, args, {**kwargs, _ARGUMENTS[self.parameter_name]: handed})
                if handed.taken:
                    return out
                self.forward_without_factors = _forward_of(experts)
                _warn(self, _OTHER_FORWARD)
            return super().forward(x, *args, **kwargs)

        def __reduce_ex__(self, protocol):
            return (_new_wrapper, (kind,), *super().__reduce_ex__(protocol)[2:])

    FusedWrapper.__name__, FusedWrapper.__qualname__ = kind.__name__, kind.__qualname__
    return FusedWrapper


def _call(base_layer: nn.Module, experts: nn.Module, x: Tensor, args: tuple, arguments: Dict[str, object]) -> Tensor:
    """Calls what a wrapper is around: another wrapper, or the experts.

    Where an exchange between ranks stands before the experts, which takes no other arguments, the experts have a dict
    `ep_loras`, which holds the LoRAs meanwhile: peft's own forward of the other wrapper would pass arguments on.
    """
    arguments.pop("adapter_names", None)  # None, as all other values are left to peft
    given = experts.__dict__.get("ep_loras")
    if given is None:
        return base_layer(x, *args, **arguments)
    given.update((name, arguments.pop(name)) for name in _ARGUMENTS.values() if name in arguments)
    try:
        return base_layer(x, *args, **arguments)
    finally:
        given.clear()


def _new_wrapper(kind: type) -> nn.Module:
    """For copy and pickle: an empty wrapper."""
    return _subclass(kind).__new__(_subclass(kind))


def _lora_of(wrapper: nn.Module, experts: nn.Module, arguments: Dict[str, object]) -> Optional[LoRA]:
    """What to call the experts with besides `arguments`, or None where peft's own forward has to run.

    It runs in each forward of each layer, so it looks at nothing twice: peft takes several us to find the experts.
    """
    if implementation_of(experts) is None:
        return None
    if not _is_known(getattr(experts, "is_transposed", False)):
        _warn(wrapper, "this version of peft has other factors, or computes something else of them")
        return None
    adapters = _active(wrapper)
    if not adapters or arguments.get("adapter_names") is not None:
        return None
    adapter = adapters[0]
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    reason = "several adapters are active" if len(adapters) > 1 else _obstacle(wrapper, experts, adapter, a, b)
    if reason is not None:
        _warn(wrapper, reason)
        return None
    return _as_lora(wrapper, adapter, a, b)


def loras_of(target: nn.Module) -> Dict[nn.Module, Dict[str, LoRA]]:
    """The experts that wrappers within a module hand LoRAs to, each with these by the names of their arguments."""
    kind, found = _wrapper_class(), {}
    for wrapper in target.modules() if kind is not None else ():
        if type(wrapper) is _subclass(kind):
            experts = wrapper.get_base_layer()
            lora = _lora_of(wrapper, experts, {})
            if lora is not None:
                found.setdefault(experts, {})[_ARGUMENTS[wrapper.parameter_name]] = lora
    return found


def _warn(wrapper: nn.Module, reason: str) -> None:
    """Once for each reason."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"grouped_moe: LoRA on {wrapper.parameter_name} is left to peft, which merges the weights of all experts "
            f"in each forward: {reason}",
            stacklevel=4,
        )


def _active(wrapper: nn.Module) -> List[str]:
    """The adapters that the wrapper's forward adds to the weight."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [adapter for adapter in wrapper.active_adapters if adapter in wrapper.lora_A]


def _as_lora(wrapper: nn.Module, adapter: str, a: Tensor, b: Tensor) -> LoRA:
    """Of factors as peft stores them: A (E r, K), B (N, r E), whether the weight is transposed or not.

    `ParamWrapper.get_delta_factors` would round them, and their gradients, to the dtype of the weight.
    """
    num_experts = wrapper.num_experts
    a, b = a.reshape(num_experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1)
    return LoRA(a, b, wrapper.scaling[adapter])


def _obstacle(wrapper: nn.Module, experts: nn.Module, adapter: str, a: Tensor, b: Tensor) -> Optional[str]:
    """Why the adapter, of which a and b are the factors, cannot be handed to the block, or None."""
    if wrapper.parameter_name not in _ARGUMENTS:
        return f"{wrapper.parameter_name} is none of {', '.join(_ARGUMENTS)}"
    if wrapper.num_experts == 1:
        return "there is one expert"
    weight = getattr(experts, wrapper.parameter_name)
    spread = getattr(weight, "placements", None) is not None  # of a DTensor
    if spread and not hasattr(experts, "ep_loras"):
        return (
            "the weight is sharded, and no ep_implementation of this package brings tokens to its rank (or fully_shard "
            "was applied to the experts alone, within the wrapper, which gathers their weights too late)"
        )
    if wrapper.__dict__.get("forward_without_factors") is _forward_of(experts) or not _may_take_factors(experts):
        return _OTHER_FORWARD
    if not _has_factors_alone(wrapper, adapter):
        return "the adapter is more than two factors and a scaling that is an int or a float"
    tensors = (a, b) if spread else (a, b, weight)
    weight_dtypes = (*_DTYPES, CODES) if is_fp8(experts) else _DTYPES
    known = weight.dtype in weight_dtypes and a.dtype in _DTYPES and b.dtype in _DTYPES
    if not known or not all(map(_can_be_handed_over, tensors)):
        return "the weight or a factor is sharded, quantized or of a dtype that the block does not compute in"
    if a.shape[0] > MAX_RANK * wrapper.num_experts:
        return f"the rank is above {MAX_RANK}"
    return None


def _can_be_handed_over(tensor: Tensor) -> bool:
    """Whether the block can take it: a tensor in memory, or what an exporter has in its place; not a DTensor."""
    kind = type(tensor)
    if kind in (Tensor, nn.Parameter):
        return True
    return _compat.is_transparent(kind) and getattr(tensor, "placements", None) is None


def _forward_of(experts: nn.Module) -> Callable:
    """What a call of the experts runs: an attribute of theirs, or their class's."""
    return experts.__dict__.get("forward", type(experts).forward)


def _may_take_factors(experts: nn.Module) -> bool:
    """Whether their forward takes arguments of these names; whether it passes them on shows when it runs."""
    forward = _forward_of(experts)
    if "ep_loras" in experts.__dict__:  # which it finds there
        return True
    if forward is type(experts).forward:
        return _takes_factors(forward)
    if isinstance(forward, MethodType):  # as kernels.kernelize puts one there
        return _takes_factors(forward.__func__)
    # A compiler cannot ask this one.
    return torch.compiler.is_compiling() or _has_parameters_for_factors(forward)


def _has_parameters_for_factors(forward: Callable) -> bool:
    # What a wrapper says of the function that it wraps is not what it takes itself.
    parameters = inspect.signature(forward, follow_wrapped=False).parameters
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or set(_ARGUMENTS.values()) <= parameters.keys()


# Of functions of classes, which may be kept, as they do not hold the experts.
_takes_factors = constant(_has_parameters_for_factors)


def _has_factors_alone(wrapper: nn.Module, adapter: str) -> bool:
    """Whether an adapter is two matrices without a bias: no dropout, and no variant such as DoRA.

    peft refuses all these on weights of experts, but a later version may not.
    """
    if adapter in wrapper.lora_variant or not isinstance(wrapper.scaling[adapter], (int, float)):
        return False
    for name, child in wrapper._modules.items():
        if child is None or name == "base_layer" or adapter not in child:
            continue
        part = getattr(child[adapter], "bias", None) if name in ("lora_A", "lora_B") else child[adapter]
        if part is not None and not isinstance(part, nn.Identity):
            return False
    return True


@torch.compiler.assume_constant_result
def _is_known(transposed: bool) -> bool:
    try:
        return _computes_our_sum(transposed)
    except _Unanswered:
        return False


@lru_cache(maxsize=None)
def _computes_our_sum(transposed: bool) -> bool:
    """Whether peft makes W + scaling b a of the weights of experts, with a and b as `_as_lora` takes them.

    Found by wrapping a small module by peft's own means and asking it for the weight that it then has.
    """

    class Experts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    def compare() -> bool:
        import peft

        model, (e, n, k) = nn.Module(), (2, 3, 5)
        model.experts = Experts()
        weight = torch.randn((e, k, n) if transposed else (e, n, k), dtype=torch.float64)
        model.experts.weight, model.experts.is_transposed = nn.Parameter(weight), transposed
        if model.experts.weight.is_meta:
            raise _Unanswered
        options = {"r": 4, "lora_alpha": 6, "target_modules": [], "init_lora_weights": False}
        peft.get_peft_model(model, peft.LoraConfig(target_parameters=["experts.weight"], **options))
        (adapter,) = _active(model.experts)
        stored = model.experts.lora_A[adapter].weight, model.experts.lora_B[adapter].weight
        a, b, scaling = _as_lora(model.experts, adapter, *stored)
        delta = scaling * (b @ a)
        want = weight + (delta.transpose(1, 2) if transposed else delta)
        merged = model.experts(torch.ones((), dtype=torch.float64))
        return _has_factors_alone(model.experts, adapter) and torch.allclose(merged, want)

    return _ask_aside(compare)


def factors_in_place(experts: nn.Module, name: str, transposed: bool) -> Optional[Tuple[Tensor, LoRA]]:
    """The weight of that name and its LoRA, where peft has put the sum of both in the place of the weight.

    So it is where the package is registered after peft has wrapped the model. None if there is no such sum, or if it is
    another one.
    """
    parametrizations = experts._modules.get("parametrizations")
    steps = parametrizations[name] if parametrizations is not None and name in parametrizations else ()
    if len(steps) != 1 or type(steps[0]).__name__ != "_LoraFactorsProxy" or not _adds_factors(type(steps[0])):
        return None
    a, b, scaling = steps[0].rhs, steps[0].lhs, steps[0].scaling
    if transposed:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    if a.shape[1] > MAX_RANK or not isinstance(scaling, (int, float)):
        return None
    weight = steps.original
    if not weight.requires_grad and not torch.compiler.is_compiling() and is_plain(weight):
        # Each forward of peft's counts as a change of it, also one before the backward of this one.
        weight = weight.data
    return weight, LoRA(a, b, scaling)


@constant
def _adds_factors(kind: type) -> bool:
    """Whether peft's class of such sums makes W + scaling lhs rhs of a weight W."""

    def compare() -> bool:
        shapes = (2, 3, 5), (2, 3, 4), (2, 4, 5)
        weight, lhs, rhs = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        return torch.allclose(kind(lhs, rhs, 1.5)(weight), weight + 1.5 * lhs @ rhs)

    return _ask_aside(compare)


class _Unanswered(Exception):
    """Modules get parameters without values here, so that nothing shows: another call has to ask again."""


def _ask_aside(question: Callable[[], bool]) -> bool:
    """The answer in a thread of its own, where no mode or transform of the caller's holds; False if the question fails.

    Random numbers leave no trace. `_Unanswered` is passed on.
    """

    def answer() -> bool:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return question()

    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(answer).result()
        except _Unanswered:
            raise
        except Exception:  # whatever is not as it was
            return False
