"""The up-projection of experts, fused with the activation."""

from typing import Optional, Tuple, Union

from torch import Tensor

from ...block import Block
from ...block_scaled import Weight
from ...common.device import dot_precision, spec_of
from ...operands import LowRank
from ...rows import Rows
from ..problems import BlockProblem
from ..table import launcher_of
from .codes import takes_codes
from .descriptors import takes_rows, takes_weight
from .low_rank import factor_of
from .quantize import QuantizedRows, empty_rows, quantize_rows
from .scales import for_rows, scale_blocks


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
        problem = problem_of(block, x, block.up, low_rank, rows, save, block.transposed)
        launcher = launcher_of("quantized_up_proj" if of_codes else "up_proj", problem)
        launcher(block, quantize_rows(x, rows) if of_codes else x, low_rank, scales, preact, act, rows)
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
