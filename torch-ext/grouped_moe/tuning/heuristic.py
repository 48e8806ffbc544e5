"""Tile choice for the grouped GEMMs: a heuristic in the shapes a host knows, fitted to the device's shared memory.

Tiles that were tuned on a device (`tuning.files`) take the place of the heuristic's there, for types of two bytes.

Nothing here depends on the number of routed rows, which is known on the device only. The number of rows that there are
at most enters by classes: a layer has few variants of each kernel.
"""

from dataclasses import dataclass, field, replace
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..common.device import DeviceSpec
from ..common.numbers import power_of_two
from .files import tiles_of

_MAX_SHARED_BYTES = 28 << 20  # of weights that are read again, on average, in the time that routing takes


@dataclass(frozen=True)
class GemmConfig:
    """A tile of BLOCK_M x BLOCK_N outputs, BLOCK_K deep; programs_per_sm sizes a persistent grid.

    tuned: whether it is from the device's file.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    programs_per_sm: int = 1
    tuned: bool = field(default=False, compare=False)

    def describe(self, path: str) -> str:
        """What the log says of a kernel that takes this path."""
        return (
            f"{path}, tile {self.block_m}x{self.block_n}x{self.block_k}, {self.num_warps} warps, "
            f"{self.num_stages} stages, {'tuned' if self.tuned else 'heuristic'}"
        )

    def options(self, gluon: bool = False) -> dict:
        """Triton's options for a kernel of this tile."""
        return {"num_warps": self.num_warps, **({} if gluon else {"num_stages": self.num_stages})}

    def weight_block(self, transposed: bool) -> Tuple[int, int]:
        """The block of a weight (E, N, K) or, transposed, (E, K, N) that a step reads by descriptor."""
        return (self.block_k, self.block_n) if transposed else (self.block_n, self.block_k)


def decode_pays(num_tokens: int, top_k: int, up: Tensor, down: Tensor, code_bytes: int = 4) -> bool:
    """Whether so few slots share an expert that each may read its weights for itself. up, down: (E, ., .).

    code_bytes: bytes that take as long to read as an 8-bit code takes to widen.
    """
    if num_tokens == 1:
        return True
    num_experts = up.shape[0]
    if 4 * num_tokens * top_k > num_experts:
        return False
    # Two tokens of random routing share top_k^2 / E experts.
    shared = num_tokens * (num_tokens - 1) // 2 * top_k * top_k
    weights = sum(weight.numel() * (code_bytes if weight.dtype.itemsize == 1 else 2) for weight in (up, down))
    return shared * weights <= _MAX_SHARED_BYTES * num_experts**2


def choose_block_m(num_slots: int, num_experts: int, dtype: torch.dtype, quantizes: bool = False) -> int:
    """Rows per tile: the power of two near the rows an expert gets if every slot is local.

    16 to 128, or to 64 for types of four bytes.

    Forward and backward, and every GEMM of a call, share it: one schedule serves them all. quantizes: products of tall
    tiles are made with rows of 8-bit floats, which pays although tiles are not full (`quantizing_pays`).
    """
    if quantizes:
        return 128
    return min(rows_per_group(num_slots, num_experts), 128 if dtype.itemsize == 2 else 64)


def quantizing_pays(num_rows: int, num_experts: int, spec: DeviceSpec) -> bool:
    """Whether tall tiles with rows of 8-bit floats take less time than others, for so many rows at most.

    Hopper's kernels stream weights with tiles that are not full; others are not known to.
    """
    return spec.hopper and num_rows >= _QUANTIZED_ROWS * num_experts


def transposing_pays(num_rows: int, num_groups: int, spec: DeviceSpec) -> bool:
    """Whether to transpose codes in shared memory, for each row tile anew, takes less time than a transposed copy.

    Memory bounds the copy: of an H100 it takes 1.4 times as long as of an H200.
    """
    return num_rows * (spec.bandwidth or _H200_BANDWIDTH) <= _TRANSPOSED_ROWS * _H200_BANDWIDTH * num_groups


def rows_per_group(num_rows: int, num_groups: int) -> int:
    """The rows of a group on average if there are as many as there can be, as a power of two from 16 to 1024."""
    return min(1024, power_of_two(-(-num_rows // num_groups), 16))


# By rows and whether there are two weights, for two-byte types.
# Tall tiles reuse a gathered row tile over many columns; thin ones stream weights, so they are many and deep.
_GEMM_TILES = {
    (16, False): GemmConfig(16, 64, 128, 4, 3, programs_per_sm=3),
    (32, False): GemmConfig(32, 128, 64, 4, 4, programs_per_sm=2),
    (64, False): GemmConfig(64, 128, 64, 4, 4, programs_per_sm=2),
    (128, False): GemmConfig(128, 256, 64, 8, 3),
    (16, True): GemmConfig(16, 64, 128, 4, 3, programs_per_sm=2),
    (32, True): GemmConfig(32, 64, 64, 4, 4, programs_per_sm=2),
    (64, True): GemmConfig(64, 64, 64, 4, 4, programs_per_sm=2),
    (128, True): GemmConfig(128, 128, 64, 8, 3),
}
# By rows, where both operands come by descriptor.
_TMA_GEMM_TILES = {64: GemmConfig(64, 256, 64, 4, 4), 128: GemmConfig(128, 256, 64, 8, 4)}
# By product, of the Gluon kernels for Hopper but weight gradients'; num_warps: of each of two consumers, which share
# tiles of 256 columns. The dgrad's ring leaves room for pre-activations; four m tiles in turn suit weights larger than
# the L2 cache, by measurement (benchmarks/NOTES.md).
HOPPER_TILES = {
    "gemm_hopper": GemmConfig(128, 128, 64, 4, 6),
    "gemm_hopper_wide": GemmConfig(128, 256, 64, 4, 4, 16),
    "up_proj": GemmConfig(128, 128, 64, 4, 6),
    "gathered_up_proj": GemmConfig(128, 256, 64, 4, 4, 16),
    "down_dgrad": GemmConfig(128, 128, 64, 4, 5, 4),
    "quantized": GemmConfig(128, 256, 128, 4, 4, 32),  # a step is one block of K
}
_LONG_K = 4096  # from where on wide tiles can pay
_QUANTIZED_ROWS = 16  # of an expert on average from where on 8-bit rows pay
_TRANSPOSED_ROWS = 600  # of a group on average up to which an H200 does not copy codes
_H200_BANDWIDTH = 4917  # GB/s
THIN = 64  # columns of a weight gradient up to which its time is that of reading its other operand


# By product and rows, with weights that are widened in registers: the sums of one block of K take as many registers as
# an accumulator. Bytes under way count: many programs, few columns each.
_SCALED_TILES = {
    ("gemm", 16): GemmConfig(16, 128, 128, 4, 3, programs_per_sm=3),
    ("gemm", 32): GemmConfig(32, 128, 128, 4, 3, programs_per_sm=2),
    ("gemm", 64): GemmConfig(64, 64, 128, 4, 3, programs_per_sm=2),
    ("up_proj", 16): GemmConfig(16, 32, 128, 4, 4, programs_per_sm=4),
    ("up_proj", 32): GemmConfig(32, 64, 128, 4, 3, programs_per_sm=3),
    ("up_proj", 64): GemmConfig(64, 64, 128, 4, 3, programs_per_sm=2),
    ("down_dgrad", 16): GemmConfig(16, 64, 128, 4, 3, programs_per_sm=2),
    ("down_dgrad", 32): GemmConfig(32, 64, 64, 4, 3, programs_per_sm=2),
    ("down_dgrad", 64): GemmConfig(64, 64, 64, 4, 3, programs_per_sm=2),
}


def choose_tile(
    kernel: str, size: int, default: Optional[GemmConfig], itemsize: int, spec: DeviceSpec
) -> Optional[GemmConfig]:
    """The device's tuned tile of one of `files.KERNELS` for a size, or else the default. itemsize: of the operands."""
    tiles = tiles_of(spec) if itemsize == 2 else {}
    if (kernel, size) not in tiles:
        return default
    tile = tiles[kernel, size]
    return None if tile is None else GemmConfig(**tile, tuned=True)


def _default_tile(block_m: int, dtype: torch.dtype, spec: DeviceSpec, weight_tiles: int = 1) -> GemmConfig:
    """The heuristic's tile of a GEMM that reads rows by pointer."""
    tile = _GEMM_TILES[block_m, weight_tiles == 2]
    if dtype.itemsize > 2:
        # fp32 without tf32 multiplies on the plain cores: accumulators and operands must both fit the registers.
        columns, num_warps = min(tile.block_n, 64 // weight_tiles), 8 if block_m == 64 else 4
        return replace(tile, block_n=columns, block_k=32, num_warps=num_warps, num_stages=2)
    return replace(tile, block_n=tile.block_n // 2) if block_m == 128 and not spec.wide_tiles else tile


def gemm_config(block_m: int, n: int, dtype: torch.dtype, spec: DeviceSpec, tma: bool = False) -> GemmConfig:
    """Config of a grouped GEMM with N output columns. tma: both operands are read by descriptor."""
    default = _TMA_GEMM_TILES[block_m] if tma else _default_tile(block_m, dtype, spec)
    return _fitted("gemm_tma" if tma else "gemm", block_m, default, n, dtype, spec)


def hopper_gemm_config(block_m: int, n: int, k: int, spec: DeviceSpec, wide: bool) -> Optional[GemmConfig]:
    """Config of a grouped GEMM by the Gluon kernel for Hopper; None: not by that one. wide: `wide_pays`.

    num_warps: of each of its two consumers. The ring takes the shared memory that staging tiles of results, and one of
    zeros, leave. Wide tiles, which both consumers share, are for a long K: less is read for them, but what a tile takes
    besides its products is hidden less well.
    """
    if block_m != 128 or n <= 64:
        return None
    kernels = ["gemm_hopper"]
    if k >= _LONG_K:
        kernels.insert(0 if wide else 1, "gemm_hopper_wide")
    configs = (choose_tile(kernel, block_m, HOPPER_TILES[kernel], 2, spec) for kernel in kernels)
    return next((config for config in configs if config is not None), None)


def wide_pays(rows: int, num_groups: int, n: int, k: int, spec: DeviceSpec) -> bool:
    """Whether wide tiles of a long K take less time, by the rounds of tiles that the processors make.

    The last round is half full on average. A wide tile counts as 1.95 narrow ones (benchmarks/NOTES.md) or, for groups
    of 128 rows or less, whose weights are streamed, as the 1.5 that it reads.
    """
    if k < _LONG_K:
        return False
    streamed = rows <= 128 * num_groups
    m_tiles = num_groups if streamed else rows / 128 + num_groups / 2
    narrow, wide = (m_tiles * -(-n // block_n) / spec.num_sms + 0.5 for block_n in (128, 256))
    return wide * (1.5 if streamed else 1.95) < narrow


def up_config(block_m: int, n: int, dtype: torch.dtype, spec: DeviceSpec, gated: bool, tma: bool) -> GemmConfig:
    """Config of the up-projection with N columns of the activation. tma: the weight is read by descriptor."""
    weight_tiles = 2 if gated else 1
    default = _default_tile(block_m, dtype, spec, weight_tiles)
    if tma:
        default = replace(default, num_stages=4, group_m=16)
    kernel = "up_proj" + ("_gated" if gated else "") + ("_tma" if tma else "")
    return _fitted(kernel, block_m, default, n, dtype, spec, weight_tiles)


def dgrad_config(
    block_m: int, n: int, dtype: torch.dtype, spec: DeviceSpec, interleaved: bool, tma: bool, low_rank: bool = False
) -> GemmConfig:
    """Config of the down-projection's dgrad, whose epilogue holds pre-activation, activation and their gradients.

    interleaved: gate and up in turn pass through registers once more to be told apart. tma: the weight is read by
    descriptor. low_rank: a low-rank part is added, which limits the columns of a tile.
    """
    default = _default_tile(block_m, dtype, spec)
    if not tma:
        # Stages stay those of the wide tile.
        default = _narrowed(default, n, 1, dtype.itemsize, spec.shared_memory)
        columns = 128 if spec.wide_tiles and not interleaved and (spec.hopper or block_m != 64) else 64
        columns = 32 if spec.warp_size == 64 and dtype.itemsize > 2 else columns
        default = replace(default, block_n=min(default.block_n, columns))
    elif interleaved:
        # At 256 columns what such a tile needs besides its accumulator does not fit the registers.
        default = replace(default, block_n=min(default.block_n, 128), num_stages=4)
    kernel = "down_dgrad" + ("_tma" if tma else "") + ("_interleaved" if interleaved else "")
    config = _fitted(kernel, block_m, default, n, dtype, spec)
    columns = 64 if block_m == 64 and not spec.hopper else 128
    return replace(config, block_n=min(config.block_n, columns)) if low_rank else config


def wgrad_config(
    m: int, n: int, rows: int, dtype: torch.dtype, spec: DeviceSpec, gathered: bool, tma: bool = False
) -> GemmConfig:
    """Config of a weight gradient of (M, N) per expert, contracted over its rows, one operand gathered or none.

    rows: `rows_per_group`. Few of them make the kernel one of stores: small tiles, many at once. tma: both operands
    are read by descriptor. programs_per_sm 0: one program per tile.
    """
    if dtype.itemsize > 2:
        default = GemmConfig(64, 64, 32, 8, 2, programs_per_sm=0)
    elif n <= THIN:
        # Many rows under way: a group with most of them is left to few programs.
        block_k = 32 if gathered and (n > 32 or rows < 512) else 64
        default = GemmConfig(128, 64, block_k, 4, 3 if gathered else 4, programs_per_sm=0)
    elif rows <= 32:
        default = GemmConfig(64, 128, 32, 4, 3 if tma else 2, programs_per_sm=0)
    elif tma and rows < 1024:
        default = GemmConfig(128, 128, 32 if rows <= 128 else 64, 4, 3, programs_per_sm=0)
    elif tma:
        default = GemmConfig(128, 256, 64, 8, 3)
    else:
        default = GemmConfig(128, 256 if spec.wide_tiles else 128, 64, 8, 3, programs_per_sm=0)
    kernel = "wgrad_tma" if tma else "wgrad_gathered" if gathered else "wgrad"
    if n <= THIN:
        kernel = "wgrad_thin"  # which no file has
    config = _fitted(kernel, rows, default, n, dtype, spec, m=m)
    # On NVIDIA a load that waits for its row indices starts two iterations late: so many stages buffer nothing.
    return replace(config, num_stages=config.num_stages + 2) if gathered and spec.is_nvidia else config


def hopper_wgrad_config(
    m: int, n: int, rows: int, out_itemsize: int, gathered: bool, spec: DeviceSpec
) -> Optional[GemmConfig]:
    """Config of the same by the Gluon kernels for Hopper; None where there is none. out_itemsize: of a result.

    A staging buffer holds a whole tile of results, the ring gets what it leaves. Few rows: neighbours along N are
    written at once.
    """
    if gathered and (m % 8 or n % 8):
        return None  # threads copy 8 elements at a time
    wide = out_itemsize > 2
    default = GemmConfig(128, 256, 32, 4, 4 if wide else 6, 1 if rows <= 128 else 8)
    kernel = "wgrad_hopper" + ("_gathered" if gathered else "") + ("_fp32" if wide else "")
    return choose_tile(kernel, rows, None if wide and gathered and rows < 128 else default, 2, spec)


def quantized_config(spec: DeviceSpec) -> GemmConfig:
    """Config of the Triton kernels that multiply rows of 8-bit floats.

    A step is one block of K or, where operands take registers, too, half of it.
    """
    return GemmConfig(128, 128, 128, 8, 4) if spec.wide_tiles else GemmConfig(128, 128, 64, 8, 6)


def scaled_config(
    product: str, block_m: int, n: int, dtype: torch.dtype, spec: DeviceSpec, step: int, weight_tiles: int = 1
) -> GemmConfig:
    """Config of a product with block-scaled weights: "gemm", "up_proj" or "down_dgrad".

    step: columns of K within one block. weight_tiles: 2 for gate and up.
    """
    tile = _SCALED_TILES[product, block_m]
    if dtype.itemsize > 2:
        held_tiles = 1 if product == "gemm" else 2
        warps = 8 if block_m == 64 else 4
        tile = replace(tile, block_n=64 // held_tiles, block_k=32, num_warps=warps, num_stages=2, programs_per_sm=2)
    elif block_m > 16 and not spec.wide_tiles:
        # Operands take registers, too.
        columns = 64 if weight_tiles == 1 else 64 * 32 // block_m
        tile = replace(tile, block_n=columns, block_k=min(tile.block_k, 128 * 32 // block_m))
    config = replace(tile, block_k=min(tile.block_k, step))
    config = _narrowed(config, n, weight_tiles, dtype.itemsize, spec.shared_memory)
    return replace(config, num_warps=max(1, config.num_warps // 2)) if spec.warp_size == 64 else config


def fitted_to_ranks(config: GemmConfig, k: int, parts: int, ranks: int, spec: DeviceSpec) -> GemmConfig:
    """The tile of a Triton kernel with a low-rank part of so many ranks, 0 without one: of one stage if it may not fit.

    Where each part of K is one step, no loop along K is left. Triton then pipelines the loop over tiles, with buffers
    for a step of each part and for all ranks at once. Weights count as fp32 here, and as gate and up.
    """
    held = 4 * (config.block_m + 2 * config.block_n) * (parts * config.block_k + ranks)
    if ranks and k <= parts * config.block_k and held > spec.shared_memory:
        return replace(config, num_stages=1)
    return config


def _fitted(
    kernel: str, size: int, default: GemmConfig, n: int, dtype: torch.dtype, spec: DeviceSpec, weight_tiles: int = 1,
    m: int = 1024,
) -> GemmConfig:  # fmt: skip
    """The tile of a Triton kernel for a size, tuned or by default, as far as the device has room for it.

    m, n: rows and columns of a result, of a weight gradient both.
    """
    config = choose_tile(kernel, size, default, dtype.itemsize, spec)
    config = replace(config, block_m=min(config.block_m, power_of_two(m, 16)))
    config = _narrowed(config, n, weight_tiles, dtype.itemsize, spec.shared_memory)
    return replace(config, num_warps=max(1, config.num_warps // 2)) if spec.warp_size == 64 else config


def _narrowed(config: GemmConfig, n: int, weight_tiles: int, itemsize: int, shared_memory: int) -> GemmConfig:
    """Narrows the tile to N columns; until its buffers fit, drops stages, then halves columns, at last its steps."""
    config, room = replace(config, block_n=min(config.block_n, power_of_two(n, 16))), shared_memory // itemsize
    while config.num_stages * config.block_k * (config.block_m + weight_tiles * config.block_n) > room:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > 32:
            config = replace(config, block_n=config.block_n // 2)
        else:
            config = replace(config, block_k=config.block_k // 2)
    return config
