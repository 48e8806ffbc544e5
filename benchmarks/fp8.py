"""Block-scaled FP8 weights beside the same weights in bf16: forward, and the backward of hidden states.

With rows of 8-bit floats (W8A8) where these are faster, with rows as they are (W8A16), and, for many tokens, beside
cuBLAS' dense products of as many 8-bit rows with blockwise scales, which compute nothing else.
"""

from types import ModuleType
from typing import Dict, List, NamedTuple

import torch
from experts import make_block
from machine import DEVICE
from problems import DGRAD, FORWARD, OURS, Inputs, Problem, Provider
from timing import Call
from torch import Tensor
from workload import DEEPSEEK_V3, QWEN3_30B, SMOKE, Cell, Layer, make_inputs

BF16, W8A16, CUBLAS = "bf16", "ours, w8a16", "cuBLAS dense products"
NAMES = ("hidden_states", "top_k_weights", "gate_up_proj", "down_proj")
SETS, LARGE, DENSE = 2, 8192, 2048
BATCHES = (1, 2, 4, 8, 32, 64, 128, 256, 512, 2048, LARGE, 2 * LARGE)
# Relative, of rows with three bits: each product adds about 2.6e-2 (benchmarks/NOTES.md).
MAX_ERROR = 6e-2


class Case(NamedTuple):
    """A layer, for so many tokens. local: the share of slots whose expert is here."""

    layer: Layer
    tokens: int
    backward: bool = False
    local: float = 1.0

    def __str__(self) -> str:
        cell = Cell(self.layer, self.tokens, self.local)
        return f"{str(cell).rsplit(maxsplit=1)[0]} {'training' if self.backward else 'forward'}"


def cases(smoke: bool) -> List[Case]:
    """Equal layers are in a row."""
    if smoke:
        return [Case(SMOKE, 12, True), Case(SMOKE, 2), Case(SMOKE, 12, local=1 / 2)]
    forward = [Case(QWEN3_30B, tokens) for tokens in BATCHES]
    qwen = [*forward, Case(QWEN3_30B, LARGE, local=1 / 8), Case(QWEN3_30B, LARGE, True)]
    return [
        *qwen,
        *(Case(DEEPSEEK_V3, *rest) for rest in ((64,), (512,), (LARGE,), (LARGE, False, 1 / 8), (LARGE, True))),
    ]


def dense_products(case: Case) -> Dict[str, Call]:
    """cuBLAS' products of as many rows as the block has, where PyTorch has them and scales are whole blocks of four."""
    layer, recipes = case.layer, getattr(torch.nn.functional, "ScalingType", None)
    extents = layer.hidden, layer.intermediate, layer.preact_width
    whole = recipes is not None and DEVICE == "cuda" and all(extent % 512 == 0 for extent in extents)
    if not whole or case.backward or case.tokens < DENSE:
        return {}
    rows = round(case.tokens * layer.top_k * case.local)
    operands = []
    for n, k in ((layer.preact_width, layer.hidden), (layer.hidden, layer.intermediate)):
        codes = [torch.randn(extent, k, device=DEVICE).to(torch.float8_e4m3fn) for extent in (rows, n)]
        scales = [torch.rand(k // 128, extent, device=DEVICE).T for extent in (rows, n // 128)]
        operands.append((codes[0], codes[1].T, scales[0], recipes.BlockWise1x128, scales[1], recipes.BlockWise128x128))

    def multiply(_: int) -> List[Tensor]:
        return [torch.nn.functional.scaled_mm(*each, output_dtype=torch.bfloat16) for each in operands]

    return {CUBLAS: multiply}


def make_problem(kernel: ModuleType, case: Case) -> Problem:
    """The providers of a case, on the values that the scaled weights have."""
    torch.manual_seed(0)
    experts = kernel.grouped_mm_experts
    scaled = [kernel.quantize_blocks(weight.detach()) for weight in make_block(case.layer, DEVICE).weights]
    exact = [weight._replace(products="w8a16") for weight in scaled]
    plain = [weight.dequantize() for weight in scaled]
    cell = Cell(case.layer, case.tokens, case.local, backward=case.backward)
    sets = [make_inputs(cell, DEVICE) for _ in range(SETS)]
    inputs = [Inputs((s.x, s.weights, *plain), s.dout) for s in sets]

    def ours(i: int, x: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
        return experts(x, sets[i].ids, weights, *scaled)

    def with_plain_rows(i: int, x: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
        return experts(x, sets[i].ids, weights, *exact)

    def in_bf16(i: int, x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return experts(x, sets[i].ids, weights, up, down)

    def right(first: int, x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return kernel.reference.grouped_mm_experts(x, sets[0].ids - first, weights, up, down)

    described = {**cell.described(), "name": str(case)}
    parts = (FORWARD, DGRAD) if case.backward else (FORWARD,)
    functions = {OURS: ours, W8A16: with_plain_rows, BF16: in_bf16}
    providers = {name: Provider(function, inputs) for name, function in functions.items()}
    baselines = dense_products(case)
    return Problem(
        described, providers, parts, right, NAMES, 2, baselines=baselines, frozen=plain, max_errors={OURS: MAX_ERROR}
    )
