"""Stands in for Triton's driver where there is no GPU: kernels are those for a Hopper, and their launches are kept.

CPU tensors take the way of CUDA's, through all of the package and of Triton but the launcher in C.
"""

import importlib
import itertools
import sys
import zlib
from types import SimpleNamespace

import pytest
import torch

_NUMBERS = itertools.count()  # of devices: each test has its own, for which Triton has compiled nothing


class Utils:
    """Stands in for the driver's functions in C."""

    def load_binary(self, name, kernel, shared, device):
        return name, zlib.crc32(kernel), 32, 0, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def build_signature_metadata(self, signature):
        return tuple(signature)

    def fill_tma_descriptor(self, address, *form):
        return ("map", address, *(tuple(part) if isinstance(part, (list, tuple)) else part for part in form))

    fill_tma_descriptor_tiled = fill_tma_descriptor


class Stub:
    """What came of launches.

    launches: of each one the grid, the kernel and what it got, tensors by address. variants: what Triton compiled.
    package: the name of the package under test.
    """

    def __init__(self, package):
        self.package, self.launches, self.variants = package, [], []

    def module(self, name):
        return importlib.import_module(f"{self.package}.{name}")

    def names(self):
        """Of all variants' kernels, in the order in which they were compiled."""
        return [variant.name for variant in self.variants]

    def launcher(self, first):
        """A launcher as Triton's in C, of which `first` is the place of the kernel's metadata, hooks follow."""

        def launch(*args):
            _, metadata, enter, leave = args[first : first + 4]
            if enter is not None:
                enter(metadata)
            self.launches.append(_values(args[: first + 1] + args[first + 4 :]))
            if leave is not None:
                leave(metadata)

        return launch


def _values(arg):
    """What a launcher got, to be compared: tensors, of descriptors as well, by what they are and where they lie."""
    if isinstance(arg, (list, tuple)):
        return tuple(map(_values, arg))
    if isinstance(arg, torch.Tensor):
        return "tensor", arg.data_ptr(), arg.dtype
    if hasattr(arg, "block_shape"):
        parts = arg.base, arg.shape, arg.strides, arg.block_shape, arg.padding
        return "descriptor", *map(_values, parts), str(getattr(arg, "layout", None))
    return arg


def _uncompiled(stub, function, number):
    """What Triton launches a compiled kernel by, without a binary."""
    from triton.compiler import CompiledKernel

    variant = object.__new__(CompiledKernel)
    variant.name, variant.src, variant.hash = function.__name__, None, str(number)
    variant.module, variant.function, variant.packed_metadata = "loaded", number, ("metadata", number)
    variant._module_pid = None  # of no process that would unload it
    variant._run = stub.launcher(5)
    return variant


def _patch_triton(stub, monkeypatch):
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    utils, device = Utils(), f"stub {next(_NUMBERS)}"
    if hasattr(nvidia, "_BASE_ARGS_FORMAT"):  # a launcher is compiled for each signature
        built = SimpleNamespace(launch=stub.launcher(9))
        monkeypatch.setattr(nvidia, "compile_module_from_src", lambda *args, **kwargs: built)
    else:
        utils.launch = stub.launcher(7)
        monkeypatch.setattr(nvidia, "PyKernelArg", lambda nested_tuple, type: (nested_tuple, type), raising=False)
        for name in ("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):
            monkeypatch.setattr(nvidia, name, name, raising=False)
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [])
    active = SimpleNamespace(
        utils=utils, launcher_cls=nvidia.CudaLauncher, get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: device, get_current_stream=lambda device: 7, map_python_to_cpp_type=nvidia.ty_to_cpp,
        allocate_default_profile_scratch=lambda size, align, stream: None,
    )  # fmt: skip
    monkeypatch.setattr(driver, "_active", active)


def _patch_compiler(stub, monkeypatch, compiles):
    from triton.runtime.jit import JITFunction

    compile_kernel = JITFunction._do_compile

    def keep(function, key, signature, device, *rest):
        if compiles:
            variant = compile_kernel(function, key, signature, device, *rest)
        else:
            variant = function.device_caches[device][0][key] = _uncompiled(stub, function, len(stub.variants))
        stub.variants.append(variant)
        return variant

    monkeypatch.setattr(JITFunction, "_do_compile", keep)


def _patch_package(stub, monkeypatch):
    kernels, device, compat = map(stub.module, ("backends.triton", "common.device", "common._compat"))
    spec = device.DeviceSpec(132, 232448, hopper=compat.has_gluon(), name="NVIDIA H200", capability=(9, 0))
    monkeypatch.setattr(device, "device_spec", lambda device: spec)
    monkeypatch.setattr(stub.module("backends"), "_load", lambda device_type: kernels)
    monkeypatch.setattr(compat, "keeps_variants", lambda is_cuda: True)


def _forget(package):
    """Clears what the package keeps of kernels."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(f"{package}.backends"):
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


def _stubbed(grouped_moe, monkeypatch, compiles):
    pytest.importorskip("triton.backends.nvidia.driver")
    _forget(grouped_moe.__name__)
    stub = Stub(grouped_moe.__name__)
    _patch_triton(stub, monkeypatch)
    _patch_compiler(stub, monkeypatch, compiles)
    _patch_package(stub, monkeypatch)
    yield stub
    monkeypatch.undo()
    _forget(grouped_moe.__name__)


@pytest.fixture
def stub(grouped_moe, monkeypatch):
    """Triton's path without its compiler: which variants there are, and what each launch gets."""
    yield from _stubbed(grouped_moe, monkeypatch, compiles=False)


@pytest.fixture
def compiling_stub(grouped_moe, monkeypatch):
    """The same with Triton's compiler and all of its launcher but the part in C."""
    yield from _stubbed(grouped_moe, monkeypatch, compiles=True)
