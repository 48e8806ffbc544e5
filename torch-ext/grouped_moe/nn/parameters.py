"""What the parameters of a grouped layer are made of: its arguments, and checkpoints of either form."""

from typing import Any, Dict, Sequence

import torch
from torch import nn

from ..common import checks
from . import frozen
from .packing import stack

FLAGS = {  # of `GroupedLinear` but `bias`, and their defaults
    "scale_bias": False, "single_grouped_weight": True, "single_grouped_bias": True, "accumulate_into_main_grad": False,
    "delay_wgrad": False,
}  # fmt: skip


def check_arguments(num_groups, in_features, out_features, bias, scale_bias, dtype, init_method) -> None:
    """Raises TypeError or ValueError that names the argument of `GroupedLinear`."""
    sizes = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    checks.check_num_groups("num_groups", num_groups)
    if scale_bias and not bias:
        raise ValueError("scale_bias: expected False without a bias, got True")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating-point torch.dtype, got {dtype!r}")
    if dtype is not None and dtype.itemsize == 1:
        raise TypeError(f"dtype: expected one of two bytes or more, got {dtype}; `from_block_scaled` makes FP8 layers")
    if init_method is not None and not callable(init_method):
        raise TypeError(f"init_method: expected a callable, got {type(init_method).__name__}")


def fit_checkpoint(module: nn.Module, state_dict: Dict[str, Any], prefix: str, *rest: Any) -> None:
    """A hook before `load_state_dict`: gives entries of either form the module's keys, and refuses other dtypes.

    rest: what else PyTorch calls a hook with. The last is the list of errors.
    """
    names = {kind: names for kind, names in module._names.items() if module._of(kind)}
    _translate(state_dict, prefix, names, module.num_groups)
    if type(module).get_extra_state is nn.Module.get_extra_state:
        state_dict.pop(f"{prefix}_extra_state", None)  # TransformerEngine's
    frozen.replace_misfits(state_dict, prefix, module, rest[-1])


def _translate(state_dict: Dict[str, Any], prefix: str, names: Dict[str, Sequence[str]], groups: int) -> None:
    """Gives entries the keys of a module's form. What fits neither form is left for torch to complain about.

    names: of the module's parameters by their kind, "weight" or "bias".
    """
    for kind, own in names.items():
        keys = [prefix + name for name in own]
        one, many = prefix + kind, [f"{prefix}{kind}{group}" for group in range(groups)]
        if keys == [one] and one not in state_dict and all(key in state_dict for key in many):
            if len({state_dict[key].shape for key in many}) == 1:
                state_dict[one] = stack([state_dict.pop(key) for key in many])
        elif keys == many and one in state_dict and not any(key in state_dict for key in many):
            if state_dict[one].dim() and len(state_dict[one]) == groups:
                whole = state_dict.pop(one)  # of a DTensor that is sharded by groups one can be taken, not all at once
                state_dict.update((key, whole[group]) for group, key in enumerate(many))
