"""Which hazards the GPU suite counts apart, and how processes share random cases and GPUs."""

import argparse
import json
import os
from pathlib import Path

import gpu_suite
import pytest
import torch
from conftest import spread_over_gpus
from hub import ROOT

KERNEL, FILE = "hopper_wgrad_kernel", "hopper_wgrad.py"
STATE = 4096  # where the kernel tells warps their work, in bytes of its own shared memory


def line_of(start: str) -> int:
    (path,) = (path for path in ROOT.glob(f"torch-ext/**/{FILE}") if f"def {KERNEL}(" in path.read_text("utf-8"))
    lines = path.read_text(encoding="utf-8").splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.strip().startswith(start))


def report(kind="RAW", access="Write", writer=127, reader=320, address=STATE, lines=None, kernel=KERNEL) -> str:
    """A hazard as compute-sanitizer prints it, behind what `sanitize_case` prints."""
    first, second = lines or 2 * [line_of(f"def {KERNEL}(")]
    place = hex(address + gpu_suite.RESERVED)
    return (
        f"dispatch {KERNEL} {STATE} 8\n"
        f"========= Error: Potential {kind} hazard detected at __shared__ {place} in block (0,0,0) :\n"
        f"=========     {access} Thread ({writer},0,0) at {KERNEL}+0x38a0 in {FILE}:{first}\n"
        f"=========     Read Thread ({reader},0,0) at {kernel}+0x120 in {FILE}:{second}\n"
        "=========     Current Value : 4\n"
    )


def counts(output: str) -> tuple:
    found = gpu_suite.classify(output)
    return sum(found["dispatch_hazards"].values()), sum(found["hazards"].values())


def test_hand_over_is_counted_apart():
    assert counts(2 * report() + report(address=STATE + 7)) == (3, 0)


@pytest.mark.parametrize("change", [
    {"kind": "WAR"}, {"kind": "WAW"}, {"access": "Read"}, {"writer": 128}, {"reader": 127}, {"address": STATE - 1},
    {"address": STATE + 8}, {"kernel": "hopper_gemm_kernel"}, {"lines": (line_of("mbarrier.wait("),) * 2},
    {"lines": (line_of(f"def {KERNEL}("), line_of("def consume("))},
], ids=str)  # fmt: skip
def test_any_other_hazard_is_not(change):
    assert counts(report(**change)) == (0, 1)


def test_without_the_addresses_nothing_is_explained():
    assert counts(report().split("\n", 1)[1]) == (0, 1)


def test_what_is_not_read_is_shown():
    output = report() + report(kernel="void a::kernel<4>(int)")
    (unread,) = gpu_suite.classify(output)["unread_hazards"]
    assert counts(output) == (1, 0) and "void a::kernel" in unread


@pytest.mark.parametrize("change, status", [
    ({}, "passed"), ({"displayed": 2}, "failed"), ({"ended": ""}, "failed"), ({"returncode": 1}, "failed"),
    ({"returncode": None}, "timed out"), ({"writer": 128}, "failed"),
], ids=str)  # fmt: skip
def test_racecheck_passes_with_hand_overs_alone(change, status):
    """Those of all runs; where one of them did not end, or shows fewer hazards than it counts, nothing is known."""

    def run(returncode=gpu_suite.SANITIZER_FAILED, displayed=1, ended="all right on cuda", **hazard):
        output = report(**hazard) + f"a case: right\n{ended}\n==== RACECHECK SUMMARY: {displayed} hazards displayed\n"
        return gpu_suite.Run(returncode, 1.0, output)

    found = gpu_suite.judge("racecheck", [run(), run(**change)], 3.0)
    assert (found["status"], found["seconds"], found["cases_done"]) == (status, 3.0, 2)


@pytest.mark.parametrize("option", ["cases", "workers"])
def test_refuses_none_of_them(monkeypatch, capsys, option):
    monkeypatch.setattr("sys.argv", ["gpu_suite.py", "fuzz", f"--{option}", "0"])
    with pytest.raises(SystemExit):
        gpu_suite.main()
    assert f"argument --{option}: invalid positive value: '0'" in capsys.readouterr().err


def test_random_cases_are_shared_by_processes(monkeypatch):
    monkeypatch.setattr(gpu_suite, "CASES", 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = gpu_suite.fuzz(argparse.Namespace(cases=5, seed=3, workers=2, fuzz_timeout=240.0))
    assert (found["status"], found["cases_done"], found["failures"]) == ("passed", 5, [])


@pytest.mark.parametrize("returncode, status", [(None, "timed out"), (1, "failed"), (-11, "failed")])
def test_random_cases_count_as_far_as_processes_came(monkeypatch, returncode, status):
    """One that ends early is no pass, whatever the others say; failures of all are listed."""

    def run(command, timeout):
        number = int(command[-1].partition("-")[0])
        failures = [{"line": f"repeats {number}"}] if number else []
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"cases": 2, "failures": failures}))
        return gpu_suite.Run(returncode if number else 0, 1.0, "")

    monkeypatch.setattr(gpu_suite, "CASES", 3)
    monkeypatch.setattr(gpu_suite, "run", run)
    found = gpu_suite.fuzz(argparse.Namespace(cases=5, seed=3, workers=2, fuzz_timeout=240.0))
    assert (found["status"], found["cases_done"], found["failures"]) == (status, 4, ["repeats 3"])


@pytest.mark.parametrize("worker, count, chosen, want", [
    ("gw0", 4, None, "0,1,2,3"), ("gw6", 4, None, "2,3,0,1"), ("gw6", 1, None, None), ("gw6", 0, None, None),
    (None, 4, None, None), ("named", 4, None, None), ("gw6", 4, "3", "3"),
], ids=str)  # fmt: skip
def test_processes_are_spread_over_gpus(monkeypatch, worker, count, chosen, want):
    """In turn, with all GPUs in sight, for the tests that need another one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for name, value in (("PYTEST_XDIST_WORKER", worker), ("CUDA_VISIBLE_DEVICES", chosen)):
        monkeypatch.setenv(name, value or "")  # puts it back in the end
        if value is None:
            monkeypatch.delenv(name)
    spread_over_gpus()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == want
