"""Routing and groups: which rows belong to which group, and the schedule of their tiles."""

from functools import lru_cache
from typing import Optional, Tuple

import torch
from torch import Tensor

from ...common import _compat
from ...common.numbers import power_of_two
from ...rows import Rows, schedule_size
from ...tuning.heuristic import choose_block_m
from ..kernels.routing import count_slots_kernel, place_slots_kernel, scan_counts_kernel, schedule_kernel
from .launch import Kernel, runs_nothing

_FEW_SLOTS = 2048  # up to here one launch does it all, in which every program counts all slots
_CHUNK = 128  # slots per program: each is compared with the others of its chunk
_STEP = 512  # slots that a program of that launch counts at a time
_TILES = 128  # that schedule_kernel writes together
# Chunks that scan_counts_kernel adds up at a time, experts of a program, warps: up to so many chunks, and above.
_SCAN_FEW = (256, 8, 4)
_SCAN_MANY = (1024, 4, 8)


def route(
    top_k_index: Tensor, num_experts: int, dtype: torch.dtype, capacity: Optional[int] = None, quantizes: bool = False
) -> Rows:
    """Sorts slots by expert: one launch for few slots, else three.

    dtype: of the products, which share a tile of rows. quantizes: whether they are made with rows of 8-bit floats.
    With a capacity below S there are that many rows. More routed slots fail an assertion on the device; what follows
    there finds a routing without the slots that have no room.
    """
    ids = top_k_index if top_k_index.is_contiguous() else top_k_index.contiguous()
    num_slots, block_m = ids.numel(), choose_block_m(ids.numel(), num_experts, dtype, quantizes)
    num_rows = num_slots if capacity is None else min(num_slots, capacity)
    row_to_slot, slot_to_row = ids.new_empty(num_rows, dtype=torch.int32), ids.new_empty(num_slots, dtype=torch.int32)
    schedule = ids.new_empty(schedule_size(num_rows, num_experts), dtype=torch.int32)
    num_routed = ids.new_empty(1, dtype=torch.int32) if num_rows < num_slots else None
    rows = Rows(schedule, num_experts, num_rows, block_m, top_k_index.shape[1], row_to_slot, slot_to_row)
    _place_slots(ids, rows, num_routed)
    if num_routed is not None:
        assert_room(num_routed, num_rows)
    return rows


def assert_room(num_routed: Tensor, num_rows: int) -> None:
    """Fails on the device if there are fewer rows than routed slots. num_routed: (1,), which launches have written."""
    if runs_nothing():
        return
    _compat.assert_on_device(
        num_routed <= num_rows,
        f"grouped_mm_experts: capacity: expected at least the slots routed to local experts, got {num_rows}",
    )


def launches_of(num_slots: int) -> Tuple[bool, bool, bool]:
    """Which launches route so many slots: whether all three, whether the scan is one of few chunks, whether of one."""
    num_chunks = -(-num_slots // _CHUNK)
    most, *_ = _SCAN_FEW
    return num_slots > _FEW_SLOTS, num_chunks <= most, num_chunks <= 1


def _place_slots(ids: Tensor, rows: Rows, num_routed: Optional[Tensor]) -> None:
    """Writes all of rows, and R, which may exceed the rows there are, to num_routed."""
    num_slots, num_experts = ids.numel(), rows.num_groups
    num_chunks = max(1, -(-num_slots // _CHUNK))
    all_three, few_chunks, one_chunk = launches_of(num_slots)
    counts = totals = None
    if all_three:
        counts = ids.new_empty(num_chunks, num_experts, dtype=torch.int32)
        totals = ids.new_empty(num_experts, dtype=torch.int32)
        _count_kernel(num_experts)((num_chunks, 1, 1), ids, counts, num_slots)
        scan = _scan_kernel(num_experts, few_chunks)
        scan((-(-num_experts // scan.constants["WIDTH"]), 1, 1), counts, totals, num_chunks)
    _place_kernel(num_experts, rows.block_m, one_chunk)(
        (num_chunks, 1, 1), ids, counts, totals, rows.schedule, rows.row_to_slot, rows.slot_to_row, num_routed,
        num_slots, rows.num_rows,
    )  # fmt: skip


def _sizes(num_experts: int) -> dict:
    return {"NUM_EXPERTS": num_experts, "EXPERTS_POW2": power_of_two(num_experts, 32)}


@lru_cache(maxsize=None)
def _count_kernel(num_experts: int) -> Kernel:
    return Kernel(count_slots_kernel, {**_sizes(num_experts), "CHUNK": _CHUNK})


@lru_cache(maxsize=None)
def _scan_kernel(num_experts: int, few: bool) -> Kernel:
    block, width, warps = _SCAN_FEW if few else _SCAN_MANY
    constants = {"NUM_EXPERTS": num_experts, "BLOCK": block, "WIDTH": width}
    return Kernel(scan_counts_kernel, constants, {"num_warps": warps})


@lru_cache(maxsize=None)
def _place_kernel(num_experts: int, block_m: int, one_chunk: bool) -> Kernel:
    constants = {"BLOCK_M": block_m, "CHUNK": _CHUNK, "STEP": _CHUNK if one_chunk else _STEP}
    return Kernel(place_slots_kernel, {**_sizes(num_experts), **constants})


@lru_cache(maxsize=None)
def _schedule_kernel(num_groups: int, are_sizes: bool, block_m: int) -> Kernel:
    constants = {"SIZES": are_sizes, "NUM_GROUPS": num_groups, "GROUPS_POW2": power_of_two(num_groups)}
    return Kernel(schedule_kernel, {**constants, "BLOCK_M": block_m, "BLOCK": _TILES})


def split_rows(splits: Tensor, num_groups: int, num_rows: int, dtype: torch.dtype, quantizes: bool = False) -> Rows:
    """Rows in place. splits: (G,) sizes or (G + 1,) offsets of any values, or the schedule of earlier rows.

    Such a schedule must have been made for as many rows and the same dtype.
    """
    block_m = choose_block_m(num_rows, num_groups, dtype, quantizes)
    if splits.shape[0] > num_groups + 1:
        return Rows(splits.contiguous(), num_groups, num_rows, block_m)
    schedule = splits.new_empty(schedule_size(num_rows, num_groups), dtype=torch.int32)
    kernel = _schedule_kernel(num_groups, splits.shape[0] == num_groups, block_m)
    kernel((num_groups, 1, 1), splits if splits.is_contiguous() else splits.contiguous(), schedule, num_rows)
    return Rows(schedule, num_groups, num_rows, block_m)
