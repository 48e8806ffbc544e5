"""Tables of tuned tiles, configs/<device>.json: where a device has one, it takes the place of the heuristic.

    {"device": "NVIDIA H200", "capability": [9, 0], "num_sms": 132, "bandwidth": 4917,
     "tiles": {"gemm": {"128": {"block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3}}}}

bandwidth: of the device's memory in GB/s. Of tiles first the kernel, one of `KERNELS`, then the size that they are
chosen by: rows per tile (block_m), or for a weight gradient the class of rows per group. null for a Gluon kernel: the
next one is used instead, Triton's last. For types of two bytes. `benchmarks/tune.py` writes these files.

A device without a table takes that of the nearest device of the same compute capability.
"""

import json
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, FrozenSet, NamedTuple, Optional, Tuple

from ..common.device import DeviceSpec

CONFIGS = Path(__file__).parent.parent / "configs"  # not resolved: the Hub's cache has links to files elsewhere

_ROW_TILES = frozenset((16, 32, 64, 128))
_ROW_CLASSES = frozenset((16, 32, 64, 128, 256, 512, 1024))


class _Kind(NamedTuple):
    """What the entries of a kernel may be."""

    sizes: FrozenSet[int]
    wgrad: bool = False  # which has a block_m of its own
    hopper: bool = False  # in Gluon: null is an entry, warps and rows are given
    least_stages: int = 1
    columns: int = 0  # of a tile, if they are the kernel's


_GEMM, _WGRAD = _Kind(_ROW_TILES), _Kind(_ROW_CLASSES, wgrad=True)
# tma: weights, or in gemm and wgrad both operands, by descriptor. gated: gate and up, tiles of block_n columns of each.
# interleaved: gate and up in turn. gathered: one operand by row indices. hopper: in Gluon. wide: of tiles that both of
# its consumers share. fp32: results in fp32.
KERNELS = {
    "gemm": _GEMM,
    "gemm_tma": _GEMM,
    "gemm_hopper": _Kind(frozenset((128,)), hopper=True, least_stages=2, columns=128),
    "gemm_hopper_wide": _Kind(frozenset((128,)), hopper=True, least_stages=2, columns=256),
    "up_proj": _GEMM,
    "up_proj_tma": _GEMM,
    "up_proj_gated": _GEMM,
    "up_proj_gated_tma": _GEMM,
    "down_dgrad": _GEMM,
    "down_dgrad_interleaved": _GEMM,
    "down_dgrad_tma": _GEMM,
    "down_dgrad_tma_interleaved": _GEMM,
    "wgrad": _WGRAD,
    "wgrad_gathered": _WGRAD,
    "wgrad_tma": _WGRAD,
    **{
        f"wgrad_hopper{suffix}": _Kind(_ROW_CLASSES, wgrad=True, hopper=True, least_stages=2)
        for suffix in ("", "_fp32", "_gathered", "_gathered_fp32")
    },
}

_REQUIRED = ("block_n", "block_k", "num_warps", "num_stages")
_POWERS = ("block_m", "block_n", "block_k", "num_warps")
DEFAULTS = {"group_m": 8, "programs_per_sm": 1}

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
    tables = [read_table(path) for path in sorted(CONFIGS.glob("*.json"))] if spec.name else []
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
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: not JSON: {error}") from None
    try:
        return _read_content(content)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _read_content(content: Any) -> Table:
    _expect(isinstance(content, dict), "the file", "an object", content)
    for key in content:
        _expect(key in Table._fields, "its keys", ", ".join(Table._fields), key)
    _expect(isinstance(content.get("device"), str), "device", "a name", content.get("device"))
    capability = content.get("capability")
    pair = isinstance(capability, list) and len(capability) == 2 and all(type(part) is int for part in capability)
    _expect(pair, "capability", "major and minor", capability)
    for key in ("num_sms", "bandwidth"):
        value = content.get(key)
        _expect(type(value) is int and value > 0, key, "an integer above 0", value)
    kernels = content.get("tiles")
    _expect(isinstance(kernels, dict), "tiles", "an object", kernels)
    tiles = {
        (kernel, int(size)): _read_tile(kernel, size, tile)
        for kernel, sizes in kernels.items()
        for size, tile in _read_kernel(kernel, sizes).items()
    }
    return Table(content["device"], tuple(capability), content["num_sms"], content["bandwidth"], tiles)


def _expect(holds: bool, key: str, expected: str, got: Any) -> None:
    if not holds:
        raise ValueError(f"{key}: expected {expected}, got {got!r}")


def _read_kernel(kernel: str, sizes: Any) -> Dict[str, Any]:
    _expect(kernel in KERNELS, "tiles", f"one of {', '.join(KERNELS)}", kernel)
    _expect(isinstance(sizes, dict), f"tiles.{kernel}", "an object", sizes)
    known = [str(size) for size in sorted(KERNELS[kernel].sizes)]
    for size in sizes:
        _expect(size in known, f"tiles.{kernel}", f"one of {', '.join(known)}", size)
    return sizes


def _read_tile(kernel: str, size: str, tile: Any) -> Optional[Tile]:
    """The tile with all its fields; block_m is the size where rows per tile are."""
    key, kind = f"tiles.{kernel}.{size}", KERNELS[kernel]
    if tile is None and kind.hopper:
        return None
    _expect(isinstance(tile, dict), key, "an object", tile)
    required = ("block_m", *_REQUIRED) if kind.wgrad else _REQUIRED
    for field in required:
        _expect(field in tile, key, f"the field {field}", sorted(tile))
    if kind.hopper:  # other values would wait for each other for ever
        for field, wanted in (("block_m", 128), ("num_warps", 4)):
            _expect(tile.get(field, wanted) == wanted, f"{key}.{field}", str(wanted), tile.get(field))
    columns = kind.columns or tile["block_n"]
    _expect(tile["block_n"] == columns, f"{key}.block_n", str(columns), tile["block_n"])
    for field, value in tile.items():
        _expect(field in required or field in DEFAULTS, key, f"the fields {', '.join((*required, *DEFAULTS))}", field)
        least = kind.least_stages if field == "num_stages" else 1
        least = 0 if kind.wgrad and field == "programs_per_sm" else least  # 0: one program per tile
        _expect(type(value) is int and value >= least, f"{key}.{field}", f"an integer, {least} or more", value)
        if field in _POWERS:
            _expect(value & (value - 1) == 0, f"{key}.{field}", "a power of two", value)
    return {"block_m": int(size), **DEFAULTS, **tile}
