"""Inputs of the layers over rows that are sorted by group, and how tests run these layers and compare their results.

A case is a NamedTuple of `linears` or `mlps`, with `call(grouped_moe, inputs, splits, **changes)`, which returns y, and
`reference(grouped_moe, inputs, **lora)`, which does in plain torch.
"""

from typing import Dict, NamedTuple, Optional

import compare
import torch
from leaves import collect, leaves_of
from pairs import factors, loras_of, with_factors
from poison import guarded
from torch import Tensor

SCALES = ("activation_scales", "bias_scales")
PER_ROW = ("x", *SCALES)


class Inputs(NamedTuple):
    """The floating tensors by argument, None for what a case has not; the offsets; the cotangent of the output."""

    tensors: Dict[str, Optional[Tensor]]
    offsets: Tensor
    dy: Tensor

    def replace(self, **tensors) -> "Inputs":
        return self._replace(tensors={**self.tensors, **tensors})

    def given(self) -> Dict[str, Tensor]:
        """The tensors that are there, one tensor that is given twice only once."""
        same = self.tensors["bias_scales"] is self.tensors.get("activation_scales")
        return {n: t for n, t in self.tensors.items() if t is not None and not (same and n == "bias_scales")}

    def map(self, function) -> "Inputs":
        """function(name, tensor) of every tensor; one that is given twice stays one."""
        changed = {name: function(name, tensor) for name, tensor in self.given().items()}
        if self.tensors["bias_scales"] is self.tensors.get("activation_scales"):
            changed["bias_scales"] = changed.get("activation_scales")
        return self.replace(**changed)

    def poisoned(self) -> "Inputs":
        """NaN in rows of no group, their scales and cotangents, and in weights and biases of groups without rows."""
        outside, empty = self.outside(), self.offsets.diff() == 0

        def poison(name, tensor):
            tensor = tensor.clone()
            tensor[outside if name in PER_ROW else empty] = float("nan")
            return tensor

        return self.map(poison)._replace(dy=poison("x", self.dy))

    def guarded(self) -> "Inputs":
        """Each tensor in the middle of NaN."""
        return self.map(lambda _, tensor: guarded(tensor))._replace(dy=guarded(self.dy))

    def outside(self) -> Tensor:
        """Which rows are of no group."""
        rows = torch.arange(len(self.dy), device=self.dy.device)
        return (rows < self.offsets[0]) | (rows >= self.offsets[-1])


def with_leaves(inputs: Inputs, frozen=()) -> Inputs:
    return inputs.map(lambda name, tensor: tensor.detach().requires_grad_(name not in frozen))


@torch.enable_grad()
def run(grouped_moe, case, inputs: Inputs, frozen=(), splits=None, **changes) -> Dict[str, Tensor]:
    """{"y": output, name: gradient}; what is frozen has none. splits: those of the inputs if not given.

    changes: arguments of the layer, a LoRA among them.
    """
    leaves, named = with_leaves(inputs, frozen), leaves_of(factors(changes), frozen)
    splits = grouped_moe.GroupOffsets(inputs.offsets) if splits is None else splits
    y = case.call(grouped_moe, leaves, splits, **with_factors(changes, named))
    y.backward(inputs.dy)
    return collect({"y": y}, {**leaves.given(), **named}, frozen)


@torch.enable_grad()
def run_reference(grouped_moe, case, inputs: Inputs, **lora) -> Dict[str, Tensor]:
    """As `run`, by the reference in fp64, from the rounded inputs and factors."""
    leaves = inputs.map(lambda _, tensor: tensor.detach().double().requires_grad_())
    named = leaves_of({name: factor.double() for name, factor in factors(lora).items()})
    y = case.reference(grouped_moe, leaves, **with_factors(lora, named))
    y.backward(inputs.dy.double())
    return collect({"y": y}, {**leaves.given(), **named})


def check(grouped_moe, case, inputs: Inputs, poisoned: Optional[Inputs] = None, **changes) -> Dict[str, Tensor]:
    """The package's result, which matches the reference's. poisoned: the inputs that the package gets, if others."""
    got, loras = run(grouped_moe, case, poisoned or inputs, **changes), loras_of(changes)
    own = {name: tensor.dtype for name, tensor in {**inputs.given(), **factors(loras)}.items()}
    compare.assert_matches(got, run_reference(grouped_moe, case, inputs, **loras), inputs.dy.dtype, own)
    return got
