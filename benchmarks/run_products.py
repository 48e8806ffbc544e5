"""The products of a training step one by one, next to cuBLAS, which pads and gathers nothing.

    python benchmarks/run_products.py --output benchmarks/results/products_h200.json [--only gpt-oss T=8192] [--smoke]

dense: one product over all rows, with one weight for all. batched: `torch.bmm`, one weight per expert and equally many
rows for each, in place. ours: the kernels of a step with random routing, gathers, activation and ragged rows included;
the pass that sorts dout's rows for the dgrad on Hopper, combines and routing are apart. All run in turn within one
trace of PyTorch's profiler, after a second of the same, so that the card is hot for all of them.
"""

import argparse
import statistics
import time
from collections import defaultdict
from types import ModuleType
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from machine import DEVICE, Task, load_kernel, main_of, make_parser
from providers import OURS, make_block, make_call, make_ours
from torch.profiler import ProfilerActivity, profile
from workload import GPT_OSS, LAYERS, OLMOE, QWEN3_30B, SMOKE, Cell, Layer, make_inputs

UP, DOWN, DGRAD, DX, WGRAD_UP, WGRAD_DOWN = PRODUCTS = ("up", "down", "dgrad", "dx", "wgrad up", "wgrad down")
REST = "combine, sort, routing, sums"
# What the names of our kernels hold, in the order of a step.
KERNELS = (
    (UP, "up_proj"), (DOWN, "gemm"), (DGRAD, "down_dgrad"), (DX, "gemm"), (WGRAD_UP, "wgrad"), (WGRAD_DOWN, "wgrad"),
)  # fmt: skip
CALLS = 2  # of one provider in a row
LEAST_ROUNDS = 3

Span = Tuple[str, float]  # a kernel's name and microseconds


def cells(smoke: bool) -> List[Cell]:
    """In order of importance."""
    if smoke:
        return [Cell(SMOKE, 64, backward=True)]
    few = [Cell(layer, 8192, backward=True) for layer in (QWEN3_30B, OLMOE, GPT_OSS)]
    return (
        few
        + [Cell(layer, 16384, backward=True) for layer in (QWEN3_30B, GPT_OSS)]
        + [Cell(layer, 8192, backward=True) for layer in LAYERS if layer not in (QWEN3_30B, OLMOE, GPT_OSS)]
    )


def flops(cell: Cell, product: str) -> float:
    """Of the rows there are."""
    wide = 2 if product in (UP, DX, WGRAD_UP) else 1
    return 2.0 * wide * cell.tokens * cell.layer.top_k * cell.layer.hidden * cell.layer.intermediate


def cublas(layer: Layer, rows: int, batch: Optional[int], device: str) -> Dict[str, Callable]:
    """The products over so many rows, of one weight or, with a batch, of one per expert."""
    shape, h, i = (() if batch is None else (batch,)), layer.hidden, layer.intermediate

    def make(*sizes: int) -> torch.Tensor:
        return torch.randn((*shape, *sizes), device=device, dtype=torch.bfloat16)

    rows //= batch or 1
    up, down, x, p, a = make(2 * i, h), make(h, i), make(rows, h), make(rows, 2 * i), make(rows, i)
    pairs = ((x, up.mT), (a, down.mT), (x, down), (p, up), (p.mT, x), (x.mT, a))
    return {name: lambda pair=pair: torch.matmul(*pair) for name, pair in zip(PRODUCTS, pairs)}


def by_call(spans: Sequence[Span], calls: int, rounds: int) -> List[List[List[Span]]]:
    """[call][round * CALLS + repetition]: the kernels of every call, of all in the order of their start.

    Before each call runs a kernel that does nothing. Raises RuntimeError if one of those is missing.
    """
    groups: List[List[Span]] = []
    for span in spans:
        if "spin_kernel" in span[0]:
            groups.append([])
        elif groups:
            groups[-1].append(span)
    if len(groups) != rounds * calls * CALLS:
        raise RuntimeError(f"the trace has {len(groups)} calls of {rounds * calls * CALLS}")
    found: List[List[List[Span]]] = [[] for _ in range(calls)]
    for number, group in enumerate(groups):
        found[number // CALLS % calls].append(group)
    return found


def trace(calls: Sequence[Callable], rounds: int, seconds: float) -> List[List[List[Span]]]:
    """`by_call` of calls that take turns.

    Ends early, but not before LEAST_ROUNDS, when so many seconds are over.
    """
    deadline, done = time.monotonic() + seconds, 0
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        while done < rounds and (done < LEAST_ROUNDS or time.monotonic() < deadline):
            done += 1
            for call in calls:
                for _ in range(CALLS):
                    torch.cuda._sleep(1)
                    call()
            torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return by_call([(event.name, event.time_range.elapsed_us()) for event in events], len(calls), done)


def products_of(step: List[Span]) -> Iterator[Span]:
    """Our kernels of one step by product; all others as the rest."""
    left = list(KERNELS)
    for name, taken in step:
        product = next(((p, part) for p, part in left if part in name), None)
        if product is not None:
            left.remove(product)
        yield (REST if product is None else product[0]), taken


def total(step: List[Span]) -> Dict[str, float]:
    """Microseconds by product."""
    sums: Dict[str, float] = defaultdict(float)
    for product, taken in products_of(step):
        sums[product] += taken
    return sums


def prepare(kernel: ModuleType, cell: Cell) -> List[Callable]:
    """A step, then the dense and the batched products, each called once."""
    torch.manual_seed(0)
    block, sets = make_block(cell.layer, DEVICE), [make_inputs(cell, DEVICE)]
    step = make_call(make_ours(kernel, block), block, sets, cell.backward)
    rows = cell.tokens * cell.layer.top_k
    dense, batched = (cublas(cell.layer, rows, batch, DEVICE) for batch in (None, cell.layer.experts))
    calls = [lambda: step(0), *dense.values(), *batched.values()]
    for call in calls:
        call()
    return calls


def measure(kernel: ModuleType, cell: Cell, arguments: argparse.Namespace) -> List[dict]:
    """Median ms of every product, by provider."""
    calls, found = prepare(kernel, cell), {**cell.described(), "times": {}, "skipped": {}}
    if DEVICE != "cuda":
        return [{**found, "skipped": {"all": "needs a GPU"}}]
    until = time.monotonic() + arguments.warm_seconds
    while time.monotonic() < until:
        for call in calls:
            call()
        torch.cuda.synchronize()
    ours, *others = trace(calls, arguments.rounds, arguments.seconds)
    steps = [total(one) for one in ours]
    lost = [name for name in PRODUCTS if not all(one[name] for one in steps)]
    if lost:
        raise RuntimeError(f"no kernel of ours for {', '.join(lost)}")
    for name in (*PRODUCTS, REST):
        found["times"][name] = {OURS: {"median_ms": statistics.median(one[name] for one in steps) / 1e3}}
    for number, calls_of in enumerate(others):
        name, provider = PRODUCTS[number % len(PRODUCTS)], ("dense", "batched")[number // len(PRODUCTS)]
        median = statistics.median(sum(taken for _, taken in one) for one in calls_of) / 1e3
        found["times"][name][provider] = {"median_ms": median}
    return [{**found, "flops": {name: flops(cell, name) for name in PRODUCTS}}]


def main(argv: Optional[Sequence[str]] = None) -> dict:
    parser = make_parser(__doc__, budget=120, seconds=5.0)
    parser.set_defaults(warm_seconds=1.0)
    arguments, kernel = parser.parse_args(argv), load_kernel()
    tasks = [Task(str(c), lambda c=c: measure(kernel, c, arguments)) for c in cells(arguments.smoke)]
    return main_of("products", arguments, kernel, tasks)


if __name__ == "__main__":
    main()
