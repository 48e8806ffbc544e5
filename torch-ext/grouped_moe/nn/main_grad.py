"""Weight gradients that take another way than autograd's: into `main_grad`, as Megatron-LM has it, or later."""

from operator import attrgetter
from types import ModuleType
from typing import Callable, Deque, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from ..common import _compat, checks
from ..common.autograd import is_plain, once_differentiable
from ..registration import define_op, goes_directly
from ..rows import unit_rows
from .packing import as_one, unchanged

_BUFFER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MainGrad(NamedTuple):
    """A buffer that takes a weight's gradient in autograd's stead.

    buffer: of the weight's shape. overwrite: the gradient replaces what the buffer holds instead of being added. dummy:
    what autograd is given as the weight's gradient, "none", "empty" (unwritten memory) or "zeros": hooks that wait for
    one run with the latter two.
    """

    buffer: Tensor
    overwrite: bool = False
    dummy: str = "none"


class Wanted(NamedTuple):
    """The weights of a layer that require a gradient, and their names.

    groups: the number of each one's group, below num_groups; None if one weight is that of all groups. targets: where
    gradients go, by `main_grads_of`; None where that is looked up in the backward, as Megatron-LM may replace buffers
    and reset flags until then.
    """

    names: List[str]
    weights: List[Tensor]
    num_groups: int
    groups: Optional[List[int]]
    targets: Optional[List[MainGrad]] = None


def buffer_of(parameter: Tensor) -> Optional[Tensor]:
    """The attribute `main_grad` of a parameter, or what its method `get_main_grad()` returns; None without either."""
    get = getattr(parameter, "get_main_grad", None)
    return getattr(parameter, "main_grad", None) if get is None else get()


def main_grads_of(wanted: Wanted) -> List[MainGrad]:
    """Where the gradients of weights go, by the attributes that Megatron-LM gives them.

    Raises AttributeError if one has no `main_grad`, TypeError or ValueError if that has another shape or device than
    the weight or a dtype that can't be accumulated in; each names the weight.
    """
    return [*map(_main_grad_of, wanted.names, wanted.weights)]


def _main_grad_of(name: str, weight: Tensor) -> MainGrad:
    buffer = buffer_of(weight)
    if buffer is None:
        raise AttributeError(
            f"{name}.main_grad: expected a buffer for the gradient (accumulate_into_main_grad=True), got none"
        )
    same = type(buffer) is Tensor and buffer.shape == weight.shape and buffer.device == weight.device
    if not (same and buffer.dtype in _BUFFER_DTYPES and buffer.is_contiguous()):  # most are, which takes a third
        name = f"{name}.main_grad"
        checks.check_operand(name, buffer, weight.shape, "of the parameter", weight.device, None, "the parameter")
        if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride())):
            raise ValueError(f"{name}: expected memory of its own for each element, got strides {buffer.stride()}")
    dummy = "none"
    if hasattr(weight, "grad_added_to_main_grad"):
        dummy = "zeros" if getattr(weight, "zero_out_wgrad", False) else "empty"
    return MainGrad(buffer, bool(getattr(weight, "overwrite_main_grad", False)), dummy)


def mark_added(weights: Sequence[Tensor]) -> None:
    """Tells Megatron-LM's hooks that main_grad has the gradient, if they are there to be told."""
    for weight in weights:
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True


def _accumulate_wgrad(
    kernels: ModuleType, dy: Tensor, x: Tensor, splits: Tensor, num_groups: int, dws: Sequence[Tensor],
    groups: Optional[Sequence[int]], overwrite: Sequence[bool],
) -> None:  # fmt: skip
    """Adds dY_g^T X_g to dws[i] (N, K) for g = groups[i], or overwrites it; to dws[0] (G, N, K) without groups."""
    torch.autograd.graph.increment_version(dws)
    whole = dws[0] if groups is None else None
    if groups is not None and len(dws) == num_groups and len(set(overwrite)) == 1:
        whole = as_one(dws)
    rows = kernels.split_rows(splits, num_groups, dy.shape[0], dy.dtype)
    if whole is not None:
        kernels.wgrad(dy, x, rows, whole, accumulate=not overwrite[0])
        return
    dy, x = unit_rows(dy), unit_rows(x)
    for dw, group, replace in zip(dws, groups, overwrite):
        alone = rows._replace(schedule=rows.schedule[group:], num_groups=1)
        kernels.wgrad(dy, x, alone, dw[None], accumulate=not replace)


_accumulate = define_op(
    "accumulate_wgrad",
    "(Tensor dy, Tensor x, Tensor splits, SymInt num_groups, Tensor(a!)[] dws, int[]? groups, bool[] overwrite) -> ()",
    _accumulate_wgrad,
    lambda *_: None,
)


def accumulate(
    wanted: Wanted, targets: Sequence[MainGrad], dy: Tensor, x: Tensor, splits: Tensor
) -> List[Optional[Tensor]]:
    """Adds dY_g^T X_g, summed in fp32, to targets[i].buffer for g = wanted.groups[i], or overwrites it.

    Buffers: of any strides and floating dtype. One launch if they are those of all groups and lie in memory as one
    (G, N, K) tensor, else one per group. dy: (rows, N), x: (rows, K), in one dtype. splits: as `as_splits` gives them.
    Not differentiable; arguments are not checked. Returns the dummies for autograd.
    """
    buffers, overwrite, dummies = map(list, zip(*targets))
    if any(overwrite):  # of groups that share a weight the first one overwrites, others add
        seen = set()
        for i, weight in enumerate(wanted.weights):
            overwrite[i] = overwrite[i] and id(weight) not in seen
            seen.add(id(weight))
    # Anomaly mode raises for NaN in dummies, too. A compiler cannot trace the question.
    unwritten = torch.compiler.is_compiling() or not torch.is_anomaly_enabled()
    empty = torch.empty_like if unwritten else torch.zeros_like
    make = {"none": lambda weight: None, "empty": empty, "zeros": torch.zeros_like}
    made = [make[dummy](weight) for weight, dummy in zip(wanted.weights, dummies)]  # nothing is added yet if this fails
    run = _accumulate.directly if goes_directly(dy, x, splits, *buffers) else _accumulate.op
    run(dy, x, splits, wanted.num_groups, buffers, wanted.groups, overwrite)
    return made


class Delayed(NamedTuple):
    """What the gradients of the parameters are made of, for one microbatch.

    parameters: all that the module had in the forward. check: raises RuntimeError if anything but the parameters was
    modified in place since the backward.
    """

    dy: Tensor  # (rows, N)
    x: Optional[Tensor]  # (rows, K) in the dtype of dy; None if no weight wanted a gradient
    splits: Tensor  # (G,) sizes or (G + 1,) offsets
    bias_scales: Optional[Tensor]  # (rows,)
    wants_bias: bool
    parameters: List[Tensor]
    check: Callable[[], None]

    def record_stream(self) -> None:
        """Keeps the memory of all tensors until the current stream has read it, which may not be the backward's."""
        for tensor in (self.dy, self.x, self.splits, self.bias_scales):
            if is_plain(tensor) and tensor.device.type != "cpu":
                tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class Later(NamedTuple):
    """A backward appends a `Delayed` to the queue. wants_bias: whether a bias wants a gradient.

    parameters: all of the module's.
    """

    queue: Deque[Delayed]
    wants_bias: bool
    parameters: List[Tensor]


def check_leaves(names: Sequence[str], parameters: Sequence[Tensor]) -> None:
    """Raises RuntimeError that names a parameter which requires a gradient and is computed itself."""
    if all(map(attrgetter("is_leaf"), parameters)):  # in C, as there may be a thousand
        return
    for name, parameter in zip(names, parameters):
        if parameter.requires_grad and not parameter.is_leaf:
            raise RuntimeError(
                f"delay_wgrad: {name} is computed from other tensors (by a parametrization, pruning or FSDP), whose "
                "gradients cannot wait for backward_dw()"
            )


def _leads_to_weights(ctx) -> bool:
    """Within a backward of `WgradTap`: whether it leads to a wanted weight, not to the gradients of inputs alone.

    A compiler cannot ask, and takes it for granted.
    """
    return torch.compiler.is_compiling() or _compat.goes_on_to(
        node for node, _ in ctx.next_functions[-len(ctx.how.weights) :]
    )


class WgradTap(torch.autograd.Function):
    """Returns y. Its backward adds the gradients of weights to main_grad, or keeps what `backward_dw` makes them of.

    y (rows, N) is of x (rows, K), in its dtype, and of weights that it is detached from. how: `Wanted`, whose
    gradients go into main_grad in a backward that leads to them, or `Later`, for any backward. watched: weights that
    must not change before the backward. leaves: the wanted weights, which get dummies from autograd. For `Later` a
    tensor by which the output requires a gradient where y does not: hooks of parameters would run in this backward,
    without a gradient.

    torch.compile traces this function. An op with a backward, in its place, would fail with two microbatches in
    flight: what a compiled graph saves for it must not change until then, but main_grad does. What a traced function
    keeps on its ctx may change, from PyTorch 2.11 on.
    """

    @staticmethod
    def forward(ctx, y, x, splits, bias_scales, how, watched, *leaves):
        ctx.save_for_backward(x, splits, bias_scales)
        ctx.how, ctx.check = how, unchanged(watched) if watched else None
        if not torch.compiler.is_compiling() and _compat.is_watched():
            return y.clone()  # a mode, as of selective checkpointing, may hold y, and would find it modified
        ctx.mark_dirty(y)  # or it would be a view that callers could not modify in place
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy: Tensor):
        how = ctx.how
        if ctx.check is not None:
            ctx.check()
        if isinstance(how, Later):
            # Detached, lest they keep the autograd graph that x hangs on.
            tensors = [None if tensor is None else tensor.detach() for tensor in (dy, *saved)]
            names = "the gradient of the output", "x", "splits", "bias_scales"
            how.queue.append(Delayed(*tensors, how.wants_bias, how.parameters, unchanged(tensors, names.__getitem__)))
            dummies = [None]
        elif _leads_to_weights(ctx):
            targets = how.targets
            if targets is None:
                targets = main_grads_of(how)
                mark_added(how.weights)
            dummies = accumulate(how, targets, dy, *saved[:2])
        else:
            dummies = [None] * len(how.weights)
        return (dy, None, None, None, None, None, *dummies)
