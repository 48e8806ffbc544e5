"""The experts block in plain torch, by a loop over experts: the yardstick of the tests.

Imports nothing of the package. Pass tensors in fp64 (or fp32) to compute in it; autograd gives the gradients.
"""

from typing import Optional

import torch
from torch import Tensor


def activation(x: Tensor, name: str = "silu", alpha: float = 1.0) -> Tensor:
    """act(x) for silu (x * sigmoid(alpha x)), gelu, gelu_tanh, relu and relu2."""
    if name == "silu":
        return x * torch.sigmoid(alpha * x)
    if name == "gelu":
        return torch.nn.functional.gelu(x)
    if name == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if name == "relu":
        return torch.nn.functional.relu(x)
    if name == "relu2":
        return torch.nn.functional.relu(x).square()
    raise ValueError(f"name: unknown activation {name!r}")


def expert(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor] = None,
    down_bias: Optional[Tensor] = None,
    name: str = "silu",
    alpha: float = 1.0,
    limit: Optional[float] = None,
    up_offset: float = 0.0,
    gated: bool = True,
    interleaved: bool = False,
) -> Tensor:
    """One expert on rows x (R, H): up (2 I or I, H), down (H, I). Returns (R, H)."""
    preact = x @ up.t() if up_bias is None else x @ up.t() + up_bias
    if gated:
        gate, up_part = (preact[:, ::2], preact[:, 1::2]) if interleaved else preact.chunk(2, dim=1)
        if limit is not None:
            gate, up_part = gate.clamp(max=limit), up_part.clamp(-limit, limit)
        hidden = activation(gate, name, alpha) * (up_part + up_offset)
    else:
        hidden = activation(preact if limit is None else preact.clamp(max=limit), name, alpha)
    return hidden @ down.t() if down_bias is None else hidden @ down.t() + down_bias


def grouped_mm_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Optional[Tensor] = None,
    down_proj_bias: Optional[Tensor] = None,
    transposed: bool = False,
    **kind,
) -> Tensor:
    """The experts block by a loop over experts; sentinels are simply never visited. `kind`: see `expert`."""
    out = torch.zeros_like(hidden_states)
    for e in range(gate_up_proj.shape[0]):
        tokens, ks = (top_k_index == e).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        up, down = gate_up_proj[e], down_proj[e]
        y = expert(
            hidden_states[tokens],
            up.t() if transposed else up,
            down.t() if transposed else down,
            None if gate_up_proj_bias is None else gate_up_proj_bias[e],
            None if down_proj_bias is None else down_proj_bias[e],
            **kind,
        )
        out = out.index_add(0, tokens, y * top_k_weights[tokens, ks, None])
    return out


def grouped_linear(
    x: Tensor, weight: Tensor, group_offsets: Tensor, bias: Optional[Tensor] = None, transposed: bool = False
) -> Tensor:
    """y[r] = W[g] x[r] + bias[g] by a loop over groups; rows of no group are 0."""
    bounds = group_offsets.tolist()
    parts = []
    for group, (start, end) in enumerate(zip(bounds, bounds[1:])):
        w = weight[group] if transposed else weight[group].t()
        part = x[start:end] @ w
        parts.append(part if bias is None else part + bias[group])
    head, tail = (x.new_zeros((rows, parts[0].shape[1])) for rows in (bounds[0], x.shape[0] - bounds[-1]))
    return torch.cat([head, *parts, tail])
