"""The reference with random roundings wherever the package rounds: how far off its results may be.

- What is stored goes up or down to a number of its dtype, either as likely as it is near: rows that go into a product,
  its result, and their gradients. This has twice the variance of rounding to nearest, and leaves alone what is exact.
  As there, equal numbers of a tensor round alike, and negative ones as positive ones.
- A sum of n terms in fp32 (fp64 for fp64) is off by about sqrt(n) times the last digit of the sum of the terms'
  magnitudes: by n roundings, each of a partial sum that is no larger.
- An activation or its derivative is off by about four times the last digit of the terms that are added in it.

So the error of a result is in proportion to the magnitudes that it is made of, however much of them cancels.
"""

import importlib.util
from functools import partial
from types import ModuleType
from typing import Callable, NamedTuple, Optional, Tuple

import torch
from fuzz_cases import sort_slots
from torch import Tensor

LOSSES = 4  # last digits that an activation may be off by: about eight operations


class Adapted(NamedTuple):
    """weight (N, K) + scaling b a, of which the package multiplies the parts one after the other."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scaling: float

    def t(self) -> "Adapted":
        return self._replace(weight=self.weight.t())


def last_digit(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """What the last binary digit of a number of this magnitude counts."""
    info = torch.finfo(dtype)
    unit = torch.ldexp(torch.full_like(magnitude, info.eps), torch.frexp(magnitude).exponent - 1)
    return unit if info.bits == 8 else unit.clamp_min(info.smallest_normal * info.eps)  # codes have scales


class Roundings:
    """Random roundings. dtype: of what is stored. rows: of the rows that go into a product."""

    def __init__(self, dtype: torch.dtype, rows: torch.dtype, device, seed: int) -> None:
        self.dtype, self.rows, self.wide = dtype, rows, torch.promote_types(dtype, torch.float32)
        self.generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, like: Tensor) -> Tensor:
        """The same for equal magnitudes, which round alike: of slots of one token and expert, or of saturated codes."""
        each, inverse = torch.unique(like.abs(), return_inverse=True)
        drawn = torch.rand(each.shape, generator=self.generator, dtype=like.dtype, device=like.device)
        return drawn[inverse]

    def to_dtype(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        magnitude = value.abs()
        unit = last_digit(magnitude, dtype)
        return torch.copysign(unit * torch.floor(magnitude / unit + self.uniform(value)), value)

    def off(self, value: Tensor, magnitudes: Tensor, digits: float) -> Tensor:
        """value, off by so many last digits of the magnitudes: with the variance of the other roundings."""
        noise = 2**0.5 * (self.uniform(value) - 0.5)
        return value + torch.where(magnitudes == 0, 0.0, digits * noise * last_digit(magnitudes, self.wide))

    def sum(self, value: Tensor, magnitudes: Tensor, terms: int) -> Tensor:
        """value, a sum of so many terms, of which the magnitudes are added up in magnitudes."""
        return self.off(value, magnitudes, terms**0.5)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right. Of sixteenths it is exact, so that it stays on its side of a kink."""
        if all(torch.equal((16 * factor).round(), 16 * factor) for factor in (left, right)):
            return left @ right
        return self.sum(left @ right, left.abs() @ right.abs(), left.shape[1])


class _By(torch.autograd.Function):
    """forward(*tensors), whose gradients are backward(gradient of the result, *tensors)."""

    @staticmethod
    def forward(ctx, forward: Callable, backward: Callable, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.gradients = backward
        return forward(*tensors)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tuple[Optional[Tensor], ...]:
        return None, None, *ctx.gradients(grad, *ctx.saved_tensors)


def with_roundings(reference: ModuleType, roundings: Roundings) -> ModuleType:
    """A copy of the reference that rounds as the package does."""
    dtype, rows, wide = roundings.dtype, roundings.rows, roundings.wide
    spec = importlib.util.spec_from_file_location("reference_with_roundings", reference.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)

    def stored(x: Tensor, dtype: torch.dtype, grad_dtype: Optional[torch.dtype]) -> Tensor:
        """x in a dtype, and its gradient in one, unless this is None."""

        def backward(grad: Tensor, _) -> Tuple[Tensor]:
            return (grad if grad_dtype is None else roundings.to_dtype(grad, grad_dtype),)

        return _By.apply(lambda x: roundings.to_dtype(x, dtype), backward, x)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        """x (R, K) times the transpose of weight (N, K)."""

        def backward(grad: Tensor, x: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
            return roundings.product(grad, weight), roundings.product(grad.t(), x)

        return _By.apply(lambda x, weight: roundings.product(x, weight.t()), backward, x, weight)

    def linear(x: Tensor, weight, bias: Optional[Tensor] = None, bias_scales: Optional[Tensor] = None) -> Tensor:
        pair = weight if isinstance(weight, Adapted) else None
        weight = pair.weight if pair else weight
        if not len(x):  # as of most groups where there are many
            return reference.linear(x, weight, bias, bias_scales)
        x = stored(x, rows, dtype)
        y = product(stored(x, rows, dtype) if pair else x, weight)
        if bias is not None:
            scales = x.new_ones(len(x)) if bias_scales is None else bias_scales
            y = y + stored(product(scales[:, None], bias[:, None]), dtype, None)
        if pair:  # a sum of two products that are stored, both ways; on a GPU one sum, with a rounding less
            a, b = (stored(factor, dtype, None) for factor in (pair.a, pair.b))
            projected = stored(pair.scaling * product(x, a), dtype, dtype)
            y = stored(y, dtype, None) + product(projected, b)
        return stored(y, dtype, rows)

    def activation(x: Tensor, name: str = "silu", alpha: float = 1.0) -> Tensor:
        """act(x) = x s(x), of which the derivative is s(x) + x s'(x). A gelu's s is 1 and a term that may cancel it."""
        act, adds_one = partial(reference.activation, name=name, alpha=alpha), "gelu" in name

        def forward(x: Tensor) -> Tensor:
            value = act(x)
            return roundings.off(value, x.abs() if adds_one else value.abs(), LOSSES)

        def backward(grad: Tensor, x: Tensor) -> Tuple[Tensor]:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                value = act(x)
                (slope,) = torch.autograd.grad(value.sum(), x)
            factor = torch.where(x == 0, slope, value / x).detach()
            magnitude = (1.0 if adds_one else factor.abs()) + (slope - factor).abs()
            return (grad * roundings.off(slope, magnitude, LOSSES),)

        return _By.apply(forward, backward, x)

    def scale_rows(y: Tensor, scales: Tensor) -> Tensor:
        def backward(grad: Tensor, y: Tensor, scales: Tensor) -> Tuple[Tensor, Tensor]:
            terms = grad * y
            dscales = roundings.sum(terms.sum(1), terms.abs().sum(1), y.shape[1])
            return roundings.to_dtype(grad * scales[:, None], wide), dscales

        return _By.apply(lambda y, scales: roundings.to_dtype(y * scales[:, None], wide), backward, y, scales)

    def grouped_mm_experts(
        hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj, down_proj, **given
    ) -> Tensor:
        """By `grouped_mlp`: the package, too, has the gradients of routing weights from those of the activation."""
        offsets, slots = sort_slots(top_k_index, gate_up_proj.shape[0])
        tokens, scales = slots // top_k_index.shape[1], top_k_weights.flatten()[slots]
        y = copy.grouped_mlp(hidden_states[tokens], offsets, scales, gate_up_proj, down_proj, scales, **given)
        return torch.zeros_like(hidden_states).index_add(0, tokens, y)

    for function in (Adapted, linear, activation, scale_rows, grouped_mm_experts):
        setattr(copy, function.__name__, function)
    return copy
