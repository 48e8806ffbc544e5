"""A warp-specialised kernel whose warps share nothing: hazards that racecheck finds in it are Triton's own.

    python tools/sanitize_control.py

Triton hands each group of warps its work through shared memory, behind named barriers, which racecheck does not follow.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def store(out_ptr, value, NUMBER: gl.constexpr):
    gl.store(out_ptr + NUMBER, value + NUMBER)


@gluon.jit
def control_kernel(out_ptr, value):
    """out[i] = value + i for i < 3, each by a group of warps. Grid: (1,)."""
    gl.warp_specialize(
        [(store, (out_ptr, value, 0)), (store, (out_ptr, value, 1)), (store, (out_ptr, value, 2))],
        [4, 1],
        [64, 32],
    )


def main() -> None:
    out = torch.zeros(3, dtype=torch.int32, device="cuda")
    for value in range(3):
        control_kernel[(1,)](out, value, num_warps=4)
        assert out.tolist() == [value, value + 1, value + 2], out.tolist()
    print("control: all right")


if __name__ == "__main__":
    main()
