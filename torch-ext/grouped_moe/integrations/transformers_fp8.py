"""transformers' FP8 experts: their weights as the block takes them."""

from functools import partial

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..block_scaled import CODES, BlockScaled, check_scaled
from .transformers_gate import local_parameter, local_part

_PLAIN = "_grouped_moe_plain_weights"  # the attribute of a module that names those found to be no codes


def is_fp8(experts: nn.Module) -> bool:
    """Whether its class is for weights that have scales."""
    return "down_proj_scale_inv" in experts._parameters


def has_scales(experts: nn.Module, name: str) -> bool:
    """Whether the weight of that name is in FP8: transformers leaves one as it is whose extents are no whole blocks."""
    if not is_fp8(experts):
        return False
    weight = experts.parametrizations[name].original if is_parametrized(experts, name) else getattr(experts, name)
    if weight.dtype.itemsize == 1:
        return True
    block = getattr(experts, "block_size", None)
    in_blocks = block is None or not any(extent % size for extent, size in zip(weight.shape[1:], block))
    return in_blocks or _holds_codes(experts, name, weight)


def _holds_codes(experts: nn.Module, name: str, weight: torch.Tensor) -> bool:
    """Whether a weight that is wider than codes has their values, as after a cast of the module: the scales are lost.

    Found out by some of the values, where they can be read, once for each module.
    """
    weight, plain = local_part(weight).detach(), experts.__dict__.setdefault(_PLAIN, set())
    unknown = torch.compiler.is_compiling() or type(weight) is not torch.Tensor or weight.is_meta
    if name in plain or unknown or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    some = weight[:1, :64, :64].float()
    if bool(some.any()) and torch.equal(some.to(CODES).float(), some):
        return True
    plain.add(name)
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
            f"{name}: expected FP8 experts in {CODES}, got {data.dtype}; choose another experts_implementation, such "
            "as 'grouped_mm', or, if the model was cast to that dtype, load it anew: the codes have lost their scales"
        )
    n, k = data.shape[1:]
    parts = 2 if name == "gate_up_proj" else 1
    block = getattr(experts, "block_size", None)
    block = (n // parts, k) if block is None else tuple(block)
    extent, size = (k, block[1]) if name == "down_proj" else (n // parts, block[0])
    whole = getattr(experts, "intermediate_dim", extent)
    if extent != whole and extent % size and getattr(experts, "block_size", None) is not None:
        raise ValueError(
            f"{name}: expected tensor-parallel parts of whole blocks, got {extent} of {whole} for blocks of {size}; "
            "choose a tp_size that leaves whole blocks, or ep_size instead"
        )
    if scales.shape[1] != parts * -(-n // parts // block[0]):  # blocks go on from gate to up
        parts, block = 1, (n, k) if getattr(experts, "block_size", None) is None else block
    return BlockScaled(data, scales, block, parts)


def check_supported(experts: nn.Module) -> None:
    """Raises ValueError for FP8 experts of a format that the block does not take."""
    names = ("gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj", "down_proj")
    rows = torch.empty((0, 0), device=experts.down_proj.device)
    for name in filter(partial(has_scales, experts), names):
        check_scaled(name, scaled_weight(experts, name), rows, "hidden_states", False)
