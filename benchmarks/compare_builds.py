"""Two builds of the package in one process: every cell of both in turn, after / before.

    python benchmarks/compare_builds.py --before DIR --after DIR [--only layers] [--output compare.json]

Measured are the recorded layers (forward and step, peak and saved memory) eagerly, and decode, linear and growth as
CUDA graphs. The name of a task begins with its suite: --only layers, --only decode T=8. The builds need different ids,
as builds of different trees have. Prints the ratio of medians, and behind it the range of each build's samples.
"""

import statistics
from pathlib import Path
from typing import Dict, Optional, Sequence

from machine import build_id
from run import Task, expect_times, experts_tasks, linear_tasks, make_parser, run_tasks
from timing import EAGER, GRAPH

BEFORE, AFTER = "before", "after"


def load(folders: Dict[str, Path]) -> dict:
    """{name: module} of builds, whose ops are registered under names that hold their ids."""
    import kernels

    found = {name: kernels.get_local_kernel(folder.resolve()) for name, folder in folders.items()}
    if len({build_id(kernel) for kernel in found.values()}) < len(found):
        raise SystemExit(f"--before, --after: expected builds with different ids, got {build_id(found[AFTER])} twice")
    return found


def named(suite: str, task: Task) -> Task:
    """The task with the name of its suite before its own and those of its cells."""
    return Task(
        f"{suite}: {task.name}", lambda: [{**cell, "name": f"{suite}: {cell['name']}"} for cell in task.measure()]
    )


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
    parser = make_parser(__doc__, budget=1200)
    parser.set_defaults(seconds=1.0)
    for name in (BEFORE, AFTER):
        parser.add_argument(f"--{name}", type=Path, required=True, help="folder of a build")
    arguments = parser.parse_args(argv)
    builds = load({BEFORE: arguments.before, AFTER: arguments.after})
    tasks = []
    for suite, ways in (("layers", (EAGER,)), ("decode", (GRAPH,)), ("growth", (GRAPH,))):
        tasks += [named(suite, task) for task in experts_tasks(suite, builds, arguments, tuple(builds), ways)]
    tasks += [named("linear", task) for task in linear_tasks(builds, arguments, False, (GRAPH,))]
    ids = ", ".join(f"{name} {build_id(kernel)}" for name, kernel in builds.items())
    results = expect_times(run_tasks("compare_builds", ids, tasks, arguments))
    report(results["cells"])
    return results


if __name__ == "__main__":
    main()
