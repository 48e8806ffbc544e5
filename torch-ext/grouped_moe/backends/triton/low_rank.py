"""Rows projected on the ranks of a LoRA."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.device import DeviceSpec, dot_precision, spec_of
from ...rows import Rows, max_tiles
from ..kernels.low_rank import project_kernel
from .launch import Kernel

_MAX_COLUMNS = 128  # of a tile


class _Problem(NamedTuple):
    """What the kernel is compiled for: z (rows, n) of x (rows, k), or (T, k) with of_tokens."""

    spec: DeviceSpec
    dtype: torch.dtype
    precision: str
    num_groups: int
    block_m: int
    n: int
    k: int
    rank: int
    top_k: int
    of_tokens: bool
    transposed: bool


@lru_cache(maxsize=None)
def _kernel(problem: _Problem) -> Kernel:
    p = problem
    block_n = min(_MAX_COLUMNS, max(16, 1 << (p.n - 1).bit_length()))
    block_k, stages = (32, 2) if p.dtype.itemsize > 2 else (64, 2 if p.of_tokens else 4)
    constants = {
        "NUM_EXPERTS": p.num_groups, "R": p.n, "K": p.k, "RANK": p.rank, "TOP_K": p.top_k, "OF_TOKENS": p.of_tokens,
        "KN": p.transposed, "PRECISION": p.precision, "BLOCK_M": p.block_m, "BLOCK_N": block_n, "BLOCK_K": block_k,
    }  # fmt: skip
    return Kernel(project_kernel, constants, {"num_warps": 4, "num_stages": stages})


def project(
    x: Tensor, weight: Tensor, rows: Rows, *, transposed: bool, scaling: float, rank: int, of_tokens: bool
) -> Tensor:
    """z[r] = scaling weight[e] x[r], of x[token of r] with of_tokens. Rows of no group are unwritten.

    x: (rows, K) or (T, K), any strides. weight: (E, R, K) or, transposed, (E, K, R), contiguous. Returns (rows, R).
    With `rows.adapters`, z[r, c] is 0 unless the row's adapter is c // rank.
    """
    n, k = weight.shape[2 if transposed else 1], x.shape[1]
    z = x.new_empty((rows.num_rows, n))
    if rows.num_rows:
        spec = spec_of(x)
        top_k = rows.top_k if of_tokens or rows.adapters is not None else 0
        problem = _Problem(
            spec, x.dtype, dot_precision(x.dtype, spec), rows.num_groups, rows.block_m, n, k,
            rank if rows.adapters is not None else n, top_k, of_tokens, transposed,
        )  # fmt: skip
        kernel = _kernel(problem)
        tiles = max_tiles(rows.num_rows, rows.num_groups, rows.block_m)
        kernel(
            (tiles, -(-n // kernel.constants["BLOCK_N"]), 1), x, *x.stride(), weight, rows.adapters, z,
            rows.row_to_slot if top_k else None, rows.schedule, scaling,
        )  # fmt: skip
    return z
