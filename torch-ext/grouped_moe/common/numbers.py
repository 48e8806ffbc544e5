"""Arithmetic on extents, shares and dtypes that several modules have in common."""

from fractions import Fraction
from typing import Tuple

import torch

EXACT = 2**16  # shares are fractions of numbers up to this one


def power_of_two(extent: int, least: int = 1) -> int:
    """The smallest power of two that is not below `extent` nor below `least`, which is a power of two."""
    return 1 << (max(extent, least) - 1).bit_length()


@torch.compiler.assume_constant_result  # a compiler cannot trace fractions
def as_fraction(share: float) -> Tuple[int, int]:
    """(numerator, denominator) of the nearest such fraction above 0: integers, to compute with symbolic ones."""
    fraction = max(Fraction(share).limit_denominator(EXACT), Fraction(1, EXACT))
    return fraction.numerator, fraction.denominator


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
