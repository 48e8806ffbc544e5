"""The ways into the package from transformers and kernels: registration, Hub layers, and models as they are built."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import compare
import kernels
import pytest
import torch
from experts_modules import EXPERTS, GPT_OSS, assert_same, build, make_custom, make_inputs, run


def test_names_of_transformers_are_refused(grouped_moe):
    """All that it has, and the ones that it does not keep in its registries; they stay what they were."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    grouped_moe.register_experts_implementation("of_another_test", capacity=0.5)
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


@pytest.mark.parametrize("given, error, message", [
    *(({"name": name}, TypeError, "^name: expected a string, got") for name in (0.25, None)),
    *(({"capacity": share}, ValueError, "^capacity: expected") for share in (0.0, -0.5, 1.5, float("nan"))),
    *(({"capacity": share}, TypeError, "^capacity: expected") for share in ("half", True)),
], ids=str)  # fmt: skip
def test_errors_of_registration(grouped_moe, given, error, message):
    with pytest.raises(error, match=message):
        grouped_moe.register_experts_implementation(**given)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_code_may_put_modules_into_modules(implementation, device, fullgraph, fresh_compiler):
    """Of which PyTorch tells the package, who looks at them: a compiler knows them in part."""

    class Wraps(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.compiled = torch.nn.Linear(8, 8), None

        def forward(self, x):
            self.other = self.inner
            if not fullgraph:
                torch._dynamo.graph_break()
                self.__dict__["compiled"] = compile_later(self.inner)
            return (self.compiled or self.other)(x)

    def compile_later(module):
        warnings.warn("which the compiler leaves to Python", stacklevel=1)
        return torch.compile(module, backend="aot_eager", dynamic=True)

    model, x = Wraps().to(device), torch.randn(4, 8, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.compile(model, fullgraph=fullgraph, backend="aot_eager")(x), model.inner(x))


def test_capacity_as_a_share_of_the_slots(grouped_moe, device):
    """Enough: the same results, compiled with other numbers of tokens, too. Too little, of 32 slots: an error.

    Of several registrations, under the usual name or another one, the last one holds.
    """
    register = grouped_moe.register_experts_implementation
    assert [register(), register(), register("again")] == ["grouped_moe", "grouped_moe", "again"]
    experts = build(GPT_OSS, device, "grouped_moe")
    x, ids, weights = (tensor[:16] for tensor in make_inputs(device)[:3])
    ids, weights = ids[:, :2], weights[:, :2]
    ids[:, 1] = EXPERTS  # half of the slots are not local
    want = experts(x, ids, weights)
    experts.config._experts_implementation = register("again", capacity=0.5)
    assert torch.equal(experts(x, ids, weights), want)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for tokens in (16, 9, 13):
        inputs = x[:tokens], ids[:tokens], weights[:tokens]
        assert torch.equal(compiled(*inputs), experts(*inputs))
    for share, room in ((0.3, 10), (1 / 3, 11), (1e-9, 1)) if device == "cpu" else ():
        register("again", capacity=share)
        with pytest.raises(RuntimeError, match=f"^capacity: expected at least the 16 slots.*, got {room}$"):
            experts(x, ids, weights)
    for share in (1.0, None):
        register("again", capacity=share)
        assert torch.equal(experts(x, ids, weights), want)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_has_room_for_all_slots(grouped_moe, device):
    """`torch.jit.trace` has tensors for sizes: a share of the slots of one call would be too few for a larger one."""
    experts = build(GPT_OSS, device, grouped_moe.register_experts_implementation("shares", capacity=0.5))
    x, ids, weights = (tensor[:16] for tensor in make_inputs(device)[:3])
    ids, weights = ids[:, :2], weights[:, :2]
    ids[:, 1] = EXPERTS
    for tokens in (1, 4):
        traced = torch.jit.trace(experts, (x[:tokens], ids[:tokens], weights[:tokens]), check_trace=False)
        assert torch.equal(traced(x, ids, weights), experts(x, ids, weights))


WITHOUT_TRANSFORMERS = """
import kernels, sys
kernel = kernels.get_kernel({!r}, version={})
print("transformers" in sys.modules)
sys.modules[{!r}] = None
try:
    kernel.register_experts_implementation()
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("missing", ["transformers", "transformers.cache_utils"])
def test_without_transformers(hub, missing):
    """The package loads without it; the registration raises an error that says what to install and what is missing."""
    code = WITHOUT_TRANSFORMERS.format(hub.repo_id, hub.version, missing)
    result = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.startswith("False\n"), result.stderr
    assert "register_experts_implementation" in result.stdout and "pip install 'transformers>=5.13'" in result.stdout
    assert missing in result.stdout.split(", got: ")[1]


def kernelize(experts: torch.nn.Module, grouped_moe, device: str) -> torch.nn.Module:
    """Through kernels, which checks the layer's rules on the way: stateless, same signature, no members of its own."""
    extensible = type("ExtensibleExperts", (type(experts),), {})
    kernels.replace_kernel_forward_from_hub(extensible, "GroupedMoeExperts")
    experts.__class__ = extensible
    repository = kernels.LocalLayerRepository(Path(grouped_moe.__file__).parent, layer_name="GroupedMoeExperts")
    with kernels.use_kernel_mapping({"GroupedMoeExperts": {device: repository}}, inherit_mapping=False):
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        (layer,) = kernels.kernelize(torch.nn.Sequential(experts), mode=mode, device=device, use_fallback=False)
    assert layer.forward.__func__.__qualname__ == "GroupedMoeExperts.forward"
    return layer


def test_hub_layer_computes_the_same(grouped_moe, implementation, device):
    experts = build(GPT_OSS, device)
    *inputs, cotangent = make_inputs(device)
    want = run(experts, implementation, inputs, cotangent)
    got = run(kernelize(experts, grouped_moe, device), "eager", inputs, cotangent)
    compare.assert_same(got, want)


@pytest.mark.parametrize("norm", [None, torch.nn.Tanh()], ids=["plain", "norm"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["concatenated", "interleaved"])
@pytest.mark.parametrize("act_fn", [None, torch.nn.ReLU(), torch.nn.Softplus()], ids=lambda each: type(each).__name__)
def test_hub_layer_of_a_class_outside_of_transformers(grouped_moe, device, act_fn, interleaved, norm):
    """It has the attributes that docs/hub-layer.md names, and no gate of its own."""

    class Experts(torch.nn.Module):
        def __init__(self, like):
            super().__init__()
            self.gate_up_proj, self.down_proj, self.num_experts = like.gate_up_proj, like.down_proj, EXPERTS
            self.config = like.config  # for `run`
            if act_fn is not None:
                self.act_fn = act_fn
            if interleaved:
                self.is_concatenated = False
            if norm is not None:
                self.has_post_expert_norm, self.post_expert_norm = True, norm

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return like(hidden_states, top_k_index, top_k_weights)

    def gate(module, first, second):
        rows = torch.cat((first, second), dim=-1)
        gate, up = (rows[:, ::2], rows[:, 1::2]) if interleaved else (first, second)
        return module.act_fn(gate) * up

    step = None if norm is None else lambda module, rows: norm(rows)
    like = make_custom(device, gate=gate, step=step, act_fn=act_fn or torch.nn.SiLU())
    experts, (*inputs, cotangent) = Experts(like), make_inputs(device)
    want = run(experts, "eager", inputs, cotangent)
    assert_same(run(kernelize(experts, grouped_moe, device), "eager", inputs, cotangent), want)


SIZES = {"vocab_size": 64, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
         "num_hidden_layers": 1, "num_experts_per_tok": 2, "intermediate_size": 128}  # fmt: skip
TEXT = {**SIZES, "intermediate_size_mlp": 64, "num_local_experts": 2, "pad_token_id": 0}
VISION = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
          "image_size": 28, "patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 64,
          "projector_output_dim": 64}  # fmt: skip
DBRX = {"vocab_size": 64, "d_model": 64, "n_heads": 2, "n_layers": 1,
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 2}}  # fmt: skip
QWEN3_MOE = "Qwen3MoeForCausalLM"
CONFIGS = {
    QWEN3_MOE: ("Qwen3MoeConfig", {**SIZES, "num_experts": 4, "moe_intermediate_size": 128}),
    "Llama4ForConditionalGeneration": ("Llama4Config", {"text_config": TEXT, "vision_config": VISION}),
    "DbrxForCausalLM": ("DbrxConfig", DBRX),
}


def build_model(name: str, implementation: str) -> torch.nn.Module:
    import transformers

    config_class, sizes = CONFIGS[name]
    config = getattr(transformers, config_class)(**sizes)
    config._experts_implementation = implementation
    with torch.device("meta"):
        return getattr(transformers, name)(config)


@pytest.mark.parametrize(
    "name, kind", [("Llama4ForConditionalGeneration", "Llama4TextExperts"), ("DbrxForCausalLM", "DbrxExperts")]
)
def test_experts_outside_of_the_interface_are_warned_of(implementation, name, kind):
    with pytest.warns(UserWarning, match=f"{implementation}' has no effect on {kind}, which does not go by"):
        build_model(name, implementation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_model(name, "eager")


def test_experts_of_modules_are_warned_of(implementation):
    """As models with code of their own have them: a list of modules by the name of experts."""
    experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    block, model = {"experts": experts, "shared_experts": torch.nn.Linear(4, 4)}, torch.nn.Module()
    model.config = build_model(QWEN3_MOE, implementation).config
    with pytest.warns(UserWarning, match="has no effect on ModuleList"):
        model.block = torch.nn.ModuleDict(block)
    with pytest.warns(UserWarning, match="has no effect on ModuleList"):
        model.experts = experts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.shared_experts, model.experts = torch.nn.Linear(4, 4), None


def test_quantized_experts_that_leave_the_interface_are_warned_of(implementation):
    """Replaced by a class that does not know the config; a wrapper around the experts is none of these."""
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_model(QWEN3_MOE, implementation)
        model.set_submodule("model.layers.0.mlp.experts", torch.nn.Sequential(model.model.layers[0].mlp.experts))
        model.set_submodule("model.layers.0.mlp.experts", model.model.layers[0].mlp.experts[0])
    model.config.num_local_experts = 4
    with pytest.warns(UserWarning, match="has no effect on Mxfp4GptOssExperts"):
        model.set_submodule("model.layers.0.mlp.experts", Mxfp4GptOssExperts(model.config))


def test_scripted_modules_keep_their_own_errors(implementation):
    """Theirs is no dict of children, which the look at what is put into it has to know."""
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match="ScriptModule"):
        scripted.add_module("other", torch.nn.Linear(2, 2))
