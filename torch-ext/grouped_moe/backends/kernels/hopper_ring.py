"""The operand pipeline of the Gluon kernels for Hopper: a ring of shared-memory slots, and the products made from it.

A slot holds the operands of one step along K, BLOCK_K wide. Of its two barriers, `full` completes when the operands
have landed, and `empty` when all consumers have read them. Producer and consumers visit the slots in order, and keep
(slot, phase); the phase flips each time they start over. The producer starts with phase 1: on a new barrier that wait
returns at once.
"""

import math
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.runtime.jit import constexpr_function

from .hopper import allocate_barriers, allocate_blocks, reinterpret, tma_load


class Ranks(NamedTuple):
    """The descriptors of a low-rank part, None without one. A block takes a slot of the ring, or less of it."""

    rows_desc: object  # (rows, R)
    factor_desc: object  # (E, N, R) or, FACTOR_KN, (E, R, N), gate and up apart where those of the weight are


class Ring(NamedTuple):
    """Shared-memory buffers and barriers; dimension 0 is STAGES, the number of slots. Ranks take steps, too."""

    lhs: gl.shared_memory_descriptor  # the activations: (STAGES, BLOCK_M, BLOCK_K), or K first in a weight gradient
    rhs: gl.shared_memory_descriptor  # the weights, in blocks of their descriptor, or the weight gradient's other rows
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ranks: Ranks


class Product(NamedTuple):
    """The product of rows (rows, K) with an expert's weights for N columns: compile-time values.

    R: columns of the low-rank part, 0 without one, which are more of K.
    """

    N: gl.constexpr
    K: gl.constexpr
    R: gl.constexpr
    W_KN: gl.constexpr  # whether weights are (E, K, N) instead of (E, N, K)
    FACTOR_KN: gl.constexpr  # the same of the low-rank part's factor, with R for K
    BLOCK_N: gl.constexpr  # columns of a tile
    BLOCK_K: gl.constexpr  # of a step
    RANKS_FIRST: gl.constexpr  # whether the steps of the low-rank part come before those of K


@gluon.jit
def allocate_slots(lhs_desc, rhs_desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Buffers and barriers of a ring that one warp fills by TMA, in blocks of the descriptors: (lhs, rhs, full, empty).

    CONSUMERS: warp groups that read each slot.
    """
    lhs, rhs = allocate_blocks(lhs_desc, STAGES), allocate_blocks(rhs_desc, STAGES)
    return lhs, rhs, allocate_barriers(STAGES, 1), allocate_barriers(STAGES, CONSUMERS)


@constexpr_function
def num_steps(K, R, BLOCK_K):
    """Steps along K and the ranks of the low-rank part."""
    return (K + BLOCK_K - 1) // BLOCK_K + (R + BLOCK_K - 1) // BLOCK_K


@constexpr_function
def narrow_columns(R, BLOCK_K):
    """Columns of the last step of R ranks, a power of two, if the matrix instructions can take fewer; else 0."""
    columns = 16
    while columns < R % BLOCK_K:
        columns *= 2
    return columns % BLOCK_K if R % BLOCK_K else 0


@constexpr_function
def has_shape(buffers, block):
    """Whether each of some buffers has the shape of a block."""
    return list(buffers[1:]) == list(block)


@constexpr_function
def count_blocks(buffers, dtype, block, block_dtype):
    """How many blocks a slot of some buffers holds. buffers, block: their shapes."""
    bits = math.prod(buffers[1:]) * dtype.primitive_bitwidth
    return bits // (math.prod(block) * block_dtype.primitive_bitwidth)


@gluon.jit
def slot_as(buffers, desc, slot):
    """A slot of the ring's buffers as a block of a descriptor: that of the operands, or of the low-rank part.

    A smaller block is the first of those in the slot: Triton 3.8 reinterprets memory as a type of the same size alone.
    """
    if buffers.dtype == desc.dtype and has_shape(buffers.shape, desc.block_type.shape):
        return buffers.index(slot)
    else:
        blocks: gl.constexpr = count_blocks(buffers.shape, buffers.dtype, desc.block_type.shape, desc.dtype)
        shape: gl.constexpr = [blocks] + desc.block_type.shape
        layout: gl.constexpr = desc.layout
        return reinterpret(buffers.index(slot), desc.dtype, shape, layout).index(0)


@gluon.jit
def slot_at(position, STAGES: gl.constexpr):
    """(slot, phase) at a position in the sequence of all slots that a program fills."""
    return position % STAGES, (position // STAGES) & 1


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The slot after this one, and its phase."""
    slot += 1
    wrap = slot == STAGES
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def previous_slot(slot, STAGES: gl.constexpr):
    """The slot before this one. Triton 3.6 would silently drop a loop-carried `previous = slot`."""
    return gl.where(slot == 0, STAGES - 1, slot - 1)


@gluon.jit
def load_weight(w_desc, expert, n_tile, k, full, buf, BLOCK_N: gl.constexpr, KN: gl.constexpr):
    """Starts to load an expert's weights for the columns of n_tile and the step at k into `buf`.

    KN: whether weights are (E, K, N) instead of (E, N, K).

    A descriptor of four dimensions, (E, 2, N, K), has gate and up apart: BLOCK_N / 2 columns of each are loaded.
    """
    if len(w_desc.block_shape) == 4:
        tma_load(w_desc, [expert, 0, n_tile * (BLOCK_N // 2), k], full, buf)
    elif KN:
        tma_load(w_desc, [expert, k, n_tile * BLOCK_N], full, buf)
    else:
        tma_load(w_desc, [expert, n_tile * BLOCK_N, k], full, buf)


@gluon.jit
def multiply_step(acc, lhs, rhs, ring, slot, k, ADD: gl.constexpr):
    """Starts acc + lhs @ rhs for step k, whose operands are in `slot`, and releases the slot of the step before it.

    ADD: whether acc counts in step 0; in later steps it always does.
    """
    acc = warpgroup_mma(lhs, rhs, acc, use_acc=True if ADD else k > 0, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    mbarrier.arrive(ring.empty.index(previous_slot(slot, ring.empty.shape[0])), count=1, pred=k > 0)
    return acc


@gluon.jit
def finish_products(acc, ring, slot, steps=1):
    """Waits for the last of `steps` products, and releases their slot, the one before `slot`, if there were any."""
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(ring.empty.index(previous_slot(slot, ring.empty.shape[0])), count=1, pred=steps > 0)
    return acc


@gluon.jit
def multiply(
    ring, slot, phase, PRODUCT: gl.constexpr,
    STEPS: gl.constexpr, FIRST_ROW: gl.constexpr, ROWS: gl.constexpr, sums=None, ENDS: gl.constexpr = True,
):  # fmt: skip
    """x[FIRST_ROW : FIRST_ROW + ROWS] @ w over the next STEPS slots, plus `sums` if given: (acc, next slot, phase).

    acc: (ROWS, BLOCK_N) fp32. The last products are still under way: call `finish_products` before reading it. ENDS:
    whether these are the tile's last steps. Of the last one only as many columns are multiplied as the ranks need.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    LAST: gl.constexpr = narrow_columns(PRODUCT.R, BLOCK_K) if ENDS else 0
    BLOCK_N: gl.constexpr = PRODUCT.BLOCK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT) if sums is None else sums
    for k in range(STEPS - (1 if LAST > 0 else 0)):
        mbarrier.wait(ring.full.index(slot), phase)
        if PRODUCT.W_KN:
            w = ring.rhs.index(slot).reshape([BLOCK_K, BLOCK_N])
        else:
            w = ring.rhs.index(slot).reshape([BLOCK_N, BLOCK_K]).permute((1, 0))
        x = ring.lhs.index(slot).slice(FIRST_ROW, ROWS)
        acc = multiply_step(acc, x, w, ring, slot, k, ADD=sums is not None)
        slot, phase = next_slot(slot, phase, STAGES)
    if LAST > 0:
        mbarrier.wait(ring.full.index(slot), phase)
        x = slot_as(ring.lhs, ring.ranks.rows_desc, slot).slice(FIRST_ROW, ROWS)
        w = slot_as(ring.rhs, ring.ranks.factor_desc, slot)
        BLOCK_R: gl.constexpr = x.shape[1]
        if PRODUCT.W_KN:
            w = w.reshape([BLOCK_R, BLOCK_N]).slice(0, LAST)
        else:
            w = w.reshape([BLOCK_N, BLOCK_R]).slice(0, LAST, dim=1).permute((1, 0))
        x = x.slice(0, LAST, dim=1)
        acc = multiply_step(acc, x, w, ring, slot, STEPS - 1, ADD=True)
        slot, phase = next_slot(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def multiply_half(GROUP: gl.constexpr, ring, slot, phase, lead_barrier, lead_phase, PRODUCT: gl.constexpr):
    """`multiply` for half GROUP of the rows of a tile that two warp groups share.

    Group 0 leads: group 1 makes a tile's last LEAD steps only once group 0 has finished the tile. Its products so
    overlap group 0's epilogue, and group 0's first products of the next tile overlap group 1's epilogue. Group 0 lets
    group 1 go on by lead_barrier, in phase lead_phase; with None, neither group leads. A tile needs more than STAGES
    steps: with fewer, group 0 could complete a second phase of lead_barrier before group 1 has seen the first.

    LEAD = STAGES // 2; LEAD plus the commit lag of `commit_slot` must not exceed STAGES, or producer and consumers
    deadlock: while group 1 waits, the ring has to take all remaining steps of the tile.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    ROWS: gl.constexpr = ring.lhs.shape[1] // 2
    STEPS: gl.constexpr = num_steps(PRODUCT.K, PRODUCT.R, ring.lhs.shape[2])
    LEAD: gl.constexpr = STAGES // 2
    gl.static_assert(lead_barrier is None or STEPS > STAGES)
    if GROUP == 0 or lead_barrier is None:
        acc, slot, phase = multiply(ring, slot, phase, PRODUCT, STEPS, GROUP * ROWS, ROWS)
        if lead_barrier is not None:
            mbarrier.arrive(lead_barrier, count=1)
    else:
        acc, slot, phase = multiply(ring, slot, phase, PRODUCT, STEPS - LEAD, GROUP * ROWS, ROWS, ENDS=False)
        acc = finish_products(acc, ring, slot)
        mbarrier.wait(lead_barrier, lead_phase)
        acc, slot, phase = multiply(ring, slot, phase, PRODUCT, LEAD, GROUP * ROWS, ROWS, acc)
    return acc, slot, phase
