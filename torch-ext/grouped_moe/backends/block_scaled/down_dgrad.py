"""The fused dgrad of the down-projection with block-scaled weights."""

from typing import Optional

from torch import Tensor

from ...block import Block
from ...operands import LowRank
from ...rows import Rows
from ...tuning.heuristic import scaled_config
from ..kernels.block_scaled import scaled_down_dgrad_kernel
from ..problems import BlockProblem
from ..triton.launch import Kernel, persistent_grid
from ..triton.scales import codes_and_scales, step_of
from .gemm import PATH
from .up_proj import block_constants


class Launcher:
    """The Triton kernel, persistent, which gathers routed rows."""

    reads_sorted_rows = False

    def __init__(self, problem: BlockProblem):
        self.problem = p = problem
        self.config = scaled_config("down_dgrad", p.block_m, p.n, p.dtype, p.spec, step_of(p.scales, p.k))
        self.num_dots = -(-p.n // self.config.block_n)
        constants = {**block_constants(p), **self.config.constants()}
        self.kernel = Kernel(scaled_down_dgrad_kernel, constants, self.config.options(), self.config.describe(PATH))

    def __call__(
        self, block: Block, dout: Tensor, low_rank: Optional[LowRank], scales: Optional[Tensor], preact: Tensor,
        dpreact: Optional[Tensor], act: Optional[Tensor], dots: Optional[Tensor], rows: Rows,
    ) -> None:  # fmt: skip
        """Writes dpreact, act and the first `num_dots` of dots, where they are given."""
        p = self.problem
        self.kernel(
            persistent_grid(p, self.config, rows.num_rows, p.n), dout, *dout.stride(),
            *codes_and_scales(block.down, p.transposed, p.spec), *(low_rank or (None, None)), scales, preact, dpreact,
            act, dots, rows.num_rows, rows.row_to_slot if p.top_k else None, rows.schedule,
        )  # fmt: skip
