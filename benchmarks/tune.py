"""Times candidate tiles of grouped GEMMs on this GPU and writes those that win as configs/<device>.json.

    python benchmarks/tune.py [--output FILE] [--budget SECONDS]
    python benchmarks/tune.py --quick --output quick.json           # one layer, one step away from the tiles in use
    python benchmarks/tune.py --layers Mixtral OLMoE --rows 32 128  # these layers, so many rows per expert

`make build` packs the file with the package; tiles that were not timed stay those that the GPU has now. Hopper's fused
kernels, thin weight gradients and the kernels of FP8 weights have fixed tiles: there is nothing to choose.

From the tile in use, a search looks at those that differ in one field and goes on from the best until none is better.
Candidates run through the package's launchers, for several layers and row counts each; processes compile them ahead,
for a driver that only names the GPU. What fails to compile or to run, or disagrees with the tile in use, is out. Times
are medians of CUDA graph replays in turn; the smallest geometric mean over the cases wins, if by 2 % at least.
"""

import argparse
import contextlib
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple
from unittest import mock

import timing
import torch
from machine import ROOT, first_line, load_kernel
from torch import Tensor
from triton.runtime import driver
from workload import LAYERS, Cell, Layer, draw_ids

sys.path.insert(0, str(ROOT / "tools"))

import compile_check  # noqa: E402

PRODUCTS = ("up", "down", "down dgrad", "dx", "up wgrad", "down wgrad", "linear wgrad", "linear wgrad fp32")
ROWS, QUICK_ROWS = (16, 32, 64, 128, 256, 1024), (32, 256)  # per expert
STEPS = 6  # of a search, for a kernel and size
WORKERS = max(1, (os.cpu_count() or 1) - 1)  # that compile
WON = 0.98  # of the time of the tile in use
PLAN = timing.Plan(warm_seconds=0.15, rounds=7, seconds=0.0, sample_seconds=3e-3)
TOLERANCE = 1e-2  # between results of two tiles, by norm: the order of their sums differs
FIELDS = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "group_m", "programs_per_sm")

Key = Tuple[str, int]  # kernel and size, as in a file
Tile = Optional[Dict[str, int]]  # all fields; None: not by this kernel


class Gpu(NamedTuple):
    """What processes without it compile for: its target and its DeviceSpec, as tuples."""

    target: Tuple[str, object, int]
    spec: tuple


class Case(NamedTuple):
    """A product of a layer's forward or backward with so many rows per expert, all local."""

    layer: Layer
    rows: int
    product: str


class Tiles:
    """The tiles that the package takes. base: those it has. asked: what it has asked for since the last change."""

    def __init__(self, package: compile_check.Package, spec):
        self.base, self.asked, self.current = dict(package["tuning.files"].tiles_of(spec)), [], {}
        self.launcher_of = package["backends.table"].launcher_of

    def take(self, changes: Dict[Key, Tile]) -> None:
        """From here on the package takes the tiles that it has, but for these changes."""
        self.current = {**self.base, **changes}
        self.asked.clear()
        self.launcher_of.cache_clear()


@contextlib.contextmanager
def replaced(package: compile_check.Package, spec) -> Iterator[Tiles]:
    """Within, the package takes tiles from here, in place of those in its files."""
    tiles, heuristic = Tiles(package, spec), package["tuning.heuristic"]
    choose = heuristic.choose_tile

    def recorded(kernel, size, *rest):
        chosen = choose(kernel, size, *rest)
        tile = None if chosen is None else {name: getattr(chosen, name) for name in FIELDS}
        tiles.asked.append(((kernel, size), tile))
        return chosen

    with (
        mock.patch.object(heuristic, "choose_tile", recorded),
        mock.patch.object(heuristic, "tiles_of", lambda _: tiles.current),
    ):
        tiles.take({})
        yield tiles
    tiles.take({})  # leaves nothing of it in the caches


def make_products(
    package: compile_check.Package, layer: Layer, rows_per_expert: int, device: str
) -> Dict[str, Callable[[int], List[Tensor]]]:
    """The grouped GEMMs of a layer's forward and backward, on the GPU with numbers, on a CPU with unwritten memory."""
    kernels, real = package["backends.triton"], device != "cpu"
    e, h, i, top_k, t = layer.experts, layer.hidden, layer.intermediate, layer.top_k, layer.transposed
    tokens = max(1, rows_per_expert * e // top_k)

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(shape, device=device, dtype=torch.bfloat16)
        return made.normal_().mul_(scale) if real else made

    up, down = (tensor(*shape, scale=fan_in**-0.5) for shape, fan_in in zip(layer.weight_shapes, (h, i)))
    biases = (tensor(e, 2 * i), tensor(e, h)) if layer.bias else (None, None)
    activation = package["common.activation"].Activation(*layer.activation)
    block = package["block"].Block(up, down, *biases, None, None, activation, **layer.kind, recompute=False)
    ids = draw_ids(Cell(layer, tokens), device) if real else torch.empty((tokens, top_k), dtype=torch.int64)
    rows = kernels.route(ids, e, torch.bfloat16)
    x, dout, act, preact = tensor(tokens, h), tensor(tokens, h), tensor(ids.numel(), i), tensor(ids.numel(), 2 * i)
    x_rows, weights = tensor(ids.numel(), h), torch.ones(tokens, top_k, device=device)
    dup, ddown, wide = (torch.empty_like(w, dtype=d) for w, d in ((up, None), (down, None), (up, torch.float32)))
    needs = package["block"].Needs(*[True] * 7)

    def down_dgrad(_: int) -> List[Tensor]:
        dpreact, _, a, dots = kernels.down_dgrad(block, dout, rows, weights, preact, needs)
        return [dpreact, a, dots.sum(0) if real else dots]

    def wgrad(lhs: Tensor, rhs: Tensor, out: Tensor, **gathered: bool) -> Callable[[int], List[Tensor]]:
        def call(_: int) -> List[Tensor]:
            kernels.wgrad(lhs, rhs, rows, out.transpose(1, 2) if t else out, **gathered)
            return [out]

        return call

    calls = (
        lambda _: [kernels.up_proj(block, x, rows, None, save=False, activate=True)[1]],
        lambda _: [kernels.gemm(act, down, rows, transposed=t, bias=block.down_bias)],
        down_dgrad,
        lambda _: [kernels.gemm(preact, up, rows, transposed=not t)],
        wgrad(preact, x, dup, rhs_of_tokens=True),
        wgrad(dout, act, ddown, lhs_of_tokens=True),
        wgrad(preact, x_rows, dup),
        wgrad(preact, x_rows, wide),
    )
    return dict(zip(PRODUCTS, calls))


@functools.lru_cache(maxsize=1)
def unwritten(gpu: Gpu, layer: Layer, rows: int) -> tuple:
    """(package, DeviceSpec, context in which launches compile, products on a CPU) for a process that compiles."""
    package, target = compile_check.Package(load_kernel()), compile_check.GPUTarget(*gpu.target)
    spec = package["common.device"].DeviceSpec(*gpu.spec)
    compiling = functools.partial(compile_check.compiling_for, package, target, spec, lambda *_: None)
    with compiling():
        return package, spec, compiling, make_products(package, layer, rows, "cpu")


def compile_case(gpu: Gpu, case: Case, changes: Dict[Key, Tile]) -> Tuple[str, List[Tuple[Key, Tile]]]:
    """Compiles into the cache on disk. Returns the error, if any, and which tiles were asked for."""
    package, spec, compiling, products = unwritten(gpu, case.layer, case.rows)
    with replaced(package, spec) as tiles, compiling():
        tiles.take(changes)
        try:
            products[case.product](0)
        except Exception as error:  # no more than one candidate less
            return first_line(error), []
        return "", list(tiles.asked)


def neighbours(key: Key, tile: Dict[str, int], shared_memory: int) -> List[Tile]:
    """The tiles that differ from this one in one field and may fit; for a Gluon kernel also None."""
    kernel, wgrad, found = key[0], key[0].startswith("wgrad"), []
    near = {name: (tile[name] // 2, 2 * tile[name]) for name in ("block_n", "block_k", "num_warps", "block_m")}
    choices = {"num_stages": (tile["num_stages"] - 1, tile["num_stages"] + 1)}
    if "hopper" in kernel:  # their blocks are those of the kernels
        choices["group_m"] = (1, 4, 8, 16)
    else:
        choices.update({name: near[name] for name in near if wgrad or name != "block_m"})
        choices["programs_per_sm"] = (0, 1, 2) if wgrad else (1, 2, 3)
        choices.update({"group_m": (4, 8, 16)} if kernel.startswith("up_proj") else {})
    limits = {"block_m": (64, 128), "block_n": (32, 256), "block_k": (32, 128), "num_warps": (4, 8)}
    for name, values in choices.items():
        low, high = limits.get(name, (2, 8) if name == "num_stages" else (0, 16))
        others = [{**tile, name: value} for value in values if low <= value <= high and value != tile[name]]
        found += [other for other in others if fits(kernel, other, shared_memory)]
    return found + ([None] if "hopper" in kernel else [])


def fits(kernel: str, tile: Dict[str, int], shared_memory: int) -> bool:
    """Whether its buffers have room, for a Gluon kernel beside results, and its sums 128 registers of each thread."""
    columns = tile["block_n"] * (2 if "gated" in kernel else 1)
    buffers = tile["num_stages"] * tile["block_k"] * (tile["block_m"] + columns) * 2
    if kernel.startswith("wgrad_hopper"):  # a whole tile of them
        return buffers + tile["block_m"] * columns * (4 if kernel.endswith("fp32") else 2) <= shared_memory
    if "hopper" in kernel:  # two staging tiles of 64 columns
        return buffers + 2 * tile["block_m"] * 64 * 2 <= shared_memory
    return buffers <= shared_memory and tile["block_m"] * columns <= 128 * 32 * tile["num_warps"]


def as_json(package: compile_check.Package, table) -> str:
    """A file of the package, a tile a line, without what `files.read_table` fills in."""
    files, lines = package["tuning.files"], {}
    for kernel in files.KERNELS:
        fields = FIELDS if kernel.startswith("wgrad") else FIELDS[1:]
        for size, tile in sorted((key[1], tile) for key, tile in table.tiles.items() if key[0] == kernel):
            given = tile and {name: tile[name] for name in fields if tile[name] != files.DEFAULTS.get(name)}
            lines.setdefault(kernel, []).append(f'      "{size}": {json.dumps(given)}')
    kernels = ",\n".join(f'    "{kernel}": {{\n' + ",\n".join(of) + "\n    }" for kernel, of in lines.items())
    head = "".join(f'  "{name}": {json.dumps(getattr(table, name))},\n' for name in table._fields if name != "tiles")
    return f'{{\n{head}  "tiles": {{\n{kernels}\n  }}\n}}\n'


class Bench:
    """Runs cases on the GPU."""

    def __init__(self, package: compile_check.Package, tiles: Tiles):
        self.package, self.tiles, self.made = package, tiles, (None, {})

    def times(self, case: Case, key: Key, candidates: List[Tile]) -> List[float]:
        """Median ms of a call with each; infinity for what is wrong. The first one's results are what is right."""
        if self.made[0] != case[:2]:  # one set of inputs is held at a time
            self.made = (None, {})
            timing.release_memory()
            self.made = (case[:2], make_products(self.package, *case[:2], "cuda"))
        call, calls = self.made[1][case.product], {}
        wanted: List[Tensor] = []
        for number, tile in enumerate(candidates):
            self.tiles.take({key: tile})
            try:
                results = call(0)
                wanted = wanted or [result.clone() for result in results]
                if all(map(agrees, results, wanted)):
                    calls[number] = timing.capture(call, 1)
            except Exception as error:
                print(f"  {case.product}: {first_line(error)}", flush=True)
        samples = timing.time_in_turn(calls, PLAN)
        return [statistics.median(samples.get(number, [math.inf])) for number in range(len(candidates))]

    def ratios(self, key: Key, tile: Tile, candidates: List[Tile], cases: List[Case]) -> List[float]:
        """Time of each candidate over the tile's, geometric mean over the cases; infinity for what is out."""
        logs = [0.0] * len(candidates)
        for case in cases:
            alive = [number for number, total in enumerate(logs) if total < math.inf]
            now, *others = self.times(case, key, [tile, *(candidates[number] for number in alive)])
            for number, taken in zip(alive, others):
                logs[number] += math.log(taken / now) if now < math.inf else math.inf
        return [math.exp(total / len(cases)) for total in logs]


def agrees(got: Tensor, wanted: Tensor) -> bool:
    """False for NaN, too."""
    norm = torch.linalg.vector_norm
    return bool(norm(got - wanted, dtype=torch.float32) <= TOLERANCE * norm(wanted, dtype=torch.float32))


def search(
    key: Key, tile: Tile, cases: List[Case], bench: Bench, compile_all: Callable, shared_memory: int, steps: int
) -> Tuple[Tile, float]:  # fmt: skip
    """The tile that a search ends at, and its time over the first one's. What wins a step is measured twice."""
    gain = 1.0
    for _ in range(steps):
        found = neighbours(key, tile, shared_memory)
        compile_all([(case, {key: candidate}) for case in cases for candidate in found])
        ratio, best = min(zip(bench.ratios(key, tile, found, cases), range(len(found))), default=(math.inf, 0))
        if ratio < WON:
            (ratio,) = bench.ratios(key, tile, [found[best]], cases)
        if not ratio < WON:
            break
        tile, gain = found[best], gain * ratio
        if tile is None:
            break
    return tile, gain


def group(cases: List[Case], compiled: Iterable[Tuple[str, list]]) -> Dict[Key, Tuple[Tile, List[Case]]]:
    """The tile in use and the cases by kernel and size: that which a case, compiled as it is, asks for last."""
    groups: Dict[Key, Tuple[Tile, List[Case]]] = {}
    for case, (error, asked) in zip(cases, compiled):
        if error or not asked or asked[-1][1] is None:
            print(f"{case.layer.name} {case.rows} {case.product}: {error or 'no tile'}", flush=True)
        else:
            groups.setdefault(asked[-1][0], (asked[-1][1], []))[1].append(case)
    return groups


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write (this GPU's in the package's source)")
    parser.add_argument("--budget", type=float, default=1800, help="no search starts past so many seconds (1800)")
    parser.add_argument("--layers", nargs="+", metavar="WORD", help="layers of workload.py with one of these words")
    parser.add_argument("--rows", nargs="+", type=int, help=f"per expert ({' '.join(map(str, ROWS))})")
    parser.add_argument("--quick", action="store_true", help="one layer, few row counts, one step, no linear layers")
    arguments, names = parser.parse_args(), [layer.name for layer in LAYERS]
    for word in arguments.layers or ():
        if not any(word in name for name in names):
            parser.error(f"--layers: expected words of {', '.join(names)}, got {word!r}")
    return arguments


def main() -> int:
    arguments, begun = parse(), time.monotonic()
    if not torch.cuda.is_available():
        print("tune.py: no GPU that torch.cuda sees: nothing to tune", file=sys.stderr)
        return 1
    package, target = compile_check.Package(load_kernel()), driver.active.get_current_target()
    device = torch.device("cuda", torch.cuda.current_device())
    files, spec = package["tuning.files"], package["common.device"].device_spec(device)
    if not spec.bandwidth:
        print("tune.py: expected a GPU whose driver tells the memory's clock and width", file=sys.stderr)
        return 1
    gpu = Gpu((target.backend, target.arch, target.warp_size), astuple(spec))
    words = arguments.layers or (["Qwen3-30B"] if arguments.quick else [""])
    layers = [layer for layer in LAYERS if any(word in layer.name for word in words)]
    names, steps = (PRODUCTS[:-2], 1) if arguments.quick else (PRODUCTS, STEPS)
    rows = arguments.rows or (QUICK_ROWS if arguments.quick else ROWS)
    cases = [Case(layer, row, name) for layer in layers for row in rows for name in names]
    output = arguments.output or ROOT / "torch-ext" / "grouped_moe" / "configs" / files.file_of(spec.name).name
    print(f"{spec.name}: {len(cases)} cases of {', '.join(layer.name for layer in layers)}", flush=True)
    spawn, found = multiprocessing.get_context("spawn"), {}
    with ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool, replaced(package, spec) as tiles:
        bench = Bench(package, tiles)

        def compile_all(jobs: List[tuple]) -> list:
            return list(pool.map(functools.partial(compile_case, gpu), *zip(*jobs)))

        groups = group(cases, compile_all([(case, {}) for case in cases]))
        for key, (tile, of_key) in groups.items():
            if time.monotonic() - begun > arguments.budget:
                print("past the budget", flush=True)
                break
            found[key], gain = search(key, tile, of_key, bench, compile_all, spec.shared_memory, steps)
            # Written after each, so that a run that is cut short leaves what it has.
            table = files.Table(spec.name, spec.capability, spec.num_sms, spec.bandwidth, {**tiles.base, **found})
            output.write_text(as_json(package, table), encoding="utf-8")
            said = ", ".join(sorted({f"{case.layer.name} {case.product}" for case in of_key}))
            print(f"{key[0]} {key[1]}: {found[key]}, {1 / gain:.3f} times as fast ({said})", flush=True)
    print(f"{len(found)} of {len(groups)} kernels and sizes in {time.monotonic() - begun:.0f} s: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
