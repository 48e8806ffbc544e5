"""The gradient that the down-projection's input gets, fused with the activation's derivative."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from ...block import Block, Needs
from ...operands import LowRank
from ...rows import Rows
from ..table import launcher_of
from .activation_grad import activation_grad
from .codes import takes_codes
from .gemm import gemm
from .permute import sort_rows
from .quantize import QuantizedRows, quantize_rows
from .scales import for_rows
from .up_proj import problem_of


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
    if not isinstance(block.down, Tensor):
        block = block._replace(down=for_rows(block.down, rows.block_m, dout.dtype))
    problem = problem_of(block, dout, block.down, low_rank, rows, False, not block.transposed)
    launcher = launcher_of("down_dgrad", problem)
    if num_rows and launcher.reads_sorted_rows and rows.top_k:
        dout = sort_rows(dout, rows)
    act = dout.new_empty(num_rows, n) if needs.act else None
    dots = None
    if needs.act_scales:
        dots = dout.new_empty(launcher.n_tiles + more_dots, num_rows, dtype=torch.float32)
    if num_rows:
        launcher(block, dout, low_rank, scales, preact, dpreact, act, dots, rows)
    return dpreact, None, act, dots
