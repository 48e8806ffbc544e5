"""Benchmarks of the experts block (see experts.py), linear layers (linear.py), low-rank pairs (lora.py), FP8 weights
(fp8.py), training on them (fp8_training.py), a rank's work under expert parallelism (ep.py), routing (routing.py) and
new token counts (new_shapes.py).

python benchmarks/run.py [NAME...]  # these or all (without a GPU the CPU's), each in a process, and the figures
python benchmarks/run.py layers --only Mixtral T=8192 --output layers.json
"""

import argparse
import faulthandler
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

import ep
import fp8
import fp8_training
import linear
import lora
import new_shapes
import routing
import torch
from experts import SUITES, Experts, cells_of
from machine import DEVICE, RESULTS, build_id, describe_machine, first_line, load_kernel, result_name, summary, write
from problems import OURS, run_group
from timing import EAGER, GRAPH, time_box

WAYS, GPU = (EAGER, GRAPH), DEVICE == "cuda"
GRACE_SECONDS, HANGING_SECONDS = 8.0, 30.0  # past the budget: a task is stopped, the process ends
MODULES = {module.__name__: module for module in (lora, fp8, fp8_training, ep, routing, new_shapes)}
BENCHMARKS = (*SUITES, "linear", *MODULES)


class Task(NamedTuple):
    """What fills in one cell, or the cells that take turns with each other."""

    name: str
    measure: Callable[[], List[dict]]


def experts_tasks(
    suite: str, kernels: Dict[str, ModuleType], arguments: argparse.Namespace, names: Sequence[str], ways: Sequence[str]
) -> List[Task]:
    """Those of a suite for these providers, measured in these ways; memory where the suite takes eager calls alone."""
    device = SUITES[suite].device
    experts, memory = Experts(kernels, names, device), SUITES[suite].ways == (EAGER,) and device != "cpu"
    return [
        Task(name, lambda group=group: run_group(experts.problems(group), ways, arguments, memory))
        for name, group in cells_of(suite, arguments.smoke).items()
    ]


def linear_tasks(
    kernels: Dict[str, ModuleType], arguments: argparse.Namespace, peers: bool, ways: Sequence[str]
) -> List[Task]:
    """A task for each cell."""
    layer = linear.Linear(kernels, peers)
    return [
        Task(str(cell), lambda cell=cell: run_group([layer.problem(cell)], ways, arguments))
        for cell in linear.cells(arguments.smoke)
    ]


def tasks_of(benchmark: str, kernel: ModuleType, arguments: argparse.Namespace) -> List[Task]:
    """Those of a benchmark."""
    if benchmark in SUITES:
        suite = SUITES[benchmark]
        return experts_tasks(benchmark, {OURS: kernel}, arguments, suite.names, suite.ways)
    if benchmark == "linear":
        return linear_tasks({OURS: kernel}, arguments, True, (EAGER, GRAPH))
    module = MODULES[benchmark]

    def measure(case: NamedTuple) -> List[dict]:
        if module in (lora, fp8):
            return run_group([module.make_problem(kernel, case)], WAYS, arguments, GPU)
        return fp8_training.measure(kernel, case) if module is fp8_training else module.run(kernel, case, arguments)

    return [Task(str(case), partial(measure, case)) for case in module.cases(arguments.smoke)]


def make_parser(description: Optional[str], budget: float = 900) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, help="JSON file to write")
    add("--smoke", action="store_true", help="tiny sizes, also without a GPU")
    add("--only", nargs="+", action="append", metavar="WORD", help="cells whose name has all these words; repeatable")
    add("--budget", type=float, default=budget, help=f"seconds after which no cell starts ({budget:g})")
    add("--seconds", type=float, help="of one measurement, past all orders (2, of linear and builds 1, of ep 0.2)")
    add("--rounds", type=int, default=7, help="in which all providers take their turn (7)")
    return parser


def run_tasks(benchmark: str, build: str, tasks: List[Task], arguments: argparse.Namespace) -> dict:
    """Runs tasks until the budget is over; after each one, prints its cells and writes the JSON.

    A task that is under way when the budget ends is stopped a little later. A process that hangs is ended; what it has
    written stays.
    """
    results = {"benchmark": benchmark, "build": build, **describe_machine(), "cells": []}
    begun, only = time.monotonic(), arguments.only or [[]]
    chosen = [task for task in tasks if any(all(word in task.name for word in words) for words in only)]
    if not chosen:
        sys.exit(f"--only: expected words of one name, such as {tasks[0].name!r}, got {only}")
    faulthandler.dump_traceback_later(arguments.budget + HANGING_SECONDS, exit=True, file=sys.__stderr__)
    for task in chosen:
        left = arguments.budget - (time.monotonic() - begun)
        try:
            if left <= 0:
                raise TimeoutError(f"past the budget of {arguments.budget:.0f} s")
            with time_box(left + GRACE_SECONDS):
                cells = task.measure()
        except Exception as error:  # one cell's failure is a result, too
            cells = [{"name": task.name, "times": {}, "skipped": {"all": first_line(error)}}]
        results["cells"] += cells
        results["seconds"] = round(time.monotonic() - begun, 1)
        write(arguments.output, results)
        print(*map(summary, cells), sep="\n", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return results


def expect_times(results: dict) -> dict:
    """The results; ends the process with an error if all cells were skipped."""
    if not any(cell["times"] for cell in results["cells"]):
        sys.exit(f"{results['benchmark']}: nothing was measured, all {len(results['cells'])} cells were skipped")
    return results


def run_each(names: Sequence[str], smoke: bool, folder: Path) -> int:
    """Each benchmark in a process of its own, then the figures. Returns how many failed."""
    import plot

    gpu, failed = torch.cuda.get_device_name() if DEVICE == "cuda" else None, 0
    for name in names:
        output = folder / result_name(name, None if name == "cpu" else gpu)
        command = [sys.executable, __file__, name, "--output", str(output), *(["--smoke"] * smoke)]
        failed += subprocess.run(command).returncode != 0
    plot.draw(folder, gpu)
    return failed


def main(argv: Optional[Sequence[str]] = None) -> dict:
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    arguments = parser.parse_args(argv)
    if not set(arguments.names) <= set(BENCHMARKS):
        parser.error(f"expected {', '.join(BENCHMARKS)}, got {' '.join(arguments.names)}")
    if len(arguments.names) != 1:
        given = {name for name, value in vars(arguments).items() if value != parser.get_default(name)}
        if given := given - {"names", "smoke"}:
            parser.error(
                f"expected one NAME with {', '.join(sorted(given))}, got {' '.join(arguments.names) or 'none'}"
            )
        folder = Path(tempfile.mkdtemp()) if arguments.smoke else RESULTS
        every = BENCHMARKS if GPU or arguments.smoke else ("cpu",)
        sys.exit(run_each(arguments.names or every, arguments.smoke, folder))
    (name,), kernel = arguments.names, load_kernel()
    arguments.seconds = arguments.seconds or {"linear": 1.0, "ep": 0.2}.get(name, 2.0)
    return expect_times(run_tasks(name, build_id(kernel), tasks_of(name, kernel, arguments), arguments))


if __name__ == "__main__":
    main()
