"""TransformerEngine's tests of its grouped GEMM and GroupedLinear module, as tests of ours; see test_te_cases.py."""

import pytest
import torch
from compare import assert_bitwise
from te_steps import (
    BOTH,
    OURS,
    agrees,
    by_bias,
    by_delay,
    by_dtype,
    by_main_grad,
    by_single,
    cut,
    expected,
    fill,
    give_main_grads,
    needs_cuda,
    packed,
    parameters,
    replays,
    same,
    shuffled,
    step,
    uniform,
)

EXTENTS = [(96, 24), pytest.param(2048, 768, marks=pytest.mark.gpu), pytest.param(4096, 768, marks=pytest.mark.gpu)]


@by_dtype
@by_bias
@by_main_grad
@by_delay
@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("rows, hidden", EXTENTS)
def test_linear_accuracy(grouped_moe, device, rows, hidden, groups, delay, main_grad, bias, dtype):
    """Discrete parameters as they are initialized; main_grad is random before, and the gradient then None."""
    options = {"single_grouped_weight": False, "single_grouped_bias": False, "bias": bias, "delay_wgrad": delay}
    module = grouped_moe.GroupedLinear(
        groups, hidden, 4 * hidden, accumulate_into_main_grad=main_grad, device=device, dtype=dtype, **options
    )
    start = torch.rand(groups, 4 * hidden, hidden, device=device) if main_grad else 0.0
    if main_grad:
        give_main_grads(module, start)
    sizes = cut(rows, groups, empty=True)
    x, dy = (torch.randn(rows, n, dtype=torch.float64).to(device, dtype) for n in (hidden, 4 * hidden))
    got = step(module, x, sizes, dy)
    assert not main_grad or all(weight.grad is None for weight in parameters(module, "weight"))
    agrees("sums", got, expected(grouped_moe, module, x, sizes, dy, start=start), terms=rows)


@by_dtype
@pytest.mark.parametrize("groups", [3, 6])
def test_padded_groups(grouped_moe, device, groups, dtype):
    """Rows of zeros that fill each group up change nothing; and nothing needs them."""
    module = grouped_moe.GroupedLinear(groups, 24, 96, bias=False, device=device, dtype=dtype)
    sizes = cut(150, groups)
    full = [-(-size // 16) * 16 for size in sizes]
    x, dy = (torch.randn(150, n, dtype=torch.float64).to(device, dtype) for n in (24, 96))
    row = torch.cat([torch.arange(size) + sum(full[:group]) for group, size in enumerate(sizes)]).to(device)
    spread = [tensor.new_zeros(sum(full), tensor.shape[1]).index_copy(0, row, tensor) for tensor in (x, dy)]
    want = expected(grouped_moe, module, x, sizes, dy)
    agrees("sums", step(module, x, sizes, dy), want)
    module.zero_grad()
    got = step(module, spread[0], full, spread[1])
    agrees("sums", {**got, "y": got["y"][row], "x": got["x"][row]}, want)


SHAPES = [(1, 127, 128, 512), (8, 15, 128, 512), (8, 1027, 128, 512)]  # groups, rows, K, N
SHAPES += [(16, 3001, 64, 128), pytest.param((16, 10027, 128, 512), marks=pytest.mark.gpu)]


@by_dtype
@by_main_grad
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemm(grouped_moe, device, shape, main_grad, dtype):
    """Unscaled random operands. main_grad has their dtype: the sum is rounded to it."""
    groups, rows, k, n = shape
    module = grouped_moe.GroupedLinear(
        groups, k, n, bias=False, device=device, dtype=dtype, accumulate_into_main_grad=main_grad
    )
    fill(module, "weight", torch.randn(groups, n, k))
    start = torch.randn(groups, n, k, device=device).to(dtype) if main_grad else torch.zeros(())
    if main_grad:
        give_main_grads(module, start, dtype)
    sizes = cut(rows, groups, empty=True)
    x, dy = (torch.randn(rows, width, dtype=torch.float64).to(device, dtype) for width in (k, n))
    got = step(module, x, torch.tensor(sizes, device=device), dy)
    agrees("sums", got, expected(grouped_moe, module, x, sizes, dy, start=start.double()))


def scaled_bias_rounding(module, sizes, scales):
    """What y may be off if the product of bias and scale is rounded by itself; theirs rounds y before it is added."""
    bias = packed(module, "bias").repeat_interleave(torch.tensor(sizes, device=scales.device), 0)
    return torch.finfo(bias.dtype).eps / 2 * (bias.double() * scales[:, None].double()).abs()


PARAMETERS = {"single": (True, False), "discrete": (False, False), "discrete-main-grad": (False, True)}


@pytest.mark.parametrize("scaled", BOTH, ids=["plain-bias", "scaled-bias"])
@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize(
    "shape", [(4, 256, 256, 256), (4, 512, 256, 512), (4, 512, 512, 256), (8, 512, 256, 512)], ids=str
)
def test_gemm_of_parameters(grouped_moe, device, shape, kind, scaled):
    """bf16, with scales in fp32; without a bias where gradients go to separate buffers."""
    groups, rows, n, k = shape
    single, main_grad = PARAMETERS[kind]
    module = grouped_moe.GroupedLinear(
        groups, k, n, bias=not main_grad, scale_bias=scaled and not main_grad, single_grouped_weight=single,
        accumulate_into_main_grad=main_grad, device=device, dtype=torch.bfloat16,
    )  # fmt: skip
    for name in ("weight", "bias"):
        if parameters(module, name):
            fill(module, name, torch.randn_like(packed(module, name)))
    start = torch.randn(groups, n, k, device=device)
    if main_grad:
        give_main_grads(module, start)
    sizes, scales = cut(rows, groups), torch.randn(rows, device=device) if module.scale_bias else None
    x, dy = (torch.randn(rows, width, device=device).bfloat16() for width in (k, n))
    got = step(module, x, torch.tensor(sizes, device=device), dy, scales)
    want = expected(grouped_moe, module, x, sizes, dy, scales, start=start if main_grad else 0.0)
    slack = {"y": scaled_bias_rounding(module, sizes, scales)} if module.scale_bias else None
    agrees("sums", got, want, slack=slack)


@pytest.mark.parametrize("scaled", BOTH, ids=["plain-bias", "scaled-bias"])
@by_main_grad
@pytest.mark.parametrize("groups, rows, n, k", [(4, 0, 256, 256), (4, 256, 256, 256), (1, 0, 1536, 2048)])
def test_zero_work(grouped_moe, device, groups, rows, n, k, main_grad, scaled):
    """No group has rows, whether there are any or not: zeros, and main_grad as it was."""
    module = grouped_moe.GroupedLinear(
        groups, k, n, scale_bias=scaled, accumulate_into_main_grad=main_grad, device=device, dtype=torch.bfloat16
    )
    start = torch.randn(groups, n, k, device=device)
    if main_grad:
        give_main_grads(module, start)
    x, dy = (torch.full((rows, width), float("nan"), device=device, dtype=torch.bfloat16) for width in (k, n))
    splits = torch.zeros(groups, device=device, dtype=torch.int64)
    got = step(module, x, splits, dy, torch.full((rows,), float("nan"), device=device) if scaled else None)
    if main_grad:
        assert_bitwise("main_grad", got.pop("weight"), start)
    for name, tensor in got.items():
        assert not tensor.any(), name
    assert got["y"].shape == (rows, n)


def test_splits_on_the_host(grouped_moe, device):
    """A list does; a tensor has to be where x is."""
    module = grouped_moe.GroupedLinear(2, 64, 64, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(512, 64, device=device).bfloat16()
    y = module(x, [256, 256])
    assert_bitwise("y", y, module(x, torch.tensor([256, 256], device=device)))
    with pytest.raises(ValueError, match="^splits: .*got "):
        module(x, torch.tensor([256, 256], device="meta" if device == "cpu" else "cpu"))


def layouts():
    for bias, weight_single, bias_single in [(False, w, True) for w in BOTH] + [
        (True, w, b) for b in BOTH for w in BOTH
    ]:
        words = "single" if weight_single else "discrete", "-bias" * bias, "-single" * (bias and bias_single)
        yield pytest.param(bias, weight_single, bias_single, id="".join(words))


@by_delay
@by_main_grad
@pytest.mark.parametrize("bias, weight_single, bias_single", list(layouts()))
def test_parameter_layouts(grouped_moe, device, bias, weight_single, bias_single, main_grad, delay):
    """bf16. All layouts agree bitwise; main_grad is a view of one flat buffer, and untouched until `backward_dw`."""
    groups, n, k, sizes = 2, 256, 256, [256, 512]
    x, dy = (0.1 * torch.randn(768, width, device=device).bfloat16() for width in (k, n))
    values = {"weight": 0.1 * torch.randn(groups, n, k), "bias": 0.1 * torch.randn(groups, n)}
    splits = torch.tensor(sizes, device=device)

    def make(**options):
        module = grouped_moe.GroupedLinear(groups, k, n, bias=bias, device=device, dtype=torch.bfloat16, **options)
        for kind in ("weight", "bias")[: 1 + bias]:
            fill(module, kind, values[kind])
        return module

    module = make(
        single_grouped_weight=weight_single, single_grouped_bias=bias_single, accumulate_into_main_grad=main_grad,
        delay_wgrad=delay,
    )  # fmt: skip
    flat = torch.full((groups * n * k,), 0.25, device=device)
    buffers = flat.view(groups, n, k)
    for weight, buffer in zip(parameters(module, "weight"), [buffers] if weight_single else buffers):
        weight.main_grad, weight.grad_added_to_main_grad = buffer, False
    y = module(x, splits)
    y.backward(dy)
    if delay:
        assert bool((flat == 0.25).all()) and module.need_backward_dw()
        assert main_grad or all(weight.grad is None for weight in parameters(module, "weight"))
        module.backward_dw()
    if main_grad:
        assert all(weight.grad_added_to_main_grad is True for weight in parameters(module, "weight"))
    got = {kind: packed(module, kind, lambda p: p.grad) for kind in ("weight", "bias")[: 1 + bias]}
    got = {"y": y.detach(), **got, **({"weight": buffers} if main_grad else {})}
    want = step(make(), x, splits, dy)
    want_wide = expected(grouped_moe, module, x, sizes, dy, start=0.25 if main_grad else 0.0)
    del want["x"], want_wide["x"]
    agrees("linear", got, want_wide)
    same({**got, "weight": want["weight"]} if main_grad else got, want)


@by_delay
@by_bias
@by_single
def test_list_is_as_good_as_tensor(grouped_moe, device, single, bias, delay):
    module = grouped_moe.GroupedLinear(
        3, 128, 128, bias=bias, single_grouped_weight=single, delay_wgrad=delay, device=device, dtype=torch.bfloat16
    )
    sizes = [128, 256, 384]
    x, dy = (0.1 * torch.randn(768, 128, device=device).bfloat16() for _ in range(2))
    got = step(module, x, sizes, dy)
    module.zero_grad()
    same(got, step(module, x, torch.tensor(sizes, device=device), dy))
    agrees("linear", got, expected(grouped_moe, module, x, sizes, dy))


def test_bias_scaled_by_the_caller(grouped_moe, device):
    """A bias that the caller scales and adds, and one that the layer does: the same, and its gradient."""
    options = {"device": device, "dtype": torch.bfloat16, "single_grouped_weight": False}
    module = grouped_moe.GroupedLinear(2, 128, 128, scale_bias=True, **options)
    without = grouped_moe.GroupedLinear(2, 128, 128, bias=False, **options)
    without.load_state_dict(module.state_dict(), strict=False)
    x, dy = (torch.randn(512, 128, device=device).bfloat16() for _ in range(2))
    splits, scales = torch.tensor([256, 256], device=device), torch.tensor([0.25, 0.5], device=device)
    scales = scales.repeat_interleave(256).bfloat16()
    got = step(module, x, splits, dy, scales)
    bias = module.bias.detach().double().requires_grad_()
    y = without(x, splits).double() + bias.repeat_interleave(256, 0) * scales[:, None].double()
    y.backward(dy.double())
    torch.testing.assert_close(got["y"].double(), y.detach(), rtol=2 * OURS["linear"][torch.bfloat16][0], atol=5e-3)
    agrees("sums", {"bias": got["bias"]}, {"bias": bias.grad})
    agrees("sums", got, expected(grouped_moe, module, x, [256, 256], dy, scales))


@by_dtype
@pytest.mark.parametrize("frozen", [(), ("x",), ("weight", "bias")], ids=["all", "x-frozen", "parameters-frozen"])
@by_delay
@by_single
@pytest.mark.parametrize("bias", ["", "discrete", "single"])
def test_linear_requires_grad(grouped_moe, device, bias, single, delay, frozen, dtype):
    """Of four groups one has no rows. Values in [0, 1], so that sums don't cancel."""
    module = grouped_moe.GroupedLinear(
        4, 128, 128, bias=bool(bias), single_grouped_weight=single, single_grouped_bias=bias == "single",
        delay_wgrad=delay, device=device, dtype=dtype,
    )  # fmt: skip
    for kind in ("weight", "bias")[: 1 + bool(bias)]:
        fill(module, kind, uniform(0, 1, *packed(module, kind).shape))
        for parameter in parameters(module, kind):
            parameter.requires_grad_(kind not in frozen)
    sizes = shuffled([128 * group for group in range(4)])
    x, dy = (uniform(0, 1, sum(sizes), 128).to(device, dtype) for _ in range(2))
    got = step(module, x, torch.tensor(sizes, device=device, dtype=torch.int32), dy, frozen=frozen)
    assert all(parameter.requires_grad or parameter.grad is None for parameter in module.parameters())
    agrees("linear", got, expected(grouped_moe, module, x, sizes, dy, frozen=frozen))


@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=["all", "parameters-frozen"])
@pytest.mark.parametrize("bias", ["", "plain", "scaled"])
def test_scaled_bias_of_frozen_weights(grouped_moe, device, bias, frozen):
    """bf16. The gradient of scales does not depend on whether parameters have any."""
    module = grouped_moe.GroupedLinear(
        4, 256, 256, bias=bool(bias), scale_bias=bias == "scaled", single_grouped_weight=False, device=device,
        dtype=torch.bfloat16,
    )  # fmt: skip
    for parameter in module.parameters():
        parameter.requires_grad_(not frozen)
    sizes = shuffled([128 * group for group in range(4)])
    x, dy = ((uniform(0, 1, sum(sizes), 256) - 0.5).to(device, torch.bfloat16) for _ in range(2))
    scales = uniform(0, 1, sum(sizes)).to(device, torch.bfloat16) if bias == "scaled" else None
    got = step(module, x, torch.tensor(sizes, device=device), dy, scales)
    agrees("sums", got, expected(grouped_moe, module, x, sizes, dy, scales, frozen=frozen))


@by_delay
@by_bias
@by_single
def test_meta_module(grouped_moe, device, single, bias, delay):
    """Made on the meta device it has no storage, and computes once it has."""
    module = grouped_moe.GroupedLinear(
        2, 16, 24, bias=bias, single_grouped_weight=single, single_grouped_bias=single, delay_wgrad=delay,
        device="meta", dtype=torch.bfloat16,
    )  # fmt: skip
    assert all(parameter.is_meta for parameter in module.parameters())
    assert packed(module, "weight").shape == (2, 24, 16) and (not bias or packed(module, "bias").shape == (2, 24))
    assert not delay or all(parameter.skip_backward_post_hook for parameter in module.parameters())
    assert module(torch.empty(10, 16, dtype=torch.bfloat16, device="meta"), [4, 6]).shape == (10, 24)
    module = module.to_empty(device=device)
    for kind in ("weight", "bias")[: 1 + bias]:
        fill(module, kind, torch.randn(packed(module, kind).shape))
    x, dy = (torch.randn(10, n, device=device).bfloat16() for n in (16, 24))
    got = step(module, x, [4, 6], dy)
    agrees("sums", got, expected(grouped_moe, module, x, [4, 6], dy))


@by_single
def test_parameters_are_what_is_computed_with(grouped_moe, device, single):
    """Registered by name, trainable; what is written to one is what the next forward reads."""
    options = {"single_grouped_weight": single, "single_grouped_bias": single}
    module = grouped_moe.GroupedLinear(2, 128, 128, device=device, dtype=torch.bfloat16, **options)
    names = {"weight", "bias"} if single else {"weight0", "weight1", "bias0", "bias1"}
    named = dict(module.named_parameters())
    assert named.keys() == names
    assert all(parameter.requires_grad and getattr(module, name) is parameter for name, parameter in named.items())
    x = torch.randn(10, 128, device=device).bfloat16()
    with torch.no_grad():
        for parameter in parameters(module, "weight"):
            parameter.zero_()
        for group, bias in enumerate(module.bias if single else parameters(module, "bias")):
            bias.fill_(group + 1)
        y = module(x, [4, 6])
    assert bool((y[:4] == 1).all()) and bool((y[4:] == 2).all())


@by_single
def test_checkpoint_of_the_other_layout(grouped_moe, device, tmp_path, single):
    source, module = (
        grouped_moe.GroupedLinear(3, 64, 32, single_grouped_weight=own, single_grouped_bias=own, device=device)
        for own in (not single, single)
    )
    torch.save(source.state_dict(), tmp_path / "checkpoint.pt")
    loaded = module.load_state_dict(torch.load(tmp_path / "checkpoint.pt", map_location="cpu"), strict=True)
    assert not loaded.missing_keys and not loaded.unexpected_keys
    for kind in ("weight", "bias"):
        assert_bitwise(kind, packed(module, kind), packed(source, kind))


@pytest.mark.gpu
@needs_cuda
@by_bias
@by_single
@by_main_grad
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_graph_of_linear(grouped_moe, device, dtype, main_grad, single, bias):
    """A step with main_grad at 0.5, replayed with other splits."""
    module = grouped_moe.GroupedLinear(
        4, 128, 128, bias=bias, scale_bias=bias and single, single_grouped_weight=single, single_grouped_bias=single,
        accumulate_into_main_grad=main_grad, device=device, dtype=dtype,
    )  # fmt: skip
    half = torch.full((4, 128, 128), 0.5, device=device)
    give_main_grads(module, half)
    sizes = shuffled([128 * (group + 1) for group in range(4)])
    rows = sum(sizes) + 256
    static = {name: torch.zeros(rows, 128, device=device, dtype=dtype) for name in ("x", "dy")}
    static["splits"] = torch.tensor(sizes, device=device)
    if module.scale_bias:
        static["scales"] = torch.zeros(rows, device=device)

    def run():
        module.zero_grad()
        return step(module, **static)

    def reset():
        for weight in parameters(module, "weight"):
            weight.main_grad.fill_(0.5)

    for splits, got in replays(run, static, sizes, rows, reset):
        now = [static[name] for name in ("x", "dy")]
        want = expected(
            grouped_moe, module, now[0], splits, now[1], static.get("scales"), start=0.5 if main_grad else 0.0
        )
        agrees("sums", got, want)


@pytest.mark.gpu
@needs_cuda
def test_list_is_refused_under_capture(grouped_moe, device):
    module = grouped_moe.GroupedLinear(2, 64, 64, device=device)
    x = torch.randn(512, 64, device=device)
    module(x, [256, 256])
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="^splits: "):
        module(x, [256, 256])
