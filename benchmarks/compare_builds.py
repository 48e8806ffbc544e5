"""Two builds of the package in one process: every cell of both in turn, after / before.

    python benchmarks/compare_builds.py --before DIR --after DIR [--only layers] [--output compare.json]

Measured are the recorded layers (forward and step, peak and saved memory) eagerly, and decode, linear and growth as
CUDA graphs. The name of a task begins with its suite: --only layers, --only decode T=8. The builds need different ids,
as builds of different trees have. Prints the ratio of medians, and behind it the range of each build's samples.
"""

import argparse
import statistics
from pathlib import Path
from typing import Dict, List, Optional, Sequence

import run_linear
import timing
from machine import DEVICE, Task, build_id, describe_machine, make_parser, run_tasks
from problems import run_group
from run_experts import SUITES, Experts, cells_of

BEFORE, AFTER = "before", "after"
WAYS = {"layers": (timing.EAGER,), "decode": (timing.GRAPH,), "growth": (timing.GRAPH,)}


def load(folders: Dict[str, Path]) -> dict:
    """{name: module} of builds, whose ops are registered under names that hold their ids."""
    import kernels

    found = {name: kernels.get_local_kernel(folder.resolve()) for name, folder in folders.items()}
    if len({build_id(kernel) for kernel in found.values()}) < len(found):
        raise SystemExit(f"--before, --after: expected builds with different ids, got {build_id(found[AFTER])} twice")
    return found


def tasks_of(builds: dict, arguments: argparse.Namespace) -> List[Task]:
    """Every suite's cells."""
    experts, tasks = Experts(builds, tuple(builds), DEVICE), []
    for suite, ways in WAYS.items():
        memory = SUITES[suite].ways == (timing.EAGER,)
        for name, group in cells_of(suite, arguments.smoke).items():
            for entry in group:
                entry = {**entry, "name": f"{suite}: {entry.get('name', name)}"}

                def measure(entry=entry, ways=ways, memory=memory) -> List[dict]:
                    return run_group(experts.problems([entry]), ways, arguments, memory)

                tasks.append(Task(entry["name"], measure))
    linear = run_linear.Linear(builds, peers=False)
    for cell in run_linear.cells(arguments.smoke):
        tasks.append(Task(f"linear: {cell}", lambda c=cell: run_group([linear.problem(c)], (timing.GRAPH,), arguments)))
    return tasks


def report(cells: Sequence[dict]) -> None:
    """A line per measurement, then the range of all ratios."""
    found = []
    for cell in cells:
        for measure, entries in cell["times"].items():
            if entries.keys() == {BEFORE, AFTER}:
                found.append(entries[AFTER]["median_ms"] / entries[BEFORE]["median_ms"])
                spread = " ".join(f"{n} {e['min_ms']:.4g}..{e['max_ms']:.4g}" for n, e in entries.items())
                print(f"{found[-1]:.3f}  {cell['name']} {measure} ({spread} ms)")
        for what in ("peak_mib", "saved_mib"):
            mib = cell.get(what, {})
            if len(set(mib.values())) > 1:
                print(f"       {cell['name']} {what}: {mib}")
    if found:
        print(f"after / before: median {statistics.median(found):.3f}, {min(found):.3f} to {max(found):.3f}")


def main(argv: Optional[Sequence[str]] = None) -> dict:
    parser = make_parser(__doc__, budget=1200, seconds=1.0)
    for name in (BEFORE, AFTER):
        parser.add_argument(f"--{name}", type=Path, required=True, help="folder of a build")
    arguments = parser.parse_args(argv)
    builds = load({BEFORE: arguments.before, AFTER: arguments.after})
    ids = ", ".join(f"{name} {build_id(kernel)}" for name, kernel in builds.items())
    results = run_tasks(
        {"benchmark": "compare_builds", "build": ids, **describe_machine()}, tasks_of(builds, arguments), arguments
    )
    report(results["cells"])
    return results


if __name__ == "__main__":
    main()
