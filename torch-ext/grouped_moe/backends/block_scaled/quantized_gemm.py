"""Grouped GEMM of 8-bit rows with 8-bit weights by the Triton kernel."""

from typing import Optional

from torch import Tensor

from ...block_scaled import BlockScaled
from ...operands import LowRank
from ...rows import Rows
from ...tuning.heuristic import quantized_config
from ..kernels.block_scaled import scaled_gemm_kernel
from ..problems import GemmProblem
from ..triton.gemm import bias_and_strides
from ..triton.launch import Kernel, persistent_grid
from ..triton.low_rank import factor_constants
from ..triton.quantize import QuantizedRows
from ..triton.scales import codes_and_scales, scale_constants

PATH = "Triton, 8-bit rows and weights"


class Launcher:
    """The Triton kernel, persistent."""

    def __init__(self, problem: GemmProblem):
        self.problem, self.config = p, config = problem, quantized_config(problem.spec)
        constants = {
            "NUM_EXPERTS": p.num_groups, "N": p.n, "K": p.k, "ZERO_UNGROUPED": p.zero_rest,
            "PRECISION": p.precision, **factor_constants(p.low_rank), **scale_constants(p.scales),
            **config.constants(),
        }  # fmt: skip
        self.kernel = Kernel(scaled_gemm_kernel, constants, config.options(), config.describe(PATH))

    def __call__(
        self, x: QuantizedRows, weight: BlockScaled, bias: Optional[Tensor], scales: Optional[Tensor],
        low_rank: Optional[LowRank], y: Tensor, rows: Rows,
    ) -> None:  # fmt: skip
        """Writes y."""
        p = self.problem
        self.kernel(
            persistent_grid(p, self.config, x.shape[0], p.n), x.codes, *x.codes.stride(), x.scales,
            *codes_and_scales(weight, False, p.spec), *bias_and_strides(bias), scales, *(low_rank or (None, None)), y,
            rows.schedule, x.shape[0],
        )  # fmt: skip
