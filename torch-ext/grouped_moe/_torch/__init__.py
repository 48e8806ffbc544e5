"""The CPU implementations: same contract as the Triton kernels, one GEMM per expert that has rows.

One rounding differs: in two-byte dtypes the activation starts from the stored, rounded pre-activation here, and from
the accumulator there.
"""

import functools

import torch


def without_autocast(function):
    """Runs it outside of autocast: inputs have their dtype already, and sums are meant to be wide."""

    @functools.wraps(function)
    def plain(*args, **kwargs):
        # Not torch.autocast as a decorator: one instance would hold the state of all threads.
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return plain
