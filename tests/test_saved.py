"""What a backward does with what was saved for it: the last one of a graph may overwrite the pre-activation."""

import sys
from typing import List, Tuple

import pytest
import torch
from block import call, run, with_leaves
from cases import BY_ID, make_inputs
from compare import assert_bitwise

CASE = BY_ID["tall-wide"]
PREACT = (CASE.T * CASE.top_k, CASE.preact_width)


@pytest.mark.parametrize("keep", [False, True], ids=["let-go", "kept"])
@pytest.mark.parametrize("padding", [0, 64])
def test_a_pool_behind_hooks_is_left_alone(grouped_moe, device, padding, keep):
    """Hooks that move what is saved to memory of their own hand that out: the backward does not own it."""
    inputs = make_inputs(CASE, torch.float32, device)
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
        out = call(grouped_moe, CASE, leaves)
    before = [pool.clone() for pool in pools]
    got = torch.autograd.grad(out, list(leaves.floating().values()), leaves.dout, retain_graph=keep)
    for number, (pool, want) in enumerate(zip(pools, before)):
        assert torch.equal(pool.view(torch.int32), want.view(torch.int32)), number  # rows of no expert hold anything
    for (name, want), grad in zip(run(grouped_moe, CASE, inputs).grads.items(), got):
        assert_bitwise(name, grad, want)


def test_hooks_may_return_other_strides(grouped_moe, device):
    """The same values elsewhere."""
    inputs = make_inputs(CASE, torch.float32, device)
    leaves = with_leaves(inputs)

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        spaced = tensor.new_zeros([*tensor.shape, 2]).select(-1, 1)
        return spaced.copy_(tensor)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        out = call(grouped_moe, CASE, leaves)
    got = torch.autograd.grad(out, list(leaves.floating().values()), leaves.dout)
    for (name, want), grad in zip(run(grouped_moe, CASE, inputs).grads.items(), got):
        # On a CPU sums may go in another order then.
        assert torch.linalg.vector_norm(grad - want) <= 1e-6 * torch.linalg.vector_norm(want), name


def record(grouped_moe, leaves) -> Tuple[torch.Tensor, torch.Tensor, int]:
    """The output, the pre-activation that was saved for it, and how many rows of that were written."""
    saved: List[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call(grouped_moe, CASE, leaves)
    (preact,) = (tensor for tensor in saved if tensor.shape == PREACT)
    return out, preact, int((leaves.top_k_index % CASE.E == leaves.top_k_index).sum())


def test_the_last_backward_takes_the_preactivation(grouped_moe, device):
    """One that keeps the graph leaves it as it is. The last one gives back its memory."""
    leaves = with_leaves(make_inputs(CASE, torch.float32, device))
    out, preact, routed = record(grouped_moe, leaves)
    tensors, before = list(leaves.floating().values()), preact.clone()
    torch.autograd.grad(out, tensors, leaves.dout, retain_graph=True)
    assert_bitwise("kept", preact[:routed], before[:routed])
    torch.autograd.grad(out, tensors, leaves.dout)
    assert preact.untyped_storage().nbytes() == 0


def test_a_checkpoint_takes_it_too(grouped_moe, device):
    """What a checkpoint computes again is as much the backward's own, and gives the same."""
    inputs = make_inputs(CASE, torch.float32, device)
    leaves = with_leaves(inputs)
    taken = []
    autograd = sys.modules[f"{grouped_moe.__name__}.common.autograd"]
    experts = sys.modules[f"{grouped_moe.__name__}.block_op"]

    def take_over(saved: torch.Tensor) -> bool:
        taken.append(autograd.take_over(saved))
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "take_over", take_over)
        out = torch.utils.checkpoint.checkpoint(lambda: call(grouped_moe, CASE, leaves), use_reentrant=False)
        got = torch.autograd.grad(out, list(leaves.floating().values()), leaves.dout)
    assert taken == [True]
    for (name, want), grad in zip(run(grouped_moe, CASE, inputs).grads.items(), got):
        assert_bitwise(name, grad, want)


def test_after_a_backward_that_failed_another_raises(grouped_moe, device):
    """It would read what the first one has overwritten."""
    leaves = with_leaves(make_inputs(CASE, torch.float32, device))
    out = call(grouped_moe, CASE, leaves)
    tensors = list(leaves.floating().values())
    experts = sys.modules[f"{grouped_moe.__name__}.block_op"]

    def fail(*_, **__):
        raise MemoryError("of the test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_backward", fail)
        with pytest.raises(MemoryError, match="of the test"):
            torch.autograd.grad(out, tensors, leaves.dout)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, tensors, leaves.dout)
