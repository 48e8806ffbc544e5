"""What the package needs to know of a device, and the device that launches go to."""

import threading
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import ContextManager

import torch

from . import _compat

_ALREADY_THERE = nullcontext()


class _Thread(threading.local):
    """The devices that launches of this thread have gone to."""

    devices: frozenset = frozenset()


_thread = _Thread()


@dataclass(frozen=True, eq=False)  # by identity: there is one of each device, and it is part of many keys
class DeviceSpec:
    """What the choice of a kernel and its tile depends on.

    shared_memory: bytes that one program may use. wide_tiles: whether matrix instructions read both operands from
    shared memory (NVIDIA's Hopper and data center Blackwell), which leaves the registers to the accumulator. tf32:
    whether the device has that mode. hopper: whether the Gluon kernels for Hopper run on it. float8: whether Triton has
    e4m3 there. name: as torch reports it. capability: NVIDIA's compute capability, major and minor; (0, 0) of other
    makers' devices. bandwidth: of the device's memory in GB/s, 0 if unknown.
    """

    num_sms: int
    shared_memory: int
    warp_size: int = 32
    wide_tiles: bool = True
    tf32: bool = True
    hopper: bool = False
    float8: bool = False
    name: str = ""
    capability: tuple = (0, 0)
    bandwidth: int = 0

    @property
    def is_nvidia(self) -> bool:
        """Whether NVIDIA made it, as far as its capability is known."""
        return self.capability > (0, 0)


@lru_cache(maxsize=None)
def device_spec(device: torch.device) -> DeviceSpec:
    """The properties of an accelerator."""
    if device.type != "cuda":
        return _xpu_spec(device.index)
    properties = torch.cuda.get_device_properties(device.index)
    on_amd = torch.version.hip is not None
    capability = (0, 0) if on_amd else (properties.major, properties.minor)  # ROCm says 9.0 of an MI210
    # The clock of the memory is in kHz, its bus width in bits, and there are two transfers per clock.
    clock, bus = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return DeviceSpec(
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block if on_amd else properties.shared_memory_per_block_optin,
        warp_size=properties.warp_size,
        wide_tiles=capability in ((9, 0), (10, 0), (10, 3)),
        tf32=not on_amd or properties.gcnArchName.startswith("gfx94"),
        hopper=capability == (9, 0) and _compat.has_gluon(),
        float8=capability >= (8, 9),
        name=properties.name,
        capability=capability,
        bandwidth=2 * clock * bus // 8 // 10**6,
    )


def _xpu_spec(index: int) -> DeviceSpec:
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(index)  # as in Triton's tutorial on fused softmax
    return DeviceSpec(
        num_sms=properties["multiprocessor_count"],
        shared_memory=properties["max_shared_mem"],
        warp_size=driver.active.get_current_target().warp_size,
        wide_tiles=False,
        name=torch.xpu.get_device_name(index),
    )


def device_type(tensor: torch.Tensor) -> str:
    """The type of the device that holds `tensor`; `tensor.device.type` is a new string, which takes the host longer."""
    return "cuda" if tensor.is_cuda else "cpu" if tensor.is_cpu else tensor.device.type


def spec_of(tensor: torch.Tensor) -> DeviceSpec:
    """`device_spec` of the device that holds `tensor`."""
    return device_spec(tensor.device)


def launch_context(tensor: torch.Tensor) -> ContextManager[None]:
    """Context in which launches go to the device that holds `tensor`, which may not be the current one.

    On a CPU autocast is off in it: operands have their dtype already, and sums are meant to be wide.
    """
    if tensor.is_cpu:
        return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else _ALREADY_THERE
    device, backend = tensor.device, torch.cuda if tensor.is_cuda else torch.xpu
    if device not in _thread.devices:
        # Descriptors of the tensor memory accelerator need a context in the thread, which any kernel of PyTorch makes.
        torch.zeros(1, device=device)
        _thread.devices = {*_thread.devices, device}
    return _ALREADY_THERE if backend.current_device() == device.index else backend.device(device)


def dot_precision(dtype: torch.dtype, spec: DeviceSpec) -> str:
    """tf32 for fp32 where the device has it and PyTorch's own flag, set by either of its names, allows it."""
    if dtype != torch.float32 or not spec.tf32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
