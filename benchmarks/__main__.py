"""`python -m benchmarks [--commit C] [--smoke]`: both benchmarks, their tables, and the figures beside the JSON."""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import plot  # noqa: E402
import run_experts  # noqa: E402
import run_linear  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="", help="commit of the package, where git can't tell")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a few seconds")
    arguments = parser.parse_args()
    options = [f"--commit={arguments.commit}"] * bool(arguments.commit) + ["--smoke"] * arguments.smoke
    for name, benchmark in (("experts", run_experts), ("linear", run_linear)):
        output = HERE / "results" / f"{name}.json"
        benchmark.main(["--output", str(output), *options])
        plot.draw(output, output.parent)
