"""Block-scaled FP8 weights beside the same weights in bf16: forward, the backward of hidden states, small batches."""

from types import ModuleType
from typing import List, NamedTuple

import torch
from experts import make_block
from machine import DEVICE
from problems import DGRAD, FORWARD, OURS, Inputs, Problem, Provider
from torch import Tensor
from workload import DEEPSEEK_V3, QWEN3_30B, SMOKE, Cell, Layer, make_inputs

BF16 = "bf16"
NAMES = ("hidden_states", "top_k_weights", "gate_up_proj", "down_proj")
SETS, LARGE, BATCHES = 2, 8192, (1, 8, 32, 128)


class Case(NamedTuple):
    """A layer, for so many tokens."""

    layer: Layer
    tokens: int
    backward: bool

    def __str__(self) -> str:
        return f"{self.layer.name} {'training' if self.backward else 'forward'} T={self.tokens}"


def cases(smoke: bool) -> List[Case]:
    """Equal layers are in a row."""
    if smoke:
        return [Case(SMOKE, 12, True), Case(SMOKE, 2, False)]
    small = [Case(QWEN3_30B, tokens, False) for tokens in BATCHES]
    return [*small, *(Case(layer, LARGE, True) for layer in (QWEN3_30B, DEEPSEEK_V3))]


def make_problem(kernel: ModuleType, case: Case) -> Problem:
    """The providers of a case, on the values that the scaled weights have."""
    torch.manual_seed(0)
    experts = kernel.grouped_mm_experts
    scaled = [kernel.quantize_blocks(weight.detach()) for weight in make_block(case.layer, DEVICE).weights]
    plain = [weight.dequantize() for weight in scaled]
    cell = Cell(case.layer, case.tokens, backward=case.backward)
    sets = [make_inputs(cell, DEVICE) for _ in range(SETS)]
    inputs = [Inputs((s.x, s.weights, *plain), s.dout) for s in sets]

    def ours(i: int, x: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
        return experts(x, sets[i].ids, weights, *scaled)

    def in_bf16(i: int, x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return experts(x, sets[i].ids, weights, up, down)

    def right(first: int, x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return kernel.reference.grouped_mm_experts(x, sets[0].ids - first, weights, up, down)

    described = {**cell.described(), "name": str(case)}
    parts = (FORWARD, DGRAD) if case.backward else (FORWARD,)
    providers = {OURS: Provider(ours, inputs), BF16: Provider(in_bf16, inputs)}
    return Problem(described, providers, parts, right, NAMES, 2, frozen=plain)
