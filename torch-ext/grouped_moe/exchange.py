"""Expert parallelism: tokens to the ranks of their experts and back, in buffers whose sizes the host knows.

Every rank owns E experts, rank r those from r E on. A token goes once to each rank that owns one of its experts, with
its expert ids and routing weights, and comes back once, as the sum of what these experts give. Each pair of ranks has
the same number of places, the capacity. What is not filled holds sentinels, which cost the experts nothing; so no size
is read from the device. Rows are sent in token order and added up in the order of a token's slots: results repeat
bitwise.
"""

from __future__ import annotations  # PyTorch may be built without torch.distributed

from typing import Dict, Iterator, NamedTuple, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ._ops import ops
from .common import _compat
from .common.autograd import once_differentiable
from .routing import route

# Ids that travel are those of the experts of all ranks plus 1; others stand for no expert. Places without a token are 0
# in all bytes, those from a rank with too many tokens are -1.
NO_EXPERT, TOO_MANY = 0, -1
_ALIGNMENT = 16  # bytes: where hidden states, weights and ids start in a row that travels


class Plan(NamedTuple):
    """Where tokens go. There are ranks * capacity places, those for each rank in a row.

    source: (places,) the token in each place; T in those that are not filled. sent: (S,) int32, the place that a slot's
    token takes, said at the first of its slots for that rank; -1 at all others. places: (T, top_k) the same at every
    slot; -1 where the token goes nowhere.
    """

    source: Tensor
    sent: Tensor
    places: Tensor


def global_ids(top_k_index: Tensor, num_experts: int) -> Tensor:
    """Ids of the num_experts experts of all ranks as they travel, int32 from 1 on; sentinels are 0 or one too many."""
    return (top_k_index.clamp(-1, num_experts) + 1).to(torch.int32)


def local_ids(ids: Tensor, num_local: int, rank: int) -> Tensor:
    """`global_ids` as those of the rank's own experts, int64 as routers have them; E = num_local for all others."""
    ids = ids - (1 + rank * num_local)
    return (ids & 0x7FFFFFFF).clamp(max=num_local).long()  # without its sign a negative number is a large one


def make_plan(ids: Tensor, num_local: int, ranks: int, capacity: int) -> Plan:
    """The plan of a rank that holds the tokens with these `global_ids` (T, top_k); num_local: E.

    Tokens past the capacity for a rank are dropped there.
    """
    num_tokens, top_k = ids.shape
    owner = (ids - 1) // num_local  # of sentinels -1 or `ranks`: none
    first = (owner[:, :, None] == owner[:, None, :]).to(torch.uint8).argmax(2)  # of several equal ones the first
    sent_to = torch.where(first == torch.arange(top_k, device=ids.device), owner, -1)
    routing = route(sent_to, ranks)
    place = routing.slot_to_row.view(num_tokens, top_k) - routing.expert_offsets[sent_to]
    fits = (place >= 0) & (place < capacity)
    sent = torch.where(fits, sent_to * capacity + place, -1)
    source = ids.new_full((ranks * capacity + 1,), num_tokens)
    source[sent.flatten()] = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device) // top_k  # -1: the last
    return Plan(source[:-1], sent.flatten(), sent.gather(1, first))


def count_dropped(ids: Tensor, plan: Plan, num_experts: int) -> Tensor:
    """() int64: slots with one of the num_experts experts of all ranks whose tokens have found no place."""
    return ((ids > 0) & (ids <= num_experts) & (plan.places < 0)).sum()


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """rows: (places, n), an equal part for each rank. Returns those that each rank has for this one."""
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, rows.contiguous(), group=group)
    return received


def _words(columns: int, dtype: torch.dtype) -> int:
    return -(-columns * dtype.itemsize // _ALIGNMENT) * (_ALIGNMENT // 8)


def _as_words(part: Tensor) -> Tensor:
    more = _words(part.shape[1], part.dtype) * 8 // part.dtype.itemsize - part.shape[1]
    if more:
        part = F.pad(part, (0, more))
    elif not torch.compiler.is_compiling() and part.storage_offset() * part.dtype.itemsize % 8:
        part = part.clone(memory_format=torch.contiguous_format)  # a view that starts within a word
    return part.contiguous().view(torch.int64)


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Tensors (T, n) of any dtypes side by side, as (T, words) int64; `_ALIGNMENT` divides where each starts."""
    return torch.cat([_as_words(part) for part in parts], 1)


def unpack(rows: Tensor, layout: Sequence[Tuple[int, torch.dtype]]) -> Iterator[Tensor]:
    """What `pack` has packed, as views; layout: columns and dtype of each tensor."""
    start = 0
    for columns, dtype in layout:
        end = start + _words(columns, dtype)
        yield rows[:, start:end].view(dtype)[:, :columns]
        start = end


def _sum_of_places(rows: Tensor, sent: Tensor, top_k: int) -> Tensor:
    """(T, H): the rows (places, H) of each token, added up in fp32 (fp64 for fp64) in the order of its slots."""
    return ops.combine_rows_forward.default(rows, None, sent[:0], sent[:0], sent, top_k)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, ids, source, sent, places, empty, group):
        ctx.group = group
        ctx.save_for_backward(sent, places)
        parts = x, weights, ids
        rows = F.pad(pack(parts), (0, 0, 0, 1), value=empty).index_select(0, source)
        x, weights, ids = unpack(all_to_all(rows, group), [(part.shape[1], part.dtype) for part in parts])
        ctx.mark_non_differentiable(ids)
        return x, weights, ids

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dx, dweights, _):
        (sent, places), (needs_x, needs_weights) = saved, ctx.needs_input_grad[:2]
        dx = _sum_of_places(all_to_all(dx, ctx.group), sent, places.shape[1]) if needs_x else None
        if needs_weights:
            returned = all_to_all(dweights, ctx.group)
            dweights = returned.gather(0, places.clamp(min=0).long()).masked_fill(places < 0, 0)
        return dx, dweights if needs_weights else None, None, None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, source, sent, top_k, group):
        ctx.group = group
        ctx.save_for_backward(source)
        return _sum_of_places(all_to_all(rows, group), sent, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dout):
        rows = F.pad(dout, (0, 0, 0, 1)).index_select(0, saved[0])
        return all_to_all(rows, ctx.group), None, None, None, None


def dispatch(
    x: Tensor, top_k_weights: Tensor, ids: Tensor, plan: Plan, group: dist.ProcessGroup, empty: int = NO_EXPERT
) -> Tuple[Tensor, Tensor, Tensor]:
    """What ranks have for this one: hidden states (places, H), routing weights and `global_ids` (places, top_k).

    x: (T, H). top_k_weights, ids: (T, top_k). empty: the id in places that are not filled, NO_EXPERT or TOO_MANY.
    Differentiable once in x and top_k_weights; every rank has to take part in forward and backward.
    """
    return _Dispatch.apply(x, top_k_weights, ids, *plan, empty, group)


def combine(rows: Tensor, plan: Plan, group: dist.ProcessGroup) -> Tensor:
    """(T, H): the sum, for each token, of what its ranks give; rows: (places, H), in the places of `dispatch`.

    Differentiable once; every rank has to take part in forward and backward.
    """
    return _Combine.apply(rows, plan.source, plan.sent, plan.places.shape[1], group)


def check_counts(ids: Tensor, capacity: int) -> None:
    """Fails, on an accelerator at the next sync, if a rank has sent TOO_MANY among the ids (places, top_k)."""
    if _compat.has_device_assertions():
        message = "ep_max_tokens: another rank of the expert group has more tokens, and says how many"
        _compat.assert_on_device((ids[::capacity, 0] != TOO_MANY).all(), message)


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole, group):
        ctx.group = group
        return _part(whole, group).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dpart):
        return _gather(dpart, ctx.group), None


class _AllParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        return _gather(part, group)

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


def own_part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rank's share of rows that all ranks of the group have. The gradient is that of all rows, on each rank."""
    return _OwnPart.apply(whole, group)


def all_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `own_part`. Each rank takes its share of the gradient, which is the same on all of them."""
    return _AllParts.apply(part, group)


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
