"""The two fused products of the experts block: the up-projection, and the dgrad of the down-projection."""

from functools import lru_cache
from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from ...block import Block, Needs
from ...block_scaled import Weight
from ...common.activation import Activation
from ...common.device import dot_precision, spec_of
from ...operands import LowRank
from ...rows import Rows
from ..kernels.activation import Options
from ..kernels.activation_grad import activation_grad_kernel
from ..problems import BlockProblem
from ..table import launcher_of
from .codes import takes_codes
from .descriptors import takes_rows, takes_weight
from .factors import factor_of
from .gemm import gemm
from .launch import Kernel
from .permute import sort_rows
from .quantize import BLOCK, QuantizedRows, empty_rows, quantize_rows, values_and_scales
from .scales import for_rows, scale_blocks

_ROWS = 16  # of a tile of `activation_grad`, whose columns are those of one scale
_PROGRAMS_PER_SM = 32  # of `activation_grad`: some rounds of those that run at once, so that the last one is small


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
        weight = block.up if of_codes else for_rows(block.up, rows.block_m, x.dtype)
        problem = problem_of(block, x, weight, low_rank, rows, save, block.transposed)
        launcher = launcher_of("quantized_up_proj" if of_codes else "up_proj", problem)
        x = quantize_rows(x, rows) if of_codes else x
        launcher(x, weight, block.up_bias, scales, low_rank, preact, act, rows)
    return preact, act


def problem_of(
    block: Block, x: Tensor, weight: Weight, low_rank: Optional[LowRank], rows: Rows, saves_preact: bool,
    transposed: bool,
) -> BlockProblem:  # fmt: skip
    """The problem of either fused product, x times the weight (E, N, K) or, transposed, (E, K, N)."""
    spec, dtype, block_m, scales = spec_of(x), x.dtype, rows.block_m, scale_blocks(weight, transposed)
    tall = block_m >= 128  # shorter tiles, which stream weights, do not earn back what descriptors cost
    return BlockProblem(
        spec, dtype, dot_precision(dtype, spec), rows.num_groups, block_m, block.intermediate, x.shape[1], rows.top_k,
        tall and takes_weight(weight), transposed, factor_of(low_rank and low_rank.factor),
        tall and scales is None and takes_rows(x, rows.num_rows, spec), block.gated, block.interleaved,
        block.activation, saves_preact, scales,
    )  # fmt: skip


def down_dgrad(
    block: Block, dout: Tensor, rows: Rows, scales: Optional[Tensor], preact: Tensor, needs: Needs, *,
    more_dots: int = 0, overwrite: bool = False, low_rank: Optional[LowRank] = None,
) -> Tuple[Optional[Tensor], Optional[QuantizedRows], Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    """With g[r] = dout[r] W2[e], of dout[token of r] for routed rows, and the activation a[r] recomputed out of preact:

    (dpreact (rows, P) = scales[r] g[r] * a'(preact[r]), the same in 8-bit floats, scales[r] a[r] (rows, I), dots
    (parts + more_dots, rows), of which the first parts sum up to <g[r], a[r]>), None where not needed. scales: per row,
    or per slot for routed rows. Rows of no expert stay unwritten. needs: the gradients to be made of these: dpreact in
    8-bit floats is for that of x alone. more_dots: further inner products there is room for. overwrite: dpreact takes
    the place of preact. low_rank: what is added to g.
    """
    num_rows, n = rows.num_rows, block.intermediate
    if num_rows and takes_codes(block, dout, num_rows, rows.block_m, backward=True):
        dact = gemm(quantize_rows(dout, rows, sorts=True), block.down, rows, transposed=True, low_rank=low_rank)
        return activation_grad(block, dact, rows, scales, preact, needs, more_dots=more_dots, overwrite=overwrite)
    dpreact = (preact if overwrite else torch.empty_like(preact)) if needs.beyond_x or needs.x else None
    weight = for_rows(block.down, rows.block_m, dout.dtype)
    problem = problem_of(block, dout, weight, low_rank, rows, False, not block.transposed)
    launcher = launcher_of("down_dgrad", problem)
    if num_rows and launcher.reads_sorted_rows and rows.top_k:
        dout = sort_rows(dout, rows)
    act = dout.new_empty(num_rows, n) if needs.act else None
    dots = dout.new_empty(launcher.n_tiles + more_dots, num_rows, dtype=torch.float32) if needs.act_scales else None
    if num_rows:
        launcher(dout, weight, scales, low_rank, preact, dpreact, act, dots, rows)
    return dpreact, None, act, dots


def activation_grad(
    block: Block, dact: Tensor, rows: Rows, scales: Optional[Tensor], preact: Tensor, needs: Needs, *,
    more_dots: int = 0, overwrite: bool = False,
) -> Tuple[Optional[Tensor], Optional[QuantizedRows], Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    """What `down_dgrad` returns, of the gradient of the activation before its scales: dact[r] = W2[e]^T dout[r].

    dact: (rows, I), preact: (rows, P), contiguous and of one dtype. For the gradient of x dpreact, unrounded, becomes
    8-bit floats, which needs I to be a multiple of 128, so that gate and up have blocks of their own. Rows of no expert
    are neither read nor written.
    """
    num_rows, n = dact.shape
    dpreact = (preact if overwrite else torch.empty_like(preact)) if needs.beyond_x else None
    codes = empty_rows(num_rows, preact.shape[1], preact) if needs.x else None
    act = torch.empty_like(dact) if needs.act else None
    num_tiles = -(-n // BLOCK)
    dots = dact.new_empty(num_tiles + more_dots, num_rows, dtype=torch.float32) if needs.act_scales else None
    kernel = _activation_grad_kernel(rows.num_groups, n, block.gated, block.interleaved, block.activation)
    programs = min(-(-num_rows // _ROWS) * num_tiles, spec_of(dact).num_sms * _PROGRAMS_PER_SM)
    kernel(
        (programs, 1, 1), dact, scales, preact, dpreact,
        *values_and_scales(codes), act, dots, num_rows, rows.row_to_slot, rows.schedule,
    )  # fmt: skip
    return dpreact, codes, act, dots


@lru_cache(maxsize=None)
def _activation_grad_kernel(num_groups: int, n: int, gated: bool, interleaved: bool, activation: Activation) -> Kernel:
    options = Options(n, gated, interleaved, *activation)
    constants = {"NUM_EXPERTS": num_groups, "OPTIONS": options, "BLOCK_M": _ROWS, "BLOCK_N": BLOCK}
    return Kernel(activation_grad_kernel, constants, {"num_warps": 4})
