"""TransformerEngine's tests of its grouped layers and MLPs, as tests of ours; see test_te_cases.py."""

import layers
import pytest
import torch
from cases import RELU2, Case
from compare import assert_bitwise, assert_close
from layers import HALF, Batch, Form, give_main_grads, make_module, packed, parameters, reference, step
from marks import DTYPES, by_dtype, by_recompute
from mlps import Mlp
from sorted_rows import SCALES, run, run_reference
from timing import graph_of

on_gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="uses torch.cuda")

# |got - want| <= atol + rtol |want|, element by element, as TransformerEngine compares: (rtol, atol) of ours, to which
# `agrees` adds the norm-wise bounds of `compare`. "linear": one rounding of an fp32 sum of a few hundred small terms;
# "sums": of up to thousands that cancel; "mlp": four roundings in a row. TransformerEngine's own, where tightest:
# "linear" (1e-3, 1e-5) in fp32 and fp16, (1e-2, 1e-5) in bf16; "sums" (1e-3, 1e-3) in fp32, else (1.5e-2, 1.5e-2);
# "mlp" (0.125, 0.25); "activation" (1.3e-6, 1e-5).
OURS = {
    "linear": {torch.float32: (1e-5, 1e-5), torch.float16: (7.5e-4, 1e-5), torch.bfloat16: (6e-3, 1e-5)},
    "sums": {torch.float32: (1e-5, 1e-3), torch.float16: (7.5e-4, 1e-3), torch.bfloat16: (6e-3, 1e-3)},
    "mlp": {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 4e-3), torch.bfloat16: (3e-2, 3e-2)},
    "activation": {torch.float32: (1.3e-6, 1e-5)},
}


def agrees(what, got, want, inner_products=("scales", "activation_scales"), slack=None, terms=0):
    """Every tensor of got is that of want, which is in fp64, within the tolerances of its own dtype.

    slack: by name, what an element may be off in addition. terms: the longest sum.
    """
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], tensor.dtype, name in inner_products, terms)
        rtol, atol = OURS[what][tensor.dtype]
        excess = (tensor.double() - want[name]).abs() - atol - rtol * want[name].abs() - (slack or {}).get(name, 0.0)
        off = int((~(excess <= 0)).sum())
        assert off == 0, f"{name}: {off} of {excess.numel()} elements are off, by up to {float(excess.max()):.3e}"


def uniform(low, high, *shape):
    return torch.empty(shape, dtype=torch.float64).uniform_(low, high)


def cut(rows, groups):
    """Random sizes of groups that sum to rows. Of several groups the last but one has none."""
    if groups == 1:
        return [rows]
    cuts = [0, *sorted((torch.randperm(rows - 1)[: groups - 2] + 1).tolist()), rows]
    sizes = [end - start for start, end in zip(cuts, cuts[1:])]
    return [*sizes[:-1], 0, sizes[-1]]


def fill(module, draw):
    """Gives the parameters the values of draw(*shape), the same whatever the layout."""
    shapes = {kind: packed(module, kind).shape for kind in ("weight", "bias") if parameters(module, kind)}
    module.load_state_dict({kind: draw(*shape) for kind, shape in shapes.items()})


def make_batch(module, sizes, draw=torch.randn, scales_dtype=torch.float32, tail=0):
    """x and the cotangent, of draw(*shape) and in the dtype of the module, and scales if it takes some."""
    weight, rows = parameters(module, "weight")[0], sum(sizes) + tail
    x, dy = (draw(rows, n).to(weight) for n in (module.in_features, module.out_features))
    scales = draw(rows).to(weight.device, scales_dtype) if module.scale_bias else None
    return Batch(x, torch.tensor([0, *sizes], device=weight.device).cumsum(0), scales, dy)


EXTENTS = [(96, 24), pytest.param(2048, 768, marks=on_gpu), pytest.param(4096, 768, marks=on_gpu)]


@by_dtype
@pytest.mark.parametrize("kind", ["none", "bias"])
@layers.by_main
@layers.by_delay
@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("rows, hidden", EXTENTS)
def test_linear_accuracy(grouped_moe, device, rows, hidden, groups, delay, main, kind, dtype):
    """Discrete parameters as they are initialized."""
    form, options = Form(False, False, kind, dtype), {"accumulate_into_main_grad": main, "delay_wgrad": delay}
    module = make_module(grouped_moe, form, device, (groups, hidden, 4 * hidden), **options)
    start = give_main_grads(module, "apart") if main else None
    batch = make_batch(module, cut(rows, groups))
    agrees("sums", step(module, batch), reference(grouped_moe, module, batch, start), terms=rows)


SHAPES = [(1, 127, 128, 512), (8, 15, 128, 512), (8, 1027, 128, 512), (16, 3001, 64, 128), (16, 10027, 128, 512)]
BF16_SHAPES = [(4, 256, 256, 256), (4, 512, 512, 256), (4, 512, 256, 512), (8, 512, 512, 256)]
BF16_FORMS = [Form(weight, True, kind, HALF) for weight in (True, False) for kind in ("none", "bias", "scaled")]
GEMMS = [(shape, Form(kind="none", dtype=dtype)) for shape in SHAPES for dtype in DTYPES]
GEMMS += [(shape, form) for shape in BF16_SHAPES for form in BF16_FORMS]


@layers.by_main
@pytest.mark.parametrize(
    "shape, form", [pytest.param(*gemm, marks=on_gpu if gemm[0][1] > 10000 else ()) for gemm in GEMMS], ids=str
)
def test_gemm(grouped_moe, device, shape, form, main):
    """Unscaled random operands. A main_grad of all groups has their dtype: the sum is rounded to it."""
    groups, rows, *extents = shape  # K, N
    module = make_module(grouped_moe, form, device, (groups, *extents), accumulate_into_main_grad=main)
    fill(module, torch.randn)
    place, dtype = ("single", form.dtype) if form.weight else ("apart", torch.float32)
    start = give_main_grads(module, place, dtype) if main else None
    batch = make_batch(module, cut(rows, groups))
    slack = {}
    if module.scale_bias:  # The product of bias and scale may be rounded by itself. Theirs rounds y before it is added.
        bias = packed(module, "bias").repeat_interleave(batch.offsets.diff(), 0).double()
        slack["y"] = torch.finfo(form.dtype).eps / 2 * (bias * batch.scales[:, None].double()).abs()
    agrees("sums", step(module, batch), reference(grouped_moe, module, batch, start), slack=slack)


@by_dtype
@pytest.mark.parametrize("frozen", [(), ("x",), ("weight", "bias")], ids=["all", "x-frozen", "parameters-frozen"])
@layers.by_delay
@layers.by_single
@pytest.mark.parametrize("kind, single_bias", [("none", True), ("bias", False), ("bias", True), ("scaled", True)])
def test_linear_requires_grad(grouped_moe, device, kind, single_bias, single, delay, frozen, dtype):
    """Of four groups one has no rows. Values in [0, 1], so that sums don't cancel. Scales have the dtype of x."""
    form = Form(single, single_bias, kind, dtype)
    module = make_module(grouped_moe, form, device, (4, 128, 128), delay_wgrad=delay)
    fill(module, lambda *shape: uniform(0, 1, *shape))
    for name in frozen:
        for parameter in parameters(module, name):
            parameter.requires_grad_(False)
    batch = make_batch(module, (256, 0, 384, 128), lambda *shape: uniform(0, 1, *shape), dtype)
    got, want = step(module, batch, frozen), reference(grouped_moe, module, batch)
    assert all(parameter.requires_grad or parameter.grad is None for parameter in module.parameters())
    agrees("linear", got, {name: tensor for name, tensor in want.items() if name not in frozen})


@layers.by_delay
@pytest.mark.parametrize("main, shape, sizes", [
    ("grad", (2, 256, 256), (256, 512)),
    ("add", (2, 256, 256), (256, 512)),
    ("overwrite", (4, 64, 128), (64, 128, 32, 96)),
    pytest.param("overwrite", (4, 256, 512), (512, 1024, 256, 768), marks=on_gpu),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["none", "bias"])
@layers.by_layout
def test_parameter_layouts(grouped_moe, device, form, kind, main, shape, sizes, delay):
    """All agree bitwise with the default one; main_grad's rounding is the gradient where it overwrites what was NaN."""
    form, plain = form._replace(kind=kind, dtype=HALF), Form(kind=kind, dtype=HALF)
    plain = make_module(grouped_moe, plain, device, shape)
    fill(plain, lambda *shape: 0.1 * torch.randn(shape))
    options = {"accumulate_into_main_grad": main != "grad", "delay_wgrad": delay}
    module = make_module(grouped_moe, form, device, shape, **options)
    module.load_state_dict(plain.state_dict())
    flags = {"grad_added_to_main_grad": False, "overwrite_main_grad": main == "overwrite"}
    place, value = "single" if form.weight else "packed", 0.25 if main == "add" else float("nan")
    start = give_main_grads(module, place, value=value, **flags)
    batch = make_batch(module, sizes, lambda *shape: 0.1 * torch.randn(shape))
    got, want = step(module, batch), step(plain, batch)
    agrees("linear", got, reference(grouped_moe, module, batch, start if main == "add" else None))
    for weight in parameters(module, "weight"):
        assert weight.grad_added_to_main_grad == (main != "grad") and weight.grad.shape == weight.shape
    for name, tensor in got.items():
        if name != "weight" or main != "add":
            assert_bitwise(name, tensor.to(HALF), want[name])


KINDS = [
    Case("swiglu"),
    Case("clamped-qgeglu", activation=("silu", 1.702, 7.0, 1.0)),
    Case("clamped-qgeglu-custom", activation=("silu", 1.5, 5.0, 0.5)),
    Case("relu2", gated=False, activation=RELU2),
]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
by_bias = pytest.mark.parametrize("bias", ["", "both"], ids=["no-bias", "bias"])


def make_mlp(kind, bias, sizes, hidden, **changes):
    """One tensor scales activation and bias."""
    case = kind._replace(H=hidden, I=hidden, bias=bias, **changes)
    return Mlp("te", case, "same" if bias else "activation", tuple(sizes), tail=0)


def make_inputs(mlp, dtype, device):
    """In ranges as those of TransformerEngine."""

    def draw(name, tensor):
        low, high = (-0.25, 1.0) if name in SCALES else (-0.5, 0.5) if "bias" in name else (-0.25, 0.25)
        return uniform(low, high, *tensor.shape).to(tensor)

    inputs = mlp.make(dtype, device)
    return inputs.map(draw)._replace(dy=draw("dy", inputs.dy))


@by_dtype
@by_bias
@by_kind
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    "unit, hidden", [(32, 64), *(pytest.param(256, hidden, marks=on_gpu) for hidden in (128, 256))]
)
def test_mlp(grouped_moe, device, unit, hidden, groups, kind, bias, dtype):
    """Of four groups one has no rows."""
    sizes = [unit * size for size in (2, 0, 3, 1)] if groups == 4 else [unit]
    mlp = make_mlp(kind, bias, sizes, hidden, interleaved=kind.gated)
    inputs = make_inputs(mlp, dtype, device)
    agrees("mlp", run(grouped_moe, mlp, inputs), run_reference(grouped_moe, mlp, inputs))


@pytest.mark.parametrize("wanted", [("x",), ("activation_scales",), ("x", "activation_scales")], ids="-".join)
@pytest.mark.parametrize("rows, width, blocks", [(71, 192, 0), (35, 128, 0), (32, 192, 32)])
@pytest.mark.parametrize("kind", [*KINDS[:2], Case("no-offset", activation=("silu", 1.702, 7.0, 0.0)), KINDS[3]])
def test_scaled_activation(grouped_moe, device, kind, rows, width, blocks, wanted):
    """fp32. The MLP of one group whose projections are identities, exact in any order of summation.

    blocks: the rows of the first weight alternate so many of gate and up.
    """
    inner = width // 2 if kind.gated else width
    order = torch.arange(width)
    if blocks and kind.gated:
        order = order.view(-1, 2, blocks).transpose(0, 1).reshape(-1)
    mlp = Mlp("te", kind._replace(H=width, I=inner), "activation", (rows,), tail=0)
    eye = torch.eye(width, device=device)
    inputs = mlp.make(torch.float32, device).map(lambda _, tensor: uniform(0, 1, *tensor.shape).to(tensor))
    inputs = inputs.replace(gate_up_proj=eye[order][None], down_proj=eye[None, :, :inner])
    inputs = inputs._replace(dy=uniform(0, 1, rows, width).to(inputs.dy))
    frozen = [name for name in inputs.given() if name not in wanted]
    got, want = run(grouped_moe, mlp, inputs, frozen), run_reference(grouped_moe, mlp, inputs)
    assert not got["y"][:, inner:].any()
    agrees("activation", got, {name: want[name] for name in got}, inner_products=())


def replays(function, static, offsets, reset=lambda: None):
    """Captures a function and replays it with fresh numbers and splits: (sizes, results), bitwise those of eager.

    static, offsets: the tensors that change. Rows of no group are NaN. reset: called before each run.
    """
    graph, results = graph_of(function)
    sizes, rows = offsets.diff().tolist(), len(static[0])
    for other in (sizes, sizes[::-1], [0] * 4, [0, rows, 0, 0], [1, 0, 2, 5]):
        offsets.copy_(torch.tensor([0, *other]).cumsum(0))
        for tensor in static:
            fresh = uniform(-0.25, 0.25, *tensor.shape)
            fresh[sum(other) :] = float("nan")
            tensor.copy_(fresh)
        for tensor in results.values():
            tensor.detach().fill_(float("nan"))
        reset()
        graph.replay()
        got = {name: tensor.detach().clone() for name, tensor in results.items()}
        reset()
        for name, tensor in function().items():
            assert_bitwise(name, got[name], tensor.detach())
        yield other, got


LARGE = (4, 128, 128), (256, 512, 128, 384)


@on_gpu
@needs_cuda
@pytest.mark.parametrize(
    "dtype, shape, sizes", [(HALF, (4, 48, 40), layers.SIZES), (HALF, *LARGE), (torch.float16, *LARGE)]
)
@pytest.mark.parametrize("kind", ["none", "bias", "scaled"])
@layers.by_delay
@pytest.mark.parametrize("place, main", [(p, True) for p in layers.PLACES] + [("single", False), ("packed", False)])
def test_graph_of_linear(grouped_moe, device, place, main, delay, kind, dtype, shape, sizes):
    """Forward, backward and backward_dw, into gradients or a main_grad that is 0.5 before."""
    options = {"accumulate_into_main_grad": main, "delay_wgrad": delay}
    module = make_module(grouped_moe, layers.form_of(place, dtype, kind), device, shape, **options)
    start = give_main_grads(module, place, value=0.5)
    batch = make_batch(module, sizes, tail=128)

    def function():
        module.zero_grad()
        return step(module, batch)

    def reset():
        for weight in parameters(module, "weight"):
            weight.main_grad.fill_(0.5)

    static = [tensor for tensor in (batch.x, batch.scales, batch.dy) if tensor is not None]
    for _, got in replays(function, static, batch.offsets, reset):
        agrees("sums", got, reference(grouped_moe, module, batch, start if main else None))


@on_gpu
@needs_cuda
def test_list_is_refused_under_capture(grouped_moe, device):
    module = grouped_moe.GroupedLinear(2, 64, 64, device=device)
    x = torch.randn(512, 64, device=device)
    module(x, [256, 256])
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="^splits: "):
        module(x, [256, 256])


@on_gpu
@needs_cuda
@by_bias
@by_recompute
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[3]], ids=lambda kind: kind.id)
def test_graph_of_mlp(grouped_moe, device, kind, recompute, bias):
    """bf16, with 2048 rows of no group."""
    mlp = make_mlp(kind, bias, (512, 1024, 256, 768), 256, recompute=recompute)._replace(tail=2048)
    inputs = make_inputs(mlp, HALF, device)
    static = [inputs.tensors["x"], inputs.tensors["activation_scales"], inputs.dy]
    for other, got in replays(lambda: run(grouped_moe, mlp, inputs), static, inputs.offsets):
        want, used = run_reference(grouped_moe, mlp, inputs), sum(other)
        for name in ("y", "x", "activation_scales"):
            assert not got[name][used:].any(), name
            got[name], want[name] = got[name][:used], want[name][:used]
        agrees("mlp", got, want)
