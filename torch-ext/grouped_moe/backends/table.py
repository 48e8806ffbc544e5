"""The table of kernels for each product: which backends have one, in order of preference, and what they support."""

import importlib
from functools import lru_cache
from typing import Any, Callable, NamedTuple

PREFERENCE = ("hopper", "triton", "block_scaled")  # packages beside this module, which have a module per product


@lru_cache(maxsize=None)
def launcher_of(product: str, problem: NamedTuple) -> Callable[..., Any]:
    """The launcher for a problem of a product: "gemm", "up_proj", "down_dgrad" or "wgrad".

    A module of a product has `supports(problem)` and the class `Launcher`, made of the problem and called with tensors.
    """
    for backend in PREFERENCE:
        if backend == "hopper" and not problem.spec.hopper:
            continue
        module = importlib.import_module(f".{backend}.{product}", __package__)
        if module.supports(problem):
            return module.Launcher(problem)
    raise RuntimeError(f"{product}: no kernel for {problem}")
