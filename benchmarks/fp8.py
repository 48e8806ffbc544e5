"""Block-scaled FP8 weights beside the same weights in bf16: forwards, and steps that train what is beside the weights.

A step differentiates hidden states, routing weights and, with a rank, the factors of a LoRA on each weight.

FP8 weights run with rows of 8-bit floats where these are faster (W8A8), and with rows as they are (W8A16). With many
tokens cuBLAS' dense products of as many 8-bit rows, with blockwise scales, run beside: they compute nothing else.
"""

from types import ModuleType
from typing import Callable, Dict, List

import torch
from experts import NAMES, make_block
from lora import make_factors, pairs
from machine import DEVICE
from problems import FORWARD, OURS, STEP, Inputs, Problem, Provider
from timing import Call
from torch import Tensor
from torch.nn import functional as F
from workload import DEEPSEEK_V3, QWEN3_30B, SMOKE, Cell, Layer, make_inputs

Function = Callable[..., Tensor]

BF16, W8A16, CUBLAS = "bf16", "ours, w8a16", "cuBLAS dense products"
FACTORS = ("gate_up_a", "gate_up_b", "down_a", "down_b")
SETS, LARGE, DENSE, RANK = 2, 8192, 2048, 16
BATCHES = (1, 2, 4, 8, 32, 64, 128, 256, 512, 2048, LARGE, 2 * LARGE)
# Relative, of rows with three bits: each product adds about 2.6e-2 (benchmarks/NOTES.md).
MAX_ERROR = 7e-2


def cases(smoke: bool) -> List[Cell]:
    """Equal layers are in a row."""
    if smoke:
        step = Cell(SMOKE, 12, backward=True)
        return [step, step._replace(rank=4), Cell(SMOKE, 2), Cell(SMOKE, 12, 1 / 2)]

    def training(layer: Layer) -> List[Cell]:
        return [Cell(layer, t, backward=True, rank=rank) for t in (LARGE // 4, LARGE) for rank in (0, RANK)]

    qwen = [*(Cell(QWEN3_30B, tokens) for tokens in BATCHES), Cell(QWEN3_30B, LARGE, 1 / 8), *training(QWEN3_30B)]
    deepseek = [*(Cell(DEEPSEEK_V3, tokens) for tokens in (64, 512, LARGE)), Cell(DEEPSEEK_V3, LARGE, 1 / 8)]
    return qwen + deepseek + training(DEEPSEEK_V3)


def dense_products(case: Cell) -> Dict[str, Call]:
    """cuBLAS' products of as many rows as the block has, on a GPU, where scales are whole blocks of four."""
    layer, recipes = case.layer, F.ScalingType
    whole = all(extent % 512 == 0 for extent in (layer.hidden, layer.intermediate, layer.preact_width))
    if DEVICE != "cuda" or not whole or case.backward or case.tokens < DENSE:
        return {}
    rows = round(case.tokens * layer.top_k * case.local)
    operands = []
    for n, k in ((layer.preact_width, layer.hidden), (layer.hidden, layer.intermediate)):
        codes = [torch.randn(extent, k, device=DEVICE).to(torch.float8_e4m3fn) for extent in (rows, n)]
        of_rows = torch.rand(k // 128, rows, device=DEVICE).T
        of_blocks = torch.rand(n // 128, k // 128, device=DEVICE).T
        operands.append((codes[0], codes[1].T, of_rows, recipes.BlockWise1x128, of_blocks, recipes.BlockWise128x128))
    return {CUBLAS: lambda _: [F.scaled_mm(*each, output_dtype=torch.bfloat16) for each in operands]}


def make_problem(kernel: ModuleType, case: Cell) -> Problem:
    """The providers of a case, on the values that the scaled weights have."""
    torch.manual_seed(0)
    experts = kernel.grouped_mm_experts
    scaled = [kernel.quantize_blocks(weight.detach()) for weight in make_block(case.layer, DEVICE).weights]
    exact = [weight._replace(products="w8a16") for weight in scaled]
    plain = [weight.dequantize() for weight in scaled]
    sets = [make_inputs(case, DEVICE) for _ in range(SETS)]
    factors = make_factors(plain, case.rank) if case.rank else []
    factors = [factor.div_(8).requires_grad_(case.backward) for factor in factors]
    inputs = [Inputs((s.x, s.weights, *plain, *factors), s.dout) for s in sets]

    def by(*given) -> Function:
        """The block on these weights in FP8 or, without any, on the leaves in bf16."""
        return lambda i, x, weights, up, down, *factors: experts(
            x, sets[i].ids, weights, *(given or (up, down)), **pairs(kernel, factors)
        )

    def right(first: int, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, *factors: Tensor) -> Tensor:
        if factors:
            up, down = up + factors[1] @ factors[0], down + factors[3] @ factors[2]
        return kernel.reference.grouped_mm_experts(x, sets[0].ids - first, weights, up, down)

    functions = {OURS: by(*scaled), W8A16: by(*exact), BF16: by()}
    providers = {name: Provider(function, inputs) for name, function in functions.items()}
    names, frozen = NAMES[:4] + FACTORS[: len(factors)], [part for weight in scaled for part in weight[:2]]
    options = {"baselines": dense_products(case), "frozen": frozen, "max_errors": {OURS: MAX_ERROR}}
    return Problem(case.described(), providers, (STEP if case.backward else FORWARD,), right, names, 2, **options)
