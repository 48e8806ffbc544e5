"""Loads the kernel as its users do: from the Hub's name for it, resolved to a local build."""

import dataclasses
import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Callable, Iterator, Optional

import kernels
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))  # the Hub's run of tests has no pytest.ini

from hub import ROOT, Hub, read_hub  # noqa: E402

# Plugins of test files that import them as well, which pytest would warn of.
pytest.register_assert_rewrite("layers_to_warm", "peft_experts", "tuned")


def accelerator() -> str:
    """The device type of the machine's accelerator, or an empty string."""
    if torch.cuda.is_available():  # ROCm as well.
        return "cuda"
    return "xpu" if torch.xpu.is_available() else ""


def spread_over_gpus() -> None:
    """Gives each process of pytest-xdist another GPU as its first one, if there are several and nobody chose one."""
    first, count = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw"), torch.cuda.device_count()
    if first.isdigit() and count > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((int(first) + i) % count) for i in range(count))


def pytest_configure(config: pytest.Config) -> None:
    spread_over_gpus()
    # The Hub build sets LOCAL_KERNELS to the variant under test.
    if "LOCAL_KERNELS" in os.environ:
        return
    build = ROOT / "build"
    if not build.is_dir():
        pytest.exit("there is no build to test: run make build", returncode=pytest.ExitCode.USAGE_ERROR)
    os.environ["LOCAL_KERNELS"] = f"{read_hub().repo_id}={build}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> Optional[bool]:
    """The Hub's run of cheap tests has no tools and benchmarks, which files without such tests import."""
    is_test = collection_path.name.startswith("test_") and config.option.markexpr == "kernels_ci"
    return True if is_test and "kernels_ci" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if accelerator():
        return
    skip = pytest.mark.skip(reason="needs an accelerator")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread(set_threads) -> None:
    """Where matrices are tiny: threads would only wait for each other, for minutes on a busy machine."""
    set_threads(1)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What a test compiles is not there before, nor after it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def hub() -> Hub:
    return read_hub()


@pytest.fixture(scope="session")
def grouped_moe(hub: Hub):
    """The kernel, loaded by its name on the Hub."""
    return kernels.get_kernel(hub.repo_id, version=hub.version)


@pytest.fixture(scope="session")
def module(grouped_moe):
    """A module of the package by its name: `grouped_moe.grouped_linear` is a function. Some need Triton."""
    return lambda name: importlib.import_module(f"{grouped_moe.__name__}.{name}")


@pytest.fixture(params=["gluon", "triton"])
def kernels_of_codes(request, module, monkeypatch) -> None:
    """Hopper's own kernels for rows of 8-bit floats, and those for any GPU with e4m3, which a Hopper runs as well."""
    device = module("common.device")
    spec = device.device_spec(torch.device("cuda", torch.cuda.current_device()))
    if request.param == "triton":
        spec = dataclasses.replace(spec, hopper=False)
        monkeypatch.setattr(device, "device_spec", lambda device: spec)
    elif not spec.hopper:
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.fixture
def two_ranks(device):
    """Two ranks, of which this is the first, without the second: nothing here communicates."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh(device, (2,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def exchange(module, monkeypatch):
    """That of expert-parallel ranks, of which this is the only one: what it sends to any rank comes back to it."""
    exchange = module("exchange")
    monkeypatch.setattr(exchange, "all_to_all", lambda rows, group: rows.clone(memory_format=torch.contiguous_format))
    return exchange


@pytest.fixture
def implementation(grouped_moe) -> str:
    """The name that transformers knows the package by."""
    return grouped_moe.register_experts_implementation()


@pytest.fixture
def fused_calls(grouped_moe, monkeypatch) -> list:
    """Grows by one entry for each call that takes the fused path."""
    shim = sys.modules[grouped_moe.register_experts_implementation.__module__]
    fused, calls = shim.grouped_mm_experts, []
    monkeypatch.setattr(shim, "grouped_mm_experts", lambda *a, **k: calls.append(1) or fused(*a, **k))
    return calls


@pytest.fixture(scope="session")
def device() -> str:
    return accelerator() or "cpu"


@pytest.fixture(scope="session")
def native(module):
    """The module of the native op for a few tokens."""
    if not module("backends.native.fakes").IS_BUILT:
        pytest.skip("not the CUDA build")
    # Loads the backend, which keeps the functions that it finds: not those that a test has put in their place.
    module("backends").backend_of(torch.empty(0, device="cuda"))
    return module("backends.native.decode")


@pytest.fixture(params=["by-slot", "by-expert"])
def way(native, monkeypatch, request):
    """Whether slots read weights themselves, or those of an expert are read once for several slots."""
    monkeypatch.setattr(native, "decode_pays", lambda *_: request.param == "by-slot")
    monkeypatch.setattr(native, "groups_slots", lambda *_: True)
    return request.param


@pytest.fixture
def taken(native, monkeypatch, module) -> list:
    """Grows by whether the native op took the call, and whether it was called before any other op."""
    found, decode_experts = [], native.decode_experts

    def spy(direct, *args):
        out = decode_experts(*args)
        found.append((direct, out is not None))
        return out

    monkeypatch.setattr(native, "decode_experts", partial(spy, True))
    monkeypatch.setattr(module("backends.native.backend"), "decode_experts", partial(spy, False))
    return found
