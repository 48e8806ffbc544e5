"""Token counts that change: what a call costs when its number of tokens is new, and when it came before.

A Qwen3-30B-A3B layer in bf16, eager, next to transformers and PyTorch on the same inputs in turn. Every call starts on
an idle GPU. host: until the call returns; wall: until the GPU is idle again. new: the first call of a provider with
this number of tokens, after calls with other numbers from the same range have compiled what the range needs. seen: the
later calls. For linear layers, T tokens are 8 T rows less T % 8, so that row counts have every residue.
"""

import argparse
import random
import time
from types import ModuleType
from typing import Dict, List, NamedTuple, Sequence

import timing
import torch
from experts import BATCHED, GROUPED, Block, Experts, block_of
from linear import make_module, make_problem
from machine import DEVICE
from problems import FORWARD, OURS, STEP, Problem, make_call, start
from timing import Call
from workload import QWEN3_30B, SMOKE, Cell, make_inputs

FIRST, SIZES, BETWEEN, PASSES, DECODE_PASSES = (64, 512, 2048), 200, 3, 3, 20
WARM_EVERY = 7  # of the sizes between: among them, and among the sizes, are multiples of 16
DECODE_TOKENS = tuple(range(1, 9))
OPS = ("grouped_mm_experts", "grouped_linear", "GroupedLinear", "grouped_mlp")


class Shapes(NamedTuple):
    """An op in one direction around one number of tokens; first 0: decoding, whose few sizes all count as seen."""

    op: str
    backward: bool
    first: int

    def __str__(self) -> str:
        sizes = f"{self.first}+{BETWEEN}i" if self.first else "1..8"
        return f"{self.op} {'step' if self.backward else 'forward'} T={sizes}"


def cases(smoke: bool) -> List[Shapes]:
    """What is measured."""
    first = (8,) if smoke else FIRST
    return [Shapes(OPS[0], False, 0), *(Shapes(op, b, at) for at in first for op in OPS for b in (False, True))]


def make(kernel: ModuleType, block: Block, shapes: Shapes, tokens: Sequence[int]) -> Problem:
    """The op next to its peers, with an input set for each number of tokens."""
    op, backward, first = shapes
    described = {"name": str(shapes), "op": op, "backward": backward, "tokens": first}
    layer, sets = block.layer, []
    for count in tokens:
        torch.manual_seed(count)
        sets.append(make_inputs(Cell(layer, count, backward=True), DEVICE))
    if op == OPS[0]:
        names = (OURS, GROUPED) if first else (OURS, GROUPED, BATCHED)
        cell = Cell(layer, 1, backward=backward)
        return Experts({OURS: kernel}, names, DEVICE).problem_of(block, cell, sets, described)
    rows = [t * layer.top_k - t % layer.top_k for t in tokens]
    sizes = [s.ids.flatten()[:count].bincount(minlength=layer.experts) for s, count in zip(sets, rows)]
    weights = block.weights if op == "grouped_mlp" else block.weights[:1]
    problem = make_problem({OURS: kernel}, weights, rows, sizes, described)
    if op == "GroupedLinear":
        problem.providers[OURS] = make_module(kernel, problem.providers[OURS], sizes)
    return problem._replace(parts=(STEP if backward else FORWARD,))


def take(call: Call, number: int) -> Dict[str, float]:
    """ms of one call on an idle GPU, until it returns and until the GPU is idle again."""
    timing.synchronize()
    start = time.perf_counter()
    results = call(number)
    issued = time.perf_counter()
    timing.synchronize()
    done = time.perf_counter()
    del results
    return {"host": (issued - start) * 1e3, "wall": (done - start) * 1e3}


def measure(calls: Dict[str, Call], warm: Sequence[int], sizes: Sequence[int], passes: int) -> dict:
    """{"new, host": {provider: entry}, ...} of calls on the input sets `sizes`, after those on `warm`.

    In each pass every size comes once, in random order, providers in turn.
    """
    for number in warm:
        for call in calls.values():
            call(number)
    samples: Dict[str, Dict[str, List[float]]] = {}
    order, shuffled, turns = list(sizes), random.Random(0), timing.orders(list(calls))
    with timing.without_gc():
        for number in range(passes):
            shuffled.shuffle(order)
            for place, size in enumerate(order):
                for name in turns[(place + number) % len(turns)]:
                    for what, ms in take(calls[name], size).items():
                        key = f"{'seen' if number else 'new'}, {what}"
                        samples.setdefault(key, {}).setdefault(name, []).append(ms)
    return {key: {name: timing.described(ms) for name, ms in of.items()} for key, of in samples.items()}


def run(kernel: ModuleType, shapes: Shapes, arguments: argparse.Namespace) -> List[dict]:
    """The cell of an op in one direction. The first of the input sets is checked, and warms up."""
    block = block_of(SMOKE if arguments.smoke else QWEN3_30B)
    count, every = (6, 3) if arguments.smoke else (SIZES, WARM_EVERY)
    warm = [shapes.first + 1 + BETWEEN * i for i in range(0, count, every)] if shapes.first else []
    sizes = [shapes.first + BETWEEN * i for i in range(count)] if shapes.first else DECODE_TOKENS
    problem = make(kernel, block, shapes, [*warm, *sizes])
    cell = start(problem)
    calls = {name: make_call(provider, problem.parts[0]) for name, provider in problem.providers.items()}
    passes = 2 if arguments.smoke else PASSES if shapes.first else DECODE_PASSES
    numbers = range(len(warm) + len(sizes))
    times = measure(calls, numbers[: len(warm) or None], numbers[len(warm) :], passes)
    kept = {key: entries for key, entries in times.items() if shapes.first or key.startswith("seen")}
    return [{**cell, "sizes": len(sizes), "times": kept}]
