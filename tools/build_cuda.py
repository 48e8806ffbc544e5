"""Build the CUDA variant of the kernel for this machine's platform without Nix, beside the noarch variants.

    python tools/build_cuda.py [--output build-cuda] [--nvcc PATH]

Needs g++ and an nvcc: --nvcc, the one of requirements/cuda.txt, or that on the PATH. No GPU. The result is what a
branch on the Hub holds, for one platform and one CUDA version: the variant has the layout, names and `metadata.json` of
a kernel-builder build, and passes the checks of the builder's hooks but one, the oldest system that it runs on.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, List, NamedTuple

import build
import native_library
from source_rules import BuildError

REGISTRATION = build.ROOT / "tools" / "registration.h"  # the builder's own, as is the template of _ops.py
OPS_TEMPLATE = build.ROOT / "tools" / "_ops_cuda.py.in"
PYTHON_ABI = "0x03090000"
STUB = """extern "C" {
int aoti_torch_get_current_cuda_stream(int, void **) { return 1; }
int aoti_torch_cuda_caching_allocator_raw_alloc(unsigned long, void **) { return 1; }
int aoti_torch_cuda_caching_allocator_raw_delete(void *) { return 1; }
}
"""


class Project(NamedTuple):
    """What build.toml says of the native code. sources: those to compile, relative to the root.

    torch_version, cuda_version: the oldest that it is for.
    """

    sources: List[str]
    capabilities: List[str]
    torch_version: str
    cuda_version: str


class Toolkit(NamedTuple):
    """A CUDA toolkit. version: as "13.0"."""

    nvcc: Path
    include: Path
    runtime: Path
    version: str


def read_project(root: Path) -> Project:
    """Raises `BuildError` if the real parser rejects build.toml, or noarch/build.toml says something else."""
    build.parse(root)
    data, noarch = (build.read_toml(folder) for folder in (root, root / "noarch"))
    general, kernels = data["general"], data.get("kernel", {})
    for key in ("name", "version", "license", "source", "hub"):
        if general.get(key) != noarch["general"].get(key):
            raise BuildError(f"build.toml: {key} is not that of noarch/build.toml")
    capabilities = {tuple(kernel["cuda-capabilities"]) for kernel in kernels.values()}
    if len(capabilities) != 1:
        raise BuildError("build.toml: expected the same cuda-capabilities of each kernel")
    listed = [name for part in (data["torch"], *kernels.values()) for name in part["src"]]
    for name in listed:
        if not (root / name).is_file():
            raise BuildError(f"build.toml: {name} is missing")
    there = [path.relative_to(root).as_posix() for path in (root / "kernels").rglob("*") if path.is_file()]
    for name in sorted(set(there) - set(listed)):
        raise BuildError(f"build.toml: {name} is not listed, so that a release would be built without it")
    sources = [name for name in listed if name.endswith((".cpp", ".cu"))]
    return Project(sources, list(*capabilities), data["torch"]["stable-abi"]["cuda"], general["cuda"]["minver"])


def find_nvcc(given: Path | None) -> Path:
    packaged = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvcc")
    if given and not given.is_file():
        raise BuildError(f"--nvcc: there is no {given}")
    for nvcc in filter(None, (given, packaged, shutil.which("nvcc"))):
        if Path(nvcc).is_file():
            return Path(nvcc)
    raise BuildError("there is no nvcc: pip install -r requirements/cuda.txt, or give one by --nvcc")


def find_toolkit(given: Path | None) -> Toolkit:
    """Raises `BuildError` if there is none, or a part of it is missing."""
    nvcc = find_nvcc(given)
    # The nvcc on the PATH may be a link or a script: it knows itself where its toolkit is.
    shown = run([nvcc, "--dryrun", "-c", "x.cu"])
    top = Path(re.search(r"^#\$ TOP=(.*)$", shown, re.MULTILINE).group(1)).resolve()
    version = re.search(r"release ([\d.]+)", run([nvcc, "--version"])).group(1)
    runtimes = sorted(path for folder in top.glob("lib*") for path in folder.rglob("libcudart_static.a"))
    runtimes += sorted(top.glob("targets/*/lib/libcudart_static.a"))
    includes = [folder for folder in (top / "include", *top.glob("targets/*/include")) if (folder / "cuda.h").is_file()]
    if not runtimes or not includes:
        raise BuildError(f"{top}: libcudart_static.a or cuda.h is missing")
    return Toolkit(nvcc, includes[0], runtimes[0], version)


def run(command: List[Any]) -> str:
    """What a command prints. Raises `BuildError` with it if the command fails."""
    result = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise BuildError(f"{Path(command[0]).name} {command[-1]}: {result.stdout.strip()}")
    return result.stdout


def architecture_flags(capabilities: List[str]) -> List[str]:
    flags = []
    for capability in capabilities:
        number = capability.split("+")[0].replace(".", "")
        codes = f"sm_{number},compute_{number}" if capability.endswith("+PTX") else f"sm_{number}"
        flags += ["-gencode", f"arch=compute_{number},code=[{codes}]"]
    return flags


def compile_library(root: Path, project: Project, toolkit: Toolkit, name: str, scratch: Path) -> Path:
    """The library of the module `name`, built in `scratch`. Raises `BuildError` if a compiler fails or warns."""
    import torch

    torch_root = Path(torch.__file__).parent
    major, minor = native_library.version_of(project.torch_version)
    defines = [
        f"-DTORCH_TARGET_VERSION={hex(major << 56 | minor << 48)}", f"-DPy_LIMITED_API={PYTHON_ABI}",
        f"-DTORCH_EXTENSION_NAME={name}", "-DTORCH_STABLE_ONLY",
    ]  # fmt: skip
    folders = (torch_root / "include", sysconfig.get_path("include"), toolkit.include, scratch)
    includes = [flag for folder in folders for flag in ("-isystem", str(folder))]
    shutil.copyfile(REGISTRATION, scratch / "registration.h")
    host = ["g++", "-std=c++17", "-O2", "-Wall", "-Werror", "-fPIC", "-fvisibility=hidden", *defines, *includes]
    device = [toolkit.nvcc, "-std=c++17", "-O3", "-Werror", "all-warnings", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    device += architecture_flags(project.capabilities)

    def compile_source(source: str) -> Path:
        made = scratch / f"{source.replace('/', '-')}.o"
        run([*(device if source.endswith(".cu") else host), "-c", root / source, "-o", made])
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_source, project.sources))
    # A PyTorch for CPUs lacks libtorch_cuda.so: one with its three symbols is linked with, and not shipped.
    stub, library = scratch / "stub.cpp", scratch / f"{name}.abi3.so"
    stub.write_text(STUB, encoding="utf-8")
    run(["g++", "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", "-o", scratch / "libtorch_cuda.so", stub])
    libraries = ["-L", scratch, "-ltorch_cuda", "-L", torch_root / "lib", "-ltorch_cpu", "-ldl", "-lrt", "-lpthread"]
    link = ["g++", "-shared", "-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", "-o", library, *objects, toolkit.runtime]
    run([*link, *libraries])
    run(["strip", "--strip-unneeded", library])
    return library


def variant_name(project: Project, toolkit: Toolkit) -> str:
    digits = (version.replace(".", "") for version in (project.torch_version, toolkit.version))
    return "torch-stable-abi{}-cu{}-".format(*digits) + f"{platform.machine()}-{platform.system().lower()}"


def build_variant(root: Path, stage: Path, toolkit: Toolkit) -> List[str]:
    """Adds the variant to the noarch build in `stage`; what it needs of the system beyond manylinux_2_28."""
    project, config = read_project(root), build.read_config(root)
    if native_library.version_of(toolkit.version) < native_library.version_of(project.cuda_version):
        wanted = f"build.toml wants {project.cuda_version} or newer: pip install -r requirements/cuda.txt"
        raise BuildError(f"{toolkit.nvcc} is of CUDA {toolkit.version}, but {wanted}")
    name, variant = config.id_of("cuda"), stage / variant_name(project, toolkit)
    ops = OPS_TEMPLATE.read_text(encoding="utf-8").replace("@OPS_NAME@", name)
    with tempfile.TemporaryDirectory() as scratch:
        library = compile_library(root, project, toolkit, name, Path(scratch))
        needs = native_library.needs_of(library)
        native_library.check_symbols(needs, project.torch_version)
        native_library.check_architectures(library, project.capabilities)
        build.write_variant(config, variant, "cuda", ops, library, project.capabilities)
    return native_library.beyond_manylinux(needs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the CUDA variant beside the noarch variants, without Nix.")
    default = build.ROOT / "build-cuda"
    parser.add_argument("--output", type=Path, default=default, help="directory to replace (default: build-cuda)")
    parser.add_argument("--nvcc", type=Path, help="the compiler (default: of requirements/cuda.txt, or on the PATH)")
    arguments = parser.parse_args()

    def fill(stage: Path) -> str:
        toolkit = find_toolkit(arguments.nvcc)
        build.build(build.ROOT, stage)
        newer = build_variant(build.ROOT, stage, toolkit)
        name = next(path.name for path in stage.glob("torch-stable-abi*"))
        return f"built {name}{' for this system alone, which needs ' + ', '.join(newer) if newer else ''}"

    return build.replace_output(arguments.output.absolute(), fill)


if __name__ == "__main__":
    sys.exit(main())
