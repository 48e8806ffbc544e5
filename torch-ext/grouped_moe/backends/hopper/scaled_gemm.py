"""Grouped GEMM with block-scaled weights by the Gluon kernel for Hopper."""

from typing import Optional

import torch
from torch import Tensor

from ...block_scaled import BlockScaled
from ...operands import LowRank
from ...rows import Rows, max_tiles
from ...tuning.heuristic import hopper_scaled_config, persistent_grid
from ..kernels.hopper_scaled_gemm import hopper_scaled_gemm_kernel
from ..problems import GemmProblem
from ..triton.gemm import bias_and_strides
from ..triton.launch import Kernel
from ..triton.scales import scale_arguments
from .descriptors import RaggedTmaBlock, TmaBlock, describe_low_rank

_STORE_COLUMNS = 32  # that an epilogue stores at once


def supports(problem: GemmProblem) -> bool:
    """Tall tiles of operands that can be read by descriptor, with one scale for each step of each tile."""
    p, config = problem, hopper_scaled_config()
    readable = p.layout is not None and p.n % 16 == 0 and p.k % 16 == 0 and p.n > 64 and not p.many_rows
    n_block, k_block, n_parts, k_parts = p.scales
    one_scale = n_block % config.block_n == 0 and k_block % config.block_k == 0
    parts = n_parts == 1 and (k_parts == 1 or p.k // k_parts % config.block_k == 0)
    return readable and p.block_m == config.block_m and one_scale and parts


class Launcher:
    """Two warp groups take tiles in turn, a third widens codes, a warp loads."""

    def __init__(self, problem: GemmProblem):
        self.problem, self.config = p, config = problem, hopper_scaled_config()
        block = (config.block_k, config.block_n) if p.layout == "kn" else (config.block_n, config.block_k)
        self.x_block, self.w_block = TmaBlock(p.dtype, config.block_m, config.block_k), TmaBlock(p.dtype, 1, *block)
        self.codes_block = TmaBlock(torch.float8_e4m3fn, 1, *block)
        self.y_block = RaggedTmaBlock(p.dtype, config.block_m, _STORE_COLUMNS)
        constants = {
            "NUM_EXPERTS": p.num_groups, "N": p.n, "K": p.k, "R": p.low_rank.padded_rank,
            "ZERO_UNGROUPED": p.zero_rest, "W_KN": p.layout == "kn", "N_BLOCK": p.scales.n_block,
            "K_BLOCK": p.scales.k_block, "K_PARTS": p.scales.k_parts, **config.gluon_constants(),
        }  # fmt: skip
        options, path = {"num_warps": config.num_warps}, "Gluon for Hopper, weights widened on the way"
        self.kernel = Kernel(hopper_scaled_gemm_kernel, constants, options, config.describe(path))

    def __call__(
        self, x: Tensor, weight: BlockScaled, bias: Optional[Tensor], scales: Optional[Tensor],
        low_rank: Optional[LowRank], y: Tensor, rows: Rows,
    ) -> None:  # fmt: skip
        """Writes y."""
        p = self.problem
        tiles = max_tiles(x.shape[0], p.num_groups, p.block_m)
        self.kernel(
            persistent_grid(self.config, tiles, p.n, p.spec), self.x_block.of(x), self.codes_block.of(weight.data),
            *scale_arguments(weight, p.transposed), *bias_and_strides(bias), scales,
            *describe_low_rank(low_rank, p.layout, self.x_block, self.w_block), self.y_block.of_rows(y),
            rows.schedule, x.shape[0],
        )  # fmt: skip
