"""The up-projection of 8-bit rows with 8-bit weights by the Gluon kernel for Hopper."""

from typing import Optional

import torch
from torch import Tensor

from ...block import Block
from ...operands import LowRank
from ...rows import Rows
from ...tuning.heuristic import hopper_quantized_config
from ..kernels.hopper_quantized import hopper_quantized_up_proj_kernel
from ..problems import BlockProblem
from ..triton.gemm import bias_and_strides
from ..triton.launch import Kernel, persistent_grid
from ..triton.quantize import BLOCK, QuantizedRows
from ..triton.scales import scale_arguments
from .descriptors import RaggedTmaBlock, RankBlocks, TmaBlock
from .quantized_gemm import PATH
from .up_proj import STORE_COLUMNS, describe_halves


class Launcher:
    """Two warp groups share tiles of 128 columns of gate and as many of up; four warps gather rows."""

    def __init__(self, problem: BlockProblem):
        self.problem, self.config = p, config = problem, hopper_quantized_config()
        half = config.block_m // 2
        self.w_block = TmaBlock(torch.float8_e4m3fn, 1, 2, config.block_n // 2, config.block_k)
        rank, room = p.low_rank.padded_rank, config.block_k // p.dtype.itemsize
        self.rank_blocks = RankBlocks(p.dtype, rank, "nk", config.block_m, self.w_block, room)
        self.preact_block = RaggedTmaBlock(p.dtype, half, STORE_COLUMNS)
        self.act_block = RaggedTmaBlock(torch.float8_e4m3fn, half, BLOCK)
        constants = {**p.constants(), "R": rank, "TOP_K": p.top_k, **config.gluon_constants()}
        options = {"num_warps": config.num_warps}
        self.kernel = Kernel(hopper_quantized_up_proj_kernel, constants, options, config.describe(PATH))

    def __call__(
        self, block: Block, x: QuantizedRows, low_rank: Optional[LowRank], scales: Optional[Tensor],
        preact: Optional[Tensor], act: Optional[QuantizedRows], rows: Rows,
    ) -> None:  # fmt: skip
        """Writes preact and act, where they are given."""
        p, up = self.problem, block.up
        halves = up.data.view(p.num_groups, 2, p.n, p.k)
        act_arguments = (None, None) if act is None else (self.act_block.of_rows(act.codes), act.scales)
        self.kernel(
            persistent_grid(p, self.config, rows.num_rows, p.width), x.codes, x.codes.stride(0) // 16,
            self.w_block.of(halves), *self.rank_blocks.of(low_rank),
            x.scales, *scale_arguments(up), *bias_and_strides(block.up_bias),
            *describe_halves(preact, p, self.preact_block), *act_arguments, scales,
            rows.row_to_slot if p.top_k else None, rows.schedule,
        )  # fmt: skip
