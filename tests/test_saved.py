"""What the experts block saves for its backward, and what the last backward of a graph may overwrite."""

from typing import List, Tuple

import pytest
import torch
from block import assert_same, call, checkpointed, count_routed, make, run, with_leaves
from cases import BY_ID, GPU_PARAMS, make_inputs
from compare import assert_bitwise
from poison import poisoned_allocations


def record(grouped_moe, case, leaves, **changes) -> Tuple[torch.Tensor, List[torch.Tensor]]:
    """(output, what was saved for the backward beside the inputs)."""
    saved: List[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.detach()) or saved[-1], lambda t: t):
        out = call(grouped_moe, case, leaves, **changes)
    given = {tensor.data_ptr() for tensor in leaves if tensor is not None}
    return out, [tensor for tensor in saved if tensor.data_ptr() not in given]


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
@pytest.mark.parametrize("spare", [None, 3], ids=["no-capacity", "capacity"])
@pytest.mark.parametrize("case_id", ["tall", "gpt-oss", "relu2-not-gated", "silu-transposed"])
def test_what_is_saved(grouped_moe, module, device, case_id, spare, recompute):
    """A pre-activation, unless it is recomputed, and maps, with room for the capacity whatever the routing."""
    case, inputs = make(case_id, device)
    num_slots = case.T * case.top_k
    capacity = None if spare is None else count_routed(case, inputs) + spare
    rows = capacity or num_slots
    preact = (0,) if recompute else (rows, case.preact_width)
    want = [preact, (module("rows").schedule_size(rows, case.E),), (rows,), (num_slots,)]
    assert spare is None or rows < num_slots
    for ids in (inputs.top_k_index, torch.full_like(inputs.top_k_index, -1)):
        leaves = with_leaves(inputs._replace(top_k_index=ids))
        _, saved = record(grouped_moe, case, leaves, recompute=recompute, capacity=capacity)
        assert [tuple(tensor.shape) for tensor in saved] == want


@pytest.mark.parametrize("case", [BY_ID["tall-wide"], *GPU_PARAMS[1:2]], ids=lambda case: case.id)
def test_sentinels_cost_no_memory_access(grouped_moe, device, case):
    """Rows past the routed ones stay as they were allocated: nothing passed over them."""
    inputs = make_inputs(case._replace(sentinels=0.7), torch.float32, device)
    with poisoned_allocations():
        _, (preact, *_) = record(grouped_moe, case, with_leaves(inputs))
    routed = count_routed(case, inputs)
    assert 0 < routed < len(preact)
    assert bool(preact[:routed].isfinite().all()) and bool(preact[routed:].isnan().all())


@pytest.mark.parametrize("keep", [False, True], ids=["let-go", "kept"])
@pytest.mark.parametrize("padding", [0, 64])
def test_a_pool_behind_hooks_is_left_alone(grouped_moe, device, padding, keep):
    """Hooks that move what is saved to memory of their own hand that out: the backward does not own it."""
    case, inputs = make("tall-wide", device)
    leaves = with_leaves(inputs)
    pools: List[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> Tuple[int, torch.Size]:
        # All types here have four bytes.
        pools.append(torch.cat([tensor.detach().reshape(-1), tensor.new_ones(padding)]))
        return len(pools) - 1, tensor.shape

    def unpack(packed: Tuple[int, torch.Size]) -> torch.Tensor:
        number, shape = packed
        return pools[number][: shape.numel()].view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = call(grouped_moe, case, leaves)
    before = [pool.clone() for pool in pools]
    out.backward(leaves.dout, retain_graph=keep)
    for number, (pool, want) in enumerate(zip(pools, before)):
        assert torch.equal(pool.view(torch.int32), want.view(torch.int32)), number  # rows of no expert hold anything
    for name, grad in run(grouped_moe, case, inputs).grads.items():
        assert_bitwise(name, getattr(leaves, name).grad, grad)


def test_hooks_may_return_other_strides(grouped_moe, device):
    """The same values elsewhere."""
    case, inputs = make("tall-wide", device)

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        spaced = tensor.new_zeros([*tensor.shape, 2]).select(-1, 1)
        return spaced.copy_(tensor)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        got = run(grouped_moe, case, inputs)
    for name, want in run(grouped_moe, case, inputs).grads.items():
        # On a CPU sums may go in another order then.
        assert torch.linalg.vector_norm(got.grads[name] - want) <= 1e-6 * torch.linalg.vector_norm(want), name


def test_the_last_backward_takes_the_preactivation(grouped_moe, device):
    """One that keeps the graph leaves it as it is. The last one gives back its memory."""
    case, inputs = make("tall-wide", device)
    out, (preact, *_) = record(grouped_moe, case, with_leaves(inputs))
    before, routed = preact.clone(), count_routed(case, inputs)
    out.backward(inputs.dout, retain_graph=True)
    assert_bitwise("kept", preact[:routed], before[:routed])
    out.backward(inputs.dout)
    assert preact.untyped_storage().nbytes() == 0


def test_a_checkpoint_takes_it_too(grouped_moe, module, device, monkeypatch):
    """What a checkpoint computes again is as much the backward's own, and gives the same."""
    case, inputs = make("tall-wide", device)
    want, taken = run(grouped_moe, case, inputs), []
    take_over = module("common.autograd").take_over
    monkeypatch.setattr(module("experts"), "take_over", lambda saved: taken.append(take_over(saved)) or taken[-1])
    assert_same(run(grouped_moe, case, inputs, around=checkpointed), want)
    assert taken == [True]


def test_after_a_backward_that_failed_another_raises(grouped_moe, module, device):
    """It would read what the first one has overwritten."""
    case, inputs = make("tall-wide", device)
    out = call(grouped_moe, case, with_leaves(inputs))

    def fail(*_):
        raise MemoryError("of the test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module("experts"), "_backward", fail)
        with pytest.raises(MemoryError, match="of the test"):
            out.backward(inputs.dout)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(inputs.dout)
