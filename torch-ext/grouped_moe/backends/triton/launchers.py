"""How Triton's kernels for any GPU are launched, for products of plain weights."""

from typing import Any, Dict, Optional, Tuple

from torch import Tensor

from ...tuning.heuristic import dgrad_config, gemm_config, up_config, wgrad_config
from ..kernels.experts import down_dgrad_kernel, up_proj_kernel
from ..kernels.gemm import grouped_gemm_kernel, wgrad_kernel
from ..kernels.products import Product
from ..problems import BlockProblem, GemmProblem, WgradProblem
from .descriptors import describe
from .launch import Launcher
from .scales import nk_strides


def bias_and_strides(bias: Optional[Tensor]) -> Tuple[Any, ...]:
    """A bias (E, N) and its strides as arguments of a kernel."""
    return (None, 0, 0) if bias is None else (bias, *bias.stride())


def _path(by_tma: bool) -> str:
    return "Triton by descriptor" if by_tma else "Triton by pointer"


class Gemm(Launcher):
    """By descriptor where both operands can be read so, else by pointer."""

    def __init__(self, problem: GemmProblem):
        p, self.by_tma = problem, problem.by_tma
        config = gemm_config(p.block_m, p.n, p.dtype, p.spec, self.by_tma)
        product = Product(p.k, self.by_tma, self.by_tma and p.transposed, p.precision, config.block_k)
        constants = {"N": p.n, "ZERO_UNGROUPED": p.zero_rest, "PRODUCT": product, "FACTOR": p.low_rank}
        super().__init__(p, config, grouped_gemm_kernel, constants, p.n, _path(self.by_tma))

    def __call__(self, x, weight, bias, scales, low_rank, y, rows) -> None:
        if self.by_tma:
            x_and_strides = describe(x, (self.config.block_m, self.config.block_k)), 0, 0
            w_and_strides = describe(weight, (1, *self.config.weight_block(self.problem.transposed))), 0, 0, 0
        else:
            x_and_strides = x, *x.stride()
            w_and_strides = weight, *nk_strides(weight, self.problem.transposed)
        self.kernel(
            self.grid(x.shape[0]), *x_and_strides, *w_and_strides, *bias_and_strides(bias), scales,
            *(low_rank or (None, None)), y, rows.schedule, x.shape[0],
        )  # fmt: skip


def _weight_by_tma(problem: BlockProblem) -> bool:
    return problem.weight_by_tma and problem.spec.wide_tiles and problem.dtype.itemsize == 2


def _block_constants(problem: BlockProblem, block_k: int, by_tma: bool) -> Dict[str, Any]:
    p = problem
    product = Product(p.k, by_tma, by_tma and p.transposed, p.precision, block_k)
    return {"TOP_K": p.top_k, "PRODUCT": product, "FACTOR": p.low_rank, "OPTIONS": p.options}


class UpProj(Launcher):
    """Gathers routed rows; the weight comes by descriptor or by pointer."""

    def __init__(self, problem: BlockProblem):
        p, self.by_tma = problem, _weight_by_tma(problem)
        config = up_config(p.block_m, p.n, p.dtype, p.spec, p.gated, self.by_tma)
        constants = _block_constants(p, config.block_k, self.by_tma)
        super().__init__(p, config, up_proj_kernel, constants, p.n, _path(self.by_tma))

    def __call__(self, x, weight, bias, scales, low_rank, preact, act, rows) -> None:
        if self.by_tma:
            w_and_strides = self._describe(weight), 0, 0, 0
        else:
            w_and_strides = weight, *nk_strides(weight, self.problem.transposed)
        self.kernel(
            self.grid(rows.num_rows), x, *x.stride(), *w_and_strides, *bias_and_strides(bias),
            *(low_rank or (None, None)), preact, act, scales, rows.row_to_slot, rows.schedule,
        )  # fmt: skip

    def _describe(self, up: Tensor):
        """A tile holds BLOCK_N columns of gate and as many of up: of each half, or neighbours if they alternate."""
        p, config = self.problem, self.config
        if p.gated and not p.interleaved and not p.transposed:
            return describe(up.view(p.num_groups, 2, p.n, p.k), (1, 2, config.block_n, config.block_k))
        width = config.block_n * (2 if p.gated and p.interleaved else 1)
        return describe(up, (1, config.block_k, width) if p.transposed else (1, width, config.block_k))


class DownDgrad(Launcher):
    """Gathers routed rows; the weight comes by descriptor or by pointer."""

    def __init__(self, problem: BlockProblem):
        p, self.by_tma = problem, _weight_by_tma(problem)
        config = dgrad_config(p.block_m, p.n, p.dtype, p.spec, p.interleaved, self.by_tma, p.low_rank.RANK > 0)
        constants = _block_constants(p, config.block_k, self.by_tma)
        super().__init__(p, config, down_dgrad_kernel, constants, p.n, _path(self.by_tma))

    def __call__(self, dout, weight, scales, low_rank, preact, dpreact, act, dots, rows) -> None:
        transposed = self.problem.transposed
        if self.by_tma:
            w_and_strides = describe(weight, (1, *self.config.weight_block(transposed))), 0, 0, 0
        else:
            w_and_strides = weight, *nk_strides(weight, transposed)
        self.kernel(
            self.grid(rows.num_rows), dout, *dout.stride(), *w_and_strides, *(low_rank or (None, None)), scales, preact,
            dpreact, act, dots, rows.num_rows, rows.row_to_slot, rows.schedule,
        )  # fmt: skip


class Wgrad(Launcher):
    """Both operands come by descriptor where none is gathered and both can be read so."""

    def __init__(self, problem: WgradProblem):
        p, gathered = problem, problem.gathered is not None
        self.by_tma = p.rows_by_tma and not gathered
        config = wgrad_config(p.m, p.n, p.rows_per_group, p.dtype, p.spec, gathered, self.by_tma)
        # A whole tile passes through shared memory, which small tiles, two programs to a processor, have not left.
        whole = config.block_n == 256 and not p.accumulate and p.out_dtype == p.dtype
        self.out_by_tma = self.by_tma and whole and p.out_by_tma
        constants = {
            "M": p.m, "N": p.n, "P_TOP_K": p.top_k if p.gathered == "lhs" else 0,
            "Q_TOP_K": p.top_k if p.gathered == "rhs" else 0, "ACCUMULATE": p.accumulate, "TMA": self.by_tma,
            "ROW_UNIT": p.row_unit, "PRECISION": p.precision, "BLOCK_K": config.block_k,
        }  # fmt: skip
        super().__init__(p, config, wgrad_kernel, constants, p.n, _path(self.by_tma))
        tiles = p.num_groups * -(-p.m // config.block_m) * self.n_tiles
        self.programs = min(tiles, p.spec.num_sms * config.programs_per_sm) if config.programs_per_sm else tiles

    def __call__(self, lhs, rhs, out, rows) -> None:
        p, config = self.problem, self.config
        lhs_desc = rhs_desc = out_desc = None
        if self.by_tma:
            lhs_desc = describe(lhs, (config.block_k, config.block_m))
            rhs_desc = describe(rhs, (config.block_k, config.block_n))
        if self.out_by_tma:
            out_desc = describe(out, (1, config.block_m, config.block_n))
        self.kernel(
            (self.programs, 1, 1), lhs, lhs.stride(0), rhs, rhs.stride(0), lhs_desc, rhs_desc, out, *out.stride(),
            out_desc, None if p.gathered is None else rows.row_to_slot, rows.schedule,
        )  # fmt: skip


LAUNCHERS = {"gemm": Gemm, "up_proj": UpProj, "down_dgrad": DownDgrad, "wgrad": Wgrad}
