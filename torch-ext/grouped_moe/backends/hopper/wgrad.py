"""Weight gradients by the Gluon kernels for Hopper."""

from typing import Optional

from torch import Tensor

from ...common.numbers import power_of_two
from ...rows import Rows
from ...tuning.heuristic import THIN, GemmConfig, hopper_wgrad_config
from ..kernels.hopper_wgrad import hopper_gathered_wgrad_kernel, hopper_wgrad_kernel
from ..problems import WgradProblem
from ..triton.launch import Kernel
from .descriptors import RaggedTmaBlock, TmaBlock

_MAX_ORDERED = 128  # to rank more experts would take longer than their few rows are worth
_CONSUMERS = 2


def supports(problem: WgradProblem) -> bool:
    """Operands and results that descriptors take, one operand gathered at most. Tiles are 256 columns wide."""
    p = problem
    return p.n > THIN and p.rows_by_tma and p.out_by_tma and not p.many_rows and _config(p) is not None


def _config(problem: WgradProblem) -> Optional[GemmConfig]:
    gathered, itemsize = problem.gathered is not None, problem.out_dtype.itemsize
    return hopper_wgrad_config(problem.m, problem.n, problem.rows_per_group, itemsize, gathered, problem.spec)


class Launcher:
    """Two warp groups multiply, each half of a tile's rows; one warp loads, or four gather."""

    def __init__(self, problem: WgradProblem):
        p, self.problem, self.config = problem, problem, _config(problem)
        constants = {
            "NUM_EXPERTS": p.num_groups, "M": p.m, "N": p.n, "ACCUMULATE": p.accumulate,
            "ORDER_SIZE": power_of_two(p.num_groups, 32) if p.num_groups <= _MAX_ORDERED else 0,
            "STAGES": self.config.num_stages, "GROUP_M": self.config.group_m,
        }  # fmt: skip
        config = self.config
        self.lhs_block = RaggedTmaBlock(p.dtype, config.block_k, config.block_m)
        self.rhs_block = RaggedTmaBlock(p.dtype, config.block_k, config.block_n)
        self.out_block = TmaBlock(p.out_dtype, 1, config.block_m // _CONSUMERS, config.block_n)
        if p.gathered:
            constants.update(TOP_K=p.top_k, P_GATHERED=p.gathered == "lhs")
        function = hopper_gathered_wgrad_kernel if p.gathered else hopper_wgrad_kernel
        options = {"num_warps": self.config.num_warps}
        self.kernel = Kernel(function, constants, options, self.config.describe("Gluon for Hopper"))

    def __call__(self, lhs: Tensor, rhs: Tensor, out: Tensor, rows: Rows) -> None:
        """Writes out, or adds to it."""
        p, config = self.problem, self.config
        if p.gathered == "lhs":
            operands = lhs, lhs.stride(0) // 8, rows.row_to_slot, self.rhs_block.of_rows(rhs)
        elif p.gathered == "rhs":
            operands = rhs, rhs.stride(0) // 8, rows.row_to_slot, self.lhs_block.of_rows(lhs)
        else:
            operands = self.lhs_block.of_rows(lhs), self.rhs_block.of_rows(rhs)
        tiles = p.num_groups * -(-p.m // config.block_m) * -(-p.n // config.block_n)
        self.kernel((min(tiles, p.spec.num_sms), 1, 1), *operands, self.out_block.of(out), rows.schedule)
