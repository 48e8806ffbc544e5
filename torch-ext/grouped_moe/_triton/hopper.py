"""What the Gluon kernels for Hopper share: a ring of shared-memory buffers between warps, and descriptors.

A ring has STAGES slots with two barriers each: `full` completes when a slot's loads have landed, `empty` when its
readers are done with it. Both sides walk the slots in turn with (slot, phase); the phase flips with every round. The
side that fills begins with phase 1: an `empty` barrier that was never completed passes a wait for it.
"""

from functools import lru_cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from .dependent import has_dependent_launches

# Triton 3.7 renamed these.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# Rows of a ragged descriptor end here, wherever a group ends in memory.
RAGGED_END = gl.constexpr(1 << 30)


@gluon.jit
def wait_for_stream():
    """`dependent.wait_for_stream`, which only Triton's kernels can call."""
    if has_dependent_launches():
        gdc_wait()


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The slot after this one, and its phase."""
    slot += 1
    wrap = slot == STAGES
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def previous_slot(slot, STAGES: gl.constexpr):
    """The slot before this one. A carried `previous = slot` would be dropped silently by Triton 3.6."""
    return gl.where(slot == 0, STAGES - 1, slot - 1)


@gluon.jit
def allocate_barriers(NUM: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUM barriers, each completed by so many arrivals, before warps are specialised, which synchronises them.

    For what partitions use only: Triton lays other buffers over barriers that are dead to it, which PTX forbids unless
    they are invalidated. Such a kernel had NaN there next to other processes on the GPU.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    fence_async_shared()  # for the tensor memory accelerator, too
    return barriers


@lru_cache(maxsize=None)
def shared_layout(block, dtype):
    """The layout in which the tensor memory accelerator writes a block of a torch dtype, as wgmma reads it."""
    return gl.NVMMASharedLayout.get_default_for(block, getattr(gl, str(dtype).removeprefix("torch.")))


@gluon.jit
def ragged_coordinates(row, end, column):
    """Where the descriptor of a `descriptors.ragged_box` reads rows from `row` on, those from `end` on as 0."""
    return [RAGGED_END, end, RAGGED_END - end + row, column]
