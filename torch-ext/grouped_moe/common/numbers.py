"""Arithmetic on extents, shares and dtypes that several modules have in common."""

from fractions import Fraction
from typing import Tuple

import torch

_MAX_DENOMINATOR = 2**16  # of shares, which are fractions of integers: extents may be symbolic


def power_of_two(extent: int, least: int = 1) -> int:
    """The smallest power of two that is not below `extent` nor below `least`, which is a power of two."""
    return 1 << (max(extent, least) - 1).bit_length()


@torch.compiler.assume_constant_result  # a compiler cannot trace fractions
def as_fraction(share: float) -> Tuple[int, int]:
    """(numerator, denominator) of the nearest fraction above 0 with such a denominator."""
    fraction = max(Fraction(share).limit_denominator(_MAX_DENOMINATOR), Fraction(1, _MAX_DENOMINATOR))
    return fraction.numerator, fraction.denominator


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 for fp64."""
    return dtype if dtype is torch.float64 else torch.float32
