"""The table of kernels for each product: which backends have one, in order of preference, and what they take."""

import importlib
from functools import lru_cache
from typing import Any, Callable, NamedTuple


@lru_cache(maxsize=None)
def launcher_of(product: str, problem: NamedTuple) -> Callable[..., Any]:
    """The launcher for a problem of a product; of rows of 8-bit floats, one of those that `triton.codes` allows.

    Kernels for Hopper are asked first, then those for plain or for scaled weights. A product's module has the class
    `Launcher`, made of the problem and called with tensors. It has `supports(problem)` unless it takes every problem.
    """
    any_device = "triton" if getattr(problem, "scales", None) is None else "block_scaled"
    backends = ("hopper", any_device) if problem.spec.hopper else (any_device,)
    modules = (importlib.import_module(f".{backend}.{product}", __package__) for backend in backends)
    return next(m for m in modules if not hasattr(m, "supports") or m.supports(problem)).Launcher(problem)
