"""Low-rank pairs of the experts block and of grouped layers, and what they compute with weights that are merged."""

from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
from cases import Case, Inputs
from poison import LAYOUTS as VIEWS
from torch import Tensor

WEIGHTS = {"gate_up_lora": "gate_up_proj", "down_lora": "down_proj"}


class Pairs(NamedTuple):
    """The LoRAs of a block or layer. given: of these arguments. shared: factors with an expert dimension of 1.

    adapters: L, 0 for one adapter without an index.
    """

    rank: int = 8
    given: Tuple[str, ...] = tuple(WEIGHTS)
    shared: str = ""
    adapters: int = 0


def make_lora(grouped_moe, pairs: Pairs, weight: Tensor, transposed: bool, scaling: float, dtype: torch.dtype):
    """One for a weight: of unit scale, so that it weighs as much as the weight itself."""
    experts, n, k = (weight.transpose(1, 2) if transposed else weight).shape
    many = (pairs.adapters,) if pairs.adapters else ()

    def factor(name: str, *shape: int) -> Tensor:
        made = torch.randn(*many, 1 if name in pairs.shared else experts, *shape, dtype=torch.float64)
        return (made / shape[-1] ** 0.5).to(weight.device, dtype)

    return grouped_moe.LoRA(factor("a", pairs.rank, k), factor("b", n, pairs.rank), scaling)


def make_loras(grouped_moe, case: Case, inputs: Inputs, pairs: Pairs, dtype: Optional[torch.dtype] = None) -> Dict:
    """The arguments of `grouped_mm_experts`: LoRAs and, of several adapters, the index.

    The index has each adapter, -1 and what is past the last one.
    """
    arguments = {}
    for (name, weight), scaling in zip(WEIGHTS.items(), (0.7, 1.25)):
        if name in pairs.given:
            weight = getattr(inputs, weight)
            arguments[name] = make_lora(grouped_moe, pairs, weight, case.transposed, scaling, dtype or weight.dtype)
    if pairs.adapters:
        arguments["adapter_index"] = make_index(pairs.adapters, case.T).to(inputs.hidden_states.device)
    return arguments


def _as_peft(factor: Tensor) -> Tensor:
    """(E, N, r) as a view of (N, r E)."""
    return factor.movedim(-3, -1).contiguous().movedim(-1, -3)


LAYOUTS = {
    "peft": _as_peft,
    "transposed": VIEWS["transposed"],
    "apart": VIEWS["columns-apart"],
    "guarded": VIEWS["guarded"],
}


def make_index(adapters: int, rows: int) -> Tensor:
    """(rows,) adapters, of which some are none."""
    return torch.randint(-1, adapters + 1, (rows,))


def loras_of(arguments: Dict) -> Dict:
    """The LoRAs and the index among arguments of the package."""
    return {name: arguments[name] for name in ("lora", *WEIGHTS, "adapter_index") if name in arguments}


def factors(arguments: Dict) -> Dict[str, Tensor]:
    """The factors by name."""
    loras = {name: lora for name, lora in arguments.items() if name.endswith("lora") and lora is not None}
    return {f"{name}.{field}": getattr(lora, field) for name, lora in loras.items() for field in ("a", "b")}


def with_factors(arguments: Dict, changed: Dict[str, Tensor]) -> Dict:
    """The arguments with other factors."""
    loras = {name: lora for name, lora in arguments.items() if f"{name}.a" in changed}
    loras = {name: lora._replace(a=changed[f"{name}.a"], b=changed[f"{name}.b"]) for name, lora in loras.items()}
    return {**arguments, **loras}


def merged(weight: Tensor, lora, adapter: Optional[int], transposed: bool) -> Tensor:
    """The weight with one adapter of a LoRA added, or with none where that is outside of them."""
    if lora is None:
        return weight
    a, b = lora.a, lora.b
    if adapter is not None:
        if not 0 <= adapter < a.shape[0]:
            return weight
        a, b = a[adapter], b[adapter]
    delta = lora.scaling * (b @ a)
    return weight + (delta.transpose(1, 2) if transposed else delta)


def over_adapters(function: Callable[[Optional[int], Optional[Tensor]], Tensor], arguments: Dict) -> Tensor:
    """The sum of function(adapter, which rows have it) over the adapters and none; of one adapter (None, None)."""
    index = arguments.get("adapter_index")
    if index is None:
        return function(None, None)
    return sum(function(adapter, index == adapter) for adapter in index.unique().tolist())
