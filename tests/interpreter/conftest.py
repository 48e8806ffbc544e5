"""The Triton kernels under Triton's interpreter, on CPU tensors: a run of its own, since a variable decides at import.

    TRITON_INTERPRET=1 pytest tests/interpreter

fp32 and fp16 only: `tl.dot` of bf16 is wrong in the interpreter of Triton 3.6 to 3.9.
"""

import os
import sys

import pytest
import torch


def _quick_run(config: pytest.Config) -> bool:
    """Whether this is the Hub's run of cheap tests, of which there are none here."""
    return config.option.markexpr == "kernels_ci"


def pytest_ignore_collect(collection_path, config):
    return True if _quick_run(config) else None


def pytest_pycollect_makemodule(module_path, parent):
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise parent.CollectError("tests/interpreter needs TRITON_INTERPRET=1 in the environment; else --ignore it")


@pytest.fixture(scope="session", autouse=True)
def device_spec(grouped_moe):
    """There is no driver to ask for one: two programs at a time, so that a persistent grid loops."""
    tuning = sys.modules[grouped_moe.__name__ + ".tuning"]
    patch = pytest.MonkeyPatch()
    patch.setattr(tuning, "device_spec", lambda device_type, index: tuning.DeviceSpec(2, 232448))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def no_grad():
    """The launchers are called directly, below autograd."""
    with torch.no_grad():
        yield
