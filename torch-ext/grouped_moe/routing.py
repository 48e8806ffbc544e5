"""Routing: which rows of a grouped GEMM come from which slot. The sentinel contract lives here.

A slot s = t * top_k + k is the k-th choice of token t. A slot whose expert id lies outside [0, E) -- E and beyond, or
negative, any int32 or int64 value -- is a sentinel (under expert parallelism: an expert of another rank). A sentinel
1. contributes exactly 0 to the output; its routing weight is never read, nor is the hidden row of a token that has
   nothing but sentinels;
2. receives exactly 0 gradient for its routing weight, and gives none to hidden states, weights or biases;
3. has no row: memory that was not written has no effect, in the forward, the backward or a graph replay;
4. costs its routing entry: time follows the R routed rows, not the S slots.
No token, no routed row, an expert without rows and all rows on one expert are valid.

Rows are sorted by expert and, within an expert, by slot (a stable counting sort), so every sum over rows has one order.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ._checks import check_routing
from ._ops import add_op_namespace_prefix, ops
from ._torch.routing import route as _route_torch
from .launch import MAX_KEPT, Launch, Ref, bind
from .plan import Plan, unwritten
from .schedule import Schedule, map_size, schedule_of_map
from .tuning import on_device_of

_SMALL_SLOTS = 2048  # up to here one launch does it all, in which every program counts all slots
_CHUNK = 128  # slots per program: each is compared with the others of its chunk
_STEP = 512  # slots that a program of that launch counts at a time
# Chunks that scan_counts_kernel adds up at a time, experts of a program, warps: up to so many chunks, and above.
_SCAN_FEW = (256, 8, 4)
_SCAN_MANY = (1024, 4, 8)


@dataclass(frozen=True)
class Routing:
    """The two index maps between slots and rows, and where each expert's rows lie. All int32, on one device.

    expert_offsets: (E + 1,), rows [expert_offsets[e], expert_offsets[e + 1]) belong to expert e; the last entry is R.
    row_to_slot: (S,), row -> slot for the first R rows; the rest is unspecified.
    slot_to_row: (S,), slot -> row; -1 for a sentinel.
    top_k: slots per token, so that slot // top_k is the token.
    """

    expert_offsets: Tensor
    row_to_slot: Tensor
    slot_to_row: Tensor
    top_k: int

    @property
    def num_experts(self) -> int:
        """E, the local experts."""
        return self.expert_offsets.shape[0] - 1


class TiledRouting(NamedTuple):
    """What the experts block needs of its routing: the schedule, whose map begins with expert_offsets, and the maps."""

    schedule: Schedule
    row_to_slot: Tensor
    slot_to_row: Tensor


def _sizes(num_experts: int) -> dict:
    return {"NUM_EXPERTS": num_experts, "EXPERTS_POW2": max(32, 1 << (num_experts - 1).bit_length())}


def _launch(
    top_k_index: Tensor, offsets: Tensor, num_experts: int, block_m: int, num_rows: int, num_routed: Optional[Tensor]
) -> Tuple[Tensor, Tensor]:
    """(row_to_slot, slot_to_row); writes offsets or, with the rows of a tile given, a schedule's map.

    num_routed: (1,), gets R, which may then exceed num_rows; None if num_rows is S.
    """
    ids = top_k_index if top_k_index.is_contiguous() else top_k_index.contiguous()
    plan = route_plan(ids.numel(), ids.dtype, num_experts, block_m, num_rows, num_routed is not None, ids.device)
    row_to_slot, slot_to_row = plan(ids, offsets, num_routed)[3:5]
    return row_to_slot, slot_to_row


def route_plan(
    num_slots: int, ids_dtype: torch.dtype, num_experts: int, block_m: int, num_rows: int, counts: bool,
    device: torch.device,
) -> Plan:  # fmt: skip
    """ids, offsets or a schedule's map, num_routed -> row_to_slot, slot_to_row.

    counts: whether num_routed is asked for.
    """
    few = num_slots <= _SMALL_SLOTS
    return _route_plan(num_slots, ids_dtype, num_experts, block_m, num_rows, counts, device, few)


@lru_cache(maxsize=MAX_KEPT)
def _route_plan(
    num_slots: int, ids_dtype: torch.dtype, num_experts: int, block_m: int, num_rows: int, counts: bool,
    device: torch.device, few: bool,
) -> Plan:  # fmt: skip
    """few: whether one launch does it all."""
    from ._triton import routing as kernels

    num_chunks = max(1, -(-num_slots // _CHUNK))
    plan = Plan(device, 3)
    row_to_slot, slot_to_row = (plan.make(unwritten(torch.int32, size)) for size in (num_rows, num_slots))
    matrix = None if few else plan.make(unwritten(torch.int32, num_chunks, num_experts), scratch=True)
    totals = None if few else plan.make(unwritten(torch.int32, num_experts), scratch=True)
    grid, sizes = (num_chunks, 1, 1), _sizes(num_experts)
    if not few:
        kernel = bind(kernels.count_slots_kernel, **sizes, CHUNK=_CHUNK)
        plan.add(Launch(device, kernel, grid, Ref(0), Ref(1), num_slots), 0, matrix)
        block, width, warps = _SCAN_FEW if num_chunks <= _SCAN_FEW[0] else _SCAN_MANY
        kernel = bind(kernels.scan_counts_kernel, NUM_EXPERTS=num_experts, BLOCK=block, WIDTH=width, num_warps=warps)
        plan.add(Launch(device, kernel, (-(-num_experts // width), 1, 1), Ref(0), Ref(1), num_chunks), matrix, totals)
    step = _CHUNK if num_chunks == 1 else _STEP
    kernel = bind(kernels.place_slots_kernel, **sizes, BLOCK_M=block_m, CHUNK=_CHUNK, STEP=step)
    counted = (None, None) if few else (Ref(1), Ref(2))
    place = Launch(
        device, kernel, grid,
        Ref(0), *counted, Ref(3), Ref(4), Ref(5), Ref(6) if counts else None, num_slots, num_rows,
    )  # fmt: skip
    plan.add(place, 0, matrix, totals, 1, row_to_slot, slot_to_row, 2)
    return plan


def route_triton(top_k_index: Tensor, num_experts: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(expert_offsets, row_to_slot, slot_to_row) by the Triton kernels: one launch for few slots, else three."""
    expert_offsets = top_k_index.new_empty(num_experts + 1, dtype=torch.int32)
    return (expert_offsets, *_launch(top_k_index, expert_offsets, num_experts, 0, top_k_index.numel(), None))


def route_tiles_triton(
    top_k_index: Tensor, num_experts: int, block_m: int, capacity: Optional[int] = None, specified: bool = False
) -> TiledRouting:
    """The routing and its schedule by the same launches. The map is of the size that `map_size` tells.

    With a capacity below S there are that many rows. More routed slots fail a device-side assertion; what follows on
    the device finds a routing without the slots that have no room. specified: entries of the map that no tile needs are
    0, for an op that returns it.
    """
    num_slots = top_k_index.numel()
    num_rows = num_slots if capacity is None else min(num_slots, capacity)
    new = top_k_index.new_zeros if specified else top_k_index.new_empty
    tile_map = new(map_size(num_rows, num_experts), dtype=torch.int32)
    num_routed = tile_map.new_empty(1) if num_rows < num_slots else None
    indices = _launch(top_k_index, tile_map, num_experts, block_m, num_rows, num_routed)
    if num_routed is not None:
        torch._assert_async(
            num_routed <= num_rows,
            f"grouped_mm_experts: capacity: expected at least the slots routed to local experts, got {num_rows}",
        )
    return TiledRouting(schedule_of_map(tile_map, num_experts, num_rows, block_m), *indices)


def route_indices(top_k_index: Tensor, num_experts: int) -> Tuple[Tensor, Tensor, Tensor]:
    """(expert_offsets, row_to_slot, slot_to_row) on the device of top_k_index."""
    if top_k_index.device.type == "cpu":
        return _route_torch(top_k_index, num_experts)
    with on_device_of(top_k_index):
        return route_triton(top_k_index, num_experts)


@torch.library.custom_op(add_op_namespace_prefix("route"), mutates_args=())
def _route(top_k_index: Tensor, num_experts: int) -> Tuple[Tensor, Tensor, Tensor]:
    return route_indices(top_k_index, num_experts)


@torch.library.register_fake(add_op_namespace_prefix("route"))
def _route_fake(top_k_index: Tensor, num_experts: int) -> Tuple[Tensor, Tensor, Tensor]:
    num_slots = top_k_index.shape[0] * top_k_index.shape[1]
    return (
        top_k_index.new_empty(num_experts + 1, dtype=torch.int32),
        top_k_index.new_empty(num_slots, dtype=torch.int32),
        top_k_index.new_empty(num_slots, dtype=torch.int32),
    )


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sorts slots by expert, without a host sync; not differentiable.

    top_k_index: (T, top_k) int32 or int64; ids outside [0, num_experts) are sentinels. num_experts: E, 1 to 1024.
    Raises TypeError for other dtypes, ValueError for other shapes, E out of range or more than 2^31 - 129 slots.
    """
    check_routing(top_k_index, num_experts)
    return Routing(*ops.route(top_k_index, num_experts), top_k=top_k_index.shape[1])
