"""Every shipped kernel compiles for GPUs that are not here, fits their shared memory and does not spill."""

import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("triton")

TARGETS = ("sm80", "sm90", "sm100", "sm120", "gfx942")


CASES = ("--layers gpt-oss --tokens 1,4096", "--layers qwen3-30b --tokens 4096")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spilling(target):
    """Two layers in one signature each, one at the smallest and the largest row tile; without options it does all."""
    for case in CASES:
        command = [sys.executable, "tools/compile_check.py", "--targets", target, "--dtypes", "bf16", *case.split()]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(result.stdout)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "down_dgrad_kernel" in result.stdout and "wgrad_kernel" in result.stdout
