"""Speed of grouped_linear next to a loop over groups and torch's grouped_mm, one process, providers taken in turn.

    python benchmarks/run_linear.py --output benchmarks/results/linear.json [--commit SHA] [--budget SECONDS]
    python benchmarks/run_linear.py --only G=8 zipf  # the cells that have all of these words in their name
    python benchmarks/run_linear.py --floors         # the floors of every cell, without running anything
    python benchmarks/run_linear.py --smoke          # every code path at tiny sizes, also without a GPU

The method is in NOTES_linear.md. The JSON is rewritten after every cell, so a run that is cut short leaves what it has.
"""

import argparse
import gc
import math
import random
import time
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import report
import torch
from machine import describe_machine, first_line, load_kernel, write
from report import (
    DGRAD,
    DISCRETE,
    ELAPSED,
    FORWARD,
    GRAPH,
    LOOP,
    OURS,
    PACKED,
    PARTS,
    STEP,
    STEP_GRAPH,
    TORCH,
    TRACKED,
    WGRAD,
)
from timing import Call, Plan, capture, issue, sample, time_in_turn
from torch import Tensor
from torch.nn import functional as F
from workload import BYTES_PER_SECOND, FLOPS_HOT, ITEM

SHAPES = ((4096, 14336), (7168, 4096), (2048, 1536))  # K, N: Mixtral, DeepSeek-V3, Qwen3-30B-A3B
GROUPS = (8, 32, 128)
ROWS = (65536, 4096)
PATTERNS = ("zipf", "half", "balanced")
MAX_ERROR = 2e-2  # of a bf16 result against fp32, in norm; a lost row or term is far above
HOST_CALLS = 50  # issued in a row to an idle GPU; more could fill its queue


class Cell(NamedTuple):
    """One grouped linear layer: weight (groups, n, k), x (rows, k), rows split by a pattern."""

    groups: int
    k: int
    n: int
    rows: int
    pattern: str

    def __str__(self) -> str:
        return f"G={self.groups} {self.k}x{self.n} rows={self.rows} {self.pattern}"


HOST_CELLS = tuple(Cell(groups, 256, 256, 256, "balanced") for groups in GROUPS)


class Provider(NamedTuple):
    """forward(x, weights) gives rows of groups, with or without padding, and dout has as many rows.

    weights: one per group or all in one tensor, without gradients; `make_call` makes leaves of them.
    zeros_from: the first row of padding, if the provider promises to write it as 0.
    """

    forward: Callable[[Tensor, Sequence[Tensor]], Tensor]
    weights: Tuple[Tensor, ...]
    dout: Tensor
    zeros_from: Optional[int] = None


class Expected(NamedTuple):
    """The fp32 results of one group, whose rows are [start, end)."""

    group: int
    start: int
    end: int
    results: Tuple[Tensor, Tensor, Tensor]


def split_sizes(cell: Cell) -> List[int]:
    """Rows per group. half: balanced over the first half of the rows, the second belongs to no group."""
    if cell.pattern == "zipf":
        shares = [1 / rank for rank in range(1, cell.groups + 1)]
        random.Random(0).shuffle(shares)
        rows = cell.rows
    else:
        shares, rows = [1.0] * cell.groups, cell.rows // 2 if cell.pattern == "half" else cell.rows
    ends = [round(rows * end / sum(shares)) for end in accumulate(shares)]
    return [end - start for start, end in zip([0, *ends], ends)]


def floors(cell: Cell) -> Dict[str, dict]:
    """Fewest bytes, FLOPs, and the time in ms that the larger of the two takes on a hot card, of every part.

    Every input is read once and every result written once: x, y and their gradients in the rows of groups, weights of
    groups with rows, the gradients of all weights. A step is a forward and a backward that reads its three inputs once.
    """
    sizes = split_sizes(cell)
    used, with_rows = sum(sizes), sum(size > 0 for size in sizes)
    x, y = used * cell.k * ITEM, used * cell.n * ITEM
    weight = cell.k * cell.n * ITEM
    read, dw = with_rows * weight, cell.groups * weight
    moved = {FORWARD: x + read + y, DGRAD: y + read + x, WGRAD: x + y + dw}
    moved[STEP] = moved[FORWARD] + (y + x + read) + (x + dw)
    found = {}
    for part in PARTS:
        flops = 2 * used * cell.k * cell.n * (3 if part == STEP else 1)
        times = {"bytes": moved[part] / BYTES_PER_SECOND * 1e3, "flops": flops / FLOPS_HOT * 1e3}
        bound = max(times, key=times.get)
        found[part] = {"bytes": moved[part], "flops": flops, "floor_hot_ms": times[bound], "floor_of": bound}
    return found


def make_providers(kernel: ModuleType, cell: Cell, weight: Tensor, dout: Tensor) -> Dict[str, Provider]:
    """What is compared. The peers get their form of the splits, and views of the weight, for nothing.

    ours: sizes on the device; padding is written as 0.
    loop: sizes on the host; padding is left out of the output, which favours it.
    grouped_mm: offsets on the device; it leaves padding unwritten, in the output and in the gradient of x.
    """
    sizes = split_sizes(cell)
    used, padding = sum(sizes), cell.rows - sum(sizes)
    splits = torch.tensor(sizes, device=weight.device)
    offsets = torch.tensor(list(accumulate(sizes)), device=weight.device, dtype=torch.int32)
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def loop(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        parts = x.split([*sizes, padding] if padding else sizes)
        return torch.cat([F.linear(part, w) for part, w in zip(parts, weights)])

    return {
        OURS: Provider(lambda x, w: kernel.grouped_linear(x, w[0], splits), (weight,), dout, used),
        LOOP: Provider(loop, tuple(weight), dout[:used]),
        TORCH: Provider(lambda x, w: grouped_mm(x, w[0].transpose(-2, -1), offs=offsets), (weight,), dout),
    }


def make_call(provider: Provider, x: Tensor, part: str) -> Call:
    """One part of training as a call. dgrad, wgrad: the backward alone, of a graph that is kept between calls."""
    x = x.detach().requires_grad_(part in (TRACKED, DGRAD, STEP))
    weights = [w.detach().requires_grad_(part in (TRACKED, WGRAD, STEP)) for w in provider.weights]
    leaves = [tensor for tensor in (x, *weights) if tensor.requires_grad]

    def forward(_: int) -> Sequence[Tensor]:
        with torch.set_grad_enabled(part != FORWARD):
            return (provider.forward(x, weights),)

    def step(_: int) -> Sequence[Tensor]:
        out = provider.forward(x, weights)
        return (out, *torch.autograd.grad(out, leaves, provider.dout))

    if part in (FORWARD, TRACKED):
        return forward
    if part == STEP:
        return step
    out = provider.forward(x, weights)
    return lambda _: torch.autograd.grad(out, leaves, provider.dout, retain_graph=True)


def make_module_calls(kernel: ModuleType, cell: Cell, x: Tensor, dout: Tensor, part: str) -> Dict[str, Call]:
    """`GroupedLinear` with a bias, and as a trainer of Megatron-LM's kind has it: one weight per group, main_grad."""
    shape, options = (cell.groups, cell.k, cell.n), {"device": x.device, "dtype": x.dtype}
    discrete = {"single_grouped_weight": False, "accumulate_into_main_grad": True, "bias": False}
    modules = {
        PACKED: kernel.GroupedLinear(*shape, **options),
        DISCRETE: kernel.GroupedLinear(*shape, **options, **discrete),
    }
    buffers = torch.zeros((cell.groups, cell.n, cell.k), device=x.device)
    for weight, buffer in zip(modules[DISCRETE].parameters(), buffers):
        weight.main_grad = buffer
    splits, x = torch.tensor(split_sizes(cell), device=x.device), x.detach().requires_grad_()

    def make(module) -> Call:
        def step(_: int) -> Sequence[Tensor]:
            out = module(x, splits)
            return (out, *torch.autograd.grad(out, [x, *module.parameters()], dout, allow_unused=True))

        return step if part == STEP else lambda _: (module(x, splits),)

    return {name: make(module) for name, module in modules.items()}


def expect(cell: Cell, x: Tensor, weight: Tensor, dout: Tensor) -> List[Expected]:
    """Output and gradients in fp32 of the first group, the last, the smallest and the largest."""
    sizes = split_sizes(cell)
    sampled = {0, cell.groups - 1, sizes.index(min(sizes)), sizes.index(max(sizes))}
    found = []
    for group in sorted(sampled):
        start, end = sum(sizes[:group]), sum(sizes[: group + 1])
        rows, w, dy = x[start:end].float(), weight[group].float(), dout[start:end].float()
        found.append(Expected(group, start, end, (rows @ w.t(), dy @ w, dy.t() @ rows)))
    return found


def check(provider: Provider, x: Tensor, expected: List[Expected]) -> dict:
    """||got - want|| / ||want|| of the worst sampled group, absolute where want is 0, for output and gradients."""
    out, dx, *grads = make_call(provider, x, STEP)(0)
    dw = grads[0] if len(provider.weights) == 1 else grads
    errors: Dict[str, List[float]] = {"out": [], "dx": [], "dw": []}
    for group, start, end, results in expected:
        for name, got, want in zip(errors, (out[start:end], dx[start:end], dw[group]), results):
            errors[name].append((got.float() - want).norm().item() / (want.norm().item() or 1.0))
    worst = {name: torch.tensor(values).max().item() for name, values in errors.items()}  # keeps NaN, max() may not
    if provider.zeros_from is not None:
        worst["padding"] = sum(rows[provider.zeros_from :].count_nonzero().item() for rows in (out, dx))
    return {"errors": worst, "ok": all(error < MAX_ERROR for error in worst.values())}


class Bench:
    """Runs cells; keeps the weight, which cells of the same groups and shape share."""

    def __init__(self, kernel: ModuleType, device: str, plan: Plan, seconds: float) -> None:
        self.kernel, self.device, self.plan, self.seconds = kernel, device, plan, seconds
        self.cuda = device == "cuda"
        self.weight = torch.empty(0)

    def inputs(self, cell: Cell) -> Tuple[Tensor, Tensor, Tensor]:
        """x, weight and dout of unit scale: the weight is divided by the root of its fan-in."""
        torch.manual_seed(0)
        shape = (cell.groups, cell.n, cell.k)
        options = {"device": self.device, "dtype": torch.bfloat16}
        if self.weight.shape != shape:
            self.weight = torch.empty(0)
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()  # blocks of another size, as a loop leaves them, are of no use from here on
            self.weight = torch.randn(shape, **options).div_(math.sqrt(cell.k))
        return torch.randn((cell.rows, cell.k), **options), self.weight, torch.randn((cell.rows, cell.n), **options)

    def time(self, calls: Dict[str, Call], plan: Optional[Plan] = None, sampler: Callable = sample) -> Dict[str, dict]:
        return time_in_turn(calls, plan or self.plan, self.seconds, self.cuda, sampler) if calls else {}

    def prepare(self, cell: Cell) -> Tuple[Tensor, Dict[str, Provider], Dict[str, dict]]:
        """x, the providers that can run, and of every one the errors or why it can't."""
        x, weight, dout = self.inputs(cell)
        expected, checked = expect(cell, x, weight, dout), {}
        providers = make_providers(self.kernel, cell, weight, dout)
        for name, provider in providers.items():
            try:
                checked[name] = check(provider, x, expected)
            except Exception as error:  # of any library: the other providers go on
                checked[name] = {"skipped": first_line(error)}
        return x, {name: p for name, p in providers.items() if "skipped" not in checked[name]}, checked

    def graphs(self, providers: Dict[str, Provider], x: Tensor, part: str) -> Dict[str, dict]:
        """Replays of a part as a CUDA graph, where the provider's splits are on the device."""
        calls, skipped = {}, {}
        for name in providers.keys() - {LOOP}:
            try:
                calls[name] = capture(make_call(providers[name], x, part), 1)
            except Exception as error:
                skipped[name] = {"skipped": first_line(error)}
        return {**self.time(calls), **skipped}

    def run(self, cell: Cell) -> dict:
        """Everything about one cell; the errors are with the step."""
        start = time.monotonic()
        x, providers, checked = self.prepare(cell)
        skipped = {name: entry for name, entry in checked.items() if "skipped" in entry}
        result = {**cell._asdict(), "used_rows": sum(split_sizes(cell))}
        for part, floor in floors(cell).items():
            timings = self.time({name: make_call(provider, x, part) for name, provider in providers.items()})
            result[part] = {**floor, "providers": {**timings, **skipped}}
        for name in providers:
            result[STEP]["providers"][name].update(checked[name])
        for part, name in ((FORWARD, GRAPH), (STEP, STEP_GRAPH)) if self.cuda else ():
            result[name] = {"providers": self.graphs(providers, x, part)}
        return {**result, "seconds": time.monotonic() - start}

    def run_host(self, cell: Cell) -> dict:
        """What the host takes to issue a call, and what the call takes: as long, if the GPU is not what bounds it."""
        x, providers, _ = self.prepare(cell)
        result = cell._asdict()
        for part in (TRACKED, STEP):
            calls = {name: make_call(provider, x, part) for name, provider in providers.items()}
            calls.update(make_module_calls(self.kernel, cell, x, providers[OURS].dout, part))
            fixed = Plan(self.plan.warm_seconds, self.plan.rounds, math.inf, HOST_CALLS)
            result[part] = {"providers": self.time(calls, fixed, issue)}
            result[part + ELAPSED] = {"providers": self.time(calls)}
        return result


def cells(smoke: bool) -> List[Cell]:
    """First the smallest shape, whose steps the host can bound: what runs beside them can begin after them. Then the
    shapes with the group counts of their models; least important last, where a budget that ends early cuts. Cells that
    share a weight follow each other."""
    if smoke:
        return [Cell(3, 32, 48, rows, pattern) for rows in (96, 5) for pattern in PATTERNS]
    first = [*((groups, SHAPES[-1]) for groups in GROUPS), *zip(GROUPS, SHAPES[:-1])]
    rest = [(groups, shape) for groups in GROUPS for shape in SHAPES if (groups, shape) not in first]
    rest.sort(key=lambda pair: pair[0] * math.prod(pair[1]))
    return [Cell(g, *shape, rows, pattern) for g, shape in first + rest for rows in ROWS for pattern in PATTERNS]


def measure(arguments: argparse.Namespace) -> dict:
    """Runs the cells that are asked for and that the budget allows; returns everything that the JSON holds."""
    begun = time.monotonic()
    kernel = load_kernel()
    plan = Plan(0.01, 3, 1e-3, 16) if arguments.smoke else Plan(arguments.warm_seconds, arguments.rounds, 5e-3, 256, 4)
    bench = Bench(kernel, "cuda" if torch.cuda.is_available() else "cpu", plan, arguments.part_seconds)
    results = {"benchmark": report.LINEAR, **describe_machine(kernel, arguments.commit), "host": [], "cells": []}
    words = set(arguments.only)
    if words <= {"host"}:
        results["host"] = [bench.run_host(cell) for cell in HOST_CELLS[: 1 if arguments.smoke else None]]
    for cell in cells(arguments.smoke):
        if not words <= set(str(cell).split()):
            continue
        if time.monotonic() - begun > arguments.budget:
            results["cells"].append({**cell._asdict(), "skipped": f"after {arguments.budget:.0f} s in all"})
            continue
        try:
            results["cells"].append(bench.run(cell))
            print(report.progress(str(cell), {**results["cells"][-1], **results["cells"][-1][STEP]}), flush=True)
        except Exception as error:  # the other cells go on
            results["cells"].append({**cell._asdict(), "skipped": first_line(error)})
            print(f"{cell}: {first_line(error)}", flush=True)
        results["seconds"] = time.monotonic() - begun
        write(arguments.output, results)
    write(arguments.output, results)
    return results


def print_floors() -> None:
    """A Markdown table; patterns with the same floors share a row. (B): bytes are the bound, (F): FLOPs."""
    shared: Dict[tuple, List[str]] = {}
    for cell in cells(smoke=False):
        times = [f"{floor['floor_hot_ms']:.3f} ({floor['floor_of'][0].upper()})" for floor in floors(cell).values()]
        key = (cell.groups, f"{cell.k} x {cell.n}", cell.rows, sum(split_sizes(cell)), *times)
        shared.setdefault(key, []).append(cell.pattern)
    table = [
        dict(
            zip(("G", "K x N", "rows", "used", "pattern", *PARTS), map(str, (*key[:4], ", ".join(patterns), *key[4:])))
        )
        for key, patterns in shared.items()
    ]
    print("\n".join(report.markdown_table(table)))


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="commit of the package, where git can't tell")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a minute or two")
    parser.add_argument("--floors", action="store_true", help="print the floors and stop")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cells with all these words; or: host")
    parser.add_argument("--budget", type=float, default=480, help="no cell starts after so many seconds (default 480)")
    parser.add_argument(
        "--part-seconds", type=float, default=1.0, help="of a cell's part, past all orders once (default 1)"
    )
    parser.add_argument("--warm-seconds", type=float, default=0.3, help="before a part (default 0.3)")
    parser.add_argument("--rounds", type=int, default=6, help="of all in turn (default 6)")
    arguments = parser.parse_args(argv)
    if arguments.floors:
        print_floors()
        return
    results = measure(arguments)
    print(report.summary(results))
    if arguments.smoke and any(report.linear_failures(results)):
        raise SystemExit("not everything ran and agreed")


if __name__ == "__main__":
    main()
