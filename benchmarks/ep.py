"""One rank's own work under expert parallelism, on one GPU: a copy on the device stands in for the wire.

Dispatch, experts and combine, alone and as a layer, and a step of the layer. What the other ranks send is made
beforehand, out of batches of their own. Of the link's time nothing is measured.

ours                the exchange of register_experts_implementation: each token once per rank, in places of a fixed size
all_to_all          the steps of transformers' AllToAllEP, each token once per expert, with its grouped_mm
bytes               what ours has to read and write, with the copies that stand in for the wire, at 4.3 TB/s; for the
                    experts the time of their products, if that is more

A first run compiles the kernels of all cells, which takes minutes: `--budget` bounds it, and Triton keeps what it has
compiled for the next one.
"""

import argparse
import sys
from functools import partial
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple
from unittest import mock

import timing
import torch
from experts import Block, block_of
from machine import DEVICE
from problems import MAX_ERROR, OURS
from timing import EAGER, GRAPH, HOST, Call
from torch import Tensor
from workload import BYTES_PER_SECOND, EP_LAYERS, FLOPS_PER_SECOND, ITEM, SMOKE, Cell, Layer, Routed, make_inputs

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
    """Those of the same weights in a row. On more ranks than top_k there is room for twice what comes, else for all."""
    if smoke:
        return [Case(SMOKE, 4, 6, 2.0)]
    return [
        Case(layer, ranks, tokens, 2.0 if ranks > layer.top_k else None)
        for layer in EP_LAYERS
        for ranks in (4, 8, 64)
        for tokens in (1, 64, 1024, 8192)
    ]


class Arrived(NamedTuple):
    """What all ranks send to rank 0.

    packed: as ours sends it, (places, words). rows, counts: as AllToAllEP does, (rows, H) by rank and expert, and how
    many they are, (ranks, E).
    """

    packed: Tensor
    rows: Tensor
    counts: Tensor


def arrive(kernel: ModuleType, case: Case, capacity: int) -> Arrived:
    """The work of the other ranks."""
    send, local = sys.modules[f"{kernel.__name__}.places"].send, case.local.experts
    packed, rows, counts = [], [], []
    for _ in range(case.ranks):
        batch = case.batch()
        x, weights = batch.x.detach(), batch.weights.detach()
        packed.append(send(x, weights, batch.ids, local, case.ranks, capacity, local)[0][:capacity].clone())
        here = (batch.ids.flatten() < local).sum()
        rows.append(x[batch.ids.flatten().argsort(stable=True)[:here] // case.layer.top_k])
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
        there = exchange.dispatch(x, weights, batch.ids, local, case.ranks, capacity, None)
        return there.x, there.ids, there.weights, there.plan

    return Parts(
        dispatch,
        lambda rows, ids, weights, _: kernel.grouped_mm_experts(rows, ids, weights, *block.weights),
        lambda rows, _, state: exchange.combine(rows, state[-1], None),
    )


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
    """Both on one batch."""
    from transformers.integrations import moe

    arrived, grouped = arrive(kernel, case, capacity), partial(moe.grouped_mm_experts_forward, block.module)
    return {
        OURS: make_ours(kernel, case, block, batch, arrived, capacity),
        ALL_TO_ALL: make_all_to_all(grouped, case, batch, arrived),
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
        "combine": 2 * places * wide + int((plan.places >= 0).sum()) * wide + case.tokens * wide,
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


def layer_calls(layer: Callable[..., Tensor], batch: Routed, weights: Sequence[Tensor]) -> Dict[str, Call]:
    """layer(x, routing weights) without gradients, and a step, on any input set."""
    leaves = batch.x, batch.weights
    return {
        "layer": without_graph(layer, *leaves),
        "step": lambda _: torch.autograd.grad(layer(*leaves), (*leaves, *weights), batch.dout),
    }


def without_graph(function: Callable, *arguments: object) -> Call:
    """The call of a function, of which the tensors among its results are kept."""

    def call(_: int) -> Sequence[Tensor]:
        with torch.no_grad():
            out = function(*arguments)
        return [t for t in out if isinstance(t, Tensor)] if isinstance(out, tuple) else [out]

    return call


def calls_of(parts: Parts, weights: Sequence[Tensor], batch: Routed) -> Dict[str, Call]:
    """What is timed of a provider, by measure."""
    with torch.no_grad():
        state = parts.dispatch(batch.x, batch.weights)
        rows = parts.experts(*state)
    arguments = ((batch.x, batch.weights), state, (rows, batch.weights, state))
    alone = {part: without_graph(getattr(parts, part), *given) for part, given in zip(PARTS, arguments)}
    return {**alone, **layer_calls(parts.layer, batch, weights)}


def time_layers(calls: Dict[str, Dict[str, Call]], plan: timing.Plan, **options) -> Dict[str, Dict[str, dict]]:
    """Times by measure and provider: layer and step eagerly, the layer by the host. One warms up the card for all."""
    times = {}
    for what, way in (("layer", EAGER), ("layer", HOST), ("step", EAGER)):
        some = {name: each[what] for name, each in calls.items()}
        times[timing.measure_of(what, way)] = timing.described_in_turn(some, plan, way, **options)
        plan = plan._replace(warm_seconds=0.0)
    return times


def measure(calls: Dict[str, Dict[str, Call]], plan: timing.Plan) -> Dict[str, Dict[str, dict]]:
    """Times by measure and provider: those of layers, parts of ours as graphs, and parts of the other eagerly."""
    times = {**dict.fromkeys(PARTS), **time_layers(calls, plan)}
    plan = plan._replace(warm_seconds=0.0)
    found = timing.described_in_turn({part: calls[ALL_TO_ALL][part] for part in PARTS}, plan)
    times.update({part: {ALL_TO_ALL: entry} for part, entry in found.items()})
    graphs = {part: timing.capture(calls[OURS][part], 1) for part in (*PARTS, "layer")}
    found = timing.described_in_turn(graphs, plan, GRAPH)
    return {**times, **{timing.measure_of(part, GRAPH): {OURS: entry} for part, entry in found.items()}}


def run(kernel: ModuleType, case: Case, arguments: argparse.Namespace) -> List[dict]:
    """The cell of a case."""
    exchange = sys.modules[f"{kernel.__name__}.exchange"]
    with mock.patch.object(exchange, "all_to_all", exchange.all_to_all):  # in whose place `make_ours` puts a copy
        return [cell_of(kernel, case, arguments)]


def cell_of(kernel: ModuleType, case: Case, arguments: argparse.Namespace) -> dict:
    """What `run` measures."""
    torch.manual_seed(0)
    limits = sys.modules[f"{kernel.__name__}.integrations.transformers_ep"].Limits(None, case.factor)
    block, batch = block_of(case.local), case.batch()
    capacity = limits.capacity_of(case.tokens, case.layer.top_k, case.ranks)
    providers = make_providers(kernel, case, block, batch, capacity)
    cell = {"name": str(case), **case._asdict(), "layer": case.layer.name, "capacity": capacity, "errors": {}}
    cell.update(skipped={f"{ALL_TO_ALL}, {GRAPH}": "reads split sizes"}, wrong=[], peak_mib={}, sent_mib={})
    calls: Dict[str, Dict[str, Call]] = {}
    for name, parts in providers.items():
        with torch.no_grad():
            state = parts.dispatch(batch.x, batch.weights)
            error = check(kernel, block, state, parts.experts(*state))
        cell["errors"][name] = {"out": error}
        cell["wrong"] += [name] if not error < MAX_ERROR[batch.x.dtype] else []
        if name == OURS:
            bytes_of = floors(case, state, capacity)
            cell["dropped_slots"] = int(state[-1].dropped.sum())
            sent = state[0].shape[0] * state[0].stride(0)
        else:
            sent = case.tokens * case.layer.top_k * case.layer.hidden
        cell["sent_mib"][name] = sent * ITEM / 2**20
        del state
        calls[name] = calls_of(parts, [*block.weights], batch)
        cell["peak_mib"][name] = timing.peak_mib(calls[name]["step"])
    cell["times"] = measure(calls, timing.plan_of(arguments))
    for what, time in bytes_of.items():
        cell["times"][what][BYTES] = {"median_ms": time}
    del calls, providers
    timing.release_memory()
    return cell
