"""The experts block for a few tokens, whose time is that of reading weights: no routing, no sorted rows, no tl.dot.

Each slot reads the weights of its expert. If several slots share an expert, all but the first mostly read from L2.
"""

import triton
import triton.language as tl

from .activation import glu
from .block_scaled import block_of, widen_scales
from .dependent import wait_for_stream
from .low_rank import find_adapter, inner_ranks
from .products import load_masked
from .quantize import widen_codes


@triton.jit
def fold(products):
    """(ROWS, COLUMNS) -> (ROWS, COLUMNS // 8): sums of 8 neighbours, read at once by a thread if rows are aligned."""
    return tl.sum(tl.reshape(products, (products.shape[0], products.shape[1] // 8, 8)), 2)


@triton.jit
def inner_products(
    x_ptr, w_ptrs, scale_ptrs, stride_sk, n_mask,
    N: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """<x, w[n]> over K for BLOCK_N rows of weights, (BLOCK_N,) fp32. w_ptrs: (BLOCK_N, BLOCK_K) pointers at k = 0.

    scale_ptrs: (BLOCK_N,) pointers to the scales of the first block, or None for plain weights.
    """
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + start + k, mask=k < K - start, other=0.0).to(tl.float32)
        w = load_masked(w_ptrs + start, n_mask, k < K - start, N % BLOCK_N == 0, K % BLOCK_K == 0)
        if scale_ptrs is None:
            acc += fold(x[None, :] * w.to(tl.float32))
        else:
            scales = load_scales_of_folds(scale_ptrs, stride_sk, start, n_mask, K, K_BLOCK, BLOCK_K)
            acc += fold(x[None, :] * widen_codes(w, tl.float32)) * scales
    return tl.sum(acc, 1)


@triton.jit
def load_scales_of_folds(
    scale_ptrs, stride_sk, start, mask, K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """(rows, BLOCK_K // 8) scales of what `fold` makes of the columns from start on; blocks are multiples of 8."""
    columns = start + 8 * tl.arange(0, BLOCK_K // 8)
    ptrs = scale_ptrs[:, None] + (columns // K_BLOCK).to(tl.int64)[None, :] * stride_sk
    return widen_scales(tl.load(ptrs, mask=mask[:, None] & (columns < K)[None, :], other=0))


@triton.jit
def load_bias_or_zeros(bias_ptr, stride_bn, columns, n_mask):
    """Values of an expert's bias in fp32; 0 without a bias and where masked."""
    if bias_ptr is None:
        return tl.zeros_like(columns).to(tl.float32)
    else:
        return tl.load(bias_ptr + columns.to(tl.int64) * stride_bn, mask=n_mask, other=0.0).to(tl.float32)


@triton.jit
def slot_up_proj_kernel(
    x_ptr, stride_xt,  # (T, K), columns contiguous
    ids_ptr,  # (S,) int32 or int64, expert id per slot
    w_ptr, stride_we, stride_wn,  # (E, 2 N or N, K), K contiguous
    w_scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks along 2 N or N, blocks along K), or None
    bias_ptr, stride_be, stride_bn,  # (E, 2 N or N) or None
    projected_ptr,  # (S, R) fp32, the low-rank part's rows, or None
    factor_ptr, stride_fl, stride_fe, stride_fn, stride_fr,  # (L, E, 2 N or N, R), or None
    adapters_ptr,  # (T,) adapter of each token, or None
    act_ptr,  # (S, N), out: rows of sentinels stay unwritten
    NUM_EXPERTS: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, SCALES: tl.constexpr,
    NUM_ADAPTERS: tl.constexpr, R: tl.constexpr, R_POW2: tl.constexpr,
    OPTIONS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """act[s] = activation(W[e] x[token of s] + bias[e]), e being the expert of slot s, with the low-rank part in W.

    Grid: (n tiles, S). With a low-rank part it is launched after `slot_project_kernel`, which has waited for x and ids.
    The caller guarantees that a scale's block along K is all of K, or a multiple of 8.
    """
    if projected_ptr is None:
        wait_for_stream()
    N: tl.constexpr = OPTIONS.N
    K_BLOCK: tl.constexpr = SCALES.K_BLOCK
    slot = tl.program_id(1)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    if (expert >= 0) & (expert < NUM_EXPERTS):
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = columns < N
        x_row_ptr = x_ptr + (slot // TOP_K).to(tl.int64) * stride_xt
        gate_rows = 2 * columns if OPTIONS.INTERLEAVED else columns
        w_ptrs = (
            w_ptr + expert * stride_we + gate_rows.to(tl.int64)[:, None] * stride_wn + tl.arange(0, BLOCK_K)[None, :]
        )
        expert_bias_ptr = bias_ptr + expert * stride_be if bias_ptr is not None else None
        scale_ptrs = None
        if w_scale_ptr is not None:
            WIDTH: tl.constexpr = 2 if OPTIONS.GATED else 1
            block = block_of(gate_rows, WIDTH * N, SCALES.N_BLOCK, SCALES.N_PARTS).to(tl.int64)
            scale_ptrs = w_scale_ptr + expert * stride_se + block * stride_sn
        gate = inner_products(x_row_ptr, w_ptrs, scale_ptrs, stride_sk, n_mask, N, K, K_BLOCK, BLOCK_N, BLOCK_K)
        gate += load_bias_or_zeros(expert_bias_ptr, stride_bn, gate_rows, n_mask)
        if OPTIONS.GATED:
            TO_UP: tl.constexpr = 1 if OPTIONS.INTERLEAVED else N
            up_ptrs = w_ptrs + tl.cast(stride_wn, tl.int64) * TO_UP
            if w_scale_ptr is not None:
                block = block_of(gate_rows + TO_UP, WIDTH * N, SCALES.N_BLOCK, SCALES.N_PARTS).to(tl.int64)
                scale_ptrs = w_scale_ptr + expert * stride_se + block * stride_sn
            up = inner_products(x_row_ptr, up_ptrs, scale_ptrs, stride_sk, n_mask, N, K, K_BLOCK, BLOCK_N, BLOCK_K)
            up += load_bias_or_zeros(expert_bias_ptr, stride_bn, gate_rows + TO_UP, n_mask)
        else:
            up = None
        if projected_ptr is not None:
            wait_for_stream()
            adapter, has_adapter = find_adapter(adapters_ptr, slot // TOP_K, NUM_ADAPTERS)
            has_pair = columns < tl.where(has_adapter, N, 0)
            row_ptrs = projected_ptr + slot.to(tl.int64) * R + 0 * columns
            factor_ptrs = factor_ptr + adapter * stride_fl + expert * stride_fe + gate_rows.to(tl.int64) * stride_fn
            gate += inner_ranks(row_ptrs, factor_ptrs, stride_fr, has_pair, R, R_POW2)
            if OPTIONS.GATED:
                factor_ptrs += tl.cast(stride_fn, tl.int64) * TO_UP
                up += inner_ranks(row_ptrs, factor_ptrs, stride_fr, has_pair, R, R_POW2)
        value = glu(gate, up, OPTIONS)
        tl.store(act_ptr + slot.to(tl.int64) * N + columns, value.to(act_ptr.dtype.element_ty), mask=n_mask)
    elif projected_ptr is not None:
        wait_for_stream()  # or this kernel could end before the one that it was launched beside


@triton.jit
def slot_down_proj_kernel(
    act_ptr,  # (S, K)
    ids_ptr,  # (S,) int32 or int64, expert id per slot
    weights_ptr,  # (S,) routing weight per slot
    w_ptr, stride_we, stride_wn,  # (E, N, K), K contiguous
    w_scale_ptr, stride_se, stride_sn, stride_sk,  # (E, blocks along N, blocks along K), or None
    bias_ptr, stride_be, stride_bn,  # (E, N) or None
    projected_ptr, factor_ptr, stride_fl, stride_fe, stride_fn, stride_fr, adapters_ptr,  # as above, (L, E, N, R)
    out_ptr,  # (T, N), out
    NUM_EXPERTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, SCALES: tl.constexpr,
    NUM_ADAPTERS: tl.constexpr, R: tl.constexpr, R_POW2: tl.constexpr,
    TOP_K_POW2: tl.constexpr,  # power of two, TOP_K or more
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over the routed slots s of token t, with expert e, of weights[s] (W[e] act[s] + bias[e]), in fp32.

    Nothing of a sentinel is read. The rows of a tile are BLOCK_N columns of the token's first choice, then those of its
    second one, and so on, so that the weights of all choices are loaded together.
    Grid: (n tiles, T). With a low-rank part it is launched after `slot_project_kernel`, which has waited for act.
    The caller guarantees what `slot_up_proj_kernel` needs.
    """
    if projected_ptr is None:
        wait_for_stream()
    row = tl.arange(0, TOP_K_POW2 * BLOCK_N)
    choice = row // BLOCK_N
    column = tl.program_id(0) * BLOCK_N + row % BLOCK_N
    slot = tl.program_id(1) * TOP_K + choice
    expert = tl.load(ids_ptr + slot, mask=choice < TOP_K, other=-1)
    routed = (expert >= 0) & (expert < NUM_EXPERTS) & (column < N)
    expert = tl.where(routed, expert, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + (expert * stride_we + column.to(tl.int64) * stride_wn)[:, None] + k[None, :]
    act_ptrs = act_ptr + slot.to(tl.int64)[:, None] * K + k[None, :]
    if w_scale_ptr is not None:
        scale_ptrs = w_scale_ptr + expert * stride_se
        scale_ptrs += block_of(column, N, SCALES.N_BLOCK, SCALES.N_PARTS).to(tl.int64) * stride_sn
    acc = tl.zeros((TOP_K_POW2 * BLOCK_N, BLOCK_K // 8), tl.float32)
    for start in range(0, K, BLOCK_K):
        mask = routed[:, None] & (k < K - start)[None, :]
        a = tl.load(act_ptrs + start, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptrs + start, mask=mask, other=0.0)
        if w_scale_ptr is None:
            acc += fold(a * w.to(tl.float32))
        else:
            scales = load_scales_of_folds(scale_ptrs, stride_sk, start, routed, K, SCALES.K_BLOCK, BLOCK_K)
            acc += fold(a * widen_codes(w, tl.float32)) * scales
    y = tl.sum(acc, 1)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * stride_be + column.to(tl.int64) * stride_bn
        y += tl.load(bias_ptrs, mask=routed, other=0.0).to(tl.float32)
    if projected_ptr is not None:
        wait_for_stream()
        adapter, has_adapter = find_adapter(adapters_ptr, tl.program_id(1) + 0 * choice, NUM_ADAPTERS)
        factor_ptrs = factor_ptr + adapter * stride_fl + expert * stride_fe + column.to(tl.int64) * stride_fn
        row_ptrs = projected_ptr + slot.to(tl.int64) * R
        y += inner_ranks(row_ptrs, factor_ptrs, stride_fr, routed & has_adapter, R, R_POW2)
    y *= tl.load(weights_ptr + slot, mask=routed, other=0.0).to(tl.float32)
    out = tl.sum(tl.reshape(y, (TOP_K_POW2, BLOCK_N)), 0)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + tl.program_id(1).to(tl.int64) * N + columns
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=columns < N)
