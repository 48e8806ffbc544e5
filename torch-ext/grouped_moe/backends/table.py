"""The table of kernels for each product: which backends have one, in order of preference, and what they take."""

import importlib
from functools import lru_cache
from typing import Any, Callable, NamedTuple


@lru_cache(maxsize=None)
def launcher_of(product: str, problem: NamedTuple) -> Callable[..., Any]:
    """The launcher for a problem of a product; of rows of 8-bit floats, one of those that `triton.codes` allows.

    Kernels for Hopper are asked first, then those for plain or for scaled weights: each module `launchers` lists its
    `triton.launch.Launcher`s by product.
    """
    any_device = "triton" if getattr(problem, "scales", None) is None else "block_scaled"
    backends = ("hopper", any_device) if problem.spec.hopper else (any_device,)
    tables = (importlib.import_module(f".{backend}.launchers", __package__).LAUNCHERS for backend in backends)
    kinds = (table[product] for table in tables if product in table)
    return next(kind for kind in kinds if kind.supports(problem))(problem)
