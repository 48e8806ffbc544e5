"""Every experts class of the installed transformers against its own eager forward: the output and all gradients.

The classes are found in transformers' source, so a newer transformers extends the sweep by itself.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 5, 32, 24, 24, 3
IDLE_EXPERT = 3  # gets no token

# transformers -> its experts classes. Versions in between have at least what the one before has.
CLASS_COUNTS = {(5, 9): 37, (5, 17): 55, (5, 23): 65}

# Classes that compute what the fused block does not: a norm after each expert; soft caps on gate and up.
UNFUSED = {"MuseSparkExperts", "Inkling2Experts"}

# The names in ACT2FN whose functions the fused block has.
FUSED_ACTIVATIONS = {
    "silu", "swish", "quick_gelu", "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_accurate",
    "gelu_pytorch_tanh", "gelu_python_tanh", "relu", "relu2",
}  # fmt: skip

# A limit and an alpha that no class has by default. |pre-activation| ~ N(0, 1), so 0.6 clamps more than a half.
LOWERED = {"limit": 0.6, "swiglu_limit": 0.6, "alpha": 1.3, "swiglu_alpha": 1.3}

# fp32 sums of at most TOKENS * TOP_K terms, whose order differs: an error of about sqrt(terms) * 2**-24 = 5e-7 of the
# norm per sum, three sums deep. Another function or a lost term is off by 1e-2 or more.
TOLERANCE = 5e-6
# A row may cancel below the norm of its terms, which the error is relative to: what a row lacks in norm beneath a
# fifth of the root mean square is not held against it, and the others may be a fifth of the terms that they sum.
ROW_TOLERANCE = 5 * TOLERANCE


class Case(NamedTuple):
    """An experts class, with its own limit or a lowered one."""

    module: str
    name: str
    lowered: bool


class Result(NamedTuple):
    """One forward and backward. grads: of each parameter, hidden_states and top_k_weights."""

    out: torch.Tensor
    grads: dict


def find_cases() -> list:
    """All classes under @use_experts_implementation, from the source alone: the modules take a while to import."""
    decorated = re.compile(r"^@use_experts_implementation\b.*?^class (\w+)(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
    spec = importlib.util.find_spec("transformers")
    root = Path(spec.origin).parent / "models" if spec else Path(os.devnull)
    cases = []
    for path in sorted(root.glob("*/modeling_*.py")):
        for match in decorated.finditer(path.read_text(encoding="utf-8")):
            module = f"transformers.models.{path.parent.name}.{path.stem}"
            variants = (False, True) if "self.limit" in match[2] or "self.swiglu_limit" in match[2] else (False,)
            cases += [Case(module, match[1], lowered) for lowered in variants]
    return cases


CASES = find_cases()


def case_id(case: Case) -> str:
    return case.name + ("-lowered_limit" if case.lowered else "")


def config_classes(experts_class: type) -> list:
    """The config classes that the experts' module knows, the likeliest first."""
    from transformers import PreTrainedConfig

    name = experts_class.__module__
    modules = [sys.modules[name], importlib.import_module(name.replace(".modeling_", ".configuration_"))]
    known = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    annotation = str(inspect.signature(experts_class.__init__).parameters["config"].annotation)

    def unlikeliness(config_class: type) -> tuple:
        common = os.path.commonprefix((config_class.__name__, experts_class.__name__))
        return not re.search(rf"\b{config_class.__name__}\b", annotation), -len(common), config_class.__name__

    return sorted((c for c in known if issubclass(c, PreTrainedConfig)), key=unlikeliness)


def small_config(config_class: type, source: str):
    """The model's default config, with the sizes that the source of the experts' __init__ reads made small."""
    config = config_class()
    for name in set(re.findall(r"config\.(\w+)", source)):
        for part, size in (("experts", EXPERTS), ("intermediate", INTERMEDIATE), ("hidden_size", HIDDEN)):
            if part in name and hasattr(config, name):
                # Past the config's own validation: Ernie's lists one size per modality and passes one of them on.
                object.__setattr__(config, config.attribute_map.get(name, name), size)
    return config


def build(case: Case, device: str) -> torch.nn.Module:
    """The experts with random weights that keep the scale of their input."""
    experts_class = getattr(importlib.import_module(case.module), case.name)
    source = inspect.getsource(inspect.unwrap(experts_class.__init__))
    for config_class in config_classes(experts_class):
        try:
            experts = experts_class(small_config(config_class, source))
        except (AttributeError, TypeError):  # the config of another part of the model
            continue
        break
    assert experts.num_experts == EXPERTS and experts.down_proj.numel() == EXPERTS * HIDDEN * INTERMEDIATE
    for parameter in experts.parameters():
        fan_in = parameter.shape[1 if experts.is_transposed else 2] if parameter.dim() == 3 else 1
        torch.nn.init.normal_(parameter, std=fan_in**-0.5)
    for name, value in LOWERED.items() if case.lowered else ():
        if hasattr(experts, name):
            setattr(experts, name, value)
    return experts.to(device)


def make_custom(device: str, gate=None, **attributes) -> torch.nn.Module:
    """Experts of a new class, so that nothing about its gate is known yet, with a gate and attributes that it reads."""
    from transformers import MixtralConfig
    from transformers.integrations.moe import use_experts_implementation
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    class Experts(MixtralExperts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            out = torch.zeros_like(hidden_states)
            for e in range(self.num_experts):
                tokens, ks = torch.where(top_k_index == e)
                rows = self._apply_gate(hidden_states[tokens] @ self.gate_up_proj[e].t()) @ self.down_proj[e].t()
                out = out.index_add(0, tokens, rows * top_k_weights[tokens, ks, None])
            return out

    if gate is not None:
        Experts._apply_gate = gate
    sizes = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    experts = use_experts_implementation(Experts)(MixtralConfig(**sizes)).to(device)
    torch.nn.init.normal_(experts.gate_up_proj, std=HIDDEN**-0.5)
    torch.nn.init.normal_(experts.down_proj, std=INTERMEDIATE**-0.5)
    for name, value in attributes.items():
        if hasattr(experts, name):
            delattr(experts, name)  # a function cannot take the place of a module
        setattr(experts, name, value)
    return experts


def run(experts: torch.nn.Module, implementation: str, inputs: tuple, cotangent: torch.Tensor) -> Result:
    experts.config._experts_implementation = implementation
    x, ids, weights = inputs
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(x, ids, weights)
    leaves = {"hidden_states": x, "top_k_weights": weights, **dict(experts.named_parameters())}
    return Result(out.detach(), dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), cotangent))))


def make_inputs(device: str) -> tuple:
    """hidden_states, top_k_index, top_k_weights, cotangent."""
    busy = torch.tensor([e for e in range(EXPERTS) if e != IDLE_EXPERT])
    ids = busy[torch.rand(TOKENS, len(busy)).argsort(dim=1)[:, :TOP_K]]
    tensors = (torch.randn(TOKENS, HIDDEN), ids, torch.rand(TOKENS, TOP_K) + 0.1, torch.randn(TOKENS, HIDDEN))
    return tuple(tensor.to(device) for tensor in tensors)


def assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
    rows = actual.double().reshape(-1, actual.shape[-1]), expected.double().reshape(-1, expected.shape[-1])
    errors, norms = (rows[0] - rows[1]).norm(dim=1), rows[1].norm(dim=1)
    assert errors.norm() <= TOLERANCE * norms.norm(), f"{name}: {errors.norm() / norms.norm():.1e}"
    bounds = ROW_TOLERANCE * norms.clamp(min=0.2 * norms.square().mean().sqrt())
    assert (errors <= bounds).all(), f"{name}: row {(errors / bounds).argmax()}"


def assert_same(actual: Result, expected: Result) -> None:
    assert_close("output", actual.out, expected.out)
    assert actual.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        assert_close(f"gradient of {name}", actual.grads[name], grad)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The matrices are tiny: threads would only wait for each other, for minutes on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_finds_the_classes():
    version = tuple(int(part) for part in importlib.metadata.version("transformers").split(".")[:2])
    expected = max(count for since, count in CLASS_COUNTS.items() if since <= version)
    assert len({case[:2] for case in CASES}) >= expected


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matches_eager(case, implementation, fused_calls, device):
    experts = build(case, device)
    *inputs, cotangent = make_inputs(device)
    expected = run(experts, "eager", inputs, cotangent)
    assert not fused_calls
    assert_same(run(experts, implementation, inputs, cotangent), expected)
    assert len(fused_calls) == (case.name not in UNFUSED)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matches_eager_with_sentinels(case, implementation, device):
    """Eager gets expert 0 with weight 0 for a sentinel: the same function, and every version of eager takes it."""
    experts = build(case, device)
    x, ids, weights, cotangent = make_inputs(device)
    sentinel = torch.rand(ids.shape, device=device) < 0.4
    sentinel[0], sentinel[1] = True, False
    eager_inputs = (x, ids.masked_fill(sentinel, 0), weights.masked_fill(sentinel, 0.0))
    expected = run(experts, "eager", eager_inputs, cotangent)
    expected.grads["top_k_weights"][sentinel] = 0.0
    actual = run(experts, implementation, (x, ids.masked_fill(sentinel, EXPERTS), eager_inputs[2]), cotangent)
    assert_same(actual, expected)
    assert not actual.grads["top_k_weights"][sentinel].any() and not actual.out[0].any()
    assert_sentinels_are_not_read(experts, implementation, (x, ids, weights), sentinel, cotangent, actual)


def assert_sentinels_are_not_read(experts, implementation, inputs, sentinel, cotangent, expected) -> None:
    """Bitwise what it was, with other ids outside the range and NaN wherever a sentinel leads."""
    x, ids, weights = (tensor.clone() for tensor in inputs)
    outside = torch.tensor([EXPERTS, EXPERTS + 1, -1, -EXPERTS, 2**31, 2**63 - 1, -(2**63)], device=ids.device)
    ids[sentinel] = outside[torch.arange(int(sentinel.sum()), device=ids.device) % len(outside)]
    weights[sentinel] = float("nan")
    x[sentinel.all(dim=1)] = float("nan")
    actual = run(experts, implementation, (x, ids, weights), cotangent)
    assert torch.equal(actual.out, expected.out)
    assert all(torch.equal(actual.grads[name], grad) for name, grad in expected.grads.items())


def plain_gate(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def clamped_gate(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def gpt_oss_gate(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    gate, up = gate.clamp(max=self.swiglu_limit), up.clamp(-self.swiglu_limit, self.swiglu_limit)
    return (up + 1) * gate * torch.sigmoid(self.swiglu_alpha * gate)


def other_alpha_gate(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    glu = torch.nn.functional.silu(gate.clamp(max=self.limit) * 1.001) / 1.001
    return (up.clamp(-self.limit, self.limit) + 1) * glu


def optional_clamp_gate(self, rows):
    return plain_gate(self, rows) if self.limit is None else clamped_gate(self, rows)


def clamped_to_constant_gate(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=20.0)) * up


def clamped_both_ways_gate(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(-self.limit, self.limit)) * up.clamp(-self.limit, self.limit)


def relu_gate(self, rows):
    gate, up = rows.chunk(2, dim=-1)
    return torch.relu(gate) * up


def up_first_gate(self, rows):
    up, gate = rows.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def scaled_gate(self, rows):
    return plain_gate(self, rows) * self.scale


def normed_gate(self, rows):
    return torch.nn.functional.normalize(plain_gate(self, rows), dim=-1)


GATES = {
    "default": (None, {}, True),
    "plain": (plain_gate, {}, True),
    "plain_beside_a_limit": (plain_gate, {"limit": 0.6}, True),
    "clamped": (clamped_gate, {"limit": 0.6}, True),
    "clamped_to_int": (clamped_gate, {"limit": 1}, True),
    "clamped_to_zero": (clamped_gate, {"limit": 0.0}, False),
    "clamped_to_tensor": (clamped_gate, {"limit": torch.tensor(0.6)}, False),
    "clamped_to_constant": (clamped_to_constant_gate, {}, False),
    "limit_of_none": (plain_gate, {"limit": None}, True),
    "optional_clamp": (optional_clamp_gate, {"limit": 0.6}, True),
    "optional_clamp_of_none": (optional_clamp_gate, {"limit": None}, True),
    "two_limits": (clamped_gate, {"limit": 0.6, "swiglu_limit": 0.6}, True),
    "two_different_limits": (clamped_gate, {"limit": 0.6, "swiglu_limit": 0.7}, False),
    "clamped_relu": (clamped_gate, {"limit": 0.6, "act_fn": torch.nn.ReLU()}, True),
    "unknown_act_fn": (plain_gate, {"act_fn": torch.nn.Softplus()}, False),
    "function_as_act_fn": (plain_gate, {"act_fn": torch.nn.functional.silu}, True),
    "gpt_oss": (gpt_oss_gate, {"swiglu_limit": 0.6, "swiglu_alpha": 1.3}, True),
    "gpt_oss_without_act_fn": (gpt_oss_gate, {"swiglu_limit": 0.6, "swiglu_alpha": 1.3, "act_fn": None}, True),
    "other_alpha": (other_alpha_gate, {"limit": 0.6, "alpha": 1.0}, False),
    "clamped_both_ways": (clamped_both_ways_gate, {"limit": 0.6}, False),
    "other_activation": (relu_gate, {}, False),
    "other_activation_beside_a_large_limit": (relu_gate, {"limit": 1e3}, False),
    "up_first": (up_first_gate, {}, False),
    "reads_more": (scaled_gate, {"scale": 0.5}, False),
    "mixes_columns": (normed_gate, {}, False),
}


@pytest.mark.parametrize("gate, attributes, fused", GATES.values(), ids=GATES)
def test_fuses_only_the_same_gate(gate, attributes, fused, implementation, fused_calls, device):
    attributes = {name: value.to(device) if torch.is_tensor(value) else value for name, value in attributes.items()}
    experts = make_custom(device, gate, **attributes)
    *inputs, cotangent = make_inputs(device)
    expected = run(experts, "eager", inputs, cotangent)
    assert_same(run(experts, implementation, inputs, cotangent), expected)
    assert bool(fused_calls) == fused


def test_gate_of_one_module_stays_its_own(implementation, fused_calls, device):
    """A gate set on a module, not on its class."""
    experts = make_custom(device)
    experts._apply_gate = lambda rows: up_first_gate(experts, rows)
    *inputs, cotangent = make_inputs(device)
    expected = run(experts, "eager", inputs, cotangent)
    assert_same(run(experts, implementation, inputs, cotangent), expected)
    assert not fused_calls


@pytest.mark.parametrize("case", ("default", "gpt_oss", "clamped_both_ways", "unknown_act_fn"))
def test_compiles_in_one_graph(case, implementation, device):
    """Cold: the first call that sees the class, and so has to find out about its gate, is the compiler's."""
    gate, attributes, _ = GATES[case]
    experts = make_custom(device, gate, **attributes)
    *inputs, cotangent = make_inputs(device)
    expected = run(experts, "eager", inputs, cotangent)
    torch.compiler.reset()
    experts.forward = torch.compile(experts.forward, fullgraph=True, backend="aot_eager")
    assert_same(run(experts, implementation, inputs, cotangent), expected)


def test_compiles_layers_with_different_limits(implementation, device):
    """The same class and code with another limit and alpha, which torch.compile then makes dynamic."""
    *inputs, cotangent = make_inputs(device)
    gate, attributes, _ = GATES["gpt_oss"]
    first = make_custom(device, gate, **attributes)
    forward = torch.compile(type(first).forward, fullgraph=True, backend="aot_eager")
    for limit, alpha in ((0.6, 1.3), (0.7, 1.1), (0.8, 1.702)):
        experts = make_custom(device, gate, swiglu_limit=limit, swiglu_alpha=alpha)
        experts.__class__ = type(first)
        expected = run(experts, "eager", inputs, cotangent)
        experts.forward = partial(forward, experts)
        assert_same(run(experts, implementation, inputs, cotangent), expected)


def test_activations_match_eager(implementation, fused_calls, device):
    from transformers.activations import ACT2FN

    *inputs, cotangent = make_inputs(device)
    fused = set()
    for name in ACT2FN:
        experts = make_custom(device, act_fn=ACT2FN[name].to(device, torch.float32))
        expected = run(experts, "eager", inputs, cotangent)
        fused_calls.clear()
        assert_same(run(experts, implementation, inputs, cotangent), expected)
        if fused_calls:
            fused.add(name)
    assert fused == FUSED_ACTIVATIONS
