"""The experts block and the dispatcher: whoever watches ops sees them, and nothing else changes."""

import pytest
import torch
from block import assert_same, call, run, with_leaves
from cases import BY_ID, make_inputs
from test_dispatch import Log, assert_differentiable_once, by_entry, by_loss
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("case_id", ["silu-bias", "silu-recompute"])
def test_a_mode_sees_the_ops(grouped_moe, device, case_id):
    case = BY_ID[case_id]
    inputs = make_inputs(case, torch.float32, device)
    plain = run(grouped_moe, case, inputs)
    with Log() as log:
        watched = run(grouped_moe, case, inputs)
    assert {"experts_forward", "experts_backward_overwriting"} <= set(log.names)
    assert_same(watched, plain)


def test_without_gradients(grouped_moe, device):
    """A plain call and a watched one give the same; neither makes what a backward needs."""
    case = BY_ID["silu-bias"]
    inputs = make_inputs(case, torch.float32, device)
    with torch.no_grad():
        plain = call(grouped_moe, case, inputs)
        with Log() as log:
            watched = call(grouped_moe, case, inputs)
    assert torch.equal(plain, watched) and not plain.requires_grad
    assert "experts_inference" in log.names and "experts_forward" not in log.names


@by_loss
@by_entry
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("case_id", ["silu-bias", "silu-recompute"])
def test_differentiable_once(grouped_moe, device, case_id, curved, backward, checkpointed):
    case = BY_ID[case_id]
    inputs = with_leaves(make_inputs(case, torch.float32, device))

    def function():
        return call(grouped_moe, case, inputs)

    out = checkpoint(function, use_reentrant=False) if checkpointed else function()
    assert_differentiable_once(out, inputs.hidden_states, curved, backward)
