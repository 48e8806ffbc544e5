"""Launchers of the two fused grouped GEMMs that the experts block and the grouped MLP share."""

from functools import lru_cache
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .block import Block, Kind
from .descriptors import Strides, box, weight_tma
from .gemm import nk_order
from .hopper_fused import hopper_down_dgrad, hopper_gathered_up_proj, hopper_up_proj
from .launch import MAX_KEPT, Form, Kernel, Launch, Ref, bias_operand, bind, form_of, ref
from .schedule import Schedule, Sizes
from .tuning import DeviceSpec, GemmConfig, dgrad_config, persistent_grid, spec_of, triton_path, up_config


def _bind(
    kernel, config: GemmConfig, w_kn: Optional[bool], num_experts: int, n: int, k: int, top_k: int, kind: Kind
) -> Kernel:
    """Either kernel with its constants."""
    (gated, interleaved, activation, precision), tma = kind, w_kn is not None
    return bind(
        kernel, config.describe(triton_path(tma)),
        NUM_EXPERTS=num_experts, N=n, K=k, TOP_K=top_k, TMA=tma, W_KN=bool(w_kn), GATED=gated, INTERLEAVED=interleaved,
        ACTIVATION=activation.name, ALPHA=activation.alpha, LIMIT=activation.limit, UP_OFFSET=activation.up_offset,
        PRECISION=precision, **config.launch_options(),
    )  # fmt: skip


def _weight_by_tma(weight: Form, strides: Strides, block_m: int, spec: DeviceSpec) -> Optional[bool]:
    """None if the weight comes by pointer; else whether it lies (E, K, N) in memory, not (E, N, K).

    Row tiles that stream weights do not earn back what descriptors cost.
    """
    if block_m < 128 or not spec.wide_tiles or weight.dtype.itemsize != 2:
        return None
    return weight_tma(weight, strides)


def _weight_operand(weight: Form, strides: Strides, w_kn: Optional[bool], width: int, config) -> Tuple[Any, ...]:
    """The kernels' arguments for a weight: itself and its strides, or its descriptor in tiles of so many columns."""
    if w_kn is None:
        return (Ref(1), *strides)
    block = (config.block_k, width) if w_kn else (width, config.block_k)
    return Ref(1, box(weight, 1, *block)), 0, 0, 0


def _up_operand(up: Form, n: int, strides: Strides, w_kn: Optional[bool], kind: Kind, config) -> Tuple[Any, ...]:
    """`_weight_operand` of the up-projection, whose tiles hold both gate and up, of N columns each."""
    if kind.gated and not kind.interleaved and w_kn is False:
        (num_experts, _, k), (stride_e, stride_n, stride_k) = up.shape, up.strides
        up = up._replace(shape=(num_experts, 2, n, k), strides=(stride_e, n * stride_n, stride_n, stride_k))
        return Ref(1, box(up, 1, 2, config.block_n, config.block_k)), 0, 0, 0
    return _weight_operand(up, strides, w_kn, (2 if kind.gated and kind.interleaved else 1) * config.block_n, config)


def launch_up_proj(
    block: Block,
    x: Tensor,
    schedule: Schedule,
    save: bool,
    activate: bool,
    scales: Optional[Tensor] = None,
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """(preact (rows, P) if save, scales * activation (rows, I) if activate); rows of no expert stay unwritten."""
    rows, n = x.shape[0], block.intermediate
    preact = x.new_empty((rows, block.preact_width)) if save else None
    a = x.new_empty((rows, n)) if activate else None
    if rows:
        spec, given = spec_of(x), (save, activate, False)
        kept = up_launch(
            form_of(x), form_of(block.up), form_of(block.up_bias), form_of(scales), given, rows, n, 0,
            block.transposed, block.kind(spec), schedule[1:], spec, x.device,
        )  # fmt: skip
        kept((x, block.up, block.up_bias, preact, a, scales, None, schedule.map))
    return preact, a


@lru_cache(maxsize=MAX_KEPT)
def up_launch(
    x: Form, up: Form, bias: Optional[Form], scales: Optional[Form], given: Tuple[bool, bool, bool], rows: int, n: int,
    top_k: int, transposed: bool, kind: Kind, sizes: Sizes, spec: DeviceSpec, device: torch.device,
) -> Launch:  # fmt: skip
    """The launch for (x, weight, bias, preact, activation, scales, row_to_slot, the schedule's map).

    given: whether preact, activation and row_to_slot are. rows: of the results. sizes: of the schedule.
    """
    if top_k == 0:
        found = hopper_up_proj(x, up, bias, scales, given, n, transposed, kind, sizes, spec, device)
    else:
        found = hopper_gathered_up_proj(
            x, up, bias, scales, given, rows, n, top_k, transposed, kind, sizes, spec, device
        )  # fmt: skip
    if found is not None:
        return found
    from ._triton.experts import up_proj_kernel

    num_experts, block_m, max_tiles = sizes
    strides = nk_order(up.strides, transposed)
    w_kn = _weight_by_tma(up, strides, block_m, spec)
    config = up_config(block_m, n, x.dtype, spec, kind.gated, w_kn is not None)
    kernel = _bind(up_proj_kernel, config, w_kn, num_experts, n, x.shape[1], top_k, kind)
    preact, a, row_to_slot = (Ref(index) if there else None for index, there in zip((3, 4, 6), given))
    return Launch(
        device, kernel, persistent_grid(config, max_tiles, n, spec),
        Ref(0), *x.strides, *_up_operand(up, n, strides, w_kn, kind, config), *bias_operand(2, bias), preact, a,
        ref(5, scales), row_to_slot, Ref(7),
    )  # fmt: skip


def launch_down_dgrad(
    block: Block,
    dout: Tensor,
    weights: Optional[Tensor],
    preact: Tensor,
    schedule: Schedule,
    *,
    dpreact: bool,
    scaled_act: bool,
    partials: bool,
) -> Tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """(dpreact, activation times weight, partial sums of <dout, y>) of rows in place, None where not asked for.

    A recomputed preact is overwritten by dpreact: nobody else has seen it.
    """
    rows, n, spec = preact.shape[0], block.intermediate, spec_of(dout)
    given = (dpreact, scaled_act, partials, False)
    kept, n_tiles = dgrad_launch(
        form_of(dout), form_of(block.down), form_of(weights), given, rows, n, 0, block.transposed,
        block.kind(spec), schedule[1:], spec, dout.device,
    )  # fmt: skip
    d_preact = (preact if block.recompute else torch.empty_like(preact)) if dpreact else None
    a = dout.new_empty((rows, n)) if scaled_act else None
    sums = dout.new_empty((n_tiles, rows), dtype=torch.float32) if partials else None
    if rows:
        kept((dout, block.down, weights, preact, d_preact, a, sums, None, schedule.map))
    return d_preact, a, sums


@lru_cache(maxsize=MAX_KEPT)
def dgrad_launch(
    dout: Form, down: Form, weights: Optional[Form], given: Tuple[bool, ...], rows: int, n: int, top_k: int,
    transposed: bool, kind: Kind, sizes: Sizes, spec: DeviceSpec, device: torch.device,
) -> Tuple[Launch, int]:  # fmt: skip
    """The launch for (dout, weight, routing weights, preact, dpreact, activation, sums, row_to_slot, the schedule's
    map), and how many partial sums there are.

    given: whether dpreact, activation, sums and row_to_slot are. sizes: of the schedule.
    """
    if top_k == 0:
        found = hopper_down_dgrad(dout, down, weights, given, n, transposed, kind, sizes, spec, device)
        if found is not None:
            return found
    from ._triton.experts import down_dgrad_kernel

    num_experts, block_m, max_tiles = sizes
    strides = nk_order(down.strides, not transposed)
    w_kn = _weight_by_tma(down, strides, block_m, spec)
    config = dgrad_config(block_m, n, dout.dtype, spec, kind.interleaved, w_kn is not None)
    kernel = _bind(down_dgrad_kernel, config, w_kn, num_experts, n, dout.shape[1], top_k, kind)
    d_preact, a, sums, row_to_slot = (Ref(index) if there else None for index, there in zip((4, 5, 6, 7), given))
    made = Launch(
        device, kernel, persistent_grid(config, max_tiles, n, spec),
        Ref(0), *dout.strides, *_weight_operand(down, strides, w_kn, config.block_n, config),
        ref(2, weights), Ref(3), d_preact, a, sums, rows, row_to_slot, Ref(8),
    )  # fmt: skip
    return made, -(-n // config.block_n)
