"""Launchers of the two fused grouped GEMMs that the experts block and the grouped MLP share."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .block import Block
from .gemm import bias_strides, nk_strides, num_dots
from .launch import launch
from .schedule import Schedule
from .tuning import dgrad_config, gemm_config, persistent_grid, spec_of


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
    config = gemm_config(schedule.block_m, n, x.dtype, spec, weight_tiles=2 if block.gated else 1)
    if rows:
        launch(
            up_proj_kernel, persistent_grid(config, schedule.max_tiles, n, spec),
            x, *x.stride(), block.up, *nk_strides(block.up, block.transposed),
            block.up_bias, *bias_strides(block.up_bias), preact, a, scales, row_to_slot, schedule.map,
            NUM_EXPERTS=block.num_experts, N=n, K=x.shape[1], TOP_K=top_k,
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
    config = dgrad_config(schedule.block_m, n, dout.dtype, spec, block.interleaved)
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
            dout, *dout.stride(), block.down, *nk_strides(block.down, not block.transposed), weights,
            preact, d_preact, a, sums, rows, row_to_slot, schedule.map,
            NUM_EXPERTS=block.num_experts, N=n, K=dout.shape[1], TOP_K=0 if row_to_slot is None else weights.shape[1],
            **block.kernel_options(), **config.launch_options(),
        )  # fmt: skip
    return d_preact, a, sums, dots
