"""Runs the functions check_* of modules on ranks: python tests/support/ranks.py DEVICE SIZE MODULE...

With DEVICE cpu the ranks talk by gloo. One process imports the modules and then forks the ranks: imports take longer
than checks. With cuda each rank has a GPU, and they talk by NCCL. The first check that fails on a rank ends them all.
"""

import importlib
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Callable, Dict, Sequence

import torch

TIMEOUT = timedelta(seconds=60)  # of a collective


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


def run_rank(rank: int, device: str, size: int, modules: Sequence[str], store: str) -> None:
    """Runs all checks as one of the ranks, which meet at a file."""
    as_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in as_torchrun.items()})
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=TIMEOUT)
    for module in modules:
        importlib.import_module(module).prepare()
    for name, check in checks_of(modules, device, size).items():
        torch.manual_seed(0)
        begun = time.monotonic()
        check()
        torch.distributed.barrier()
        if rank == 0:
            print(f"{size} ranks, {name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    sys.stderr.flush()
    os._exit(0)  # the others may have gone: no farewell


def start(device: str, size: int, *modules: str) -> None:
    """Runs this script in a process of its own. Fails if a check does, whose rank and traceback are printed."""
    command = [sys.executable, __file__, device, str(size), *modules]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run(command, env=environment, timeout=300)
    assert result.returncode == 0, f"{size} ranks: exit status {result.returncode}"


if __name__ == "__main__":
    _, device_type, size, *modules = sys.argv
    assert checks_of(modules, device_type, int(size))
    with tempfile.TemporaryDirectory() as folder:
        arguments = device_type, int(size), modules, f"file://{folder}/store"
        method = "fork" if device_type == "cpu" else "spawn"  # CUDA does not survive a fork
        torch.multiprocessing.start_processes(run_rank, arguments, int(size), start_method=method)
