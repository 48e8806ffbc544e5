"""The Triton kernels under Triton's interpreter, on CPU tensors: a run of its own, since a variable decides at import.

    TRITON_INTERPRET=1 pytest tests/interpreter

The CPU counts as an accelerator, whose backend is Triton's. In all tests fresh memory is NaN (or the largest integer),
and a kernel accesses no other memory than that of the tensors that its launch is given. fp32 and fp16 only: `tl.dot` of
bf16 is wrong in the interpreter of Triton 3.6 to 3.9.
"""

import importlib
import os
from functools import partial

import pytest
import torch
from poison import poisoned_allocations


def pytest_pycollect_makemodule(module_path, parent):
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise parent.CollectError("tests/interpreter needs TRITON_INTERPRET=1 in the environment; else --ignore it")


@pytest.fixture(scope="session", autouse=True)
def device_spec(module):
    """There is no driver to ask for one: two programs at a time, so that a persistent grid loops."""
    device = module("common.device")
    patch, spec = pytest.MonkeyPatch(), device.DeviceSpec(2, 232448)
    patch.setattr(device, "device_spec", lambda device: spec)
    yield
    patch.undo()


class PatchedOnce:
    """The language as interpreted functions see it: patched once in a kernel for the functions of each module.

    Triton patches it anew for each call of a device function, which takes two fifths of the time of these tests.
    """

    modules = set()  # globals of functions that it is patched for

    def __init__(self, patch, function):
        if id(function.__globals__) not in self.modules:
            self.modules.add(id(function.__globals__))
            self.scope = patch(function)

    def restore(self):
        """At the end of a kernel."""
        self.modules.clear()
        self.scope.restore()


@pytest.fixture(scope="session", autouse=True)
def patched_once():
    interpreter, patch = importlib.import_module("triton.runtime.interpreter"), pytest.MonkeyPatch()
    if hasattr(interpreter, "_patch_lang"):  # private: without it these tests take longer
        patch.setattr(interpreter, "_patch_lang", partial(PatchedOnce, interpreter._patch_lang))
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def kernels(module):
    """The Triton backend."""
    backends, patch = module("backends"), pytest.MonkeyPatch()
    patch.setitem(backends._NAMES, "cpu", "triton")
    backends._load.cache_clear()
    yield module("backends.triton")
    patch.undo()
    backends._load.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def checked_bounds(module):
    from interpreter.guard import Bounds

    kernel, patch = module("backends.triton.launch").Kernel, pytest.MonkeyPatch()
    launch = kernel.__call__

    def checked(self, grid, *args):
        with Bounds(*args):
            launch(self, grid, *args)

    patch.setattr(kernel, "__call__", checked)
    yield
    patch.undo()


@pytest.fixture(scope="session")
def quantize(kernels, module):
    """The launchers that make rows of codes."""
    return module("backends.triton.quantize")


@pytest.fixture
def descriptors(module, monkeypatch):
    """Counts the descriptors that launchers make."""
    made, descriptors = [], module("backends.triton.descriptors")
    kind = descriptors.TmaDescriptor
    monkeypatch.setattr(descriptors, "TmaDescriptor", lambda *args: made.append(args) or kind(*args))
    return made


@pytest.fixture
def small_decode_tiles(module, monkeypatch):
    """For a few tokens: small extents have several columns and steps along K, none of them a multiple."""
    decode = module("backends.triton.decode")
    monkeypatch.setattr(decode, "_up_tile", lambda k: (4, 16, 4))
    monkeypatch.setattr(decode, "_down_tile", lambda k, choices: (2, 16, 4))
    for name in ("_up_kernel", "_down_kernel"):  # which keep the kernels of real tiles
        monkeypatch.setattr(decode, name, getattr(decode, name).__wrapped__)


@pytest.fixture(params=["one-launch", "three-launches"])
def launches(module, monkeypatch, request):
    """Both sorts at sizes that the interpreter can take."""
    few = {"one-launch": 10**9, "three-launches": -1}[request.param]
    monkeypatch.setattr(module("backends.triton.routing"), "_FEW_SLOTS", few)


@pytest.fixture
def unchecked(monkeypatch):
    """The counts that are asserted on; the assertion itself, which a device only reports later, does not stop us."""
    counts = []
    monkeypatch.setattr(torch, "_assert_async", lambda fits, message: counts.append((bool(fits), message)))
    return counts


@pytest.fixture(autouse=True)
def below_autograd():
    """As the backend is, which many tests call directly."""
    with torch.no_grad(), poisoned_allocations():
        yield
