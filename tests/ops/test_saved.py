"""What the experts block saves for its backward, and what the last backward of a graph may overwrite."""

from typing import List
from unittest.mock import Mock

import pytest
import torch
from block import call, checkpointed, count_routed, make, run, with_leaves
from cases import BY_ID, GPU_PARAMS, make_inputs
from compare import assert_bitwise, assert_same
from marks import by_recompute
from operations import record
from poison import poisoned_allocations


@by_recompute
@pytest.mark.parametrize("spare", [None, 3], ids=["no-capacity", "capacity"])
@pytest.mark.parametrize("case_id", ["tall", "gpt-oss", "relu2-not-gated", "silu-transposed"])
def test_what_is_saved(grouped_moe, module, device, case_id, spare, recompute):
    """A pre-activation, unless it is recomputed, and maps, with room for the capacity whatever the routing."""
    case, inputs = make(case_id, device)
    num_slots = case.T * case.top_k
    capacity = None if spare is None else count_routed(case, inputs) + spare
    rows = capacity or num_slots
    preact = [] if recompute else [(rows, case.preact_width)]
    want = [*preact, (module("rows").schedule_size(rows, case.E),), (rows,), (num_slots,)]
    assert spare is None or rows < num_slots
    for ids in (inputs.top_k_index, torch.full_like(inputs.top_k_index, -1)):
        leaves = with_leaves(inputs._replace(top_k_index=ids))
        _, saved = record(lambda: call(grouped_moe, case, leaves, recompute=recompute, capacity=capacity))
        given = {tensor.data_ptr() for tensor in leaves if tensor is not None}
        assert [tuple(tensor.shape) for tensor in saved if tensor.data_ptr() not in given] == want


def test_frozen_weights_keep_no_rows(grouped_moe, device):
    """Rows that only the gradient of a weight reads are not saved for a frozen one."""
    case, inputs = make("tall-wide", device)
    x, ids, weights, up, *_ = inputs
    routing, rows = grouped_moe.route(ids, case.E), torch.randn(ids.numel(), case.H, device=device)
    for operand, weight, function in (
        (x, up, lambda: call(grouped_moe, case, inputs)),
        (rows, up, lambda: grouped_moe.grouped_linear(rows, up, routing.expert_offsets)),
        (rows, weights, lambda: grouped_moe.combine_rows(rows, weights, routing)),
    ):
        operand.requires_grad_()
        for frozen in (False, True):
            weight.requires_grad_(not frozen)
            _, saved = record(function)
            assert frozen != any(tensor.data_ptr() == operand.data_ptr() for tensor in saved)


@pytest.mark.parametrize("case", GPU_PARAMS[1:4], ids=lambda case: case.id)
def test_hooks_may_return_another_address(grouped_moe, device, case):
    """For the pre-activation that of an element on, which tensor memory accelerators do not take: the same bits."""
    inputs, moved = make_inputs(case, torch.bfloat16, device), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != (case.T * case.top_k, case.preact_width):
            return tensor
        moved.append(tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor.detach()))
        return moved[-1]

    want = run(grouped_moe, case, inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda view: view):
        assert_same(run(grouped_moe, case, inputs), want)
    assert [view.data_ptr() % 16 for view in moved] == [2]


def test_a_gradient_that_needs_no_preactivation(grouped_moe, device):
    """That of the b of the second LoRA is made of what its a has projected alone."""
    case, inputs = make("tall-wide", device)
    a = torch.randn(case.E, 2, inputs.down_proj.shape[2], device=device)
    b = torch.randn(case.E, case.H, 2, device=device)
    grads, preacts = [], []
    for trains_a in (False, True):
        lora = grouped_moe.LoRA(a.clone().requires_grad_(trains_a), b.clone().requires_grad_())
        out, saved = record(lambda: call(grouped_moe, case, inputs, down_lora=lora))
        preacts.append(sum(tensor.shape == (case.T * case.top_k, case.preact_width) for tensor in saved))
        grads.append(torch.autograd.grad(out, lora.b, inputs.dout)[0])
    assert preacts == [0, 1]
    assert_bitwise("b", *grads)


def preact_of(case, saved: List[torch.Tensor]) -> torch.Tensor:
    """The pre-activation among what was saved."""
    (preact,) = (tensor for tensor in saved if tensor.shape == (case.T * case.top_k, case.preact_width))
    return preact


@pytest.mark.parametrize("case", [BY_ID["tall-wide"], *GPU_PARAMS[1:2]], ids=lambda case: case.id)
def test_sentinels_cost_no_memory_access(grouped_moe, device, case):
    """Rows past the routed ones stay as they were allocated: nothing passed over them."""
    inputs = with_leaves(make_inputs(case._replace(sentinels=0.7), torch.float32, device))
    with poisoned_allocations():
        preact = preact_of(case, record(lambda: call(grouped_moe, case, inputs))[1])
    routed = count_routed(case, inputs)
    assert 0 < routed < len(preact)
    assert bool(preact[:routed].isfinite().all()) and bool(preact[routed:].isnan().all())


@pytest.mark.parametrize("keep", [False, True], ids=["let-go", "kept"])
@pytest.mark.parametrize("pool", ["of-its-size", "larger", "strided", "an-element-on"])
def test_a_pool_behind_hooks_is_left_alone(grouped_moe, device, pool, keep):
    """Hooks that move what is saved to memory of their own hand that out: the backward does not own it."""
    case, inputs = make("tall-wide", device)
    memory: List[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        spare = (*tensor.shape[:-1], 2 * tensor.shape[-1]) if pool == "strided" else (tensor.numel() + 64,)
        memory.append(tensor.new_ones(tensor.shape if pool == "of-its-size" else spare))
        first = int(pool == "an-element-on")
        flat = memory[-1].view(-1)[first : first + tensor.numel()]
        view = memory[-1][..., ::2] if pool == "strided" else flat.view(tensor.shape)
        return view.copy_(tensor.detach())

    leaves = with_leaves(inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda view: view):
        out = call(grouped_moe, case, leaves)
    before = [tensor.clone() for tensor in memory]
    out.backward(leaves.dout, retain_graph=keep)
    for number, (tensor, want) in enumerate(zip(memory, before)):
        # All types here have four bytes, and rows of no expert hold anything.
        assert torch.equal(tensor.view(torch.int32), want.view(torch.int32)), number
    _, *wants = run(grouped_moe, case, inputs).items()
    for name, want in wants:
        grad = getattr(leaves, name).grad
        if pool != "strided":
            assert_bitwise(name, grad, want)
        # On a CPU sums may go in another order then.
        assert torch.linalg.vector_norm(grad - want) <= 1e-6 * torch.linalg.vector_norm(want), name


def test_the_last_backward_takes_the_preactivation(grouped_moe, device):
    """One that keeps the graph leaves it as it is. The last one gives back its memory."""
    case, inputs = make("tall-wide", device)
    out, saved = record(lambda: call(grouped_moe, case, with_leaves(inputs)))
    preact, routed = preact_of(case, saved), count_routed(case, inputs)
    before = preact.clone()
    out.backward(inputs.dout, retain_graph=True)
    assert_bitwise("kept", preact[:routed], before[:routed])
    out.backward(inputs.dout)
    assert preact.untyped_storage().nbytes() == 0


def test_a_checkpoint_takes_it_too(grouped_moe, module, device, monkeypatch):
    """What a checkpoint computes again is as much the backward's own, and gives the same."""
    case, inputs = make("tall-wide", device)
    want, taken = run(grouped_moe, case, inputs), []
    take_over = module("common.autograd").take_over
    monkeypatch.setattr(module("block_op"), "take_over", lambda saved: taken.append(take_over(saved)) or taken[-1])
    assert_same(run(grouped_moe, case, inputs, around=checkpointed), want)
    assert taken == [True]


def test_after_a_backward_that_failed_another_raises(grouped_moe, module, device, monkeypatch):
    """It would read what the first one has overwritten."""
    case, inputs = make("tall-wide", device)
    out = call(grouped_moe, case, with_leaves(inputs))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(module("block_op"), "_backward", Mock(side_effect=MemoryError))
        out.backward(inputs.dout)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(inputs.dout)
