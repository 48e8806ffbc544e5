"""The ways into the package from transformers and kernels: registration, errors, distributed parameters, Hub layers."""

import os
import subprocess
import sys
from pathlib import Path

import kernels
import pytest
import torch

NUM_EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 4, 32, 24, 16, 2

LOAD = "import kernels; kernel = kernels.get_kernel({!r}, version={})\n"
WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
try:
    kernel.register_experts_implementation()
except ImportError as error:
    print(error)
"""


def make_experts(device: str, implementation: str, num_experts: int = NUM_EXPERTS) -> torch.nn.Module:
    """gpt-oss experts: transposed, interleaved, with biases and a clamp."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(num_local_experts=num_experts, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE)
    config._experts_implementation = implementation
    experts = GptOssExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return experts.to(device)


def make_inputs(device: str, num_experts: int = NUM_EXPERTS) -> tuple:
    """hidden_states, top_k_index, top_k_weights; the ids reach num_experts, the sentinel."""
    ids = torch.randint(0, num_experts + 1, (TOKENS, TOP_K))
    tensors = (torch.randn(TOKENS, HIDDEN, requires_grad=True), ids, torch.rand(TOKENS, TOP_K, requires_grad=True))
    return tuple(tensor.to(device) for tensor in tensors)


def test_registers_once_or_twice(grouped_moe):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    names = [grouped_moe.register_experts_implementation() for _ in range(2)]
    assert names == ["grouped_moe"] * 2
    assert callable(ALL_EXPERTS_FUNCTIONS["grouped_moe"])


def test_registers_again_with_another_capacity(grouped_moe, device):
    """The last capacity holds."""
    name = grouped_moe.register_experts_implementation("again", capacity=1e-9)
    experts, inputs = make_experts(device, name), make_inputs(device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="^capacity: "):
            experts(*inputs)
    assert grouped_moe.register_experts_implementation("again") == name
    want = make_experts(device, grouped_moe.register_experts_implementation())
    want.load_state_dict(experts.state_dict())
    assert torch.equal(experts(*inputs), want(*inputs))


def test_names_of_transformers_are_refused(grouped_moe, device):
    """All that it has, and the ones that it does not keep in its registries; they stay what they were."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    grouped_moe.register_experts_implementation("of_another_test")
    registries = ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS
    theirs = {
        name: function for registry in registries for name, function in registry.items()
        if getattr(function, "__module__", "").startswith("transformers.")
    }  # fmt: skip
    assert {"grouped_mm", "batched_mm", "deepgemm_megamoe"} <= theirs.keys()
    for name in ("", "eager", *theirs):
        with pytest.raises(ValueError, match=f"^name: expected one that transformers does not use .*, got '{name}'$"):
            grouped_moe.register_experts_implementation(name)
    assert all(function in (registry.get(name) for registry in registries) for name, function in theirs.items())


@pytest.mark.parametrize("name", [0.25, None])
def test_a_name_is_a_string(grouped_moe, name):
    with pytest.raises(TypeError, match="^name: expected a string, got"):
        grouped_moe.register_experts_implementation(name)


def test_registers_under_another_name(grouped_moe, device):
    name = grouped_moe.register_experts_implementation("another_name")
    inputs = make_inputs(device)
    experts = make_experts(device, name)
    actual = experts(*inputs)
    experts.config._experts_implementation = grouped_moe.register_experts_implementation()
    assert name == "another_name" and torch.equal(actual, experts(*inputs))


def test_capacity_as_a_share_of_the_slots(grouped_moe, device):
    """Enough: the same results, compiled with other numbers of tokens, too. Too little, of 32 slots: an error."""
    experts = make_experts(device, grouped_moe.register_experts_implementation(), num_experts=8)
    x, ids, weights = make_inputs(device, num_experts=8)
    ids[:, 0] %= 8  # local: half of the slots,
    ids[:, 1] = 8  # and the others are not
    want = experts(x, ids, weights)
    experts.config._experts_implementation = grouped_moe.register_experts_implementation("with_capacity", capacity=0.5)
    assert torch.equal(experts(x, ids, weights), want)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for tokens in (16, 9, 13):
        inputs = x[:tokens], ids[:tokens], weights[:tokens]
        assert torch.equal(compiled(*inputs), experts(*inputs))
    if device == "cpu":
        for share, room in ((0.3, 10), (1 / 3, 11), (1e-9, 1)):
            experts.config._experts_implementation = grouped_moe.register_experts_implementation("few", capacity=share)
            with pytest.raises(RuntimeError, match=f"^capacity: expected at least the 16 slots.*, got {room}$"):
                experts(x, ids, weights)


@pytest.mark.parametrize(
    "value, error", [(0.0, ValueError), (-0.5, ValueError), (1.5, ValueError), (float("nan"), ValueError),
                     ("half", TypeError), (True, TypeError)], ids=str,
)  # fmt: skip
def test_capacity_that_is_no_share(grouped_moe, value, error):
    with pytest.raises(error, match="^capacity: expected"):
        grouped_moe.register_experts_implementation("with_capacity", capacity=value)


def test_without_transformers_raises_a_clear_error(hub):
    code = LOAD.format(hub.repo_id, hub.version) + WITHOUT_TRANSFORMERS
    result = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "register_experts_implementation" in result.stdout and "pip install 'transformers>=5.9'" in result.stdout


def test_needs_no_transformers_to_load(hub):
    code = LOAD.format(hub.repo_id, hub.version) + "import sys; print('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["False"], result.stderr


def test_wrong_num_experts_is_named(implementation, device):
    experts = make_experts(device, implementation)
    experts.num_experts += 1
    with pytest.raises(ValueError, match="num_experts: expected 4 as in gate_up_proj, got 5"):
        experts(*make_inputs(device))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_output_has_the_dtype_of_hidden_states(dtype, implementation, device):
    """As in eager, where weights and activations may differ: with fp32 norms before bf16 experts, say."""
    experts = make_experts(device, implementation).to(torch.bfloat16)
    x, ids, weights = make_inputs(device)
    assert experts(x.to(dtype), ids, weights).dtype == dtype


def kernelize(experts: torch.nn.Module, grouped_moe, device: str) -> torch.nn.Module:
    """The experts in a model whose layers `kernels` has replaced, without a fallback."""
    repository = kernels.LocalLayerRepository(Path(grouped_moe.__file__).parent, layer_name="GroupedMoeExperts")
    model = torch.nn.Sequential(experts)
    with kernels.use_kernel_mapping({"GroupedMoeExperts": {device: repository}}, inherit_mapping=False):
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        return kernels.kernelize(model, mode=mode, device=device, use_fallback=False)[0]


def test_hub_layer_computes_the_same(grouped_moe, implementation, device):
    """Through kernels, which checks the layer's rules on the way: stateless, same signature, no members of its own."""
    experts = make_experts(device, implementation)
    inputs = make_inputs(device)
    leaves = (inputs[0], inputs[2], *experts.parameters())
    expected = experts(*inputs)
    grads = torch.autograd.grad(expected.sum(), leaves)
    experts.config._experts_implementation = "eager"
    extensible = type("ExtensibleExperts", (type(experts),), {})
    kernels.replace_kernel_forward_from_hub(extensible, "GroupedMoeExperts")
    experts.__class__ = extensible
    layer = kernelize(experts, grouped_moe, device)
    assert layer.forward.__func__.__qualname__ == "GroupedMoeExperts.forward"
    actual = layer(*inputs)
    assert torch.equal(actual, expected)
    for grad, reference in zip(torch.autograd.grad(actual.sum(), leaves), grads):
        assert torch.equal(grad, reference)


def test_runs_cold_on_fake_tensors(grouped_moe, implementation):
    """As an exporter calls it: the gate is probed on real values all the same."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    sys.modules[grouped_moe.__name__ + ".integrations.transformers_gate"]._probe_gate.cache_clear()
    experts, inputs = make_experts("cpu", implementation), make_inputs("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = experts(*inputs)
    assert out.shape == inputs[0].shape


def make_silu_experts(device: str, implementation: str) -> torch.nn.Module:
    """A gate that is silu times up, in a class that a test may change."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        num_experts=NUM_EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    experts = type("OwnExperts", (Qwen3MoeExperts,), {})(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return experts.to(device)


def assert_as_by_slot(experts: torch.nn.Module, device: str) -> None:
    """The module does what its gate, asked for one slot after the other, says."""
    x, ids, weights = make_inputs(device)
    with torch.no_grad():
        actual, expected = experts(x, ids, weights), torch.zeros_like(x)
        for slot, expert in enumerate(ids.flatten().tolist()):
            if expert < NUM_EXPERTS:
                token, choice = divmod(slot, TOP_K)
                act = experts._apply_gate(experts.gate_up_proj[expert] @ x[token])
                expected[token] += weights[token, choice] * (experts.down_proj[expert] @ act)
    assert torch.linalg.vector_norm(actual - expected) < 1e-3 * torch.linalg.vector_norm(expected)


def test_a_gate_that_changes_is_looked_at_again(implementation, device):
    """A class is patched after the first forward; then its activation gets a hook."""
    experts = make_silu_experts(device, implementation)
    assert_as_by_slot(experts, device)
    usual = type(experts)._apply_gate
    type(experts)._apply_gate = lambda self, gate_up: 1.5 * usual(self, gate_up)
    assert_as_by_slot(experts, device)
    type(experts)._apply_gate = usual
    experts.act_fn.register_forward_hook(lambda module, inputs, output: 0.5 * output)
    assert_as_by_slot(experts, device)


def test_quantized_weights_are_named(implementation, device):
    experts = make_silu_experts(device, implementation)
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj.to(torch.uint8), requires_grad=False)
    with pytest.raises(TypeError, match="^gate_up_proj: expected one of .*, got torch.uint8"):
        experts(*make_inputs(device))


def test_activations_by_the_names_of_transformers(grouped_moe, device):
    """Each name of ACT2FN that is accepted computes that function; alone and in an Activation."""
    from transformers.activations import ACT2FN

    x, one = torch.linspace(-6.0, 6.0, 64, device=device)[:, None], torch.ones(64, 1, device=device)
    ids, eye = torch.zeros(64, 1, dtype=torch.int64, device=device), torch.ones(1, 1, 1, device=device)
    accepted = set()
    for name in ACT2FN:
        for activation in (name, grouped_moe.Activation(name)):
            try:
                y = grouped_moe.grouped_mm_experts(x, ids, one, eye, eye, activation=activation, gated=False)
            except ValueError:
                continue
            torch.testing.assert_close(y.double(), ACT2FN[name](x.double()), rtol=1e-5, atol=1e-6)
            accepted.add(name)
    assert accepted >= {"swish", "quick_gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "relu2", "gelu_python"}
    with_alpha = grouped_moe.Activation("swish", alpha=2.0)
    y = grouped_moe.grouped_mm_experts(x, ids, one, eye, eye, activation=with_alpha, gated=False)
    torch.testing.assert_close(y, x * torch.sigmoid(2.0 * x), rtol=1e-5, atol=1e-6)
