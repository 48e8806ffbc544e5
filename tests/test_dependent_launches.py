"""Dependent launches: who asks for them, and that every kernel keeps what they ask of it."""

import ast
import sys
from pathlib import Path

import pytest
import torch


def test_every_kernel_waits_for_the_stream(grouped_moe):
    """Before all else, as a dependent launch must: the kernel before it may still run."""
    count = 0
    for path in (Path(grouped_moe.__file__).parent / "_triton").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert ast.unparse(node.body[1]) == "wait_for_stream()", f"{path.name}: {node.name}"
                count += 1
    assert count > 20


@pytest.mark.parametrize("capability, hip, options", [
    ((9, 0), None, {"launch_pdl": True}), ((12, 0), None, {"launch_pdl": True}), ((8, 9), None, {}), ((9, 4), "7", {}),
])  # fmt: skip
def test_who_launches_dependently(grouped_moe, monkeypatch, capability, hip, options):
    """NVIDIA's GPUs from Hopper on; AMD's Triton does not know the option."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    options_of = sys.modules[f"{grouped_moe.__name__}.launch"]._launch_options.__wrapped__
    assert options_of(0) == options and options_of(-1) == {}
