"""Tables of tuned tiles, configs/<device>.json: where a device has one, it takes the place of the heuristic.

    {"device": "NVIDIA H200", "capability": [9, 0], "num_sms": 132, "bandwidth": 4917,
     "tiles": {"gemm": {"128": {"block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3}}}}

bandwidth: of the device's memory in GB/s. tiles: for each kernel, one of `KERNELS`, a tile by size: the rows per tile
(block_m), or for a weight gradient the class of rows per group. null for a Gluon kernel: the next one is used instead,
Triton's last. For types of two bytes. `benchmarks/tune.py` writes these files.

A device without a table takes that of the nearest device of the same compute capability, if it has one (NVIDIA's).
"""

import json
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional, Tuple

from ..common.device import DeviceSpec

CONFIGS = Path(__file__).parent.parent / "configs"  # not resolved: the Hub's cache has links to files elsewhere

_REQUIRED = ("block_n", "block_k", "num_warps", "num_stages")
_POWERS = ("block_m", "block_n", "block_k", "num_warps")
DEFAULTS = {"group_m": 8, "programs_per_sm": 1}


class _Kind(NamedTuple):
    """What the entries of a kernel may be.

    fixed: values that a kernel in Gluon has to have, since its warps would wait for each other for ever; for such a one
    null is an entry. least: of fields that may be less than 1 or have to be more.
    """

    sizes: Tuple[int, ...] = (16, 32, 64, 128)
    required: Tuple[str, ...] = _REQUIRED
    fixed: Dict[str, int] = {}
    least: Dict[str, int] = {}


_GEMM = _Kind()
_HOPPER_GEMM = _Kind((128,), fixed={"num_warps": 4, "block_n": 128}, least={"num_stages": 2})
_HOPPER_GEMM_WIDE = _HOPPER_GEMM._replace(fixed={"num_warps": 4, "block_n": 256})
# A weight gradient has a block_m of its own. programs_per_sm 0: one program per tile.
_WGRAD = _Kind((16, 32, 64, 128, 256, 512, 1024), ("block_m", *_REQUIRED), least={"programs_per_sm": 0})
_HOPPER_WGRAD = _WGRAD._replace(fixed={"block_m": 128, "num_warps": 4}, least={**_WGRAD.least, "num_stages": 2})
# tma: weights, or in gemm and wgrad both operands, by descriptor. gated: gate and up, tiles of block_n columns of each.
# interleaved: gate and up in turn. gathered: one operand by row indices. hopper: in Gluon. wide: of tiles that both of
# its consumers share. fp32: results in fp32.
KERNELS = {
    **dict.fromkeys(("gemm", "gemm_tma"), _GEMM),
    "gemm_hopper": _HOPPER_GEMM,
    "gemm_hopper_wide": _HOPPER_GEMM_WIDE,
    **{f"up_proj{suffix}": _GEMM for suffix in ("", "_tma", "_gated", "_gated_tma")},
    **{f"down_dgrad{suffix}": _GEMM for suffix in ("", "_interleaved", "_tma", "_tma_interleaved")},
    **{f"wgrad{suffix}": _WGRAD for suffix in ("", "_gathered", "_tma")},
    **{f"wgrad_hopper{suffix}": _HOPPER_WGRAD for suffix in ("", "_fp32", "_gathered", "_gathered_fp32")},
}

Tile = Dict[str, int]
Tiles = Dict[Tuple[str, int], Optional[Tile]]


def file_of(device: str) -> Path:
    """Where the tiles of a device are, by its name as torch reports it: NVIDIA H200 has nvidia_h200.json."""
    return CONFIGS / (re.sub("[^a-z0-9]+", "_", device.lower()).strip("_") + ".json")


class Table(NamedTuple):
    """A file: the device it was made on, its capability, processors and GB/s, and its tiles by kernel and size."""

    device: str
    capability: Tuple[int, int]
    num_sms: int
    bandwidth: int
    tiles: Tiles


@lru_cache(maxsize=None)
def tiles_of(spec: DeviceSpec) -> Tiles:
    """The tuned tiles for a device by kernel and size: its own, else the nearest one's; none without such a file."""
    path = file_of(spec.name)
    if spec.name and path.is_file():
        return read_table(path).tiles
    is_comparable = spec.name and spec.is_nvidia
    tables = [read_table(path) for path in sorted(CONFIGS.glob("*.json"))] if is_comparable else []
    tables = [table for table in tables if table.capability == tuple(spec.capability)]
    return min(tables, key=lambda table: _distance(spec, table)).tiles if tables else {}


def _distance(spec: DeviceSpec, table: Table) -> float:
    """By how much number of processors and bandwidth differ, as logarithms; an unknown bandwidth counts as the same."""
    distance = abs(math.log(spec.num_sms / table.num_sms))
    return distance + (abs(math.log(spec.bandwidth / table.bandwidth)) if spec.bandwidth and table.bandwidth else 0.0)


@lru_cache(maxsize=None)
def read_table(path: Path) -> Table:
    """The table in a file. Raises ValueError that names the file and the key that is wrong."""
    try:
        return _read_content(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}: not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _read_content(content: Any) -> Table:
    _expect(isinstance(content, dict), "the file", "an object", content)
    for key in content:
        _expect(key in Table._fields, "its keys", ", ".join(Table._fields), key)
    device, capability, num_sms, bandwidth, kernels = map(content.get, Table._fields)
    _expect(isinstance(device, str), "device", "a name", device)
    pair = isinstance(capability, list) and [*map(type, capability)] == [int, int]
    _expect(pair, "capability", "major and minor", capability)
    for key, value in (("num_sms", num_sms), ("bandwidth", bandwidth)):
        _expect(type(value) is int and value > 0, key, "an integer above 0", value)
    _expect(isinstance(kernels, dict), "tiles", "an object", kernels)
    tiles: Tiles = {}
    for kernel, sizes in kernels.items():
        _expect(kernel in KERNELS, "tiles", f"one of {', '.join(KERNELS)}", kernel)
        _expect(isinstance(sizes, dict), f"tiles.{kernel}", "an object", sizes)
        known = [*map(str, KERNELS[kernel].sizes)]
        for size, tile in sizes.items():
            _expect(size in known, f"tiles.{kernel}", f"one of {', '.join(known)}", size)
            tiles[kernel, int(size)] = _read_tile(f"tiles.{kernel}.{size}", KERNELS[kernel], int(size), tile)
    return Table(device, tuple(capability), num_sms, bandwidth, tiles)


def _expect(holds: bool, key: str, expected: str, got: Any) -> None:
    if not holds:
        raise ValueError(f"{key}: expected {expected}, got {got!r}")


def _read_tile(key: str, kind: _Kind, size: int, tile: Any) -> Optional[Tile]:
    """The tile with all its fields; block_m is the size where rows per tile are."""
    if tile is None and kind.fixed:
        return None
    _expect(isinstance(tile, dict), key, "an object", tile)
    for field in kind.required:
        _expect(field in tile, key, f"the field {field}", sorted(tile))
    fields = (*kind.required, *DEFAULTS)
    for field in tile:
        _expect(field in fields, key, f"the fields {', '.join(fields)}", field)
    for field, wanted in kind.fixed.items():
        _expect(tile[field] == wanted, f"{key}.{field}", str(wanted), tile[field])
    for field, value in tile.items():
        least = kind.least.get(field, 1)
        _expect(type(value) is int and value >= least, f"{key}.{field}", f"an integer, {least} or more", value)
        if field in _POWERS:
            _expect(value & (value - 1) == 0, f"{key}.{field}", "a power of two", value)
    return {"block_m": size, **DEFAULTS, **tile}
