"""Launchers of the grouped GEMM, its weight gradient and the reductions, which every op of the package shares."""

from functools import lru_cache
from typing import Optional, Tuple

import torch
from torch import Tensor

from .descriptors import Strides, box, rows_tma, tma_fits, weight_tma
from .hopper import hopper_gemm, hopper_wgrad
from .launch import MAX_KEPT, Form, Launch, Ref, bias_operand, bind, form_of, launch, ref
from .plan import Plan, unwritten
from .schedule import Schedule, Sizes
from .tuning import (
    DeviceSpec,
    dot_precision,
    gemm_config,
    persistent_grid,
    rows_per_expert,
    spec_of,
    triton_path,
    wgrad_config,
)

_ZERO_PROGRAMS_PER_SM = 4
_ZERO_CHUNK = 4096  # elements
_BIAS_BLOCK_N = 64


def nk_order(strides: Strides, transposed: bool) -> Strides:
    """Strides over (E, N, K) of those of a weight that is laid out (E, N, K) or, transposed, (E, K, N)."""
    return (strides[0], strides[2], strides[1]) if transposed else strides


def nk_strides(weight: Tensor, transposed: bool) -> Strides:
    """Strides of a weight over (E, N, K), whether it is laid out (E, N, K) or, transposed, (E, K, N)."""
    return nk_order(weight.stride(), transposed)


def has_unit_rows(x: Tensor) -> bool:
    """Whether its columns are contiguous."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def unit_rows(x: Tensor) -> Tensor:
    """x itself if its columns are contiguous, else a contiguous copy."""
    return x if has_unit_rows(x) else x.contiguous()


def launch_gemm(
    x: Tensor,
    weight: Tensor,
    strides: Strides,
    n: int,
    bias: Optional[Tensor],
    schedule: Schedule,
    scales: Optional[Tensor] = None,
    zero_rest: bool = False,
) -> Tensor:
    """y (rows, N) with y[r] = W[e] x[r] + scales[r] bias[e]; rows of no expert are 0 or, by default, stay unwritten.

    x: (rows, K), any strides. weight: (E, N, K) or (E, K, N), read by its strides over (E, N, K).
    """
    y = x.new_empty((x.shape[0], n))
    if x.shape[0]:
        spec = spec_of(x)
        kept = gemm_launch(
            form_of(x), form_of(weight), strides, n, form_of(bias), form_of(scales), schedule[1:], zero_rest,
            spec, dot_precision(x.dtype, spec), x.device,
        )  # fmt: skip
        kept((x, weight, bias, scales, y, schedule.map))
    return y


@lru_cache(maxsize=MAX_KEPT)
def gemm_launch(
    x: Form,
    weight: Form,
    strides: Strides,
    n: int,
    bias: Optional[Form],
    scales: Optional[Form],
    sizes: Sizes,
    zero_rest: bool,
    spec: DeviceSpec,
    precision: str,
    device: torch.device,
) -> Launch:
    """The launch of `launch_gemm` for (x, weight, bias, scales, y, the schedule's map).

    sizes: of the schedule: groups, rows of a tile, an upper bound of the tiles.
    """
    (rows, k), (num_groups, block_m, max_tiles) = x.shape, sizes
    w_kn = None
    # Row tiles that stream weights do not earn back what descriptors cost.
    if block_m >= 64 and rows_tma(x, spec):
        w_kn = weight_tma(weight, strides)
    if w_kn is not None and spec.hopper:
        y = Form(x.dtype, (rows, n), (n, 1), True)
        found = hopper_gemm(x, weight, w_kn, bias, scales, y, sizes, zero_rest, spec, device)
        if found is not None:
            return found
    from ._triton.gemm import grouped_gemm_kernel

    # w_kn: how a weight that comes by descriptor lies in memory, None for pointers.
    tma = w_kn is not None
    config = gemm_config(block_m, n, x.dtype, spec, tma)
    kernel = bind(
        grouped_gemm_kernel, config.describe(triton_path(tma)),
        NUM_EXPERTS=num_groups, N=n, K=k, ZERO_UNGROUPED=zero_rest, TMA=tma, W_KN=bool(w_kn), PRECISION=precision,
        **config.launch_options(),
    )  # fmt: skip
    if tma:
        block = (config.block_k, config.block_n) if w_kn else (config.block_n, config.block_k)
        operands = (Ref(0, box(x, config.block_m, config.block_k)), 0, 0, Ref(1, box(weight, 1, *block)), 0, 0, 0)
    else:
        operands = (Ref(0), *x.strides, Ref(1), *strides)
    grid = persistent_grid(config, max_tiles, n, spec)
    return Launch(device, kernel, grid, *operands, *bias_operand(2, bias), ref(3, scales), Ref(4), Ref(5), rows)


def launch_wgrad(
    p: Tensor,
    p_top_k: int,
    q: Tensor,
    q_top_k: int,
    row_to_slot: Optional[Tensor],
    offsets: Tensor,
    dw: Tensor,
    accumulate: bool = False,
) -> Tensor:
    """dw[e] = sum over the rows r of expert e of p[r] q[r]^T, or is added to it. dw: (E, M, N) of any strides.

    p_top_k, q_top_k: 0 where the operand has one row per routed row, else the top_k by which token rows are gathered.
    offsets: (E + 1,) int32, or a schedule's map, which begins with them.
    """
    p, q = unit_rows(p), unit_rows(q)
    spec = spec_of(p)
    kept = wgrad_launch(
        form_of(p), p_top_k, form_of(q), q_top_k, None if row_to_slot is None else row_to_slot.shape[0], form_of(dw),
        accumulate, spec, dot_precision(p.dtype, spec), p.device,
    )  # fmt: skip
    kept((p, q, dw, row_to_slot, offsets))
    return dw


@lru_cache(maxsize=MAX_KEPT)
def wgrad_launch(
    p: Form,
    p_top_k: int,
    q: Form,
    q_top_k: int,
    gathered_rows: Optional[int],
    dw: Form,
    accumulate: bool,
    spec: DeviceSpec,
    precision: str,
    device: torch.device,
) -> Launch:
    """The launch of `launch_wgrad` for (p, q, dw, row_to_slot, offsets); columns of p and q are contiguous.

    gathered_rows: None without row_to_slot.
    """
    num_experts, m, n = dw.shape
    if dw.strides[2] != 1 and dw.strides[1] == 1:
        (stride_e, stride_m, stride_n), transposed = dw.strides, (num_experts, n, m)
        dw = dw._replace(shape=transposed, strides=(stride_e, stride_n, stride_m))
        swapped = wgrad_launch(
            q, q_top_k, p, p_top_k, gathered_rows, dw, accumulate, spec, precision, device
        )  # fmt: skip
        return swapped.numbered(1, 0, 2, 3, 4)
    gathered = gathered_rows is not None
    num_rows = gathered_rows if gathered else p.shape[0]
    aligned = num_rows > 0 and rows_tma(p, spec) and rows_tma(q, spec)
    if spec.hopper and aligned and dw.strides[2] == 1 and dw.dtype.itemsize <= 4 and tma_fits(dw):
        found = hopper_wgrad(p, p_top_k, q, q_top_k, gathered_rows, dw, accumulate, spec, device)
        if found is not None:
            return found
    from ._triton.gemm import wgrad_kernel

    tma = aligned and not gathered
    config = wgrad_config(
        m, n, rows_per_expert(num_rows, num_experts), p.dtype, spec, p_top_k + q_top_k > 0, tma
    )  # fmt: skip
    kernel = bind(
        wgrad_kernel, config.describe(triton_path(tma)),
        NUM_EXPERTS=num_experts, M=m, N=n, P_TOP_K=p_top_k, Q_TOP_K=q_top_k, ACCUMULATE=accumulate, TMA=tma,
        PRECISION=precision, **config.launch_options(),
    )  # fmt: skip
    boxes = (None, None)
    if tma:
        boxes = (Ref(0, box(p, config.block_k, config.block_m)), Ref(1, box(q, config.block_k, config.block_n)))
    dw_box = None
    # A whole tile passes through shared memory, which small tiles, two programs to a processor, have not left.
    if tma and config.block_n == 256 and not accumulate and dw.dtype == p.dtype and dw.strides[2] == 1 and tma_fits(dw):
        dw_box = Ref(2, box(dw, 1, config.block_m, config.block_n))
    tiles = num_experts * -(-m // config.block_m) * -(-n // config.block_n)
    programs = min(tiles, spec.num_sms * config.programs_per_sm) if config.programs_per_sm else tiles
    return Launch(
        device, kernel, (programs, 1, 1), Ref(0), p.strides[0], Ref(1), q.strides[0], *boxes, Ref(2), *dw.strides,
        dw_box, Ref(3) if gathered else None, Ref(4),
    )  # fmt: skip


@lru_cache(maxsize=MAX_KEPT)
def bias_grads_plan(
    dy: Form, top_k: int, scales: Optional[Form], bias: Optional[Form], dots_stride: Optional[int], gathered: bool,
    dbias: Optional[Form], sizes: Sizes, accumulate: bool, device: torch.device,
) -> Plan:  # fmt: skip
    """dbias[e] = sum over the rows r of expert e of scales[r] dy[r]; with bias dots[:, r] = parts of <dy[r], bias[e]>.

    The plan for (dy, scales, bias, dots, row_to_slot, the schedule's map, dbias). dbias: (E, N) contiguous, or None;
    with accumulate it is added to. dots: (`num_dots(N)`, rows) fp32; dots_stride: None without them. Columns of dy are
    contiguous. top_k: 0 where dy has one row per routed row, else that by which token rows are gathered. gathered:
    whether row_to_slot is given.
    """
    from ._triton.sums import bias_grads_kernel, sum_tiles_kernel

    (num_groups, block_m, tiles), n, plan = sizes, dy.shape[1], Plan(device, 7)
    sums = plan.make(None if dbias is None else unwritten(torch.float32, tiles, n), scratch=True)
    if tiles:
        # Triton 3.9 fuses one or the other of two products into their sum, by whether dbias is made as well: the last
        # bits of routing weights' gradients would depend on that.
        kernel = bind(
            bias_grads_kernel, NUM_EXPERTS=num_groups, N=n, TOP_K=top_k, BLOCK_M=block_m, BLOCK_N=_BIAS_BLOCK_N,
            enable_fp_fusion=False,
        )  # fmt: skip
        dots = (None, 0) if dots_stride is None else (Ref(3), dots_stride)
        launch_dots = Launch(
            device, kernel, (tiles, num_dots(n), 1),
            Ref(0), dy.strides[0], ref(1, scales), *bias_operand(2, bias), None if dbias is None else Ref(6), *dots,
            Ref(4) if gathered else None, Ref(5),
        )  # fmt: skip
        plan.add(launch_dots, 0, 1, 2, 3, 4, 5, sums)
    if dbias is not None:
        kernel = bind(
            sum_tiles_kernel, NUM_EXPERTS=num_groups, N=n, ACCUMULATE=accumulate, BLOCK_R=32, BLOCK_N=_BIAS_BLOCK_N
        )  # fmt: skip
        plan.add(Launch(device, kernel, (num_groups, num_dots(n), 1), Ref(0), Ref(1), Ref(2)), sums, 6, 5)
    return plan


def launch_bias_backward(
    dy: Tensor,
    scales: Optional[Tensor],
    bias: Optional[Tensor],
    schedule: Schedule,
    dbias: Optional[Tensor],
    dscales: Optional[Tensor],
    accumulate: Tuple[bool, bool] = (False, False),
) -> None:
    """Writes dbias[e] = sum over the rows r of scales[r] dy[r] and dscales[r] = <dy[r], bias[e]>, or adds to them.

    Either may be None. dscales: (rows,), 0 for rows of no expert.
    """
    dy = unit_rows(dy)
    operands = map(form_of, (dy, scales, bias, dbias, dscales))
    plan = bias_backward_plan(*operands, schedule[1:], accumulate, dy.device)
    plan(dy, scales, bias, schedule.map, dbias, dscales)


@lru_cache(maxsize=MAX_KEPT)
def bias_backward_plan(
    dy: Form, scales: Optional[Form], bias: Optional[Form], dbias: Optional[Form], dscales: Optional[Form],
    sizes: Sizes, accumulate: Tuple[bool, bool], device: torch.device,
) -> Plan:  # fmt: skip
    """The plan of `launch_bias_backward` for (dy, scales, bias, the schedule's map, dbias, dscales).

    Columns of dy are contiguous.
    """
    (rows, n), plan = dy.shape, Plan(device, 6)
    parts = num_dots(n), rows
    dots = plan.make(None if dscales is None else unwritten(torch.float32, *parts), scratch=True)
    dots_stride = None if dscales is None else rows
    sums = bias_grads_plan(dy, 0, scales, bias, dots_stride, False, dbias, sizes, accumulate[0], device)
    plan.include(sums, 0, 1, 2, dots, None, 3, 4)
    if dscales is not None and rows:
        total = sum_partials_launch(parts, False, dscales.dtype, rows, sizes[0], accumulate[1], device)
        plan.add(total, dots, None, 3, 5)
    return plan


def num_dots(n: int) -> int:
    """Into how many partial sums `bias_grads_plan` cuts an inner product over N columns."""
    return -(-n // _BIAS_BLOCK_N)


def launch_sum_partials(partials: Tensor, schedule: Schedule, out: Tensor) -> None:
    """out[r] = sum of partials[:, r], in order; 0 for a row of no expert."""
    if out.numel():
        kept = sum_partials_launch(
            partials.shape, False, out.dtype, out.numel(), schedule.num_groups, False, out.device
        )  # fmt: skip
        kept((partials, None, schedule.map, out))


@lru_cache(maxsize=MAX_KEPT)
def sum_partials_launch(
    shape: Tuple[int, int], gathered: bool, dtype: torch.dtype, size: int, num_groups: int, accumulate: bool,
    device: torch.device,
) -> Launch:  # fmt: skip
    """out[s] = sum of partials[:, row of s], in order, or is added to it; 0 for a slot without a row.

    The launch for (partials, slot_to_row, the schedule's map, out).

    shape: of the partial sums, contiguous. gathered: whether slot_to_row is given. dtype, size: of out.
    """
    from ._triton.sums import sum_partials_kernel

    kernel = bind(
        sum_partials_kernel, NUM_EXPERTS=num_groups, NUM_PARTIALS=shape[0], ACCUMULATE=accumulate, BLOCK=256
    )  # fmt: skip
    slots = Ref(1) if gathered else None
    return Launch(device, kernel, (-(-size // 256), 1, 1), Ref(0), shape[1], slots, Ref(2), Ref(3), size)


def zero_ungrouped(y: Tensor, offsets: Tensor) -> Tensor:
    """Writes 0 to the rows of y before the first group and after the last; costs those rows only."""
    from ._triton.gemm import zero_ungrouped_kernel

    total, n = y.shape
    grid = (max(1, min(-(-total * n // _ZERO_CHUNK), spec_of(y).num_sms * _ZERO_PROGRAMS_PER_SM)),)
    launch(zero_ungrouped_kernel, grid, y, offsets, total, NUM_GROUPS=offsets.shape[0] - 1, N=n, CHUNK=_ZERO_CHUNK)
    return y
