"""The Triton backend: what makes the kernels' operands and results. Importing it imports Triton."""

from .codes import quantizes
from .decode import decode, is_decode
from .exchange import pack_rows, place_rows, plan_exchange, take_slots, unpack_rows
from .experts import down_dgrad, up_proj
from .factors import pack_factors, unpack_grads
from .gemm import gemm, wgrad
from .low_rank import project, project_backward
from .permute import combine, combine_grad, gather_rows
from .routing import route, split_rows
from .sums import bias_grads, num_bias_dots, sum_dots

__all__ = [
    "bias_grads", "combine", "combine_grad", "decode", "down_dgrad", "gather_rows", "gemm", "is_decode",
    "num_bias_dots", "pack_factors", "pack_rows", "place_rows", "plan_exchange", "project", "project_backward",
    "quantizes", "route", "split_rows", "sum_dots", "take_slots", "unpack_grads", "unpack_rows", "up_proj", "wgrad",
]  # fmt: skip
