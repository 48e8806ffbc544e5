"""The whole experts block: route, up-projection with activation, down-projection, combine."""

from typing import Optional, Union

import torch
from torch import Tensor

from .backends.native.decode import decode_directly
from .backends.native.fakes import IS_BUILT
from .block import Block, check_and_pack
from .block_op import experts_op
from .block_scaled import Weight
from .common import checks
from .common.activation import Activation, as_activation
from .common.autograd import refuse_forward_mode
from .operands import LoRA


def grouped_mm_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Weight,
    down_proj: Weight,
    *,
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
    capacity: Optional[int] = None,
) -> Tensor:
    """The experts block: out[t] = sum over k of top_k_weights[t, k] * expert(top_k_index[t, k], hidden_states[t]),

    expert(e, x) = down_proj[e] a(gate_up_proj[e] x + gate_up_proj_bias[e]) + down_proj_bias[e], with the activation a
    of `Activation`. Slots whose id is outside [0, E) are sentinels: they add 0 to out, and get and give 0 gradient,
    whatever their weights hold.

    hidden_states: (T, H) bf16, fp16 or fp32 (fp64, too, on CPU). top_k_index: (T, top_k) int32 or int64. top_k_weights:
    (T, top_k), any of these floating dtypes, kept as it is. gate_up_proj: (E, 2 I, H), or (E, I, H) if not gated;
    down_proj: (E, H, I); with transposed=True (E, H, 2 I) and (E, I, H); of any strides, in the dtype of hidden_states.
    Biases: (E, 2 I) or (E, I), and (E, H), in that dtype, too; gated blocks take both or none. interleaved: gate and up
    columns alternate instead of [gate | up]. E up to 1024. A weight may be `BlockScaled`, frozen FP8, with
    transposed=False. Returns (T, H) in the dtype of hidden_states. Under autocast hidden states, plain weights and
    biases are cast as `F.linear` does.

    gate_up_lora, down_lora: a `LoRA` each, or None, that is added to the weights without making their sum. Factors are
    rounded to the dtype of hidden_states, but in decode calls: those on a GPU, without gradients, of one token or of up
    to E / (4 top_k), with native ops of up to 64 (256 with FP8 weights). Gradients of factors have their dtype. For
    several adapters each LoRA has a (L, E, r, K) and b (L, E, N, r), with the same L, and adapter_index (T,), int32 or
    int64, selects the adapter of each token; outside [0, L) it selects none.

    Differentiable once, in reverse mode, in all floating tensors; only gradients that are asked for are computed.
    Sums are in fp32 (fp64 for fp64) and in fixed order: results repeat bitwise. No host sync.

    Saved for backward, in elements, with S = T top_k rows (capacity, if that is less) and P = 2 I (I if not
    gated): T H, hidden_states itself, and S P, the pre-activation; with recompute=True T H. The backward turns the
    pre-activation into its own gradient and gives its memory back: code that keeps it longer, as by hooks on saved
    tensors, has to copy it before. docs/memory.md counts what else a call takes; docs/lora.md and docs/fp8.md say what
    LoRAs and FP8 weights add.

    capacity: a promise that at most so many slots (1 or more) are routed to local experts; it sizes buffers. If more
    are, nothing is accessed out of bounds, and an error comes instead of a wrong result: on CPU RuntimeError with both
    numbers; on an accelerator, which counts them without telling the host, an assertion on the device, in a graph's
    replay as well: CUDA reports it at the next sync and prints a message that names grouped_mm_experts and capacity.
    ROCm, whose PyTorch is built without such assertions, makes room for all slots instead. So does a trace of
    `torch.jit` if the capacity is made of sizes.
    Decode calls on an accelerator have room for all slots, and ignore it.

    Raises TypeError or ValueError that names the argument, before anything is launched, and NotImplementedError in
    gradient transforms of torch.func and for tensors with tangents of forward mode.
    """
    checks.check_flags(gated=gated, interleaved=interleaved, transposed=transposed, recompute=recompute)
    activation = as_activation(activation, gated, interleaved)
    if capacity is not None and torch.jit.is_tracing() and isinstance(capacity, Tensor):
        capacity = None  # made of sizes, for which a trace has tensors
    checks.check_count("capacity", capacity)
    if IS_BUILT:
        experts = gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias
        has_loras = gate_up_lora is not None or down_lora is not None or adapter_index is not None
        loras = (gate_up_lora, down_lora, adapter_index) if has_loras else None
        flags = gated, interleaved, transposed
        out = decode_directly(hidden_states, top_k_index, top_k_weights, experts, (activation, *flags), loras)
        if out is not None:
            return out
    if gated and (gate_up_proj_bias is None) != (down_proj_bias is None):
        missing = "gate_up_proj_bias" if gate_up_proj_bias is None else "down_proj_bias"
        raise ValueError(f"{missing}: expected with the other bias; a gated block takes both biases or none")
    block = Block(
        gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias, gate_up_lora, down_lora, activation, gated,
        interleaved, transposed, recompute, capacity,
    )  # fmt: skip
    x, adapters, weights, kind = check_and_pack("hidden_states", hidden_states, block, adapter_index)
    checks.check_choices(x, top_k_index, top_k_weights)
    refuse_forward_mode("grouped_mm_experts", x, top_k_weights, *weights)
    return experts_op(x, top_k_index, top_k_weights.contiguous(), None, adapters, *weights, *kind)
