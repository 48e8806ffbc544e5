"""grouped_linear: every combination of operands, what its backward reads, and its errors; see test_sorted_rows.py."""

import itertools

import pytest
import torch
from compare import assert_bitwise, assert_part
from linears import BY_LINEAR, Linear
from marks import by_fp32_and_bf16
from poison import LAYOUTS, poisoned_allocations
from sorted_rows import assert_matches, run, run_reference, with_leaves

SCALED = BY_LINEAR["bias-scales"]
NAMES = ("x", "weight", "bias", "bias_scales")
by_order = pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
by_names = pytest.mark.parametrize("names", [NAMES[:2], NAMES[:3], NAMES], ids=["no bias", "bias", "scales"])


def subsets(names):
    """Of the operands, those that want a gradient, all of them first."""
    return [chosen for count in range(len(names), 0, -1) for chosen in itertools.combinations(names, count)]


@by_fp32_and_bf16
@by_order
@pytest.mark.parametrize("layout", ["contiguous", "transposed-apart", "guarded"])
@by_names
def test_every_combination(grouped_moe, device, names, layout, transposed, dtype):
    """Of operands, those that want a gradient, layouts of the weight: next to NaN wherever nothing must be read."""
    linear = Linear("all", head=3, transposed=transposed, bias=True, scales=True)
    inputs = linear.make(dtype, device, torch.float32)
    inputs = inputs.replace(**{name: None for name in NAMES if name not in names})
    poisoned, full = inputs.poisoned(), None
    if layout in LAYOUTS:
        poisoned = poisoned.replace(weight=LAYOUTS[layout](poisoned.tensors["weight"]))
    for wanted in subsets(names):
        with poisoned_allocations():
            got = run(grouped_moe, linear, poisoned, frozen=set(names) - set(wanted))
        full = full or got
        assert_part(got, full)
    assert_matches(full, run_reference(grouped_moe, linear, inputs), dtype, torch.float32)


@by_order
@by_names
def test_gradcheck_of_every_combination(grouped_moe, names, transposed):
    linear = Linear("gradcheck", (2, 0, 3), 2, 1, 3, 4, transposed, bias=True, scales=True)
    inputs = linear.make(torch.float64, "cpu")

    def function(x, weight, *biases):
        return grouped_moe.grouped_linear(x, weight, inputs.offsets, *biases, transposed=transposed)

    for wanted in subsets(names):
        leaves = with_leaves(inputs, frozen=set(NAMES) - set(wanted))
        assert torch.autograd.gradcheck(function, [leaves.tensors[name] for name in names])


@pytest.mark.parametrize(
    "wanted, changed, read",
    [
        ("weight", "weight", False),
        ("bias", "weight", False),
        ("x", "bias", False),
        ("bias", "x", False),
        ("x", "weight", True),
        ("weight", "x", True),
        ("bias_scales", "bias", True),
    ],
)
def test_what_the_backward_does_not_read_may_change(grouped_moe, device, wanted, changed, read):
    """In place, before it. What it reads may not."""
    inputs, frozen = SCALED.make(torch.float32, device), set(NAMES) - {wanted}
    leaves = inputs.map(lambda name, tensor: tensor.clone().requires_grad_(name == wanted))
    y = SCALED.call(grouped_moe, leaves, inputs.offsets)
    with torch.no_grad():
        leaves.tensors[changed].mul_(3)
    if read:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(inputs.dy)
    else:
        y.backward(inputs.dy)
        assert_bitwise(wanted, leaves.tensors[wanted].grad, run(grouped_moe, SCALED, inputs, frozen)[wanted])


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
