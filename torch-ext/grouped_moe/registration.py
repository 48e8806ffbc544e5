"""How ops are registered, by public functions of torch alone.

A differentiable op `name`, which callers, compilers and exporters see, is made of others: one that also returns what a
backward needs, and those of the backward. The first decides whether autograd records the call. (By
`torch.library.register_autograd` a recorded call takes the host 58 us, this way 17.) Those others refuse to be
differentiated: nothing but a decomposed program calls them where autograd would record it.

Implementations are called with the backend of their first tensor, then the op's arguments, on the device of that
tensor; on a CPU, where they are made of torch's own products, without autocast.
"""

from typing import Callable

import torch

from ._ops import add_op_namespace_prefix, ops
from .backends import backend_of
from .common import _compat
from .common.autograd import PLAIN_TYPES, is_plain, needs_autograd
from .common.device import launch_context

_DECOMPOSED = (
    "grouped_moe: the program was decomposed, so {} has no gradients here: differentiate the exported program before"
    " run_decompositions, or call this one under torch.no_grad()"
)
_NO_TRANSFORM = (
    "grouped_moe: the op {} is not differentiated by transforms of torch.func (grad, vjp, jvp, jacrev): use"
    " torch.autograd.grad, which works with torch.func.vmap and torch.func.functional_call"
)
_OTHER_TYPES = frozenset((bool, int, float, str, list, tuple, torch.dtype))  # of arguments
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def define_op(name: str, schema: str, implementation: Callable, fake: Callable) -> Callable:
    """Defines an op with one implementation for all devices, and one that makes results of the right shapes alone.

    Either may have None among several results. An op cannot return None: it returns an empty tensor there, of the dtype
    of its first argument. Exported programs that are decomposed call ops where gradients are enabled: autograd records
    nothing of what an op does, and to differentiate its results raises RuntimeError.

    Returns what calls it below autograd: the op, or the implementation itself where `goes_directly` allows it, which
    spares the op's dispatch. Its attributes `op` and `directly` are for callers that have asked.
    """

    def refuse(ctx, *_):
        raise RuntimeError(_DECOMPOSED.format(name))

    run = _with_backend(implementation)
    op = _define(name, schema, run, fake)
    if "!" not in schema:  # PyTorch registers no backward of ops that write to their arguments
        torch.library.register_autograd(add_op_namespace_prefix(name), refuse)

    def call(*args):
        return run(*args) if goes_directly(*args) else op(*args)

    call.op, call.directly = op, run
    return call


def _with_backend(implementation: Callable) -> Callable:
    def run(first, *args):
        with launch_context(first):
            return implementation(backend_of(first), first, *args)

    return run


def _define(name: str, schema: str, implementation: Callable, fake: Callable) -> Callable:
    """Registers an op without a backward, and returns it."""
    qualified = add_op_namespace_prefix(name)
    torch.library.define(qualified, schema, tags=_TAGS)
    torch.library.impl(qualified, "CompositeExplicitAutograd")(torch.no_grad()(_without_none(implementation)))
    torch.library.register_fake(qualified)(_without_none(fake))
    return getattr(ops, name).default


def _without_none(function: Callable) -> Callable:
    def run(first, *args):
        made = function(first, *args)
        if not isinstance(made, tuple):
            return made
        return tuple(first.new_empty(0) if tensor is None else tensor for tensor in made)

    return run


def define_differentiable_op(
    name: str, schema: str, implementation: Callable, recorded: Callable, forward: Callable, plain: Callable,
    fake: Callable,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """Defines an op that calls `recorded` where autograd has to record it, else `plain`: both are made of other ops.

    recorded: called with what runs its forward, `forward` of `define_op` or its implementation, before the arguments.
    Returns what a public function calls: the op or, where `goes_directly` allows it, `recorded` or `implementation`,
    which computes what `plain` does and calls no op.
    """

    def choose(*args):
        if not needs_autograd(*args):
            return plain(*args)
        if _compat.in_transform(if_unknown=False) and not torch.compiler.is_compiling():
            raise NotImplementedError(_NO_TRANSFORM.format(name))
        return recorded(forward, *args)

    def call(*args):
        if not goes_directly(*args):
            return op(*args)
        if not needs_autograd(*args):
            return run(*args)
        return op(*args) if _compat.is_below_autograd() else recorded(forward.directly, *args)

    run, op = _with_backend(implementation), _define(name, schema, plain, fake)
    torch.library.impl(add_op_namespace_prefix(name), "Autograd")(choose)
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
        if arg is not None and type(arg) not in _OTHER_TYPES and (type(arg) not in PLAIN_TYPES or arg.is_neg()):
            return False
    return True
