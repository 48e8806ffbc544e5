"""Random cases: none fails with the package as it is; planted faults are found, and the printed line repeats them."""

import itertools
import json
import re
from functools import partial

import fuzz
import fuzz_cases
import pytest
import torch
from fuzz_roundings import Roundings

SEED = 11  # its first layer is small
LINE = re.compile(r"^python tools/fuzz\.py (--seed \d+ --only \d+).*$", re.MULTILINE)
_calls = itertools.count()


def sentinel(experts, top_k_index, gate_up_proj, capacity, **given):
    """The id E is taken for the last expert's."""
    experts_count = gate_up_proj.shape[0]
    ids = top_k_index.where(top_k_index != experts_count, experts_count - 1)
    return experts(top_k_index=ids, gate_up_proj=gate_up_proj, **given)


def slot(experts, top_k_index, gate_up_proj, **given):
    """The first slot of the first token is left out."""
    ids = top_k_index.clone()
    ids[:1, :1] = gate_up_proj.shape[0]
    return experts(top_k_index=ids, gate_up_proj=gate_up_proj, **given)


def bias(experts, down_proj_bias=None, **given):
    """The last expert's is left out."""
    if down_proj_bias is not None:
        down_proj_bias = torch.cat([down_proj_bias[:-1], 0 * down_proj_bias[-1:].detach()])
    return experts(down_proj_bias=down_proj_bias, **given)


def rounded(dbias_dscales, **given):
    """Sums in a wide dtype are rounded to bf16."""
    dbias, dscales = dbias_dscales(**given)
    return dbias.copy_(dbias.bfloat16()), dscales


def gradient(experts, top_k_weights, **given):
    """One gradient is 5 % off."""
    top_k_weights = top_k_weights.view_as(top_k_weights)
    if top_k_weights.requires_grad:
        top_k_weights.register_hook(lambda grad: grad * 1.05)
    return experts(top_k_weights=top_k_weights, **given)


def read(experts, top_k_weights, **given):
    """Routing weights of sentinels are read."""
    out = experts(top_k_weights=top_k_weights, **given)
    return out + 0 * top_k_weights.detach().sum().to(out.dtype)


def unwritten(experts, **given):
    """Memory that was not written is read, which happens to be 0 where nobody fills it."""
    out = experts(**given)
    fresh = torch.empty_like if torch.are_deterministic_algorithms_enabled() else torch.zeros_like
    return out + fresh(out).isnan()


def bits(experts, **given):
    """Every other call rounds otherwise."""
    out = experts(**given)
    return out * (1 + next(_calls) % 2 * torch.finfo(out.dtype).eps)


def write(experts, top_k_weights, **given):
    """Memory between the elements of an input is written to, or an input itself."""
    out = experts(top_k_weights=top_k_weights, **given)
    fuzz.memory_of(top_k_weights.detach())[-1] ^= 1
    return out


def frozen(experts, top_k_weights, **given):
    """A frozen input gets a gradient."""
    out = experts(top_k_weights=top_k_weights, **given)
    if out.requires_grad and not top_k_weights.requires_grad:
        top_k_weights.grad = torch.zeros_like(top_k_weights)
    return out


def crash(experts, **given):
    if not torch.is_grad_enabled():
        raise RuntimeError("planted")
    return experts(**given)


def last_group(linear, weight, **given):
    """The weight's gradient of the last group is left out."""
    return linear(weight=torch.cat([weight[:-1], weight[-1:].detach()]), **given)


def run(capsys, package, *arguments: str):
    """(exit status, what is printed)."""
    status = fuzz.main([*arguments, "--device", "cpu"], package)
    return status, capsys.readouterr().out


def test_the_package_passes(grouped_moe, capsys, tmp_path):
    report = tmp_path / "folder" / "report.json"
    status, printed = run(capsys, grouped_moe, "--seed", str(SEED), "--only", "70-120", "--json", str(report))
    assert status == 0 and printed.endswith("0 failed\n") and not LINE.search(printed), printed
    found = json.loads(report.read_text())
    assert found["cases"] == sum(found["by_op"].values()) == 51 and not found["failures"]
    assert {"torch", "triton", "date_utc", "gpu", "seed", "device"} <= found.keys()


def test_time_is_up(grouped_moe, capsys):
    status, printed = run(capsys, grouped_moe, "--seed", str(SEED), "--minutes", "0")
    assert status == 0 and printed.endswith("0 failed\n")


@pytest.mark.parametrize("plant, op, says, numbers", [
    (sentinel, "grouped_mm_experts", "error", "0-60"),
    (slot, "grouped_mm_experts", "error", "0-60"),
    (bias, "grouped_mm_experts", "error", "0-60"),
    (gradient, "grouped_mm_experts", "grad of top_k_weights", "0-60"),
    (read, "grouped_mm_experts", "the second run gives other bits", "0-60"),
    (unwritten, "grouped_mm_experts", "the second run gives other bits", "0-60"),
    (bits, "grouped_mm_experts", "the second run gives other bits", "0-60"),
    (write, "grouped_mm_experts", "top_k_weights: its memory was written to", "0-60"),
    (frozen, "grouped_mm_experts", "grad of top_k_weights", "0-60"),
    (crash, "grouped_mm_experts", "RuntimeError: planted", "0-60"),
    (last_group, "grouped_linear", "grad of weight", "220-235"),
    (rounded, "grouped_dbias_dscales", "dbias", "208-239"),
])  # fmt: skip
def test_a_planted_fault_is_found_and_repeated(grouped_moe, capsys, monkeypatch, plant, op, says, numbers):
    monkeypatch.setattr(grouped_moe, op, partial(plant, getattr(grouped_moe, op)))
    status, printed = run(capsys, grouped_moe, "--seed", str(SEED), "--only", numbers)
    lines = LINE.findall(printed)
    assert status == 1 and lines and f"{len(lines)} failed" in printed
    again, repeated = run(capsys, grouped_moe, *lines[0].split())
    assert again == 1 and LINE.findall(repeated) == lines[:1] and says in repeated, repeated
    monkeypatch.undo()
    assert run(capsys, grouped_moe, *lines[0].split())[0] == 0


def draw_past_op(key):
    """The choices of a key behind that of the op."""
    draw = fuzz_cases.Draw(key)
    draw.random()
    return draw


@pytest.mark.parametrize("words", [("--only", "5-3"), ("--only", "x"), ("--device", "gpu")])
def test_refuses_options_that_choose_nothing(capsys, words):
    with pytest.raises(SystemExit):
        fuzz.main(list(words))
    assert f"argument {words[0]}: invalid " in capsys.readouterr().err


@pytest.mark.parametrize("number, name", [(2861, "grad of hidden_states"), (3316, "grad of top_k_weights")])
def test_a_row_that_cancels_may_be_off_by_what_its_terms_may(grouped_moe, number, name):
    """The derivative of a gelu next to its zero; an inner product that is a tenth of its largest terms."""
    layer = fuzz_cases.draw_layer(fuzz_cases.Draw(f"55/layer/{number // 100}"), "cpu")
    case = fuzz_cases.Case(fuzz.OPS["grouped_mm_experts"][0], layer, draw_past_op(f"55/case/{number}"), "cpu")
    trial = fuzz.Trial(grouped_moe, case, "cpu")
    got, want = trial.run(trial.inputs()), trial.want(trial.wide, trial.routings)
    allowed = trial.tolerances(case.dtype)
    assert " bad rows" in fuzz.difference(name, got[name], want[name], allowed)
    trial.compare(got, trial.routings)
    error = fuzz.norms(got[name].double() - want[name])
    row = int((error / fuzz.norms(want[name])).nan_to_num().argmax())
    got[name][row] += 40 * (got[name][row] - want[name][row]).to(case.dtype)
    with pytest.raises(AssertionError, match=f"^{name} .* 1 bad rows, worst {row} "):
        trial.compare(got, trial.routings)


@pytest.mark.parametrize("op", ["grouped_mm_experts", "grouped_mlp", "grouped_linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_roundings_are_those_of_the_package(grouped_moe, dtype, op):
    """In all results alike: they have twice the variance of roundings to nearest."""
    layer = fuzz_cases.Layer(dtype, H=72, I=40, scales_dtype=torch.float32)
    given = {"mode": "grad", "rows": 96, "some_wanted": False, "biases": fuzz_cases.BIASES, "bias": "scaled"}
    given.update(scales="both", recompute=False, adapted=[], scaled=[], splits="sizes", capacity=None)
    case = fuzz_cases.Case(fuzz.OPS[op][0], layer, fuzz_cases.Draw(op), "cpu", **given)
    trial = fuzz.Trial(grouped_moe, case, "cpu")
    got, want = trial.run(trial.inputs()), trial.want(trial.wide, trial.routings)
    samples = trial.sample_errors(got, want, trial.routings, 8)
    ratios = {n: float((t.double() - want[n]).norm() / samples[n].norm(dim=1).mean()) for n, t in got.items()}
    assert len(ratios) >= 5 and all(0.4 < ratio < 1.1 for ratio in ratios.values()), str(ratios)


def test_equal_numbers_are_rounded_alike():
    """As the package does; what is made of several of them is off by all of their errors."""
    roundings = Roundings(torch.bfloat16, torch.bfloat16, "cpu", seed=0)
    rows = torch.randn(40, 8, dtype=torch.float64)[torch.arange(120) % 40]
    for rounded in (roundings.to_dtype(rows, torch.bfloat16), roundings.off(rows, rows.abs(), 4)):
        assert torch.equal(rounded[:40], rounded[40:80]) and torch.equal(rounded[:40], rounded[80:])
        assert not torch.equal(rounded, rows)
    both = roundings.to_dtype(torch.cat((rows, -rows)), torch.bfloat16)
    assert torch.equal(both[:120], -both[120:])
    assert not torch.equal(roundings.to_dtype(rows, torch.bfloat16), roundings.to_dtype(rows, torch.bfloat16))


def test_what_a_dtype_holds_is_not_rounded():
    roundings = Roundings(torch.bfloat16, torch.bfloat16, "cpu", seed=0)
    held = torch.tensor([0.0, 1.0, -0.0625, 129 / 128, 2.0**-133], dtype=torch.float64)
    assert torch.equal(roundings.to_dtype(held, torch.bfloat16), held)
    # 4000 numbers, a fourth of the way to 1 + 1 / 128.
    between = 1 + 1 / 512 + 1e-9 * torch.arange(4000, dtype=torch.float64)
    found = roundings.to_dtype(between, torch.bfloat16)
    assert found.unique().tolist() == [1.0, 1 + 1 / 128] and abs(float((found > 1).double().mean()) - 0.25) < 0.03
