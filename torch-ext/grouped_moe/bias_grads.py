"""Gradients of a bias that is scaled per row: `grouped_dbias_dscales`."""

import itertools
from types import ModuleType
from typing import Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .common import _compat, checks
from .common.autograd import is_plain, refuse_forward_mode
from .common.numbers import wide_dtype
from .registration import define_op
from .rows import unit_rows
from .splits import Splits, as_splits


def _dbias_dscales(
    kernels: ModuleType, dy: Tensor, scales: Tensor, bias: Tensor, splits: Tensor, dbias: Tensor, dscales: Tensor,
    accumulate: Sequence[bool],
) -> None:  # fmt: skip
    """Writes dbias and dscales, or adds to them where `accumulate` says so."""
    torch.autograd.graph.increment_version([dbias, dscales])
    adds_dbias, adds_dscales = accumulate
    rows = kernels.split_rows(splits, bias.shape[0], dy.shape[0], dy.dtype)
    dots = dy.new_empty(kernels.num_bias_dots(dy.shape[1]), dy.shape[0], dtype=dscales.dtype)
    kernels.bias_grads(unit_rows(dy), rows, scales, bias, dbias, dots, accumulate=adds_dbias)
    kernels.sum_dots(dots, rows, dscales, accumulate=adds_dscales)


_run = define_op(
    "dbias_dscales",
    "(Tensor dy, Tensor scales, Tensor bias, Tensor splits, Tensor(a!) dbias, Tensor(b!) dscales, bool[] accumulate)"
    " -> ()",
    _dbias_dscales,
    lambda *_: None,
)


def _refuse_overlap(buffers: Dict[str, Tensor], inputs: Dict[str, Tensor]) -> None:
    """Raises ValueError if a buffer, which is contiguous, shares memory with an input or the other buffer.

    Not where a compiler traces the call: it knows no addresses.
    """
    tensors = {**inputs, **buffers}
    if not buffers or torch.compiler.is_compiling() or not all(map(is_plain, tensors.values())):
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
    wide = wide_dtype(dy.dtype)
    if buffer is None:
        return dy.new_empty(shape, dtype=wide)
    checks.check_tensor(name, buffer)
    if buffer.dtype != wide:
        raise TypeError(f"{name}: expected {wide}, in which the sums are, got {buffer.dtype}")
    checks.check_operand(name, buffer, shape, legend, dy.device, wide, "dy")
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

    dy: (rows, N) bf16, fp16 or fp32 (fp64, too, on CPU). bias_scales: (rows,), of any floating dtype. bias: (G, N), in
    the dtype of dy. splits: as for `grouped_linear`. dbias, dscales: buffers to add to and return, in the dtype of the
    sums, contiguous, of memory of their own; without them new ones. Not differentiable. Raises TypeError or ValueError
    that names the argument, and NotImplementedError in transforms of torch.func and for tensors with tangents of
    forward mode.
    """
    if not torch.compiler.is_compiling() and _compat.in_transform(if_unknown=False):  # gradients would silently be 0
        refused = "neither differentiated nor mapped by transforms of torch.func"
        raise NotImplementedError(f"grouped_dbias_dscales: {refused}")
    refuse_forward_mode("grouped_dbias_dscales", dy, bias_scales, bias)
    checks.check_tensor("dy", dy)
    checks.check_matrix("dy", dy, "(rows, N)")
    checks.check_scales("bias_scales", bias_scales, dy, "dy")
    checks.check_operand("bias", bias, (None, dy.shape[1]), "(G, N)", dy.device, dy.dtype, "dy")
    checks.check_num_groups("bias", bias.shape[0])
    splits = as_splits(splits, bias.shape[0], dy.shape[0], dy.device, "dy")
    accumulate = [dbias is not None, dscales is not None]
    given = {name: buffer for name, buffer in (("dbias", dbias), ("dscales", dscales)) if buffer is not None}
    dbias = _sums("dbias", dbias, tuple(bias.shape), "(G, N)", dy)
    dscales = _sums("dscales", dscales, (dy.shape[0],), "(rows,)", dy)
    _refuse_overlap(given, {"dy": dy, "bias_scales": bias_scales, "bias": bias, "splits": splits})
    with torch.no_grad():
        _run(dy, bias_scales.contiguous(), bias, splits, dbias, dscales, accumulate)
    return dbias, dscales
