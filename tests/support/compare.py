"""Norm-wise and worst-row relative error against a reference in fp64.

Tolerances, in units u of roundoff. Dtypes of one or two bytes: sums are in fp32, so what counts are the roundings of
stored values. A gradient passes at most eight (preact, activation, dout W, dpreact, row of y or dx, result, ...); each
is uniform with an rms of u / sqrt(3), independent of the others, so eight make 1.7 u. Allowed are 4 u in norm; 8 u in
the worst of some thousand rows. fp32 and fp64: sums of up to a few hundred terms, some after the other, make
sqrt(terms) u each: 64 u in norm, 256 u in the worst row. Where the terms are given, twice and eight times their root.
Entries of a row may be off by two subnormal numbers besides: a row of fp16 that is scaled by 1e-6 has no more digits.
"""

from types import MappingProxyType
from typing import Dict

import pytest
import torch
from torch import Tensor

UNIT_ROUNDOFF = {
    torch.float8_e4m3fn: 2.0**-4,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}


INNER_PRODUCTS = ("top_k_weights", "activation_scales", "bias_scales")


def tolerances(dtype: torch.dtype, terms: int = 0):
    """(norm-wise, worst-row) tolerance of a result computed in dtype, as sums of so many terms."""
    u = UNIT_ROUNDOFF[dtype]
    return (4 * u, 8 * u) if dtype.itemsize <= 2 else (max(64, 2 * terms**0.5) * u, max(256, 8 * terms**0.5) * u)


def assert_close(
    name: str, got: Tensor, want: Tensor, dtype: torch.dtype, inner_products: bool = False, terms: int = 0
) -> None:
    """Fails unless got is want (fp64) within the tolerances of dtype. A row is an entry of the first dimension.

    A row that is 0 in want must be exactly 0 in got. NaN never passes. inner_products: entries are single inner
    products, which cancel, so that a row's error is measured against the rms of all rows where that is larger.
    """
    assert got.shape == want.shape, f"{name}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    assert want.dtype == torch.float64, f"{name}: the reference is in {want.dtype}"
    assert bool(torch.isfinite(want).all()), f"{name}: the reference is not finite"
    if not got.numel():
        return
    size, (allowed_norm, allowed_row) = norms(want), tolerances(dtype, terms)
    floor = size.square().mean().sqrt() if inner_products else torch.zeros_like(size[0])
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    by_row = allowed_row * torch.maximum(size, floor) + 2 * subnormal * want[0].numel() ** 0.5
    message = difference(name, got, want, allowed_norm * size.norm(), by_row)
    if message:
        raise AssertionError(message)


def norms(tensor: Tensor) -> Tensor:
    """Of each entry of the first dimension."""
    return tensor.double().reshape(tensor.shape[0], -1).norm(dim=1) if tensor.numel() else tensor.new_zeros(0).double()


def difference(name: str, got: Tensor, want: Tensor, in_norm: Tensor, by_row: Tensor) -> str:
    """What is wrong, or nothing. NaN is always wrong. in_norm, by_row: absolute errors that are allowed."""
    apart = got.detach().double() - want
    error, size = norms(apart), norms(want)
    bad = ~(error <= by_row)
    if bool(error.norm() <= in_norm) and not bool(bad.any()):
        return ""
    row = int(torch.where(bad, error / by_row, 0.0).nan_to_num(torch.inf).argmax())
    column = int(apart[row].abs().nan_to_num(torch.inf).argmax())
    return (
        f"{name} {tuple(got.shape)} {got.dtype}: error {float(error.norm() / size.norm()):.2e} in norm (allowed"
        f" {float(in_norm / size.norm()):.1e}), {int(bad.sum())} bad rows, worst {row} with {float(error[row]):.2e} of"
        f" {float(size[row]):.2e} (allowed {float(by_row[row]):.1e}); there at {column}: got"
        f" {float(got[row].flatten()[column]):.9g}, expected {float(want[row].flatten()[column]):.9g}"
    )


def assert_bitwise(name: str, got: Tensor, want: Tensor) -> None:
    """Fails unless got and want hold the same values in the same dtype. NaN never passes."""
    assert got.dtype == want.dtype, f"{name}: expected {want.dtype}, got {got.dtype}"
    assert got.shape == want.shape, f"{name}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    if not torch.equal(got, want):
        where = (got != want).nonzero()[:4].tolist()
        raise AssertionError(f"{name}: differs at {int((got != want).sum())} of {got.numel()} places, first {where}")


def assert_matches(got: Dict[str, Tensor], want: Dict[str, Tensor], dtype, own=MappingProxyType({}), few=0) -> None:
    """Everything in its own dtype, `dtype` unless `own` says another one, within the tolerances of the coarser of both.

    Gradients of scales and routing weights are inner products, and so are rows of so few numbers.
    """
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor is not None and tensor.dtype == own.get(name, dtype), name
        coarse = max(tensor.dtype, dtype, key=lambda each: torch.finfo(each).eps)
        single = name in INNER_PRODUCTS or tensor[:1].numel() <= few
        assert_close(name, tensor, want[name], coarse, inner_products=single)


def assert_same(got: Dict[str, Tensor], want: Dict[str, Tensor], what: str = "") -> None:
    """Bitwise, with the same names."""
    assert got.keys() == want.keys()
    assert_part(got, want, what)


def assert_part(got: Dict[str, Tensor], want: Dict[str, Tensor], what: str = "") -> None:
    """Bitwise, what got has, which may be less."""
    for name, tensor in got.items():
        assert_bitwise(f"{what}{name}", tensor, want[name])


def assert_differentiable_once(out, x, curved: bool, backward: bool) -> None:
    """A second derivative raises, by autograd.grad or backward().

    curved: the first loss is not linear, so that its gradient depends on the output, too, not on what was saved alone.
    """
    (grad,) = torch.autograd.grad(out.square().sum() if curved else out.sum(), x, create_graph=True)
    again = out.square().sum() + grad.square().sum()
    with pytest.raises(RuntimeError, match="differentiable once"):
        again.backward() if backward else torch.autograd.grad(again, x)
