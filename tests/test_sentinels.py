"""The sentinel contract of routing.py, item by item, and the extreme routings that it calls valid."""

import pytest
import torch
from block import assert_matches, assert_same, call, run, run_reference, with_leaves
from cases import BY_ID, CASES, make_inputs, sentinel_ids
from compare import assert_bitwise
from poison import dirty_allocator, is_sentinel, poison_sentinels, poisoned_allocations

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16]

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
by_poison = pytest.mark.parametrize("value", [NAN, INF, -INF], ids=["nan", "inf", "minus-inf"])
by_recompute = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
some_cases = pytest.mark.parametrize("case_id", ["silu-mostly-sentinels", "gpt-oss", "relu2-not-gated", "many-experts"])


def _with_ids(inputs, ids):
    return inputs._replace(top_k_index=ids.to(inputs.top_k_index))


@by_dtype
@by_case
def test_item_1_nothing_of_a_sentinel_is_read(grouped_moe, device, case, dtype):
    """NaN in all that must not be read, the package's own memory included: bit-identical output and gradients."""
    inputs = make_inputs(case, dtype, device)
    want = run(grouped_moe, case, inputs)
    with poisoned_allocations():
        assert_same(run(grouped_moe, case, inputs), want)
        poisoned = run(grouped_moe, case, poison_sentinels(inputs, case.E))
    assert_same(poisoned, want)


@by_poison
@by_recompute
@some_cases
def test_item_1_for_nan_and_infinities(grouped_moe, device, case_id, recompute, value):
    case = BY_ID[case_id]._replace(recompute=recompute)
    inputs = make_inputs(case, torch.float32, device)
    got = run(grouped_moe, case, poison_sentinels(inputs, case.E, value))
    assert_same(got, run(grouped_moe, case, inputs))


@some_cases
def test_item_1_sentinels_contribute_zero(grouped_moe, device, case_id):
    """Where every slot of a token is a sentinel, output and gradient of its hidden row are exactly 0."""
    case = BY_ID[case_id]
    inputs = make_inputs(case, torch.float32, device)
    unrouted = is_sentinel(inputs.top_k_index, case.E).all(1)
    assert bool(unrouted.any())
    got = run(grouped_moe, case, poison_sentinels(inputs, case.E))
    assert not got.out[unrouted].any() and not got.grads["hidden_states"][unrouted].any()


@by_recompute
@some_cases
def test_item_2_exactly_zero_gradients(grouped_moe, device, case_id, recompute):
    """Of routing weights of sentinels; and of weights and biases of experts that got none but NaN to multiply."""
    case = BY_ID[case_id]._replace(recompute=recompute)
    inputs = make_inputs(case, torch.float32, device)
    ids = torch.where(inputs.top_k_index == 1, -1, inputs.top_k_index)
    inputs = poison_sentinels(_with_ids(inputs, ids), case.E)
    with poisoned_allocations():
        grads = run(grouped_moe, case, inputs).grads
    sentinel = is_sentinel(ids, case.E)
    assert not grads["top_k_weights"][sentinel].any() and grads["top_k_weights"][~sentinel].all()
    for name, grad in grads.items():
        assert not grad.isnan().any(), name
        if name.endswith(("proj", "bias")):
            assert not grad[1].any(), name


@pytest.mark.kernels_ci
def test_sentinel_ids_mean_the_same(grouped_moe, device):
    """Which foreign id stands in a slot changes nothing, up to the ends of int32 and int64."""
    case = BY_ID["silu"]
    inputs = make_inputs(case, torch.float32, device)
    want = run(grouped_moe, case, inputs)
    sentinel = is_sentinel(inputs.top_k_index, case.E)
    for dtype in (torch.int32, torch.int64):
        for foreign in sentinel_ids(case.E, dtype).tolist():
            ids = inputs.top_k_index.masked_fill(sentinel, foreign if dtype == torch.int64 else 0).to(dtype)
            ids[sentinel] = foreign
            assert_same(run(grouped_moe, case, inputs._replace(top_k_index=ids)), want)


@pytest.mark.kernels_ci
def test_sentinel_is_the_slot_left_out(grouped_moe, device):
    """Dropping a column of slots equals making it sentinels, bitwise: the order of the sums is the same."""
    case = BY_ID["silu"]._replace(sentinels=0.0)
    inputs = make_inputs(case, torch.float32, device)
    ids = inputs.top_k_index.clone()
    ids[:, 1] = case.E
    fewer = {name: getattr(inputs, name)[:, ::2].contiguous() for name in ("top_k_index", "top_k_weights")}
    got, want = run(grouped_moe, case, _with_ids(inputs, ids)), run(grouped_moe, case, inputs._replace(**fewer))
    assert not got.grads["top_k_weights"][:, 1].any()
    got.grads["top_k_weights"] = got.grads["top_k_weights"][:, ::2]
    assert_same(got, want)


@by_dtype
@by_recompute
@some_cases
def test_item_3_second_backward_finds_dirty_memory(grouped_moe, device, case_id, recompute, dtype):
    """Steps in a row, with memory full of NaN given back in between."""
    case = BY_ID[case_id]._replace(recompute=recompute)
    inputs = make_inputs(case, dtype, device)
    want = run(grouped_moe, case, inputs)
    for _ in range(3):
        dirty_allocator(device)
        assert_same(run(grouped_moe, case, poison_sentinels(inputs, case.E)), want)


@some_cases
def test_item_3_two_backward_passes_of_one_graph(grouped_moe, device, case_id):
    """recompute overwrites its own pre-activation, so the second pass must make a new one."""
    for recompute in (False, True):
        case = BY_ID[case_id]._replace(recompute=recompute)
        inputs = make_inputs(case, torch.float32, device)
        leaves = with_leaves(poison_sentinels(inputs, case.E))
        out, tensors = call(grouped_moe, case, leaves), list(leaves.floating().values())
        with poisoned_allocations():
            first = torch.autograd.grad(out, tensors, leaves.dout, retain_graph=True)
            dirty_allocator(device)
            second = torch.autograd.grad(out, tensors, leaves.dout)
        for name, a, b, want in zip(leaves.floating(), first, second, run(grouped_moe, case, inputs).grads.values()):
            assert_bitwise(name, a, want)
            assert_bitwise(name, b, want)


@by_recompute
@pytest.mark.parametrize("routed", ["more", "fewer", "none"])
def test_checkpointing_when_routing_changes(grouped_moe, device, routed, recompute):
    """The shapes that are saved do not depend on R: a checkpoint sees the same metadata; gradients use the new ids."""
    case = BY_ID["silu-bias"]._replace(recompute=recompute)
    inputs = make_inputs(case, torch.float32, device)
    foreign = torch.full_like(inputs.top_k_index, case.E)
    changed = {"more": inputs.top_k_index.clamp(0, case.E - 1), "fewer": foreign.clone(), "none": foreign}[routed]
    if routed == "fewer":
        changed[5:7] = 1
    routings = iter([inputs.top_k_index, changed])
    leaves = with_leaves(inputs)

    def block(hidden_states):
        return call(grouped_moe, case, leaves._replace(hidden_states=hidden_states, top_k_index=next(routings)))

    out = torch.utils.checkpoint.checkpoint(block, leaves.hidden_states, use_reentrant=False)
    assert_bitwise("out", out.detach(), run(grouped_moe, case, inputs).out)
    out.backward(inputs.dout)
    want = run(grouped_moe, case, _with_ids(inputs, changed)).grads
    for name, leaf in leaves.floating().items():
        assert_bitwise(name, leaf.grad, want[name])


@pytest.mark.parametrize("case_id", ["silu", "silu-recompute", "gpt-oss", "relu2-not-gated"])
@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_item_5_no_routed_row(grouped_moe, device, case_id, tokens):
    """R = 0, T = 0 included: zeros everywhere, whatever the tensors hold."""
    case = BY_ID[case_id]._replace(T=tokens)
    inputs = make_inputs(case, torch.float32, device)
    inputs = _with_ids(inputs, torch.full_like(inputs.top_k_index, -1))
    with poisoned_allocations():
        got = run(grouped_moe, case, poison_sentinels(inputs, case.E))
    assert got.out.shape == (tokens, case.H) and not got.out.any()
    for name, grad in got.grads.items():
        assert grad.shape == getattr(inputs, name).shape and not grad.any(), name


@by_dtype
@pytest.mark.parametrize("expert", [0, 2, 4])
def test_item_5_all_rows_on_one_expert(grouped_moe, device, expert, dtype):
    case = BY_ID["silu-bias"]
    inputs = make_inputs(case, dtype, device)
    inputs = _with_ids(inputs, torch.full_like(inputs.top_k_index, expert))
    got = run(grouped_moe, case, poison_sentinels(inputs, case.E))
    assert_matches(got, run_reference(grouped_moe, case, inputs), dtype)


@by_dtype
@pytest.mark.parametrize("idle", [(0,), (4,), (1, 2), (0, 1, 3, 4)], ids=str)
def test_item_5_experts_without_rows(grouped_moe, device, idle, dtype):
    """First, last, neighbours, all but one: their NaN weights do not leak and their gradients are exactly 0."""
    case = BY_ID["gpt-oss"]
    inputs = make_inputs(case, dtype, device)
    ids = inputs.top_k_index
    ids = torch.where(torch.isin(ids, torch.tensor(idle, device=ids.device)), case.E + 1, ids)
    inputs = _with_ids(inputs, ids)
    with poisoned_allocations():
        got = run(grouped_moe, case, poison_sentinels(inputs, case.E))
    for name, grad in got.grads.items():
        if name.endswith(("proj", "bias")):
            assert not grad[list(idle)].any(), name
    assert_matches(got, run_reference(grouped_moe, case, inputs), dtype)


@by_dtype
def test_item_5_one_expert_of_many(grouped_moe, device, dtype):
    """E = 1024 and a single routed slot, of the last expert."""
    case = BY_ID["many-experts"]
    inputs = make_inputs(case, dtype, device)
    ids = torch.full_like(inputs.top_k_index, case.E)
    ids[3, 2] = case.E - 1
    inputs = _with_ids(inputs, ids)
    with poisoned_allocations():
        got = run(grouped_moe, case, poison_sentinels(inputs, case.E))
    assert_matches(got, run_reference(grouped_moe, case, inputs), dtype)


@pytest.mark.parametrize("where", ["hidden_states", "gate_up_proj", "down_proj", "top_k_weights"])
def test_nan_of_a_routed_row_is_not_hidden(grouped_moe, device, where):
    """The contract protects from what is not routed only: a NaN that takes part shows."""
    case = BY_ID["silu-no-sentinels"]
    inputs = make_inputs(case, torch.float32, device)
    getattr(inputs, where)[2] = NAN
    token = int((inputs.top_k_index == 2).nonzero()[0, 0]) if where.endswith("proj") else 2
    assert call(grouped_moe, case, inputs)[token].isnan().all()


@pytest.mark.parametrize("case_id", ["silu", "gpt-oss", "relu-not-gated-limit", "relu2-not-gated", "gelu-tanh-limit"])
def test_nan_passes_activation_and_clamp(grouped_moe, device, case_id):
    """A clamp or a rectifier must not turn a routed NaN into a number."""
    case = BY_ID[case_id]._replace(sentinels=0.0)
    inputs = make_inputs(case, torch.float32, device)
    inputs.hidden_states[2] = NAN
    got = run(grouped_moe, case, inputs)
    others = torch.arange(case.T, device=device) != 2
    assert got.out[2].isnan().all() and not got.out[others].isnan().any()
    assert not got.grads["hidden_states"][others].isnan().any()
