"""A problem that several providers solve, and how it is run: results checked first, then times taken in turn."""

import argparse
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import timing
import torch
from machine import first_line
from timing import Call
from torch import Tensor

OURS = "ours"
# Parts of training. dgrad, wgrad: the backward alone, of a graph that is kept. It runs on the stream of its forward, so
# it can't be captured.
FORWARD, DGRAD, WGRAD, STEP = "forward", "dgrad", "wgrad", "step"
# Relative error in norm of a result against fp32. A lost row or term is far above.
MAX_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
NOT_CAPTURED = "is timed eagerly alone"
GROUPS_AT_A_TIME = 16  # of the reference in fp32
FIRST_SECONDS = 200.0  # for a first call, which may compile or tune


class Unsupported(Exception):
    """What a provider cannot do, which is why it is absent from a cell."""


class Inputs(NamedTuple):
    """One set: what the output is made of, first the layer's input and last its weights; the output's gradient.

    A step differentiates the leaves that require a gradient.
    """

    leaves: Sequence[Tensor]
    dout: Tensor


class Provider(NamedTuple):
    """forward(i, *leaves): the output on input set i. rows: how many it writes in set 0, None for all."""

    forward: Callable[..., Tensor]
    sets: Sequence[Inputs]
    rows: Optional[int] = None


class Problem(NamedTuple):
    """One cell of a benchmark.

    described: what identifies it in the JSON, its name included. reference(first, *leaves): what the experts from
    `first` on, whose weights it gets, add to the output of input set 0. names: of the leaves. shared: how many leaves,
    the first ones, all experts share; in a step they require gradients. absent: why some providers are not here.
    baselines: calls that compute something else, which are timed beside and not checked. eager_only: providers that
    are not captured. unjudged: names of gradients whose errors are reported only. frozen: parameters that are no
    leaves. max_errors: of providers that may be further off.
    """

    described: dict
    providers: Dict[str, Provider]
    parts: Sequence[str]
    reference: Callable[..., Tensor]
    names: Sequence[str]
    shared: int
    absent: Dict[str, str] = {}
    baselines: Dict[str, Call] = {}
    eager_only: Sequence[str] = ()
    unjudged: Sequence[str] = ()
    frozen: Sequence[Tensor] = ()
    max_errors: Dict[str, float] = {}

    @property
    def sets(self) -> int:
        """How many input sets there are."""
        return max((len(provider.sets) for provider in self.providers.values()), default=1)


def trained(leaves: Sequence[Tensor]) -> List[Tensor]:
    """Those that require a gradient."""
    return [leaf for leaf in leaves if leaf.requires_grad]


def make_call(provider: Provider, part: str) -> Call:
    """call(i) on input set i: (out,) without a graph, gradients, or (out, gradients of the leaves that require one)."""
    forward, sets = provider.forward, provider.sets

    def call(i: int) -> Sequence[Tensor]:
        leaves, dout = sets[i % len(sets)]
        if part == FORWARD:
            with torch.no_grad():
                return (forward(i % len(sets), *leaves),)
        out = forward(i % len(sets), *leaves)
        return (out, *torch.autograd.grad(out, trained(leaves), dout))

    if part in (FORWARD, STEP):
        return call
    leaves = [leaf.detach() for leaf in sets[0].leaves]
    wanted = [leaf.requires_grad_() for leaf in (leaves[:1] if part == DGRAD else leaves[1:])]
    out = forward(0, *leaves)
    return lambda _: torch.autograd.grad(out, wanted, sets[0].dout, retain_graph=True)


def expected(problem: Problem, backward: bool) -> List[Tensor]:
    """The output and, of a step, the gradients of input set 0's trained leaves in fp32, a few experts at a time."""
    leaves, dout = next(iter(problem.providers.values())).sets[0]
    shared = [leaf.detach().float().requires_grad_(backward) for leaf in leaves[: problem.shared]]
    sums, of_weights = [], []
    for first in range(0, len(leaves[-1]), GROUPS_AT_A_TIME):
        some = [leaf.detach()[first : first + GROUPS_AT_A_TIME].float() for leaf in leaves[problem.shared :]]
        for leaf, weight in zip(leaves[problem.shared :], some):
            weight.requires_grad_(backward and leaf.requires_grad)
        out = problem.reference(first, *shared, *some)
        results, wanted = [out.detach()], trained([*shared, *some])
        if wanted and out.requires_grad:  # else none of these experts has a row
            results += torch.autograd.grad(out, wanted, dout.float())
        else:
            results += [torch.zeros_like(leaf) for leaf in wanted]
        count = 1 + problem.shared
        sums = [a + b for a, b in zip(sums, results)] if sums else results[:count]
        of_weights.append(results[count:])
    return [*sums, *(torch.cat(column) for column in zip(*of_weights))]


def check(problem: Problem, name: str, wanted: List[Tensor]) -> Tuple[Dict[str, float], bool]:
    """||got - want|| / ||want|| of output and gradients, absolute where want is 0, and whether all are small."""
    provider, errors = problem.providers[name], {}
    names = ("out", *(f"d_{name}" for name, leaf in zip(problem.names, provider.sets[0].leaves) if leaf.requires_grad))
    results = make_call(provider, STEP if len(wanted) > 1 else FORWARD)(0)
    if len(results) > len(wanted):  # a gradient for each expert
        results = [*results[: len(wanted) - 1], torch.stack(results[len(wanted) - 1 :])]
    for place, (what, got, want) in enumerate(zip(names, results, wanted)):
        rows = provider.rows if place <= problem.shared else None
        error = (got[:rows].float() - want[:rows]).norm() / (want[:rows].norm().item() or 1.0)
        errors[what] = error.item()
    most = problem.max_errors.get(name, MAX_ERROR[results[0].dtype])
    return errors, all(error < most for what, error in errors.items() if what not in problem.unjudged)


def start(problem: Problem) -> dict:
    """The cell without times. Providers whose first call fails leave the problem."""
    cell = {**problem.described, "times": {}, "skipped": dict(problem.absent), "errors": {}, "wrong": []}
    wanted = expected(problem, backward=STEP in problem.parts)
    for name in list(problem.providers):
        try:
            with timing.time_box(FIRST_SECONDS):
                cell["errors"][name], good = check(problem, name, wanted)
                timing.synchronize()
        except Exception as error:  # of any library: the other providers go on
            cell["skipped"][name] = first_line(error)
            del problem.providers[name]
            continue
        cell["wrong"] += [] if good else [name]
    return cell


def measure_memory(problem: Problem) -> dict:
    """Peak of a call of the last part, and what the forward of a step saves for the backward, in MiB by provider."""
    calls = {name: make_call(provider, problem.parts[-1]) for name, provider in problem.providers.items()}
    peak = {name: timing.peak_mib(call) for name, call in {**calls, **problem.baselines}.items()}
    saved = {}
    for name, (forward, (first, *_), _) in problem.providers.items():
        if problem.parts[-1] == STEP:
            parameters = [*first.leaves[problem.shared :], *problem.frozen]
            saved[name] = timing.saved_mib(lambda f=forward, s=first: f(0, *s.leaves), parameters)
    return {"peak_mib": peak, "saved_mib": saved}


def run_group(
    problems: List[Problem], ways: Sequence[str], arguments: argparse.Namespace, memory: bool = False
) -> List[dict]:
    """The cells of problems that take turns with each other, provider by provider."""
    cells = [start(problem) for problem in problems]
    for cell, problem in zip(cells, problems):
        cell.update(measure_memory(problem) if memory else {})
    for way in ways:
        for part in problems[0].parts:
            if way == timing.GRAPH and part not in (FORWARD, STEP):
                continue
            measure, calls = timing.measure_of(part, way), {}
            for number, (cell, problem) in enumerate(zip(cells, problems)):
                made = {name: make_call(provider, part) for name, provider in problem.providers.items()}
                for name, call in {**made, **problem.baselines}.items():
                    if way == timing.GRAPH and name in problem.eager_only:
                        cell["skipped"][f"{name}, {measure}"] = NOT_CAPTURED
                        continue
                    try:
                        calls[number, name] = timing.capture(call, problem.sets) if way == timing.GRAPH else call
                    except Exception as error:  # a peer that waits for the device can't be captured
                        cell["skipped"][f"{name}, {measure}"] = first_line(error)
            for (number, name), entry in timing.described_in_turn(calls, timing.plan_of(arguments), way).items():
                cells[number]["times"].setdefault(measure, {})[name] = entry
            del calls
            timing.release_memory()  # graphs have memory pools of their own
    return cells
