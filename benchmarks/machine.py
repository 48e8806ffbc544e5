"""What every benchmark shares: the package, the machine, and the JSON with its schema."""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Optional

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
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


def build_id(kernel: ModuleType) -> str:
    """The id in the metadata of a build."""
    return json.loads((Path(kernel.__file__).parent / "metadata.json").read_text(encoding="utf-8"))["id"]


def describe_machine() -> dict:
    """Machine, versions and date: what a result needs to be compared with another."""
    cuda = torch.cuda.is_available()
    found = [(package.metadata["Name"], package.version) for package in importlib.metadata.distributions()]
    installed = dict(reversed(found))  # of several on the path, the first is the one that is imported
    driver = command_output("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    return {
        "date_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": command_output("git", "rev-parse", "HEAD"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver_and_power_limit": driver.splitlines()[0] if driver and cuda else None,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda or torch.version.hip,
        **{name: installed.get(name) for name in ("torch", "triton", "transformers", "kernels")},
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


def summary(cell: dict) -> str:
    """A cell in one line: its times in ms, the peaks of calls, what is wrong, and what was skipped."""
    said = []
    for measure, entries in cell["times"].items():
        times = ", ".join(f"{name} {entry['median_ms']:.4g}" for name, entry in entries.items())
        said.append(f"{measure}: {times}")
    peaks = ", ".join(f"{name} {mib:.0f}" for name, mib in cell.get("peak_mib", {}).items() if mib is not None)
    said += [f"peak MiB: {peaks}"] if peaks else []
    said += [f"{name} IS WRONG: {cell['errors'][name]}" for name in cell.get("wrong", ())]
    said += [f"{name} skipped: {reason}" for name, reason in cell["skipped"].items()]
    return f"{cell['name']}: {'; '.join(said)}"


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
