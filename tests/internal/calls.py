"""Calls of every kind, which between them launch all kernels of the package: by name, functions of the package."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from compile_check import EVERY, LAYERS, Calls, Package, Signature
from workload import Layer

BF16 = torch.bfloat16


def tensors(*shapes, dtype=BF16):
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def linear(package, rows, transposed, bias):
    """A step of the linear layer, of splits of each kind."""
    (x, weight), n = tensors((rows, 256), (4, 256, 512) if transposed else (4, 512, 256)), 512
    bias, scales = tensors((4, n), (rows,)) if bias else (None, None)
    leaves = [tensor for tensor in (x, weight, bias, scales) if tensor is not None]
    for splits in (torch.full((4,), rows // 4), torch.arange(5, dtype=torch.int32) * (rows // 4)):
        y = package.grouped_linear(x, weight, splits, bias, scales, transposed=transposed)
        torch.autograd.grad(y, leaves, torch.zeros_like(y))


def layer_of(layer):
    """step(package, tokens, backward) of an experts block. Memory is neither written nor read."""
    up, down = (torch.empty(shape, dtype=BF16) for shape in layer.weight_shapes)
    widths = (layer.preact_width, layer.hidden) if layer.bias else ()
    biases = dict(zip(("gate_up_proj_bias", "down_proj_bias"), tensors(*((layer.experts, n) for n in widths))))
    leaves = [up.requires_grad_(), down.requires_grad_(), *biases.values()]

    def step(package, tokens, backward):
        x, weights = torch.empty(tokens, layer.hidden, dtype=BF16), torch.empty(tokens, layer.top_k)
        ids = torch.zeros(tokens, layer.top_k, dtype=torch.int64)
        with torch.set_grad_enabled(backward):
            inputs = [x.requires_grad_(backward), weights.requires_grad_(backward)]
            out = package.grouped_mm_experts(x, ids, weights, up, down, **biases, **layer.kind)
        if backward:
            torch.autograd.grad(out, inputs + leaves, out.detach())

    return step


def experts(package, tokens, bias, **kind):
    """A forward without gradients, and a step."""
    step = layer_of(Layer("", 16, 2, 128, 96, bias=bias, **kind))
    for backward in (False, True):
        step(package, tokens, backward)


def scaled(package, tokens, kind="", extent=128):
    """A forward without gradients, and a step, with weights in FP8. kind: of LoRAs. extent: H, and I as well."""
    up, down = map(package.quantize_blocks, tensors((16, 2 * extent, extent), (16, extent, extent)))
    options, factors = {}, []
    for name, n in (("gate_up_lora", 2 * extent), ("down_lora", extent)):
        if kind in (name, "loras"):
            options[name] = package.LoRA(*tensors((16, 16, extent), (16, n, 16)))
            factors += options[name][:2]
    (x,), (weights,) = tensors((tokens, extent)), tensors((tokens, 2), dtype=torch.float32)
    ids = torch.zeros(tokens, 2, dtype=torch.int64)
    with torch.no_grad():
        package.grouped_mm_experts(x, ids, weights, up, down, **options)
    out = package.grouped_mm_experts(x, ids, weights, up, down, **options)
    torch.autograd.grad(out, [x, weights, *factors], torch.zeros_like(out))


def adapted(package, tokens):
    """A forward without gradients, and a step, with two adapters of which each token has one."""
    x, up, down, *factors = tensors(
        (tokens, 128), (16, 192, 128), (16, 128, 96), (2, 16, 16, 128), (2, 16, 192, 16), (2, 16, 16, 96),
        (2, 16, 128, 16),
    )  # fmt: skip
    ids, (weights,) = torch.zeros(tokens, 2, dtype=torch.int64), tensors((tokens, 2), dtype=torch.float32)
    loras = {"gate_up_lora": package.LoRA(*factors[:2]), "down_lora": package.LoRA(*factors[2:])}
    index = torch.zeros(tokens, dtype=torch.int64)
    with torch.no_grad():
        package.grouped_mm_experts(x, ids, weights, up, down, **loras, adapter_index=index)
    out = package.grouped_mm_experts(x, ids, weights, up, down, **loras, adapter_index=index)
    torch.autograd.grad(out, [x, weights, up, down, *factors], torch.zeros_like(out))


def plain_mlp(package, rows):
    """A step of an MLP without a gate and biases, whose activation has scales."""
    x, up, down = tensors((rows, 128), (16, 128, 96), (16, 96, 128))
    (scales,) = tensors((rows,), dtype=torch.float32)
    y = package.grouped_mlp(x, torch.full((16,), rows // 16), scales, up, down, gated=False, transposed=True)
    torch.autograd.grad(y, [x, scales, up, down], torch.zeros_like(y))


def parts(package, tokens):
    """Routing, and the passes between tokens and rows."""
    (x,), (weights,) = tensors((tokens, 128)), tensors((tokens, 2), dtype=torch.float32)
    routing = package.route(torch.zeros(tokens, 2, dtype=torch.int32), 16)
    out = package.combine_rows(package.gather_rows(x, routing), weights, routing)
    torch.autograd.grad(out, [x, weights], torch.zeros_like(out))


def of_backend(package, layer, tokens, part, signature="plain", dtype=BF16):
    """What `compile_check` calls of the backend for a part of a layer."""
    package = Package(package)
    calls = Calls(package, LAYERS[layer], dtype, tokens, SIGNATURES[signature], every=True)
    with mock.patch.object(package["common._compat"], "assert_on_device"):  # no kernel ran that would have counted
        getattr(calls, part)()


# Few enough kernels to be compiled.
SMALL = {
    "linear-64-nk-bias": partial(linear, rows=64, transposed=False, bias=True),
    "linear-2048-kn-plain": partial(linear, rows=2048, transposed=True, bias=False),
    "experts-1-bias": partial(experts, tokens=1, bias=True),
    "experts-2048": partial(experts, tokens=2048, bias=False),
}
SIGNATURES = {
    "plain": Signature(),
    "bias": Signature(torch.int32, BF16, bias=True),
    "some": Signature(bias=True, needs="act_scales down"),
    "x": Signature(needs="x"),
}
KINDS = {
    **SMALL,
    "fp32": partial(of_backend, layer="odd", tokens=256, part="linear", dtype=torch.float32),
    **{f"adapted-{tokens}": partial(adapted, tokens=tokens) for tokens in (1, 40, 2048)},  # the backend's have one
    **{f"scaled-{tokens}": partial(scaled, tokens=tokens) for tokens in (1, 40, 2048)},
    "scaled-adapted": partial(scaled, tokens=2048, kind="loras", extent=256),
    "interleaved": partial(experts, tokens=2048, bias=True, interleaved=True),
    "mlp-plain": partial(plain_mlp, rows=2048),
    "parts": partial(parts, tokens=40),
    "many-groups": partial(of_backend, layer="qwen3-30b", tokens=4096, part="linear"),
}
for tokens, *flags in itertools.product((40, 2048), *[(False, True)] * 3):
    kind = dict(zip(("bias", "gated", "transposed"), flags))
    name = "-".join(["block", str(tokens), *(word for word, flag in kind.items() if flag)])
    KINDS[name] = partial(experts, tokens=tokens, **kind)
for case in itertools.product(EVERY, (1, 40, 2048), ("experts", "linear", "mlp"), SIGNATURES):
    names = "layer", "tokens", "part", "signature"
    KINDS["-".join(map(str, case))] = partial(of_backend, **dict(zip(names, case)))
