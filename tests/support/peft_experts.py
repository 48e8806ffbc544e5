"""Experts and small models under peft, how they are run, and which LoRAs the package is given by them."""

from typing import Dict, Iterator, List, NamedTuple, Optional

import pytest
import torch
from experts_modules import build, step
from models import assert_close, make_model
from torch import Tensor, nn

peft = pytest.importorskip("peft", minversion="0.21")

WRAPPER = peft.tuners.lora.ParamWrapper
E, H, I, TOKENS, TOP_K, RANK = 8, 64, 48, 20, 2, 3  # noqa: E741
MODELS = ("qwen3_moe", "gpt_oss", "nemotron_h")  # gated; transposed, interleaved, with biases; without a gate
ROUTERS = ("gate.weight", "router.weight")
by_model = pytest.mark.parametrize("name", MODELS)
# By kind: the model and attributes. muse_spark has a norm after each expert; the block computes no softplus gates.
EXPERTS = {
    **{name: (name, {}) for name in (*MODELS, "muse_spark")},
    "softplus": ("qwen3_moe", {"act_fn": nn.Softplus()}),
    "softplus-gpt_oss": ("gpt_oss", {"_apply_gate": lambda rows: nn.functional.softplus(rows[:, ::2]) * rows[:, 1::2]}),
}
by_kind = pytest.mark.parametrize("kind", EXPERTS)


class Call(NamedTuple):
    """Which LoRAs a call of the block, or of two grouped linear layers, was given."""

    up: bool
    down: bool


BOTH, NONE = Call(True, True), Call(False, False)


@pytest.fixture
def calls(module, monkeypatch) -> List[Call]:
    """Grows by one entry for each call of experts by the package: the LoRAs that it was given."""
    shim, calls, linears = module("integrations.transformers"), [], []
    block, linear = shim.grouped_mm_experts, shim.grouped_linear

    def watched_block(*args, **kwargs):
        calls.append(Call(kwargs["gate_up_lora"] is not None, kwargs["down_lora"] is not None))
        return block(*args, **kwargs)

    def watched_linear(*args, **kwargs):
        linears.append(kwargs["lora"] is not None)
        if len(linears) % 2 == 0:
            calls.append(Call(*linears[-2:]))
        return linear(*args, **kwargs)

    monkeypatch.setattr(shim, "grouped_mm_experts", watched_block)
    monkeypatch.setattr(shim, "grouped_linear", watched_linear)
    return calls


@pytest.fixture
def fresh_peft(module, implementation, fresh_compiler) -> Iterator[None]:
    """Warnings about peft come once for each reason: in each test again. What is found of a peft, a test may change."""
    ours = module("integrations.peft")
    ours._warned.clear()
    assert ours._is_known(False) and ours._is_known(True)
    yield
    ours._computes_our_sum.cache_clear()
    ours._adds_factors.cache_clear()


def forget_registration(model: nn.Module) -> None:
    """Makes wrappers peft's own, as they are of a model that peft wrapped before the package was registered."""
    for wrapper in wrappers(model):
        wrapper.__class__ = WRAPPER


def first_weight(name: str) -> str:
    return "up_proj" if name == "nemotron_h" else "gate_up_proj"


def add_lora(model: nn.Module, name: str, targets: Optional[List[str]] = None, **options):
    """The model under peft, with random factors for both weights of the experts."""
    targets = targets or [f"experts.{first_weight(name)}", "experts.down_proj"]
    options = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": [], "init_lora_weights": False, **options}
    return peft.get_peft_model(model, peft.LoraConfig(target_parameters=targets, **options))


def make_peft_model(name: str, device: str, num_layers: int = 2, **options):
    """A small model under peft, with LoRA on the attention, too, and trained routers; and ids."""
    model, ids = make_model(name, device, num_layers)
    model = add_lora(model, name, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **options)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(ROUTERS):
            parameter.requires_grad_()
    return model, ids


class Holder(nn.Module):
    """A block of one experts module, as peft sees it."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.experts, self.config = experts, {"model_type": "custom"}

    def forward(self, *args):
        return self.experts(*args)


def make_experts(kind: str, device: str, num_experts: int = E) -> Holder:
    """Experts alone with random weights, in a block. Skips the test where transformers has no such model."""
    name, attributes = EXPERTS[kind]
    modeling, class_name = f"transformers.models.{name}.modeling_{name}", name.title().replace("_", "") + "Experts"
    pytest.importorskip(modeling)
    sizes = {"experts": num_experts, "intermediate": I, "hidden_size": H}
    experts = build((modeling, class_name), device, sizes=sizes)
    for attribute, value in attributes.items():
        setattr(experts, attribute, value)
    return Holder(experts).to(device)


def make_adapted(kind: str, device: str, targets=None, num_experts: int = E, dtype=torch.float32, **options) -> tuple:
    """(experts alone under peft, inputs)."""
    experts = make_experts(kind, device, num_experts).to(dtype)
    return add_lora(experts, kind, targets, **options), make_inputs(device, num_experts, dtype)


def set_implementation(model: nn.Module, implementation: str) -> None:
    for module in model.modules():
        if "is_transposed" in module.__dict__:
            module.config._experts_implementation = implementation


def make_inputs(device: str, num_experts: int = E, dtype: torch.dtype = torch.float32) -> tuple:
    """hidden_states, top_k_index, top_k_weights, cotangent."""
    ids = torch.rand(TOKENS, num_experts).argsort(dim=1)[:, :TOP_K]
    tensors = (torch.randn(TOKENS, H).to(dtype), ids, torch.rand(ids.shape) + 0.1, torch.randn(TOKENS, H))
    return tuple(tensor.to(device) for tensor in tensors)


def run(model: nn.Module, inputs: tuple, implementation: str) -> Dict[str, Tensor]:
    set_implementation(model, implementation)
    return step(model, *inputs)


def train_step(model: nn.Module, ids: Tensor, implementation: str) -> Dict[str, Tensor]:
    """Logits, loss, and the gradients of what is trained."""
    set_implementation(model, implementation)
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), "loss": out.loss.detach()[None], **grads}


def assert_near(got: Tensor, want: Tensor) -> None:
    assert_close({"out": got}, {"out": want})


def assert_runs_as_eager(model: nn.Module, inputs: tuple, implementation: str) -> None:
    """Output and gradients are those of the model's own eager forward, which runs before."""
    want = run(model, inputs, "eager")
    assert_close(run(model, inputs, implementation), want)


def outputs(model: nn.Module, inputs: tuple, implementation: str) -> Tensor:
    set_implementation(model, implementation)
    with torch.no_grad():
        return model(*inputs[:3])


def wrappers(model: nn.Module) -> List[nn.Module]:
    return [module for module in model.modules() if isinstance(module, WRAPPER)]
