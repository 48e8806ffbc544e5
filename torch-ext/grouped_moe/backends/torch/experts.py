"""The two fused products of the experts block on the CPU: elementwise passes in fp32 or wider."""

from typing import Iterator, Optional, Tuple

import torch
from torch import Tensor

from ...block import Block, Needs
from ...common import activation as act
from ...common.numbers import wide_dtype
from ...operands import LowRank
from ...rows import Rows
from .linear import products, scales_of

_CHUNK = 256  # rows per elementwise pass: its temporaries stay in the cache


def _chunks(rows: Rows) -> Iterator[Tuple[int, int]]:
    """The rows that any expert has, some at a time: (first row, end)."""
    first, end = int(rows.group_offsets[0]), int(rows.group_offsets[-1])
    for start in range(first, end, _CHUNK):
        yield start, min(start + _CHUNK, end)


def up_proj(
    block: Block, x: Tensor, rows: Rows, scales: Optional[Tensor], *, save: bool, activate: bool,
    low_rank: Optional[LowRank] = None,
) -> Tuple[Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    """(preact (rows, P) if save, scales * activation (rows, I) if activate), neither in 8-bit floats."""
    preact = products(
        x, block.up, rows, transposed=block.transposed, bias=block.up_bias, of_tokens=rows.top_k > 0, low_rank=low_rank
    )
    if not activate:
        return preact, None
    activated = x.new_empty((rows.num_rows, block.intermediate))
    for start, end in _chunks(rows):
        wide = preact[start:end].to(wide_dtype(x.dtype))
        value = act.forward(wide, block.activation, block.gated, block.interleaved)
        if scales is not None:
            value = value * scales[start:end, None].to(value.dtype)
        activated[start:end] = value
    return preact if save else None, activated


def down_dgrad(
    block: Block, dout: Tensor, rows: Rows, scales: Optional[Tensor], preact: Tensor, needs: Needs, *,
    more_dots: int = 0, overwrite: bool = False, low_rank: Optional[LowRank] = None,
) -> Tuple[Tensor, None, Tensor, Tensor]:  # fmt: skip
    """(dpreact, None, act, dots) whatever the needs; the inner products of the activation are in one part."""
    wide = wide_dtype(preact.dtype)
    grad = products(
        dout, block.down, rows, transposed=not block.transposed, of_tokens=rows.top_k > 0, low_rank=low_rank
    )
    dpreact = preact if overwrite else torch.empty_like(preact)
    dots = preact.new_empty((1 + more_dots, rows.num_rows), dtype=wide)
    for start, end in _chunks(rows):
        wide_grad = grad[start:end].to(wide)
        factors = None if scales is None else scales_of(scales, rows, start, end)[:, None].to(wide)
        weighted = wide_grad if factors is None else factors * wide_grad
        value, dpreact[start:end] = act.forward_and_vjp(
            preact[start:end].to(wide), weighted, block.activation, block.gated, block.interleaved
        )
        dots[0, start:end] = (wide_grad * value).sum(1)
        grad[start:end] = value if factors is None else value.mul_(factors)
    return dpreact, None, grad, dots
