"""grouped_linear: output and every gradient against the reference, the tail, and offsets that are wrong."""

from typing import NamedTuple

import pytest
import torch
from compare import assert_bitwise, assert_close
from poison import dirty_allocator, guarded, poisoned_allocations

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Linear(NamedTuple):
    """One grouped linear layer: rows of each group, rows of no group before and after them, N, K, layout."""

    id: str
    sizes: tuple = (7, 0, 19, 5)
    tail: int = 6
    head: int = 0
    N: int = 40
    K: int = 48
    transposed: bool = False
    bias: bool = False


LINEARS = [
    Linear("plain"),
    Linear("bias", bias=True),
    Linear("transposed", transposed=True),
    Linear("transposed-bias", transposed=True, bias=True),
    Linear("no-tail", tail=0, bias=True),
    Linear("head-and-tail", head=11, bias=True),
    Linear("head-only", sizes=(0, 0), head=9, tail=0),
    Linear("no-rows", sizes=(0, 0, 0), tail=0, bias=True),
    Linear("tail-only", sizes=(0, 0, 0), tail=9, bias=True),
    Linear("one-group", sizes=(33,), transposed=True),
    Linear("first-and-last-empty", sizes=(0, 0, 21, 0, 3, 0), bias=True),
    Linear("tall", sizes=(200, 1, 130), tail=70),
    Linear("odd-extents", N=21, K=35, bias=True),
    Linear("extents-of-one", N=1, K=1, bias=True),
    Linear("aligned-extents", sizes=(64, 16, 128), tail=32, N=128, K=64),
    Linear("many-tiles", sizes=(300, 0, 129, 64, 191, 128), head=37, tail=150, N=264, K=200, bias=True),
    Linear("many-tiles-transposed", sizes=(65, 1, 640, 0, 127), tail=300, N=520, K=72, transposed=True),
    Linear("1024-groups", sizes=(0, 1, 2, 0) * 256, tail=3, N=8, K=8, bias=True),
]
by_linear = pytest.mark.parametrize("linear", LINEARS, ids=lambda linear: linear.id)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
some = pytest.mark.parametrize("linear", [LINEARS[3], LINEARS[5], LINEARS[11]], ids=lambda linear: linear.id)


def make(linear, dtype, device):
    """(x, weight, offsets, bias or None, dy) at unit scale, made on the CPU."""
    groups, rows = len(linear.sizes), linear.head + sum(linear.sizes) + linear.tail
    shape = (groups, linear.K, linear.N) if linear.transposed else (groups, linear.N, linear.K)
    x, weight = torch.randn(rows, linear.K), torch.randn(shape) / linear.K**0.5
    bias, dy = torch.randn(groups, linear.N), torch.randn(rows, linear.N)
    offsets = torch.tensor((linear.head, *linear.sizes)).cumsum(0).to(device)
    x, weight, bias, dy = (t.to(device, dtype) for t in (x, weight, bias, dy))
    return x, weight, offsets, bias if linear.bias else None, dy


def run(function, linear, x, weight, offsets, bias, dy):
    """{"y", "x", "weight", "bias"}: output and gradients."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(leaves[0], leaves[1], offsets, leaves[2], transposed=linear.transposed)
    y.backward(dy)
    grads = {name: t.grad for name, t in zip(("x", "weight", "bias"), leaves) if t is not None}
    return {"y": y.detach(), **grads}


def run_reference(grouped_moe, linear, x, weight, offsets, bias, dy):
    wide = [t if t is None else t.double() for t in (x, weight, bias)]
    return run(grouped_moe.reference.grouped_linear, linear, wide[0], wide[1], offsets, wide[2], dy.double())


def assert_matches(got, want, dtype):
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == dtype, name
        assert_close(name, tensor, want[name], dtype)


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_bitwise(name, tensor, want[name])


@by_dtype
@by_linear
def test_matches_reference(grouped_moe, device, linear, dtype):
    inputs = make(linear, dtype, device)
    assert_matches(run(grouped_moe.grouped_linear, linear, *inputs), run_reference(grouped_moe, linear, *inputs), dtype)


@by_linear
def test_fp64_on_cpu_matches_reference(grouped_moe, linear):
    inputs = make(linear, torch.float64, "cpu")
    got = run(grouped_moe.grouped_linear, linear, *inputs)
    assert_matches(got, run_reference(grouped_moe, linear, *inputs), torch.float64)


@by_dtype
@by_linear
def test_ungrouped_rows_are_zero_and_left_out(grouped_moe, device, linear, dtype):
    """NaN in rows of no group, in weights of groups without rows, and in fresh memory: bit-identical results."""
    x, weight, offsets, bias, dy = inputs = make(linear, dtype, device)
    want = run(grouped_moe.grouped_linear, linear, *inputs)
    rows = torch.arange(x.shape[0], device=device)
    outside = (rows < offsets[0]) | (rows >= offsets[-1])
    assert not want["y"][outside].any() and not want["x"][outside].any()
    x, weight, dy = x.clone(), weight.clone(), dy.clone()
    x[outside], dy[outside], weight[offsets.diff() == 0] = NAN, NAN, NAN
    if bias is not None:
        bias = bias.masked_fill((offsets.diff() == 0)[:, None], NAN)
    with poisoned_allocations():
        assert_same(run(grouped_moe.grouped_linear, linear, x, weight, offsets, bias, dy), want)
    dirty_allocator(device)
    assert_same(run(grouped_moe.grouped_linear, linear, x, weight, offsets, bias, dy), want)


@some
def test_group_without_rows_has_zero_gradient(grouped_moe, device, linear):
    inputs = make(linear, torch.float32, device)
    empty = inputs[2].diff() == 0
    with poisoned_allocations():
        got = run(grouped_moe.grouped_linear, linear, *inputs)
    assert not got["weight"][empty].any() and not (linear.bias and got["bias"][empty].any())


WRONG = {
    "decreasing": [0, 20, 5, 30, 12],
    "beyond-rows": [0, 7, 40, 41, 1000],
    "negative": [-9, -1, 7, -30, 20],
    "all-negative": [-5, -4, -3, -2, -1],
    "starts-late": [9, 12, 20, 20, 30],
    "int64-ends": [-(2**63), 2**32 + 3, 2**63 - 1, -(2**63), 2**63 - 1],
    "int32-ends": [-(2**31), 3, 2**31 - 1, 0, 2**31 - 1],
    "wraps-to-valid": [2**32, 2**32 + 7, 2**32 + 9, 2**33 + 20, 2**34 + 30],
}


@pytest.mark.parametrize("kind", WRONG)
@by_dtype
def test_wrong_offsets_stay_in_bounds(grouped_moe, device, kind, dtype):
    """What comes out is unspecified but made of the operands: NaN all around them is never reached."""
    linear = LINEARS[1]
    x, weight, offsets, bias, dy = make(linear, dtype, device)
    wrong = torch.tensor(WRONG[kind], device=device)
    offsets = wrong if wrong.abs().max() >= 2**31 or kind == "int64-ends" else wrong.int()
    x, weight, bias, dy = (guarded(t) for t in (x, weight, bias, dy))
    got = run(grouped_moe.grouped_linear, linear, x, weight, offsets, bias, dy)
    for name, tensor in got.items():
        assert torch.isfinite(tensor).all(), name


@pytest.mark.kernels_ci
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_offsets_are_clamped(grouped_moe, device, kind):
    """As if they had been clamped to [0, rows] and made not to decrease."""
    linear = Linear("unsorted", sizes=(7, 0, 19, 5), tail=6, bias=True)
    x, weight, _, bias, dy = make(linear, torch.float32, device)
    wrong = torch.tensor(WRONG[kind], device=device)
    right = wrong.clamp(0, x.shape[0]).cummax(0).values
    got = run(grouped_moe.grouped_linear, linear, x, weight, wrong, bias, dy)
    assert_same(got, run(grouped_moe.grouped_linear, linear, x, weight, right, bias, dy))


def _strided(tensor):
    """The same values, transposed in memory and with NaN in between."""
    wide = torch.full((*tensor.shape, 2), NAN, dtype=tensor.dtype, device=tensor.device).transpose(-2, -3)
    wide = wide.contiguous().transpose(-2, -3)
    wide[..., 0] = tensor
    return wide[..., 0]


@pytest.mark.parametrize("layout", [_strided, guarded], ids=["strided", "misaligned"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
@some
def test_strides(grouped_moe, device, linear, layout, dtype):
    x, weight, offsets, bias, dy = inputs = make(linear, dtype, device)
    bias = bias if bias is None else layout(bias)
    got = run(grouped_moe.grouped_linear, linear, layout(x), layout(weight), offsets, bias, layout(dy))
    assert_matches(got, run_reference(grouped_moe, linear, *inputs), dtype)


@some
def test_expanded_cotangent(grouped_moe, device, linear):
    x, weight, offsets, bias, dy = make(linear, torch.float32, device)
    dy = dy[:1, :1].expand_as(dy)
    got = run(grouped_moe.grouped_linear, linear, x, weight, offsets, bias, dy)
    assert_matches(got, run_reference(grouped_moe, linear, x, weight, offsets, bias, dy), torch.float32)


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("x", "bias")], ids="-".join)
def test_only_gradients_asked_for(grouped_moe, device, wanted):
    x, weight, offsets, bias, dy = inputs = make(LINEARS[1], torch.float32, device)
    full = run(grouped_moe.grouped_linear, LINEARS[1], *inputs)
    leaves = {"x": x, "weight": weight, "bias": bias}
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in leaves.items()}
    grouped_moe.grouped_linear(leaves["x"], leaves["weight"], offsets, leaves["bias"]).backward(dy)
    for name, leaf in leaves.items():
        if name in wanted:
            assert_bitwise(name, leaf.grad, full[name])
        else:
            assert leaf.grad is None, name


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_repeats_bitwise_and_for_both_index_dtypes(grouped_moe, device, dtype):
    x, weight, offsets, bias, dy = inputs = make(LINEARS[1], dtype, device)
    first = run(grouped_moe.grouped_linear, LINEARS[1], *inputs)
    for _ in range(20):
        assert_same(run(grouped_moe.grouped_linear, LINEARS[1], *inputs), first)
    assert_same(run(grouped_moe.grouped_linear, LINEARS[1], x, weight, offsets.int(), bias, dy), first)


@pytest.mark.kernels_ci
def test_autocast(grouped_moe, device):
    x, weight, offsets, bias, dy = make(LINEARS[1], torch.float32, device)
    cast = (x.bfloat16(), weight.bfloat16(), offsets, bias.bfloat16(), dy.bfloat16())
    want = run(grouped_moe.grouped_linear, LINEARS[1], *cast)
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    with torch.autocast(device, torch.bfloat16):
        y = grouped_moe.grouped_linear(leaves[0], leaves[1], offsets, leaves[2])
    y.backward(cast[-1])
    assert_bitwise("y", y.detach(), want["y"])
    for name, leaf in zip(("x", "weight", "bias"), leaves):
        assert_bitwise(name, leaf.grad, want[name].float())


def test_autocast_leaves_fp64(grouped_moe):
    x, weight, offsets, bias, _ = make(LINEARS[1], torch.float64, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_moe.grouped_linear(x, weight, offsets, bias).dtype == torch.float64


def test_lists_may_leave_rows_to_no_group(grouped_moe, device):
    x, weight, *_ = make(LINEARS[0], torch.float32, device)
    sizes = torch.tensor(LINEARS[0].sizes, device=device)
    want = grouped_moe.grouped_linear(x, weight, sizes)
    assert LINEARS[0].tail and not want[sizes.sum() :].any()
    assert_bitwise("y", grouped_moe.grouped_linear(x, weight, list(LINEARS[0].sizes)), want)


@pytest.mark.parametrize("sizes", [[8, 8, 8, 8], [17, 0, 0, 0], [5, -1, 5, 5], [2**63, 0, 0, 0], [20, -10, 0, 0]])
def test_lists_that_do_not_fit_the_rows(grouped_moe, device, sizes):
    x, weight, bias = (torch.randn(shape, device=device) for shape in ((16, 8), (4, 8, 8), (4, 8)))
    calls = (
        lambda: grouped_moe.grouped_linear(x, weight, sizes),
        lambda: grouped_moe.grouped_mlp(x, tuple(sizes), None, weight, weight, gated=False),
        lambda: grouped_moe.GroupedLinear(4, 8, 8, device=device)(x, sizes),
        lambda: grouped_moe.grouped_dbias_dscales(x, x[:, 0], bias, sizes),
    )
    for call in calls:
        with pytest.raises(ValueError, match="^splits: expected sizes of at least 0 and together at most the 16 rows"):
            call()
