"""`python -m benchmarks [--commit C] [--smoke]`: every benchmark, their tables, and the figures beside the JSON.

Each script runs in a process of its own; before them, processes side by side compile what they need.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import plot  # noqa: E402
from report import EAGER, OURS  # noqa: E402
from workload import LAYERS, MODELS  # noqa: E402

# What makes each JSON of results.
SCRIPTS = {
    "layers": ("run_layers.py",),
    "decode": ("run_decode.py",),
    "growth": ("run_growth.py",),
    "linear": ("run_linear.py",),
    "products": ("run_products.py",),
    "models": ("run_layers.py", "--models", "--peers", OURS, EAGER),
    "models_decode": ("run_decode.py", "--models"),
}
PREPARE_SECONDS = 60
# The words that choose the cells which one process prepares.
SHARES = {
    "layers": tuple(layer.name for layer in LAYERS),
    "decode": ("T=", "generate"),
    "growth": ("tokens", "local", "experts", "skew", "routing"),
    "models": tuple(layer.name for layer in MODELS),
    "models_decode": ("T=",),
}


def command(name: str, *options: str) -> list:
    script, *own = SCRIPTS[name]
    return [sys.executable, str(HERE / script), *own, *options]


def prepare(names: list) -> None:
    """Fills the caches on disk; what does not get there in time compiles later."""
    options = ("--prepare", "--budget", str(PREPARE_SECONDS))
    shares = [(name, word) for name in names for word in SHARES.get(name, ())]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}  # of each of these processes
    running = [subprocess.Popen(command(name, *options, "--only", word), env=environment) for name, word in shares]
    for process in running:
        try:
            process.wait(PREPARE_SECONDS + 30)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="", help="commit of the package, where git can't tell")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, minutes on a CPU")
    parser.add_argument("--scripts", nargs="+", default=list(SCRIPTS), choices=SCRIPTS, help="these alone")
    parser.add_argument(
        "--results", type=Path, help="folder of JSON and figures (benchmarks/results; with --smoke a temporary one)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return run(arguments, arguments.results or (Path(scratch) if arguments.smoke else HERE / "results"))


def run(arguments: argparse.Namespace, results: Path) -> int:
    """1 if a script failed."""
    options = [f"--commit={arguments.commit}"] * bool(arguments.commit) + ["--smoke"] * arguments.smoke
    if not arguments.smoke:
        prepare(arguments.scripts)
    failed = 0
    for name in arguments.scripts:
        output = results / f"{name}.json"
        failed += subprocess.run(command(name, "--output", str(output), *options)).returncode != 0
        if output.exists() and not name.startswith("models"):  # a table of theirs says more than a figure
            plot.draw(output, output.parent)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
