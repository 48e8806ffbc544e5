"""What a backward does with what was saved for it: the last one of a graph may overwrite the pre-activation."""

from typing import List, Tuple

import pytest
import torch
from block import call, run, with_leaves
from cases import BY_ID, make_inputs
from compare import assert_bitwise

CASE = BY_ID["tall-wide"]
PREACT = (CASE.T * CASE.top_k, CASE.preact_width)


@pytest.mark.parametrize("keep", [False, True], ids=["let-go", "kept"])
def test_a_pool_behind_hooks_is_left_alone(grouped_moe, device, keep):
    """Hooks that move what is saved to a pool hand out views of it, which the backward does not own."""
    inputs = make_inputs(CASE, torch.float32, device)
    leaves = with_leaves(inputs)
    pools: List[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> Tuple[int, torch.Size]:
        pools.append(torch.cat([tensor.detach().reshape(-1), tensor.new_ones(64)]))  # all types here have four bytes
        return len(pools) - 1, tensor.shape

    def unpack(packed: Tuple[int, torch.Size]) -> torch.Tensor:
        number, shape = packed
        return pools[number][:-64].view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = call(grouped_moe, CASE, leaves)
    before = [pool.clone() for pool in pools]
    got = torch.autograd.grad(out, list(leaves.floating().values()), leaves.dout, retain_graph=keep)
    for number, (pool, want) in enumerate(zip(pools, before)):
        assert torch.equal(pool.view(torch.int32), want.view(torch.int32)), number  # rows of no expert hold anything
    for (name, want), grad in zip(run(grouped_moe, CASE, inputs).grads.items(), got):
        assert_bitwise(name, grad, want)


def test_the_last_backward_gives_the_preactivation_back(grouped_moe, device):
    """Before the backward is over, so that there is room for gradients; one that keeps the graph leaves it as it is."""
    leaves = with_leaves(make_inputs(CASE, torch.float32, device))
    saved: List[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call(grouped_moe, CASE, leaves)
    (preact,) = (tensor for tensor in saved if tensor.shape == PREACT)
    tensors, routed = list(leaves.floating().values()), int((leaves.top_k_index % CASE.E == leaves.top_k_index).sum())
    before = preact.clone()
    torch.autograd.grad(out, tensors, leaves.dout, retain_graph=True)
    assert_bitwise("kept", preact[:routed], before[:routed])
    torch.autograd.grad(out, tensors, leaves.dout)
    if device == "cpu":
        assert not torch.equal(preact[:routed], before[:routed])
    else:
        assert preact.untyped_storage().nbytes() == 0
