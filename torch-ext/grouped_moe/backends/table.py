"""The table of kernels for each product: which backends have one, in order of preference, and what they take."""

import importlib
from functools import lru_cache
from typing import Any, Callable, NamedTuple, Optional


@lru_cache(maxsize=None)
def launcher_of(product: str, problem: NamedTuple) -> Optional[Callable[..., Any]]:
    """The launcher for a problem of a product. None if no kernel takes it; only of rows of 8-bit floats is that so.

    Kernels for Hopper are asked first, then those for plain or for scaled weights. A product's module has the class
    `Launcher`, made of the problem and called with tensors. It has `supports(problem)` unless it takes every problem.
    """
    any_device = "triton" if getattr(problem, "scales", None) is None else "block_scaled"
    for backend in ("hopper", any_device) if problem.spec.hopper else (any_device,):
        module = importlib.import_module(f".{backend}.{product}", __package__)
        if not hasattr(module, "supports") or module.supports(problem):
            return module.Launcher(problem)
    return None
