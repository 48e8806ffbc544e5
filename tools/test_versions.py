"""The tests without a GPU on each pair of PyTorch and Triton that the package supports: `make test-versions`.

    python tools/test_versions.py [--only NAME] [--workers 2]

Each pair gets a virtual environment, which stays for the next time; the newest one gets the newest transformers
and peft, too. The recorded result has what pytest counted, first of the tests, then of those under Triton's
interpreter. Exits with 1 if a pair did not pass.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Dict, Tuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
FOLDER = Path(tempfile.gettempdir()) / "grouped-moe-versions"  # of the environments
# Triton 3.6's interpreter makes scalars of arrays with a dimension, which NumPy 2.4 refuses.
PAIRS: Dict[str, Tuple[str, ...]] = {
    "oldest": ("torch==2.11.0", "triton==3.6.0", "numpy==2.3.5"),
    "pinned": ("torch==2.13.0", "triton==3.9.0"),
    "newest": ("torch", "triton", "transformers", "peft"),
}
SHOW = (
    "import numpy, torch, transformers, triton; print(*(m.__version__ for m in (torch, triton, numpy, transformers)))"
)


def install(folder: Path, packages: Tuple[str, ...]) -> Path:
    """The Python of a virtual environment that has the repository's requirements and these packages."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    requirements = [word for name in ("runtime", "test") for word in ("-r", str(ROOT / f"requirements/{name}.txt"))]
    subprocess.run([*pip, *requirements], check=True)
    subprocess.run([*pip, "--upgrade", *packages], check=True)
    return python


def test(python: Path, workers: int) -> dict:
    """What `make test` says with this Python: versions, seconds and pytest's counts."""
    shown = subprocess.run([str(python), "-c", SHOW], check=True, capture_output=True, text=True).stdout.split()
    start = time.monotonic()
    command = ["make", "--keep-going", "test", f"PY={python}", f"WORKERS={workers}"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    failures = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
    print(done.stdout[-4000:] if done.returncode else "")
    return {
        **dict(zip(("torch", "triton", "numpy", "transformers"), shown)),
        "status": "failed" if done.returncode else "passed",
        "seconds": round(time.monotonic() - start),
        "counts": re.findall(r"^(?:=+ )?(\d+ (?:passed|failed).*?) in [\d.]+s", done.stdout, re.MULTILINE),
        "failures": [line[:300] for line in failures[:40]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", choices=PAIRS, action="append", help="this pair, repeatable; all without")
    add("--workers", type=int, default=2, help="processes that test (2)")
    arguments = parser.parse_args()
    steps = json.loads(RESULTS.read_text(encoding="utf-8"))["steps"]  # pairs that do not run stay
    names = arguments.only or PAIRS
    for name in names:
        found = steps[name] = test(install(FOLDER / name, PAIRS[name]), arguments.workers)
        said = f"torch {found['torch']}, triton {found['triton']}: {found['status']}, {found['counts']}"
        print(f"{name}: {said}", flush=True)
        results = {
            "benchmark": "versions",
            "date_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "triton": ", ".join(sorted({step["triton"] for step in steps.values()})),
            "steps": steps,
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(steps[name]["status"] != "passed" for name in names))


if __name__ == "__main__":
    sys.exit(main())
