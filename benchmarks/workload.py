"""What run_experts.py measures: layers, cells, inputs, the floors that bytes and FLOPs set, and the machine.

Legend: T tokens, E local experts, H hidden, I intermediate, R routed rows (slots whose expert is local).
"""

import json
import os
import platform
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Dict, List, NamedTuple, Optional

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent

# Measured on an H200: a large copy, bytes read plus bytes written, and a large bf16 product on a cool and on a hot
# card. The card is power-capped, so a series of measurements runs at the hot rate.
BYTES_PER_SECOND = 4.3e12
FLOPS_COOL, FLOPS_HOT = 790e12, 655e12
ITEM = 2  # bytes of a bf16 number


class Layer(NamedTuple):
    """An experts block, gated."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int


QWEN3_30B = Layer("Qwen3-30B-A3B", experts=128, top_k=8, hidden=2048, intermediate=768)
SMOKE = Layer("smoke", experts=8, top_k=2, hidden=64, intermediate=32)


class Cell(NamedTuple):
    """One measurement. local: the share of slots whose expert is on this rank; the others are sentinels."""

    tokens: int
    local: float
    backward: bool

    def __str__(self) -> str:
        mode = "forward+backward" if self.backward else "forward"
        return f"T={self.tokens} local={fraction(self.local)} {mode}"


class Inputs(NamedTuple):
    """One set of inputs. ids: sentinels are E. weights: 0 for sentinels, as transformers has it."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dout: Tensor


class Counts(NamedTuple):
    """What a routing asks for: rows, tokens with a row and experts with a row. Averages over sets, so no integers."""

    rows: float
    tokens: float
    experts: float


def fraction(value: float) -> str:
    """1, 1/2, 1/8."""
    return "1" if value == 1 else f"1/{round(1 / value)}"


def make_inputs(layer: Layer, cell: Cell, device: str) -> Inputs:
    """Unit-scale bf16 inputs; every token chooses top_k distinct experts out of all ranks', of which the first E are
    here."""
    everywhere = round(layer.experts / cell.local)
    ids = torch.rand(cell.tokens, everywhere, device=device).topk(layer.top_k).indices
    remote = ids >= layer.experts
    weights = torch.rand(ids.shape, device=device) + 0.1
    weights = (weights / weights.sum(1, keepdim=True)).masked_fill(remote, 0.0)
    shape = (cell.tokens, layer.hidden)
    x, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    tensors = x, weights.to(torch.bfloat16)
    for tensor in tensors:
        tensor.requires_grad_(cell.backward)
    return Inputs(tensors[0], ids.masked_fill(remote, layer.experts), tensors[1], dout)


def count(layer: Layer, sets: List[Inputs]) -> Counts:
    """Means over the input sets."""
    parts = []
    for inputs in sets:
        local = inputs.ids < layer.experts
        parts.append((int(local.sum()), int(local.any(1).sum()), int(inputs.ids[local].unique().numel())))
    return Counts(*(sum(column) / len(sets) for column in zip(*parts)))


def expected_counts(layer: Layer, cell: Cell) -> Counts:
    """What `count` gives on average, with slots taken as independent."""
    chosen = 1 - (1 - cell.local * layer.top_k / layer.experts) ** cell.tokens
    tokens = cell.tokens * (1 - (1 - cell.local) ** layer.top_k)
    return Counts(cell.tokens * layer.top_k * cell.local, tokens, layer.experts * chosen)


def flops(layer: Layer, counts: Counts, backward: bool) -> float:
    """Two per multiply-add of the three products of a row; the backward has two products for each of the forward's."""
    return (3 if backward else 1) * 2 * counts.rows * 3 * layer.hidden * layer.intermediate


def bytes_moved(layer: Layer, cell: Cell, counts: Counts) -> float:
    """The fewest that a call can move: every input read once, every result written once, by each direction.

    Read: hidden rows of tokens with a row, weights of experts with a row, routing. Written: the output. For training
    also the pre-activation between the directions (once each way), and in the backward the output's gradient and again
    the hidden rows and weights are read, the gradients of hidden states and of all E experts are written.
    """
    h, p = layer.hidden, 2 * layer.intermediate
    rows_in, rows_out = counts.tokens * h * ITEM, cell.tokens * h * ITEM
    per_expert = 3 * h * layer.intermediate * ITEM
    routing = cell.tokens * layer.top_k * (8 + ITEM)
    total = rows_in + counts.experts * per_expert + routing + rows_out
    if cell.backward:
        total += 2 * counts.rows * p * ITEM
        total += 2 * rows_in + counts.experts * per_expert + routing + rows_out + layer.experts * per_expert
    return total


def floors(layer: Layer, cell: Cell, counts: Counts) -> Dict[str, float]:
    """Times in ms that no implementation can go much below."""
    moved, operations = bytes_moved(layer, cell, counts), flops(layer, counts, cell.backward)
    bytes_ms = moved / BYTES_PER_SECOND * 1e3
    return {
        "bytes": moved,
        "flops": operations,
        "bytes_ms": bytes_ms,
        "floor_ms": max(bytes_ms, operations / FLOPS_COOL * 1e3),
        "floor_hot_ms": max(bytes_ms, operations / FLOPS_HOT * 1e3),
    }


def load_kernel() -> ModuleType:
    """The package as its users load it, by repo id and version of build.toml; a local build stands in for the Hub."""
    import kernels

    text = (ROOT / "build.toml").read_text(encoding="utf-8")
    repo_id = re.search(r'^repo-id = "(.+)"', text, re.MULTILINE).group(1)
    version = int(re.search(r"^version = (\d+)", text, re.MULTILINE).group(1))
    os.environ.setdefault("LOCAL_KERNELS", f"{repo_id}={ROOT / 'build'}")
    return kernels.get_kernel(repo_id, version=version)


def command_output(*command: str) -> Optional[str]:
    """Its stripped standard output, or None if it can't be had."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=str(ROOT))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def package_version(name: str) -> Optional[str]:
    """The version of an installed package, or None."""
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_machine(kernel: ModuleType, commit: Optional[str]) -> dict:
    """Machine, versions, build and date: what a result needs to be compared with another."""
    metadata = json.loads((Path(kernel.__file__).parent / "metadata.json").read_text(encoding="utf-8"))
    cuda = torch.cuda.is_available()
    driver = command_output("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    return {
        "date_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit or command_output("git", "rev-parse", "HEAD"),
        "kernel": {key: metadata.get(key) for key in ("name", "version", "id")},
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpu_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if cuda else None,
        "driver_and_power_limit": driver.splitlines()[0] if driver and cuda else None,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda or torch.version.hip,
        **{name: package_version(name) for name in ("torch", "triton", "transformers", "kernels")},
    }
