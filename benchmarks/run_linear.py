"""grouped_linear next to a loop over groups and PyTorch's grouped_mm: forward, dgrad, wgrad, step; eager and as graphs.

python benchmarks/run_linear.py --output benchmarks/results/linear_h200.json [--only G=8 zipf] [--smoke]
"""

import argparse
import gc
import math
from itertools import accumulate
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from machine import DEVICE, Task, load_kernel, main_of, make_parser
from problems import Problem, run_group
from providers import GROUPED, MAX_ERROR, OURS
from timing import EAGER, GRAPH, Call
from torch import Tensor
from torch.nn import functional as F
from workload import LinearCell

LOOP = "loop"
SHAPES = ((4096, 14336), (7168, 4096), (2048, 1536))  # K, N: Mixtral, DeepSeek-V3, Qwen3-30B-A3B
GROUPS = (8, 32, 128)
PATTERNS = ("zipf", "half", "balanced")
FORWARD, DGRAD, WGRAD, STEP = PARTS = ("forward", "dgrad", "wgrad", "step")


def cells(smoke: bool) -> List[LinearCell]:
    """First the smallest shape, then the shapes with the group counts of their models. Equal weights are in a row."""
    if smoke:
        return [LinearCell(3, 32, 48, *case) for case in ((96, "zipf"), (96, "half"), (5, "balanced"), (5, "half"))]
    first = [*((groups, SHAPES[-1]) for groups in GROUPS), *zip(GROUPS, SHAPES[:-1])]
    rest = [(groups, shape) for groups in GROUPS for shape in SHAPES if (groups, shape) not in first]
    rest.sort(key=lambda pair: pair[0] * math.prod(pair[1]))
    return [LinearCell(g, *shape, rows, p) for g, shape in first + rest for rows in (65536, 4096) for p in PATTERNS]


def grouped_mm() -> Callable:
    """PyTorch's, by its public name where it has one."""
    return getattr(F, "grouped_mm", None) or torch._grouped_mm


class Provider(NamedTuple):
    """forward(x, weights) gives the rows of groups, with or without padding; dout has as many rows.

    weights: one per group, or all in one tensor. zeros: whether padding is written as 0.
    """

    forward: Callable[[Tensor, Sequence[Tensor]], Tensor]
    weights: Tuple[Tensor, ...]
    dout: Tensor
    zeros: bool = False


def make_providers(
    kernels: Dict[str, ModuleType], cell: LinearCell, weight: Tensor, dout: Tensor
) -> Dict[str, Provider]:
    """What is compared. The peers get their form of the splits, and views of the weight, for nothing.

    ours: sizes on the device; padding is written as 0. loop: sizes on the host; padding is left out of the output,
    which favours it. grouped_mm: offsets on the device; padding is left unwritten, in the output and in x's gradient.
    """
    sizes, function = cell.sizes(), grouped_mm()
    used, padding = sum(sizes), cell.rows - sum(sizes)
    splits = torch.tensor(sizes, device=weight.device)
    offsets = torch.tensor(list(accumulate(sizes)), device=weight.device, dtype=torch.int32)

    def loop(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        parts = x.split([*sizes, padding] if padding else sizes)
        return torch.cat([F.linear(part, w) for part, w in zip(parts, weights)])

    def ours(kernel: ModuleType) -> Provider:
        return Provider(lambda x, w: kernel.grouped_linear(x, w[0], splits), (weight,), dout, zeros=True)

    return {
        **{name: ours(kernel) for name, kernel in kernels.items()},
        LOOP: Provider(loop, tuple(weight), dout[:used]),
        GROUPED: Provider(lambda x, w: function(x, w[0].transpose(-2, -1), offs=offsets), (weight,), dout),
    }


def make_call(provider: Provider, x: Tensor, part: str) -> Call:
    """One part of training as a call. dgrad, wgrad: the backward alone, of a graph that is kept between calls."""
    x = x.detach().requires_grad_(part in (DGRAD, STEP))
    weights = [w.detach().requires_grad_(part in (WGRAD, STEP)) for w in provider.weights]
    leaves = [tensor for tensor in (x, *weights) if tensor.requires_grad]

    def forward(_: int) -> Sequence[Tensor]:
        with torch.no_grad():
            return (provider.forward(x, weights),)

    def step(_: int) -> Sequence[Tensor]:
        out = provider.forward(x, weights)
        return (out, *torch.autograd.grad(out, leaves, provider.dout))

    if part in (FORWARD, STEP):
        return forward if part == FORWARD else step
    out = provider.forward(x, weights)
    return lambda _: torch.autograd.grad(out, leaves, provider.dout, retain_graph=True)


def check(provider: Provider, cell: LinearCell, x: Tensor, weight: Tensor) -> Tuple[Dict[str, float], bool]:
    """||got - want|| / ||want|| of output and gradients against fp32, in the first, last, smallest and largest group.

    The worst of them, absolute where want is 0. Of ours, also how many numbers in the padding are not 0.
    """
    out, dx, *grads = make_call(provider, x, STEP)(0)
    dw, sizes = grads[0] if len(provider.weights) == 1 else grads, cell.sizes()
    errors: Dict[str, List[float]] = {"out": [], "dx": [], "dw": []}
    for group in {0, cell.groups - 1, sizes.index(min(sizes)), sizes.index(max(sizes))}:
        start, end = sum(sizes[:group]), sum(sizes[: group + 1])
        rows, w, dy = x[start:end].float(), weight[group].float(), provider.dout[start:end].float()
        results = rows @ w.t(), dy @ w, dy.t() @ rows
        for name, got, want in zip(errors, (out[start:end], dx[start:end], dw[group]), results):
            errors[name].append((got.float() - want).norm().item() / (want.norm().item() or 1.0))
    worst = {name: torch.tensor(values).max().item() for name, values in errors.items()}  # keeps NaN, max() may not
    if provider.zeros:
        worst["padding"] = sum(rows[sum(sizes) :].count_nonzero().item() for rows in (out, dx))
    return worst, all(error < MAX_ERROR[x.dtype] for error in worst.values())


class Linear:
    """Makes the problems of cells; keeps the weight, which cells of the same groups and shape share."""

    def __init__(self, kernels: Dict[str, ModuleType], peers: bool = True) -> None:
        self.kernels, self.peers, self.weight = kernels, peers, torch.empty(0)

    def problem(self, cell: LinearCell) -> Problem:
        """Unit-scale inputs; the weight is divided by the root of its fan-in."""
        torch.manual_seed(0)
        shape, options = (cell.groups, cell.n, cell.k), {"device": DEVICE, "dtype": torch.bfloat16}
        if self.weight.shape != shape:
            self.weight = torch.empty(0)
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()  # a loop leaves blocks of other sizes
            self.weight = torch.randn(shape, **options).div_(math.sqrt(cell.k))
        x, dout = torch.randn((cell.rows, cell.k), **options), torch.randn((cell.rows, cell.n), **options)
        providers = make_providers(self.kernels, cell, self.weight, dout)
        providers = {name: p for name, p in providers.items() if self.peers or name in self.kernels}
        calls = {part: {name: make_call(p, x, part) for name, p in providers.items()} for part in PARTS}
        return Problem(
            cell.described(), calls, lambda name: check(providers[name], cell, x, self.weight), {},
            eager_only=(LOOP,),
        )  # fmt: skip


def task(linear: Linear, cell: LinearCell, arguments: argparse.Namespace) -> Task:
    """Everything about one cell."""
    return Task(str(cell), lambda: run_group([linear.problem(cell)], (EAGER, GRAPH), arguments))


def main(argv: Optional[Sequence[str]] = None) -> dict:
    arguments = make_parser(__doc__, budget=900, seconds=1.0).parse_args(argv)
    kernel = load_kernel()
    linear = Linear({OURS: kernel})
    return main_of("linear", arguments, kernel, [task(linear, cell, arguments) for cell in cells(arguments.smoke)])


if __name__ == "__main__":
    main()
