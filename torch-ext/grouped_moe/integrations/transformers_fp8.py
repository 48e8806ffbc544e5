"""transformers' FP8 experts: their weights as the block takes them."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..block_scaled import CODES, BlockScaled, check_scaled
from ..common import _compat
from .transformers_gate import local_parameter, local_part

_FOUND = "_grouped_moe_plain_dtype"  # the attribute of a weight that was found to be no codes


def is_fp8(experts: nn.Module) -> bool:
    """Whether its class is for weights that have scales."""
    return "down_proj_scale_inv" in experts._parameters


def has_scales(experts: nn.Module, name: str) -> bool:
    """Whether the weight of that name is in FP8: transformers leaves one as it is whose extents are no whole blocks."""
    if not is_fp8(experts):
        return False
    if is_parametrized(experts, name):
        weight = getattr(experts.parametrizations[name], "original", None)  # None if it is made of several tensors
    else:
        weight = getattr(experts, name)
    if weight is None or weight.dtype.itemsize == 1:
        return True
    block = getattr(experts, "block_size", None)
    if block is None or not any(extent % size for extent, size in zip(weight.shape[1:], block)):
        return True
    if torch.compiler.is_compiling() or getattr(weight, _FOUND, None) is weight.dtype:
        return False
    return _holds_codes(weight)


def _holds_codes(weight: Tensor) -> bool:
    """Whether a weight that is wider than codes has their values, as after a cast of the module: the scales are lost.

    Found out by some of the values, where they can be read. Codes are spread over the whole range of e4m3, up to 448;
    weights are neither as large nor as coarse. That it has none is noted on the weight, with its dtype.
    """
    part = local_part(weight).detach()
    has_no_values = type(part) is not Tensor or part.is_meta
    if has_no_values or (part.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    with _compat.real_values():  # a selective checkpoint would count what is asked once
        some = part[:1, :64, :64].float()
        largest = float(some.abs().amax()) if some.numel() else 0.0
        if largest > 16.0 and torch.equal(some.to(CODES).float(), some):
            return True
    if largest:  # zeros are not loaded yet
        setattr(weight, _FOUND, weight.dtype)
    return False


def scaled_weight(experts: nn.Module, name: str) -> BlockScaled:
    """The weight of that name, frozen, in its blocks; of DTensors the rank's own part.

    The scales of a gate_up_proj are those of gate and then those of up, which checkpoints store apart. Raises
    ValueError for weights of a format that the block does not take, for those in whose place something else was put,
    such as peft's sum of codes and adapters, and for a rank's part that starts or ends within a block.
    """
    if is_parametrized(experts, name):
        raise ValueError(
            f"{name}: expected the codes of an FP8 weight, got a parametrization of them; call "
            "register_experts_implementation before peft wraps the model, with one adapter that it has factors for"
        )
    data, scales = (local_parameter(experts, each).detach() for each in (name, f"{name}_scale_inv"))
    if data.dtype is not CODES:
        raise ValueError(
            f"{name}: expected FP8 experts in {CODES}, got {data.dtype}; if the model was cast to that dtype, load it "
            "anew: the codes have lost their scales; else choose another experts_implementation, such as 'grouped_mm'"
        )
    n, k = data.shape[1:]
    parts = 2 if name == "gate_up_proj" else 1
    given = getattr(experts, "block_size", None)
    n_block, k_block = block = (n // parts, k) if given is None else tuple(given)
    extent, size = (k, k_block) if name == "down_proj" else (n // parts, n_block)
    whole = getattr(experts, "intermediate_dim", extent)
    if extent != whole and extent % size:
        raise ValueError(
            f"{name}: expected tensor-parallel parts of whole blocks, got {extent} of {whole} for blocks of {size}; "
            "choose a tp_size that leaves whole blocks, or ep_size instead"
        )
    if scales.shape[1] != parts * -(-n // parts // n_block):  # blocks go on from gate to up
        parts, block = 1, (n, k) if given is None else block
    return BlockScaled(data, scales, block, parts)


def check_supported(experts: nn.Module) -> None:
    """Raises ValueError for FP8 experts of a format that the block does not take."""
    names = ("gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj", "down_proj")
    rows = torch.empty((0, 0), device=experts.down_proj.device)
    for name in filter(partial(has_scales, experts), names):
        check_scaled(name, scaled_weight(experts, name), rows, "hidden_states", False)
