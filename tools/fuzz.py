"""Random cases of every public op against the fp64 reference, for as long as you like.

    python tools/fuzz.py [--minutes 5] [--seed 0] [--device cuda] [--json FILE]
    python tools/fuzz.py --seed 7 --only 1234

A case draws shapes, dtypes, strides, options and routings. Output and every gradient are compared with the reference,
norm-wise and by rows. A second run must give the same bits; in most cases it finds NaN in fresh memory and in all that
must not be read. Inputs, and the memory around them, must stay as they are. On a GPU some cases are captured in a CUDA
graph, which is replayed with another routing.

A case depends on the seed and its number alone, so the line that a failure prints repeats it. If it does not, the
failure depends on what ran before: --only takes a range, such as 1200-1234, too. Exits with 1 if a case failed.
"""

import argparse
import collections
import contextlib
import itertools
import json
import sys
import textwrap
import time
import traceback
import warnings
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional

import torch
from fuzz_cases import Case, Draw, draw_layer, expect
from fuzz_ops import OPS
from gpu_suite import describe_machine, scrub
from sanitize_case import load_kernel
from torch import Tensor

CASES_PER_LAYER = 100  # many, as each layer compiles kernels of its own on a GPU
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def make_case(seed: int, number: int, device: str) -> Case:
    layer = draw_layer(Draw(seed, "layer", number // CASES_PER_LAYER), device)
    draw = Draw(seed, "case", number)
    return draw.one(*OPS)(draw, layer, device)


def lay(tensor: Tensor, layout: str) -> Tensor:
    """A copy in memory of this layout; before, between and after its elements is NaN or, among integers, 99."""
    if layout == "transposed" and tensor.dim() > 1:
        return lay(tensor.transpose(-1, -2), "plain").transpose(-1, -2)
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
    count = torch.Size(shape).numel()
    memory = torch.full((count + 2 * margin,), fill, dtype=tensor.dtype, device=tensor.device)
    view = memory[margin : margin + count].view(shape)
    if layout == "strided":
        view = view[..., ::2]
    elif layout == "apart":
        view = view[::2]
    return view[..., : tensor.shape[-1]].copy_(tensor)


def memory_of(tensor: Tensor) -> Tensor:
    """All of the storage that it lies in, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within it every torch.empty is NaN, or the largest integer."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that the mode would otherwise refuse
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(False)


def dirty_allocator(device: str) -> None:
    """Fills memory of many sizes with NaN and frees it, so that the next torch.empty finds it."""
    blocks = [torch.full((2**power,), float("nan"), device=device) for power in range(20)]
    del blocks


class Trial:
    """A case on a device."""

    def __init__(self, package, case: Case, device: str) -> None:
        self.package, self.case, self.device = package, case, device
        dtypes = {name: case.dtypes.get(name, case.dtype) for name in case.values}
        self.values = {name: value.to(dtypes[name]) for name, value in case.values.items()}
        self.wide = {name: value.to(device).double() for name, value in self.values.items()}
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
        results = self.case.run(self.package, tensors, self.routings)
        for name, tensor in kept.items():
            expect(torch.equal(memory_of(tensor), before[name]), f"{name}: its memory was written to")
        return results

    def check(self) -> None:
        """Raises AssertionError if something differs, and whatever the package raises."""
        got = self.run(self.inputs())
        self.compare(got, self.routings)
        again = Draw("again", self.case.draw.random.random())
        poison = again.one(None, float("nan"), float("inf"), float("-inf"))
        if again.chance(0.6):
            with poisoned_allocations():
                assert_same("second run", self.run(self.inputs(poison)), got)
        else:
            dirty_allocator(self.device)
            assert_same("second run", self.run(self.inputs(poison)), got)
        if self.case.mode == "replay":
            self.replay(got)

    def replay(self, got: Dict[str, Tensor]) -> None:
        """Captures a graph, replays it with its routing and with the other one."""
        tensors, routing = self.inputs(), self.lay("routing", self.case.routings[0])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.case.run(self.package, tensors, [routing])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self.case.run(self.package, tensors, [routing])
        graph.replay()
        assert_same("replay", results, got)
        routing.copy_(self.routings[1])
        graph.replay()
        self.compare(results, self.routings[1:])
        assert_same("replay of another routing", results, self.case.run(self.package, tensors, [routing]))

    def compare(self, got: Dict[str, Tensor], routings: List[Tensor]) -> None:
        """With the reference, and where that is not close, with how far it moves if its inputs are rounded."""
        case, spread = self.case, None
        want = case.expected(self.package.reference, self.wide, routings)
        expect(got.keys() == want.keys(), f"expected {sorted(want)}, got {sorted(got)}")
        for name, tensor in got.items():
            if not tensor.is_floating_point():
                expect(torch.equal(tensor.long(), want[name].long()), f"{name}: expected {want[name]}, got {tensor}")
                continue
            dtype = max(case.computed_in, tensor.dtype, key=UNIT_ROUNDOFF.get)
            message = difference(name, tensor, want[name], self.tolerances(dtype))
            if message and spread is None:
                spread = self.spread(want, routings)
            if message:
                message = difference(name, tensor, want[name], self.tolerances(dtype), spread[name])
            expect(not message, message)

    def tolerances(self, dtype: torch.dtype):
        """(norm-wise, worst-row) relative error: what eight roundings and sums in that order of length may make."""
        u, terms = UNIT_ROUNDOFF[dtype], max(map(max, (t.shape for t in self.wide.values()))) * self.case.layer.top_k
        return (4 * u, 8 * u) if dtype.itemsize == 2 else (max(64, 2 * terms**0.5) * u, max(256, 8 * terms**0.5) * u)

    def spread(self, want: Dict[str, Tensor], routings: List[Tensor]) -> Dict[str, Tensor]:
        """By rows, how far the results move if the inputs are off by the tolerance: sums of few terms cancel at times.

        A few inputs, of which the sums across kinks are made, stay as they are.
        """
        found, allowed = {name: 0.0 for name in want}, self.tolerances(self.case.dtype)[0]
        for seed in range(4):
            draw = Draw("spread", seed)
            noise = {n: (2 * draw.uniform(*t.shape) - 1).to(t.device) for n, t in self.wide.items()}
            moved = {n: t if n in self.case.exact else t * (1 + allowed * noise[n]) for n, t in self.wide.items()}
            for name, tensor in self.case.expected(self.package.reference, moved, routings).items():
                moved_by = norms(tensor - want[name])
                found[name] = torch.maximum(moved_by, found[name]) if seed else moved_by
        return found


def norms(tensor: Tensor) -> Tensor:
    """Of each entry of the first dimension."""
    return tensor.double().reshape(tensor.shape[0], -1).norm(dim=1) if tensor.numel() else tensor.new_zeros(0).double()


def difference(name: str, got: Tensor, want: Tensor, allowed, spread: Optional[Tensor] = None) -> str:
    """What is wrong, or nothing. A row that is 0 in want must be 0 in got; NaN is always wrong.

    Rows of a few entries, which may all cancel, are measured against the rms of all rows where that is larger.
    """
    expect(got.shape == want.shape, f"{name}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    if not want.numel():
        return ""
    error, size = norms(got.double() - want), norms(want)
    entries, rms = want[0].numel(), size.square().mean().sqrt()
    underflow = 8 * torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps * entries**0.5
    in_norm = allowed[0] * size.norm() + underflow * len(size) ** 0.5
    by_row = allowed[1] * (size.clamp_min(rms) if entries < 16 else size) + underflow
    if spread is not None:
        in_norm, by_row = torch.maximum(in_norm, spread.norm()), torch.maximum(by_row, spread)
    by_row = torch.where(size == 0, 0.0, by_row)
    bad = ~(error <= by_row)
    if bool(error.norm() <= in_norm) and not bool(bad.any()):
        return ""
    row = int(torch.where(bad, error / by_row, 0.0).nan_to_num(torch.inf).argmax())
    return (
        f"{name} {tuple(got.shape)} {got.dtype}: error {float(error.norm() / size.norm()):.2e} in norm (allowed"
        f" {float(in_norm / size.norm()):.1e}), {int(bad.sum())} bad rows, worst {row} with {float(error[row]):.2e} of"
        f" {float(size[row]):.2e} (allowed {float(by_row[row]):.1e})"
    )


def assert_same(what: str, got: Dict[str, Tensor], want: Dict[str, Tensor]) -> None:
    """Bitwise."""
    for name, tensor in want.items():
        same = got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
        expect(same, f"{name}: the {what} gives other bits, at {int((got[name] != tensor).sum())} places")


class Failure(NamedTuple):
    """line: what repeats it. broken: whether the device can't go on."""

    line: str
    op: str
    what: str
    broken: bool


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def repeating_line(seed: int, number: int, device: str) -> str:
    other = "" if device == default_device() else f" --device {device}"
    return f"python tools/fuzz.py --seed {seed} --only {number}{other}"


def describe(case: Case) -> str:
    """What a case has drawn, for who reads a failure."""
    shapes = {name: tuple(value.shape) for name, value in case.values.items()}
    drawn = {"mode": case.mode, "wanted": case.wanted, "options": case.options, "layouts": case.layouts}
    return "\n".join(map(str, (case.layer, shapes, drawn)))


def is_broken(device: str) -> bool:
    """Whether an error on the GPU has ended this process's use of it."""
    try:
        torch.cuda.synchronize() if device == "cuda" else None
    except RuntimeError:
        return True
    return False


def run_case(package, case: Case, line: str, device: str) -> Optional[Failure]:
    """How the case failed, if it did."""
    try:
        Trial(package, case, device).check()
        torch.cuda.synchronize() if device == "cuda" else None
        return None
    except Exception as error:  # a crash of any kind is a failure
        what = str(error) if type(error) is AssertionError else traceback.format_exc(limit=-6).rstrip()
    return Failure(line, case.op, f"{what}\n{describe(case)}", is_broken(device))


def fuzz(package, seed: int, numbers: Iterable[int], device: str, seconds: float) -> Iterator[dict]:
    """Runs cases until the time is over or the device is broken, prints failures. Yields the report after each case."""
    counts = {what: collections.Counter() for what in ("op", "dtype", "mode")}
    report = {**describe_machine(), "device": device, "seed": seed, "cases": 0, "seconds": 0.0}
    report.update({f"by_{what}": counter for what, counter in counts.items()}, failures=[])
    start = time.monotonic()
    for number in numbers:
        case = make_case(seed, number, device)
        failure = run_case(package, case, repeating_line(seed, number, device), device)
        for what, value in (("op", case.op), ("dtype", str(case.dtype)[6:]), ("mode", case.mode)):
            counts[what][value] += 1
        report["cases"] += 1
        report["seconds"] = round(time.monotonic() - start, 1)
        if failure is not None:
            print(f"{failure.line}\n{textwrap.indent(failure.what, '    ')}", flush=True)
            report["failures"].append({"line": failure.line, "op": failure.op, "what": scrub(failure.what)})
        yield report
        if time.monotonic() - start > seconds or (failure is not None and failure.broken):
            return


def numbers_of(text: str) -> Iterable[int]:
    """ "12" or "12-40"."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main(argv: Optional[List[str]] = None, package=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long new cases are begun (5)")
    parser.add_argument("--seed", type=int, default=0, help="what all cases are drawn from (0)")
    parser.add_argument("--only", type=numbers_of, help="run this case, or these, whatever the time")
    parser.add_argument("--device", default=default_device(), help="cpu or cuda (a GPU if there is one)")
    parser.add_argument("--json", type=Path, help="file for counts, versions, date and failures")
    arguments = parser.parse_args(argv)
    package = load_kernel() if package is None else package
    numbers, seconds = arguments.only, float("inf")
    if numbers is None:
        numbers, seconds = itertools.count(), 60 * arguments.minutes
    for report in fuzz(package, arguments.seed, numbers, arguments.device, seconds):
        if arguments.json is not None:  # after each case: a crash of the process leaves what came before it
            write(arguments.json, report)
    print(f"{report['cases']} cases in {report['seconds']:.0f} s, {len(report['failures'])} failed", flush=True)
    return int(bool(report["failures"]))


def write(path: Path, report: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
