"""Routing: from the expert ids of tokens to sorted slots and the schedule of their tiles.

ours         what the experts block runs, in whatever way the loaded build has
ours, public `route`, which copies the offsets out of the schedule
triton       the Triton backend's launches, where the build has a way of its own
torch        as transformers does, but with a stable sort: the sort, its inverse, histc and running sums

graph: a call of IN_ROW in one CUDA graph, as the host takes longer to start a graph than the GPU takes to route.
"""

import argparse
import itertools
import sys
from collections import deque
from operator import attrgetter
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Sequence

import timing
import torch
from machine import DEVICE
from problems import OURS
from timing import EAGER, GRAPH, HOST, Call
from torch import Tensor
from workload import Cell, Layer, draw_ids

PUBLIC, TRITON, TORCH = f"{OURS}, public", "triton", "torch"
SLOTS, EXPERTS, TOP_K = (512, 8192, 32768, 131072), (8, 64, 128, 256, 512), 8
SETS, IN_ROW = 2, 20
# ids (T, top_k) -> the schedule, the E + 1 offsets or the E ends of experts' rows; row_to_slot (S,); slot_to_row (S,).
Route = Callable[[Tensor], Sequence[Tensor]]
parts_of_rows = attrgetter("schedule", "row_to_slot", "slot_to_row")
parts_of_routing = attrgetter("expert_offsets", "row_to_slot", "slot_to_row")


class Case(NamedTuple):
    """So many slots, TOP_K of each token, for so many experts, which are all here."""

    slots: int
    experts: int

    def __str__(self) -> str:
        return f"S={self.slots} E={self.experts}"


def cases(smoke: bool) -> List[Case]:
    """All sizes."""
    return [Case(*sizes) for sizes in itertools.product(*(((64,), (8, 12)) if smoke else (SLOTS, EXPERTS)))]


def sort(ids: Tensor, experts: int) -> Sequence[Tensor]:
    """A route by PyTorch's own functions."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    counted = sorted_ids.int() if ids.is_cuda else sorted_ids.float()  # histc takes no integers on a CPU
    ends = torch.histc(counted, experts, 0, experts - 1).cumsum(0, dtype=torch.int32)
    slot_to_row = torch.empty_like(order)
    slot_to_row[order] = torch.arange(len(order), device=ids.device)
    return ends, order, slot_to_row


def make_routes(kernel: ModuleType, experts: int) -> Dict[str, Route]:
    """The providers."""
    backends, dtype = sys.modules[f"{kernel.__name__}.backends"], torch.bfloat16
    backend = backends.backend_of(torch.empty(0, device=DEVICE))
    routes = {
        OURS: lambda ids: parts_of_rows(backend.route(ids, experts, dtype)),
        PUBLIC: lambda ids: parts_of_routing(kernel.route(ids, experts)),
    }
    if DEVICE == "cuda" and backends.IS_BUILT:
        triton = sys.modules[f"{backends.__name__}.triton"]
        routes[TRITON] = lambda ids: parts_of_rows(triton.route(ids, experts, dtype))
    return {**routes, TORCH: lambda ids: sort(ids, experts)}


def is_right(ids: Tensor, experts: int, schedule: Tensor, row_to_slot: Tensor, slot_to_row: Tensor) -> bool:
    """Whether slots are sorted by expert and, within an expert, by slot."""
    order, ends = ids.flatten().argsort(stable=True), ids.flatten().bincount(minlength=experts).cumsum(0)
    got_ends = schedule[1 : experts + 1] if len(schedule) > experts else schedule
    pairs = ((got_ends, ends), (row_to_slot, order), (slot_to_row, order.argsort()))
    return all(torch.equal(got.long(), want) for got, want in pairs)


def in_row(call: Call) -> Call:
    """IN_ROW calls, which keeps no results but the last ones."""
    return lambda i: deque(map(call, [i] * IN_ROW), maxlen=1)[0]


def run(kernel: ModuleType, case: Case, arguments: argparse.Namespace) -> List[dict]:
    """The cell of a case."""
    torch.manual_seed(0)
    layer = Layer("", case.experts, TOP_K, hidden=0, intermediate=0)
    sets = [draw_ids(Cell(layer, case.slots // TOP_K), DEVICE) for _ in range(SETS)]
    routes, times = make_routes(kernel, case.experts), {}
    wrong = [name for name, route in routes.items() if not all(is_right(s, case.experts, *route(s)) for s in sets)]
    calls = {name: lambda i, route=route: route(sets[i % SETS]) for name, route in routes.items()}
    graphs = {name: timing.capture(in_row(call), SETS) for name, call in calls.items()}
    for way, timed, count in ((GRAPH, graphs, IN_ROW), (EAGER, calls, 1), (HOST, calls, 1)):
        samples = timing.time_in_turn(timed, timing.plan_of(arguments), way)
        times[way] = {name: timing.described([ms / count for ms in found]) for name, found in samples.items()}
    return [{"name": str(case), **case._asdict(), "top_k": TOP_K, "times": times, "skipped": {}, "wrong": wrong}]
