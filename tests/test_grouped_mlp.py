"""grouped_mlp: output and every gradient, each scale's own among them, against the reference in fp64; its errors."""

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


@by_dtype
@by_mlp
def test_matches_reference(grouped_moe, device, mlp, dtype):
    inputs = make(mlp, dtype, device)
    assert_matches(run(grouped_moe, mlp, inputs), run_reference(grouped_moe, mlp, inputs), dtype)


@pytest.mark.kernels_ci
def test_quick(grouped_moe, device):
    """One shape: on a GPU each one compiles its kernels."""
    mlp = BY_MLP["gpt-oss"]
    inputs = make(mlp, torch.bfloat16, device)
    assert_matches(run(grouped_moe, mlp, inputs), run_reference(grouped_moe, mlp, inputs), torch.bfloat16)


@by_mlp
def test_fp64_on_cpu_matches_reference(grouped_moe, mlp):
    inputs = make(mlp, torch.float64, "cpu")
    assert_matches(run(grouped_moe, mlp, inputs), run_reference(grouped_moe, mlp, inputs), torch.float64)


@pytest.mark.parametrize("scales", ["two", "same"])
@pytest.mark.parametrize("kind", ["silu-bias", "gpt-oss", "gelu-not-gated", "relu2-not-gated"])
def test_gradcheck(grouped_moe, kind, scales, monkeypatch):
    """Finite differences in fp64, independent of the reference's autograd."""
    monkeypatch.setitem(BY_ID, kind, BY_ID[kind]._replace(H=4, I=3))
    mlp = Mlp("gradcheck", kind, scales, sizes=(2, 0, 3), tail=2, head=1)
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


def _every_second(tensor):
    """A view of rows, and of columns where there are any, with NaN in between."""
    wide = tensor.new_full((*tensor.shape, 2), NAN).transpose(0, -1).contiguous().transpose(0, -1)
    wide[..., 1] = tensor
    return wide[..., 1]


def _transposed(tensor):
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("layout", [_every_second, _transposed, guarded], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
@some
def test_strides(grouped_moe, device, mlp, layout, dtype):
    inputs = make(mlp, dtype, device)
    views = inputs.map(lambda _, tensor: layout(tensor))._replace(dy=layout(inputs.dy))
    assert_matches(run(grouped_moe, mlp, views), run_reference(grouped_moe, mlp, inputs), dtype)


@some
def test_expanded_cotangent_and_scales(grouped_moe, device, mlp):
    """Strides of 0, which `sum` and a scale common to all rows give."""
    inputs = make(mlp, torch.float32, device)
    scales = {name: inputs.tensors[name][:1].expand(mlp.rows) for name in SCALES}
    inputs = inputs.replace(**scales)._replace(dy=inputs.dy[:1, :1].expand_as(inputs.dy))
    assert_matches(run(grouped_moe, mlp, inputs), run_reference(grouped_moe, mlp, inputs), torch.float32)


@by_dtype
@some
def test_repeats_bitwise(grouped_moe, device, mlp, dtype):
    inputs = make(mlp, dtype, device)
    first = run(grouped_moe, mlp, inputs)
    for _ in range(10):
        assert_same(run(grouped_moe, mlp, inputs), first)


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


SPLITS = {
    "sizes": lambda package, sizes, offsets: package.GroupSizes(sizes),
    "offsets-int32": lambda package, sizes, offsets: package.GroupOffsets(offsets.int()),
    "bare-sizes": lambda package, sizes, offsets: sizes,
    "bare-sizes-int32": lambda package, sizes, offsets: sizes.int(),
    "bare-offsets": lambda package, sizes, offsets: offsets,
    "strided-sizes": lambda package, sizes, offsets: sizes.repeat_interleave(2)[::2],
    "list": lambda package, sizes, offsets: sizes.tolist(),
    "tuple": lambda package, sizes, offsets: tuple(sizes.tolist()),
}


@pytest.mark.parametrize("form", SPLITS)
@pytest.mark.parametrize("mlp", [BY_MLP[i] for i in ("two-scales", "no-rows", "one-group")], ids=lambda mlp: mlp.id)
def test_splits_agree(grouped_moe, device, mlp, form):
    inputs = make(mlp, torch.float32, device)
    splits = SPLITS[form](grouped_moe, inputs.offsets.diff(), inputs.offsets)
    assert_same(run(grouped_moe, mlp, inputs, splits=splits), run(grouped_moe, mlp, inputs))


WRONG_SIZES = {  # wrong sizes: as if they were these. There are 37 rows.
    (7, -3, 19, 5): (7, 0, 19, 5),
    (-(2**63), 7, -1, 19): (0, 7, 0, 19),
    (7, 0, 100, 5): (7, 0, 30, 0),
    (2**63 - 1, 2**63 - 1, 2**63 - 1, 5): (37, 0, 0, 0),
    (2**62, 2**62, 2**62, 2**62): (37, 0, 0, 0),
    (3, 2**32, 4, 2**32 + 1): (3, 34, 0, 0),
}
WRONG_OFFSETS = {
    (0, 20, 5, 30, 12): (0, 20, 20, 30, 30),
    (-9, -1, 7, -30, 20): (0, 0, 7, 7, 20),
    (9, 12, 20, 20, 1000): (9, 12, 20, 20, 37),
    (-(2**63), 2**32 + 3, 2**63 - 1, -(2**63), 2**63 - 1): (0, 37, 37, 37, 37),
}


@pytest.mark.parametrize("wrong, right", [*WRONG_SIZES.items(), *WRONG_OFFSETS.items()])
def test_wrong_splits_are_clamped(grouped_moe, device, wrong, right):
    """And what surrounds the tensors in memory, NaN here, is never reached."""
    mlp = BY_MLP["two-scales"]
    inputs = make(mlp, torch.float32, device)
    inputs = inputs.map(lambda _, tensor: guarded(tensor))._replace(dy=guarded(inputs.dy))
    got = run(grouped_moe, mlp, inputs, splits=torch.tensor(wrong, device=device))
    assert all(bool(tensor.isfinite().all()) for tensor in got.values())
    assert_same(got, run(grouped_moe, mlp, inputs, splits=torch.tensor(right, device=device)))


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


BAD_SHAPES = [
    *(("x", shape) for shape in ((H,), (1, ROWS, H))),
    *((name, shape) for name in SCALES for shape in ((ROWS + 1,), (ROWS - 1,), (ROWS, 1), (1,), ())),
    *(("gate_up_proj", shape) for shape in ((2 * I, H), (G, 2 * I - 1, H), (G, 2 * I, H + 1), (0, 2 * I, H))),
    *(("gate_up_proj", (1025, 2 * I, H)), ("down_proj", (H, I)), ("down_proj", (G + 1, H, I))),
    *(("down_proj", shape) for shape in ((G, H, I + 1), (G, H + 1, I), (G, I, H))),
    *(("gate_up_proj_bias", (2 * I,)), ("gate_up_proj_bias", (G, I)), ("gate_up_proj_bias", (G + 1, 2 * I))),
    *(("down_proj_bias", (H,)), ("down_proj_bias", (G, I)), ("down_proj_bias", (G + 1, H))),
]


@pytest.mark.parametrize("name, shape", BAD_SHAPES)
def test_error_of_shape(grouped_moe, device, name, shape):
    given = {**arguments(device), name: torch.zeros(shape, device=device)}
    raises(ValueError, f"^{name}: .*got ", grouped_moe.grouped_mlp, **given)


@pytest.mark.parametrize("name", NAMES)
def test_error_of_type_dtype_and_device(grouped_moe, device, name):
    for value in (1.0, [1.0]):
        raises(TypeError, f"^{name}: .*got ", grouped_moe.grouped_mlp, **{**arguments(device), name: value})
    given = arguments(device)
    raises(TypeError, f"^{name}: .*got ", grouped_moe.grouped_mlp, **{**given, name: given[name].long()})
    if name in PER_GROUP:
        raises(TypeError, f"^{name}: .*got ", grouped_moe.grouped_mlp, **{**given, name: given[name].half()})
    if name != "x":
        raises(ValueError, f"^{name}: .*got meta", grouped_moe.grouped_mlp, **{**given, name: given[name].to("meta")})


BAD_SPLITS = {
    "one-more": (ValueError, lambda package, sizes: torch.cat([sizes, sizes])[: G + 2]),
    "one-less": (ValueError, lambda package, sizes: sizes[:-1]),
    "two-dimensions": (ValueError, lambda package, sizes: sizes[None]),
    "float": (TypeError, lambda package, sizes: sizes.float()),
    "int16": (TypeError, lambda package, sizes: sizes.short()),
    "none": (TypeError, lambda package, sizes: None),
    "list-of-other-length": (ValueError, lambda package, sizes: [2, 3, 4, 1]),
    "list-of-too-many": (ValueError, lambda package, sizes: [2, ROWS - 4, 3]),
    "list-with-a-negative": (ValueError, lambda package, sizes: [2, -1, 4]),
    "list-of-floats": (TypeError, lambda package, sizes: [2.0, 3.0, 4.0]),
    "sizes-as-offsets": (ValueError, lambda package, sizes: package.GroupOffsets(sizes)),
    "offsets-as-sizes": (ValueError, lambda package, sizes: package.GroupSizes(torch.zeros(G + 1, dtype=torch.int64))),
    "list-of-sizes": (TypeError, lambda package, sizes: package.GroupSizes([2, 3, 4])),
    "other-device": (ValueError, lambda package, sizes: sizes.to("meta")),
}


@pytest.mark.parametrize("kind", BAD_SPLITS)
def test_error_of_splits(grouped_moe, device, kind):
    error, make_splits = BAD_SPLITS[kind]
    given = {**arguments(device), "splits": make_splits(grouped_moe, torch.tensor([2, 3, 4], device=device))}
    raises(error, "^splits: ", grouped_moe.grouped_mlp, **given)


BAD_COMBINATIONS = [
    ("bias_scales", {"down_proj_bias": None, "gate_up_proj_bias": None}),
    ("gated", {"gated": False, "interleaved": True}),
    ("activation", {"activation": "mish"}),
]


@pytest.mark.parametrize("name, changes", BAD_COMBINATIONS)
def test_error_of_combination(grouped_moe, device, name, changes):
    raises(ValueError, f"^{name}: ", grouped_moe.grouped_mlp, **{**arguments(device), **changes})
