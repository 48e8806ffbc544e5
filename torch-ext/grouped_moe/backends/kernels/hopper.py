"""Barriers, descriptors and version differences that the Gluon kernels for Hopper share."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...common._compat import reinterpret_method
from .tiles import MAX_RAGGED_ROWS

# Triton 3.7 renamed these.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of a partition's warps
reinterpret = reinterpret_method()  # of a shared-memory descriptor: (descriptor, dtype, shape, layout)

# Rows of a ragged descriptor end here, wherever a group ends in memory.
RAGGED_END = gl.constexpr(MAX_RAGGED_ROWS)


class Tokens(NamedTuple):
    """Tokens to gather, (T, columns), by pointer and row stride in units of 16 bytes, and the slots of rows, or None.

    Without slots, rows are in place.
    """

    ptr: gl.tensor
    unit_stride: gl.tensor
    row_to_slot_ptr: object


@gluon.jit
def allocate_barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUM mbarriers, (NUM, 1), each of which completes a phase after ARRIVALS arrivals.

    Call this before `gl.warp_specialize`, which synchronises the warps. Allocate only barriers that a partition uses:
    Triton gives the shared memory of an unused one to other buffers, but PTX forbids to overwrite an mbarrier that was
    not invalidated. Such a kernel produced NaN while other processes ran on the GPU.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    fence_async_shared()  # makes the initialisation visible to TMA
    return barriers


@gluon.jit
def allocate_blocks(desc, NUM: gl.constexpr):
    """Shared memory for NUM blocks of a descriptor, (NUM, ...)."""
    return gl.allocate_shared_memory(desc.dtype, [NUM] + desc.block_type.shape, desc.layout)


@gluon.jit
def ragged_coordinates(row, end, column):
    """Coordinates in a ragged descriptor (`hopper.descriptors.RaggedTmaBlock`) of the block at (row, column).

    Rows from `end` on are read as 0 and are not written.
    """
    return [RAGGED_END, end, RAGGED_END - end + row, column]


@gluon.jit
def write_staging(value, staging):
    """Writes a tile to a staging tile, a block in shared memory, for a TMA store to read."""
    staging.reshape(value.shape).store(value.to(staging.dtype))
    fence_async_shared()
