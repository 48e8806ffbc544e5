"""Differentiable once, in reverse mode: all else raises, whatever is frozen. Linear layers: test_dispatch.py."""

import pytest
import torch
from block import call, with_leaves
from cases import BY_ID, make_inputs
from compare import assert_bitwise, assert_differentiable_once
from mlps import BY_MLP, make
from mlps import call as call_mlp

FLOATING = ("hidden_states", "top_k_weights", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
by_recompute = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
by_loss = pytest.mark.parametrize("curved", [False, True], ids=["linear-loss", "curved-loss"])
by_entry = pytest.mark.parametrize("backward", [False, True], ids=["grad", "backward"])


@by_recompute
@by_loss
@by_entry
@pytest.mark.parametrize("only", FLOATING[:4])
def test_experts_once(grouped_moe, device, only, curved, backward, recompute):
    """All else is frozen, so that what the gradient depends on may not be among what was saved."""
    case = BY_ID["silu-bias"]._replace(recompute=recompute)
    inputs = make_inputs(case, torch.float32, device)
    leaves = with_leaves(inputs, frozen=[name for name in FLOATING if name != only])
    assert_differentiable_once(call(grouped_moe, case, leaves), getattr(leaves, only), curved, backward)


@by_recompute
@by_loss
@by_entry
@pytest.mark.parametrize("only", ["x", "activation_scales", "gate_up_proj", "down_proj"])
def test_mlp_once(grouped_moe, device, only, curved, backward, recompute):
    mlp = BY_MLP["two-scales"]
    inputs = make(mlp, torch.float32, device)
    leaf = inputs.tensors[only].detach().requires_grad_()
    y = call_mlp(grouped_moe, mlp, inputs.replace(**{only: leaf}), recompute=recompute)
    assert_differentiable_once(y, leaf, curved, backward)


@pytest.mark.parametrize("frozen", [False, True], ids=["weights", "frozen"])
def test_a_second_derivative_that_nobody_asks_for(grouped_moe, device, frozen):
    """A graph of the gradients may be made, as long as nothing is differentiated through it."""
    case = BY_ID["silu-bias"]
    leaves = with_leaves(make_inputs(case, torch.float32, device), frozen=FLOATING[2:] if frozen else ())
    (want,) = torch.autograd.grad(call(grouped_moe, case, leaves).sum(), leaves.hidden_states)
    (got,) = torch.autograd.grad(call(grouped_moe, case, leaves).sum(), leaves.hidden_states, create_graph=True)
    assert torch.equal(got, want)


def test_forward_mode_is_refused(grouped_moe, device):
    routing = grouped_moe.route(torch.tensor([[0, 1], [1, 2]], device=device), 3)
    weights, rows = torch.rand(2, 2, device=device), torch.randn(4, 4, device=device)
    mlp, case = BY_MLP["two-scales"], BY_ID["silu-bias"]
    mlp_inputs, inputs = make(mlp, torch.float32, device), make_inputs(case, torch.float32, device)
    for function, tensor in (
        (lambda x: grouped_moe.gather_rows(x, routing), rows[:2]),
        (lambda y: grouped_moe.combine_rows(y, weights, routing), rows),
        (lambda w: grouped_moe.combine_rows(rows, w, routing), weights),
        (lambda x: call_mlp(grouped_moe, mlp, mlp_inputs.replace(x=x)), mlp_inputs.tensors["x"]),
        (lambda x: call(grouped_moe, case, inputs._replace(hidden_states=x)), inputs.hidden_states),
    ):
        with pytest.raises(RuntimeError, match="jvp|setup_context"):  # the latter is PyTorch's, of experts
            torch.func.jvp(function, (tensor,), (torch.ones_like(tensor),))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            function(torch.autograd.forward_ad.make_dual(tensor, torch.ones_like(tensor)))


@pytest.mark.filterwarnings("ignore:There is a performance drop.*:UserWarning")
@pytest.mark.parametrize("op", ["linear", "experts", "mlp"])
def test_batched_gradients(grouped_moe, device, op):
    """`is_grads_batched`, as vectorized Jacobians ask for it, gives each gradient; the graph of them it cannot."""
    x = torch.randn(8, 64, device=device, requires_grad=True)
    if op == "linear":
        out = grouped_moe.grouped_linear(x, torch.randn(2, 32, 64, device=device), torch.tensor([5, 3], device=device))
    elif op == "experts":
        inputs = make_inputs(BY_ID["silu-bias"], torch.float32, device)
        x = inputs.hidden_states.requires_grad_()
        out = call(grouped_moe, BY_ID["silu-bias"], inputs)
    else:
        inputs = make(BY_MLP["two-scales"], torch.float32, device)
        x = inputs.tensors["x"].requires_grad_()
        out = call_mlp(grouped_moe, BY_MLP["two-scales"], inputs)
    douts = torch.randn(3, *out.shape, device=device)
    want = torch.stack([torch.autograd.grad(out, x, dout, retain_graph=True)[0] for dout in douts])
    (got,) = torch.autograd.grad(out, x, douts, retain_graph=True, is_grads_batched=True)
    assert_bitwise("grad", got, want)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(out, x, douts, create_graph=True, is_grads_batched=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop.*:UserWarning")
@by_recompute
@pytest.mark.parametrize("op", ["experts", "mlp"])
def test_vmap(grouped_moe, device, op, recompute):
    """A batch of inputs one by one, gradients too, though inside of vmap nothing says that they will be asked for."""
    if op == "experts":
        inputs = make_inputs(BY_ID["silu-bias"]._replace(recompute=recompute), torch.float32, device)
        x = inputs.hidden_states

        def function(x):
            return call(grouped_moe, BY_ID["silu-bias"], inputs._replace(hidden_states=x), recompute=recompute)
    else:
        inputs = make(BY_MLP["two-scales"], torch.float32, device)
        x = inputs.tensors["x"]

        def function(x):
            return call_mlp(grouped_moe, BY_MLP["two-scales"], inputs.replace(x=x), recompute=recompute)

    batch = torch.randn(3, *x.shape, device=device).requires_grad_()
    dout = torch.randn_like(batch)
    out, want = torch.func.vmap(function)(batch), torch.stack([function(x) for x in batch])
    assert_bitwise("out", out, want)
    (got,), (want,) = (torch.autograd.grad(result, batch, dout) for result in (out, want))
    assert_bitwise("grad", got, want)
