"""Weight gradients: one product per group, contracted over its rows."""

import math

import torch
from torch import Tensor

from ...common.device import dot_precision, spec_of
from ...rows import Rows, unit_rows
from ...tuning.heuristic import THIN, rows_per_group
from ..problems import WgradProblem
from ..table import launcher_of
from .descriptors import takes_rows, tma_strides


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
    problem = WgradProblem(
        spec, lhs.dtype, out.dtype, dot_precision(lhs.dtype, spec), num_groups, m, n, rows.top_k,
        "lhs" if lhs_of_tokens else "rhs" if rhs_of_tokens else None, rows_per_group(num_rows, num_groups),
        num_rows > 0 and takes_rows(lhs, num_rows, spec) and takes_rows(rhs, num_rows, spec),
        8 if math.gcd(lhs.stride(0), rhs.stride(0), 16) == 8 else 1,
        out.dtype != torch.float64 and tma_strides(out) is not None, accumulate,
    )  # fmt: skip
    launcher_of("wgrad", problem)(lhs, rhs, out, rows)
