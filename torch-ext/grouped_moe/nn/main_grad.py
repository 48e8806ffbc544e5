"""Weight gradients that take another way than autograd's: into `main_grad`, as Megatron-LM has it, or later."""

import operator
from typing import Callable, Deque, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .._ops import ops
from ..backends import backend_of
from ..common import _compat, checks
from ..common.autograd import define_op, once_differentiable
from ..common.device import on_device
from ..rows import unit_rows

_BUFFER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHAPE, _DTYPE = map(operator.attrgetter, ("shape", "dtype"))


class MainGrad(NamedTuple):
    """A buffer that takes a weight's gradient in autograd's stead.

    buffer: of the weight's shape. overwrite: the gradient replaces what the buffer holds instead of being added. dummy:
    what autograd is given as the weight's gradient, "none", "empty" (unwritten memory) or "zeros": hooks that wait for
    one run with the latter two.
    """

    buffer: Tensor
    overwrite: bool = False
    dummy: str = "none"


def as_one(tensors: Sequence[Tensor]) -> Optional[Tensor]:
    """(G, *shape), a view of G contiguous tensors that lie equally spaced and ascending in one storage; else None."""
    first, groups = tensors[0].detach(), len(tensors)
    if groups == 1:
        return first[None]
    if type(first) is not Tensor:  # a fake tensor has no address
        return None
    # By functions in C, as there may be a thousand.
    starts, itemsize = [*map(Tensor.data_ptr, tensors)], first.element_size()
    step = starts[1] - starts[0]
    end = first.storage_offset() * itemsize + (groups - 1) * step + first.nbytes
    fit = (
        step >= max(1, first.nbytes)
        and step % itemsize == 0
        and starts == [*range(starts[0], starts[0] + groups * step, step)]
        and end <= first.untyped_storage().nbytes()  # an address between two of one storage is of that storage, too
        and all(map(Tensor.is_contiguous, tensors))
        and {*map(_SHAPE, tensors)} == {first.shape}
        and {*map(_DTYPE, tensors)} == {first.dtype}
    )
    return first.as_strided((groups, *first.shape), (step // itemsize, *first.stride())) if fit else None


def versions_of(tensors: Sequence[Optional[Tensor]]) -> List[int]:
    """What `check_versions` compares with."""
    return [0 if tensor is None else _compat.version_of(tensor) for tensor in tensors]


def check_versions(
    tensors: Sequence[Optional[Tensor]], versions: Sequence[int], name_of: Callable[[int], str] = "weight{}".format
) -> None:
    """Raises RuntimeError, as autograd does for what it saved, if a tensor was modified since it had its version."""
    found = versions_of(tensors)
    if found != versions:
        place = [*map(operator.ne, found, versions)].index(True)
        raise RuntimeError(f"{name_of(place)}: modified in place before the gradients that depend on it were computed")


def buffer_of(parameter: Tensor) -> Optional[Tensor]:
    """The attribute `main_grad` of a parameter, or what its method `get_main_grad()` returns; None without either."""
    get = getattr(parameter, "get_main_grad", None)
    return getattr(parameter, "main_grad", None) if get is None else get()


def main_grad_of(name: str, parameter: Tensor) -> MainGrad:
    """Where the gradient of the parameter called `name` goes, by the attributes that Megatron-LM gives it.

    Raises AttributeError if it has no `main_grad`, TypeError or ValueError if that has another shape or device than
    the parameter or a dtype that can't be accumulated in; each names the parameter.
    """
    buffer = buffer_of(parameter)
    if buffer is None:
        raise AttributeError(
            f"{name}.main_grad: expected a buffer for the gradient (accumulate_into_main_grad=True), got none"
        )
    same = type(buffer) is Tensor and buffer.shape == parameter.shape and buffer.device == parameter.device
    if not (same and buffer.dtype in _BUFFER_DTYPES and buffer.is_contiguous()):  # most are, which takes a third
        name, device = f"{name}.main_grad", parameter.device
        checks.check_operand(name, buffer, parameter.shape, "of the parameter", device, None, "the parameter")
        if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride())):
            raise ValueError(f"{name}: expected memory of its own for each element, got strides {buffer.stride()}")
    dummy = "none"
    if hasattr(parameter, "grad_added_to_main_grad"):
        dummy = "zeros" if getattr(parameter, "zero_out_wgrad", False) else "empty"
    return MainGrad(buffer, bool(getattr(parameter, "overwrite_main_grad", False)), dummy)


def main_grads_of(names: Sequence[str], parameters: Sequence[Tensor]) -> List[MainGrad]:
    """`main_grad_of` of each."""
    return [*map(main_grad_of, names, parameters)]


def mark_added(weights: Sequence[Tensor]) -> None:
    """Tells Megatron-LM's hooks that main_grad has the gradient, if they are there to be told."""
    for weight in weights:
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True


def dummy_grad(parameter: Tensor, dummy: str) -> Optional[Tensor]:
    """The gradient that autograd's hooks see where the real one is in `main_grad` already."""
    if dummy == "none":
        return None
    return torch.zeros_like(parameter) if dummy == "zeros" else torch.empty_like(parameter)


def _accumulate_wgrad(dw: Tensor, dy: Tensor, x: Tensor, splits: Tensor, overwrite: bool) -> None:
    """Adds dY_g^T X_g to dw (G, N, K), or overwrites it."""
    torch.autograd.graph.increment_version(dw)
    kernels = backend_of(dw)
    with on_device(dw):
        rows = kernels.split_rows(splits, dw.shape[0], dy.shape[0], dy.dtype)
        kernels.wgrad(dy, x, rows, dw, accumulate=not overwrite)


def _accumulate_wgrads(
    dws: Sequence[Tensor], dy: Tensor, x: Tensor, splits: Tensor, num_groups: int, groups: Sequence[int],
    overwrite: Sequence[bool],
) -> None:  # fmt: skip
    """The same for one buffer (N, K) per group, of the groups that are named."""
    torch.autograd.graph.increment_version(dws)
    dw = as_one(dws) if len(dws) == num_groups and len(set(overwrite)) == 1 else None
    if dw is not None:
        _accumulate_wgrad(dw, dy, x, splits, overwrite[0])
        return
    kernels, dy, x = backend_of(dy), unit_rows(dy), unit_rows(x)
    with on_device(dy):
        rows = kernels.split_rows(splits, num_groups, dy.shape[0], dy.dtype)
        for dw, group, replace in zip(dws, groups, overwrite):
            alone = rows._replace(schedule=rows.schedule[group:], num_groups=1)
            kernels.wgrad(dy, x, alone, dw[None], accumulate=not replace)


define_op(
    "accumulate_wgrad",
    "(Tensor(a!) dw, Tensor dy, Tensor x, Tensor splits, bool overwrite) -> ()",
    _accumulate_wgrad,
    lambda *_: None,
)
define_op(
    "accumulate_wgrads",
    "(Tensor(a!)[] dws, Tensor dy, Tensor x, Tensor splits, SymInt num_groups, int[] groups, bool[] overwrite) -> ()",
    _accumulate_wgrads,
    lambda *_: None,
)


def accumulate(
    targets: Sequence[MainGrad], dy: Tensor, x: Tensor, splits: Tensor, num_groups: int, groups: Optional[List[int]]
) -> None:
    """Adds dY_g^T X_g, summed in fp32, to targets[i].buffer (N, K) for g = groups[i], or overwrites it.

    groups None: there is one target, of all groups, (G, N, K). Buffers: of any strides and floating dtype. One launch
    if they are those of all groups and lie in memory as one (G, N, K) tensor, else one per group.
    dy: (rows, N), x: (rows, K), in one dtype. splits: as `as_splits` gives them. Not differentiable; arguments are not
    checked.
    """
    buffers, overwrite = [target.buffer for target in targets], [target.overwrite for target in targets]
    if groups is None:
        ops.accumulate_wgrad.default(buffers[0], dy, x, splits, overwrite[0])
    else:
        ops.accumulate_wgrads.default(buffers, dy, x, splits, num_groups, groups, overwrite)


class Delayed(NamedTuple):
    """What the gradients of the parameters are made of, for one microbatch."""

    dy: Tensor  # (rows, N)
    x: Optional[Tensor]  # (rows, K) in the dtype of dy; None if no weight wanted a gradient
    splits: Tensor  # (G,) sizes or (G + 1,) offsets
    bias_scales: Optional[Tensor]  # (rows,)
    wants_bias: bool
    versions: List[int]

    def check(self) -> None:
        """Raises RuntimeError if any of it was modified in place since the backward."""
        check_versions(
            self[:4], self.versions, ("the gradient of the output", "x", "splits", "bias_scales").__getitem__
        )


class Now(NamedTuple):
    """The weights' gradients are computed in the backward, into main_grad; see `accumulate`.

    names: of the weights. targets: theirs; None, but under torch.compile, for what `main_grad_of` says in the backward.
    """

    names: Sequence[str]
    num_groups: int
    groups: Optional[List[int]]
    targets: Optional[List[MainGrad]]


class Later(NamedTuple):
    """A backward appends a `Delayed` to the queue. wants_bias: whether a bias wants a gradient."""

    queue: Deque[Delayed]
    wants_bias: bool


class WgradTap(torch.autograd.Function):
    """y itself, in whose backward the parameters get their gradients by another way than autograd's: `when`.

    y (rows, N) is of x (rows, K), in its dtype, and of parameters that it is detached from. watched: weights that must
    not change before the backward. leaves: for `Now` the weights, which get dummies from autograd. For `Later` a tensor
    by which the output requires a gradient where y does not: hooks of parameters would run in this backward, without a
    gradient.

    torch.compile traces this function. An op with a backward, in its place, would fail with two microbatches in
    flight: what a compiled graph saves for it must not change until then, but main_grad does. What a traced function
    keeps on its ctx may change, from PyTorch 2.11 on.
    """

    @staticmethod
    def forward(ctx, y, x, splits, bias_scales, when, watched, *leaves):
        ctx.save_for_backward(x, splits, bias_scales)
        ctx.when, ctx.leaves = when, leaves
        ctx.watched, ctx.versions = watched, versions_of(watched)
        ctx.mark_dirty(y)  # or it would be a view that callers could not modify in place
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy: Tensor):
        check_versions(ctx.watched, ctx.versions)
        when, grads = ctx.when, [None] * len(ctx.leaves)
        if isinstance(when, Later):
            # Detached, lest they keep the autograd graph that x hangs on.
            tensors = [None if tensor is None else tensor.detach() for tensor in (dy, *saved)]
            when.queue.append(Delayed(*tensors, when.wants_bias, versions_of(tensors)))
        else:
            targets = when.targets
            if targets is None:
                targets = main_grads_of(when.names, ctx.leaves)
                mark_added(ctx.leaves)
            accumulate(targets, dy, *saved[:2], when.num_groups, when.groups)
            grads = [dummy_grad(weight, target.dummy) for weight, target in zip(ctx.leaves, targets)]
        return (dy, None, None, None, None, None, *grads)
