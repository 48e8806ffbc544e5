"""The up-projection by the Gluon kernels for Hopper: of rows in place, or of rows that are gathered meanwhile."""

from typing import Optional

from torch import Tensor

from ...block import Block
from ...operands import LowRank
from ...rows import Rows
from ...tuning.heuristic import GemmConfig, hopper_gathered_up_config, hopper_up_config
from ..kernels.hopper_up_proj import hopper_gathered_up_proj_kernel, hopper_up_proj_kernel
from ..problems import BlockProblem
from ..triton.gemm import bias_and_strides
from ..triton.launch import Kernel, persistent_grid
from .descriptors import RaggedTmaBlock, RankBlocks, TmaBlock

STORE_COLUMNS = 32  # that an epilogue stores at once
_STAGED_COLUMNS = 128  # in all staging tiles of a warp group, where rows are gathered


def supports(problem: BlockProblem) -> bool:
    """Not [gate | up] of a weight (E, H, 2 I): a block of both halves would be no operand of wgmma."""
    p = problem
    if p.transposed and p.gated and not p.interleaved:
        return False
    return fits(p) and (p.top_k == 0 or p.k % 8 == 0) and _config(p) is not None


def fits(problem: BlockProblem) -> bool:
    """Whether the fused Gluon kernels take a block of this kind.

    Not the exact GELU where there is no gate: of so many values a tile the up-projection would be more code than caches
    hold, and the dgrad as much as they do.
    """
    p = problem
    known_act = p.gated or p.activation.name != "gelu"
    return known_act and p.n % 8 == 0 and not p.many_rows and p.rows_by_tma and p.layout is not None


def _config(problem: BlockProblem) -> Optional[GemmConfig]:
    choose = hopper_gathered_up_config if problem.top_k else hopper_up_config
    return choose(problem.block_m, problem.width)


class Launcher:
    """Two warp groups multiply; one warp loads rows in place, or four gather them from tokens."""

    def __init__(self, problem: BlockProblem):
        self.problem, self.config = problem, _config(problem)
        p, config = problem, self.config
        # An activation alone leaves in fewer, wider pieces where rows are gathered.
        columns = 2 * STORE_COLUMNS if p.top_k > 0 and not p.saves_preact else STORE_COLUMNS
        self.out_block = RaggedTmaBlock(p.dtype, config.block_m // 2 if p.top_k else config.block_m, columns)
        self.x_block = TmaBlock(p.dtype, config.block_m, config.block_k)
        # As many columns of gate as of up: of each half, or neighbours where they alternate or have no gate.
        if p.gated and not p.interleaved:
            w_block = (2, config.block_n // 2, config.block_k)
        else:
            w_block = (config.block_k, config.block_n) if p.layout == "kn" else (config.block_n, config.block_k)
        self.w_block = TmaBlock(p.dtype, 1, *w_block)
        rank = p.low_rank.padded_rank
        self.rank_blocks = RankBlocks(p.dtype, rank, p.layout, config.block_m, self.w_block, config.block_k)
        constants = {**p.constants(), "R": rank, "W_KN": p.layout == "kn", **config.gluon_constants()}
        if p.top_k:
            constants.update(TOP_K=p.top_k, BUFFERS=_STAGED_COLUMNS // columns)
        function = hopper_gathered_up_proj_kernel if p.top_k else hopper_up_proj_kernel
        options = {"num_warps": config.num_warps}
        self.kernel = Kernel(function, constants, options, config.describe("Gluon for Hopper"))

    def __call__(
        self, block: Block, x: Tensor, low_rank: Optional[LowRank], scales: Optional[Tensor],
        preact: Optional[Tensor], act: Optional[Tensor], rows: Rows,
    ) -> None:  # fmt: skip
        """Writes preact and act, where they are given."""
        p, up = self.problem, block.up
        if p.top_k:
            source, indices = (x, x.stride(0) // 8), (rows.row_to_slot,)
        else:
            source, indices = (self.x_block.of(x),), ()
        if p.gated and not p.interleaved:
            up = up.view(p.num_groups, 2, p.n, p.k)
        self.kernel(
            persistent_grid(p, self.config, rows.num_rows, p.width), *source, self.w_block.of(up),
            *self.rank_blocks.of(low_rank), *bias_and_strides(block.up_bias),
            *describe_halves(preact, p, self.out_block),
            None if act is None else self.out_block.of_rows(act), scales, *indices, rows.schedule,
        )  # fmt: skip


def describe_halves(preact: Optional[Tensor], problem: BlockProblem, block: RaggedTmaBlock) -> tuple:
    """The gate and the up columns of a pre-activation: all columns twice if they alternate, one without a gate."""
    if preact is None:
        return None, None
    if not problem.gated:
        return block.of_rows(preact), None
    if problem.interleaved:
        both = block.of_rows(preact)
        return both, both
    return block.of_rows(preact, problem.n), block.of_rows(preact.narrow(1, problem.n, problem.n))
