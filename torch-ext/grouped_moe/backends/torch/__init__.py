"""The CPU backend: the same contract as the Triton backend, one GEMM per group that has rows.

Roundings differ: in two-byte dtypes each product is stored, rounded, before activations, their derivatives, sums with
low-rank parts or scaled ranks are made of it. Kernels there make these of the accumulator.
"""

from .exchange import pack_rows, place_rows, plan_exchange, take_slots, unpack_rows
from .experts import down_dgrad, up_proj
from .linear import (
    bias_grads,
    gemm,
    num_bias_dots,
    pack_factors,
    project,
    project_backward,
    sum_dots,
    unpack_grads,
    wgrad,
)
from .permute import combine, combine_grad, gather_rows
from .routing import route, split_rows

__all__ = [
    "bias_grads", "combine", "combine_grad", "down_dgrad", "gather_rows", "gemm", "is_decode",
    "num_bias_dots", "pack_factors", "pack_rows", "place_rows", "plan_exchange", "project", "project_backward",
    "quantizes", "route", "split_rows", "sum_dots", "take_slots", "unpack_grads", "unpack_rows", "up_proj", "wgrad",
]  # fmt: skip


def is_decode(block, num_tokens, top_k) -> bool:
    """Whether `decode` is for a call; it never is on a CPU."""
    return False


def quantizes(block, x, num_rows, trains) -> bool:
    """Whether products are made with rows of 8-bit floats; they never are on a CPU."""
    return False
