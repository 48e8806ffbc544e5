"""grouped_dbias_dscales: both sums against fp64, buffers that are added to, and what is wrong with a buffer."""

import contextlib
import itertools

import group_splits
import pytest
import torch
from compare import assert_bitwise, assert_close
from loops import loop_bias_grads
from marks import DTYPES, by_dtype
from poison import LAYOUTS, dirty_allocator, guarded, poisoned_allocations

NAN = float("nan")
SIZES = [(7, 0, 19, 5), (200, 1, 130), (0, 0), (33,), (0, 21, 0), (0, 1, 2, 0) * 256]
by_sizes = pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}-groups-{sum(sizes)}-rows")


def make(sizes, dtype, device, N=70, tail=6, scales_dtype=torch.float32):
    """(dy, scales, bias, sizes) at unit scale."""
    rows = sum(sizes) + tail
    dy, scales, bias = torch.randn(rows, N), torch.rand(rows) - 0.5, torch.randn(len(sizes), N)
    return dy.to(device, dtype), scales.to(device, scales_dtype), bias.to(device, dtype), torch.tensor(sizes).to(device)


def assert_sums(got, want, dtype=torch.float32):
    """dtype: that of sums."""
    for name, tensor, right in zip(("dbias", "dscales"), got, want, strict=True):
        assert tensor.dtype == dtype
        assert_close(name, tensor, right, dtype, inner_products=True)


@pytest.mark.parametrize("scales_dtype", DTYPES, ids=lambda dtype: f"{str(dtype)[6:]}-scales")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=lambda dtype: str(dtype)[6:])
@by_sizes
def test_matches_loop(grouped_moe, device, sizes, dtype, scales_dtype):
    """fp64 on the CPU alone."""
    inputs = make(sizes, dtype, "cpu" if dtype == torch.float64 else device, scales_dtype=scales_dtype)
    sums = torch.promote_types(dtype, torch.float32)
    assert_sums(grouped_moe.grouped_dbias_dscales(*inputs), loop_bias_grads(*inputs), sums)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("given", [("dbias",), ("dscales",), ("dbias", "dscales")], ids="-".join)
@by_dtype
def test_adds_to_buffers(grouped_moe, device, given, dtype, compiled, fresh_compiler):
    """Those of the call, and returns them; the other one is new. Compiled in one graph."""
    inputs, function = make(SIZES[0], dtype, device), grouped_moe.grouped_dbias_dscales
    function = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    start = {"dbias": torch.randn(4, 70, device=device), "dscales": torch.randn(len(inputs[0]), device=device)}
    buffers = {name: start[name].clone() for name in given}
    got = dict(zip(start, function(*inputs, **buffers)))
    assert all(got[name] is buffers[name] for name in given)
    want = dict(zip(start, loop_bias_grads(*inputs)))
    assert_sums(list(got.values()), [want[name] + (start[name].double() if name in given else 0) for name in start])


@by_dtype
@by_sizes
def test_what_is_not_of_a_group_is_not_read(grouped_moe, device, sizes, dtype):
    """NaN in the padding, the bias of groups without rows and fresh memory: the same bits. Nor what lies around."""
    dy, scales, bias, splits = inputs = make(sizes, dtype, device)
    want = grouped_moe.grouped_dbias_dscales(*inputs)
    assert not want[0][splits == 0].any() and not want[1][sum(sizes) :].any()
    dy[sum(sizes) :], scales[sum(sizes) :], bias[splits == 0] = NAN, NAN, NAN
    around = grouped_moe.grouped_dbias_dscales(guarded(dy), guarded(scales), guarded(bias), splits)
    assert all(bool(tensor.isfinite().all()) for tensor in around)
    dirty_allocator(device)
    with poisoned_allocations():
        got = grouped_moe.grouped_dbias_dscales(dy, scales, bias, splits)
    for name, first, second in zip(("dbias", "dscales"), got, want):
        assert_bitwise(name, first, second)


def test_an_infinite_scale(grouped_moe, device):
    """Of a group's last row, which a tile's rows past it repeat: the group's sum is that of the row's infinities."""
    dy, scales, bias, splits = inputs = make((7, 0, 19, 5), torch.float32, device)
    want = grouped_moe.grouped_dbias_dscales(*inputs)
    scales[25] = -torch.inf
    dbias, dscales = grouped_moe.grouped_dbias_dscales(*inputs)
    want[0][2] = dy[25].sign() * -torch.inf
    assert_bitwise("dbias", dbias, want[0])
    assert_bitwise("dscales", dscales, want[1])


def test_repeats_bitwise_whatever_the_splits(grouped_moe, device):
    dy, scales, bias, sizes = make(SIZES[1], torch.bfloat16, device)
    first = grouped_moe.grouped_dbias_dscales(dy, scales, bias, sizes)
    for splits in [sizes] * 10 + [*group_splits.forms(grouped_moe, sizes).values()]:
        for got, want in zip(grouped_moe.grouped_dbias_dscales(dy, scales, bias, splits), first):
            assert_bitwise("sum", got, want)


def test_strides_and_no_graph(grouped_moe, device):
    dy, scales, bias, sizes = inputs = make(SIZES[0], torch.float32, device)
    strided = [LAYOUTS["transposed-apart"](tensor).requires_grad_() for tensor in (dy, scales, bias)]
    got = grouped_moe.grouped_dbias_dscales(*strided, sizes)
    assert not any(tensor.requires_grad for tensor in got)
    assert_sums(got, loop_bias_grads(*inputs))


@pytest.mark.parametrize("name, change, error, message", [
    ("dy", lambda t: t[0], ValueError, r"expected shape \(rows, N\)"),
    ("dy", lambda t: t.long(), TypeError, "expected one of"),
    ("dy", lambda t: t.tolist(), TypeError, "expected a tensor, got list"),
    ("bias_scales", lambda t: t[:-1], ValueError, r"expected shape \(rows,\) = \(37,\), got \(36,\)"),
    ("bias_scales", lambda t: t.long(), TypeError, "expected one of"),
    ("bias_scales", lambda t: None, TypeError, "expected a tensor, got NoneType"),
    ("bias_scales", lambda t: t.to("meta"), ValueError, "expected on .* like dy, got meta"),
    ("bias", lambda t: t[:, :9], ValueError, r"expected shape \(G, N\) = \(\?, 70\), got \(4, 9\)"),
    ("bias", lambda t: t[:0], ValueError, "expected 1 to 1024 groups, got 0"),
    ("bias", lambda t: t.half(), TypeError, "expected torch.float32 like dy, got torch.float16"),
    ("splits", lambda t: t[:2], ValueError, r"expected shape \(G \+ 1,\) offsets or \(G,\) sizes = \(4,\)"),
    ("splits", lambda t: t.float(), TypeError, "expected torch.int32 or torch.int64, got torch.float32"),
    ("splits", lambda t: t.to("meta"), ValueError, "expected on .* like dy, got meta"),
    ("dbias", lambda t: t.bfloat16(), TypeError, "expected torch.float32, in which the sums are, got torch.bf"),
    ("dscales", lambda t: t.double(), TypeError, "expected torch.float32, in which the sums are, got torch.f"),
    ("dbias", lambda t: t[:3], ValueError, r"expected shape \(G, N\) = \(4, 70\), got \(3, 70\)"),
    ("dscales", lambda t: t[:, None], ValueError, r"expected shape \(rows,\) = \(37,\), got \(37, 1\)"),
    ("dbias", lambda t: t.t().contiguous().t(), ValueError, "expected a contiguous tensor, got strides"),
    ("dscales", lambda t: t.repeat_interleave(2)[::2], ValueError, "expected a contiguous tensor"),
    ("dbias", lambda t: t.to("meta"), ValueError, "expected on .* like dy, got meta"),
    ("dscales", lambda t: t.requires_grad_(), ValueError, "expected a tensor without gradient"),
    ("dbias", lambda t: t.tolist(), TypeError, "expected a tensor, got list"),
])  # fmt: skip
def test_wrong_arguments(grouped_moe, device, name, change, error, message):
    """Refused before anything is written."""
    given = dict(zip(("dy", "bias_scales", "bias", "splits"), make(SIZES[0], torch.float32, device)))
    buffers = {"dbias": torch.zeros(4, 70, device=device), "dscales": torch.zeros(37, device=device)}
    given = {**given, **buffers}
    with pytest.raises(error, match=f"^{name}: {message}"):
        grouped_moe.grouped_dbias_dscales(**{**given, name: change(given[name])})
    assert not any(buffer.any() for buffer in buffers.values())


def test_transforms_are_refused(grouped_moe, device):
    """Which would give a gradient or a tangent of 0."""
    dy, *others = make(SIZES[0], torch.float32, device)

    def function(dy):
        return grouped_moe.grouped_dbias_dscales(dy, *others)[0].sum()

    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(NotImplementedError, match="^grouped_dbias_dscales: .* by transforms of torch.func"):
            transform(function)(dy if transform is torch.func.grad else dy[None])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        function(torch.autograd.forward_ad.make_dual(dy, torch.ones_like(dy)))


def test_buffers_that_share_memory(grouped_moe, device):
    """With an input, which would change while it is read, or with each other; not side by side in one."""
    dy, scales, bias, sizes = inputs = make(SIZES[0], torch.float32, device)
    memory = torch.zeros(4 * 70 + len(dy), device=device)
    apart = {"dbias": memory[: 4 * 70].view(4, 70), "dscales": memory[4 * 70 :]}
    ints = memory[4 * 70 :].view(torch.int32)[:4].copy_(sizes)
    shared = {
        "bias": ("dbias", bias),
        "dy": ("dbias", dy[:4]),
        "bias_scales": ("dscales", scales),
        "dscales": ("dbias", memory[1 : 4 * 70 + 1].view(4, 70)),
        "splits": ("dscales", apart["dscales"]),
    }
    for other, (name, buffer) in shared.items():
        splits = ints if other == "splits" else sizes
        alone = ({},) if other not in apart else ()
        for context, rest in itertools.product((contextlib.nullcontext(), torch.profiler.profile()), (apart, *alone)):
            with context, pytest.raises(ValueError, match=f"^{name}: expected memory apart from that of {other}$"):
                grouped_moe.grouped_dbias_dscales(dy, scales, bias, splits, **{**rest, name: buffer})
    ints.zero_()
    assert not memory.any()
    assert_sums(grouped_moe.grouped_dbias_dscales(*inputs, **apart), loop_bias_grads(*inputs))
