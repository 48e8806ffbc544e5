"""How ops are registered and differentiated, by public functions of torch alone.

A differentiable op `name`, which callers, compilers and exporters see, is made of others: one that also returns what a
backward needs, and those of the backward. The first decides whether autograd records the call. (By
`torch.library.register_autograd` a recorded call takes the host 58 us, so registered 17.) Those others refuse to be
differentiated: nothing but a decomposed program calls them where autograd would record it.
"""

from typing import Callable, List, Optional, Sequence

import torch

from .._ops import add_op_namespace_prefix, ops
from . import _compat

_TWICE = "grouped_moe: differentiable once, but a derivative of a gradient was asked for"
_DECOMPOSED = (
    "grouped_moe: the program was decomposed, so {} has no gradients here: differentiate the exported program before"
    " run_decompositions, or call this one under torch.no_grad()"
)
_NO_TRANSFORM = (
    "{}: not differentiated by transforms of torch.func (grad, vjp, jvp, jacrev): use torch.autograd.grad, which works"
    " with torch.func.vmap and torch.func.functional_call"
)
_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_OTHER_TYPES = frozenset((bool, int, float, str, list, tuple, torch.dtype))  # of arguments
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def define_op(name: str, schema: str, implementation: Callable, fake: Callable) -> Callable:
    """Defines an op with one implementation for all devices, and one that makes results of the right shapes alone.

    Either may have None among several results. An op cannot return None: it returns an empty tensor there, of the dtype
    of its first argument. Exported programs that are decomposed call ops where gradients are enabled: autograd records
    nothing of what an op does, and to differentiate its results raises RuntimeError.

    Returns what calls it below autograd: the op, or the implementation itself where `goes_directly` allows it, which
    spares the op's dispatch.
    """

    def refuse(ctx, *_):
        raise RuntimeError(_DECOMPOSED.format(name))

    call = _define(name, schema, implementation, fake)
    if "!" not in schema:  # PyTorch registers no backward of ops that write to their arguments
        torch.library.register_autograd(add_op_namespace_prefix(name), refuse)
    return call


def _define(name: str, schema: str, implementation: Callable, fake: Callable) -> Callable:
    """`define_op` without a backward that raises."""
    qualified = add_op_namespace_prefix(name)
    torch.library.define(qualified, schema, tags=_TAGS)
    torch.library.impl(qualified, "CompositeExplicitAutograd")(torch.no_grad()(_without_none(implementation)))
    torch.library.register_fake(qualified)(_without_none(fake))
    op = getattr(ops, name).default

    def call(*args):
        return implementation(*args) if goes_directly(*args) else op(*args)

    return call


def _without_none(function: Callable) -> Callable:
    def run(first, *args):
        made = function(first, *args)
        if not isinstance(made, tuple):
            return made
        return tuple(first.new_empty(0) if tensor is None else tensor for tensor in made)

    return run


def define_differentiable_op(
    name: str, schema: str, implementation: Callable, recorded: Callable, plain: Callable, fake: Callable
) -> Callable[..., torch.Tensor]:
    """Defines an op that calls `recorded` where autograd has to record it, else `plain`: both are made of other ops.

    Returns what a public function calls: the op or, where `goes_directly` allows it, `recorded` or `implementation`,
    which computes what `plain` does and calls no op.
    """

    def choose(*args):
        if not needs_autograd(*args):
            return plain(*args)
        if _compat.in_transform(if_unknown=False) and not torch.compiler.is_compiling():
            raise NotImplementedError(_NO_TRANSFORM.format(name))
        return recorded(*args)

    def call(*args):
        if not goes_directly(*args):
            return op(*args)
        if not needs_autograd(*args):
            return implementation(*args)
        return op(*args) if _compat.is_below_autograd() else recorded(*args)

    _define(name, schema, plain, fake)
    torch.library.impl(add_op_namespace_prefix(name), "Autograd")(choose)
    op = getattr(ops, name).default
    return call


def goes_directly(first: torch.Tensor, *args: object) -> bool:
    """Whether nobody would miss an op with these arguments: nothing traces, transforms or watches the call.

    Nor does the dispatcher have to do anything for a tensor, as it has for subclasses and for views that read their
    memory with the other sign. first: in a backward the incoming gradient, which `is_grads_batched` makes of many.
    Dispatching an op that is written in Python takes the host 40 us.
    """
    if torch.compiler.is_compiling() or _compat.is_watched() or _compat.in_transform() or _compat.is_recorded():
        return False
    if not is_plain(first) or first.is_neg():
        return False
    for arg in args:
        kind = type(arg)
        if kind in _PLAIN_TYPES:
            if arg.is_neg():
                return False
        elif arg is not None and kind not in _OTHER_TYPES:
            return False
    return True


def needs_autograd(*args: object) -> bool:
    """Whether autograd records a call with these arguments."""
    if torch.is_grad_enabled():
        for arg in args:
            if arg is not None and isinstance(arg, torch.Tensor) and arg.requires_grad:
                return True
    return False


def refuse_transforms(name: str, *args: object) -> None:
    """Raises NotImplementedError within a transform of torch.func, or if a tensor has a tangent of forward mode.

    For what has no gradient: it would be 0 without an error.
    """
    if not torch.compiler.is_compiling() and _compat.in_transform(if_unknown=False):
        raise NotImplementedError(f"{name}: neither differentiated nor mapped by transforms of torch.func")
    refuse_forward_mode(name, *args)


def refuse_forward_mode(name: str, *args: object) -> None:
    """Raises NotImplementedError if a tensor has a tangent, which the ops would drop silently."""
    for arg in args if _compat.has_tangents() else ():
        if isinstance(arg, torch.Tensor) and torch.autograd.forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(f"{name}: no forward-mode differentiation (jvp), got a tensor with a tangent")


def is_plain(tensor: Optional[torch.Tensor]) -> bool:
    """Whether it is a tensor in memory, no subclass and none that a transform wraps, as the batched ones of vmap."""
    if type(tensor) not in _PLAIN_TYPES:
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
