"""Which rows belong to which group, as callers say it."""

from typing import NamedTuple, Sequence, Union

import torch
from torch import Tensor

from .common import checks


class GroupSizes(NamedTuple):
    """Rows per group: (G,) int32 or int64. Group 0 starts at row 0."""

    sizes: Tensor


class GroupOffsets(NamedTuple):
    """Where each group starts and the last one ends: (G + 1,) int32 or int64; group g has rows [o[g], o[g + 1])."""

    offsets: Tensor


Splits = Union[GroupSizes, GroupOffsets, Tensor, Sequence[int]]


def as_splits(splits: Splits, num_groups: int, rows: int, device: torch.device, owner: str = "x") -> Tensor:
    """The tensor that says how rows are split: (G,) sizes or (G + 1,) offsets; its shape tells which.

    owner: the argument whose rows and device these are.
    A list of sizes, which may leave some of the rows to no group, is copied to the device; on CUDA without a wait for
    it, unless a compiler traces the call. Raises TypeError and ValueError that name splits, and RuntimeError for a list
    under CUDA graph capture, which would record the copy of this call's numbers.
    """
    tensor, shape, legend = splits, (num_groups,), "(G + 1,) offsets or (G,) sizes"
    if isinstance(splits, GroupSizes):
        tensor, legend = splits.sizes, "(G,)"
    elif isinstance(splits, GroupOffsets):
        tensor, shape, legend = splits.offsets, (num_groups + 1,), "(G + 1,)"
    elif isinstance(splits, (list, tuple)):
        return _from_list(splits, num_groups, rows, device)
    elif not isinstance(splits, Tensor):
        kinds = "GroupSizes, GroupOffsets, a tensor or a list of ints"
        raise TypeError(f"splits: expected {kinds}, got {type(splits).__name__}")
    checks.check_tensor("splits", tensor)
    checks.check_index_dtype("splits", tensor)
    if tensor is splits and tensor.shape == (num_groups + 1,):
        shape = (num_groups + 1,)
    checks.check_shape("splits", tensor, shape, legend)
    checks.check_device("splits", tensor, device, owner)
    return tensor


def _from_list(sizes: Sequence[int], num_groups: int, rows: int, device: torch.device) -> Tensor:
    if not all(isinstance(size, (int, torch.SymInt)) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"splits: expected a list of ints, got {sizes!r}")
    if len(sizes) != num_groups:
        raise ValueError(f"splits: expected {num_groups} sizes, got {len(sizes)}")
    if any(size < 0 for size in sizes) or sum(sizes) > rows:
        raise ValueError(f"splits: expected sizes of at least 0 and together at most the {rows} rows, got {sizes!r}")
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(sizes, dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("splits: expected a tensor on the device under CUDA graph capture, got a list")
    return torch.tensor(sizes, dtype=torch.int64, device="cpu", pin_memory=True).to(device, non_blocking=True)
