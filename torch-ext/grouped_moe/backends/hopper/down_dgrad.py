"""The fused dgrad of the down-projection by the Gluon kernel for Hopper, whose rows are in place."""

from typing import Optional

from torch import Tensor

from ...block import Block
from ...operands import LowRank
from ...rows import Rows
from ...tuning.heuristic import hopper_dgrad_config
from ..kernels.hopper_down_dgrad import hopper_down_dgrad_kernel
from ..problems import BlockProblem
from ..triton.launch import Kernel, persistent_grid
from .descriptors import RaggedTmaBlock, RankBlocks, TmaBlock
from .up_proj import STORE_COLUMNS, describe_halves, fits

_SLOTS = {True: 3, False: 4}  # staging tiles of gate and up, or of no gate, that are on their way or worked on


def supports(problem: BlockProblem) -> bool:
    """Sorted copies of routed rows must suit descriptors, too."""
    return fits(problem) and problem.k % 8 == 0 and hopper_dgrad_config(problem.block_m, problem.n) is not None


class Launcher:
    """Two warp groups take tiles in turn, one warp loads."""

    reads_sorted_rows = True

    def __init__(self, problem: BlockProblem):
        self.problem, self.config = problem, hopper_dgrad_config(problem.block_m, problem.n)
        config, dtype = self.config, problem.dtype
        self.num_dots = -(-problem.n // config.block_n)
        w_block = (config.block_k, config.block_n) if problem.layout == "kn" else (config.block_n, config.block_k)
        self.dout_block, self.w_block = TmaBlock(dtype, config.block_m, config.block_k), TmaBlock(dtype, 1, *w_block)
        rank = problem.low_rank.padded_rank
        self.rank_blocks = RankBlocks(dtype, rank, problem.layout, config.block_m, self.w_block, config.block_k)
        self.row_block = RaggedTmaBlock(dtype, config.block_m, STORE_COLUMNS)
        constants = {
            **problem.constants(), "R": rank, "W_KN": problem.layout == "kn",
            "SLOTS": _SLOTS[problem.gated],
            **config.gluon_constants(),
        }  # fmt: skip
        options = {"num_warps": config.num_warps}
        self.kernel = Kernel(hopper_down_dgrad_kernel, constants, options, config.describe("Gluon for Hopper"))

    def __call__(
        self, block: Block, dout: Tensor, low_rank: Optional[LowRank], scales: Optional[Tensor], preact: Tensor,
        dpreact: Optional[Tensor], act: Optional[Tensor], dots: Optional[Tensor], rows: Rows,
    ) -> None:  # fmt: skip
        """Writes dpreact, act and the first `num_dots` of dots, where they are given. dout: sorted rows."""
        p, row_block = self.problem, self.row_block
        inputs = describe_halves(preact, p, row_block)
        outputs = inputs if dpreact is preact else describe_halves(dpreact, p, row_block)
        self.kernel(
            persistent_grid(p, self.config, rows.num_rows, p.n), self.dout_block.of(dout), self.w_block.of(block.down),
            *self.rank_blocks.of(low_rank), scales, *inputs, *outputs,
            None if act is None else row_block.of_rows(act), dots, rows.num_rows,
            rows.row_to_slot if p.top_k else None, rows.schedule,
        )  # fmt: skip
