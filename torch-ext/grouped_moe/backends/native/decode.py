"""The experts block for a few tokens as one native op, without gradients.

The op checks its arguments itself and returns None for a call that is not for it, so that `decode_directly` can call it
before anything else has looked at them.
"""

from math import inf
from operator import attrgetter
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..._ops import ops
from ...block_scaled import PRODUCTS, BlockScaled, Weight
from ...common import _compat
from ...common.activation import ACTIVATION_NAMES, Activation
from ...operands import LoRA
from ...tuning.heuristic import decode_pays
from .fakes import IS_BUILT

# An expert's weights are read once for several slots in calls of at most so many tokens and slots per expert.
_MAX_TOKENS, _MAX_SLOTS_OF_EXPERT = 64, 4
_MAX_TOKENS_SCALED = 256
_CODE_BYTES = 2  # take as long to read as the op takes to widen an 8-bit code
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_MAX_SCALING = torch.finfo(torch.float32).max
_requires_grad = attrgetter("requires_grad")
_NO_PARAMETERS, _NO_LORA = (1.0, None, 0.0), (None, None, 0.0)
# The bits of an op's `kind`, as kernels/decode/describe.h has them; activations are counted in steps of the last one.
_INTERLEAVED, _GATED, _HALVES_APART, _BY_SLOT, _EXCHANGED, _UP_EXPONENTS, _DOWN_EXPONENTS, _ACTIVATION = (
    1 << bit for bit in range(8)
)
_CODES = {name: _ACTIVATION * code for code, name in enumerate(ACTIVATION_NAMES)}
# Their attributes take the host half a microsecond to find.
_DECODE, _DECODE_PLAIN, _DECODE_LORA = (
    (ops.decode_experts.default, ops.decode_plain_experts.default, ops.decode_lora_experts.default)
    if IS_BUILT
    else (None, None, None)
)


# Plain tuples: a named one takes the host a quarter of a microsecond to make.
Experts = Tuple[Weight, Weight, Optional[Tensor], Optional[Tensor]]  # up, down and their biases
Kind = Tuple[Activation, bool, bool, bool]  # and whether gated, interleaved and transposed
Loras = Tuple[Optional[LoRA], Optional[LoRA], Optional[Tensor]]  # of up and down, and the adapter of each token


def groups_slots(num_tokens: int, top_k: int, num_experts: int, scaled: bool) -> bool:
    """Whether the op reads an expert's weights once for several slots in about the time that Triton's kernels take.

    scaled: whether both weights are in 8-bit floats.
    """
    most = _MAX_TOKENS_SCALED if scaled else _MAX_TOKENS
    return num_tokens <= most and num_tokens * top_k <= _MAX_SLOTS_OF_EXPERT * num_experts


def _takes_scales(up: Weight, down: Weight) -> bool:
    """Whether both weights are scaled in the op's blocks."""
    if not isinstance(up, BlockScaled) or not isinstance(down, BlockScaled) or not up.block == down.block == (128, 128):
        return False
    return up.parts in (1, 2) and down.parts == 1 and up.products in PRODUCTS and down.products in PRODUCTS


def _has_exponents(weight: BlockScaled) -> bool:
    """Whether its scales are in e8m0. The op has to be told: its stable ABI has no name for that dtype."""
    return weight.scale_inv.dtype is torch.float8_e8m0fnu


def _factors_of(*loras: Optional[LoRA]) -> Optional[Tuple[Tensor, ...]]:
    """The factors of the pairs that there are; None if one is no LoRA, or its scaling no plain number of fp32."""
    factors = ()
    for lora in loras:
        if lora is not None:
            if not isinstance(lora, LoRA) or type(lora.scaling) not in (float, int):
                return None
            if not abs(lora.scaling) <= _MAX_SCALING:
                return None
            factors += lora.a, lora.b
    return factors


def decode_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, kind: Kind, loras: Optional[Loras] = None
) -> Optional[Tensor]:
    """out (T, H) of the experts block, None if the op is not for these tensors: torch_binding.h says what it takes.

    The first weight is (E, 2 I, H), or (E, I, H) if not gated, the second one (E, H, I); transposed (E, H, 2 I) and
    (E, I, H). Slots read weights themselves where `decode_pays`, else an expert's are read once for several of them,
    where it `groups_slots`.
    """
    (up, down, up_bias, down_bias), (activation, gated, interleaved, transposed) = experts, kind
    name, alpha, limit, up_offset = activation
    code = _CODES[name] + _EXCHANGED * transposed + _GATED * gated + _INTERLEAVED * interleaved
    up_scales = down_scales = None
    if isinstance(up, BlockScaled) or isinstance(down, BlockScaled):
        if not _takes_scales(up, down):
            return None
        code += _UP_EXPONENTS * _has_exponents(up) + _DOWN_EXPONENTS * _has_exponents(down)
        code += _HALVES_APART * (up.parts == 2)
        up, up_scales, down, down_scales = up.data, up.scale_inv, down.data, down.scale_inv
    num_tokens, top_k = ids.shape
    if decode_pays(num_tokens, top_k, up, down, _CODE_BYTES):
        code += _BY_SLOT
    elif not groups_slots(num_tokens, top_k, up.shape[0], up_scales is not None):
        return None
    is_plain = up_scales is None and up_bias is None and down_bias is None
    if is_plain and loras is None and (alpha, limit, up_offset) == _NO_PARAMETERS:
        return _DECODE_PLAIN(x, ids, weights, up, down, code)
    limit = inf if limit is None else limit
    given = x, ids, weights, up, down, code, up_scales, down_scales, up_bias, down_bias, alpha, limit, up_offset
    if loras is None:
        return _DECODE(*given)
    up_lora, down_lora, adapters = loras
    up_a, up_b, up_scaling = up_lora or _NO_LORA
    down_a, down_b, down_scaling = down_lora or _NO_LORA
    return _DECODE_LORA(*given, up_a, up_b, down_a, down_b, up_scaling, down_scaling, adapters)


def decode_directly(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, kind: Kind, loras: Optional[Loras] = None
) -> Optional[Tensor]:
    """`decode_experts` for arguments that nobody has checked, as a caller of `grouped_mm_experts` gave them.

    None if anything calls for more: other tokens, tensors, gradients, or somebody who traces, transforms or watches.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    if _compat.is_watched() or _compat.in_transform() or _compat.has_tangents():
        return None
    up, down, up_bias, down_bias = experts
    scales = ()
    if isinstance(up, BlockScaled) and isinstance(down, BlockScaled):
        up, down, scales = up.data, down.data, (up.scale_inv, down.scale_inv)
    tensors = x, ids, weights, up, down, *scales
    if up_bias is not None or down_bias is not None:
        tensors += tuple(bias for bias in (up_bias, down_bias) if bias is not None)
    if loras is not None:
        up_lora, down_lora, adapters = loras
        factors = _factors_of(up_lora, down_lora)
        if factors is None:
            return None
        tensors += factors if adapters is None else (*factors, adapters)
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES or not tensor.is_cuda:
            return None
    if scales and any(map(_requires_grad, (up, down, *scales))):  # an error, with gradients enabled or not
        return None
    if torch.is_grad_enabled() and any(map(_requires_grad, tensors)) or torch.is_autocast_enabled("cuda"):
        return None
    if ids.dim() != 2 or up.dim() != 3:
        return None
    try:
        return decode_experts(x, ids, weights, experts, kind, loras)
    except NotImplementedError:  # of the dispatcher, for a layout that the op has no kernel for
        return None
