"""Experts modules of transformers against their own eager forward: every class, and every gate that is told apart."""

import importlib.metadata
from functools import partial
from types import MethodType

import compare
import experts_modules
import pytest
import torch
from experts_modules import EXPERTS, assert_as_eager, build, find_cases, lower_limits, make_custom, make_inputs, run
from torch.nn.functional import normalize, rms_norm, silu

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = find_cases()
# transformers -> its experts classes. Versions in between have at least what the one before has.
CLASS_COUNTS = {(5, 9): 37, (5, 17): 55, (5, 23): 65, (5, 24): 68}

# Classes that compute what the fused block does not: a norm after each expert; soft caps on gate and up.
UNFUSED = {"MuseSparkExperts", "Inkling2Experts", "Inkling2LoopExperts"}

# The names in ACT2FN whose functions the fused block has.
FUSED_ACTIVATIONS = {
    "silu", "swish", "quick_gelu", "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_accurate",
    "gelu_pytorch_tanh", "gelu_python_tanh", "relu", "relu2",
}  # fmt: skip


def test_finds_the_classes():
    version = tuple(int(part) for part in importlib.metadata.version("transformers").split(".")[:2])
    expected = max(count for since, count in CLASS_COUNTS.items() if since <= version)
    assert len(set(CASES)) >= expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1])
def test_matches_eager(case, implementation, fused_calls, device):
    """With the limits of the gate, if there are any, as they are, and lowered."""
    experts = build(case, device)
    for lower in (lambda _: True, lower_limits):
        if lower(experts):
            fused_calls.clear()
            assert_as_eager(experts, implementation)
            assert len(fused_calls) == (case[1] not in UNFUSED)
            assert_as_eager_with_sentinels(experts, implementation)


def assert_as_eager_with_sentinels(experts, implementation) -> None:
    """Eager gets expert 0 with weight 0 for a sentinel: the same function, and every version of eager takes it."""
    x, ids, weights, cotangent = make_inputs(experts.down_proj.device)
    sentinel = torch.rand(ids.shape, device=ids.device) < 0.4
    sentinel[0], sentinel[1] = True, False
    expected = run(experts, "eager", (x, ids.masked_fill(sentinel, 0), weights.masked_fill(sentinel, 0.0)), cotangent)
    expected["top_k_weights"][sentinel] = 0.0
    actual = run(experts, implementation, (x, ids.masked_fill(sentinel, EXPERTS), weights), cotangent)
    experts_modules.assert_same(actual, expected)
    assert not actual["top_k_weights"][sentinel].any() and not actual["output"][0].any()
    # Bitwise the same with other ids outside the range, and NaN wherever a sentinel leads.
    outside = torch.tensor([EXPERTS, EXPERTS + 1, -1, -EXPERTS, 2**31, 2**63 - 1, -(2**63)], device=ids.device)
    ids = ids.masked_scatter(sentinel, outside.repeat(ids.numel()))
    x, weights = x.masked_fill(sentinel.all(1, keepdim=True), torch.nan), weights.masked_fill(sentinel, torch.nan)
    compare.assert_same(run(experts, implementation, (x, ids, weights), cotangent), actual)


def plain(module, gate, up):
    return module.act_fn(gate) * up


def clamped(module, gate, up):
    return module.act_fn(gate.clamp(max=module.limit)) * up.clamp(-module.limit, module.limit)


def optionally_clamped(module, gate, up):
    return (plain if module.limit is None else clamped)(module, gate, up)


def gpt_oss(module, gate, up):
    limit = module.swiglu_limit
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(module.swiglu_alpha * gate)


def other_alpha(module, gate, up):
    glu = silu(gate.clamp(max=module.limit) * 1.001) / 1.001
    return (up.clamp(-module.limit, module.limit) + 1) * glu


def softcapped(module, gate, up):
    """As that of transformers' FP8Experts: one function for the gates of all models."""
    if module.gate_softcap is not None:
        return module.act_fn(torch.tanh(gate / module.gate_softcap)) * torch.tanh(up / module.up_softcap)
    return (optionally_clamped if module.swiglu_alpha is None else gpt_oss)(module, gate, up)


class ReLU(torch.nn.Module):
    """By the name of PyTorch's, which it is not."""

    def forward(self, x):
        return silu(x)


NO_CAPS = dict.fromkeys(("gate_softcap", "up_softcap", "limit", "swiglu_limit", "swiglu_alpha"))
LIMITS = {"limit": 0.6, "swiglu_limit": 0.6}
OSS = {"swiglu_limit": 0.6, "swiglu_alpha": 1.3}
GATES = {  # the gate, attributes of its module, and whether the fused block computes it
    "default": (None, {}, True),
    "plain": (plain, {}, True),
    "plain_beside_a_limit": (plain, {"limit": 0.6}, True),
    "clamped": (clamped, {"limit": 0.6}, True),
    "clamped_to_int": (clamped, {"limit": 1}, True),
    "clamped_to_zero": (clamped, {"limit": 0.0}, False),
    "clamped_to_tensor": (clamped, {"limit": torch.tensor(0.6)}, False),
    "clamped_to_constant": (lambda m, gate, up: m.act_fn(gate.clamp(max=20.0)) * up, {}, False),
    "clamped_to_another_constant": (
        lambda m, gate, up: plain(m, gate.clamp(max=0.75), up.clamp(-0.75, 0.75)), {"limit": 0.6}, False
    ),
    "limit_of_none": (plain, {"limit": None}, True),
    "optional_clamp": (optionally_clamped, {"limit": 0.6}, True),
    "optional_clamp_of_none": (optionally_clamped, {"limit": None}, True),
    "two_limits": (clamped, LIMITS, True),
    "two_different_limits": (clamped, {"limit": 0.6, "swiglu_limit": 0.7}, False),
    "clamped_relu": (clamped, {"limit": 0.6, "act_fn": torch.nn.ReLU()}, True),
    "unknown_act_fn": (plain, {"act_fn": torch.nn.Softplus()}, False),
    "act_fn_by_a_known_name": (plain, {"act_fn": ReLU()}, False),
    "function_as_act_fn": (plain, {"act_fn": silu}, True),
    "gpt_oss": (gpt_oss, OSS, True),
    "gpt_oss_without_act_fn": (gpt_oss, {**OSS, "act_fn": None}, True),
    "other_alpha": (other_alpha, {"limit": 0.6, "alpha": 1.0}, False),
    "clamped_both_ways": (
        lambda m, gate, up: plain(m, gate.clamp(-m.limit, m.limit), up.clamp(-m.limit, m.limit)), {"limit": 0.6}, False
    ),
    "other_activation": (lambda m, gate, up: torch.relu(gate) * up, {}, False),
    "other_activation_beside_a_large_limit": (lambda m, gate, up: torch.relu(gate) * up, {"limit": 1e3}, False),
    "almost_the_same": (lambda m, gate, up: 1.0001 * plain(m, gate, up), {}, False),
    "up_first": (lambda m, gate, up: plain(m, up, gate), {}, False),
    "clamped_to_fp16": (lambda m, gate, up: m.act_fn(gate).clamp(max=65504.0) * up, {}, False),
    "reads_more_by_getattr": (lambda m, gate, up: plain(m, gate, up) * getattr(m, "scale", 1.0), {"scale": 0.5}, False),
    "reads_more_by_hasattr": (
        lambda m, gate, up: plain(m, gate, up) * (2 if hasattr(m, "wide") else 1), {"wide": 1}, False
    ),
    "looks_for_a_limit": (
        lambda m, gate, up: (plain if getattr(m, "limit", None) is None else clamped)(m, gate, up), {}, True
    ),
    "reads_more": (lambda m, gate, up: plain(m, gate, up) * m.scale, {"scale": 0.5}, False),
    "in_fp32": (lambda m, gate, up: plain(m, gate.float(), up.float()), {}, True),
    "mixes_columns": (lambda m, gate, up: normalize(plain(m, gate, up), dim=-1), {}, False),
    "no_softcap": (softcapped, NO_CAPS, True),
    "no_softcap_clamped": (softcapped, {**NO_CAPS, **LIMITS}, True),
    "no_softcap_gpt_oss": (softcapped, {**NO_CAPS, **LIMITS, "swiglu_alpha": 1.3}, True),
    "softcap": (softcapped, {**NO_CAPS, "gate_softcap": 0.7, "up_softcap": 0.9}, False),
}  # fmt: skip
compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")


def make(name: str, device: str) -> torch.nn.Module:
    """Experts with the gate of that name."""
    gate, attributes, _ = GATES[name]
    attributes = {key: value.to(device) if torch.is_tensor(value) else value for key, value in attributes.items()}
    return make_custom(device, gate=gate, **attributes)


@pytest.mark.parametrize("name", GATES)
def test_fuses_only_the_same_gate(name, implementation, fused_calls, device):
    assert_as_eager(make(name, device), implementation)
    assert bool(fused_calls) == GATES[name][2]


def test_gates_that_are_not_of_a_class_or_change(implementation, fused_calls, device):
    """One is set on a module. A class is patched after its first forward; then its activation gets hooks."""
    experts = make_custom(device)
    experts._apply_gate = lambda rows: plain(experts, *reversed(rows.chunk(2, dim=-1)))
    assert_as_eager(experts, implementation)
    assert not fused_calls
    experts = make_custom(device)
    assert_as_eager(experts, implementation)
    usual = type(experts)._apply_gate
    type(experts)._apply_gate = lambda self, gate_up: 1.5 * usual(self, gate_up)
    assert_as_eager(experts, implementation)
    type(experts)._apply_gate = usual
    hook = experts.act_fn.register_forward_hook(lambda module, inputs, output: 0.5 * output)
    assert_as_eager(experts, implementation)
    hook.remove()
    experts.act_fn.register_forward_pre_hook(lambda module, inputs: (0.5 * inputs[0],))
    assert_as_eager(experts, implementation)


def test_a_limit_of_the_class(implementation, fused_calls, device):
    experts = make("looks_for_a_limit", device)
    type(experts).limit = 0.6
    assert_as_eager(experts, implementation)
    assert fused_calls


@pytest.mark.parametrize("where", ["module", "class"])
def test_another_forward_of_an_activation_runs(where, implementation, fused_calls, device, monkeypatch):
    """Of a module's and of its class's; the latter's are the same for another module."""
    experts = make_custom(device)
    kind, usual = type(experts.act_fn), type(experts.act_fn).forward
    with monkeypatch.context() as patch:
        if where == "module":
            experts.act_fn.forward = lambda x: usual(experts.act_fn, x).clamp(max=0.05)
        else:
            patch.setattr(kind, "forward", lambda self, x: usual(self, x).clamp(max=0.05))
        assert_as_eager(experts, implementation)
        assert not fused_calls
    assert_as_eager(make_custom(device), implementation)
    assert fused_calls


def test_an_activation_by_a_kernel_of_the_hub_is_the_same(implementation, fused_calls, device, monkeypatch):
    """As `kernels.kernelize` puts one in the place of a forward, of classes that transformers marks for it."""
    from transformers.activations import SiLUActivation

    monkeypatch.setattr(SiLUActivation, "kernel_layer_name", "SiLU", raising=False)
    experts = make_custom(device, act_fn=SiLUActivation())
    experts.act_fn.forward = MethodType(lambda self, x: silu(x), experts.act_fn)
    assert_as_eager(experts, implementation)
    assert fused_calls


@pytest.mark.parametrize("way", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_an_activation_run(way, implementation, fused_calls, device):
    """They may change gradients, as these do."""
    experts = make_custom(device)
    getattr(experts.act_fn, way)(lambda module, *grads: (2.0 * grads[0][0],))
    assert_as_eager(experts, implementation)
    assert not fused_calls


@pytest.mark.parametrize("name", ["default", "gpt_oss", "clamped_both_ways", "unknown_act_fn"])
def test_compiles_in_one_graph(name, implementation, device):
    """Cold: the first call that sees the class, and so has to find out about its gate, is the compiler's."""
    torch.compiler.reset()
    assert_as_eager(make(name, device), implementation, compiled)


def test_compiles_layers_with_different_limits(implementation, device):
    """The same class and code with another limit and alpha, which torch.compile then makes dynamic."""
    first = make("gpt_oss", device)
    forward = compiled(type(first).forward)
    for limit, alpha in ((0.6, 1.3), (0.7, 1.1), (0.8, 1.702)):
        experts = make_custom(device, gate=gpt_oss, swiglu_limit=limit, swiglu_alpha=alpha)
        experts.__class__ = type(first)
        assert_as_eager(experts, implementation, lambda _: partial(forward, experts))


def test_activations_of_transformers(grouped_moe, implementation, fused_calls, device):
    """Each match eager as a module's; of those whose names are accepted, alone and in an Activation, the functions."""
    from transformers.activations import ACT2FN

    x, one = torch.linspace(-6.0, 6.0, 64, device=device)[:, None], torch.ones(64, 1, device=device)
    ids, eye = torch.zeros(64, 1, dtype=torch.int64, device=device), torch.ones(1, 1, 1, device=device)
    call = partial(grouped_moe.grouped_mm_experts, x, ids, one, eye, eye, gated=False)
    fused, accepted = set(), set()
    for name in ACT2FN:
        fused_calls.clear()
        assert_as_eager(make_custom(device, act_fn=ACT2FN[name].to(device, torch.float32)), implementation)
        fused |= {name} if fused_calls else set()
        for activation in (name, grouped_moe.Activation(name)):
            try:
                y = call(activation=activation)
            except ValueError:
                continue
            torch.testing.assert_close(y.double(), ACT2FN[name](x.double()), rtol=1e-5, atol=1e-6)
            accepted.add(name)
    assert fused == FUSED_ACTIVATIONS
    assert accepted >= {"swish", "quick_gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "relu2", "gelu_python"}
    y = call(activation=grouped_moe.Activation("swish", alpha=2.0))
    torch.testing.assert_close(y, x * torch.sigmoid(2.0 * x), rtol=1e-5, atol=1e-6)


STEPS = {  # after the experts, and whether it is none
    "norm": (lambda self, rows: rms_norm(rows, rows.shape[-1:]), False),
    "nothing": (lambda self, rows: rows, True),
    "by-option": (lambda self, rows: self.post_expert_norm(rows) if self.has_post_expert_norm else rows, True),
    "by-hasattr": (lambda self, rows: rms_norm(rows, rows.shape[-1:]) if hasattr(self, "num_experts") else rows, False),
    "in-place": (lambda self, rows: rows.mul_(2.0), False),
}


@pytest.mark.parametrize("step, fused", STEPS.values(), ids=STEPS)
def test_a_step_after_the_experts(implementation, fused_calls, device, step, fused):
    for around in (lambda forward: forward, compiled):
        torch.compiler.reset()
        fused_calls.clear()
        assert_as_eager(make_custom(device, step=step, has_post_expert_norm=False), implementation, around)
        assert around is compiled or bool(fused_calls) == fused


def test_a_step_of_one_module(implementation, fused_calls, device):
    """In the place of its class's, which is none."""
    experts = make_custom(device, step=STEPS["nothing"][0])
    experts._apply_post_expert = lambda rows: 2.0 * rows
    assert_as_eager(experts, implementation)
    assert not fused_calls


def test_unknown_steps_are_refused(implementation, device):
    """When they run and, but for two that exclude each other, before that when they are put into a model."""
    norm, inputs = STEPS["norm"][0], make_inputs(device)[:3]
    options = {"has_post_expert_norm": True, "post_expert_norm": torch.nn.Identity()}
    with pytest.raises(ValueError, match="knows, got one with has_post_expert_norm and _apply_post_expert; choose"):
        make_custom(device, implementation, step=norm, **options)(*inputs)
    experts = make_custom(device, implementation)
    type(experts)._apply_router_bias = norm
    message = "^Experts: expected an experts module of a kind .* knows, got one with _apply_router_bias; choose another"
    for use in (lambda: experts(*inputs), lambda: torch.nn.Sequential(experts)):
        with pytest.raises(ValueError, match=message):
            use()
    layer = type("Layer", (torch.nn.Module,), {"_apply_rope": norm})()
    layer.config = experts.config
    torch.nn.Sequential(layer)  # no experts: methods of any names


def test_unknown_options_are_refused(module, implementation, device, monkeypatch):
    """An option that a later decorator has; modules that have it at its default compute what they always did."""
    from transformers.integrations import moe

    def use_experts_implementation(experts_class=None, *, is_transposed=False, has_gate=True, has_output_scale=False):
        raise NotImplementedError

    options = module("integrations.transformers_gate")._unknown_options
    usual, other = (make_custom(device, implementation, has_output_scale=scale) for scale in (False, True))
    monkeypatch.setattr(moe, "use_experts_implementation", use_experts_implementation)
    options.cache_clear()
    try:
        usual(*make_inputs(device)[:3])
        with pytest.raises(ValueError, match="got one with has_output_scale; choose another experts_implementation"):
            other(*make_inputs(device)[:3])
    finally:
        options.cache_clear()
