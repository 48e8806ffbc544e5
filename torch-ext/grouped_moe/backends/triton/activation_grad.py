"""The gradient of the pre-activation, where that of the activation comes from a product of its own."""

from functools import lru_cache
from typing import Optional, Tuple

import torch
from torch import Tensor

from ...block import Block, Needs
from ...common.activation import Activation
from ...rows import Rows
from ..kernels.activation import Options
from ..kernels.activation_grad import activation_grad_kernel
from .launch import Kernel
from .quantize import BLOCK, QuantizedRows, empty_rows, values_and_scales

_ROWS = 16  # of a program, which takes the activation's columns of one scale


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
    num_tiles, dots = -(-n // BLOCK), None
    if needs.act_scales:
        dots = dact.new_empty(num_tiles + more_dots, num_rows, dtype=torch.float32)
    if num_rows:
        kernel = _kernel(rows.num_groups, n, block.gated, block.interleaved, block.activation)
        kernel(
            (-(-num_rows // _ROWS) * num_tiles, 1, 1), dact, scales, preact, dpreact,
            *values_and_scales(codes), act, dots, num_rows, rows.row_to_slot, rows.schedule,
        )  # fmt: skip
    return dpreact, codes, act, dots


@lru_cache(maxsize=None)
def _kernel(num_groups: int, n: int, gated: bool, interleaved: bool, activation: Activation) -> Kernel:
    options = Options(n, gated, interleaved, *activation)
    constants = {"NUM_EXPERTS": num_groups, "OPTIONS": options, "BLOCK_M": _ROWS, "BLOCK_N": BLOCK}
    return Kernel(activation_grad_kernel, constants, {"num_warps": 4})
