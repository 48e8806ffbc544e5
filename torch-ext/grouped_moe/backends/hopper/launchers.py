"""How the Gluon kernels for Hopper are launched, and which problems they take."""

from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from ...block_scaled import CODES
from ...common.numbers import power_of_two
from ...tuning.heuristic import HOPPER_TILES, GemmConfig, hopper_gemm_config, hopper_wgrad_config
from ..kernels.hopper_down_dgrad import hopper_down_dgrad_kernel
from ..kernels.hopper_gemm import hopper_gemm_kernel
from ..kernels.hopper_quantized import hopper_quantized_gemm_kernel, hopper_quantized_up_proj_kernel
from ..kernels.hopper_ring import Product
from ..kernels.hopper_scheduler import WgradTiling
from ..kernels.hopper_up_proj import hopper_gathered_up_proj_kernel, hopper_up_proj_kernel
from ..kernels.hopper_wgrad import hopper_gathered_wgrad_kernel, hopper_wgrad_kernel
from ..problems import BlockProblem, GemmProblem, WgradProblem
from ..triton.launch import Kernel, Launcher
from ..triton.launchers import bias_and_strides
from ..triton.quantize import BLOCK
from ..triton.scales import scale_arguments
from .descriptors import RaggedTmaBlock, RankBlocks, TmaBlock

_PATH, _PATH_OF_CODES = "Gluon for Hopper", "Gluon for Hopper, 8-bit rows and weights"
_STORE_COLUMNS = 32  # that an epilogue stores at once
_STAGED_COLUMNS = 128  # in all staging tiles of a warp group, where rows are gathered
_SLOTS = {True: 3, False: 4}  # staging tiles of gate and up, or of no gate, that are on their way or worked on
_MAX_ORDERED = 128  # to rank more experts would take longer than their few rows are worth
_CONSUMERS = 2


class _Pipelined(Launcher):
    """Two warp groups multiply; others load rows and weights, a step of K at a time."""

    gluon = True

    def set_blocks(self, problem: NamedTuple, config: GemmConfig, dtype: torch.dtype, *weights: int) -> None:
        """Makes the blocks of a step, and of the low-rank part. weights: extents of an expert's block."""
        self.x_block, self.w_block = TmaBlock(dtype, config.block_m, config.block_k), TmaBlock(dtype, 1, *weights)
        self.rank_blocks = RankBlocks(problem, self.x_block, self.w_block, problem.transposed)

    @staticmethod
    def product(problem: NamedTuple, config: GemmConfig, columns: int) -> Product:
        """How the product is made, as kernels take it. columns: of the result."""
        p, is_kn = problem, problem.transposed
        return Product(columns, p.k, p.low_rank.R, is_kn, is_kn, config.block_n, config.block_k, RANKS_FIRST=False)


class Gemm(_Pipelined):
    """Two warp groups multiply, one warp loads. The groups take tiles in turn, or share tiles of 256 columns."""

    def __init__(self, problem: GemmProblem):
        p, config = problem, self.choose(problem)
        self.set_blocks(p, config, p.dtype, *config.weight_block(p.transposed))
        # The registers of a warp group hold the sums of 128 x 128 products: wider tiles are shared. Zeros take a
        # staging tile of their own.
        store_rows = min(config.block_m, 128 * 128 // config.block_n)
        self.y_block = RaggedTmaBlock(p.dtype, store_rows, 32 if p.zero_rest else 64)
        constants = {"ZERO_UNGROUPED": p.zero_rest, "PRODUCT": self.product(p, config, p.n)}
        super().__init__(p, config, hopper_gemm_kernel, constants, p.n, _PATH)

    @staticmethod
    def choose(p: GemmProblem) -> Optional[GemmConfig]:
        return hopper_gemm_config(p.block_m, p.n, p.k, p.spec, p.wide)

    @classmethod
    def supports(cls, problem: GemmProblem) -> bool:
        """Tall tiles of operands that can be read by descriptor; results leave by a ragged one."""
        p = problem
        return p.by_tma and p.n % 8 == 0 and cls.choose(p) is not None

    def __call__(self, x, weight, bias, scales, low_rank, y, rows) -> None:
        self.kernel(
            self.grid(x.shape[0]), self.x_block.of(x), self.w_block.of(weight), *bias_and_strides(bias), scales,
            *self.rank_blocks.of(low_rank), self.y_block.of_rows(y), rows.schedule, x.shape[0],
        )  # fmt: skip


class QuantizedGemm(_Pipelined):
    """Of 8-bit rows and weights. Two warp groups share tiles of 256 columns, a third loads."""

    def __init__(self, problem: GemmProblem):
        p, config = problem, HOPPER_TILES["quantized"]
        self.set_blocks(p, config, CODES, *config.weight_block(p.transposed))
        factor_transposed = p.low_rank.STRIDE_N == 1  # as that of a backward, the a of a LoRA
        factor_block = TmaBlock(CODES, 1, *config.weight_block(factor_transposed))
        self.rank_blocks = RankBlocks(p, self.x_block, factor_block, factor_transposed)
        self.y_block = RaggedTmaBlock(p.dtype, config.block_m // 2, 32 if p.zero_rest else 64)
        product = self.product(p, config, p.n)._replace(FACTOR_KN=factor_transposed, RANKS_FIRST=True)
        constants = {"ZERO_UNGROUPED": p.zero_rest, "PRODUCT": product}
        super().__init__(p, config, hopper_quantized_gemm_kernel, constants, p.n, _PATH_OF_CODES)

    def __call__(self, x, weight, bias, scales, low_rank, y, rows) -> None:
        self.kernel(
            self.grid(x.shape[0]), self.x_block.of(x.codes), self.w_block.of(weight.data),
            *self.rank_blocks.of(low_rank), x.scales, *scale_arguments(weight, self.problem.transposed),
            *bias_and_strides(bias), scales, self.y_block.of_rows(y), rows.schedule, x.shape[0],
        )  # fmt: skip


def _fits(problem: BlockProblem) -> bool:
    """Whether the fused kernels for plain weights take a block of this kind, in tiles of 128 rows.

    Not the exact GELU where there is no gate: of so many values a tile the up-projection would be more code than caches
    hold, and the dgrad as much as they do.
    """
    p = problem
    known_act, by_tma = p.gated or p.activation.name != "gelu", p.rows_by_tma and p.weight_by_tma
    return known_act and by_tma and p.block_m == 128 and p.n % 8 == 0


def _describe_halves(preact: Optional[Tensor], problem: BlockProblem, block: RaggedTmaBlock) -> Tuple[Any, Any]:
    """The gate and the up columns of a pre-activation: all columns twice if they alternate, one without a gate."""
    if preact is None:
        return None, None
    if not problem.gated:
        return block.of_rows(preact), None
    if problem.interleaved:
        both = block.of_rows(preact)
        return both, both
    return block.of_rows(preact, problem.n), block.of_rows(preact.narrow(1, problem.n, problem.n))


class UpProj(_Pipelined):
    """Two warp groups multiply; one warp loads rows in place, or four gather them from tokens."""

    def __init__(self, problem: BlockProblem):
        p, config = problem, HOPPER_TILES["gathered_up_proj" if problem.top_k else "up_proj"]
        # An activation alone leaves in fewer, wider pieces where rows are gathered.
        columns = 2 * _STORE_COLUMNS if p.top_k > 0 and not p.saves_preact else _STORE_COLUMNS
        self.out_block = RaggedTmaBlock(p.dtype, config.block_m // 2 if p.top_k else config.block_m, columns)
        # As many columns of gate as of up: of each half, or neighbours where they alternate or have no gate.
        halves = (2, config.block_n // 2, config.block_k)
        block = halves if p.gated and not p.interleaved else config.weight_block(p.transposed)
        self.set_blocks(p, config, p.dtype, *block)
        constants = {"PRODUCT": self.product(p, config, p.width), "OPTIONS": p.options}
        if p.top_k:
            constants.update(TOP_K=p.top_k, BUFFERS=_STAGED_COLUMNS // columns)
        function = hopper_gathered_up_proj_kernel if p.top_k else hopper_up_proj_kernel
        super().__init__(p, config, function, constants, p.width, _PATH)

    @staticmethod
    def supports(problem: BlockProblem) -> bool:
        """Not [gate | up] of a weight (E, H, 2 I): a block of both halves would be no operand of wgmma."""
        p = problem
        if p.transposed and p.gated and not p.interleaved:
            return False
        fills_tiles = p.width > 128 and p.k % 8 == 0 if p.top_k else p.width >= 128
        return _fits(p) and fills_tiles

    def __call__(self, x, weight, bias, scales, low_rank, preact, act, rows) -> None:
        p = self.problem
        if p.top_k:
            source, indices = (x, x.stride(0) // 8), (rows.row_to_slot,)
        else:
            source, indices = (self.x_block.of(x),), ()
        if p.gated and not p.interleaved:
            weight = weight.view(p.num_groups, 2, p.n, p.k)
        self.kernel(
            self.grid(rows.num_rows), *source, self.w_block.of(weight), *self.rank_blocks.of(low_rank),
            *bias_and_strides(bias), *_describe_halves(preact, p, self.out_block),
            None if act is None else self.out_block.of_rows(act), scales, *indices, rows.schedule,
        )  # fmt: skip


class QuantizedUpProj(_Pipelined):
    """Of 8-bit rows and weights. Two warp groups share tiles of 128 columns of gate and up each; four warps gather."""

    def __init__(self, problem: BlockProblem):
        p, config = problem, HOPPER_TILES["quantized"]
        self.set_blocks(p, config, CODES, 2, config.block_n // 2, config.block_k)
        self.preact_block = RaggedTmaBlock(p.dtype, config.block_m // 2, _STORE_COLUMNS)
        self.act_block = RaggedTmaBlock(CODES, config.block_m // 2, BLOCK)
        product = self.product(p, config, p.width)._replace(RANKS_FIRST=True)
        constants = {"TOP_K": p.top_k, "PRODUCT": product, "OPTIONS": p.options}
        super().__init__(p, config, hopper_quantized_up_proj_kernel, constants, p.width, _PATH_OF_CODES)

    def __call__(self, x, weight, bias, scales, low_rank, preact, act, rows) -> None:
        p = self.problem
        halves = weight.data.view(p.num_groups, 2, p.n, p.k)
        act_arguments = (None, None) if act is None else (self.act_block.of_rows(act.codes), act.scales)
        self.kernel(
            self.grid(rows.num_rows), x.codes, x.codes.stride(0) // 16, self.w_block.of(halves),
            *self.rank_blocks.of(low_rank), x.scales, *scale_arguments(weight), *bias_and_strides(bias),
            *_describe_halves(preact, p, self.preact_block), *act_arguments, scales,
            rows.row_to_slot, rows.schedule,
        )  # fmt: skip


class DownDgrad(_Pipelined):
    """Two warp groups take tiles in turn, one warp loads rows in place."""

    reads_sorted_rows = True

    def __init__(self, problem: BlockProblem):
        p, config = problem, HOPPER_TILES["down_dgrad"]
        self.set_blocks(p, config, p.dtype, *config.weight_block(p.transposed))
        self.row_block = RaggedTmaBlock(p.dtype, config.block_m, _STORE_COLUMNS)
        constants = {"PRODUCT": self.product(p, config, p.n), "OPTIONS": p.options, "SLOTS": _SLOTS[p.gated]}
        super().__init__(p, config, hopper_down_dgrad_kernel, constants, p.n, _PATH)

    @staticmethod
    def supports(problem: BlockProblem) -> bool:
        """Sorted copies of routed rows must suit descriptors, too."""
        return _fits(problem) and problem.k % 8 == 0 and problem.n > 64

    def __call__(self, dout, weight, scales, low_rank, preact, dpreact, act, dots, rows) -> None:
        p, row_block = self.problem, self.row_block
        inputs = _describe_halves(preact, p, row_block)
        outputs = inputs if dpreact is preact else _describe_halves(dpreact, p, row_block)
        self.kernel(
            self.grid(rows.num_rows), self.x_block.of(dout), self.w_block.of(weight),
            *self.rank_blocks.of(low_rank), scales, *inputs, *outputs, None if act is None else row_block.of_rows(act),
            dots, rows.num_rows, rows.row_to_slot, rows.schedule,
        )  # fmt: skip


class Wgrad(Launcher):
    """Two warp groups multiply, each half of a tile's rows; one warp loads, or four gather."""

    def __init__(self, problem: WgradProblem):
        p, self.problem, self.config = problem, problem, self.choose(problem)
        config = self.config
        m_tiles, n_tiles = -(-p.m // config.block_m), -(-p.n // config.block_n)
        self.programs = min(p.num_groups * m_tiles * n_tiles, p.spec.num_sms)
        order_size = power_of_two(p.num_groups, 32) if p.num_groups <= _MAX_ORDERED else 0
        tiling = WgradTiling(p.num_groups, m_tiles, n_tiles, config.group_m, order_size)
        constants = {"ACCUMULATE": p.accumulate, "TILING": tiling, "STAGES": config.num_stages}
        self.lhs_block = RaggedTmaBlock(p.dtype, config.block_k, config.block_m)
        self.rhs_block = RaggedTmaBlock(p.dtype, config.block_k, config.block_n)
        self.out_block = TmaBlock(p.out_dtype, 1, config.block_m // _CONSUMERS, config.block_n)
        if p.gathered:
            is_lhs = p.gathered == "lhs"
            constants.update(TOP_K=p.top_k, P_GATHERED=is_lhs, COLUMNS=p.m if is_lhs else p.n)
        function = hopper_gathered_wgrad_kernel if p.gathered else hopper_wgrad_kernel
        self.kernel = Kernel(function, constants, config.options(gluon=True), config.describe(_PATH))

    @staticmethod
    def choose(p: WgradProblem) -> Optional[GemmConfig]:
        gathered, itemsize = p.gathered is not None, p.out_dtype.itemsize
        return hopper_wgrad_config(p.m, p.n, p.rows_per_group, itemsize, gathered, p.spec)

    @classmethod
    def supports(cls, problem: WgradProblem) -> bool:
        """Operands and results that descriptors take, one operand gathered at most. Tiles are 256 columns wide."""
        p = problem
        return p.rows_by_tma and p.out_by_tma and cls.choose(p) is not None

    def __call__(self, lhs, rhs, out, rows) -> None:
        p = self.problem
        if p.gathered == "lhs":
            operands = lhs, lhs.stride(0) // 8, rows.row_to_slot, self.rhs_block.of_rows(rhs)
        elif p.gathered == "rhs":
            operands = rhs, rhs.stride(0) // 8, rows.row_to_slot, self.lhs_block.of_rows(lhs)
        else:
            operands = self.lhs_block.of_rows(lhs), self.rhs_block.of_rows(rhs)
        self.kernel((self.programs, 1, 1), *operands, self.out_block.of(out), rows.schedule)


LAUNCHERS = {
    "gemm": Gemm, "quantized_gemm": QuantizedGemm, "up_proj": UpProj, "quantized_up_proj": QuantizedUpProj,
    "down_dgrad": DownDgrad, "wgrad": Wgrad,
}  # fmt: skip
