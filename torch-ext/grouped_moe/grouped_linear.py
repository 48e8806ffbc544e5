"""Linear layer with one weight per group of consecutive rows, and the launchers that the package shares."""

from typing import Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _checks as checks
from ._ops import add_op_namespace_prefix, ops
from ._torch.grouped_linear import matmul_groups, sum_groups, wgrad_groups
from .routing import Schedule, make_schedule
from .tuning import DeviceSpec, choose_block_m, gemm_config, on_device_of, persistent_grid, spec_of, wgrad_config

_ZERO_PROGRAMS_PER_SM = 4


def nk_strides(weight: Tensor, transposed: bool) -> Tuple[int, int, int]:
    """Strides of a weight over (E, N, K), whether it is laid out (E, N, K) or, transposed, (E, K, N)."""
    stride_e, first, second = weight.stride()
    return (stride_e, second, first) if transposed else (stride_e, first, second)


def dot_precision(dtype: torch.dtype, spec: DeviceSpec) -> str:
    """tf32 for fp32 where the device has it and PyTorch's own flag, by its new name or its old one, allows it."""
    if dtype != torch.float32 or not spec.tf32:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    # PyTorch raises when the old name is read after the new one was set.
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if allowed else "ieee"


def unit_rows(x: Tensor) -> Tensor:
    """x itself if its columns are contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def launch_gemm(
    x: Tensor,
    weight: Tensor,
    strides: Tuple[int, int, int],
    n: int,
    bias: Optional[Tensor],
    offsets: Tensor,
    schedule: Schedule,
) -> Tensor:
    """y (rows, N) with y[r] = W[e] x[r] + bias[e]; rows of no expert stay unwritten. x: (rows, K), any strides."""
    from ._triton.gemm import grouped_gemm_kernel

    rows, k = x.shape
    y = x.new_empty((rows, n))
    spec = spec_of(x)
    config = gemm_config(schedule.block_m, n, x.dtype, spec)
    if rows == 0:
        return y
    grouped_gemm_kernel[persistent_grid(config, schedule.max_tiles, n, spec)](
        x, *x.stride(), weight, *strides, bias, *(bias.stride() if bias is not None else (0, 0)), y,
        offsets, schedule.tile_offsets, schedule.tile_to_expert,
        NUM_EXPERTS=offsets.shape[0] - 1, N=n, K=k, PRECISION=dot_precision(x.dtype, spec),
        **config.launch_options(),
    )  # fmt: skip
    return y


def launch_wgrad(
    p: Tensor, p_top_k: int, q: Tensor, q_top_k: int, row_to_slot: Optional[Tensor], offsets: Tensor, dw: Tensor
) -> Tensor:
    """dw[e] = sum over the rows r of expert e of p[r] q[r]^T. dw: (E, M, N) of any strides, all of it is written.

    p_top_k, q_top_k: 0 where the operand has one row per routed row, else the top_k by which token rows are gathered.
    """
    from ._triton.gemm import wgrad_kernel

    if dw.stride(2) != 1 and dw.stride(1) == 1:
        p, p_top_k, q, q_top_k, dw = q, q_top_k, p, p_top_k, dw.transpose(1, 2)
    p, q = unit_rows(p), unit_rows(q)
    num_experts, m, n = dw.shape
    gathered = row_to_slot is not None
    num_rows = row_to_slot.shape[0] if gathered else p.shape[0]
    block_m = choose_block_m(num_rows, num_experts, p.dtype)
    spec = spec_of(p)
    config = wgrad_config(m, n, block_m, p.dtype, spec, gathered)
    grid = (num_experts * -(-m // config.block_m) * -(-n // config.block_n),)
    wgrad_kernel[grid](
        p, p.stride(0), q, q.stride(0), dw, *dw.stride(), row_to_slot, offsets,
        M=m, N=n, P_TOP_K=p_top_k, Q_TOP_K=q_top_k, PRECISION=dot_precision(p.dtype, spec),
        **config.launch_options(),
    )  # fmt: skip
    return dw


def launch_group_sum(
    x: Tensor, top_k: int, weights: Optional[Tensor], row_to_slot: Optional[Tensor], offsets: Tensor, out: Tensor
) -> Tensor:
    """out[e] = sum over the rows r of expert e of weights[slot of r] x[r]. out: (E, N) contiguous, all is written."""
    from ._triton.rows import group_sum_kernel

    x = unit_rows(x)
    num_experts, n = out.shape
    block_n = 64
    group_sum_kernel[(num_experts, -(-n // block_n))](
        x, x.stride(0), weights, row_to_slot, offsets, out, N=n, TOP_K=top_k, BLOCK_R=32, BLOCK_N=block_n
    )
    return out


def zero_ungrouped(y: Tensor, offsets: Tensor) -> Tensor:
    """Writes 0 to the rows of y before the first group and after the last; costs those rows only."""
    from ._triton.rows import zero_ungrouped_kernel

    total, n = y.shape
    block_r = 8
    grid = (max(1, min(-(-total // block_r), spec_of(y).num_sms * _ZERO_PROGRAMS_PER_SM)),)
    zero_ungrouped_kernel[grid](y, offsets, total, NUM_GROUPS=offsets.shape[0] - 1, N=n, BLOCK_R=block_r, BLOCK_N=256)
    return y


def _safe_offsets(group_offsets: Tensor, rows: int) -> Tensor:
    """Offsets that never lead out of bounds, whatever the caller's hold: within [0, rows] and not decreasing."""
    return group_offsets.clamp(0, rows).cummax(0).values.to(torch.int32)


def forward_triton(x: Tensor, weight: Tensor, offsets: Tensor, bias: Optional[Tensor], transposed: bool) -> Tensor:
    """The forward by the Triton kernels; offsets are safe."""
    n = weight.shape[2] if transposed else weight.shape[1]
    schedule = make_schedule(offsets, x.shape[0], choose_block_m(x.shape[0], weight.shape[0], x.dtype))
    y = launch_gemm(x, weight, nk_strides(weight, transposed), n, bias, offsets, schedule)
    return zero_ungrouped(y, offsets)


def backward_triton(
    dy: Tensor, x: Optional[Tensor], weight: Tensor, offsets: Tensor, transposed: bool, needs: Sequence[bool]
) -> Tuple[Tensor, Tensor, Tensor]:
    """The backward by the Triton kernels; offsets are safe."""
    dx, dw, dbias = _empty_grads(dy, weight, transposed, (False, *needs[1:]))
    if needs[0]:
        schedule = make_schedule(offsets, dy.shape[0], choose_block_m(dy.shape[0], weight.shape[0], dy.dtype))
        k = weight.shape[1] if transposed else weight.shape[2]
        dx = launch_gemm(dy, weight, nk_strides(weight, not transposed), k, None, offsets, schedule)
        zero_ungrouped(dx, offsets)
    if needs[1]:
        p, q = (x, dy) if transposed else (dy, x)
        launch_wgrad(p, 0, q, 0, None, offsets, dw)
    if needs[2]:
        launch_group_sum(dy, 0, None, None, offsets, dbias)
    return dx, dw, dbias


def forward_torch(x: Tensor, weight: Tensor, offsets: Tensor, bias: Optional[Tensor], transposed: bool) -> Tensor:
    """The forward on the CPU; offsets are safe."""
    nk = weight.transpose(1, 2) if transposed else weight
    y = matmul_groups(x, nk, offsets, bias, x.new_empty((x.shape[0], nk.shape[1])))
    y[: offsets[0]] = 0
    y[offsets[-1] :] = 0
    return y


def backward_torch(
    dy: Tensor, x: Optional[Tensor], weight: Tensor, offsets: Tensor, transposed: bool, needs: Sequence[bool]
) -> Tuple[Tensor, Tensor, Tensor]:
    """The backward on the CPU; offsets are safe."""
    dx, dw, dbias = _empty_grads(dy, weight, transposed, needs)
    if needs[0]:
        matmul_groups(dy, weight if transposed else weight.transpose(1, 2), offsets, None, dx)
        dx[: offsets[0]] = 0
        dx[offsets[-1] :] = 0
    if needs[1]:
        p, q = (x, dy) if transposed else (dy, x)
        wgrad_groups(p, q, offsets, dw)
    if needs[2]:
        sum_groups(dy, offsets, dbias)
    return dx, dw, dbias


def _empty_grads(dy: Tensor, weight: Tensor, transposed: bool, needs: Sequence[bool]) -> Tuple[Tensor, Tensor, Tensor]:
    """Unwritten (dx, dw, dbias); an empty tensor stands for a gradient that is not asked for."""
    k, n = (weight.shape[1], weight.shape[2]) if transposed else (weight.shape[2], weight.shape[1])
    return (
        dy.new_empty((dy.shape[0], k) if needs[0] else (0,)),
        torch.empty_like(weight) if needs[1] else weight.new_empty(0),
        dy.new_empty((weight.shape[0], n) if needs[2] else (0,)),
    )


@torch.library.custom_op(add_op_namespace_prefix("grouped_linear"), mutates_args=())
def _grouped_linear(
    x: Tensor, weight: Tensor, group_offsets: Tensor, bias: Optional[Tensor], transposed: bool
) -> Tensor:
    offsets = _safe_offsets(group_offsets, x.shape[0])
    if x.device.type == "cpu":
        return forward_torch(x, weight, offsets, bias, transposed)
    with on_device_of(x):
        return forward_triton(x, weight, offsets, bias, transposed)


@torch.library.register_fake(add_op_namespace_prefix("grouped_linear"))
def _grouped_linear_fake(
    x: Tensor, weight: Tensor, group_offsets: Tensor, bias: Optional[Tensor], transposed: bool
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2] if transposed else weight.shape[1]))


@torch.library.custom_op(add_op_namespace_prefix("grouped_linear_backward"), mutates_args=())
def _grouped_linear_backward(
    dy: Tensor, x: Optional[Tensor], weight: Tensor, group_offsets: Tensor, transposed: bool, needs: Sequence[bool]
) -> Tuple[Tensor, Tensor, Tensor]:
    offsets = _safe_offsets(group_offsets, dy.shape[0])
    if dy.device.type == "cpu":
        return backward_torch(dy, x, weight, offsets, transposed, needs)
    with on_device_of(dy):
        return backward_triton(dy, x, weight, offsets, transposed, needs)


@torch.library.register_fake(add_op_namespace_prefix("grouped_linear_backward"))
def _grouped_linear_backward_fake(
    dy: Tensor, x: Optional[Tensor], weight: Tensor, group_offsets: Tensor, transposed: bool, needs: Sequence[bool]
) -> Tuple[Tensor, Tensor, Tensor]:
    return _empty_grads(dy, weight, transposed, needs)


def _setup_context(ctx, inputs, output):
    x, weight, group_offsets, _, ctx.transposed = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, group_offsets)


def _backward(ctx, dy):
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
    dx, dw, dbias = ops.grouped_linear_backward(dy, *ctx.saved_tensors, ctx.transposed, needs)
    return (dx if needs[0] else None, dw if needs[1] else None, None, dbias if needs[2] else None, None)


torch.library.register_autograd(add_op_namespace_prefix("grouped_linear"), _backward, setup_context=_setup_context)


def grouped_linear(
    x: Tensor, weight: Tensor, group_offsets: Tensor, bias: Optional[Tensor] = None, *, transposed: bool = False
) -> Tensor:
    """y[r] = W[g] x[r] + bias[g] for the rows r of group g, [group_offsets[g], group_offsets[g + 1]).

    x: (rows, K). weight: (G, N, K) or, transposed, (G, K, N), of any strides. group_offsets: (G + 1,) int32 or int64
    on the device, G up to 1024. bias: (G, N). Returns (rows, N) in the dtype of x.

    Rows of no group are written as 0 and left out of every gradient, also where they hold NaN. Offsets that decrease
    or leave [0, rows] are clamped: the result is then unspecified, but no memory out of bounds is touched.
    Differentiable in x, weight and bias; fp32 accumulation; bitwise repeatable; autocast applies as to `F.linear`.
    Raises TypeError or ValueError that names the argument.
    """
    for name, tensor in (("x", x), ("weight", weight), ("group_offsets", group_offsets), ("bias", bias)):
        if tensor is not None or name != "bias":
            checks.check_tensor(name, tensor)
    dtype = checks.autocast_dtype(x.device.type)
    x, weight, bias = (checks.autocast(tensor, dtype) for tensor in (x, weight, bias))
    checks.check_compute_dtype("x", x)
    checks.check_shape("x", x, (None, None), "(rows, K)")
    k = x.shape[1]
    if transposed:
        checks.check_shape("weight", weight, (None, k, None), "(G, K, N)")
    else:
        checks.check_shape("weight", weight, (None, None, k), "(G, N, K)")
    groups, n = weight.shape[0], weight.shape[2 if transposed else 1]
    if not 1 <= groups <= checks.MAX_EXPERTS:
        raise ValueError(f"weight: expected 1 to {checks.MAX_EXPERTS} groups, got {groups}")
    checks.check_shape("group_offsets", group_offsets, (groups + 1,), "(G + 1,)")
    checks.check_index_dtype("group_offsets", group_offsets)
    if bias is not None:
        checks.check_shape("bias", bias, (groups, n), "(G, N)")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            checks.check_same_dtype(name, tensor, x.dtype, "x")
    for name, tensor in (("weight", weight), ("group_offsets", group_offsets), ("bias", bias)):
        if tensor is not None:
            checks.check_device(name, tensor, x.device, "x")
    return ops.grouped_linear(x, weight, group_offsets, bias, transposed)
