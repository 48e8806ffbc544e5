"""Launchers of the two fused grouped GEMMs that the experts block and the grouped MLP share."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .block import Block
from .descriptors import Strides, descriptor, weight_tma
from .gemm import bias_strides, nk_strides, num_dots
from .launch import launch
from .schedule import Schedule
from .tuning import DeviceSpec, dgrad_config, persistent_grid, spec_of, up_config


def _weight_by_tma(weight: Tensor, strides: Strides, block_m: int, spec: DeviceSpec) -> Optional[bool]:
    """None if the weight comes by pointer; else whether it lies (E, K, N) in memory, not (E, N, K).

    Descriptors cost the host some time, which row tiles that stream weights do not earn back.
    """
    if block_m < 128 or not spec.wide_tiles or weight.dtype.itemsize != 2:
        return None
    return weight_tma(weight, strides)


def _weight_operand(weight: Tensor, strides: Strides, w_kn: Optional[bool], width: int, config) -> Tuple[Any, ...]:
    """The kernels' arguments for a weight: itself and its strides, or its descriptor in tiles of so many columns."""
    if w_kn is None:
        return (weight, *strides)
    block = (config.block_k, width) if w_kn else (width, config.block_k)
    return descriptor(weight, 1, *block), 0, 0, 0


def _up_operand(block: Block, strides: Strides, w_kn: Optional[bool], config) -> Tuple[Any, ...]:
    """`_weight_operand` of the up-projection, whose tiles hold both gate and up."""
    if block.gated and not block.interleaved and w_kn is False:
        weight = block.up.unflatten(1, (2, block.intermediate))
        return descriptor(weight, 1, 2, config.block_n, config.block_k), 0, 0, 0
    width = 2 * config.block_n if block.gated and block.interleaved else config.block_n
    return _weight_operand(block.up, strides, w_kn, width, config)


def launch_up_proj(
    block: Block,
    x: Tensor,
    top_k: int,
    row_to_slot: Optional[Tensor],
    schedule: Schedule,
    save: bool,
    activate: bool,
    scales: Optional[Tensor] = None,
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """(preact (rows, P) if save, scales * activation (rows, I) if activate); rows of no expert stay unwritten.

    top_k: that by which token rows of x are gathered, or 0 without row_to_slot, where x has one row per row.
    """
    from ._triton.experts import up_proj_kernel

    rows, n = x.shape[0] if row_to_slot is None else row_to_slot.shape[0], block.intermediate
    preact = x.new_empty((rows, block.preact_width)) if save else None
    a = x.new_empty((rows, n)) if activate else None
    spec = spec_of(x)
    strides = nk_strides(block.up, block.transposed)
    w_kn = _weight_by_tma(block.up, strides, schedule.block_m, spec)
    config = up_config(schedule.block_m, n, x.dtype, spec, block.gated, w_kn is not None)
    if rows:
        launch(
            up_proj_kernel, persistent_grid(config, schedule.max_tiles, n, spec),
            x, *x.stride(), *_up_operand(block, strides, w_kn, config),
            block.up_bias, *bias_strides(block.up_bias), preact, a, scales, row_to_slot, schedule.map,
            NUM_EXPERTS=block.num_experts, N=n, K=x.shape[1], TOP_K=top_k, TMA=w_kn is not None, W_KN=bool(w_kn),
            **block.kernel_options(), **config.launch_options(),
        )  # fmt: skip
    return preact, a


def launch_down_dgrad(
    block: Block,
    dout: Tensor,
    weights: Optional[Tensor],
    preact: Tensor,
    row_to_slot: Optional[Tensor],
    schedule: Schedule,
    *,
    dpreact: bool,
    scaled_act: bool,
    partials: bool,
    bias_dots: bool = False,
) -> Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """(dpreact, activation times weight, partial sums of <dout, y>, their rows for the bias), None where not asked for.

    A recomputed preact is overwritten by dpreact: nobody else has seen it. bias_dots, a view of the last partial sums,
    is left for `launch_bias_grads` to fill.
    """
    from ._triton.experts import down_dgrad_kernel

    rows, n = preact.shape[0], block.intermediate
    spec = spec_of(dout)
    strides = nk_strides(block.down, not block.transposed)
    w_kn = _weight_by_tma(block.down, strides, schedule.block_m, spec)
    config = dgrad_config(schedule.block_m, n, dout.dtype, spec, block.interleaved, w_kn is not None)
    n_tiles = -(-n // config.block_n)
    d_preact = (preact if block.recompute else torch.empty_like(preact)) if dpreact else None
    a = dout.new_empty((rows, n)) if scaled_act else None
    sums = dots = None
    if partials:
        extra = num_dots(dout.shape[1]) if bias_dots else 0
        sums = dout.new_empty((n_tiles + extra, rows), dtype=torch.float32)
        dots = sums[n_tiles:] if bias_dots else None
    if rows:
        launch(
            down_dgrad_kernel, persistent_grid(config, schedule.max_tiles, n, spec),
            dout, *dout.stride(), *_weight_operand(block.down, strides, w_kn, config.block_n, config), weights,
            preact, d_preact, a, sums, rows, row_to_slot, schedule.map,
            NUM_EXPERTS=block.num_experts, N=n, K=dout.shape[1], TOP_K=0 if row_to_slot is None else weights.shape[1],
            TMA=w_kn is not None, W_KN=bool(w_kn),
            **block.kernel_options(), **config.launch_options(),
        )  # fmt: skip
    return d_preact, a, sums, dots
