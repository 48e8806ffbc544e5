"""The exchange of expert-parallel ranks on one device: a copy stands in for the wire, a rank sends to itself."""

from functools import partial

import pytest
import torch
from block import check, run, with_leaves
from cases import Case, Inputs, kept, make_inputs
from compare import assert_same
from operations import Log
from poison import poisoned_allocations
from timing import graph_of

T, E, TOP_K, RANKS = 40, 8, 3, 4
CASE = Case("of-a-rank", T, TOP_K, E // RANKS, H=64, I=48)


def draw_ids(device: str) -> torch.Tensor:
    """Distinct experts, a tenth of the slots sentinels, one token without any expert."""
    ids = torch.rand(T, E).topk(TOP_K).indices
    ids[torch.rand(ids.shape) < 0.1] = E
    ids[T // 2] = torch.tensor([-1, E, 2**31])
    return ids.to(device)


def make(device: str, dtype: torch.dtype) -> Inputs:
    """Of the experts of a rank, with fp32 routing weights and ids over all ranks."""
    return make_inputs(CASE, dtype, device, weights_dtype=torch.float32)._replace(top_k_index=draw_ids(device))


def through_places(grouped_moe, exchange, capacity: int, x, ids, weights, up, down, *_):
    """The layer of ranks that all have the same experts."""
    there = exchange.dispatch(x, weights, ids, CASE.E, RANKS, capacity, None)
    rows = grouped_moe.grouped_mm_experts(there.x, there.ids, there.weights, up, down)
    return exchange.combine(rows, there.plan, None)


@pytest.mark.parametrize("capacity", [T, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_gradients(grouped_moe, exchange, device, dtype, capacity):
    inputs, layer = make(device, dtype), partial(through_places, grouped_moe, exchange, capacity)
    found = kept(inputs.top_k_index, E, RANKS, capacity)
    own = torch.where(found < E, found % CASE.E, -1)  # as ranks number their experts
    with poisoned_allocations():
        check(grouped_moe, CASE, inputs._replace(top_k_index=own), inputs, around=lambda _: layer)


def test_ops_are_what_is_called_directly(grouped_moe, exchange, device):
    """Under a mode that sees ops, and where autograd records, the results are the same, bit by bit.

    There is room for so many tokens that no kernel for few of them is taken.
    """
    layer = partial(through_places, grouped_moe, exchange, T, *with_leaves(make(device, torch.bfloat16)))
    with torch.no_grad():
        out = layer()
        with Log() as called:
            assert torch.equal(layer(), out)
    assert {"exchange_send", "exchange_receive", "combine_rows_forward"} <= called.names
    assert torch.equal(layer(), out)


@pytest.mark.parametrize("used", ["x", "weights"])
def test_what_has_no_gradient_is_exchanged_too(exchange, device, monkeypatch, used):
    """As zeros: other ranks wait for it."""
    x, ids, weights, *_ = make(device, torch.bfloat16)
    leaves, usual, sent = {"x": x.requires_grad_(), "weights": weights.requires_grad_()}, exchange.all_to_all, []
    there = exchange.dispatch(x, weights, ids, CASE.E, RANKS, T, None)
    monkeypatch.setattr(exchange, "all_to_all", lambda rows, group: sent.append(rows) or usual(rows, group))
    getattr(there, used).sum().backward()
    assert [(rows.shape, rows.dtype) for rows in sent] == [(t.shape, t.dtype) for t in (there.x, there.weights)]
    assert all(leaf.grad.any() == (name == used) for name, leaf in leaves.items())


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [T, 12])
def test_graph_replays_with_other_routing(grouped_moe, exchange, device, capacity):
    """Forward and backward in a CUDA graph, with room for all tokens and for fewer."""
    inputs, layer = make(device, torch.bfloat16), partial(through_places, grouped_moe, exchange, capacity)
    step = partial(run, grouped_moe, CASE, inputs, around=lambda _: layer)
    graph, captured = graph_of(step)
    for _ in range(2):
        inputs.top_k_index.copy_(draw_ids(device))
        graph.replay()
        assert_same(captured, step())


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
