"""Rows of a gradient, projected by the b of a LoRA, and b's gradient: the rows are read once for both.

An expert's rows are cut into chunks, of which a program takes one: else an expert that most tokens choose would keep
one program busy long after the others. The gradients that the chunks of an expert make are added up by a second kernel.
"""

import triton
import triton.language as tl

from .dependent import wait_for_stream
from .low_rank import factor_ptrs
from .products import load_masked
from .tiles import end_of_rows, expert_rows, source_rows, tile_rows, tokens_of


@triton.jit
def rows_of_chunk(schedule_ptr, NUM_EXPERTS: tl.constexpr, LEAST: tl.constexpr):
    """Twice the rows of an expert on average, in multiples of LEAST.

    So there are at most (E - 1) // 2 chunks in all that are not the first ones of their experts.
    """
    num_rows = end_of_rows(schedule_ptr, NUM_EXPERTS) - tl.load(schedule_ptr)
    return tl.maximum(tl.cdiv(2 * tl.cdiv(num_rows, NUM_EXPERTS), LEAST), 1) * LEAST


@triton.jit
def further_chunks(chunk_rows, schedule_ptr, NUM_EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr):
    """(experts, the number of chunks that follow the first one of each)."""
    experts = tl.arange(0, EXPERTS_POW2)
    begin = tl.load(schedule_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    end = tl.load(schedule_ptr + experts + 1, mask=experts < NUM_EXPERTS, other=0)
    return experts, tl.maximum(tl.cdiv(end - begin, chunk_rows) - 1, 0)


@triton.jit
def further_before(expert, chunk_rows, schedule_ptr, NUM_EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr):
    """The number of chunks before those of an expert that follow a first one."""
    experts, further = further_chunks(chunk_rows, schedule_ptr, NUM_EXPERTS, EXPERTS_POW2)
    return tl.sum(tl.where(experts < expert, further, 0), 0)


@triton.jit
def find_further_chunk(number, chunk_rows, schedule_ptr, NUM_EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr):
    """Number of a chunk that follows a first one -> (expert, number within the expert).

    The expert is NUM_EXPERTS or more if there are not so many.
    """
    _, further = further_chunks(chunk_rows, schedule_ptr, NUM_EXPERTS, EXPERTS_POW2)
    expert = tl.sum((tl.cumsum(further, 0) <= number).to(tl.int32), 0)
    return expert, number - further_before(expert, chunk_rows, schedule_ptr, NUM_EXPERTS, EXPERTS_POW2) + 1


@triton.jit(do_not_specialize=["num_rows"])
def project_backward_kernel(
    dy_ptr, stride_dyr,  # (rows, N) or, with TOP_K, (T, N), columns contiguous
    factor_ptr,  # (L, E, N, RANK), as `Factor` has it
    projected_ptr,  # (rows, R), or None if grad is not asked for
    partials_ptr,  # (n blocks, rows, R) fp32, out: rows of no expert are not written
    grad_ptr,  # (E, N, R), out, or None
    chunk_grads_ptr,  # (2 ((E - 1) // 2), N, R) fp32, out: of experts of several chunks; or None
    row_to_slot_ptr,  # (rows,) int32, or None for rows in place
    schedule_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, N: tl.constexpr,
    FACTOR: tl.constexpr, TOP_K: tl.constexpr,  # 0 for rows in place
    LEAST_CHUNK: tl.constexpr,  # rows
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Over the columns n of a block and the rows r of a chunk, of dy[r] or dy[token of r]:

    partials[block, r] = sum over n of factor[l, e, n] dy[r, n] for each adapter l, and
    grad[e, n] = sum over r of dy[r, n] projected[r], 0 for an expert without rows.
    The grad of a chunk that is not all of its expert goes to chunk_grads: that of the i-th chunk that follows a first
    one to place i, that of a first one to place (E - 1) // 2 + i, where the i-th is the next of its expert.
    Grid: (n blocks, E first chunks and (E - 1) // 2 that may follow).
    The caller guarantees that BLOCK_M divides LEAST_CHUNK.
    """
    wait_for_stream()
    R: tl.constexpr = FACTOR.R
    block, expert = tl.program_id(0), tl.program_id(1)
    chunk, number = tl.zeros((), tl.int32), expert - NUM_EXPERTS
    chunk_rows = rows_of_chunk(schedule_ptr, NUM_EXPERTS, LEAST_CHUNK)
    if number >= 0:
        expert, chunk = find_further_chunk(number, chunk_rows, schedule_ptr, NUM_EXPERTS, EXPERTS_POW2)
    if expert < NUM_EXPERTS:
        n, ranks = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
        w_ptrs = factor_ptrs(factor_ptr, expert, n[:, None], ranks[None, :], FACTOR)
        w_mask = (n < N)[:, None] & (ranks < FACTOR.NUM_ADAPTERS * FACTOR.RANK)[None, :]
        w = tl.load(w_ptrs, mask=w_mask, other=0.0).to(dy_ptr.dtype.element_ty)
        block_ptr = partials_ptr + block.to(tl.int64) * num_rows * R
        acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
        begin, end_of_expert = expert_rows(expert, schedule_ptr)
        start = begin + chunk * chunk_rows
        end = tl.minimum(start + chunk_rows, end_of_expert)
        for first_row in tl.range(start, end, BLOCK_M):
            rows, row_mask = tile_rows(first_row, end - first_row, BLOCK_M)
            sources = source_rows(rows, row_to_slot_ptr, TOP_K)
            dy_ptrs = dy_ptr + sources[:, None] * stride_dyr + n[None, :]
            dy = load_masked(dy_ptrs, row_mask, n < N, False, N % BLOCK_N == 0)
            offsets = rows.to(tl.int64)[:, None] * R + ranks[None, :]
            mask = row_mask[:, None] & (ranks < R)[None, :]
            if grad_ptr is not None:
                acc = tl.dot(tl.trans(dy), tl.load(projected_ptr + offsets, mask=mask, other=0.0), acc)
            tl.store(block_ptr + offsets, tl.dot(dy, w), mask=mask)
        if grad_ptr is not None:
            offsets, mask = n[:, None] * R + ranks[None, :], (n < N)[:, None] & (ranks < R)[None, :]
            if end - start == end_of_expert - begin:
                grad_ptrs = grad_ptr + expert.to(tl.int64) * (N * R) + offsets
                tl.store(grad_ptrs, acc.to(grad_ptr.dtype.element_ty), mask=mask)
            elif chunk_grads_ptr is not None:
                if chunk == 0:
                    before = further_before(expert, chunk_rows, schedule_ptr, NUM_EXPERTS, EXPERTS_POW2)
                    number = (NUM_EXPERTS - 1) // 2 + before
                tl.store(chunk_grads_ptr + number.to(tl.int64) * (N * R) + offsets, acc, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "scaling"])
def sum_projected_kernel(
    partials_ptr,  # (NUM_PARTIALS, rows, R) fp32
    adapters_ptr,  # adapter of each token, or of each row in place, or None
    z_ptr,  # (rows, R), out
    chunk_grads_ptr,  # as `project_backward_kernel` writes them, or None
    grad_ptr,  # (E, N, R), out, or None
    row_to_slot_ptr,  # (rows,) int32, or None for rows in place
    schedule_ptr,
    num_rows, scaling,
    NUM_EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, N: tl.constexpr,
    NUM_PARTIALS: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, TOP_K: tl.constexpr,
    LEAST_CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """z[r] = scaling times the sum of partials[:, r], in order; with adapters 0 in columns that are not of r's.

    Rows of no expert are not written. With chunk_grads: grad[e] = the sum of those of e, in order, if it has several.
    Grid: (row blocks and, with chunk_grads, E times the n blocks,).
    """
    wait_for_stream()
    block, num_row_blocks = tl.program_id(0), tl.cdiv(num_rows, BLOCK_M)
    if block < num_row_blocks:
        rows, columns = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
        row_mask = (rows >= tl.load(schedule_ptr)) & (rows < end_of_rows(schedule_ptr, NUM_EXPERTS))
        mask = row_mask[:, None] & (columns < R)[None, :]
        offsets = rows.to(tl.int64)[:, None] * R + columns[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for _ in range(NUM_PARTIALS):
            acc += tl.load(partials_ptr + offsets, mask=mask, other=0.0)
            partials_ptr += tl.cast(num_rows, tl.int64) * R
        acc *= scaling
        if adapters_ptr is not None:
            slots = rows if row_to_slot_ptr is None else tl.load(row_to_slot_ptr + rows, mask=row_mask, other=0)
            adapters = tl.load(adapters_ptr + tokens_of(slots, TOP_K), mask=row_mask, other=-1)
            acc = tl.where(adapters[:, None] == (columns // RANK)[None, :], acc, 0.0)
        tl.store(z_ptr + offsets, acc.to(z_ptr.dtype.element_ty), mask=mask)
    elif chunk_grads_ptr is not None:
        NUM_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
        block -= num_row_blocks
        sum_chunk_grads(
            chunk_grads_ptr, grad_ptr, schedule_ptr, block // NUM_BLOCKS, block % NUM_BLOCKS,
            NUM_EXPERTS, EXPERTS_POW2, N, R, LEAST_CHUNK, BLOCK_N, BLOCK_R,
        )  # fmt: skip


@triton.jit
def sum_chunk_grads(
    chunk_grads_ptr, grad_ptr, schedule_ptr, expert, n_block,
    NUM_EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    LEAST_CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """grad[expert] of a block of columns, if the expert has several chunks."""
    chunk_rows = rows_of_chunk(schedule_ptr, NUM_EXPERTS, LEAST_CHUNK)
    begin, end = expert_rows(expert, schedule_ptr)
    if end - begin > chunk_rows:
        before = further_before(expert, chunk_rows, schedule_ptr, NUM_EXPERTS, EXPERTS_POW2)
        n, ranks = n_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
        offsets, mask = n[:, None] * R + ranks[None, :], (n < N)[:, None] & (ranks < R)[None, :]
        first = (NUM_EXPERTS - 1) // 2 + before
        acc = tl.load(chunk_grads_ptr + first.to(tl.int64) * (N * R) + offsets, mask=mask, other=0.0)
        for number in range(before, before + tl.cdiv(end - begin, chunk_rows) - 1):
            acc += tl.load(chunk_grads_ptr + tl.cast(number, tl.int64) * (N * R) + offsets, mask=mask, other=0.0)
        grad_ptrs = grad_ptr + expert.to(tl.int64) * (N * R) + offsets
        tl.store(grad_ptrs, acc.to(grad_ptr.dtype.element_ty), mask=mask)
