"""Grouped GEMM over rows that are sorted by group."""

from functools import lru_cache
from typing import Optional, Union

from torch import Tensor

from ...block_scaled import Weight
from ...common.device import dot_precision, spec_of
from ...operands import LowRank
from ...rows import Rows
from ...tuning.heuristic import wide_pays
from ..kernels.gemm import zero_ungrouped_kernel
from ..problems import GemmProblem
from ..table import launcher_of
from .codes import gemm_takes_codes, transposes_codes
from .descriptors import takes_rows, takes_weight
from .launch import Kernel
from .low_rank import factor_of
from .quantize import QuantizedRows, quantize_rows
from .scales import for_rows, scale_blocks
from .transpose import can_transpose, transpose_codes

_ZERO_PROGRAMS_PER_SM = 4
_ZERO_CHUNK = 4096  # elements


def gemm(
    x: Union[Tensor, QuantizedRows], weight: Weight, rows: Rows, *, transposed: bool = False,
    bias: Optional[Tensor] = None, scales: Optional[Tensor] = None, zero_rest: bool = False,
    low_rank: Optional[LowRank] = None, quantizes: bool = False,
) -> Tensor:  # fmt: skip
    """y[r] = W[e] x[r] + scales[r] bias[e], for rows in place.

    x: (rows, K), any strides. weight: (E, N, K) or, transposed, (E, K, N), any strides, scaled or plain. bias: (E, N).
    low_rank: what is added to the product. quantizes: whether rows may become 8-bit floats here. Returns (rows, N),
    where rows of no group are unwritten or, with zero_rest, 0.
    """
    (num_rows, k), n = x.shape, weight.shape[2 if transposed else 1]
    # Extents one by one: a tuple of them takes the host a microsecond longer.
    y = rows.schedule.new_empty(num_rows, n, dtype=x.dtype)
    if num_rows == 0:
        return y
    spec, of_codes = spec_of(y), isinstance(x, QuantizedRows)
    if quantizes and gemm_takes_codes(weight, x.dtype, rows, spec, transposed, low_rank):
        x, of_codes = quantize_rows(x), True
    if of_codes:
        if transposed and not transposes_codes(weight, rows, spec):
            weight, transposed = transpose_codes(weight), False
        if weight.parts > 1 and can_transpose(weight):  # they end where blocks do, and make no difference
            weight = weight._replace(parts=1)
        by_tma = True
    else:
        weight = for_rows(weight, rows.block_m, x.dtype)
        # Row tiles that stream weights do not earn back what descriptors cost.
        by_tma = rows.block_m >= 64 and takes_rows(x, num_rows, spec) and takes_weight(weight)
    blocks = scale_blocks(weight, transposed)
    problem = GemmProblem(
        spec, x.dtype, dot_precision(x.dtype, spec), rows.num_groups, rows.block_m, n, k, by_tma, transposed,
        factor_of(low_rank and low_rank.factor), zero_rest,
        blocks is None and spec.hopper and wide_pays(num_rows, rows.num_groups, n, k, spec), blocks,
    )  # fmt: skip
    launcher_of("quantized_gemm" if of_codes else "gemm", problem)(x, weight, bias, scales, low_rank, y, rows)
    return y


def zero_ungrouped(y: Tensor, rows: Rows) -> None:
    """Writes 0 to the rows of y before the first group and after the last; costs those rows only."""
    total, n = y.shape
    programs = max(1, min(-(-total * n // _ZERO_CHUNK), spec_of(y).num_sms * _ZERO_PROGRAMS_PER_SM))
    _zero_kernel(rows.num_groups, n)((programs, 1, 1), y, rows.schedule, total)


@lru_cache(maxsize=None)
def _zero_kernel(num_groups: int, n: int) -> Kernel:
    return Kernel(zero_ungrouped_kernel, {"NUM_GROUPS": num_groups, "N": n, "CHUNK": _ZERO_CHUNK})
