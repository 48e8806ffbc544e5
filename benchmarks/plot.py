"""Draws what run_experts.py measured: speed-up over grouped_mm by tokens and local share, and memory by tokens.
And what run_linear.py measured: speed-up of a step over both peers.

    python benchmarks/plot.py benchmarks/results/experts.json [--output FOLDER]

Lines differ by dash and marker, bars by hatch: the figures read without colour.
"""

import argparse
import json
import math
from pathlib import Path
from typing import List, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from report import COMPILED, EAGER, LINEAR, LOOP, OURS, STEP, TORCH, mib, speedup  # noqa: E402

STYLES = {1.0: ("-", "o", "0.0"), 0.5: ("--", "s", "0.25"), 0.125: (":", "^", "0.45")}
PATTERNS = {"balanced": "o", "zipf": "s", "half": "^"}
BARS = {OURS: ("0.25", ""), EAGER: ("0.85", "//"), COMPILED: ("1.0", "..")}


def origin(results: dict) -> str:
    """Where the numbers come from, in a line."""
    what = results.get("benchmark")
    if what is None:
        layer = results["layer"]
        sizes = f"E={layer['experts']}, top_k={layer['top_k']}, H={layer['hidden']}, I={layer['intermediate']}"
        what = f"{layer['name']} ({sizes})"
    versions = ", ".join(f"{name} {results[name]}" for name in ("torch", "triton", "transformers"))
    return f"{what}, bf16, {results['gpu'] or 'CPU'}, {versions}, {results['date_utc'][:10]}"


def tokens_axis(axes: plt.Axes, tokens: List[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.minorticks_off()
    axes.set_xlabel("tokens per call, T")
    axes.grid(True, color="0.9")


def draw_speedup(results: dict, path: Path) -> None:
    """A panel for the forward and one for both passes; a line per local share, grouped_mm eager being 1."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.8), sharey=True, layout="constrained")
    for axes, backward in zip(panels, (False, True)):
        cells = [cell for cell in results["cells"] if cell["backward"] == backward]
        for local, (dash, marker, shade) in STYLES.items():
            for provider, filled in ((EAGER, True), (COMPILED, False)):
                points = [(c["tokens"], speedup(c, provider)) for c in cells if c["local"] == local]
                points = sorted(point for point in points if point[1] is not None)
                if not points:
                    continue
                share = "all" if local == 1 else f"1/{round(1 / local)} of the"
                axes.plot(
                    *zip(*points), linestyle=dash, marker=marker, color=shade, linewidth=1.6 if filled else 0.8,
                    markerfacecolor=shade if filled else "white",
                    label=f"{share} slots local, over {provider}",
                )  # fmt: skip
        tokens_axis(axes, sorted({cell["tokens"] for cell in results["cells"]}))
        axes.set_title("forward and backward" if backward else "forward")
    finish_speedup(figure, panels, results, path)


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


def draw_memory(results: dict, path: Path) -> None:
    """Peak of a training step and what the forward saves for the backward, all slots local."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    cells = sorted((c for c in results["cells"] if c["backward"] and c["local"] == 1), key=lambda c: c["tokens"])
    titles = {"peak_mib": "peak of forward and backward, gradients included", "saved_mib": "saved for backward"}
    for axes, (what, title) in zip(panels, titles.items()):
        width = 0.8 / len(BARS)
        for k, (provider, (shade, hatch)) in enumerate(BARS.items()):
            bars = [(i + (k - 1) * width, mib(cell, provider, what)) for i, cell in enumerate(cells)]
            bars = [bar for bar in bars if bar[1] is not None]
            if bars:
                axes.bar(*zip(*bars), width=width, color=shade, edgecolor="0.0", hatch=hatch, label=provider)
                axes.legend(fontsize="small")
        axes.set_xticks(range(len(cells)), [str(cell["tokens"]) for cell in cells])
        axes.set_xlabel("tokens per call, T")
        axes.set_ylabel("memory (MiB)")
        axes.set_title(title)
    figure.suptitle(origin(results), fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw(results_path: Path, folder: Path) -> None:
    """Writes speedup.png and memory.png, or for run_linear.py's linear.json linear_speedup.png, into folder."""
    results = json.loads(results_path.read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    if results.get("benchmark") == LINEAR:
        draw_linear(results, folder / f"{results_path.stem}_speedup.png")
        return
    draw_speedup(results, folder / "speedup.png")
    draw_memory(results, folder / "memory.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON that run_experts.py or run_linear.py wrote")
    parser.add_argument("--output", type=Path, help="folder of the figures, by default that of the JSON")
    arguments = parser.parse_args()
    draw(arguments.results, arguments.output or arguments.results.parent)


if __name__ == "__main__":
    main()
