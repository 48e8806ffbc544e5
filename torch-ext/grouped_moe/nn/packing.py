"""One tensor over the weights of all groups, where they lie so, and what was modified since it was read."""

import operator
from typing import Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..common import _compat, checks
from ..common.autograd import is_plain

_SHAPE, _DTYPE = map(operator.attrgetter, ("shape", "dtype"))


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


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.stack` without autocast, under which it raises for the other dtype of two bytes."""
    if checks.autocast_dtype(tensors[0]) is None:
        return torch.stack(tensors)
    with torch.autocast(tensors[0].device.type, enabled=False):
        return torch.stack(tensors)


def for_pickle(weights: Sequence[Tensor]) -> Tuple[Optional[Tensor], List[nn.Parameter]]:
    """(the weights as one where processes share their memory, else None; copies of them, without data in that case).

    Pickle writes the whole storage of each tensor it meets, and shares that of shared memory with another process.
    """
    first = weights[0].detach()
    shared = as_one(weights) if is_plain(first) and first.is_cpu and first.is_shared() else None
    copies = {}  # by the identity of the weights: groups may share one
    for weight in weights:
        if id(weight) not in copies:
            data = weight.detach().clone() if shared is None else weight.new_empty(0)
            copies[id(weight)] = nn.Parameter(data, weight.requires_grad)
            copies[id(weight)].__dict__.update(weight.__dict__)
    return shared, [copies[id(weight)] for weight in weights]


def unchanged(
    tensors: Sequence[Optional[Tensor]], name_of: Callable[[int], str] = "weight{}".format
) -> Callable[[], None]:
    """A check that raises RuntimeError if a tensor was modified in place after this call, as autograd's own does."""
    versions = _compat.versions_of(tensors)

    def check() -> None:
        modified = [*map(operator.ne, versions, _compat.versions_of(tensors))]
        if any(modified):
            name = name_of(modified.index(True))
            raise RuntimeError(f"{name}: modified in place before the gradients that depend on it were computed")

    return check


def watch(y: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Makes the backward of y raise if a weight was modified in place after this call. Returns y.

    It raises whatever gradients are asked for. Below autograd y has no backward of its own.
    """
    if weights and y.grad_fn is not None:
        check = unchanged(weights)
        y.grad_fn.register_prehook(lambda _: _untraced(check) if torch.compiler.is_compiling() else check())
    return y


@torch.compiler.disable
def _untraced(check: Callable[[], None]) -> None:
    """For compiled autograd: what it traces with has no versions to compare."""
    check()


class Pack(torch.autograd.Function):
    """`packed`, which holds the data of the weights, as a function of the weights."""

    @staticmethod
    def forward(ctx, packed: Tensor, *weights: Tensor) -> Tensor:
        return packed.view_as(packed)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return (None, *grad.unbind(0))
