"""route against a Python loop: stable order, ids of every kind, sizes around the blocks of the sort."""

import pytest
import torch
from cases import Case, make_ids
from loops import loop_route
from poison import poisoned_allocations


def assert_routed(grouped_moe, ids, num_experts):
    """route equals the loop, in int32, on the device of the ids; unwritten memory shows as NaN's integer twin."""
    with poisoned_allocations():
        routing = grouped_moe.route(ids, num_experts)
    offsets, order, places = loop_route(ids, num_experts)
    for tensor in (routing.expert_offsets, routing.row_to_slot, routing.slot_to_row):
        assert tensor.dtype == torch.int32 and tensor.device == ids.device
    assert routing.row_to_slot.shape == routing.slot_to_row.shape == (ids.numel(),)
    assert (routing.top_k, routing.num_experts) == (ids.shape[1], num_experts)
    assert routing.expert_offsets.tolist() == offsets
    assert routing.row_to_slot[: len(order)].tolist() == order
    assert routing.slot_to_row.tolist() == places


# Around the kernels' chunks of 128 slots, steps of 512, and 2048, where the sort takes three launches; and more chunks
# than the scan over chunks takes at a time.
SIZES = [(0, 3, 4), (1, 1, 1), (1, 8, 128), (5, 3, 7), (31, 1, 2), (33, 1, 31), (64, 2, 32), (127, 1, 33), (43, 3, 64)]
SIZES += [(511, 2, 3), (512, 2, 4), (1025, 1, 5), (40, 30, 1024), (2047, 1, 6), (1024, 2, 2), (2049, 1, 1)]
SIZES += [(768, 3, 7), (2305, 1, 63), (1100, 8, 512), (1100, 8, 1024), (33000, 4, 513), (33100, 4, 6)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("sentinels", [0.0, 0.4, 1.0], ids=["local", "some-sentinels", "sentinels"])
@pytest.mark.parametrize("tokens, top_k, experts", SIZES)
def test_matches_loop(grouped_moe, device, tokens, top_k, experts, sentinels, dtype):
    case = Case("routing", T=tokens, top_k=top_k, E=experts, sentinels=sentinels)
    assert_routed(grouped_moe, make_ids(case, dtype).to(device), experts)


def test_random_sizes(grouped_moe, device):
    for _ in range(150):
        tokens, top_k, experts = (int(torch.randint(low, high, ())) for low, high in ((0, 51), (1, 7), (1, 13)))
        case = Case("routing", T=tokens, top_k=top_k, E=experts, sentinels=0.5)
        assert_routed(grouped_moe, make_ids(case).to(device), experts)


@pytest.mark.parametrize("slots", [127, 129, 2048, 2049, 3000, 70000])
@pytest.mark.parametrize("expert", [0, 3, 6])
def test_one_expert_takes_all(grouped_moe, device, slots, expert):
    assert_routed(grouped_moe, torch.full((slots, 1), expert, device=device), 7)


@pytest.mark.kernels_ci
def test_huge_ids_do_not_wrap(grouped_moe, device):
    """2**32 + e is not expert e, though its low 32 bits are."""
    ids = torch.tensor([[2**32, 2**32 + 1, 1], [-(2**32), 2**33 + 2, 0], [2**63 - 1, -(2**63), 2]], device=device)
    assert_routed(grouped_moe, ids, 3)


@pytest.mark.kernels_ci
def test_worked_example(grouped_moe, device):
    routing = grouped_moe.route(torch.tensor([[1, 0], [2, 1], [0, -1]], device=device), 2)
    assert routing.expert_offsets.tolist() == [0, 2, 4]
    assert routing.row_to_slot[:4].tolist() == [1, 4, 0, 3]
    assert routing.slot_to_row.tolist() == [2, 0, -1, 3, 1, -1]


@pytest.mark.kernels_ci
def test_strided_ids(grouped_moe, device):
    ids = torch.randint(-1, 6, (70, 6), device=device)
    for view in (ids[:, ::2], ids.t(), ids[1:, 2:], ids[:, :1].expand(70, 4)):
        assert_routed(grouped_moe, view, 5)
