"""The table of kernels for each product: which backends have one, in order of preference, and what they support."""

import importlib
from functools import lru_cache
from typing import Any, Callable, NamedTuple, Optional

PREFERENCE = ("hopper", "triton", "block_scaled")  # packages beside this module, which have a module per product
_OF_CODES = ("quantized_gemm", "quantized_up_proj")  # products of rows of 8-bit floats, which are of scaled weights


@lru_cache(maxsize=None)
def find_launcher(product: str, problem: NamedTuple) -> Optional[Callable[..., Any]]:
    """The launcher for a problem of a product, or None if no backend supports it.

    A module of a product has `supports(problem)` and the class `Launcher`, made of the problem and called with tensors.
    """
    for backend in PREFERENCE:
        if backend == "hopper" and not problem.spec.hopper or backend == "triton" and product in _OF_CODES:
            continue
        module = importlib.import_module(f".{backend}.{product}", __package__)
        if module.supports(problem):
            return module.Launcher(problem)
    return None


@lru_cache(maxsize=None)
def launcher_of(product: str, problem: NamedTuple) -> Callable[..., Any]:
    """The launcher for a problem of a product that has one: "gemm", "up_proj", "down_dgrad" or "wgrad"."""
    launcher = find_launcher(product, problem)
    if launcher is None:
        raise RuntimeError(f"{product}: no kernel for {problem}")
    return launcher
