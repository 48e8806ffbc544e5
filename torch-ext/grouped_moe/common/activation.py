"""Activations of the experts block: their names and parameters, and the torch implementation of both passes."""

import math
from typing import NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

ACTIVATION_NAMES = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


class Activation(NamedTuple):
    """An activation with parameters. With `name` one of silu, gelu (exact, by erf), gelu_tanh, relu, relu2 (squared):

        gated:     a = act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)
        not gated: a = act(min(x, limit))

    where act(x) = x * sigmoid(alpha * x) for silu; alpha is 1 and unused for the others. A limit of None clamps
    nothing. transformers' names for the same functions are taken, too: swish, quick_gelu (silu with an alpha of 1.702),
    gelu_python for gelu, and gelu_pytorch_tanh, gelu_python_tanh, gelu_new, gelu_fast, gelu_accurate for gelu_tanh.
    The clamped SwiGLU of gpt-oss is `Activation("silu", alpha=1.702, limit=7.0, up_offset=1.0)`.
    """

    name: str = "silu"
    alpha: float = 1  # ints: see `known_fields`
    limit: Optional[float] = None
    up_offset: float = 0


# By each name that callers may use, transformers' own among them.
_KNOWN = {
    **{name: Activation(name) for name in ACTIVATION_NAMES},
    **{"swish": Activation("silu"), "quick_gelu": Activation("silu", alpha=1.702), "gelu_python": Activation("gelu")},
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), Activation("gelu_tanh")
    ),
}


@torch.compiler.assume_constant_result
def known_fields(name: str) -> Optional[tuple]:
    """The fields of a known activation; a plain tuple, as torch 2.11 takes no named one for a constant.

    With dynamic=True a compiler makes variables of numbers that are global, which two checkpoints cannot share; so are
    the defaults of fields, but not if they are the ints 0 and 1.
    """
    return tuple(_KNOWN[name]) if name in _KNOWN else None


def as_activation(activation: Union[str, Activation], gated: bool, interleaved: bool) -> Activation:
    """Checks and completes what a caller gave. Raises TypeError and ValueError that name the argument."""
    if not isinstance(activation, (str, Activation)):
        raise TypeError(f"activation: expected a name or an Activation, got {type(activation).__name__}")
    name = activation if isinstance(activation, str) else activation.name
    fields = known_fields(name) if isinstance(name, str) else None
    if fields is None:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATION_NAMES)}, got {name!r}")
    known = Activation(*fields)
    activation = known if isinstance(activation, str) else _with_parameters(known, activation)
    if not gated and (interleaved or activation.up_offset):
        raise ValueError("gated: expected True with interleaved or an activation with up_offset, got False")
    return activation


def _with_parameters(known: Activation, given: Activation) -> Activation:
    """The known activation of that name with the parameters that are given."""
    name, alpha, limit, up_offset = given
    for field, value in (("alpha", alpha), ("limit", 1.0 if limit is None else limit), ("up_offset", up_offset)):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"activation: expected a number as {field}, got {type(value).__name__}")
        if value != value:  # math.isnan cannot be traced
            raise ValueError(f"activation: expected a number as {field}, got nan")
        if isinstance(value, int) and abs(value) > torch.finfo(torch.float64).max:
            raise ValueError(f"activation: expected {field} as a number that a float holds, got a larger int")
    if 1.0 in (alpha, known.alpha):
        name, alpha = known.name, alpha * known.alpha
    if alpha != 1.0 and name != "silu":
        raise ValueError(f"activation: alpha applies to silu only, got alpha={alpha} with {name!r}")
    if limit is not None and not limit > 0:
        raise ValueError(f"activation: limit must be positive or None, got {limit}")
    return Activation(name, alpha, None if limit == math.inf else limit, up_offset)


def activate(x: Tensor, name: str, alpha: float) -> Tensor:
    """act(x), in the dtype of x."""
    if name == "silu":
        return torch.nn.functional.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)
    if name == "gelu":
        return torch.nn.functional.gelu(x)
    if name == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    rectified = torch.relu(x)
    return rectified if name == "relu" else rectified * rectified


def _activate_vjp(grad: Tensor, x: Tensor, name: str, alpha: float) -> Tensor:
    """grad * act'(x), in the dtype of x; 0 at the kink of relu."""
    if name == "silu":
        # x sigmoid(alpha x) = silu(alpha x) / alpha
        return torch.ops.aten.silu_backward(grad, x if alpha == 1.0 else alpha * x)
    if name == "gelu":
        return torch.ops.aten.gelu_backward(grad, x)
    if name == "gelu_tanh":
        return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    return torch.ops.aten.threshold_backward(grad if name == "relu" else 2.0 * x * grad, x, 0)


def split(preact: Tensor, gated: bool, interleaved: bool) -> Tuple[Tensor, Optional[Tensor]]:
    """Views of gate and up in (..., 2 I), [gate | up] or in turn; of preact itself and nothing if not gated."""
    if not gated:
        return preact, None
    return (preact[..., ::2], preact[..., 1::2]) if interleaved else preact.chunk(2, dim=-1)


def _operands(gate: Tensor, up: Optional[Tensor], activation: Activation) -> Tuple[Tensor, Optional[Tensor]]:
    """(x, factor) of a = act(x) * factor, None if not gated."""
    _, _, limit, up_offset = activation
    if limit is not None:
        gate, up = gate.clamp(max=limit), up if up is None else up.clamp(-limit, limit)
    return gate, up + up_offset if up_offset else up


def forward(preact: Tensor, activation: Activation, gated: bool, interleaved: bool) -> Tensor:
    """a(preact): (rows, 2 I) gated or (rows, I) -> (rows, I), in the dtype of preact."""
    x, factor = _operands(*split(preact, gated, interleaved), activation)
    value = activate(x, activation.name, activation.alpha)
    return value if factor is None else value * factor


def forward_and_vjp(
    preact: Tensor, grad: Tensor, activation: Activation, gated: bool, interleaved: bool
) -> Tuple[Tensor, Tensor]:
    """(a(preact), grad * a'(preact)): (rows, I) and the shape of preact, in the dtype of preact."""
    name, alpha, limit, _ = activation
    dpreact = torch.empty_like(preact, memory_format=torch.contiguous_format)
    (gate, up), (d_gate, d_up) = (split(tensor, gated, interleaved) for tensor in (preact, dpreact))
    x, factor = _operands(gate, up, activation)
    value = activate(x, name, alpha)
    d_gate.copy_(_activate_vjp(grad if factor is None else grad * factor, x, name, alpha))
    if limit is not None:
        d_gate.masked_fill_(gate > limit, 0.0)
    if gated:
        torch.mul(value, grad, out=d_up)
        value.mul_(factor)
        if limit is not None:
            d_up.masked_fill_(up.abs() > limit, 0.0)
    return value, dpreact
