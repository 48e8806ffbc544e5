"""Grouped GEMM by the Gluon kernel for Hopper."""

from typing import Optional

from torch import Tensor

from ...operands import LowRank
from ...rows import Rows
from ...tuning.heuristic import hopper_gemm_config
from ..kernels.hopper_gemm import hopper_gemm_kernel
from ..problems import GemmProblem
from ..triton.gemm import bias_and_strides
from ..triton.launch import Kernel, persistent_grid
from .descriptors import RaggedTmaBlock, RankBlocks, TmaBlock


def supports(problem: GemmProblem) -> bool:
    """Tall tiles of operands that can be read by descriptor; results leave by a ragged one."""
    p = problem
    return p.layout is not None and p.n % 8 == 0 and not p.many_rows and _config(p) is not None


def _config(problem: GemmProblem):
    return hopper_gemm_config(problem.block_m, problem.n, problem.k, problem.spec, problem.wide)


class Launcher:
    """Two warp groups multiply, one warp loads. The groups take tiles in turn, or share tiles of 256 columns."""

    def __init__(self, problem: GemmProblem):
        self.problem, self.config = problem, _config(problem)
        config, dtype = self.config, problem.dtype
        w_block = (config.block_k, config.block_n) if problem.layout == "kn" else (config.block_n, config.block_k)
        self.x_block, self.w_block = TmaBlock(dtype, config.block_m, config.block_k), TmaBlock(dtype, 1, *w_block)
        rank = problem.low_rank.padded_rank
        self.rank_blocks = RankBlocks(dtype, rank, problem.layout, config.block_m, self.w_block, config.block_k)
        # The registers of a warp group hold the sums of 128 x 128 products: wider tiles are shared. Zeros take a
        # staging tile of their own.
        store_rows = min(config.block_m, 128 * 128 // config.block_n)
        self.y_block = RaggedTmaBlock(dtype, store_rows, 32 if problem.zero_rest else 64)
        constants = {
            "NUM_EXPERTS": problem.num_groups, "N": problem.n, "K": problem.k, "R": rank,
            "ZERO_UNGROUPED": problem.zero_rest,
            "W_KN": problem.layout == "kn", **self.config.gluon_constants(),
        }  # fmt: skip
        options = {"num_warps": self.config.num_warps}
        self.kernel = Kernel(hopper_gemm_kernel, constants, options, self.config.describe("Gluon for Hopper"))

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Optional[Tensor], scales: Optional[Tensor],
        low_rank: Optional[LowRank], y: Tensor, rows: Rows,
    ) -> None:  # fmt: skip
        """Writes y."""
        p = self.problem
        self.kernel(
            persistent_grid(p, self.config, x.shape[0], p.n), self.x_block.of(x), self.w_block.of(weight),
            *bias_and_strides(bias), scales, *self.rank_blocks.of(low_rank), self.y_block.of_rows(y), rows.schedule,
            x.shape[0],
        )  # fmt: skip
