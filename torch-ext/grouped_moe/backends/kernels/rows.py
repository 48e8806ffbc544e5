"""Row-wise kernels between slot order and row order: sort, gather and combine."""

import triton
import triton.language as tl

from .dependent import wait_for_stream

_TOGETHER = tl.constexpr(4)  # rows that are loaded at once: more take the registers of other programs


@triton.jit
def add_rows(
    acc, y_ptr, weights_ptr, rows, first_slot, columns, FIRST: tl.constexpr, H: tl.constexpr, TOP_K: tl.constexpr
):
    """acc + the sum, in order, of weights[first_slot + k] y[rows[k]] over the routed slots k from FIRST on, in fp32."""
    END: tl.constexpr = FIRST + _TOGETHER if FIRST + _TOGETHER < TOP_K else TOP_K
    last = rows[FIRST]
    for k in tl.static_range(FIRST + 1, END):
        last = tl.maximum(last, rows[k])
    if last >= 0:
        values, weights = (), ()
        for k in tl.static_range(FIRST, END):
            width = tl.where(rows[k] >= 0, H, 0)
            row_ptr = y_ptr + rows[k].to(tl.int64) * H
            values = values + (tl.load(row_ptr + columns, mask=columns < width, other=0.0),)
            if weights_ptr is not None:
                weights = weights + (tl.load(weights_ptr + first_slot + k, mask=rows[k] >= 0, other=0.0),)
        for k in tl.static_range(FIRST, END):
            if rows[k] >= 0:  # where most slots are sentinels, arithmetic on zeros takes longer than the memory
                value = values[k - FIRST].to(tl.float32)
                if weights_ptr is not None:
                    value *= weights[k - FIRST].to(tl.float32)
                acc += value
    return acc


@triton.jit(do_not_specialize=["stride_pn"])
def combine_kernel(
    y_ptr,  # (S, H) rows sorted by expert
    weights_ptr,  # (S,) routing weight per slot, or None
    dots_ptr, stride_pn,  # (NUM_DOTS, rows) fp32, or None
    slot_to_row_ptr,  # (S,) int32, -1 for a sentinel
    out_ptr,  # (T, H), out
    dscales_ptr,  # (S,), out, or None without dots
    H: tl.constexpr, TOP_K: tl.constexpr, NUM_DOTS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two, TOP_K or more
):  # fmt: skip
    """out[t] = sum over the routed slots s of token t, in order, of weights[s] y[slot_to_row[s]], in fp32.

    dscales[s] = sum of dots[:, slot_to_row[s]], in order as of `sum_partials_kernel`, 0 for a sentinel.
    Neither the row nor the weight nor the dots of a sentinel are read.
    Grid: (T, h tiles). The first h tile of a token makes its dscales.
    """
    wait_for_stream()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    rows = ()
    for k in tl.static_range(TOP_K):
        rows = rows + (tl.load(slot_to_row_ptr + token * TOP_K + k),)
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for first in tl.static_range(0, TOP_K, _TOGETHER):
        acc = add_rows(acc, y_ptr, weights_ptr, rows, token * TOP_K, columns, first, H, TOP_K)
    tl.store(out_ptr + token * H + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < H)
    if dots_ptr is not None:
        if tl.program_id(1) == 0:
            places = tl.arange(0, BLOCK_K)
            slots, inside = token * TOP_K + places, places < TOP_K
            dot_rows = tl.load(slot_to_row_ptr + slots, mask=inside, other=-1)
            dots_ptrs, total = dots_ptr + dot_rows, tl.zeros((BLOCK_K,), tl.float32)
            for _ in range(NUM_DOTS):
                total += tl.load(dots_ptrs, mask=dot_rows >= 0, other=0.0)
                dots_ptrs += stride_pn
            tl.store(dscales_ptr + slots, total.to(dscales_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sort_rows_kernel(
    x_ptr, stride_xt,  # (T, H), columns contiguous
    slot_to_row_ptr,  # (S,) int32, -1 for a sentinel
    out_ptr,  # (rows, H), out: the first R rows are written
    H: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[slot_to_row[s]] = x[t] for the routed slots s of each token t.

    A token is read once, or not at all if it has no routed slot.
    Grid: (T, h tiles).
    """
    wait_for_stream()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    last = tl.load(slot_to_row_ptr + token * TOP_K)
    for k in tl.static_range(1, TOP_K):
        last = tl.maximum(last, tl.load(slot_to_row_ptr + token * TOP_K + k))
    x = tl.load(x_ptr + token * stride_xt + columns, mask=columns < tl.where(last >= 0, H, 0), other=0.0)
    for k in tl.static_range(TOP_K):
        row = tl.load(slot_to_row_ptr + token * TOP_K + k).to(tl.int64)
        tl.store(out_ptr + row * H + columns, x, mask=columns < tl.where(row >= 0, H, 0))


@triton.jit
def combine_grad_kernel(
    dout_ptr, stride_dt,  # (T, H), columns contiguous
    y_ptr,  # (S, H) or None: needed for dweights only
    weights_ptr,  # (S,) routing weight per slot
    slot_to_row_ptr,  # (S,) int32, -1 for a sentinel
    dy_ptr,  # (S, H) or None, out: the first R rows are written
    dweights_ptr,  # (S,) or None, out
    H: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dy[row of s] = weights[s] dout[token of s]; dweights[s] = <dout[token of s], y[row of s]>, 0 for a sentinel.

    Grid: (S,).
    """
    wait_for_stream()
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(slot_to_row_ptr + slot).to(tl.int64)
    inner = tl.zeros((BLOCK_H,), tl.float32)
    if row >= 0:
        weight = tl.load(weights_ptr + slot).to(tl.float32)
        for start in range(0, H, BLOCK_H):
            columns = start + tl.arange(0, BLOCK_H)
            inside = columns < H
            dout = tl.load(dout_ptr + slot // TOP_K * stride_dt + columns, mask=inside, other=0.0).to(tl.float32)
            if dy_ptr is not None:
                tl.store(dy_ptr + row * H + columns, (weight * dout).to(dy_ptr.dtype.element_ty), mask=inside)
            if dweights_ptr is not None:
                inner += dout * tl.load(y_ptr + row * H + columns, mask=inside, other=0.0).to(tl.float32)
    if dweights_ptr is not None:
        tl.store(dweights_ptr + slot, tl.sum(inner, 0).to(dweights_ptr.dtype.element_ty))


@triton.jit
def gather_rows_kernel(
    x_ptr, stride_xt,  # (T, H), columns contiguous
    row_to_slot_ptr,  # (S,) int32
    num_rows_ptr,  # () int32, R
    out_ptr,  # (S, H), out: all of it is written
    H: tl.constexpr, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[r] = x[token of r] for r < R, else 0.

    Grid: (S, h tiles).
    """
    wait_for_stream()
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    routed = row < tl.load(num_rows_ptr)
    token = (tl.load(row_to_slot_ptr + row, mask=routed, other=0) // TOP_K).to(tl.int64)
    x = tl.load(x_ptr + token * stride_xt + columns, mask=columns < tl.where(routed, H, 0), other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * H + columns, x, mask=columns < H)
