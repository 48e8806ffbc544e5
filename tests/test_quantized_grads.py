"""Gradients through products with rows of 8-bit floats, and low-rank pairs beside them: fp64 on the same codes."""

from typing import Dict, NamedTuple, Optional, Tuple

import pytest
import torch
from compare import assert_bitwise
from poison import poisoned_allocations
from quantized import BF16, CASES, ROWS, Case, Inputs, error, hopper, make, rounded, run
from torch import Tensor
from torch.nn.functional import silu

# Relative errors in norm, against the same codes. Of a product, tensor cores keep 14 bits of a sum. What is rounded to
# bf16 in a backward, the pre-activation and the activation's gradient, makes one code in fifty another one.
PRODUCT, GRADIENT = 1.6e-2, 2.5e-2


class Rounded(torch.autograd.Function):
    """Rows as codes times scales; their gradient passes."""

    @staticmethod
    def forward(ctx, rows):
        return rounded(rows)

    @staticmethod
    def backward(ctx, grad):
        return grad


class RoundedGrad(torch.autograd.Function):
    """Rows as they are; their gradient becomes codes times scales."""

    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):
        return rounded(grad)


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
    codes = Rounded.apply(rows)
    return RoundedGrad.apply(codes @ weight.T) + pair(codes if of_codes else rows)


def reference(case: Case, given: Inputs, pairs: Dict[str, object], adapters, quantizes: bool) -> Tensor:
    """The block in fp64. quantizes: rows and their gradients become codes where weights are."""
    up, down = given.up.dequantize(torch.float64), given.down.dequantize(torch.float64)
    out = torch.zeros(given.x.shape, dtype=torch.float64, device="cuda")
    for expert in range(case.E):
        for adapter in [None] if adapters is None else adapters.unique().tolist():
            chosen = given.ids == expert
            if adapter is not None:
                chosen = chosen & (adapters == adapter)[:, None]
            token, choice = chosen.nonzero(as_tuple=True)
            of_up, of_down = (pair_of(pairs.get(name), expert, adapter) for name in ("gate_up_lora", "down_lora"))
            preact = product(given.x[token], up[expert], of_up, quantizes, of_codes=False)
            gate, value = preact.chunk(2, 1)
            if case.limit is not None:
                gate, value = gate.clamp(max=case.limit), value.clamp(-case.limit, case.limit)
            y = product(silu(gate) * value, down[expert], of_down, quantizes, of_codes=True)
            out = out.index_add(0, token, y * given.weights[token, choice, None])
    return out


def pair_of(lora, expert: int, adapter: Optional[int]) -> Pair:
    if lora is None or (adapter is not None and not 0 <= adapter < lora.a.shape[0]):
        return Pair(None, None)
    a, b = (factor if adapter is None else factor[adapter] for factor in lora[:2])
    return Pair(*(factor[min(expert, factor.shape[0] - 1)] for factor in (a, b)), lora.scaling)


class Ranks(NamedTuple):
    """Low-rank pairs. adapters: L, 0 for one adapter."""

    rank: int
    adapters: int = 0
    dtype: torch.dtype = BF16
    given: Tuple[str, ...] = ("gate_up_lora", "down_lora")
    shared: bool = False


RANKS = {
    "none": None,
    "16": Ranks(16),
    "fp32-72": Ranks(72, dtype=torch.float32),
    "shared-200": Ranks(200, shared=True),
    "adapters": Ranks(24, adapters=3),
    "many-adapters": Ranks(64, adapters=6),
    "up": Ranks(8, given=("gate_up_lora",)),
    "down": Ranks(8, given=("down_lora",)),
}


def make_pairs(grouped_moe, case: Case, ranks: Optional[Ranks]) -> dict:
    """The LoRAs, as heavy as the weights, and the adapters of tokens, some of which have none."""
    if ranks is None:
        return {}
    pairs = {}
    for name, n, k in (("gate_up_lora", 2 * case.I, case.H), ("down_lora", case.H, case.I)):
        if name in ranks.given:
            leading = (*([ranks.adapters] if ranks.adapters else []), 1 if ranks.shared else case.E)
            a, b = (
                (torch.randn(*leading, *shape, device="cuda") / shape[1] ** 0.5).to(ranks.dtype)
                for shape in ((ranks.rank, k), (n, ranks.rank))
            )
            pairs[name] = grouped_moe.LoRA(a.requires_grad_(), b.requires_grad_(), 0.75)
    if ranks.adapters:
        pairs["adapter_index"] = torch.randint(-1, ranks.adapters, (case.T,), device="cuda")
    return pairs


def gradients(out: Tensor, given: Inputs, pairs: dict, dout: Tensor) -> Dict[str, Tensor]:
    """Of hidden states, routing weights and factors, by name."""
    leaves = {"dx": given.x, "dweights": given.weights}
    for name, lora in pairs.items():
        if name != "adapter_index":
            leaves.update({f"{name}.a": lora.a, f"{name}.b": lora.b})
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout)))


# Of a single step of K, pairs have no kernel.
PAIRED = [("even", kind) for kind in RANKS if kind != "none"] + [(name, "16") for name in CASES if "short" not in name][
    1:
]


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("name, kind", [*((name, "none") for name in CASES), *PAIRED])
def test_gradients(grouped_moe, name, kind):
    """Two calls, and one that recomputes, give the same bits; poisoned memory and unread tokens do not matter."""
    case = CASES[name]
    given, pairs = make(grouped_moe, case), make_pairs(grouped_moe, case, RANKS[kind])
    dout = torch.randn_like(given.x)
    unread = (given.ids >= case.E).all(1)
    poisoned = torch.where(unread[:, None], float("nan"), dout)
    results = []
    for recompute in (False, False, True):
        leaves = given._replace(x=given.x.detach().requires_grad_(), weights=given.weights.detach().requires_grad_())
        with poisoned_allocations():
            out = run(grouped_moe, case, leaves, recompute=recompute, **pairs)
            results.append({"out": out.detach(), **gradients(out, leaves, pairs, poisoned)})
    for again in results[1:]:
        for key, value in again.items():
            assert_bitwise(key, value, results[0][key])
    wide = {
        key: value if key == "adapter_index" else value._replace(
            a=value.a.detach().double().requires_grad_(), b=value.b.detach().double().requires_grad_()
        )
        for key, value in pairs.items()
    }  # fmt: skip
    wants = []
    for quantizes in (True, False):
        leaves = given._replace(x=given.x.double().requires_grad_(), weights=given.weights.double().requires_grad_())
        out = reference(case, leaves, wide, pairs.get("adapter_index"), quantizes)
        wants.append({"out": out.detach(), **gradients(out, leaves, wide, dout.double())})
    # Those of pairs are made of rows as they are. Where I is no multiple of 128, so is dx.
    rounds_dx = case.I % 128 == 0
    for key, got in results[0].items():
        errors = error(got, wants[0][key]), error(got, wants[1][key])
        if key == "out":
            assert errors[0] < PRODUCT, (key, errors)
        if case.limit is not None:  # rounded rows reach it elsewhere
            continue
        assert errors[1] < 1.5 * ROWS, (key, errors)
        if key == "dx" and rounds_dx:
            assert errors[0] < GRADIENT, (key, errors)
            assert errors[0] < 0.7 * errors[1], (key, errors)
    assert (results[0]["dx"][unread] == 0).all()


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rank", [None, 16, 136], ids=str)
def test_linear(grouped_moe, rank):
    """`grouped_linear`, some of whose rows have no group, with gate and up scaled apart."""
    groups, n, k, rows, bounds = 4, 512, 384, 900, [30, 400, 400, 420, 800]
    weight = grouped_moe.quantize_blocks(torch.randn(groups, n, k, device="cuda") / k**0.5, parts=2)
    x = torch.randn(rows, k, device="cuda", dtype=BF16, requires_grad=True)
    dy, lora, pair = torch.randn(rows, n, device="cuda", dtype=BF16), None, Pair(None, None)
    if rank is not None:
        a, b = (torch.randn(groups, *shape, device="cuda", dtype=BF16) / 18 for shape in ((rank, k), (n, rank)))
        lora = grouped_moe.LoRA(a.requires_grad_(), b.requires_grad_(), 0.5)
    offsets = grouped_moe.GroupOffsets(torch.tensor(bounds, device="cuda"))
    leaves = (x,) if lora is None else (x, lora.a, lora.b)
    with poisoned_allocations():
        y = grouped_moe.grouped_linear(x, weight, offsets, lora=lora)
        got = y.detach(), *torch.autograd.grad(y, leaves, dy)
    full, wide = weight.dequantize(torch.float64), [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = torch.zeros(rows, n, dtype=torch.float64, device="cuda")
    index = torch.arange(rows, device="cuda")
    for group, (first, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        pair = Pair(None, None) if lora is None else Pair(wide[1][group], wide[2][group], 0.5)
        if end > first:
            part = product(wide[0][first:end], full[group], pair, True, of_codes=False)
            want = want.index_add(0, index[first:end], part)
    wanted = want.detach(), *torch.autograd.grad(want, wide, dy.double())
    for name, each, expected in zip(("y", "dx", "da", "db"), got, wanted):
        assert error(each, expected) < PRODUCT, name
    assert (got[0][:30] == 0).all() and (got[1][800:] == 0).all()
