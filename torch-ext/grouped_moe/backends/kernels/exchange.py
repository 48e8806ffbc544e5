"""Tokens in the places of other ranks: a plan, rows that travel, and what returns.

Each rank has `capacity` places, those of rank r from r * capacity on, which its tokens take in token order.
"""

import triton
import triton.language as tl

from .dependent import wait_for_stream


@triton.jit
def owners_of(
    ids_ptr, tokens, num_tokens, ranks, NUM_LOCAL: tl.constexpr, TOP_K: tl.constexpr, TOP_K_POW2: tl.constexpr
):
    """(slots of some tokens, whether there are such, the ranks of their experts and -1 for sentinels)."""
    columns = tl.arange(0, TOP_K_POW2)[None, :]
    slots = tokens.to(tl.int64)[:, None] * TOP_K + columns
    inside = (tokens < num_tokens)[:, None] & (columns < TOP_K)
    ids = tl.load(ids_ptr + slots, mask=inside, other=-1)
    owner = tl.where((ids >= 0) & (ids < ranks * NUM_LOCAL), ids, -NUM_LOCAL).to(tl.int32) // NUM_LOCAL
    return slots, inside, owner


@triton.jit(do_not_specialize=["num_tokens", "capacity"])
def plan_exchange_kernel(
    ids_ptr,  # (T, top_k) int32 or int64, over the experts of all ranks
    source_ptr,  # (ranks * capacity,) int32, out: the token of each place, -1 for none
    places_ptr,  # (T, top_k) int32, out
    dropped_ptr,  # (ranks,) int32, out
    num_tokens,
    capacity,
    NUM_LOCAL: tl.constexpr, TOP_K: tl.constexpr, TOP_K_POW2: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """position = the number of earlier tokens with an expert of the rank; place = r * capacity + position.

    places: that place at the first of a token's slots for the rank, -2 - place at the others, -1 where there is no such
    place or the slot is a sentinel. dropped: the slots with an expert of the rank whose position is past the capacity.
    Grid: (ranks, chunks of tokens, at least 1). A program counts the rank's tokens of all earlier chunks, and then
    places those of its own. Those of rank 0 write the places of sentinels; those of the last chunk write what is
    dropped, and -1 to places that stay free.
    """
    wait_for_stream()
    rank, ranks, chunk = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    is_last = chunk == tl.num_programs(1) - 1
    size = tl.cdiv(tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(1)) * BLOCK_T
    count = tl.zeros((), tl.int32)
    dropped = tl.zeros((), tl.int32)
    for start in range(0, chunk * size, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        _, _, owner = owners_of(ids_ptr, tokens, num_tokens, ranks, NUM_LOCAL, TOP_K, TOP_K_POW2)
        mine = (owner == rank).to(tl.int32)
        goes = tl.max(mine, 1)
        passed = count + tl.sum(goes, 0)
        if is_last & (passed > capacity):
            position = count + tl.cumsum(goes, 0) - goes
            dropped += tl.sum(tl.where(position < capacity, 0, tl.sum(mine, 1)), 0)
        count = passed

    for start in range(chunk * size, (chunk + 1) * size, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        slots, inside, owner = owners_of(ids_ptr, tokens, num_tokens, ranks, NUM_LOCAL, TOP_K, TOP_K_POW2)
        mine = (owner == rank).to(tl.int32)
        goes = tl.max(mine, 1)
        position = count + tl.cumsum(goes, 0) - goes
        count += tl.sum(goes, 0)
        fits = position < capacity
        place = rank * capacity + position
        tl.store(source_ptr + place, tokens, mask=fits & (goes > 0))
        is_first = tl.cumsum(mine, 1) == mine
        value = tl.where(is_first, place[:, None], -2 - place[:, None])
        value = tl.where(fits[:, None] & (mine > 0), value, -1)
        tl.store(places_ptr + slots, value, mask=inside & (tl.maximum(owner, 0) == rank))
        dropped += tl.sum(tl.where(fits, 0, tl.sum(mine, 1)), 0)
    if is_last:
        tl.store(dropped_ptr + rank, dropped)
        for start in range(tl.minimum(count, capacity), capacity, BLOCK_T):
            position = start + tl.arange(0, BLOCK_T)
            none = tl.full((BLOCK_T,), -1, tl.int32)
            tl.store(source_ptr + rank * capacity + position, none, mask=position < capacity)


@triton.jit(do_not_specialize=["capacity"])
def pack_rows_kernel(
    x_ptr, stride_xt,  # (T, H), columns contiguous
    weights_ptr,  # (T, top_k), or None: then rows are those of x alone
    ids_ptr,  # (T, top_k) int32 or int64, over the experts of all ranks; None without weights
    source_ptr,  # (places,) int32, the token of each place, -1 for none
    out_ptr,  # (places, ROW bytes), out
    capacity,
    H: tl.constexpr, TOP_K: tl.constexpr, TOP_K_POW2: tl.constexpr, NUM_LOCAL: tl.constexpr, EMPTY: tl.constexpr,
    WEIGHTS_AT: tl.constexpr, IDS_AT: tl.constexpr, ROW: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[p] = x[t], weights[t] and ids[t] of t = source[p], ids less r * NUM_LOCAL, NUM_LOCAL if not an expert of r.

    A place without a token has 0 in x and weights, and EMPTY in ids.
    Grid: (places, h tiles). The caller guarantees that parts start at multiples of 16 bytes.
    """
    wait_for_stream()
    place = tl.program_id(0)
    token = tl.load(source_ptr + place).to(tl.int64)
    row_ptr = out_ptr.to(tl.pointer_type(tl.int8)) + place.to(tl.int64) * ROW
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    x = tl.load(x_ptr + token * stride_xt + columns, mask=columns < tl.where(token >= 0, H, 0), other=0.0)
    tl.store(row_ptr.to(tl.pointer_type(x_ptr.dtype.element_ty)) + columns, x, mask=columns < H)
    if weights_ptr is not None:
        if tl.program_id(1) == 0:
            choices = tl.arange(0, TOP_K_POW2)
            inside, known = choices < TOP_K, choices < tl.where(token >= 0, TOP_K, 0)
            weights = tl.load(weights_ptr + token * TOP_K + choices, mask=known, other=0.0)
            to_weights = (row_ptr + WEIGHTS_AT).to(tl.pointer_type(weights_ptr.dtype.element_ty))
            tl.store(to_weights + choices, weights, mask=inside)
            ids = tl.load(ids_ptr + token * TOP_K + choices, mask=known, other=0) - place // capacity * NUM_LOCAL
            ids = tl.where((ids >= 0) & (ids < NUM_LOCAL), ids, NUM_LOCAL).to(tl.int32)
            ids = tl.where(token >= 0, ids, EMPTY)
            tl.store((row_ptr + IDS_AT).to(tl.pointer_type(tl.int32)) + choices, ids, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def unpack_rows_kernel(
    rows_ptr,  # (places, ROW bytes)
    weights_ptr,  # (places, top_k), out
    ids_ptr,  # (places, top_k) int64, out
    fits_ptr,  # () int32, out
    num_rows,
    capacity,
    TOP_K: tl.constexpr, REFUSAL: tl.constexpr, WEIGHTS_AT: tl.constexpr, IDS_AT: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """weights and ids of the rows; fits = whether the first id of no rank's places is REFUSAL.

    Grid: (blocks of slots,). Rows are those of `pack_rows_kernel`.
    The caller guarantees that capacity divides num_rows.
    """
    wait_for_stream()
    slots = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place, inside = slots // TOP_K, slots < num_rows.to(tl.int64) * TOP_K
    row_ptrs = rows_ptr.to(tl.pointer_type(tl.int8)) + place * ROW
    from_weights = (row_ptrs + WEIGHTS_AT).to(tl.pointer_type(weights_ptr.dtype.element_ty)) + slots % TOP_K
    tl.store(weights_ptr + slots, tl.load(from_weights, mask=inside), mask=inside)
    from_ids = (row_ptrs + IDS_AT).to(tl.pointer_type(tl.int32)) + slots % TOP_K
    tl.store(ids_ptr + slots, tl.load(from_ids, mask=inside).to(tl.int64), mask=inside)
    if tl.program_id(0) == 0:
        refusals = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, num_rows // capacity, BLOCK):
            first = (start + tl.arange(0, BLOCK)).to(tl.int64) * capacity
            first_ids = (rows_ptr.to(tl.pointer_type(tl.int8)) + first * ROW + IDS_AT).to(tl.pointer_type(tl.int32))
            refusals += (tl.load(first_ids, mask=first < num_rows, other=0) == REFUSAL).to(tl.int32)
        tl.store(fits_ptr, (tl.sum(refusals, 0) == 0).to(tl.int32))


@triton.jit(do_not_specialize=["num_slots"])
def take_slots_kernel(
    values_ptr,  # (places, top_k)
    places_ptr,  # (S,) int32, as `plan_exchange_kernel` makes them
    out_ptr,  # (S,), out
    num_slots,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[s] = values[place of s, s mod top_k], 0 without a place. Grid: (blocks of slots,)."""
    wait_for_stream()
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places_ptr + slots, mask=slots < num_slots, other=-1)
    place = tl.where(place < -1, -2 - place, place).to(tl.int64)
    values = tl.load(values_ptr + place * TOP_K + slots % TOP_K, mask=place >= 0, other=0.0)
    tl.store(out_ptr + slots, values, mask=slots < num_slots)
