"""Gradients of a bias that is scaled per row: `grouped_dbias_dscales`."""

import itertools
from typing import Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _checks as checks
from ._ops import add_op_namespace_prefix, ops
from ._torch import without_autocast
from ._torch.grouped_linear import dot_groups, sum_groups
from ._torch.schedule import safe_offsets
from .define import have_addresses
from .gemm import launch_bias_backward
from .schedule import Splits, as_splits, schedule_for
from .tuning import on_device_of


def launch_dbias_dscales(
    dy: Tensor,
    scales: Tensor,
    bias: Tensor,
    splits: Tensor,
    dbias: Tensor,
    dscales: Tensor,
    accumulate: Sequence[bool],
) -> None:
    """Writes dbias and dscales, or adds to them where `accumulate` says so, by the Triton kernels."""
    schedule = schedule_for(splits, bias.shape[0], dy.shape[0], dy.dtype)
    launch_bias_backward(dy, scales, bias, schedule, dbias, dscales, tuple(accumulate))


@torch.library.custom_op(add_op_namespace_prefix("dbias_dscales"), mutates_args=("dbias", "dscales"))
def _dbias_dscales(
    dy: Tensor, scales: Tensor, bias: Tensor, splits: Tensor, dbias: Tensor, dscales: Tensor, accumulate: Sequence[bool]
) -> None:
    if dy.device.type == "cpu":
        offsets = safe_offsets(splits, bias.shape[0], dy.shape[0])
        without_autocast(sum_groups)(dy, offsets, dbias, weights=scales, accumulate=accumulate[0])
        without_autocast(dot_groups)(dy, bias, offsets, dscales, accumulate=accumulate[1])
        return
    with on_device_of(dy):
        launch_dbias_dscales(dy, scales, bias, splits, dbias, dscales, accumulate)


@torch.library.register_fake(add_op_namespace_prefix("dbias_dscales"))
def _dbias_dscales_fake(dy, scales, bias, splits, dbias, dscales, accumulate):
    return None


def _refuse_overlap(buffers: Dict[str, Tensor], inputs: Dict[str, Tensor]) -> None:
    """Raises ValueError if a buffer, which is contiguous, shares memory with an input or the other buffer."""
    tensors = {**inputs, **buffers}
    if not buffers or not have_addresses(*tensors.values()):
        return
    spans = {name: _span(tensor) for name, tensor in tensors.items()}
    for name, other in itertools.product(buffers, tensors):
        (start, end), (other_start, other_end) = spans[name], spans[other]
        if name != other and start < other_end and other_start < end:
            raise ValueError(f"{name}: expected memory apart from that of {other}")


def _span(tensor: Tensor) -> Tuple[int, int]:
    """The addresses of a tensor's first element and past its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def _sums(name: str, buffer: Optional[Tensor], shape: Tuple[int, ...], legend: str, dy: Tensor) -> Tensor:
    """The caller's buffer, checked, or a new one."""
    wide = torch.promote_types(dy.dtype, torch.float32)
    if buffer is None:
        return dy.new_empty(shape, dtype=wide)
    checks.check_tensor(name, buffer)
    if buffer.dtype != wide:
        raise TypeError(f"{name}: expected {wide}, in which the sums are, got {buffer.dtype}")
    checks.check_shape(name, buffer, shape, legend)
    checks.check_device(name, buffer, dy.device, "dy")
    if not buffer.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {buffer.stride()}")
    if buffer.requires_grad:
        raise ValueError(f"{name}: expected a tensor without gradient, since it is written to")
    return buffer


def grouped_dbias_dscales(
    dy: Tensor,
    bias_scales: Tensor,
    bias: Tensor,
    splits: Splits,
    *,
    dbias: Optional[Tensor] = None,
    dscales: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """(dbias, dscales) of y[r] = ... + bias[g] * bias_scales[r]: what a fused backward needs beside its GEMMs.

    dbias[g] = sum over the rows r of group g of bias_scales[r] dy[r], (G, N); dscales[r] = <dy[r], bias[g]>, (rows,), 0
    for rows of no group, which are not read. Both fp32 (fp64 for fp64), summed in fixed order without atomics.

    dy: (rows, N). bias_scales: (rows,), of any floating dtype. bias: (G, N), in the dtype of dy. splits: as for
    `grouped_linear`. dbias, dscales: buffers to add to and return, fp32, contiguous, of memory of their own; without
    them new ones. Not differentiable. Raises TypeError or ValueError that names the argument.
    """
    for name, tensor in (("dy", dy), ("bias", bias)):
        checks.check_tensor(name, tensor)
    checks.check_compute_dtype("dy", dy)
    checks.check_shape("dy", dy, (None, None), "(rows, N)")
    checks.check_rows("dy", dy.shape[0])
    checks.check_scales("bias_scales", bias_scales, dy)
    checks.check_shape("bias", bias, (None, dy.shape[1]), "(G, N)")
    checks.check_num_groups("bias", bias.shape[0])
    checks.check_same_dtype("bias", bias, dy.dtype, "dy")
    checks.check_device("bias", bias, dy.device, "dy")
    splits = as_splits(splits, bias.shape[0], dy.shape[0], dy.device)
    accumulate = [dbias is not None, dscales is not None]
    given = {name: buffer for name, buffer in (("dbias", dbias), ("dscales", dscales)) if buffer is not None}
    dbias = _sums("dbias", dbias, tuple(bias.shape), "(G, N)", dy)
    dscales = _sums("dscales", dscales, (dy.shape[0],), "(rows,)", dy)
    _refuse_overlap(given, {"dy": dy, "bias_scales": bias_scales, "bias": bias, "splits": splits})
    with torch.no_grad():
        scales = bias_scales.detach().contiguous()
        ops.dbias_dscales(dy.detach(), scales, bias.detach(), splits, dbias, dscales, accumulate)
    return dbias, dscales
