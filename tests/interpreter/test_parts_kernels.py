"""Kernels of routing, schedule, grouped linear, gather and combine under poison, with their bounds checked."""

import importlib
import itertools

import pytest
import torch
import triton
import triton.language as tl
from cases import Case, make_ids, sentinel_ids
from compare import assert_bitwise, assert_close
from group_splits import WRONG_OFFSETS as WRONG
from linears import LINEARS, Linear, make, run_reference
from poison import guarded, is_sentinel
from test_permute import differentiate, loop_combine, loop_gather
from test_routing import loop_route

from interpreter.guard import GuardedAllocations, linear_backward

NAN = float("nan")
# Around the chunks of 128 slots and the steps of 512.
SIZES = [(0, 3, 4), (1, 1, 1), (1, 8, 128), (5, 3, 7), (33, 1, 31), (64, 2, 32), (127, 1, 1), (129, 1, 5), (511, 1, 3)]
SIZES += [(256, 2, 4), (513, 1, 5), (700, 2, 70), (321, 4, 33), (70, 4, 512), (60, 5, 1024), (200, 3, 1024)]


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
    """Every tile once; m tiles that go together are never fewer than half a group, unless there are no more."""
    n_tiles, out = 3, torch.full((m_tiles * 3, 2), -1, dtype=torch.int32)
    grouped_order = module("backends.triton.gemm").grouped_gemm_kernel.fn.__globals__["grouped_order"]
    order_kernel[(m_tiles * n_tiles,)](out, grouped_order, m_tiles, n_tiles, group_m)
    order = [tuple(pair) for pair in out.tolist()]
    assert sorted(order) == [(m, n) for m in range(m_tiles) for n in range(n_tiles)]
    firsts = [place for place, (_, n) in enumerate(order) if n == 0]
    together = [len(list(group)) for _, group in itertools.groupby(enumerate(firsts), lambda pair: pair[1] - pair[0])]
    assert all(2 * size >= min(group_m, 2 * m_tiles) for size in together)


def assert_routed(kernels, ids, num_experts):
    """The routing equals the loop; what it does not write stays within bounds."""
    with GuardedAllocations(ids):
        rows = kernels.route(ids, num_experts, torch.float32)
    want_offsets, order, places = loop_route(ids, num_experts)
    assert rows.group_offsets.tolist() == want_offsets
    assert rows.row_to_slot.shape == rows.slot_to_row.shape == (ids.numel(),)
    assert rows.row_to_slot[: len(order)].tolist() == order
    assert rows.slot_to_row.tolist() == places


@pytest.mark.parametrize("tokens, top_k, experts", SIZES)
def test_route(kernels, launches, tokens, top_k, experts):
    ids = make_ids(Case("route", T=tokens, top_k=top_k, E=experts))
    assert_routed(kernels, ids, experts)


def test_route_of_int32(kernels, launches):
    assert_routed(kernels, make_ids(Case("route", T=300, top_k=2, E=7), torch.int32), 7)


def test_route_of_strided_ids(kernels, launches):
    ids = make_ids(Case("route", T=300, top_k=4, E=7))
    assert_routed(kernels, ids[:, ::2], 7)
    assert_routed(kernels, ids.t().contiguous().t(), 7)


@pytest.mark.parametrize("few", [(16, 8, 4), (1, 8, 4)], ids=["few", "many"])
def test_route_of_more_chunks_than_one_scan_takes(module, kernels, monkeypatch, few):
    routing = module("backends.triton.routing")
    changes = {"_FEW_SLOTS": -1, "_SCAN_FEW": few, "_SCAN_MANY": (16, 4, 4)}
    # Else the kernels of real scans would be kept.
    for name, value in {**changes, "_scan_kernel": routing._scan_kernel.__wrapped__}.items():
        monkeypatch.setattr(routing, name, value)
    assert_routed(kernels, make_ids(Case("route", T=1000, top_k=3, E=6)), 6)


def test_route_of_one_kind(kernels, launches):
    """Sentinels only, and all slots on the last expert."""
    foreign = sentinel_ids(9, torch.int64)
    assert_routed(kernels, foreign[torch.randint(len(foreign), (600, 1))], 9)
    assert_routed(kernels, torch.full((600, 1), 8), 9)


@pytest.fixture
def set_block_m(module, monkeypatch):
    """Sets the rows of a tile, which the heuristic chooses otherwise."""
    return lambda block_m: monkeypatch.setattr(module("backends.triton.routing"), "choose_block_m", lambda *_: block_m)


def assert_tiled(module, ids, num_experts, block_m):
    """The routing equals the loop, and so does the schedule of its launches, which touch nothing out of bounds."""
    with GuardedAllocations(ids):
        rows = module("backends.triton").route(ids, num_experts, torch.bfloat16)
    offsets, order, places = loop_route(ids, num_experts)
    assert rows.row_to_slot[: len(order)].tolist() == order
    assert rows.slot_to_row.tolist() == places
    tiles = [-(-(end - start) // block_m) for start, end in zip(offsets, offsets[1:])]
    want = offsets + [sum(tiles[:e]) for e in range(num_experts + 1)]
    want += [expert for expert, count in enumerate(tiles) for _ in range(count)]
    assert rows.schedule[: len(want)].tolist() == want
    max_tiles = module("rows").max_tiles(rows.num_rows, num_experts, block_m)
    assert sum(tiles) <= max_tiles <= len(rows.schedule) - 2 * (num_experts + 1)
    assert (rows.num_groups, rows.num_rows, rows.block_m) == (num_experts, ids.numel(), block_m)


@pytest.mark.parametrize("tokens, top_k, experts", SIZES)
def test_schedule_of_route(module, launches, tokens, top_k, experts):
    ids = make_ids(Case("route", T=tokens, top_k=top_k, E=experts))
    block_m = module("tuning.heuristic").choose_block_m(ids.numel(), experts, torch.bfloat16)
    assert_tiled(module, ids, experts, block_m)


@pytest.mark.parametrize("block_m", [16, 128])
def test_schedule_of_route_of_one_kind(module, launches, set_block_m, block_m):
    """Sentinels only, all slots on one expert, and tiles that end with their expert's rows or one row later."""
    set_block_m(block_m)
    assert_tiled(module, torch.full((400, 1), -1), 3, block_m)
    for experts in (1, 9):
        assert_tiled(module, torch.full((600, 1), experts - 1), experts, block_m)
    assert_tiled(module, torch.arange(3).repeat_interleave(block_m)[:, None], 3, block_m)
    assert_tiled(module, torch.tensor([0] * (block_m + 1) + [4, 2] * block_m)[:, None], 4, block_m)


@pytest.mark.parametrize("block_m", [16, 64, 128])
@pytest.mark.parametrize("sizes", [(5, 0, 40, 1), (0,), (2500,), (0, 0, 0), (1,) * 70, (16, 64, 128), (17, 65, 129)])
def test_schedule(module, kernels, set_block_m, sizes, block_m):
    """Every expert in order, once per started block of its rows; the bound holds with rows to spare, too."""
    set_block_m(block_m)
    offsets = torch.tensor((0, *sizes)).cumsum(0).int()
    tiles = [-(-size // block_m) for size in sizes]
    for spare in (0, 1, 300):
        for splits in (offsets, torch.tensor(sizes)):
            with GuardedAllocations(splits):
                rows = kernels.split_rows(splits, len(sizes), sum(sizes) + spare, torch.bfloat16)
            want = offsets.tolist() + [sum(tiles[:e]) for e in range(len(sizes) + 1)]
            max_tiles = module("rows").max_tiles(rows.num_rows, len(sizes), rows.block_m)
            assert sum(tiles) <= max_tiles <= len(rows.schedule) - 2 * (len(sizes) + 1)
            want += [expert for expert, count in enumerate(tiles) for _ in range(count)]
            assert rows.schedule[: len(want)].tolist() == want


@pytest.mark.parametrize("sizes", [(-3, 5, 2**40, 1), (2**63 - 1, 2**63 - 1), (-(2**63), 4, 0), (9, 9, 9)], ids=str)
def test_wrong_sizes_are_clamped(module, grouped_moe, kernels, sizes):
    """Negative ones count as 0, and what lies past the rows is cut off; as on the CPU."""
    on_cpu, splits = importlib.import_module(f"{grouped_moe.__name__}.backends.torch"), torch.tensor(sizes)
    with GuardedAllocations(splits):
        got = kernels.split_rows(splits, len(sizes), 20, torch.float32).group_offsets
    assert_bitwise("offsets", got, on_cpu.split_rows(splits, len(sizes), 20, torch.float32).group_offsets)
    ends = [0]
    for size in sizes:
        ends.append(min(20, ends[-1] + max(0, size)))
    assert got.tolist() == ends


def run_linear(module, linear, x, weight, offsets, bias, dy, needs=None, scales=None):
    """{"y", "x", "weight", "bias", "bias_scales"} by what the ops call. Needs the fixture `accelerated`."""
    functions = module("grouped_linear")
    needs = needs or (True, True, bias is not None, scales is not None)
    with GuardedAllocations(x, weight, offsets, bias, dy, scales):
        y, schedule = functions._forward(x, weight, offsets, bias, scales, linear.transposed)
        grads = linear_backward(module, dy, x, weight, schedule, bias, scales, linear.transposed, needs)
        named = zip(("y", "x", "weight", "bias", "bias_scales"), (y, *grads), (True, *needs))
        return {name: tensor.clone() for name, tensor, need in named if need}


DEEP = [
    Linear("ten-row-tiles", sizes=(600, 3), tail=5, N=130, K=8, bias=True),
    Linear("ten-weight-tiles", sizes=(5, 0), tail=1, N=600, K=70),
    Linear("deep", sizes=(20, 45), tail=3, N=70, K=200, transposed=True),
]
SMALL = [case if len(case.sizes) < 100 else case._replace(sizes=(0, 1, 2, 0) * 16) for case in LINEARS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("linear", SMALL + DEEP, ids=lambda linear: linear.id)
def test_grouped_linear(module, grouped_moe, accelerated, linear, dtype):
    """With NaN in rows of no group, in weights of groups without rows and around every operand."""
    x, weight, offsets, bias, dy = inputs = make(linear, dtype, "cpu")
    with torch.enable_grad():
        want = run_reference(grouped_moe, linear, *inputs)
    rows = torch.arange(x.shape[0])
    outside, empty = (rows < offsets[0]) | (rows >= offsets[-1]), offsets.diff() == 0
    x[outside], dy[outside], weight[empty] = NAN, NAN, NAN
    x, weight, dy = guarded(x), guarded(weight), guarded(dy)
    if bias is not None:
        bias[empty] = NAN
        bias = guarded(bias)
    got = run_linear(module, linear, x, weight, offsets, bias, dy)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], dtype)


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_offsets_stay_in_bounds(module, accelerated, kind):
    """And the result is that of the offsets that they are clamped to."""
    linear = LINEARS[1]
    x, weight, _, bias, dy = make(linear, torch.float32, "cpu")
    x, weight, bias, dy = (guarded(t) for t in (x, weight, bias, dy))
    wrong = torch.tensor(WRONG[kind])
    got = run_linear(module, linear, x, weight, wrong, bias, dy)
    want = run_linear(module, linear, x, weight, wrong.clamp(0, x.shape[0]).cummax(0).values, bias, dy)
    for name, tensor in got.items():
        assert_bitwise(name, tensor, want[name])


@pytest.mark.parametrize(
    "needs", [(True, False, False, False), (False, True, False, False), (False, False, True, False)], ids=str
)
def test_grouped_linear_only_gradients_asked_for(module, accelerated, needs):
    inputs = make(LINEARS[3], torch.float32, "cpu")
    full = run_linear(module, LINEARS[3], *inputs)
    for name, tensor in run_linear(module, LINEARS[3], *inputs, needs=needs).items():
        assert_bitwise(name, tensor, full[name])


PERMUTES = [Case("plain"), Case("sentinels-only", T=4, sentinels=1.0), Case("top-1", T=9, top_k=1)]
PERMUTES += [Case("no-token", T=0), Case("odd", T=9, H=35), Case("one", T=9, H=1), Case("wide", T=4, top_k=2, H=2100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("case", PERMUTES, ids=lambda case: case.id)
def test_permute(module, grouped_moe, kernels, case, dtype):
    """gather, combine and the gradients of combine, with NaN in rows past R and in weights of sentinels."""
    ids = make_ids(case)
    routing = grouped_moe.route(ids, case.E)
    offsets, row_to_slot, slot_to_row = routing.expert_offsets, routing.row_to_slot, routing.slot_to_row
    x, dout = (torch.randn(case.T, case.H).to(dtype) for _ in range(2))
    y, weights = torch.randn(case.T * case.top_k, case.H).to(dtype), torch.rand(case.T, case.top_k)
    with torch.enable_grad():
        leaves = [y.double(), weights.double()]
        want = differentiate(lambda y, w: loop_combine(y, w, routing), leaves, dout.double())
        plain = loop_combine(y.double(), torch.ones_like(leaves[1]), routing)
    sentinel = is_sentinel(ids, case.E)
    y[int(offsets[-1]) :], weights[sentinel], dout[sentinel.all(1)] = NAN, NAN, NAN
    row_to_slot = torch.where(torch.arange(len(row_to_slot)) < offsets[-1], row_to_slot, 2**30).int()
    x, y, weights, dout = (guarded(t) for t in (x, y, weights, dout))
    rows = module("routing").rows_of(offsets, row_to_slot, slot_to_row, case.top_k)
    with GuardedAllocations(x, y, weights, dout, offsets, row_to_slot, slot_to_row):
        gathered = kernels.gather_rows(x, rows)
        out, unweighted = kernels.combine(y, weights, rows), kernels.combine(y, None, rows)
        dy, dw = kernels.combine_grad(dout, y, weights, rows, True)
    assert_bitwise("gather", gathered, loop_gather(x, routing))
    for name, got, wanted in (("out", out, want[0]), ("unweighted", unweighted, plain), ("dy", dy, want[1][0])):
        assert_close(name, got, wanted, dtype)
    assert_close("dweights", dw, want[1][1], dtype, inner_products=True)


@pytest.mark.parametrize("case", [Case("plain"), Case("one-token", T=1, top_k=8, E=16), Case("odd-extent", H=1035)])
def test_sort_rows(module, kernels, case):
    """Rows of tokens go where their slots are; what no row comes from is not read, what no row goes to not written."""
    ids = make_ids(case)
    with GuardedAllocations(ids):
        rows = kernels.route(ids, case.E, torch.float32)
        x = guarded(torch.randn(case.T, case.H))
        x[is_sentinel(ids, case.E).all(1)] = NAN
        out = module("backends.triton.permute").sort_rows(x, rows)
    routed = int(rows.group_offsets[-1])
    assert out.shape == (ids.numel(), case.H)
    assert torch.equal(out[:routed], x[rows.row_to_slot[:routed].long() // case.top_k])
    assert out[routed:].isnan().all()


def test_strides_beyond_int32(kernels):
    """Column times stride passes 2^31: a weight whose columns lie 2^27 elements apart, in memory that is never touched
    but where it is read."""
    n, k, stride = 20, 16, 2**27
    storage = torch.empty(n * stride, dtype=torch.float16)
    weight = storage.as_strided((1, n, k), (16, stride, 1))
    values = torch.randn(1, n, k).half()
    weight.copy_(values)
    x, offsets = torch.randn(5, k).half(), torch.tensor([0, 5], dtype=torch.int32)
    y = kernels.gemm(x, weight, kernels.split_rows(offsets, 1, 5, x.dtype))
    assert_close("y", y, x.double() @ values[0].double().t(), torch.float16)
