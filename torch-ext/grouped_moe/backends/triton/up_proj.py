"""The up-projection of experts, fused with the activation."""

from typing import Optional, Tuple, Union

from torch import Tensor

from ...block import Block
from ...block_scaled import Weight
from ...common.device import dot_precision, spec_of
from ...operands import FactorLayout, LowRank, low_rank_layout
from ...rows import Rows
from ...tuning.heuristic import triton_path, up_config
from ..kernels.experts import up_proj_kernel
from ..problems import BlockProblem
from ..table import launcher_of
from .codes import takes_codes
from .descriptors import MAX_RAGGED_ROWS, describe, takes_rows, weight_layout
from .gemm import bias_and_strides
from .launch import Kernel, persistent_grid
from .low_rank import factor_constants
from .quantize import QuantizedRows, empty_rows, quantize_rows
from .scales import for_rows, nk_strides, scale_layout


def block_constants(problem: BlockProblem, by_tma: bool) -> dict:
    """The constexprs of both fused kernels but for the tile's. by_tma: the weight comes by descriptor."""
    return {
        **problem.constants(), "TOP_K": problem.top_k, "PRECISION": problem.precision, "TMA": by_tma,
        "W_KN": by_tma and problem.layout == "kn", **factor_constants(problem.low_rank),
    }  # fmt: skip


def weight_by_tma(problem: BlockProblem) -> bool:
    """Whether the kernels for any device read the weight by descriptor."""
    return problem.layout is not None and problem.spec.wide_tiles and problem.dtype.itemsize == 2


class Launcher:
    """The Triton kernel, persistent; the weight comes by descriptor or by pointer."""

    def __init__(self, problem: BlockProblem):
        self.problem, self.by_tma = problem, weight_by_tma(problem)
        p = problem
        self.config = up_config(p.block_m, p.n, p.dtype, p.spec, p.gated, self.by_tma)
        constants = {**block_constants(p, self.by_tma), **self.config.constants()}
        self.kernel = Kernel(
            up_proj_kernel, constants, self.config.options(), self.config.describe(triton_path(self.by_tma))
        )

    def __call__(
        self, block: Block, x: Tensor, low_rank: Optional[LowRank], scales: Optional[Tensor],
        preact: Optional[Tensor], act: Optional[Tensor], rows: Rows,
    ) -> None:  # fmt: skip
        """Writes preact and act, where they are given."""
        p, config = self.problem, self.config
        if self.by_tma:
            weight = self._describe(block.up), 0, 0, 0
        else:
            weight = block.up, *nk_strides(block.up, p.transposed)
        self.kernel(
            persistent_grid(p, config, rows.num_rows, p.n), x, *x.stride(), *weight, *bias_and_strides(block.up_bias),
            *(low_rank or (None, None)), preact, act, scales, rows.row_to_slot if p.top_k else None, rows.schedule,
        )  # fmt: skip

    def _describe(self, up: Tensor):
        """A tile holds BLOCK_N columns of gate and as many of up: of each half, or neighbours if they alternate."""
        p, config = self.problem, self.config
        if p.gated and not p.interleaved and p.layout == "nk":
            return describe(up.view(p.num_groups, 2, p.n, p.k), (1, 2, config.block_n, config.block_k))
        width = config.block_n * (2 if p.gated and p.interleaved else 1)
        return describe(up, (1, config.block_k, width) if p.layout == "kn" else (1, width, config.block_k))


def up_proj(
    block: Block, x: Tensor, rows: Rows, scales: Optional[Tensor], *, save: bool, activate: bool,
    low_rank: Optional[LowRank] = None,
) -> Tuple[Optional[Tensor], Union[Tensor, QuantizedRows, None]]:  # fmt: skip
    """(preact (rows, P) if save, scales * activation (rows, I) if activate); rows of no expert stay unwritten.

    preact[r] = W1[e] x[r] + b1[e], of x[token of r] for routed rows. scales: (rows,), of rows in place. low_rank: what
    is added to the product. The activation is of 8-bit floats if the down-projection takes these.
    """
    num_rows, n = rows.num_rows, block.intermediate
    of_codes = num_rows > 0 and takes_codes(block, x, num_rows, rows.block_m)
    preact, act = x.new_empty(num_rows, block.preact_width) if save else None, None
    if activate:
        act = empty_rows(num_rows, n, x) if of_codes else x.new_empty(num_rows, n)
    if num_rows:
        if not of_codes and not isinstance(block.up, Tensor):
            block = block._replace(up=for_rows(block.up, rows.block_m, x.dtype))
        problem = problem_of(block, x, block.up, low_rank_layout(low_rank), rows, save, block.transposed)
        launcher = launcher_of("quantized_up_proj" if of_codes else "up_proj", problem)
        launcher(block, quantize_rows(x, rows) if of_codes else x, low_rank, scales, preact, act, rows)
    return preact, act


def problem_of(
    block: Block, x: Tensor, weight: Weight, low_rank: FactorLayout, rows: Rows, saves_preact: bool,
    transposed: bool,
) -> BlockProblem:  # fmt: skip
    """The problem of either fused product, x times the weight (E, N, K) or, transposed, (E, K, N)."""
    spec, dtype, block_m, scales = spec_of(x), x.dtype, rows.block_m, scale_layout(weight, transposed)
    tall = block_m >= 128  # shorter tiles, which stream weights, do not earn back what descriptors cost
    return BlockProblem(
        spec, dtype, dot_precision(dtype, spec), rows.num_groups, block_m, block.intermediate, x.shape[1], rows.top_k,
        weight_layout(weight, transposed) if tall else None, transposed,
        low_rank, tall and scales is None and takes_rows(x, spec),
        rows.num_rows > MAX_RAGGED_ROWS, block.gated, block.interleaved, block.activation, saves_preact, scales,
    )  # fmt: skip
