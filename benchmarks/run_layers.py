"""Six layers' experts block next to its peers: forward, training step, their memory, and time against the local share.

    python benchmarks/run_layers.py --output benchmarks/results/layers.json [--commit SHA] [--budget SECONDS]
    python benchmarks/run_layers.py --only Mixtral T=8192   # cells by words of their names; given again: those, too
    python benchmarks/run_layers.py --peers ours SonicMoE   # these providers alone
    python benchmarks/run_layers.py --models                # layers of more models
    python benchmarks/run_layers.py --floors                # the floors of every cell, without running anything
    python benchmarks/run_layers.py --smoke                 # every code path at tiny sizes, also without a GPU

The method is in NOTES.md. The JSON is rewritten after every cell, so a run that is cut short leaves what it has.
"""

import argparse
import math
import time
import warnings
from types import ModuleType
from typing import Dict, List, Optional

import report
import torch
from machine import Task, describe_machine, first_line, load_kernel, make_parser, run_tasks
from peers import (
    Block,
    Function,
    Providers,
    check,
    dense_products,
    expected,
    make_block,
    make_call,
)
from report import (
    BACKWARD,
    COMPILED,
    DENSE,
    DENSE_WGRAD,
    EAGER,
    FROZEN,
    OURS,
    RECOMPUTE,
    SCATTERMOE,
    SONICMOE,
)
from timing import Call, Plan, peak_mib, saved_mib, time_box, time_in_turn
from workload import (
    DEEPSEEK_V3,
    GPT_OSS,
    LAYERS,
    MIXTRAL,
    MODELS,
    OLMOE,
    QWEN3_30B,
    QWEN3_NEXT,
    SMOKE,
    SMOKE_GPT_OSS,
    SMOKE_UNGATED,
    Cell,
    Inputs,
    Layer,
    count,
    described,
    expected_counts,
    floors,
    fraction,
    make_inputs,
)

PEERS = (OURS, RECOMPUTE, EAGER, COMPILED, SCATTERMOE, SONICMOE)
SETS = 4  # input sets that calls go through in turn


def model_cells() -> List[Cell]:
    """Of each a long and a short prompt, a small batch, a step."""
    cases = ((16384, False), (8192, True), (2048, False), (128, False))
    return [Cell(layer, tokens, 1.0, backward) for layer in MODELS for tokens, backward in cases]


def cells(smoke: bool, models: bool) -> List[Cell]:
    """In order of importance; equal shapes in a row compile once."""
    if smoke:
        tiny, shares = (SMOKE_UNGATED,) if models else (SMOKE, SMOKE_GPT_OSS), (1.0, 0.5, 0.125)
        return [Cell(x, 24, local, b) for x in tiny for b in (False, True) for local in shares]
    if models:
        return model_cells()

    def forward(layer: Layer, tokens: int) -> List[Cell]:
        return [Cell(layer, tokens, local) for local in (1.0, 0.5, 0.125)]

    def step(layer: Layer, tokens: int = 8192) -> List[Cell]:
        return [Cell(layer, tokens, local, True) for local in (1.0, 0.125)]

    found = forward(QWEN3_30B, 16384) + forward(DEEPSEEK_V3, 16384) + step(QWEN3_30B) + step(DEEPSEEK_V3)
    for layer in (OLMOE, QWEN3_NEXT, MIXTRAL, GPT_OSS):
        found += forward(layer, 16384)
    for layer in (OLMOE, QWEN3_NEXT, MIXTRAL, GPT_OSS):
        found += step(layer)
    for layer in LAYERS:
        found += forward(layer, 4096)
    return found + step(QWEN3_30B, 16384)


class Bench:
    """Runs cells; keeps the layers' weights and what is left of the time for compiling."""

    def __init__(self, kernel: ModuleType, device: str, arguments: argparse.Namespace) -> None:
        self.kernel, self.device, self.arguments = kernel, device, arguments
        self.cuda = device == "cuda"
        self.providers = Providers(kernel)
        self.left = {COMPILED: arguments.compile_seconds, SONICMOE: arguments.tune_seconds}
        self.blocks: Dict[Layer, Block] = {}
        self.plan = Plan(arguments.warm_seconds, arguments.rounds)

    def block(self, layer: Layer) -> Block:
        if layer not in self.blocks:
            if self.arguments.models:  # one after the other, and too many for the memory
                self.blocks.clear()
            self.blocks[layer] = make_block(layer, self.device)
        return self.blocks[layer]

    def wanted(self, cell: Cell) -> List[str]:
        """The providers of a cell: what it makes no sense to try is left out."""
        names = [name for name in PEERS if name in self.arguments.peers]
        return [name for name in names if cell.backward or name != RECOMPUTE]

    def first_call(self, name: str, call: Call) -> float:
        """Seconds of the call that may compile, which has to be within what is left of the provider's time for that."""
        left = self.left.get(name, math.inf)
        if left <= 0:
            raise TimeoutError("the time for compiling is used up")
        start = time.monotonic()
        try:
            with time_box(min(left, self.arguments.first_seconds)):
                call(0)
                if self.cuda:
                    torch.cuda.synchronize()
        finally:
            seconds = time.monotonic() - start
            self.left[name] = left - seconds
        return seconds

    def time(self, calls: Dict[str, Call]) -> Dict[str, dict]:
        return time_in_turn(calls, self.plan, self.arguments.cell_seconds, self.cuda)

    def start(self, cell: Cell, functions: Dict[str, Function], sets: List[Inputs], entries: Dict[str, dict]) -> dict:
        """The calls whose first one goes well; the errors of its results, or why there are none, in entries."""
        block, calls = self.block(cell.layer), {}
        wanted = expected(self.kernel, block, cell, sets[0])
        for name, function in functions.items():
            entry = entries[name] = {}
            try:
                call = make_call(function, block, sets, cell.backward)
                entry["first_seconds"] = self.first_call(name, call)
                entry.update(check(call(0), wanted, sets[0]))
                calls[name] = call
            except Exception as error:  # of any library: the other providers go on
                entry["skipped"] = first_line(error)
        return calls

    def prepare(self, cell: Cell) -> None:
        """One call of every provider that compiles into a cache on disk; SonicMoE's tuning needs the GPU for itself."""
        block, sets = self.block(cell.layer), [make_inputs(cell, self.device)]
        names = [name for name in self.wanted(cell) if name != SONICMOE]
        for function in self.providers.make(block, cell, names)[0].values():
            make_call(function, block, sets, cell.backward)(0)

    def run(self, cell: Cell) -> dict:
        """Everything about one cell."""
        torch.manual_seed(0)
        block = self.block(cell.layer)
        sets = [make_inputs(cell, self.device) for _ in range(SETS)]
        counts = count(cell.layer, sets)
        functions, entries = self.providers.make(block, cell, self.wanted(cell))
        calls = self.start(cell, functions, sets, entries)
        for name, call in calls.items():
            entries[name]["peak_mib"] = peak_mib(call, self.cuda)
            if cell.backward and name != COMPILED:  # within it the hooks would be part of what is compiled
                entries[name]["saved_mib"] = saved_mib(lambda f=functions[name]: f(sets[0]), block.weights)
        dense = dense_products(block, [int((s.ids < cell.layer.experts).sum()) for s in sets])
        calls[DENSE] = dense["step" if cell.backward else "forward"]
        for name, timing in self.time(calls).items():
            entries.setdefault(name, {}).update(timing)
        found = {**described(counts), **floors(cell, counts), "providers": entries}
        if cell.backward:
            both = {name: functions[name] for name in (OURS, EAGER) if name in calls}
            found["parts"] = self.parts(block, both, dense, sets[:1])
        return found

    def parts(self, block: Block, functions: Dict[str, Function], dense: Dict[str, Call], sets: List[Inputs]) -> dict:
        """The backward alone, with all gradients, and of a graph with frozen weights: the products of dgrad.

        The graphs are kept between calls, so they all run on one input set. What does not require a gradient is not
        computed; to leave it out of what is asked for would not do, for a Python autograd function is not told.
        """
        s, calls = sets[0], {BACKWARD: {}, FROZEN: {DENSE: dense["dgrad"], DENSE_WGRAD: dense["wgrad"]}}
        for name, function in functions.items():
            for part, trained in ((BACKWARD, True), (FROZEN, False)):
                for weight in block.weights:
                    weight.requires_grad_(trained)
                out = function(s)
                leaves = (s.x, s.weights, *block.weights) if trained else (s.x, s.weights)
                calls[part][name] = lambda _, out=out, leaves=leaves: torch.autograd.grad(
                    out, leaves, s.dout, retain_graph=True
                )
        for weight in block.weights:
            weight.requires_grad_()
        every = {(part, name): call for part, found in calls.items() for name, call in found.items()}
        timed = self.time(every)
        return {part: {name: timed[part, name] for name in found} for part, found in calls.items()}


def print_floors(models: bool) -> None:
    """A Markdown table, from expected instead of drawn routings."""
    columns = ("layer", "mode", "T", "local", "rows", "experts with rows", "GB", "TFLOP", "bytes ms", "hot ms")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for cell in cells(smoke=False, models=models):
        counts = expected_counts(cell)
        floor = floors(cell, counts)
        print(
            f"| {cell.layer.name} | {'fwd+bwd' if cell.backward else 'fwd'} | {cell.tokens} | {fraction(cell.local)} "
            f"| {counts.rows:.0f} | {counts.experts:.0f} | {floor['bytes'] / 1e9:.3f} | {floor['flops'] / 1e12:.4f} "
            f"| {floor['bytes_ms']:.3f} | {floor['floor_hot_ms']:.3f} |"
        )


def main(argv: Optional[List[str]] = None) -> dict:
    parser = make_parser(__doc__, budget=900, cell_seconds=2.0)
    parser.add_argument("--models", action="store_true", help="layers of more models instead")
    parser.add_argument("--floors", action="store_true", help="print the floors and stop")
    parser.add_argument(
        "--peers", nargs="+", default=list(PEERS), choices=PEERS, metavar="NAME", help="of " + str(PEERS)
    )
    parser.add_argument("--compile-seconds", type=float, default=120, help="for torch.compile in all (120)")
    parser.add_argument(
        "--tune-seconds", type=float, default=500, help="for SonicMoE's compiling and tuning in all (500)"
    )
    parser.add_argument("--first-seconds", type=float, default=200, help="for one call that compiles or tunes (200)")
    arguments = parser.parse_args(argv)
    if arguments.floors:
        print_floors(arguments.models)
        return {}
    # Which cached helpers of transformers the compiler traces through is not news here.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    kernel = load_kernel()
    bench = Bench(kernel, "cuda" if torch.cuda.is_available() else "cpu", arguments)
    machine = describe_machine(kernel, arguments.commit)
    results = {"benchmark": report.LAYERS, **machine, "peers": bench.providers.builds}
    tasks = [
        Task("cells", c.described(), str(c), lambda c=c: bench.run(c), lambda c=c: bench.prepare(c))
        for c in cells(arguments.smoke, arguments.models)
    ]
    run_tasks(results, tasks, arguments, report.progress)
    if not arguments.prepare:
        print(report.summary(results))
    return results


if __name__ == "__main__":
    main()
