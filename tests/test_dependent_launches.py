"""Dependent launches: who asks for them, and that every kernel keeps what they ask of it."""

import ast
import importlib
from pathlib import Path

import pytest
import torch


def is_compiled(function: ast.FunctionDef) -> bool:
    """Whether Triton or Gluon compiles it."""
    return any(".jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_every_kernel_waits_for_the_stream(grouped_moe):
    """Before all else, as a dependent launch must: the kernel before it may still run."""
    count = 0
    for path in Path(grouped_moe.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and is_compiled(node):
                assert ast.unparse(node.body[1]) == "wait_for_stream()", f"{path.name}: {node.name}"
                count += 1
    assert count > 20


@pytest.mark.parametrize("capability, hip, dependent", [
    ((9, 0), None, True), ((12, 0), None, True), ((8, 9), None, False), ((9, 4), "7", False),
])  # fmt: skip
def test_who_launches_dependently(grouped_moe, monkeypatch, capability, hip, dependent):
    """NVIDIA's GPUs from Hopper on; AMD's Triton does not know the option. All fuse, whatever Triton's default."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    launch = importlib.import_module(f"{grouped_moe.__name__}.backends.triton.launch")
    options_of, fused = launch._options_of.__wrapped__, {"enable_fp_fusion": True}
    assert options_of(torch.device("cuda", 0)) == {**fused, **({"launch_pdl": True} if dependent else {})}
    assert options_of(torch.device("cpu")) == options_of(torch.device("xpu", 0)) == fused
