"""Everything that is to hold on a GPU, in one command: tests, random cases, compute-sanitizer over every kernel.

    python tools/gpu_suite.py [tests] [fuzz] [memcheck] [racecheck] [synccheck] [--workers 6] [--output JSON]

Without names all steps run. Each prints one line; the JSON is rewritten after each. Exits with 1 if a step failed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from machine import describe_machine, scrub, write  # noqa: E402

CASE = str(Path("tools") / "sanitize_case.py")
TAIL_LINES = 30
CASES = 100  # of fuzz.py that a process runs: those of a layer, which share compiled kernels
SANITIZER_FAILED = 86  # an exit status that nothing else here has
PRINT_LIMIT = 100000


class Run(NamedTuple):
    """A finished command. returncode: None if it ran into its time limit."""

    returncode: Optional[int]
    seconds: float
    output: str

    def described(self) -> dict:
        """What every step records; the end of its output where it did not pass."""
        status = {None: "timed out", 0: "passed"}.get(self.returncode, "failed")
        tail = [line.rstrip()[:300] for line in self.output.splitlines()[-TAIL_LINES:]]
        return {"status": status, "seconds": round(self.seconds, 1), "tail": [] if status == "passed" else tail}


def run(command: List[str], timeout: float, **environment: str) -> Run:
    """Runs a command in the repository; past the limit, ends it with all that it started."""
    start = time.monotonic()
    # A file, not a pipe: what a command leaves running would hold a pipe open.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
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


def tests(arguments: argparse.Namespace) -> dict:
    """The whole suite, but for what runs under Triton's interpreter: pytest's counts, failures and slowest tests."""
    command = [sys.executable, "-m", "pytest", "tests", "-p", "no:cacheprovider", "--tb=short", "-rfEs"]
    command += ["--ignore", "tests/interpreter", "--durations=10"]
    command += ["-n", str(arguments.workers)] if arguments.workers > 1 else []
    result = run(command + arguments.pytest, arguments.tests_timeout)
    found = {name: re.findall(rf"^{name} .*", result.output, re.MULTILINE) for name in ("FAILED", "ERROR", "SKIPPED")}
    last = result.output.splitlines()[-1:]
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", "".join(last))}
    slowest = re.findall(r"^[\d.]+s call .*", result.output, re.MULTILINE)
    failures = [line[:300] for line in found["FAILED"] + found["ERROR"]]
    return {**result.described(), **counts, "failures": failures, "skips": found["SKIPPED"][:40], "slowest": slowest}


HAZARD = re.compile(
    r"Potential (\w+) hazard detected at __shared__ 0x(\w+) in block .*\n"
    + 2 * r"=+ +(\w+) Thread \((\d+),0,0\) at (\S+)\+0x\w+(?: in (\S+?):(\d+))?.*\n"
)
RESERVED = 1024  # bytes of shared memory ahead of a program's own, from compute capability 8 on
DEFAULT_THREADS = 128  # of the partition that tells the others their work


def statement(kernel: str, name: str, number: str) -> str:
    """A line of a file by its name; of several files, of the one that defines the kernel."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(f"torch-ext/**/{name}"))] if name else []
    lines = max(texts, key=lambda text: f"def {kernel}(" in text, default="").splitlines()
    return lines[int(number) - 1].strip() if int(number or 0) in range(1, len(lines) + 1) else ""


def classify(output: str) -> dict:
    """Counts racecheck's hazards, those of Triton's own dispatch to warps apart (benchmarks/NOTES.md says why).

    A hazard is the dispatch's if it is a read after write, by another partition, of an address that `sanitize_case`
    names, and both accesses bear the line of the kernel's `def` or of `gl.warp_specialize`. The first hazards that this
    can't parse are returned as they are.
    """
    areas: Dict[str, List[range]] = {}
    for kernel, start, size in re.findall(r"^dispatch (\w+) (\d+) (\d+)$", output, re.MULTILINE):
        areas.setdefault(kernel, []).append(range(int(start), int(start) + int(size)))
    unread = re.findall(r"Potential \w+ hazard.*\n.*\n.*", HAZARD.sub("", output))
    found: Dict[str, Any] = {"dispatch_hazards": {}, "hazards": {}, "unread_hazards": unread[:TAIL_LINES]}
    for kind, address, *sides in HAZARD.findall(output):
        (access, writer, kernel, *first), (_, reader, other, *second) = sides[:5], sides[5:]
        lines = [statement(kernel, *first), statement(kernel, *second)]
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


def worst(runs: List[Run], seconds: float) -> Run:
    """Of runs side by side: the status of the one that did worst, the output of all. seconds: that they took."""
    found = max(runs, key=lambda each: (each.returncode is None, each.returncode not in (0, 1), each.returncode != 0))
    return Run(found.returncode, seconds, "\n".join(each.output for each in runs))


def sanitize(tool: str, arguments: argparse.Namespace) -> dict:
    """compute-sanitizer over the case script, a share of the cases to each process, after a run without it."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return {"status": "skipped", "seconds": 0.0, "tail": ["compute-sanitizer is not on the PATH"]}
    # One allocation per tensor: in a shared block a stray access would land in a neighbour unnoticed.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}

    def run_shares(*prefix: str) -> List[Run]:
        def share(number: int) -> Run:
            command = [*prefix, sys.executable, CASE, "--share", str(number), str(arguments.workers)]
            return run(command, arguments.sanitizer_timeout, **environment)

        with ThreadPoolExecutor(arguments.workers) as pool:
            return list(pool.map(share, range(arguments.workers)))

    for result in run_shares():  # compiles the kernels, too
        if result.returncode != 0:
            return {**result.described(), "failures": ["a case fails without the sanitizer"]}
    command = [sanitizer, "--tool", tool, "--target-processes", "application-only", "--show-backtrace", "no"]
    command += ["--print-limit", str(PRINT_LIMIT), "--error-exitcode", str(SANITIZER_FAILED)]
    command += ["--racecheck-report", "hazard"] if tool == "racecheck" else []
    start = time.monotonic()
    runs = run_shares(*command)
    return judge(tool, runs, time.monotonic() - start)


def judge(tool: str, runs: List[Run], seconds: float) -> dict:
    """What a tool said in runs that share the cases. racecheck passes with hazards of Triton's dispatch alone."""
    result = worst(runs, seconds)
    report = {**result.described(), "cases_done": len(re.findall(": right$", result.output, re.MULTILINE))}
    report["summary"] = "; ".join(re.findall(r"^=+ *(.*SUMMARY.*?) *$", result.output, re.MULTILINE))
    if tool == "racecheck":
        report.update(classify(result.output))
        explained, others = (sum(report[name].values()) for name in ("dispatch_hazards", "hazards"))
        # Nothing else may be wrong: every hazard was printed and parsed, and each run came to its end.
        displayed = sum(map(int, re.findall(r"SUMMARY: (\d+) hazards? displayed", result.output)))
        ended = all(each.returncode in (0, SANITIZER_FAILED) and "\nall right" in each.output for each in runs)
        if ended and explained == displayed and not others:
            report["status"] = "passed"
    return report


def fuzz(arguments: argparse.Namespace) -> dict:
    """Random cases, shared by processes. A failure's line in `failures` repeats it."""
    shares = [range(arguments.cases)[start : start + CASES] for start in range(0, arguments.cases, CASES)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:

        def share(numbers: range) -> Run:
            file, seed = Path(folder, f"{numbers[0]}.json"), str(arguments.seed)
            command = [sys.executable, str(Path("tools") / "fuzz.py"), "--seed", seed, "--json", str(file)]
            left = arguments.fuzz_timeout - (time.monotonic() - start)
            return run([*command, "--only", f"{numbers[0]}-{numbers[-1]}"], max(left, 1.0))

        runs = list(pool.map(share, shares))
        # Written after each case: a process that ran out of time leaves those that it did.
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in Path(folder).glob("*.json")]
    found = worst(runs, time.monotonic() - start).described()
    failures = [failure["line"] for report in reports for failure in report["failures"]]
    return {**found, "seed": arguments.seed, "cases_done": sum(each["cases"] for each in reports), "failures": failures}


TOOLS = {tool: partial(sanitize, tool) for tool in ("memcheck", "racecheck", "synccheck")}
STEPS = {"tests": tests, "fuzz": fuzz, **TOOLS}


def line(name: str, result: dict) -> str:
    """What a step prints."""
    said = [f"{name}: {result['status']} in {result['seconds']:.0f} s"]
    said += [f"{result[key]} {key}" for key in ("passed", "failed", "errors", "skipped", "cases_done") if key in result]
    said += [result["summary"]] if result.get("summary") else []
    if "dispatch_hazards" in result:
        said.append(f"{sum(result['dispatch_hazards'].values())} of them of Triton's dispatch")
    return "\n  ".join([", ".join(said), *(result.get("failures", [])[:12] or result["tail"][-6:])])


def positive(text: str) -> int:
    """The type of an option. Raises ValueError unless it is a number from 1 on."""
    if int(text) < 1:
        raise ValueError("no number from 1 on")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("steps", nargs="*", metavar="step", help=f"of {', '.join(STEPS)}; all without")
    add("--output", type=Path, help="JSON file to write")
    add("--workers", type=positive, default=1, help="processes that share each step (1)")
    add("--tests-timeout", type=float, default=480, help="seconds (480)")
    add("--sanitizer-timeout", type=float, default=240, help="seconds for each tool (240)")
    add("--cases", type=positive, default=2000, help="random cases (2000)")
    add("--seed", type=int, default=0, help="of the random cases (0)")
    add("--fuzz-timeout", type=float, default=480, help="seconds for the random cases (480)")
    add("--pytest", action="append", default=[], help="a further argument for pytest, repeatable")
    arguments = parser.parse_args()
    if not set(arguments.steps) <= set(STEPS):
        parser.error(f"expected steps of {', '.join(STEPS)}, got {' '.join(arguments.steps)}")
    results: Dict[str, Any] = {"benchmark": "gpu_suite", **describe_machine(), "steps": {}}
    for name in arguments.steps or STEPS:
        results["steps"][name] = STEPS[name](arguments)
        print(line(name, results["steps"][name]), flush=True)
        write(arguments.output, results)
    return int(any(result["status"] in ("failed", "timed out") for result in results["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
