"""Backends: the products and passes that ops are made of, once in torch for CPUs, once in Triton for accelerators.

Each backend is a module with these functions, whose docstrings in `triton` say what they take and compute; those of
other backends say in one line what it is, and what differs:
    routes and groups   route, split_rows                          -> `rows.Rows`
    products            gemm, up_proj, down_dgrad, wgrad, project, project_backward
    factors of LoRA     pack_factors, unpack_grads
    passes over rows    combine, combine_grad, gather_rows, bias_grads, sum_dots, num_bias_dots
    between ranks       plan_exchange, pack_rows, unpack_rows, place_rows, take_slots
    few tokens          is_decode; decode, not in torch
    8-bit rows          quantizes
`table` finds the kernel of a product in the modules `launchers`, in order of preference: Gluon's in `hopper`, Triton's
in `triton`, and those of scaled weights in `block_scaled`. The CUDA build has `native` ops for few tokens and routes,
with the Triton backend for all else.
"""

import importlib
from functools import lru_cache
from types import ModuleType

from torch import Tensor

from ..common.device import device_type
from .native.fakes import IS_BUILT

_NAMES = {"cpu": "torch", "cuda": "native.backend" if IS_BUILT else "triton", "xpu": "triton"}


def backend_of(tensor: Tensor) -> ModuleType:
    """The backend for the device that holds `tensor`."""
    return _load(device_type(tensor))


@lru_cache(maxsize=None)
def _load(device_type: str) -> ModuleType:
    """Imported on first use: a machine without Triton has no use for the other one."""
    return importlib.import_module(f"{__name__}.{_NAMES[device_type]}")
