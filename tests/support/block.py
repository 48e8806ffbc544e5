"""Runs the experts block of the package, or of its reference, forward and backward.

A result is {"out": output, name: gradient}, of the inputs and, if `pairs.make_loras` gives any, of the LoRAs' factors.
"""

from functools import partial
from typing import Callable, Dict, Optional, Tuple

import compare
import torch
from cases import BY_ID, Case, Inputs, make_inputs
from leaves import collect, leaves_of
from pairs import WEIGHTS, factors, loras_of, merged, over_adapters, with_factors
from poison import is_sentinel
from torch import Tensor
from torch.utils.checkpoint import checkpoint


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
    positional = [tensors.pop(name) for name in Inputs._fields[:5]]
    return grouped_moe.grouped_mm_experts(*positional, **tensors, **{**case.kind(grouped_moe), **changes})


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
    return inputs._replace(**leaves_of(inputs.floating(), frozen))


@torch.enable_grad()
def run(
    grouped_moe, case: Case, inputs: Inputs, frozen=(), around: Optional[Callable] = None, before: int = 0,
    keep: bool = False, **changes,
) -> Dict[str, Tensor]:  # fmt: skip
    """Forward and backward of the package. Gradients are those of fresh leaves: layout of `inputs` is kept.

    around: of the block as a function of its tensors makes the one that is called, such as `checkpointed`. before: how
    many backwards go before, whose gradients are dropped. keep: the graph. changes: arguments of the package, LoRAs
    among them.
    """
    leaves, named = with_leaves(inputs, frozen), leaves_of(factors(changes), frozen)

    def block(*tensors: Tensor) -> Tensor:
        return call(grouped_moe, case, Inputs(*tensors, None), **with_factors(changes, named))

    out = (block if around is None else around(block))(*leaves[:-1])
    given = {**leaves.floating(), **named}
    for _ in range(before):
        torch.autograd.grad(out, [t for t in given.values() if t.requires_grad], inputs.dout, retain_graph=True)
    out.backward(inputs.dout, retain_graph=keep)
    return collect({"out": out}, given, frozen)


def widen(inputs: Inputs, loras: Dict) -> Dict[str, Tensor]:
    """The floating-point inputs and the factors by name, in fp64."""
    return {name: t.detach().double() for name, t in {**inputs.floating(), **factors(loras)}.items()}


def reference_out(
    grouped_moe, case: Case, inputs: Inputs, loras: Dict, wide: Optional[Dict[str, Tensor]] = None
) -> Tensor:
    """The output of the reference, in fp64, with weights that LoRAs are merged into. wide: leaves made by `widen`."""
    wide = wide or widen(inputs, loras)
    given, pairs = {name: wide[name] for name in inputs.floating()}, with_factors(loras, wide)

    def part(adapter, chosen):
        ids = inputs.top_k_index if chosen is None else inputs.top_k_index.masked_fill(~chosen[:, None], -1)
        for lora, weight in WEIGHTS.items():
            given[weight] = merged(wide[weight], pairs.get(lora), adapter, case.transposed)
        return grouped_moe.reference.grouped_mm_experts(top_k_index=ids, **given, **case.reference_kind())

    return over_adapters(part, loras)


def differentiate(out: Tensor, leaves: Dict[str, Tensor], dout: Tensor) -> Dict[str, Tensor]:
    """The output, with its gradients, zeros for what takes no part."""
    if not out.requires_grad:  # no row is routed
        return {"out": out, **{name: torch.zeros_like(t) for name, t in leaves.items()}}
    grads = torch.autograd.grad(out, [*leaves.values()], dout.to(out.dtype), allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, grads))}


@torch.enable_grad()
def run_reference(grouped_moe, case: Case, inputs: Inputs, **loras) -> Dict[str, Tensor]:
    """Forward and backward of the reference, in fp64, from the rounded inputs and factors."""
    wide = leaves_of(widen(inputs, loras))
    return differentiate(reference_out(grouped_moe, case, inputs, loras, wide), wide, inputs.dout)


def assert_matches(got: Dict[str, Tensor], want: Dict[str, Tensor], inputs: Inputs, loras: Dict) -> None:
    """Everything in its own dtype. Ranks may be so few that rows of factors' gradients are inner products."""
    own = {name: t.dtype for name, t in {"top_k_weights": inputs.top_k_weights, **factors(loras)}.items()}
    compare.assert_matches(got, want, inputs.dout.dtype, own, few=2 if loras else 0)


def check(grouped_moe, case: Case, inputs: Inputs, poisoned: Optional[Inputs] = None, **changes) -> Dict[str, Tensor]:
    """The package's result, which matches the reference's. poisoned: the inputs that the package gets, if others."""
    got, loras = run(grouped_moe, case, poisoned or inputs, **changes), loras_of(changes)
    assert_matches(got, run_reference(grouped_moe, case, inputs, **loras), inputs, loras)
    return got


def random_inputs(case: Case, device: str, ids: torch.Tensor) -> Inputs:
    """bf16 inputs made on the device, for sizes that take too long on a CPU; no biases."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    weights = torch.rand((case.T, case.top_k), device=device).to(torch.bfloat16)
    up = randn(case.E, case.preact_width, case.H).mul_(case.H**-0.5)
    down = randn(case.E, case.H, case.I).mul_(case.I**-0.5)
    return Inputs(randn(case.T, case.H), ids, weights, up, down, None, None, randn(case.T, case.H))
