"""Reads the JSON of run_experts.py: the table that a run ends with, and the same as Markdown.

python benchmarks/report.py benchmarks/results/experts.json
"""

import argparse
import json
from pathlib import Path
from typing import Dict, List, Optional

OURS, EAGER, COMPILED, DENSE = "ours", "grouped_mm eager", "grouped_mm compiled", "dense bound"
GRAPHS = {OURS: "ours, CUDA graph", EAGER: "grouped_mm eager, CUDA graph"}
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


def summary(results: dict) -> str:
    """The table in columns, and the verdicts."""
    table = rows(results)
    widths = {key: max(len(key), *(len(row[key]) for row in table)) for key in table[0]}
    lines = ["  ".join(key.rjust(width) for key, width in widths.items())]
    lines += ["  ".join(row[key].rjust(width) for key, width in widths.items()) for row in table]
    return "\n".join([*lines, "", *verdicts(results)])


def markdown(results: dict) -> str:
    """The table for NOTES.md, with where it comes from."""
    table = rows(results)
    keys = ("gpu", "torch", "triton", "transformers", "commit", "date_utc")
    origin = ", ".join(f"{key} {results.get(key)}" for key in keys) + f", build {results['kernel']['id']}"
    lines = [origin, "", "| " + " | ".join(table[0]) + " |", "|" + "---|" * len(table[0])]
    lines += ["| " + " | ".join(row.values()) + " |" for row in table]
    return "\n".join([*lines, "", *(f"- {verdict}" for verdict in verdicts(results))])


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the table of a measurement as Markdown.")
    parser.add_argument("results", type=Path, help="JSON that run_experts.py wrote")
    print(markdown(json.loads(parser.parse_args().results.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
