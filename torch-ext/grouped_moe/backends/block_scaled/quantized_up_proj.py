"""The up-projection of 8-bit rows with 8-bit weights by the Triton kernel."""

from typing import Optional

from torch import Tensor

from ...block import Block
from ...operands import LowRank
from ...rows import Rows
from ...tuning.heuristic import quantized_config
from ..kernels.quantized import quantized_up_proj_kernel
from ..problems import BlockProblem
from ..triton.gemm import bias_and_strides
from ..triton.launch import Kernel, persistent_grid
from ..triton.quantize import QuantizedRows
from ..triton.scales import codes_and_scales
from .quantized_gemm import PATH
from .up_proj import block_constants


class Launcher:
    """The Triton kernel, persistent, which gathers routed rows."""

    def __init__(self, problem: BlockProblem):
        self.problem = p = problem
        self.config = config = quantized_config(problem.spec)
        constants = {**block_constants(p), **config.constants()}
        self.kernel = Kernel(quantized_up_proj_kernel, constants, config.options(), config.describe(PATH))

    def __call__(
        self, block: Block, x: QuantizedRows, low_rank: Optional[LowRank], scales: Optional[Tensor],
        preact: Optional[Tensor], act: Optional[QuantizedRows], rows: Rows,
    ) -> None:  # fmt: skip
        """Writes preact and act, where they are given."""
        p = self.problem
        self.kernel(
            persistent_grid(p, self.config, rows.num_rows, p.n), x.codes, x.scales,
            *codes_and_scales(block.up, False, p.spec), *bias_and_strides(block.up_bias), *(low_rank or (None, None)),
            preact, *(act or (None, None))[:2], scales, rows.row_to_slot if p.top_k else None, rows.schedule,
        )  # fmt: skip
