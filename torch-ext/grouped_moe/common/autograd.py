"""Which calls autograd records, what a backward may do with what was saved, and which derivatives raise an error."""

from typing import Callable, List, Optional, Sequence

import torch

from . import _compat

_TWICE = "grouped_moe: differentiable once, but a derivative of a gradient was asked for"
PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


def needs_autograd(*args: object) -> bool:
    """Whether autograd records a call with these arguments."""
    if torch.is_grad_enabled():
        for arg in args:
            if arg is not None and isinstance(arg, torch.Tensor) and arg.requires_grad:
                return True
    return False


def refuse_forward_mode(name: str, *args: object) -> None:
    """Raises NotImplementedError if a tensor has a tangent, which the ops would drop silently."""
    for arg in args if _compat.has_tangents() else ():
        if isinstance(arg, torch.Tensor) and torch.autograd.forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(f"{name}: no forward-mode differentiation (jvp), got a tensor with a tangent")


def is_plain(tensor: Optional[torch.Tensor]) -> bool:
    """Whether it is a tensor in memory, no subclass and none that a transform wraps, as the batched ones of vmap."""
    if type(tensor) not in PLAIN_TYPES:
        return False
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return not tensor.is_meta


def mark_as_own(saved: Optional[torch.Tensor]) -> None:
    """Says of what a forward may save for its backward that it is the whole of its memory, and no caller's."""
    if is_plain(saved):
        saved.untyped_storage().grouped_moe_own = True


def take_over(saved: Optional[torch.Tensor]) -> bool:
    """Whether this backward may overwrite what was saved, and give its memory back.

    It may if a forward made it for itself (`mark_as_own`), so that no hook has put other memory in its place, if the
    graph is not kept, and if no compiler traces the backward, which would take no op that writes to its arguments.
    Autograd then counts it as changed: if this backward fails, another one raises.
    """
    if torch.compiler.is_compiling() or not is_plain(saved):
        return False
    if not getattr(saved.untyped_storage(), "grouped_moe_own", False) or _compat.keeps_graph():
        return False
    torch.autograd.graph.increment_version(saved)
    return True


def where_needed(grads: Sequence[Optional[torch.Tensor]], needs: Sequence[bool]) -> List[Optional[torch.Tensor]]:
    """The gradients that are asked for, else None: an op cannot return None, and returns an empty tensor there."""
    return [grad if need else None for grad, need in zip(grads, needs)]


class _NotTwice(torch.autograd.Function):
    """Runs a function and marks what it returns as made of some tensors. To differentiate that by them raises."""

    @staticmethod
    def forward(ctx, function, *tensors):
        return function()

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(_TWICE)


def once_differentiable(backward: Callable) -> Callable:
    """An autograd function's backward(ctx, *grads) of a backward(ctx, saved tensors, *grads).

    To differentiate its results raises RuntimeError, by whatever they depend on. PyTorch's decorator of this name
    raises for incoming gradients alone: by tensors that were saved the derivative would be silently 0.
    """

    def once(ctx, *grads):
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return backward(ctx, saved, *grads)
        compiling = torch.compiler.is_compiling()
        # Batched gradients (is_grads_batched) forget what they were made of.
        if not compiling and any(type(grad) is torch.Tensor and not is_plain(grad) for grad in grads):
            raise RuntimeError(_TWICE)
        return _NotTwice.apply(lambda: backward(ctx, saved, *grads), *grads, *saved)

    return once
