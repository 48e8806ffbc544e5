"""Kernels for GPUs that are not here: a driver that names one, and what a compiled kernel uses and its code holds.

That is read from the texts and the binary that Triton keeps.
"""

import contextlib
import math
import re
import struct
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Iterator
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def named_driver(gpu: GPUTarget) -> SimpleNamespace:
    """Stands in for Triton's driver: answers which target to compile for, and can launch nothing."""
    device = f"{gpu.backend} {gpu.arch}"  # Triton keeps compiled kernels per device
    return SimpleNamespace(
        get_current_target=lambda: gpu, get_current_device=lambda: device, get_current_stream=lambda device: 0
    )


@contextlib.contextmanager
def compiling_for(package, gpu: GPUTarget, spec, collect: Callable) -> Iterator[None]:
    """Within, a launch compiles for a GPU, hands the result to `collect` and runs nothing."""
    run, compat = JITFunction.run, package["common._compat"]

    def compile_only(self, *args, grid, warmup, **kwargs):
        collect(self, run(self, *args, grid=grid, warmup=True, **kwargs))

    with (
        mock.patch.object(driver, "_active", named_driver(gpu)),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(package["common.device"], "device_spec", lambda device: spec),
        mock.patch.object(compat, "assert_on_device", lambda *_: None),  # no kernel ran that would have counted
    ):
        yield


def resource_usage(kernel) -> tuple:
    """(registers, bytes of spills in memory) per thread of a compiled kernel."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        # Scalar registers spill into lanes of vector registers, which takes no memory.
        fields = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text))
        return int(fields["vgpr_count"]), int(fields["private_segment_fixed_size"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(registers), int(stack)


def code_bytes(kernel) -> int:
    """Machine code of a kernel: the sections .text.* of its ELF file (64 bits, little endian)."""
    elf = kernel.asm.get("cubin")
    if elf is None:
        return 0
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, of_names = struct.unpack_from("<HHH", elf, 58)
    # name, type, flags, address, offset, size
    sections = [struct.unpack_from("<IIQQQQ", elf, table + number * entry_size) for number in range(count)]
    names = sections[of_names][4]
    return sum(section[5] for section in sections if elf.startswith(b".text.", names + section[0]))


def stray_barriers(kernel) -> list:
    """Names of a Gluon kernel's barriers that it does not use once its warps are specialised.

    Triton lays other buffers over them. Nothing may be written over an mbarrier that was not invalidated (PTX ISA,
    "mbarrier.inval"): next to other processes on the GPU, tiles had NaN in their place.
    """
    before, specialised, after = kernel.asm.get("ttgir", "").partition("ttg.warp_specialize(")
    if not specialised:
        return []  # Triton's own, which it invalidates
    used = set(re.findall(r"%\w+", after))
    used |= {whole for view, whole in re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)", before) if view in used}
    allocated = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[0-9x]+xi64", before)
    return [name for name in allocated if name not in used]


def resized_memory(kernel) -> list:
    """Pieces of shared memory that a Gluon kernel sees as a type of another size, with which Triton 3.8 fails."""
    pairs = re.findall(
        r"memdesc_reinterpret %\S+ : !ttg\.memdesc<(\w+),.*? -> !ttg\.memdesc<(\w+),", kernel.asm.get("ttgir", "")
    )
    return [f"{before} as {after}" for before, after in pairs if _bits(before) != _bits(after)]


def _bits(shape: str) -> int:
    """Of a tensor's type in the text, such as 128x64xbf16."""
    *extents, kind = shape.split("x")
    return math.prod(map(int, extents)) * int(re.search(r"\d+", kind).group())


def memory_misuse(kernel) -> str:
    """What is wrong with how a Gluon kernel uses shared memory, if anything."""
    if stray_barriers(kernel):
        return f"barriers that no partition uses: {stray_barriers(kernel)}"
    if resized_memory(kernel):
        return f"memory as a type of another size: {resized_memory(kernel)}"
    return ""


def waits_for_stream(kernel, target: GPUTarget, beside: bool = False) -> bool:
    """Whether a kernel waits before it touches memory, as dependent launches need; where there are none, does not.

    beside: it is launched beside the kernel before it, so that it may read before it waits, but not write.
    """
    if target.backend != "cuda":
        return True
    before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
    if target.arch < 90:
        return not wait
    touched = r"\bst\.global" if beside else r"\b(?:ld|st)\.global|\bcp\.async|\bmbarrier\."
    return bool(wait) and not re.search(touched, before)
