"""The experts block for a few tokens as one native op, without gradients.

The op checks its arguments itself and returns None for a call that is not for it, so that `decode_directly` can call it
before anything else has looked at them.
"""

from math import inf
from typing import Optional

import torch
from torch import Tensor

from ..._ops import ops
from ...common import _compat
from ...common.activation import ACTIVATION_NAMES, Activation
from ...tuning.heuristic import decode_pays
from .fakes import IS_BUILT

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_NO_PARAMETERS = (1.0, None, 0.0)
_CODES = {name: 4 * code for code, name in enumerate(ACTIVATION_NAMES)}
# Their attributes take the host half a microsecond to find.
_DECODE, _DECODE_PLAIN = (ops.decode_experts.default, ops.decode_plain_experts.default) if IS_BUILT else (None, None)


def decode_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    activation: Activation,
    gated: bool,
    interleaved: bool,
) -> Optional[Tensor]:
    """out (T, H) of the experts block, None if the op is not for these tensors: torch_binding.h says what it takes."""
    name, alpha, limit, up_offset = activation
    block = x, ids, weights, up, down, _CODES[name] + 2 * gated + interleaved
    if up_bias is None and down_bias is None and (alpha, limit, up_offset) == _NO_PARAMETERS:
        return _DECODE_PLAIN(*block)
    return _DECODE(*block, up_bias, down_bias, alpha, inf if limit is None else limit, up_offset)


def decode_directly(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    activation: Activation,
    gated: bool,
    interleaved: bool,
) -> Optional[Tensor]:
    """`decode_experts` for arguments that nobody has checked, as a caller of `grouped_mm_experts` gave them.

    None if anything calls for more: other tokens, tensors, gradients, or somebody who traces, transforms or watches.
    """
    if torch.compiler.is_compiling() or _compat.is_watched() or _compat.in_transform() or _compat.has_tangents():
        return None
    records = torch.is_grad_enabled()
    given = [bias for bias in (up_bias, down_bias) if bias is not None]
    for tensor in (x, ids, weights, up, down, *given):
        if (
            type(tensor) not in _PLAIN_TYPES
            or not tensor.is_cuda
            or tensor.layout is not torch.strided
            or (records and tensor.requires_grad)
        ):
            return None
    if torch.is_autocast_enabled("cuda") or ids.dim() != 2 or up.dim() != 3:
        return None
    num_tokens, top_k = ids.shape
    if not num_tokens or not decode_pays(num_tokens, top_k, up, down):
        return None
    return decode_experts(x, ids, weights, up, down, up_bias, down_bias, activation, gated, interleaved)
