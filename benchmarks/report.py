"""Reads the JSON of any of the scripts: the tables that a run ends with, and the same as Markdown.

python benchmarks/report.py benchmarks/results/layers.json
"""

import argparse
import json
import math
from pathlib import Path
from typing import Dict, List, Optional, Tuple

# Providers.
OURS, RECOMPUTE, EAGER, COMPILED = "ours", "ours, recompute", "grouped_mm eager", "grouped_mm compiled"
BATCHED, SCATTERMOE, SONICMOE, DENSE, DENSE_WGRAD = "batched_mm", "ScatterMoE", "SonicMoE", "dense bound", "dense wgrad"
LOOP, TORCH, SORT, COPY = "loop", "grouped_mm", "sort", "copy"
# What the scripts write as "benchmark".
LAYERS, DECODE, GROWTH, LINEAR = "layers", "decode", "growth", "grouped_linear"
# What is measured alone.
PARTS = FORWARD, DGRAD, WGRAD, STEP = ("forward", "dgrad", "wgrad", "step")
FROZEN = "backward, weights frozen"
BACKWARD, CALLS, HOST = "backward", "eager calls", "host"
GRAPH, STEP_GRAPH = "forward, CUDA graph", "step, CUDA graph"
TRACKED, ELAPSED = "forward with autograd", ", elapsed"
PACKED, DISCRETE = "module", "module, discrete, main_grad"
OVER_LINE = 1.10  # growth past this multiple of the line between neighbours is flagged


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


PEERS = {EAGER: "grouped_mm", COMPILED: "compiled", SCATTERMOE: "ScatterMoE", SONICMOE: "SonicMoE"}
KEEPERS = {OURS: "ours", RECOMPUTE: "recompute", EAGER: "grouped_mm", SCATTERMOE: "ScatterMoE", SONICMOE: "SonicMoE"}


def cell_title(cell: dict) -> str:
    return f"{cell['layer']} {mode(cell)} T={cell['tokens']} local={local(cell)}"


def rate(cell: dict, provider: str, of: Optional[float] = None) -> Optional[float]:
    """TFLOP/s of the products of a cell, or of a part of it that takes so many ms."""
    ms = milliseconds(cell, provider) if of is None else of
    return cell["flops"] / ms / 1e9 if ms else None


def part_rates(cell: dict, provider: str) -> Dict[str, Optional[float]]:
    """TFLOP/s of dgrad and wgrad, a third of a step's products each. wgrad: of what all gradients take more."""
    third = {"flops": cell["flops"] / 3}
    parts = cell["parts"]
    dgrad, backward = (milliseconds({"providers": parts.get(part, {})}, provider) for part in (FROZEN, BACKWARD))
    if provider == DENSE:
        wgrad = milliseconds({"providers": parts.get(FROZEN, {})}, DENSE_WGRAD)
    else:
        wgrad = backward - dgrad if dgrad and backward and backward > dgrad else None
    return {part: ms and rate(third, provider, ms) for part, ms in ((DGRAD, dgrad), (WGRAD, wgrad))}


def measured(results: dict, key: str = "cells") -> List[dict]:
    """The cells that ran."""
    return [cell for cell in results.get(key, ()) if "skipped" not in cell]


def layer_rows(results: dict) -> List[Dict[str, str]]:
    """Times in ms; TF/s of the products; error: the worst relative one against fp32."""
    table = []
    for cell in measured(results):
        row = {"layer": cell["layer"], "mode": mode(cell), "T": str(cell["tokens"]), "local": local(cell)}
        row.update({f"vs {label}": text(speedup(cell, name), ".2f", "x") for name, label in PEERS.items()})
        row["of dense"] = text(speedup(cell, DENSE), ".0%")
        row.update({"ours": text(milliseconds(cell, OURS)), "TF/s": text(rate(cell, OURS), ".0f")})
        row.update({label: text(milliseconds(cell, name)) for name, label in PEERS.items()})
        row.update({"dense": text(milliseconds(cell, DENSE)), "floor hot": text(cell.get("floor_hot_ms"))})
        row["error"] = text(worst_error(cell, OURS), ".1e")
        table.append(row)
    return table


def step_rows(results: dict) -> List[Dict[str, str]]:
    """Steps: TF/s of dgrad and wgrad next to dense products; MiB saved for backward, and the peak of a step."""
    table = []
    for cell in measured(results):
        if not cell["backward"]:
            continue
        row = {"layer": cell["layer"], "T": str(cell["tokens"]), "local": local(cell)}
        found = {name: part_rates(cell, name) for name in (OURS, EAGER, DENSE)}
        for part in (DGRAD, WGRAD):
            row[f"{part} TF/s: ours / grouped_mm / dense"] = " / ".join(text(r[part], ".0f") for r in found.values())
        row["recompute, time"] = text(speedup(cell, OURS, RECOMPUTE), ".2f", "x")
        for what in ("saved", "peak"):
            values = [text(mib(cell, name, f"{what}_mib"), ".0f") for name in KEEPERS]
            row[f"{what} MiB: " + " / ".join(KEEPERS.values())] = " / ".join(values)
        table.append(row)
    return table


def sentinel_rows(results: dict) -> List[Dict[str, str]]:
    """Time by the local share over that with all slots local."""
    by_key: Dict[tuple, Dict[float, dict]] = {}
    for cell in measured(results):
        by_key.setdefault((cell["layer"], mode(cell), cell["tokens"]), {})[cell["local"]] = cell
    table = []
    for (layer, how, tokens), cells in by_key.items():
        if 1.0 not in cells or len(cells) < 2:
            continue
        row = {"layer": layer, "mode": how, "T": str(tokens)}
        for name in (OURS, *PEERS, DENSE):
            whole = milliseconds(cells[1.0], name)
            times = [milliseconds(cells.get(share, {}), name) for share in (0.5, 0.125)]
            row[name] = " / ".join(text(t / whole if t and whole else None, ".2f") for t in times)
        table.append(row)
    return table


def faults(results: dict) -> List[str]:
    """Results off the reference, and what did not run, with its reason."""
    wrong, skipped = [], {}
    for key in ("cells", "series", "routing", "combine", "generate"):
        for cell in results.get(key, ()):
            where = cell_title(cell) if "local" in cell else " ".join(str(v) for v in list(cell.values())[:3])
            entries = {"all": cell, **cell.get("providers", {}), **{str(p["value"]): p for p in cell.get("points", ())}}
            entries.update({f"{name}, {GRAPH}": e for name, e in cell.get(GRAPH, {}).get("providers", {}).items()})
            for name, entry in entries.items():
                if entry.get("ok") is False:
                    wrong.append(f"{name} at {where}")
                if "skipped" in entry:
                    skipped.setdefault(f"{name}: {entry['skipped']}", []).append(where)
    lines = ["results off the reference: " + (", ".join(wrong) or "none")]
    return lines + [f"did not run: {what} ({len(where)}: {'; '.join(where)})" for what, where in skipped.items()]


def layer_verdicts(results: dict) -> List[str]:
    """Where ours is slower than a peer."""
    lines = []
    for name in PEERS:
        ratios = {cell_title(c): speedup(c, name) for c in measured(results) if speedup(c, name)}
        slower = [f"{title} {ratio:.2f}" for title, ratio in ratios.items() if ratio < 1]
        lines.append(
            f"slower than {name} in {len(slower)} of {len(ratios)} cells" + ": " * bool(slower) + ", ".join(slower)
        )
    return lines + faults(results)


def better(part: dict) -> Optional[float]:
    """How many times ours is faster than the better of grouped_mm and batched_mm."""
    ratios = [ratio for ratio in (speedup(part, EAGER), speedup(part, BATCHED)) if ratio]
    return min(ratios, default=None)


def decode_rows(results: dict) -> List[Dict[str, str]]:
    """ours / grouped_mm / batched_mm in ms; vs: times that ours is faster than the better of the two."""
    table = []
    for cell in measured(results):
        row = {"layer": cell["layer"], "T": str(cell["tokens"]), "floor": text(cell["floor_hot_ms"])}
        for part in (GRAPH, CALLS, HOST):
            row[f"{part}, vs"] = text(better(cell[part]), ".2f", "x")
            row[part] = " / ".join(text(milliseconds(cell[part], name)) for name in (OURS, EAGER, BATCHED))
        row["error"] = text(worst_error(cell, OURS), ".1e")
        table.append(row)
    return table


def generate_rows(results: dict) -> List[Dict[str, str]]:
    """Tokens per second of generate(), and how far the logits of a prompt are apart."""
    table = []
    for cell in measured(results, "generate"):
        speeds = [cell["providers"].get(name, {}).get("tokens_per_s") for name in (OURS, EAGER)]
        row = {"batch": str(cell["batch"]), "cache": "static, compiled" if cell["static"] else "eager"}
        row.update({"ours, tokens/s": text(speeds[0], ".1f"), "transformers' default": text(speeds[1], ".1f")})
        row["ratio"] = text(speeds[0] / speeds[1] if all(speeds) else None, ".2f", "x")
        table.append({**row, "logits apart": text(cell.get("difference"), ".1e")})
    return table


def over_line(series: dict) -> List[Optional[float]]:
    """Each point's time over that of the straight line between its neighbours, both axes logarithmic.

    Of skew: over the time of the balanced routing.
    """
    points = series["points"]
    times = [point.get("median_ms") for point in points]
    if series["x"] == "skew":
        return [None] + [t / times[0] if t and times[0] else None for t in times[1:]]
    found: List[Optional[float]] = [None] * len(points)
    for i in range(1, len(points) - 1):
        if all(times[i - 1 : i + 2]):
            before, here, after = (math.log(point["value"]) for point in points[i - 1 : i + 2])
            share = (here - before) / (after - before)
            found[i] = times[i] / (times[i - 1] ** (1 - share) * times[i + 1] ** share)
    return found


def growth_rows(results: dict) -> List[Dict[str, str]]:
    """The series, a row per point."""
    table = []
    for series in measured(results, "series"):
        for point, over in zip(series["points"], over_line(series)):
            value = point["pattern"] if series["x"] == "skew" else f"{point['value']:g}"
            row = {"grows": series["x"], "mode": mode(series), "at": value}
            row.update({"ms": text(point.get("median_ms"), ".4f"), "floor": text(point["floor_hot_ms"], ".4f")})
            row["over the line"] = text(over, ".2f") + (" FLAG" if over and over > OVER_LINE else "")
            table.append({**row, "error": text(max(point["errors"].values()), ".1e")})
    return table


def routing_rows(results: dict) -> List[Dict[str, str]]:
    """Microseconds of routing, ours and by a sort."""
    table = []
    for cell in measured(results, "routing"):
        times = [milliseconds(cell, name) for name in (OURS, SORT)]
        row = {"S": str(cell["slots"]), "E": str(cell["experts"])}
        row.update(
            {"ours, us": text(times[0] and times[0] * 1e3, ".1f"), "sort, us": text(times[1] and times[1] * 1e3, ".1f")}
        )
        table.append(row)
    return table


def combine_rows(results: dict) -> List[Dict[str, str]]:
    """Combine next to a copy of as many bytes."""
    table = []
    for cell in measured(results, "combine"):
        row = {
            "T": str(cell["tokens"]),
            "H": str(cell["hidden"]),
            "us": text((milliseconds(cell, OURS) or 0) * 1e3, ".1f"),
        }
        for name, label in ((OURS, "GB/s"), (COPY, "copy GB/s")):
            row[label] = text(cell["providers"].get(name, {}).get("gb_per_s"), ".0f")
        table.append(row)
    return table


def growth_verdicts(results: dict) -> List[str]:
    """The points that are flagged."""
    rows = [row for row in growth_rows(results) if "FLAG" in row["over the line"]]
    flagged = [f"{row['grows']} {row['mode']} {row['at']}: {row['over the line'][:4]}" for row in rows]
    return [f"more than {OVER_LINE - 1:.0%} over the line: " + (", ".join(flagged) or "none"), *faults(results)]


def progress(title: str, cell: dict) -> str:
    """One line about a cell that has just run, with the reasons of what did not."""
    parts = [cell, *(cell[part] for part in (GRAPH, CALLS, HOST) if part in cell)]
    timed = [(name, milliseconds(part, name)) for part in parts for name in part.get("providers", {})]
    said = [f"{name} {text(ms)}" for name, ms in timed if ms]
    said += [f"{point['value']:g}: {text(point.get('median_ms'))}" for point in cell.get("points", ())]
    entries = {"all": cell, **cell.get("providers", {})}
    said += [f"{name} skipped: {entry['skipped'][:70]}" for name, entry in entries.items() if "skipped" in entry]
    return f"{title} ({cell['seconds']:.1f} s): " + ", ".join(said)


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
        parts = {part: cell.get(part, {}) for part in (*PARTS, GRAPH, STEP_GRAPH)}
        for name, part in parts.items():
            over = (TORCH,) if name in (GRAPH, STEP_GRAPH) else (LOOP, TORCH)
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
        graphs = {
            f"{name}, {part}": entry
            for part in (GRAPH, STEP_GRAPH)
            for name, entry in cell.get(part, {}).get("providers", {}).items()
        }
        for name, entry in (("all", cell), *providers.items(), *graphs.items()):
            if "skipped" in entry:
                skipped.append(f"{name} at {linear_title(cell)}: {entry['skipped']}")
    return wrong, skipped


def linear_verdicts(results: dict) -> List[str]:
    """Every part of a cell in which ours is slower than a peer, what is wrong, and what did not run."""
    lines = []
    for peer in (LOOP, TORCH):
        count, slower = 0, {}
        for cell in sorted(results["cells"], key=linear_order):
            ratios = {part: speedup(cell.get(part, {}), peer) for part in (*PARTS, GRAPH, STEP_GRAPH)}
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
            for name in (OURS, PACKED, DISCRETE, LOOP, TORCH):
                times = [milliseconds(cell[key], name) for key in (part, part + ELAPSED)]
                row[f"{name}, us"] = "{} ({})".format(*(text(t and t * 1e3, ".0f") for t in times))
            table.append(row)
    return table


def tables(results: dict) -> Tuple[List[List[Dict[str, str]]], List[str]]:
    """The tables of any script that are not empty, and the verdicts."""
    makers, verdicts = {
        LINEAR: ((linear_rows, host_rows), linear_verdicts),
        LAYERS: ((layer_rows, step_rows, sentinel_rows), layer_verdicts),
        DECODE: ((decode_rows, generate_rows), faults),
        GROWTH: ((combine_rows, routing_rows, growth_rows), growth_verdicts),
    }[results["benchmark"]]
    return [table for table in (make(results) for make in makers) if table], verdicts(results)


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
    parser.add_argument("results", type=Path, help="JSON that a script wrote")
    print(markdown(json.loads(parser.parse_args().results.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
