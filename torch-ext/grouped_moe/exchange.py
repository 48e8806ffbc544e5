"""Expert parallelism: tokens to the ranks of their experts and back, in buffers whose sizes the host knows.

Every rank owns E experts, rank r those from r E on. A token goes once to each rank that owns one of its experts, with
its expert ids and routing weights, and comes back once, as the sum of what these experts give. Each pair of ranks has
the same number of places, the capacity. What is not filled holds sentinels, which cost the experts nothing; so no size
is read from the device. Rows are sent in token order and added up in the order of a token's slots: results repeat
bitwise.
"""

from __future__ import annotations  # PyTorch may be built without torch.distributed

from typing import Dict, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from .common.autograd import needs_autograd, once_differentiable
from .packed import PackedRow
from .places import Plan, place_rows, receive, send, sum_places, take_slots


class Arrived(NamedTuple):
    """What ranks have for this one, in ranks * capacity places.

    x: (places, H). weights: (places, top_k). ids: (places, top_k) int64, as the rank numbers its own experts; E for
    those of others and in places that are not filled. fits: () int32, 0 if any rank has too many tokens. plan: of what
    was sent.
    """

    x: Tensor
    weights: Tensor
    ids: Tensor
    fits: Tensor
    plan: Plan


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """rows: (places, n), an equal part for each rank. Returns those that each rank has for this one."""
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, rows.contiguous(), group=group)
    return received


def _dispatch(x, weights, ids, num_local, ranks, capacity, empty, group) -> Tuple[Tensor, ...]:
    rows, *plan = send(x, weights, ids, num_local, ranks, capacity, empty)
    row = PackedRow(x.shape[1], x.dtype, weights.shape[1], weights.dtype)
    rows = all_to_all(rows, group)
    return row.hidden_states(rows), *receive(rows, capacity, *row), *plan


def _combine(rows, source, places, group) -> Tensor:
    return sum_places(all_to_all(rows, group), places)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        out = x, weights, ids, fits, source, places, dropped = _dispatch(*args)
        *_, ctx.group = args
        ctx.set_materialize_grads(False)  # else zeros for each of the outputs that have none
        ctx.forms = [(part.shape, part.dtype) for part in (x, weights)]
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(ids, fits, source, places, dropped)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, *grads):
        (places,), found = saved, []
        ways = zip(ctx.needs_input_grad, grads, ctx.forms, (sum_places, take_slots))
        for needed, grad, (shape, dtype), add_up in ways:
            if needed and grad is None:  # other ranks wait for it
                grad = places.new_zeros(shape, dtype=dtype)
            found.append(add_up(all_to_all(grad, ctx.group), places) if needed else None)
        return (*found, None, None, None, None, None, None)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, source, places, group):
        ctx.group = group
        ctx.save_for_backward(source)
        return _combine(rows, source, places, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dout):
        return all_to_all(place_rows(dout, *saved), ctx.group), None, None, None


def dispatch(
    x: Tensor, top_k_weights: Tensor, top_k_index: Tensor, num_local: int, ranks: int, capacity: int,
    group: dist.ProcessGroup, empty: Optional[int] = None,
) -> Arrived:  # fmt: skip
    """Sends each token once to every rank that has one of its experts; tokens past the capacity of a rank are dropped.

    x: (T, H). top_k_weights, top_k_index: (T, top_k), ids over all ranks' experts, of which each has num_local; others
    are sentinels. empty: the id in places that are not filled, num_local by default; TOO_MANY tells of too many tokens.
    Differentiable once in x and top_k_weights; every rank has to take part in forward and backward.
    """
    arguments = top_k_index, num_local, ranks, capacity, num_local if empty is None else empty, group
    recorded = torch.compiler.is_compiling() or needs_autograd(x, top_k_weights)
    x, weights, ids, fits, *plan = (_Dispatch.apply if recorded else _dispatch)(x, top_k_weights, *arguments)
    return Arrived(x, weights, ids, fits, Plan(*plan))


def combine(rows: Tensor, plan: Plan, group: dist.ProcessGroup) -> Tensor:
    """(T, H): the sum, for each token, of what its ranks give; rows: (places, H), in the places of `dispatch`.

    Differentiable once; every rank has to take part in forward and backward.
    """
    recorded = torch.compiler.is_compiling() or needs_autograd(rows)
    return (_Combine.apply if recorded else _combine)(rows, plan.source, plan.places, group)


class OwnPart(torch.autograd.Function):
    """The rank's share of rows that all ranks of the group have.

    The gradient is that of all rows, on each rank, divided by `batches`.
    """

    @staticmethod
    def forward(ctx, whole, group, batches):
        ctx.group, ctx.batches = group, batches
        return _part(whole, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dpart):
        return _gather(dpart if ctx.batches == 1 else dpart / ctx.batches, ctx.group), None, None


class AllParts(torch.autograd.Function):
    """The inverse of `OwnPart`. Each rank takes its share of the gradient, which is the same on all of them."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        whole = _gather(part, group)
        # Compiled, what is filled in place loses its gradient in PyTorch 2.11, and a view of it takes PyTorch 2.15 a
        # compilation more, for numbers of tokens that its ranks do not divide.
        return whole.clone() if torch.compiler.is_compiling() else whole

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dwhole):
        return _part(dwhole, ctx.group).clone(), None


def _part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = whole.shape[0] // dist.get_world_size(group)
    return whole.narrow(0, dist.get_rank(group) * size, size)


def _gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.new_empty((part.shape[0] * dist.get_world_size(group), *part.shape[1:]))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    gather(whole, part.contiguous(), group=group)
    return whole


def agree(same: Dict[str, int], group: dist.ProcessGroup, device: str, most: int = 0) -> int:
    """The largest `most` of any rank. Waits for all ranks and for the device.

    same: numbers, by name, that all ranks have to give alike. Raises ValueError that names the first which they do not,
    on every rank.
    """
    values = torch.tensor([*same.values(), most], device=device)
    both = torch.stack([values, -values])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    largest, smallest = both.tolist()
    for name, high, low in zip(same, largest, smallest):
        if high != -low:
            ranks = dist.get_process_group_ranks(group)
            raise ValueError(f"{name}: expected the same on all ranks {ranks}, got from {-low} to {high}")
    return largest[-1]
