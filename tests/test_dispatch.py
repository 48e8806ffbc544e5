"""Ops and the dispatcher: whoever watches ops sees them, and nothing else changes."""

import contextlib

import pytest
import torch
import torch.utils.checkpoint
from compare import assert_bitwise, assert_differentiable_once
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


class Seen(Exception):
    """What `Sub` ends a call with."""


class Sub(torch.Tensor):
    """A subclass that sees ops itself."""

    names = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.names.append(func.overloadpacket.__name__)
        raise Seen


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
    assert {"grouped_linear_forward", "grouped_linear_backward"} <= set(log.names)
    for name, got, want in zip(NAMES, watched, plain):
        assert_bitwise(name, got, want)


def test_a_subclass_sees_the_op(linear, device):
    function, (x, weight, *_), _ = linear
    sub = torch.Tensor._make_subclass(Sub, weight.detach())
    with torch.no_grad(), pytest.raises(Seen):
        function(x, sub, torch.tensor([5, 0, 12], device=device))
    assert Sub.names[-1] == "grouped_linear_forward"


@pytest.mark.parametrize("values", [[5, 0, 12], [3, 8, 8, 20]], ids=["sizes", "offsets"])
def test_splits_may_change_before_the_backward(linear, device, values):
    """The gradients are those of the splits that the forward has read."""
    function, (x, weight, bias, scales), dy = linear
    splits = torch.tensor(values, device=device)
    want = step(linear, splits.clone())
    y = function(x, weight, splits, bias, scales)
    splits.fill_(1)
    grads = torch.autograd.grad(y, (x, weight, bias, scales), dy)
    for name, got, expected in zip(NAMES, (y, *grads), want):
        assert_bitwise(name, got, expected)


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
    names = [event.key.rpartition("::")[2] for event in profile.key_averages()]
    assert {"grouped_linear", "grouped_linear_forward", "grouped_linear_backward"} <= set(names)


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


by_loss = pytest.mark.parametrize("curved", [False, True], ids=["linear-loss", "curved-loss"])
by_entry = pytest.mark.parametrize("backward", [False, True], ids=["grad", "backward"])


@by_loss
@by_entry
@pytest.mark.parametrize("watched", [False, True], ids=["plain", "watched"])
def test_differentiable_once(linear, device, curved, backward, watched):
    function, (x, weight, *others), _ = linear
    with Log() if watched else contextlib.nullcontext():
        y = function(x, weight, torch.tensor([5, 0, 12], device=device), *others)
        assert_differentiable_once(y, x, curved, backward)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_keeps_the_splits_as_an_input(linear, device):
    function, (x, weight, *_), _ = linear
    sizes, others = (torch.tensor(values, device=device) for values in ([5, 0, 12], [9, 8, 0]))
    with torch.no_grad():
        weight = weight.detach()
        traced = torch.jit.trace(lambda x, splits: function(x, weight, splits), (x, sizes), check_trace=False)
        assert_bitwise("y", traced(x, others), function(x, weight, others))


def test_a_default_device_changes_nothing(grouped_moe, device):
    """What calls make is where their inputs are."""
    x, up, down = (torch.randn(shape, device=device) for shape in ((24, 16), (3, 32, 16), (3, 16, 16)))
    ids, sizes = torch.tensor([[0, 1], [2, 5], [1, 0]] * 8, device=device), torch.tensor([5, 0, 12], device=device)
    weights, scales = torch.rand(24, 2, device=device), torch.rand(24, device=device)
    bias = torch.randn(3, 16, device=device)
    layer = grouped_moe.GroupedLinear(3, 16, 16, delay_wgrad=True, device=device)
    leaves = [leaf.requires_grad_() for leaf in (x, up, down, weights, scales, bias)]

    def results():
        routing = grouped_moe.route(ids, 3)
        for out in (
            grouped_moe.grouped_mm_experts(x, ids, weights, up, down),
            grouped_moe.grouped_mm_experts(x, ids, weights, up, down, recompute=True, capacity=48),
            grouped_moe.combine_rows(grouped_moe.gather_rows(x, routing), weights, routing),
            grouped_moe.grouped_linear(x, down, sizes, bias, scales),
            grouped_moe.grouped_linear(x, down, [5, 0, 12]),
            grouped_moe.grouped_mlp(x, sizes, scales, up, down),
            layer(x, sizes),
        ):
            grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
            yield from (out.detach(), *(grad for grad in grads if grad is not None))
        layer.backward_dw()
        yield from (parameter.grad.clone() for parameter in layer.parameters())
        layer.zero_grad()
        yield from grouped_moe.grouped_dbias_dscales(out.detach(), scales, bias.detach(), sizes)

    want = list(results())
    with torch.device("meta"):
        got = list(results())
    assert len(got) == len(want)
    for tensor, expected in zip(got, want):
        assert_bitwise("result", tensor, expected)
