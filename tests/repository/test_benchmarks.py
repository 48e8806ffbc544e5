"""The benchmarks' inputs are what they say, their providers agree with the reference, and all of them run."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import compare_builds
import experts
import fp8_training
import linear
import machine
import new_shapes
import problems
import pytest
import routing
import run
import timing
import torch
from hub import ROOT
from workload import SMOKE, SMOKE_GPT_OSS, SMOKE_UNGATED, Cell, LinearCell, counts_of, draw_ids, make_inputs

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


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
    inputs = make_inputs(Cell(SMOKE, 1024, 0.125), "cpu")
    assert abs(counts_of(SMOKE, [inputs])[0] - 256) < 64
    assert (inputs.weights[inputs.ids == SMOKE.experts] == 0).all()


@pytest.mark.parametrize("layer", [SMOKE, SMOKE_GPT_OSS, SMOKE_UNGATED], ids=lambda layer: layer.name)
@pytest.mark.parametrize("local", [1.0, 0.5])
def test_providers_agree(grouped_moe, layer, local):
    pytest.importorskip("transformers")
    names = (problems.OURS, experts.RECOMPUTE, experts.GROUPED, experts.BATCHED, experts.SONICMOE)
    made = experts.Experts({problems.OURS: grouped_moe}, names, "cpu")
    (problem,) = made.problems([{"cell": Cell(layer, 200, local, backward=True)}])
    assert list(problem.absent) == [experts.SONICMOE]  # a kernel for GPUs
    wanted = problems.expected(problem, backward=True)
    for name in names[:-1]:
        errors, good = problems.check(problem, name, wanted)
        assert good and len(errors) >= 5, errors


def test_workers_can_import_a_kernel(grouped_moe, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # puts it back in the end
    command = [sys.executable, "-c", f"import {grouped_moe.__name__}.reference"]
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode
    experts.show_to_workers(grouped_moe, str(tmp_path))
    assert not subprocess.run(command).returncode


def changed(provider, row):
    """The provider with 1 added to a row of its output."""

    def forward(i, *leaves):
        out = provider.forward(i, *leaves)
        return out + (torch.arange(len(out), device=out.device) == row)[:, None]

    return provider._replace(forward=forward)


@pytest.mark.parametrize("row, good", [(-1, True), (2, False), (39, False)], ids=["right", "a group", "padding"])
def test_a_wrong_row_is_seen(grouped_moe, row, good):
    """In a group, and in the rows of none, where ours writes 0."""
    problem = linear.Linear({"ours": grouped_moe}).problem(LinearCell(3, 16, 24, 40, "half"))
    problem.providers["ours"] = changed(problem.providers["ours"], row)
    assert problems.check(problem, "ours", problems.expected(problem, backward=True))[1] is good


@pytest.mark.parametrize("name", [problems.OURS, routing.PUBLIC, routing.TORCH])
@pytest.mark.parametrize("part", range(3))
def test_a_wrong_route_is_seen(grouped_moe, device, name, part):
    """Two entries that have changed places."""
    ids = torch.rand(40, 12, device=device).topk(3).indices
    parts = [each.clone() for each in routing.make_routes(grouped_moe, 12)[name](ids)]
    assert routing.is_right(ids, 12, *parts)
    parts[part][3:5] = parts[part][3:5].flip(0)
    assert not routing.is_right(ids, 12, *parts)


def options_of(*words):
    return run.make_parser(None).parse_args(["--smoke", *words])


def test_wrong_and_failing_providers_are_recorded():
    """A failed first call does not end the others'."""

    def fail(*_):
        raise RuntimeError("no such kernel\nmore")

    weight = torch.ones(1, 1, 1, requires_grad=True)
    sets = [problems.Inputs((torch.ones(2, 1, requires_grad=True), weight), torch.ones(2, 1))]
    forwards = {"ours": lambda _, x, w: x * w[0], "peer": lambda _, x, w: x * w[0] + 1, "other": fail}
    problem = problems.Problem(
        {"name": "a"}, {name: problems.Provider(f, sets) for name, f in forwards.items()}, ("step",),
        lambda first, x, w: x * w[0], ("x", "weight"), 1, {"b": "why"},
    )  # fmt: skip
    (cell,) = problems.run_group([problem], ("eager",), options_of())
    assert cell["wrong"] == ["peer"] and cell["skipped"] == {"b": "why", "other": "RuntimeError: no such kernel"}
    assert cell["times"]["step"].keys() == {"ours", "peer"}


def test_gradients_beside_frozen_leaves():
    """Each of the leaves that are trained is compared by its name; those that are frozen have none."""
    x, frozen, factor = torch.randn(3, 4), torch.randn(40, 4), torch.randn(40, 4)
    for trained in (x, factor):
        trained.requires_grad_()
    inputs = [problems.Inputs((x, frozen, factor), torch.randn(3, 4))]

    def right(_, x, frozen, factor):
        return x * (frozen * factor).sum(0)

    def twice(_, x, frozen, factor):
        return right(_, x, frozen, 2 * factor - factor.detach())

    providers = {"right": problems.Provider(right, inputs), "twice": problems.Provider(twice, inputs)}
    problem = problems.Problem({}, providers, (problems.STEP,), right, ("x", "frozen", "factor"), 1)
    cell = problems.start(problem)
    assert cell["wrong"] == ["twice"] and cell["skipped"] == {}
    assert cell["errors"]["twice"].keys() == {"out", "d_x", "d_factor"}
    assert cell["errors"]["twice"]["d_x"] < 1e-5 < 0.9 < cell["errors"]["twice"]["d_factor"]


def test_a_failing_task_and_a_budget_that_is_over(tmp_path):
    def fail():
        raise ValueError("here")

    tasks = [run.Task("one", fail), run.Task("two", fail)]
    output = tmp_path / "out.json"
    run.run_tasks("", "", tasks, options_of("--output", str(output), "--only", "one"))
    (cell,) = json.loads(output.read_text(encoding="utf-8"))["cells"]
    assert cell == {"name": "one", "times": {}, "skipped": {"all": "ValueError: here"}}
    late = run.run_tasks("", "", tasks, options_of("--budget", "0"))["cells"]
    assert all("past the budget" in cell["skipped"]["all"] for cell in late)


def test_only_skipped_cells_are_an_error(tmp_path):
    """They are recorded all the same."""
    output = tmp_path / "out.json"
    with pytest.raises(SystemExit, match="^routing: nothing was measured, all 2 cells were skipped"):
        run.main(["routing", "--smoke", "--budget", "0", "--output", str(output)])
    assert "past the budget" in json.loads(output.read_text(encoding="utf-8"))["cells"][0]["skipped"]["all"]


def test_options_that_choose_nothing(capsys):
    with pytest.raises(SystemExit, match="--only: expected words of one name, such as 'one', got .*'none'"):
        run.run_tasks("", "", [run.Task("one", list)], options_of("--only", "none"))
    for names in ([], ["layers", "decode"]):
        with pytest.raises(SystemExit):
            run.main([*names, "--smoke", "--rounds", "1", "--only", "T=12"])
        assert f"expected one NAME with only, rounds, got {' '.join(names) or 'none'}" in capsys.readouterr().err


@pytest.mark.parametrize("gpu, names", [(True, run.BENCHMARKS), (False, ("cpu",))], ids=["gpu", "no-gpu"])
def test_without_names_what_this_machine_can_measure_runs(monkeypatch, gpu, names):
    """Without a GPU the layers of GPUs would take hours, and their figures would be drawn anew from such times."""
    monkeypatch.setattr(run, "GPU", gpu)
    monkeypatch.setattr(run, "run_each", lambda *given: given)
    with pytest.raises(SystemExit) as ended:
        run.main([])
    assert ended.value.code == (names, False, machine.RESULTS)


@pytest.mark.parametrize("rounds, seconds", [(1, math.inf), (25, 0.0)], ids=["planned", "cut-short"])
@pytest.mark.parametrize("number", range(1, 8))
def test_everyone_follows_everyone_equally_often(monkeypatch, number, rounds, seconds):
    """Over all that runs; what comes first in a round follows itself."""
    sampled, calls = [], {f"provider {i}": f"call {i}" for i in range(number)}
    monkeypatch.setattr(timing, "sample", lambda call, n: sampled.append(call) or 1.0)
    found = timing.time_in_turn(calls, timing.Plan(0.0, rounds, seconds))
    sampled = sampled[number:]  # after the warm-up
    counted = sum(map(len, found.values()))
    assert len(sampled) == counted + counted // number
    followed = Counter(zip(sampled, sampled[1:]))
    for first in range(0, len(sampled), number + 1):  # what comes before a sample that does not count
        if first:
            followed[sampled[first - 1], sampled[first]] -= 1
    assert len(+followed) == number**2 and len(set((+followed).values())) == 1


@pytest.mark.parametrize("smoke", [True, False])
@pytest.mark.parametrize("suite", experts.SUITES)
def test_cells_have_names_of_their_own(suite, smoke):
    groups = experts.cells_of(suite, smoke)
    names = [{**entry["cell"].described(), **entry}["name"] for group in groups.values() for entry in group]
    assert names and len(set(names)) == len(names)


def test_new_shapes_take_each_size_once_before_they_repeat():
    """Every provider, in every pass; what compiles ahead has none of the sizes."""
    seen = []
    calls = {name: lambda size, name=name: seen.append((name, size)) for name in ("ours", "peer")}
    times = new_shapes.measure(calls, [90], [80, 110, 140], 3)
    assert seen[:2] == [("ours", 90), ("peer", 90)]
    for number in range(3):
        passed = seen[2 + 6 * number : 8 + 6 * number]
        assert sorted(passed) == sorted((name, size) for name in calls for size in (80, 110, 140))
    assert times["new, wall"]["ours"]["samples"] == 3 and times["seen, host"]["peer"]["samples"] == 6


def check_smoke(results):
    assert machine.schema_error(results) is None
    assert not [name for cell in results["cells"] for name in cell.get("wrong", ())]
    reasons = {reason for cell in results["cells"] for reason in cell["skipped"].values()}
    assert reasons <= {"needs a GPU", "saves nothing in a forward", "reads split sizes", problems.NOT_CAPTURED}


@pytest.mark.parametrize(
    "name", ["layers", "decode", "growth", "cpu", "linear", "lora", "fp8", "ep", "routing", "new_shapes"]
)
def test_smoke(name, tmp_path, module):
    """Whatever ran, the package sends as before."""
    pytest.importorskip("transformers")
    own = module("exchange").all_to_all
    results = run.main([name, "--smoke", "--output", str(tmp_path / "out.json")])
    check_smoke(results)
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == results
    assert module("exchange").all_to_all is own


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="kernels measures on the kind of device that PyTorch is built for",
)
def test_benchmark_of_the_hub(grouped_moe):
    """All that `kernels benchmark` finds, run and verified as it does."""
    runner = pytest.importorskip("kernels.cli.benchmark")
    (found,) = runner.discover_benchmark_classes(ROOT / "benchmarks" / "benchmark.py", ROOT)
    variant = str(Path(grouped_moe.__file__).parent)
    results, _ = runner.run_benchmark_class(found, iterations=1, warmup=0, repo_id=variant, is_local=True, revision="")
    assert {name: result.verified for name, result in results.items()} == dict.fromkeys(
        ("decode", "long_batch", "sentinels", "training"), True
    )


@pytest.mark.slow
def test_smoke_of_ranks(tmp_path):
    pytest.importorskip("transformers.distributed.expert_parallel")
    output, script = tmp_path / "out.json", ROOT / "benchmarks" / "ep_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--smoke", "--output", str(output)], env=environment, check=True, timeout=200)
    results = json.loads(output.read_text(encoding="utf-8"))
    check_smoke(results)
    assert [cell["shared"] for cell in results["cells"]] == [False, True]


def test_smoke_of_training(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft", minversion="0.21")
    results = run.main(["fp8_training", "--smoke", "--output", str(tmp_path / "out.json")])
    check_smoke(results)
    (cell,) = results["cells"]
    assert cell["shown_steps"] == [0, 5, 10, 14]
    assert all(first > last for first, *_, last in cell["losses"].values())
    held = cell["resident_mib"]
    assert held[fp8_training.FP8] < held[fp8_training.BF16] == held[fp8_training.OTHER]


@pytest.mark.parametrize("wrong", [False, True])
def test_training_on_other_values_is_seen(grouped_moe, monkeypatch, wrong):
    """Scales of one weight that are off by a tenth."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft", minversion="0.21")
    build = fp8_training.build_model

    def build_wrong(kernel, case, run):
        model = build(kernel, case, run)
        for name, parameter in model.named_parameters():
            if name.endswith("up_proj_scale_inv"):
                parameter.mul_(1.1 if wrong else 1.0)
        return model

    monkeypatch.setattr(fp8_training, "build_model", build_wrong)
    (case,) = fp8_training.cases(smoke=True)
    (cell,) = fp8_training.measure(grouped_moe, case._replace(steps=4))
    assert cell["wrong"] == [fp8_training.FP8] * wrong


def test_rounding_at_random():
    """To one of both neighbours, those that are bf16 to themselves, with the mean as it was."""
    values = torch.full((10000,), 1.0 + 2.0**-9)
    got = fp8_training.round_at_random(values).float()
    assert got.unique().tolist() == [1.0, 1.0 + 2.0**-7]
    assert abs(got.mean() - values[0]) < 2.0**-12
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(fp8_training.round_at_random(exact.float()), exact)


def test_two_builds(grouped_moe, tmp_path, capsys):
    """Copies of the build under other ids: each measurement has a ratio. A build compared with itself is refused."""
    pytest.importorskip("transformers")
    own = machine.build_id(grouped_moe).removeprefix("_grouped_moe_").split("_", 1)[1]
    for name in ("one", "two"):
        shutil.copytree(ROOT / "build", tmp_path / name)
        for path in (tmp_path / name).glob("torch-*/*.*"):
            if path.name in ("_ops.py", "metadata.json"):
                path.write_text(path.read_text(encoding="utf-8").replace(own, f"{own}_{name}"), encoding="utf-8")
    folders = ["--before", str(tmp_path / "one"), "--after", str(tmp_path / "two")]
    results = compare_builds.main(["--smoke", "--only", "skew", "forward", "--only", "linear", "half", *folders])
    with pytest.raises(SystemExit, match="different ids"):
        compare_builds.load({"before": tmp_path / "one", "after": tmp_path / "one"})
    check_smoke(results)
    assert capsys.readouterr().out.splitlines()[-1].startswith("after / before: median")
    assert len(results["cells"]) == 6
    assert all(entries.keys() == {"before", "after"} for c in results["cells"] for entries in c["times"].values())


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_recorded_results(path):
    text = path.read_text(encoding="utf-8")
    results = json.loads(text)
    assert text == json.dumps(results, indent=1) + "\n"  # as `machine.write` writes it
    assert machine.schema_error(results) is None
    assert path.name == machine.result_name(results["benchmark"], results.get("gpu"))
    assert not [(cell["name"], name) for cell in results.get("cells", ()) for name in cell.get("wrong", ())]


@pytest.mark.parametrize("change", [
    {"date_utc": None}, {"gpu": 3}, {"cells": []}, {"cells": [{"name": "a", "times": {}, "skipped": {}}]},
    {"cells": 2 * [{"name": "a", "times": {}, "skipped": {"all": "why"}}]},
    {"cells": [{"name": "a", "times": {"step": {"ours": {"median_ms": 0.0}}}, "skipped": {}}]},
], ids=str)  # fmt: skip
def test_what_the_schema_refuses(change):
    results = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text(encoding="utf-8"))
    assert machine.schema_error(results) is None
    assert machine.schema_error({**results, **change})


@pytest.fixture
def plot():
    pytest.importorskip("matplotlib")
    return __import__("plot")


def test_over_line(plot):
    assert plot.over_line([(1, 1), (2, 2), (4, 4)]) == [None, pytest.approx(1.0), None]
    assert plot.over_line([(1, 1), (2, 2.5), (4, 4)])[1] == pytest.approx(1.25)
    assert plot.over_line([(0, 2), (1, 3)], skew=True) == [None, 1.5]


def test_figures_of_the_recorded_results(plot, tmp_path):
    for path in RESULTS:
        shutil.copy(path, tmp_path)
    plot.draw(tmp_path, "h200")
    drawn = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.png")}
    assert drawn <= {path.name for path in tmp_path.glob("*.png")}


def test_peers_of_other_runs(plot):
    def cells(name, **times):
        entries = {name: {"median_ms": ms} for name, ms in times.items()}
        return [{"name": name, "times": {"step": entries}}]

    (cell,) = ours = cells("a", ours=2.0, grouped_mm=10.0, dense=1.0)
    plot.add_peers(ours, cells("a", ours=4.0, dense=8.0, peer=6.0))
    plot.add_peers(ours, cells("a", ours=1.0, peer=9.0))  # the first one that has it counts
    plot.add_peers(ours, cells("a", ours=1.0, grouped_mm=20.0, slow=40.0))  # of grouped_mm, where both have it
    plot.add_peers(ours, cells("b", ours=1.0, other=1.0))  # another cell
    plot.add_peers(ours, cells("a", third=1.0))  # next to neither
    assert {name: entry["median_ms"] for name, entry in cell["times"]["step"].items()} == dict(
        ours=2.0, grouped_mm=10.0, dense=1.0, peer=3.0, slow=20.0
    )
