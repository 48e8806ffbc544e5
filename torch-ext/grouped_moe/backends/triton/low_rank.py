"""Rows projected on the ranks of a LoRA, alone or with the gradient of its b."""

from functools import lru_cache
from typing import NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from ...common.device import DeviceSpec, dot_precision, spec_of
from ...operands import FactorLayout, layout_of
from ...rows import Rows, max_tiles, unit_rows
from ..kernels.low_rank import project_backward_kernel, project_kernel, sum_projected_kernel
from .launch import Kernel
from .quantize import BLOCK, QuantizedRows
from .wgrad import wgrad

_MAX_COLUMNS = 128  # of a tile
_TALL = 64  # rows of a tile from where on its products, not the latency of its loads, take the time
_MANY_ROWS = 128  # of a tile, the tallest: from there on a group's rows are read once for both results
_LONG_STEP = 512  # bytes of a row
_BACKWARD_ROWS = 64  # of a step of that kernel
_SUM_ROWS = 64  # of a program that adds up partial sums


class _Problem(NamedTuple):
    """What the kernel is compiled for: z (rows, R) of x (rows, k), or (T, k) with of_tokens.

    dtype: of z. is_quantized: whether x is of codes.
    """

    spec: DeviceSpec
    dtype: torch.dtype
    precision: str
    num_groups: int
    block_m: int
    k: int
    factor: FactorLayout
    factor_dtype: torch.dtype
    top_k: int
    of_tokens: bool
    is_quantized: bool


def factor_constants(factor: FactorLayout) -> dict:
    """The constexprs of a kernel that say how a factor lies: as such, they keep its loads wide at any rank."""
    names = "STRIDE_FL", "STRIDE_FE", "STRIDE_FN", "STRIDE_FR"
    ranks = {"R": factor.padded_rank, "NUM_ADAPTERS": factor.num_adapters, "RANK": factor.rank}
    return {**ranks, **dict(zip(names, factor.strides))}


def _tile(problem: _Problem) -> tuple:
    """BLOCK_N, BLOCK_K, num_stages. Short tiles take few, long steps, and few columns, so that many run at once."""
    p, itemsize = problem, problem.dtype.itemsize
    block_n = min(_MAX_COLUMNS, _power_of_two(p.factor.padded_rank))
    if p.block_m < _TALL:
        block_n, stages = min(block_n, p.block_m), 3
        block_k = min(_LONG_STEP // itemsize, _power_of_two(p.k))
    else:
        block_k, stages = (32, 2) if itemsize > 2 else (64, 2 if p.of_tokens else 4)
    if p.is_quantized:  # a step has one scale for each row
        block_k = min(block_k, BLOCK)
    # Of AMD's stages, one lies in registers.
    buffer = block_k * (p.block_m * itemsize + block_n * p.factor_dtype.itemsize)
    while (stages - (p.spec.warp_size == 64)) * buffer > p.spec.shared_memory and stages > 2:
        stages -= 1
    return block_n, block_k, stages


@lru_cache(maxsize=None)
def _kernel(problem: _Problem) -> Kernel:
    p = problem
    block_n, block_k, stages = _tile(p)
    constants = {
        "NUM_EXPERTS": p.num_groups, "K": p.k, **factor_constants(p.factor), "TOP_K": p.top_k,
        "OF_TOKENS": p.of_tokens, "PRECISION": p.precision, "BLOCK_M": p.block_m, "BLOCK_N": block_n,
        "BLOCK_K": block_k,
    }  # fmt: skip
    return Kernel(project_kernel, constants, {"num_warps": 4, "num_stages": stages})


def project(
    x: Union[Tensor, QuantizedRows], factor: Tensor, rows: Rows, *, scaling: float, of_tokens: bool = False,
    scales: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """z[r] = scaling factor[l, e]^T x[r] for each adapter l, of x[token of r] with of_tokens; and z times scales.

    x: (rows, K) or (T, K), any strides; without of_tokens also of 8-bit floats, which times their scales are rounded to
    x.dtype. factor: (L, E, K, r), any strides and dtype. scales: one per slot of routed rows. Returns z (rows, R), the
    ranks of all adapters side by side, 0 past the last one and, with `rows.adapters`, in those that are not of the
    row's adapter; and the same scaled, None without scales. Rows of no group are unwritten.
    """
    layout, k, is_quantized = layout_of(factor), x.shape[1], isinstance(x, QuantizedRows)
    values, x_scales = x[:2] if is_quantized else (x, None)
    z = values.new_empty((rows.num_rows, layout.padded_rank), dtype=x.dtype)
    scaled = None if scales is None else torch.empty_like(z)
    if rows.num_rows:
        spec = spec_of(values)
        if is_quantized and not spec.float8:
            values = values.view(torch.uint8)
        top_k = rows.top_k if of_tokens or rows.adapters is not None or scales is not None else 0
        problem = _Problem(
            spec, x.dtype, dot_precision(x.dtype, spec), rows.num_groups, rows.block_m, k, layout, factor.dtype, top_k,
            of_tokens, is_quantized,
        )  # fmt: skip
        kernel = _kernel(problem)
        tiles = max_tiles(rows.num_rows, rows.num_groups, rows.block_m)
        kernel(
            (tiles, -(-z.shape[1] // kernel.constants["BLOCK_N"]), 1), values, *values.stride(), x_scales, factor,
            rows.adapters, z, scales, scaled, rows.row_to_slot if top_k else None, rows.schedule, scaling,
        )  # fmt: skip
    return z, scaled


class _BackwardProblem(NamedTuple):
    """What the kernels of `project_backward` are compiled for: dy (rows, n), or (T, n) with of_tokens.

    top_k: of routed rows, if the tokens matter.
    """

    spec: DeviceSpec
    dtype: torch.dtype
    num_groups: int
    block_m: int
    n: int
    factor: FactorLayout
    top_k: int
    of_tokens: bool


class _BackwardTile(NamedTuple):
    """Columns of dy that a program takes, and the stages of its loop over rows."""

    block_n: int
    num_stages: int


@lru_cache(maxsize=None)
def _backward_tile(problem: _BackwardProblem) -> Optional[_BackwardTile]:
    """The tile of the kernel that reads dy once for both results; None where one kernel for each is faster.

    A program takes all rows of a group: nearly as many programs as processors are needed, and many rows. A block of
    columns is read once less, for a partial sum that is written and read: that may cost half of the gain. The second
    read of gathered rows hits L2, so one pass pays only with 16 ranks or fewer.
    """
    p, block_r = problem, _power_of_two(problem.factor.padded_rank)
    if p.block_m < _MANY_ROWS or p.dtype.itemsize > 2 or p.of_tokens and block_r > 16:
        return None
    for block_n in (512, 256, 128):
        num_programs = p.num_groups * -(-p.n // block_n)
        for stages in (3, 2):
            step = 2 * _BACKWARD_ROWS * (block_n + block_r)
            rest = block_r * (2 * block_n + 4 * _BACKWARD_ROWS)  # the factor, and results on their way to memory
            fits = stages * step + rest <= p.spec.shared_memory
            if fits and block_n >= 8 * block_r and 10 * num_programs >= 9 * p.spec.num_sms:
                return _BackwardTile(block_n, stages)
    return None


@lru_cache(maxsize=None)
def _backward_kernels(problem: _BackwardProblem) -> Tuple[Kernel, Kernel]:
    """The kernel that makes both results, and the one that adds up its partial sums."""
    p, tile, block_r = problem, _backward_tile(problem), _power_of_two(problem.factor.padded_rank)
    constants = {
        "N": p.n, **factor_constants(p.factor), "TOP_K": p.top_k if p.of_tokens else 0,
        "BLOCK_M": _BACKWARD_ROWS, "BLOCK_N": tile.block_n, "BLOCK_R": block_r,
    }  # fmt: skip
    # On NVIDIA a load that waits for its row indices starts two iterations late.
    late = 2 if p.of_tokens and p.spec.warp_size == 32 else 0
    options = {"num_warps": 8 if tile.block_n == 512 else 4, "num_stages": tile.num_stages + late}
    sums = {
        "NUM_EXPERTS": p.num_groups, "NUM_PARTIALS": -(-p.n // tile.block_n), "R": p.factor.padded_rank,
        "RANK": p.factor.rank, "TOP_K": p.top_k, "BLOCK_M": _SUM_ROWS, "BLOCK_R": block_r,
    }  # fmt: skip
    return Kernel(project_backward_kernel, constants, options), Kernel(sum_projected_kernel, sums)


def _power_of_two(extent: int) -> int:
    """The least one that covers an extent, and 16, as an extent of a product."""
    return max(16, 1 << (extent - 1).bit_length())


def project_backward(
    dy: Union[Tensor, QuantizedRows], factor: Tensor, rows: Rows, *, scaling: float, of_tokens: bool = False,
    projected: Optional[Tensor] = None, grad: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    """z[r] = scaling factor[l, e]^T dy[r] for each adapter l, and grad[e] = sum of dy[r] projected[r]^T over rows of e.

    dy: (rows, N), or (T, N), of whose rows those of the tokens are taken, with of_tokens; of 8-bit floats without grad
    alone. factor: (L, E, N, r). projected: (rows, R), grad: (E, N, R), contiguous; both or none. Returns z, (rows, R),
    as `project` does: the same bits with grad and without.
    """
    tile = None
    if not isinstance(dy, QuantizedRows):
        dy, spec, layout = unit_rows(dy), spec_of(dy), layout_of(factor)
        top_k = rows.top_k if of_tokens or rows.adapters is not None else 0
        problem = _BackwardProblem(spec, dy.dtype, rows.num_groups, rows.block_m, dy.shape[1], layout, top_k, of_tokens)
        tile = _backward_tile(problem)
    if tile is None:
        if grad is not None:
            wgrad(dy, projected, rows, grad, lhs_of_tokens=of_tokens)
        return project(dy, factor, rows, scaling=scaling, of_tokens=of_tokens)[0]
    z, blocks = dy.new_empty((rows.num_rows, layout.padded_rank)), -(-dy.shape[1] // tile.block_n)
    partials = dy.new_empty((blocks, *z.shape), dtype=torch.float32)
    both, add_up = _backward_kernels(problem)
    both(
        (blocks, rows.num_groups, 1), dy, dy.stride(0), factor, projected, partials, grad,
        rows.row_to_slot if of_tokens else None, rows.schedule, rows.num_rows,
    )  # fmt: skip
    add_up(
        (-(-rows.num_rows // _SUM_ROWS), 1, 1), partials, rows.adapters, z, rows.row_to_slot if rows.top_k else None,
        rows.schedule, rows.num_rows, scaling,
    )  # fmt: skip
    return z
