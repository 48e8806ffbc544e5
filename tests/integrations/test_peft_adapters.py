"""Adapters of peft on experts through their life, and all that the package does not know: it is left to peft.

A warning says why, once.
"""

import gc
import warnings
import weakref
from functools import partial
from types import MethodType
from typing import NamedTuple, Optional

import peft_experts
import pytest
import torch
from copies import COPIES
from models import assert_close
from peft_experts import BOTH, Call, assert_near, by_model, make_adapted, make_experts, outputs, peft, run
from torch import Tensor, nn

pytest_plugins = ["peft_experts"]
pytestmark = pytest.mark.usefixtures("fresh_peft")


def assert_as_eager(model: nn.Module, inputs: tuple, implementation: str, calls: list, fused: Optional[Call]) -> Tensor:
    """The output, which is eager's; fused: the LoRAs that the block gets. Returns the output."""
    got = outputs(model, inputs, implementation)
    assert calls.pop() == fused and not calls
    assert_near(got, outputs(model, inputs, "eager"))
    return got


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
@by_model
def test_copies_are_fused(name, how, implementation, calls, device):
    model, inputs = make_adapted(name, device)
    want = assert_as_eager(model, inputs, implementation, calls, BOTH)
    twin = COPIES[how](model)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(assert_as_eager(twin, inputs, implementation, calls, BOTH), want)


@by_model
def test_a_model_is_freed_at_once(name, implementation, device):
    """No reference leads from a wrapper to itself."""
    model, inputs = make_adapted(name, device)
    outputs(model, inputs, implementation)
    wrapper = weakref.ref(model.base_model.model.experts)
    gc.disable()
    try:
        del model
        assert wrapper() is None
    finally:
        gc.enable()


@by_model
def test_adapters_are_switched_merged_saved_and_deleted(name, implementation, calls, device, tmp_path):
    model, inputs = make_adapted(name, device)
    fused, merged = BOTH, peft_experts.NONE
    state = {key.replace("base_layer.", ""): value for key, value in model.base_model.model.state_dict().items()}
    plain = make_experts(name, device)
    plain.load_state_dict({key: state[key] for key in plain.state_dict()})
    base = outputs(plain, inputs, "eager")
    first = assert_as_eager(model, inputs, implementation, calls, fused)
    assert (first - base).norm() > 0.1 * base.norm()
    with model.disable_adapter():
        assert_near(assert_as_eager(model, inputs, implementation, calls, merged), base)
    assert torch.equal(assert_as_eager(model, inputs, implementation, calls, fused), first)
    model.merge_adapter()
    assert_near(assert_as_eager(model, inputs, implementation, calls, merged), first)
    model.unmerge_adapter()
    assert_near(assert_as_eager(model, inputs, implementation, calls, fused), first)

    model.add_adapter("second", peft.LoraConfig(**{**model.peft_config["default"].to_dict(), "r": 5}))
    model.set_adapter("second")
    second = assert_as_eager(model, inputs, implementation, calls, fused)
    assert (second - first).norm() > 0.1 * first.norm()
    model.base_model.set_adapter(["default", "second"])
    with pytest.warns(UserWarning, match="left to peft, .*: several adapters are active") as record:
        assert_as_eager(model, inputs, implementation, calls, merged)
    assert len([each for each in record if "left to peft" in str(each.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_as_eager(model, inputs, implementation, calls, merged)

    model.set_adapter("default")
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path)
    assert_near(assert_as_eager(loaded, inputs, implementation, calls, fused), first)
    loaded.load_adapter(tmp_path / "second", "second")
    loaded.set_adapter("second")
    assert_near(assert_as_eager(loaded, inputs, implementation, calls, fused), second)
    loaded.delete_adapter("second")
    loaded.set_adapter("default")
    assert_near(assert_as_eager(loaded, inputs, implementation, calls, fused), first)
    whole = model.merge_and_unload()
    assert not any("lora" in key for key in whole.state_dict())
    assert_near(assert_as_eager(whole, inputs, implementation, calls, merged), first)


@by_model
def test_unload_gives_the_base_back(name, implementation, calls, device):
    experts = make_experts(name, device)
    inner, inputs = experts.experts, peft_experts.make_inputs(device)
    base = outputs(experts, inputs, "eager")
    assert peft_experts.add_lora(experts, name).unload().experts is inner
    assert_near(assert_as_eager(experts, inputs, implementation, calls, peft_experts.NONE), base)


@pytest.mark.parametrize("target, fused", [("down_proj", Call(False, True)), ("up", Call(True, False))])
@by_model
def test_one_weight_alone(name, target, fused, implementation, calls, device):
    target = peft_experts.first_weight(name) if target == "up" else target
    model, inputs = make_adapted(name, device, [f"experts.{target}"])
    peft_experts.assert_runs_as_eager(model, inputs, implementation)
    assert calls == [fused]


def test_ranks_and_scalings_differ(implementation, calls, device):
    options = {"rank_pattern": {"experts.down_proj": 7}, "alpha_pattern": {"experts.down_proj": 3}, "use_rslora": True}
    model, inputs = make_adapted("qwen3_moe", device, **options)
    peft_experts.assert_runs_as_eager(model, inputs, implementation)
    assert calls == [BOTH]


class Own(torch.Tensor):
    """As of a library that quantizes: what operations do with it is its own affair."""


def subclass(linear):
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Own))


MORE = "the adapter is more than two factors and a scaling that is an int or a float"
CHANGES = {  # what becomes of the wrapper, which options its adapter has, and what is said
    "dropout": (lambda it: it.lora_dropout.update({"default": nn.Dropout(0.0)}), {}, MORE),
    "bias": (lambda it: it.lora_B["default"].register_parameter("bias", nn.Parameter(torch.zeros(64))), {}, MORE),
    "variant": (lambda it: it.lora_variant.update({"default": object()}), {}, MORE),
    "other-parts": (lambda it: it.lora_magnitude_vector.update({"default": nn.Linear(1, 1)}), {}, MORE),
    "scaling": (lambda it: it.scaling.update({"default": torch.tensor(2.0)}), {}, MORE),
    "rank": (lambda it: None, {"rank_pattern": {"experts.down_proj": 257}}, "the rank is above 256"),
    "dtype": (lambda it: it.lora_A["default"].to(torch.float8_e5m2), {}, "sharded, quantized or of a dtype"),
    "subclass": (lambda it: subclass(it.lora_A["default"]), {}, "sharded, quantized or of a dtype"),
}


@pytest.mark.parametrize("change, options, reason", CHANGES.values(), ids=CHANGES)
def test_what_is_not_known_is_left_to_peft(change, options, reason, implementation, calls, device):
    """Of the down-projection, the outer one; the other weight's LoRA stays fused."""
    model, inputs = make_adapted("qwen3_moe", device, **options)
    change(model.base_model.model.experts)
    with pytest.warns(UserWarning, match=f"LoRA on down_proj is left to peft, .*: .*{reason}"):
        got = outputs(model, inputs, implementation)
    assert len(calls) == 1 and calls[0].up
    want = outputs(model, inputs, "eager")
    assert_near(got, want)
    peft_experts.forget_registration(model)  # so is what peft has put in the place of the weight
    assert_near(outputs(model, inputs, implementation), want)


def test_factors_of_another_module(implementation, calls, device):
    """Of which peft reads the weight alone."""
    model, inputs = make_adapted("qwen3_moe", device)
    factors = model.base_model.model.experts.lora_A
    weight, factors["default"] = factors["default"].weight, nn.Module()
    factors["default"].weight = weight
    assert_as_eager(model, inputs, implementation, calls, BOTH)


def test_one_expert_is_left_to_peft(implementation, calls, device):
    model, inputs = make_adapted("qwen3_moe", device, num_experts=1)
    with pytest.warns(UserWarning, match="there is one expert"):
        assert_as_eager(model, inputs, implementation, calls, peft_experts.NONE)


def test_other_parameters_are_left_to_peft(implementation, calls, device):
    """A bias, with which gpt-oss' weights may be targeted."""
    targets = ["experts.gate_up_proj", "experts.gate_up_proj_bias", "experts.down_proj"]
    model, inputs = make_adapted("gpt_oss", device, targets)
    with pytest.warns(UserWarning, match="gate_up_proj_bias is none of gate_up_proj, up_proj, down_proj"):
        assert_as_eager(model, inputs, implementation, calls, BOTH)


def test_another_forward_is_not_given_factors(grouped_moe, implementation, calls, device):
    """As of `kernels.kernelize`, whose layers have the signature that they replace."""
    model, inputs = make_adapted("gpt_oss", device)
    want = outputs(model, inputs, "eager")
    experts = peft_experts.wrappers(model)[0].get_base_layer()
    experts.forward = MethodType(grouped_moe.layers.GroupedMoeExperts.forward, experts)
    with pytest.warns(UserWarning, match="the experts have another forward, which takes no factors"):
        assert_near(outputs(model, inputs, implementation), want)
    assert calls == [BOTH]


def plain(forward):
    return lambda self, x, ids, weights: forward(self, x, ids, weights)


def with_unused_options(forward):
    return lambda self, x, ids, weights, **options: forward(self, x, ids, weights)


@pytest.mark.parametrize("way", ["of the class", "of a subclass", "bound", "partial"])
@pytest.mark.parametrize("replacement", [plain, with_unused_options], ids=["without options", "dropping options"])
def test_a_forward_that_drops_factors(way, replacement, implementation, calls, device):
    """It is found out before the call, or by what the call did; then peft's own forward runs, output and gradients.

    Where the experts have their own forward again, they get factors again.
    """
    model, inputs = make_adapted("qwen3_moe", device)
    experts = peft_experts.wrappers(model)[0].get_base_layer()
    want, kind = run(model, inputs, "eager"), type(experts)
    forward = replacement(kind.forward)
    with pytest.MonkeyPatch.context() as patch:
        if way == "of the class":
            patch.setattr(kind, "forward", forward)
        elif way == "of a subclass":
            patch.setattr(experts, "__class__", type("Experts", (kind,), {"forward": forward}))
        elif way == "bound":
            patch.setattr(experts, "forward", MethodType(forward, experts), raising=False)
        else:
            patch.setattr(experts, "forward", partial(forward, experts), raising=False)
        with pytest.warns(UserWarning, match="the experts have another forward, which takes no factors"):
            assert_close(run(model, inputs, implementation), want)
        assert_close(run(model, inputs, implementation), want)
    calls.clear()
    assert_close(run(model, inputs, implementation), want)
    assert calls == [BOTH]


@pytest.mark.parametrize("way", ["hook of accelerate", "by name", "compiled forward", "compiled module"])
def test_a_forward_that_passes_factors_on(way, implementation, calls, device):
    model, inputs = make_adapted("qwen3_moe", device)
    experts = peft_experts.wrappers(model)[0].get_base_layer()
    want = run(model, inputs, "eager")
    if way == "hook of accelerate":
        hooks = pytest.importorskip("accelerate.hooks")
        hooks.add_hook_to_module(experts, hooks.ModelHook())
    elif way == "by name":
        forward = experts.forward
        experts.forward = lambda x, ids, weights, gate_up_lora=None, down_lora=None: forward(
            x, ids, weights, gate_up_lora=gate_up_lora, down_lora=down_lora
        )
    elif way == "compiled forward":
        experts.forward = torch.compile(experts.forward, backend="aot_eager")
    else:
        experts.compile(backend="aot_eager")
    with warnings.catch_warnings(record=True) as told:
        assert_close(run(model, inputs, implementation), want)
    assert not any("left to peft" in str(each.message) for each in told)
    assert calls == [BOTH] or way.startswith("compiled")


def test_wrappers_of_another_build(module, implementation, calls, device, monkeypatch):
    """Which was registered first, under the same name: its LoRAs are of another class."""
    shim = module("integrations.peft")
    other = NamedTuple("LoRA", [("a", torch.Tensor), ("b", torch.Tensor), ("scaling", float)])
    model, inputs = make_adapted("qwen3_moe", device)
    usual = shim._as_lora
    monkeypatch.setattr(shim, "_as_lora", lambda *args: other(*usual(*args)))
    peft_experts.assert_runs_as_eager(model, inputs, implementation)
    assert calls == [BOTH]


def test_names_of_no_adapters(implementation, calls, device):
    """`adapter_names=None` is as without it."""
    model, inputs = make_adapted("qwen3_moe", device)
    want = outputs(model, inputs, "eager")
    peft_experts.set_implementation(model, implementation)
    with torch.no_grad():
        assert_near(peft_experts.wrappers(model)[0](*inputs[:3], adapter_names=None), want)
    assert calls == [BOTH]


def other_sum(self, weight):
    return torch.baddbmm(weight, self.lhs, self.rhs, alpha=2 * self.scaling)


def other_factors(self, adapter, usual=peft_experts.WRAPPER.get_delta_factors):
    lhs, rhs, scaling = usual(self, adapter)
    return lhs.flip(2), rhs, scaling


PEFTS = {  # what of it is replaced, and by what
    "sum": (peft.tuners.lora.layer._LoraFactorsProxy, "forward", other_sum),
    "factors": (peft_experts.WRAPPER, "get_delta_factors", other_factors),
    "interface": (peft, "get_peft_model", None),
}


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
@pytest.mark.parametrize("owner, name, replacement", PEFTS.values(), ids=PEFTS)
def test_another_peft_is_left_to_itself(
    owner, name, replacement, late, module, implementation, calls, device, monkeypatch
):
    """A version that computes something else: that is what comes out. late: as where the package is registered so."""
    ours = module("integrations.peft")
    model, inputs = make_adapted("gpt_oss", device)
    if late:
        peft_experts.forget_registration(model)
    monkeypatch.setattr(owner, name, replacement)
    ours._computes_our_sum.cache_clear()
    ours._adds_factors.cache_clear()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        got = outputs(model, inputs, implementation)
    assert late or any("this version of peft" in str(each.message) for each in record)
    assert_near(got, outputs(model, inputs, "eager"))


def test_forwards_may_come_before_the_backward_of_another(implementation, device):
    """peft's own, which run where the package is registered late, change the weights' versions, not their values."""
    model, inputs = make_adapted("qwen3_moe", device)
    peft_experts.forget_registration(model)
    want = run(model, inputs, "eager")
    peft_experts.set_implementation(model, implementation)
    x, ids, weights, cotangent = inputs
    out = model(x, ids, weights)
    outputs(model, inputs, implementation)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(out, list(trained.values()), cotangent)
    assert_close(dict(zip(trained, grads)), {name: want[name] for name in trained})


def test_the_implementation_may_change(implementation, calls, device):
    model, ids = peft_experts.make_peft_model("qwen3_moe", device)
    base, found = model.get_base_model(), []
    for each in (implementation, "eager", "grouped_mm", implementation):
        base.set_experts_implementation(each)
        with torch.no_grad():
            found.append(model(input_ids=ids).logits)
    assert calls == [BOTH] * 4
    assert torch.equal(found[0], found[3])
    for other in found[1:3]:
        assert_near(found[0], other)
