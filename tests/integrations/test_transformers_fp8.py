"""transformers' FP8 experts: models of them, with LoRA by peft, against eager models on the same weights in fp64."""

import copy
import functools

import pytest
import torch
from compare import assert_close
from fp8_training import hold_in_fp8
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytest.importorskip("transformers.integrations.finegrained_fp8")
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

E, H, I, LAYERS = 6, 256, 192, 2  # noqa: E741
TOLERANCE = 1e-5
NAMES = ("gate_up_proj", "down_proj")
SIZES = {
    "vocab_size": 64, "hidden_size": H, "intermediate_size": 128, "moe_intermediate_size": I, "num_experts": E,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts_per_tok": 2, "decoder_sparse_step": 1,
}  # fmt: skip


def empty_model(implementation: str, **options) -> nn.Module:
    """With FP8 experts and plain linear layers."""
    config = Qwen3MoeConfig(**SIZES)
    config._experts_implementation = implementation
    model = Qwen3MoeForCausalLM(config)
    hold_in_fp8(model, **options)
    return model


def freeze(module: nn.Module, **tensors: torch.Tensor) -> None:
    """Gives the module these as parameters without gradients."""
    for name, tensor in tensors.items():
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))


def set_scaled(experts: nn.Module, name: str, scaled) -> None:
    freeze(experts, **{name: scaled.data, f"{name}_scale_inv": scaled.scale_inv})


def make_models(grouped_moe, implementation: str, device: str, per_expert: bool = False, parts: int = 1):
    """(a model with FP8 experts, the eager one in fp64 with the same weights). parts: of gate_up_proj."""
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
            weight, own = getattr(like.mlp.experts, name), parts if name == "gate_up_proj" else 1
            n, k = weight.shape[1:]
            scaled = grouped_moe.quantize_blocks(weight, (n // own, k) if per_expert else (128, 128), own)
            shapes = getattr(experts, name).shape, getattr(experts, f"{name}_scale_inv").shape
            assert shapes == (scaled.data.shape, scaled.scale_inv.shape) or per_expert or parts == 2
            set_scaled(experts, name, scaled)
            weight.data = scaled.dequantize(torch.float64)
    return model.to(device), plain


def make_ids(device: str):
    return torch.randint(0, SIZES["vocab_size"], (2, 9)).to(device)


def with_lora(models: tuple, names: tuple = NAMES, modules: tuple = ()) -> tuple:
    """Both models under peft, with the same adapters on these weights of experts. Skips the test without peft."""
    peft = pytest.importorskip("peft", minversion="0.21")
    options = {"r": 4, "target_modules": [*modules], "target_parameters": [f"experts.{name}" for name in names]}
    config = peft.LoraConfig(**options, init_lora_weights=False)
    model, plain = (peft.get_peft_model(each, copy.deepcopy(config)) for each in models)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "lora_" in k}, strict=False)
    return model, plain


def assert_logits(model: nn.Module, plain: nn.Module, device: str, trains: bool = False) -> None:
    """The eager model's. trains: where autograd records."""
    ids = make_ids(device)
    with torch.set_grad_enabled(trains):
        got, want = model(ids).logits.detach().cpu(), plain(ids.cpu()).logits.detach()
    assert_close("logits", got, want, torch.float32, terms=2 * H * H)


def assert_gradients(model: nn.Module, plain: nn.Module, device: str) -> list:
    """The eager model's, of all that is trained. Returns the names."""
    ids = make_ids(device)
    model(ids, labels=ids).loss.backward()
    plain(ids.cpu(), labels=ids.cpu()).loss.backward()
    want = dict(plain.named_parameters())
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, grad in trained.items():
        error = (grad.cpu().double() - want[name].grad).norm() / want[name].grad.norm()
        assert error < TOLERANCE, name
    return [*trained]


# Of 200 intermediate columns the scales of gate and of up are as many as those of both together: those of checkpoints.
@pytest.mark.parametrize(
    "per_expert, parts, width",
    [(False, 1, I), (True, 2, I), (True, 1, I), (False, 2, 200)],
    ids=["blocks", "halves", "whole", "blocks-apart"],
)
def test_matches_eager(grouped_moe, implementation, device, monkeypatch, per_expert, parts, width):
    monkeypatch.setitem(SIZES, "moe_intermediate_size", width)
    assert_logits(*make_models(grouped_moe, implementation, device, per_expert, parts), device)


def test_trains_what_is_not_scaled(grouped_moe, implementation, device):
    """Gradients pass through FP8 experts to all other parameters."""
    trained = assert_gradients(*make_models(grouped_moe, implementation, device), device)
    assert len(trained) > 10 and not any("experts." in name for name in trained)


def test_lora_by_peft(grouped_moe, implementation, device):
    """The gradients of adapters on FP8 experts, of which peft alone has none; without a warning."""
    models = with_lora(make_models(grouped_moe, implementation, device), modules=("q_proj",))
    assert len(assert_gradients(*models, device)) == LAYERS * 6


def test_what_peft_puts_in_their_place_is_refused(grouped_moe, implementation, device):
    """Sums of codes and adapters, as of two active ones, mean nothing."""
    model, _ = with_lora(make_models(grouped_moe, implementation, device), ("down_proj",))
    model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="down_proj: expected the codes of an FP8 weight, got a parametrization"):
        model(make_ids(device))


def test_weights_that_were_left_plain(grouped_moe, implementation, monkeypatch):
    """As transformers leaves those whose extents are no whole blocks; the same of whole blocks were cast by mistake."""
    monkeypatch.setitem(SIZES, "moe_intermediate_size", 200)
    model, plain = make_models(grouped_moe, implementation, "cpu", parts=2)
    for layer, like in zip(model.model.layers, plain.model.layers):
        freeze(layer.mlp.experts, **{name: getattr(like.mlp.experts, name).detach().float() for name in NAMES})
    assert_logits(model, plain, "cpu")
    experts = model.model.layers[0].mlp.experts
    freeze(experts, down_proj=torch.zeros(E, H, 256))
    for experts.block_size in (experts.block_size, None):
        with pytest.raises(ValueError, match="load it anew: the codes have lost their scales"), torch.no_grad():
            model(make_ids("cpu"))


def plain_experts(grouped_moe, implementation, monkeypatch):
    """Experts of a class for FP8, whose weights transformers left plain."""
    monkeypatch.setitem(SIZES, "moe_intermediate_size", 200)
    experts = make_models(grouped_moe, implementation, "cpu", parts=2)[0].model.layers[0].mlp.experts
    freeze(experts, **{name: torch.randn(getattr(experts, name).shape) / 20 for name in NAMES})
    experts.gate_up_proj[0, 0, 0] = 100.3  # as large as codes are, but none of them
    return experts


@pytest.mark.parametrize("called", [False, True])
def test_a_cast_of_codes_is_refused(grouped_moe, implementation, monkeypatch, called):
    """Also of weights whose extents are no whole blocks, as those have that transformers leaves plain.

    called: before, too. What was found of the plain weights is not said of the codes that take their place.
    """
    experts = plain_experts(grouped_moe, implementation, monkeypatch)
    inputs = torch.randn(5, H), torch.randint(0, E, (5, 2)), torch.rand(5, 2)
    use = experts if called else lambda *_: None
    use(*inputs)
    for name, parts in zip(NAMES, (2, 1)):
        set_scaled(experts, name, grouped_moe.quantize_blocks(getattr(experts, name), parts=parts))
    use(*inputs)
    experts.to(torch.bfloat16)
    with pytest.raises(ValueError, match="gate_up_proj: .* the codes have lost their scales"):
        experts(*inputs)


def test_the_look_at_values_is_not_seen_by_selective_checkpoints(grouped_moe, implementation, monkeypatch):
    """It comes in the first call alone, not in its recomputation."""
    experts = plain_experts(grouped_moe, implementation, monkeypatch)
    x = torch.randn(5, H, requires_grad=True)
    ids, weights = torch.randint(0, E, (5, 2)), torch.rand(5, 2)

    def keep_casts(_, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if "_to_copy" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, keep_casts)
    grads = []
    for _ in range(2):
        y = checkpoint(lambda x: experts(x, ids, weights).double() ** 2, x, use_reentrant=False, context_fn=contexts)
        grads += torch.autograd.grad(y.sum(), x)
    assert torch.equal(*grads) and grads[0].any()


def test_a_parametrization_of_several_tensors(grouped_moe, implementation):
    experts = make_models(grouped_moe, implementation, "cpu")[0].model.layers[0].mlp.experts
    freeze(experts, down_proj=experts.down_proj.float())
    nn.utils.parametrizations.weight_norm(experts, "down_proj")
    with pytest.raises(ValueError, match="down_proj: expected the codes of an FP8 weight, got a parametrization"):
        experts(torch.randn(5, H), torch.randint(0, E, (5, 2)), torch.rand(5, 2))


@pytest.mark.parametrize("registered", ["before", "after"])
def test_lora_on_a_weight_that_was_left_plain(grouped_moe, implementation, device, registered):
    """The other one is in FP8. peft wraps experts that the package knows, or comes before it."""
    forget_registration = pytest.importorskip("peft_experts").forget_registration
    model, plain = make_models(grouped_moe, implementation, device)
    for layer, like in zip(model.model.layers, plain.model.layers):
        freeze(layer.mlp.experts, down_proj=like.mlp.experts.down_proj.detach().float().to(device))
    model, plain = with_lora((model, plain), ("down_proj",))
    if registered == "after":
        forget_registration(model)
    assert_logits(model, plain, device, trains=True)


def test_parts_of_blocks_are_refused(grouped_moe, implementation):
    """The rank's part of a weight, of tensor parallelism that cuts through its blocks, and one that does not."""
    experts = make_models(grouped_moe, implementation, "cpu")[0].model.layers[0].mlp.experts
    experts.intermediate_dim = 2 * I
    hidden, ids, weights = torch.zeros(3, H), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(
        ValueError, match=f"gate_up_proj: expected .* whole blocks, got {I} of {2 * I} for blocks of 128"
    ):
        experts(hidden, ids, weights)
    experts.block_size = (64, 64)
    for name in NAMES:
        n, k = getattr(experts, name).shape[1:]
        freeze(experts, **{f"{name}_scale_inv": torch.ones(E, -(-n // 64), -(-k // 64))})
    assert experts(hidden, ids, weights).shape == hidden.shape


@pytest.mark.parametrize("options, message", [
    ({"expert_dtype": "fp4"}, "expected FP8 experts in torch.float8_e4m3fn, got torch.int8"),
    ({"weight_block_size": (1, 32), "scale_fmt": "ue8m0"}, "block: expected multiples of 16"),
])  # fmt: skip
def test_other_formats_are_refused(implementation, options, message):
    """When they come into a model, before its weights load; of one that is set to us later, when they run."""
    eager = empty_model("eager", **options)
    if "expert_dtype" in options and eager.model.layers[0].mlp.experts.down_proj.dtype.is_floating_point:
        pytest.skip("this version of transformers has no FP4 experts")
    with pytest.raises(ValueError, match=message):
        empty_model(implementation, **options)
    model = eager.to_empty(device="cpu")
    model.set_experts_implementation(implementation)
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model(make_ids("cpu"))


def test_on_the_meta_device(grouped_moe, implementation, monkeypatch):
    """As `from_pretrained` builds a model; also weights that are left plain."""
    with torch.device("meta"):
        model = empty_model(implementation)
    experts = model.model.layers[0].mlp.experts
    assert "FP8" in type(experts).__name__ and experts.config._experts_implementation == implementation
    nn.Sequential(plain_experts(grouped_moe, implementation, monkeypatch).to("meta"))
