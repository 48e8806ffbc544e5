"""What grouped_linear and grouped_mlp have in common: rows of no group, splits, layouts, autocast, repeatability."""

import group_splits
import pytest
import torch
from compare import assert_bitwise, assert_same
from errors import raises
from linears import BY_LINEAR, LINEARS, SCALED
from marks import DTYPES, by_dtype, by_fp32_and_bf16
from mlps import BY_MLP, MLPS
from poison import LAYOUTS, dirty_allocator, poisoned_allocations
from sorted_rows import PER_ROW, SCALES, assert_matches, run, run_reference, with_leaves


def by_case(linears, mlps, marks=()):
    """Of these cases, given by id or as they are. marks: of those of grouped_linear."""
    cases = [pytest.param(BY_LINEAR.get(linear, linear), marks=marks) for linear in linears]
    cases += [BY_MLP.get(mlp, mlp) for mlp in mlps]
    return pytest.mark.parametrize("case", cases, ids=lambda case: f"{type(case).__name__}-{case.id}")


every = by_case(LINEARS + SCALED, MLPS)
some = by_case(
    ["transposed-bias", "transposed-bias-scales", "head-and-tail", "head-and-tail-scales", "tall"],
    ["two-scales", "gpt-oss", "relu2-not-gated"],
)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=lambda dtype: str(dtype)[6:])
@every
def test_matches_reference(grouped_moe, device, case, dtype):
    """fp64 on the CPU alone."""
    inputs = case.make(dtype, "cpu" if dtype == torch.float64 else device)
    assert_matches(run(grouped_moe, case, inputs), run_reference(grouped_moe, case, inputs), dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case", [BY_LINEAR["bias-scales"], BY_MLP["gpt-oss"]], ids=["linear", "mlp"])
def test_quick(grouped_moe, device, case):
    """One shape: on a GPU each one compiles its kernels."""
    inputs = case.make(torch.bfloat16, device)
    assert_matches(run(grouped_moe, case, inputs), run_reference(grouped_moe, case, inputs), torch.bfloat16)


@pytest.mark.parametrize("scales_dtype", DTYPES, ids=lambda dtype: f"{str(dtype)[6:]}-scales")
@by_dtype
@by_case(SCALED, ["gpt-oss", "same-scales"])
def test_scales_keep_their_dtype(grouped_moe, device, case, dtype, scales_dtype):
    inputs = case.make(dtype, device, scales_dtype)
    assert_matches(run(grouped_moe, case, inputs), run_reference(grouped_moe, case, inputs), dtype, scales_dtype)


@by_dtype
@every
def test_what_has_no_group_is_never_read(grouped_moe, device, case, dtype):
    """NaN in rows of no group, their scales and cotangents, groups without rows and fresh memory: the same bits."""
    inputs = case.make(dtype, device)
    want, poisoned = run(grouped_moe, case, inputs), inputs.poisoned()
    outside, empty = inputs.outside(), inputs.offsets.diff() == 0
    for name, tensor in want.items():
        assert not tensor[outside if name in ("y", *PER_ROW) else empty].any(), name
    with poisoned_allocations():
        assert_same(run(grouped_moe, case, poisoned), want)
    dirty_allocator(device)
    assert_same(run(grouped_moe, case, poisoned), want)


@by_case(["bias-scales"], ["two-scales"])
def test_nan_of_a_row_with_a_group_is_not_hidden(grouped_moe, device, case):
    inputs = case.make(torch.float32, device)
    for name, tensor in inputs.given().items():
        changed = tensor.clone()
        changed[0] = float("nan")
        y = case.call(grouped_moe, inputs.replace(**{name: changed}), inputs.offsets)
        assert y[0].isnan().all() and not y[case.sizes[0] :].isnan().any(), name


def expanded(tensor):
    """One number for all, with strides of 0, as `sum` and a scale common to all rows give."""
    return tensor[(slice(1),) * tensor.dim()].expand_as(tensor)


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), expanded], ids=[*LAYOUTS, "expanded"])
@by_fp32_and_bf16
@some
def test_strides(grouped_moe, device, case, layout, dtype):
    """Of all operands and of the cotangent; expanded ones are the cotangent and scales."""
    inputs = case.make(dtype, device)
    views = inputs.map(lambda name, tensor: tensor if layout is expanded and name not in SCALES else layout(tensor))
    views = views._replace(dy=layout(inputs.dy))
    assert_matches(run(grouped_moe, case, views), run_reference(grouped_moe, case, views), dtype)


@by_dtype
@by_case(["bias-scales", "plain"], ["two-scales", "gpt-oss", "relu2-not-gated", "no-rows", "one-group"])
def test_repeats_bitwise_whatever_the_splits(grouped_moe, device, case, dtype):
    inputs = case.make(dtype, device)
    first, sizes = run(grouped_moe, case, inputs), inputs.offsets.diff()
    for splits in [inputs.offsets] * 10 + [*group_splits.forms(grouped_moe, sizes).values()]:
        assert_same(run(grouped_moe, case, inputs, splits=splits), first)


@by_case(["bias-scales"], ["two-scales"])
def test_splits_of_another_type(grouped_moe, device, case):
    """Whose type says what they mean: the other length is refused, which else would pass, and so is a list."""
    inputs = case.make(torch.float32, device)
    for splits, error, message in (
        (grouped_moe.GroupSizes(inputs.offsets), ValueError, r"\(G,\) = \(4,\), got \(5,\)"),
        (grouped_moe.GroupOffsets(inputs.offsets.diff()), ValueError, r"\(G \+ 1,\) = \(5,\), got \(4,"),
        (grouped_moe.GroupSizes([*case.sizes]), TypeError, ""),
    ):
        raises(error, f"^splits: .*{message}", case.call, grouped_moe, inputs, splits)


PAIRS = [(case, d) for case in (BY_LINEAR["bias"], BY_LINEAR["bias-scales"], BY_MLP["two-scales"]) for d in DTYPES]
QUICK = pytest.param(*PAIRS[0], marks=pytest.mark.kernels_ci)


@pytest.mark.parametrize("kind", group_splits.WRONG)
@pytest.mark.parametrize("case, dtype", [QUICK, *PAIRS[1:]], ids=lambda value: getattr(value, "id", str(value)))
def test_wrong_splits_are_clamped(grouped_moe, device, case, dtype, kind):
    """And what surrounds the tensors in memory, NaN here, is never reached."""
    inputs = case.make(dtype, device).guarded()
    wrong = torch.tensor(group_splits.WRONG[kind], device=device)
    right = torch.tensor(group_splits.clamped(group_splits.WRONG[kind], len(inputs.dy)), device=device)
    want = run(grouped_moe, case, inputs, splits=right)
    assert all(bool(tensor.isfinite().all()) for tensor in want.values())
    for splits in (wrong, wrong.int()) if torch.equal(wrong.int(), wrong) else (wrong,):
        assert_same(run(grouped_moe, case, inputs, splits=splits), want)


RECOMPUTE = BY_MLP["two-scales"]._replace(id="two-scales-recompute")
RECOMPUTE = RECOMPUTE._replace(kind=RECOMPUTE.case._replace(recompute=True))


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16], ids=["fp32-scales", "bf16-scales"])
@by_case(["bias-scales"], ["two-scales", RECOMPUTE], marks=pytest.mark.kernels_ci)
def test_autocast(grouped_moe, device, case, scales_dtype):
    """As `F.linear`: fp32 operands are cast, gradients come back in fp32; scales and fp64 are left alone."""
    inputs = case.make(torch.float32, device, scales_dtype)
    cast = inputs.map(lambda name, tensor: tensor if name in SCALES else tensor.bfloat16())
    want, leaves = run(grouped_moe, case, cast._replace(dy=inputs.dy.bfloat16())), with_leaves(inputs)
    with torch.autocast(device, torch.bfloat16):
        y = case.call(grouped_moe, leaves, grouped_moe.GroupOffsets(inputs.offsets))
    y.backward(inputs.dy.bfloat16())
    assert_bitwise("y", y.detach(), want["y"])
    for name, leaf in leaves.given().items():
        assert_bitwise(name, leaf.grad, want[name].to(leaf.dtype))
    inputs = case.make(torch.float64, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert case.call(grouped_moe, inputs, inputs.offsets).dtype == torch.float64
