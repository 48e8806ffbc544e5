"""The experts implementation for transformers: reads an experts module and calls the block on its weights.

The fused block runs where it computes the very same function as the module; otherwise the grouped building blocks run
with the module's own gate (and post-expert norm) between them.
"""

from functools import partial
from typing import Any, Iterable, List, Mapping, Optional, Tuple, Union

import torch
from torch import Tensor

from ..block_scaled import Weight
from ..common import checks
from ..common.numbers import as_fraction
from ..experts import grouped_mm_experts
from ..grouped_linear import grouped_linear
from ..operands import LoRA
from ..permute import combine_rows, gather_rows
from ..routing import route
from .peft import Handed, factors_in_place, take, watch_wrappers
from .transformers_ep import Limits, ep_implementations, register_ep
from .transformers_fp8 import has_scales, scaled_weight
from .transformers_gate import apply_gate, check_known, fused_activation, local_parameter, post_expert
from .transformers_load import Share, watch


def _weight(
    experts: torch.nn.Module, name: str, lora: Optional[LoRA], transposed: bool
) -> Tuple[Weight, Optional[LoRA]]:
    """The weight of that name and what is to be added to it: `lora`, or what peft has put in its place."""
    if has_scales(experts, name):
        return scaled_weight(experts, name), lora
    in_place = None if lora is not None else factors_in_place(experts, name, transposed)
    return (local_parameter(experts, name), lora) if in_place is None else in_place


def capacity_of(num_slots: Union[int, Tensor], share: Share) -> Optional[int]:
    """The slots' share, rounded up, or 1 without slots. Their number may be symbolic.

    None for all of them in a trace of `torch.jit`, which has tensors for sizes.
    """
    if isinstance(num_slots, Tensor):
        return None
    numerator, denominator = share
    return max(1, -(-num_slots * numerator // denominator))


def experts_forward(
    self: torch.nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    share: Optional[Share] = None,
    gate_up_lora: Union[LoRA, Handed, None] = None,
    down_lora: Union[LoRA, Handed, None] = None,
) -> Tensor:
    """The forward of a transformers experts module; signature and attributes are transformers'.

    hidden_states: (T, H). top_k_index, top_k_weights: (T, top_k); ids outside the module's num_experts are sentinels.
    share: numerator and denominator of the share of the slots that is the fused block's capacity; None for none.
    gate_up_lora, down_lora: what is added to the weights. Returns (T, H) in the dtype of hidden_states.
    """
    gated, transposed = getattr(self, "has_gate", True), getattr(self, "is_transposed", False)
    name = "gate_up_proj" if gated else "up_proj"
    check_known(self)
    up, gate_up_lora = _weight(self, name, take(gate_up_lora), transposed)
    down, down_lora = _weight(self, "down_proj", take(down_lora), transposed)
    has_bias = getattr(self, "has_bias", False)
    up_bias = local_parameter(self, name + "_bias") if has_bias else None
    down_bias = local_parameter(self, "down_proj_bias") if has_bias else None
    interleaved = gated and not getattr(self, "is_concatenated", True)
    if self.num_experts != up.shape[0]:
        raise ValueError(f"num_experts: expected {up.shape[0]} as in {name}, got {self.num_experts}")
    x = hidden_states
    if isinstance(up, Tensor):
        checks.check_compute_dtype(name, up)
        x = x.to(up.dtype)
    after = post_expert(self)
    activation = fused_activation(self, interleaved) if after is None else None
    if activation is not None:
        out = grouped_mm_experts(
            x, top_k_index, top_k_weights, up, down, gate_up_proj_bias=up_bias, down_proj_bias=down_bias,
            gate_up_lora=gate_up_lora, down_lora=down_lora, activation=activation, gated=gated,
            interleaved=interleaved, transposed=transposed,
            capacity=None if share is None else capacity_of(top_k_index.numel(), share),
        )  # fmt: skip
        return out.to(hidden_states.dtype)
    routing = route(top_k_index, self.num_experts)
    rows, splits = gather_rows(x, routing), routing.expert_offsets
    rows = grouped_linear(rows, up, splits, up_bias, lora=gate_up_lora, transposed=transposed)
    rows = apply_gate(self, rows, interleaved) if gated else self.act_fn(rows)
    rows = grouped_linear(rows.to(x.dtype), down, splits, down_bias, lora=down_lora, transposed=transposed)
    if after is not None:
        rows = after(rows)
    return combine_rows(rows, top_k_weights, routing).to(hidden_states.dtype)


def _share(capacity: object) -> Optional[Share]:
    """The capacity as a fraction. Raises TypeError or ValueError unless it is a share or None."""
    if capacity is None:
        return None
    if not isinstance(capacity, (int, float)) or isinstance(capacity, bool):
        raise TypeError(f"capacity: expected a float or None, got {type(capacity).__name__}")
    if not 0 < capacity <= 1:
        raise ValueError(f"capacity: expected a share of the slots above 0 and up to 1, got {capacity}")
    return as_fraction(capacity)


def _check_name(name: object, registries: Iterable[Mapping]) -> None:
    """Raises TypeError or ValueError unless the name is a string that transformers does not use itself."""
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {type(name).__name__}")
    functions = [registry.get(name) for registry in registries]
    modules = [getattr(getattr(function, "func", function), "__module__", "") for function in functions]
    if name in ("", "eager") or any(module.startswith("transformers.") for module in modules):
        raise ValueError(f"name: expected one that transformers does not use itself, got {name!r}")


def _experts_registries() -> List[Any]:
    """Those of transformers. Raises ImportError where there is none."""
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            "register_experts_implementation: expected transformers 5.13 or later to be installed "
            f"(pip install 'transformers>=5.13'), and all that it imports, got: {error}"
        ) from error
    return [ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS]


def register_experts_implementation(
    name: str = "grouped_moe",
    capacity: Optional[float] = None,
    ep_max_tokens: Optional[int] = None,
    ep_capacity_factor: Optional[float] = None,
) -> str:
    """Registers the package with transformers as experts_implementation=`name` and returns the name.

    Then `AutoModelForCausalLM.from_pretrained(..., experts_implementation=name)` or
    `model.set_experts_implementation(name)` use it, in training and inference. The choice is not saved with a model:
    it has to be made again whenever the model is loaded. Calling this twice is harmless: the last arguments hold.

    From then on a model with this implementation is looked at as it is built, before its weights load: experts that
    do not go by transformers' ExpertsInterface, and so keep their own code, are warned of; those with steps that this
    version does not know, and FP8 experts whose scales are not per block or per expert, raise ValueError.
    `set_experts_implementation` on a model that is there already warns of nothing; what this package cannot run raises
    when it runs. LoRA that peft puts on the weights of experts from then on (`LoraConfig(target_parameters=...)`) runs
    in the block, without merged weights, on FP8 ones, too; what of it is not known is left to peft, with a warning.
    Registration hooks for modules, which PyTorch keeps for the whole process, do this.

    From transformers 5.23 on `DistributedConfig(ep_implementation=name)` sends each token once to every rank that has
    one of its experts, in buffers of a fixed size: see docs/expert-parallelism.md.

    capacity: the share of the T top_k slots, above 0 and up to 1, that the fused block makes room for, rounded up to
    whole slots; more local slots than that are an error, as in `grouped_mm_experts`. For expert parallelism with
    sentinels, where a rank has a share of the experts: that share and headroom, more for small batches. Not for
    all-to-all dispatch, where every slot that arrives is local. Modules that the fused block does not compute make room
    for all slots.

    ep_max_tokens: the most tokens that a call has on any rank; more are an error on all ranks (on ROCm on that one
    alone, for which the others wait). Without it ranks with batches of their own compare their numbers of tokens in
    each call, for which the host waits.
    ep_capacity_factor: the size of the buffers, relative to what they hold if all ranks get equally many tokens; what
    is past it is dropped, and counted in `ep_dropped_slots` of the experts. Without it there is room for all.

    Raises TypeError or ValueError that names the argument, also for a name that transformers uses itself; ImportError
    without a transformers that has an ExpertsInterface, or with limits for expert parallelism that it has no place for.
    """
    share, limits = _share(capacity), Limits(ep_max_tokens, ep_capacity_factor)
    limits.check()
    forward = experts_forward if share is None else partial(experts_forward, share=share)
    registries = _experts_registries()
    _check_name(name, [ep_implementations(), *registries])
    register_ep(name, limits)
    for registry in registries:
        registry.register(name, forward)
    watch(name, share)
    watch_wrappers()
    return name
