"""A problem that several providers solve, and how it is run: results checked first, then times taken in turn."""

import argparse
import gc
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import timing
import torch
from machine import first_line, plan_of
from timing import Call
from torch import Tensor

# The backward of a graph that is kept runs on the stream of its forward, so the other parts can't be captured.
GRAPHED_PARTS = ("forward", "step")


class Problem(NamedTuple):
    """One cell of a benchmark.

    described: what identifies it in the JSON, its name included. calls: {part: {provider: call}}. check(provider): the
    errors of its results, and whether they are small enough; its first call may compile. sets: input sets that calls go
    through in turn. forwards, parameters: what `saved_mib` needs. absent: why some providers are not here. eager_only:
    providers whose graph would replay sizes of the host.
    """

    described: dict
    calls: Dict[str, Dict[str, Call]]
    check: Callable[[str], Tuple[Dict[str, float], bool]]
    absent: Dict[str, str]
    sets: int = 1
    forwards: Dict[str, Callable[[], Tensor]] = {}
    parameters: Sequence[Tensor] = ()
    eager_only: Sequence[str] = ()


def start(problem: Problem, first_seconds: float) -> dict:
    """The cell without times. Providers whose first call fails leave the problem's calls."""
    cell = {**problem.described, "times": {}, "skipped": dict(problem.absent), "errors": {}, "wrong": []}
    for name in {name: None for calls in problem.calls.values() for name in calls}:
        try:
            with timing.time_box(first_seconds):
                errors, good = problem.check(name)
                timing.synchronize()
        except Exception as error:  # of any library: the other providers go on
            cell["skipped"][name] = first_line(error)
            for calls in problem.calls.values():
                calls.pop(name, None)
            continue
        if errors:
            cell["errors"][name] = errors
        cell["wrong"] += [] if good else [name]
    return cell


def measure_memory(problem: Problem) -> dict:
    """Peak of a call of the last part, and what a forward saves for the backward, in MiB by provider."""
    *_, calls = problem.calls.values()
    peak = {name: timing.peak_mib(call) for name, call in calls.items()}
    saved = {name: timing.saved_mib(f, problem.parameters) for name, f in problem.forwards.items() if name in calls}
    return {"peak_mib": peak, "saved_mib": saved}


def run_group(
    problems: List[Problem], ways: Sequence[str], arguments: argparse.Namespace, memory: bool = False
) -> List[dict]:
    """The cells of problems that take turns with each other, provider by provider."""
    cells = [start(problem, arguments.first_seconds) for problem in problems]
    for cell, problem in zip(cells, problems):
        cell.update(measure_memory(problem) if memory else {})
    for way in ways:
        for part in problems[0].calls:
            if way == timing.GRAPH and part not in GRAPHED_PARTS:
                continue
            measure = part if way == timing.EAGER else f"{part}, {way}"
            calls = {}
            for number, (cell, problem) in enumerate(zip(cells, problems)):
                for name, call in problem.calls[part].items():
                    if way == timing.GRAPH and name in problem.eager_only:
                        continue
                    try:
                        calls[number, name] = timing.capture(call, problem.sets) if way == timing.GRAPH else call
                    except Exception as error:  # a peer that waits for the device can't be captured
                        cell["skipped"][f"{name}, {measure}"] = first_line(error)
            for (number, name), samples in timing.time_way(calls, way, plan_of(arguments)).items():
                cells[number]["times"].setdefault(measure, {})[name] = timing.described(samples)
            del calls
            if torch.cuda.is_available():
                gc.collect()
                torch.cuda.empty_cache()  # graphs have memory pools of their own
    return cells
