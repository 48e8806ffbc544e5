"""Runs the experts block of the package, or of its reference, forward and backward."""

from typing import Dict, NamedTuple, Optional

import torch
from cases import Case, Inputs
from compare import assert_bitwise, assert_close
from torch import Tensor


class Result(NamedTuple):
    """The output, and the gradient of each differentiable input by name (None where it was not asked for)."""

    out: Tensor
    grads: Dict[str, Optional[Tensor]]


def call(grouped_moe, case: Case, inputs: Inputs, **changes) -> Tensor:
    """`grouped_mm_experts` of the kind of a case."""
    tensors = inputs._asdict()
    del tensors["dout"]
    kind = {name: getattr(case, name) for name in ("gated", "interleaved", "transposed", "recompute")}
    kind.update(activation=grouped_moe.Activation(*case.activation), **changes)
    positional = [tensors.pop(name) for name in Inputs._fields[:5]]
    return grouped_moe.grouped_mm_experts(*positional, **tensors, **kind)


def with_leaves(inputs: Inputs, frozen=()) -> Inputs:
    """The same inputs as leaves that require gradients, but those that are frozen."""
    leaves = {name: t.detach().requires_grad_(name not in frozen) for name, t in inputs.floating().items()}
    return inputs._replace(**leaves)


def run(grouped_moe, case: Case, inputs: Inputs, frozen=(), **changes) -> Result:
    """Forward and backward of the package. Gradients are those of fresh leaves: layout of `inputs` is kept."""
    leaves = with_leaves(inputs, frozen)
    out = call(grouped_moe, case, leaves, **changes)
    out.backward(inputs.dout)
    return Result(out.detach(), {name: t.grad for name, t in leaves.floating().items()})


def run_reference(grouped_moe, case: Case, inputs: Inputs) -> Result:
    """Forward and backward of the reference, in fp64, from the rounded inputs."""
    wide = {name: t.detach().double().requires_grad_() for name, t in inputs.floating().items()}
    name, alpha, limit, up_offset = case.activation
    out = grouped_moe.reference.grouped_mm_experts(
        top_k_index=inputs.top_k_index, transposed=case.transposed, name=name, alpha=alpha, limit=limit,
        up_offset=up_offset, gated=case.gated, interleaved=case.interleaved, **wide,
    )  # fmt: skip
    if not out.requires_grad:  # No row is routed: nothing in its loop takes part.
        return Result(out, {name: torch.zeros_like(t) for name, t in wide.items()})
    leaves, dout = list(wide.values()), inputs.dout.double()
    grads = torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)
    return Result(out.detach(), dict(zip(wide, grads)))


def assert_matches(got: Result, want: Result, dtype: torch.dtype, weights_dtype: Optional[torch.dtype] = None) -> None:
    """Output and every gradient within the tolerances of dtype, each in its own dtype."""
    assert got.out.dtype == dtype
    assert_close("out", got.out, want.out, dtype)
    assert got.grads.keys() == want.grads.keys()
    for name, grad in got.grads.items():
        own = (weights_dtype or dtype) if name == "top_k_weights" else dtype
        assert grad is not None and grad.dtype == own, f"{name}: no gradient of {own}"
        assert_close(f"grad of {name}", grad, want.grads[name], dtype, inner_products=name == "top_k_weights")


def assert_same(got: Result, want: Result) -> None:
    """Output and every gradient bitwise."""
    assert_bitwise("out", got.out, want.out)
    assert got.grads.keys() == want.grads.keys()
    for name, grad in got.grads.items():
        assert_bitwise(f"grad of {name}", grad, want.grads[name])


def step(grouped_moe, case: Case, inputs: Inputs, recompute: bool = False) -> list:
    """[output, gradients]. The inputs are leaves."""
    out = call(grouped_moe, case, inputs, recompute=recompute)
    return [out, *torch.autograd.grad(out, list(inputs.floating().values()), inputs.dout)]


def random_inputs(case: Case, device: str, ids: torch.Tensor) -> Inputs:
    """bf16 inputs made on the device, for sizes that take too long on a CPU; no biases."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    weights = torch.rand((case.T, case.top_k), device=device).to(torch.bfloat16)
    up = randn(case.E, case.preact_width, case.H).mul_(case.H**-0.5)
    down = randn(case.E, case.H, case.I).mul_(case.I**-0.5)
    return with_leaves(Inputs(randn(case.T, case.H), ids, weights, up, down, None, None, randn(case.T, case.H)))


def reference_step(grouped_moe, case: Case, inputs: Inputs, rows: torch.Tensor) -> list:
    """[output, gradients] in fp64 of these tokens alone, of weights as `random_inputs` makes them."""
    tensors = [inputs.hidden_states[rows], inputs.top_k_weights[rows], inputs.gate_up_proj, inputs.down_proj]
    tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
    x, weights, up, down = tensors
    kind = {"name": case.activation[0], "gated": case.gated}
    out = grouped_moe.reference.grouped_mm_experts(x, inputs.top_k_index[rows], weights, up, down, **kind)
    return [out.detach(), *torch.autograd.grad(out, tensors, inputs.dout[rows].double())]
