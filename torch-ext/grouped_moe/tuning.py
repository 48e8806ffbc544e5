"""Tile choice for the grouped GEMMs: a heuristic in the shapes a host knows, fitted to the device's shared memory.

Nothing here depends on the number of routed rows (known on the device only) nor enters a kernel's compile key beyond
the chosen tile, so a new number of tokens compiles at most once per row-tile size.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Optional, Tuple

import torch


class DeviceSpec(NamedTuple):
    """What the choice of a tile needs to know of a device.

    shared_memory: bytes one program may use. wide_tiles: whether its matrix instructions read both operands from
    shared memory (NVIDIA's Hopper and data center Blackwell), which leaves the registers to the accumulator. tf32:
    whether it has that mode. hopper: whether Gluon kernels for Hopper run on it.
    """

    num_sms: int
    shared_memory: int
    warp_size: int = 32
    wide_tiles: bool = True
    tf32: bool = True
    hopper: bool = False


@dataclass(frozen=True)
class GemmConfig:
    """A tile of BLOCK_M x BLOCK_N outputs, BLOCK_K deep; programs_per_sm sizes a persistent grid."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    programs_per_sm: int = 1

    def launch_options(self) -> dict:
        """The keyword arguments of a kernel launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


@lru_cache(maxsize=None)
def device_spec(device_type: str, index: int) -> DeviceSpec:
    """Properties of a device as Triton's driver reports them."""
    import triton
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(index)
    target = driver.active.get_current_target()
    return DeviceSpec(
        num_sms=properties["multiprocessor_count"],
        shared_memory=properties["max_shared_mem"],
        warp_size=target.warp_size,
        wide_tiles=target.backend == "cuda" and target.arch in (90, 100, 103),
        tf32=target.backend != "hip" or target.arch.startswith("gfx94"),
        hopper=target.backend == "cuda" and target.arch == 90 and _triton_version(triton) >= (3, 6),
    )


def _triton_version(triton) -> Tuple[int, ...]:
    """(major, minor)"""
    return tuple(map(int, triton.__version__.split(".")[:2]))


def on_device_of(tensor: torch.Tensor):
    """Context in which launches go to the accelerator that holds `tensor`, which may not be the current one."""
    device = tensor.device
    backend = getattr(torch, device.type)
    return nullcontext() if backend.current_device() == device.index else backend.device(device)


def spec_of(tensor: torch.Tensor) -> DeviceSpec:
    """`device_spec` of the device that holds `tensor`."""
    return device_spec(tensor.device.type, tensor.device.index or 0)


def choose_block_m(num_slots: int, num_experts: int, dtype: torch.dtype) -> int:
    """Rows per tile: the power of two near the rows an expert gets if every slot is local, 16 to 128.

    Forward and backward, and every GEMM of a call, share it: one schedule serves them all.
    """
    return min(rows_per_expert(num_slots, num_experts), 128 if dtype.itemsize == 2 else 64)


def rows_per_expert(num_slots: int, num_experts: int) -> int:
    """The rows an expert gets on average if every slot is local, as the next power of two from 16 to 1024."""
    average = -(-num_slots // max(1, min(num_experts, num_slots)))
    return min(1024, max(16, 1 << max(0, average - 1).bit_length()))


# (block_m, two_weights) -> (block_n, block_k, num_warps, num_stages, programs_per_sm), for two-byte types.
# Tall tiles reuse a gathered row tile over many columns; thin ones stream weights, so they are many and deep.
_GEMM_TILES = {
    (16, False): (64, 128, 4, 3, 3),
    (32, False): (128, 64, 4, 4, 2),
    (64, False): (128, 64, 4, 4, 2),
    (128, False): (256, 64, 8, 3, 1),
    (16, True): (64, 128, 4, 3, 2),
    (32, True): (64, 64, 4, 4, 2),
    (64, True): (64, 64, 4, 4, 2),
    (128, True): (128, 64, 8, 3, 1),
}


# The same by row tile where both operands come by descriptor.
_TMA_GEMM_TILES = {
    64: (256, 64, 4, 4, 1),
    128: (256, 64, 8, 4, 1),
}


@lru_cache(maxsize=None)
def gemm_config(
    block_m: int, n: int, dtype: torch.dtype, spec: DeviceSpec, weight_tiles: int = 1, tma: bool = False
) -> GemmConfig:
    """Config of a grouped GEMM with N output columns; weight_tiles: 2 for the gated up-projection (gate and up).

    tma: both operands are read by descriptor.
    """
    if tma:
        block_n, block_k, num_warps, num_stages, programs = _TMA_GEMM_TILES[block_m]
        config = GemmConfig(block_m, block_n, block_k, num_warps, num_stages, programs_per_sm=programs)
        return _fit(config, n, weight_tiles, dtype.itemsize, spec)
    block_n, block_k, num_warps, num_stages, programs = _GEMM_TILES[block_m, weight_tiles == 2]
    if dtype.itemsize > 2:
        # fp32 without tf32 multiplies on the plain cores: accumulators and operands must both fit the registers.
        block_n, block_k, num_warps, num_stages = min(block_n, 64 // weight_tiles), 32, 8 if block_m == 64 else 4, 2
    elif block_m == 128 and not spec.wide_tiles:
        block_n //= 2
    config = GemmConfig(block_m, block_n, block_k, num_warps, num_stages, programs_per_sm=programs)
    return _fit(config, n, weight_tiles, dtype.itemsize, spec)


@lru_cache(maxsize=None)
def hopper_gemm_config(
    block_m: int, rows: int, num_groups: int, n: int, k: int, spec: DeviceSpec, zero_rest: bool
) -> Optional[Tuple[GemmConfig, int]]:
    """Config of a grouped GEMM by the Gluon kernel for Hopper and the columns it stores at once; None: not by that one.

    num_warps: of each of its two consumers. The ring takes the shared memory that boxes of results, and one of zeros,
    leave. What streams weights, groups of 128 rows or less with a long K, wants the wide tiles of the Triton kernel,
    which read x less often, unless they would leave more of the processors idle.
    """
    if block_m != 128 or n <= 64:
        return None
    if rows <= 128 * num_groups and k >= 4096:
        narrow, wide = (-(-num_groups * -(-n // block_n) // spec.num_sms) for block_n in (128, 256))
        if wide * (128 + 256) < narrow * (128 + 128):
            return None
    return GemmConfig(128, 128, 64, 4, 6), 32 if zero_rest else 64


@lru_cache(maxsize=None)
def up_config(block_m: int, n: int, dtype: torch.dtype, spec: DeviceSpec, gated: bool, tma: bool) -> GemmConfig:
    """Config of the up-projection with N columns of the activation. tma: the weight is read by descriptor."""
    config = gemm_config(block_m, n, dtype, spec, weight_tiles=2 if gated else 1)
    return (
        _fit(replace(config, num_stages=4, group_m=16), n, 2 if gated else 1, dtype.itemsize, spec) if tma else config
    )


@lru_cache(maxsize=None)
def dgrad_config(
    block_m: int, n: int, dtype: torch.dtype, spec: DeviceSpec, interleaved: bool, tma: bool
) -> GemmConfig:
    """Config of the down-projection's dgrad, whose epilogue holds pre-activation, activation and their gradients.

    interleaved: gate and up in turn pass through registers once more to be told apart. tma: the weight is read by
    descriptor.
    """
    config = gemm_config(block_m, n, dtype, spec)
    if tma:
        # At 256 columns what an interleaved tile needs besides its accumulator does not fit the registers.
        return replace(config, block_n=min(config.block_n, 128), num_stages=4) if interleaved else config
    if spec.warp_size == 64 and dtype.itemsize > 2:
        return replace(config, block_n=min(config.block_n, 32))
    return replace(config, block_n=min(config.block_n, 128 if spec.wide_tiles and not interleaved else 64))


@lru_cache(maxsize=None)
def wgrad_config(
    m: int, n: int, rows: int, dtype: torch.dtype, spec: DeviceSpec, gathered: bool, tma: bool = False
) -> GemmConfig:
    """Config of a weight gradient of (M, N) per expert, contracted over its rows, one operand gathered or none.

    rows: `rows_per_expert`. Few of them make the kernel one of stores: small tiles, many at once. tma: both operands
    are read by descriptor. programs_per_sm 0: one program per tile.
    """
    if dtype.itemsize > 2:
        config = GemmConfig(64, 64, 32, 8, 2, programs_per_sm=0)
    elif rows <= 32:
        config = GemmConfig(64, 128, 32, 4, 3 if tma else 2, programs_per_sm=0)
    elif tma and rows < 1024:
        config = GemmConfig(128, 128, 32 if rows <= 128 else 64, 4, 3, programs_per_sm=0)
    elif tma:
        config = GemmConfig(128, 256, 64, 8, 3)
    else:
        config = GemmConfig(128, 256 if spec.wide_tiles else 128, 64, 8, 3, programs_per_sm=0)
    config = replace(config, block_m=min(config.block_m, _block_for(m)))
    config = _fit(config, n, 1, dtype.itemsize, spec)
    # On NVIDIA a load that waits for its row indices starts two iterations late: so many stages buffer nothing.
    return replace(config, num_stages=config.num_stages + 2) if gathered and spec.warp_size == 32 else config


@lru_cache(maxsize=None)
def hopper_wgrad_config(m: int, n: int, rows: int, out_itemsize: int, gathered: bool) -> Optional[GemmConfig]:
    """Config of the same by the Gluon kernels for Hopper; None where there is none. out_itemsize: of a result.

    A staging buffer holds a whole tile of results, the ring gets what it leaves. Few rows: neighbours along N are
    written at once. gathered: more rows per step, of which each has a cost of its own.
    """
    if gathered and (rows < 128 or m % 8 or n % 8):
        return None  # threads copy 8 elements at a time
    group_m = 1 if rows <= 128 else 8
    if out_itemsize > 2:
        return GemmConfig(128, 256, 32, 4, 4, group_m)
    return GemmConfig(128, 256, 64, 4, 3, group_m) if gathered else GemmConfig(128, 256, 32, 4, 6, group_m)


def _block_for(extent: int) -> int:
    """Smallest power of two, 16 or more, that covers `extent`."""
    return max(16, 1 << max(0, extent - 1).bit_length())


def _fit(config: GemmConfig, n: int, weight_tiles: int, itemsize: int, spec: DeviceSpec) -> GemmConfig:
    """Narrows the tile to N columns, then drops stages, then columns, until its buffers fit the shared memory."""
    config = replace(config, block_n=min(config.block_n, _block_for(n)))
    while _buffer_bytes(config, weight_tiles, itemsize) > spec.shared_memory:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > 32:
            config = replace(config, block_n=config.block_n // 2)
        elif config.block_k > 16:
            config = replace(config, block_k=config.block_k // 2)
        else:
            raise RuntimeError(f"no tile fits {spec.shared_memory} bytes of shared memory")
    if spec.warp_size == 64:
        config = replace(config, num_warps=max(1, config.num_warps // 2))
    return config


def _buffer_bytes(config: GemmConfig, weight_tiles: int, itemsize: int) -> int:
    columns = weight_tiles * config.block_n
    return config.num_stages * config.block_k * (config.block_m + columns) * itemsize


def persistent_grid(config: GemmConfig, max_m_tiles: int, n: int, spec: DeviceSpec) -> Tuple[int, int, int]:
    """One program per tile, up to what the device holds at once."""
    return max(1, min(max_m_tiles * -(-n // config.block_n), spec.num_sms * config.programs_per_sm)), 1, 1
