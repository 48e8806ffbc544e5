"""Products along K of the Triton kernels: operands of a tile, by pointer or by descriptor, and the loops over them."""

from typing import NamedTuple

import triton
import triton.language as tl

from .tiles import column_pieces


class Product(NamedTuple):
    """How products are made: compile-time values."""

    K: tl.constexpr
    TMA: tl.constexpr  # whether weights are read by descriptor
    W_KN: tl.constexpr  # whether that describes (E, K, N)
    PRECISION: tl.constexpr
    BLOCK_K: tl.constexpr


class TileRows(NamedTuple):
    """The rows of a tile: pointers to their first BLOCK_K columns, which of them to read, and a step along K."""

    ptrs: tl.tensor
    mask: tl.tensor
    stride_k: tl.tensor


class Weights(NamedTuple):
    """The weights (E, N, K) by pointer and strides, or their descriptor."""

    ptr: object
    stride_e: tl.tensor
    stride_n: tl.tensor
    stride_k: tl.tensor


@triton.jit
def locate_rows(ptr, stride_r, stride_k, rows, mask, BLOCK_K: tl.constexpr):
    """The TileRows at `rows`, int64, of a tensor (rows, K)."""
    ptrs = ptr + rows[:, None] * stride_r + tl.arange(0, BLOCK_K).to(tl.int64)[None, :] * stride_k
    return TileRows(ptrs, mask, stride_k)


@triton.jit
def weight_ptrs(w, expert, columns, k):
    """(BLOCK_K, BLOCK_N) pointers to an expert's weights."""
    ptrs = w.ptr + expert.to(tl.int64) * w.stride_e + columns.to(tl.int64)[None, :] * w.stride_n
    return ptrs + k.to(tl.int64)[:, None] * w.stride_k


@triton.jit
def load_masked(ptrs, row_mask, column_mask, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """A tile, 0 where masked. A mask that is not needed would prevent vectorized loads."""
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(ptrs)
    elif EVEN_COLUMNS:
        return tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    elif EVEN_ROWS:
        return tl.load(ptrs, mask=column_mask[None, :], other=0.0)
    else:
        return tl.load(ptrs, mask=row_mask[:, None] & column_mask[None, :], other=0.0)


@triton.jit
def load_x(x_ptrs, row_mask, start, PRODUCT: tl.constexpr):
    """The BLOCK_K columns of a tile's rows from `start` on, 0 past K and in rows that are not read."""
    inside = tl.arange(0, PRODUCT.BLOCK_K) < PRODUCT.K - start
    return load_masked(x_ptrs, row_mask, inside, False, PRODUCT.K % PRODUCT.BLOCK_K == 0)


@triton.jit
def load_w(
    w, expert, first_column, start, N: tl.constexpr, EVEN_N: tl.constexpr, BLOCK_N: tl.constexpr, PRODUCT: tl.constexpr
):
    """A (BLOCK_K, BLOCK_N) tile of an expert's weights, 0 past K and past N."""
    BLOCK_K: tl.constexpr = PRODUCT.BLOCK_K
    if PRODUCT.TMA and PRODUCT.W_KN:
        return w.ptr.load([expert, start, first_column]).reshape(BLOCK_K, BLOCK_N)
    elif PRODUCT.TMA:
        return w.ptr.load([expert, first_column, start]).reshape(BLOCK_N, BLOCK_K).T
    else:
        k = start + tl.arange(0, BLOCK_K)
        columns = first_column + tl.arange(0, BLOCK_N)
        ptrs = weight_ptrs(w, expert, columns, k)
        return load_masked(ptrs, k < PRODUCT.K, columns < N, PRODUCT.K % BLOCK_K == 0, EVEN_N)


@triton.jit
def dot_rows(x, w, expert, first_column, N: tl.constexpr, BLOCK_N: tl.constexpr, PRODUCT: tl.constexpr):
    """x @ w over K for BLOCK_N columns: (BLOCK_M, BLOCK_N) fp32."""
    acc = tl.zeros((x.mask.shape[0], BLOCK_N), tl.float32)
    for start in range(0, PRODUCT.K, PRODUCT.BLOCK_K):
        x_tile = load_x(x.ptrs + start * tl.cast(x.stride_k, tl.int64), x.mask, start, PRODUCT)
        w_tile = load_w(w, expert, first_column, start, N, N % BLOCK_N == 0, BLOCK_N, PRODUCT)
        acc = tl.dot(x_tile, w_tile, acc, input_precision=PRODUCT.PRECISION)
    return acc


@triton.jit
def dot_gate_up(x, w, expert, first_column, N: tl.constexpr, BLOCK_N: tl.constexpr, PRODUCT: tl.constexpr):
    """(x @ w_gate, x @ w_up) over K for BLOCK_N columns of each; w has the columns of gate, then those of up."""
    BLOCK_M: tl.constexpr = x.mask.shape[0]
    if PRODUCT.TMA and not PRODUCT.W_KN:
        # One product for gate and up: wgmma reads x once for up to 256 columns.
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for start in range(0, PRODUCT.K, PRODUCT.BLOCK_K):
            x_tile = load_x(x.ptrs + start * tl.cast(x.stride_k, tl.int64), x.mask, start, PRODUCT)
            w_tile = w.ptr.load([expert, 0, first_column, start]).reshape(2 * BLOCK_N, PRODUCT.BLOCK_K)
            acc = tl.dot(x_tile, w_tile.T, acc)
        return column_pieces(acc, 2)
    else:
        EVEN_N: tl.constexpr = N % BLOCK_N == 0
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, PRODUCT.K, PRODUCT.BLOCK_K):
            x_tile = load_x(x.ptrs + start * tl.cast(x.stride_k, tl.int64), x.mask, start, PRODUCT)
            w_gate = load_w(w, expert, first_column, start, N, EVEN_N, BLOCK_N, PRODUCT)
            w_up = load_w(w, expert, N + first_column, start, 2 * N, EVEN_N, BLOCK_N, PRODUCT)
            gate = tl.dot(x_tile, w_gate, gate, input_precision=PRODUCT.PRECISION)
            up = tl.dot(x_tile, w_up, up, input_precision=PRODUCT.PRECISION)
        return gate, up


@triton.jit
def dot_rows_advancing(x, w, expert, first_column, N: tl.constexpr, BLOCK_N: tl.constexpr, PRODUCT: tl.constexpr):
    """`dot_rows` without TMA, by pointers that advance along K."""
    BLOCK_K: tl.constexpr = PRODUCT.BLOCK_K
    columns, k = first_column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x_ptrs, w_ptrs = x.ptrs, weight_ptrs(w, expert, columns, k)
    acc = tl.zeros((x.mask.shape[0], BLOCK_N), tl.float32)
    for start in range(0, PRODUCT.K, BLOCK_K):
        x_tile = load_x(x_ptrs, x.mask, start, PRODUCT)
        w_tile = load_masked(w_ptrs, k < PRODUCT.K - start, columns < N, PRODUCT.K % BLOCK_K == 0, N % BLOCK_N == 0)
        acc = tl.dot(x_tile, w_tile, acc, input_precision=PRODUCT.PRECISION)
        x_ptrs += tl.cast(x.stride_k, tl.int64) * BLOCK_K
        w_ptrs += tl.cast(w.stride_k, tl.int64) * BLOCK_K
    return acc
