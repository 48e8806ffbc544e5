"""The experts block next to its peers. What is measured is the name of a suite:

layers         six models' layers: forward and step, their memory, and time by the local share
models         layers of nine more models, for which no tile was chosen
sonicmoe       the layers next to SonicMoE, which takes minutes to tune itself
decode         few tokens: as a CUDA graph, as eager calls, and the host's time
models_decode  the same for more models
growth         how cost grows with tokens, experts, the local share and skew, as CUDA graphs
cpu            the CPU implementation

python benchmarks/run_experts.py layers --output benchmarks/results/layers_h200.json --only Mixtral T=8192
"""

from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import workload
from machine import DEVICE, Task, load_kernel, main_of, make_parser
from problems import Problem, run_group
from providers import (
    BATCHED,
    DENSE,
    GROUPED,
    OURS,
    RECOMPUTE,
    SONICMOE,
    Block,
    Providers,
    Unsupported,
    check,
    dense_products,
    expected,
    make_block,
    make_call,
)
from timing import EAGER, GRAPH, HOST
from workload import LAYERS, MODELS, QWEN3_30B, Cell, Inputs, Layer, make_inputs

# Input sets that calls go through in turn: one set's weights could stay in the cache. A series, which keeps a graph per
# set, has as many only up to so many tokens.
SETS, FEW_TOKENS = 4, 256
SMOKE_TOKENS = 12
BATCHED_BYTES = 12e9  # of batched_mm's copies of weights, one per slot; past that it is not tried


def layer_cells(layers: Sequence[Layer]) -> List[Cell]:
    """In order of importance; equal shapes in a row compile once."""

    def forwards(tokens: int) -> List[Cell]:
        return [Cell(layer, tokens, local) for layer in layers for local in (1.0, 0.5, 0.125)]

    steps = [Cell(layer, 8192, local, True) for layer in layers for local in (1.0, 0.125)]
    longest = [Cell(QWEN3_30B, 16384, local, True) for local in (1.0, 0.125) if QWEN3_30B in layers]
    return forwards(16384) + steps + forwards(4096) + longest


def model_cells(layers: Sequence[Layer]) -> List[Cell]:
    """Of each model a long and a short prompt, a small batch, a step."""
    cases = ((16384, False), (8192, True), (2048, False), (128, False))
    return [Cell(layer, tokens, 1.0, backward) for layer in layers for tokens, backward in cases]


def decode_cells(layers: Sequence[Layer]) -> List[Cell]:
    """Few tokens, most numbers of them for the first layer."""
    first = [Cell(layers[0], tokens) for tokens in (1, 8, 128, 32, 4, 16, 64, 2)]
    return first + [Cell(layer, tokens) for layer in layers[1:] for tokens in (1, 16, 128)]


def models_decode_cells(layers: Sequence[Layer]) -> List[Cell]:
    """Three numbers of tokens for each model."""
    return [Cell(layer, tokens) for layer in layers for tokens in (1, 8, 64)]


def cpu_cells(layers: Sequence[Layer]) -> List[Cell]:
    """What two cores do in seconds."""
    dtypes = (torch.float32, torch.bfloat16)
    return [Cell(x, 512, 1.0, b, dtype=dtype) for x in layers for dtype in dtypes for b in (False, True)]


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
    """What a suite measures, of which providers, and how. tiny: the layers of --smoke."""

    cells: Callable[[Sequence[Layer]], List[Cell]]
    layers: Sequence[Layer]
    names: Sequence[str]
    ways: Sequence[str] = (EAGER,)
    tiny: Sequence[Layer] = (workload.SMOKE, workload.SMOKE_GPT_OSS)
    device: str = DEVICE


UNGATED = (workload.SMOKE_UNGATED,)
CPU_LAYER = QWEN3_30B._replace(name="Qwen3-30B-A3B with 16 experts", experts=16)
DECODE = (OURS, GROUPED, BATCHED), (GRAPH, EAGER, HOST)
SUITES = {
    "layers": Suite(layer_cells, LAYERS, (OURS, RECOMPUTE, GROUPED, DENSE)),
    "models": Suite(model_cells, MODELS, (OURS, GROUPED, DENSE), tiny=UNGATED),
    "sonicmoe": Suite(layer_cells, LAYERS, (OURS, GROUPED, SONICMOE, DENSE)),
    "decode": Suite(decode_cells, LAYERS, *DECODE),
    "models_decode": Suite(models_decode_cells, MODELS, *DECODE, tiny=UNGATED),
    "growth": Suite(lambda _: [], (QWEN3_30B,), (OURS,), (GRAPH,)),  # its cells are in series
    "cpu": Suite(cpu_cells, (CPU_LAYER,), (OURS, GROUPED), device="cpu"),
}


def cells_of(name: str, smoke: bool) -> Dict[str, List[dict]]:
    """The groups of a suite by name: cells that take turns, each {"cell": Cell} with more entries for the JSON."""
    if name == "growth":
        sizes = (workload.SMOKE, 8, 24) if smoke else (QWEN3_30B, 65536, 16384)
        return {
            series: [{"cell": c, "series": series, "value": v, "name": f"{series} {v:g}"} for v, c in points]
            for series, points in growth_series(*sizes).items()
        }
    suite = SUITES[name]
    cells = suite.cells(suite.tiny if smoke else suite.layers)
    if smoke:
        cells = [cell._replace(tokens=min(cell.tokens, SMOKE_TOKENS)) for cell in cells]
    return {str(cell): [{"cell": cell}] for cell in cells}


class Experts:
    """Makes the problems of cells; keeps the weights that the next ones may share."""

    def __init__(self, kernels: Dict[str, ModuleType], names: Sequence[str], device: str) -> None:
        self.providers, self.names, self.device = Providers(kernels), names, device
        self.reference = next(iter(kernels.values()))
        self.blocks: Dict[tuple, Block] = {}

    def problems(self, group: List[dict]) -> List[Problem]:
        """Those of cells that take turns."""
        keys = [(entry["cell"].layer, entry["cell"].dtype) for entry in group]
        self.blocks = {key: block for key, block in self.blocks.items() if key in keys}
        for layer, dtype in keys:
            if (layer, dtype) not in self.blocks:
                self.blocks[layer, dtype] = make_block(layer, self.device, dtype)
        return [self.problem(self.blocks[key], **entry) for key, entry in zip(keys, group)]

    def make(self, name: str, block: Block, cell: Cell):
        """A provider's function; raises where it can't do the cell, or should not be tried."""
        copies = cell.tokens * cell.layer.top_k * cell.layer.weights_per_expert * workload.ITEM
        if name == BATCHED and copies > BATCHED_BYTES:
            raise Unsupported("would copy the weights of every slot")
        if name == RECOMPUTE and not cell.backward:
            raise Unsupported("saves nothing in a forward")
        return self.providers.make(name, block, cell)

    def problem(self, block: Block, cell: Cell, **facts) -> Problem:
        """The providers that can do a cell, checked against an fp32 loop over experts. facts: for the JSON."""
        torch.manual_seed(0)
        alone = "series" not in facts or cell.tokens <= FEW_TOKENS
        sets = [make_inputs(cell, self.device) for _ in range(SETS if alone else 1)]
        wanted = expected(self.reference, block, cell, sets[0])
        counts = workload.count(cell.layer, sets)
        functions, absent = {}, {}
        for name in self.names:
            try:
                functions[name] = None if name == DENSE else self.make(name, block, cell)
            except Exception as error:  # whatever a peer lacks here
                absent[name] = str(error)[:160]
        calls = {name: make_call(f, block, sets, cell.backward) for name, f in functions.items() if name != DENSE}
        if DENSE in functions:
            calls[DENSE] = dense_products(block, [self.rows(s, cell.layer) for s in sets], cell.backward)

        def checked(name: str) -> Tuple[Dict[str, float], bool]:
            results = calls[name](0)
            return ({}, True) if name == DENSE else check(results, wanted, sets[0])

        forwards = {name: lambda f=f: f(sets[0]) for name, f in functions.items() if cell.backward and name != DENSE}
        described = {**cell.described(), **facts, **workload.facts(cell, counts)}
        part = "step" if cell.backward else "forward"
        return Problem(described, {part: calls}, checked, absent, len(sets), forwards, block.weights)

    @staticmethod
    def rows(inputs: Inputs, layer: Layer) -> int:
        """The number of slots whose expert is local."""
        return int((inputs.ids < layer.experts).sum())


def main(argv: Optional[Sequence[str]] = None) -> dict:
    parser = make_parser(__doc__, budget=900)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="these providers alone")
    arguments = parser.parse_args(argv)
    suite, kernel = SUITES[arguments.suite], load_kernel()
    experts = Experts({OURS: kernel}, arguments.peers or suite.names, suite.device)
    memory = suite.ways == (EAGER,) and suite.device != "cpu"
    tasks = [
        Task(name, lambda group=group: run_group(experts.problems(group), suite.ways, arguments, memory))
        for name, group in cells_of(arguments.suite, arguments.smoke).items()
    ]
    return main_of(arguments.suite, arguments, kernel, tasks)


if __name__ == "__main__":
    main()
