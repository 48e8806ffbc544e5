"""grouped_linear: output and every gradient against the reference, rows of no group, splits that are wrong, errors."""

import itertools
from typing import NamedTuple

import group_splits
import pytest
import torch
from compare import assert_bitwise, assert_close
from poison import dirty_allocator, guarded, poisoned_allocations

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("x", "weight", "bias", "bias_scales")
WRONG = group_splits.WRONG_OFFSETS


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
BIASED = LINEARS[1]
# Not a single column: a row of y is then one number, of two that may cancel.
SCALED = [linear for linear in LINEARS if linear.bias and linear.N > 1]


def pairs(*scales_dtypes):
    """Of layers and dtypes of their scales, None without."""
    every = [(linear, None) for linear in LINEARS] + list(itertools.product(SCALED, scales_dtypes))
    names = [f"{linear.id}-{dtype}".replace("-None", "").replace("torch.", "") for linear, dtype in every]
    return pytest.mark.parametrize("linear, scales_dtype", every, ids=names)


by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
by_order = pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
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


def named(*tensors):
    """{name: tensor} of those that are there, in the order of NAMES."""
    return {name: tensor for name, tensor in zip(NAMES, tensors) if tensor is not None}


def make_named(linear, dtype, device, scales_dtype=torch.float32):
    """({name: tensor}, offsets, dy); without scales if scales_dtype is None."""
    x, weight, offsets, bias, dy = make(linear, dtype, device)
    scales = None if scales_dtype is None else (torch.rand(x.shape[0]) - 0.5).to(device, scales_dtype)
    return named(x, weight, bias, scales), offsets, dy


def run(function, linear, tensors, splits, dy, wanted=NAMES):
    """{"y": output, name: gradient}; what is not wanted has none."""
    leaves = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in tensors.items()}
    rest = (leaves.get(name) for name in NAMES[2:])
    y = function(leaves["x"], leaves["weight"], splits, *rest, transposed=linear.transposed)
    y.backward(dy)
    assert all((leaf.grad is None) == (name not in wanted) for name, leaf in leaves.items())
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items() if name in wanted}}


def run_reference(grouped_moe, linear, x, weight, offsets, bias, dy, scales=None):
    wide = {name: tensor.double() for name, tensor in named(x, weight, bias, scales).items()}
    return run(grouped_moe.reference.grouped_linear, linear, wide, offsets, dy.double())


def assert_matches_reference(got, grouped_moe, linear, tensors, offsets, dy):
    """Each in its own dtype; a gradient of scales within the tolerances of the coarser one of its and that of x."""
    x, weight, bias, scales = (tensors.get(name) for name in NAMES)
    want = run_reference(grouped_moe, linear, x, weight, offsets, bias, dy, scales)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == (x if name == "y" else tensors[name]).dtype, name
        coarser = max(x.dtype, tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        assert_close(name, tensor, want[name], coarser, inner_products=name == "bias_scales")


def assert_same(got, want):
    for name, tensor in got.items():
        assert_bitwise(name, tensor, want[name])


def poison(tensors, offsets, dy):
    """NaN in place, in rows of no group, their scales and cotangents, and in weights and biases of groups without."""
    rows, empty = torch.arange(len(dy), device=dy.device), offsets.diff() == 0
    outside = (rows < offsets[0]) | (rows >= offsets[-1])
    for name, tensor in tensors.items():
        tensor[empty if name in ("weight", "bias") else outside] = NAN
    dy[outside] = NAN
    return outside


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pairs(*DTYPES)
def test_matches_reference(grouped_moe, device, linear, scales_dtype, dtype):
    """fp64 on the CPU alone."""
    inputs = make_named(linear, dtype, "cpu" if dtype == torch.float64 else device, scales_dtype)
    assert_matches_reference(run(grouped_moe.grouped_linear, linear, *inputs), grouped_moe, linear, *inputs)


@by_dtype
@pairs(torch.float32)
def test_what_is_not_of_a_group_is_not_read(grouped_moe, device, linear, scales_dtype, dtype):
    """NaN in it and in fresh memory: the same bits, and zeros where there is nothing to sum."""
    tensors, offsets, dy = inputs = make_named(linear, dtype, device, scales_dtype)
    want = run(grouped_moe.grouped_linear, linear, *inputs)
    outside = poison(tensors, offsets, dy)
    assert not any(tensor[outside].any() for name, tensor in want.items() if name not in ("weight", "bias"))
    with poisoned_allocations():
        assert_same(run(grouped_moe.grouped_linear, linear, *inputs), want)
    dirty_allocator(device)
    assert_same(run(grouped_moe.grouped_linear, linear, *inputs), want)


def strided(tensor):
    """The same values, transposed in memory and with NaN in between."""
    wide = torch.full((*tensor.shape, 2), NAN, dtype=tensor.dtype, device=tensor.device)
    if tensor.dim() > 1:
        wide = wide.transpose(-2, -3).contiguous().transpose(-2, -3)
    wide[..., 0] = tensor
    return wide[..., 0]


def subsets(names):
    """Of the operands, those that want a gradient, all of them first."""
    return [chosen for count in range(len(names), 0, -1) for chosen in itertools.combinations(names, count)]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
@by_order
@pytest.mark.parametrize("layout", [torch.clone, strided, guarded], ids=["contiguous", "strided", "misaligned"])
@pytest.mark.parametrize("count", [2, 3, 4], ids=["no bias", "bias", "scales"])
def test_every_combination(grouped_moe, device, count, layout, transposed, dtype):
    """Of operands, those that want a gradient, layouts of the weight: next to NaN wherever nothing must be read."""
    linear = Linear("all", head=3, transposed=transposed, bias=True)
    tensors, offsets, dy = make_named(linear, dtype, device)
    tensors = {name: tensors[name] for name in NAMES[:count]}
    clean = {name: tensor.clone() for name, tensor in tensors.items()}, offsets, dy.clone()
    poison(tensors, offsets, dy)
    tensors["weight"], full = layout(tensors["weight"]), None
    for wanted in subsets(tensors):
        with poisoned_allocations():
            got = run(grouped_moe.grouped_linear, linear, tensors, offsets, dy, wanted)
        full = full or got
        assert_same(got, full)
    assert_matches_reference(full, grouped_moe, linear, *clean)


@by_order
@pytest.mark.parametrize("count", [2, 3, 4], ids=["no bias", "bias", "scales"])
def test_gradcheck_of_every_combination(grouped_moe, count, transposed):
    linear = Linear("gradcheck", (2, 0, 3), 2, 1, 3, 4, transposed, True)
    tensors, offsets, _ = make_named(linear, torch.float64, "cpu", torch.float64)

    def function(x, weight, *biases):
        return grouped_moe.grouped_linear(x, weight, offsets, *biases, transposed=transposed)

    for wanted in subsets(NAMES[:count]):
        leaves = [tensors[name].detach().requires_grad_(name in wanted) for name in NAMES[:count]]
        assert torch.autograd.gradcheck(function, leaves)


def expanded(tensor):
    """One number or row for all, with strides of 0, as `sum` and a scale common to all rows give."""
    return tensor[:1, :1].expand_as(tensor) if tensor.dim() == 2 else tensor[:1].expand_as(tensor)


@pytest.mark.parametrize("layout", [strided, guarded, expanded])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
@pytest.mark.parametrize("scales_dtype", [None, torch.float32], ids=["unscaled", "scaled"])
@some
def test_strides(grouped_moe, device, linear, scales_dtype, layout, dtype):
    """Of all operands and of the cotangent; expanded ones are the cotangent and scales."""
    tensors, offsets, dy = make_named(linear, dtype, device, scales_dtype if linear.bias else None)
    changed = [name for name in tensors if layout is not expanded or name == "bias_scales"]
    views = {**tensors, **{name: layout(tensors[name]) for name in changed}}
    got = run(grouped_moe.grouped_linear, linear, views, offsets, layout(dy))
    assert_matches_reference(got, grouped_moe, linear, views, offsets, layout(dy))


@by_dtype
def test_repeats_bitwise_whatever_the_splits(grouped_moe, device, dtype):
    tensors, offsets, dy = make_named(BIASED, dtype, device)
    want = run(grouped_moe.grouped_linear, BIASED, tensors, offsets, dy)
    for splits in [offsets] * 10 + [*group_splits.forms(grouped_moe, offsets.diff()).values()]:
        assert_same(run(grouped_moe.grouped_linear, BIASED, tensors, splits, dy), want)


@pytest.mark.parametrize("kind", group_splits.WRONG)
@pytest.mark.parametrize("scales_dtype", [None, torch.float32], ids=["unscaled", "scaled"])
@pytest.mark.parametrize(
    "dtype", [pytest.param(DTYPES[0], marks=pytest.mark.kernels_ci), *DTYPES[1:]], ids=lambda dtype: str(dtype)[6:]
)
def test_wrong_splits_are_clamped(grouped_moe, device, dtype, scales_dtype, kind):
    """And NaN all around the operands is never reached."""
    tensors, _, dy = make_named(BIASED, dtype, device, scales_dtype)
    tensors, dy = {name: guarded(tensor) for name, tensor in tensors.items()}, guarded(dy)
    wrong = torch.tensor(group_splits.WRONG[kind], device=device)
    right = torch.tensor(group_splits.clamped(group_splits.WRONG[kind], len(dy)), device=device)
    want = run(grouped_moe.grouped_linear, BIASED, tensors, right, dy)
    assert all(bool(tensor.isfinite().all()) for tensor in want.values())
    for splits in (wrong, wrong.int()) if torch.equal(wrong.int(), wrong) else (wrong,):
        assert_same(run(grouped_moe.grouped_linear, BIASED, tensors, splits, dy), want)


@pytest.mark.kernels_ci
def test_autocast(grouped_moe, device):
    """Operands are cast, gradients come back in their dtype; scales and fp64 are left alone."""
    tensors, offsets, dy = make_named(BIASED, torch.float32, device)
    cast = {name: tensor if name == "bias_scales" else tensor.bfloat16() for name, tensor in tensors.items()}
    want = run(grouped_moe.grouped_linear, BIASED, cast, offsets, dy.bfloat16())

    def autocast(*args, **kwargs):
        with torch.autocast(device, torch.bfloat16):
            return grouped_moe.grouped_linear(*args, **kwargs)

    got = run(autocast, BIASED, tensors, offsets, dy.bfloat16())
    assert_same(got, {name: tensor if name == "y" else tensor.float() for name, tensor in want.items()})
    x, weight, offsets, bias, _ = make(BIASED, torch.float64, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_moe.grouped_linear(x, weight, offsets, bias).dtype == torch.float64


def test_scales_of_two_layers_get_both_gradients(grouped_moe, device):
    """One tensor of scales for two layers: the sum of what each gives alone."""
    tensors, offsets, dy = make_named(BIASED, torch.float32, device)
    x, weight, bias, scales = tensors.values()
    both = bias, torch.randn_like(bias)
    alone = [run(grouped_moe.grouped_linear, BIASED, {**tensors, "bias": b}, offsets, dy) for b in both]
    leaf = scales.clone().requires_grad_()
    y = [grouped_moe.grouped_linear(x, weight, offsets, b, leaf) for b in both]
    torch.autograd.backward(y, [dy, dy])
    torch.testing.assert_close(leaf.grad, sum(grads["bias_scales"] for grads in alone), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "wanted, changed, read",
    [
        ("weight", "weight", False),
        ("bias", "weight", False),
        ("x", "bias", False),
        ("bias", "x", False),
        ("x", "weight", True),
        ("weight", "x", True),
        ("bias_scales", "bias", True),
    ],
)
def test_what_the_backward_does_not_read_may_change(grouped_moe, device, wanted, changed, read):
    """In place, before it. What it reads may not."""
    tensors, offsets, dy = make_named(BIASED, torch.float32, device)
    leaves = {name: tensor.clone().requires_grad_(name == wanted) for name, tensor in tensors.items()}
    y = grouped_moe.grouped_linear(leaves["x"], leaves["weight"], offsets, leaves["bias"], leaves["bias_scales"])
    with torch.no_grad():
        leaves[changed].mul_(3)
    if read:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)
    else:
        y.backward(dy)
        want = run(grouped_moe.grouped_linear, BIASED, tensors, offsets, dy, (wanted,))
        assert_bitwise(wanted, leaves[wanted].grad, want[wanted])


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


def test_errors(grouped_moe, device):
    """Of scales, and of splits whose type says what they mean: the other length is refused, which else would pass."""
    tensors, offsets, _ = make_named(BIASED, torch.float32, device)
    x, weight, bias, scales = tensors.values()
    for args, error, message in (
        ((x, weight, grouped_moe.GroupSizes(offsets)), ValueError, r"splits: .*\(G,\) = \(4\), got \(5,\)"),
        ((x, weight, grouped_moe.GroupOffsets(offsets.diff())), ValueError, r"splits: .*\(G \+ 1,\) = \(5\), got \(4,"),
        ((x, weight, [1, 2, 3]), ValueError, "splits: expected 4 sizes, got 3"),
        ((x, weight, [1.0, 2, 3, 4]), TypeError, "splits: expected a list of ints"),
        ((x, weight, [True, 2, 3, 4]), TypeError, "splits: expected a list of ints"),
        ((x, weight, offsets, None, scales), ValueError, "bias_scales: expected None without a bias"),
        ((x, weight, offsets, bias, scales[:-1]), ValueError, r"bias_scales: .*\(rows,\) = \(37\), got \(36,\)"),
        ((x[:1].expand(2**31, -1), weight, offsets), ValueError, r"x: expected fewer than 2\^31 rows, got 2147483648$"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            grouped_moe.grouped_linear(*args)
