"""An experts layer on several GPUs: tokens travel to their experts through NCCL, next to transformers' own ways.

    torchrun --standalone --nproc-per-node 2 benchmarks/ep_ranks.py --output ep_ranks.json

Each rank has one GPU and a part of the experts; ep.py measures what a rank does without the wire. Ranks have batches of
their own, or one that they share, as in decoding under tensor parallelism:

ours              experts and exchange of this package
all_to_all        transformers' AllToAllEP with its grouped_mm, its default in training
all_reduce        transformers' AllReduceEP with its grouped_mm, its default at inference with a shared batch
ours, all_reduce  the experts of this package under AllReduceEP
wire              what ours sends and receives, by NCCL alone

A sample is that of the slowest rank.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Callable, List, NamedTuple, Sequence

import timing
import torch
import torch.distributed as dist
from ep import ALL_TO_ALL, CHECKED, layer_calls, time_layers
from machine import DEVICE, build_id, describe_machine, load_kernel, summary, write
from problems import MAX_ERROR, OURS
from timing import GRAPH, Call
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from workload import EP_LAYERS, ITEM, SMOKE, Cell, Layer, Routed, make_inputs

ALL_REDUCE, OURS_REDUCED, WIRE = "all_reduce", "ours, all_reduce", "wire"
PLAN = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm", "experts": "ep_dispatch_experts"}
NAMES = ("gate_up_proj", "down_proj")


class Case(NamedTuple):
    """A layer with the experts of all ranks. tokens: of each rank. shared: whether all ranks have the same ones."""

    layer: Layer
    tokens: int
    shared: bool

    def __str__(self) -> str:
        return f"{self.layer.name} EP {dist.get_world_size()} T={self.tokens}{' shared' if self.shared else ''}"


def cases(smoke: bool) -> List[Case]:
    """Those of the same weights in a row."""
    layers = (SMOKE,) if smoke else EP_LAYERS
    tokens = (6,) if smoke else (1, 64, 1024, 8192)
    return [Case(layer, count, shared) for layer in layers for count in tokens for shared in (False, True)]


def make_weights(layer: Layer) -> List[Tensor]:
    """Those of this rank's experts, unit-scale over the root of their fan-in."""
    here = layer.experts // dist.get_world_size()
    torch.manual_seed(1 + dist.get_rank())
    shapes = [(here, *shape[1:]) for shape in layer.weight_shapes]
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).div_(shape[-1] ** 0.5) for shape in shapes]


def make_experts(layer: Layer, weights: Sequence[Tensor], mesh: DeviceMesh, shared: bool, name: str) -> nn.Module:
    """transformers' experts module of a rank, by the names of what computes the experts and what brings the tokens."""
    from transformers import Qwen3MoeConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts, way = {
        OURS: ("grouped_moe", "grouped_moe"), OURS_REDUCED: ("grouped_moe", "all_reduce"),
        ALL_TO_ALL: ("grouped_mm", "all_to_all"), ALL_REDUCE: ("grouped_mm", "all_reduce"),
    }[name]  # fmt: skip
    config = Qwen3MoeConfig(
        hidden_size=layer.hidden, moe_intermediate_size=layer.intermediate, num_experts=layer.experts
    )
    config._experts_implementation = experts
    root = nn.Module()
    with torch.device("meta"):
        root.experts = Qwen3MoeExperts(config)
    apply_expert_parallelism(root, mesh["ep"], mesh["ep" if shared else "tp"], PLAN, way)
    for parameter, weight in zip(NAMES, weights):
        weight = DTensor.from_local(weight, mesh["ep"], [Shard(0)], run_check=False)
        setattr(root.experts, parameter, nn.Parameter(weight))
    return root.experts


def batch_of(case: Case) -> Routed:
    """This rank's."""
    torch.manual_seed(100 + (0 if case.shared else dist.get_rank()))
    return make_inputs(Cell(case.layer, case.tokens, backward=True), DEVICE)


def expected(reference: Callable, weights: Sequence[Tensor], batch: Routed) -> Tensor:
    """The first rows of rank 0's output in fp32, as the sum of what the ranks' experts give."""
    parts = [part[:CHECKED].detach().clone() for part in batch[:3]]
    for part in parts:
        dist.broadcast(part, 0)
    x, ids, scales = parts
    up, down = weights
    out = reference(x.float(), ids - dist.get_rank() * len(up), scales.float(), up.float(), down.float())
    dist.all_reduce(out)
    return out


def wire_of(case: Case) -> Call:
    """The all-to-alls of ours, and the all-gather of a shared batch, with nothing between."""
    ranks, hidden = dist.get_world_size(), case.layer.hidden
    tokens = -(-case.tokens // ranks) if case.shared else case.tokens
    words = hidden * ITEM // 8 + case.layer.top_k  # ids and weights beside the hidden state
    there = torch.empty((ranks * tokens, words), device=DEVICE, dtype=torch.int64)
    back = torch.empty((ranks * tokens, hidden), device=DEVICE, dtype=torch.bfloat16)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13

    def call(_: int) -> Sequence[Tensor]:
        for rows in (there, back):
            dist.all_to_all_single(torch.empty_like(rows), rows)
        if case.shared:
            gather(torch.empty_like(back), back[:tokens])
        return [back]

    return call


def slowest(value: float) -> float:
    """The largest of all ranks."""
    largest = torch.tensor(value, device=DEVICE, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def measure(case: Case, kernel: object, weights: Sequence[Tensor], mesh: DeviceMesh) -> dict:
    """The cell of a case."""
    kernel.register_experts_implementation(ep_max_tokens=case.tokens)
    batch = batch_of(case)
    names = (OURS, ALL_TO_ALL, OURS_REDUCED, ALL_REDUCE) if case.shared else (OURS, ALL_TO_ALL)
    calls = {}
    for name in names:
        experts = make_experts(case.layer, weights, mesh, case.shared, name)
        parameters = [getattr(experts, parameter) for parameter in NAMES]
        calls[name] = layer_calls(lambda x, scales, e=experts: e(x, batch.ids, scales), batch, parameters)
    cell = {"name": str(case), **case._asdict(), "layer": case.layer.name, "ranks": dist.get_world_size()}
    cell.update(errors={}, wrong=[], times={}, peak_mib={}, skipped={f"{ALL_TO_ALL}, {GRAPH}": "reads split sizes"})
    right = expected(kernel.reference.grouped_mm_experts, weights, batch)
    for name, each in calls.items():
        error = (each["layer"](0)[0][:CHECKED].float() - right).norm() / right.norm()
        error = slowest(error.item() if dist.get_rank() == 0 else 0.0)
        cell["errors"][name] = {"out": error}
        cell["wrong"] += [name] if not error < MAX_ERROR[torch.bfloat16] else []
        peak = timing.peak_mib(each["step"])
        cell["peak_mib"][name] = None if peak is None else slowest(peak)
    plan = timing.Plan(0.0, rounds=8, seconds=math.inf, sample_seconds=4e-3, least_calls=2)
    cell["times"].update(time_layers(calls, plan, agree=slowest))
    graphs = {"layer": {name: each["layer"] for name, each in calls.items() if name != ALL_TO_ALL}}
    graphs["layer"][WIRE] = wire_of(case)
    graphs.update({} if case.shared else {"step": {OURS: calls[OURS]["step"]}})
    for what, some in graphs.items():
        captured = {name: timing.capture(call, 1) for name, call in some.items()}
        times = timing.described_in_turn(captured, plan, GRAPH, agree=slowest)
        cell["times"][timing.measure_of(what, GRAPH)] = times
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, also without a GPU")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cells whose name has all these words")
    arguments = parser.parse_args()
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    kernel, results, weights, layer = load_kernel(), {"benchmark": "ep_ranks", "cells": []}, [], None
    results.update(describe_machine(), build=build_id(kernel))
    for case in cases(arguments.smoke):
        if not all(word in str(case) for word in arguments.only):
            continue
        if case.layer != layer:
            weights.clear()
            layer, weights[:] = case.layer, make_weights(case.layer)
        results["cells"].append(measure(case, kernel, weights, mesh))
        timing.release_memory()
        if dist.get_rank() == 0:
            print(summary(results["cells"][-1]), flush=True)
            write(arguments.output, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
