"""Dependent launches: the next kernel of a stream starts while the stores of the one before it are flushed.

Every kernel of the package begins with `wait_for_stream`. `launch.Kernel` may therefore launch any of them so, which
hides what lies between two kernels. None lets the next one in before its own programs have ended: programs that only
wait cost those that stream weights up to 10 %. Source: CUDA programming guide, programmatic dependent launch.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_wait
from triton.runtime.jit import constexpr_function


@constexpr_function
def has_dependent_launches():
    """Whether the GPU that is compiled for knows them: NVIDIA's, from Hopper on."""
    return not knobs.runtime.interpret and tl.target_info.cuda_capability_geq(9)


@triton.jit
def wait_for_stream():
    """Waits until all earlier kernels of the stream have ended and their stores are visible."""
    if has_dependent_launches():
        gdc_wait()
