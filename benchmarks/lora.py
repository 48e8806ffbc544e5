"""Low-rank pairs (LoRA) on the experts block, its weights frozen: steps and small batches, all tokens local.

frozen            our block without pairs, which all others are to be compared with: it computes something else
ours, as peft     our block with factors in fp32 as peft stores them: b and its gradient are views of (N, r E)
eight adapters    our block with as many adapters, of which each token has one; in small batches alone
merged            our block on W + b a, made twice in each forward, as by the parametrization of peft's ParamWrapper
grouped_mm merged transformers' grouped_mm on the same
split             x W^T + (x a^T) b^T by PyTorch's grouped_mm, over rows that are sorted and gathered first
"""

from types import ModuleType
from typing import Callable, List, Sequence, Tuple

import torch
from experts import GROUPED, Block, make_block
from machine import DEVICE
from problems import FORWARD, OURS, STEP, Inputs, Problem, Provider
from torch import Tensor
from torch.nn import functional as F
from workload import DEEPSEEK_V3, MIXTRAL, QWEN3_30B, SMOKE, Cell, make_inputs

FROZEN, EIGHT, MERGED, SPLIT, AS_PEFT = "frozen", "eight adapters", "merged", "split", f"{OURS}, as peft"
NAMES = ("hidden_states", "top_k_weights", "up_a", "up_b", "down_a", "down_b")
SETS, RANKS, STEP_TOKENS, BATCHES = 2, (16, 64), 8192, (1, 8, 32, 128)


def cases(smoke: bool) -> List[Cell]:
    """Equal layers are in a row."""
    if smoke:
        step = Cell(SMOKE, 12, backward=True, rank=8)
        return [step, step._replace(pattern="zipf"), Cell(SMOKE, 2, rank=8)]
    layers = QWEN3_30B, DEEPSEEK_V3, MIXTRAL
    steps = [Cell(layer, STEP_TOKENS, backward=True, rank=rank) for layer in layers for rank in RANKS]
    steps[len(RANKS) : len(RANKS)] = [steps[0]._replace(pattern="zipf", rank=rank) for rank in (8, 16)]
    return steps + [Cell(QWEN3_30B, tokens, rank=RANKS[0]) for tokens in BATCHES]


def make_factors(weights: Sequence[Tensor], rank: int, *adapters: int) -> List[Tensor]:
    """up_a, up_b, down_a, down_b of unit scale over the root of their fan-in. weights: (E, N, K) in bf16."""
    ends = [((rank, k), (n, rank)) for _, n, k in (weight.shape for weight in weights)]
    shapes = [(*adapters, len(weights[0]), *shape) for pair in ends for shape in pair]
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).div_(shape[-1] ** 0.5) for shape in shapes]


def pairs(kernel: ModuleType, factors: Sequence[Tensor]) -> dict:
    """Both LoRAs, or none, as arguments of the block."""
    return {"gate_up_lora": kernel.LoRA(*factors[:2]), "down_lora": kernel.LoRA(*factors[2:])} if factors else {}


def as_peft(name: str, factor: Tensor) -> Tensor:
    """A factor in fp32, b as a view of (N, r E)."""
    wide = factor.detach().float()
    return wide.movedim(0, -1).contiguous().movedim(-1, 0) if name.endswith("b") else wide


def stored(b: Tensor) -> Tensor:
    """b by way of the matrix (N, r E) that peft stores, which its gradient takes, too."""
    num_experts, n, _ = b.shape
    return b.permute(1, 2, 0).reshape(n, -1).reshape(n, -1, num_experts).permute(2, 0, 1)


def make_split(block: Block, ids: Tensor) -> Callable[..., Tensor]:
    """Over rows that are sorted by expert."""
    up, down = block.weights
    order = ids.flatten().argsort(stable=True)
    tokens, ends = order // ids.shape[1], ids.flatten().bincount(minlength=len(up)).cumsum(0, dtype=torch.int32)

    def adapted(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        projected = F.grouped_mm(x, a.transpose(1, 2), offs=ends)
        low_rank = F.grouped_mm(projected, b.transpose(1, 2), offs=ends)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends) + low_rank

    def forward(x: Tensor, weights: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor, down_b: Tensor) -> Tensor:
        gate, value = adapted(x[tokens], up, up_a, up_b).chunk(2, dim=-1)
        rows = adapted(F.silu(gate) * value, down, down_a, down_b) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, tokens, rows)

    return forward


def merge(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As peft does it: the first sum is thrown away."""
    with torch.no_grad():
        torch.baddbmm(weight, b, a)
    return torch.baddbmm(weight, b, a)


def make_problem(kernel: ModuleType, case: Cell) -> Problem:
    """The providers of a case. A step differentiates hidden states, routing weights and factors."""
    torch.manual_seed(0)
    block = make_block(case.layer, DEVICE)
    (up, down), experts = [weight.requires_grad_(False) for weight in block.weights], kernel.grouped_mm_experts
    sets = [make_inputs(case, DEVICE) for _ in range(SETS)]
    factors = [factor.requires_grad_(case.backward) for factor in make_factors(block.weights, case.rank)]
    inputs = [Inputs((s.x, s.weights, *factors), s.dout) for s in sets]

    def ours(i: int, x: Tensor, weights: Tensor, *some: Tensor) -> Tensor:
        return experts(x, sets[i].ids, weights, up, down, **pairs(kernel, some))

    def adapted(i: int, x: Tensor, weights: Tensor, up_a: Tensor, up_b: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return ours(i, x, weights, up_a, stored(up_b), a, stored(b))

    def merged(i: int, x: Tensor, weights: Tensor, up_a: Tensor, up_b: Tensor, *of_down: Tensor) -> Tensor:
        return experts(x, sets[i].ids, weights, merge(up, up_a, up_b), merge(down, *of_down))

    def grouped_merged(i: int, x: Tensor, weights: Tensor, up_a: Tensor, up_b: Tensor, *of_down: Tensor) -> Tensor:
        from transformers.integrations import moe

        module = Stand(block.module, merge(up, up_a, up_b), merge(down, *of_down))
        return moe.grouped_mm_experts_forward(module, x, sets[i].ids, weights)

    def frozen(n: int) -> Tuple[Tensor, ...]:
        x, ids, weights, dout = sets[n % SETS]
        out = experts(x, ids, weights, up, down)
        return (out, *torch.autograd.grad(out, (x, weights), dout)) if case.backward else (out,)

    baselines, providers = {FROZEN: frozen}, {OURS: Provider(ours, inputs)}
    if case.backward:
        wide = [as_peft(name, factor).requires_grad_() for name, factor in zip(NAMES[-4:], factors)]
        providers[AS_PEFT] = Provider(adapted, [Inputs((s.x, s.weights, *wide), s.dout) for s in sets])
        split = [make_split(block, s.ids) for s in sets]
        providers[MERGED] = Provider(merged, inputs)
        providers[f"{GROUPED} {MERGED}"] = Provider(grouped_merged, inputs)
        providers[SPLIT] = Provider(lambda i, *leaves: split[i](*leaves), inputs)
    else:
        eight = pairs(kernel, make_factors(block.weights, case.rank, 8))
        eight["adapter_index"] = torch.arange(case.tokens, device=DEVICE) % 8
        baselines[EIGHT] = lambda n: (experts(*sets[n % SETS][:3], up, down, **eight),)

    def right(first: int, x: Tensor, weights: Tensor, up_a: Tensor, up_b: Tensor, *of_down: Tensor) -> Tensor:
        some = slice(first, first + len(up_a))
        sums = up[some].float() + up_b @ up_a, down[some].float() + of_down[1] @ of_down[0]
        return kernel.reference.grouped_mm_experts(x, sets[0].ids - first, weights, *sums)

    part = STEP if case.backward else FORWARD
    merging = MERGED, f"{GROUPED} {MERGED}", SPLIT  # whose graphs would hold several weights or copies of rows each
    options = {"baselines": baselines, "frozen": (up, down), "eager_only": merging}
    return Problem(case.described(), providers, (part,), right, NAMES, 2, **options)


class Stand:
    """An experts module with other weights, for transformers' function."""

    def __init__(self, module: torch.nn.Module, up: Tensor, down: Tensor) -> None:
        self._module, self.gate_up_proj, self.down_proj = module, up, down

    def __getattr__(self, name: str):
        return getattr(self._module, name)
