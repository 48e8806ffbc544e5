"""Tokens in the places of other ranks on the CPU."""

from typing import Tuple

import torch
from torch import Tensor

from ...packed import PackedRow


def plan_exchange(ids: Tensor, num_local: int, ranks: int, capacity: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(source (ranks * capacity,), places (T, top_k), dropped (ranks,)), all int32: see `places.Plan`."""
    known = (ids >= 0) & (ids < ranks * num_local)
    owner = torch.where(known, ids, ranks * num_local) // num_local
    goes = torch.zeros((ids.shape[0], ranks + 1), dtype=torch.int32, device=ids.device).scatter_(1, owner.long(), 1)
    position = (goes.cumsum(0) - goes).gather(1, owner.long())
    fits = known & (position < capacity)
    first = (owner[:, :, None] == owner[:, None, :]).to(torch.uint8).argmax(2)  # of several equal ones the first
    is_first = first == torch.arange(ids.shape[1], device=ids.device)
    place = torch.where(fits, owner * capacity + position, -1)
    source = ids.new_full((ranks * capacity,), -1, dtype=torch.int32)
    tokens, slots = (fits & is_first).nonzero(as_tuple=True)
    source[place[tokens, slots]] = tokens.int()
    dropped = torch.bincount(owner[known & ~fits], minlength=ranks).int()
    return source, torch.where(is_first | ~fits, place, -2 - place).int(), dropped


def pack_rows(
    x: Tensor, weights: Tensor, ids: Tensor, source: Tensor, num_local: int, capacity: int, empty: int
) -> Tensor:
    """(places, words) int64: the `PackedRow` of each place's token. Tensors have any strides."""
    row = PackedRow(x.shape[1], x.dtype, weights.shape[1], weights.dtype)
    rows = ids.new_zeros((source.shape[0], row.words), dtype=torch.int64)
    filled = (source >= 0).nonzero().squeeze(1)
    tokens = source[filled]
    local = ids[tokens] - (filled // capacity * num_local)[:, None]
    local = torch.where((local >= 0) & (local < num_local), local, num_local).int()
    to_x, to_weights, to_ids = row.parts(rows)
    to_ids.fill_(empty)
    for part, values in ((to_x, x[tokens]), (to_weights, weights[tokens]), (to_ids, local)):
        part[filled] = values
    return rows


def unpack_rows(rows: Tensor, row: PackedRow, capacity: int, refusal: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(weights (places, top_k), ids (places, top_k) int64, fits () int32) of rows that `pack_rows` has packed."""
    _, weights, ids = row.parts(rows)
    return weights.clone(memory_format=torch.contiguous_format), ids.long(), (ids[::capacity, 0] != refusal).all().int()


def place_rows(x: Tensor, source: Tensor) -> Tensor:
    """out[p] = x[source[p]], 0 where that is -1. x: (T, H). Returns (places, H)."""
    filled = (source >= 0).nonzero().squeeze(1)
    out = x.new_zeros((source.shape[0], x.shape[1]))
    out[filled] = x[source[filled]]
    return out


def take_slots(values: Tensor, places: Tensor) -> Tensor:
    """out[t, k] = values[place of the token's slot, k], 0 for slots without one. values: (places, top_k)."""
    place = torch.where(places < -1, -2 - places, places)
    return values.gather(0, place.clamp(min=0).long()).masked_fill(place < 0, 0)
