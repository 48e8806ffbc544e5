"""How cost grows with tokens, experts, the local share and skew; routing and combine alone. On a GPU: graph replays.

    python benchmarks/run_growth.py --output benchmarks/results/growth.json [--commit SHA] [--budget SECONDS]
    python benchmarks/run_growth.py --only experts          # the series that have all of these words in their name
    python benchmarks/run_growth.py --smoke                 # every code path at tiny sizes, also without a GPU

The points of a series take turns in one process. The method is in NOTES.md.
"""

import argparse
import gc
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import report
import torch
from machine import Task, describe_machine, first_line, load_kernel, make_parser, run_tasks
from peers import check, expected, make_block, make_call, make_ours
from report import COPY, OURS, SORT
from timing import Call, Plan, capture, time_in_turn
from torch import Tensor
from workload import DEEPSEEK_V3, QWEN3_30B, SMOKE, Cell, count, described, floors, make_inputs

TOKENS = tuple(2**n for n in range(17))
EXPERTS = tuple(2**n for n in range(3, 10))
SHARES = tuple(2.0**-n for n in range(7))
SLOTS = (8192, 131072)
SETS, FEW_TOKENS = 4, 256  # input sets up to so many tokens: one set's weights could stay in the cache
PATTERNS = ("balanced", "random", "zipf", "half")


class Series(NamedTuple):
    """Cells that differ in one thing; `x` says what, and its value in each cell."""

    x: str
    cells: Tuple[Tuple[float, Cell], ...]

    def __str__(self) -> str:
        cell = self.cells[0][1]
        return f"{self.x} {'forward+backward' if cell.backward else 'forward'}"


def series(smoke: bool) -> List[Series]:
    """In order of importance; a step goes to fewer tokens, for its memory."""
    layer, most, fixed = (SMOKE, 16, 24) if smoke else (QWEN3_30B, 65536, 16384)
    experts = [e for e in EXPERTS if e <= (16 if smoke else 512)]
    found = []
    for backward in (False, True):
        tokens = [t for t in TOKENS if t <= (most // 2 if backward else most)]
        found += [
            Series("tokens", tuple((t, Cell(layer, t, backward=backward)) for t in tokens)),
            Series("local", tuple((s, Cell(layer, fixed, s, backward)) for s in SHARES)),
            Series(
                "experts",
                tuple((e, Cell(layer._replace(experts=e), fixed // 4, backward=backward)) for e in experts),
            ),
            Series(
                "skew",
                tuple((i, Cell(layer, fixed, 1.0, backward, p)) for i, p in enumerate(PATTERNS)),
            ),
        ]
    return found


class Routing(NamedTuple):
    """Routing so many slots to so many experts."""

    slots: int
    experts: int
    top_k: int = 8

    def __str__(self) -> str:
        return f"routing S={self.slots} E={self.experts}"


class Combine(NamedTuple):
    """The weighted sum over a token's rows."""

    tokens: int
    hidden: int
    top_k: int = 8

    def __str__(self) -> str:
        return f"combine T={self.tokens} H={self.hidden}"


def route_by_sort(ids: Tensor, experts: int) -> Tuple[Tensor, ...]:
    """The same index maps as transformers makes them: sort, histogram, cumulative sum, inverse permutation."""
    flat = ids.reshape(-1)
    ordered, perm = torch.sort(flat)
    values = ordered.float() if ordered.device.type == "cpu" else ordered.int()
    offsets = torch.histc(values, bins=experts, min=0, max=experts - 1).cumsum(0, dtype=torch.int32)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0], device=perm.device)
    return offsets, perm, inverse


class Bench:
    """Times calls in turn, on a GPU as replays of graphs: cost without the host's."""

    def __init__(self, kernel: ModuleType, device: str, arguments: argparse.Namespace) -> None:
        self.kernel, self.device, self.arguments = kernel, device, arguments
        self.cuda = device == "cuda"

    def time(self, calls: Dict[object, Call], sets: Optional[Dict[object, int]] = None) -> Dict[object, dict]:
        """sets: of inputs that a call goes through, if not one."""
        ready, skipped = calls, {}
        if self.cuda:
            ready = {}
            for key, call in calls.items():
                try:
                    ready[key] = capture(call, (sets or {}).get(key, 1))
                except Exception as error:  # a peer that syncs with the host, say
                    skipped[key] = {"skipped": first_line(error)}
        plan = Plan(self.arguments.warm_seconds, self.arguments.rounds)
        return {**time_in_turn(ready, plan, self.arguments.cell_seconds, self.cuda), **skipped}

    def run_series(self, some: Series) -> dict:
        """Every point of a series: ours, checked against the reference, and its floor."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()  # the last series' graphs had pools of their own
        points, calls, blocks, used = [], {}, {}, {}
        for value, cell in some.cells:
            torch.manual_seed(0)
            if cell.layer not in blocks:
                blocks[cell.layer] = make_block(cell.layer, self.device)
            block = blocks[cell.layer]
            sets = [make_inputs(cell, self.device) for _ in range(SETS if cell.tokens <= FEW_TOKENS else 1)]
            call = make_call(make_ours(self.kernel, block), block, sets, cell.backward)
            counts = count(cell.layer, sets)
            checked = check(call(0), expected(self.kernel, block, cell, sets[0]), sets[0])
            calls[value], used[value] = call, len(sets)
            points.append({"value": value, **cell.described(), **described(counts), **floors(cell, counts), **checked})
        timed = self.time(calls, used)
        return {"points": [{**point, **timed[point["value"]]} for point in points]}

    def prepare_series(self, some: Series) -> None:
        """One call of every point."""
        for _, cell in some.cells:
            block = make_block(cell.layer, self.device)
            make_call(make_ours(self.kernel, block), block, [make_inputs(cell, self.device)], cell.backward)(0)

    def run_routing(self, case: Routing) -> dict:
        """Ours and the sort, with an eighth of the slots sentinels."""
        torch.manual_seed(0)
        everywhere = case.experts * 8 // 7
        ids = torch.rand(case.slots // case.top_k, everywhere, device=self.device).topk(case.top_k).indices
        ids = ids.clamp(max=case.experts)
        routing = self.kernel.route(ids, case.experts)
        offsets, _, _ = route_by_sort(ids, case.experts)
        ok = torch.equal(routing.expert_offsets[1:].long(), offsets.long())
        ok = ok and int((routing.slot_to_row < 0).sum()) == int((ids >= case.experts).sum())

        def ours(_: int) -> Sequence[Tensor]:
            found = self.kernel.route(ids, case.experts)
            return found.expert_offsets, found.row_to_slot, found.slot_to_row

        timed = self.time({OURS: ours, SORT: lambda _: route_by_sort(ids, case.experts)})
        timed[OURS]["ok"] = ok
        return {"providers": timed}

    def run_combine(self, case: Combine) -> dict:
        """combine_rows, and a copy of as many bytes; both with the bytes that they move."""
        torch.manual_seed(0)
        experts, options = 32, {"device": self.device, "dtype": torch.bfloat16}
        ids = torch.rand(case.tokens, experts, device=self.device).topk(case.top_k).indices
        routing, weights = self.kernel.route(ids, experts), torch.rand(ids.shape, **options)
        y = torch.randn((case.tokens * case.top_k, case.hidden), **options)
        with torch.no_grad():
            out = self.kernel.combine_rows(y, weights, routing).float()
            wanted = (y[routing.slot_to_row.long()].float().view(*ids.shape, -1) * weights.float()[..., None]).sum(1)
        moved = 2 * (y.numel() + out.numel()) + weights.numel() * 2 + ids.numel() * 4
        source = torch.empty(moved // 2, device=self.device, dtype=torch.uint8)

        def combine(_: int) -> Sequence[Tensor]:
            with torch.no_grad():
                return (self.kernel.combine_rows(y, weights, routing),)

        timed = self.time({OURS: combine, COPY: lambda _: (source.clone(),)})
        timed[OURS]["ok"] = ((out - wanted).norm() / wanted.norm()).item() < 2**-6
        for entry in timed.values():
            if "median_ms" in entry:
                entry["gb_per_s"] = moved / entry["median_ms"] / 1e6
        return {"bytes": moved, "providers": timed}


def tasks_of(bench: Bench, smoke: bool) -> List[Task]:
    """Routing and combine first: they are short."""
    slots, experts = ((64, 256), (8, 16)) if smoke else (SLOTS, EXPERTS)
    shapes = ((16, 64),) if smoke else ((16384, QWEN3_30B.hidden), (4096, DEEPSEEK_V3.hidden))

    def task(key: str, case: NamedTuple, cell: dict, measure: Callable, prepare: Callable) -> Task:
        return Task(key, cell, str(case), lambda: measure(case), lambda: prepare(case))

    combines = [Combine(*shape) for shape in shapes]
    routings = [Routing(s, e) for s in slots for e in experts]
    found = [task("combine", c, c._asdict(), bench.run_combine, lambda _: None) for c in combines]
    found += [task("routing", c, c._asdict(), bench.run_routing, bench.run_routing) for c in routings]
    for s in series(smoke):
        cell = {"x": s.x, "backward": s.cells[0][1].backward}
        found.append(task("series", s, cell, bench.run_series, bench.prepare_series))
    return found


def main(argv: Optional[List[str]] = None) -> dict:
    arguments = make_parser(__doc__, budget=150, cell_seconds=2.0).parse_args(argv)
    kernel = load_kernel()
    bench = Bench(kernel, "cuda" if torch.cuda.is_available() else "cpu", arguments)
    results = {"benchmark": report.GROWTH, **describe_machine(kernel, arguments.commit)}
    run_tasks(results, tasks_of(bench, arguments.smoke), arguments, report.progress)
    if not arguments.prepare:
        print(report.summary(results))
    return results


if __name__ == "__main__":
    main()
