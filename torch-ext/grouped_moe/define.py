"""Ops for paths where the host's time counts: registered directly, and passed by where nothing watches them."""

from typing import Callable, Optional, Sequence

import torch

# By name: to look them up in torch's modules took a third of `is_unwatched`.
from torch._C import (
    _are_functorch_transforms_active,
    _functorch,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
)
from torch.autograd import _profiler_enabled
from torch.compiler import is_compiling

from ._ops import add_op_namespace_prefix
from .launch import ALIGNMENT
from .plan import has_function_mode
from .tuning import dot_precision, spec_of

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_TWICE = "grouped_moe: differentiable once, but a derivative of a gradient was asked for"
_is_batched = _functorch.is_legacy_batchedtensor  # as `is_grads_batched` of `torch.autograd.grad` makes them


def define_op(name: str, schema: str, implementation: Callable, fake: Callable) -> None:
    """Defines an op that mutates nothing, with one implementation for all devices and one for shapes alone."""
    qualified = add_op_namespace_prefix(name)
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    torch.library.impl(qualified, "CompositeExplicitAutograd")(implementation)
    torch.library.register_fake(qualified)(fake)


def below_autograd():
    """Context for the forward of an autograd function that calls the op it belongs to."""
    return torch._C._AutoDispatchBelowAutograd()


def is_unwatched() -> bool:
    """Whether no tracing, mode of dispatch or functions, functorch transform or profiler is there to look for ops.

    A default device is none of these.
    """
    return not (
        is_compiling()
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or has_function_mode()
        or _profiler_enabled()
        or _get_tracing_state() is not None
    )


def is_plain(*args) -> bool:
    """Whether an op's implementation may be called in the op's stead, at a fraction of the host's time.

    That is where nobody looks for the op, no tensor subclass either, and every tensor has memory that holds its values.
    """
    if not is_unwatched():
        return False
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if type(arg) not in _PLAIN_TYPES or arg.is_meta or arg.is_neg() or _is_batched(arg):
                return False
    return True


def have_addresses(*tensors: torch.Tensor) -> bool:
    """Whether all are dense tensors in memory, whoever watches, so that addresses tell which memory."""
    if is_compiling() or _are_functorch_transforms_active():
        return False
    dense = all(type(tensor) in _PLAIN_TYPES and tensor.layout is _STRIDED for tensor in tensors)
    return dense and not any(tensor.is_meta or _is_batched(tensor) for tensor in tensors)


def plan_key(tensors: Sequence[object], *options) -> Optional[tuple]:
    """What a checked call's plan is kept by: all that the checks and the plan depend on.

    None if the call is not plain, under any autocast, or of other arguments than None and dense tensors on one
    accelerator, the first of them a tensor. The device stands for its `DeviceSpec`.
    """
    first = tensors[0]
    if type(first) not in _PLAIN_TYPES or not is_accelerated(first) or not is_unwatched():
        return None
    if _is_any_autocast_enabled() or _is_batched(first):
        return None
    device = first.device
    # Of other dtypes it is always the same, which is known without a spec.
    precision = dot_precision(first.dtype, spec_of(first)) if first.dtype is torch.float32 else None
    key = [device, precision, *options]
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        elif type(tensor) in _PLAIN_TYPES and tensor.layout is _STRIDED and tensor.device == device:
            if tensor.is_neg():
                return None
            key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGNMENT == 0)
        else:
            return None
    return tuple(key)


def is_accelerated(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels take it."""
    return tensor.is_cuda or tensor.is_xpu


def needs_autograd(*args) -> bool:
    """Whether autograd has to record a call with these arguments, or to refuse forward mode."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                return True
    return False


def refuse_forward_mode(name: str, *args) -> None:
    """Raises NotImplementedError if a tensor has a tangent: what `torch.library` registers would drop it silently."""
    if torch.autograd.forward_ad._current_level < 0:
        return
    for arg in args:
        if isinstance(arg, torch.Tensor) and torch.autograd.forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(f"{name}: no forward-mode differentiation (jvp), got a tensor with a tangent")


def mark_as_own(saved: torch.Tensor) -> None:
    """Says of what a forward saves for its backward that it is the whole of its memory, and that no caller has it."""
    saved.untyped_storage()._grouped_moe_own = True


def take_over(saved: torch.Tensor) -> bool:
    """In a backward: whether what was saved may be overwritten, and its memory given back, since nobody will miss it.

    It is so if a forward has marked it, which hooks that put other memory in its place do not, and the graph is not
    kept, which PyTorch's compiler asks, too, before it donates what was saved. From here on autograd takes it for
    changed: if this backward fails, another one raises.
    """
    own = getattr(saved.untyped_storage(), "_grouped_moe_own", False)
    if not own or torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    torch.autograd.graph.increment_version(saved)
    return True


def register_autograd(name: str, function) -> None:
    """Makes an autograd function the op's derivative; it is left out of calls that need no gradient.

    The function takes the op's arguments and whether the call `is_plain`.
    """

    def autograd(*args):
        if needs_autograd(*args):
            return function.apply(*args, False)
        with below_autograd():
            return op(*args)

    qualified = add_op_namespace_prefix(name)
    namespace, base = qualified.split("::")
    op = getattr(getattr(torch.ops, namespace), base).default
    torch.library.impl(qualified, "Autograd")(autograd)


def plain_apply(function) -> Callable:
    """`function.apply` where `is_unwatched` holds: it need not look for functorch's transforms again."""
    return super(torch.autograd.Function, function).apply


class _NotTwice(torch.autograd.Function):
    """What a function returns, as of tensors by which nothing of it can be differentiated: to ask for that raises."""

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
        if any(isinstance(grad, torch.Tensor) and _is_batched(grad) for grad in grads):  # these forget who made them
            raise RuntimeError(_TWICE)
        return _NotTwice.apply(lambda: backward(ctx, saved, *grads), *grads, *saved)

    return once
