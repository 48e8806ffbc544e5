"""Stands in for Triton's driver where there is no GPU: kernels are compiled for a Hopper, and their launches kept."""

import zlib
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch


class Utils:
    """Stands in for the driver's functions in C."""

    def load_binary(self, name, kernel, shared, device):
        return name, zlib.crc32(kernel) % 2**20, 32, 0, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def build_signature_metadata(self, signature):
        return tuple(signature)

    def fill_tma_descriptor(self, address, *form):
        return ("map", address, *(tuple(part) if isinstance(part, (list, tuple)) else part for part in form))

    fill_tma_descriptor_tiled = fill_tma_descriptor


class Taken(list):
    """Stands in for a launcher in C: keeps its arguments, but for what hooks would get and the hooks.

    metadata: the place of the kernel's. in_tuple: whether the last argument is all those of the kernel.
    """

    metadata, in_tuple = 9, False

    def __call__(self, *args):
        assert not self.in_tuple or len(args) == 16, "another number than is parsed"
        args = args[: self.metadata + 1] + args[self.metadata + 4 :]
        args = (*args[:-1], *args[-1]) if self.in_tuple else args
        self.append(tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args))


TAKEN = Taken()  # one for all: what the package keeps between tests calls it


@pytest.fixture(scope="module")
def sent(module):
    """The arguments of all calls of launchers in C, on a GPU that is a Hopper but for its memory."""
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    taken, monkeypatch, utils = TAKEN, pytest.MonkeyPatch(), Utils()
    if hasattr(nvidia, "_BASE_ARGS_FORMAT"):
        monkeypatch.setattr(nvidia, "compile_module_from_src", lambda *args, **kwargs: SimpleNamespace(launch=taken))
    else:
        utils.launch, taken.metadata, taken.in_tuple = taken, 7, True
        monkeypatch.setattr(nvidia, "PyKernelArg", lambda nested_tuple, type: (nested_tuple, type))
    active = SimpleNamespace(
        utils=utils, launcher_cls=nvidia.CudaLauncher, get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: "stub", get_current_stream=lambda device: 7, map_python_to_cpp_type=nvidia.ty_to_cpp,
    )  # fmt: skip
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(module("launch"), "_keeps_variants", lambda tensor: True)
    options = {"enable_fp_fusion": True, "launch_pdl": True}
    monkeypatch.setattr(module("launch"), "_launch_options", lambda device: options)
    spec = module("tuning").DeviceSpec(132, 232448, hopper=True, name="stub")
    monkeypatch.setattr(module("tuning"), "device_spec", lambda device_type, index: spec)
    previous = driver._active
    driver.set_active(active)
    yield taken
    driver._active = previous
    monkeypatch.undo()


@pytest.fixture
def linear(module, sent, monkeypatch):
    """The linear layer with no plans yet, its calls on an accelerator as far as it can see."""
    linear = module("grouped_linear")
    monkeypatch.setattr(module("define"), "is_accelerated", lambda tensor: True)
    monkeypatch.setattr(linear, "on_device_of", lambda tensor: nullcontext())
    monkeypatch.setattr(linear, "_plans", module("plan").Plans())
    monkeypatch.setattr(linear, "_backward_plans", module("plan").Plans())
    monkeypatch.setattr(linear, "_backward", linear.backward_triton)
    return linear
