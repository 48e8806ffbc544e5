"""Plain eager calls pass the dispatcher by; whoever watches ops still sees them, and nothing else changes."""

import contextlib

import pytest
import torch
import torch.utils.checkpoint
from compare import assert_bitwise
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = ("y", "dx", "dweight", "dbias", "dscales")


class Log(TorchDispatchMode):
    """Names of the ops that were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    """A subclass that sees ops itself."""

    names = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.names.append(func.overloadpacket.__name__)
        raise NotImplementedError("seen")


@pytest.fixture
def linear(grouped_moe, device):
    """(grouped_linear of fixed sizes, its tensor inputs, a cotangent)."""
    x = torch.randn(24, 16, device=device, requires_grad=True)
    weight = torch.randn(3, 8, 16, device=device, requires_grad=True)
    bias = torch.randn(3, 8, device=device, requires_grad=True)
    scales = torch.rand(24, device=device, requires_grad=True)
    return grouped_moe.grouped_linear, (x, weight, bias, scales), torch.randn(24, 8, device=device)


def step(linear, splits):
    function, (x, weight, bias, scales), dy = linear
    y = function(x, weight, splits, bias, scales)
    return (y, *torch.autograd.grad(y, (x, weight, bias, scales), dy))


def test_a_mode_sees_the_ops(linear, device):
    splits = torch.tensor([5, 0, 12], device=device)
    plain = step(linear, splits)
    with Log() as log:
        watched = step(linear, splits)
    assert {"grouped_linear", "grouped_linear_backward"} <= set(log.names)
    for name, got, want in zip(NAMES, watched, plain):
        assert_bitwise(name, got, want)


def test_a_subclass_sees_the_op(linear, device):
    function, (x, weight, *_), _ = linear
    sub = torch.Tensor._make_subclass(Sub, weight.detach())
    with torch.no_grad(), pytest.raises(NotImplementedError, match="seen"):
        function(x, sub, torch.tensor([5, 0, 12], device=device))
    assert Sub.names[-1] == "grouped_linear"


def test_splits_may_not_change_before_the_backward(linear, device):
    function, (x, weight, bias, scales), dy = linear
    splits = torch.tensor([5, 0, 12], device=device)
    y = function(x, weight, splits, bias, scales)
    splits.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, (x, weight, bias, scales), dy)


@pytest.mark.parametrize("watched", ["forward", "backward"])
def test_checkpointing_across_a_mode(linear, device, watched):
    """What is saved is the same whether a mode sees the op or not."""
    function, (x, weight, bias, scales), dy = linear
    splits = torch.tensor([5, 0, 12], device=device)
    before = step(linear, splits)
    with Log() if watched == "forward" else contextlib.nullcontext():
        y = torch.utils.checkpoint.checkpoint(function, x, weight, splits, bias, scales, use_reentrant=False)
    with Log() if watched == "backward" else contextlib.nullcontext():
        grads = torch.autograd.grad(y, (x, weight, bias, scales), dy)
    for name, got, want in zip(NAMES, (y, *grads), before):
        assert_bitwise(name, got, want)


def test_a_profiler_sees_the_ops(linear, device):
    with torch.profiler.profile() as profile:
        step(linear, torch.tensor([5, 0, 12], device=device))
    names = " ".join(event.key for event in profile.key_averages())
    assert "::grouped_linear " in names + " " and "::grouped_linear_backward" in names


def test_forward_mode_is_refused(linear, device):
    function, (x, weight, *_), _ = linear
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        function(dual, weight.detach(), torch.tensor([5, 0, 12], device=device))


def test_a_negative_view(linear, device):
    """Its memory holds the values with the other sign."""
    function, (x, weight, *_), _ = linear
    z = torch.complex(torch.zeros_like(x), x).detach()
    splits = torch.tensor([5, 0, 12], device=device)
    with torch.no_grad():
        got, want = function(z.conj().imag, weight, splits), function(-x, weight, splits)
    assert z.conj().imag.is_neg()
    assert_bitwise("y", got, want)


def test_differentiable_once(linear, device):
    function, (x, weight, *_), dy = linear
    y = function(x, weight, torch.tensor([5, 0, 12], device=device))
    dx, dw = torch.autograd.grad(y, (x, weight), dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (dx.sum() + dw.sum()).backward()
