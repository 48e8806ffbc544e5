"""Runs functions of a module on gloo ranks: python tests/ranks.py MODULE SIZE... prints {size: {check: [error or ""]}}.

One process imports everything, then forks the ranks of one group after the other: imports take longer than checks.
"""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Dict, List, Sequence

import torch

TIMEOUT = timedelta(seconds=60)  # of a collective; a rank that waits for one that has failed learns of it at once
Errors = Dict[str, List[str]]


def checks_of(module: ModuleType, size: int) -> List[str]:
    """Names of its functions check_*, in order; those with an attribute `sizes` for these sizes alone."""
    found = [name for name in vars(module) if name.startswith("check_")]
    return [name for name in found if size in getattr(getattr(module, name), "sizes", (size,))]


def _run_rank(module: ModuleType, rank: int, size: int, folder: str) -> None:
    """Runs all checks; after one that fails, ranks no longer agree where they are, so that the rest is left out."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=TIMEOUT)
    module.prepare()
    errors = {}
    for name in checks_of(module, size):
        torch.manual_seed(0)
        begun = time.monotonic()
        try:
            getattr(module, name)()
            torch.distributed.barrier()
        except BaseException:
            errors[name] = traceback.format_exc()
            break
        errors[name] = ""
        if rank == 0:
            print(f"{size} ranks, {name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    Path(folder, f"{rank}.json").write_text(json.dumps(errors), encoding="utf-8")
    sys.stderr.flush()
    os._exit(0)  # the others may have gone: no farewell


def run_group(module: ModuleType, size: int) -> Errors:
    """What each check says on each rank."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_run_rank, args=(module, rank, size, folder)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        files = [Path(folder, f"{rank}.json") for rank in range(size)]
        found = [json.loads(file.read_text(encoding="utf-8")) if file.exists() else {} for file in files]
    return {name: [each.get(name, "did not run") for each in found] for name in checks_of(module, size)}


def start(module: str, sizes: Sequence[int], timeout: float) -> Dict[str, Errors]:
    """The result of this script in a process of its own, by size."""
    command = [sys.executable, __file__, module, *map(str, sizes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout)
    assert result.returncode == 0, f"{module} on {sizes} ranks: exit status {result.returncode}"
    return json.loads(result.stdout.splitlines()[-1])


if __name__ == "__main__":
    checks = importlib.import_module(sys.argv[1])
    print(json.dumps({size: run_group(checks, int(size)) for size in sys.argv[2:]}))
