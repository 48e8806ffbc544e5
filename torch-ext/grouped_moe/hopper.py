"""Launchers of the Gluon kernels for Hopper, where `tuning.DeviceSpec.hopper` says that they run."""

from functools import lru_cache
from typing import Any, Optional, Tuple

from torch import Tensor

from .descriptors import descriptor_strides
from .launch import Kernel
from .schedule import Schedule
from .tuning import (
    DeviceSpec,
    GemmConfig,
    hopper_gemm_config,
    hopper_wgrad_config,
    persistent_grid,
    rows_per_expert,
)

_MAX_RAGGED_ROWS = 1 << 30  # what ragged descriptors count up to
_MAX_ORDERED = 128  # to rank more experts would take longer than their few rows are worth
_CONSUMERS = 2
_PATH = "Gluon for Hopper"


@lru_cache(maxsize=None)
def _gluon():
    """Imported where it first runs, and not looked up in every call."""
    from ._triton import hopper

    return hopper


def launch_hopper_gemm(
    x: Tensor,
    weight: Tensor,
    w_kn: bool,
    bias: Tuple[Any, int, int],
    schedule: Schedule,
    scales: Optional[Tensor],
    y: Tensor,
    zero_rest: bool,
    spec: DeviceSpec,
) -> bool:
    """`launch_gemm` into y, if there is a kernel for it. Descriptors must take x and weight. bias: with its strides.

    w_kn: whether the weight lies (E, K, N) in memory, not (E, N, K).
    """
    rows, n = y.shape
    if n % 8 or rows > _MAX_RAGGED_ROWS:
        return False
    found = hopper_gemm_config(schedule.block_m, rows, schedule.num_groups, n, x.shape[1], spec, zero_rest)
    if found is None:
        return False
    config, box = found
    kernel = _gemm_kernel(config, schedule.num_groups, n, x.shape[1], zero_rest, w_kn)
    block = (config.block_k, config.block_n) if w_kn else (config.block_n, config.block_k)
    x_desc = _gluon().make_descriptor(x, x.shape, descriptor_strides(x), (config.block_m, config.block_k))
    w_desc = _gluon().make_descriptor(weight, weight.shape, descriptor_strides(weight), (1, *block))
    y_desc = _gluon().ragged_descriptor(y, config.block_m, box)
    grid = persistent_grid(config, schedule.max_tiles, n, spec)
    kernel(grid, x_desc, w_desc, *bias, scales, y_desc, schedule.map, rows)
    return True


@lru_cache(maxsize=None)
def _gemm_kernel(config: GemmConfig, num_groups: int, n: int, k: int, zero_rest: bool, w_kn: bool) -> Kernel:
    """The kernel with its constants."""
    from ._triton.hopper_gemm import hopper_gemm_kernel

    return Kernel(
        hopper_gemm_kernel, config.describe(_PATH),
        NUM_EXPERTS=num_groups, N=n, K=k, ZERO_UNGROUPED=zero_rest, W_KN=w_kn, STAGES=config.num_stages,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        num_warps=config.num_warps,
    )  # fmt: skip


def launch_hopper_wgrad(
    p: Tensor,
    p_top_k: int,
    q: Tensor,
    q_top_k: int,
    row_to_slot: Optional[Tensor],
    offsets: Tensor,
    dw: Tensor,
    accumulate: bool,
    spec: DeviceSpec,
) -> bool:
    """`launch_wgrad`, if there is a kernel for it. Descriptors must take p, q and dw; p and q are of two-byte types."""
    num_experts, m, n = dw.shape
    num_rows = p.shape[0] if row_to_slot is None else row_to_slot.shape[0]
    if num_rows > _MAX_RAGGED_ROWS or (p_top_k and q_top_k):
        return False
    rows = rows_per_expert(num_rows, num_experts)
    found = _wgrad_kernel(num_experts, m, n, rows, p_top_k, q_top_k, dw.dtype.itemsize, accumulate, spec)
    if found is None:
        return False
    kernel, config, grid = found
    dw_desc = _gluon().make_descriptor(
        dw, dw.shape, descriptor_strides(dw), (1, config.block_m // _CONSUMERS, config.block_n)
    )
    if row_to_slot is None:
        p_desc = _gluon().ragged_descriptor(p, config.block_k, config.block_m)
        q_desc = _gluon().ragged_descriptor(q, config.block_k, config.block_n)
        kernel(grid, p_desc, q_desc, dw_desc, offsets)
    else:
        tokens, in_rows, block = (p, q, config.block_n) if p_top_k else (q, p, config.block_m)
        rows_desc = _gluon().ragged_descriptor(in_rows, config.block_k, block)
        kernel(grid, tokens, tokens.stride(0) // 8, row_to_slot, rows_desc, dw_desc, offsets)
    return True


@lru_cache(maxsize=None)
def _wgrad_kernel(
    num_experts: int,
    m: int,
    n: int,
    rows: int,
    p_top_k: int,
    q_top_k: int,
    out_itemsize: int,
    accumulate: bool,
    spec: DeviceSpec,
) -> Optional[Tuple[Kernel, GemmConfig, Tuple[int, int, int]]]:
    """The kernel with its constants, its tile and its grid; None if there is none."""
    from ._triton.hopper_wgrad import hopper_gathered_wgrad_kernel, hopper_wgrad_kernel

    gathered = p_top_k + q_top_k > 0
    config = hopper_wgrad_config(m, n, rows, out_itemsize, gathered, spec)
    if config is None:
        return None
    constants = {
        "ORDER_SIZE": max(32, 1 << (num_experts - 1).bit_length()) if num_experts <= _MAX_ORDERED else 0,
        "STAGES": config.num_stages,
        "GROUP_M": config.group_m,
        "num_warps": config.num_warps,
    }
    if gathered:
        kernel = Kernel(
            hopper_gathered_wgrad_kernel, config.describe(_PATH),
            NUM_EXPERTS=num_experts, M=m, N=n, TOP_K=p_top_k + q_top_k, P_GATHERED=p_top_k > 0, ACCUMULATE=accumulate,
            **constants,
        )  # fmt: skip
    else:
        kernel = Kernel(
            hopper_wgrad_kernel, config.describe(_PATH),
            NUM_EXPERTS=num_experts, M=m, N=n, ACCUMULATE=accumulate, **constants,
        )  # fmt: skip
    tiles = num_experts * -(-m // config.block_m) * -(-n // config.block_n)
    return kernel, config, (min(tiles, spec.num_sms), 1, 1)
