"""A module's weight as 8-bit codes and their scales: parameters without a gradient, which nothing may cast."""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..block_scaled import CODES, PRODUCTS, BlockScaled, check_scaled, quantize_blocks
from ..common import checks

SCALES = "weight_scale_inv"  # the name of the scales' parameter, as in checkpoints
NAMES = ("weight", SCALES)
_FIELDS = ("data", "scale_inv")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element


def quantize_groups(weight: Tensor, block: Tuple[int, int], parts: int) -> BlockScaled:
    """`quantize_blocks` of a weight (G, N, K), with intermediates in fp32 of one group at a time."""
    groups = [quantize_blocks(group[None], block, parts) for group in weight]
    data = torch.cat([_bits(group.data) for group in groups]).view(CODES)  # autocast would refuse codes
    return groups[0]._replace(data=data, scale_inv=torch.cat([group.scale_inv for group in groups]))


def check_freezes(module: nn.Module, products: object) -> None:
    """Raises ValueError or RuntimeError if a `GroupedLinear` cannot have a frozen weight of such products."""
    if products not in PRODUCTS:
        raise ValueError(f"products: expected one of {', '.join(PRODUCTS)}, got {products!r}")
    for name in ("accumulate_into_main_grad", "delay_wgrad"):
        if getattr(module, name):
            raise ValueError(f"{name}: expected False with a block-scaled weight, which takes no gradient, got True")
    if not module.single_grouped_weight:
        raise ValueError("single_grouped_weight: expected True, for a block-scaled weight of all groups, got False")
    if SCALES in module._parameters:
        raise RuntimeError("quantize_blocks_: the weight is block-scaled already")
    for name in NAMES:
        if hasattr(module, name) and name not in module._parameters:
            raise ValueError(f"{name}: expected a parameter, got what a parametrization, pruning or others put there")
    if getattr(module.weight, "placements", None) is not None:
        raise ValueError("weight: expected a whole tensor, got a DTensor; quantize it before you call fully_shard")


def check_given(weight: object, bias: Optional[Tensor]) -> None:
    """Raises TypeError or ValueError that names the argument of `GroupedLinear.from_block_scaled` at fault."""
    if not isinstance(weight, BlockScaled):
        raise TypeError(f"weight: expected a BlockScaled, got {type(weight).__name__}")
    check_scaled("weight", weight, weight.data, "weight.data", False)
    if bias is not None:
        checks.check_operand("bias", bias, weight.shape[:2], "(G, N)", weight.data.device, None, "weight.data")


def register(module: nn.Module, weight: BlockScaled) -> Dict[str, Any]:
    """Makes its tensors parameters of a module, and returns its other fields."""
    options = weight._asdict()
    for name, field in zip(NAMES, _FIELDS):
        module.register_parameter(name, nn.Parameter(options.pop(field), False))
    return options


def weight_of(module: nn.Module, detached: bool) -> BlockScaled:
    """The weight of a `GroupedLinear`. Raises ValueError if it is computed, as by peft's sum of codes and adapters."""
    for name in NAMES:
        if is_parametrized(module, name):
            raise ValueError(f"{name}: expected a parameter, got a parametrization; call the layer with a LoRA instead")
    tensors = [getattr(module, name) for name in NAMES]
    return BlockScaled(*(tensor.detach() if detached else tensor for tensor in tensors), **module._scaled)


def described(options: Dict[str, Any]) -> List[str]:
    """The options for a repr: those that are not the default, and the block always."""
    defaults = BlockScaled._field_defaults
    return [f"{name}={value!r}" for name, value in options.items() if name == "block" or value != defaults[name]]


def without_casts(fn: Callable[[Tensor], Tensor], kept: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of a module's tensors, such as what `to` moves and casts them by, that only moves those kept.

    A cast would lose codes' scales or, of the scales, digits. Casts of a whole module leave integers as they are, so
    these tensors are shown as integers.
    """

    def apply(tensor: Tensor) -> Tensor:
        if not any(tensor is each for each in kept):
            return fn(tensor)
        bits = _bits(tensor)
        moved = fn(bits)
        return (moved if moved.dtype == bits.dtype else bits.to(moved.device)).view(tensor.dtype)

    return apply


def _bits(tensor: Tensor) -> Tensor:
    """Its memory as integers."""
    return tensor.detach().view(_BITS[tensor.element_size()])


def as_integers(state: Dict[str, Any]) -> Dict[str, Any]:
    """A module's state for pickle, which writes tensors of 8-bit floats, but does not read them (PyTorch 2.13)."""
    parameters = state["_parameters"]
    dtypes = {name: parameters[name].dtype for name in NAMES}
    integers = {name: nn.Parameter(_bits(parameters[name]), False) for name in NAMES}
    return {**state, "_parameters": {**parameters, **integers}, "_dtypes": dtypes}


def from_integers(state: Dict[str, Any]) -> Dict[str, Any]:
    """The inverse of `as_integers`; any other state as it is."""
    if "_dtypes" not in state:
        return state
    state, parameters = dict(state), dict(state["_parameters"])
    for name, dtype in state.pop("_dtypes").items():
        parameters[name] = nn.Parameter(parameters[name].detach().view(dtype), False)
    return {**state, "_parameters": parameters}


def replace_misfits(state_dict: Dict[str, Any], prefix: str, module: nn.Module, errors: List[str]) -> None:
    """Replaces entries that a copy into the module would change by the module's own, and adds an error for each.

    They are codes for a plain weight, a plain weight for codes, and scales for ones of fewer digits.
    """
    for name in [*module._names["weight"], SCALES]:
        given, own = state_dict.get(prefix + name), module._parameters.get(name)
        if not isinstance(given, Tensor) or own is None or given.dtype == own.dtype:
            continue
        wanted = _wanted_dtype(name, given, own)
        if wanted is not None:
            state_dict[prefix + name] = own
            errors.append(f"{prefix}{name}: expected {wanted}, got {given.dtype}")


def _wanted_dtype(name: str, given: Tensor, own: Tensor) -> Optional[str]:
    """What a tensor of a checkpoint has to be, None if it is that."""
    if name == SCALES:
        if own.dtype != torch.float32:
            return f"scales in {own.dtype}"
        return (
            None if given.dtype.is_floating_point else "floating-point scales (exponents: .view(torch.float8_e8m0fnu))"
        )
    if own.dtype == CODES:
        return f"codes in {CODES}, as the weight is block-scaled"
    return "a plain weight, or quantize_blocks_() of this layer before loading" if given.dtype == CODES else None
