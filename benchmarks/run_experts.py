"""Speed and memory of the experts block next to transformers' grouped_mm, one process, providers taken in turn.

    python benchmarks/run_experts.py --output benchmarks/results/experts.json [--commit SHA]
    python benchmarks/run_experts.py --floors        # the floors of every cell, without running anything
    python benchmarks/run_experts.py --smoke         # every code path at tiny sizes, also without a GPU

The method is in NOTES.md. The JSON is rewritten after every cell, so a run that is cut short leaves what it has.
"""

import argparse
import json
import math
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import report
import torch
from report import COMPILED, DENSE, EAGER, GRAPHS, OURS
from timing import Call, Plan, capture, peak_mib, time_box, time_in_turn
from torch import Tensor
from workload import (
    QWEN3_30B,
    SMOKE,
    Cell,
    Inputs,
    Layer,
    count,
    describe_machine,
    expected_counts,
    floors,
    fraction,
    load_kernel,
    make_inputs,
)

GRAPH_TOKENS = 128  # up to here the host is a large part of a call, so graph replays are timed as well
SETS = 4  # input sets that calls go through in turn: one set's weights could stay in the cache at T = 1
MAX_ERROR = 2e-2  # of a bf16 result against fp32, in norm; a lost row or term is far above
FEW_ROWS = 256  # with fewer, routing-weight gradients are a few inner products that may cancel: reported, not judged


class Provider(NamedTuple):
    """call(i) runs on input set i and returns (output, *gradients); checked: they are comparable with a reference."""

    call: Call
    checked: bool = True


class Block(NamedTuple):
    """A layer's weights, in the experts module of transformers."""

    layer: Layer
    module: torch.nn.Module
    device: str

    @property
    def weights(self) -> Tuple[Tensor, Tensor]:
        """gate_up_proj (E, 2 I, H) and down_proj (E, H, I)."""
        return self.module.gate_up_proj, self.module.down_proj


def make_block(layer: Layer, device: str) -> Block:
    """Weights of unit scale: divided by the root of their fan-in."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        num_experts=layer.experts, hidden_size=layer.hidden, moe_intermediate_size=layer.intermediate, hidden_act="silu"
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    e, h, i = layer.experts, layer.hidden, layer.intermediate
    for name, shape in (("gate_up_proj", (e, 2 * i, h)), ("down_proj", (e, h, i))):
        weight = torch.randn(shape, device=device, dtype=torch.bfloat16).div_(math.sqrt(shape[-1]))
        setattr(module, name, torch.nn.Parameter(weight))
    return Block(layer, module, device)


def call_experts(function: Callable, block: Block, inputs: Inputs, backward: bool) -> Sequence[Tensor]:
    """(out,) without a graph, or (out, gradients of hidden states, routing weights and both projections)."""
    if not backward:
        with torch.no_grad():
            return (function(inputs),)
    out = function(inputs)
    return (out, *torch.autograd.grad(out, (inputs.x, inputs.weights, *block.weights), inputs.dout))


def dense_products(block: Block, cell: Cell, sets: List[Inputs]) -> Call:
    """The products of a call as plain matrix products over all its rows at once; the backward counts as two more."""
    layer, repeats = block.layer, 3 if cell.backward else 1
    up, down = (weight.detach()[0].t() for weight in block.weights)
    rows = [int((inputs.ids < layer.experts).sum()) for inputs in sets]
    options = {"device": block.device, "dtype": torch.bfloat16}
    most = max(rows)
    x, a = torch.randn((most, layer.hidden), **options), torch.randn((most, layer.intermediate), **options)

    def call(i: int) -> Sequence[Tensor]:
        for _ in range(repeats):
            results = x[: rows[i % len(rows)]] @ up, a[: rows[i % len(rows)]] @ down
        return results

    return call


class Bench:
    """Runs cells; keeps the budgets and the results."""

    def __init__(self, kernel: ModuleType, block: Block, arguments: argparse.Namespace) -> None:
        from transformers.integrations.moe import grouped_mm_experts_forward

        self.kernel, self.block, self.arguments = kernel, block, arguments
        self.cuda = block.device == "cuda"
        self.transformers = grouped_mm_experts_forward
        self.compiled: Optional[Callable] = None
        self.compiled_for: object = None
        self.compile_left = arguments.compile_seconds

    def providers(self, cell: Cell, sets: List[Inputs]) -> Tuple[Dict[str, Provider], Dict[str, dict]]:
        """What can run in this cell, and why the rest can't."""
        kernel, block = self.kernel, self.block
        module, (up, down) = block.module, block.weights
        if hasattr(module, "_is_expert_parallel"):
            module._is_expert_parallel = cell.local < 1

        def on_sets(function: Callable[[Inputs], Tensor]) -> Call:
            return lambda i: call_experts(function, block, sets[i % len(sets)], cell.backward)

        calls = {
            OURS: on_sets(lambda s: kernel.grouped_mm_experts(s.x, s.ids, s.weights, up, down)),
            EAGER: on_sets(lambda s: self.transformers(module, s.x, s.ids, s.weights)),
        }
        found = {name: Provider(call) for name, call in calls.items()}
        found[DENSE] = Provider(dense_products(block, cell, sets), checked=False)
        skipped: Dict[str, dict] = {}
        if self.cuda and cell.tokens <= GRAPH_TOKENS and not cell.backward:
            for name, graph_name in GRAPHS.items():
                try:
                    found[graph_name] = Provider(capture(calls[name], len(sets)))
                except Exception as error:  # of any library: the other providers go on
                    skipped[graph_name] = {"skipped": first_line(error)}
        try:
            compiled = self.compile(cell)
            call = on_sets(lambda s: compiled(module, s.x, s.ids, s.weights))
            self.first_call(call)
            found[COMPILED] = Provider(call)
        except Exception as error:
            skipped[COMPILED] = {"skipped": first_line(error)}
            self.compiled = self.compiled_for = None
        return found, skipped

    def compile(self, cell: Cell) -> Callable:
        """transformers' function compiled for the shapes of this cell, kept for the next one of the same shapes."""
        if self.compile_left <= 0:
            raise TimeoutError("the time for compiling is used up")
        key = (cell.tokens, getattr(self.block.module, "_is_expert_parallel", None))
        if self.compiled is None or self.compiled_for != key:
            torch._dynamo.reset()  # else one function's graphs for other shapes count towards its limit
            self.compiled = torch.compile(self.transformers, dynamic=False, fullgraph=True)
            self.compiled_for = key
        return self.compiled

    def first_call(self, call: Call) -> None:
        """The call that compiles, within what is left of the compile time and at most a minute."""
        start = time.monotonic()
        try:
            with time_box(min(self.compile_left, 60.0)):
                call(0)
                self.synchronize()
        finally:
            self.compile_left -= time.monotonic() - start

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def saved(self, name: str, inputs: Inputs) -> Optional[float]:
        """MiB that the forward keeps for the backward, parameters left out and inputs not; None if not to be had."""
        functions = {
            OURS: lambda s: self.kernel.grouped_mm_experts(s.x, s.ids, s.weights, *self.block.weights),
            EAGER: lambda s: self.transformers(self.block.module, s.x, s.ids, s.weights),
        }
        if name not in functions:  # within a compiled function the hooks would be part of what is compiled
            return None
        parameters = {weight.untyped_storage().data_ptr() for weight in self.block.weights}
        kept: Dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = functions[name](inputs)
        del out
        return sum(kept.values()) / 2**20

    def reference(self, cell: Cell, inputs: Inputs) -> List[Tensor]:
        """The results in fp32, by a loop over experts."""
        tensors = [t.detach().float().requires_grad_() for t in (inputs.x, inputs.weights, *self.block.weights)]
        x, weights, up, down = tensors
        if not cell.backward:
            with torch.no_grad():
                return [self.kernel.reference.grouped_mm_experts(x, inputs.ids, weights, up, down)]
        out = self.kernel.reference.grouped_mm_experts(x, inputs.ids, weights, up, down)
        if not out.requires_grad:  # no expert here has a row
            return [out, *(torch.zeros_like(t) for t in tensors)]
        return [out.detach(), *torch.autograd.grad(out, tensors, inputs.dout.float())]

    def errors(self, results: Sequence[Tensor], expected: List[Tensor]) -> Dict[str, float]:
        """||got - expected|| / ||expected|| for the output and each gradient; absolute where expected is 0."""
        names = ("out", "d_hidden_states", "d_top_k_weights", "d_gate_up_proj", "d_down_proj")
        found = {}
        for name, got, want in zip(names, results, expected):
            scale = want.norm().item()
            found[name] = (got.float() - want).norm().item() / (scale or 1.0)
        return found

    def run(self, cell: Cell) -> dict:
        """Everything about one cell."""
        start = time.monotonic()
        layer = self.block.layer
        torch.manual_seed(0)
        sets = [make_inputs(layer, cell, self.block.device) for _ in range(SETS)]
        counts = count(layer, sets)
        found, providers = self.providers(cell, sets)
        expected = self.reference(cell, sets[0])
        for name, provider in found.items():
            entry = providers.setdefault(name, {})
            if provider.checked:
                entry["errors"] = self.errors(provider.call(0), expected)
                judged = {n: e for n, e in entry["errors"].items() if n != "d_top_k_weights" or counts.rows >= FEW_ROWS}
                entry["ok"] = all(error < MAX_ERROR for error in judged.values())
        del expected
        for name, provider in found.items():
            if name not in GRAPHS.values():
                providers[name]["peak_mib"] = peak_mib(provider.call, self.cuda)
            if cell.backward:
                providers[name]["saved_mib"] = self.saved(name, sets[0])
        calls = {name: provider.call for name, provider in found.items()}
        plan = Plan(self.arguments.warm_seconds, self.arguments.rounds)
        timings = time_in_turn(calls, plan, self.arguments.cell_seconds, self.cuda)
        for name, timing in timings.items():
            providers[name].update(timing)
        return {
            **cell._asdict(),
            "routed_rows": counts.rows,
            "tokens_with_rows": counts.tokens,
            "experts_with_rows": counts.experts,
            **floors(layer, cell, counts),
            "providers": providers,
            "seconds": time.monotonic() - start,
        }


def first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def cells(smoke: bool) -> List[Cell]:
    """Large first, so that a budget that ends early costs the small cells; equal shapes in a row compile once."""
    tokens = (40, 16, 5, 1) if smoke else (16384, 4096, 128, 1)
    return [Cell(t, local, backward) for t in tokens for local in (1.0, 0.5, 0.125) for backward in (False, True)]


def measure(arguments: argparse.Namespace) -> dict:
    """Runs the cells that the budget allows and returns everything that the JSON holds."""
    begun = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = SMOKE if arguments.smoke else QWEN3_30B
    kernel = load_kernel()
    results = {"layer": layer._asdict(), **describe_machine(kernel, arguments.commit), "cells": []}
    bench = Bench(kernel, make_block(layer, device), arguments)
    for cell in cells(arguments.smoke):
        if time.monotonic() - begun > arguments.seconds:
            results["cells"].append({**cell._asdict(), "skipped": f"after {arguments.seconds:.0f} s in all"})
            continue
        results["cells"].append(bench.run(cell))
        results["seconds"] = time.monotonic() - begun
        write(arguments.output, results)
        print(report.progress(str(cell), results["cells"][-1]), flush=True)
    write(arguments.output, results)
    return results


def write(path: Optional[Path], results: dict) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def print_floors(layer: Layer) -> None:
    """A Markdown table, from expected instead of drawn routings."""
    columns = ("T", "local", "mode", "routed rows", "experts with rows", "GB", "TFLOP", "bytes ms", "cool ms", "hot ms")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for cell in sorted(cells(smoke=False), key=lambda c: (c.backward, c.tokens, -c.local)):
        counts = expected_counts(layer, cell)
        floor = floors(layer, cell, counts)
        print(
            f"| {cell.tokens} | {fraction(cell.local)} | {'fwd+bwd' if cell.backward else 'fwd'} | {counts.rows:.0f} "
            f"| {counts.experts:.0f} | {floor['bytes'] / 1e9:.3f} | {floor['flops'] / 1e12:.4f} "
            f"| {floor['bytes_ms']:.3f} | {floor['floor_ms']:.3f} | {floor['floor_hot_ms']:.3f} |"
        )


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="commit of the package, where git can't tell")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a few seconds")
    parser.add_argument("--floors", action="store_true", help="print the floors and stop")
    parser.add_argument("--seconds", type=float, default=270, help="no cell starts after so many (default 270)")
    parser.add_argument("--cell-seconds", type=float, default=6, help="time of a cell's rounds (default 6)")
    parser.add_argument("--compile-seconds", type=float, default=100, help="for torch.compile in all (default 100)")
    parser.add_argument("--warm-seconds", type=float, default=Plan().warm_seconds, help="before a cell")
    parser.add_argument("--rounds", type=int, default=Plan().rounds, help="of all in turn")
    arguments = parser.parse_args(argv)
    if arguments.floors:
        print_floors(QWEN3_30B)
        return
    # Which cached helpers of transformers the compiler traces through is not news here.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    print(report.summary(measure(arguments)))


if __name__ == "__main__":
    main()
