"""The benchmarks' inputs are what they say, their providers agree with the reference, and growth is flagged."""

import json
import math
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import peers  # noqa: E402
import report  # noqa: E402
import run_products  # noqa: E402
import timing  # noqa: E402
from workload import SMOKE, SMOKE_GPT_OSS, SMOKE_UNGATED, Cell, count, draw_ids, make_inputs  # noqa: E402


def rows_of(pattern):
    torch.manual_seed(0)
    ids = draw_ids(Cell(SMOKE._replace(experts=16, top_k=4), 512, pattern=pattern), "cpu")
    return torch.bincount(ids.flatten(), minlength=16)


def test_patterns():
    assert (rows_of("balanced") == 128).all()
    assert rows_of("half")[0] == 1024 and rows_of("half")[1:].max() < 128
    zipf = rows_of("zipf")
    assert zipf[0] > 350 and zipf[15] < 100
    assert abs(rows_of("random") - 128).max() < 48


def test_local_share():
    cell = Cell(SMOKE, 1024, 0.125)
    inputs = make_inputs(cell, "cpu")
    assert abs(count(SMOKE, [inputs]).rows - 256) < 64
    assert (inputs.weights[inputs.ids == SMOKE.experts] == 0).all()


@pytest.mark.parametrize("layer", [SMOKE, SMOKE_GPT_OSS, SMOKE_UNGATED], ids=lambda layer: layer.name)
@pytest.mark.parametrize("local", [1.0, 0.5])
def test_providers_agree(grouped_moe, layer, local):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    cell = Cell(layer, 200, local, backward=True)
    block, inputs = peers.make_block(layer, "cpu"), make_inputs(cell, "cpu")
    names = (report.OURS, report.RECOMPUTE, report.EAGER, report.BATCHED, report.SCATTERMOE)
    functions, absent = peers.Providers(grouped_moe).make(block, cell, names)
    assert list(absent) == [report.SCATTERMOE]  # a kernel for GPUs
    wanted = peers.expected(grouped_moe, block, cell, inputs)
    for function in functions.values():
        checked = peers.check(peers.make_call(function, block, [inputs], True)(0), wanted, inputs)
        assert checked["ok"], checked


def test_workers_can_import_a_kernel(grouped_moe, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # puts it back in the end
    command = [sys.executable, "-c", f"import {grouped_moe.__name__}.reference"]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode
    peers.show_to_workers(grouped_moe, str(tmp_path))
    assert not subprocess.run(command).returncode


def test_a_lost_row_is_wrong(grouped_moe):
    torch.manual_seed(0)
    cell = Cell(SMOKE, 200)
    block, inputs = peers.make_block(SMOKE, "cpu"), make_inputs(cell, "cpu")
    wanted = peers.expected(grouped_moe, block, cell, inputs)
    lost = wanted[0].clone()
    lost[7] = 0
    assert not peers.check([lost], wanted, inputs)["ok"]


@pytest.mark.parametrize("rounds, seconds", [(1, math.inf), (25, 0.0)], ids=["planned", "cut-short"])
@pytest.mark.parametrize("number", range(1, 8))
def test_everyone_follows_everyone_equally_often(number, rounds, seconds):
    """Over all that runs; what comes first in a round follows itself."""
    sampled, calls = [], {f"provider {i}": f"call {i}" for i in range(number)}
    found = timing.time_in_turn(
        calls, timing.Plan(0.0, rounds), seconds, False, lambda call, calls, cuda: sampled.append(call) or 1.0
    )  # fmt: skip
    sampled = sampled[number:]  # after the warm-up
    counted = sum(one["rounds"] for one in found.values())
    assert len(sampled) == counted + counted // number
    followed = Counter(zip(sampled, sampled[1:]))
    for first in range(0, len(sampled), number + 1):  # what comes before a sample that does not count
        if first:
            followed[sampled[first - 1], sampled[first]] -= 1
    assert len(+followed) == number**2 and len(set((+followed).values())) == 1


def test_over_line():
    def series(times):
        return {"x": "tokens", "points": [{"value": 2**n, "median_ms": ms} for n, ms in enumerate(times)]}

    assert report.over_line(series([1, 2, 4])) == [None, pytest.approx(1.0), None]
    assert report.over_line(series([1, 2.5, 4]))[1] == pytest.approx(1.25)
    assert report.over_line(series([1, None, 4])) == [None, None, None]


def test_kernels_of_a_step_go_to_products():
    """Kernels that share a name come in the order of a step; all others, and those past it, are the rest."""
    names = "place_slots up_proj gemm combine sort_rows down_dgrad gemm combine wgrad wgrad wgrad".split()
    sums = run_products.total([(f"hopper_{name}_kernel", 2.0**place) for place, name in enumerate(names)])
    at = {name: 2.0**place for name, place in zip(run_products.PRODUCTS, (1, 2, 5, 6, 8, 9))}
    assert sums == {**at, run_products.REST: 2.0**11 - 1 - sum(at.values())}


def test_calls_of_a_trace():
    """Calls take turns, some repetitions of each in a row; one whose mark is lost would shift all that come after."""
    calls, rounds = 3, 2
    spans = []
    for number in range(rounds * calls * run_products.CALLS):
        spans += [("void at::cuda::spin_kernel(long)", 0.1), (f"kernel {number}", 1.0), (f"second {number}", 2.0)]
    numbers = [[int(one[0][0].split()[1]) for one in call] for call in run_products.by_call(spans, calls, rounds)]
    assert numbers == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    with pytest.raises(RuntimeError, match="the trace has 11 calls of 12"):
        run_products.by_call(spans[:3] + spans[4:], calls, rounds)


@pytest.mark.parametrize(
    "options, last",
    [((), "nothing measured"), (("--only", "none of them"), "nothing measured"), (("--prepare",), None)],
)
def test_products_without_a_gpu(options, last, tmp_path):
    """All of it runs there but the trace, and the JSON says why there are no times."""
    script, output = ROOT / "benchmarks" / "run_products.py", tmp_path / "products.json"
    done = subprocess.run(
        [sys.executable, str(script), "--smoke", "--output", str(output), *options],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (done.stdout.splitlines() or [None])[-1] == last
    if not options:
        (cell,) = json.loads(output.read_text(encoding="utf-8"))["cells"]
        assert cell["skipped"] == "needs a GPU"


def test_peers_of_other_runs():
    pytest.importorskip("matplotlib")
    import plot

    def run(tokens, **times):
        cell = dict(layer="a", backward=False, tokens=tokens, local=1.0)
        return {"cells": [{**cell, "providers": {name: {"median_ms": t, "peak_mib": t} for name, t in times.items()}}]}

    results = run(8, ours=2.0, dense=1.0)
    plot.add_peers(results, run(8, ours=4.0, dense=8.0, peer=6.0))
    plot.add_peers(results, run(8, ours=1.0, peer=9.0))  # the first one that has it counts
    plot.add_peers(results, run(16, ours=1.0, other=1.0))  # another cell
    plot.add_peers(results, run(8, third=1.0))  # not next to ours
    assert {name: tuple(entry.values()) for name, entry in results["cells"][0]["providers"].items()} == {
        "ours": (2.0, 2.0),
        "dense": (1.0, 1.0),
        "peer": (3.0, 6.0),
    }
    assert len(results["cells"]) == 1
