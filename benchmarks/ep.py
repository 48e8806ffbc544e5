"""One rank's own work under expert parallelism, on one GPU: a copy on the device stands in for the wire.

Dispatch, experts and combine, alone and as a layer, and a step of the layer. What the other ranks send is made
beforehand, out of batches of their own. Of the link's time nothing is measured.

ours                the exchange of register_experts_implementation: each token once per rank, in places of a fixed size
all_to_all          the steps of transformers' AllToAllEP, each token once per expert, with its grouped_mm
all_to_all, ours    the same with our experts block
bytes               what ours has to read and write, with the copies that stand in for the wire, at 4.3 TB/s; for the
                    experts the time of their products, if that is more
"""

import argparse
import gc
import sys
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import timing
import torch
from experts import Block, make_block
from machine import DEVICE
from problems import MAX_ERROR, OURS
from timing import GRAPH, HOST, Call
from torch import Tensor
from torch.nn import functional as F
from workload import (
    BYTES_PER_SECOND,
    DEEPSEEK_V3,
    FLOPS_PER_SECOND,
    ITEM,
    QWEN3_30B,
    SMOKE,
    Cell,
    Layer,
    Routed,
    make_inputs,
)

ALL_TO_ALL, BYTES = "all_to_all", "bytes"
PARTS = ("dispatch", "experts", "combine")
CHECKED = 64  # rows and tokens


class Case(NamedTuple):
    """A layer with the experts of all ranks; tokens: of each rank. factor: ep_capacity_factor."""

    layer: Layer
    ranks: int
    tokens: int
    factor: Optional[float] = None

    def __str__(self) -> str:
        said = "" if self.factor is None else f" factor={self.factor:g}"
        return f"{self.layer.name} EP {self.ranks} T={self.tokens}{said}"

    @property
    def local(self) -> Layer:
        """With the experts of one rank."""
        return self.layer._replace(experts=self.layer.experts // self.ranks)

    def batch(self) -> Routed:
        """What one rank has, with ids over all ranks."""
        return make_inputs(Cell(self.layer, self.tokens, backward=True), DEVICE)


def cases(smoke: bool) -> List[Case]:
    """Few tokens and many, with room for all or, on many ranks, for twice what comes."""
    if smoke:
        return [Case(SMOKE, 4, 6, 2.0)]
    deepseek = DEEPSEEK_V3._replace(name="DeepSeek-V3", experts=256)
    few = [Case(QWEN3_30B, ranks, 64) for ranks in (4, 8, 64)]
    many = [Case(QWEN3_30B, 4, 8192), Case(QWEN3_30B, 8, 8192), Case(QWEN3_30B, 64, 8192, 2.0)]
    return [*few, *many, Case(deepseek, 8, 64), Case(deepseek, 64, 4096, 2.0)]


class Arrived(NamedTuple):
    """What all ranks send to rank 0.

    packed: as ours sends it, (places, words). rows, counts: as AllToAllEP does, (rows, H) by rank and expert, and how
    many they are, (ranks, E).
    """

    packed: Tensor
    rows: Tensor
    counts: Tensor


def arrive(exchange: ModuleType, case: Case, capacity: int) -> Arrived:
    """The work of the other ranks."""
    local, packed, rows, counts = case.local.experts, [], [], []
    for _ in range(case.ranks):
        batch = case.batch()
        ids = exchange.global_ids(batch.ids, case.layer.experts)
        source = exchange.make_plan(ids, local, case.ranks, capacity).source[:capacity]
        sent = F.pad(exchange.pack([batch.x.detach(), batch.weights.detach(), ids]), (0, 0, 0, 1))
        packed.append(sent.index_select(0, source))
        here = (batch.ids.flatten() < local).sum()
        tokens = batch.ids.flatten().argsort(stable=True)[:here] // case.layer.top_k
        rows.append(batch.x.detach()[tokens])
        counts.append(batch.ids.flatten().bincount(minlength=case.layer.experts)[:local])
    return Arrived(torch.cat(packed), torch.cat(rows), torch.stack(counts))


class Wire(torch.autograd.Function):
    """A copy of what has arrived in place of what was sent; backward, of as many rows as were sent."""

    @staticmethod
    def forward(ctx, sent: Tensor, arrived: Tensor) -> Tensor:
        ctx.size = sent.shape[0]
        return arrived.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tuple[Tensor, None]:
        back = grad.new_empty((ctx.size, grad.shape[1]))
        both = min(ctx.size, grad.shape[0])
        back[:both].copy_(grad[:both])
        back[both:].zero_()
        return back, None


class Parts(NamedTuple):
    """A provider: dispatch(x, weights) -> state; experts(*state) -> rows; combine(rows, weights, state) -> out."""

    dispatch: Callable
    experts: Callable
    combine: Callable

    def layer(self, x: Tensor, weights: Tensor) -> Tensor:
        state = self.dispatch(x, weights)
        return self.combine(self.experts(*state), weights, state)


def make_ours(kernel: ModuleType, case: Case, block: Block, batch: Routed, arrived: Arrived, capacity: int) -> Parts:
    """The package's exchange. Its all-to-all becomes a copy: of what arrives in the dispatch, else of what is sent."""
    exchange, local = sys.modules[f"{kernel.__name__}.exchange"], case.local.experts

    def wire(rows: Tensor, _: object) -> Tensor:
        return (arrived.packed if rows.dtype == torch.int64 else rows).clone(memory_format=torch.contiguous_format)

    exchange.all_to_all = wire

    def dispatch(x: Tensor, weights: Tensor) -> tuple:
        ids = exchange.global_ids(batch.ids, case.layer.experts)
        plan = exchange.make_plan(ids, local, case.ranks, capacity)
        rows, weights, ids = exchange.dispatch(x, weights, ids, plan, None)
        return rows, exchange.local_ids(ids, local, 0), weights, plan

    def experts(rows: Tensor, ids: Tensor, weights: Tensor, _: object) -> Tensor:
        return kernel.grouped_mm_experts(rows, ids, weights, *block.weights)

    return Parts(dispatch, experts, lambda rows, _, state: exchange.combine(rows, state[-1], None))


def make_all_to_all(experts: Callable, case: Case, batch: Routed, arrived: Arrived) -> Parts:
    """The steps of transformers 5.23's AllToAllEP without tensor parallelism."""
    top_k, (ranks, local) = case.layer.top_k, arrived.counts.shape
    returned = torch.randn((case.tokens * top_k, case.layer.hidden), device=DEVICE, dtype=batch.x.dtype)

    def dispatch(x: Tensor, _: Tensor) -> tuple:
        ids = batch.ids.reshape(-1)
        order = torch.argsort(ids)
        sent = x[order // top_k]
        counts = torch.zeros(local * ranks, dtype=torch.long, device=x.device)
        counts = counts.scatter_add_(0, ids, torch.ones_like(ids)).view(ranks, local)
        received = arrived.counts.clone()
        _, sizes = torch.stack([counts.sum(dim=1), received.sum(dim=1)]).tolist()
        rows = Wire.apply(sent, arrived.rows)
        ids = torch.arange(local, device=x.device).repeat(ranks)
        ids = ids.repeat_interleave(received.reshape(-1), output_size=sum(sizes)).unsqueeze(-1)
        return rows, ids, torch.ones_like(ids, dtype=rows.dtype), order

    def combine(rows: Tensor, weights: Tensor, state: tuple) -> Tensor:
        back = Wire.apply(rows, returned)
        slots = torch.empty_like(back)
        slots[state[-1]] = back
        return (slots.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    return Parts(dispatch, lambda rows, ids, weights, _: experts(rows, ids, weights), combine)


def make_providers(kernel: ModuleType, case: Case, block: Block, batch: Routed, capacity: int) -> Dict[str, Parts]:
    """All of them on one batch."""
    from transformers.integrations import moe

    arrived = arrive(sys.modules[f"{kernel.__name__}.exchange"], case, capacity)

    def grouped(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.grouped_mm_experts_forward(block.module, rows, ids, weights)

    def own(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return kernel.grouped_mm_experts(rows, ids, weights, *block.weights)

    return {
        OURS: make_ours(kernel, case, block, batch, arrived, capacity),
        ALL_TO_ALL: make_all_to_all(grouped, case, batch, arrived),
        f"{ALL_TO_ALL}, {OURS}": make_all_to_all(own, case, batch, arrived),
    }


def floors(case: Case, state: tuple, capacity: int) -> Dict[str, float]:
    """ms of each part of ours at BYTES_PER_SECOND and FLOPS_PER_SECOND. state: what its dispatch gives."""
    layer, (x, ids, _, plan) = case.local, state
    here, places = ids < layer.experts, case.ranks * capacity
    row, wide = x.stride(0) * ITEM, layer.hidden * ITEM
    used = ids[here].unique().numel() * layer.weights_per_expert * ITEM
    moved = {
        "dispatch": case.tokens * row + 3 * places * row,
        "experts": int(here.any(1).sum()) * wide + used + places * wide,
        "combine": 2 * places * wide + int((plan.sent >= 0).sum()) * wide + case.tokens * wide,
    }
    found = {part: size / BYTES_PER_SECOND * 1e3 for part, size in moved.items()}
    products = 2 * int(here.sum()) * layer.weights_per_expert / FLOPS_PER_SECOND * 1e3
    found["experts"] = max(found["experts"], products)
    return {**found, "layer": sum(found.values())}


def check(kernel: ModuleType, block: Block, state: tuple, rows: Tensor) -> float:
    """Relative error of the rows that the experts give for the first tokens that arrived."""
    x, ids, weights = state[:3]
    some = (ids < len(block.weights[0])).any(1).nonzero().flatten()[:CHECKED]
    up, down = (weight.detach().float() for weight in block.weights)
    want = kernel.reference.grouped_mm_experts(x[some].float(), ids[some], weights[some].float(), up, down)
    return float((rows[some].float() - want).norm() / want.norm())


def calls_of(parts: Parts, weights: Sequence[Tensor], batch: Routed) -> Dict[str, Call]:
    """What is timed of a provider, by measure; each call ignores which input set is asked for."""
    with torch.no_grad():
        state = parts.dispatch(batch.x, batch.weights)
        rows = parts.experts(*state)

    def without_graph(function: Callable, *arguments: object) -> Call:
        def call(_: int) -> Sequence[Tensor]:
            with torch.no_grad():
                out = function(*arguments)
            return [t for t in out if isinstance(t, Tensor)] if isinstance(out, tuple) else [out]

        return call

    def step(_: int) -> Sequence[Tensor]:
        out = parts.layer(batch.x, batch.weights)
        return torch.autograd.grad(out, (batch.x, batch.weights, *weights), batch.dout)

    return {
        "dispatch": without_graph(parts.dispatch, batch.x, batch.weights),
        "experts": without_graph(parts.experts, *state),
        "combine": without_graph(parts.combine, rows, batch.weights, state),
        "layer": without_graph(parts.layer, batch.x, batch.weights),
        "step": step,
    }


def table(cell: dict) -> str:
    """Times in ms by measure and provider, what a rank sends in a dispatch and the peak of a step in MiB."""
    columns = [BYTES, *cell["errors"]]
    times = {
        measure: {name: f"{e['median_ms']:.4f}" for name, e in row.items()} for measure, row in cell["times"].items()
    }
    sizes = {what: {n: f"{size:.0f}" for n, size in cell[what].items() if size} for what in ("sent_mib", "peak_mib")}
    lines = [f"{cell['name']}, {cell['capacity']} places"]
    lines += [f"{'':16}" + "".join(f"{name:>18}" for name in columns)]
    for what, row in {**times, **sizes}.items():
        lines.append(f"{what:16}" + "".join(f"{row.get(name, ''):>18}" for name in columns))
    return "\n".join(lines)


def run(kernel: ModuleType, case: Case, arguments: argparse.Namespace) -> List[dict]:
    """The cell of a case. `layer` is measured as a graph and by the host's time, too, the parts of ours as graphs."""
    torch.manual_seed(0)
    limits = sys.modules[f"{kernel.__name__}.integrations.transformers_ep"].Limits(None, case.factor)
    block, batch = make_block(case.local, DEVICE), case.batch()
    capacity = limits.capacity_of(case.tokens, case.layer.top_k, case.ranks)
    providers = make_providers(kernel, case, block, batch, capacity)
    cell = {"name": str(case), **case._asdict(), "layer": case.layer.name, "capacity": capacity, "times": {}}
    cell.update(skipped={f"{ALL_TO_ALL}, {GRAPH}": "reads split sizes"}, errors={}, wrong=[], peak_mib={}, sent_mib={})
    calls: Dict[str, Dict[str, Call]] = {}
    for name, parts in providers.items():
        with torch.no_grad():
            state = parts.dispatch(batch.x, batch.weights)
            error = check(kernel, block, state, parts.experts(*state))
        cell["errors"][name] = {"out": error}
        cell["wrong"] += [name] if not error < MAX_ERROR[batch.x.dtype] else []
        if name == OURS:
            times = floors(case, state, capacity)
            cell["dropped_slots"] = int((state[-1].places < 0).sum())
            sent = state[0].shape[0] * state[0].stride(0)
        else:
            sent = case.tokens * case.layer.top_k * case.layer.hidden
        cell["sent_mib"][name] = sent * ITEM / 2**20
        del state
        calls[name] = calls_of(parts, [*block.weights], batch)
        cell["peak_mib"][name] = timing.peak_mib(calls[name]["step"])
    plan = timing.plan_of(arguments)
    for measure in (*PARTS, "layer", "step"):
        found = timing.time_in_turn({name: each[measure] for name, each in calls.items()}, plan)
        cell["times"][measure] = {name: timing.described(samples) for name, samples in found.items()}
        if measure in times:
            cell["times"][measure][BYTES] = {"median_ms": times[measure]}
    for measure in (*PARTS, "layer"):
        call = {OURS: timing.capture(calls[OURS][measure], 1)}
        (samples,) = timing.time_in_turn(call, plan, GRAPH).values()
        cell["times"][f"{measure}, {GRAPH}"] = {OURS: timing.described(samples)}
        del call
    found = timing.time_in_turn({name: each["layer"] for name, each in calls.items()}, plan, HOST)
    cell["times"][f"layer, {HOST}"] = {name: timing.described(samples) for name, samples in found.items()}
    del calls, providers
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    print(table(cell), flush=True)
    return [cell]
