"""Launchers of the Gluon kernels for Hopper, where `tuning.DeviceSpec.hopper` says that they run."""

from typing import Optional

import torch

from .descriptors import box, ragged_box
from .launch import Form, Launch, Ref, bias_operand, bind, ref
from .schedule import Sizes
from .tuning import DeviceSpec, hopper_gemm_config, hopper_wgrad_config, persistent_grid, rows_per_expert

_MAX_RAGGED_ROWS = 1 << 30  # what ragged descriptors count up to
_MAX_ORDERED = 128  # to rank more experts would take longer than their few rows are worth
_CONSUMERS = 2
_PATH = "Gluon for Hopper"


def hopper_gemm(
    x: Form,
    weight: Form,
    w_kn: bool,
    bias: Optional[Form],
    scales: Optional[Form],
    y: Form,
    sizes: Sizes,
    zero_rest: bool,
    spec: DeviceSpec,
    device: torch.device,
) -> Optional[Launch]:
    """`gemm.gemm_launch`, if there is a kernel for it. Descriptors must take x and weight.

    w_kn: whether the weight lies (E, K, N) in memory, not (E, N, K).
    """
    (rows, n), k = y.shape, x.shape[1]
    num_groups, block_m, max_tiles = sizes
    if n % 8 or rows > _MAX_RAGGED_ROWS:
        return None
    found = hopper_gemm_config(block_m, rows, num_groups, n, k, spec, zero_rest)
    if found is None:
        return None
    from ._triton.hopper_gemm import hopper_gemm_kernel

    config, columns = found
    kernel = bind(
        hopper_gemm_kernel, config.describe(_PATH),
        NUM_EXPERTS=num_groups, N=n, K=k, ZERO_UNGROUPED=zero_rest, W_KN=w_kn, STAGES=config.num_stages,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        num_warps=config.num_warps,
    )  # fmt: skip
    block = (config.block_k, config.block_n) if w_kn else (config.block_n, config.block_k)
    # A warp group's registers hold the sums of 128 x 128 products: tiles of more are shared.
    box_rows = min(config.block_m, 128 * 128 // config.block_n)
    return Launch(
        device, kernel, persistent_grid(config, max_tiles, n, spec),
        Ref(0, box(x, config.block_m, config.block_k, gluon=True)), Ref(1, box(weight, 1, *block, gluon=True)),
        *bias_operand(2, bias), ref(3, scales), Ref(4, ragged_box(y, box_rows, columns)), Ref(5), rows,
    )  # fmt: skip


def hopper_wgrad(
    p: Form,
    p_top_k: int,
    q: Form,
    q_top_k: int,
    gathered_rows: Optional[int],
    dw: Form,
    accumulate: bool,
    spec: DeviceSpec,
    device: torch.device,
) -> Optional[Launch]:
    """`gemm.wgrad_launch`, if there is a kernel for it. Descriptors must take p, q and dw; p and q are of two bytes."""
    num_experts, m, n = dw.shape
    num_rows = p.shape[0] if gathered_rows is None else gathered_rows
    if num_rows > _MAX_RAGGED_ROWS or (p_top_k and q_top_k):
        return None
    gathered = p_top_k + q_top_k > 0
    config = hopper_wgrad_config(m, n, rows_per_expert(num_rows, num_experts), dw.dtype.itemsize, gathered, spec)
    if config is None:
        return None
    from ._triton.hopper_wgrad import hopper_gathered_wgrad_kernel, hopper_wgrad_kernel

    constants = {
        "ORDER_SIZE": max(32, 1 << (num_experts - 1).bit_length()) if num_experts <= _MAX_ORDERED else 0,
        "STAGES": config.num_stages,
        "GROUP_M": config.group_m,
        "num_warps": config.num_warps,
    }
    dw_ref = Ref(2, box(dw, 1, config.block_m // _CONSUMERS, config.block_n, gluon=True))
    if gathered:
        kernel = bind(
            hopper_gathered_wgrad_kernel, config.describe(_PATH),
            NUM_EXPERTS=num_experts, M=m, N=n, TOP_K=p_top_k + q_top_k, P_GATHERED=p_top_k > 0, ACCUMULATE=accumulate,
            **constants,
        )  # fmt: skip
        tokens, in_rows, block = (0, q, config.block_n) if p_top_k else (1, p, config.block_m)
        token_stride = (p if p_top_k else q).strides[0]
        rows_ref = Ref(1 - tokens, ragged_box(in_rows, config.block_k, block))
        arguments = (Ref(tokens), token_stride // 8, Ref(3), rows_ref, dw_ref, Ref(4))
    else:
        kernel = bind(
            hopper_wgrad_kernel, config.describe(_PATH),
            NUM_EXPERTS=num_experts, M=m, N=n, ACCUMULATE=accumulate, **constants,
        )  # fmt: skip
        p_ref = Ref(0, ragged_box(p, config.block_k, config.block_m))
        q_ref = Ref(1, ragged_box(q, config.block_k, config.block_n))
        arguments = (p_ref, q_ref, dw_ref, Ref(4))
    tiles = num_experts * -(-m // config.block_m) * -(-n // config.block_n)
    return Launch(device, kernel, (min(tiles, spec.num_sms), 1, 1), *arguments)
