"""The experts block for a few tokens as one native op, without gradients.

The op checks its arguments itself and returns None for a call that is not for it, so that `decode_directly` can call it
before anything else has looked at them.
"""

from math import inf
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..._ops import ops
from ...block_scaled import PRODUCTS, BlockScaled, Weight
from ...common import _compat
from ...common.activation import ACTIVATION_NAMES, Activation
from ...tuning.heuristic import decode_pays
from .fakes import IS_BUILT

CODE_BYTES = 2  # take as long to read as the op takes to widen an 8-bit code
_DENSE = torch.strided
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_NO_PARAMETERS = (1.0, None, 0.0)
_CODES = {name: 8 * code for code, name in enumerate(ACTIVATION_NAMES)}
# Their attributes take the host half a microsecond to find.
_DECODE, _DECODE_PLAIN = (ops.decode_experts.default, ops.decode_plain_experts.default) if IS_BUILT else (None, None)


class Experts(NamedTuple):
    """The weights and the kind of an experts block. up: (E, 2 I, H), or (E, I, H) if not gated. down: (E, H, I)."""

    up: Weight
    down: Weight
    up_bias: Optional[Tensor]
    down_bias: Optional[Tensor]
    activation: Activation
    gated: bool
    interleaved: bool


def takes_scales(up: Weight, down: Weight) -> bool:
    """Whether both weights are scaled in the op's blocks."""
    return (
        isinstance(up, BlockScaled)
        and isinstance(down, BlockScaled)
        and up.block == down.block == (128, 128)
        and up.parts in (1, 2)
        and down.parts == 1
        and up.products in PRODUCTS
        and down.products in PRODUCTS
    )


def decode_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Optional[Tensor]:
    """out (T, H) of the experts block, None if the op is not for these tensors: torch_binding.h says what it takes."""
    up, down, up_bias, down_bias, (name, *parameters), gated, interleaved = experts
    kind = _CODES[name] + 2 * gated + interleaved
    up_scales = down_scales = None
    if isinstance(up, BlockScaled) or isinstance(down, BlockScaled):
        if not takes_scales(up, down):
            return None
        kind += 4 * (up.parts == 2)
        (up, up_scales, *_), (down, down_scales, *_) = up, down
    elif up_bias is None and down_bias is None and tuple(parameters) == _NO_PARAMETERS:
        return _DECODE_PLAIN(x, ids, weights, up, down, kind)
    alpha, limit, up_offset = parameters
    limit = inf if limit is None else limit
    scales = up_scales, down_scales
    return _DECODE(x, ids, weights, up, down, kind, *scales, up_bias, down_bias, alpha, limit, up_offset)


def decode_directly(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Optional[Tensor]:
    """`decode_experts` for arguments that nobody has checked, as a caller of `grouped_mm_experts` gave them.

    None if anything calls for more: other tokens, tensors, gradients, or somebody who traces, transforms or watches.
    """
    if torch.compiler.is_compiling() or _compat.is_watched() or _compat.in_transform() or _compat.has_tangents():
        return None
    up, down, up_bias, down_bias, *_ = experts
    tensors = x, ids, weights, up, down
    if isinstance(up, BlockScaled) and isinstance(down, BlockScaled):
        up, down = up.data, down.data
        tensors = x, ids, weights, up, down, experts.up.scale_inv, experts.down.scale_inv
    if up_bias is not None or down_bias is not None:
        tensors = *tensors, *(bias for bias in (up_bias, down_bias) if bias is not None)
    records = torch.is_grad_enabled()
    for tensor in tensors:
        if (
            type(tensor) not in _PLAIN_TYPES
            or not tensor.is_cuda
            or tensor.layout is not _DENSE
            or (records and tensor.requires_grad)
        ):
            return None
    if torch.is_autocast_enabled("cuda") or ids.dim() != 2 or up.dim() != 3:
        return None
    num_tokens, top_k = ids.shape
    if not num_tokens or not decode_pays(num_tokens, top_k, up, down, CODE_BYTES):
        return None
    return decode_experts(x, ids, weights, experts)
