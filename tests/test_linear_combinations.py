"""grouped_linear: every combination of bias, scales, layout of the weight, its strides, dtype and frozen operands.

Each with an empty group, rows of no group before and after the others, and NaN wherever nothing must be read.
"""

import itertools

import pytest
import torch
from compare import assert_bitwise
from poison import guarded, poisoned_allocations
from test_grouped_linear import NAN, Linear, _strided
from test_scaled_bias import assert_matches, make_scaled

NAMES = {"no bias": ("x", "weight"), "bias": ("x", "weight", "bias"), "scales": ("x", "weight", "bias", "bias_scales")}
LAYOUTS = {"contiguous": lambda tensor: tensor, "strided": _strided, "misaligned": guarded}
by_names = pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
by_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
by_order = pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def subsets(names):
    """Of the operands, those that want a gradient, all of them first."""
    return [chosen for count in range(len(names), 0, -1) for chosen in itertools.combinations(names, count)]


def run(function, tensors, splits, dy, transposed, wanted):
    """{"y": output, name: gradient}; the others have none."""
    leaves = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in tensors.items()}
    x, weight, *biases = leaves.values()
    y = function(x, weight, splits, *biases, transposed=transposed)
    y.backward(dy)
    assert all((leaf.grad is None) == (name not in wanted) for name, leaf in leaves.items())
    return {"y": y.detach(), **{name: leaves[name].grad for name in wanted}}


@by_dtype
@by_order
@by_layout
@by_names
def test_every_combination(grouped_moe, device, names, layout, transposed, dtype):
    tensors, offsets, dy = make_scaled(Linear("all", head=3, transposed=transposed, bias=True), dtype, device)
    tensors = {name: tensor for name, tensor in tensors.items() if name in names}
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    want = run(grouped_moe.reference.grouped_linear, wide, offsets, dy.double(), transposed, names)
    rows, empty = torch.arange(len(dy), device=device), offsets.diff() == 0
    outside = (rows < offsets[0]) | (rows >= offsets[-1])
    for name, tensor in tensors.items():
        tensor[empty if name in ("weight", "bias") else outside] = NAN
    dy[outside] = NAN
    tensors["weight"], full = layout(tensors["weight"]), None
    for wanted in subsets(names):
        with poisoned_allocations():
            got = run(grouped_moe.grouped_linear, tensors, offsets, dy, transposed, wanted)
        full = full or got
        for name, tensor in got.items():
            assert_bitwise(name, tensor, full[name])
    assert_matches(full, want, tensors, dtype)


@by_order
@by_names
def test_gradcheck_of_every_combination(grouped_moe, names, transposed):
    linear = Linear("gradcheck", (2, 0, 3), 2, 1, 3, 4, transposed, True)
    tensors, offsets, _ = make_scaled(linear, torch.float64, "cpu", torch.float64)

    def function(x, weight, *biases):
        return grouped_moe.grouped_linear(x, weight, offsets, *biases, transposed=transposed)

    for wanted in subsets(names):
        leaves = [tensors[name].detach().requires_grad_(name in wanted) for name in names]
        assert torch.autograd.gradcheck(function, leaves)
