"""Random cases of every public op against the fp64 reference, for as long as you like.

    python tools/fuzz.py [--minutes 5] [--seed 0] [--device cuda] [--json FILE]
    python tools/fuzz.py --seed 7 --only 1234

A case draws sizes and routings; four in a row share dtypes, strides and options. Output and every gradient are compared
with the reference, norm-wise and by rows. A second run must give the same bits; in most cases it finds NaN in fresh
memory and in all that must not be read. Inputs, and the memory around them, must stay as they are. On a GPU some cases
are captured in a CUDA graph, which is replayed with another routing.

A case depends on the seed and its number alone, so the line that a failure prints repeats it. If it does not, the
failure depends on what ran before: --only takes a range, such as 1200-1234, too. Exits with 1 if a case failed.
"""

import argparse
import collections
import contextlib
import itertools
import sys
import textwrap
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, Optional, Tuple

import torch
from fuzz_cases import Case, Draw, draw_layer, expect
from fuzz_ops import OPS
from fuzz_roundings import Roundings, with_roundings
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("benchmarks", "tests/support")]

import compare  # noqa: E402
from compare import UNIT_ROUNDOFF, norms, tolerances  # noqa: E402
from machine import DEVICE, describe_machine, load_kernel, scrub, write  # noqa: E402
from poison import dirty_allocator, guarded, poisoned_allocations  # noqa: E402
from timing import capture  # noqa: E402

# Many, as each layer compiles kernels of its own on a GPU, and so do an op's options: dtypes, strides, what is wanted.
CASES_PER_LAYER, CASES_PER_OPTIONS = 100, 4
# How often a case is run with random roundings, and how many standard deviations beyond the mean of their errors an
# error may be: first a few, which most are within. The package's roundings have half the variance, so that an error of
# a single number exceeds the last limit with a probability of 1e-9, that of Student's t.
STAGES = ((8, 3), (32, 6))


def make_case(seed: int, number: int, device: str) -> Case:
    layer = draw_layer(Draw(f"{seed}/layer/{number // CASES_PER_LAYER}"), device)
    draw = Draw(f"{seed}/options/{number // CASES_PER_OPTIONS}", numbers=Draw(f"{seed}/case/{number}"))
    (name,) = draw.choices(list(OPS), [share for _, share in OPS.values()])
    return Case(OPS[name][0], layer, draw, device, op=name)


def lay(tensor: Tensor, layout: str) -> Tensor:
    """A copy in memory of this layout; before, between and after its elements is NaN or, among integers, 99."""
    if layout == "transposed" and tensor.dim() > 1:
        return lay(tensor.transpose(-1, -2), "plain").transpose(-1, -2)
    if layout == "turned" and tensor.dim() > 2:  # the first dimension lies where the last one did: as peft stores b
        return lay(tensor.movedim(0, -1), "plain").movedim(-1, 0)
    if layout == "expanded":
        return tensor[:1].clone().expand_as(tensor)
    margin, shape = 128, list(tensor.shape)
    if layout.startswith("offset"):
        margin += int(layout[6:])
    elif layout.startswith("padded"):
        shape[-1] += int(layout[6:])
    elif layout in ("apart", "strided"):
        shape[-1 if layout == "strided" else 0] *= 2
    fill = float("nan") if tensor.is_floating_point() else 99
    view = guarded(tensor.new_full(shape, fill), fill, margin)
    view = view[..., ::2] if layout == "strided" else view[::2] if layout == "apart" else view
    return view[..., : tensor.shape[-1]].copy_(tensor)


def memory_of(tensor: Tensor) -> Tensor:
    """All of the storage that it lies in, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Trial:
    """A case on a device. reference_on: the device of the reference, if another one."""

    def __init__(self, package, case: Case, device: str, reference_on: str = "") -> None:
        self.case, self.device, self.reference_on = case, device, reference_on or device
        self.package = package
        self.call, self.want = partial(case.call, package), partial(case.expected, package.reference)
        dtypes = {name: case.dtypes.get(name, case.dtype) for name in case.values}
        self.values = {name: value.to(dtypes[name]) for name, value in case.values.items()}
        self.wide = {name: value.to(self.reference_on).double() for name, value in self.values.items()}
        self.routings = [self.lay("routing", routing) for routing in case.routings]

    def lay(self, name: str, value: Tensor) -> Tensor:
        return lay(value.to(self.device), self.case.layouts[name])

    def inputs(self, poison: Optional[float] = None) -> Dict[str, Tensor]:
        """The tensors, with poison, if there is any, in all that must not be read."""
        values = dict(self.values)
        for name, mask in self.case.dead().items() if poison is not None else ():
            if self.case.layouts[name] != "expanded":
                values[name] = values[name].clone()
                values[name][mask] = poison
        return {name: self.lay(name, value) for name, value in values.items()}

    def run(self, tensors: Dict[str, Tensor]) -> Dict[str, Tensor]:
        """The results. Fails if inputs, or what lies around them, have changed."""
        kept = {name: t for name, t in tensors.items() if name not in self.case.written}
        kept.update({f"routing {number}": routing for number, routing in enumerate(self.routings)})
        before = {name: memory_of(tensor).clone() for name, tensor in kept.items()}
        results = self.case.run(self.call, tensors, self.routings)
        for name, tensor in kept.items():
            expect(torch.equal(memory_of(tensor), before[name]), f"{name}: its memory was written to")
        return results

    def check(self) -> None:
        """Raises AssertionError if something differs, and whatever the package raises."""
        got = self.run(self.inputs())
        self.compare(got, self.routings)
        poison = self.case.draw.one(None, float("nan"), float("inf"), float("-inf"))
        is_filled = self.case.draw.chance(0.6)
        with poisoned_allocations() if is_filled else contextlib.nullcontext(dirty_allocator(self.device)):
            assert_same("second run", self.run(self.inputs(poison)), got)
        if self.case.mode == "replay":
            self.replay(got)

    def replay(self, got: Dict[str, Tensor]) -> None:
        """Captures a graph, replays it with its routing and with the other one."""
        tensors, routing = self.inputs(), self.lay("routing", self.case.routings[0])
        run = partial(self.case.run, self.call, tensors, [routing])
        replayed = capture(lambda _: list(run().values()), 1)
        assert_same("replay", dict(zip(got, replayed(0))), got)
        routing.copy_(self.routings[1])
        results = dict(zip(got, replayed(0)))
        self.compare(results, self.routings[1:])
        assert_same("replay of another routing", results, run())

    def compare(self, got: Dict[str, Tensor], routings: List[Tensor]) -> None:
        """With the reference, and where that is not close, with how far off random roundings make it."""
        case, limits = self.case, {}
        routings = [routing.to(self.reference_on) for routing in routings]
        got, want = {name: t.to(self.reference_on) for name, t in got.items()}, self.want(self.wide, routings)
        expect(got.keys() == want.keys(), f"expected {sorted(want)}, got {sorted(got)}")
        expect("out" not in got or got["out"].dtype == case.dtype, f"out: expected {case.dtype}")
        for name, tensor in got.items():
            if not tensor.is_floating_point():
                expect(torch.equal(tensor.long(), want[name].long()), f"{name}: expected {want[name]}, got {tensor}")
                continue
            allowed = self.tolerances(max(case.computed_in, tensor.dtype, key=UNIT_ROUNDOFF.get))
            message = difference(name, tensor, want[name], allowed)
            for stage in STAGES:
                if message:
                    limits[stage] = limits.get(stage) or self.limits(got, want, routings, *stage)
                    message = difference(name, tensor, want[name], allowed, *limits[stage][name])
            expect(not message, message)

    def tolerances(self, dtype: torch.dtype):
        """(norm-wise, worst-row) relative error: what eight roundings and sums in that order of length may make."""
        return tolerances(dtype, max(map(max, (t.shape for t in self.wide.values()))) * self.case.layer.top_k)

    def limits(self, got, want, routings, runs: int, deviations: float) -> Dict[str, Tuple[Tensor, Tensor]]:
        """By name, how far off a result and its rows may be by the errors of so many runs with random roundings."""
        errors = self.sample_errors(got, want, routings, runs).items()
        each = {name: (rows.norm(dim=1), rows) for name, rows in errors}
        return {name: tuple(e.mean(0) + deviations * e.std(0) for e in both) for name, both in each.items()}

    def sample_errors(self, got, want, routings: List[Tensor], runs: int) -> Dict[str, Tensor]:
        """By name (runs, rows): the errors that random roundings make, which grow with what cancels."""
        case, found = self.case, {name: [] for name in want}
        dtype = min(case.dtype, case.computed_in, key=UNIT_ROUNDOFF.get)
        roundings = Roundings(dtype, case.computed_in, self.reference_on, seed=0)
        model = with_roundings(self.package.reference, roundings)
        for _ in range(runs):
            for name, tensor in case.expected(model, self.wide, routings).items():
                found[name].append(norms(roundings.to_dtype(tensor, got[name].dtype) - want[name]))
        return {name: torch.stack(errors) for name, errors in found.items()}


def difference(name: str, got: Tensor, want: Tensor, allowed, at_least=0.0, at_least_by_row=0.0) -> str:
    """What is wrong, or nothing. NaN is always wrong.

    Rows of a few entries, which may all cancel, are measured against the rms of all rows where that is larger.
    allowed: in norm and by row, relative; a row that is 0 in want must be 0 in got. at_least, at_least_by_row: absolute
    errors that are allowed besides, also of rows that are 0: those of a relu may only just be.
    """
    expect(got.shape == want.shape, f"{name}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    if not want.numel():
        return ""
    size, entries = norms(want), want[0].numel()
    underflow = 8 * torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps * entries**0.5
    in_norm = allowed[0] * size.norm() + underflow * len(size) ** 0.5
    by_row = allowed[1] * (size.clamp_min(size.square().mean().sqrt()) if entries < 16 else size) + underflow
    by_row = torch.where(size == 0, 0.0, by_row)
    limits = (x + (y - x).clamp_min(0) for x, y in ((in_norm, at_least), (by_row, at_least_by_row)))
    return compare.difference(name, got, want, *limits)


def assert_same(what: str, got: Dict[str, Tensor], want: Dict[str, Tensor]) -> None:
    """Bitwise."""
    for name, tensor in want.items():
        same = got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
        expect(same, f"{name}: the {what} gives other bits, at {int((got[name] != tensor).sum())} places")


def failure_of(package, case: Case, device: str) -> str:
    """How the case failed and what it had drawn, or nothing."""
    try:
        Trial(package, case, device).check()
        if device == "cuda":
            torch.cuda.synchronize()
        return ""
    except Exception as error:  # a crash of any kind is a failure
        what = str(error) if type(error) is AssertionError else traceback.format_exc(limit=-6).rstrip()
    shapes = {name: tuple(value.shape) for name, value in case.values.items()}
    drawn = {"mode": case.mode, "wanted": case.wanted, "options": case.options, "layouts": case.layouts}
    return "\n".join(map(str, (what, case.layer, shapes, drawn)))


def fuzz(package, seed: int, numbers: Iterable[int], device: str, seconds: float) -> Iterator[dict]:
    """Runs cases until the time is over, prints failures. Yields the report after each case.

    Raises RuntimeError if a failure has ended this process's use of the GPU.
    """
    report = {**describe_machine(), "device": device, "seed": seed, "cases": 0, "seconds": 0.0}
    report.update({f"by_{what}": collections.Counter() for what in ("op", "dtype", "mode")}, failures=[])
    start = time.monotonic()
    for number in numbers:
        case = make_case(seed, number, device)
        failure = failure_of(package, case, device)
        for what, value in (("op", case.options["op"]), ("dtype", str(case.dtype)[6:]), ("mode", case.mode)):
            report[f"by_{what}"][value] += 1
        report["cases"] += 1
        report["seconds"] = round(time.monotonic() - start, 1)
        if failure:
            line = f"python tools/fuzz.py --seed {seed} --only {number}"
            line += "" if device == DEVICE else f" --device {device}"
            print(f"{line}\n{textwrap.indent(failure, '    ')}", flush=True)
            report["failures"].append({"line": line, "op": case.options["op"], "what": scrub(failure)})
        yield report
        if failure and device == "cuda":
            torch.cuda.synchronize()
        if time.monotonic() - start > seconds:
            return


def numbers_of(text: str) -> Iterable[int]:
    """ "12" or "12-40"."""
    first, _, last = text.partition("-")
    numbers = range(int(first), int(last or first) + 1)
    if not numbers:
        raise ValueError("no numbers")
    return numbers


def main(argv: Optional[List[str]] = None, package=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long new cases are begun (5)")
    parser.add_argument("--seed", type=int, default=0, help="what all cases are drawn from (0)")
    parser.add_argument("--only", type=numbers_of, help="run this case, or these, whatever the time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=DEVICE, help="a GPU if there is one")
    parser.add_argument("--json", type=Path, help="file for counts, versions, date and failures")
    arguments = parser.parse_args(argv)
    numbers, seconds = itertools.count(), 60 * arguments.minutes
    if arguments.only is not None:
        numbers, seconds = arguments.only, float("inf")
    for report in fuzz(package or load_kernel(), arguments.seed, numbers, arguments.device, seconds):
        write(arguments.json, report)  # after each case: a crash of the process leaves what came before it
    print(f"{report['cases']} cases in {report['seconds']:.0f} s, {len(report['failures'])} failed", flush=True)
    return int(bool(report["failures"]))


if __name__ == "__main__":
    sys.exit(main())
