"""Grouped GEMM over rows that are sorted by group, and the weight gradient over a group's rows."""

from functools import lru_cache
from typing import Optional, Union

import torch
from torch import Tensor

from ...block_scaled import Weight
from ...common.device import dot_precision, spec_of
from ...operands import LowRank
from ...rows import Rows, unit_rows
from ...tuning.heuristic import THIN, rows_per_group, wide_pays
from ..kernels.gemm import zero_ungrouped_kernel
from ..problems import GemmProblem, WgradProblem
from ..table import launcher_of
from .codes import gemm_takes_codes, transposes_codes
from .descriptors import takes_rows, takes_weight, tma_strides
from .factors import factor_of
from .launch import Kernel
from .quantize import QuantizedRows, quantize_rows
from .scales import can_transpose, for_rows, scale_blocks, transpose_codes

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


def wgrad(
    lhs: Tensor, rhs: Tensor, rows: Rows, out: Tensor, *, lhs_of_tokens: bool = False, rhs_of_tokens: bool = False,
    accumulate: bool = False,
) -> None:  # fmt: skip
    """out[g] = sum over the rows r of group g of lhs[r] rhs[r]^T, 0 for a group without rows; or is added to out[g].

    lhs: (rows, M), or (T, M) with lhs_of_tokens. rhs: (rows, N), the same. out: (G, M, N), any strides and dtype.
    """
    # Matrix instructions take 64 rows at least: the factor of a low-rank pair is thin along N.
    (num_groups, m, n), (_, m_stride, n_stride) = out.shape, out.stride()
    if m < n if min(m, n) <= THIN else n_stride != 1 and m_stride == 1:
        out, m, n = out.transpose(1, 2), n, m
        lhs, rhs, lhs_of_tokens, rhs_of_tokens = rhs, lhs, rhs_of_tokens, lhs_of_tokens
    lhs, rhs, spec, num_rows = unit_rows(lhs), unit_rows(rhs), spec_of(lhs), rows.num_rows
    wide = num_rows > 0 and n > THIN  # thin ones go by pointer
    problem = WgradProblem(
        spec, lhs.dtype, out.dtype, dot_precision(lhs.dtype, spec), num_groups, m, n, rows.top_k,
        "lhs" if lhs_of_tokens else "rhs" if rhs_of_tokens else None, rows_per_group(num_rows, num_groups),
        wide and takes_rows(lhs, num_rows, spec) and takes_rows(rhs, num_rows, spec),
        8 if (lhs.stride()[0] | rhs.stride()[0]) % 16 == 8 else 1,
        wide and out.dtype != torch.float64 and tma_strides(out) is not None, accumulate,
    )  # fmt: skip
    launcher_of("wgrad", problem)(lhs, rhs, out, rows)


def zero_ungrouped(y: Tensor, rows: Rows) -> None:
    """Writes 0 to the rows of y before the first group and after the last; costs those rows only."""
    total, n = y.shape
    programs = max(1, min(-(-total * n // _ZERO_CHUNK), spec_of(y).num_sms * _ZERO_PROGRAMS_PER_SM))
    _zero_kernel(rows.num_groups, n)((programs, 1, 1), y, rows.schedule, total)


@lru_cache(maxsize=None)
def _zero_kernel(num_groups: int, n: int) -> Kernel:
    return Kernel(zero_ungrouped_kernel, {"NUM_GROUPS": num_groups, "N": n, "CHUNK": _ZERO_CHUNK})
