"""The compile check: what it says of a kernel from its code alone, and that shipped kernels compile for other GPUs."""

import dataclasses
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hub import ROOT

pytest.importorskip("triton")

import compile_check
import compiled_kernel

ALLOCATED = """
    %ring = ttg.local_alloc : () -> !ttg.memdesc<6x32x256xbf16, #shared, #smem, mutable>
    %full = ttg.local_alloc : () -> !ttg.memdesc<6x1xi64, #shared2, #smem, mutable>
    %loaded = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared2, #smem, mutable>
    %first = ttg.memdesc_index %loaded[%c0_i32] : !ttg.memdesc<2x1xi64, #shared2, #smem, mutable>
    ttng.init_barrier %first, 1 : !ttg.memdesc<1xi64, #shared2, #smem, mutable>
"""


@pytest.mark.parametrize("specialised, stray", [
    ("ttg.warp_specialize(%ring, %full)", ["%loaded"]),
    ("ttg.warp_specialize(%ring, %full, %loaded)", []),
    ("ttg.warp_specialize(%ring, %full, %first)", []),  # a view of it
    ("ttg.warp_specialize(%ring, %full) default { ttng.wait_barrier %first, %phase }", []),
    ("ttg.warp_specialize(%ring)", ["%full", "%loaded"]),
    ("ttng.inval_barrier %first", []),  # Triton's own pipelines
])  # fmt: skip
def test_stray_barriers(specialised, stray):
    kernel = SimpleNamespace(asm={"ttgir": ALLOCATED + specialised})
    assert compiled_kernel.stray_barriers(kernel) == stray
    assert bool(stray) is compiled_kernel.memory_misuse(kernel).startswith("barriers")


@pytest.mark.parametrize("before, after, resized", [
    ("1x2x128x64xbf16", "4x1x2x128x16xbf16", False), ("128x128xf8E4M3FN", "1x128x64xbf16", False),
    ("128x64xbf16", "128x16xbf16", True), ("128x128xi8", "128x128xf16", True),
])  # fmt: skip
def test_resized_memory(before, after, resized):
    line = f"%w_5 = ttg.memdesc_reinterpret %w : !ttg.memdesc<{before}, #a, #smem> -> !ttg.memdesc<{after}, #b, #smem>"
    kernel = SimpleNamespace(asm={"ttgir": f"{line}\n{line}"})
    assert compiled_kernel.resized_memory(kernel) == [f"{before} as {after}"] * 2 * resized
    assert bool(compiled_kernel.memory_misuse(kernel)) is resized


@pytest.mark.parametrize("target, ptx, waits", [
    ("sm90", "griddepcontrol.wait; ld.global.b32 %r1, [%rd1];", True),
    ("sm90", "mov.u32 %r1, %tid.x; griddepcontrol.wait; mbarrier.init.shared::cta.b64 [%r1], 1;", True),
    ("sm90", "ld.global.b32 %r1, [%rd1]; griddepcontrol.wait;", None),
    ("sm90", "@%p1 st.global.b32 [%rd1], %r1; griddepcontrol.wait;", False),
    ("sm100", "cp.async.bulk.tensor.2d.shared::cluster [%r1]; griddepcontrol.wait;", None),
    ("sm90", "ld.global.b32 %r1, [%rd1];", False),
    ("sm80", "ld.global.b32 %r1, [%rd1];", True),
    ("sm80", "griddepcontrol.wait; ld.global.b32 %r1, [%rd1];", False),  # no such instruction there
    ("gfx942", None, True),
])  # fmt: skip
def test_waits_for_stream(target, ptx, waits):
    """None: a kernel that is launched beside another one may do so, which may read before it waits."""
    kernel, gpu = SimpleNamespace(asm={"ptx": ptx}), compile_check.TARGETS[target].gpu
    assert compile_check.waits_for_stream(kernel, gpu) is bool(waits)
    assert compile_check.waits_for_stream(kernel, gpu, beside=True) is (waits is not False)


@pytest.mark.parametrize("changes, problem", [
    ({}, ""),
    ({"shared": 232449}, "shared memory"),
    ({"spilled": 65}, "spills"),
    ({"spilled": 33, "num_warps": 8}, "spills"),
    ({"spilled": 32, "num_warps": 8}, ""),
    ({"code": (128 << 10) + 16}, "code"),
    ({"target": "sm100", "code": (128 << 10) + 16}, ""),  # not seen there
    ({"layer": "odd", "spilled": 432}, ""),  # known to spill
    ({"layer": "odd", "spilled": 440}, "spills"),
    ({"target": "sm100", "kernel": "quantized_up_proj_kernel", "spilled": 128}, ""),
    ({"kernel": "quantized_up_proj_kernel", "spilled": 128}, "spills"),
])  # fmt: skip
def test_problems(changes, problem):
    row = compile_check.Row("sm90", "layer", "bf16", 128, "kernel", 12, 3, 168, 232448, 64, 128 << 10)
    kernel = SimpleNamespace(asm={"ptx": "griddepcontrol.wait;"})
    found = compile_check.problem_of(dataclasses.replace(row, **changes), kernel)
    assert found.startswith(problem) and bool(found) is bool(problem)


@pytest.mark.parametrize("option", ["targets", "dtypes", "layers", "tokens"])
def test_refuses_what_it_does_not_know(monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["compile_check.py", f"--{option}", "sm42"])
    with pytest.raises(SystemExit) as ended:
        compile_check.main()
    assert ended.value.code == 2 and f"argument --{option}: invalid " in capsys.readouterr().err


def test_code_bytes():
    names = b"\0.text.one\0.data\0.text.two\0.names\0"
    sizes = {b".text.one": 640, b".data": 16, b".text.two": 256, b".names": len(names)}
    offsets = [names.index(name) for name in sizes]
    sections = [struct.pack("<IIQQQQ24x", at, 1, 0, 0, 64, size) for at, size in zip(offsets, sizes.values())]
    header = bytearray(64)
    struct.pack_into("<Q", header, 40, 64 + len(names))
    struct.pack_into("<HHH", header, 58, 64, len(sections), 3)
    elf = bytes(header) + names + b"".join(sections)
    assert compile_check.code_bytes(SimpleNamespace(asm={"cubin": elf})) == 640 + 256
    assert compile_check.code_bytes(SimpleNamespace(asm={"amdgcn": ""})) == 0


# One layer for each GPU, both for Hopper, whose kernels differ most by the layer. 4096 tokens make the largest tiles.
SHIPPED = (
    ("sm80", "gpt-oss", 1), ("sm90", "gpt-oss", 4096), ("sm90", "qwen3-30b", 4096), ("sm100", "gpt-oss", 4096),
    ("sm120", "qwen3-30b", 4096), ("gfx942", "gpt-oss", 4096),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("target, layer, tokens", SHIPPED)
def test_compiles_without_spilling(target, layer, tokens):
    """One signature; without options the tool takes all layers, tiles and signatures."""
    command = [sys.executable, "tools/compile_check.py", "--targets", target, "--dtypes", "bf16"]
    command += ["--layers", layer, "--tokens", str(tokens)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "down_dgrad_kernel" in result.stdout and "wgrad_kernel" in result.stdout
