"""Everything that is to hold on a GPU, in one command: the tests, and compute-sanitizer over every kernel.

    python tools/gpu_suite.py [tests] [memcheck] [racecheck] [--output benchmarks/results/gpu_suite.json] [--workers 6]

Without names all steps run. Each prints one line; the JSON is rewritten after each. Exits with 1 if a step failed.
"""

import argparse
import collections
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
CASE = str(Path("tools") / "sanitize_case.py")
TAIL_LINES = 30
SANITIZER_FAILED = 86  # an exit status that nothing else here has
PRINT_LIMIT = 100000


class Run(NamedTuple):
    """A finished command. returncode: None if it ran into its time limit."""

    returncode: Optional[int]
    seconds: float
    output: str


def run(command: List[str], timeout: float, **environment: str) -> Run:
    """Runs a command in the repository; past the limit, ends it with all that it started."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=str(ROOT), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        try:
            returncode: Optional[int] = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            returncode = None
        log.seek(0)
        return Run(returncode, time.monotonic() - start, scrub(log.read()))


def scrub(text: str) -> str:
    """Without the paths of this machine."""
    folders = ((str(ROOT), "."), (sys.prefix, "<python>"), (tempfile.gettempdir(), "<tmp>"), (str(Path.home()), "~"))
    for path, name in folders:
        text = text.replace(path, name) if len(path) > 1 else text
    return text


def tail(text: str, lines: int = TAIL_LINES) -> List[str]:
    return [line.rstrip()[:300] for line in text.splitlines()[-lines:]]


def described(result: Run) -> dict:
    """What every step records."""
    status = {None: "timed out", 0: "passed"}.get(result.returncode, "failed")
    return {"status": status, "seconds": round(result.seconds, 1), "tail": tail(result.output)}


def counts_of_junit(path: Path) -> Optional[dict]:
    """Counts, failures and the slowest tests of a pytest report, or None if there is none."""
    try:
        cases = list(ElementTree.parse(str(path)).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return None
    kinds: Dict[str, List[str]] = {"failure": [], "error": [], "skipped": []}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for kind, found in kinds.items():
            child = case.find(kind)
            if child is not None:
                found.append(scrub(f"{name}: {(child.get('message') or '')[:200]}"))
    bad = len({line for found in kinds.values() for line in found})
    files = collections.Counter(case.get("classname") for case in cases)
    seconds = sorted(((float(case.get("time") or 0), f"{case.get('classname')}::{case.get('name')}") for case in cases))
    return {
        "passed": len(cases) - bad,
        "failed": len(kinds["failure"]) + len(kinds["error"]),
        "skipped": len(kinds["skipped"]),
        "failures": kinds["failure"] + kinds["error"],
        "cases_by_file": dict(sorted(files.items())),
        "skips": sorted(kinds["skipped"])[:40],
        "slowest": [f"{taken:.1f} s {name}" for taken, name in seconds[:-11:-1]],
    }


def counts_of_log(output: str) -> dict:
    """What a verbose log tells when pytest did not live to write its report."""
    found = re.findall(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b", output)
    bad = re.findall(r"(tests/\S+) (?:FAILED|ERROR)|(?:FAILED|ERROR) (tests/\S+)", output)
    return {
        "passed": found.count("PASSED"),
        "failed": found.count("FAILED") + found.count("ERROR"),
        "skipped": found.count("SKIPPED"),
        "failures": sorted({first or second for first, second in bad}),
    }


def tests(arguments: argparse.Namespace) -> dict:
    """The whole suite, but for what runs under Triton's interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests", "-v", "-p", "no:cacheprovider", "--tb=short"]
        command += ["--ignore", "tests/interpreter", f"--junitxml={report}"]
        if arguments.workers > 1:
            command += ["-n", str(arguments.workers)]
        result = run(command + arguments.pytest, arguments.tests_timeout)
        counts = counts_of_junit(report) or counts_of_log(result.output)
    return {**described(result), **counts}


HAZARD = re.compile(
    r"Potential (\w+) hazard detected at __shared__ 0x(\w+) in block .*\n"
    + 2 * r"=+ +(\w+) Thread \((\d+),0,0\) at (\S+)\+0x\w+(?: in (\S+?):(\d+))?.*\n"
)
RESERVED = 1024  # bytes of shared memory ahead of a program's own, from compute capability 8 on
DEFAULT_THREADS = 128  # of the partition that tells the others their work


def statement(name: str, number: str) -> str:
    """A line of a kernel's file."""
    paths = list(ROOT.glob(f"torch-ext/*/_triton/{name}")) if name else []
    lines = paths[0].read_text(encoding="utf-8").splitlines() if paths else []
    return lines[int(number) - 1].strip() if int(number or 0) in range(1, len(lines) + 1) else ""


def classify(output: str) -> dict:
    """Hazards of racecheck, apart those in what `gl.warp_specialize` itself writes for its warps: see NOTES.md.

    Such a one is a read after write, by another partition, of an address that `sanitize_case` names, and both accesses
    bear the line of the kernel's `def` or of `gl.warp_specialize`: no line of a partition, and no data of one. Those in
    a form that is not known here are shown as they are, the first ones.
    """
    areas: Dict[str, List[range]] = {}
    for kernel, start, size in re.findall(r"^dispatch (\w+) (\d+) (\d+)$", output, re.MULTILINE):
        areas.setdefault(kernel, []).append(range(int(start), int(start) + int(size)))
    unread = re.findall(r"Potential \w+ hazard.*\n.*\n.*", HAZARD.sub("", output))
    found: Dict[str, Any] = {"dispatch_hazards": {}, "hazards": {}, "unread_hazards": unread[:TAIL_LINES]}
    for kind, address, *sides in HAZARD.findall(output):
        (access, writer, kernel, *first), (_, reader, other, *second) = sides[:5], sides[5:]
        lines = [statement(*first), statement(*second)]
        dispatch = (
            (kind, access, kernel) == ("RAW", "Write", other)
            and int(writer) < DEFAULT_THREADS <= int(reader)
            and any(int(address, 16) - RESERVED in area for area in areas.get(kernel, []))
            and all(line.startswith((f"def {kernel}(", "gl.warp_specialize(")) for line in lines)
        )
        named = f"{kind}, {':'.join(first)} {lines[0]}, {':'.join(second)} {lines[1]}"
        counts = found["dispatch_hazards" if dispatch else "hazards"]
        counts[named] = counts.get(named, 0) + 1
    return found


def sanitize(tool: str, arguments: argparse.Namespace) -> dict:
    """compute-sanitizer over one case script, after runs without it, of a share each, that compile the kernels."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return {"status": "skipped", "seconds": 0.0, "tail": ["compute-sanitizer is not on the PATH"]}
    # One allocation per tensor: in a shared block a stray access would land in a neighbour unnoticed.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}

    shares = max(1, arguments.workers)

    def share(number: int) -> Run:
        command = [sys.executable, CASE, "--share", str(number), str(shares)]
        return run(command, arguments.sanitizer_timeout, **environment)

    with ThreadPoolExecutor(shares) as pool:
        plain = list(pool.map(share, range(shares)))
    for result in plain:
        if result.returncode != 0:
            return {**described(result), "failures": ["a case fails without the sanitizer"]}
    command = [sanitizer, "--tool", tool, "--target-processes", "application-only", "--show-backtrace", "no"]
    command += ["--print-limit", str(PRINT_LIMIT), "--error-exitcode", str(SANITIZER_FAILED)]
    command += ["--racecheck-report", "hazard"] if tool == "racecheck" else []
    result = run([*command, sys.executable, CASE], arguments.sanitizer_timeout, **environment)
    messages = [line for line in result.output.splitlines() if line.startswith("=========")]
    summary = [line for line in messages if "SUMMARY" in line]
    report = {
        **described(result),
        "seconds_without": round(max(result.seconds for result in plain), 1),
        "cases_done": len(re.findall(r": error \d", result.output)),
        "summary": summary[-1].strip("= ") if summary else None,
        "first_messages": messages[:TAIL_LINES],
    }
    if tool != "racecheck":
        return report
    report.update(classify(result.output))
    explained, others = (sum(report[name].values()) for name in ("dispatch_hazards", "hazards"))
    # Nothing else may be wrong: every hazard was printed and read, and the case came to its end.
    complete = (
        re.search(rf"SUMMARY: {explained} hazards? displayed", report["summary"] or "")
        and "\nall right" in result.output
    )
    if result.returncode == SANITIZER_FAILED and complete and not others:
        report["status"] = "passed"
    return report


STEPS = {
    "tests": tests,
    "memcheck": lambda arguments: sanitize("memcheck", arguments),
    "racecheck": lambda arguments: sanitize("racecheck", arguments),
}


def describe_machine(commit: Optional[str]) -> dict:
    """Machine, versions, commit and date."""
    import torch

    versions = {}
    for name in ("torch", "triton", "transformers", "kernels", "pytest"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    cuda = torch.cuda.is_available()
    head = run(["git", "rev-parse", "HEAD"], 30) if shutil.which("git") else Run(1, 0.0, "")
    return {
        "date_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit or (head.output.strip() if head.returncode == 0 else None),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "python": platform.python_version(),
        "cuda": torch.version.cuda or torch.version.hip,
        **versions,
    }


def line(name: str, result: dict) -> str:
    """The one line that a step prints."""
    parts = [f"{name}: {result['status']} in {result['seconds']:.0f} s"]
    if "passed" in result:
        parts.append(f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped")
    if result.get("summary"):
        parts.append(result["summary"])
    if "dispatch_hazards" in result:
        parts.append(f"{sum(result['dispatch_hazards'].values())} of them of Triton's dispatch")
    if "cases_done" in result:
        parts.append(f"{result['cases_done']} cases done")
    for failure in result.get("failures", [])[:12]:
        parts.append(f"\n  {failure}")
    if result["status"] in ("failed", "timed out") and not result.get("failures"):
        parts.append("\n  " + "\n  ".join(result["tail"][-6:]))
    return ", ".join(parts).replace(", \n", "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="step", help=f"of {', '.join(STEPS)}; all without")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="commit of the package, where git can't tell")
    parser.add_argument("--workers", type=int, default=1, help="processes that test, or compile what is sanitized (1)")
    parser.add_argument("--tests-timeout", type=float, default=480, help="seconds (default 480)")
    parser.add_argument("--sanitizer-timeout", type=float, default=240, help="seconds for each tool (default 240)")
    parser.add_argument("--pytest", action="append", default=[], help="a further argument for pytest, repeatable")
    arguments = parser.parse_args()
    unknown = set(arguments.steps) - set(STEPS)
    if unknown:
        parser.error(f"no such step: {', '.join(sorted(unknown))}")
    results = {**describe_machine(arguments.commit), "steps": {}}
    for name in arguments.steps or STEPS:
        results["steps"][name] = STEPS[name](arguments)
        print(line(name, results["steps"][name]), flush=True)
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(result["status"] in ("failed", "timed out") for result in results["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
