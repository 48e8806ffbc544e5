"""What every benchmark shares: the package, the machine, the options, and the JSON with its schema."""

import argparse
import faulthandler
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Callable, List, NamedTuple, Optional

import torch
from timing import Plan, time_box

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GRACE_SECONDS, HANGING_SECONDS = 8.0, 30.0  # past the budget: a task is stopped, the process ends
PACKAGES = ("torch", "triton", "transformers", "kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_kernel() -> ModuleType:
    """The package as its users load it, by repo id and version of build.toml. A local build stands in for the Hub."""
    import kernels

    text = (ROOT / "build.toml").read_text(encoding="utf-8")
    repo_id = re.search(r'^repo-id = "(.+)"', text, re.MULTILINE).group(1)
    version = int(re.search(r"^version = (\d+)", text, re.MULTILINE).group(1))
    os.environ.setdefault("LOCAL_KERNELS", f"{repo_id}={ROOT / 'build'}")
    return kernels.get_kernel(repo_id, version=version)


def command_output(*command: str) -> Optional[str]:
    """Its stripped standard output, or None if it failed."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=str(ROOT))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def package_version(name: str) -> Optional[str]:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def build_id(kernel: ModuleType) -> str:
    """The id in the metadata of a build."""
    return json.loads((Path(kernel.__file__).parent / "metadata.json").read_text(encoding="utf-8"))["id"]


def describe_machine() -> dict:
    """Machine, versions and date: what a result needs to be compared with another."""
    cuda = torch.cuda.is_available()
    driver = command_output("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    return {
        "date_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": command_output("git", "rev-parse", "HEAD"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver_and_power_limit": driver.splitlines()[0] if driver and cuda else None,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda or torch.version.hip,
        **{name: package_version(name) for name in PACKAGES},
    }


def result_name(benchmark: str, gpu: Optional[str]) -> str:
    """File name of a result: the benchmark and the GPU, as in layers_h200.json; cpu.json for what has no GPU."""
    model = gpu and gpu.replace("NVIDIA ", "").split()[0].lower()
    return f"{benchmark}_{model}.json" if model else f"{benchmark}.json"


def schema_error(results: dict) -> Optional[str]:
    """Why `results` is not what a file of benchmarks/results holds, or None if it is.

    Every file has benchmark, date_utc and triton as strings. A check's file has steps {name: what was found}. A
    benchmark's file has build, machine, python and torch as strings, gpu as a string or None, and cells, a list.

    A cell has name, a unique string; times {measure: {provider: entry}}, where an entry has median_ms > 0; and skipped
    {provider: reason}, where "all" stands for the whole cell. It may have errors {provider: {tensor: relative error}},
    wrong [provider], peak_mib and saved_mib {provider: MiB or None}, build and date_utc where they differ from the
    file's, and whatever else identifies it.
    """
    strings = ("benchmark", "date_utc", "triton")
    for key in strings if "steps" in results else (*strings, "build", "machine", "python", "torch"):
        if not isinstance(results.get(key), str):
            return f"{key}: expected a string, got {results.get(key)!r}"
    if not isinstance(results.get("gpu"), (str, type(None))):
        return "gpu: expected a string or None"
    if "steps" in results:
        return None if results["steps"] else "steps: expected what was found, by name"
    names = [cell.get("name") for cell in results.get("cells", ())]
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        return "cells: expected a list of cells with unique names"
    for cell in results["cells"]:
        entries = [entry for providers in cell["times"].values() for entry in providers.values()]
        if not entries and not cell["skipped"]:
            return f"{cell['name']}: neither times nor a reason why there are none"
        if not all(isinstance(entry.get("median_ms"), float) and entry["median_ms"] > 0 for entry in entries):
            return f"{cell['name']}: an entry without a positive median_ms"
    return None


def write(path: Optional[Path], results: dict) -> None:
    """The results as JSON, if there is a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def scrub(text: str) -> str:
    """Without the paths of this machine."""
    folders = ((str(ROOT), "."), (sys.prefix, "<python>"), (tempfile.gettempdir(), "<tmp>"), (str(Path.home()), "~"))
    for path, name in folders:
        text = text.replace(path, name) if len(path) > 1 else text
    return text


def first_line(error: Exception) -> str:
    """What is recorded of an error."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def make_parser(description: Optional[str], budget: float, seconds: float = 2.0) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, help="JSON file to write")
    add("--smoke", action="store_true", help="tiny sizes, also without a GPU")
    add("--only", nargs="+", action="append", metavar="WORD", help="cells whose name has all these words; repeatable")
    add("--budget", type=float, default=budget, help=f"seconds after which no cell starts ({budget:g})")
    add("--seconds", type=float, default=seconds, help=f"of one measurement, past all orders once ({seconds:g})")
    add("--warm-seconds", type=float, default=0.3, help="before each measurement (0.3)")
    add("--rounds", type=int, default=7, help="in which all providers take their turn (7)")
    add("--first-seconds", type=float, default=200, help="for a first call, which may compile or tune (200)")
    return parser


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan that the options ask for."""
    if arguments.smoke:
        return Plan(0.0, 2, 0.0, 1e-4, 1, 2)
    return Plan(arguments.warm_seconds, arguments.rounds, arguments.seconds)


class Task(NamedTuple):
    """What fills in one cell, or the cells that take turns with each other."""

    name: str
    measure: Callable[[], List[dict]]


def wanted(name: str, only: Optional[List[List[str]]]) -> bool:
    """Whether a name has all the words of one of the lists, if there are any."""
    return not only or any(all(word in name for word in words) for words in only)


def summary(cell: dict) -> str:
    """A cell in one line: its times in ms, what is wrong, and what was skipped."""
    said = []
    for measure, entries in cell["times"].items():
        times = ", ".join(f"{name} {entry['median_ms']:.4g}" for name, entry in entries.items())
        said.append(f"{measure}: {times}")
    said += [f"{name} IS WRONG: {cell['errors'][name]}" for name in cell.get("wrong", ())]
    return "; ".join(said + [f"{name} skipped: {reason}" for name, reason in cell["skipped"].items()])


def run_tasks(results: dict, tasks: List[Task], arguments: argparse.Namespace) -> dict:
    """Runs tasks until the budget is over; after each one, prints its cells and writes the JSON.

    A task that is under way when the budget ends is stopped a little later. A process that hangs is ended; what it has
    written stays.
    """
    begun, results["cells"] = time.monotonic(), []
    faulthandler.dump_traceback_later(arguments.budget + HANGING_SECONDS, exit=True, file=sys.__stderr__)
    for task in tasks:
        if not wanted(task.name, arguments.only):
            continue
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
        for cell in cells:
            print(f"{cell['name']}: {summary(cell)}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return results


def main_of(benchmark: str, arguments: argparse.Namespace, kernel: ModuleType, tasks: List[Task]) -> dict:
    """What the main function of a benchmark ends with."""
    return run_tasks({"benchmark": benchmark, "build": build_id(kernel), **describe_machine()}, tasks, arguments)
