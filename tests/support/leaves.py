"""Leaves of autograd, and what a step by them gives."""

from typing import Dict

from torch import Tensor


def leaves_of(tensors: Dict[str, Tensor], frozen=()) -> Dict[str, Tensor]:
    """The same tensors as leaves that require gradients, but those that are frozen."""
    return {name: tensor.detach().requires_grad_(name not in frozen) for name, tensor in tensors.items()}


def collect(outputs: Dict[str, Tensor], leaves: Dict[str, Tensor], frozen=()) -> Dict[str, Tensor]:
    """The outputs and the gradients of leaves by name. Those that are frozen, and no others, must have none."""
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    assert {name for name, grad in grads.items() if grad is None} == {*frozen} & {*leaves}
    outputs = {name: out.detach() for name, out in outputs.items()}
    return {**outputs, **{name: grad for name, grad in grads.items() if grad is not None}}
