"""Compile every kernel that the package launches for GPUs that are not here, and report what each one uses.

    python tools/compile_check.py [--targets sm80 sm90 ...] [--dtypes bf16 fp32 ...] [--json FILE]

The Triton backend itself runs, on unwritten CPU tensors of real layers, with Triton's driver replaced by one that only
names a target: what is compiled is what would be launched there. The layers of `EVERY` take, at the largest number of
tokens, every signature that a launcher can produce: each dtype of indices and scales, biases or none, each set of
gradients. Exit status 1 if a kernel fails to compile, exceeds the shared memory of its target, spills more than
`spill_limit`, has more than 128 KB of code (sm90), leaves a barrier that no partition uses, or touches memory before it
has waited for the stream where launches are dependent. Needs a build (make build) and Triton; no GPU.
"""

import argparse
import functools
import importlib
import itertools
import os
import sys
from dataclasses import astuple, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

import torch
import triton
from kernels import get_local_kernel
from triton.backends.compiler import GPUTarget

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from compiled_kernel import code_bytes, compiling_for, memory_misuse, resource_usage, waits_for_stream  # noqa: E402
from machine import write  # noqa: E402
from workload import DEEPSEEK_V3, GPT_OSS, NEMOTRON, QWEN3_30B, Layer  # noqa: E402

# ptxas parks up to this much in local memory when a kernel uses every register: values that a tile reads once, outside
# its K loop, as the disassembly shows. More is a spill. The two consumers of a specialised kernel park theirs apart.
SPILL_ALLOWANCE = 32
SPECIALISED_WARPS = 12  # of two consumers and as many producers as either, or one that Triton makes up to as many
# Bytes of code on sm90, of which a tile runs most. 160 KB took 1.8 to 1.9 times as long as 96 KB that did the same, 124
# KB as long as 76 (H200; benchmarks/NOTES.md).
CODE_LIMIT = 128 << 10
BESIDE = ("slot_up_proj_kernel", "slot_down_proj_kernel")  # with a low-rank part: the kernel that projects rows


class Target(NamedTuple):
    """A GPU to compile for: shared memory in bytes per program, multiprocessors."""

    gpu: GPUTarget
    shared_memory: int
    num_sms: int


# Shared memory: CUDA C++ Programming Guide, technical specifications per compute capability; CDNA 3 ISA (LDS).
TARGETS = {
    "sm80": Target(GPUTarget("cuda", 80, 32), 166912, 108),
    "sm89": Target(GPUTarget("cuda", 89, 32), 101376, 142),
    "sm90": Target(GPUTarget("cuda", 90, 32), 232448, 132),
    "sm100": Target(GPUTarget("cuda", 100, 32), 232448, 148),
    "sm120": Target(GPUTarget("cuda", 120, 32), 101376, 170),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 65536, 304),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MANY_TOKENS = 1 << 15  # whose slots are counted in more chunks than one step adds up
RANK, MORE_RANKS = 16, (20, 64)  # of low-rank pairs; of the projections of gradients alone

LAYERS = {
    "qwen3-30b": QWEN3_30B,
    "gpt-oss": GPT_OSS,
    "nemotron-h": NEMOTRON,
    "deepseek-v3": DEEPSEEK_V3,  # K long enough for tiles that two warp groups share
    "small": Layer("small", 8, 2, 128, 128),  # of fewer steps than a ring has slots
    "not-gated": Layer(
        "not-gated", 16, 12, 384, 384, gated=False, transposed=True, bias=True, activation=("relu", 1.0, 7.0, 0.0)
    ),
    "odd": Layer("odd", 5, 3, 75, 51, interleaved=True, activation=("gelu", 1.0, None, 0.0)),
}
EVERY = ("small", "not-gated", "odd")  # take every signature, other layers a plain one
UNALIGNED = ("odd",)  # addresses of its tensors


class Signature(NamedTuple):
    """The types of arguments. index: of ids and splits. scales: of routing weights and scales, None for no scales.

    needs: the gradients that are asked for, of those of `Needs`.
    """

    index: torch.dtype = torch.int64
    scales: Optional[torch.dtype] = torch.float32
    bias: bool = False
    needs: str = "x act_scales bias_scales up down up_bias down_bias"


# Each combination of what the dgrad of the down-projection may write, and the gradients of the biases alone.
NEEDS = (
    Signature().needs, "x", "x act_scales", "x down", "act_scales", "down", "act_scales down", "down_bias",
    "bias_scales", "bias_scales down_bias up_bias",
)  # fmt: skip


INDICES, SCALES = (torch.int64, torch.int32), (torch.float32, torch.bfloat16, torch.float16, None)
SIGNATURES = [Signature(*types) for types in itertools.product(INDICES, SCALES, (False, True), NEEDS)]


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


class Package:
    """The modules of a loaded package by name."""

    def __init__(self, kernel):
        self.name = kernel.__name__

    def __getitem__(self, name: str):
        return importlib.import_module(f"{self.name}.{name}")

    def spec(self, name: str, target: Target):
        """The DeviceSpec of a target, as the package would make it there."""
        gpu, cuda = target.gpu, target.gpu.backend == "cuda"
        capability = divmod(gpu.arch, 10) if cuda else (0, 0)
        wide = capability in ((9, 0), (10, 0), (10, 3))
        hopper = capability == (9, 0) and self["common._compat"].has_gluon()
        spec = self["common.device"].DeviceSpec
        float8 = capability >= (8, 9)
        return spec(target.num_sms, target.shared_memory, gpu.warp_size, wide, True, hopper, float8, name, capability)


class Calls:
    """Calls of the backend's functions for a layer, with unwritten CPU tensors in one signature."""

    def __init__(
        self, package: Package, layer: Layer, dtype: torch.dtype, num_tokens: int, signature: Signature, every: bool
    ) -> None:
        self.package, self.layer, self.dtype, self.signature, self.every = package, layer, dtype, signature, every
        self.kernels, self.pipeline = package["backends.triton"], package["pipeline"]
        self.ids = self.empty(num_tokens, layer.top_k, dtype=signature.index)
        self.x = self.empty(num_tokens, layer.hidden)
        e, activation = layer.experts, package["common.activation"].Activation(*layer.activation)
        up, down = (self.empty(*shape) for shape in layer.weight_shapes)
        biases = (self.empty(e, layer.preact_width), self.empty(e, layer.hidden)) if signature.bias else (None, None)
        self.block = package["block"].Block(up, down, *biases, None, None, activation, **layer.kind, recompute=False)
        shapes = (layer.preact_width, layer.hidden), (layer.hidden, layer.intermediate)  # N and K
        self.adapted = self.block._replace(up_lora=self.pair(*shapes[0]), down_lora=self.pair(*shapes[1]))
        up, down = (self.codes(*shape) for shape in shapes)
        self.scaled = self.adapted._replace(up=up, down=down, transposed=False)
        self.quantized = self.scaled._replace(up_lora=None, down_lora=None)
        self.kept = self.scaled._replace(up=up._replace(products="w8a16"), down=down._replace(products="w8a16"))

    def empty(self, *shape: int, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """Unwritten memory, at an address of Triton's alignment or, for some layers, one element past it."""
        flat = torch.empty(functools.reduce(int.__mul__, shape) + 1, dtype=dtype or self.dtype)
        return (flat[:-1] if self.layer.name not in UNALIGNED else flat[1:]).view(shape)

    def pair(self, n: int, k: int):
        """A LoRA of a weight (E, N, K)."""
        e = self.layer.experts
        return self.package["operands"].LoRA(self.empty(e, RANK, k), self.empty(e, n, RANK))

    def codes(self, n: int, k: int):
        """A block-scaled weight (E, N, K)."""
        e, scales = self.layer.experts, (-(-n // 128), -(-k // 128))
        codes = self.empty(e, n, k, dtype=torch.float8_e4m3fn)
        return self.package["block_scaled"].BlockScaled(codes, torch.empty((e, *scales)))

    def scales(self, *shape: int) -> Optional[torch.Tensor]:
        """Routing weights, or scales of rows."""
        return None if self.signature.scales is None else self.empty(*shape, dtype=self.signature.scales)

    def needs(self, **given: bool):
        """The gradients that are asked for, of what is given."""
        asked, kind = self.signature.needs.split(), self.package["block"].Needs
        return kind(*(name in asked and given.get(name, True) for name in kind._fields))

    def both_ways(self, x: torch.Tensor, rows, act_scales, bias_scales, needs, scaled: bool = True) -> None:
        """The block without gradients, saving and recomputing, and its backward.

        With plain weights, with low-rank pairs, with these on scaled weights, and with scaled weights alone. Where
        products are made with rows of 8-bit floats, also of scaled weights with rows as they are.
        """
        kernels, arguments = self.kernels, (x, rows, act_scales, bias_scales)
        scales = {"act_scales": act_scales, "bias_scales": bias_scales}
        backward = functools.partial(self.pipeline.backward, kernels, x=x, rows=rows, **scales)
        factors = dict.fromkeys(("up_a", "up_b", "down_a", "down_b"), True)
        adapted, frozen = needs._replace(**factors), needs._replace(**factors, up=False, down=False)
        kinds = [(self.block, needs), (self.adapted, adapted)]
        if scaled:
            kinds.append((self.scaled, frozen))
        if self.package["backends.triton.codes"].takes_codes(self.quantized, x, rows.num_rows, rows.block_m):
            of_codes = self.quantized, needs._replace(up=False, down=False)
            kinds += [(self.scaled, frozen), of_codes, (self.kept, frozen)]
        for block, asked in kinds:
            self.pipeline.forward(kernels, block, *arguments, save=False)
            for each in (block, block._replace(recompute=True)):
                out, saved = self.pipeline.forward(kernels, each, *arguments, save=True)
                backward(block=each, dout=out, saved=saved, needs=asked)

    def experts(self) -> None:
        """`grouped_mm_experts`, `route`, `gather_rows` and `combine_rows`."""
        kernels, layer, ids, bias = self.kernels, self.layer, self.ids, self.signature.bias
        weights = self.scales(*ids.shape)
        for some, capacity in ((ids, None), (ids, ids.numel() - 1), (self.empty(MANY_TOKENS, 4, dtype=ids.dtype), 9)):
            kernels.route(some, layer.experts, self.dtype, capacity)
        rows = kernels.route(ids, layer.experts, self.dtype)
        gathered = kernels.gather_rows(self.x, rows)
        out = kernels.combine(gathered, weights, rows)
        if weights is None:
            return
        self.exchange(weights)
        needs = self.needs(bias_scales=False, up_bias=bias, down_bias=bias)
        self.both_ways(self.x, rows, weights, None, needs)
        for y, needs_dy in ((gathered, True), (gathered, False), (None, True)):
            kernels.combine_grad(out, y, weights, rows, needs_dy)
        if kernels.is_decode(self.block, 1, layer.top_k):
            kernels.decode(self.block, self.x[:1], ids[:1], weights[:1])
            for adapted in (self.adapted, self.scaled):
                kernels.decode(adapted, self.x[:1], ids[:1], weights[:1])

    def exchange(self, weights: torch.Tensor) -> None:
        """What expert-parallel ranks send, receive and send back; the experts are those of two ranks."""
        kernels, x, ids, num_local = self.kernels, self.x, self.ids, self.layer.experts
        source, places, _ = kernels.plan_exchange(ids, num_local, 2, ids.shape[0])
        rows = kernels.pack_rows(x, weights, ids, source, num_local, ids.shape[0], num_local)
        row = self.package["packed"].PackedRow(x.shape[1], x.dtype, ids.shape[1], weights.dtype)
        received, *_ = kernels.unpack_rows(rows, row, ids.shape[0], -1)
        kernels.place_rows(x, source)
        kernels.take_slots(received, places)

    def linear(self) -> None:
        """`grouped_linear`, `main_grad` of every dtype, and `grouped_dbias_dscales`."""
        kernels, layer, e, every = self.kernels, self.layer, self.layer.experts, self.every
        n, (k, num_rows) = layer.intermediate, (layer.hidden, self.ids.numel())
        for shape in (e, e + 1):
            rows = kernels.split_rows(self.empty(shape, dtype=self.ids.dtype), e, num_rows, self.dtype)
        x, dy, weight = self.empty(num_rows, k), self.empty(num_rows, n), self.empty(e, n, k)
        bias, scales = (self.empty(e, n), self.scales(num_rows)) if self.signature.bias else (None, None)
        kernels.gemm(x, weight, rows, bias=bias, scales=scales, zero_rest=True)
        kernels.gemm(dy, weight, rows, transposed=True, zero_rest=True)
        for rank in MORE_RANKS:
            grad = {"projected": self.empty(num_rows, -(-rank // 8) * 8), "grad": self.empty(e, n, -(-rank // 8) * 8)}
            stored = 2 * [self.empty(1, n, rank, e, dtype=torch.float32).movedim(3, 1)]
            packed = kernels.pack_factors(stored, rows, self.dtype)
            kernels.unpack_grads([each[..., :rank] for each in packed], stored)
            for asked in ({}, grad):
                kernels.project_backward(dy, packed[0], rows, scaling=1.0, **asked)
        kernels.wgrad(self.empty(num_rows, 24), x, rows, self.empty(e, 24, k))  # of a rank that 16 does not divide
        alone = rows._replace(schedule=rows.schedule[1:], num_groups=1)
        for dtype in DTYPES.values() if every else (self.dtype, torch.float32):
            buffer = self.empty(e, n, k, dtype=dtype)
            for some, accumulate in ((rows, False), (rows, True), (alone, True))[: 3 if every else 2]:
                kernels.wgrad(dy, x, some, buffer[: some.num_groups], accumulate=accumulate)
        dots, dbias = torch.empty((kernels.num_bias_dots(n), num_rows)), self.empty(e, n)
        kernels.bias_grads(dy, rows, scales, None, dbias, None)
        if scales is None:
            return
        for needed in (None, dbias):
            kernels.bias_grads(dy, rows, scales, bias, needed, dots)
        kernels.sum_dots(dots, rows, self.empty(num_rows, dtype=scales.dtype))
        for accumulate in (False, True):
            kernels.bias_grads(dy, rows, scales, bias, self.empty(e, n, dtype=torch.float32), dots, accumulate)
            kernels.sum_dots(dots, rows, self.empty(num_rows, dtype=torch.float32), accumulate)

    def mlp(self) -> None:
        """`grouped_mlp`."""
        kernels, e, num_rows = self.kernels, self.layer.experts, self.ids.numel()
        rows = kernels.split_rows(self.empty(e, dtype=self.ids.dtype), e, num_rows, self.dtype)
        scales, bias, scaled = self.scales(num_rows), self.signature.bias, self.signature.scales is not None
        needs = self.needs(act_scales=scaled, bias_scales=scaled and bias, up_bias=bias, down_bias=bias)
        x = self.empty(num_rows, self.layer.hidden)
        # With scaled weights, rows in place differ from routed ones by a constant: to compile both takes long.
        self.both_ways(x, rows, scales, scales if bias else None, needs, scaled=self.every)


def spill_limit(row: Row) -> int:
    """Bytes that a kernel may spill: an allowance or, where Triton 3.6 or 3.9 is known to spill more, that."""
    if row.layer == "odd":
        return 432
    if row.target in ("sm89", "sm100") and row.kernel == "quantized_up_proj_kernel":
        return 128
    return SPILL_ALLOWANCE * (2 if row.num_warps == SPECIALISED_WARPS else 1)


def problem_of(row: Row, kernel) -> str:
    """What is wrong with a compiled kernel, if anything."""
    target = TARGETS[row.target]
    if row.shared > target.shared_memory:
        return f"shared memory {row.shared} > {target.shared_memory}"
    if row.spilled > spill_limit(row):
        return f"spills {row.spilled} bytes"
    if row.target == "sm90" and row.code > CODE_LIMIT:
        return f"code {row.code} > {CODE_LIMIT}"
    if misuse := memory_misuse(kernel):
        return misuse
    if not waits_for_stream(kernel, target.gpu, row.kernel in BESIDE and "*" in kernel.src.signature["projected_ptr"]):
        return "does not wait for the stream first, or where it cannot"
    return ""


def check(package: Package, target: str, name: str, dtype: str, tokens: int, every: bool) -> List[Row]:
    """The rows of all kernels that a layer launches, one for each variant."""
    rows: Dict[str, Row] = {}
    layer, choose_block_m = LAYERS[name], package["tuning.heuristic"].choose_block_m
    case = target, name, dtype, choose_block_m(tokens * layer.top_k, layer.experts, DTYPES[dtype])

    def collect(function, kernel):
        if kernel.hash not in rows:
            meta, (registers, spilled) = kernel.metadata, resource_usage(kernel)
            uses = meta.num_warps, meta.num_stages, registers, meta.shared, spilled, code_bytes(kernel)
            rows[kernel.hash] = row = Row(*case, function.fn.__name__, *uses)
            row.error = problem_of(row, kernel)

    spec = package.spec(target, TARGETS[target])
    with compiling_for(package, TARGETS[target].gpu, spec, collect):
        signatures = SIGNATURES if every else [Signature(bias=layer.bias)]
        for signature, part in itertools.product(signatures, (Calls.experts, Calls.linear, Calls.mlp)):
            try:
                part(Calls(package, layer, DTYPES[dtype], tokens, signature, every))
            except Exception as error:  # a compiler failure of any kind is a result of this tool, not its end
                message = " ".join(f"{part.__name__}: {type(error).__name__}: {error}".split())[:300]
                rows[message] = Row(*case, "?", 0, 0, 0, 0, 0, error=message)
    return list(rows.values())


def summary(rows: List[Row]) -> dict:
    """What the JSON says of a target."""
    uses = ("registers", "shared", "spilled", "code")
    most = {f"most_{name}": max(getattr(row, name) for row in rows) for name in uses}
    spilling = sorted({row.kernel for row in rows if row.spilled})
    kernels = len({row.kernel for row in rows} - {"?"})
    errors = sum(bool(row.error) for row in rows)
    return {"variants": len(rows), "kernels": kernels, "errors": errors, **most, "spilling": spilling}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=[*LAYERS])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 512, 1024, 4096], help="each selects a tile size")
    parser.add_argument("--json", type=Path, help="write a summary by target here")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("unset TRITON_INTERPRET: an interpreted kernel is not compiled")
    package = Package(get_local_kernel(ROOT / "build"))
    rows: List[Row] = []
    print(LINE.format(*HEAD.split()))
    for target, dtype in itertools.product(arguments.targets, arguments.dtypes):
        for layer, tokens in itertools.product(arguments.layers, arguments.tokens):
            found = check(package, target, layer, dtype, tokens, layer in EVERY and tokens == max(arguments.tokens))
            print(*sorted({LINE.format(*astuple(row)).rstrip() for row in found}), sep="\n", flush=True)
            rows += found
    steps = {target: summary([row for row in rows if row.target == target]) for target in arguments.targets}
    print(*(f"{target}: {found}" for target, found in steps.items()), sep="\n")
    if arguments.json:
        head = {"benchmark": "compile_check", "date_utc": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
        write(arguments.json, {**head, "triton": triton.__version__, "steps": steps})
    return int(any(row.error for row in rows))


LINE = "{:6} {:12}{:6}{:>4} {:32}{:>6}{:>7}{:>5}{:>8}{:>8}{:>7}  {}"
HEAD = "target layer dtype M kernel warps stages regs shared spilled code error"

if __name__ == "__main__":
    sys.exit(main())
