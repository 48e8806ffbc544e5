"""Draws what is recorded of one GPU into the folder of the results:

    python benchmarks/plot.py [--gpu h200]

Lines differ by dash and marker, bars by shade and hatch, so the figures read without colour.
"""

import argparse
import contextlib
import json
import math
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from experts import BATCHED, DENSE, GROUPED, OURS, SONICMOE  # noqa: E402
from linear import LOOP  # noqa: E402
from machine import RESULTS, result_name  # noqa: E402
from workload import fraction  # noqa: E402

OVER_LINE = 1.10  # growth past this multiple of the line between neighbours is marked
# Shade and hatch of a provider's bars; dash, marker and shade of its lines.
BARS = {OURS: ("0.15", ""), SONICMOE: ("0.6", "--"), DENSE: ("1.0", "")}
LINES = {OURS: ("-", "o", "0.0"), GROUPED: ("--", "s", "0.3"), BATCHED: (":", "v", "0.3")}


def ms(cell: dict, name: str, measure: Optional[str] = None) -> Optional[float]:
    """A provider's median in a measure, by default the cell's first one; None where it is missing."""
    measures = cell.get("times", {})
    entries = measures.get(measure or next(iter(measures), ""), {})
    return entries.get(name, {}).get("median_ms")


def ratio(cell: dict, over: str, of: str = OURS, measure: Optional[str] = None) -> Optional[float]:
    """How many times `of` is faster than `over`, or None where one is missing."""
    slow, fast = ms(cell, over, measure), ms(cell, of, measure)
    return slow / fast if slow and fast else None


def add_peers(cells: List[dict], others: List[dict]) -> None:
    """Adds the providers of another run's cells to the same cells where they lack them.

    Their time is that of `grouped_mm` here times what theirs was of it there, so that a figure shows what was measured
    side by side; of ours where the other run has no `grouped_mm`.
    """
    by_name = {cell["name"]: cell for cell in cells}
    for theirs in others:
        cell = by_name.get(theirs["name"], {})
        for measure, entries in theirs["times"].items():
            anchor = next((name for name in (GROUPED, OURS) if name in entries and ms(cell, name, measure)), None)
            if anchor is None:
                continue
            for name in entries:
                if not ms(cell, name, measure):
                    factor = ratio(theirs, name, anchor, measure)
                    cell["times"][measure][name] = {"median_ms": ms(cell, anchor, measure) * factor}


def over_line(points: Sequence[Tuple[float, float]], skew: bool = False) -> List[Optional[float]]:
    """Each point's time over that of the straight line between its neighbours, both axes logarithmic.

    skew: over the time of the first point, the balanced routing.
    """
    if skew:
        return [None] + [time / points[0][1] for _, time in points[1:]]
    found: List[Optional[float]] = [None] * len(points)
    for i in range(1, len(points) - 1):
        (x0, t0), (x1, t1), (x2, t2) = points[i - 1 : i + 2]
        share = (math.log(x1) - math.log(x0)) / (math.log(x2) - math.log(x0))
        found[i] = t1 / (t0 ** (1 - share) * t2**share)
    return found


@contextlib.contextmanager
def figure_of(
    results: dict, path: Path, rows: int, columns: int, size: Tuple[float, float], **options
) -> Iterator[List[plt.Axes]]:
    """The panels of a figure. It gets one legend and a title that says where the numbers come from, and is saved."""
    figure, panels = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    panels = list(panels.flat)
    yield panels
    labels: Dict[str, object] = {}
    for axes in panels:
        handles, names = axes.get_legend_handles_labels()
        labels.update(zip(names, handles))
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=6, fontsize="x-small")
    versions = ", ".join(f"{name} {results[name]}" for name in ("torch", "triton", "transformers"))
    where = results["gpu"] or results["machine"]
    said = (results["benchmark"], where, versions, results["date_utc"][:10], results.get("origin"))
    figure.suptitle(", ".join(filter(None, said)), fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def logarithmic(axes: plt.Axes, x: bool = False) -> None:
    """Log scales of base 2 with plain numbers."""
    for axis, scale in ((axes.yaxis, axes.set_yscale), (axes.xaxis, axes.set_xscale))[: 2 if x else 1]:
        scale("log", base=2)
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_axisbelow(True)
    axes.grid(True, axis="both" if x else "y", color="0.9")


def draw_speedup(results: dict, path: Path) -> None:
    """Speed of every provider relative to grouped_mm; a panel per mode, T and local share."""
    panels_of: Dict[tuple, List[dict]] = {}
    for cell in results["cells"]:
        panels_of.setdefault((cell["backward"], cell["tokens"], -cell["local"]), []).append(cell)
    rows, columns, width = -(-len(panels_of) // 3), min(3, len(panels_of)), 0.85 / len(BARS)
    with figure_of(results, path, rows, columns, (15, 3.3 * rows)) as panels:
        for axes, (backward, tokens, local) in zip(panels, sorted(panels_of)):
            cells = panels_of[backward, tokens, local]
            for k, (name, (shade, hatch)) in enumerate(BARS.items()):
                speeds = [ratio(cell, GROUPED, name) for cell in cells]
                bars = [(i + (k + 0.5) * width - 0.425, speed) for i, speed in enumerate(speeds) if speed]
                style = {"width": width, "color": shade, "edgecolor": "0.0", "linewidth": 0.5, "hatch": hatch}
                if bars:
                    axes.bar(*zip(*bars), **style, label=name)
            labels = [cell["layer"].replace(" ", "\n").replace("-", "-\n", 1) for cell in cells]
            axes.set_xticks(range(len(cells)), labels, fontsize="x-small")
            axes.axhline(1, color="0.0", linewidth=0.8)
            logarithmic(axes)
            mode = "forward and backward" if backward else "forward"
            axes.set_title(f"{mode}, T={tokens}, local {fraction(-local)}: times grouped_mm's speed", fontsize="small")
        for axes in panels[len(panels_of) :]:
            axes.set_visible(False)


def draw_decode(results: dict, path: Path) -> None:
    """Time by T of the first layer: replays of a graph, eager calls, the host's time."""
    layer = results["cells"][0]["layer"]
    cells = sorted((c for c in results["cells"] if c["layer"] == layer), key=lambda cell: cell["tokens"])
    with figure_of(results, path, 1, 3, (12, 4)) as panels:
        for axes, measure in zip(panels, ("forward, graph", "forward", "forward, host")):
            for name, (dash, marker, shade) in LINES.items():
                points = [(cell["tokens"], ms(cell, name, measure)) for cell in cells if ms(cell, name, measure)]
                if points:
                    style = {"linestyle": dash, "marker": marker, "color": shade, "markersize": 4}
                    axes.plot(*zip(*points), **style, label=name)
            logarithmic(axes, x=True)
            if measure == "forward, graph":
                axes.plot(*zip(*((c["tokens"], c["floor_ms"]) for c in cells)), color="0.7", label="floor")
            title = measure if "," in measure else f"{measure}, eager"
            axes.set_title(f"{layer}: {title}, ms by T", fontsize="small")


def draw_growth(results: dict, path: Path) -> None:
    """A panel per series: time and floor, in ms; a ring around what is over the line between its neighbours."""
    series = list(dict.fromkeys(cell["series"] for cell in results["cells"]))
    kinds = list(dict.fromkeys(name.split()[0] for name in series))
    with figure_of(results, path, 1, len(kinds), (4 * len(kinds), 4.2)) as panels:
        for name in series:
            axes, step = panels[kinds.index(name.split()[0])], name.endswith("step")
            cells = [cell for cell in results["cells"] if cell["series"] == name and ms(cell, OURS)]
            points = [(cell["value"], ms(cell, OURS)) for cell in cells]
            style = {"linestyle": "--" if step else "-", "color": "0.3" if step else "0.0", "marker": "o"}
            axes.plot(*zip(*points), **style, markersize=3, label="forward and backward" if step else "forward")
            axes.plot([x for x, _ in points], [c["floor_ms"] for c in cells], ":", color="0.6", label="floor")
            far = [p for p, over in zip(points, over_line(points, "skew" in name)) if over and over > OVER_LINE]
            ring = {"markersize": 10, "color": "0.0", "markerfacecolor": "none"}
            label = "more than 10 % over the line"
            axes.plot([x for x, _ in far], [time for _, time in far], "o", **ring, label=label)
            axes.set_title(f"ms by {name.split()[0]}", fontsize="small")
            if "skew" in name:
                axes.set_xticks(range(len(cells)), [cell["pattern"] for cell in cells], fontsize="small")
            else:
                logarithmic(axes, x=True)
            if "local" in name:
                axes.set_xticks([x for x, _ in points], [fraction(x) for x, _ in points])
                axes.minorticks_off()


def draw_linear(results: dict, path: Path) -> None:
    """Speed of a step relative to both peers. A panel per shape; along it rows and groups; a marker per pattern."""
    cells = [cell for cell in results["cells"] if cell["times"]]
    shapes = sorted({(cell["k"], cell["n"]) for cell in cells}, key=math.prod)
    columns = sorted({(cell["rows"], cell["groups"]) for cell in cells})
    with figure_of(results, path, 1, len(shapes), (4.5 * len(shapes), 4.8), sharey=True) as panels:
        for axes, shape in zip(panels, shapes):
            for shift, (pattern, marker) in enumerate({"balanced": "o", "zipf": "s", "half": "^"}.items()):
                some = [c for c in cells if (c["k"], c["n"], c["pattern"]) == (*shape, pattern)]
                places = [columns.index((c["rows"], c["groups"])) + 0.2 * (shift - 1) for c in some]
                for peer, face in ((LOOP, "0.25"), (GROUPED, "white")):
                    style = {"marker": marker, "color": "0.0", "markerfacecolor": face, "linestyle": ""}
                    speeds = [ratio(c, peer, OURS, "step") for c in some]
                    axes.plot(places, speeds, **style, label=f"{pattern}, over {peer}")
            axes.axhline(1, color="0.0", linewidth=0.8)
            logarithmic(axes)
            axes.set_xticks(range(len(columns)), [f"{rows}\nG={groups}" for rows, groups in columns], fontsize="small")
            axes.set_title("K={}, N={}: times a peer's speed".format(*shape), fontsize="small")


def draw_new_shapes(results: dict, path: Path) -> None:
    """ms of a call until the GPU is idle again, with new and seen numbers of tokens; a panel per op and direction."""
    cells = [cell for cell in results["cells"] if "new, wall" in cell["times"]]
    kinds = sorted(dict.fromkeys((cell["op"], cell["backward"]) for cell in cells), key=lambda kind: kind[1])
    with figure_of(results, path, 2, -(-len(kinds) // 2), (14, 7)) as panels:
        for axes, kind in zip(panels, kinds):
            some = [cell for cell in cells if (cell["op"], cell["backward"]) == kind]
            for k, (name, age) in enumerate((name, age) for name in (OURS, GROUPED) for age in ("new", "seen")):
                values = [ms(cell, name, f"{age}, wall") or math.nan for cell in some]
                shade = {"color": "0.35" if name == OURS else "0.9", "edgecolor": "0.0"}
                style = {"width": 0.2, **shade, "hatch": "//" if age == "new" else ""}
                axes.bar([i + 0.2 * (k - 1.5) for i in range(len(some))], values, **style, label=f"{name}, T {age}")
            axes.set_xticks(range(len(some)), [f"T around {cell['tokens']}" for cell in some], fontsize="x-small")
            axes.set_title(f"{kind[0]}, {'forward and backward' if kind[1] else 'forward'}, ms", fontsize="small")


FIGURES = {
    "layers": {"speedup.png": draw_speedup},
    "decode": {"decode.png": draw_decode},
    "growth": {"growth.png": draw_growth},
    "linear": {"linear_speedup.png": draw_linear},
    "new_shapes": {"new_shapes.png": draw_new_shapes},
}


def draw(folder: Path, gpu: Optional[str]) -> None:
    """Writes the figures of what there is of a GPU, or of what has none. Layers show the peers of another run, too."""

    def read(benchmark: str) -> Optional[dict]:
        path = folder / result_name(benchmark, gpu)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    for benchmark, figures in FIGURES.items():
        results = read(benchmark)
        if not results or not any(cell["times"] for cell in results["cells"]):
            continue
        others = read("sonicmoe") if benchmark == "layers" else None
        if others:
            add_peers(results["cells"], others["cells"])
            results["origin"] = "SonicMoE from other runs, relative to grouped_mm or, if they lack it, to ours there"
        for name, function in figures.items():
            function(results, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200", help="as in the names of the results (h200)")
    arguments = parser.parse_args()
    if not any((RESULTS / result_name(name, arguments.gpu)).exists() for name in FIGURES):
        parser.error(f"--gpu: expected one with results in {RESULTS}, got {arguments.gpu!r}")
    draw(RESULTS, arguments.gpu)


if __name__ == "__main__":
    main()
