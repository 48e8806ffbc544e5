"""Arithmetic on extents and dtypes that several modules share."""

import torch


def power_of_two(extent: int, least: int = 1) -> int:
    """The smallest power of two that is not below `extent` nor below `least`, which is a power of two."""
    return 1 << (max(extent, least) - 1).bit_length()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
