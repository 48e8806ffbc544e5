"""What is measured: layers, cells, inputs, and the floors that bytes and FLOPs set.

Legend: T tokens, E local experts, H hidden, I intermediate, R routed rows (slots whose expert is local).
"""

from typing import Dict, List, NamedTuple

import torch
from torch import Tensor

# Measured on an H200: a large copy, bytes read plus bytes written, and a large bf16 product on a cool and on a hot
# card. The card is power-capped, so a series of measurements runs at the hot rate.
BYTES_PER_SECOND = 4.3e12
FLOPS_COOL, FLOPS_HOT = 790e12, 655e12
ITEM = 2  # bytes of a bf16 number


class Layer(NamedTuple):
    """An experts block. gpt_oss: with biases, interleaved gate and up, transposed weights, a clamped gate.

    activation: the package's name of it.
    """

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    gpt_oss: bool = False
    gated: bool = True
    activation: str = "silu"

    @property
    def preact_width(self) -> int:
        """Columns of the up-projection's results."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def weights_per_expert(self) -> int:
        """Numbers in both weights of an expert, biases left out."""
        return self.hidden * (self.preact_width + self.intermediate)


QWEN3_30B = Layer("Qwen3-30B-A3B", experts=128, top_k=8, hidden=2048, intermediate=768)
OLMOE = Layer("OLMoE", experts=64, top_k=8, hidden=2048, intermediate=1024)
MIXTRAL = Layer("Mixtral-8x7B", experts=8, top_k=2, hidden=4096, intermediate=14336)
DEEPSEEK_V3 = Layer("DeepSeek-V3 EP8 rank", experts=32, top_k=8, hidden=7168, intermediate=2048)
QWEN3_NEXT = Layer("Qwen3-Next", experts=512, top_k=10, hidden=2048, intermediate=512)
GPT_OSS = Layer("gpt-oss-120b", experts=128, top_k=4, hidden=2880, intermediate=2880, gpt_oss=True)
LAYERS = (QWEN3_30B, DEEPSEEK_V3, MIXTRAL, OLMOE, QWEN3_NEXT, GPT_OSS)
# More models, by the sizes in their configurations on the Hub. Decoding's tiles were chosen on these, too, no others.
MODELS = (
    Layer("Nemotron-3-Nano-30B", 128, 6, hidden=2688, intermediate=1856, gated=False, activation="relu2"),
    Layer("Gemma-4-26B-A4B", 128, 8, hidden=2816, intermediate=704, activation="gelu_tanh"),
    Layer("DeepSeek-V2-Lite", 64, 6, hidden=2048, intermediate=1408),
    Layer("GLM-4.5-Air", 128, 8, hidden=4096, intermediate=1408),
    Layer("MiniMax-M2", 256, 8, hidden=3072, intermediate=1536),
    Layer("LFM2-8B-A1B", 32, 4, hidden=2048, intermediate=1792),
    Layer("Qwen1.5-MoE-A2.7B", 60, 4, hidden=2048, intermediate=1408),
    Layer("Phi-3.5-MoE", 16, 2, hidden=4096, intermediate=6400),
    Layer("Granite-3.1-3B-A800M", 40, 8, hidden=1536, intermediate=512),
)
SMOKE = Layer("smoke", experts=8, top_k=2, hidden=64, intermediate=32)
SMOKE_UNGATED = Layer("smoke-ungated", experts=8, top_k=2, hidden=64, intermediate=32, gated=False, activation="relu2")
SMOKE_GPT_OSS = Layer("smoke-oss", experts=8, top_k=2, hidden=64, intermediate=64, gpt_oss=True)


class Cell(NamedTuple):
    """One measurement. local: the share of slots whose expert is on this rank; the others are sentinels.

    pattern: random (distinct experts, all alike), balanced (as many rows for every expert), zipf (distinct, chances by
    1 / rank), half (one expert takes half of the slots).
    """

    layer: Layer
    tokens: int
    local: float = 1.0
    backward: bool = False
    pattern: str = "random"

    def __str__(self) -> str:
        mode = "forward+backward" if self.backward else "forward"
        skew = "" if self.pattern == "random" else f" {self.pattern}"
        return f"{self.layer.name} T={self.tokens} local={fraction(self.local)}{skew} {mode}"

    def described(self) -> dict:
        """What identifies the cell in the JSON."""
        layer = self.layer._asdict()
        return {**self._asdict(), "layer": layer.pop("name"), "sizes": layer}


class Inputs(NamedTuple):
    """One set of inputs. ids: sentinels are E. weights: 0 for sentinels, as transformers has it."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dout: Tensor


class Counts(NamedTuple):
    """What a routing asks for: rows, tokens with a row and experts with a row. Averages over sets, so no integers."""

    rows: float
    tokens: float
    experts: float


def fraction(value: float) -> str:
    """1, 1/2, 1/8."""
    return "1" if value == 1 else f"1/{round(1 / value)}"


def draw_ids(cell: Cell, device: str) -> Tensor:
    """(T, top_k) ids; every token chooses out of all ranks' experts, of which the first E are here."""
    layer = cell.layer
    everywhere = round(layer.experts / cell.local)
    if cell.pattern == "balanced":
        slots = torch.arange(cell.tokens * layer.top_k, device=device)
        return torch.randperm(everywhere, device=device)[slots % everywhere].view(cell.tokens, layer.top_k)
    chances = torch.rand(cell.tokens, everywhere, device=device)
    if cell.pattern == "zipf":  # the k largest of u ** (1 / p) are k draws by p without replacement
        chances = chances.log() * torch.arange(1, everywhere + 1, device=device)
    if cell.pattern == "half":
        chances[:, 0] = 0
    ids = chances.topk(layer.top_k).indices
    if cell.pattern == "half":
        ids[:, : layer.top_k // 2] = 0
    return ids


def make_inputs(cell: Cell, device: str) -> Inputs:
    """Unit-scale bf16 inputs."""
    layer = cell.layer
    ids = draw_ids(cell, device)
    remote = ids >= layer.experts
    weights = torch.rand(ids.shape, device=device) + 0.1
    weights = (weights / weights.sum(1, keepdim=True)).masked_fill(remote, 0.0)
    shape = (cell.tokens, layer.hidden)
    x, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    tensors = x, weights.to(torch.bfloat16)
    for tensor in tensors:
        tensor.requires_grad_(cell.backward)
    return Inputs(tensors[0], ids.masked_fill(remote, layer.experts), tensors[1], dout)


def count(layer: Layer, sets: List[Inputs]) -> Counts:
    """Means over the input sets."""
    parts = []
    for inputs in sets:
        local = inputs.ids < layer.experts
        parts.append((int(local.sum()), int(local.any(1).sum()), int(inputs.ids[local].unique().numel())))
    return Counts(*(sum(column) / len(sets) for column in zip(*parts)))


def expected_counts(cell: Cell) -> Counts:
    """What `count` gives on average for random routing, with slots taken as independent."""
    layer = cell.layer
    chosen = 1 - (1 - cell.local * layer.top_k / layer.experts) ** cell.tokens
    tokens = cell.tokens * (1 - (1 - cell.local) ** layer.top_k)
    return Counts(cell.tokens * layer.top_k * cell.local, tokens, layer.experts * chosen)


def described(counts: Counts) -> Dict[str, float]:
    """As in the JSON."""
    return {"routed_rows": counts.rows, "tokens_with_rows": counts.tokens, "experts_with_rows": counts.experts}


def flops(layer: Layer, counts: Counts, backward: bool) -> float:
    """Two per multiply-add of the products of a row; the backward has two products for each of the forward's."""
    return (3 if backward else 1) * 2 * counts.rows * layer.weights_per_expert


def bytes_moved(cell: Cell, counts: Counts) -> float:
    """The fewest that a call can move: every input read once, every result written once, by each direction.

    Read: hidden rows of tokens with a row, weights of experts with a row, routing. Written: the output. For training
    also the pre-activation between the directions (once each way), and in the backward the output's gradient and again
    the hidden rows and weights are read, the gradients of hidden states and of all E experts are written.
    """
    layer = cell.layer
    h, p = layer.hidden, layer.preact_width
    rows_in, rows_out = counts.tokens * h * ITEM, cell.tokens * h * ITEM
    per_expert = layer.weights_per_expert * ITEM
    routing = cell.tokens * layer.top_k * (8 + ITEM)
    total = rows_in + counts.experts * per_expert + routing + rows_out
    if cell.backward:
        total += 2 * counts.rows * p * ITEM
        total += 2 * rows_in + counts.experts * per_expert + routing + rows_out + layer.experts * per_expert
    return total


def floors(cell: Cell, counts: Counts) -> Dict[str, float]:
    """Times in ms that no implementation can go much below."""
    moved, operations = bytes_moved(cell, counts), flops(cell.layer, counts, cell.backward)
    bytes_ms = moved / BYTES_PER_SECOND * 1e3
    return {
        "bytes": moved,
        "flops": operations,
        "bytes_ms": bytes_ms,
        "floor_ms": max(bytes_ms, operations / FLOPS_COOL * 1e3),
        "floor_hot_ms": max(bytes_ms, operations / FLOPS_HOT * 1e3),
    }
