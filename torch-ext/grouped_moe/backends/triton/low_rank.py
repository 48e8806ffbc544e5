"""Rows projected on the ranks of a LoRA."""

from functools import lru_cache
from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from ...common.device import DeviceSpec, dot_precision, spec_of
from ...common.numbers import power_of_two
from ...operands import pad_rank
from ...rows import Rows, max_tiles
from ..kernels.low_rank import Factor, project_kernel
from .launch import Kernel
from .quantize import BLOCK, QuantizedRows, values_and_scales

_MAX_COLUMNS = 128  # of a tile
_TALL = 64  # rows of a tile from where on its products, not the latency of its loads, take the time
_LONG_STEP = 512  # bytes of a row
_NO_FACTOR = Factor(0, 0, 0, 0, 0, 0, 0)


def factor_of(factor: Optional[Tensor]) -> Factor:
    """How a factor (L, E, N, r) lies, with strides that are 0 where an extent is 1; all is 0 without a factor.

    Strides that are compile-time values keep its loads wide at any rank.
    """
    if factor is None:
        return _NO_FACTOR
    shape, strides = factor.shape, factor.stride()
    strides = [0 if n == 1 else step for n, step in zip(shape, strides)]
    return Factor(pad_rank(shape[0] * shape[3]), shape[0], shape[3], *strides)


@lru_cache(maxsize=None)
def _kernel(
    spec: DeviceSpec, dtype: torch.dtype, precision: str, num_groups: int, block_m: int, k: int, factor: Factor,
    factor_dtype: torch.dtype, top_k: int, of_tokens: bool, is_quantized: bool,
) -> Kernel:  # fmt: skip
    """dtype: of z. k: columns of x. is_quantized: whether x is of codes.

    Short tiles take few, long steps, and few columns, so that many run at once.
    """
    itemsize, block_n = dtype.itemsize, min(_MAX_COLUMNS, power_of_two(factor.R, 16))
    if block_m < _TALL:
        block_n, stages = min(block_n, block_m), 3
        block_k = min(_LONG_STEP // itemsize, power_of_two(k, 16))
    else:
        block_k, stages = (32, 2) if itemsize > 2 else (64, 2 if of_tokens else 4)
    if is_quantized:  # a step has one scale for each row
        block_k = min(block_k, BLOCK)
    # Of AMD's stages, one lies in registers.
    buffer = block_k * (block_m * itemsize + block_n * factor_dtype.itemsize)
    while (stages - (spec.warp_size == 64)) * buffer > spec.shared_memory and stages > 2:
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
        if is_quantized and not spec.float8:
            values = values.view(torch.uint8)
        top_k = rows.top_k if of_tokens or rows.adapters is not None or scales is not None else 0
        kernel = _kernel(
            spec, x.dtype, dot_precision(x.dtype, spec), rows.num_groups, rows.block_m, k, layout, factor.dtype, top_k,
            of_tokens, is_quantized,
        )  # fmt: skip
        tiles = max_tiles(rows.num_rows, rows.num_groups, rows.block_m)
        kernel(
            (tiles, -(-z.shape[1] // kernel.constants["BLOCK_N"]), 1), values, *values.stride(), x_scales, factor,
            rows.adapters, z, scales, scaled, rows.row_to_slot if top_k else None, rows.schedule, scaling,
        )  # fmt: skip
    return z, scaled
