"""Launchers of the two fused grouped GEMMs that the experts block and the grouped MLP share."""

from functools import lru_cache
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .activation import Activation
from .block import Block
from .descriptors import Strides, descriptor, weight_tma
from .gemm import bias_strides, nk_strides, num_dots
from .launch import Kernel
from .schedule import Schedule
from .tuning import DeviceSpec, GemmConfig, dgrad_config, persistent_grid, spec_of, triton_path, up_config


@lru_cache(maxsize=None)
def _fused_kernel(
    up: bool, block_m: int, num_experts: int, n: int, k: int, top_k: int, dtype: torch.dtype, w_kn: Optional[bool],
    kind: Tuple[bool, bool, Activation, str], spec: DeviceSpec,
) -> Tuple[Kernel, GemmConfig]:  # fmt: skip
    """The up-projection, or else the down-projection's dgrad, with its constants and its tile.

    w_kn: as `_weight_by_tma` says. kind: `Block.kind`.
    """
    from ._triton import experts as kernels

    (gated, interleaved, activation, precision), tma = kind, w_kn is not None
    if up:
        function, config = kernels.up_proj_kernel, up_config(block_m, n, dtype, spec, gated, tma)
    else:
        function, config = kernels.down_dgrad_kernel, dgrad_config(block_m, n, dtype, spec, interleaved, tma)
    kernel = Kernel(
        function, config.describe(triton_path(tma)),
        NUM_EXPERTS=num_experts, N=n, K=k, TOP_K=top_k, TMA=tma, W_KN=bool(w_kn), GATED=gated, INTERLEAVED=interleaved,
        ACTIVATION=activation.name, ALPHA=activation.alpha, LIMIT=activation.limit, UP_OFFSET=activation.up_offset,
        PRECISION=precision, **config.launch_options(),
    )  # fmt: skip
    return kernel, config


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
    rows, n = x.shape[0] if row_to_slot is None else row_to_slot.shape[0], block.intermediate
    preact = x.new_empty((rows, block.preact_width)) if save else None
    a = x.new_empty((rows, n)) if activate else None
    spec = spec_of(x)
    strides = nk_strides(block.up, block.transposed)
    w_kn = _weight_by_tma(block.up, strides, schedule.block_m, spec)
    if rows:
        kernel, config = _fused_kernel(
            True, schedule.block_m, block.num_experts, n, x.shape[1], top_k, x.dtype, w_kn, block.kind(spec), spec
        )
        kernel(
            persistent_grid(config, schedule.max_tiles, n, spec),
            x, *x.stride(), *_up_operand(block, strides, w_kn, config),
            block.up_bias, *bias_strides(block.up_bias), preact, a, scales, row_to_slot, schedule.map,
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
    rows, n = preact.shape[0], block.intermediate
    spec = spec_of(dout)
    strides = nk_strides(block.down, not block.transposed)
    w_kn = _weight_by_tma(block.down, strides, schedule.block_m, spec)
    top_k = 0 if row_to_slot is None else weights.shape[1]
    kernel, config = _fused_kernel(
        False, schedule.block_m, block.num_experts, n, dout.shape[1], top_k, dout.dtype, w_kn, block.kind(spec), spec
    )
    n_tiles = -(-n // config.block_n)
    d_preact = (preact if block.recompute else torch.empty_like(preact)) if dpreact else None
    a = dout.new_empty((rows, n)) if scaled_act else None
    sums = dots = None
    if partials:
        extra = num_dots(dout.shape[1]) if bias_dots else 0
        sums = dout.new_empty((n_tiles + extra, rows), dtype=torch.float32)
        dots = sums[n_tiles:] if bias_dots else None
    if rows:
        kernel(
            persistent_grid(config, schedule.max_tiles, n, spec),
            dout, *dout.stride(), *_weight_operand(block.down, strides, w_kn, config.block_n, config), weights,
            preact, d_preact, a, sums, rows, row_to_slot, schedule.map,
        )  # fmt: skip
    return d_preact, a, sums, dots
