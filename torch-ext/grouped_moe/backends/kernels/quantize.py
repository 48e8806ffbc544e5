"""The values of 8-bit floats, and rows of them, each times the scale of its block of 128 columns."""

import triton
import triton.language as tl

from .dependent import wait_for_stream

BLOCK = tl.constexpr(128)  # columns of a scale
_LARGEST = tl.constexpr(448.0)  # of e4m3 codes
_SMALLEST = tl.constexpr(2.0**-110)  # magnitude that sets a scale: the inverse of one below might overflow


@triton.jit
def widen_codes(codes, DTYPE: tl.constexpr):
    """Values of e4m3 codes: of tl.float8e4nv, or, where the GPU has none, of bytes."""
    if codes.dtype == DTYPE:
        return codes
    elif codes.dtype == tl.float8e4nv:
        # By way of fp32, which two fast instructions reach: the conversion from fp16 to bf16 takes four times as long.
        return codes.to(tl.float16).to(tl.float32).to(DTYPE)
    else:
        # The bits as an fp16, whose exponent is 8 larger: exact, subnormal codes as well. All ones are NaN.
        bits = codes.to(tl.uint16)
        value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)


@triton.jit
def scale_of(largest):
    """The scale that lets the largest magnitude of a block reach the largest code; that of 2^-110 for smaller ones."""
    return tl.maximum(largest, _SMALLEST) * (1.0 / _LARGEST)


@triton.jit
def quantize(value):
    """(values that codes round, (rows, columns), and the scale of each block of columns, (rows, blocks)) in fp32."""
    NUM_BLOCKS: tl.constexpr = value.shape[1] // BLOCK
    blocks = tl.reshape(value, (value.shape[0], NUM_BLOCKS, BLOCK))
    scale = scale_of(tl.max(tl.abs(blocks), axis=2))
    return tl.reshape(blocks * (1.0 / scale)[:, :, None], (value.shape[0], value.shape[1])), scale


@triton.jit
def row_scale_ptrs(x_scale_ptr, sources, K: tl.constexpr):
    """Pointers to the first scales of rows of codes."""
    return x_scale_ptr + sources * ((K + BLOCK - 1) // BLOCK)


@triton.jit
def store_codes(codes_ptr, scale_ptr, codes, scale, rows, row_mask, first_block, K: tl.constexpr):
    """Stores blocks of columns, from first_block on, to some rows of codes (rows, K) and scales (rows, blocks of K)."""
    K_BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    columns = first_block * BLOCK + tl.arange(0, codes.shape[1])
    blocks = first_block + tl.arange(0, scale.shape[1])
    codes_ptrs = codes_ptr + rows[:, None] * K + columns[None, :]
    tl.store(codes_ptrs, codes.to(codes_ptr.dtype.element_ty), mask=row_mask[:, None] & (columns < K)[None, :])
    scale_ptrs = scale_ptr + rows[:, None] * K_BLOCKS + blocks[None, :]
    tl.store(scale_ptrs, scale, mask=row_mask[:, None] & (blocks < K_BLOCKS)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def quantize_rows_kernel(
    x_ptr, stride_r, stride_k,  # (rows, K)
    slot_to_row_ptr,  # (rows * TOP_K,) int32, -1 for a sentinel, or None if TOP_K is 0
    codes_ptr,  # (rows, K) e4m3, contiguous, out; SORTED: of the sorted rows, as scale_ptr
    scale_ptr,  # (rows, blocks of K) fp32, contiguous, out
    num_rows,
    K: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_POW2: tl.constexpr,  # power of two, TOP_K or more
    SORTED: tl.constexpr, BLOCK_M: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """scale[r, b] = the largest magnitude of the columns of block b over 448; codes = x / scale.

    With TOP_K rows are tokens, and those of which no slot is routed are neither read nor written. SORTED: those of a
    token go to each of its sorted rows instead.
    Grid: (row tiles, tiles of NUM_BLOCKS blocks).
    """
    wait_for_stream()
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_block = tl.program_id(1) * NUM_BLOCKS
    columns = first_block * BLOCK + tl.arange(0, NUM_BLOCKS * BLOCK)
    row_mask, rows = rows < num_rows, rows.to(tl.int64)
    if TOP_K > 0:
        choices = tl.arange(0, TOP_K_POW2)
        slot_mask = row_mask[:, None] & (choices < TOP_K)[None, :]
        sorted_rows = tl.load(slot_to_row_ptr + rows[:, None] * TOP_K + choices[None, :], mask=slot_mask, other=-1)
        row_mask = tl.max(sorted_rows, axis=1) >= 0
    mask = row_mask[:, None] & (columns < K)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_r + columns.to(tl.int64)[None, :] * stride_k, mask=mask, other=0.0)
    codes, scale = quantize(x.to(tl.float32))
    if SORTED:
        for choice in range(TOP_K):
            targets = tl.load(slot_to_row_ptr + rows * TOP_K + choice, mask=row_mask, other=-1).to(tl.int64)
            store_codes(codes_ptr, scale_ptr, codes, scale, targets, targets >= 0, first_block, K)
    else:
        store_codes(codes_ptr, scale_ptr, codes, scale, rows, row_mask, first_block, K)
