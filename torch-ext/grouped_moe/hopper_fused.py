"""Launchers of the two fused grouped GEMMs by the Gluon kernels for Hopper, which `fused` prefers where they fit."""

from typing import Optional, Tuple

import torch

from .block import Kind
from .descriptors import box, descriptor_strides, ragged_box, rows_tma, tma_fits
from .launch import Form, Launch, Ref, bias_operand, bind, ref
from .schedule import Sizes
from .tuning import (
    DeviceSpec,
    GemmConfig,
    hopper_dgrad_config,
    hopper_gathered_up_config,
    hopper_up_config,
    persistent_grid,
)

_BOX = 32  # columns that an epilogue stores at once
_BUFFERED = 128  # columns of all boxes of a warp group, where rows are gathered
_SLOTS = {True: 3, False: 4}  # boxes of gate and up, or of no gate, that are on their way or worked on
_MAX_RAGGED_ROWS = 1 << 30  # what ragged descriptors count up to
_PATH = "Gluon for Hopper"


def hopper_up_proj(
    x: Form,
    up: Form,
    bias: Optional[Form],
    scales: Optional[Form],
    given: Tuple[bool, ...],
    n: int,
    transposed: bool,
    kind: Kind,
    sizes: Sizes,
    spec: DeviceSpec,
    device: torch.device,
) -> Optional[Launch]:
    """`fused.up_launch` for rows in place, if there is a kernel for it."""
    (rows, k), (num_experts, block_m, max_tiles) = x.shape, sizes
    width = 2 * n if kind.gated else n
    config = hopper_up_config(block_m, width)
    if config is None or not _up_fits(x, up, rows, n, transposed, kind, spec):
        return None
    from ._triton.hopper_experts import hopper_up_proj_kernel

    kernel = bind(
        hopper_up_proj_kernel, config.describe(_PATH),
        NUM_EXPERTS=num_experts, N=n, K=k, W_KN=transposed, **_epilogue(kind), **_tile(config),
    )  # fmt: skip
    size = config.block_m, _BOX
    act = Ref(4, _columns(x.dtype, rows, n, n, size)) if given[1] else None
    return Launch(
        device, kernel, persistent_grid(config, max_tiles, width, spec),
        Ref(0, box(x, config.block_m, config.block_k, gluon=True)),
        _up_weight(up, n, transposed, kind, config), *bias_operand(2, bias),
        *_preact(3 if given[0] else None, x.dtype, rows, n, size, kind), act, ref(5, scales), Ref(7),
    )  # fmt: skip


def hopper_gathered_up_proj(
    x: Form,
    up: Form,
    bias: Optional[Form],
    scales: Optional[Form],
    given: Tuple[bool, ...],
    rows: int,
    n: int,
    top_k: int,
    transposed: bool,
    kind: Kind,
    sizes: Sizes,
    spec: DeviceSpec,
    device: torch.device,
) -> Optional[Launch]:
    """`fused.up_launch` for rows that are gathered from x, if there is a kernel for it."""
    k, (num_experts, block_m, max_tiles) = x.shape[1], sizes
    width = 2 * n if kind.gated else n
    config = hopper_gathered_up_config(block_m, width)
    if config is None or k % 8 or not _up_fits(x, up, rows, n, transposed, kind, spec):
        return None
    from ._triton.hopper_gathered import hopper_gathered_up_proj_kernel

    columns = _BOX if given[0] else 2 * _BOX  # an activation alone leaves in fewer boxes
    kernel = bind(
        hopper_gathered_up_proj_kernel, config.describe(_PATH),
        NUM_EXPERTS=num_experts, N=n, K=k, TOP_K=top_k, W_KN=transposed, **_epilogue(kind),
        BUFFERS=_BUFFERED // columns, **_tile(config),
    )  # fmt: skip
    size = config.block_m // 2, columns
    act = Ref(4, _columns(x.dtype, rows, n, n, size)) if given[1] else None
    return Launch(
        device, kernel, persistent_grid(config, max_tiles, width, spec), Ref(0), x.strides[0] // 8,
        _up_weight(up, n, transposed, kind, config), *bias_operand(2, bias),
        *_preact(3 if given[0] else None, x.dtype, rows, n, size, kind), act, ref(5, scales), Ref(6), Ref(7),
    )  # fmt: skip


def hopper_down_dgrad(
    dout: Form,
    down: Form,
    weights: Optional[Form],
    given: Tuple[bool, ...],
    n: int,
    transposed: bool,
    kind: Kind,
    sizes: Sizes,
    spec: DeviceSpec,
    device: torch.device,
) -> Optional[Tuple[Launch, int]]:
    """`fused.dgrad_launch` for rows in place, if there is a kernel for it. With row_to_slot weights are of slots."""
    (rows, k), (num_experts, block_m, max_tiles) = dout.shape, sizes
    config = hopper_dgrad_config(block_m, n)
    if config is None or not _fits(dout, down, rows, n, kind, spec):
        return None
    from ._triton.hopper_experts import hopper_down_dgrad_kernel

    w_kn = not transposed
    kernel = bind(
        hopper_down_dgrad_kernel, config.describe(_PATH),
        NUM_EXPERTS=num_experts, N=n, K=k, W_KN=w_kn, **_epilogue(kind), SLOTS=_SLOTS[kind.gated], **_tile(config),
    )  # fmt: skip
    block = (config.block_k, config.block_n) if w_kn else (config.block_n, config.block_k)
    dpreact, act, sums, row_to_slot = given
    size = config.block_m, _BOX
    made = Launch(
        device, kernel, persistent_grid(config, max_tiles, n, spec),
        Ref(0, box(dout, config.block_m, config.block_k, gluon=True)), Ref(1, box(down, 1, *block, gluon=True)),
        ref(2, weights), *_preact(3, dout.dtype, rows, n, size, kind),
        *_preact(4 if dpreact else None, dout.dtype, rows, n, size, kind),
        Ref(5, _columns(dout.dtype, rows, n, n, size)) if act else None, Ref(6) if sums else None, rows,
        Ref(7) if row_to_slot else None, Ref(8),
    )  # fmt: skip
    return made, -(-n // config.block_n)


def _fits(x: Form, weight: Form, rows: int, n: int, kind: Kind, spec: DeviceSpec) -> bool:
    """Whether the kernels take a block of this kind, these rows and this weight of it.

    Not the exact GELU where there is no gate: of so many values a tile the up-projection would be more code than caches
    hold, and the dgrad as much as they do.
    """
    return (
        spec.hopper
        and (kind.gated or kind.activation.name != "gelu")
        and n % 8 == 0
        and 0 < rows <= _MAX_RAGGED_ROWS
        and rows_tma(x, spec)
        and weight.strides[2] == 1
        and tma_fits(weight)
    )


def _up_fits(x: Form, up: Form, rows: int, n: int, transposed: bool, kind: Kind, spec: DeviceSpec) -> bool:
    """The same of an up-projection. A box of both halves of (E, H, 2 I) would be no operand of wgmma."""
    halves = kind.gated and not kind.interleaved
    return _fits(x, up, rows, n, kind, spec) and not (halves and transposed)


def _columns(dtype: torch.dtype, rows: int, width: int, n: int, size: Tuple[int, int]):
    """Boxes of N columns of contiguous (rows, width), each of so many rows and columns."""
    return ragged_box(Form(dtype, (rows, n), (width, 1), True), *size)


def _preact(
    index: Optional[int], dtype: torch.dtype, rows: int, n: int, size: Tuple[int, int], kind: Kind
) -> Tuple[Optional[Ref], Optional[Ref]]:  # fmt: skip
    """The gate and the up columns of a pre-activation, all of its columns twice if they alternate; no index: None."""
    if index is None:
        return None, None
    if not kind.gated:
        return Ref(index, _columns(dtype, rows, n, n, size)), None
    boxes = _columns(dtype, rows, 2 * n, 2 * n if kind.interleaved else n, size)
    return Ref(index, boxes), Ref(index, boxes, 0 if kind.interleaved else n)


def _up_weight(up: Form, n: int, transposed: bool, kind: Kind, config: GemmConfig) -> Ref:
    """Blocks of as many columns of gate as of up: of each half, or neighbours where they alternate or have no gate."""
    columns = config.block_n
    if kind.interleaved or not kind.gated:
        block = (config.block_k, columns) if transposed else (columns, config.block_k)
        return Ref(1, box(up, 1, *block, gluon=True))
    (num_experts, _, k), (stride_e, stride, _) = up.shape, descriptor_strides(up)
    halves = up._replace(shape=(num_experts, 2, n, k), strides=(stride_e, n * stride, stride, 1))
    return Ref(1, box(halves, 1, 2, columns // 2, config.block_k, gluon=True))


def _epilogue(kind: Kind) -> dict:
    """The kernels' constants that say what becomes of products."""
    name, alpha, limit, up_offset = kind.activation
    activation = {"ACTIVATION": name, "ALPHA": alpha, "LIMIT": limit, "UP_OFFSET": up_offset}
    return {"GATED": kind.gated, "INTERLEAVED": kind.interleaved, **activation}


def _tile(config: GemmConfig) -> dict:
    return {
        "STAGES": config.num_stages,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "num_warps": config.num_warps,
    }
