"""Grouped GEMM of 8-bit rows with 8-bit weights by the Gluon kernel for Hopper."""

from typing import Optional

import torch
from torch import Tensor

from ...block_scaled import BlockScaled
from ...rows import Rows, max_tiles
from ...tuning.heuristic import hopper_quantized_config, persistent_grid
from ..kernels.hopper_quantized import hopper_quantized_gemm_kernel
from ..problems import GemmProblem
from ..triton.gemm import bias_and_strides
from ..triton.launch import Kernel
from ..triton.quantize import QuantizedRows
from ..triton.scales import scale_arguments
from .descriptors import RaggedTmaBlock, TmaBlock

PATH = "Gluon for Hopper, 8-bit rows and weights"


def supports(problem: GemmProblem) -> bool:
    """Weights (E, N, K) that can be read by descriptor, without a low-rank part; results leave by a ragged one."""
    p = problem
    plain = p.low_rank.rank == 0 and p.scales.n_parts == 1
    return plain and p.layout == "nk" and p.n % 8 == 0 and p.k % 16 == 0 and not p.many_rows


class Launcher:
    """Two warp groups share tiles of 256 columns, a third loads."""

    def __init__(self, problem: GemmProblem):
        self.problem, self.config = p, config = problem, hopper_quantized_config()
        codes = torch.float8_e4m3fn
        self.x_block = TmaBlock(codes, config.block_m, config.block_k)
        self.w_block = TmaBlock(codes, 1, config.block_n, config.block_k)
        self.y_block = RaggedTmaBlock(p.dtype, config.block_m // 2, 32 if p.zero_rest else 64)
        constants = {
            "NUM_EXPERTS": p.num_groups, "N": p.n, "K": p.k, "ZERO_UNGROUPED": p.zero_rest,
            **config.gluon_constants(),
        }  # fmt: skip
        options = {"num_warps": config.num_warps}
        self.kernel = Kernel(hopper_quantized_gemm_kernel, constants, options, config.describe(PATH))

    def __call__(
        self, x: QuantizedRows, weight: BlockScaled, bias: Optional[Tensor], scales: Optional[Tensor], y: Tensor,
        rows: Rows,
    ) -> None:  # fmt: skip
        """Writes y."""
        p = self.problem
        tiles = max_tiles(x.shape[0], p.num_groups, p.block_m)
        self.kernel(
            persistent_grid(self.config, tiles, p.n, p.spec), self.x_block.of(x.codes), self.w_block.of(weight.data),
            x.scales, *scale_arguments(weight), *bias_and_strides(bias), scales, self.y_block.of_rows(y),
            rows.schedule, x.shape[0],
        )  # fmt: skip
