"""What is measured: layers, cells, inputs, and the floor that bytes and FLOPs set.

Legend: T tokens, E local experts, H hidden, I intermediate, R routed rows (slots whose expert is local).
"""

from itertools import accumulate
from random import Random
from typing import Dict, List, NamedTuple, Tuple

import torch
from torch import Tensor

# Measured on an H200: a large copy, bytes read plus bytes written, and a large bf16 product on a hot card. The card is
# power-capped: a product on a cool card runs at up to 790 TFLOP/s, a series of measurements at about this rate.
BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 655e12
ITEM = 2  # bytes of a bf16 number


class Layer(NamedTuple):
    """An experts block. interleaved: gate and up take turns. activation: arguments of the package's Activation."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    bias: bool = False
    activation: tuple = ("silu", 1.0, None, 0.0)

    @property
    def preact_width(self) -> int:
        """Columns of the up-projection's results."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def weights_per_expert(self) -> int:
        """Numbers in both weights of an expert, biases left out."""
        return self.hidden * (self.preact_width + self.intermediate)

    @property
    def weight_shapes(self) -> List[Tuple[int, int, int]]:
        """Of both weights."""
        shapes = (self.preact_width, self.hidden), (self.hidden, self.intermediate)
        return [(self.experts, *(shape[::-1] if self.transposed else shape)) for shape in shapes]

    @property
    def kind(self) -> Dict[str, bool]:
        """Arguments of the package's experts block and of the reference's."""
        return {name: getattr(self, name) for name in ("gated", "interleaved", "transposed")}


RELU2, GELU_TANH = ("relu2", 1.0, None, 0.0), ("gelu_tanh", 1.0, None, 0.0)
# Biases, gate and up in turn, transposed weights, a clamped gate.
OSS = {"interleaved": True, "transposed": True, "bias": True, "activation": ("silu", 1.702, 7.0, 1.0)}
QWEN3_30B = Layer("Qwen3-30B-A3B", experts=128, top_k=8, hidden=2048, intermediate=768)
OLMOE = Layer("OLMoE", experts=64, top_k=8, hidden=2048, intermediate=1024)
MIXTRAL = Layer("Mixtral-8x7B", experts=8, top_k=2, hidden=4096, intermediate=14336)
DEEPSEEK_V3 = Layer("DeepSeek-V3 EP8 rank", experts=32, top_k=8, hidden=7168, intermediate=2048)
QWEN3_NEXT = Layer("Qwen3-Next", experts=512, top_k=10, hidden=2048, intermediate=512)
GPT_OSS = Layer("gpt-oss-120b", experts=128, top_k=4, hidden=2880, intermediate=2880, **OSS)
LAYERS = (QWEN3_30B, DEEPSEEK_V3, MIXTRAL, OLMOE, QWEN3_NEXT, GPT_OSS)
EP_LAYERS = QWEN3_30B, DEEPSEEK_V3._replace(name="DeepSeek-V3", experts=256)  # with the experts of all ranks
NEMOTRON = Layer("Nemotron-3-Nano-30B", 128, 6, hidden=2688, intermediate=1856, gated=False, activation=RELU2)
# More models, by the sizes in their configurations on the Hub. Decoding's tiles were chosen on these, too, no others.
MODELS = (
    NEMOTRON,
    Layer("Gemma-4-26B-A4B", 128, 8, hidden=2816, intermediate=704, activation=GELU_TANH),
    Layer("DeepSeek-V2-Lite", 64, 6, hidden=2048, intermediate=1408),
    Layer("GLM-4.5-Air", 128, 8, hidden=4096, intermediate=1408),
    Layer("MiniMax-M2", 256, 8, hidden=3072, intermediate=1536),
    Layer("LFM2-8B-A1B", 32, 4, hidden=2048, intermediate=1792),
    Layer("Qwen1.5-MoE-A2.7B", 60, 4, hidden=2048, intermediate=1408),
    Layer("Phi-3.5-MoE", 16, 2, hidden=4096, intermediate=6400),
    Layer("Granite-3.1-3B-A800M", 40, 8, hidden=1536, intermediate=512),
)
SMOKE = Layer("smoke", experts=8, top_k=2, hidden=64, intermediate=32)
SMOKE_UNGATED = Layer("smoke-ungated", experts=8, top_k=2, hidden=64, intermediate=32, gated=False, activation=RELU2)
SMOKE_GPT_OSS = Layer("smoke-oss", experts=8, top_k=2, hidden=64, intermediate=64, **OSS)


class Cell(NamedTuple):
    """One measurement of the block. local: the share of slots whose expert is on this rank; the others are sentinels.

    rank: of low-rank pairs on both weights, 0 for none. pattern: random (distinct experts, equally likely), balanced
    (as many rows for every expert), zipf (distinct, with chances of 1 / rank), half (one expert takes half of the
    slots).
    """

    layer: Layer
    tokens: int
    local: float = 1.0
    backward: bool = False
    pattern: str = "random"
    dtype: torch.dtype = torch.bfloat16
    rank: int = 0

    def __str__(self) -> str:
        said = f"{self.layer.name} T={self.tokens} local={fraction(self.local)}"
        said += "" if self.pattern == "random" else f" {self.pattern}"
        said += "" if self.dtype == torch.bfloat16 else f" {str(self.dtype)[6:]}"
        said += " step" if self.backward else " forward"
        return f"{said} r={self.rank}" if self.rank else said

    def described(self) -> dict:
        """What identifies the cell in the JSON."""
        layer = {**self.layer._asdict(), "activation": list(self.layer.activation)}
        cell = {**self._asdict(), "layer": layer.pop("name"), "dtype": str(self.dtype)[6:]}
        return {"name": str(self), **cell, "sizes": layer}


class Routed(NamedTuple):
    """One set of inputs. ids: sentinels are E. weights: 0 for sentinels, as transformers has it."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dout: Tensor


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


def make_inputs(cell: Cell, device: str) -> Routed:
    """Unit-scale inputs."""
    layer = cell.layer
    ids = draw_ids(cell, device)
    remote = ids >= layer.experts
    weights = torch.rand(ids.shape, device=device) + 0.1
    weights = (weights / weights.sum(1, keepdim=True)).masked_fill(remote, 0.0).to(cell.dtype)
    x, dout = (torch.randn((cell.tokens, layer.hidden), device=device, dtype=cell.dtype) for _ in range(2))
    for tensor in (x, weights):
        tensor.requires_grad_(cell.backward)
    return Routed(x, ids.masked_fill(remote, layer.experts), weights, dout)


def counts_of(layer: Layer, sets: List[Routed]) -> List[float]:
    """Rows, tokens with a row and experts with a row: what a routing asks for, as means over the input sets."""
    local = [inputs.ids < layer.experts for inputs in sets]
    experts = [inputs.ids[here].unique().numel() for inputs, here in zip(sets, local)]
    parts = [[int(here.sum()) for here in local], [int(here.any(1).sum()) for here in local], experts]
    return [sum(part) / len(sets) for part in parts]


def facts(cell: Cell, sets: List[Routed]) -> Dict[str, float]:
    """What a cell's routing asks for, and the floor: the time in ms that its bytes or FLOPs take on a hot card.

    FLOPs: two per multiply-add of the products of a row; the backward has two products for each of the forward's.
    Bytes: every input read once and every result written once, by each direction. Read: hidden rows of tokens with a
    row, weights of experts with a row, routing. Written: the output. Training also writes and reads the pre-activation
    between the directions, and in the backward reads the output's gradient and again the hidden rows and weights, and
    writes the gradients of the hidden states and of all E experts.
    """
    layer, (rows, tokens, experts) = cell.layer, counts_of(cell.layer, sets)
    rows_in, rows_out = tokens * layer.hidden * ITEM, cell.tokens * layer.hidden * ITEM
    per_expert = layer.weights_per_expert * ITEM
    routing = cell.tokens * layer.top_k * (8 + ITEM)
    moved = rows_in + experts * per_expert + routing + rows_out
    if cell.backward:
        moved += 2 * rows * layer.preact_width * ITEM
        moved += 2 * rows_in + experts * per_expert + routing + rows_out + layer.experts * per_expert
    flops = (3 if cell.backward else 1) * 2 * rows * layer.weights_per_expert
    floor = max(moved / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND) * 1e3
    return {"routed_rows": rows, "experts_with_rows": experts, "bytes": moved, "flops": flops, "floor_ms": floor}


class LinearCell(NamedTuple):
    """One grouped linear layer: weight (groups, n, k), x (rows, k), rows split by a pattern."""

    groups: int
    k: int
    n: int
    rows: int
    pattern: str

    def __str__(self) -> str:
        return f"G={self.groups} {self.k}x{self.n} rows={self.rows} {self.pattern}"

    def sizes(self) -> List[int]:
        """Rows per group. half: balanced over the first half of the rows; the second half belongs to no group."""
        shares, rows = [1.0] * self.groups, self.rows // 2 if self.pattern == "half" else self.rows
        if self.pattern == "zipf":
            shares = [1 / rank for rank in range(1, self.groups + 1)]
            Random(0).shuffle(shares)
        ends = [round(rows * end / sum(shares)) for end in accumulate(shares)]
        return [end - start for start, end in zip([0, *ends], ends)]

    def described(self) -> dict:
        """What identifies the cell in the JSON."""
        return {"name": str(self), **self._asdict(), "used_rows": sum(self.sizes())}
