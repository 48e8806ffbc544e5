"""Layers whose kernels `warm_up` compiles, and a stub for the GPU that they would need."""

import pytest
import torch
from fp8_training import hold_in_fp8

BF16 = torch.bfloat16


@pytest.fixture
def compiles(stub, monkeypatch):
    """The stub, on which CPU tensors need kernels."""
    monkeypatch.setattr(stub.module("warm_up"), "_needs_kernels", lambda tensor: True)
    return stub


def build(name, layers, dtype, sizes):
    """A model of transformers, without its head. Memory of experts is as it was."""
    transformers = pytest.importorskip("transformers")
    small = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 64, "hidden_size": 256}
    config = getattr(transformers, f"{name}Config")(**{"num_hidden_layers": layers, **small, **sizes})
    config._experts_implementation = "eager"
    return getattr(transformers, f"{name}Model")(config).to(dtype)


def qwen3(layers=1, dtype=BF16, **sizes):
    sizes = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 192, **sizes}
    return build("Qwen3Moe", layers, dtype, sizes)


def gpt_oss():
    """Experts with biases, whose gate and up columns alternate."""
    return build("GptOss", 1, BF16, {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 256})


def fp8(**options):
    """Qwen3's experts in FP8."""
    model = qwen3()
    hold_in_fp8(model, **options)
    experts = experts_of(model)
    for name, parameter in experts._parameters.items():
        if parameter is not None:
            experts._parameters[name] = torch.nn.Parameter(torch.zeros_like(parameter, device="cpu"), False)
    return model


def experts_of(model):
    return next(module for module in model.modules() if hasattr(module, "down_proj") and hasattr(module, "num_experts"))
