"""The exchange of expert-parallel ranks on one device: a copy stands in for the wire, a rank sends to itself."""

import pytest
import torch
from cases import kept
from compare import assert_close
from operations import Log
from poison import poisoned_allocations
from timing import graph_of

T, E, H, INNER, TOP_K, RANKS = 40, 8, 64, 48, 3, 4


@pytest.fixture
def exchange(module, monkeypatch):
    """What it sends to any rank comes back to it."""
    exchange = module("exchange")
    monkeypatch.setattr(exchange, "all_to_all", lambda rows, group: rows.clone(memory_format=torch.contiguous_format))
    return exchange


def draw_ids(device: str) -> torch.Tensor:
    """Distinct experts, a tenth of the slots sentinels, one token without any expert."""
    ids = torch.rand(T, E).topk(TOP_K).indices
    ids[torch.rand(ids.shape) < 0.1] = E
    ids[T // 2] = torch.tensor([-1, E, 2**31])
    return ids.to(device)


def make_leaves(device: str, dtype: torch.dtype) -> list:
    """Hidden states, fp32 routing weights, and the weights of a rank's experts."""
    local = E // RANKS
    shapes = (T, H), (T, TOP_K), (local, 2 * INNER, H), (local, H, INNER)
    leaves = [torch.randn(shape, device=device) / (shape[2] ** 0.5 if len(shape) == 3 else 1) for shape in shapes]
    leaves[1].abs_()  # two of one token may be of the same expert, and are not to cancel
    return [leaf.to(torch.float32 if leaf.shape == (T, TOP_K) else dtype).requires_grad_() for leaf in leaves]


def through_places(grouped_moe, exchange, capacity: int, ids, x, weights, up, down):
    """The layer of ranks that all have the same experts."""
    there = exchange.dispatch(x, weights, ids, E // RANKS, RANKS, capacity, None)
    rows = grouped_moe.grouped_mm_experts(there.x, there.ids, there.weights, up, down)
    return exchange.combine(rows, there.plan, None)


@pytest.mark.parametrize("capacity", [T, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_gradients(grouped_moe, exchange, device, dtype, capacity):
    ids, leaves, dout = draw_ids(device), make_leaves(device, dtype), torch.randn(T, H, device=device).to(dtype)
    with poisoned_allocations():
        out = through_places(grouped_moe, exchange, capacity, ids, *leaves)
        grads = torch.autograd.grad(out, leaves, dout)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = kept(ids, E, RANKS, capacity)
    own = torch.where(found < E, found % (E // RANKS), -1)  # as ranks number their experts
    want = grouped_moe.reference.grouped_mm_experts(wide[0], own, *wide[1:])
    assert_close("out", out, want.detach(), dtype)
    for name, grad, right in zip(("x", "weights", "up", "down"), grads, torch.autograd.grad(want, wide, dout.double())):
        assert_close(name, grad, right, dtype, inner_products=name == "weights")


def test_ops_are_what_is_called_directly(grouped_moe, exchange, device):
    """Under a mode that sees ops, and where autograd records, the results are the same, bit by bit.

    There is room for so many tokens that no kernel for few of them is taken.
    """
    ids, leaves = draw_ids(device), make_leaves(device, torch.bfloat16)
    with torch.no_grad():
        out = through_places(grouped_moe, exchange, T, ids, *leaves)
        with Log() as called:
            assert torch.equal(through_places(grouped_moe, exchange, T, ids, *leaves), out)
    assert {"exchange_send", "exchange_receive", "combine_rows_forward"} <= called.names
    assert torch.equal(through_places(grouped_moe, exchange, T, ids, *leaves), out)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [T, 12])
def test_graph_replays_with_other_routing(grouped_moe, exchange, device, capacity):
    """Forward and backward in a CUDA graph, with room for all tokens and for fewer."""
    ids, leaves, dout = draw_ids(device), make_leaves(device, torch.bfloat16), torch.randn(T, H, device=device)

    def step():
        out = through_places(grouped_moe, exchange, capacity, ids, *leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    graph, captured = graph_of(step)
    for _ in range(2):
        ids.copy_(draw_ids(device))
        graph.replay()
        for got, want in zip(captured, step()):
            assert torch.equal(got, want)


def test_one_place_for_each_token_and_rank(exchange, device):
    """In token order; what finds no place is counted, and what is not filled holds sentinels."""
    ids = torch.tensor([[0, 1, 5], [5, 0, 0], [-1, 9, E], [1, 6, 4]], device=device)
    x, weights = torch.arange(8.0, device=device).view(4, 2), torch.arange(12.0, device=device).view(4, 3)
    there = exchange.dispatch(x, weights, ids, 2, RANKS, 2, None)  # rank 0 has experts 0 and 1, rank 2 has 4 and 5
    source, places, dropped = there.plan
    assert source.tolist() == [0, 1, -1, -1, 0, 1, 3, -1]
    assert places.tolist() == [[0, -2, 4], [5, 1, -3], [-1, -1, -1], [-1, 6, -1]]
    assert dropped.tolist() == [1, 0, 1, 0]  # of token 3
    none = [2, 2, 2]
    assert there.ids.tolist() == [[0, 1, 2], [2, 0, 0], none, none, [2, 2, 1], [1, 2, 2], [2, 0, 2], none]
    filled = source >= 0
    for got, given in ((there.x, x), (there.weights, weights)):
        assert torch.equal(got[filled], given[source[filled]]) and not got[~filled].any()
    assert there.fits
