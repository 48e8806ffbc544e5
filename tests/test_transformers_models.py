"""Whole transformers models on the package: they compute what they do with eager experts, however they are run."""

import pytest
import torch

SEQUENCE, NEW_TOKENS = 9, 6

# Large enough that the experts shape the logits.
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip

# fp32, two layers deep: the experts differ from eager by 3e-7 (see the sweep over the classes), attention, norms and
# the head pass that on and may amplify it a few times. Experts that are left out are off by more than 1e-1.
FP32_TOLERANCE = 1e-5

# In units of the dtype's eps, the spacing at 1. A rounding is off by half of it at most. What the experts compute is
# rounded at about four places (pre-activation, activation, down-projection, sum), forward and again backward, where
# eager and the package may round apart: in the norm, one eps was seen.
ROUNDINGS = 2.0


def build_qwen3_moe(num_layers: int):
    """Gated experts without bias."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=24, num_hidden_layers=num_layers)
    return Qwen3MoeForCausalLM(config)


def build_gpt_oss(num_layers: int):
    """Transposed, interleaved, with biases and a clamp."""
    from transformers import GptOssConfig, GptOssForCausalLM

    layer_types = ["full_attention", "sliding_attention"][:num_layers]
    config = GptOssConfig(
        **SIZES, num_local_experts=4, intermediate_size=24, num_hidden_layers=num_layers, layer_types=layer_types,
        sliding_window=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    return GptOssForCausalLM(config)


def build_nemotron_h(num_layers: int):
    """Experts without a gate."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **SIZES, n_routed_experts=4, moe_intermediate_size=24, moe_shared_expert_intermediate_size=24, n_group=1,
        topk_group=1, layers_block_type=["attention", "moe"] * num_layers,
    )  # fmt: skip
    return NemotronHForCausalLM(config)


BUILDERS = {"qwen3_moe": build_qwen3_moe, "gpt_oss": build_gpt_oss, "nemotron_h": build_nemotron_h}
WITH_STATIC_CACHE = ("qwen3_moe", "gpt_oss")  # transformers 5.9 builds no masks for it with nemotron_h, eager neither


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The matrices are tiny: threads would only wait for each other, for minutes on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


@pytest.fixture(params=BUILDERS)
def name(request) -> str:
    return request.param


def make_model(name: str, device: str, num_layers: int = 2):
    """The model in evaluation mode, and input ids."""
    model = BUILDERS[name](num_layers).to(device).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("_bias"):  # the experts' start at zero
            torch.nn.init.normal_(parameter)
    return model, torch.randint(1, SIZES["vocab_size"], (2, SEQUENCE), device=device)


def logits_and_grads(model, ids: torch.Tensor, implementation: str, dtype=None) -> tuple:
    """Logits for ids, and the gradient of every parameter; under autocast to a dtype, if there is one."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    with torch.autocast(ids.device.type, dtype=dtype, enabled=dtype is not None):
        logits = model(ids).logits
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    logits.backward(cotangent)
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str = "logits") -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error <= tolerance, f"{what}: {error:.1e}"


def assert_all_close(actual: tuple, expected: tuple, tolerance: float, only: str = "") -> None:
    """Also the gradients, of the parameters with `only` in their names."""
    assert_close(actual[0], expected[0], tolerance)
    assert actual[1].keys() == expected[1].keys()
    names = [name for name in expected[1] if only in name]
    assert any("experts" in name for name in names)
    for name in names:
        assert_close(actual[1][name], expected[1][name], tolerance, name)


def assert_close_in_low_precision(actual: tuple, expected: tuple, dtype: torch.dtype) -> None:
    """Of the gradients only those of the experts: sums that cancel magnify the roundings in some of the others."""
    assert_all_close(actual, expected, ROUNDINGS * torch.finfo(dtype).eps, only=".experts.")


def test_logits_and_gradients_match_eager(name, implementation, device):
    model, ids = make_model(name, device)
    expected = logits_and_grads(model, ids, "eager")
    assert_all_close(logits_and_grads(model, ids, implementation), expected, FP32_TOLERANCE)


def test_experts_matter(name, implementation, device):
    """What the other tests rest on: without its experts, the model computes something else."""
    model, ids = make_model(name, device)
    expected, _ = logits_and_grads(model, ids, implementation)
    for parameter_name, parameter in model.named_parameters():
        if "experts.down_proj" in parameter_name:
            torch.nn.init.zeros_(parameter)
    without, _ = logits_and_grads(model, ids, implementation)
    assert (without - expected).norm() > 0.1 * expected.norm()


def test_autocast_matches_eager(name, implementation, device):
    """One layer: both route by the same values, so no token goes elsewhere for a rounding."""
    model, ids = make_model(name, device, num_layers=1)
    expected = logits_and_grads(model, ids, "eager", torch.bfloat16)
    actual = logits_and_grads(model, ids, implementation, torch.bfloat16)
    assert_close_in_low_precision(actual, expected, torch.bfloat16)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_low_precision_matches_eager(name, implementation, dtype, device):
    model, ids = make_model(name, device, num_layers=1)
    model.to(dtype)
    expected = logits_and_grads(model, ids, "eager")
    assert_close_in_low_precision(logits_and_grads(model, ids, implementation), expected, dtype)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_gradient_checkpointing_matches_eager(name, use_reentrant, implementation, device):
    model, ids = make_model(name, device)
    model.train()
    expected = logits_and_grads(model, ids, "eager")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_all_close(logits_and_grads(model, ids, implementation), expected, FP32_TOLERANCE)


def generate(model, ids: torch.Tensor, implementation: str, **options) -> list:
    """The tokens of greedy decoding."""
    model.set_experts_implementation(implementation)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()


def test_generates_the_tokens_of_eager(name, implementation, device):
    model, ids = make_model(name, device)
    assert generate(model, ids, implementation) == generate(model, ids, "eager")


@pytest.mark.parametrize("name", WITH_STATIC_CACHE)
def test_generates_with_a_static_cache(name, implementation, device):
    """On a GPU, transformers compiles the decoding by itself."""
    model, ids = make_model(name, device)
    expected = generate(model, ids, "eager")
    assert generate(model, ids, implementation, cache_implementation="static") == expected


@pytest.mark.parametrize("name", WITH_STATIC_CACHE)
def test_generates_compiled_with_a_static_cache(name, implementation, device):
    model, ids = make_model(name, device)
    expected = generate(model, ids, "eager")
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert generate(model, ids, implementation, cache_implementation="static", disable_compile=True) == expected


@pytest.mark.parametrize("name", WITH_STATIC_CACHE)
def test_trains_compiled(name, implementation, device):
    model, ids = make_model(name, device)
    expected = logits_and_grads(model, ids, "eager")
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert_all_close(logits_and_grads(model, ids, implementation), expected, FP32_TOLERANCE)


def test_loads_with_the_implementation(implementation, device, tmp_path):
    """from_pretrained(experts_implementation=...), as users ask for it."""
    from transformers import AutoModelForCausalLM

    model, ids = make_model("qwen3_moe", device)
    expected, _ = logits_and_grads(model, ids, implementation)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=implementation).to(device)
    assert loaded.config._experts_implementation == implementation
    assert torch.equal(loaded(ids).logits, expected)
