"""Which rows belong to which group, as callers say it, and how a grouped GEMM cuts them into tiles."""

from functools import lru_cache
from typing import NamedTuple, Sequence, Tuple, Union

import torch
from torch import Tensor

from . import _checks as checks
from .launch import MAX_KEPT, Form, Launch, Ref, bind, form_of
from .plan import unwritten
from .tuning import choose_block_m

_BLOCK = 128  # tiles that schedule_kernel writes together
_MIN_BLOCK_M = 16  # the fewest rows of a tile


class GroupSizes(NamedTuple):
    """Rows per group: (G,) int32 or int64. Group 0 starts at row 0."""

    sizes: Tensor


class GroupOffsets(NamedTuple):
    """Where each group starts and the last one ends: (G + 1,) int32 or int64; group g has rows [o[g], o[g + 1])."""

    offsets: Tensor


Splits = Union[GroupSizes, GroupOffsets, Tensor, Sequence[int]]


class Schedule(NamedTuple):
    """How the rows of a grouped GEMM are cut into tiles of block_m rows.

    map: int32 on the device, in one piece: group offsets (G + 1,), clamped to the rows there are; tile offsets
    (G + 1,), the m tiles before each group; tile to group, of which the first tile offsets[G] entries are written.
    max_tiles: an upper bound of that number that holds for any splits.
    """

    map: Tensor
    num_groups: int
    block_m: int
    max_tiles: int


Sizes = Tuple[int, int, int]  # of a schedule: groups, rows of a tile, the upper bound of the tiles


def max_tiles(rows: int, num_groups: int, block_m: int) -> int:
    """An upper bound of the number of m tiles that holds for any splits."""
    return -(-rows // block_m) + max(0, min(num_groups, rows) - 1)


def map_size(rows: int, num_groups: int) -> int:
    """Entries of a map that has room for tiles of any block_m: an expression in rows without a branch."""
    return 2 * (num_groups + 1) + -(-rows // _MIN_BLOCK_M) + num_groups


def schedule_of_map(tile_map: Tensor, num_groups: int, rows: int, block_m: int) -> Schedule:
    """The schedule that a map of at least its size holds."""
    return Schedule(tile_map, num_groups, block_m, max_tiles(rows, num_groups, block_m))


def as_splits(splits: Splits, num_groups: int, rows: int, device: torch.device) -> Tensor:
    """The tensor that says how rows are split: (G,) sizes or (G + 1,) offsets; its shape tells which.

    A list of sizes, which may leave some of the rows to no group, is copied to the device without a wait for it. Raises
    TypeError and ValueError that name splits, and RuntimeError for a list under CUDA graph capture, which would record
    the copy of this call's numbers.
    """
    if isinstance(splits, GroupSizes):
        tensor, shape, legend = splits.sizes, (num_groups,), "(G,)"
    elif isinstance(splits, GroupOffsets):
        tensor, shape, legend = splits.offsets, (num_groups + 1,), "(G + 1,)"
    elif isinstance(splits, (list, tuple)):
        return _from_list(splits, num_groups, rows, device)
    else:
        offsets = isinstance(splits, Tensor) and splits.dim() == 1 and splits.shape[0] == num_groups + 1
        tensor, shape, legend = splits, (num_groups + offsets,), "(G,) sizes or (G + 1,) offsets"
    checks.check_tensor("splits", tensor)
    checks.check_index_dtype("splits", tensor)
    checks.check_shape("splits", tensor, shape, legend)
    checks.check_device("splits", tensor, device, "x")
    return tensor


def _from_list(sizes: Sequence[int], num_groups: int, rows: int, device: torch.device) -> Tensor:
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"splits: expected a list of ints, got {sizes!r}")
    if len(sizes) != num_groups:
        raise ValueError(f"splits: expected {num_groups} sizes, got {len(sizes)}")
    if any(size < 0 for size in sizes) or sum(sizes) > rows:
        raise ValueError(f"splits: expected sizes of at least 0 and together at most the {rows} rows, got {sizes!r}")
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(sizes, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("splits: expected a tensor on the device under CUDA graph capture, got a list")
    return torch.tensor(sizes, dtype=torch.int64, device="cpu", pin_memory=True).to(device, non_blocking=True)


def schedule_sizes(rows: int, num_groups: int, dtype: torch.dtype) -> Sizes:
    """The sizes of the schedule that GEMMs in dtype over so many rows share."""
    block_m = choose_block_m(rows, num_groups, dtype)
    return num_groups, block_m, max_tiles(rows, num_groups, block_m)


def map_form(sizes: Sizes) -> Form:
    """The map that `schedule_launch` writes."""
    num_groups, _, tiles = sizes
    return unwritten(torch.int32, 2 * (num_groups + 1) + tiles)


@lru_cache(maxsize=MAX_KEPT)
def schedule_launch(splits: Form, rows: int, sizes: Sizes, device: torch.device) -> Launch:
    """The launch for (splits, map): the tiles of a grouped GEMM over at most `rows` rows.

    splits: (G,) sizes or (G + 1,) offsets of any values, contiguous.
    """
    from ._triton.schedule import schedule_kernel

    num_groups, block_m, _ = sizes
    kernel = bind(
        schedule_kernel,
        SIZES=splits.shape[0] == num_groups, NUM_GROUPS=num_groups, GROUPS_POW2=1 << (num_groups - 1).bit_length(),
        BLOCK_M=block_m, BLOCK=_BLOCK,
    )  # fmt: skip
    return Launch(device, kernel, (num_groups, 1, 1), Ref(0), Ref(1), rows)


def make_schedule(splits: Tensor, num_groups: int, rows: int, block_m: int) -> Schedule:
    """The tiles of a grouped GEMM over at most `rows` rows. splits: (G,) sizes or (G + 1,) offsets of any values."""
    sizes = num_groups, block_m, max_tiles(rows, num_groups, block_m)
    splits = splits if splits.is_contiguous() else splits.contiguous()
    tile_map = splits.new_empty(map_form(sizes).shape, dtype=torch.int32)
    schedule_launch(form_of(splits), rows, sizes, splits.device)((splits, tile_map))
    return Schedule(tile_map, *sizes)


def schedule_for(splits: Tensor, num_groups: int, rows: int, dtype: torch.dtype) -> Schedule:
    """`make_schedule` with the row tile that GEMMs in dtype over so many rows share.

    splits may also be the map of a schedule that was made so before: longer than offsets, it is taken as it is.
    """
    block_m = choose_block_m(rows, num_groups, dtype)
    if splits.shape[0] > num_groups + 1:
        return schedule_of_map(splits, num_groups, rows, block_m)
    return make_schedule(splits, num_groups, rows, block_m)
