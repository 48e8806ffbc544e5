"""`FlopCounterMode` counts the products of all ops: 2 M N K each, every slot taken for routed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

T, TOP_K, E, H, I = 24, 2, 3, 16, 8  # noqa: E741
UP, DOWN = 2 * T * TOP_K * 2 * I * H, 2 * T * TOP_K * I * H


def count(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.fixture
def inputs(device):
    shapes = ((T, H), (T, TOP_K), (E, 2 * I, H), (E, H, I))
    x, weights, up, down = (torch.rand(shape, device=device).requires_grad_() for shape in shapes)
    return x, torch.randint(0, E, (T, TOP_K), device=device), weights, up, down


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
def test_experts(grouped_moe, inputs, recompute):
    x, _, weights, up, down = inputs
    with torch.no_grad():
        assert count(lambda: grouped_moe.grouped_mm_experts(*inputs)) == UP + DOWN

    def step(leaves):
        torch.autograd.grad(grouped_moe.grouped_mm_experts(*inputs, recompute=recompute).sum(), leaves)

    again = UP if recompute else 0
    assert count(lambda: step((x, weights, up, down))) == 3 * (UP + DOWN) + again
    up.requires_grad_(False), down.requires_grad_(False)
    assert count(lambda: step((x,))) == 2 * (UP + DOWN) + again


def test_linear_and_mlp(grouped_moe, inputs, device):
    x, _, _, up, down = inputs
    sizes = torch.tensor([5, 0, 12], device=device)
    product = 2 * T * 2 * I * H
    assert count(lambda: torch.autograd.grad(grouped_moe.grouped_linear(x, up, sizes).sum(), (x, up))) == 3 * product
    frozen = up.detach()
    assert count(lambda: torch.autograd.grad(grouped_moe.grouped_linear(x, frozen, sizes).sum(), x)) == 2 * product
    mlp = count(lambda: torch.autograd.grad(grouped_moe.grouped_mlp(x, sizes, None, up, down).sum(), (x, up, down)))
    assert mlp == 3 * (product + product // 2)


@pytest.mark.parametrize("single", [True, False], ids=["packed", "discrete"])
def test_main_grad(grouped_moe, device, single):
    layer = grouped_moe.GroupedLinear(
        E, H, I, bias=False, single_grouped_weight=single, accumulate_into_main_grad=True, device=device
    )
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    x, sizes = torch.rand(T, H, device=device, requires_grad=True), torch.tensor([5, 0, 12], device=device)
    assert count(lambda: layer(x, sizes).sum().backward()) == 3 * 2 * T * H * I
