"""What every script shares: the package, the machine, the JSON that is rewritten after every cell, the options."""

import argparse
import faulthandler
import gc
import json
import os
import platform
import re
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Callable, List, NamedTuple, Optional

import torch
from timing import time_box

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS, HANGING_SECONDS = 8.0, 30.0  # past the budget: a task is stopped, the process ends
PACKAGES = ("torch", "triton", "transformers", "kernels", "nvidia-cutlass-dsl")


def load_kernel() -> ModuleType:
    """The package as its users load it, by repo id and version of build.toml; a local build stands in for the Hub."""
    import kernels

    text = (ROOT / "build.toml").read_text(encoding="utf-8")
    repo_id = re.search(r'^repo-id = "(.+)"', text, re.MULTILINE).group(1)
    version = int(re.search(r"^version = (\d+)", text, re.MULTILINE).group(1))
    os.environ.setdefault("LOCAL_KERNELS", f"{repo_id}={ROOT / 'build'}")
    return kernels.get_kernel(repo_id, version=version)


def command_output(*command: str) -> Optional[str]:
    """Its stripped standard output, or None if it can't be had."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=str(ROOT))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def package_version(name: str) -> Optional[str]:
    """The version of an installed package, or None."""
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_machine(kernel: ModuleType, commit: Optional[str]) -> dict:
    """Machine, versions, build and date: what a result needs to be compared with another."""
    metadata = json.loads((Path(kernel.__file__).parent / "metadata.json").read_text(encoding="utf-8"))
    cuda = torch.cuda.is_available()
    driver = command_output("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    return {
        "date_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit or command_output("git", "rev-parse", "HEAD"),
        "kernel": {key: metadata.get(key) for key in ("name", "version", "id")},
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpu_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if cuda else None,
        "driver_and_power_limit": driver.splitlines()[0] if driver and cuda else None,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda or torch.version.hip,
        **{name: package_version(name) for name in PACKAGES},
    }


def write(path: Optional[Path], results: dict) -> None:
    """The results as JSON, if there is a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def first_line(error: Exception) -> str:
    """What is recorded of an error."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def make_parser(description: str, budget: float, cell_seconds: float) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="commit of the package, where git can't tell")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, also without a GPU")
    parser.add_argument("--prepare", action="store_true", help="compile into the caches on disk, measure nothing")
    parser.add_argument(
        "--only", nargs="+", action="append", metavar="WORD",
        help="cells with all these words in their name; given again: these cells, too",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=float, default=budget, help=f"no cell starts past so many seconds ({budget:g})"
    )
    parser.add_argument("--cell-seconds", type=float, default=cell_seconds, help=f"of rounds ({cell_seconds:g})")
    parser.add_argument("--warm-seconds", type=float, default=0.3, help="before the rounds (0.3)")
    parser.add_argument("--rounds", type=int, default=7, help="of all in turn (7)")
    return parser


class Task(NamedTuple):
    """A cell of results[key]: what identifies it, what fills it in, and what only compiles for it."""

    key: str
    cell: dict
    title: str
    measure: Callable[[], dict]
    prepare: Callable[[], None]


def wanted(title: str, only: Optional[List[List[str]]]) -> bool:
    """Whether a cell's name has all the words of one of the lists, if there are any."""
    return not only or any(all(word in title for word in words) for words in only)


def prepare_tasks(tasks: List[Task], arguments: argparse.Namespace) -> None:
    """Compiles into the caches on disk what the tasks need, as far as the budget goes."""
    begun = time.monotonic()
    for task in tasks:
        left = arguments.budget - (time.monotonic() - begun)
        if left > 0 and wanted(task.title, arguments.only):
            try:
                with time_box(left):
                    task.prepare()
            except Exception as error:  # it will show again where it is measured
                print(f"{task.title}: {first_line(error)}", flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # others prepare at the same time


def run_tasks(results: dict, tasks: List[Task], arguments: argparse.Namespace, progress: Callable) -> dict:
    """Runs tasks in order of importance until the budget is over; writes and prints after each.

    A task that is under way then is stopped a little later; a process that hangs ends, with what it has written.
    """
    if arguments.prepare:
        prepare_tasks(tasks, arguments)
        return results
    begun = time.monotonic()
    faulthandler.dump_traceback_later(arguments.budget + HANGING_SECONDS, exit=True)
    for task in tasks:
        results.setdefault(task.key, [])
        if not wanted(task.title, arguments.only):
            continue
        start = time.monotonic()
        left = arguments.budget - (start - begun)
        if left <= 0:
            results[task.key].append({**task.cell, "skipped": f"past the budget of {arguments.budget:.0f} s"})
            continue
        try:
            with time_box(left + GRACE_SECONDS):
                found = {**task.cell, **task.measure()}
        except Exception as error:  # one cell's failure is a result, too
            found = {**task.cell, "skipped": first_line(error)}
        results[task.key].append({**found, "seconds": time.monotonic() - start})
        results["seconds"] = time.monotonic() - begun
        write(arguments.output, results)
        print(progress(task.title, results[task.key][-1]), flush=True)
    faulthandler.cancel_dump_traceback_later()
    write(arguments.output, results)
    return results
