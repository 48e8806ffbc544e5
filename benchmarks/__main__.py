"""`python -m benchmarks [--smoke] [--only NAME...]`: every benchmark in a process of its own, then the figures."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import plot  # noqa: E402
import torch  # noqa: E402
from machine import RESULTS, result_name  # noqa: E402
from run_experts import SUITES  # noqa: E402

COMMANDS = {
    **{name: ("run_experts.py", name) for name in SUITES},
    **{name: (f"run_{name}.py",) for name in ("linear", "new_shapes")},
}


def main() -> int:
    """1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, minutes on a CPU")
    parser.add_argument("--only", nargs="+", default=list(COMMANDS), choices=COMMANDS, help="these benchmarks")
    parser.add_argument(
        "--results", type=Path, help="folder of JSON and figures; by default, not with --smoke, results/"
    )
    arguments = parser.parse_args()
    gpu, failed = torch.cuda.get_device_name() if torch.cuda.is_available() else None, 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.results or (Path(scratch) if arguments.smoke else RESULTS)
        for name in arguments.only:
            script, *options = COMMANDS[name]
            output = folder / result_name(name, None if name == "cpu" else gpu)
            options += ["--output", str(output), *(["--smoke"] * arguments.smoke)]
            failed += subprocess.run([sys.executable, str(HERE / script), *options]).returncode != 0
        plot.draw(folder, result_name("", gpu).split(".")[0].strip("_"))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
