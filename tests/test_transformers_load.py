"""Models whose experts cannot run as asked, as they are built: FP8 raises, experts outside of the interface warn."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

SIZES = {"vocab_size": 64, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
         "num_hidden_layers": 1, "num_experts_per_tok": 2}  # fmt: skip


def qwen3_moe_config(implementation: str):
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=128, intermediate_size=128, experts_implementation=implementation
    )


def llama4_config(implementation: str):
    """Text and vision; the experts are of the text model."""
    from transformers import Llama4Config

    vision = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
              "image_size": 28, "patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 64,
              "projector_output_dim": 64}  # fmt: skip
    text = {**SIZES, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_local_experts": 2, "pad_token_id": 0}
    config = Llama4Config(text_config=text, vision_config=vision)
    config._experts_implementation = implementation
    return config


def dbrx_config(implementation: str):
    from transformers import DbrxConfig

    sizes = {"vocab_size": 64, "d_model": 64, "n_heads": 2, "n_layers": 1}
    attention = {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 1e4}
    config = DbrxConfig(**sizes, attn_config=attention, ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 2})
    config._experts_implementation = implementation
    return config


def build(config, name: str) -> torch.nn.Module:
    import transformers

    with torch.device("meta"):
        return getattr(transformers, name)(config)


def test_fp8_experts_raise_before_the_weights_load(implementation):
    """As transformers puts them into a model whose parameters have no memory yet."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    model = build(qwen3_moe_config(implementation), "Qwen3MoeForCausalLM")
    with pytest.raises(ValueError, match="FP8 experts are not supported.*choose another experts_implementation"):
        replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config())


def test_fp8_checkpoints_raise_in_from_pretrained(implementation, tmp_path, monkeypatch):
    """A checkpoint without nearly all of its weights, which nobody has missed yet."""
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    config = qwen3_moe_config("eager")
    build(config, "Qwen3MoeForCausalLM").config.save_pretrained(tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    contents["architectures"] = ["Qwen3MoeForCausalLM"]
    contents["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(contents))
    save_file({"model.norm.weight": torch.ones(128)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    # On a machine without a GPU transformers would dequantize the checkpoint.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
    with pytest.raises(ValueError, match="FP8 experts are not supported"):
        AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=implementation)


def test_fp8_experts_that_are_there_raise_when_they_run(implementation):
    """transformers asks nothing of an implementation that a model is set to later."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, replace_with_fp8_linear

    model = build(qwen3_moe_config("eager"), "Qwen3MoeForCausalLM")
    replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config())
    model.set_experts_implementation(implementation)
    experts = model.model.layers[0].mlp.experts
    assert implementation in ALL_FP8_EXPERTS_FUNCTIONS and "FP8" in type(experts).__name__
    ids, weights = torch.zeros(16, 2, dtype=torch.int64), torch.ones(16, 2)
    with pytest.raises(ValueError, match="FP8 experts are not supported.*choose another experts_implementation"):
        experts(torch.zeros(16, 128), ids, weights)


OUTSIDE = {
    "Llama4ForConditionalGeneration": (llama4_config, "Llama4TextExperts"),
    "Llama4ForCausalLM": (lambda name: llama4_config(name).text_config, "Llama4TextExperts"),
    "Llama4TextModel": (lambda name: llama4_config(name).text_config, "Llama4TextExperts"),
    "DbrxForCausalLM": (dbrx_config, "DbrxExperts"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_experts_outside_of_the_interface_are_warned_of(implementation, name):
    make_config, kind = OUTSIDE[name]
    with pytest.warns(UserWarning, match=f"{implementation}' has no effect on {kind}, which does not go by"):
        build(make_config(implementation), name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(make_config("eager"), name)


def test_experts_of_modules_are_warned_of(implementation):
    """As models with code of their own have them: a list of modules by the name of experts."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
            self.shared_experts = torch.nn.Linear(4, 4)

    model = torch.nn.Module()
    model.config = qwen3_moe_config(implementation)
    with pytest.warns(UserWarning, match="has no effect on ModuleList"):
        model.block = Block()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.shared_experts = torch.nn.Linear(4, 4)


def test_quantized_experts_that_leave_the_interface_are_warned_of(implementation):
    """Replaced by a class that does not know the config; a wrapper around the experts is none of these."""
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build(qwen3_moe_config(implementation), "Qwen3MoeForCausalLM")
        model.set_submodule("model.layers.0.mlp.experts", torch.nn.Sequential(model.model.layers[0].mlp.experts))
        model.set_submodule("model.layers.0.mlp.experts", model.model.layers[0].mlp.experts[0])
    model.config.num_local_experts = 4
    with pytest.warns(UserWarning, match="has no effect on Mxfp4GptOssExperts"):
        model.set_submodule("model.layers.0.mlp.experts", Mxfp4GptOssExperts(model.config))
