"""Two grouped linear layers with an activation between them, over rows that are sorted by group already."""

from typing import Optional, Union

from torch import Tensor

from .block import Block, check_and_pack
from .block_op import experts_op
from .block_scaled import Weight
from .common import checks
from .common.activation import Activation, as_activation
from .common.autograd import refuse_forward_mode
from .operands import LoRA
from .splits import Splits, as_splits


def grouped_mlp(
    x: Tensor,
    splits: Splits,
    activation_scales: Optional[Tensor],
    gate_up_proj: Weight,
    down_proj: Weight,
    *,
    bias_scales: Optional[Tensor] = None,
    gate_up_proj_bias: Optional[Tensor] = None,
    down_proj_bias: Optional[Tensor] = None,
    gate_up_lora: Optional[LoRA] = None,
    down_lora: Optional[LoRA] = None,
    adapter_index: Optional[Tensor] = None,
    activation: Union[str, Activation] = "silu",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    recompute: bool = False,
) -> Tensor:
    """The experts on rows that are sorted already: for the rows r of group g

    y[r] = down_proj[g] (activation_scales[r] a(gate_up_proj[g] x[r] + gate_up_proj_bias[g]))
         + bias_scales[r] down_proj_bias[g], with the activation a of `Activation`.

    x: (rows, H), in a dtype that `grouped_mm_experts` takes. splits: as for `grouped_linear`; rows of no group are
    written as 0, left out of every gradient and never contribute. activation_scales, bias_scales: (rows,), of any
    floating dtype, kept as they are; None for ones. They may be the same tensor, whose gradient is then the sum.
    Weights, biases, activation and layout flags: as for `grouped_mm_experts`, but that one bias may come without the
    other. gate_up_lora, down_lora, adapter_index: as for `grouped_mm_experts`, with an adapter per row, (rows,).
    Returns (rows, H) in the dtype of x.

    Differentiable once, in reverse mode, in all floating tensors, each only when asked for; fp32 accumulation; bitwise
    repeatable; no host sync. Saved for backward: x (not if gate_up_proj and the a of its LoRA are frozen), the
    pre-activation, (rows, 2 I) or (rows, I), and (rows, L r) for the b of each LoRA; with recompute=True x and the
    (rows, L r) of down_lora.
    Raises TypeError or ValueError that names the argument, and NotImplementedError as `grouped_mm_experts` does.
    """
    checks.check_flags(gated=gated, interleaved=interleaved, transposed=transposed, recompute=recompute)
    activation = as_activation(activation, gated, interleaved)
    block = Block(
        gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias, gate_up_lora, down_lora, activation, gated,
        interleaved, transposed, recompute,
    )  # fmt: skip
    x, adapters, weights, kind = check_and_pack("x", x, block, adapter_index)
    scales = {"activation_scales": activation_scales, "bias_scales": bias_scales}
    for name, tensor in scales.items():
        if tensor is not None:
            checks.check_scales(name, tensor, x)
            scales[name] = tensor.contiguous()
    if bias_scales is not None and down_proj_bias is None:
        raise ValueError("bias_scales: expected None without down_proj_bias, which they scale")
    splits = as_splits(splits, gate_up_proj.shape[0], x.shape[0], x.device)
    refuse_forward_mode("grouped_mlp", x, *scales.values(), *weights)
    return experts_op(x, splits, *scales.values(), adapters, *weights, *kind)
