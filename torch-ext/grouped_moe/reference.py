"""The experts block and the grouped layers in plain torch, by a loop over experts: the yardstick of the tests.

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
    raise ValueError(f"name: expected silu, gelu, gelu_tanh, relu or relu2, got {name!r}")


def hidden(
    preact: Tensor,
    name: str = "silu",
    alpha: float = 1.0,
    limit: Optional[float] = None,
    up_offset: float = 0.0,
    gated: bool = True,
    interleaved: bool = False,
) -> Tensor:
    """What goes into the down-projection: (R, 2 I) or, not gated, (R, I) -> (R, I)."""
    if not gated:
        return activation(preact if limit is None else preact.clamp(max=limit), name, alpha)
    gate, up = (preact[:, ::2], preact[:, 1::2]) if interleaved else preact.chunk(2, dim=1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activation(gate, name, alpha) * (up + up_offset)


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, bias_scales: Optional[Tensor] = None) -> Tensor:
    """y[r] = W x[r] + bias * bias_scales[r]: x (R, K), weight (N, K), bias (N,), bias_scales (R,). Returns (R, N)."""
    y = x @ weight.t()
    if bias is None:
        return y
    return y + (bias if bias_scales is None else bias * bias_scales[:, None])


def scale_rows(y: Tensor, scales: Tensor) -> Tensor:
    """scales[r] y[r]: y (R, N), scales (R,). Returns (R, N)."""
    return y * scales[:, None]


def expert(
    x: Tensor, up: Tensor, down: Tensor, up_bias: Optional[Tensor] = None, down_bias: Optional[Tensor] = None, **kind
) -> Tensor:
    """One expert on rows x (R, H): up (2 I or I, H), down (H, I). Returns (R, H). `kind`: see `hidden`."""
    return linear(hidden(linear(x, up, up_bias), **kind), down, down_bias)


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
    """The experts block by a loop over experts; sentinels are simply never visited. `kind`: see `hidden`."""
    out = torch.zeros_like(hidden_states)
    for e in range(gate_up_proj.shape[0]):
        tokens, ks = (top_k_index == e).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        weights = (weight[e].t() if transposed else weight[e] for weight in (gate_up_proj, down_proj))
        biases = (None if bias is None else bias[e] for bias in (gate_up_proj_bias, down_proj_bias))
        y = expert(hidden_states[tokens], *weights, *biases, **kind)
        out = out.index_add(0, tokens, scale_rows(y, top_k_weights[tokens, ks]))
    return out


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    group_offsets: Tensor,
    bias: Optional[Tensor] = None,
    bias_scales: Optional[Tensor] = None,
    transposed: bool = False,
) -> Tensor:
    """y[r] = W[g] x[r] + bias[g] * bias_scales[r] by a loop over groups; rows of no group are 0.

    x (rows, K), weight (G, N, K) or, transposed, (G, K, N), group_offsets (G + 1,), bias (G, N), bias_scales (rows,).
    """
    N, bounds = weight.shape[2 if transposed else 1], [0, *group_offsets.tolist(), x.shape[0]]
    sizes = [end - start for start, end in zip(bounds, bounds[1:])]  # before the first group, of groups, after the last
    scales = [None] * len(sizes) if bias_scales is None else bias_scales.split(sizes)
    parts = [x.new_zeros((size, N)) for size in sizes]
    for group, (rows, some) in enumerate(list(zip(x.split(sizes), scales))[1:-1]):
        own = weight[group].t() if transposed else weight[group]
        parts[group + 1] = linear(rows, own, None if bias is None else bias[group], some)
    return torch.cat(parts)


def grouped_mlp(
    x: Tensor,
    group_offsets: Tensor,
    activation_scales: Optional[Tensor],
    gate_up_proj: Tensor,
    down_proj: Tensor,
    bias_scales: Optional[Tensor] = None,
    gate_up_proj_bias: Optional[Tensor] = None,
    down_proj_bias: Optional[Tensor] = None,
    transposed: bool = False,
    **kind,
) -> Tensor:
    """Two grouped linear layers around an activation scaled per row; rows of no group are 0. `kind`: see `hidden`.

    x (rows, H), scales (rows,), gate_up_proj (G, 2 I or I, H), down_proj (G, H, I), or transposed. Returns (rows, H).
    """
    a = hidden(grouped_linear(x, gate_up_proj, group_offsets, gate_up_proj_bias, None, transposed), **kind)
    a = a if activation_scales is None else scale_rows(a, activation_scales)
    return grouped_linear(a, down_proj, group_offsets, down_proj_bias, bias_scales, transposed)
