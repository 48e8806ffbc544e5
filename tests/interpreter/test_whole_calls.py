"""Whole calls by their plans: the public functions on a machine whose CPU counts as an accelerator."""

import contextlib

import pytest
import torch
from block import assert_matches, call, run, run_reference
from cases import BY_ID, make_inputs
from compare import assert_close
from poison import poison_sentinels, poisoned_allocations


@pytest.fixture(autouse=True)
def accelerated(module, monkeypatch):
    monkeypatch.setattr(module("define"), "is_accelerated", lambda tensor: True)
    for name in ("experts", "grouped_linear"):
        monkeypatch.setattr(module(name), "on_device_of", lambda tensor: contextlib.nullcontext())


@pytest.mark.parametrize("case_id", ["silu", "silu-bias", "silu-recompute", "silu-transposed", "relu2-not-gated"])
def test_experts(module, grouped_moe, case_id):
    """Twice, the second call by the plan that the first has left; the forward by the kernels, with NaN all around."""
    case = BY_ID[case_id]
    plans = module("experts")._plans
    plans.clear()
    for kept in (0, 1):
        inputs = make_inputs(case, torch.float32, "cpu")
        assert len(plans) == kept
        with torch.enable_grad(), poisoned_allocations():
            got = run(grouped_moe, case, poison_sentinels(inputs, case.E))
        with torch.enable_grad():
            want = run_reference(grouped_moe, case, inputs)
        assert_matches(got, want, torch.float32)
    (kept,) = plans.values()
    assert len(kept.saved) == 4
    for _ in range(2):
        out = call(grouped_moe, case, inputs)
        assert torch.equal(out, got.out.detach()) and len(plans) == 2


@pytest.mark.parametrize("transposed", [False, True])
def test_linear(module, grouped_moe, transposed):
    """In two forms at the same addresses, each by the plan that its first call has left."""
    plans = module("grouped_linear")._plans
    plans.clear()
    memory = torch.empty(2, 4096)
    sizes, offsets = torch.tensor([5, 0, 20]), torch.tensor([0, 5, 5, 25])
    for _ in range(2):
        for rows, k in ((30, 24), (40, 16)):
            x = memory[0, : rows * k].view(rows, k).normal_()
            weight = memory[1, : 3 * k * 24].view((3, k, 24) if transposed else (3, 24, k)).normal_()
            x[25:] = float("nan")
            with poisoned_allocations():
                got = grouped_moe.grouped_linear(x, weight, sizes, transposed=transposed)
            want = grouped_moe.reference.grouped_linear(
                x.double(), weight.double(), offsets, None, transposed=transposed
            )
            assert_close("y", got, want, torch.float32)
        assert len(plans) == 2
    by_list = grouped_moe.grouped_linear(x, weight, [5, 0, 20], transposed=transposed)  # has no plan: by the CPU's way
    assert_close("y by a list", by_list, want, torch.float32)
