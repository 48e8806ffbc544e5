"""Steps through products with rows of 8-bit floats, with low-rank pairs beside them, in fp64 on the same codes."""

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from pairs import factors, with_factors
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


def linear(rows: Tensor, weight: Tensor, bounds: Sequence[int], bias=None, lora=None, quantizes: bool = True) -> Tensor:
    """`grouped_linear` in fp64, of groups between these bounds."""
    y = torch.zeros(len(rows), weight.shape[1], dtype=torch.float64, device=rows.device)
    for group, (first, end) in enumerate(zip(bounds, bounds[1:])):
        if end > first:
            part = product(rows[first:end].double(), weight[group], pair_of(lora, group, None), quantizes, False)
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
    """Low-rank pairs. adapters: L, 0 for one adapter. turned: whether factors are stored the other way round.

    as_peft: whether the experts of b lie side by side, as in peft's (N, r E).
    """

    rank: int
    adapters: int = 0
    dtype: torch.dtype = BF16
    given: Tuple[str, ...] = ("gate_up_lora", "down_lora")
    shared: bool = False
    turned: bool = False
    as_peft: bool = False


RANKS = {
    "none": None,
    "16": Ranks(16),
    "fp32-72": Ranks(72, dtype=torch.float32),
    "shared-200": Ranks(200, shared=True),
    "adapters": Ranks(24, adapters=3),
    "many-adapters": Ranks(64, adapters=6),
    "up": Ranks(8, given=("gate_up_lora",)),
    "down": Ranks(8, given=("down_lora",)),
    "1": Ranks(1),
    "turned": Ranks(24, turned=True),
    "as-peft": Ranks(16, as_peft=True),
}


def make_pairs(grouped_moe, case: Case, ranks: Optional[Ranks], device: str = "cuda") -> dict:
    """The LoRAs, as heavy as the weights, and the adapters of tokens, some of which have none."""
    if ranks is None:
        return {}
    pairs = {}
    for name, n, k in (("gate_up_lora", 2 * case.I, case.H), ("down_lora", case.H, case.I)):
        if name in ranks.given:
            leading = (*([ranks.adapters] if ranks.adapters else []), 1 if ranks.shared else case.E)
            a, b = (
                (torch.randn(*leading, *shape, device=device) / shape[1] ** 0.5).to(ranks.dtype)
                for shape in ((ranks.rank, k), (n, ranks.rank))
            )
            if ranks.turned:
                a, b = (factor.mT.contiguous().mT for factor in (a, b))
            if ranks.as_peft:
                b = b.permute(1, 2, 0).contiguous().permute(2, 0, 1)
            pairs[name] = grouped_moe.LoRA(a.requires_grad_(), b.requires_grad_(), 0.75)
    if ranks.adapters:
        pairs["adapter_index"] = torch.randint(-1, ranks.adapters, (case.T,), device=device)
    return pairs


def with_leaves(given: Inputs) -> Inputs:
    """Hidden states and routing weights as leaves that require gradients."""
    return given._replace(x=given.x.detach().requires_grad_(), weights=given.weights.detach().requires_grad_())


def gradients(out: Tensor, given: Inputs, pairs: dict, dout: Tensor) -> Dict[str, Tensor]:
    """Of hidden states, routing weights and factors, by name."""
    leaves = {"dx": given.x, "dweights": given.weights}
    for name, lora in pairs.items():
        if name != "adapter_index":
            leaves.update({f"{name}.a": lora.a, f"{name}.b": lora.b})
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
