"""Every private name of torch and triton that the package uses, each behind a test for it and with a way without it.

The docstring of each function says what is private, why nothing public does the same, and what happens without it.
"""

import contextlib
import importlib
from functools import lru_cache
from itertools import repeat
from typing import Any, Iterable, List, Optional, Tuple

import torch


def triton_version() -> Tuple[int, ...]:
    """(major, minor)"""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


@lru_cache(maxsize=None)
def keeps_variants(is_cuda: bool) -> bool:
    """Whether compiled kernels may be kept by the facts that Triton compiles them for. is_cuda: of a launch's tensors.

    On CUDA, with Triton 3.6 to 3.9, these are the dtype and the 16-byte alignment of pointers, and whether an int is 1,
    a multiple of 16 or needs 64 bits. Elsewhere each launch goes through `kernel[grid]`, which takes the host two to
    three times as long.
    """
    return is_cuda and torch.version.cuda is not None and (3, 6) <= triton_version() <= (3, 9)


def has_gluon() -> bool:
    """Whether there is Gluon, which is experimental. Without it Triton's kernels run on Hopper."""
    try:
        importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    except ImportError:
        return False
    return True


@lru_cache(maxsize=None)
def reinterpret_method() -> Any:
    """Gluon's function that sees a piece of shared memory as another dtype, or None.

    Triton 3.9 has it as a public method of shared-memory descriptors, before that its name is private. Without it
    low-rank parts of 8-bit weights go to kernels that widen these, and others are loaded in blocks of a whole step.
    """
    from triton.experimental.gluon.language import shared_memory_descriptor as descriptor

    return getattr(descriptor, "reinterpret", None) or getattr(descriptor, "_reinterpret", None)


@lru_cache(maxsize=None)
def launch_options(capability: Tuple[int, int]) -> dict:
    """Options of all launches: dependent ones where the GPU has them. capability: as `DeviceSpec` has it.

    Triton documents neither option. All kernels wait as dependent launches ask for (`backends.kernels.dependent`);
    without the option a kernel starts when the one before it has ended. That multiplications and additions are fused is
    said, as Triton 3.9 warns where it is left open.
    """
    options = {"enable_fp_fusion": True}
    return {**options, "launch_pdl": True} if capability >= (9, 0) else options


def keeps_graph() -> bool:
    """Within a backward: whether the graph stays for another one, so that what was saved must not be overwritten.

    Nothing public tells. Where this is not known the graph counts as kept: a backward then needs more memory.
    """
    ask = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None)
    return True if ask is None else ask()


def goes_on_to(nodes: Iterable[Any]) -> bool:
    """Within a backward: whether it goes on to any of these nodes of its graph.

    Nothing public tells: `needs_input_grad` says what required a gradient in the forward. PyTorch refuses the question
    where `torch.autograd.grad` is to return the gradient of such a node. There, and where the name is gone, it is yes.
    """
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    try:
        return ask is None or any(map(ask, nodes))
    except RuntimeError:
        return True


def in_transform(if_unknown: bool = True) -> bool:
    """Whether a transform of torch.func is at work: under vmap a tensor does not say that its gradient is asked for.

    Nothing public tells. Where this is not known calls go through their ops, which takes the host 15 us longer, a layer
    with a weight per group copies its weights, and gradient transforms end in PyTorch's own error.
    """
    try:
        return torch._C._functorch.peek_interpreter_stack() is not None
    except AttributeError:
        return if_unknown


def is_watched() -> bool:
    """Whether a mode sees the ops that are called.

    Nothing public tells. Where this is not known every call goes through the package's own ops.
    """
    try:
        return torch._C._len_torch_dispatch_stack() > 0
    except AttributeError:
        return True


def is_recorded() -> bool:
    """Whether a profiler, a mode of functions or a trace of `torch.jit` takes note of the ops that are called.

    Of the last there is a public test; the others have none. One name tells of the profilers of this thread, one of
    those that Python started for any. Where this is not known every call goes through its op.
    """
    try:
        modes, profiles = torch._C._len_torch_function_stack(), torch.autograd.profiler._is_profiler_enabled
        return modes > 0 or profiles or torch.autograd._profiler_enabled() or torch.jit.is_tracing()
    except AttributeError:
        return True


def is_below_autograd() -> bool:
    """Whether the caller is an op that autograd has dealt with already, though gradients are enabled.

    Nothing public tells. Where this is not known calls that need a gradient go through their ops, whose dispatch knows.
    """
    ask, keys = (getattr(torch._C, name, None) for name in ("_dispatch_tls_is_dispatch_key_excluded", "DispatchKey"))
    key = getattr(keys, "AutogradFunctionality", None)
    return True if ask is None or key is None else ask(key)


def has_tangents() -> bool:
    """Whether tensors may have tangents of forward mode; True where that is not known, and each has to be asked.

    The level is private; asking five tensors takes as long as an allocation.
    """
    try:
        return torch.autograd.forward_ad._current_level >= 0
    except AttributeError:
        return True


def has_device_assertions() -> bool:
    """Whether `assert_on_device` can fail. PyTorch for ROCm is built without them."""
    return hasattr(torch, "_assert_async") and torch.version.hip is None


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Fails on the device, at the next sync, if the condition does not hold. Ask `has_device_assertions` before.

    PyTorch has no public assertion without a sync. Without it a capacity makes room for all slots.
    """
    torch._assert_async(condition, message)


def versions_of(tensors: Iterable[Optional[torch.Tensor]]) -> List[int]:
    """How often each tensor was modified in place, as autograd counts; always 0 where that is not to be had.

    `save_for_backward` compares it, too, but a thousand weights of a layer would cost a thousand saved tensors.
    """
    return [*map(getattr, tensors, repeat("_version"), repeat(0))]


def is_transparent(kind: type) -> bool:
    """Whether a class of tensors is one by which PyTorch traces or shards, so that ops see through it.

    They are in private modules, and have nothing public in common. One that moves elsewhere counts as a subclass with
    operations of its own, which is refused by an error that names it.
    """
    return kind.__module__.startswith(("torch._subclasses.", "torch._functorch.", "torch.distributed."))


def real_values() -> Any:
    """Context in which tensors have values although a compiler or an exporter traces with fake ones.

    PyTorch has nothing public for it. Without it, what asks for values under a compiler gets fake ones.
    """
    modes = importlib.import_module("torch.utils._python_dispatch")
    disable = getattr(modes, "_disable_current_modes", None)
    return contextlib.nullcontext() if disable is None else disable()
