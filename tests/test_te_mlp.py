"""TransformerEngine's tests of its grouped MLP, as tests of ours; see test_te_cases.py."""

import pytest
import torch
from te_steps import (
    BOTH,
    agrees,
    by_bias,
    by_delay,
    by_dtype,
    by_main_grad,
    by_single,
    expected,
    fill,
    give_main_grads,
    needs_cuda,
    on_gpu,
    packed,
    parameters,
    replays,
    same,
    shuffled,
    step,
    uniform,
)


def leaves_of(tensors):
    """Leaves; a tensor that is there twice stays one."""
    once = {id(tensor): tensor.detach().requires_grad_() for tensor in tensors.values()}
    return {name: once[id(tensor)] for name, tensor in tensors.items()}


KINDS = {  # name, alpha, limit, up_offset, gated
    "swiglu": ("silu", 1.0, None, 0.0, True),
    "clamped-qgeglu": ("silu", 1.702, 7.0, 1.0, True),
    "clamped-qgeglu-custom": ("silu", 1.5, 5.0, 0.5, True),
    "relu2": ("relu2", 1.0, None, 0.0, False),
}
by_kind = pytest.mark.parametrize("kind", KINDS)


def mlp_tensors(groups, rows, hidden, kind, bias, low=0.0):
    """The tensors of an MLP and the cotangent of its output, in fp64, as TransformerEngine draws them."""
    width = 2 * hidden if KINDS[kind][-1] else hidden
    scales = uniform(low, -low or 1.0, rows)
    tensors = {"x": uniform(-0.25, 0.25, rows, hidden), "activation_scales": scales}
    tensors["gate_up_proj"] = uniform(-0.25, 0.25, groups, width, hidden)
    tensors["down_proj"] = uniform(-0.25, 0.25, groups, hidden, hidden)
    if bias:
        tensors["gate_up_proj_bias"] = uniform(-0.5, 0.5, groups, width)
        tensors["down_proj_bias"] = uniform(-0.5, 0.5, groups, hidden)
        tensors["bias_scales"] = scales
    return tensors, uniform(-0.25, 0.25, rows, hidden)


def grads_of(leaves):
    return {name: leaf.grad for name, leaf in leaves.items() if name != "bias_scales"}


def mlp_step(grouped_moe, tensors, splits, dy, kind, interleaved=False, recompute=False):
    """{"y": output, name: gradient}; the scales' is that of both uses."""
    *activation, gated = KINDS[kind]
    leaves = leaves_of(tensors)
    rest = {name: leaf for name, leaf in leaves.items() if "bias" in name}
    y = grouped_moe.grouped_mlp(
        *(leaves["x"], splits, leaves["activation_scales"], leaves["gate_up_proj"], leaves["down_proj"]), **rest,
        activation=grouped_moe.Activation(*activation), gated=gated, interleaved=interleaved, recompute=recompute,
    )  # fmt: skip
    y.backward(dy)
    return {"y": y.detach(), **grads_of(leaves)}


def mlp_expected(grouped_moe, tensors, sizes, dy, kind, interleaved=False):
    name, alpha, limit, up_offset, gated = KINDS[kind]
    same_scales = tensors.get("bias_scales") is tensors["activation_scales"]
    wide = {n: tensor.detach().double() for n, tensor in tensors.items()}
    leaves = leaves_of({**wide, "bias_scales": wide["activation_scales"]} if same_scales else wide)
    y = grouped_moe.reference.grouped_mlp(
        group_offsets=torch.tensor([0, *sizes]).cumsum(0), gated=gated, interleaved=interleaved,
        name=name, alpha=alpha, limit=limit, up_offset=up_offset, **leaves,
    )  # fmt: skip
    y.backward(dy.double())
    return {"y": y.detach(), **grads_of(leaves)}


def cast(tensors, device, dtype):
    """To device and dtype; a tensor that is there twice stays one."""
    once = {id(tensor): tensor.to(device, dtype) for tensor in tensors.values()}
    return {name: once[id(tensor)] for name, tensor in tensors.items()}


UNITS = [(32, 64), pytest.param(256, 128, marks=on_gpu), pytest.param(256, 256, marks=on_gpu)]


@by_dtype
@by_bias
@by_kind
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("unit, hidden", UNITS)
def test_mlp(grouped_moe, device, unit, hidden, groups, kind, bias, dtype):
    """Of four groups one has no rows. One tensor scales activation and bias."""
    sizes = shuffled([unit * group for group in range(groups)]) if groups > 1 else [unit]
    tensors, dy = mlp_tensors(groups, sum(sizes), hidden, kind, bias)
    tensors, dy = cast(tensors, device, dtype), dy.to(device, dtype)
    interleaved = KINDS[kind][-1]
    splits = torch.tensor(sizes, device=device, dtype=torch.int32)
    got = mlp_step(grouped_moe, tensors, splits, dy, kind, interleaved)
    agrees("mlp", got, mlp_expected(grouped_moe, tensors, sizes, dy, kind, interleaved))


def module_mlp_step(grouped_moe, tensors, splits, dy, kind, bias, **options):
    """As `mlp_step`, of two layers with the activation in plain torch between them. main_grad starts at 0.5."""
    name, alpha, limit, up_offset, gated = KINDS[kind]
    modules = []
    for weight, scale_bias in (("gate_up_proj", False), ("down_proj", bias)):
        groups, n, k = tensors[weight].shape
        module = grouped_moe.GroupedLinear(
            groups, k, n, bias=bias, scale_bias=scale_bias, device=dy.device, dtype=dy.dtype, **options
        )
        fill(module, "weight", tensors[weight])
        if bias:
            fill(module, "bias", tensors[f"{weight}_bias"])
        give_main_grads(module, torch.full((groups, n, k), 0.5, device=dy.device), grad_added_to_main_grad=False)
        modules.append(module)
    up, down = modules
    leaves = leaves_of({name: tensors[name] for name in ("x", "activation_scales")})
    scales = leaves["activation_scales"]
    preact = up(leaves["x"], splits).float()
    a = grouped_moe.reference.hidden(preact, name, alpha, limit, up_offset, gated)
    y = down((a * scales[:, None].float()).to(dy.dtype), splits, *([scales] if bias else []))
    y.backward(dy)
    got = {"y": y.detach(), **grads_of(leaves)}
    for name, module in (("gate_up_proj", up), ("down_proj", down)):
        if module.delay_wgrad:
            module.backward_dw()
        to_main = module.accumulate_into_main_grad
        got[name] = packed(module, "weight", lambda p: p.main_grad if to_main else p.grad)
        assert not to_main or all(p.grad_added_to_main_grad is True for p in parameters(module, "weight"))
        if bias:
            got[f"{name}_bias"] = packed(module, "bias", lambda p: p.grad)
    return got


@by_delay
@by_main_grad
@by_bias
@by_kind
@pytest.mark.parametrize("unit, hidden", [(32, 64), pytest.param(256, 256, marks=on_gpu)])
def test_mlp_of_modules(grouped_moe, device, unit, hidden, kind, bias, main_grad, delay):
    """bf16, scales of either sign. Single and discrete parameters agree bitwise."""
    sizes = shuffled([unit * (group + 1) for group in range(4)])
    tensors, dy = mlp_tensors(4, sum(sizes), hidden, kind, bias, low=-0.25)
    tensors, dy = cast(tensors, device, torch.bfloat16), dy.to(device, torch.bfloat16)
    splits = torch.tensor(sizes, device=device)
    options = {"accumulate_into_main_grad": main_grad, "delay_wgrad": delay}
    both = [{"single_grouped_weight": single, "single_grouped_bias": single} for single in (False, True)]
    args = (grouped_moe, tensors, splits, dy, kind, bias)
    got, single = (module_mlp_step(*args, **options, **layout) for layout in both)
    same(got, single)
    want = mlp_expected(grouped_moe, tensors, sizes, dy, kind)
    if main_grad:  # fp32 sums of operands that were rounded to bf16
        want.update({name: want[name] + 0.5 for name in ("gate_up_proj", "down_proj")})
        got.update({name: got[name].bfloat16() for name in ("gate_up_proj", "down_proj")})
    agrees("mlp", got, want)


@by_delay
@by_single
@pytest.mark.parametrize("zeros", [False, True], ids=["dummy", "dummy-of-zeros"])
@pytest.mark.parametrize("unit, hidden", [(32, 64), pytest.param(256, 256, marks=on_gpu)])
def test_overwrite_main_grad(grouped_moe, device, unit, hidden, zeros, single, delay):
    """main_grad, NaN before, is the gradient of a layer without it, to the bit; autograd gets a dummy."""
    sizes = shuffled([unit * (group + 1) for group in range(4)])
    x, dy = (uniform(-0.25, 0.25, sum(sizes), n).to(device, torch.bfloat16) for n in (hidden, 2 * hidden))
    options = {"single_grouped_weight": single, "delay_wgrad": delay, "device": device, "dtype": torch.bfloat16}
    plain, module = (
        grouped_moe.GroupedLinear(4, hidden, 2 * hidden, bias=False, accumulate_into_main_grad=into, **options)
        for into in (False, True)
    )
    module.load_state_dict(plain.state_dict())
    nan = torch.full((4, 2 * hidden, hidden), float("nan"), device=device)
    give_main_grads(module, nan, overwrite_main_grad=True, zero_out_wgrad=zeros, grad_added_to_main_grad=False)
    splits = torch.tensor(sizes, device=device)
    got, want = step(module, x, splits, dy), step(plain, x, splits, dy)
    assert got["weight"].dtype == torch.float32
    same({**got, "weight": got["weight"].bfloat16()}, want)
    agrees("sums", got, expected(grouped_moe, module, x, sizes, dy))
    for weight in parameters(module, "weight"):
        assert weight.grad_added_to_main_grad is True and weight.grad.shape == weight.shape
        assert not (zeros and weight.grad.any())


def in_blocks(width, size):
    """Which row of a weight that alternates blocks of `size` gate and up rows is which of [gate | up]."""
    return torch.arange(width).view(-1, 2, size).transpose(0, 1).reshape(-1)


@pytest.mark.parametrize("scales_wanted", BOTH, ids=["scales-frozen", "scales"])
@pytest.mark.parametrize("x_wanted", BOTH, ids=["x-frozen", "x"])
@pytest.mark.parametrize("rows, width, blocks", [(71, 192, 0), (35, 128, 0), (32, 192, 32)])
@pytest.mark.parametrize(
    "kind, up_offset", [("swiglu", 0.0), ("clamped-qgeglu", 1.0), ("clamped-qgeglu", 0.0), ("relu2", 0.0)]
)
def test_scaled_activation(grouped_moe, device, kind, up_offset, rows, width, blocks, x_wanted, scales_wanted):
    """fp32. The MLP of one group whose projections are identities, exact in any order of summation."""
    name, alpha, limit, _, gated = KINDS[kind]
    order = in_blocks(width, blocks) if blocks and gated else torch.arange(width)
    x, scales, dy = uniform(0, 1, rows, width).float(), uniform(0, 1, rows).float(), uniform(0, 1, rows, width).float()
    inner = width // 2 if gated else width
    eye = torch.eye(width)
    leaves = [
        tensor.to(device).detach().requires_grad_(own) for tensor, own in ((x, x_wanted), (scales, scales_wanted))
    ]
    y = grouped_moe.grouped_mlp(
        leaves[0], [rows], leaves[1], eye[order][None].to(device), eye[None, :, :inner].to(device), gated=gated,
        activation=grouped_moe.Activation(name, alpha, limit, up_offset),
    )  # fmt: skip
    wide = [tensor.double().requires_grad_() for tensor in (x, scales)]
    a = grouped_moe.reference.hidden(wide[0][:, order], name, alpha, limit, up_offset, gated) * wide[1][:, None]
    a.backward(dy[:, :inner].double())
    got, want = {"y": y[:, :inner].detach().cpu()}, {"y": a.detach()}
    assert not y[:, inner:].any()
    if x_wanted or scales_wanted:
        y.backward(dy.to(device))
    for name, leaf, reference, wanted in zip(("x", "scales"), leaves, wide, (x_wanted, scales_wanted)):
        assert wanted == (leaf.grad is not None)
        if wanted:
            got[name], want[name] = leaf.grad.cpu(), reference.grad
    agrees("activation", got, want)


@pytest.mark.gpu
@needs_cuda
@by_bias
@pytest.mark.parametrize("recompute", BOTH, ids=["saved", "recompute"])
@pytest.mark.parametrize("kind", ["swiglu", "clamped-qgeglu", "relu2"])
def test_graph_of_mlp(grouped_moe, device, kind, recompute, bias):
    """bf16, with padding of 2048 rows, replayed with other splits."""
    sizes = shuffled([256 * (group + 1) for group in range(4)])
    rows = sum(sizes) + 2048
    tensors, dy = mlp_tensors(4, rows, 256, kind, bias)
    tensors, dy = cast(tensors, device, torch.bfloat16), dy.to(device, torch.bfloat16)
    splits = torch.tensor(sizes, device=device)
    static = {"x": tensors["x"], "activation_scales": tensors["activation_scales"], "dy": dy, "splits": splits}

    def run():
        return mlp_step(grouped_moe, tensors, splits, dy, kind, recompute=recompute)

    for other, got in replays(run, static, sizes, rows):
        want = mlp_expected(grouped_moe, tensors, other, dy, kind)
        for name in ("y", "x", "activation_scales"):
            assert not got[name][sum(other) :].any(), name
            got[name], want[name] = got[name][: sum(other)], want[name][: sum(other)]
        agrees("mlp", got, want)
