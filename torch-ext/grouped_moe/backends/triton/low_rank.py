"""Rows projected on the ranks of a LoRA; of a gradient with b's gradient, in one kernel where that is faster."""

from functools import lru_cache
from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from ...common.device import DeviceSpec, dot_precision, spec_of
from ...common.numbers import power_of_two
from ...rows import Rows, max_tiles, unit_rows
from ..kernels.low_rank import Factor, project_kernel
from ..kernels.low_rank_backward import project_backward_kernel, sum_projected_kernel
from .factors import factor_of
from .gemm import wgrad
from .launch import Kernel
from .quantize import BLOCK, QuantizedRows, values_and_scales

_MAX_COLUMNS = 128  # of a tile
_TALL = 64  # rows of a tile from where on its products, not the latency of its loads, take the time
_LONG_STEP = 512  # bytes of a row
_FEW_GROUPS = 32  # whose tiles of gathered rows are few: each has to hide its own loads
# Of the kernel that makes both results of a gradient.
_MANY_ROWS = 128  # of a tile, the tallest: from there on a group's rows are read once for both results
_BLOCK_M = 64  # rows of a step
_LEAST_CHUNK = 512  # rows of a chunk, the last one of an expert apart
_SUM_ROWS, _SUM_COLUMNS = 64, 128  # of a program that adds up partial sums


@lru_cache(maxsize=None)
def _project_kernel(
    spec: DeviceSpec, dtype: torch.dtype, precision: str, num_groups: int, block_m: int, k: int, factor: Factor,
    factor_dtype: torch.dtype, top_k: int, of_tokens: bool, is_quantized: bool,
) -> Kernel:  # fmt: skip
    """dtype: of z. k: columns of x. is_quantized: whether x is of codes.

    Short tiles take few, long steps, and few columns, so that many run at once. Of tall ones of gathered rows three
    are to fit a processor; of few groups two, with more stages (benchmarks/NOTES.md).
    """
    itemsize, block_n = dtype.itemsize, min(_MAX_COLUMNS, power_of_two(factor.R, 16))
    programs = 1  # that are to fit a processor
    if block_m < _TALL:
        block_n, stages = min(block_n, block_m), 3
        block_k = min(_LONG_STEP // itemsize, power_of_two(k, 16))
    elif itemsize > 2:
        block_k, stages = 32, 2
    elif not of_tokens:
        block_k, stages = 64, 4
    elif num_groups <= _FEW_GROUPS:
        block_k, stages, programs = 64, 4, 2
    else:
        block_k, stages, programs = 64, 3 if block_n >= 64 else 2, 3
    if is_quantized:  # a step has one scale for each row
        block_k = min(block_k, BLOCK)
    # Of AMD's stages, one lies in registers.
    buffer = block_k * (block_m * itemsize + block_n * factor_dtype.itemsize)
    while (stages - (spec.warp_size == 64)) * buffer * programs > spec.shared_memory and stages > 2:
        stages -= 1
    constants = {
        "NUM_EXPERTS": num_groups, "K": k, "FACTOR": factor, "TOP_K": top_k, "OF_TOKENS": of_tokens,
        "PRECISION": precision, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k,
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
    layout, k, is_quantized = factor_of(factor), x.shape[1], isinstance(x, QuantizedRows)
    values, x_scales = values_and_scales(x)
    z = values.new_empty(rows.num_rows, layout.R, dtype=x.dtype)
    scaled = None if scales is None else torch.empty_like(z)
    if rows.num_rows:
        spec = spec_of(values)
        top_k = rows.top_k if of_tokens or rows.adapters is not None or scales is not None else 0
        kernel = _project_kernel(
            spec, x.dtype, dot_precision(x.dtype, spec), rows.num_groups, rows.block_m, k, layout, factor.dtype, top_k,
            of_tokens, is_quantized,
        )  # fmt: skip
        tiles = max_tiles(rows.num_rows, rows.num_groups, rows.block_m)
        kernel(
            (tiles, -(-z.shape[1] // kernel.constants["BLOCK_N"]), 1), values, *values.stride(), x_scales, factor,
            rows.adapters, z, scales, scaled, rows.row_to_slot if top_k else None, rows.schedule, scaling,
        )  # fmt: skip
    return z, scaled


def _backward_tile(
    spec: DeviceSpec, dtype: torch.dtype, num_groups: int, block_m: int, n: int, block_r: int, of_tokens: bool
) -> Optional[Tuple[int, int]]:
    """BLOCK_N, num_stages of the kernel that reads dy once for both results; None where one for each is faster.

    Nearly as many programs as processors are needed, and many rows for each. The kernel reads dy once less, and writes
    and reads a partial sum for each block of columns, which may cost half of that. The second read of gathered rows
    hits L2, so one pass pays only with 16 ranks or fewer. With more than 32, masks of columns would spill registers
    (Triton 3.8).
    """
    if block_m < _MANY_ROWS or dtype.itemsize > 2 or of_tokens and block_r > 16:
        return None
    for block_n in (512, 256, 128):
        num_programs = num_groups * -(-n // block_n)
        for stages in (3, 2):
            step = 2 * _BLOCK_M * (block_n + block_r)
            rest = block_r * (2 * block_n + 4 * _BLOCK_M)  # the factor, and results on their way to memory
            fits = stages * step + rest <= spec.shared_memory
            masks_columns = n % block_n > 0 and block_r > 32
            if fits and not masks_columns and block_n >= 8 * block_r and 10 * num_programs >= 9 * spec.num_sms:
                return block_n, stages
    return None


@lru_cache(maxsize=None)
def _backward_kernels(
    spec: DeviceSpec, dtype: torch.dtype, num_groups: int, block_m: int, n: int, factor: Factor, top_k: int,
    of_tokens: bool,
) -> Optional[Tuple[Kernel, Kernel]]:  # fmt: skip
    """The kernel that makes both results, and the one that adds up its partial sums; None where there is no tile.

    dtype, n: of dy, and its columns. top_k: of routed rows, if the tokens matter.
    """
    block_r = power_of_two(factor.R, 16)
    tile = _backward_tile(spec, dtype, num_groups, block_m, n, block_r, of_tokens)
    if tile is None:
        return None
    block_n, stages = tile
    both = {
        "NUM_EXPERTS": num_groups, "EXPERTS_POW2": power_of_two(num_groups), "N": n, "LEAST_CHUNK": _LEAST_CHUNK,
        "BLOCK_R": block_r,
    }  # fmt: skip
    constants = {
        **both, "FACTOR": factor, "TOP_K": top_k if of_tokens else 0, "BLOCK_M": _BLOCK_M, "BLOCK_N": block_n,
    }  # fmt: skip
    # On NVIDIA a load that waits for its row indices starts two iterations late.
    late = 2 if of_tokens and spec.is_nvidia else 0
    options = {"num_warps": 8 if block_n == 512 else 4, "num_stages": stages + late}
    sums = {
        **both, "NUM_PARTIALS": -(-n // block_n), "R": factor.R, "RANK": factor.RANK, "TOP_K": top_k,
        "BLOCK_M": _SUM_ROWS, "BLOCK_N": _SUM_COLUMNS,
    }  # fmt: skip
    return Kernel(project_backward_kernel, constants, options), Kernel(sum_projected_kernel, sums)


def project_backward(
    dy: Union[Tensor, QuantizedRows], factor: Tensor, rows: Rows, *, scaling: float, of_tokens: bool = False,
    projected: Optional[Tensor] = None, grad: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    """z[r] = scaling factor[l, e]^T dy[r] for each adapter l, and grad[e] = sum of dy[r] projected[r]^T over rows of e.

    dy: (rows, N), or (T, N), of whose rows those of the tokens are taken, with of_tokens; of 8-bit floats without grad
    alone. factor: (L, E, N, r). projected: (rows, R), grad: (E, N, R), contiguous; both or none. Returns z, (rows, R),
    as `project` does: the same bits with grad and without.
    """
    kernels = None
    if not isinstance(dy, QuantizedRows):
        dy, spec, layout, n = unit_rows(dy), spec_of(dy), factor_of(factor), dy.shape[1]
        top_k = rows.top_k if of_tokens or rows.adapters is not None else 0
        kernels = _backward_kernels(spec, dy.dtype, rows.num_groups, rows.block_m, n, layout, top_k, of_tokens)
    if kernels is None:
        if grad is not None:
            wgrad(dy, projected, rows, grad, lhs_of_tokens=of_tokens)
        return project(dy, factor, rows, scaling=scaling, of_tokens=of_tokens)[0]
    (both, add_up), z = kernels, dy.new_empty(rows.num_rows, layout.R)
    n_blocks, sum_blocks = -(-n // both.constants["BLOCK_N"]), -(-rows.num_rows // _SUM_ROWS)
    further = (rows.num_groups - 1) // 2
    partials, chunk_grads = dy.new_empty(n_blocks, *z.shape, dtype=torch.float32), None
    if grad is not None and further:
        chunk_grads = grad.new_empty(2 * further, *grad.shape[1:], dtype=torch.float32)
        sum_blocks += rows.num_groups * -(-n // _SUM_COLUMNS)
    both(
        (n_blocks, rows.num_groups + further, 1), dy, dy.stride(0), factor, projected, partials, grad, chunk_grads,
        rows.row_to_slot if of_tokens else None, rows.schedule, rows.num_rows,
    )  # fmt: skip
    add_up(
        (sum_blocks, 1, 1), partials, rows.adapters, z, chunk_grads, grad, rows.row_to_slot, rows.schedule,
        rows.num_rows, scaling,
    )  # fmt: skip
    return z
