"""Kernels of grouped_linear, grouped_mlp and their gradients under poison, with their bounds checked."""

import pytest
import torch
from compare import assert_bitwise, assert_close
from linears import Linear, make
from mlps import BY_MLP
from mlps import make as make_mlp
from poison import guarded
from sorted_rows import assert_matches, run_reference

from interpreter.guard import GuardedAllocations, linear_backward

NAN = float("nan")
SIZES = (200, 0, 130, 64)  # whole row tiles, one that is cut, none
WIDE = [
    Linear("whole-tiles", SIZES, tail=70, N=256, K=64),
    Linear("cut-tiles", SIZES, tail=3, head=5, N=40, K=72, bias=True),
    Linear("transposed", SIZES, tail=70, N=136, K=40, transposed=True, bias=True),
    Linear("many-rows", (700, 0, 900), tail=10, N=136, K=200),
    Linear("many-rows-transposed", (1, 1700, 0), N=264, K=40, transposed=True),
]


@pytest.fixture
def descriptors(module, monkeypatch):
    """Counts the descriptors that launchers make."""
    made, descriptors = [], module("backends.triton.descriptors")
    kind = descriptors.TmaDescriptor
    monkeypatch.setattr(descriptors, "TmaDescriptor", lambda *args: made.append(args) or kind(*args))
    return made


@pytest.mark.parametrize("linear", WIDE, ids=lambda linear: linear.id)
def test_reads_by_descriptor(module, grouped_moe, accelerated, descriptors, linear):
    """Aligned operands of enough rows: forward, dgrad and wgrad next to NaN in rows of no group."""
    x, weight, offsets, bias, dy = make(linear, torch.float16, "cpu")
    rows = torch.arange(x.shape[0])
    outside = (rows < offsets[0]) | (rows >= offsets[-1])
    leaves = [t if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    with torch.enable_grad():
        y = grouped_moe.reference.grouped_linear(leaves[0], leaves[1], offsets, leaves[2], transposed=linear.transposed)
        y.backward(dy.double())
    x[outside], dy[outside] = NAN, NAN
    functions = module("grouped_linear")
    got, schedule = functions._forward(x, weight, offsets, bias, None, linear.transposed)
    assert_close("y", got, y.detach(), torch.float16)
    needs = (True, True, bias is not None, False)
    grads = linear_backward(module, dy, x, weight, schedule, bias, None, linear.transposed, needs)
    for name, grad, leaf in zip(("x", "weight", "bias"), grads, leaves):
        if leaf is not None:
            assert_close(name, grad, leaf.grad, torch.float16)
    assert len(descriptors) == 6 + (linear.id.startswith("many-rows"))  # of which dw is written by one


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.float16], ids=["fp32-scales", "fp16-scales"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_scaled_bias(module, grouped_moe, accelerated, dtype, scales_dtype):
    linear = Linear("scaled", sizes=(7, 0, 119, 5), tail=6, head=3, N=70, bias=True)
    x, weight, offsets, bias, dy = make(linear, dtype, "cpu")
    scales = (torch.rand(x.shape[0]) - 0.5).to(scales_dtype)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias, scales)]
    with torch.enable_grad():
        y = grouped_moe.reference.grouped_linear(leaves[0], leaves[1], offsets, *leaves[2:])
        y.backward(dy.double())
    rows = torch.arange(x.shape[0])
    outside = (rows < offsets[0]) | (rows >= offsets[-1])
    x[outside], dy[outside], scales[outside], bias[1] = NAN, NAN, NAN, NAN
    x, weight, bias, scales, dy = (guarded(t) for t in (x, weight, bias, scales, dy))
    functions = module("grouped_linear")
    with GuardedAllocations(x, weight, offsets, bias, scales, dy):
        got, schedule = functions._forward(x, weight, offsets, bias, scales, False)
        grads = linear_backward(module, dy, x, weight, schedule, bias, scales, False, (True,) * 4)
        got, grads = got.clone(), [grad.clone() for grad in grads]
    assert_close("y", got, y.detach(), dtype)
    for name, grad, leaf in zip(("x", "weight", "bias"), grads, leaves):
        assert_close(name, grad, leaf.grad, dtype)
    coarser = max(dtype, scales_dtype, key=lambda d: torch.finfo(d).eps)
    assert grads[3].dtype == scales_dtype
    assert_close("bias_scales", grads[3], leaves[3].grad, coarser, inner_products=True)


@pytest.mark.parametrize("sizes", [(7, 0, 19), (200, 0, 130)], ids=["thin", "tall"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["into-fp32", "into-fp16"])
def test_wgrad_accumulates(kernels, dtype, layout, sizes):
    """Into a buffer of its own dtype and strides; a group without rows keeps what it has, whatever that is."""
    rows = sum(sizes) + 9
    dy, x = torch.randn(rows, 40).half(), torch.randn(rows, 72).half()
    dy[-9:], x[-9:] = NAN, NAN
    dw = torch.randn(3, 40, 72).to(dtype)
    dw = dw.transpose(1, 2).contiguous().transpose(1, 2) if layout == "kn" else dw
    dw[1] = NAN
    want, bounds = dw.double(), torch.tensor((0, *sizes)).cumsum(0).tolist()
    for group, (start, end) in enumerate(zip(bounds, bounds[1:])):
        want[group] += dy[start:end].double().t() @ x[start:end].double()
    kernels.wgrad(dy, x, kernels.split_rows(torch.tensor(sizes), 3, rows, dy.dtype), dw, accumulate=True)
    for group in (0, 2):
        assert_close(f"dw[{group}]", dw[group], want[group], dtype)
    assert bool(dw[1].isnan().all())


def test_dbias_dscales_accumulate(module, accelerated):
    dy, scales, bias = torch.randn(40, 70), torch.rand(40) - 0.5, torch.randn(3, 70)
    dy[31:], scales[31:] = NAN, NAN
    dbias, dscales, groups = torch.randn(3, 70), torch.randn(40), torch.tensor([0] * 12 + [2] * 19)
    want_bias, want_scales = dbias.double(), dscales.double()
    want_bias.index_add_(0, groups, (scales[:31, None] * dy[:31]).double())
    want_scales[:31] += (dy[:31].double() * bias[groups].double()).sum(1)
    dy, scales, bias, splits = guarded(dy), guarded(scales), guarded(bias), torch.tensor([12, 0, 19])
    with GuardedAllocations(dy, scales, bias, splits, dbias, dscales):
        module("bias_grads")._dbias_dscales(dy, scales, bias, splits, dbias, dscales, [True, True])
    assert_close("dbias", dbias, want_bias, torch.float32)
    assert_close("dscales", dscales, want_scales, torch.float32, inner_products=True)
    fresh = torch.full_like(dbias, NAN), torch.full_like(dscales, NAN)
    module("bias_grads")._dbias_dscales(dy, scales, bias, splits, *fresh, [False, False])
    assert not fresh[0][1].any() and not fresh[1][31:].any()


MLPS = ["no-scales", "two-scales", "same-scales", "recompute", "gpt-oss", "interleaved-transposed-recompute"]
MLPS += ["relu2-not-gated", "head-and-tail", "no-rows", "tail-only", "odd-extents", "tall"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("mlp_id", MLPS)
def test_grouped_mlp(module, grouped_moe, kernels, mlp_id, dtype):
    mlp, names = BY_MLP[mlp_id], ("x", "activation_scales", "bias_scales")
    inputs, pipeline = make_mlp(mlp, dtype, "cpu"), module("pipeline")
    with torch.enable_grad():
        want = run_reference(grouped_moe, mlp, inputs)
    rows = torch.arange(mlp.rows)
    outside = (rows < inputs.offsets[0]) | (rows >= inputs.offsets[-1])
    inputs = inputs.map(lambda name, t: guarded(t.masked_fill(outside.view(-1, *[1] * (t.dim() - 1)), NAN)
                                                if name in names else t))  # fmt: skip
    dy, case, given = guarded(inputs.dy.masked_fill(outside[:, None], NAN)), mlp.case, inputs.tensors
    weights = [given[n] for n in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")]
    kind = (grouped_moe.Activation(*case.activation), case.gated, case.interleaved, case.transposed, case.recompute)
    block, scales = module("block").Block(*weights, *kind), (given["activation_scales"], given["bias_scales"])
    tensors = (given["x"], *scales, *weights)
    needs = module("block").Needs(*(t is not None for t in tensors))
    with GuardedAllocations(*tensors, inputs.offsets, dy):
        split = kernels.split_rows(inputs.offsets, block.num_experts, mlp.rows, dtype)
        y, preact = pipeline.forward(kernels, block, given["x"], split, *scales, save=not case.recompute)
        grads = pipeline.backward(kernels, block, dy, given["x"], split, *scales, preact, needs)
        y, grads = y.clone(), [grad if grad is None else grad.clone() for grad in grads]
    order = (*names, "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    got = {name: grad for name, grad, need in zip(order, grads, needs) if need}
    if scales[0] is scales[1] and scales[0] is not None:
        got["activation_scales"] = got["activation_scales"] + got.pop("bias_scales")
    assert_matches({"y": y, **got}, want, dtype)


def test_bitwise_of_splits(module, kernels, monkeypatch):
    """Sizes and the offsets that they make give the same schedule."""
    sizes = torch.tensor([5, 0, 130, 7])
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()
    for block_m in (16, 64):
        monkeypatch.setattr(module("backends.triton.routing"), "choose_block_m", lambda *_, rows=block_m: rows)
        first, second = (kernels.split_rows(splits, 4, 150, torch.float32).schedule for splits in (sizes, offsets))
        written = 10 + int((-(-sizes // block_m)).sum())
        assert_bitwise("schedule", first[:written], second[:written])
