"""Random cases: none fails with the package as it is; planted faults are found, and the printed line repeats them."""

import itertools
import json
import re
import sys
from functools import partial

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import fuzz  # noqa: E402

SEED = 11  # its first layer is small
LINE = re.compile(r"^python tools/fuzz\.py (--seed \d+ --only \d+).*$", re.MULTILINE)
_calls = itertools.count()


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient that is 5 % off."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.05


def sentinel(experts, top_k_index, gate_up_proj, capacity, **given):
    """The id E is taken for the last expert's."""
    experts_count = gate_up_proj.shape[0]
    ids = top_k_index.where(top_k_index != experts_count, experts_count - 1)
    return experts(top_k_index=ids, gate_up_proj=gate_up_proj, **given)


def gradient(experts, top_k_weights, **given):
    """One gradient is wrong."""
    return experts(top_k_weights=_Scaled.apply(top_k_weights), **given)


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


@pytest.mark.parametrize("plant, op, says", [
    (sentinel, "grouped_mm_experts", "error"),
    (gradient, "grouped_mm_experts", "grad of top_k_weights"),
    (read, "grouped_mm_experts", "the second run gives other bits"),
    (unwritten, "grouped_mm_experts", "the second run gives other bits"),
    (bits, "grouped_mm_experts", "the second run gives other bits"),
    (write, "grouped_mm_experts", "top_k_weights: its memory was written to"),
    (frozen, "grouped_mm_experts", "grad of top_k_weights"),
    (crash, "grouped_mm_experts", "RuntimeError: planted"),
    (last_group, "grouped_linear", "grad of weight"),
])  # fmt: skip
def test_a_planted_fault_is_found_and_repeated(grouped_moe, capsys, monkeypatch, plant, op, says):
    monkeypatch.setattr(grouped_moe, op, partial(plant, getattr(grouped_moe, op)))
    status, printed = run(capsys, grouped_moe, "--seed", str(SEED), "--only", "0-60")
    lines = LINE.findall(printed)
    assert status == 1 and lines and f"{len(lines)} failed" in printed
    again, repeated = run(capsys, grouped_moe, *lines[0].split())
    assert again == 1 and LINE.findall(repeated) == lines[:1] and says in repeated, repeated
    monkeypatch.undo()
    assert run(capsys, grouped_moe, *lines[0].split())[0] == 0
