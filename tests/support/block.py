"""Runs the experts block of the package, or of its reference, forward and backward."""

from functools import partial
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import compare
import torch
from cases import BY_ID, Case, Inputs, make_inputs
from compare import assert_bitwise
from poison import is_sentinel
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Result(NamedTuple):
    """The output, and the gradient of each differentiable input by name (None where it was not asked for)."""

    out: Tensor
    grads: Dict[str, Optional[Tensor]]


def make(case_id: str, device: str, dtype: torch.dtype = torch.float32, **changes) -> Tuple[Case, Inputs]:
    """The case of that id, changed, and its inputs."""
    case = BY_ID[case_id]._replace(**changes)
    return case, make_inputs(case, dtype, device)


def count_routed(case: Case, inputs: Inputs) -> int:
    """R, the slots of local experts."""
    return int((~is_sentinel(inputs.top_k_index, case.E)).sum())


def call(grouped_moe, case: Case, inputs: Inputs, **changes) -> Tensor:
    """`grouped_mm_experts` of the kind of a case."""
    tensors = inputs._asdict()
    del tensors["dout"]
    kind = {name: getattr(case, name) for name in ("gated", "interleaved", "transposed", "recompute")}
    kind.update(activation=grouped_moe.Activation(*case.activation), **changes)
    positional = [tensors.pop(name) for name in Inputs._fields[:5]]
    return grouped_moe.grouped_mm_experts(*positional, **tensors, **kind)


def parts_of(grouped_moe, case: Case) -> Callable[..., Tensor]:
    """The block of relu2 experts without a gate, made of the building blocks, as a function of the same tensors."""
    assert (case.activation[0], case.gated) == ("relu2", False)

    def block(x, ids, weights, up, down, up_bias, down_bias):
        routing = grouped_moe.route(ids, case.E)
        linear = partial(grouped_moe.grouped_linear, splits=routing.expert_offsets, transposed=case.transposed)
        rows = linear(grouped_moe.gather_rows(x, routing), up, bias=up_bias)
        rows = linear(torch.relu(rows).square(), down, bias=down_bias)
        return grouped_moe.combine_rows(rows, weights, routing)

    return block


def checkpointed(function: Callable) -> Callable:
    """The function under activation checkpointing."""
    return partial(checkpoint, function, use_reentrant=False)


def with_leaves(inputs: Inputs, frozen=()) -> Inputs:
    """The same inputs as leaves that require gradients, but those that are frozen."""
    leaves = {name: t.detach().requires_grad_(name not in frozen) for name, t in inputs.floating().items()}
    return inputs._replace(**leaves)


def run(grouped_moe, case: Case, inputs: Inputs, frozen=(), around: Optional[Callable] = None, **changes) -> Result:
    """Forward and backward of the package. Gradients are those of fresh leaves: layout of `inputs` is kept.

    around: of the block as a function of its tensors makes the one that is called, such as `checkpointed`.
    """
    leaves = with_leaves(inputs, frozen)

    def block(*tensors: Tensor) -> Tensor:
        return call(grouped_moe, case, Inputs(*tensors, None), **changes)

    out = (block if around is None else around(block))(*leaves[:-1])
    out.backward(inputs.dout)
    return Result(out.detach(), {name: t.grad for name, t in leaves.floating().items()})


def call_reference(grouped_moe, case: Case, ids: Tensor, tensors: Dict[str, Tensor]) -> Tensor:
    """The reference's block of the kind of a case. tensors: the floating ones by name."""
    name, alpha, limit, up_offset = case.activation
    return grouped_moe.reference.grouped_mm_experts(
        top_k_index=ids, transposed=case.transposed, name=name, alpha=alpha, limit=limit, up_offset=up_offset,
        gated=case.gated, interleaved=case.interleaved, **tensors,
    )  # fmt: skip


def differentiate(out: Tensor, leaves: Dict[str, Tensor], dout: Tensor) -> Result:
    """The output, with its gradients, zeros for what takes no part."""
    if not out.requires_grad:  # no row is routed
        return Result(out, {name: torch.zeros_like(t) for name, t in leaves.items()})
    grads = torch.autograd.grad(out, [*leaves.values()], dout.to(out.dtype), allow_unused=True, materialize_grads=True)
    return Result(out.detach(), dict(zip(leaves, grads)))


def run_reference(grouped_moe, case: Case, inputs: Inputs) -> Result:
    """Forward and backward of the reference, in fp64, from the rounded inputs."""
    wide = {name: t.detach().double().requires_grad_() for name, t in inputs.floating().items()}
    return differentiate(call_reference(grouped_moe, case, inputs.top_k_index, wide), wide, inputs.dout)


def assert_matches(got: Result, want: Result, dtype: torch.dtype, weights_dtype: Optional[torch.dtype] = None) -> None:
    """Output and every gradient, of `dtype` but for routing weights."""
    own = {"top_k_weights": weights_dtype or dtype}
    compare.assert_matches({"out": got.out, **got.grads}, {"out": want.out, **want.grads}, dtype, own)


def check(grouped_moe, case: Case, inputs: Inputs, **changes) -> Result:
    """The package's result, which matches the reference's."""
    got, want = run(grouped_moe, case, inputs, **changes), run_reference(grouped_moe, case, inputs)
    assert_matches(got, want, inputs.dout.dtype, inputs.top_k_weights.dtype)
    return got


def assert_same(got: Result, want: Result, frozen=()) -> None:
    """Output and every gradient bitwise, but for those that are frozen, which have none."""
    assert_bitwise("out", got.out, want.out)
    assert got.grads.keys() == want.grads.keys()
    for name, grad in got.grads.items():
        if name in frozen:
            assert grad is None, f"{name}: a gradient, though it is frozen"
        else:
            assert_bitwise(f"grad of {name}", grad, want.grads[name])


def random_inputs(case: Case, device: str, ids: torch.Tensor) -> Inputs:
    """bf16 inputs made on the device, for sizes that take too long on a CPU; no biases."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    weights = torch.rand((case.T, case.top_k), device=device).to(torch.bfloat16)
    up = randn(case.E, case.preact_width, case.H).mul_(case.H**-0.5)
    down = randn(case.E, case.H, case.I).mul_(case.I**-0.5)
    return Inputs(randn(case.T, case.H), ids, weights, up, down, None, None, randn(case.T, case.H))
