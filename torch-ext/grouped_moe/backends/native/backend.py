"""The backend of the CUDA build: native ops where they take a call, the Triton backend for all else."""

from typing import Optional

from torch import Tensor

from ...block import Block
from ...block_scaled import BlockScaled
from .. import triton
from ..triton import *  # noqa: F403 (all of its functions; those below take the place of four)
from ..triton import __all__ as __all__
from .decode import decode_experts, groups_slots
from .routing import route as route
from .routing import split_rows as split_rows


def is_decode(block: Block, num_tokens: int, top_k: int) -> bool:
    """Whether the op may take a call, or the Triton backend's kernels for a few tokens are for it."""
    grouped = groups_slots(num_tokens, top_k, block.num_experts, isinstance(block.up, BlockScaled))
    return grouped or triton.is_decode(block, num_tokens, top_k)


def decode(
    block: Block, x: Tensor, top_k_index: Tensor, weights: Tensor, adapters: Optional[Tensor] = None
) -> Optional[Tensor]:
    """As of the Triton backend, which takes other blocks of FP8 and rows that do not begin at 16 bytes.

    None if neither is for the call.
    """
    experts = block.up, block.down, block.up_bias, block.down_bias
    kind = block.activation, block.gated, block.interleaved, block.transposed
    loras = None if block.up_lora is None and block.down_lora is None else (block.up_lora, block.down_lora, adapters)
    out = decode_experts(x, top_k_index, weights, experts, kind, loras)
    if out is None and triton.is_decode(block, *top_k_index.shape):
        out = triton.decode(block, x, top_k_index, weights, adapters)
    return out
