"""Small models of transformers with experts of each kind."""

from typing import Dict

import torch
from torch import Tensor

SEQUENCE, NEW_TOKENS = 9, 6

# Large enough that the experts shape the logits.
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip

# fp32, two layers deep: the experts differ from eager by 3e-7 (see the sweep over the classes), attention, norms and
# the head pass that on and may amplify it a few times. Experts that are left out are off by more than 1e-1.
FP32_TOLERANCE = 1e-5

MODELS = {  # the class, the name of its config, and that config's own fields for a number of layers
    # Gated experts without bias.
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", lambda layers: {
        "num_experts": 4, "moe_intermediate_size": 24, "num_hidden_layers": layers,
    }),
    # Transposed, interleaved, with biases and a clamp.
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", lambda layers: {
        "num_local_experts": 4, "intermediate_size": 24, "num_hidden_layers": layers, "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"][:layers],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    # Experts without a gate.
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig", lambda layers: {
        "n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "n_group": 1,
        "topk_group": 1, "layers_block_type": ["attention", "moe"] * layers,
    }),
}  # fmt: skip


def make_model(name: str, device: str, num_layers: int = 2):
    """The model in evaluation mode, and input ids."""
    import transformers

    model_class, config_class, sizes = MODELS[name]
    config = getattr(transformers, config_class)(**SIZES, **sizes(num_layers))
    model = getattr(transformers, model_class)(config).to(device).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("_bias"):  # the experts' start at zero
            torch.nn.init.normal_(parameter)
    return model, torch.randint(1, SIZES["vocab_size"], (2, SEQUENCE), device=device)


def generate(model, ids: torch.Tensor, implementation: str, **options) -> list:
    """The tokens of greedy decoding."""
    model.set_experts_implementation(implementation)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()


def errors(got: Dict[str, Tensor], want: Dict[str, Tensor]) -> Dict[str, float]:
    """Relative, in norm."""
    assert got.keys() == want.keys()
    return {name: float((got[name].double() - t.double()).norm() / t.double().norm()) for name, t in want.items()}


def assert_close(got: Dict[str, Tensor], want: Dict[str, Tensor], tolerance: float = FP32_TOLERANCE) -> None:
    for name, error in errors(got, want).items():
        assert got[name].dtype == want[name].dtype and error <= tolerance, f"{name}: {error:.1e}"
