"""Ops, the dispatcher and autograd: whoever watches ops sees them, and all are differentiable once, in reverse mode."""

import contextlib

import pytest
import torch
from block import checkpointed
from compare import assert_bitwise, assert_differentiable_once
from operations import CALLED, OPERATIONS, SIZES, Log, make_operation

by_loss = pytest.mark.parametrize("curved", [False, True], ids=["linear-loss", "curved-loss"])
by_entry = pytest.mark.parametrize("backward", [False, True], ids=["grad", "backward"])
by_operation = pytest.mark.parametrize("name", OPERATIONS)


class Seen(Exception):
    """What `Sub` ends a call with."""


class Sub(torch.Tensor):
    """A subclass that sees ops itself."""

    names = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.names.append(func.overloadpacket.__name__)
        raise Seen


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_bitwise(name, tensor, want[name])


@by_operation
def test_a_mode_and_a_profiler_see_the_ops(grouped_moe, device, name):
    operation = make_operation(grouped_moe, name, device)
    plain, called = operation.step(), CALLED[name.partition("-")[0]]
    with Log() as log:
        assert_same(operation.step(), plain)
    assert called <= set(log.names)
    with torch.profiler.profile() as profile:
        assert_same(operation.step(), plain)
    names = {event.key.rpartition("::")[2] for event in profile.key_averages()}
    assert called | {each[: -len("_forward")] for each in called if each.endswith("_forward")} <= names


def test_no_gradient_makes_nothing_for_a_backward(grouped_moe, device):
    """Watched or not."""
    function, leaves, _ = make_operation(grouped_moe, "experts-silu-bias", device)
    with torch.no_grad():
        plain = function(*leaves.values())
        with Log() as log:
            watched = function(*leaves.values())
    assert_bitwise("out", watched, plain)
    assert "experts_inference" in log.names and "experts_forward" not in log.names


def test_a_subclass_sees_the_op(grouped_moe, device):
    _, leaves, _ = make_operation(grouped_moe, "linear", device)
    sub = torch.Tensor._make_subclass(Sub, leaves["weight"].detach())
    with torch.no_grad(), pytest.raises(Seen):
        grouped_moe.grouped_linear(leaves["x"], sub, torch.tensor(SIZES, device=device))
    assert Sub.names[-1] == "grouped_linear_forward"


@by_operation
@pytest.mark.parametrize("watched", ["forward", "backward", "neither"])
def test_checkpointing_across_a_mode(grouped_moe, device, name, watched):
    """What is saved is the same whether a mode sees the op or not."""
    operation = make_operation(grouped_moe, name, device)
    want, leaves = operation.step(), list(operation.leaves.values())
    with Log() if watched == "forward" else contextlib.nullcontext():
        out = checkpointed(operation.function)(*leaves)
    with Log() if watched == "backward" else contextlib.nullcontext():
        grads = torch.autograd.grad(out, leaves, operation.dout)
    assert_same({"out": out.detach(), **dict(zip(operation.leaves, grads))}, want)


@pytest.mark.parametrize("values", [[5, 0, 12], [3, 8, 8, 20]], ids=["sizes", "offsets"])
def test_splits_may_change_before_the_backward(grouped_moe, device, values):
    """The gradients are those of the splits that the forward has read."""
    operation, splits = make_operation(grouped_moe, "linear", device), torch.tensor(values, device=device)

    def function(x, weight, *bias):
        return grouped_moe.grouped_linear(x, weight, splits, *bias)

    def function_that_changes_them(*leaves):
        y = function(*leaves)
        splits.fill_(1)
        return y

    want = operation._replace(function=function).step()
    assert_same(operation._replace(function=function_that_changes_them).step(), want)


def test_a_negative_view(grouped_moe, device):
    """Its memory holds the values with the other sign."""
    function, leaves, _ = make_operation(grouped_moe, "linear", device)
    x, *others = leaves.values()
    view = torch.complex(torch.zeros_like(x), x).detach().conj().imag
    assert view.is_neg()
    assert_bitwise("y", function(view, *others), function(-x, *others))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_keeps_the_splits_as_an_input(grouped_moe, device):
    _, leaves, _ = make_operation(grouped_moe, "linear", device)
    x, weight = leaves["x"].detach(), leaves["weight"].detach()
    sizes, others = (torch.tensor(values, device=device) for values in (SIZES, [9, 8, 0]))

    def function(x, splits):
        return grouped_moe.grouped_linear(x, weight, splits)

    traced = torch.jit.trace(function, (x, sizes), check_trace=False)
    assert_bitwise("y", traced(x, others), function(x, others))


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
    assert_same(dict(enumerate(got)), dict(enumerate(want)))


@by_loss
@by_entry
@pytest.mark.parametrize("way", ["plain", "watched", "checkpoint"])
@by_operation
def test_differentiable_once(grouped_moe, device, name, way, curved, backward):
    """A second derivative raises, also where all else is frozen: what it depends on may not be among what is saved.

    Of the linear layer and the parts the gradient is a constant then, for a loss that is linear.
    """
    constant = () if curved or name.startswith(("mlp", "experts")) else make_operation(grouped_moe, name, device).leaves
    for only in ("", *make_operation(grouped_moe, name, device).leaves):
        function, leaves, _ = make_operation(grouped_moe, name, device, only)
        if only in (*constant, "down_proj_bias", "bias_scales"):
            continue
        with Log() if way == "watched" else contextlib.nullcontext():
            out = (checkpointed(function) if way == "checkpoint" else function)(*leaves.values())
            assert_differentiable_once(out, leaves[only or next(iter(leaves))], curved, backward)


@by_operation
def test_a_second_derivative_that_nobody_asks_for(grouped_moe, device, name):
    """A graph of the gradients may be made, as long as nothing is differentiated through it."""
    for only in ("", next(iter(make_operation(grouped_moe, name, device).leaves))):
        function, leaves, dout = make_operation(grouped_moe, name, device, only)
        x, *_ = leaves.values()
        want, got = (
            torch.autograd.grad(function(*leaves.values()), x, dout, create_graph=graph) for graph in (False, True)
        )
        assert_bitwise("grad", got[0], want[0])


@by_operation
def test_forward_mode_is_refused(grouped_moe, device, name):
    operation = make_operation(grouped_moe, name, device)
    leaves = {key: leaf.detach() for key, leaf in operation.leaves.items()}
    for key, leaf in leaves.items():

        def function(tensor):
            return operation.function(*{**leaves, key: tensor}.values())

        with pytest.raises(RuntimeError, match="jvp|setup_context"):  # the latter is PyTorch's
            torch.func.jvp(function, (leaf,), (torch.ones_like(leaf),))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            function(torch.autograd.forward_ad.make_dual(leaf, torch.ones_like(leaf)))


@pytest.mark.filterwarnings("ignore:There is a performance drop.*:UserWarning")
@by_operation
def test_batched_gradients(grouped_moe, device, name):
    """`is_grads_batched`, as vectorized Jacobians ask for it, gives each gradient; the graph of them it cannot."""
    function, leaves, dout = make_operation(grouped_moe, name, device)
    out, leaves = function(*leaves.values()), list(leaves.values())
    douts = torch.randn(3, *dout.shape, device=device)
    want = [torch.autograd.grad(out, leaves, each, retain_graph=True) for each in douts]
    got = torch.autograd.grad(out, leaves, douts, retain_graph=True, is_grads_batched=True)
    for index, grads in enumerate(zip(*want)):
        assert_bitwise(f"gradient {index}", got[index], torch.stack(grads))
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(out, leaves, douts, create_graph=True, is_grads_batched=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop.*:UserWarning")
@by_operation
def test_vmap(grouped_moe, device, name):
    """A batch of inputs one by one, gradients too, though inside of vmap nothing says that they will be asked for."""
    operation = make_operation(grouped_moe, name, device)
    x, *others = (leaf.detach() for leaf in operation.leaves.values())

    def function(x):
        return operation.function(x, *others)

    batch = torch.randn(3, *x.shape, device=device).requires_grad_()
    out, want = torch.func.vmap(function)(batch), torch.stack([function(x) for x in batch])
    assert_bitwise("out", out, want)
    dout = torch.randn_like(out)
    (got,), (want,) = (torch.autograd.grad(result, batch, dout) for result in (out, want))
    assert_bitwise("grad", got, want)
