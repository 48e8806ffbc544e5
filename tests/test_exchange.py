"""The exchange of expert-parallel ranks on one device: a copy stands in for the wire, a rank sends to itself."""

import pytest
import torch
from compare import assert_close
from poison import poisoned_allocations

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
    return [leaf.to(torch.float32 if leaf.shape == (T, TOP_K) else dtype).requires_grad_() for leaf in leaves]


def through_places(grouped_moe, exchange, capacity: int, ids, x, weights, up, down):
    """The layer of rank 0, to which all tokens return that it sends to anyone."""
    ids = exchange.global_ids(ids, E)
    plan = exchange.make_plan(ids, E // RANKS, RANKS, capacity)
    rows, row_weights, row_ids = exchange.dispatch(x, weights, ids, plan, None)
    row_ids = exchange.local_ids(row_ids, E // RANKS, 0)
    return exchange.combine(grouped_moe.grouped_mm_experts(rows, row_ids, row_weights, up, down), plan, None)


def ranks_of(ids) -> torch.Tensor:
    """(T, 1): to how many ranks each token goes."""
    owners = torch.where((ids >= 0) & (ids < E), ids * RANKS // E, RANKS)
    return torch.zeros(T, RANKS + 1, device=ids.device).scatter_(1, owners, 1.0)[:, :RANKS].sum(1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_gradients(grouped_moe, exchange, device, dtype):
    """Rank 0's experts count as often as the token goes to a rank, but the gradients of their routing weights once."""
    ids, leaves, dout = draw_ids(device), make_leaves(device, dtype), torch.randn(T, H, device=device).to(dtype)
    with poisoned_allocations():
        out = through_places(grouped_moe, exchange, T, ids, *leaves)
        grads = torch.autograd.grad(out, leaves, dout)
    wide, times = [leaf.detach().double().requires_grad_() for leaf in leaves], ranks_of(ids)
    want = times * grouped_moe.reference.grouped_mm_experts(wide[0], ids, *wide[1:])
    assert_close("out", out, want.detach(), dtype)
    for name, grad, right in zip(("x", "weights", "up", "down"), grads, torch.autograd.grad(want, wide, dout.double())):
        right = right / times.clamp(min=1) if name == "weights" else right
        assert_close(name, grad, right, dtype, inner_products=name == "weights")


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [T, 12])
def test_graph_replays_with_other_routing(grouped_moe, exchange, device, capacity):
    """Forward and backward in a CUDA graph, with room for all tokens and for fewer."""
    ids, leaves, dout = draw_ids(device), make_leaves(device, torch.bfloat16), torch.randn(T, H, device=device)

    def step():
        out = through_places(grouped_moe, exchange, capacity, ids, *leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for _ in range(2):
        ids.copy_(draw_ids(device))
        graph.replay()
        for got, want in zip(captured, step()):
            assert torch.equal(got, want)


def test_plan_is_one_place_for_each_token_and_rank(exchange, device):
    """In token order; what finds no place is counted."""
    ids = exchange.global_ids(torch.tensor([[0, 1, 5], [5, 0, 0], [-1, 9, E], [1, 6, 4]], device=device), E)
    plan = exchange.make_plan(ids, 2, RANKS, 2)  # rank 0 has experts 0 and 1, rank 2 has 4 and 5, rank 3 has 6 and 7
    assert plan.source.tolist() == [0, 1, 4, 4, 0, 1, 3, 4]
    assert plan.sent.view(4, 3).tolist() == [[0, -1, 4], [5, 1, -1], [-1, -1, -1], [-1, 6, -1]]
    assert plan.places.tolist() == [[0, 0, 4], [5, 1, 1], [-1, -1, -1], [-1, 6, -1]]
    assert exchange.count_dropped(ids, plan, E).item() == 2  # token 3 at ranks 0 and 2
