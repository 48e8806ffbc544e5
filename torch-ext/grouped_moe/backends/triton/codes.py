"""Which products with scaled weights are made with rows of 8-bit floats ("codes"): shapes, dtypes and strides decide.

Those of an experts block go together: each makes the codes that the next one reads. A decision is a yes or a no alone;
what a kernel is compiled for comes from the tensors that it is called with.
"""

from functools import lru_cache
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from ...block import Block
from ...block_scaled import BlockScaled, Weight
from ...common._compat import reinterpret_method
from ...common.device import DeviceSpec, spec_of
from ...operands import LoRA, LowRank
from ...rows import Rows
from ...tuning.heuristic import choose_block_m, quantizing_pays, transposing_pays
from ..kernels.tiles import MAX_RAGGED_ROWS
from .descriptors import takes_weight
from .launch import ALIGNMENT
from .quantize import BLOCK
from .scales import can_transpose


class _Operand(NamedTuple):
    """What of a scaled weight (E, N, K) decides.

    parts: as of `BlockScaled`. by_tma: whether descriptors take it as it lies. transposes: whether it has a transpose
    (`can_transpose`). has_pair: whether a low-rank pair is added to its product.
    """

    n: int
    k: int
    parts: int
    by_tma: bool
    transposes: bool
    has_pair: bool


def quantizes(block: Block, x: Tensor, num_rows: int, trains: bool) -> bool:
    """Whether row tiles should be made tall, so that both products take rows of 8-bit floats; False if they are anyway.

    x: the input, or a gradient of its shape and dtype. trains: a backward follows, with the same tiles. There it has to
    be asked for: the kernels take less time, but there are more of them to launch. The backward asks again, of weights
    that hooks on saved tensors may have laid out anew, so weights count as contiguous.
    """
    if isinstance(block.up, Tensor) or choose_block_m(num_rows, block.num_experts, x.dtype) >= BLOCK:
        return False
    is_asked = all(getattr(weight, "products", None) == "w8a8" for weight in (block.up, block.down))
    pays = not trains and quantizing_pays(num_rows, block.num_experts, spec_of(x))
    return (is_asked or pays) and takes_codes(block, x, num_rows, contiguous=trains)


def takes_codes(
    block: Block, x: Tensor, num_rows: int, block_m: int = BLOCK, *, backward: bool = False, contiguous: bool = False
) -> bool:
    """Whether both products of a block are made with rows of 8-bit floats; with backward those of its backward, too.

    x: any tensor of the rows' dtype on their device. block_m: rows of a tile, by default tall ones. contiguous: whether
    weights count as such, however they lie.
    """
    up, down = block.up, block.down
    if not _is_for_codes(up, block_m, x.dtype) or not _is_for_codes(down, block_m, x.dtype):
        return False
    operands, spec = (_operand(up, block.up_lora, contiguous), _operand(down, block.down_lora, contiguous)), spec_of(x)
    return _rows_fit(num_rows, spec) and _block_takes_codes(*operands, block.gated, block.interleaved, spec, backward)


def gemm_takes_codes(
    weight: Weight, dtype: torch.dtype, rows: Rows, spec: DeviceSpec, transposed: bool, low_rank: Optional[LowRank]
) -> bool:
    """Whether a product that is no part of a block is made with rows of 8-bit floats. dtype: of the rows.

    transposed, low_rank: as of `gemm`.
    """
    if not _is_for_codes(weight, rows.block_m, dtype):
        return False
    operand = _operand(weight, low_rank, contiguous=transposed)  # a transpose is copied where it has to be
    return _rows_fit(rows.num_rows, spec) and _gemm_takes_codes(operand, transposed, spec)


def transposes_codes(weight: BlockScaled, rows: Rows, spec: DeviceSpec) -> bool:
    """Whether the kernel of a product with the transpose of a weight transposes its codes, else a copy is made."""
    if not spec.hopper or reinterpret_method() is None or not transposing_pays(rows.num_rows, rows.num_groups, spec):
        return False
    return takes_weight(weight)


def _rows_fit(num_rows: int, spec: DeviceSpec) -> bool:
    """Whether kernels can read so many rows: Hopper's read them by ragged descriptors, which count up to a limit."""
    return not spec.hopper or num_rows <= MAX_RAGGED_ROWS


def _is_for_codes(weight: Weight, block_m: int, dtype: torch.dtype) -> bool:
    """Whether products of a weight are to be made with rows of 8-bit floats, if there is a kernel.

    Few rows wait for weights, so that narrower rows gain nothing.
    """
    if block_m < BLOCK or dtype.itemsize != 2 or not isinstance(weight, BlockScaled):
        return False
    return weight.products != "w8a16" and tuple(weight.block) == (BLOCK, BLOCK)


def _operand(weight: BlockScaled, pair: Union[LoRA, LowRank, None], contiguous: bool) -> _Operand:
    """What of a weight and of a pair decides. contiguous: whether it counts as such."""
    _, n, k = weight.data.shape
    by_tma = k % ALIGNMENT == 0 if contiguous else takes_weight(weight)
    return _Operand(n, k, weight.parts, by_tma, can_transpose(weight), pair is not None)


@lru_cache(maxsize=None)
def _block_takes_codes(
    up: _Operand, down: _Operand, gated: bool, interleaved: bool, spec: DeviceSpec, backward: bool
) -> bool:
    """Hopper's up-projection reads [gate | up] that have blocks of their own.

    A backward rounds the gradients of gate and of up, which have to be of whole blocks.
    """
    apart = up.n % (2 * BLOCK) == 0 if up.parts == 1 else up.parts == 2
    if interleaved or (spec.hopper and not (gated and apart)) or not up.by_tma or not _kernels_take(up, up.k, spec):
        return False
    if backward and down.k % BLOCK:
        return False
    gemms = [(down, False), (down, True), (up, True)] if backward else [(down, False)]
    return all(_gemm_takes_codes(weight, transposed, spec) for weight, transposed in gemms)


@lru_cache(maxsize=None)
def _gemm_takes_codes(weight: _Operand, transposed: bool, spec: DeviceSpec) -> bool:
    """A transpose may be a copy, so that it does not matter how the weight lies."""
    n, k = (weight.k, weight.n) if transposed else (weight.n, weight.k)
    if spec.hopper and (n % 8 or not weight.transposes):
        return False
    return (weight.transposes if transposed else weight.by_tma) and _kernels_take(weight, k, spec)


def _kernels_take(weight: _Operand, k: int, spec: DeviceSpec) -> bool:
    """What all kernels ask for. k: the extent of the sum.

    Beside a low-rank pair K has several blocks: of one there would be no loop, and ptxas would spill registers. On
    Hopper descriptors read codes and write results, and the pair's steps see shared memory as another dtype.
    """
    if weight.has_pair and k <= BLOCK:
        return False
    if not spec.hopper:
        return spec.float8
    return k % 16 == 0 and (not weight.has_pair or reinterpret_method() is not None)
