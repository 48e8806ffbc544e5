"""Grouped GEMM with block-scaled weights."""

from typing import Optional

from torch import Tensor

from ...block_scaled import BlockScaled
from ...operands import LowRank
from ...rows import Rows
from ...tuning.heuristic import scaled_config
from ..kernels.block_scaled import scaled_gemm_kernel
from ..problems import GemmProblem
from ..triton.gemm import bias_and_strides
from ..triton.launch import Kernel, persistent_grid
from ..triton.low_rank import factor_constants
from ..triton.scales import codes_and_scales, scale_constants, step_of

PATH = "Triton, weights widened in registers"


class Launcher:
    """The Triton kernel, persistent."""

    def __init__(self, problem: GemmProblem):
        self.problem = p = problem
        self.config = scaled_config("gemm", p.block_m, p.n, p.dtype, p.spec, step_of(p.scales, p.k))
        constants = {
            "NUM_EXPERTS": p.num_groups, "N": p.n, "K": p.k, "ZERO_UNGROUPED": p.zero_rest,
            "PRECISION": p.precision, **factor_constants(p.low_rank), **scale_constants(p.scales),
            **self.config.constants(),
        }  # fmt: skip
        self.kernel = Kernel(scaled_gemm_kernel, constants, self.config.options(), self.config.describe(PATH))

    def __call__(
        self, x: Tensor, weight: BlockScaled, bias: Optional[Tensor], scales: Optional[Tensor],
        low_rank: Optional[LowRank], y: Tensor, rows: Rows,
    ) -> None:  # fmt: skip
        """Writes y."""
        p = self.problem
        self.kernel(
            persistent_grid(p, self.config, x.shape[0], p.n), x, *x.stride(), None,
            *codes_and_scales(weight, p.transposed, p.spec), *bias_and_strides(bias), scales,
            *(low_rank or (None, None)), y, rows.schedule, x.shape[0],
        )  # fmt: skip
