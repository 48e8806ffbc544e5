"""Every way to say which rows are whose, and splits of 37 rows into four groups that are wrong."""

import itertools
from typing import Dict, List, Sequence

from torch import Tensor

WRONG_OFFSETS = {
    "decreasing": [0, 20, 5, 30, 12],
    "below-the-first": [11, 3, 9, 5, 7],
    "all-beyond-rows": [41, 3, 50, 60, 12],
    "beyond-rows": [0, 7, 40, 41, 1000],
    "negative": [-9, -1, 7, -30, 20],
    "all-negative": [-5, -4, -3, -2, -1],
    "starts-late": [9, 12, 20, 20, 30],
    "starts-late-ends-beyond-rows": [9, 12, 20, 20, 1000],
    "int64-ends": [-(2**63), 2**32 + 3, 2**63 - 1, -(2**63), 2**63 - 1],
    "int32-ends": [-(2**31), 3, 2**31 - 1, 0, 2**31 - 1],
    "wraps-to-valid": [2**32, 2**32 + 7, 2**32 + 9, 2**33 + 20, 2**34 + 30],
}
WRONG_SIZES = {
    "first-size-negative": [-3, 0, 19, 5],
    "second-size-negative": [7, -3, 19, 5],
    "smallest-size": [-(2**63), 7, -1, 19],
    "sizes-beyond-rows": [7, 0, 100, 5],
    "largest-sizes": [2**63 - 1, 2**63 - 1, 2**63 - 1, 5],
    "largest-sizes-then-small-ones": [2**63 - 1, 2**63 - 1, 1, 1],
    "sum-wraps-to-none": [2**62] * 4,
    "sizes-wrap-to-valid": [3, 2**32, 4, 2**32 + 1],
}
WRONG = {**WRONG_OFFSETS, **WRONG_SIZES}


def clamped(wrong: Sequence[int], rows: int, num_groups: int = 4) -> List[int]:
    """The offsets that wrong sizes (G,) or offsets (G + 1,) stand for."""
    if len(wrong) == num_groups:
        ends = itertools.accumulate((max(size, 0) for size in wrong), initial=0)
        return [min(end, rows) for end in ends]
    return list(itertools.accumulate((min(max(offset, 0), rows) for offset in wrong), max))


def forms(grouped_moe, sizes: Tensor) -> Dict[str, object]:
    """All ways to say the same, by name. sizes: (G,) int64."""
    offsets = sizes.new_zeros(len(sizes) + 1)
    offsets[1:] = sizes.cumsum(0)
    return {
        "sizes": sizes,
        "sizes-int32": sizes.int(),
        "sizes-strided": sizes.repeat_interleave(2)[::2],
        "offsets": offsets,
        "offsets-int32": offsets.int(),
        "GroupSizes": grouped_moe.GroupSizes(sizes),
        "GroupSizes-int32": grouped_moe.GroupSizes(sizes.int()),
        "GroupOffsets": grouped_moe.GroupOffsets(offsets),
        "GroupOffsets-int32": grouped_moe.GroupOffsets(offsets.int()),
        "list": sizes.tolist(),
        "tuple": tuple(sizes.tolist()),
    }
