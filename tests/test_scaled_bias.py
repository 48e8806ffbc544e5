"""grouped_linear with a bias that is scaled per row, and the ways to say how rows are split."""

import itertools

import pytest
import torch
from compare import assert_bitwise, assert_close
from poison import guarded, poisoned_allocations
from test_grouped_linear import LINEARS, make

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("x", "weight", "bias", "bias_scales")
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
# Not a single column: a row of y is then one number, of two that may cancel.
BIASED = [linear for linear in LINEARS if linear.bias and linear.N > 1]
by_linear = pytest.mark.parametrize("linear", BIASED, ids=lambda linear: linear.id)


def make_scaled(linear, dtype, device, scales_dtype=torch.float32):
    """({name: tensor}, offsets, dy)."""
    x, weight, offsets, bias, dy = make(linear, dtype, device)
    scales = (torch.rand(x.shape[0]) - 0.5).to(device, scales_dtype)
    return dict(zip(NAMES, (x, weight, bias, scales))), offsets, dy


def run(function, linear, tensors, splits, dy, wanted=NAMES):
    """{"y": output, name: gradient or None}."""
    leaves = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in tensors.items()}
    x, weight, bias, scales = leaves.values()
    y = function(x, weight, splits, bias, scales, transposed=linear.transposed)
    y.backward(dy)
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def run_reference(grouped_moe, linear, tensors, offsets, dy):
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    return run(grouped_moe.reference.grouped_linear, linear, wide, offsets, dy.double())


def assert_matches(got, want, tensors, dtype):
    for name, tensor in got.items():
        assert tensor.dtype == (dtype if name == "y" else tensors[name].dtype), name
        coarser = max(dtype, tensor.dtype, key=lambda d: torch.finfo(d).eps)
        assert_close(name, tensor, want[name], coarser, inner_products=name == "bias_scales")


def assert_same(got, want):
    for name, tensor in got.items():
        assert_bitwise(name, tensor, want[name])


@pytest.mark.parametrize("scales_dtype", DTYPES, ids=lambda dtype: f"{str(dtype)[6:]}-scales")
@by_dtype
@by_linear
def test_matches_reference(grouped_moe, device, linear, dtype, scales_dtype):
    tensors, offsets, dy = make_scaled(linear, dtype, device, scales_dtype)
    got = run(grouped_moe.grouped_linear, linear, tensors, offsets, dy)
    assert_matches(got, run_reference(grouped_moe, linear, tensors, offsets, dy), tensors, dtype)


@by_dtype
@by_linear
def test_what_is_not_of_a_group_is_not_read(grouped_moe, device, linear, dtype):
    tensors, offsets, dy = make_scaled(linear, dtype, device)
    want = run(grouped_moe.grouped_linear, linear, tensors, offsets, dy)
    rows, empty = torch.arange(len(dy), device=device), offsets.diff() == 0
    outside = (rows < offsets[0]) | (rows >= offsets[-1])
    assert not any(want[name][outside].any() for name in ("y", "x", "bias_scales"))
    for name, where in (("x", outside), ("bias_scales", outside), ("weight", empty), ("bias", empty)):
        tensors[name] = tensors[name].clone()
        tensors[name][where] = NAN
    dy = dy.masked_fill(outside[:, None], NAN)
    with poisoned_allocations():
        assert_same(run(grouped_moe.grouped_linear, linear, tensors, offsets, dy), want)


SUBSETS = [names for count in range(1, 4) for names in itertools.combinations(NAMES, count)]


@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_only_gradients_asked_for(grouped_moe, device, wanted):
    tensors, offsets, dy = make_scaled(LINEARS[1], torch.float32, device)
    full = run(grouped_moe.grouped_linear, LINEARS[1], tensors, offsets, dy)
    got = run(grouped_moe.grouped_linear, LINEARS[1], tensors, offsets, dy, wanted)
    assert all((got[name] is None) == (name not in wanted) for name in NAMES)
    assert_same({name: tensor for name, tensor in got.items() if tensor is not None}, full)


def test_scales_of_two_layers_get_both_gradients(grouped_moe, device):
    """One tensor of scales for two layers: the sum of what each gives alone."""
    tensors, offsets, dy = make_scaled(LINEARS[1], torch.float32, device)
    x, weight, bias, scales = tensors.values()
    other = torch.randn_like(bias)
    alone = [
        run(grouped_moe.grouped_linear, LINEARS[1], {**tensors, "bias": b}, offsets, dy)["bias_scales"]
        for b in (bias, other)
    ]
    leaf = scales.clone().requires_grad_()
    y = [grouped_moe.grouped_linear(x, weight, offsets, b, leaf) for b in (bias, other)]
    torch.autograd.backward(y, [dy, dy])
    torch.testing.assert_close(leaf.grad, alone[0] + alone[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["strided", "misaligned", "expanded"])
def test_layouts_of_scales(grouped_moe, device, layout):
    tensors, offsets, dy = make_scaled(LINEARS[1], torch.float32, device)
    scales = tensors["bias_scales"]
    if layout == "expanded":
        scales = tensors["bias_scales"] = scales[:1].expand(len(scales))
    changed = {"strided": torch.stack([scales, scales], 1)[:, 1], "misaligned": guarded(scales), "expanded": scales}
    got = run(grouped_moe.grouped_linear, LINEARS[1], {**tensors, "bias_scales": changed[layout]}, offsets, dy)
    assert_matches(got, run_reference(grouped_moe, LINEARS[1], tensors, offsets, dy), tensors, torch.float32)


@by_dtype
def test_splits_of_every_kind_agree(grouped_moe, device, dtype):
    linear = LINEARS[1]
    tensors, offsets, dy = make_scaled(linear, dtype, device)
    sizes, want = offsets.diff(), run(grouped_moe.grouped_linear, linear, tensors, offsets, dy)
    named = [grouped_moe.GroupOffsets(offsets), grouped_moe.GroupSizes(sizes), grouped_moe.GroupSizes(sizes.int())]
    strided = torch.stack([sizes, sizes], 1)[:, 0]
    for splits in (*named, sizes, sizes.int(), offsets.int(), strided, sizes.tolist(), tuple(sizes.tolist())):
        assert_same(run(grouped_moe.grouped_linear, linear, tensors, splits, dy), want)


@pytest.mark.parametrize(
    "sizes, right",
    [
        ((-3, 0, 19, 5), (0, 0, 19, 5)),
        ((7, 0, 100, 5), (7, 0, 30, 0)),
        ((2**63 - 1, 2**63 - 1, 1, 1), (37, 0, 0, 0)),
        ((3, 2**32, 4, 2**32 + 1), (3, 34, 0, 0)),
    ],
    ids=str,
)
def test_wrong_sizes_are_clamped(grouped_moe, device, sizes, right):
    """And NaN around the operands is never reached."""
    tensors, _, dy = make_scaled(LINEARS[1], torch.float32, device)
    tensors, dy = {name: guarded(tensor) for name, tensor in tensors.items()}, guarded(dy)
    got, want = (
        run(grouped_moe.grouped_linear, LINEARS[1], tensors, torch.tensor(s, device=device), dy) for s in (sizes, right)
    )
    assert all(bool(tensor.isfinite().all()) for tensor in got.values())
    assert_same(got, want)


def test_type_says_what_a_tensor_means(grouped_moe, device):
    """A tensor of the other length is refused, though it would pass by itself."""
    tensors, offsets, _ = make_scaled(LINEARS[1], torch.float32, device)
    x, weight, bias, scales = tensors.values()
    for wrong, message in (
        (grouped_moe.GroupSizes(offsets), r"^splits: expected shape \(G,\) = \(4\), got \(5,\)"),
        (grouped_moe.GroupOffsets(offsets.diff()), r"^splits: expected shape \(G \+ 1,\) = \(5\), got \(4,\)"),
        ([1, 2, 3], "^splits: expected 4 sizes, got 3"),
        ([2**63, 1, 1, 1], "^splits: expected sizes of at least 0 and together at most the 37 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_moe.grouped_linear(x, weight, wrong, bias, scales)
    for wrong in (1.0, True):
        with pytest.raises(TypeError, match="^splits: expected a list of ints"):
            grouped_moe.grouped_linear(x, weight, [wrong, 2, 3, 4], bias, scales)


def test_scales_need_a_bias(grouped_moe, device):
    tensors, offsets, _ = make_scaled(LINEARS[1], torch.float32, device)
    with pytest.raises(ValueError, match="^bias_scales: expected None without a bias"):
        grouped_moe.grouped_linear(tensors["x"], tensors["weight"], offsets, None, tensors["bias_scales"])
    with pytest.raises(ValueError, match=r"^bias_scales: expected shape \(rows,\) = \(37\), got \(36,\)"):
        grouped_moe.grouped_linear(
            tensors["x"], tensors["weight"], offsets, tensors["bias"], tensors["bias_scales"][:-1]
        )


@pytest.mark.parametrize("wanted, changed", [("weight", "weight"), ("bias", "weight"), ("x", "bias"), ("bias", "x")])
def test_what_the_backward_does_not_read_may_change(grouped_moe, device, wanted, changed):
    """In place, before it."""
    tensors, offsets, dy = make_scaled(LINEARS[1], torch.float32, device)
    leaves = {name: tensor.clone().requires_grad_(name == wanted) for name, tensor in tensors.items()}
    y = grouped_moe.grouped_linear(leaves["x"], leaves["weight"], offsets, leaves["bias"], leaves["bias_scales"])
    with torch.no_grad():
        leaves[changed].mul_(3)
    y.backward(dy)
    want = run(grouped_moe.grouped_linear, LINEARS[1], tensors, offsets, dy, (wanted,))
    assert_bitwise(wanted, leaves[wanted].grad, want[wanted])


@pytest.mark.parametrize("wanted, changed", [("x", "weight"), ("weight", "x"), ("bias_scales", "bias")])
def test_what_the_backward_reads_may_not_change(grouped_moe, device, wanted, changed):
    tensors, offsets, dy = make_scaled(LINEARS[1], torch.float32, device)
    leaves = {name: tensor.clone().requires_grad_(name == wanted) for name, tensor in tensors.items()}
    y = grouped_moe.grouped_linear(leaves["x"], leaves["weight"], offsets, leaves["bias"], leaves["bias_scales"])
    leaves[changed].mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_more_rows_than_int32_counts(grouped_moe, device):
    tensors, offsets, _ = make_scaled(LINEARS[1], torch.float32, device)
    x = tensors["x"][:1].expand(2**31, -1)
    with pytest.raises(ValueError, match="^x: expected fewer than 2\\^31 rows, got 2147483648$"):
        grouped_moe.grouped_linear(x, tensors["weight"], offsets)
