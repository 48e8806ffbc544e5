"""Kernels of routing and of schedules against a loop."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from cases import Case, make_ids, sentinel_ids
from group_splits import WRONG, clamped
from loops import loop_route
from poison import is_sentinel

# Around the chunks of 128 slots and the steps of 512.
SIZES = [(0, 3, 4), (1, 1, 1), (1, 8, 128), (5, 3, 7), (33, 1, 31), (64, 2, 32), (127, 1, 1), (129, 1, 5), (511, 1, 3)]
SIZES += [(256, 2, 4), (513, 1, 5), (700, 2, 70), (321, 4, 33), (70, 4, 512), (60, 5, 1024), (200, 3, 1024)]
UNWRITTEN = torch.iinfo(torch.int32).max


@triton.jit
def order_kernel(out_ptr, order: tl.constexpr, num_m_tiles, NUM_N_TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """out[tile] = its m tile and its n tile. Grid: (tiles,)."""
    tile = tl.program_id(0)
    m_tile, n_tile = order(tile, num_m_tiles, NUM_N_TILES, GROUP_M)
    tl.store(out_ptr + 2 * tile, m_tile)
    tl.store(out_ptr + 2 * tile + 1, n_tile)


@pytest.mark.parametrize("group_m", [1, 4, 8])
@pytest.mark.parametrize("m_tiles", [1, 3, 4, 9, 11, 12, 17])
def test_grouped_order(module, m_tiles, group_m):
    """Every tile once; m tiles that go together are half a group or more, if there are so many, and less than 1.5."""
    n_tiles, out = 3, torch.full((m_tiles * 3, 2), -1, dtype=torch.int32)
    grouped_order = module("backends.triton.launchers").grouped_gemm_kernel.fn.__globals__["grouped_order"]
    order_kernel[(m_tiles * n_tiles,)](out, grouped_order, m_tiles, n_tiles, group_m)
    order = [tuple(pair) for pair in out.tolist()]
    assert sorted(order) == [(m, n) for m in range(m_tiles) for n in range(n_tiles)]
    firsts = [place for place, (_, n) in enumerate(order) if n == 0]
    together = [len(list(group)) for _, group in itertools.groupby(enumerate(firsts), lambda pair: pair[1] - pair[0])]
    assert all(min(group_m, 2 * m_tiles) <= 2 * size < 3 * group_m for size in together)


@pytest.fixture
def set_block_m(module, monkeypatch):
    """Sets the rows of a tile, which the heuristic chooses otherwise."""
    return lambda block_m: monkeypatch.setattr(module("backends.triton.routing"), "choose_block_m", lambda *_: block_m)


def schedule_of(offsets, block_m):
    """The schedule of rows that begin and end at offsets, as a list."""
    tiles = [-(-(end - start) // block_m) for start, end in zip(offsets, offsets[1:])]
    before = [sum(tiles[:expert]) for expert in range(len(offsets))]
    return [*offsets, *before, *(expert for expert, count in enumerate(tiles) for _ in range(count))]


def assert_routed(module, ids, num_experts, dtype=torch.float32, capacity=None, block_m=16):
    """The kernels write what the loop says and nothing behind it.

    Without a capacity, `route` chooses block_m, for dtype.
    """
    routing, kind, num_slots = module("backends.triton.routing"), module("rows").Rows, ids.numel()
    if capacity is None:
        rows, num_routed = routing.route(ids, num_experts, dtype), None
    else:
        sizes = module("rows").schedule_size(capacity, num_experts), capacity, num_slots, 1
        schedule, row_to_slot, slot_to_row, num_routed = (torch.empty(size, dtype=torch.int32) for size in sizes)
        rows = kind(schedule, num_experts, capacity, block_m, ids.shape[1], row_to_slot, slot_to_row)
        routing._place_slots(ids, rows, num_routed)
    offsets, order, places = loop_route(ids, num_experts)
    assert num_routed is None or num_routed.item() == offsets[-1]
    capacity = num_slots if capacity is None else capacity
    offsets = [min(offset, capacity) for offset in offsets]
    want = schedule_of(offsets, rows.block_m), order[:capacity], [row if row < capacity else -1 for row in places]
    assert (rows.num_groups, rows.num_rows, rows.top_k) == (num_experts, capacity, ids.shape[1])
    assert rows.group_offsets.tolist() == offsets
    assert rows.row_to_slot.shape == (capacity,) and rows.slot_to_row.shape == (num_slots,)
    max_tiles = module("rows").max_tiles(capacity, num_experts, rows.block_m)
    assert len(want[0]) - 2 * (num_experts + 1) <= max_tiles <= len(rows.schedule) - 2 * (num_experts + 1)
    for tensor, values in zip((rows.schedule, rows.row_to_slot, rows.slot_to_row), want):
        assert tensor[: len(values)].tolist() == values and (tensor[len(values) :] == UNWRITTEN).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens, top_k, experts", SIZES)
def test_route(module, launches, tokens, top_k, experts, dtype):
    assert_routed(module, make_ids(Case("route", T=tokens, top_k=top_k, E=experts)), experts, dtype)


def test_route_of_other_ids(module, launches):
    """int32, and strided."""
    assert_routed(module, make_ids(Case("route", T=300, top_k=2, E=7), torch.int32), 7)
    ids = make_ids(Case("route", T=300, top_k=4, E=7))
    assert_routed(module, ids[:, ::2], 7)
    assert_routed(module, ids.t().contiguous().t(), 7)


@pytest.mark.parametrize("few", [(16, 8, 4), (1, 8, 4)], ids=["few", "many"])
def test_route_of_more_chunks_than_one_scan_takes(module, monkeypatch, few):
    routing = module("backends.triton.routing")
    changes = {"_FEW_SLOTS": -1, "_SCAN_FEW": few, "_SCAN_MANY": (16, 4, 4)}
    # Else the kernels of real scans would be kept.
    for name, value in {**changes, "_scan_kernel": routing._scan_kernel.__wrapped__}.items():
        monkeypatch.setattr(routing, name, value)
    assert_routed(module, make_ids(Case("route", T=1000, top_k=3, E=6)), 6)


@pytest.mark.parametrize("block_m", [16, 128])
def test_route_of_one_kind(module, launches, set_block_m, block_m):
    """Sentinels only, all slots on one expert, and tiles that end with their expert's rows or one row later."""
    set_block_m(block_m)
    foreign = sentinel_ids(9, torch.int64)
    assert_routed(module, foreign[torch.randint(len(foreign), (600, 1))], 9)
    assert_routed(module, torch.full((400, 1), -1), 3)
    for experts in (1, 9):
        assert_routed(module, torch.full((600, 1), experts - 1), experts)
    assert_routed(module, torch.arange(3).repeat_interleave(block_m)[:, None], 3)
    assert_routed(module, torch.tensor([0] * (block_m + 1) + [4, 2] * block_m)[:, None], 4)


@pytest.mark.parametrize("tokens, top_k, experts", [SIZES[i] for i in (1, 3, 5, 7, 10, 11, 14)])
def test_rows_end_at_capacity(module, launches, tokens, top_k, experts):
    """From one row over all but one that is needed, to just enough and to more."""
    ids = make_ids(Case("route", T=tokens, top_k=top_k, E=experts))
    num_routed = int((~is_sentinel(ids, experts)).sum())
    for capacity in {1, num_routed // 3, num_routed - 1, num_routed, num_routed + 1, ids.numel()}:
        if capacity >= 1:
            assert_routed(module, ids, experts, capacity=capacity)


# All slots on one of nine experts; and experts that end where their tiles do.
RUNS = [(torch.full((400,), e), 9, m, (1, m - 1, m, m + 1, 399)) for e, m in itertools.product((0, 4, 8), (16, 128))]
RUNS += [(torch.arange(5).repeat_interleave(16), 5, 16, (1, 16, 17, 40))]


@pytest.mark.parametrize("ids, experts, block_m, capacities", RUNS)
def test_capacity_next_to_the_end_of_a_tile(module, launches, ids, experts, block_m, capacities):
    """No expert behind it has a row or a tile."""
    for capacity in capacities:
        assert_routed(module, ids[:, None], experts, capacity=capacity, block_m=block_m)


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


@pytest.mark.parametrize("block_m", [16, 64, 128])
@pytest.mark.parametrize("sizes", [(5, 0, 40, 1), (0,), (2500,), (0, 0, 0), (1,) * 70, (16, 64, 128), (17, 65, 129)])
def test_schedule(module, kernels, set_block_m, sizes, block_m):
    """Every expert in order, once per started block of its rows; the bound holds with rows to spare, too."""
    set_block_m(block_m)
    offsets = torch.tensor((0, *sizes)).cumsum(0).int()
    want = schedule_of(offsets.tolist(), block_m)
    for spare, splits in itertools.product((0, 1, 300), (offsets, torch.tensor(sizes))):
        num_rows = sum(sizes) + spare
        rows = kernels.split_rows(splits, len(sizes), num_rows, torch.float32)
        assert rows.schedule[: len(want)].tolist() == want
        assert (rows.schedule[len(want) :] == UNWRITTEN).all()
        assert len(want) - 2 * len(offsets) <= module("rows").max_tiles(num_rows, len(sizes), block_m)


SIZES_TO_CLAMP = [(-3, 5, 2**40, 1), (2**63 - 1, 2**63 - 1), (-(2**63), 4, 0), (9, 9, 9)]


@pytest.mark.parametrize(
    "splits, groups", [*((sizes, len(sizes)) for sizes in SIZES_TO_CLAMP), *((splits, 4) for splits in WRONG.values())]
)
def test_wrong_splits_are_clamped(kernels, splits, groups):
    """Negative sizes count as 0, and what lies past the rows is cut off; offsets never decrease."""
    given = torch.tensor(splits)
    rows = kernels.split_rows(given, groups, 20, torch.float32)
    want = schedule_of(clamped(splits, 20, groups), rows.block_m)
    assert rows.schedule[: len(want)].tolist() == want
