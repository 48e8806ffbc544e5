"""The CPU implementation next to transformers' grouped_mm: Qwen3-30B-A3B's layer with 16 experts, 512 tokens.

    python benchmarks/run_cpu.py [--output benchmarks/results/cpu.json] [--commit SHA] [--rounds 15]

Both in one process, in turn; medians; outputs and gradients are checked against each other in the same run.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Callable, List, Optional

import torch
from machine import describe_machine, load_kernel
from timing import Plan, time_in_turn
from torch import Tensor

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 512, 16, 8, 2048, 768
MAX_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # in norm; both round, in another order


def make_module(dtype: torch.dtype) -> torch.nn.Module:
    """transformers' experts module with weights of unit scale."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    module = Qwen3MoeExperts(
        Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, hidden_act="silu")
    ).to(dtype)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[-1]))
    return module


def measure(kernel, dtype: torch.dtype, rounds: int) -> List[dict]:
    """Forward, and forward with all gradients, of both."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    module = make_module(dtype)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    ids = torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, requires_grad=True)
    dout = torch.randn(TOKENS, HIDDEN, dtype=dtype)
    leaves = (x, weights, module.gate_up_proj, module.down_proj)

    def ours() -> Tensor:
        return kernel.grouped_mm_experts(x, ids, weights, module.gate_up_proj, module.down_proj)

    def theirs() -> Tensor:
        return grouped_mm_experts_forward(module, x, ids, weights)

    def forward(function: Callable[[], Tensor]):
        def call(_: int):
            with torch.no_grad():
                return (function(),)

        return call

    def step(function: Callable[[], Tensor]):
        return lambda _: (out := function(), *torch.autograd.grad(out, leaves, dout))

    results = []
    for mode, wrap in (("forward", forward), ("forward+backward", step)):
        calls = {"ours": wrap(ours), "grouped_mm": wrap(theirs)}
        pairs = zip(calls["ours"](0), calls["grouped_mm"](0))
        difference = max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)
        if not difference < MAX_DIFFERENCE[dtype]:
            raise SystemExit(f"{mode} {dtype}: results differ by {difference:.1e}")
        timings = time_in_turn(calls, Plan(0.5, rounds), math.inf, cuda=False)
        ratio = timings["grouped_mm"]["median_ms"] / timings["ours"]["median_ms"]
        cell = {"dtype": str(dtype), "mode": mode, "speedup": ratio, "difference": difference, "providers": timings}
        print(f"{str(dtype)[6:]:9} {mode:17} {ratio:5.2f} times grouped_mm's speed, results {difference:.0e} apart")
        results.append(cell)
    return results


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="commit of the package, where git can't tell")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    kernel = load_kernel()
    results = {
        "tokens": TOKENS, "experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "intermediate": INTERMEDIATE,
        "threads": torch.get_num_threads(), **describe_machine(kernel, arguments.commit), "cells": [],
    }  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        results["cells"] += measure(kernel, dtype, arguments.rounds)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
