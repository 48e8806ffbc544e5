"""What experts modules compute between and after their GEMMs: it is left to them, fused, or refused, never left out."""

import sys

import pytest
import torch
from test_transformers_experts import assert_same, gpt_oss_gate, make_custom, make_inputs, optional_clamp_gate, run


def post_expert(self, rows):
    return torch.nn.functional.rms_norm(rows, rows.shape[-1:])


def returns_its_argument(self, rows):
    return rows


def later_default(self, rows):
    return self.post_expert_norm(rows) if self.has_post_expert_norm else rows


def changes_its_argument(self, rows):
    return rows.mul_(2.0)


STEPS = {"norm": (post_expert, False), "nothing": (returns_its_argument, True), "by-option": (later_default, True),
         "in-place": (changes_its_argument, False)}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("step, fused", STEPS.values(), ids=STEPS)
def test_a_step_after_the_experts(implementation, fused_calls, device, step, fused, compiled):
    """Against rows that each go through the expert and the step alone."""
    experts = make_custom(device)
    type(experts)._apply_post_expert = step
    experts.has_post_expert_norm = False
    x, ids, weights, _ = make_inputs(device)
    experts.config._experts_implementation = implementation
    forward = torch.compile(experts, fullgraph=True, backend="aot_eager") if compiled else experts
    with torch.no_grad():
        actual, expected = forward(x, ids, weights), torch.zeros_like(x)
        for slot, expert in enumerate(ids.flatten().tolist()):
            token, choice = divmod(slot, ids.shape[1])
            act = experts._apply_gate(experts.gate_up_proj[expert] @ x[token])
            row = step(experts, (experts.down_proj[expert] @ act)[None])[0]
            expected[token] += weights[token, choice] * row
    assert torch.linalg.vector_norm(actual - expected) < 1e-5 * torch.linalg.vector_norm(expected)
    assert compiled or bool(fused_calls) == fused
    torch.compiler.reset()


def test_a_step_and_a_norm_are_refused(implementation, device):
    experts = make_custom(device, has_post_expert_norm=True, post_expert_norm=torch.nn.Identity())
    type(experts)._apply_post_expert = post_expert
    experts.config._experts_implementation = implementation
    with pytest.raises(ValueError, match="knows, got one with has_post_expert_norm and _apply_post_expert; choose"):
        experts(*make_inputs(device)[:3])


def test_unknown_steps_are_refused(implementation, device):
    """When they run, and before that when they are put into a model."""
    experts = make_custom(device)
    type(experts)._apply_router_bias = post_expert
    experts.config._experts_implementation = implementation
    message = "^Experts: expected an experts module of a kind .* knows, got one with _apply_router_bias; choose another"
    with pytest.raises(ValueError, match=message):
        experts(*make_inputs(device)[:3])
    with pytest.raises(ValueError, match=message):
        torch.nn.Sequential(experts)


def test_unknown_options_are_refused(grouped_moe, implementation, device, monkeypatch):
    """An option that a later decorator has; modules that have it at its default compute what they always did."""
    from transformers.integrations import moe

    def use_experts_implementation(experts_class=None, *, is_transposed=False, has_gate=True, has_output_scale=False):
        raise NotImplementedError

    options = sys.modules[grouped_moe.__name__ + ".integrations.transformers_gate"]._unknown_options
    usual, other = make_custom(device, has_output_scale=False), make_custom(device, has_output_scale=True)
    monkeypatch.setattr(moe, "use_experts_implementation", use_experts_implementation)
    options.cache_clear()
    for experts in (usual, other):
        experts.config._experts_implementation = implementation
    try:
        usual(*make_inputs(device)[:3])
        with pytest.raises(ValueError, match="got one with has_output_scale; choose another experts_implementation"):
            other(*make_inputs(device)[:3])
    finally:
        options.cache_clear()


def softcapped_gate(self, rows):
    """As that of transformers' FP8Experts: one function for the gates of all models."""
    if self.gate_softcap is not None:
        gate, up = rows.chunk(2, dim=-1)
        return self.act_fn(torch.tanh(gate / self.gate_softcap)) * torch.tanh(up / self.up_softcap)
    return optional_clamp_gate(self, rows) if self.swiglu_alpha is None else gpt_oss_gate(self, rows)


CAPS = {
    "plain": ({}, True),
    "clamped": ({"limit": 0.6, "swiglu_limit": 0.6}, True),
    "gpt-oss": ({"limit": 0.6, "swiglu_limit": 0.6, "swiglu_alpha": 1.3}, True),
    "capped": ({"gate_softcap": 0.7, "up_softcap": 0.9}, False),
}


@pytest.mark.parametrize("attributes, fused", CAPS.values(), ids=CAPS)
def test_gates_with_a_soft_cap_of_none(implementation, fused_calls, device, attributes, fused):
    names = "gate_softcap", "up_softcap", "limit", "swiglu_limit", "swiglu_alpha"
    experts = make_custom(device, softcapped_gate, **{**dict.fromkeys(names), **attributes})
    *inputs, cotangent = make_inputs(device)
    expected = run(experts, "eager", inputs, cotangent)
    assert_same(run(experts, implementation, inputs, cotangent), expected)
    assert bool(fused_calls) == fused
