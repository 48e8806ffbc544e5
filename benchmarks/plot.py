"""Draws what the scripts measured, into the folder of their JSON:

    python benchmarks/plot.py benchmarks/results/layers.json [--output FOLDER] [--peers JSON...]

layers.json: speedup.png, sentinels.png, memory.png. decode.json: decode.png. By the name of the JSON, growth.json:
growth.png, linear.json: linear_speedup.png. Lines differ by dash and marker, bars by hatch: the figures read without
colour.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from report import (  # noqa: E402
    BATCHED,
    CALLS,
    COMPILED,
    DECODE,
    DENSE,
    EAGER,
    GRAPH,
    GROWTH,
    HOST,
    LAYERS,
    LINEAR,
    LOOP,
    OURS,
    OVER_LINE,
    RECOMPUTE,
    SCATTERMOE,
    SONICMOE,
    STEP,
    TORCH,
    local,
    measured,
    mib,
    milliseconds,
    over_line,
    speedup,
)

PATTERNS = {"balanced": "o", "zipf": "s", "half": "^"}
# Shade and hatch of a provider's bars; dash, marker and shade of its lines.
BARS = {
    OURS: ("0.15", ""), RECOMPUTE: ("0.4", ".."), EAGER: ("0.9", "//"), COMPILED: ("1.0", "xx"),
    BATCHED: ("0.9", "||"), SCATTERMOE: ("0.75", "\\\\"), SONICMOE: ("0.6", "--"), DENSE: ("1.0", ""),
}  # fmt: skip
LINES = {
    OURS: ("-", "o", "0.0"), EAGER: ("--", "s", "0.3"), COMPILED: ("-.", "D", "0.3"), BATCHED: (":", "v", "0.3"),
    SONICMOE: ("--", "^", "0.5"), DENSE: (":", "x", "0.5"),
}  # fmt: skip


def add_peers(results: dict, other: dict) -> None:
    """Adds providers of another run's cells to the same cells of results where they lack them.

    Their time is ours here times what theirs was of ours there: what a figure then shows was measured side by side.
    """
    results["others"] = True
    cells = {cell_key(cell): cell for cell in measured(results)}
    for theirs in measured(other):
        cell = cells.get(cell_key(theirs), {})
        ours = milliseconds(cell, OURS)
        for name, entry in theirs["providers"].items():
            ratio = speedup(theirs, name)
            if ours and ratio and milliseconds(cell, name) is None:
                cell["providers"][name] = {**entry, "median_ms": ours * ratio}


def cell_key(cell: dict) -> Tuple[str, bool, int, float]:
    """What a cell measures."""
    return cell["layer"], cell["backward"], cell["tokens"], cell["local"]


def origin(results: dict) -> str:
    """Where the numbers come from, in a line."""
    versions = ", ".join(f"{name} {results[name]}" for name in ("torch", "triton", "transformers"))
    where = f"{results['gpu'] or 'CPU'}, {versions}, {results['date_utc'][:10]}"
    others = "; peers that it lacks from other runs, times relative to ours there" if results.get("others") else ""
    return f"{results['benchmark']}, bf16, {where}{others}"


def save(figure: plt.Figure, panels: Sequence[plt.Axes], results: dict, path: Path, columns: int = 4) -> None:
    """What all figures share: one legend, the origin."""
    labels: Dict[str, object] = {}
    for axes in panels:
        handles, names = axes.get_legend_handles_labels()
        labels.update(zip(names, handles))
    if labels:
        figure.legend(labels.values(), labels, loc="outside lower center", ncols=columns, fontsize="x-small")
    figure.suptitle(origin(results), fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def logarithmic(axes: plt.Axes, x: bool = False) -> None:
    """Log scales of base 2 with plain numbers."""
    for axis, scale in ((axes.yaxis, axes.set_yscale), (axes.xaxis, axes.set_xscale))[: 2 if x else 1]:
        scale("log", base=2)
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    if x:
        axes.tick_params(axis="x", labelsize="small")
    axes.set_axisbelow(True)
    axes.grid(True, axis="both" if x else "y", color="0.9")


def draw_bars(
    axes: plt.Axes, groups: List[Tuple[str, dict]], names: Sequence[str], value: Callable[[dict, str], Optional[float]]
) -> None:
    """A group of bars per cell, a bar per provider; where there is no value, no bar."""
    width = 0.85 / len(names)
    for k, name in enumerate(names):
        shade, hatch = BARS[name]
        bars = [(i + (k + 0.5) * width - 0.425, value(cell, name)) for i, (_, cell) in enumerate(groups)]
        bars = [bar for bar in bars if bar[1]]
        if bars:
            axes.bar(*zip(*bars), width=width, color=shade, edgecolor="0.0", linewidth=0.5, hatch=hatch, label=name)
    axes.set_xticks(range(len(groups)), [label for label, _ in groups], fontsize="x-small")


def draw_speedup(results: dict, path: Path) -> None:
    """Speed of every provider relative to grouped_mm eager; a panel per mode, T and local share."""
    keys = sorted({(c["backward"], c["tokens"], -c["local"]) for c in measured(results)})
    figure, panels = plt.subplots(
        -(-len(keys) // 3),
        min(3, len(keys)),
        figsize=(15, 3.3 * -(-len(keys) // 3)),
        layout="constrained",
        squeeze=False,
    )
    panels = [axes for row in panels for axes in row]
    ran = {name for cell in measured(results) for name in cell["providers"] if milliseconds(cell, name)}
    names = [name for name in (OURS, COMPILED, SCATTERMOE, SONICMOE, DENSE) if name in ran]
    for axes, key in zip(panels, keys):
        cells = [c for c in measured(results) if (c["backward"], c["tokens"], -c["local"]) == key]
        groups = [(cell["layer"].replace(" ", "\n").replace("-", "-\n", 1), cell) for cell in cells]
        draw_bars(axes, groups, names, lambda cell, name: speedup(cell, EAGER, name))
        axes.axhline(1, color="0.0", linewidth=0.8)
        logarithmic(axes)
        axes.set_ylabel("times grouped_mm's speed", fontsize="x-small")
        mode = "forward and backward" if key[0] else "forward"
        axes.set_title(f"{mode}, T={key[1]}, local {local({'local': -key[2]})}", fontsize="small")
    for axes in panels[len(keys) :]:
        axes.set_visible(False)
    save(figure, panels[:1] + panels, results, path, 5)


def draw_sentinels(results: dict, path: Path) -> None:
    """Time over that with all slots local, by the local share; forward at the largest T, a panel per layer."""
    cells = [cell for cell in measured(results) if not cell["backward"]]
    most = max(cell["tokens"] for cell in cells)
    layers = list(dict.fromkeys(cell["layer"] for cell in cells))
    figure, panels = plt.subplots(
        1, len(layers), figsize=(3 * len(layers), 3.8), sharey=True, layout="constrained", squeeze=False
    )
    for axes, layer in zip(panels[0], layers):
        shares = {c["local"]: c for c in cells if c["layer"] == layer and c["tokens"] == most}
        for name, (dash, marker, shade) in LINES.items():
            whole = milliseconds(shares.get(1.0, {}), name)
            points = [(s, milliseconds(c, name)) for s, c in sorted(shares.items())]
            points = [(s, ms / whole) for s, ms in points if ms and whole]
            if points:
                axes.plot(*zip(*points), linestyle=dash, marker=marker, color=shade, label=name, markersize=4)
        axes.plot((1 / 8, 1), (1 / 8, 1), color="0.8", linewidth=0.8)
        logarithmic(axes, x=True)
        axes.set_xticks(sorted(shares), [local({"local": share}) for share in sorted(shares)])
        axes.minorticks_off()
        axes.set_title(layer, fontsize="small")
        axes.set_xlabel("share of slots that is local", fontsize="x-small")
    panels[0][0].set_ylabel(f"time, relative to all local (T={most})", fontsize="x-small")
    save(figure, panels[0], results, path, 6)


def draw_memory(results: dict, path: Path) -> None:
    """Saved for the backward, and the peak of a step, all slots local."""
    cells = [cell for cell in measured(results) if cell["backward"] and cell["local"] == 1]
    titles = {"saved_mib": "saved for backward", "peak_mib": "peak of forward and backward, gradients included"}
    names = (OURS, RECOMPUTE, EAGER, COMPILED, SCATTERMOE, SONICMOE)
    figure, panels = plt.subplots(2, 1, figsize=(10, 7), layout="constrained")
    for axes, (what, title) in zip(panels, titles.items()):
        groups = [(f"{cell['layer']}\nT={cell['tokens']}", cell) for cell in cells]
        draw_bars(axes, groups, names, lambda cell, name, what=what: mib(cell, name, what))
        axes.set_ylabel("MiB")
        axes.set_title(title, fontsize="small")
    save(figure, panels, results, path, 6)


def draw_decode(results: dict, path: Path) -> None:
    """Time per call by T: replays of a graph, eager calls, host; of the first layer. And tokens/s of generate()."""
    cells = sorted(measured(results), key=lambda cell: cell["tokens"])
    layer = measured(results)[0]["layer"] if cells else ""
    cells = [cell for cell in cells if cell["layer"] == layer]
    figure, panels = plt.subplots(1, 4, figsize=(15, 4), layout="constrained")
    for axes, part in zip(panels, (GRAPH, CALLS, HOST)):
        for name in (OURS, EAGER, BATCHED):
            dash, marker, shade = LINES[name]
            points = [(c["tokens"], milliseconds(c[part], name)) for c in cells]
            points = [point for point in points if point[1]]
            if points:
                axes.plot(*zip(*points), linestyle=dash, marker=marker, color=shade, label=name, markersize=4)
        if part == GRAPH and cells:
            axes.plot(*zip(*((c["tokens"], c["floor_hot_ms"]) for c in cells)), color="0.7", label="floor")
        logarithmic(axes, x=True)
        axes.set_title(f"{layer}: {part}", fontsize="small")
        axes.set_xlabel("tokens per call, T", fontsize="x-small")
        axes.set_ylabel("ms", fontsize="x-small")
    cases = measured(results, "generate")
    groups = [(f"batch {c['batch']}\n{'static, compiled' if c['static'] else 'eager'}", c) for c in cases]
    draw_bars(panels[3], groups, (OURS, EAGER), lambda c, name: c["providers"].get(name, {}).get("tokens_per_s"))
    panels[3].set_title("generate(), tokens/s, next to the default", fontsize="small")
    save(figure, panels, results, path, 5)


def draw_growth(results: dict, path: Path) -> None:
    """A panel per series: time and floor; a ring around what is over the line between its neighbours."""
    every = measured(results, "series")
    kinds = list(dict.fromkeys(series["x"] for series in every))
    figure, panels = plt.subplots(1, len(kinds), figsize=(4 * len(kinds), 4.2), layout="constrained", squeeze=False)
    for axes, kind in zip(panels[0], kinds):
        for series in (s for s in every if s["x"] == kind):
            dash, shade = ("--", "0.3") if series["backward"] else ("-", "0.0")
            label = "forward and backward" if series["backward"] else "forward"
            points = [p for p in series["points"] if p.get("median_ms")]
            x = [p["value"] for p in points]
            axes.plot(x, [p["median_ms"] for p in points], dash, color=shade, marker="o", markersize=3, label=label)
            axes.plot(x, [p["floor_hot_ms"] for p in points], ":", color="0.6", label="floor")
            far = [p for p, over in zip(series["points"], over_line(series)) if over and over > OVER_LINE]
            axes.plot(
                [p["value"] for p in far], [p["median_ms"] for p in far], "o", markersize=10, color="0.0",
                markerfacecolor="none", label=f"more than {OVER_LINE - 1:.0%} over the line",
            )  # fmt: skip
        if kind == "skew":
            axes.set_xticks(x, [p["pattern"] for p in points], fontsize="small")
            axes.set_ylim(bottom=0)
        else:
            logarithmic(axes, x=True)
        if kind == "local":
            axes.set_xticks(x, [local({"local": value}) for value in x])
            axes.minorticks_off()
        axes.set_title(f"time by {kind}", fontsize="small")
        axes.set_ylabel("ms", fontsize="x-small")
    save(figure, panels[0], results, path)


def finish_speedup(figure: plt.Figure, panels: Sequence[plt.Axes], results: dict, path: Path) -> None:
    """What figures of speed-ups share: the line at 1, the scale, one legend, the origin."""
    for axes in panels:
        axes.axhline(1, color="0.0", linewidth=0.8)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[0].set_ylabel("speed-up of grouped_moe (times)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="x-small")
    figure.suptitle(origin(results), fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_linear(results: dict, path: Path) -> None:
    """A panel per shape; along it groups within rows; a marker per pattern, filled over the loop."""
    shapes = sorted({(cell["k"], cell["n"]) for cell in results["cells"]}, key=math.prod)
    columns = sorted({(cell["rows"], cell["groups"]) for cell in results["cells"]})
    figure, panels = plt.subplots(
        1, len(shapes), figsize=(4.5 * len(shapes), 4.8), sharey=True, layout="constrained", squeeze=False
    )
    for axes, shape in zip(panels[0], shapes):
        cells = [cell for cell in results["cells"] if (cell["k"], cell["n"]) == shape]
        for shift, (pattern, marker) in enumerate(PATTERNS.items()):
            for peer, face in ((LOOP, "0.25"), (TORCH, "white")):
                points = [
                    (columns.index((c["rows"], c["groups"])) + 0.2 * (shift - 1), speedup(c.get(STEP, {}), peer))
                    for c in cells
                    if c["pattern"] == pattern
                ]
                points = [point for point in points if point[1] is not None] or [(math.nan, math.nan)]
                axes.plot(
                    *zip(*points), linestyle="", marker=marker, color="0.0", markerfacecolor=face,
                    label=f"{pattern}, over {peer}",
                )  # fmt: skip
        axes.set_xticks(range(len(columns)), [f"{rows}\nG={groups}" for rows, groups in columns], fontsize="small")
        axes.set_xlabel("rows, groups")
        axes.set_title("K={}, N={}".format(*shape))
        axes.grid(True, axis="y", color="0.9")
    finish_speedup(figure, panels[0], {**results, "benchmark": results["benchmark"] + " step"}, path)


def draw(results_path: Path, folder: Path, peers: Sequence[Path] = ()) -> None:
    """Writes the figures of a script's JSON into folder, if it has any. peers: see `add_peers`, the first one first."""
    results, *others = (json.loads(path.read_text(encoding="utf-8")) for path in (results_path, *peers))
    for other in others:
        add_peers(results, other)
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        LINEAR: {f"{results_path.stem}_speedup.png": draw_linear},
        LAYERS: {"speedup.png": draw_speedup, "sentinels.png": draw_sentinels, "memory.png": draw_memory},
        DECODE: {"decode.png": draw_decode},
        GROWTH: {f"{results_path.stem}.png": draw_growth},
        "products": {},
    }[results["benchmark"]]
    for name, function in figures.items():
        function(results, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON that a script wrote")
    parser.add_argument("--output", type=Path, help="folder of the figures, by default that of the JSON")
    parser.add_argument(
        "--peers", type=Path, nargs="+", default=(), metavar="JSON",
        help="of other runs of run_layers.py: peers that this one lacks, by their time relative to ours there",
    )  # fmt: skip
    arguments = parser.parse_args()
    draw(arguments.results, arguments.output or arguments.results.parent, arguments.peers)


if __name__ == "__main__":
    main()
