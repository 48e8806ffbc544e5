"""grouped_linear and grouped_mlp: rows of no group, splits, layouts, autocast, which gradients, repeatability."""

import itertools

import group_splits
import pytest
import torch
from cases import BY_ID
from compare import assert_bitwise, assert_close, assert_part, assert_same
from errors import raises
from linears import BY_LINEAR, LINEARS, SCALED, Linear
from marks import DTYPES, by_dtype, by_fp32_and_bf16, by_recompute
from mlps import BY_MLP, MLPS, NAMES, PER_GROUP, Mlp
from operations import record
from poison import LAYOUTS, dirty_allocator, poisoned_allocations
from sorted_rows import PER_ROW, SCALES, check, run, run_reference, with_leaves


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
    check(grouped_moe, case, case.make(dtype, "cpu" if dtype == torch.float64 else device))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case", [BY_LINEAR["bias-scales"], BY_MLP["gpt-oss"]], ids=["linear", "mlp"])
def test_quick(grouped_moe, device, case):
    """One shape: on a GPU each one compiles its kernels."""
    check(grouped_moe, case, case.make(torch.bfloat16, device))


@pytest.mark.parametrize("scales_dtype", DTYPES, ids=lambda dtype: f"{str(dtype)[6:]}-scales")
@by_dtype
@by_case(SCALED, ["gpt-oss", "same-scales"])
def test_scales_keep_their_dtype(grouped_moe, device, case, dtype, scales_dtype):
    check(grouped_moe, case, case.make(dtype, device, scales_dtype))


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
    check(grouped_moe, case, views._replace(dy=layout(inputs.dy)))


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


KINDS = ("silu-bias", "gpt-oss", "gelu-not-gated", "relu2-not-gated")
SMALL = [
    *(Linear("small", (2, 0, 3), 2, 1, 3, 4, transposed, *flags)
      for transposed in (False, True) for flags in ((False, False), (True, False), (True, True))),
    *(Mlp("small", BY_ID[kind]._replace(H=4, I=3), scales, sizes=(2, 0, 3), tail=2, head=1)
      for kind in KINDS for scales in ("two", "same")),
]  # fmt: skip


@pytest.mark.parametrize("case", SMALL, ids=lambda case: type(case).__name__)
def test_gradcheck(grouped_moe, case):
    """Finite differences in fp64, independent of the reference's autograd."""
    inputs = with_leaves(case.make(torch.float64, "cpu"))

    def function(*leaves):
        changed = dict(zip(inputs.given(), leaves))
        return case.call(grouped_moe, inputs.map(lambda name, _: changed[name]), inputs.offsets)

    assert torch.autograd.gradcheck(function, list(inputs.given().values()))


def subsets(names):
    """Of the operands, those that want a gradient."""
    return [chosen for count in range(1, len(names)) for chosen in itertools.combinations(names, count)]


OPERANDS = ("x", "weight", "bias", "bias_scales")


@by_fp32_and_bf16
@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed-apart", "guarded"])
@pytest.mark.parametrize("names", [OPERANDS[:2], OPERANDS[:3], OPERANDS], ids=["no bias", "bias", "scales"])
def test_every_combination_of_linear_operands(grouped_moe, device, names, layout, transposed, dtype):
    """Of operands, those that want a gradient, layouts of the weight: next to NaN wherever nothing must be read."""
    linear = Linear("all", head=3, transposed=transposed, bias=True, scales=True)
    inputs = linear.make(dtype, device, torch.float32)
    inputs = inputs.replace(**{name: None for name in OPERANDS if name not in names})
    poisoned = inputs.poisoned()
    if layout in LAYOUTS:
        poisoned = poisoned.replace(weight=LAYOUTS[layout](poisoned.tensors["weight"]))
    with poisoned_allocations():
        full = check(grouped_moe, linear, inputs, poisoned)
        for wanted in subsets(names):
            assert_part(run(grouped_moe, linear, poisoned, frozen=set(names) - set(wanted)), full)


SCALED_BIAS = BY_LINEAR["bias-scales"]


@pytest.mark.parametrize("wanted, changed, read", [
    ("weight", "weight", False), ("bias", "weight", False), ("x", "bias", False), ("bias", "x", False),
    ("x", "weight", True), ("weight", "x", True), ("bias_scales", "bias", True),
])  # fmt: skip
def test_what_the_backward_does_not_read_may_change(grouped_moe, device, wanted, changed, read):
    """In place, before it. What it reads may not."""
    inputs, frozen = SCALED_BIAS.make(torch.float32, device), set(OPERANDS) - {wanted}
    leaves = inputs.map(lambda name, tensor: tensor.clone().requires_grad_(name == wanted))
    y = SCALED_BIAS.call(grouped_moe, leaves, inputs.offsets)
    with torch.no_grad():
        leaves.tensors[changed].mul_(3)
    if read:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(inputs.dy)
    else:
        y.backward(inputs.dy)
        assert_bitwise(wanted, leaves.tensors[wanted].grad, run(grouped_moe, SCALED_BIAS, inputs, frozen)[wanted])


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


@by_recompute
@pytest.mark.parametrize("name", SCALES)
def test_scales_are_not_rounded(grouped_moe, device, name, recompute):
    """Neither an fp32 scale nor its gradient passes through the bf16 of the operands."""
    mlp = BY_MLP["two-scales"]
    inputs = mlp.make(torch.bfloat16, device, torch.float32)
    rounded = inputs.replace(**{name: inputs.tensors[name].bfloat16().float()})
    got, other = (run(grouped_moe, mlp, given, recompute=recompute) for given in (inputs, rounded))
    assert not torch.equal(got["y"], other["y"])
    assert not torch.equal(got[name], got[name].bfloat16().float())
    if name == "bias_scales":
        want = run_reference(grouped_moe, mlp, inputs)[name]
        assert_close(name, got[name], want, torch.float32, inner_products=True)


def test_scales_of_two_dtypes(grouped_moe, device):
    inputs = BY_MLP["two-scales"].make(torch.bfloat16, device)
    wide = inputs.replace(bias_scales=inputs.tensors["bias_scales"].float())
    got, same = run(grouped_moe, BY_MLP["two-scales"], wide), run(grouped_moe, BY_MLP["two-scales"], inputs)
    assert got["bias_scales"].dtype == torch.float32
    assert_bitwise("bias_scales", got["bias_scales"].bfloat16(), same["bias_scales"])
    assert_same({**got, "bias_scales": same["bias_scales"]}, same)


@by_recompute
def test_one_tensor_twice_gets_the_sum(grouped_moe, device, recompute):
    """Of what two tensors of its values get, each for its own use; neither gradient goes to the other one."""
    same = BY_MLP["same-scales"].make(torch.float32, device)
    two = same.replace(bias_scales=same.tensors["bias_scales"].clone())
    once = run(grouped_moe, BY_MLP["same-scales"], same, recompute=recompute)
    apart = run(grouped_moe, BY_MLP["two-scales"], two, recompute=recompute)
    want = apart["activation_scales"].double() + apart.pop("bias_scales").double()
    assert_close("sum", once.pop("activation_scales"), want, torch.float32, inner_products=True)
    assert apart.pop("activation_scales").any()
    assert_same(once, apart)


FROZEN = [tuple(name for name in NAMES if name != only) for only in NAMES] + [(name,) for name in NAMES]
FROZEN += [SCALES, PER_GROUP, PER_GROUP[:2], PER_GROUP[2:], ("x", "gate_up_proj"), ("down_proj", "activation_scales")]


@by_recompute
@pytest.mark.parametrize("frozen", FROZEN, ids="-".join)
def test_only_gradients_asked_for(grouped_moe, device, frozen, recompute):
    """A gradient does not depend on which others are asked for; what is frozen gets none."""
    mlp = BY_MLP["gpt-oss"]
    inputs = mlp.make(torch.float32, device)
    want = run(grouped_moe, mlp, inputs, recompute=recompute)
    got = run(grouped_moe, mlp, inputs, frozen=frozen, recompute=recompute)
    assert want.keys() - got.keys() == set(frozen)
    assert_part(got, want)


by_some_mlps = pytest.mark.parametrize("mlp", [BY_MLP[name] for name in ("two-scales", "gpt-oss", "relu2-not-gated")])


@by_dtype
@by_some_mlps
def test_recompute_changes_nothing(grouped_moe, device, mlp, dtype):
    inputs = mlp.make(dtype, device)
    assert_same(run(grouped_moe, mlp, inputs, recompute=True), run(grouped_moe, mlp, inputs, recompute=False))


@by_some_mlps
def test_recompute_saves_inputs_alone(grouped_moe, device, mlp):
    inputs = with_leaves(mlp.make(torch.float32, device))
    _, saved = record(lambda: mlp.call(grouped_moe, inputs, inputs.offsets, recompute=True))
    given = {tensor.data_ptr() for tensor in inputs.given().values()}
    assert not [t.shape for t in saved if t.data_ptr() not in given and t.is_floating_point() and t.numel()]
