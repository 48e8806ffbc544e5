"""Row-wise kernels between slot order and row order: gather, combine, and the small reductions of the backward."""

import triton
import triton.language as tl


@triton.jit
def combine_kernel(
    y_ptr,  # (S, H) rows sorted by expert
    weights_ptr,  # (S,) routing weight per slot, or None
    slot_to_row_ptr,  # (S,) int32, -1 for a sentinel
    out_ptr,  # (T, H), out
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[t] = sum over the routed slots s of token t, in order, of weights[s] y[slot_to_row[s]], in fp32.

    Grid: (T, h tiles). Neither the row nor the weight of a sentinel is read.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(slot_to_row_ptr + token * TOP_K + k).to(tl.int64)
        width = tl.where(row >= 0, H, 0)
        y = tl.load(y_ptr + row * H + columns, mask=columns < width, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            y *= tl.load(weights_ptr + token * TOP_K + k, mask=row >= 0, other=0.0).to(tl.float32)
        acc += y
    tl.store(out_ptr + token * H + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < H)


@triton.jit
def combine_grad_kernel(
    dout_ptr, stride_dt,  # (T, H), columns contiguous
    y_ptr,  # (S, H) or None: needed for dweights only
    weights_ptr,  # (S,) routing weight per slot
    slot_to_row_ptr,  # (S,) int32, -1 for a sentinel
    dy_ptr,  # (S, H) or None, out: the first R rows are written
    dweights_ptr,  # (S,) or None, out
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dy[row of s] = weights[s] dout[token of s]; dweights[s] = <dout[token of s], y[row of s]>, 0 for a sentinel.

    Grid: (S,).
    """
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
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[r] = x[token of r] for r < R, else 0. Grid: (S, h tiles)."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    routed = row < tl.load(num_rows_ptr)
    token = (tl.load(row_to_slot_ptr + row, mask=routed, other=0) // TOP_K).to(tl.int64)
    x = tl.load(x_ptr + token * stride_xt + columns, mask=columns < tl.where(routed, H, 0), other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * H + columns, x, mask=columns < H)


@triton.jit(do_not_specialize=["total_rows"])
def zero_ungrouped_kernel(
    y_ptr,  # (total_rows, N), out: rows of no group are written
    offsets_ptr,  # (G + 1,) int32
    total_rows,
    NUM_GROUPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y[r] = 0 for r < offsets[0] and offsets[G] <= r < total_rows.

    Grid: (programs,): each takes every programs-th block of those rows. The offsets must not decrease.
    """
    first = tl.load(offsets_ptr)
    grouped = tl.load(offsets_ptr + NUM_GROUPS) - first
    for start in tl.range(tl.program_id(0) * BLOCK_R, total_rows - grouped, tl.num_programs(0) * BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        rows = tl.where(rows < first, rows, rows + grouped)
        for column in range(0, N, BLOCK_N):
            columns = column + tl.arange(0, BLOCK_N)
            ptrs = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
            zeros = tl.zeros((BLOCK_R, BLOCK_N), y_ptr.dtype.element_ty)
            tl.store(ptrs, zeros, mask=(rows < total_rows)[:, None] & (columns < N)[None, :])


@triton.jit
def group_sum_kernel(
    x_ptr, stride_xr,  # (rows, N), or (T, N) read at row_to_slot[row] // TOP_K; columns contiguous
    weights_ptr,  # (S,) factor per slot, or None
    row_to_slot_ptr,  # (rows,) int32 or None
    expert_offsets_ptr,  # (E + 1,) int32
    out_ptr,  # (E, N), out
    N: tl.constexpr,
    TOP_K: tl.constexpr,  # 0: rows in place
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e] = sum over the rows r of expert e of weights[slot of r] x[r], in fp32, in fixed order.

    Grid: (E, n tiles).
    """
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(expert_offsets_ptr + expert + 1)
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for start in tl.range(tl.load(expert_offsets_ptr + expert), end, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        inside = rows < end
        if TOP_K == 0:
            sources = rows.to(tl.int64)
        else:
            slots = tl.load(row_to_slot_ptr + rows, mask=inside, other=0)
            sources = (slots // TOP_K).to(tl.int64)
        mask = inside[:, None] & (columns < N)[None, :]
        x = tl.load(x_ptr + sources[:, None] * stride_xr + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            x *= tl.load(weights_ptr + slots, mask=inside, other=0.0).to(tl.float32)[:, None]
        acc += x
    out_ptrs = out_ptr + expert.to(tl.int64) * N + columns
    tl.store(out_ptrs, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=columns < N)


# A row of the partial sums: its alignment changes with the number of slots.
@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def bias_dot_kernel(
    dout_ptr, stride_dt,  # (T, N), columns contiguous
    bias_ptr, stride_be, stride_bn,  # (E, N)
    out_ptr,  # (rows,) fp32, out: the first R are written
    row_to_slot_ptr, expert_offsets_ptr, tile_offsets_ptr, tile_to_expert_ptr,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[r] = <dout[token of r], bias[e]>. Grid: (max_tiles,). The caller guarantees a schedule made for BLOCK_M."""
    tile = tl.program_id(0)
    if tile < tl.load(tile_offsets_ptr + NUM_EXPERTS):
        expert = tl.load(tile_to_expert_ptr + tile)
        end = tl.load(expert_offsets_ptr + expert + 1)
        m_tile = tile - tl.load(tile_offsets_ptr + expert)
        rows = tl.load(expert_offsets_ptr + expert) + m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        tokens = (tl.load(row_to_slot_ptr + tl.minimum(rows, end - 1)) // TOP_K).to(tl.int64)
        acc = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(0, N, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            inside = columns < N
            dout = tl.load(dout_ptr + tokens[:, None] * stride_dt + columns[None, :], mask=inside[None, :], other=0.0)
            bias_ptrs = bias_ptr + expert.to(tl.int64) * stride_be + columns.to(tl.int64) * stride_bn
            bias = tl.load(bias_ptrs, mask=inside, other=0.0)
            acc += tl.sum(dout.to(tl.float32) * bias.to(tl.float32)[None, :], 1)
        tl.store(out_ptr + rows, acc, mask=rows < end)


@triton.jit(do_not_specialize=["stride_pn", "num_slots"])
def sum_partials_kernel(
    partials_ptr, stride_pn,  # (num_partials, S) fp32
    slot_to_row_ptr,  # (S,) int32, -1 for a sentinel
    out_ptr,  # (S,), out
    num_slots,
    NUM_PARTIALS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[s] = sum of partials[:, slot_to_row[s]], in order; 0 for a sentinel. Grid: (slot blocks,)."""
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(slot_to_row_ptr + slots, mask=slots < num_slots, other=-1)
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in range(NUM_PARTIALS):
        acc += tl.load(partials_ptr + rows, mask=rows >= 0, other=0.0)
        partials_ptr += stride_pn
    tl.store(out_ptr + slots, acc.to(out_ptr.dtype.element_ty), mask=slots < num_slots)
