"""Timing in turn, CUDA graphs, memory and time limits. Nothing here knows what is measured."""

import argparse
import contextlib
import gc
import math
import signal
import statistics
import time
from typing import Callable, Dict, Hashable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor

Call = Callable[[int], Sequence[Tensor]]
Made = TypeVar("Made")

# How a call is measured: by events around calls in a row, as replays of a CUDA graph, as the host's time to issue it.
EAGER, GRAPH, HOST = "eager", "graph", "host"
HOST_CALLS = 50  # issued in a row to an idle GPU; more could fill its queue


class Plan(NamedTuple):
    """How long to measure. rounds: of all in turn. seconds: after which no further set of orders begins.

    A sample takes sample_seconds if that is between least_calls and most_calls calls.
    """

    warm_seconds: float = 0.3
    rounds: int = 7
    seconds: float = 2.0
    sample_seconds: float = 5e-3
    least_calls: int = 1
    most_calls: int = 64


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan that the options of a benchmark ask for."""
    if arguments.smoke:
        return Plan(0.0, 2, 0.0, 1e-4, 1, 2)
    return Plan(rounds=arguments.rounds, seconds=arguments.seconds)


def graph_of(
    function: Callable[[], Made], stream: Optional[torch.cuda.Stream] = None
) -> Tuple[torch.cuda.CUDAGraph, Made]:
    """(CUDA graph of a call, what the call returned), after a call that compiles.

    Both are on one stream, a new one unless it is given: a backward runs on the stream of its forward.
    """
    stream, graph = stream or torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        made = function()
    return graph, made


def capture(call: Call, sets: int) -> Call:
    """The call as one CUDA graph per input set; without CUDA the call itself."""
    if not torch.cuda.is_available():
        return call
    stream = torch.cuda.Stream()  # memory of calls is kept for each stream
    graphs = [graph_of(lambda i=i: [tensor.detach() for tensor in call(i)], stream) for i in range(sets)]

    def replay(i: int) -> Sequence[Tensor]:
        graph, results = graphs[i % sets]
        graph.replay()
        return results

    return replay


@contextlib.contextmanager
def time_box(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after `seconds`, or when an enclosing box expires."""

    def expire(*_) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    begun = time.monotonic()
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, max(min(seconds, left or seconds), 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 1e-3))


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """The block runs after a collection of garbage and without one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release_memory() -> None:
    """What nobody holds any more goes back to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def issue(call: Call, calls: int) -> float:
    """ms per call that the host takes to issue `calls` calls to an idle GPU, without waiting for their end."""
    synchronize()
    start = time.perf_counter()
    for i in range(calls):
        call(i)
    return (time.perf_counter() - start) * 1e3 / calls


def sample(call: Call, calls: int) -> float:
    """ms per call over `calls` calls in a row, by CUDA events on a GPU.

    One untimed call goes before the first event. Otherwise the GPU would wait for the host to issue the first timed
    call, and that wait would count once per sample.
    """
    if not torch.cuda.is_available():
        return issue(call, calls)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(0)
    start.record()
    for i in range(calls):
        call(i)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def orders(names: Sequence[Hashable]) -> List[List[Hashable]]:
    """Orders of all names in which each name follows each other name equally often (Williams, 1949).

    On a card at its power limit the previous call decides the clock at which a call runs. Rotating one order would
    leave most calls the same neighbour. An odd number of names needs every row backwards as well.
    """
    n = len(names)
    first = [(i + 1) // 2 if i % 2 else -(i // 2) % n for i in range(n)]
    rows = [[names[(place + shift) % n] for place in first] for shift in range(n)]
    return [turn for row in rows for turn in (row, row[::-1])] if n % 2 else rows


def time_in_turn(
    calls: Dict[Hashable, Call], plan: Plan, way: str = EAGER, agree: Callable[[float], float] = float
) -> Dict[Hashable, List[float]]:
    """Samples in ms per call, for whole sets of `orders`: at least plan.rounds, unless plan.seconds are over.

    A round takes all calls in turn, after one sample of the first call that is not counted. way: EAGER, GRAPH (calls
    that were captured) or HOST. agree: by which processes that time together wait for each other after a sample, and
    take one time for it; only a plan without limits in time has as many rounds in all of them.
    """
    if not calls:
        return {}

    def take(name: Hashable, count: int) -> float:
        return agree((issue if way == HOST else sample)(calls[name], count))

    if way == HOST:
        plan = plan._replace(sample_seconds=math.inf, most_calls=HOST_CALLS)
    names, turns, counts = list(calls), orders(list(calls)), {}
    times: Dict[Hashable, List[float]] = {name: [] for name in names}
    deadline, warm_until = time.monotonic() + plan.seconds, time.monotonic() + plan.warm_seconds
    while time.monotonic() < warm_until or not counts:
        for name in names:
            enough = plan.sample_seconds * 1e3 / max(take(name, 4), 1e-6)
            counts[name] = max(plan.least_calls, math.ceil(min(enough, plan.most_calls)))
    with without_gc():
        for done in range(-(-plan.rounds // len(turns)) * len(turns)):
            place = done % len(turns)
            if done and place == 0 and time.monotonic() > deadline:
                break
            take(turns[place][0], 1)
            for name in turns[place]:
                times[name].append(take(name, counts[name]))
    return times


def measure_of(part: str, way: str) -> str:
    """What the times of a part, taken this way, are called in the JSON."""
    return part if way == EAGER else f"{part}, {way}"


def described(samples: Sequence[float]) -> dict:
    """A provider's times as they are in the JSON."""
    spread = {"min_ms": min(samples), "max_ms": max(samples)}
    return {"median_ms": statistics.median(samples), **spread, "samples": len(samples)}


def described_in_turn(calls: Dict[Hashable, Call], *rest, **options) -> Dict[Hashable, dict]:
    """As `time_in_turn`, as it is in the JSON."""
    return {name: described(samples) for name, samples in time_in_turn(calls, *rest, **options).items()}


def allocated_by(function: Callable[[], Made]) -> Tuple[int, Made]:
    """(peak bytes on the current GPU over what was there before, result).

    A backward shortly before it has to run in the caller's thread: autograd's own may let go of gradients later.
    """
    torch.cuda.synchronize()
    release_memory()  # what was left behind would be freed in between
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


def peak_mib(call: Call) -> Optional[float]:
    """MiB that a call allocates at its peak, results included. None without a GPU."""
    return allocated_by(lambda: call(0))[0] / 2**20 if torch.cuda.is_available() else None


def saved_mib(forward: Callable[[], Tensor], parameters: Sequence[Tensor]) -> float:
    """MiB that a forward keeps for the backward: unique storages, without those of the parameters."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: Dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        # An output that is returned as it is keeps its own graph for good, and the streams of its leaves with it, on
        # which a later capture fails.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out
    return sum(kept.values()) / 2**20
