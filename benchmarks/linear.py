"""grouped_linear next to a loop over groups and PyTorch's grouped_mm; GroupedLinear and grouped_mlp next to grouped_mm.

The peers get their form of the splits, and views of the weights, for nothing.
"""

import math
from types import ModuleType
from typing import Dict, List, Sequence

import torch
from experts import GROUPED
from machine import DEVICE
from problems import DGRAD, FORWARD, STEP, WGRAD, Inputs, Problem, Provider
from timing import release_memory
from torch import Tensor
from torch.nn import functional as F
from workload import LinearCell

LOOP = "loop"
SHAPES = ((4096, 14336), (7168, 4096), (2048, 1536))  # K, N: Mixtral, DeepSeek-V3, Qwen3-30B-A3B
GROUPS = (8, 32, 128)
PATTERNS = ("zipf", "half", "balanced")
OPTIONS = {"device": DEVICE, "dtype": torch.bfloat16}


def cells(smoke: bool) -> List[LinearCell]:
    """First the smallest shape, then the shapes with the group counts of their models. Equal weights are in a row."""
    if smoke:
        return [LinearCell(3, 32, 48, *case) for case in ((96, "zipf"), (96, "half"), (5, "balanced"), (5, "half"))]
    first = [*((groups, SHAPES[-1]) for groups in GROUPS), *zip(GROUPS, SHAPES[:-1])]
    rest = [(groups, shape) for groups in GROUPS for shape in SHAPES if (groups, shape) not in first]
    rest.sort(key=lambda pair: pair[0] * math.prod(pair[1]))
    return [LinearCell(g, *shape, rows, p) for g, shape in first + rest for rows in (65536, 4096) for p in PATTERNS]


def make_problem(
    kernels: Dict[str, ModuleType], weights: Sequence[Tensor], rows: Sequence[int], sizes: Sequence[Tensor], described
) -> Problem:
    """A step of grouped_linear or, with two weights, of grouped_mlp: ours and grouped_mm.

    rows, sizes: of each input set, the rows and how many each group has; the others belong to none. There ours writes 0
    and grouped_mm leaves the output and x's gradient unwritten.
    """
    mlp, reference = len(weights) == 2, next(iter(kernels.values())).reference
    ends, sets = [s.cumsum(0, dtype=torch.int32) for s in sizes], []
    for count in rows:
        x, dout = (torch.randn((count, size), **OPTIONS) for size in (weights[0].shape[2], weights[-1].shape[1]))
        inputs = (x, torch.rand(count, **OPTIONS))[: 1 + mlp]
        sets.append(Inputs([*(t.requires_grad_() for t in inputs), *weights], dout))

    def ours(kernel: ModuleType) -> Provider:
        splits = [kernel.GroupSizes(s) for s in sizes]
        if mlp:
            return Provider(lambda i, x, *rest: kernel.grouped_mlp(x, splits[i], *rest), sets)
        return Provider(lambda i, x, weight: kernel.grouped_linear(x, weight, splits[i]), sets)

    def peer(i: int, x: Tensor, *rest: Tensor) -> Tensor:
        if not mlp:
            return F.grouped_mm(x, rest[0].transpose(1, 2), offs=ends[i])
        scales, up, down = rest
        gate, value = F.grouped_mm(x, up.transpose(1, 2), offs=ends[i]).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * value * scales[:, None], down.transpose(1, 2), offs=ends[i])

    def right(first: int, x: Tensor, *rest: Tensor) -> Tensor:
        offsets = F.pad(sizes[0].cumsum(0), (1, 0))[first : first + len(rest[-1]) + 1]
        if mlp:
            return reference.grouped_mlp(x, offsets, *rest)
        return reference.grouped_linear(x, *rest, offsets)

    providers = {name: ours(kernel) for name, kernel in kernels.items()}
    providers[GROUPED] = Provider(peer, sets, rows=int(sizes[0].sum()))
    names = ("x", "scales", "gate_up_proj", "down_proj") if mlp else ("x", "weight")
    return Problem(described, providers, (STEP,), right, names, 1 + mlp)


def make_loop(inputs: Inputs, sizes: List[int]) -> Provider:
    """grouped_linear as a loop, with sizes on the host. The output has no rows of no group, which favours it."""
    (x, weight), dout = inputs
    used = sum(sizes)

    def forward(_: int, x: Tensor, *weights: Tensor) -> Tensor:
        parts = x.split([*sizes, len(x) - used])
        return torch.cat([F.linear(part, w) for part, w in zip(parts, weights)])

    weights = [w.requires_grad_() for w in weight.detach().unbind(0)]
    return Provider(forward, [Inputs((x, *weights), dout[:used])], rows=used)


def make_module(kernel: ModuleType, provider: Provider, sizes: Sequence[Tensor]) -> Provider:
    """GroupedLinear on the inputs of `grouped_linear`."""
    weight, splits = provider.sets[0].leaves[1], [kernel.GroupSizes(s) for s in sizes]
    e, n, k = weight.shape
    module = kernel.GroupedLinear(e, k, n, bias=False, **OPTIONS)
    module.load_state_dict({"weight": weight.detach()})
    sets = [Inputs((leaves[0], module.weight), dout) for leaves, dout in provider.sets]
    return Provider(lambda i, x, _: module(x, splits[i]), sets)


class Linear:
    """Makes the problems of cells; keeps the weight, which cells of the same groups and shape share."""

    def __init__(self, kernels: Dict[str, ModuleType], peers: bool = True) -> None:
        self.kernels, self.peers, self.weight = kernels, peers, torch.empty(0)

    def problem(self, cell: LinearCell) -> Problem:
        """Unit-scale inputs; the weight is divided by the root of its fan-in."""
        torch.manual_seed(0)
        shape = (cell.groups, cell.n, cell.k)
        if self.weight.shape != shape:
            self.weight = torch.empty(0)
            release_memory()  # a loop leaves blocks of other sizes
            self.weight = torch.randn(shape, **OPTIONS).div_(math.sqrt(cell.k)).requires_grad_()
        sizes = torch.tensor(cell.sizes(), device=DEVICE)
        problem = make_problem(self.kernels, [self.weight], [cell.rows], [sizes], cell.described())
        peer = problem.providers.pop(GROUPED)
        if self.peers:
            problem.providers.update({LOOP: make_loop(peer.sets[0], cell.sizes()), GROUPED: peer})
        return problem._replace(parts=(FORWARD, DGRAD, WGRAD, STEP), eager_only=(LOOP,))
