"""Steps through products with rows of 8-bit floats, with low-rank pairs beside them, in fp64 on the same codes."""

from typing import Dict, List, NamedTuple, Optional, Sequence

import torch
from pairs import LAYOUTS, Pairs, factors, make_index, make_lora, with_factors
from quantized import BF16, Case, Inputs, rounded
from torch import Tensor
from torch.nn.functional import silu


class Pair(NamedTuple):
    """A LoRA of one expert of a token's adapter, or of none."""

    a: Optional[Tensor]
    b: Optional[Tensor]
    scaling: float = 1.0

    def __call__(self, rows: Tensor) -> Tensor:
        return 0.0 if self.a is None else self.scaling * (rows @ self.a.T @ self.b.T)


def product(rows: Tensor, weight: Tensor, pair: Pair, quantizes: bool, of_codes: bool) -> Tensor:
    """weight rows plus the pair. of_codes: whether the pair, too, multiplies rounded rows."""
    if not quantizes:
        return rows @ weight.T + pair(rows)
    codes = rows + (rounded(rows) - rows).detach()  # whose gradient passes
    y = codes @ weight.T
    if y.requires_grad:
        y.register_hook(rounded)
    return y + pair(codes if of_codes else rows)


def linear(rows: Tensor, weight: Tensor, bounds: Sequence[int], bias=None, lora=None) -> Tensor:
    """`grouped_linear` in fp64, of groups between these bounds."""
    y = torch.zeros(len(rows), weight.shape[1], dtype=torch.float64, device=rows.device)
    for group, (first, end) in enumerate(zip(bounds, bounds[1:])):
        if end > first:
            part = product(rows[first:end].double(), weight[group], pair_of(lora, group, None), True, False)
            part = part if bias is None else part + bias[group].double()
            y = y.index_add(0, torch.arange(first, end, device=rows.device), part)
    return y


def reference(case: Case, given: Inputs, quantizes: bool = True, pairs: Optional[dict] = None) -> Tensor:
    """The block in fp64. quantizes: rows and their gradients become codes where weights are."""
    up, down = given.up.dequantize(torch.float64), given.down.dequantize(torch.float64)
    x, weights, pairs = given.x.double(), given.weights.double(), pairs or {}
    adapters = pairs.get("adapter_index")
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(case.E):
        for adapter in [None] if adapters is None else adapters.unique().tolist():
            chosen = given.ids == expert
            if adapter is not None:
                chosen = chosen & (adapters == adapter)[:, None]
            token, choice = chosen.nonzero(as_tuple=True)
            of_up, of_down = (pair_of(pairs.get(name), expert, adapter) for name in ("gate_up_lora", "down_lora"))
            preact = product(x[token], up[expert], of_up, quantizes, of_codes=False)
            gate, value = preact.chunk(2, 1)
            if case.limit is not None:
                gate, value = gate.clamp(max=case.limit), value.clamp(-case.limit, case.limit)
            y = product(silu(gate) * value, down[expert], of_down, quantizes, of_codes=True)
            out = out.index_add(0, token, y * weights[token, choice, None])
    return out


def pair_of(lora, expert: int, adapter: Optional[int]) -> Pair:
    if lora is None or (adapter is not None and not 0 <= adapter < lora.a.shape[0]):
        return Pair(None, None)
    a, b = (factor if adapter is None else factor[adapter] for factor in lora[:2])
    return Pair(*(factor[min(expert, factor.shape[0] - 1)] for factor in (a, b)), lora.scaling)


class Ranks(NamedTuple):
    """Low-rank pairs in a dtype. layout: of `pairs.LAYOUTS`; as peft has it, b alone."""

    pairs: Pairs
    dtype: torch.dtype = BF16
    layout: str = ""


RANKS = {
    "none": None,
    "16": Ranks(Pairs(16)),
    "fp32-72": Ranks(Pairs(72), torch.float32),
    "shared-200": Ranks(Pairs(200, shared="ab")),
    "adapters": Ranks(Pairs(24, adapters=3)),
    "many-adapters": Ranks(Pairs(64, adapters=6)),
    "up": Ranks(Pairs(given=("gate_up_lora",))),
    "down": Ranks(Pairs(given=("down_lora",))),
    "1": Ranks(Pairs(1)),
    "turned": Ranks(Pairs(24), layout="transposed"),
    "as-peft": Ranks(Pairs(16), layout="peft"),
}


def make_pairs(grouped_moe, given: Inputs, ranks: Optional[Ranks]) -> dict:
    """The LoRAs, whose factors require gradients, and the adapters of tokens, some of which have none."""
    if ranks is None:
        return {}
    weights, made = {"gate_up_lora": given.up.data, "down_lora": given.down.data}, {}
    for name in ranks.pairs.given:
        made[name] = make_lora(grouped_moe, ranks.pairs, weights[name], False, 0.75, ranks.dtype)
    named = factors(made)
    for name in named if ranks.layout else ():
        if ranks.layout != "peft" or name.endswith("b"):
            named[name] = LAYOUTS[ranks.layout](named[name])
    made = with_factors(made, {name: factor.requires_grad_() for name, factor in named.items()})
    if ranks.pairs.adapters:
        made["adapter_index"] = make_index(ranks.pairs.adapters, len(given.x)).to(given.x.device)
    return made


def with_leaves(given: Inputs) -> Inputs:
    """Hidden states and routing weights as leaves that require gradients."""
    return given._replace(x=given.x.detach().requires_grad_(), weights=given.weights.detach().requires_grad_())


def gradients(out: Tensor, given: Inputs, pairs: dict, dout: Tensor) -> Dict[str, Tensor]:
    """Of hidden states, routing weights and factors, by name."""
    leaves = {"dx": given.x, "dweights": given.weights, **factors(pairs)}
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout)))


def references(case: Case, given: Inputs, pairs: dict, dout: Tensor) -> List[Dict[str, Tensor]]:
    """Output and gradients in fp64: where rows and their gradients become codes, and of rows as they are."""
    wide = with_factors(pairs, {name: t.detach().double().requires_grad_() for name, t in factors(pairs).items()})
    found = []
    for quantizes in (True, False):
        leaves = with_leaves(given._replace(x=given.x.double(), weights=given.weights.double()))
        out = reference(case, leaves, quantizes, wide)
        found.append({"out": out.detach(), **gradients(out, leaves, wide, dout.double())})
    return found
