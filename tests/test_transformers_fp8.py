"""transformers' FP8 experts: models of them, with LoRA by peft, against eager models on the same weights in fp64."""

import copy

import pytest
import torch
from compare import assert_close
from test_transformers_load import QWEN3_MOE, build_model
from torch import nn

finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

E, H, I, LAYERS = 6, 256, 192, 2  # noqa: E741
TOLERANCE = 5e-5
NAMES = ("gate_up_proj", "down_proj")
SIZES = {
    "vocab_size": 64, "hidden_size": H, "intermediate_size": 128, "moe_intermediate_size": I, "num_experts": E,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts_per_tok": 2, "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.fixture
def implementation(grouped_moe):
    return grouped_moe.register_experts_implementation()


def empty_model(implementation: str, **options) -> nn.Module:
    """With FP8 experts and plain linear layers."""
    config = Qwen3MoeConfig(**SIZES)
    config._experts_implementation = implementation
    model = Qwen3MoeForCausalLM(config)
    others = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    finegrained.replace_with_fp8_linear(model, others, FineGrainedFP8Config(**options))
    return model


def make_models(grouped_moe, implementation: str, device: str, per_expert: bool = False):
    """(a model with FP8 experts, the eager one in fp64 with the same weights)."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES)
    config._experts_implementation = "eager"
    plain = Qwen3MoeForCausalLM(config)
    model = empty_model(implementation)
    others = {name: tensor for name, tensor in plain.state_dict().items() if "experts." not in name}
    model.load_state_dict(others, strict=False)
    plain = plain.double()
    for layer, like in zip(model.model.layers, plain.model.layers):
        experts = layer.mlp.experts
        experts.block_size = None if per_expert else experts.block_size
        for name in NAMES:
            weight, parts = getattr(like.mlp.experts, name), 2 if per_expert and name == "gate_up_proj" else 1
            n, k = weight.shape[1:]
            scaled = grouped_moe.quantize_blocks(weight, (n // parts, k) if per_expert else (128, 128), parts)
            for attribute, tensor in ((name, scaled.data), (f"{name}_scale_inv", scaled.scale_inv)):
                assert getattr(experts, attribute).shape == tensor.shape or per_expert
                setattr(experts, attribute, nn.Parameter(tensor, requires_grad=False))
            weight.data = scaled.dequantize(torch.float64)
    return model.to(device), plain


def make_ids(device: str):
    return torch.randint(0, SIZES["vocab_size"], (2, 9)).to(device)


@pytest.mark.parametrize("per_expert", [False, True], ids=["blocks", "per-expert"])
def test_matches_eager(grouped_moe, implementation, device, per_expert):
    model, plain = make_models(grouped_moe, implementation, device, per_expert)
    ids = make_ids(device)
    with torch.no_grad():
        logits = model(ids).logits
    assert_close("logits", logits.cpu(), plain(ids.cpu()).logits.detach(), torch.float32, terms=2 * H * H)


def test_trains_what_is_not_scaled(grouped_moe, implementation, device):
    """Gradients pass through FP8 experts to all other parameters."""
    model, plain = make_models(grouped_moe, implementation, device)
    ids = make_ids(device)
    model(ids, labels=ids).loss.backward()
    plain(ids.cpu(), labels=ids.cpu()).loss.backward()
    want = dict(plain.named_parameters())
    checked = 0
    for name, parameter in model.named_parameters():
        if "experts." in name:
            assert parameter.grad is None
            continue
        error = (parameter.grad.cpu().double() - want[name].grad).norm() / want[name].grad.norm()
        assert error < TOLERANCE, name
        checked += 1
    assert checked > 10


def test_lora_by_peft(grouped_moe, implementation, device):
    """The gradients of adapters on FP8 experts, of which peft alone has none; without a warning."""
    peft = pytest.importorskip("peft", minversion="0.21")
    models = make_models(grouped_moe, implementation, device)
    options = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
    targets = [f"experts.{name}" for name in NAMES]
    model, plain = (
        peft.get_peft_model(each, peft.LoraConfig(target_parameters=list(targets), **options)) for each in models
    )
    adapters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    theirs = {name: parameter for name, parameter in plain.named_parameters() if "lora_" in name}
    for name, parameter in adapters.items():
        theirs[name].data.copy_(parameter.data)
    ids = make_ids(device)
    model(ids, labels=ids).loss.backward()
    plain(ids.cpu(), labels=ids.cpu()).loss.backward()
    assert len(adapters) == LAYERS * 6
    for name, parameter in adapters.items():
        want = theirs[name].grad
        assert (parameter.grad.cpu().double() - want).norm() / want.norm() < TOLERANCE, name


def test_what_peft_puts_in_their_place_is_refused(grouped_moe, implementation, device):
    """Sums of codes and adapters, as of two active ones, mean nothing."""
    peft = pytest.importorskip("peft", minversion="0.21")
    model, _ = make_models(grouped_moe, implementation, device)
    options = {"r": 4, "target_modules": [], "init_lora_weights": False}
    config = peft.LoraConfig(target_parameters=["experts.down_proj"], **options)
    model = peft.get_peft_model(model, config)
    model.add_adapter("second", copy.deepcopy(config))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="down_proj: expected the codes of an FP8 weight, got a parametrization"):
        model(make_ids(device))


@pytest.mark.parametrize("options, message", [
    ({"expert_dtype": "fp4"}, "expected FP8 experts in torch.float8_e4m3fn, got torch.int8"),
    ({"weight_block_size": (1, 32), "scale_fmt": "ue8m0"}, "block: expected multiples of 16"),
])  # fmt: skip
def test_other_formats_are_refused(implementation, options, message):
    """When they come into a model, before its weights load; of one that is set to us later, when they run."""
    with pytest.raises(ValueError, match=message):
        empty_model(implementation, **options)
    model = empty_model("eager", **options).to_empty(device="cpu")
    model.set_experts_implementation(implementation)
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model(make_ids("cpu"))


def test_on_the_meta_device(implementation):
    """As `from_pretrained` builds a model."""
    model = build_model(QWEN3_MOE, implementation)
    finegrained.replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config())
    experts = model.model.layers[0].mlp.experts
    assert "FP8" in type(experts).__name__ and experts.config._experts_implementation == implementation
