"""Launches in these tests are checked: an address next to a tensor fails, though it lies in another one."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def copy_kernel(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """out[:N] = x[:N]. Grid: (1,)."""
    columns = tl.arange(0, BLOCK)
    tl.store(out_ptr + columns, tl.load(x_ptr + columns, mask=columns < N), mask=columns < N)


def test_bounds_are_checked(module):
    kernel, memory = module("backends.triton.launch").Kernel(copy_kernel, {"N": 5, "BLOCK": 8}), torch.arange(20.0)
    kernel((1, 1, 1), memory[:5], memory[10:15])
    assert memory[10:15].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    for x, out, what in ((memory[:4], memory[10:], "reads"), (memory, torch.empty(9)[:3], "writes")):
        with pytest.raises(InterpreterError, match=f"{what} [12] of 5 addresses out of bounds"):
            kernel((1, 1, 1), x, out)
