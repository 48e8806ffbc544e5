"""`python -m benchmarks [options of run_experts.py]`: measures, prints the table, draws the figures beside the JSON."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import plot  # noqa: E402
import run_experts  # noqa: E402

if __name__ == "__main__":
    output = HERE / "results" / "experts.json"
    run_experts.main(["--output", str(output), *sys.argv[1:]])
    plot.draw(output, output.parent)
