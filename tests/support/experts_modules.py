"""Experts modules of transformers: all of its classes, made small, classes of the tests' own, and how they are run.

The classes are found in transformers' source, so a newer transformers extends the sweep by itself.
"""

import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
from pathlib import Path
from typing import Callable, Dict, Optional

import torch
from compare import difference, norms, tolerances
from torch import Tensor

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 5, 32, 24, 24, 3
SIZES = {"experts": EXPERTS, "intermediate": INTERMEDIATE, "hidden_size": HIDDEN}  # by parts of names in configs
IDLE_EXPERT = 3  # gets no token

# A limit and an alpha that no class has by default. |pre-activation| ~ N(0, 1), so 0.6 clamps more than a half.
LOWERED = {"limit": 0.6, "swiglu_limit": 0.6, "alpha": 1.3, "swiglu_alpha": 1.3}

# Of fp32 sums of at most TOKENS * TOP_K terms, three deep, whose order differs. A lost term is off by 1e-2 or more.
ROW_TOLERANCE = 2.5e-5
GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts"  # transposed, interleaved, with biases


def find_cases() -> list:
    """(module, name) of all classes under @use_experts_implementation, from the source alone: modules import slowly."""
    decorated = re.compile(r"^@use_experts_implementation\b.*?^class (\w+)", re.MULTILINE | re.DOTALL)
    spec = importlib.util.find_spec("transformers")
    root = Path(spec.origin).parent / "models" if spec else Path(os.devnull)
    return [
        (f"transformers.models.{path.parent.name}.{path.stem}", name)
        for path in sorted(root.glob("*/modeling_*.py"))
        for name in decorated.findall(path.read_text(encoding="utf-8"))
    ]


def config_classes(experts_class: type) -> list:
    """The config classes that the experts' module knows, those most alike in name first."""
    from transformers import PreTrainedConfig

    name = experts_class.__module__
    modules = [sys.modules[name], importlib.import_module(name.replace(".modeling_", ".configuration_"))]
    known = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}

    def unlikeness(config_class: type) -> tuple:
        return -len(os.path.commonprefix((config_class.__name__, experts_class.__name__))), config_class.__name__

    return sorted((each for each in known if issubclass(each, PreTrainedConfig)), key=unlikeness)


def small_config(config_class: type, source: str, sizes: Dict[str, int]):
    """The model's default config, but for these sizes of those that the source of the experts' __init__ reads."""
    config = config_class()
    for name in set(re.findall(r"config\.(\w+)", source)):
        for part, size in sizes.items():
            if part in name and hasattr(config, name):
                # Past the config's own validation: Ernie's lists one size per modality and passes one of them on.
                object.__setattr__(config, config.attribute_map.get(name, name), size)
    return config


def initialized(experts: torch.nn.Module, device: str) -> torch.nn.Module:
    """The experts with random weights that keep the scale of their input."""
    for parameter in experts.parameters():
        fan_in = parameter.shape[1 if experts.is_transposed else 2] if parameter.dim() == 3 else 1
        torch.nn.init.normal_(parameter, std=fan_in**-0.5)
    return experts.to(device)


def build(case: tuple, device: str, implementation: Optional[str] = None, sizes=SIZES) -> torch.nn.Module:
    """A small module of the class."""
    module, name = case
    experts_class = getattr(importlib.import_module(module), name)
    source = inspect.getsource(inspect.unwrap(experts_class.__init__))
    for config_class in config_classes(experts_class):
        try:
            experts = experts_class(small_config(config_class, source, sizes))
        except (AttributeError, TypeError):  # the config of another part of the model
            continue
        break
    assert experts.num_experts == sizes["experts"] and experts.down_proj.numel() == math.prod(sizes.values())
    experts.config._experts_implementation = implementation
    return initialized(experts, device)


def lower_limits(experts: torch.nn.Module) -> bool:
    """Lowers the limit and the alpha of the module's gate. Returns whether it has any."""
    lowered = {name: value for name, value in LOWERED.items() if hasattr(experts, name)}
    vars(experts).update(lowered)
    return bool(lowered)


def make_custom(
    device: str,
    implementation: Optional[str] = None,
    gate: Optional[Callable] = None,
    step: Optional[Callable] = None,
    **attributes,
) -> torch.nn.Module:
    """Experts of a new class, so that nothing about its gate is known yet, with attributes that it reads.

    gate(module, gate rows, up rows) is what goes into the down-projection, step(module, rows) what comes after it.
    """
    from transformers import MixtralConfig
    from transformers.integrations.moe import use_experts_implementation
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    class Experts(MixtralExperts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            out = torch.zeros_like(hidden_states)
            for e in range(self.num_experts):
                tokens, ks = torch.where(top_k_index == e)
                rows = self._apply_gate(hidden_states[tokens] @ self.gate_up_proj[e].t()) @ self.down_proj[e].t()
                rows = rows if step is None else self._apply_post_expert(rows)
                out = out.index_add(0, tokens, rows * top_k_weights[tokens, ks, None])
            return out

    if gate is not None:
        Experts._apply_gate = lambda self, rows: gate(self, *rows.chunk(2, dim=-1))
    if step is not None:
        Experts._apply_post_expert = step
    sizes = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    experts = initialized(use_experts_implementation(Experts)(MixtralConfig(**sizes)), device)
    experts.config._experts_implementation = implementation
    for name, value in attributes.items():
        if hasattr(experts, name):
            delattr(experts, name)  # a function cannot take the place of a module
        setattr(experts, name, value)
    return experts


class Ungated(torch.nn.Module):
    """Experts without a gate, as transformers lays them out; the block has no such act_fn by default."""

    has_gate = False

    def __init__(self, experts=16, top_k=2, hidden=128, intermediate=96, act_fn=torch.nn.Tanh, device="cpu"):
        super().__init__()
        self.num_experts, self.top_k, self.act_fn = experts, top_k, act_fn()
        for name, *shape in (("up_proj", intermediate, hidden), ("down_proj", hidden, intermediate)):
            weight = torch.zeros(experts, *shape, device=device, dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(weight))


def make_inputs(device: str) -> tuple:
    """hidden_states, top_k_index, top_k_weights, cotangent."""
    busy = torch.tensor([e for e in range(EXPERTS) if e != IDLE_EXPERT])
    ids = busy[torch.rand(TOKENS, len(busy)).argsort(dim=1)[:, :TOP_K]]
    tensors = (torch.randn(TOKENS, HIDDEN), ids, torch.rand(TOKENS, TOP_K) + 0.1, torch.randn(TOKENS, HIDDEN))
    return tuple(tensor.to(device) for tensor in tensors)


def step(experts: torch.nn.Module, x: Tensor, ids: Tensor, weights: Tensor, cotangent: Tensor) -> Dict[str, Tensor]:
    """The output, and the gradients of hidden_states, top_k_weights and each parameter that is trained."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(x, ids, weights)
    trained = {name: p for name, p in experts.named_parameters() if p.requires_grad}
    leaves = {"hidden_states": x, "top_k_weights": weights, **trained}
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent.to(out.dtype))
    return {"output": out.detach(), **dict(zip(leaves, grads))}


def run(experts: torch.nn.Module, implementation: str, inputs: tuple, cotangent: Tensor) -> Dict[str, Tensor]:
    experts.config._experts_implementation = implementation
    return step(experts, *inputs, cotangent)


def assert_same(actual: Dict[str, Tensor], expected: Dict[str, Tensor]) -> None:
    """Within the tolerance of fp32 in norm, and row by row of every matrix.

    A row may cancel below the norm of its terms, which the error is relative to: what it lacks in norm beneath a fifth
    of the root mean square is not held against it.
    """
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape and got.dtype == want.dtype, name
        got, want = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (got, want.double()))
        size, (allowed, _) = norms(want), tolerances(torch.float32)
        by_row = ROW_TOLERANCE * size.clamp_min(0.2 * size.square().mean().sqrt())
        message = difference(name, got, want, allowed * size.norm(), by_row)
        assert not message, message


def assert_as_eager(experts: torch.nn.Module, implementation: str, around: Callable = lambda forward: forward) -> None:
    """The module, its forward changed by `around`, computes what it does with its own eager forward."""
    *inputs, cotangent = make_inputs(experts.down_proj.device)
    expected = run(experts, "eager", inputs, cotangent)
    experts.forward = around(experts.forward)
    assert_same(run(experts, implementation, inputs, cotangent), expected)
