"""Grouped GEMM of 8-bit rows with 8-bit weights by the Gluon kernel for Hopper."""

from typing import Optional

import torch
from torch import Tensor

from ...block_scaled import BlockScaled
from ...operands import LowRank
from ...rows import Rows
from ...tuning.heuristic import hopper_quantized_config
from ..kernels.hopper_quantized import hopper_quantized_gemm_kernel
from ..problems import GemmProblem
from ..triton.gemm import bias_and_strides
from ..triton.launch import Kernel, persistent_grid
from ..triton.quantize import QuantizedRows
from ..triton.scales import scale_arguments
from .descriptors import RaggedTmaBlock, RankBlocks, TmaBlock

PATH = "Gluon for Hopper, 8-bit rows and weights"


class Launcher:
    """Two warp groups share tiles of 256 columns, a third loads."""

    def __init__(self, problem: GemmProblem):
        self.problem, self.config = p, config = problem, hopper_quantized_config()
        codes = torch.float8_e4m3fn
        self.x_block = TmaBlock(codes, config.block_m, config.block_k)
        rank, room = p.low_rank.padded_rank, config.block_k // p.dtype.itemsize  # as many bytes as a step of codes
        factor_kn = p.low_rank.strides[2] == 1  # a backward's factor, which is the a of a LoRA, comes so
        nk = TmaBlock(codes, 1, config.block_n, config.block_k)
        kn = TmaBlock(codes, 1, config.block_k, config.block_n)
        self.w_block = kn if p.layout == "kn" else nk
        block, layout = (kn, "kn") if factor_kn else (nk, "nk")
        self.rank_blocks = RankBlocks(p.dtype, rank, layout, config.block_m, block, room)
        self.y_block = RaggedTmaBlock(p.dtype, config.block_m // 2, 32 if p.zero_rest else 64)
        constants = {
            "NUM_EXPERTS": p.num_groups, "N": p.n, "K": p.k, "R": rank, "W_KN": p.layout == "kn",
            "FACTOR_KN": factor_kn, "ZERO_UNGROUPED": p.zero_rest, **config.gluon_constants(),
        }  # fmt: skip
        options = {"num_warps": config.num_warps}
        self.kernel = Kernel(hopper_quantized_gemm_kernel, constants, options, config.describe(PATH))

    def __call__(
        self, x: QuantizedRows, weight: BlockScaled, bias: Optional[Tensor], scales: Optional[Tensor],
        low_rank: Optional[LowRank], y: Tensor, rows: Rows,
    ) -> None:  # fmt: skip
        """Writes y."""
        p = self.problem
        self.kernel(
            persistent_grid(p, self.config, x.shape[0], p.n), self.x_block.of(x.codes), self.w_block.of(weight.data),
            *self.rank_blocks.of(low_rank), x.scales, *scale_arguments(weight, p.layout == "kn"),
            *bias_and_strides(bias), scales, self.y_block.of_rows(y), rows.schedule, x.shape[0],
        )  # fmt: skip
