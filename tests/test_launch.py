"""Direct launches hand the launcher in C what Triton's own path hands it, and nothing of another tensor.

Runs Triton 3.6's own code without a GPU: a stub stands in for the driver and takes what the launcher would get.
"""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

BF16 = torch.bfloat16


class Utils:
    """Stands in for the driver's functions in C."""

    def load_binary(self, name, kernel, shared, device):
        return name, hash(name), 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def fill_tma_descriptor(self, address, *form):
        return ("map", address, *(tuple(part) if isinstance(part, (list, tuple)) else part for part in form))


class Taken(list):
    """Stands in for a launcher in C: keeps its arguments, but for what hooks would get and the hooks."""

    def __call__(self, *args):
        args = args[:10] + args[13:]
        self.append(tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args))


@pytest.fixture(scope="module")
def module(grouped_moe):
    return lambda name: sys.modules[f"{grouped_moe.__name__}.{name}"]


@pytest.fixture(scope="module")
def sent(module):
    """The arguments of all calls of launchers in C, on a GPU that is a Hopper but for its memory."""
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    if not hasattr(nvidia, "_BASE_ARGS_FORMAT"):
        pytest.skip("this Triton's launchers are called through Triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    taken, monkeypatch = Taken(), pytest.MonkeyPatch()
    active = SimpleNamespace(
        utils=Utils(), launcher_cls=nvidia.CudaLauncher, get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: "stub", get_current_stream=lambda device: 7, map_python_to_cpp_type=nvidia.ty_to_cpp,
    )  # fmt: skip
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda *args, **kwargs: SimpleNamespace(launch=taken))
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(module("launch"), "_keeps_variants", lambda tensor: True)
    spec = module("tuning").DeviceSpec(132, 232448, hopper=True, name="stub")
    monkeypatch.setattr(module("tuning"), "device_spec", lambda device_type, index: spec)
    previous = driver._active
    driver.set_active(active)
    yield taken
    driver._active = previous
    monkeypatch.undo()


@pytest.fixture
def both(module, sent, monkeypatch):
    """Every direct launch is made Triton's way as well and compared; returns how many there were."""
    launch, counts = module("launch"), {"direct": 0, "first": 0, "maps": 0}
    direct = launch.Launch.__call__

    def call(self, tensors):
        sent.clear()
        if self.function is None:
            direct(self, tensors)
            counts["first"] += 1
            assert self.function is not None
        else:
            direct(self, tensors)
            self.by_kernel(tensors)
            with mock.patch.dict(self.kernel.variants, clear=True):  # by all of Triton's path
                self.by_kernel(tensors)
            assert len(sent) == 3 and sent[0] == sent[1] == sent[2]
            counts["direct"] += 1
            counts["maps"] += sum(isinstance(arg, tuple) and arg[:1] == ("map",) for arg in sent[0])

    monkeypatch.setattr(launch.Launch, "__call__", call)
    monkeypatch.setattr(launch.Plan, "__call__", lambda self, *given: self._by_kernels([*given, *self.blank]))
    return counts


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [64, 2048])
def test_linear(module, both, rows, transposed):
    linear = module("grouped_linear")
    x, dy, sizes = torch.zeros(rows, 256, dtype=BF16), torch.zeros(rows, 512, dtype=BF16), torch.tensor([rows // 4] * 4)
    weight = torch.zeros((4, 256, 512) if transposed else (4, 512, 256), dtype=BF16)
    for _ in range(3):
        _, tile_map = linear.forward_triton(x, weight, sizes, None, None, transposed)
        linear.backward_triton(dy, x, weight, tile_map, None, None, transposed, (True, True, False, False))
    assert both["direct"] == 2 * 4 and both["first"] == 4
    assert both["maps"] > 0
