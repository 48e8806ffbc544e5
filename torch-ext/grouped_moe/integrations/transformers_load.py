"""Looks at transformers' models as they are built, before their weights load, for experts that will not run as asked.

transformers asks an experts implementation for nothing until the first forward. What it does before is to put modules
into modules, of which PyTorch tells through its hook on the registration of modules.
"""

import warnings
from typing import Dict, Optional, Tuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .transformers_fp8 import check_supported, is_fp8
from .transformers_gate import check_known

Share = Tuple[int, int]  # of the slots: numerator and denominator

_shares: Dict[str, Optional[Share]] = {}


def watch(name: str, share: Optional[Share]) -> None:
    """Has models that are built with experts_implementation=`name` looked at from now on. share: its capacity."""
    if not _shares:
        register_module_module_registration_hook(_look_at)
    _shares[name] = share


def implementation_of(module: Optional[nn.Module]) -> Optional[str]:
    """The name that the module's own config asks for, if it is one of ours."""
    config = None if module is None else module.__dict__.get("config")
    name = getattr(config, "_experts_implementation", None)
    return name if isinstance(name, str) and name in _shares else None


def share_of(module: nn.Module) -> Optional[Share]:
    """The share with which the implementation that the module asks for was registered; None for all slots."""
    return _shares.get(implementation_of(module))


def goes_by_interface(module: nn.Module) -> bool:
    """Whether its class is under transformers' @use_experts_implementation, which writes its options on each module."""
    return "is_transposed" in module.__dict__


def _look_at(parent: nn.Module, name: str, module: Optional[nn.Module]) -> None:
    """The hook: `module` becomes the child `name` of `parent`, which a compiler that traces this knows half-built."""
    if torch.compiler.is_compiling() or module is None:
        return
    if implementation_of(module) is not None and goes_by_interface(module):
        if is_fp8(module):
            check_supported(module)
        check_known(module)
    # The child that a quantizer replaces still has the config that its successor may lack. A ScriptModule has no dict.
    replaced = parent._modules[name] if name in parent._modules else None
    asked = implementation_of(parent) or implementation_of(replaced)
    children = list(module.named_modules(prefix=name)) if asked is not None else []
    if any(goes_by_interface(child) for _, child in children):
        return
    kinds = [(path.rpartition(".")[2], type(child).__name__) for path, child in children]
    for kind in {kind for last, kind in kinds if last == "experts" or ("Experts" in kind and "Shared" not in kind)}:
        warnings.warn(
            f"grouped_moe: experts_implementation={asked!r} has no effect on {kind}, which does not go by "
            "transformers' ExpertsInterface and keeps its own code",
            stacklevel=2,
        )
