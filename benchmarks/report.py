"""Reads the JSON of run_experts.py or run_linear.py: the table that a run ends with, and the same as Markdown.

python benchmarks/report.py benchmarks/results/experts.json
"""

import argparse
import json
from pathlib import Path
from typing import Dict, List, Optional, Tuple

OURS, EAGER, COMPILED, DENSE = "ours", "grouped_mm eager", "grouped_mm compiled", "dense bound"
GRAPHS = {OURS: "ours, CUDA graph", EAGER: "grouped_mm eager, CUDA graph"}
LINEAR = "grouped_linear"  # what run_linear.py writes as "benchmark"
LOOP, TORCH = "loop", "grouped_mm"
PARTS = FORWARD, DGRAD, WGRAD, STEP = ("forward", "dgrad", "wgrad", "step")  # of training, each measured alone
GRAPH, TRACKED, ELAPSED = "forward, CUDA graph", "forward with autograd", ", elapsed"
GOAL = {"tokens": 16384, "local": 0.125, "backward": False}
GOAL_RATIO = 4.0


def milliseconds(cell: dict, provider: str) -> Optional[float]:
    """Median of a provider in a cell, or None."""
    return cell.get("providers", {}).get(provider, {}).get("median_ms")


def speedup(cell: dict, over: str, of: str = OURS) -> Optional[float]:
    """How many times `of` is faster than `over`, or None where one is missing."""
    slow, fast = milliseconds(cell, over), milliseconds(cell, of)
    return slow / fast if slow and fast else None


def mib(cell: dict, provider: str, what: str) -> Optional[float]:
    """peak_mib or saved_mib, or None."""
    return cell.get("providers", {}).get(provider, {}).get(what)


def worst_error(cell: dict, provider: str) -> Optional[float]:
    """The largest of the errors of output and gradients, or None."""
    errors = cell.get("providers", {}).get(provider, {}).get("errors")
    return max(errors.values()) if errors else None


def text(value: Optional[float], form: str = ".3f", suffix: str = "") -> str:
    return "-" if value is None else format(value, form) + suffix


def local(cell: dict) -> str:
    return "1" if cell["local"] == 1 else f"1/{round(1 / cell['local'])}"


def mode(cell: dict) -> str:
    return "fwd+bwd" if cell["backward"] else "fwd"


def order(cell: dict) -> tuple:
    return cell["backward"], cell["tokens"], -cell["local"]


def progress(title: str, cell: dict) -> str:
    """One line about a cell that has just run, with the reasons of what did not."""
    times = [f"{name} {text(milliseconds(cell, name))}" for name in cell["providers"] if milliseconds(cell, name)]
    skipped = [f"{name}: {entry['skipped']}" for name, entry in cell["providers"].items() if "skipped" in entry]
    return f"{title} ({cell['seconds']:.1f} s): " + ", ".join(times + skipped)


def rows(results: dict) -> List[Dict[str, str]]:
    """The table, a row per cell. Times in ms, memory in MiB; error: the worst relative one against fp32."""
    table = []
    for cell in sorted(results["cells"], key=order):
        row = {"mode": mode(cell), "T": str(cell["tokens"]), "local": local(cell)}
        row["vs eager"] = text(speedup(cell, EAGER), ".2f", "x")
        row["vs compiled"] = text(speedup(cell, COMPILED), ".2f", "x")
        row["vs eager, graphs"] = text(speedup(cell, GRAPHS[EAGER], GRAPHS[OURS]), ".2f", "x")
        row["ours"] = text(milliseconds(cell, OURS))
        row["eager"] = text(milliseconds(cell, EAGER))
        row["compiled"] = text(milliseconds(cell, COMPILED))
        row["dense"] = text(milliseconds(cell, DENSE))
        row["floor hot"] = text(cell.get("floor_hot_ms"))
        for name, label in ((OURS, "ours"), (EAGER, "eager")):
            row[f"peak {label}"] = text(mib(cell, name, "peak_mib"), ".0f")
            row[f"saved {label}"] = text(mib(cell, name, "saved_mib"), ".0f")
            row[f"error {label}"] = text(worst_error(cell, name), ".1e")
        table.append(row)
    return table


def verdicts(results: dict) -> List[str]:
    """What the measurement was made for, in words."""
    measured = [cell for cell in results["cells"] if speedup(cell, EAGER) is not None]
    slower = [cell for cell in measured if speedup(cell, EAGER) < 1]
    names = ", ".join(f"T={cell['tokens']} local={local(cell)} {mode(cell)}" for cell in slower)
    of_all = f"{len(measured)} of {len(results['cells'])} measured"
    lines = [f"slower than grouped_mm eager: {names or 'in no cell'} ({of_all})"]
    for cell in measured:
        if all(cell[key] == value for key, value in GOAL.items()):
            lines.append(f"T=16384 local=1/8 fwd: {speedup(cell, EAGER):.2f} times faster (wanted: {GOAL_RATIO:.0f})")
    wrong = [
        f"{name} at T={cell['tokens']} local={local(cell)} {mode(cell)}"
        for cell in measured
        for name, entry in cell["providers"].items()
        if entry.get("ok") is False
    ]
    return [*lines, "results off the fp32 reference: " + (", ".join(wrong) or "none")]


def linear_title(cell: dict) -> str:
    return f"G={cell['groups']} {cell['k']}x{cell['n']} rows={cell['rows']} {cell['pattern']}"


def linear_order(cell: dict) -> tuple:
    return cell["groups"], cell["k"] * cell["n"], cell["rows"], cell["pattern"]


def linear_rows(results: dict) -> List[Dict[str, str]]:
    """The table of run_linear.py. Per part, times that ours is faster than the loop / grouped_mm; then ms (floor)."""
    table = []
    for cell in sorted(results["cells"], key=linear_order):
        row = {"G": str(cell["groups"]), "K x N": f"{cell['k']} x {cell['n']}"}
        row.update({"rows": str(cell["rows"]), "pattern": cell["pattern"]})
        parts = {part: cell.get(part, {}) for part in (*PARTS, GRAPH)}
        for name, part in parts.items():
            over = (TORCH,) if name == GRAPH else (LOOP, TORCH)
            row[f"{name}: vs {' / '.join(over)}"] = " / ".join(text(speedup(part, peer), ".2f", "x") for peer in over)
        for name in PARTS:
            times = text(milliseconds(parts[name], OURS)), text(parts[name].get("floor_hot_ms"))
            row[f"{name}: ours (floor)"] = "{} ({})".format(*times)
        row["error ours"] = text(worst_error(parts[STEP], OURS), ".1e")
        table.append(row)
    return table


def linear_failures(results: dict) -> Tuple[List[str], List[str]]:
    """Results off the reference, and what did not run with its reason."""
    wrong, skipped = [], []
    for cell in results["cells"]:
        providers = cell.get(STEP, {}).get("providers", {})
        wrong += [f"{name} at {linear_title(cell)}" for name, entry in providers.items() if entry.get("ok") is False]
        graphs = cell.get(GRAPH, {}).get("providers", {})
        for name, entry in (
            ("all", cell),
            *providers.items(),
            *((f"{name}, {GRAPH}", e) for name, e in graphs.items()),
        ):
            if "skipped" in entry:
                skipped.append(f"{name} at {linear_title(cell)}: {entry['skipped']}")
    return wrong, skipped


def linear_verdicts(results: dict) -> List[str]:
    """Every part of a cell in which ours is slower than a peer, what is wrong, and what did not run."""
    lines = []
    for peer in (LOOP, TORCH):
        count, slower = 0, {}
        for cell in sorted(results["cells"], key=linear_order):
            ratios = {part: speedup(cell.get(part, {}), peer) for part in (*PARTS, GRAPH)}
            count += sum(ratio is not None for ratio in ratios.values())
            below = [f"{part} {ratio:.3f}" for part, ratio in ratios.items() if ratio is not None and ratio < 1]
            if below:
                slower[linear_title(cell)] = below
        lines.append(f"slower than {peer} in {sum(map(len, slower.values()))} of {count} measurements")
        lines[-1] += "".join(f"\n  - {title}: {', '.join(below)}" for title, below in slower.items())
    wrong, skipped = linear_failures(results)
    lines.append("results off the fp32 reference: " + (", ".join(wrong) or "none"))
    return [*lines, "did not run: " + (", ".join(skipped) or "none")]


def host_rows(results: dict) -> List[Dict[str, str]]:
    """Microseconds of the host per call, and in brackets what the call takes; larger, where the GPU is the bound."""
    table = []
    for cell in results.get("host", ()):
        for part in (TRACKED, STEP):
            row = {"G": str(cell["groups"]), "K x N": f"{cell['k']} x {cell['n']}", "rows": str(cell["rows"])}
            row["host time of"] = part
            for name in (OURS, LOOP, TORCH):
                times = [milliseconds(cell[key], name) for key in (part, part + ELAPSED)]
                row[f"{name}, us"] = "{} ({})".format(*(text(t and t * 1e3, ".0f") for t in times))
            table.append(row)
    return table


def tables(results: dict) -> Tuple[List[List[Dict[str, str]]], List[str]]:
    """The tables of either script that are not empty, and the verdicts."""
    if results.get("benchmark") != LINEAR:
        return [rows(results)], verdicts(results)
    return [table for table in (linear_rows(results), host_rows(results)) if table], linear_verdicts(results)


def text_table(table: List[Dict[str, str]]) -> List[str]:
    widths = {key: max(len(key), *(len(row[key]) for row in table)) for key in table[0]}
    lines = ["  ".join(key.rjust(width) for key, width in widths.items())]
    return lines + ["  ".join(row[key].rjust(width) for key, width in widths.items()) for row in table]


def markdown_table(table: List[Dict[str, str]]) -> List[str]:
    lines = ["| " + " | ".join(table[0]) + " |", "|" + "---|" * len(table[0])]
    return lines + ["| " + " | ".join(row.values()) + " |" for row in table]


def summary(results: dict) -> str:
    """The tables in columns, and the verdicts."""
    found, said = tables(results)
    return "\n".join([line for table in found for line in (*text_table(table), "")] + said)


def markdown(results: dict) -> str:
    """The tables for NOTES.md, with where they come from."""
    keys = ("gpu", "torch", "triton", "transformers", "commit", "date_utc")
    origin = ", ".join(f"{key} {results.get(key)}" for key in keys) + f", build {results['kernel']['id']}"
    found, said = tables(results)
    lines = [origin, "", *(line for table in found for line in (*markdown_table(table), ""))]
    return "\n".join([*lines, *(f"- {verdict}" for verdict in said)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the table of a measurement as Markdown.")
    parser.add_argument("results", type=Path, help="JSON that run_experts.py or run_linear.py wrote")
    print(markdown(json.loads(parser.parse_args().results.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
