"""The up-projection with block-scaled weights, fused with the activation."""

from typing import Any, Dict, Optional

from torch import Tensor

from ...block import Block
from ...operands import LowRank
from ...rows import Rows
from ...tuning.heuristic import scaled_config
from ..kernels.block_scaled import scaled_up_proj_kernel
from ..problems import BlockProblem
from ..triton.gemm import bias_and_strides
from ..triton.launch import Kernel, persistent_grid
from ..triton.low_rank import factor_constants
from ..triton.scales import codes_and_scales, scale_constants, step_of
from .gemm import PATH


def block_constants(problem: BlockProblem) -> Dict[str, Any]:
    """The constexprs of both fused kernels but for the tile's."""
    return {
        **problem.constants(), "TOP_K": problem.top_k, "PRECISION": problem.precision,
        **factor_constants(problem.low_rank), **scale_constants(problem.scales),
    }  # fmt: skip


class Launcher:
    """The Triton kernel, persistent."""

    def __init__(self, problem: BlockProblem):
        self.problem = p = problem
        self.config = scaled_config(
            "up_proj", p.block_m, p.n, p.dtype, p.spec, step_of(p.scales, p.k), 2 if p.gated else 1
        )
        constants = {**block_constants(p), **self.config.constants()}
        self.kernel = Kernel(scaled_up_proj_kernel, constants, self.config.options(), self.config.describe(PATH))

    def __call__(
        self, block: Block, x: Tensor, low_rank: Optional[LowRank], scales: Optional[Tensor],
        preact: Optional[Tensor], act: Optional[Tensor], rows: Rows,
    ) -> None:  # fmt: skip
        """Writes preact and act, where they are given."""
        p = self.problem
        self.kernel(
            persistent_grid(p, self.config, rows.num_rows, p.n), x, *x.stride(),
            *codes_and_scales(block.up, p.transposed, p.spec), *bias_and_strides(block.up_bias),
            *(low_rank or (None, None)), preact, act, scales, rows.row_to_slot if p.top_k else None, rows.schedule,
        )  # fmt: skip
