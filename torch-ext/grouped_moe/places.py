"""Places for tokens in the buffers of other ranks: the ops that fill them, read them and add up what returns."""

from typing import NamedTuple, Tuple

import torch
from torch import Tensor

from .packed import PackedRow
from .permute import sum_rows
from .registration import define_op

TOO_MANY = -1  # the id in the places of a rank that has more tokens than there may be


class Plan(NamedTuple):
    """Where tokens go. There are ranks * capacity places, those for each rank in a row. All int32.

    source: (ranks * capacity,) the token in each place, -1 in those that are not filled. places: (T, top_k): at the
    first slot of a token for a rank its place p there; at further slots for the same rank -2 - p; -1 where the token
    goes nowhere. dropped: (ranks,) slots whose token has found no place.
    """

    source: Tensor
    places: Tensor
    dropped: Tensor


def _send(kernels, x, weights, ids, num_local, ranks, capacity, empty) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, *Plan)"""
    weights, ids = weights.contiguous(), ids.contiguous()
    source, *rest = kernels.plan_exchange(ids, num_local, ranks, capacity)
    return kernels.pack_rows(x, weights, ids, source, num_local, capacity, empty), source, *rest


def _send_fake(x, weights, ids, num_local, ranks, capacity, empty):
    words = PackedRow(x.shape[1], x.dtype, weights.shape[1], weights.dtype).words
    plan = (ids.new_empty(shape, dtype=torch.int32) for shape in (ranks * capacity, ids.shape, ranks))
    return ids.new_empty((ranks * capacity, words), dtype=torch.int64), *plan


def _receive_fake(rows, capacity, *row):
    row, places = PackedRow(*row), rows.shape[0]
    weights = rows.new_empty((places, row.top_k), dtype=row.weights_dtype)
    return weights, rows.new_empty((places, row.top_k)), rows.new_empty((), dtype=torch.int32)


send = define_op(
    "exchange_send",
    "(Tensor x, Tensor weights, Tensor ids, SymInt num_local, SymInt ranks, SymInt capacity, SymInt empty)"
    " -> (Tensor rows, Tensor source, Tensor places, Tensor dropped)",
    _send,
    _send_fake,
)
receive = define_op(
    "exchange_receive",
    "(Tensor rows, SymInt capacity, SymInt hidden, ScalarType dtype, SymInt top_k, ScalarType weights_dtype)"
    " -> (Tensor weights, Tensor ids, Tensor fits)",
    lambda kernels, rows, capacity, *row: kernels.unpack_rows(rows, PackedRow(*row), capacity, TOO_MANY),
    _receive_fake,
)
place_rows = define_op(
    "exchange_place_rows",
    "(Tensor x, Tensor source) -> Tensor",
    lambda kernels, x, source: kernels.place_rows(x, source.contiguous()),
    lambda x, source: x.new_empty((source.shape[0], x.shape[1])),
)
take_slots = define_op(
    "exchange_take_slots",
    "(Tensor values, Tensor places) -> Tensor",
    lambda kernels, values, places: kernels.take_slots(values.contiguous(), places.contiguous()),
    lambda values, places: values.new_empty(places.shape),
)


def sum_places(rows: Tensor, places: Tensor) -> Tensor:
    """(T, H): the rows (places, H) of each token, added up in fp32 (fp64 for fp64) in the order of its slots."""
    slot_to_row = places.reshape(-1)
    unread = slot_to_row[:0]  # the sum follows slots
    return sum_rows(rows, None, unread, unread, slot_to_row, places.shape[1])
