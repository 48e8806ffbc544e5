"""Calls of every kind, which between them launch all kernels of the package."""

import sys
from unittest import mock

import torch

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 16, 128, 96, 2


def tensors(*shapes, dtype=BF16):
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def differentiate(out, *inputs):
    inputs = [tensor for tensor in inputs if tensor is not None]
    return torch.autograd.grad(out, inputs, torch.zeros_like(out), allow_unused=True)


def linear(package, rows, transposed, bias, dtype=BF16):
    """A step of the linear layer, of splits of each kind."""
    (x, weight), n = tensors((rows, 256), (4, 256, 512) if transposed else (4, 512, 256), dtype=dtype), 512
    bias, scales = tensors((4, n), (rows,), dtype=dtype) if bias else (None, None)
    for splits in (torch.full((4,), rows // 4), torch.arange(5, dtype=torch.int32) * (rows // 4)):
        y = package.grouped_linear(x, weight, splits, bias, scales, transposed=transposed)
        differentiate(y, x, weight, bias, scales)


def adapted_linear(package, groups, rows):
    """A step of the linear layer with a LoRA, whose b is trained, or frozen, or lies as peft stores it."""
    x, weight, a, b, peft = tensors((rows, 64), (groups, 64, 64), (groups, 16, 64), (groups, 64, 16), (64, 16, groups))
    for factor, leaves in ((b, (x, a, b)), (b.detach(), (x, a)), (peft.movedim(-1, 0), (x, a, peft))):
        y = package.grouped_linear(x, weight, torch.full((groups,), rows // groups), lora=package.LoRA(a, factor))
        differentiate(y, *leaves)


def weights_of(gated, bias, transposed):
    """up, down, up_bias, down_bias"""
    width = INTERMEDIATE * (1 + gated)
    up, down = (EXPERTS, width, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    up, down = tensors(*((e, k, n) if transposed else (e, n, k) for e, n, k in (up, down)))
    return up, down, *(tensors((EXPERTS, width), (EXPERTS, HIDDEN)) if bias else (None, None))


def experts(
    package, tokens, gated=True, bias=False, transposed=False, interleaved=False, recompute=False, adapters=0
):  # fmt: skip
    """A forward without gradients, and a step. adapters: of a LoRA, which is the only one with 1."""
    up, down, up_bias, down_bias = weights_of(gated, bias, transposed)
    loras, index = [None, None], None
    if adapters:
        shape, width = (adapters, EXPERTS) if adapters > 1 else (EXPERTS,), INTERMEDIATE * (1 + gated)
        for place, (n, k) in enumerate(((width, HIDDEN), (HIDDEN, INTERMEDIATE))):
            loras[place] = package.LoRA(*tensors((*shape, 16, k), (*shape, n, 16)))
        index = torch.zeros(tokens, dtype=torch.int64) if adapters > 1 else None
    factors = [factor for lora in loras if lora for factor in lora[:2]]
    (x,), (weights,) = tensors((tokens, HIDDEN)), tensors((tokens, TOP_K), dtype=torch.float32)
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int64)

    def call():
        return package.grouped_mm_experts(
            x, ids, weights, up, down, gate_up_proj_bias=up_bias, down_proj_bias=down_bias, gated=gated,
            transposed=transposed, interleaved=interleaved, recompute=recompute, gate_up_lora=loras[0],
            down_lora=loras[1], adapter_index=index,
        )  # fmt: skip

    with torch.no_grad():
        call()
    differentiate(call(), x, weights, up, down, up_bias, down_bias, *factors)


def scaled(package, tokens, kind="", extent=HIDDEN):
    """A forward without gradients, and a step, with weights in FP8. kind: of the block. extent: H, and I as well."""
    up, down = map(package.quantize_blocks, tensors((EXPERTS, 2 * extent, extent), (EXPERTS, extent, extent)))
    options, factors = {"interleaved": True} if kind == "interleaved" else {}, []
    if kind == "w8a16":
        up = up._replace(products="w8a16")
    for name, n in (("gate_up_lora", 2 * extent), ("down_lora", extent)):
        if kind in (name, "loras"):
            options[name] = package.LoRA(*tensors((EXPERTS, 16, extent), (EXPERTS, n, 16)))
            factors += options[name][:2]
    (x,), (weights,) = tensors((tokens, extent)), tensors((tokens, TOP_K), dtype=torch.float32)
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int64)
    with torch.no_grad():
        package.grouped_mm_experts(x, ids, weights, up, down, **options)
    differentiate(package.grouped_mm_experts(x, ids, weights, up, down, **options), x, weights, *factors)


def mlp(package, rows, gated=True, bias=True, transposed=False):
    """A step of the MLP."""
    up, down, up_bias, down_bias = weights_of(gated, bias, transposed)
    (x,), (scales, bias_scales) = tensors((rows, HIDDEN)), tensors((rows,), (rows,), dtype=torch.float32)
    bias_scales = bias_scales if bias else None
    y = package.grouped_mlp(
        x, torch.full((EXPERTS,), rows // EXPERTS), scales, up, down, bias_scales=bias_scales,
        gate_up_proj_bias=up_bias, down_proj_bias=down_bias, gated=gated, transposed=transposed,
    )  # fmt: skip
    differentiate(y, x, scales, up, down, bias_scales, up_bias, down_bias)


def parts(package, tokens):
    """Routing, and the passes between tokens and rows."""
    (x,), (weights,) = tensors((tokens, HIDDEN)), tensors((tokens, TOP_K), dtype=torch.float32)
    routing = package.route(torch.zeros(tokens, TOP_K, dtype=torch.int32), EXPERTS)
    rows = package.gather_rows(x, routing)
    differentiate(package.combine_rows(rows, weights, routing), x, weights)


def exchanged(package, tokens):
    """A step of the layer of two ranks, of which this one gets what it sends; without its experts."""
    exchange = sys.modules[f"{package.__name__}.exchange"]
    (x,), (weights,) = tensors((tokens, HIDDEN)), tensors((tokens, TOP_K), dtype=torch.float32)
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int64)
    with mock.patch.object(exchange, "all_to_all", lambda rows, group: rows.clone()):
        there = exchange.dispatch(x, weights, ids, EXPERTS, 2, tokens, None)
        out = exchange.combine(there.x.clone() * there.weights.sum(), there.plan, None)
        differentiate(out, x, weights)


def sums(package, rows):
    """Gradients of a bias and its scales, made and added to."""
    dy, bias, scales = torch.zeros(rows, 256, dtype=BF16), torch.zeros(4, 256, dtype=BF16), torch.zeros(rows)
    splits = torch.full((4,), rows // 4)
    dbias, dscales = package.grouped_dbias_dscales(dy, scales, bias, splits)
    package.grouped_dbias_dscales(dy, scales, bias, splits, dbias=dbias, dscales=dscales)


def main_grads(package, rows):
    """Weight gradients that are added to buffers."""
    layer = package.GroupedLinear(4, 256, 512, dtype=BF16, accumulate_into_main_grad=True)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    (x,) = tensors((rows, 256))
    differentiate(layer(x, torch.full((4,), rows // 4)), x, layer.bias, layer.weight)


KINDS = {
    **{f"linear-{rows}-{'kn' if kn else 'nk'}-{'bias' if bias else 'plain'}": (linear, rows, kn, bias)
       for rows in (64, 2048) for kn in (False, True) for bias in (False, True)},
    "linear-fp32": (linear, 256, False, True, torch.float32), "linear-adapted": (adapted_linear, 128, 8320),
    **{f"experts-{tokens}{'' if gated else '-not-gated'}{'-bias' if bias else ''}{'-transposed' if kn else ''}":
       (experts, tokens, gated, bias, kn)
       for tokens in (1, 40, 2048) for gated in (True, False) for bias in (False, True) for kn in (False, True)},
    "experts-2048-interleaved": (experts, 2048, True, True, True, True),
    "experts-2048-recompute": (experts, 2048, True, False, False, False, True),
    "experts-many-chunks": (experts, 20000),
    **{f"experts-{tokens}-{adapters}-adapters": (experts, tokens, True, False, False, False, False, adapters)
       for tokens in (1, 40, 2048) for adapters in (1, 2)},
    **{f"scaled-{tokens}": (scaled, tokens) for tokens in (1, 40, 2048)},
    "scaled-w8a16": (scaled, 2048, "w8a16"),
    "mlp-64": (mlp, 64), "mlp-2048": (mlp, 2048), "mlp-plain": (mlp, 2048, False, False, True),
    "parts-40": (parts, 40), "parts-2048": (parts, 2048),
    "exchanged-40": (exchanged, 40), "sums": (sums, 256),
    "main_grads-64": (main_grads, 64), "main_grads-2048": (main_grads, 2048),
}  # fmt: skip


def make(package, kind):
    function, *arguments = KINDS[kind]
    function(package, *arguments)
