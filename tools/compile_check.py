"""Compile every kernel that the package launches for GPUs that are not here, and report what each one uses.

    python tools/compile_check.py [--targets sm80,sm90,...] [--dtypes bf16,fp32,...] [--json FILE]

The launchers themselves run, on CPU tensors of real layers, with Triton's driver replaced by one that only names a
target: what is compiled is what would be launched there. Exit status 1 if a kernel fails to compile, exceeds the shared
memory of its target, spills more than 32 bytes, has more than 128 KB of code (sm90), leaves a barrier that no partition
uses, or touches memory before it has waited for the stream where launches are dependent. Needs a build (make build) and
Triton; no GPU.
"""

import argparse
import contextlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Iterator, NamedTuple
from unittest import mock

import torch
import triton
from kernels import get_local_kernel
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).resolve().parent.parent
# ptxas parks up to this much in local memory when a kernel uses every register: values that a tile reads once, before
# its K loop, as the disassembly shows. More is a spill.
SPILL_ALLOWANCE = 32
# Bytes of code on sm90, of which a tile runs most. 160 KB took 1.8 to 1.9 times as long as 96 KB that did the same, 124
# KB as long as 76 (H200; benchmarks/NOTES.md).
CODE_LIMIT = 128 << 10

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Target(NamedTuple):
    """A GPU to compile for: shared memory in bytes per program, multiprocessors, threads per warp."""

    gpu: GPUTarget
    shared_memory: int
    num_sms: int

    @property
    def warp_size(self) -> int:
        return self.gpu.warp_size


# Shared memory: CUDA C++ Programming Guide, technical specifications per compute capability; CDNA 3 ISA (LDS).
TARGETS = {
    "sm80": Target(GPUTarget("cuda", 80, 32), 166912, 108),
    "sm90": Target(GPUTarget("cuda", 90, 32), 232448, 132),
    "sm100": Target(GPUTarget("cuda", 100, 32), 232448, 148),
    "sm120": Target(GPUTarget("cuda", 120, 32), 101376, 170),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 65536, 304),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Layer(NamedTuple):
    """An experts block to compile for, and the activation it has."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    bias: bool = False
    alpha: float = 1.0
    limit: float = None
    up_offset: float = 0.0
    activation: str = "silu"


LAYERS = (
    Layer("qwen3-30b", 128, 8, 2048, 768),
    Layer("gpt-oss", 128, 4, 2880, 2880, True, True, True, True, 1.702, 7.0, 1.0),
    Layer("nemotron-h", 128, 6, 2688, 1856, gated=False, activation="relu2"),
    Layer("deepseek-v3", 32, 8, 7168, 2048),  # K long enough for tiles that two warp groups share
    Layer("small", 8, 2, 128, 128),  # of fewer steps than a ring has slots
    Layer("not-gated", 16, 12, 384, 384, gated=False, transposed=True, bias=True, limit=7.0, activation="relu"),
)


@dataclass
class Row:
    """What one compiled kernel uses. registers per thread; shared, spilled and code in bytes, code only on CUDA."""

    target: str
    layer: str
    dtype: str
    block_m: int
    kernel: str
    num_warps: int
    num_stages: int
    registers: int
    shared: int
    spilled: int
    code: int = 0
    error: str = ""


class NamedDriver:
    """Stands in for Triton's driver: answers which target to compile for, and can launch nothing."""

    def __init__(self, name: str):
        self.name = name
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name].gpu

    def get_current_device(self) -> str:
        return self.name  # Triton caches compiled kernels per device

    def get_current_stream(self, device: str) -> int:
        return 0

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_device_properties(self, device: object) -> dict:
        target = TARGETS[self.name]
        return {
            "max_shared_mem": target.shared_memory,
            "multiprocessor_count": target.num_sms,
            "warpSize": target.warp_size,
        }


@contextlib.contextmanager
def compiling_for(name: str, collect) -> Iterator[None]:
    """Within, a launch compiles for the target, hands the result to `collect` and runs nothing."""
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        collect(self, run(self, *args, grid=grid, warmup=True, **kwargs))

    previous = driver._active
    JITFunction.run = compile_only
    driver.set_active(NamedDriver(name))
    try:
        yield
    finally:
        JITFunction.run = run
        driver._active = previous


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


def waits_for_stream(kernel, target: GPUTarget) -> bool:
    """Whether a kernel waits before it touches memory, as dependent launches need; where there are none, does not."""
    if target.backend != "cuda":
        return True
    before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
    if target.arch < 90:
        return not wait
    return bool(wait) and not re.search(r"\b(?:ld|st)\.global|\bcp\.async|\bmbarrier\.", before)


def weights_of(layer: Layer, dtype: torch.dtype) -> tuple:
    """Unwritten gate_up_proj and down_proj, as the layer has them."""
    e, h, i = layer.num_experts, layer.hidden, layer.intermediate
    p = 2 * i if layer.gated else i
    shapes = ((e, h, p), (e, i, h)) if layer.transposed else ((e, p, h), (e, h, i))
    return tuple(torch.empty(shape, dtype=dtype) for shape in shapes)


def run_layer(modules, layer: Layer, dtype: torch.dtype, num_tokens: int) -> None:
    """Forward and backward of the experts block through the launchers, on unwritten CPU tensors."""
    experts, routing, activation = modules("experts"), modules("routing"), modules("activation")

    def empty(*shape):
        return torch.empty(shape, dtype=dtype)

    e, h, i = layer.num_experts, layer.hidden, layer.intermediate
    p = 2 * i if layer.gated else i
    up, down = weights_of(layer, dtype)
    up_bias, down_bias = (empty(e, p), empty(e, h)) if layer.bias else (None, None)
    act = activation.Activation(layer.activation, layer.alpha, layer.limit, layer.up_offset)
    block = experts.Block(
        up, down, up_bias, down_bias, act, layer.gated, layer.interleaved, layer.transposed, recompute=False
    )
    ids = torch.empty((num_tokens, layer.top_k), dtype=torch.int64)
    x, weights = empty(num_tokens, h), torch.empty(ids.shape, dtype=torch.float32)
    block_m = modules("tuning").choose_block_m(ids.numel(), e, dtype)
    tiled = routing.route_tiles_triton(ids, e, block_m)
    with mock.patch.object(torch, "_assert_async"):  # no kernel ran that would have counted
        routing.route_tiles_triton(ids, e, block_m, capacity=ids.numel() - 1)
    experts.forward_triton(block, x, weights, tiled, save=False)
    _, preact = experts.forward_triton(block, x, weights, tiled, save=True)
    needs = experts.Needs(True, True, True, True, layer.bias, layer.bias)
    dout = empty(num_tokens, h)
    experts.backward_triton(block, dout, x, weights, preact, tiled, needs)
    decode = modules("decode")
    if decode.is_decode(block, 1, layer.top_k):
        decode.decode_triton(block, x[:1], ids[:1], weights[:1])


def run_building_blocks(modules, layer: Layer, dtype: torch.dtype, num_tokens: int) -> None:
    """Forward and backward of gather_rows, grouped_linear, grouped_mlp and combine_rows through the launchers."""
    routing, linear, permute = modules("routing"), modules("grouped_linear"), modules("permute")
    mlp, scales = modules("grouped_mlp"), torch.empty(num_tokens * layer.top_k, dtype=torch.float32)
    e, h, i = layer.num_experts, layer.hidden, layer.intermediate
    ids = torch.empty((num_tokens, layer.top_k), dtype=torch.int64)
    offsets, row_to_slot, slot_to_row = routing.route_triton(ids, e)
    x, weight = torch.empty((num_tokens, h), dtype=dtype), torch.empty((e, i, h), dtype=dtype)
    rows = permute.gather_rows_triton(x, row_to_slot, offsets, layer.top_k)
    bias = torch.empty((e, i), dtype=dtype)
    for factors in (None, scales):
        y, _ = linear.forward_triton(rows, weight, offsets, bias, factors, False)
        linear.backward_triton(y, rows, weight, offsets, bias, factors, False, (True, True, True, factors is not None))
    for main_grad in (torch.empty(weight.shape), torch.empty_like(weight)):
        modules("gemm").launch_wgrad(y, 0, rows, 0, None, offsets, main_grad, accumulate=True)
    act = modules("activation").Activation(layer.activation, layer.alpha, layer.limit, layer.up_offset)
    up, down = weights_of(layer, dtype)
    biases = torch.empty((e, 2 * i if layer.gated else i), dtype=dtype), torch.empty((e, h), dtype=dtype)
    block = mlp.Block(up, down, *biases, act, layer.gated, layer.interleaved, layer.transposed, recompute=False)
    mlp.forward_triton(block, rows, offsets, scales, scales, False)
    y, preact = mlp.forward_triton(block, rows, offsets, scales, scales, True)
    mlp.backward_triton(block, y, rows, offsets, scales, scales, preact, mlp.Needs(*[True] * 7))
    weights = torch.empty(ids.shape, dtype=torch.float32)
    out = permute.launch_combine(y, weights, slot_to_row, layer.top_k)
    permute.combine_grad_triton(out, y, weights, offsets, slot_to_row, True)


def problem_of(row: Row, kernel) -> str:
    """What is wrong with a compiled kernel, if anything."""
    target = TARGETS[row.target]
    if row.shared > target.shared_memory:
        return f"shared memory {row.shared} > {target.shared_memory}"
    if row.spilled > SPILL_ALLOWANCE:
        return f"spills {row.spilled} bytes"
    if row.target == "sm90" and row.code > CODE_LIMIT:
        return f"code {row.code} > {CODE_LIMIT}"
    if stray_barriers(kernel):
        return f"barriers that no partition uses: {stray_barriers(kernel)}"
    if not waits_for_stream(kernel, target.gpu):
        return "does not wait for the stream first, or where it cannot"
    return ""


def check(modules, target: str, layer: Layer, dtype_name: str, tokens: int, body) -> list:
    """The rows of all kernels that one case launches."""
    rows = []
    block_m = modules("tuning").choose_block_m(tokens * layer.top_k, layer.num_experts, DTYPES[dtype_name])

    def collect(function, kernel):
        meta = kernel.metadata
        registers, spilled = resource_usage(kernel)
        row = Row(
            target, layer.name, dtype_name, block_m, function.fn.__name__, meta.num_warps, meta.num_stages,
            registers, meta.shared, spilled, code_bytes(kernel),
        )  # fmt: skip
        row.error = problem_of(row, kernel)
        rows.append(row)

    modules("tuning").device_spec.cache_clear()
    try:
        with compiling_for(target, collect):
            body(modules, layer, DTYPES[dtype_name], tokens)
    except Exception as error:  # a compiler failure of any kind is a result of this tool, not its end
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        rows.append(Row(target, layer.name, dtype_name, block_m, "?", 0, 0, 0, 0, 0, error=message))
    modules("tuning").device_spec.cache_clear()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--layers", default=",".join(layer.name for layer in LAYERS))
    parser.add_argument("--tokens", default="1,4096", help="numbers of tokens: each selects a row-tile size")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("unset TRITON_INTERPRET: an interpreted kernel is not compiled")
    package = get_local_kernel(ROOT / "build")

    def modules(name):
        return sys.modules[f"{package.__name__}.{name}"]

    rows = []
    layers = [layer for layer in LAYERS if layer.name in arguments.layers.split(",")]
    for target in arguments.targets.split(","):
        for dtype in arguments.dtypes.split(","):
            for tokens in map(int, arguments.tokens.split(",")):
                for layer in layers:
                    rows += check(modules, target, layer, dtype, tokens, run_layer)
                    rows += check(modules, target, layer, dtype, tokens, run_building_blocks)
    report(rows)
    if arguments.json:
        write(arguments.json, rows)
    return 1 if any(row.error for row in rows) else 0


def write(path: Path, rows) -> None:
    """The rows as JSON, one a line, with what compiled them and when."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    head = {"triton": triton.__version__, "date_utc": datetime.now(timezone.utc).strftime("%Y-%m-%d")}
    path.write_text(json.dumps(head)[:-1] + f', "rows": [\n{lines}\n]}}\n', encoding="ascii")


def report(rows) -> None:
    """Prints the table, each distinct line once."""
    head = f"{'target':7}{'layer':12}{'dtype':6}{'M':>4} {'kernel':30}{'warps':>6}{'stages':>7}{'regs':>6}{'shared':>8}"
    print(head + f"{'spilled':>9}{'code':>8}")
    seen, errors = set(), 0
    for row in rows:
        line = (
            f"{row.target:7}{row.layer:12}{row.dtype:6}{row.block_m:>4} {row.kernel:30}{row.num_warps:>6}"
            f"{row.num_stages:>7}{row.registers:>6}{row.shared:>8}{row.spilled:>9}{row.code:>8}  {row.error}"
        )
        if line not in seen:
            seen.add(line)
            errors += bool(row.error)
            print(line.rstrip())
    print(f"{len(seen)} kernels, {errors} with an error")


if __name__ == "__main__":
    sys.exit(main())
