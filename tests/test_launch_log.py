"""What the log says of the kernels that run."""

import importlib
import logging

import pytest
import torch

pytest.importorskip("triton")


class Recorder:
    """Stands in for a kernel of Triton's: takes every launch."""

    __name__ = "some_kernel"

    def __init__(self):
        self.launches = 0

    def fn(self, BLOCK_M):
        """The signature of the kernel."""

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.launches += 1

        return run


def test_one_line_says_what_runs(grouped_moe, caplog):
    """Once per kernel and config, by the first launch; none below INFO, none for kernels without a choice."""
    launch = importlib.import_module(f"{grouped_moe.__name__}.backends.triton.launch")
    heuristic = importlib.import_module(f"{grouped_moe.__name__}.tuning.heuristic")
    kernel, x = Recorder(), torch.zeros(1)
    launch._log_once.cache_clear()
    choices = [heuristic.GemmConfig(128, 64, 32, 4, 3, tuned=tuned).describe("a path") for tuned in (False, True)]

    def lines(level):
        caplog.clear()
        with caplog.at_level(level, logger="grouped_moe"):
            for choice in (*choices, choices[0], None):
                bound = launch.Kernel(kernel, {"BLOCK_M": 1}, None, choice)
                bound((1, 1, 1), x)
                bound((1, 1, 1), x)
        return [(record.name, record.levelno, record.getMessage()) for record in caplog.records]

    assert lines(logging.WARNING) == []
    start = "some_kernel on cpu: a path, tile 128x64x32, 4 warps, 3 stages, "
    assert lines(logging.INFO) == [("grouped_moe", logging.INFO, start + how) for how in ("heuristic", "tuned")]
    assert lines(logging.INFO) == []
    assert kernel.launches == 24
