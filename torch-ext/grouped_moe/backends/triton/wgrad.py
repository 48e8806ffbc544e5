"""Weight gradients: one product per group, contracted over its rows."""

import torch
from torch import Tensor

from ...common.device import dot_precision, spec_of
from ...rows import Rows, unit_rows
from ...tuning.heuristic import THIN, rows_per_group, triton_path, wgrad_config
from ..kernels.gemm import wgrad_kernel
from ..problems import WgradProblem
from ..table import launcher_of
from .descriptors import MAX_RAGGED_ROWS, describe, takes_rows, tma_strides
from .launch import Kernel


class Launcher:
    """The Triton kernel; both operands come by descriptor where none is gathered and both can be read so."""

    def __init__(self, problem: WgradProblem):
        p, gathered = problem, problem.gathered is not None
        self.problem, self.by_tma = problem, p.rows_by_tma and not gathered and p.n > THIN
        self.config = wgrad_config(p.m, p.n, p.rows_per_group, p.dtype, p.spec, gathered, self.by_tma)
        # A whole tile passes through shared memory, which small tiles, two programs to a processor, have not left.
        whole = self.config.block_n == 256 and not p.accumulate and p.out_dtype == p.dtype
        self.out_by_tma = self.by_tma and whole and p.out_by_tma
        constants = {
            "NUM_EXPERTS": p.num_groups, "M": p.m, "N": p.n, "P_TOP_K": p.top_k if p.gathered == "lhs" else 0,
            "Q_TOP_K": p.top_k if p.gathered == "rhs" else 0, "ACCUMULATE": p.accumulate, "TMA": self.by_tma,
            "PRECISION": p.precision, **self.config.constants(),
        }  # fmt: skip
        self.kernel = Kernel(
            wgrad_kernel, constants, self.config.options(), self.config.describe(triton_path(self.by_tma))
        )

    def __call__(self, lhs: Tensor, rhs: Tensor, out: Tensor, rows: Rows) -> None:
        """Writes out, or adds to it."""
        p, config = self.problem, self.config
        lhs_desc = rhs_desc = out_desc = None
        if self.by_tma:
            lhs_desc = describe(lhs, (config.block_k, config.block_m))
            rhs_desc = describe(rhs, (config.block_k, config.block_n))
        if self.out_by_tma:
            out_desc = describe(out, (1, config.block_m, config.block_n))
        tiles = p.num_groups * -(-p.m // config.block_m) * -(-p.n // config.block_n)
        programs = min(tiles, p.spec.num_sms * config.programs_per_sm) if config.programs_per_sm else tiles
        self.kernel(
            (programs, 1, 1), lhs, lhs.stride(0), rhs, rhs.stride(0), lhs_desc, rhs_desc, out, *out.stride(), out_desc,
            None if p.gathered is None else rows.row_to_slot, rows.schedule,
        )  # fmt: skip


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
    lhs, rhs, spec = unit_rows(lhs), unit_rows(rhs), spec_of(lhs)
    problem = WgradProblem(
        spec, lhs.dtype, out.dtype, dot_precision(lhs.dtype, spec), num_groups, m, n, rows.top_k,
        "lhs" if lhs_of_tokens else "rhs" if rhs_of_tokens else None, rows_per_group(rows.num_rows, num_groups),
        rows.num_rows > 0 and takes_rows(lhs, spec) and takes_rows(rhs, spec), _takes_out(out),
        rows.num_rows > MAX_RAGGED_ROWS, accumulate,
    )  # fmt: skip
    launcher_of("wgrad", problem)(lhs, rhs, out, rows)


def _takes_out(out: Tensor) -> bool:
    """Whether a gradient can be written by descriptor."""
    return out.stride(2) == 1 and out.dtype != torch.float64 and tma_strides(out) is not None
