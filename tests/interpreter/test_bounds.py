"""Launches in these tests are checked: an address next to a tensor fails, though it lies in another one.

So does a store that writes an address twice.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def copy_kernel(x_ptr, out_ptr, N: tl.constexpr, REPEATS: tl.constexpr, BLOCK: tl.constexpr):
    """out[i // REPEATS] = x[i] for i < N. Grid: (1,)."""
    columns = tl.arange(0, BLOCK)
    tl.store(out_ptr + columns // REPEATS, tl.load(x_ptr + columns, mask=columns < N), mask=columns < N)


def test_bounds_are_checked(module):
    options, memory = {"N": 5, "REPEATS": 1, "BLOCK": 8}, torch.arange(20.0)
    kernel = module("backends.triton.launch").Kernel(copy_kernel, options)
    kernel((1, 1, 1), memory[:5], memory[10:15])
    assert memory[10:15].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    for x, out, what in ((memory[:4], memory[10:], "reads"), (memory, torch.empty(9)[:3], "writes")):
        with pytest.raises(InterpreterError, match=f"{what} [12] of 5 addresses out of bounds"):
            kernel((1, 1, 1), x, out)


def test_an_address_is_written_once(module):
    kernel = module("backends.triton.launch").Kernel(copy_kernel, {"N": 5, "REPEATS": 2, "BLOCK": 8})
    with pytest.raises(InterpreterError, match="writes an address twice at once"):
        kernel((1, 1, 1), torch.arange(5.0), torch.empty(5))
