"""`python -m benchmarks [--commit C] [--smoke]`: every benchmark, their tables, and the figures beside the JSON."""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import plot  # noqa: E402
import run_decode  # noqa: E402
import run_growth  # noqa: E402
import run_layers  # noqa: E402
import run_linear  # noqa: E402

SCRIPTS = {"layers": run_layers, "decode": run_decode, "growth": run_growth, "linear": run_linear}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="", help="commit of the package, where git can't tell")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a few seconds")
    parser.add_argument("--scripts", nargs="+", default=list(SCRIPTS), choices=SCRIPTS, help="these alone")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the JSON and the figures")
    arguments = parser.parse_args()
    options = [f"--commit={arguments.commit}"] * bool(arguments.commit) + ["--smoke"] * arguments.smoke
    for name in arguments.scripts:
        output = arguments.results / f"{name}.json"
        SCRIPTS[name].main(["--output", str(output), *options])
        plot.draw(output, output.parent)
