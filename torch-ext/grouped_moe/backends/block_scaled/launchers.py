"""How Triton's kernels for block-scaled weights are launched."""

from typing import Any, Dict

from ...tuning.heuristic import quantized_config, scaled_config
from ..kernels.block_scaled import ScaledProduct, scaled_down_dgrad_kernel, scaled_gemm_kernel, scaled_up_proj_kernel
from ..kernels.quantized import quantized_up_proj_kernel
from ..problems import BlockProblem, GemmProblem
from ..triton.launch import Launcher
from ..triton.launchers import bias_and_strides
from ..triton.quantize import values_and_scales
from ..triton.scales import codes_and_scales, step_of

_WIDENING, _OF_CODES = "Triton, weights widened in registers", "Triton, 8-bit rows and weights"


class Gemm(Launcher):
    """Of rows of two bytes or four, or of 8-bit rows."""

    of_codes = False

    def __init__(self, problem: GemmProblem):
        p, step, of_codes = problem, step_of(problem.scales, problem.k), self.of_codes
        config = quantized_config(p.spec) if of_codes else scaled_config("gemm", p.block_m, p.n, p.dtype, p.spec, step)
        product = ScaledProduct(p.n, p.k, *p.scales, p.precision, config.block_k, HALVES=1)
        constants = {"ZERO_UNGROUPED": p.zero_rest, "PRODUCT": product, "FACTOR": p.low_rank}
        super().__init__(p, config, scaled_gemm_kernel, constants, p.n, _OF_CODES if of_codes else _WIDENING)

    def __call__(self, x, weight, bias, scales, low_rank, y, rows) -> None:
        p, (values, x_scales) = self.problem, values_and_scales(x)
        self.kernel(
            self.grid(x.shape[0]), values, *values.stride(), x_scales, *codes_and_scales(weight, p.transposed, p.spec),
            *bias_and_strides(bias), scales, *(low_rank or (None, None)), y, rows.schedule, x.shape[0],
        )  # fmt: skip


class QuantizedGemm(Gemm):
    """Of 8-bit rows."""

    of_codes = True


def _block_constants(problem: BlockProblem, columns: int, block_k: int, halves: int = 1) -> Dict[str, Any]:
    p = problem
    product = ScaledProduct(columns, p.k, *p.scales, p.precision, block_k, halves)
    return {"TOP_K": p.top_k, "PRODUCT": product, "FACTOR": p.low_rank, "OPTIONS": p.options}


class UpProj(Launcher):
    """Of rows of two bytes or four; gathers routed ones."""

    def __init__(self, problem: BlockProblem):
        p, step, weights = problem, step_of(problem.scales, problem.k), 2 if problem.gated else 1
        config = scaled_config("up_proj", p.block_m, p.n, p.dtype, p.spec, step, weights)
        constants = _block_constants(p, p.width, config.block_k, halves=2 if p.gated and not p.interleaved else 1)
        super().__init__(p, config, scaled_up_proj_kernel, constants, p.n, _WIDENING)

    def __call__(self, x, weight, bias, scales, low_rank, preact, act, rows) -> None:
        p = self.problem
        self.kernel(
            self.grid(rows.num_rows), x, *x.stride(), *codes_and_scales(weight, p.transposed, p.spec),
            *bias_and_strides(bias), *(low_rank or (None, None)), preact, act, scales, rows.row_to_slot,
            rows.schedule,
        )  # fmt: skip


class QuantizedUpProj(Launcher):
    """Of 8-bit rows; gathers routed ones."""

    def __init__(self, problem: BlockProblem):
        p, config = problem, quantized_config(problem.spec)
        constants = _block_constants(p, p.width, config.block_k, halves=2 if p.gated else 1)
        super().__init__(p, config, quantized_up_proj_kernel, constants, p.n, _OF_CODES)

    def __call__(self, x, weight, bias, scales, low_rank, preact, act, rows) -> None:
        p = self.problem
        self.kernel(
            self.grid(rows.num_rows), x.codes, x.scales, *codes_and_scales(weight, False, p.spec),
            *bias_and_strides(bias), *(low_rank or (None, None)), preact, *values_and_scales(act), scales,
            rows.row_to_slot, rows.schedule,
        )  # fmt: skip


class DownDgrad(Launcher):
    """Gathers routed rows."""

    def __init__(self, problem: BlockProblem):
        p, step = problem, step_of(problem.scales, problem.k)
        config = scaled_config("down_dgrad", p.block_m, p.n, p.dtype, p.spec, step)
        super().__init__(p, config, scaled_down_dgrad_kernel, _block_constants(p, p.n, config.block_k), p.n, _WIDENING)

    def __call__(self, dout, weight, scales, low_rank, preact, dpreact, act, dots, rows) -> None:
        p = self.problem
        self.kernel(
            self.grid(rows.num_rows), dout, *dout.stride(), *codes_and_scales(weight, p.transposed, p.spec),
            *(low_rank or (None, None)), scales, preact, dpreact, act, dots, rows.num_rows, rows.row_to_slot,
            rows.schedule,
        )  # fmt: skip


LAUNCHERS = {
    "gemm": Gemm, "quantized_gemm": QuantizedGemm, "up_proj": UpProj, "quantized_up_proj": QuantizedUpProj,
    "down_dgrad": DownDgrad,
}  # fmt: skip
