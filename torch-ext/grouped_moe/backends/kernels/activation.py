"""Activations in registers: value and derivative, in fp32. `grouped_moe.common.activation` has the formulas."""

from typing import NamedTuple

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi); 1 + tanh(x) = 2 sigmoid(2 x)
_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
_TANH_CUBIC = tl.constexpr(0.044715)


class Options(NamedTuple):
    """What the activation of a block is: compile-time values. N: its columns."""

    N: tl.constexpr
    GATED: tl.constexpr
    INTERLEAVED: tl.constexpr  # gate and up in turn, instead of all of gate before all of up
    ACTIVATION: tl.constexpr
    ALPHA: tl.constexpr
    LIMIT: tl.constexpr
    UP_OFFSET: tl.constexpr


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), by two approximate instructions that need no range reduction."""
    root = tl.rsqrt(1.0 + tl.exp2(x * _MINUS_LOG2_E))
    return root * root


@triton.jit
def relu(x):
    """max(x, 0); a NaN stays one. LLVM would turn a comparison into one of the bf16 values behind x, and spill them."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate(x, OPTIONS: tl.constexpr):
    """act(x)."""
    NAME: tl.constexpr = OPTIONS.ACTIVATION
    if NAME == "silu":
        return x * sigmoid(x * OPTIONS.ALPHA)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif NAME == "gelu_tanh":
        return x * sigmoid((x + x * x * x * _TANH_CUBIC) * _TANH_SCALE)
    elif NAME == "relu":
        return relu(x)
    else:
        tl.static_assert(NAME == "relu2", "unknown activation")
        return relu(x) * relu(x)


@triton.jit
def activate_grad(x, OPTIONS: tl.constexpr):
    """act'(x)."""
    NAME: tl.constexpr = OPTIONS.ACTIVATION
    if NAME == "silu":
        s = sigmoid(x * OPTIONS.ALPHA)
        return s * (1.0 + x * OPTIONS.ALPHA * (1.0 - s))
    elif NAME == "gelu":
        return 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * _INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        s = sigmoid((x + x * x * x * _TANH_CUBIC) * _TANH_SCALE)
        return s * (1.0 + x * (1.0 - s) * _TANH_SCALE * (1.0 + x * x * 3.0 * _TANH_CUBIC))
    elif NAME == "relu":
        return tl.where(relu(x) > 0, 1.0, 0.0)
    else:
        tl.static_assert(NAME == "relu2", "unknown activation")
        return 2.0 * relu(x)


@triton.jit
def clamp_above(x, OPTIONS: tl.constexpr):
    """min(x, LIMIT); a NaN stays one."""
    return x if OPTIONS.LIMIT is None else tl.minimum(x, OPTIONS.LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp_up(up, OPTIONS: tl.constexpr):
    """up limited to [-LIMIT, LIMIT]; a NaN stays one."""
    if OPTIONS.LIMIT is None:
        return up
    else:
        return tl.maximum(clamp_above(up, OPTIONS), -OPTIONS.LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def glu(gate, up, OPTIONS: tl.constexpr):
    """act(min(gate, LIMIT)) * (clamp(up) + UP_OFFSET); not GATED, act(min(gate, LIMIT))."""
    value = activate(clamp_above(gate, OPTIONS), OPTIONS)
    if OPTIONS.GATED:
        value *= clamp_up(up, OPTIONS) + OPTIONS.UP_OFFSET
    return value


@triton.jit
def act_grad(x, OPTIONS: tl.constexpr):
    """(act, its derivative with respect to min(x, LIMIT)); `zero_past` then makes a gradient one with respect to x."""
    clamped = clamp_above(x, OPTIONS)
    grad = activate_grad(clamped, OPTIONS)
    return activate(clamped, OPTIONS), grad


@triton.jit
def zero_past(grad, x, OPTIONS: tl.constexpr):
    """grad, but 0 where x > LIMIT, also if grad is not finite there."""
    return grad if OPTIONS.LIMIT is None else tl.where(x > clamp_above(x, OPTIONS), 0.0, grad)


@triton.jit
def glu_grad(gate, up, OPTIONS: tl.constexpr):
    """(glu, d glu / d gate, d glu / d up)."""
    clamped_gate = clamp_above(gate, OPTIONS)
    shifted_up = clamp_up(up, OPTIONS) + OPTIONS.UP_OFFSET
    value = activate(clamped_gate, OPTIONS)
    d_gate = activate_grad(clamped_gate, OPTIONS) * shifted_up
    # Compared with LIMIT itself, LLVM would compare the bf16 values behind x, in a fourth more instructions.
    d_gate = zero_past(d_gate, gate, OPTIONS)
    d_up = zero_past(value, tl.abs(up), OPTIONS)
    return value * shifted_up, d_gate, d_up
