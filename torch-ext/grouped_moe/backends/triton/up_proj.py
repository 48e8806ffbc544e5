"""The up-projection of experts, fused with the activation."""

from functools import lru_cache
from typing import Callable, Optional, Tuple, Union

from torch import Tensor

from ...block import Block
from ...block_scaled import ScaleLayout, Weight
from ...common.device import dot_precision, spec_of
from ...operands import FactorLayout, LowRank, forward_layout, low_rank_layout
from ...rows import Rows
from ...tuning.heuristic import choose_block_m, quantizing_pays, triton_path, up_config
from ..kernels.experts import up_proj_kernel
from ..problems import BlockProblem, GemmProblem
from ..table import launcher_of
from .descriptors import MAX_RAGGED_ROWS, describe, takes_rows, weight_layout
from .gemm import bias_and_strides, launcher_of_codes
from .launch import ALIGNMENT, Kernel, persistent_grid
from .low_rank import factor_constants
from .quantize import BLOCK, QuantizedRows, empty_rows, quantize_rows, takes_quantized_rows
from .scales import for_rows, nk_strides, scale_layout
from .transpose import can_transpose


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
    preact = x.new_empty(num_rows, block.preact_width) if save else None
    is_plain = isinstance(block.up, Tensor)
    if num_rows and not is_plain:
        quantized = quantized_up_launcher(block, x, rows, save, low_rank_layout(low_rank))
        if quantized is not None:
            act = empty_rows(num_rows, n, x) if activate else None
            quantized(block, quantize_rows(x, rows), low_rank, scales, preact, act, rows)
            return preact, act
    act = x.new_empty(num_rows, n) if activate else None
    if num_rows:
        if not is_plain:
            block = block._replace(up=for_rows(block.up, rows.block_m, x.dtype))
        problem = problem_of(block, x, block.up, low_rank_layout(low_rank), rows, save, block.transposed)
        launcher_of("up_proj", problem)(block, x, low_rank, scales, preact, act, rows)
    return preact, act


def quantizes(block: Block, x: Tensor, num_rows: int, top_k: int, trains: bool) -> bool:
    """Whether row tiles should be made tall, so that both products take rows of 8-bit floats; False if they are anyway.

    x: the input, or a gradient of its shape and dtype. top_k: as of `Rows`. trains: a backward follows, with the same
    tiles. There it has to be asked for: the kernels take less time, but there are more of them to launch. The backward
    asks again, of weights that hooks on saved tensors may have laid out anew, so shapes and dtypes alone decide.
    """
    if isinstance(block.up, Tensor) or choose_block_m(num_rows, block.num_experts, x.dtype) >= BLOCK:
        return False
    is_asked = all(getattr(weight, "products", None) == "w8a8" for weight in (block.up, block.down))
    if trains and any(weight.shape[2] % ALIGNMENT for weight in (block.up, block.down)):
        return False  # TMA takes no such rows, if they are contiguous
    pays = not trains and quantizing_pays(num_rows, block.num_experts, spec_of(x))
    return (is_asked or pays) and can_quantize(block, x, num_rows, top_k, "nk" if trains else None)


def can_quantize(block: Block, x: Tensor, num_rows: int, top_k: int, layout: Optional[str] = None) -> bool:
    """Whether both products are made with rows of 8-bit floats where tiles are tall.

    layout: of both weights, as `weight_layout` would say; by default what it says.
    """
    rows, ranks = Rows(x, block.num_experts, num_rows, BLOCK, top_k), forward_layout(block.up_lora, block.num_experts)
    return quantized_up_launcher(block, x, rows, False, ranks, layout) is not None


def quantized_up_launcher(
    block: Block, x: Tensor, rows: Rows, saves_preact: bool, ranks: FactorLayout, layout: Optional[str] = None
) -> Optional[Callable[..., None]]:
    """The launcher of the up-projection with rows of 8-bit floats; None unless both products are made so.

    ranks: of the factor that it is called with, which may be a copy (`pack_factor`) of the LoRA's own. layout: as of
    `can_quantize`.
    """
    up, down = block.up, block.down
    if not takes_quantized_rows(up, rows, x.dtype) or not takes_quantized_rows(down, rows, x.dtype):
        return None
    down_ranks = forward_layout(block.down_lora, block.num_experts)
    problem = problem_of(block, x, up, ranks, rows, saves_preact, False)
    if layout is not None:
        problem = problem._replace(layout=layout)
    down_layout = weight_layout(down, False) if layout is None else layout
    return _launcher_if_both(problem, down_layout, down_ranks, down.layout, can_transpose(down))


@lru_cache(maxsize=None)
def _launcher_if_both(
    problem: BlockProblem, layout: Optional[str], ranks: FactorLayout, scales: ScaleLayout, whole: bool
) -> Optional[Callable[..., None]]:
    """The launcher of the up-projection; None if it or the down-projection has none.

    layout, ranks, scales, whole: of the down-projection. All else of it is in the up-projection's problem.
    """
    p = problem
    down = GemmProblem(
        p.spec, p.dtype, p.precision, p.num_groups, p.block_m, n=p.k, k=p.n, layout=layout, transposed=False,
        low_rank=ranks, zero_rest=p.top_k == 0, many_rows=p.many_rows, wide=False, scales=scales,
    )  # fmt: skip
    return None if launcher_of_codes(down, whole) is None else launcher_of("quantized_up_proj", p)


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
