"""The experts block of every provider, on one module's weights. What is measured is a suite:

layers         six models' layers: forward and step, their memory, and time by the local share
models         layers of nine more models, for which no tile was chosen
sonicmoe       the layers next to SonicMoE, which takes minutes to tune itself
decode         few tokens: as a CUDA graph, as eager calls, and the host's time
models_decode  the same for more models
growth         how cost grows with tokens, experts, the local share and skew, as CUDA graphs
cpu            the CPU implementation

Each provider takes the parameters of transformers' experts module as they lie (as views), so that all compute on the
same weights and nothing is converted. A peer that cannot be had is absent, with the reason.
"""

import functools
import importlib
import itertools
import math
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import torch
from machine import DEVICE
from problems import FORWARD, OURS, STEP, Inputs, Problem, Provider, Unsupported
from timing import EAGER, GRAPH, HOST, Call
from torch import Tensor
from workload import (
    ITEM,
    LAYERS,
    MODELS,
    QWEN3_30B,
    SMOKE,
    SMOKE_GPT_OSS,
    SMOKE_UNGATED,
    Cell,
    Layer,
    Routed,
    facts,
    make_inputs,
)

RECOMPUTE, GROUPED, BATCHED = "ours, recompute", "grouped_mm", "batched_mm"
SONICMOE, DENSE = "SonicMoE", "dense"
# Input sets that calls go through in turn: one set's weights could stay in the cache. A series, which keeps a graph per
# set, has as many only up to so many tokens.
SETS, FEW_TOKENS = 4, 256
FEW_ROWS = 256  # the gradient of a routing weight is an inner product, which may cancel: with few rows it is not judged
SMOKE_TOKENS = 12
BATCHED_BYTES = 12e9  # of batched_mm's copies of weights, one per slot; past that it is not tried
NAMES = ("hidden_states", "top_k_weights", "gate_up_proj", "down_proj", "up_bias", "down_bias")

Function = Callable[[Routed], Tensor]


class Block(NamedTuple):
    """A layer's weights, in the experts module of transformers."""

    layer: Layer
    module: torch.nn.Module

    @property
    def weights(self) -> Tuple[Tensor, ...]:
        """gate_up_proj, or up_proj without a gate, down_proj and, if there are any, their biases."""
        up = "gate_up_proj" if self.layer.gated else "up_proj"
        names = (up, "down_proj", "gate_up_proj_bias", "down_proj_bias")
        return tuple(getattr(self.module, name) for name in names[: 4 if self.layer.bias else 2])


def make_block(layer: Layer, device: str, dtype: torch.dtype = torch.bfloat16) -> Block:
    """transformers' experts module; weights are divided by the root of their fan-in, biases a tenth of unit scale."""
    name = {"gelu_tanh": "gelu_pytorch_tanh"}.get(layer.activation[0], layer.activation[0])
    experts, intermediate = layer.experts, layer.intermediate
    if layer.bias:
        model, config = "gpt_oss.GptOss", {"num_local_experts": experts, "intermediate_size": intermediate}
    elif layer.gated:
        model, config = "qwen3_moe.Qwen3Moe", {"num_experts": experts, "hidden_act": name}
    else:
        model, config = "nemotron_h.NemotronH", {"n_routed_experts": experts, "mlp_hidden_act": name}
    config = {"moe_intermediate_size": intermediate, "hidden_size": layer.hidden, **config}
    folder, _, prefix = model.partition(".")
    configuration, modeling = (
        importlib.import_module(f"transformers.models.{folder}.{kind}_{folder}")
        for kind in ("configuration", "modeling")
    )
    with torch.device("meta"):
        module = getattr(modeling, f"{prefix}Experts")(getattr(configuration, f"{prefix}Config")(**config))
    fan_in = {"gate_up_proj": layer.hidden, "up_proj": layer.hidden, "down_proj": intermediate}
    for name, parameter in list(module.named_parameters()):
        scale = 1 / math.sqrt(fan_in[name]) if name in fan_in else 0.1
        weight = torch.randn(parameter.shape, device=device, dtype=dtype).mul_(scale)
        setattr(module, name, torch.nn.Parameter(weight))
    return Block(layer, module)


@functools.lru_cache(maxsize=1)
def block_of(layer: Layer) -> Block:
    """On this machine's device; cells of the same layer in a row share it."""
    return make_block(layer, DEVICE)


def make_ours(kernel: ModuleType, block: Block, recompute: bool = False) -> Function:
    """This package."""
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    arguments = {**dict(zip(names, block.weights)), **block.layer.kind, "recompute": recompute}
    arguments["activation"] = kernel.Activation(*block.layer.activation)
    return lambda s: kernel.grouped_mm_experts(s.x, s.ids, s.weights, **arguments)


def make_sonicmoe(block: Block) -> Function:
    """The Hub's build of SonicMoE, called as transformers calls it. It knows sentinels."""
    layer = block.layer
    for missing, what in ((not layer.gated, "no experts without a gate"), (layer.bias, "no clamped SwiGLU")):
        if missing:
            raise Unsupported(what)
    sonic, (up, down) = load_sonicmoe(), (weight.permute(1, 2, 0) for weight in block.weights)

    def forward(s: Routed) -> Tensor:
        tokens = torch.arange(s.x.shape[0], device=s.x.device, dtype=torch.int32)
        out, _ = sonic.moe_general_routing_inputs(
            s.x, s.weights.reshape(-1), tokens.repeat_interleave(layer.top_k, output_size=s.ids.numel()),
            s.ids.reshape(-1).int(), up, None, down, None, E=layer.experts, stream_id=None,
            activation_type=sonic.enums.ActivationType.SWIGLU,
            is_inference_mode_enabled=not torch.is_grad_enabled(), concat_layout=True,
        )  # fmt: skip
        return out

    return forward


@functools.lru_cache(maxsize=None)
def load_sonicmoe() -> ModuleType:
    """From the Hub or LOCAL_KERNELS."""
    import kernels

    sonic = kernels.get_kernel("kernels-community/sonic-moe", revision="ep-support", trust_remote_code=True)
    show_to_workers(sonic, tempfile.mkdtemp())
    return sonic


def show_to_workers(module: ModuleType, folder: str) -> None:
    """Lets processes that this one starts import a kernel of the Hub by name, which is not on Python's path.

    SonicMoE's tuner compiles in such processes. Where they cannot import it, it compiles one variant after the other.
    """
    name = module.__name__.partition(".")[0]
    (Path(folder) / name).symlink_to(Path(module.__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


def dense_products(block: Block, rows: List[int], backward: bool) -> Call:
    """The products of a call as plain matrix products over all its rows at once, with one weight for all.

    rows: of each input set.
    """
    h, i, width = block.layer.hidden, block.layer.intermediate, block.layer.preact_width
    options = {"device": block.weights[0].device, "dtype": block.weights[0].dtype}
    up, down = torch.randn((width, h), **options), torch.randn((h, i), **options)
    x, p, a = (torch.randn((max(rows), columns), **options) for columns in (h, width, i))

    def call(n: int) -> Sequence[Tensor]:
        rows_x, rows_p, rows_a = (t[: rows[n % len(rows)]] for t in (x, p, a))
        forward = rows_x @ up.t(), rows_a @ down.t()
        if not backward:
            return forward
        return (*forward, rows_x @ down, rows_p @ up, rows_p.t() @ rows_x, rows_x.t() @ rows_a)

    return call


class Experts:
    """Makes problems; keeps the weights that the next ones may share. kernels: our builds by their provider's name."""

    def __init__(self, kernels: Dict[str, ModuleType], names: Sequence[str], device: str) -> None:
        self.kernels, self.names, self.device = kernels, names, device
        self.reference = next(iter(kernels.values())).reference
        self.blocks: Dict[tuple, Block] = {}

    def problems(self, group: List[dict]) -> List[Problem]:
        """Those of cells that take turns, each {"cell": Cell} with more entries for the JSON."""
        keys = [(entry["cell"].layer, entry["cell"].dtype) for entry in group]
        self.blocks = {key: block for key, block in self.blocks.items() if key in keys}
        for layer, dtype in keys:
            if (layer, dtype) not in self.blocks:
                self.blocks[layer, dtype] = make_block(layer, self.device, dtype)
        return [self.problem(self.blocks[key], **entry) for key, entry in zip(keys, group)]

    def problem(self, block: Block, cell: Cell, **entries) -> Problem:
        """All sets with the cell's number of tokens."""
        torch.manual_seed(0)
        alone = "series" not in entries or cell.tokens <= FEW_TOKENS
        sets = [make_inputs(cell, self.device) for _ in range(SETS if alone else 1)]
        return self.problem_of(block, cell, sets, {**cell.described(), **entries, **facts(cell, sets)})

    def problem_of(self, block: Block, cell: Cell, sets: List[Routed], described: dict) -> Problem:
        """The providers that can do a cell, on these input sets."""
        providers, absent, baselines = {}, {}, {}
        inputs = [Inputs((s.x, s.weights, *block.weights), s.dout) for s in sets]
        for name in self.names:
            try:
                if name == DENSE:
                    rows = [int((s.ids < cell.layer.experts).sum()) for s in sets]
                    baselines[name] = dense_products(block, rows, cell.backward)
                else:
                    function = self.make(name, block, cell)
                    providers[name] = Provider(lambda i, *_, f=function: f(sets[i]), inputs)
            except Exception as error:  # whatever a peer lacks here
                absent[name] = str(error)[:160]

        kind = {**block.layer.kind, **dict(zip(("name", "alpha", "limit", "up_offset"), block.layer.activation))}

        def reference(first: int, x: Tensor, weights: Tensor, *some: Tensor) -> Tensor:
            return self.reference.grouped_mm_experts(x, sets[0].ids - first, weights, *some, **kind)

        few = int(sets[0].weights.count_nonzero()) < FEW_ROWS
        parts = (STEP if cell.backward else FORWARD,)
        unjudged = ("d_top_k_weights",) if few else ()
        return Problem(described, providers, parts, reference, NAMES, 2, absent, baselines, unjudged=unjudged)

    def make(self, name: str, block: Block, cell: Cell) -> Function:
        """The function of a provider; raises where it can't do the cell, or should not be tried."""
        if hasattr(block.module, "_is_expert_parallel"):
            block.module._is_expert_parallel = cell.local < 1
        if name == RECOMPUTE and not cell.backward:
            raise Unsupported("saves nothing in a forward")
        if name in self.kernels or name == RECOMPUTE:
            return make_ours(self.kernels.get(name) or self.kernels[OURS], block, name == RECOMPUTE)
        if name == BATCHED and cell.tokens * cell.layer.top_k * cell.layer.weights_per_expert * ITEM > BATCHED_BYTES:
            raise Unsupported("would copy the weights of every slot")
        if name in (GROUPED, BATCHED):
            from transformers.integrations import moe

            function = getattr(moe, f"{name}_experts_forward")
            return lambda s: function(block.module, s.x, s.ids, s.weights)
        if self.device == "cpu":
            raise Unsupported("needs a GPU")
        return make_sonicmoe(block)


def cells_of_suite(name: str, layers: Sequence[Layer]) -> List[Cell]:
    """In order of importance; equal shapes in a row compile once."""
    if name == "models":  # of each a long and a short prompt, a small batch, a step
        cases = ((16384, False), (8192, True), (2048, False), (128, False))
        return [Cell(layer, tokens, 1.0, backward) for layer in layers for tokens, backward in cases]
    if name == "decode":
        first = [Cell(layers[0], tokens) for tokens in (1, 8, 128, 32, 4, 16, 64, 2)]
        return first + [Cell(layer, tokens) for layer in layers[1:] for tokens in (1, 16, 128)]
    if name == "models_decode":
        return [Cell(layer, tokens) for layer in layers for tokens in (1, 8, 64)]
    if name == "cpu":  # what two cores do in seconds
        kinds = itertools.product(layers, (torch.float32, torch.bfloat16), (1, 16, 512), (False, True))
        return [Cell(layer, tokens, 1.0, backward, dtype=dtype) for layer, dtype, tokens, backward in kinds]
    long, short = ([Cell(x, t, local) for x in layers for local in (1.0, 0.5, 0.125)] for t in (16384, 4096))
    steps = [Cell(layer, 8192, local, True) for layer in layers for local in (1.0, 0.125)]
    longest = [Cell(QWEN3_30B, 16384, local, True) for local in (1.0, 0.125) if QWEN3_30B in layers]
    return long + steps + short + longest


def growth_series(layer: Layer, most: int, fixed: int) -> Dict[str, List[Tuple[float, Cell]]]:
    """Cells that differ in one thing, with its value; a step has fewer tokens, for its memory."""
    found: Dict[str, List[Tuple[float, Cell]]] = {}
    for backward in (False, True):
        tokens = [2**n for n in range(17) if 2**n <= most // (1 + backward)]
        shares, experts = [2.0**-n for n in range(7)], [2**n for n in range(3, 10) if 2**n <= 4 * layer.experts]
        mode, patterns = "step" if backward else "forward", ("balanced", "random", "zipf", "half")
        found[f"tokens {mode}"] = [(t, Cell(layer, t, 1.0, backward)) for t in tokens]
        found[f"local {mode}"] = [(s, Cell(layer, fixed, s, backward)) for s in shares]
        found[f"experts {mode}"] = [(e, Cell(layer._replace(experts=e), fixed // 4, 1.0, backward)) for e in experts]
        found[f"skew {mode}"] = [(n, Cell(layer, fixed, 1.0, backward, p)) for n, p in enumerate(patterns)]
    return found


class Suite(NamedTuple):
    """Which layers a suite measures, of which providers, and how. tiny: the layers of --smoke."""

    layers: Sequence[Layer]
    names: Sequence[str]
    ways: Sequence[str] = (EAGER,)
    tiny: Sequence[Layer] = (SMOKE, SMOKE_GPT_OSS)
    device: str = DEVICE


UNGATED = (SMOKE_UNGATED,)
CPU_LAYER = QWEN3_30B._replace(name="Qwen3-30B-A3B with 16 experts", experts=16)
DECODE = (OURS, GROUPED, BATCHED), (GRAPH, EAGER, HOST)
SUITES = {
    "layers": Suite(LAYERS, (OURS, RECOMPUTE, GROUPED, DENSE)),
    "models": Suite(MODELS, (OURS, GROUPED, DENSE), tiny=UNGATED),
    "sonicmoe": Suite(LAYERS, (OURS, GROUPED, SONICMOE, DENSE)),
    "decode": Suite(LAYERS, *DECODE),
    "models_decode": Suite(MODELS, *DECODE, tiny=UNGATED),
    "growth": Suite((QWEN3_30B,), (OURS,), (GRAPH,)),
    "cpu": Suite((CPU_LAYER,), (OURS, GROUPED), device="cpu"),
}


def cells_of(name: str, smoke: bool) -> Dict[str, List[dict]]:
    """The groups of a suite by name, as `Experts.problems` takes them."""
    if name == "growth":
        sizes = (SMOKE, 8, 24) if smoke else (QWEN3_30B, 65536, 16384)
        return {
            series: [{"cell": c, "series": series, "value": v, "name": f"{series} {v:g}"} for v, c in points]
            for series, points in growth_series(*sizes).items()
        }
    suite = SUITES[name]
    cells = cells_of_suite(name, suite.tiny if smoke else suite.layers)
    if smoke:
        cells = [cell._replace(tokens=min(cell.tokens, SMOKE_TOKENS)) for cell in cells]
    return {str(cell): [{"cell": cell}] for cell in cells}
