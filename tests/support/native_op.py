"""The native op for a few tokens: cases of its own, and calls that nobody else takes."""

import torch
from cases import GPT_OSS, RELU2, Case
from poison import poison_sentinels

FEW = Case("few", T=2, top_k=3, E=40, H=64, I=48, sentinels=0.0)
STEPS = Case("steps", T=3, top_k=9, E=12, H=2120, I=1048, bias="both")  # several along H, I and the choices
WHOLE = Case("whole", T=2, top_k=8, E=16, H=2048, I=768)
# If transposed, eight warps share their K, and that of WHOLE's up-projection; five share that of all others.
ROUNDS = [
    Case("rounds-interleaved", T=3, top_k=4, E=12, H=512, I=384, interleaved=True, bias="both", activation=GPT_OSS),
    Case("rounds-not-gated", T=3, top_k=4, E=12, H=512, I=512, gated=False, activation=RELU2),
]
# Rows of codes: several blocks along all dimensions, the last ones ragged.
CODED = Case("coded", T=2, top_k=3, E=12, H=272, I=176, bias="both")
CODED_CASES = [
    CODED,
    CODED._replace(id="coded-interleaved", interleaved=True, activation=GPT_OSS),
    CODED._replace(id="coded-not-gated", gated=False, activation=RELU2, bias=""),
    CODED._replace(id="coded-steps", top_k=9, H=2320, I=1072),
    CODED._replace(id="coded-one-choice", top_k=1, H=16, I=16, bias=""),
    CODED._replace(id="coded-many", T=40, sentinels=0.0),
    WHOLE._replace(id="coded-whole", sentinels=0.0),
]


def decode(native, grouped_moe, case, inputs, loras=None):
    """By the op itself, however many tokens there are. loras: as arguments of `grouped_mm_experts`."""
    x, ids, weights, up, down, *biases = inputs[:7]
    activation = grouped_moe.Activation(*case.activation)
    kind = activation, case.gated, case.interleaved, case.transposed
    loras = loras and [loras.get(name) for name in ("gate_up_lora", "down_lora", "adapter_index")]
    return native.decode_experts(x, ids, weights, (up, down, *biases), kind, loras)


def poison_scaled(inputs, num_experts: int):
    """`poison_sentinels`, with NaN codes in experts without rows."""
    marks = torch.zeros(num_experts, device=inputs.dout.device)
    poisoned = poison_sentinels(inputs._replace(gate_up_proj=marks, down_proj=marks), num_experts)
    changed = {}
    for name in ("gate_up_proj", "down_proj"):
        codes = getattr(inputs, name).data.clone()
        codes.view(torch.uint8)[getattr(poisoned, name).isnan()] = 0x7F
        changed[name] = getattr(inputs, name)._replace(data=codes)
    return poisoned._replace(**changed)
