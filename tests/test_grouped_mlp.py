"""grouped_mlp: output and every gradient, each scale's own among them, against the reference in fp64; its errors."""

import group_splits
import pytest
import torch
from cases import BY_ID
from compare import assert_bitwise, assert_close
from mlps import (
    BY_MLP,
    MLPS,
    NAMES,
    PER_GROUP,
    PER_ROW,
    SCALES,
    Mlp,
    assert_matches,
    assert_same,
    call,
    make,
    run,
    run_reference,
    with_leaves,
)
from poison import dirty_allocator, guarded, poisoned_allocations
from test_errors import raises

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

by_mlp = pytest.mark.parametrize("mlp", MLPS, ids=lambda mlp: mlp.id)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
by_recompute = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
SOME = [BY_MLP[name] for name in ("two-scales", "gpt-oss", "relu2-not-gated")]
some = pytest.mark.parametrize("mlp", SOME, ids=lambda mlp: mlp.id)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=lambda dtype: str(dtype)[6:])
@by_mlp
def test_matches_reference(grouped_moe, device, mlp, dtype):
    """fp64 on the CPU alone."""
    inputs = make(mlp, dtype, "cpu" if dtype == torch.float64 else device)
    assert_matches(run(grouped_moe, mlp, inputs), run_reference(grouped_moe, mlp, inputs), dtype)


@pytest.mark.kernels_ci
def test_quick(grouped_moe, device):
    """One shape: on a GPU each one compiles its kernels."""
    mlp = BY_MLP["gpt-oss"]
    inputs = make(mlp, torch.bfloat16, device)
    assert_matches(run(grouped_moe, mlp, inputs), run_reference(grouped_moe, mlp, inputs), torch.bfloat16)


@pytest.mark.parametrize("scales", ["two", "same"])
@pytest.mark.parametrize("kind", ["silu-bias", "gpt-oss", "gelu-not-gated", "relu2-not-gated"])
def test_gradcheck(grouped_moe, kind, scales):
    """Finite differences in fp64, independent of the reference's autograd."""
    mlp = Mlp("gradcheck", BY_ID[kind]._replace(H=4, I=3), scales, sizes=(2, 0, 3), tail=2, head=1)
    inputs = with_leaves(make(mlp, torch.float64, "cpu"))

    def function(*leaves):
        changed = dict(zip(inputs.given(), leaves))
        return call(grouped_moe, mlp, inputs.map(lambda name, _: changed[name]))

    assert torch.autograd.gradcheck(function, list(inputs.given().values()))


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16], ids=["fp32-scales", "bf16-scales"])
@pytest.mark.parametrize("mlp", [BY_MLP["gpt-oss"], BY_MLP["same-scales"]], ids=lambda mlp: mlp.id)
@by_dtype
def test_scales_keep_their_dtype(grouped_moe, device, mlp, dtype, scales_dtype):
    inputs = make(mlp, dtype, device, scales_dtype)
    assert_matches(run(grouped_moe, mlp, inputs), run_reference(grouped_moe, mlp, inputs), dtype, scales_dtype)


@by_recompute
@pytest.mark.parametrize("name", SCALES)
def test_scales_are_not_rounded(grouped_moe, device, name, recompute):
    """Neither an fp32 scale nor its gradient passes through the bf16 of the operands."""
    mlp = BY_MLP["two-scales"]
    inputs = make(mlp, torch.bfloat16, device, torch.float32)
    rounded = inputs.replace(**{name: inputs.tensors[name].bfloat16().float()})
    got, other = (run(grouped_moe, mlp, given, recompute=recompute) for given in (inputs, rounded))
    assert not torch.equal(got["y"], other["y"])
    assert not torch.equal(got[name], got[name].bfloat16().float())
    if name == "bias_scales":
        want = run_reference(grouped_moe, mlp, inputs)[name]
        assert_close(name, got[name], want, torch.float32, inner_products=True)


def test_scales_of_two_dtypes(grouped_moe, device):
    inputs = make(BY_MLP["two-scales"], torch.bfloat16, device)
    wide = inputs.replace(bias_scales=inputs.tensors["bias_scales"].float())
    got, same = run(grouped_moe, BY_MLP["two-scales"], wide), run(grouped_moe, BY_MLP["two-scales"], inputs)
    assert got["bias_scales"].dtype == torch.float32
    assert_bitwise("bias_scales", got["bias_scales"].bfloat16(), same["bias_scales"])
    assert_same({**got, "bias_scales": same["bias_scales"]}, same)


@by_recompute
def test_one_tensor_twice_gets_the_sum(grouped_moe, device, recompute):
    """Of what two tensors of its values get, each for its own use; neither gradient goes to the other one."""
    same = make(BY_MLP["same-scales"], torch.float32, device)
    two = same.replace(bias_scales=same.tensors["bias_scales"].clone())
    once = run(grouped_moe, BY_MLP["same-scales"], same, recompute=recompute)
    apart = run(grouped_moe, BY_MLP["two-scales"], two, recompute=recompute)
    want = apart["activation_scales"].double() + apart.pop("bias_scales").double()
    assert_close("sum", once.pop("activation_scales"), want, torch.float32, inner_products=True)
    assert apart.pop("activation_scales").any()
    assert_same(once, apart)


def test_scales_of_a_router(grouped_moe, device):
    """Scales that are views of a non-leaf, as a router makes them: the gradient reaches the logits."""
    mlp = BY_MLP["two-scales"]
    inputs = make(mlp, torch.float32, device)

    def logits_grad(function, tensors, dtype):
        logits = torch.linspace(-2, 2, 2 * mlp.rows, device=device, dtype=dtype).view(mlp.rows, 2).requires_grad_()
        first, second = logits.softmax(1).unbind(1)
        function(tensors.replace(activation_scales=first, bias_scales=second)).backward(inputs.dy.to(dtype))
        return logits.grad

    reference = grouped_moe.reference.grouped_mlp
    got = logits_grad(lambda given: call(grouped_moe, mlp, given), inputs, torch.float32)
    wide = inputs.map(lambda _, tensor: tensor.double())
    want = logits_grad(lambda given: reference(group_offsets=inputs.offsets, **given.tensors), wide, torch.float64)
    assert_close("logits", got, want, torch.float32, inner_products=True)


FROZEN = [tuple(name for name in NAMES if name != only) for only in NAMES] + [(name,) for name in NAMES]
FROZEN += [SCALES, PER_GROUP, PER_GROUP[:2], PER_GROUP[2:], ("x", "gate_up_proj"), ("down_proj", "activation_scales")]


@by_recompute
@pytest.mark.parametrize("frozen", FROZEN, ids="-".join)
def test_only_gradients_asked_for(grouped_moe, device, frozen, recompute):
    """A gradient does not depend on which others are asked for; what is frozen gets none."""
    mlp = BY_MLP["gpt-oss"]
    inputs = make(mlp, torch.float32, device)
    want = run(grouped_moe, mlp, inputs, recompute=recompute)
    got = run(grouped_moe, mlp, inputs, frozen=frozen, recompute=recompute)
    assert all(got.pop(name) is None and want.pop(name) is not None for name in frozen)
    assert_same(got, want)


@some
def test_no_gradient_asked_for(grouped_moe, device, mlp):
    inputs = make(mlp, torch.float32, device)
    y = call(grouped_moe, mlp, inputs)
    with torch.no_grad():
        without = call(grouped_moe, mlp, with_leaves(inputs))
    assert not y.requires_grad and not without.requires_grad
    assert_bitwise("y", without, y)
    assert_bitwise("y", call(grouped_moe, mlp, with_leaves(inputs)).detach(), y)


@by_dtype
@by_mlp
def test_what_has_no_group_is_never_read(grouped_moe, device, mlp, dtype):
    """NaN in rows of no group, their scales and cotangents, groups without rows and fresh memory: the same bits."""
    inputs = make(mlp, dtype, device)
    want = run(grouped_moe, mlp, inputs)
    rows, empty = torch.arange(mlp.rows, device=device), inputs.offsets.diff() == 0
    outside = (rows < inputs.offsets[0]) | (rows >= inputs.offsets[-1])
    for name, tensor in want.items():
        assert not tensor[empty if name in PER_GROUP else outside].any(), name

    def poison(name, tensor):
        tensor = tensor.clone()
        tensor[outside if name in PER_ROW else empty] = NAN
        return tensor

    poisoned = inputs.map(poison)._replace(dy=poison("x", inputs.dy))
    with poisoned_allocations():
        assert_same(run(grouped_moe, mlp, poisoned), want)
    dirty_allocator(device)
    assert_same(run(grouped_moe, mlp, poisoned), want)


@pytest.mark.parametrize("name", NAMES)
def test_nan_of_a_row_with_a_group_is_not_hidden(grouped_moe, device, name):
    mlp = BY_MLP["two-scales"]
    inputs = make(mlp, torch.float32, device)
    tensor = inputs.tensors[name].clone()
    tensor[0] = NAN
    y = call(grouped_moe, mlp, inputs.replace(**{name: tensor}))
    assert y[0].isnan().all() and not y[mlp.sizes[0] :].isnan().any()


@by_dtype
@some
def test_recompute_changes_nothing(grouped_moe, device, mlp, dtype):
    inputs = make(mlp, dtype, device)
    assert_same(run(grouped_moe, mlp, inputs, recompute=True), run(grouped_moe, mlp, inputs, recompute=False))


@some
def test_recompute_saves_inputs_alone(grouped_moe, device, mlp):
    inputs, saved = with_leaves(make(mlp, torch.float32, device)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call(grouped_moe, mlp, inputs, recompute=True)
    given = {tensor.data_ptr() for tensor in inputs.given().values()}
    assert not [t.shape for t in saved if t.data_ptr() not in given and t.is_floating_point() and t.numel()]


def every_second(tensor):
    """A view of rows, and of columns where there are any, with NaN in between."""
    wide = tensor.new_full((*tensor.shape, 2), NAN).transpose(0, -1).contiguous().transpose(0, -1)
    wide[..., 1] = tensor
    return wide[..., 1]


def transposed(tensor):
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(tensor):
    """One number for all, with strides of 0, as `sum` and a scale common to all rows give."""
    return tensor[(slice(1),) * tensor.dim()].expand_as(tensor)


@pytest.mark.parametrize("layout", [every_second, transposed, guarded, expanded])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
@some
def test_strides(grouped_moe, device, mlp, layout, dtype):
    """Of all operands and of the cotangent; expanded ones are the cotangent and scales."""
    inputs = make(mlp, dtype, device)
    changed = SCALES if layout is expanded else NAMES
    views = inputs.map(lambda name, tensor: layout(tensor) if name in changed else tensor)
    views = views._replace(dy=layout(inputs.dy))
    assert_matches(run(grouped_moe, mlp, views), run_reference(grouped_moe, mlp, views), dtype)


@by_dtype
@pytest.mark.parametrize("mlp", [*SOME, BY_MLP["no-rows"], BY_MLP["one-group"]], ids=lambda mlp: mlp.id)
def test_repeats_bitwise_whatever_the_splits(grouped_moe, device, mlp, dtype):
    inputs = make(mlp, dtype, device)
    first = run(grouped_moe, mlp, inputs)
    for splits in [inputs.offsets] * 10 + [*group_splits.forms(grouped_moe, inputs.offsets.diff()).values()]:
        assert_same(run(grouped_moe, mlp, inputs, splits=splits), first)


@by_recompute
def test_gradients_accumulate_and_inputs_stay(grouped_moe, device, recompute):
    mlp = BY_MLP["same-scales"]
    inputs = with_leaves(make(mlp, torch.float32, device))
    before = {name: tensor.detach().clone() for name, tensor in inputs.given().items()}
    once = run(grouped_moe, mlp, inputs, recompute=recompute)
    for _ in range(2):
        call(grouped_moe, mlp, inputs, recompute=recompute).backward(inputs.dy)
    for name, tensor in inputs.given().items():
        assert_bitwise(name, tensor.grad, 2 * once[name])
        assert_bitwise(name, tensor.detach(), before[name])


@pytest.mark.parametrize("kind", group_splits.WRONG)
def test_wrong_splits_are_clamped(grouped_moe, device, kind):
    """And what surrounds the tensors in memory, NaN here, is never reached."""
    mlp, wrong = BY_MLP["two-scales"], group_splits.WRONG[kind]
    inputs = make(mlp, torch.float32, device)
    inputs = inputs.map(lambda _, tensor: guarded(tensor))._replace(dy=guarded(inputs.dy))
    right = torch.tensor(group_splits.clamped(wrong, mlp.rows), device=device)
    want = run(grouped_moe, mlp, inputs, splits=right)
    assert all(bool(tensor.isfinite().all()) for tensor in want.values())
    assert_same(run(grouped_moe, mlp, inputs, splits=torch.tensor(wrong, device=device)), want)


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16], ids=["fp32-scales", "bf16-scales"])
@by_recompute
def test_autocast(grouped_moe, device, recompute, scales_dtype):
    """As `F.linear`: fp32 operands are cast, gradients come back in fp32; scales are left alone."""
    mlp = BY_MLP["two-scales"]
    inputs = make(mlp, torch.float32, device, scales_dtype)
    cast = inputs.map(lambda name, tensor: tensor if name in SCALES else tensor.bfloat16())
    cast = cast._replace(dy=inputs.dy.bfloat16())
    want, leaves = run(grouped_moe, mlp, cast, recompute=recompute), with_leaves(inputs)
    with torch.autocast(device, torch.bfloat16):
        y = call(grouped_moe, mlp, leaves, recompute=recompute)
    y.backward(cast.dy)
    assert_bitwise("y", y.detach(), want["y"])
    for name, leaf in leaves.given().items():
        assert_bitwise(name, leaf.grad, want[name].to(leaf.dtype))


ROWS, G, H, I = 10, 3, 8, 6  # noqa: E741


def arguments(device):
    """Valid arguments by name."""
    shapes = {"x": (ROWS, H), "activation_scales": (ROWS,), "bias_scales": (ROWS,), "gate_up_proj": (G, 2 * I, H)}
    shapes.update(down_proj=(G, H, I), gate_up_proj_bias=(G, 2 * I), down_proj_bias=(G, H))
    given = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    return {**given, "splits": torch.tensor([2, 3, 4], device=device)}


BAD_SCALES = [(ROWS + 1,), (ROWS - 1,), (ROWS, 1), (1,), ()]
BAD_SHAPES = {
    "x": [(H,), (1, ROWS, H)],
    "activation_scales": BAD_SCALES,
    "bias_scales": BAD_SCALES,
    "gate_up_proj": [(2 * I, H), (G, 2 * I - 1, H), (G, 2 * I, H + 1), (0, 2 * I, H), (1025, 2 * I, H)],
    "down_proj": [(H, I), (G + 1, H, I), (G, H, I + 1), (G, H + 1, I), (G, I, H)],
    "gate_up_proj_bias": [(2 * I,), (G, I), (G + 1, 2 * I)],
    "down_proj_bias": [(H,), (G, I), (G + 1, H)],
}


@pytest.mark.parametrize("name", NAMES)
def test_wrong_tensors(grouped_moe, device, name):
    """Of another shape, type, dtype or on another device."""
    given = arguments(device)
    wrong = [(ValueError, torch.zeros(shape, device=device)) for shape in BAD_SHAPES[name]]
    wrong += [(TypeError, value) for value in (1.0, [1.0], given[name].long())]
    wrong += [(TypeError, given[name].half())] if name in PER_GROUP else []
    wrong += [(ValueError, given[name].to("meta"))] if name != "x" else []
    for error, value in wrong:
        raises(error, f"^{name}: .*got ", grouped_moe.grouped_mlp, **{**given, name: value})


def test_wrong_splits_and_flags(grouped_moe, device):
    given = arguments(device)
    sizes = given["splits"]
    wrong = (
        (ValueError, torch.cat([sizes, sizes])[: G + 2]),
        (ValueError, sizes[:-1]),
        (ValueError, sizes[None]),
        (TypeError, sizes.float()),
        (TypeError, sizes.short()),
        (TypeError, None),
        (ValueError, [2, 3, 4, 1]),
        (ValueError, [2, ROWS - 4, 3]),
        (ValueError, [2, -1, 4]),
        (TypeError, [2.0, 3.0, 4.0]),
        (ValueError, grouped_moe.GroupOffsets(sizes)),
        (ValueError, grouped_moe.GroupSizes(sizes.new_zeros(G + 1))),
        (TypeError, grouped_moe.GroupSizes([2, 3, 4])),
        (ValueError, sizes.to("meta")),
    )
    for error, splits in wrong:
        raises(error, "^splits: ", grouped_moe.grouped_mlp, **{**given, "splits": splits})
    without = {"down_proj_bias": None, "gate_up_proj_bias": None}
    raises(ValueError, "^bias_scales: ", grouped_moe.grouped_mlp, **{**given, **without})
    raises(ValueError, "^gated: ", grouped_moe.grouped_mlp, **given, gated=False, interleaved=True)
    raises(ValueError, "^activation: ", grouped_moe.grouped_mlp, **given, activation="mish")
