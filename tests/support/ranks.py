"""Runs the functions check_* of modules on ranks: python tests/support/ranks.py DEVICE SIZE MODULE...

With DEVICE cpu the ranks talk by gloo. One process imports the modules and then forks the ranks: imports take longer
than checks. With cuda each rank has a GPU, and they talk by NCCL. It prints {check: [error]}, with an error, or an
empty string, for each rank.
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
from typing import Callable, Dict, List, Sequence

import torch

TIMEOUT = timedelta(seconds=60)  # of a collective; a rank that waits for one that has failed learns of it at once


def device() -> str:
    """The device type of the ranks, one of which this process is."""
    return "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"


def checks_of(modules: Sequence[str], device: str, size: int) -> Dict[str, Callable]:
    """The modules' own functions check_*, in order.

    Those with an attribute `sizes` or `devices` are for these sizes and devices alone.
    """
    checks = {}
    for name in modules:
        for what, value in vars(importlib.import_module(name)).items():
            if what.startswith("check_") and value.__module__ == name:
                if size in getattr(value, "sizes", (size,)) and device in getattr(value, "devices", (device,)):
                    checks[f"{name}.{what}"] = value
    return checks


def _run_rank(rank: int, device: str, size: int, modules: Sequence[str], folder: str) -> None:
    """Runs all checks; after one that fails, ranks no longer agree where they are, so that the rest is left out."""
    as_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in as_torchrun.items()})
    store = f"file://{folder}/store"
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=TIMEOUT)
    for module in modules:
        importlib.import_module(module).prepare()
    errors = {}
    for name, check in checks_of(modules, device, size).items():
        torch.manual_seed(0)
        begun = time.monotonic()
        try:
            check()
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


def run_group(device: str, size: int, modules: Sequence[str]) -> Dict[str, List[str]]:
    """What each check says on each rank."""
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")  # CUDA does not survive a fork
    names = list(checks_of(modules, device, size))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_run_rank, args=(rank, device, size, modules, folder)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        files = [Path(folder, f"{rank}.json") for rank in range(size)]
        found = [json.loads(file.read_text(encoding="utf-8")) if file.exists() else {} for file in files]
    return {name: [each.get(name, "did not run") for each in found] for name in names}


def start(device: str, size: int, *modules: str) -> Dict[str, List[str]]:
    """What this script prints, in a process of its own."""
    command = [sys.executable, __file__, device, str(size), *modules]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300)
    assert result.returncode == 0, f"{size} ranks: exit status {result.returncode}"
    return json.loads(result.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(run_group(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
