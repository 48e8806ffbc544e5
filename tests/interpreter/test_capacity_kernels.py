"""Routing into fewer rows than slots: with room, the same; without, never past the buffers, and R counted exactly."""

import pytest
import torch
from block import assert_same
from cases import BY_ID, Case, make_ids, make_inputs
from poison import is_sentinel, poison_sentinels
from test_routing import loop_route

from interpreter.guard import MARGIN, GuardedAllocations, poison_value
from interpreter.test_experts_kernels import guarded_inputs, run_kernels

SIZES = [(1, 1, 1), (5, 3, 7), (64, 2, 32), (129, 1, 5), (513, 1, 5), (700, 2, 70), (60, 5, 1024)]


@pytest.fixture
def unchecked(monkeypatch):
    """The counts that are asserted on; the assertion itself, which a device only reports later, does not stop us."""
    counts = []
    monkeypatch.setattr(torch, "_assert_async", lambda fits, message: counts.append((bool(fits), message)))
    return counts


def clamped(ids, num_experts, capacity, block_m):
    """(row_to_slot, slot_to_row, schedule) of `capacity` rows, and R, by the loop."""
    offsets, order, places = loop_route(ids, num_experts)
    num_routed = offsets[-1]
    offsets = [min(offset, capacity) for offset in offsets]
    tiles = [-(-(end - start) // block_m) for start, end in zip(offsets, offsets[1:])]
    schedule = offsets + [sum(tiles[:expert]) for expert in range(num_experts + 1)]
    schedule += [expert for expert, count in enumerate(tiles) for _ in range(count)]
    return order[:capacity], [row if row < capacity else -1 for row in places], schedule, num_routed


def assert_clamped(module, ids, num_experts, capacity, block_m):
    """The kernels write what the loop says and, of the memory around and behind it, nothing."""
    order, places, want_schedule, want_routed = clamped(ids, num_experts, capacity, block_m)
    sizes = module("rows").schedule_size(capacity, num_experts), capacity, ids.numel(), 1
    with GuardedAllocations(ids):
        schedule, row_to_slot, slot_to_row, num_routed = (torch.empty(size, dtype=torch.int32) for size in sizes)
        rows = module("rows").Rows(schedule, num_experts, capacity, block_m, ids.shape[1], row_to_slot, slot_to_row)
        module("backends.triton.routing")._place_slots(ids, rows, num_routed)
    assert num_routed.item() == want_routed
    assert slot_to_row.tolist() == places
    assert row_to_slot[: len(order)].tolist() == order
    assert schedule[: len(want_schedule)].tolist() == want_schedule
    assert len(want_schedule) <= len(schedule)
    unwritten = poison_value(torch.int32)
    for tensor, written in ((row_to_slot, len(order)), (slot_to_row, ids.numel()), (schedule, len(want_schedule))):
        memory = tensor.as_strided((tensor.numel() + 2 * MARGIN,), (1,), 0)
        assert (memory[:MARGIN] == unwritten).all() and (memory[MARGIN + written :] == unwritten).all()


@pytest.mark.parametrize("tokens, top_k, experts", SIZES)
def test_rows_end_at_capacity(module, launches, tokens, top_k, experts):
    """From one row over all but one that is needed, to just enough and to more."""
    ids = make_ids(Case("route", T=tokens, top_k=top_k, E=experts))
    num_routed = int((~is_sentinel(ids, experts)).sum())
    for capacity in {1, num_routed // 3, num_routed - 1, num_routed, num_routed + 1, ids.numel()}:
        if capacity >= 1:
            assert_clamped(module, ids, experts, capacity, 16)


@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize("expert", [0, 4, 8])
def test_one_expert_takes_all(module, launches, expert, block_m):
    ids = torch.full((400, 1), expert)
    for capacity in (1, block_m - 1, block_m, block_m + 1, 399):
        assert_clamped(module, ids, 9, capacity, block_m)


@pytest.mark.parametrize("capacity", [1, 16, 17, 40])
def test_capacity_at_the_end_of_an_expert(module, launches, capacity):
    """And of its tiles: no expert behind it has a row or a tile."""
    assert_clamped(module, torch.arange(5).repeat_interleave(16)[:, None], 5, capacity, 16)


def test_assertion(kernels, launches):
    """Of the exact count, on the device that the routing is on: here, at once."""
    ids = make_ids(Case("route", T=50, top_k=3, E=5))
    num_routed = int((~is_sentinel(ids, 5)).sum())
    assert kernels.route(ids, 5, torch.float32, num_routed).num_rows == num_routed
    with pytest.raises(RuntimeError, match=f"grouped_mm_experts: capacity: .*, got {num_routed - 1}$"):
        kernels.route(ids, 5, torch.float32, num_routed - 1)


def test_no_count_where_none_is_needed(kernels, unchecked):
    """As many rows as slots, or more: nothing can overflow."""
    ids = make_ids(Case("route", T=50, top_k=3, E=5))
    for capacity in (None, 150, 151):
        assert kernels.route(ids, 5, torch.float32, capacity).row_to_slot.shape == (150,)
    assert not unchecked


CASES = ["silu", "silu-mostly-sentinels", "silu-recompute", "gpt-oss", "gpt-oss-halves-recompute", "relu2-not-gated"]
CASES += ["silu-transposed", "not-gated-up-bias-only", "odd-extents"]


@pytest.mark.parametrize("case_id", CASES)
def test_exact_capacity_changes_nothing(module, grouped_moe, case_id):
    """Forward and backward, R == capacity: bitwise."""
    case = BY_ID[case_id]
    inputs = make_inputs(case, torch.float32, "cpu")
    num_routed = int((~is_sentinel(inputs.top_k_index, case.E)).sum())
    poisoned = guarded_inputs(poison_sentinels(inputs, case.E))
    got = run_kernels(module, grouped_moe, case, poisoned, capacity=num_routed)
    assert_same(got, run_kernels(module, grouped_moe, case, poisoned))


@pytest.mark.parametrize("case_id", CASES)
def test_overflow_stays_within_the_buffers(module, grouped_moe, unchecked, case_id):
    """Every kernel, both ways: bounds are checked, and the slots that have room are computed as if the others were not.

    That is no result that anybody sees, but what is well defined reads nothing that is not written.
    """
    case = BY_ID[case_id]
    inputs = make_inputs(case, torch.float32, "cpu")
    num_routed = int((~is_sentinel(inputs.top_k_index, case.E)).sum())
    capacity = max(1, num_routed // 2)
    got = run_kernels(module, grouped_moe, case, guarded_inputs(inputs), capacity=capacity)
    assert [fits for fits, _ in unchecked] == [False] and f"got {capacity}" in unchecked[0][1]
    _, places, *_ = clamped(inputs.top_k_index, case.E, capacity, 16)
    kept = torch.tensor(places).view(inputs.top_k_index.shape) >= 0
    inputs = inputs._replace(top_k_index=inputs.top_k_index.masked_fill(~kept, -1))
    assert_same(got, run_kernels(module, grouped_moe, case, inputs))
