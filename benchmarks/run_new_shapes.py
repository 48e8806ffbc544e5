"""Token counts that change: what a call costs when its number of tokens is new, and when it came before.

    python benchmarks/run_new_shapes.py --output benchmarks/results/new_shapes_h200.json [--only grouped_mlp step]

A Qwen3-30B-A3B layer in bf16, eager, next to transformers and PyTorch on the same inputs in turn. Every call starts on
an idle GPU. host: until the call returns; wall: until the GPU is idle again. new: the first call of a provider with
this number of tokens, after calls with other numbers from the same range have compiled what the range needs. seen: the
later calls. For linear layers, T tokens are 8 T rows less T % 8, so that row counts have every residue.
"""

import argparse
import random
import time
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

import timing
import torch
from machine import DEVICE, Task, load_kernel, main_of, make_parser
from providers import BATCHED, GROUPED, MAX_ERROR, OURS, Block, Providers, make_block
from run_linear import grouped_mm
from torch import Tensor
from torch.nn import functional as F
from workload import QWEN3_30B, SMOKE, Cell, Inputs, Layer, make_inputs

FIRST, SIZES, STEP, PASSES = (64, 512, 2048), 200, 3, 3
WARM_EVERY = 7  # of the sizes between: among them, and among the sizes, are multiples of 16
DECODE_TOKENS = tuple(range(1, 9))
OPS = ("grouped_mm_experts", "grouped_linear", "GroupedLinear", "grouped_mlp")

Function = Callable[["Case"], Tensor]


class Case(NamedTuple):
    """Inputs with one number of tokens. rows, sizes, offsets, scales, drows: for linear layers."""

    inputs: Inputs
    rows: Tensor
    sizes: Tensor
    offsets: Tensor
    scales: Tensor
    drows: Tensor


class Op(NamedTuple):
    """The providers of an op. leaves: what a step differentiates. dout: the gradient of the output.

    reference(case, *leaves): the output, made of fp32 leaves.
    """

    functions: Dict[str, Function]
    leaves: Callable[[Case], List[Tensor]]
    dout: Callable[[Case], Tensor]
    reference: Callable[..., Tensor]


def make_case(layer: Layer, tokens: int, columns: int) -> Case:
    """columns: of the gradient of a linear layer's output."""
    torch.manual_seed(tokens)
    inputs = make_inputs(Cell(layer, tokens, backward=True), DEVICE)
    count = tokens * layer.top_k - tokens % layer.top_k
    sizes = torch.bincount(inputs.ids.flatten()[:count], minlength=layer.experts)
    options = {"device": DEVICE, "dtype": torch.bfloat16}
    rows = torch.randn((count, layer.hidden), **options).requires_grad_()
    scales = torch.rand(count, **options).requires_grad_()
    offsets = sizes.cumsum(0, dtype=torch.int32)
    return Case(inputs, rows, sizes, offsets, scales, torch.randn((count, columns), **options))


def make_op(kernel: ModuleType, name: str, block: Block, decode: bool) -> Op:
    """One of OPS next to its peer, which gets end offsets on the device and views of the weights for nothing."""
    up, down = block.weights
    product, reference = grouped_mm(), kernel.reference
    if name == "grouped_mm_experts":
        providers, cell = Providers({OURS: kernel}), Cell(block.layer, 1)
        made = {n: providers.make(n, block, cell) for n in (OURS, GROUPED, *([BATCHED] if decode else []))}
        return Op(
            {n: lambda c, f=f: f(c.inputs) for n, f in made.items()},
            lambda c: [c.inputs.x, c.inputs.weights, up, down],
            lambda c: c.inputs.dout,
            lambda c, x, weights, *both: reference.grouped_mm_experts(x, c.inputs.ids, weights, *both),
        )
    if name == "grouped_mlp":

        def mlp(c: Case) -> Tensor:
            gate, value = product(c.rows, up.transpose(1, 2), offs=c.offsets).chunk(2, dim=-1)
            return product(F.silu(gate) * value * c.scales[:, None], down.transpose(1, 2), offs=c.offsets)

        return Op(
            {OURS: lambda c: kernel.grouped_mlp(c.rows, kernel.GroupSizes(c.sizes), c.scales, up, down), GROUPED: mlp},
            lambda c: [c.rows, c.scales, up, down],
            lambda c: c.drows,
            lambda c, x, *rest: reference.grouped_mlp(x, F.pad(c.offsets, (1, 0)), *rest),
        )
    weight, ours = up, lambda c: kernel.grouped_linear(c.rows, up, kernel.GroupSizes(c.sizes))
    if name == "GroupedLinear":
        e, n, k = up.shape
        module = kernel.GroupedLinear(e, k, n, bias=False, device=DEVICE, dtype=torch.bfloat16)
        module.load_state_dict({"weight": up.detach()})
        (weight,), ours = module.parameters(), lambda c: module(c.rows, kernel.GroupSizes(c.sizes))
    return Op(
        {OURS: ours, GROUPED: lambda c: product(c.rows, weight.transpose(1, 2), offs=c.offsets)},
        lambda c: [c.rows, weight],
        lambda c: c.drows,
        lambda c, x, w: reference.grouped_linear(x, w, F.pad(c.offsets, (1, 0))),
    )


def make_call(op: Op, name: str, backward: bool) -> Callable[[Case], Sequence[Tensor]]:
    """A forward without gradients, or a forward and a backward of all leaves."""
    function = op.functions[name]

    def forward(case: Case) -> Sequence[Tensor]:
        with torch.no_grad():
            return (function(case),)

    def step(case: Case) -> Sequence[Tensor]:
        out = function(case)
        return (out, *torch.autograd.grad(out, op.leaves(case), op.dout(case)))

    return step if backward else forward


def check(op: Op, calls: Dict[str, Callable], case: Case, backward: bool) -> Dict[str, Dict[str, float]]:
    """Relative error in norm against fp32 of each provider's output and, of a step, each gradient in turn."""
    leaves = [leaf.detach().float().requires_grad_(backward) for leaf in op.leaves(case)]
    wanted = [op.reference(case, *leaves)]
    wanted += torch.autograd.grad(wanted[0], leaves, op.dout(case).float()) if backward else ()
    found = {}
    for name, call in calls.items():
        errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(call(case), wanted)]
        found[name] = {f"result {place}": error for place, error in enumerate(errors)}
    return found


def take(call: Callable[[Case], object], case: Case) -> Dict[str, float]:
    """ms of one call on an idle GPU, until it returns and until the GPU is idle again."""
    timing.synchronize()
    start = time.perf_counter()
    results = call(case)
    issued = time.perf_counter()
    timing.synchronize()
    done = time.perf_counter()
    del results
    return {"host": (issued - start) * 1e3, "wall": (done - start) * 1e3}


def measure(calls: Dict[str, Callable], cases: Dict[int, Case], passes: int, warm: Sequence[Case]) -> dict:
    """{"new, host": {provider: entry}, ...}. In each pass every size comes once, in random order, providers in turn."""
    for case in warm:
        for call in calls.values():
            call(case)
    samples: Dict[str, Dict[str, List[float]]] = {}
    order, shuffled, turns = list(cases), random.Random(0), timing.orders(list(calls))
    with timing.without_gc():
        for number in range(passes):
            shuffled.shuffle(order)
            for place, tokens in enumerate(order):
                for name in turns[(place + number) % len(turns)]:
                    for what, ms in take(calls[name], cases[tokens]).items():
                        key = f"{'seen' if number else 'new'}, {what}"
                        samples.setdefault(key, {}).setdefault(name, []).append(ms)
    return {key: {name: timing.described(ms) for name, ms in of.items()} for key, of in samples.items()}


def run(kernel: ModuleType, block: Block, name: str, backward: bool, first: int, smoke: bool) -> List[dict]:
    """One op in one direction around one number of tokens; first 0: decoding, whose few sizes all count as seen."""
    count, every = (6, 3) if smoke else (SIZES, WARM_EVERY)
    tokens = DECODE_TOKENS if not first else [first + STEP * i for i in range(count)]
    between = DECODE_TOKENS if not first else [first + 1 + STEP * i for i in range(0, count, every)]
    op = make_op(kernel, name, block, decode=not first)
    columns = block.layer.hidden if name == "grouped_mlp" else block.layer.preact_width
    cases = {t: make_case(block.layer, t, columns) for t in tokens}
    calls = {provider: make_call(op, provider, backward) for provider in op.functions}
    errors = check(op, calls, make_case(block.layer, between[-1], columns), backward)
    warm = [cases[t] if not first else make_case(block.layer, t, columns) for t in between]
    times = measure(calls, cases, 2 if smoke else PASSES if first else 20, warm)
    cell = {"name": title(name, backward, first), "op": name, "backward": backward, "tokens": first}
    if not first:
        times = {key: entries for key, entries in times.items() if key.startswith("seen")}
    wrong = [n for n, e in errors.items() if not all(error < MAX_ERROR[torch.bfloat16] for error in e.values())]
    return [{**cell, "sizes": len(tokens), "times": times, "errors": errors, "wrong": wrong, "skipped": {}}]


def title(name: str, backward: bool, first: int) -> str:
    """An op, its direction and its numbers of tokens."""
    return f"{name} {'step' if backward else 'forward'} T={f'{first}+{STEP}i' if first else '1..8'}"


def ratios(cell: dict) -> str:
    """New over seen of ours, and ours over each peer's, for the wall and the host's time."""
    said = []
    for what in ("wall", "host"):
        new, seen = (cell["times"].get(f"{age}, {what}", {}) for age in ("new", "seen"))
        if OURS in new:
            said.append(f"{what}: new / seen {new[OURS]['median_ms'] / seen[OURS]['median_ms']:.2f}")
        for age, entries in (("new", new), ("seen", seen)):
            for peer in entries.keys() - {OURS}:
                said.append(f"{age}, of {peer}'s {what} {entries[OURS]['median_ms'] / entries[peer]['median_ms']:.2f}")
    return ", ".join(said)


def main(argv: Optional[Sequence[str]] = None) -> dict:
    arguments: argparse.Namespace = make_parser(__doc__, budget=900).parse_args(argv)
    kernel, block = load_kernel(), make_block(SMOKE if arguments.smoke else QWEN3_30B, DEVICE)
    cases = [(op, backward, first) for first in FIRST for op in OPS for backward in (False, True)]
    if arguments.smoke:
        cases = [(op, backward, 8) for op, backward, first in cases if first == FIRST[0]]
    tasks = [
        Task(title(*case), lambda case=case: run(kernel, block, *case, arguments.smoke))
        for case in [(OPS[0], False, 0), *cases]
    ]
    results = main_of("new_shapes", arguments, kernel, tasks)
    for cell in results["cells"]:
        print(f"{cell['name']}: {ratios(cell)}")
    return results


if __name__ == "__main__":
    main()
