"""The native ops of routing: every entry that they write is as Triton's kernels have it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from compare import assert_bitwise
from experts_modules import Ungated

pytestmark = pytest.mark.gpu

# On both sides of what a block, clusters of 8 and of 16 blocks, and grids of one, two, four and eight rounds take.
SLOTS = (0, 1, 63, 512, 513, 1024, 1025, 2048, 2049, 4096, 4097, 8192, 8193, 16384, 16385, 32768, 32769)
SLOTS += (65536, 65537, 135168, 135169, 270336, 270337, 600000)
# (slots, 1) ids: of all experts and sentinels, of one expert alone, of none.
DRAWS = {
    "random": lambda slots, experts: torch.randint(-1, experts + 1, (slots, 1)),
    "first": lambda slots, experts: torch.full((slots, 1), 0),
    "last": lambda slots, experts: torch.full((slots, 1), experts - 1),
    "none": lambda slots, experts: torch.full((slots, 1), -1),
}


def assert_same_routing(got, want, num_experts):
    """Every entry that is written."""
    assert got[1:5] == want[1:5]
    routed, tiles = int(want.group_offsets[-1]), int(want.schedule[2 * num_experts + 1])
    ends = 2 * num_experts + 2 + tiles
    assert_bitwise("schedule", got.schedule[:ends], want.schedule[:ends])
    assert_bitwise("row_to_slot", got.row_to_slot[:routed], want.row_to_slot[:routed])
    assert_bitwise("slot_to_row", got.slot_to_row, want.slot_to_row)


# 583 take all of the shared memory that a launch gets without asking, but for what it has besides.
@pytest.mark.parametrize("experts", [1, 8, 129, 512, 583, 1024])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_routes_as_triton_does(native, module, device, monkeypatch, experts, draw, dtype):
    """With rows for all slots, for the routed ones and for half of these, whichever way would be faster.

    The op takes what a grid can that runs at once; more slots are handed over.
    """
    ours, theirs = (module(f"backends.{name}.routing") for name in ("native", "triton"))
    monkeypatch.setattr(ours, "_MAX_EXPERTS", 1024)
    op, took, room = ours.ops.route_rows.default, [], []

    def spy(*args):
        schedule, *rest = op(*args)
        took.append(schedule is not None)
        return schedule, *rest

    monkeypatch.setattr(ours, "_ROUTE", spy)
    for each in (ours, theirs):  # what fails on the device if slots have no room
        monkeypatch.setattr(each, "assert_room", lambda routed, rows: room.append((int(routed), rows)))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    for slots in (*SLOTS, 8192 * num_sms, 8192 * num_sms + 1):
        ids = DRAWS[draw](slots, experts).to(device, dtype)
        routed = int(((ids >= 0) & (ids < experts)).sum())
        for capacity in (None, routed, routed // 2):
            del room[:]
            got, want = (each.route(ids, experts, torch.bfloat16, capacity) for each in (ours, theirs))
            assert_same_routing(got, want, experts)
            assert room == ([] if capacity is None or capacity == slots else 2 * [(routed, capacity)])
            assert took[-1] is ours.takes_slots(slots, num_sms) is (slots <= 8192 * num_sms)


def test_threads_that_need_other_shared_memory(native, module, device):
    """The limit of a kernel is that of all threads: none lowers it while another one launches."""
    op, ids = module("_ops").ops.route_rows.default, torch.zeros(100, dtype=torch.int64, device=device)

    def route(experts: int) -> None:
        for _ in range(20000):
            op(ids, experts, 100, 16, 4096)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(route, (768, 1024))) == [None, None]


def test_warm_up_compiles_what_routes_more_slots(native, grouped_moe, module, device):
    """More slots than the op takes: warm-up without them leaves their kernels out, with them it leaves nothing."""
    experts = Ungated(13, 8, 64, 32, torch.nn.SiLU, device)  # no other test has compiled kernels that route to 13
    compiled = module("backends.triton.launch").COMPILED
    tokens = 1024 * torch.cuda.get_device_properties(device).multi_processor_count + 1
    assert grouped_moe.warm_up(experts, (1000, tokens - 1), progress=False)
    assert grouped_moe.warm_up(experts, (1000, tokens), progress=False)
    count, ids = len(compiled), torch.randint(13, (tokens, 8), device=device)
    x, weights = torch.randn(tokens, 64, device=device, dtype=torch.bfloat16), torch.rand(tokens, 8, device=device)
    with torch.no_grad():
        module("integrations.transformers").experts_forward(experts, x, ids, weights, None)
    assert len(compiled) == count


@pytest.mark.parametrize("groups", [1, 8, 129, 1024])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", ["sizes", "offsets"])
def test_splits_as_triton_does(native, module, device, groups, dtype, kind):
    """Every entry that is written, for sizes and offsets of any values, with a stride and at any rate of rows."""
    ours, theirs = (module(f"backends.{name}.routing") for name in ("native", "triton"))
    most = torch.iinfo(dtype).max
    for rows in (0, 1, 500, 70000, 3000000):
        shares = torch.rand(groups, device=device).pow(4)
        sizes = (shares / shares.sum() * rows).long()
        wild = torch.where(torch.rand_like(shares) < 0.3, torch.randint_like(sizes, -rows - 9, 9), sizes)
        far = torch.where(torch.rand_like(shares) < 0.1, most, wild)
        for values in (sizes, wild, far, torch.full_like(sizes, most), torch.full_like(sizes, -most)):
            sums = torch.cat([values[:1] // 2, values.clamp(-(2**40), 2**40).cumsum(0)])
            splits = (values if kind == "sizes" else sums).clamp(-most, most).to(dtype)
            strided = splits.repeat_interleave(2)[::2]
            for some in (splits, strided):
                got, want = (each.split_rows(some, groups, rows, torch.bfloat16) for each in (ours, theirs))
                assert got[1:] == want[1:]
                ends = 2 * groups + 2 + int(want.schedule[2 * groups + 1])
                assert_bitwise("schedule", got.schedule[:ends], want.schedule[:ends])


# By argument and value, the others as they should be.
MISFITS = [("groups", 0), ("groups", 1025), ("groups", 2**32 + 8), ("rows", -1), ("rows", 2**31 - 128), ("rows", 2**32)]
MISFITS += [("block_m", block_m) for block_m in (0, -16, 256, 2**31, 2**32, 2**32 + 16)] + [("size", 23), ("size", -1)]


@pytest.mark.parametrize("name, value", MISFITS)
@pytest.mark.parametrize("op", ["route_rows", "split_rows"])
def test_integers_that_do_not_fit(native, module, device, op, name, value):
    """Before a kernel counts with what is left of them in 32 bits, or writes past a schedule."""
    arguments, run = {"groups": 8, "rows": 100, "block_m": 64, "size": 40}, getattr(module("_ops").ops, op).default
    given = torch.ones(8 if op == "split_rows" else 100, dtype=torch.int64, device=device)
    run(given, *arguments.values())
    with pytest.raises(RuntimeError, match=f"{op}: expected .* and a schedule with room for them"):
        run(given, *{**arguments, name: value}.values())
