"""The examples refuse what they cannot run; `make demo` runs them."""

import subprocess
import sys

import pytest
from hub import ROOT


@pytest.mark.parametrize("name", ["quickstart", "lora"])
def test_no_steps(name):
    for module in ("matplotlib", "peft", "transformers"):
        pytest.importorskip(module)
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--steps", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 2 and "argument --steps: expected at least 1, got 0" in result.stderr, result.stderr
