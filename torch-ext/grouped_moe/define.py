"""Ops for paths where the host's time counts: registered directly, at less than half of what `custom_op` costs."""

from typing import Callable

import torch

from ._ops import add_op_namespace_prefix


def define_op(name: str, schema: str, implementation: Callable, fake: Callable) -> None:
    """Defines an op that mutates nothing, with one implementation for all devices and one for shapes alone."""
    qualified = add_op_namespace_prefix(name)
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    torch.library.impl(qualified, "CompositeExplicitAutograd")(implementation)
    torch.library.register_fake(qualified)(fake)


def below_autograd():
    """Context for the forward of an autograd function that calls the op it belongs to."""
    return torch._C._AutoDispatchBelowAutograd()


def register_autograd(name: str, function) -> None:
    """Makes an autograd function the op's derivative; it is left out of calls that need no gradient."""

    def autograd(*args):
        if torch.is_grad_enabled():
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.requires_grad:
                    return function.apply(*args)
        with below_autograd():
            return op(*args)

    qualified = add_op_namespace_prefix(name)
    namespace, base = qualified.split("::")
    op = getattr(getattr(torch.ops, namespace), base).default
    torch.library.impl(qualified, "Autograd")(autograd)
