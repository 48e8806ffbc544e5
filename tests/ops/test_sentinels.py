"""The sentinel contract of routing.py, item by item, and the extreme routings that it calls valid.

Also with a capacity, whose buffers have no row to spare: nothing past the routed rows is read there either.
"""

import pytest
import torch
from block import call, checkpointed, count_routed, make, run, run_reference, with_leaves
from cases import BY_ID, GPU_PARAMS, make_inputs
from compare import assert_bitwise, assert_matches, assert_same
from marks import by_fp32_and_bf16, by_recompute
from poison import dirty_allocator, poison_sentinels, poisoned_allocations

NAN = float("nan")

SOME = [BY_ID[name] for name in ("silu-mostly-sentinels", "gpt-oss", "relu2-not-gated", "many-experts")]


@pytest.mark.kernels_ci
def test_sentinel_is_the_slot_left_out(grouped_moe, device):
    """Dropping a column of slots equals making it sentinels, bitwise: the order of the sums is the same."""
    case, inputs = make("silu", device, sentinels=0.0)
    fewer = {name: getattr(inputs, name)[:, ::2].contiguous() for name in ("top_k_index", "top_k_weights")}
    want = run(grouped_moe, case, inputs._replace(**fewer))
    inputs.top_k_index[:, 1] = case.E
    got = run(grouped_moe, case, inputs)
    assert not got["top_k_weights"][:, 1].any()
    got["top_k_weights"] = got["top_k_weights"][:, ::2]
    assert_same(got, want)


@by_fp32_and_bf16
@by_recompute
@pytest.mark.parametrize("case", SOME + GPU_PARAMS, ids=lambda case: case.id)
def test_item_3_second_backward_finds_dirty_memory(grouped_moe, device, case, recompute, dtype):
    """Steps in a row, and two backward passes of one graph, with memory full of NaN given back in between.

    recompute overwrites its own pre-activation, so the second pass must make a new one.
    """
    case = case._replace(recompute=recompute)
    inputs = make_inputs(case, dtype, device)
    want = run(grouped_moe, case, inputs)
    leaves, floats = with_leaves(poison_sentinels(inputs, case.E)), 1 << (20 if device == "cpu" else 24)
    for _ in range(3):
        dirty_allocator(device, floats)
        out = call(grouped_moe, case, leaves)
        assert_bitwise("out", out.detach(), want["out"])
        for last in (False, True):
            dirty_allocator(device, floats)
            with poisoned_allocations():
                out.backward(leaves.dout, retain_graph=not last)
            for name, leaf in leaves.floating().items():
                assert_bitwise(name, leaf.grad, want[name])
                leaf.grad = None


@by_recompute
@pytest.mark.parametrize("routed", ["more", "fewer", "none"])
def test_checkpointing_when_routing_changes(grouped_moe, device, routed, recompute):
    """The shapes that are saved do not depend on R: a checkpoint sees the same metadata; gradients use the new ids."""
    case, inputs = make("silu-bias", device, recompute=recompute)
    ids, out = inputs.top_k_index, run(grouped_moe, case, inputs)["out"]
    foreign = torch.full_like(ids, case.E)
    fewer = foreign.index_fill(0, torch.tensor([5, 6], device=device), 1)
    changed = {"more": ids.clamp(0, case.E - 1), "fewer": fewer, "none": foreign}[routed]
    routings = iter([ids, changed])

    def around(block):
        return checkpointed(lambda x, _, *rest: block(x, next(routings), *rest))

    got = run(grouped_moe, case, inputs, around=around)
    want = run(grouped_moe, case, inputs._replace(top_k_index=changed))
    assert_same(got, {**want, "out": out})


ROUTINGS = {  # of ids, in place, and E
    "none": lambda ids, experts: ids.fill_(-1),
    "first": lambda ids, experts: ids.fill_(0),
    "third": lambda ids, experts: ids.fill_(2),
    "last": lambda ids, experts: ids.fill_(experts - 1),
    "not-the-first": lambda ids, experts: ids.masked_fill_(ids == 0, experts + 1),
    "not-the-last": lambda ids, experts: ids.masked_fill_(ids == experts - 1, experts + 1),
    "not-two-neighbours": lambda ids, experts: ids.masked_fill_((ids == 1) | (ids == 2), experts + 1),
    # That which most slots have: among many experts none may have a given one.
    "one-expert": lambda ids, experts: ids.masked_fill_(ids != ids[(ids >= 0) & (ids < experts)].mode()[0], experts),
    "one-slot": lambda ids, experts: ids.fill_(experts)[-1, -1].fill_(experts - 1),
}


@by_fp32_and_bf16
@pytest.mark.parametrize("tokens, routing", [(37, name) for name in ROUTINGS] + [(0, "none"), (1, "none"), (6, "none")])
@pytest.mark.parametrize("case_id", ["silu-bias", "silu-recompute", "gpt-oss", "relu2-not-gated", "many-experts"])
def test_item_5_extreme_routings(grouped_moe, device, case_id, tokens, routing, dtype):
    """Weights of experts without rows are NaN and do not leak; what has no row gets exactly 0, as in the reference."""
    case, inputs = make(case_id, device, dtype, T=tokens)
    ROUTINGS[routing](inputs.top_k_index, case.E)
    want = run_reference(grouped_moe, case, inputs)
    for capacity in (None, max(1, count_routed(case, inputs))):
        with poisoned_allocations():
            got = run(grouped_moe, case, poison_sentinels(inputs, case.E), capacity=capacity)
        assert_matches(got, want, dtype)


@pytest.mark.parametrize("where", ["hidden_states", "gate_up_proj", "down_proj", "top_k_weights"])
@pytest.mark.parametrize("case_id", ["silu", "gpt-oss", "relu-not-gated-limit", "relu2-not-gated", "gelu-tanh-limit"])
def test_nan_that_takes_part_shows(grouped_moe, device, case_id, where):
    """In the tokens that it belongs to, and there alone: a clamp or a rectifier must not make a number of it."""
    case, inputs = make(case_id, device, sentinels=0.0)
    getattr(inputs, where)[2] = NAN
    tokens = torch.arange(case.T, device=device) == 2
    tokens = (inputs.top_k_index == 2).any(1) if where.endswith("proj") else tokens
    got = run(grouped_moe, case, inputs)
    assert got["out"][tokens].isnan().all() and not got["out"][~tokens].isnan().any()
    assert not got["hidden_states"][~tokens].isnan().any()
