"""Timing in turn, peak memory, CUDA graphs and time limits: nothing here knows what is measured."""

import contextlib
import gc
import math
import signal
import statistics
import time
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, TypeVar

import torch
from torch import Tensor

Call = Callable[[int], Sequence[Tensor]]
Name = TypeVar("Name")


class Plan(NamedTuple):
    """How long to measure: seconds of warming up, rounds, seconds that a sample takes if so many calls are enough.

    least_calls: in a sample, however long they take; several in a row let the host run ahead of the GPU.
    """

    warm_seconds: float = 0.4
    rounds: int = 9
    sample_seconds: float = 5e-3
    most_calls: int = 64
    least_calls: int = 1


def capture(call: Call, sets: int) -> Call:
    """The call as one CUDA graph per input set."""
    graphs, results = [], []
    for i in range(sets):
        call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(call(i))
        graphs.append(graph)

    def replay(i: int) -> Sequence[Tensor]:
        graphs[i % sets].replay()
        return results[i % sets]

    return replay


@contextlib.contextmanager
def time_box(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after so many seconds, or after those of a box around this one."""

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


def issue(call: Call, calls: int, cuda: bool) -> float:
    """ms per call that the host takes to issue so many calls in a row to an idle GPU, without waiting for their end."""
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(calls):
        call(i)
    return (time.perf_counter() - start) * 1e3 / calls


def sample(call: Call, calls: int, cuda: bool) -> float:
    """ms per call over so many calls in a row, by CUDA events on a GPU.

    One more call goes before the first event: else the GPU would wait for the host to issue the first, which counts
    against long host times once per sample, however much of them the calls hide.
    """
    if not cuda:
        return issue(call, calls, cuda)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(0)
    start.record()
    for i in range(calls):
        call(i)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def orders(names: Sequence[Name]) -> List[List[Name]]:
    """Orders in each of which all take part once, and within which each follows each other one equally often.

    On a card at its power limit the one before decides at what clock a call runs: turns that only begin with another
    one leave most the same neighbour. The square of Williams (1949); for an odd number its rows in turn with the same
    ones backwards.
    """
    n = len(names)
    first = [(i + 1) // 2 if i % 2 else -(i // 2) % n for i in range(n)]
    rows = [[names[(place + shift) % n] for place in first] for shift in range(n)]
    return [turn for row in rows for turn in (row, row[::-1])] if n % 2 else rows


def time_in_turn(
    calls: Dict[str, Call],
    plan: Plan,
    seconds: float,
    cuda: bool,
    sampler: Callable[[Call, int, bool], float] = sample,
) -> Dict[str, dict]:
    """Median, min and max ms of each, over as many rounds as planned or a few more, so that all `orders` come up alike.

    A round takes all in turn, after a sample of the first one that does not count. Ends early when so many seconds are
    over, but only where all orders have come up alike. sampler: `sample` or `issue`.
    """
    names, turns, counts = list(calls), orders(list(calls)), {}
    times: Dict[str, List[float]] = {name: [] for name in names}
    deadline = time.monotonic() + seconds
    warm_until = time.monotonic() + plan.warm_seconds
    while time.monotonic() < warm_until or not counts:
        for name in names:
            per_call = sampler(calls[name], 4, cuda)
            enough = plan.sample_seconds * 1e3 / max(per_call, 1e-6)
            counts[name] = max(plan.least_calls, math.ceil(min(enough, plan.most_calls)))
    gc.collect()
    gc.disable()
    try:
        for done in range(-(-plan.rounds // len(turns)) * len(turns)):
            place = done % len(turns)
            if done and place == 0 and time.monotonic() > deadline:
                break
            turn = turns[place]
            sampler(calls[turn[0]], 1, cuda)
            for name in turn:
                times[name].append(sampler(calls[name], counts[name], cuda))
    finally:
        gc.enable()
    return {
        name: {
            "median_ms": statistics.median(times[name]),
            "min_ms": min(times[name]),
            "max_ms": max(times[name]),
            "rounds": len(times[name]),
            "calls_per_round": counts[name],
        }
        for name in names
    }


def peak_mib(call: Call, cuda: bool) -> Optional[float]:
    """MiB that a call allocates at its peak, results included; None off the GPU."""
    if not cuda:
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call(0)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del results
    return peak / 2**20


def saved_mib(forward: Callable[[], Tensor], parameters: Sequence[Tensor]) -> float:
    """MiB that a forward keeps for the backward: unique storages, parameters left out and inputs not."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: Dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out
    return sum(kept.values()) / 2**20
