"""Times candidate tiles of every grouped GEMM on this GPU and writes those that win as configs/<device>.json.

    python benchmarks/tune.py --output torch-ext/grouped_moe/configs/nvidia_h200.json [--budget SECONDS]
    python benchmarks/tune.py --quick --output quick.json           # one layer, one step away from the tiles in use
    python benchmarks/tune.py --layers Mixtral OLMoE --rows 32 128  # these layers, so many rows per expert
    python benchmarks/tune.py --products up down --rows 1 4         # these products, of small batches

Without --output the JSON is printed. `make build` packs the file with the package; tiles that were not timed stay those
of the file that is there, or else of the heuristic.

From the tile in use, a search looks at those that differ in one field and goes on from the best until none is better.
Candidates run through the package's launchers, for several layers and row counts each; processes compile them ahead,
for a driver that only names the GPU. What fails to compile or to run, or disagrees with the tile in use, is out. Times
are medians of CUDA graph replays in turn; the smallest geometric mean over the cases wins, if by 2 % at least.
"""

import argparse
import contextlib
import gc
import math
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

import torch
from machine import first_line
from tiles import Case, Gpu, Key, Table, Tile, as_json, compile_case, make_products, module, neighbours, short
from timing import orders
from torch import Tensor
from workload import LAYERS, QWEN3_30B

ROWS = (16, 32, 64, 128, 256, 1024)  # per expert
QUICK_ROWS = (32, 256)
WON = 0.98  # of the time of the tile in use
ROUNDS, SAMPLE_MS, WARM_SECONDS = 7, 3.0, 0.15
TOLERANCE = 1e-2  # between results of two tiles, by norm: the order of their sums differs


class Bench:
    """Runs cases on the GPU."""

    def __init__(self, gpu: Gpu):
        self.table = Table(gpu.spec)
        self.made: Tuple[object, dict] = (None, {})

    def products(self, case: Case):
        """Of the case's layer and rows; one set of inputs is held at a time."""
        if self.made[0] != case[:2]:
            self.made = (None, {})
            gc.collect()
            torch.cuda.empty_cache()
            self.table.take({})
            self.made = (case[:2], make_products(case.layer, case.rows, "cuda"))
        return self.made[1]

    def times(self, case: Case, current: Dict[Key, Tile], candidates: List[Dict[Key, Tile]]) -> List[float]:
        """Median ms of a call with the current tiles and with each of the candidates; infinity for what is wrong."""
        call, graphs, pool = self.products(case)[case.product], [], torch.cuda.graph_pool_handle()
        wanted: List[Tensor] = []
        for changes in (current, *candidates):
            self.table.take(changes)
            try:
                results = call()
                wanted = wanted or [result.clone() for result in results]
                graphs.append(capture(call, pool) if all(map(agrees, results, wanted)) else None)
            except Exception as error:
                print(f"  {case.product}: {first_line(error)}", flush=True)
                graphs.append(None)
        return replay_in_turn(graphs)


def agrees(got: Tensor, wanted: Tensor) -> bool:
    """False for NaN, too."""
    norm = torch.linalg.vector_norm
    return bool(norm(got - wanted, dtype=torch.float32) <= TOLERANCE * norm(wanted, dtype=torch.float32))


def capture(call: Callable, pool) -> torch.cuda.CUDAGraph:
    """A graph of one call, whose results nobody reads: all share one memory."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        call()
    return graph


def replay_in_turn(graphs: List[Optional[torch.cuda.CUDAGraph]]) -> List[float]:
    """Median ms of each, infinity for None. Every round takes all in turn, in another one of `timing.orders`."""
    alive = [index for index, graph in enumerate(graphs) if graph is not None]
    counts: Dict[int, int] = {}
    times: Dict[int, List[float]] = {index: [] for index in alive}

    def sample(index: int, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            graphs[index].replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    warm_until = time.monotonic() + WARM_SECONDS
    while time.monotonic() < warm_until or not counts:
        counts = {index: max(1, min(64, math.ceil(SAMPLE_MS / max(sample(index, 2), 1e-3)))) for index in alive}
        if not alive:
            break
    turns = orders(alive)
    for turn in range(ROUNDS if alive else 0):
        for index in turns[turn % len(turns)]:
            times[index].append(sample(index, counts[index]))
    return [statistics.median(times[index]) if index in times else math.inf for index in range(len(graphs))]


class Search:
    """Goes from the tiles in use to better ones, a kernel and size at a time."""

    def __init__(self, gpu: Gpu, bench: Bench, pool: ProcessPoolExecutor, deadline: float):
        self.gpu, self.bench, self.pool, self.deadline = gpu, bench, pool, deadline
        self.groups: Dict[Key, List[Case]] = {}
        self.first: Dict[Key, Tile] = {}
        self.found: Dict[Key, Tile] = {}
        self.compiled: Dict[tuple, Future] = {}

    def compile(self, case: Case, changes: Dict[Key, Tile]) -> Future:
        """Begins to, once."""
        key = case, repr(changes)
        if key not in self.compiled:
            self.compiled[key] = self.pool.submit(compile_case, self.gpu, case, changes)
        return self.compiled[key]

    def group(self, cases: List[Case]) -> None:
        """Which tile each case takes, the last one that it asks for."""
        futures = [self.compile(case, {}) for case in cases]
        for case, future in zip(cases, futures):
            error, asked = future.result()
            if error or not asked or asked[-1][1] is None:
                print(f"{case.layer.name} {case.rows} {case.product}: {error or 'no tile'}", flush=True)
                continue
            key, tile = asked[-1]
            self.groups.setdefault(key, []).append(case)
            self.first.setdefault(key, tile)
        for key, group in self.groups.items():
            self.candidates(key, self.first[key], group)

    def candidates(self, key: Key, tile: Dict[str, int], group: List[Case]) -> List[Tile]:
        """The neighbours; they begin to be compiled."""
        found = neighbours(key, tile, self.gpu.spec[1])
        for candidate in found:
            for case in group:
                self.compile(case, {key: candidate})
        return found

    def ratios(self, key: Key, tile: Tile, candidates: List[Tile], group: List[Case]) -> List[float]:
        """Time of each candidate over the tile's, geometric mean over the cases; infinity for what is out."""
        logs = [0.0] * len(candidates)
        for case in group:
            usable = [not self.compile(case, {key: candidate}).result()[0] for candidate in candidates]
            alive = [index for index, good in enumerate(usable) if good and logs[index] < math.inf]
            now, *others = self.bench.times(case, {key: tile}, [{key: candidates[index]} for index in alive])
            if now == math.inf:
                return [math.inf] * len(candidates)
            found = dict(zip(alive, (math.log(other / now) for other in others)))
            logs = [total + found.get(index, math.inf) for index, total in enumerate(logs)]
        return [math.exp(total / len(group)) for total in logs]

    def step(self, key: Key, tile: Dict[str, int], group: List[Case]) -> Tuple[Tile, float]:
        """The best of the tile and its neighbours, and its time over the tile's, both by a second measurement."""
        found = self.candidates(key, tile, group)
        first = self.ratios(key, tile, found, group)
        best = min(range(len(found)), key=first.__getitem__, default=None)
        if best is None or first[best] >= WON:
            return tile, 1.0
        (again,) = self.ratios(key, tile, [found[best]], group)
        return (found[best], again) if again < WON else (tile, 1.0)

    def run(self, steps: int, write: Callable[[Dict[Key, Tile]], None]) -> None:
        """Writes after every kernel and size, so that a run that is cut short leaves what it has."""
        for key, group in self.groups.items():
            tile, gain = self.first[key], 1.0
            for _ in range(steps):
                if time.monotonic() > self.deadline:
                    print("past the budget", flush=True)
                    return
                best, ratio = self.step(key, tile, group)
                if best == tile:
                    break
                tile, gain = best, gain * ratio
                if tile is None:
                    break
            self.found[key] = tile
            write(self.found)
            cases = ", ".join(sorted({f"{case.layer.name} {case.product}" for case in group}))
            print(f"{key[0]} {key[1]}: {short(tile)}, {1 / gain:.3f} times as fast ({cases})", flush=True)


def describe_gpu() -> Gpu:
    """This machine's GPU, as torch, Triton and the package see it."""
    from triton.runtime import driver

    target = driver.active.get_current_target()
    spec = module("tuning").device_spec("cuda", torch.cuda.current_device())
    return Gpu(spec.name, (target.backend, target.arch, target.warp_size), tuple(spec))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--budget", type=float, default=1800, help="no search starts past so many seconds (1800)")
    parser.add_argument("--layers", nargs="+", metavar="WORD", help="layers of workload.py with one of these words")
    parser.add_argument("--rows", nargs="+", type=int, help=f"per expert ({' '.join(map(str, ROWS))})")
    parser.add_argument("--products", nargs="+", metavar="NAME", help="of tiles.make_products, 'down dgrad' for one")
    parser.add_argument("--steps", type=int, help="of the search, for a kernel and size (6)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="that compile")
    parser.add_argument("--quick", action="store_true", help="one layer, few row counts, one step, no fp32 results")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if not torch.cuda.is_available():
        print("tune.py: no GPU that torch.cuda sees: nothing to tune", file=sys.stderr)
        return 1
    begun, gpu = time.monotonic(), describe_gpu()
    words = arguments.layers or ["Qwen3-30B" if arguments.quick else ""]
    layers = [layer for layer in LAYERS if any(word in layer.name for word in words)]
    rows = arguments.rows or (QUICK_ROWS if arguments.quick else ROWS)
    bench = Bench(gpu)
    products = list(make_products(QWEN3_30B, 16, "cpu"))
    names = arguments.products or [name for name in products if not (arguments.quick and "linear" in name)]
    if not set(names) <= set(products):
        print(f"tune.py: --products: expected some of {', '.join(products)}", file=sys.stderr)
        return 1
    cases = [Case(layer, row, name) for layer in layers for row in rows for name in names]

    def write(found: Dict[Key, Tile]) -> None:
        if arguments.output:
            arguments.output.write_text(as_json(gpu.name, {**bench.table.base, **found}), encoding="utf-8")

    print(f"{gpu.name}: {len(cases)} cases of {', '.join(layer.name for layer in layers)}", flush=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=spawn) as pool, contextlib.ExitStack() as stack:
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        search = Search(gpu, bench, pool, begun + arguments.budget)
        search.group(cases)
        search.run(arguments.steps or (1 if arguments.quick else 6), write)
    if not arguments.output:
        print(as_json(gpu.name, {**bench.table.base, **search.found}), end="")
    print(f"{len(search.found)} of {len(search.groups)} kernels and sizes in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
