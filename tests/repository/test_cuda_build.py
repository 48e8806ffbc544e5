"""The CUDA build: compiles for every architecture, passes the builder's checks and loads, all without a GPU."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import build_cuda
import native_library
import pytest
from hub import ROOT
from kernels._rust import Digest, DigestAlgorithm, Metadata
from kernels.backends import CPU, CUDA, XPU, ROCm
from kernels.variants import _resolve_variant_for_system, parse_variant
from packaging.version import Version
from source_rules import BuildError

PACKAGED_NVCC = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvcc")
needs_compilers = pytest.mark.skipif(
    not shutil.which("g++") or not (shutil.which("nvcc") or PACKAGED_NVCC.is_file()),
    reason="needs g++ and nvcc: pip install -r requirements/cuda.txt",
)

# A machine without a GPU has a PyTorch without libtorch_cuda.so: the stub takes its place.
LOAD = """
import ctypes, importlib, json, pathlib, sys
import kernels, torch
from torch._subclasses.fake_tensor import FakeTensorMode

if not torch.version.cuda:
    ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL)
kernel = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))
module = lambda name: importlib.import_module(f"{kernel.__name__}.{name}")
ops = module("_ops").ops
x, ids, weights = torch.randn(1, 64).bfloat16(), torch.tensor([[1, 0, 4]]), torch.rand(1, 3)
tensors = x, ids, weights, torch.randn(4, 96, 64).bfloat16(), torch.randn(4, 64, 48).bfloat16()
kind = 2, None, None, None, None, 1.0, float("inf"), 0.0
try:
    ops.decode_experts.default(*tensors, *kind)
    refused = ""
except NotImplementedError as error:
    refused = str(error)
with FakeTensorMode():
    fakes = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in tensors]
    made = [ops.decode_experts.default(*fakes, *kind), ops.decode_plain_experts.default(*fakes, 2)]
    factors = [torch.empty(shape, device="cuda") for shape in ((4, 8, 64), (4, 96, 8), (4, 8, 48), (4, 64, 8))]
    made.append(ops.decode_lora_experts.default(*fakes, *kind, *factors, 1.0, 2.0, None))
    made += ops.route_rows.default(fakes[1], 4, 2, 16, 50)
    made.append(ops.split_rows.default(torch.empty(3, dtype=torch.int64, device="cuda"), 3, 9, 16, 20))
    whole = kernel.grouped_mm_experts(*fakes)
x, _, _, up, down = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor for tensor in tensors)
out, want = kernel.grouped_mm_experts(*tensors), kernel.reference.grouped_mm_experts(x, ids, weights, up, down)
print(json.dumps({
    "built": module("backends.native.fakes").IS_BUILT,
    "schema": str(ops.route_rows.default._schema), "refused": refused,
    "shapes": [list(tensor.shape) for tensor in (*made, whole)], "device": whole.device.type,
    "error": float((out.float() - want).norm() / want.norm()),
}))
"""


@needs_compilers
def test_compiles_and_loads(tmp_path, hub):
    """One test of all, so that it is compiled once."""
    output = tmp_path / "build"
    command = [sys.executable, ROOT / "tools" / "build_cuda.py", "--output", output]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    (variant,) = output.glob("torch-stable-abi*")
    assert variant.name in result.stdout and {"torch-cpu", "torch-cuda"} <= {path.name for path in output.iterdir()}
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    project = build_cuda.read_project(ROOT)
    assert list(metadata.backend.archs) == project.capabilities and metadata.version == hub.version
    assert f"import {metadata.id}\n" in (variant / "_ops.py").read_text(encoding="utf-8")
    (library,) = variant.glob("*.so")
    assert library.name == f"{metadata.id}.abi3.so"
    check_library(library, project)
    # What Python sees is the noarch variant but for the ops.
    names = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()}
    noarch = output / "torch-cuda"
    assert names - {library.name} == {p.relative_to(noarch).as_posix() for p in noarch.rglob("*") if p.is_file()}
    check_loaded(variant, tmp_path)


def check_library(library: Path, project) -> None:
    """It is what build.toml declares, and what it is not is noticed."""
    native_library.check_architectures(library, project.capabilities)
    for wrong in (project.capabilities[:-1], [*project.capabilities, "7.5"], ["12.0", *project.capabilities[:-1]]):
        with pytest.raises(BuildError, match="device code for"):
            native_library.check_architectures(library, wrong)
    needs = native_library.needs_of(library)
    native_library.check_symbols(needs, project.torch_version)
    with pytest.raises(BuildError, match="came with PyTorch 2.10"):
        native_library.check_symbols(needs, "2.9")


def check_loaded(variant: Path, scratch: Path) -> None:
    source, stub = scratch / "stub.cpp", scratch / "libtorch_cuda.so"
    source.write_text(build_cuda.STUB, encoding="utf-8")
    command = ["g++", "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", "-o", stub, source]
    subprocess.run(command, check=True)
    command = [sys.executable, "-c", LOAD, variant, stub]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["built"] and "route_rows(Tensor ids, int num_experts" in found["schema"]
    assert re.search("decode_experts.*'CPU' backend", found["refused"])
    shapes = [[1, 64], [1, 64], [1, 64], [50], [2], [3], [1], [20], [1, 64]]
    assert found["shapes"] == shapes and found["device"] == "cuda"
    assert found["error"] < 1e-2


# Prints how much shared memory launches ask for; nothing is launched.
LIMITS = """
#include <cstdio>
#include "routing.h"
extern "C" cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int value) {
  std::printf("%d\\n", value);
  return cudaSuccess;
}
extern "C" long nothing() { return 0; }
int main() {
  for (int experts : {768, 1024}) {
    RouteArgs a{};
    RoutePlan plan;
    plan_route(1, a.num_experts = experts, 9, &plan);
    route_slots(a, plan, nullptr);
  }
}
"""


@needs_compilers
def test_all_calls_ask_for_the_same_shared_memory(tmp_path):
    """The limit is the kernel's, not the call's: another thread's call with fewer experts must not lower it."""
    source, made, program = tmp_path / "limits.cpp", tmp_path / "routing.o", tmp_path / "limits"
    source.write_text(LIMITS, encoding="utf-8")
    toolkit, folder = build_cuda.find_toolkit(None), ROOT / "kernels" / "routing"
    build_cuda.run([toolkit.nvcc, "-std=c++17", "-arch=sm_90", "-c", folder / "routing.cu", "-o", made])
    runtime = set(re.findall(r" U (\w*cuda\w+)", build_cuda.run(["nm", made]))) - {"cudaFuncSetAttribute"}
    stubs = [f"-Wl,--defsym={name}=nothing" for name in runtime]
    build_cuda.run(["g++", "-I", folder, "-I", toolkit.include, *stubs, made, source, "-o", program])
    limits = build_cuda.run([program]).split()
    assert len(limits) == 2 and limits[0] == limits[1]


@pytest.mark.parametrize("symbol, message", [
    ("torch_stream_native_handle", "came with PyTorch 2.13"), ("_ZN2at6Tensor4sizeEv", "not in PyTorch's stable ABI"),
    ("_ZNK3c106Device3strEv", "not in PyTorch's stable ABI"), ("PyObject_Vectorcall", "in Python's stable ABI"),
])  # fmt: skip
def test_symbols_that_are_refused(symbol, message):
    known = ["torch_call_dispatcher", "aoti_torch_get_sizes", "PyModule_Create2", "_ZN5torch6stable1fEv", "memcpy"]
    native_library.check_symbols(native_library.Needs(known, {}), "2.10")
    with pytest.raises(BuildError, match=f"^{symbol} .*{message}"):
        native_library.check_symbols(native_library.Needs([*known, symbol], {}), "2.10")


def test_what_manylinux_lacks():
    versions = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 13)}
    assert native_library.beyond_manylinux(native_library.Needs([], versions)) == ["CXXABI 1.3.13", "GLIBC 2.34"]


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of what build.toml lists."""
    for name in ("kernels", "noarch"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "torch-ext").mkdir()
    for name in ("build.toml", "torch-ext/torch_binding.cpp", "torch-ext/torch_binding.h"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("message, change", [
    ("kernels/new.cu is not listed", lambda root: (root / "kernels" / "new.cu").touch()),
    ("kernels/decode/decode.h is missing", lambda root: (root / "kernels/decode/decode.h").unlink()),
    ("version is not that of noarch/build.toml", ("version = 1", "version = 2")),
    ("hub is not that of noarch/build.toml", ('"org/grouped-moe"', '"org/other"')),
    ("the same cuda-capabilities", ('["8.0", "9.0"', '["9.0"', 1)),
    ("unknown field", ('depends = ["torch"]', 'depends = ["torch"]\nunknown = 1')),
])  # fmt: skip
def test_projects_that_are_refused(project, message, change):
    build_cuda.read_project(project)
    if callable(change):
        change(project)
    else:
        path = project / "build.toml"
        path.write_text(path.read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    with pytest.raises(BuildError, match=f"(?i){message}"):
        build_cuda.read_project(project)


def test_an_nvcc_that_is_not_there(tmp_path):
    """No other one takes its place."""
    with pytest.raises(BuildError, match="^--nvcc: there is no .*nvcc$"):
        build_cuda.find_nvcc(tmp_path / "nvcc")


def test_a_toolkit_that_is_too_old():
    toolkit = build_cuda.Toolkit(Path("/usr/bin/nvcc"), Path("include"), Path("libcudart_static.a"), "12.9")
    with pytest.raises(BuildError, match="^/usr/bin/nvcc is of CUDA 12.9, but build.toml wants 13.0 or newer"):
        build_cuda.build_variant(ROOT, Path("unused"), toolkit)


def test_sources_are_as_narrow_as_python():
    paths = [path for folder in ("kernels", "torch-ext") for path in (ROOT / folder).rglob("*.[ch]*")]
    found = {path.name: max(map(len, path.read_text(encoding="utf-8").splitlines())) for path in paths}
    assert len(found) > 10 and {name: width for name, width in found.items() if width > 120} == {}


SYSTEMS = {"Linux": "linux", "Windows": "windows"}
NOARCH = ["torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu"]


def rows_of_the_table() -> list:
    text = (ROOT / "docs" / "publishing.md").read_text(encoding="utf-8")
    table = re.search(r"## Which build will I get\n.*?\n\|[^\n]*\n\|[-|]+\n(.*?)\n\n", text, re.DOTALL).group(1)
    return [tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in table.splitlines()]


@pytest.mark.parametrize("torch_version, device, platform, build", rows_of_the_table(), ids=str)
def test_which_build_the_loader_takes(torch_version, device, platform, build):
    """The rows of the table in docs/publishing.md, by the loader's own choice from a branch with both kinds."""
    project, (kind, _, number), (cpu, system) = build_cuda.read_project(ROOT), device.partition(" "), platform.split()
    abi = project.torch_version.replace(".", "")
    native = [f"torch-stable-abi{abi}-cu13{m}-{cpu}-linux" for m in (0, 2) for cpu in ("x86_64", "aarch64")]
    backends = {"CUDA": CUDA, "ROCm": ROCm, "XPU": XPU}
    backend = CPU() if kind == "CPU" else backends[kind](version=Version(number))
    names = NOARCH if "no CUDA build" in torch_version else native + NOARCH
    version = Version(re.match(r"[\d.]+", torch_version).group())
    taken, _ = _resolve_variant_for_system(
        [parse_variant(name) for name in names], backend, cpu, SYSTEMS[system], version, True, None
    )
    assert taken[0].variant_str == build


def test_bits_of_a_kind_are_those_of_python(grouped_moe):
    """Two that changed places, as those of both weights' exponents, would send calls to Triton without an error."""
    decode = importlib.import_module(f"{grouped_moe.__name__}.backends.native.decode")
    header = (ROOT / "kernels" / "decode" / "describe.h").read_text(encoding="utf-8")
    bits = {name: int(value) for name, value in re.findall(r"([A-Z_]+) = (\d+)", header)}
    assert len(bits) == 8 and bits == {name: getattr(decode, f"_{name}") for name in bits}
