"""What `tune.py` tunes: tiles and their neighbours, the products that use them, and how the package is given them."""

import functools
import json
import sys
import uuid
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from machine import ROOT, first_line, load_kernel
from torch import Tensor
from workload import Cell, Layer, draw_ids

sys.path.insert(0, str(ROOT / "tools"))

FIELDS = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "group_m", "programs_per_sm")

Key = Tuple[str, int]  # kernel and size, as in a file
Tile = Optional[Dict[str, int]]  # all fields; None: not by this kernel


class Gpu(NamedTuple):
    """What processes without it compile for: its name, target, and the package's DeviceSpec as a tuple."""

    name: str
    target: Tuple[str, object, int]
    spec: tuple


class Case(NamedTuple):
    """A product of a layer's forward or backward with so many rows per expert, all local."""

    layer: Layer
    rows: int
    product: str

    @property
    def tokens(self) -> int:
        return max(1, self.rows * self.layer.experts // self.layer.top_k)


@functools.lru_cache(maxsize=None)
def module(name: str):
    """A module of the package."""
    return sys.modules[f"{load_kernel().__name__}.{name}"]


class Table:
    """The tiles that the package takes, instead of those in its files: a set of them for every name of a device.

    Launchers keep choices by the device's spec, name included, so that another name needs no cache to be cleared. Whole
    calls (`define.plan_key`) keep them by the device: none is made with this.
    """

    def __init__(self, spec: tuple):
        tuning = module("tuning")
        self.base = dict(module("tuned").tiles_of(spec[-1]))
        self.tiles: Dict[str, Dict[Key, Tile]] = {}
        self.asked: List[Tuple[Key, Tile]] = []
        self.name = uuid.uuid4().hex  # two tables of one name would share the launchers' choices
        self.spec = tuning.DeviceSpec(*spec)
        choose = tuning.choose_tile

        def recorded(kernel, size, default, itemsize, device):
            chosen = choose(kernel, size, default, itemsize, device)
            self.asked.append(((kernel, size), None if chosen is None else tile_of(chosen)))
            return chosen

        tuning.choose_tile, tuning.tiles_of = recorded, lambda name: self.tiles[name]
        tuning.device_spec = lambda device_type, index: self.spec

    def take(self, changes: Dict[Key, Tile], case: Optional[Case] = None) -> None:
        """From here on the package takes the tiles of the file, but for these changes.

        case: what will run, lest another's choices are known already and not asked for.
        """
        name = repr((self.name, changes, case))
        self.tiles[name] = {**self.base, **changes}
        self.spec = self.spec._replace(name=name)


def tile_of(config) -> Tile:
    """The fields of a file."""
    return {name: getattr(config, name) for name in FIELDS}


def make_products(layer: Layer, rows: int, device: str) -> Dict[str, Callable[[], List[Tensor]]]:
    """The grouped GEMMs of a layer's forward and backward, on the GPU with numbers, on a CPU with unwritten memory.

    Of dgrads the one that gathers: on Hopper only what Gluon's kernel, which has no tiles in a file, leaves runs by it.
    """
    fused, gemm, schedules, form_of = module("fused"), module("gemm"), module("schedule"), module("launch").form_of
    e, h, i, top_k = layer.experts, layer.hidden, layer.intermediate, layer.top_k
    tokens = Case(layer, rows, "").tokens
    slots, real = tokens * top_k, device != "cpu"

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(shape, device=device, dtype=torch.bfloat16)
        return made.normal_().mul_(scale) if real else made

    t = layer.gpt_oss  # transposed
    up = tensor(*((e, h, 2 * i) if t else (e, 2 * i, h)), scale=h**-0.5)
    down = tensor(*((e, i, h) if t else (e, h, i)), scale=i**-0.5)
    activation = module("activation").Activation("silu", *((1.702, 7.0, 1.0) if t else ()))
    biases = (tensor(e, 2 * i), tensor(e, h)) if t else (None, None)
    block = module("block").Block(up, down, *biases, activation, True, t, t, False)
    block_m = module("tuning").choose_block_m(slots, e, torch.bfloat16)
    if real:
        ids = draw_ids(Cell(layer, tokens), device)
        schedule, row_to_slot, _ = module("routing").route_tiles_triton(ids, e, block_m)
    else:
        tile_map = torch.empty(schedules.map_size(slots, e), dtype=torch.int32)
        schedule = schedules.schedule_of_map(tile_map, e, slots, block_m)
        row_to_slot = torch.empty(slots, dtype=torch.int32)
    x, dout, x_rows, act = tensor(tokens, h), tensor(tokens, h), tensor(slots, h), tensor(slots, i)
    preact, weights = tensor(slots, 2 * i), torch.ones(tokens, top_k, device=device)
    dup, ddown, wide = (torch.empty_like(w, dtype=d) for w, d in ((up, None), (down, None), (up, torch.float32)))

    def common() -> tuple:
        """What `up_launch` and `dgrad_launch` have in common, with the tiles of now."""
        spec = module("tuning").spec_of(x)
        return slots, i, top_k, t, block.kind(spec), schedule[1:], spec, x.device

    def up_proj() -> List[Tensor]:
        forms = [*map(form_of, (x, up, biases[0], None))]
        a = torch.empty_like(act)
        fused.up_launch(*forms, (False, True, True), *common())(
            (x, up, biases[0], None, a, None, row_to_slot, schedule.map)
        )  # fmt: skip
        return [a]

    def down_dgrad() -> List[Tensor]:
        forms = [*map(form_of, (dout, down, weights))]
        launch, num_sums = fused.dgrad_launch(*forms, (True,) * 4, *common())
        dpreact, a = torch.empty_like(preact), torch.empty_like(act)
        sums = torch.empty((num_sums, slots), device=device)
        launch((dout, down, weights, preact, dpreact, a, sums, row_to_slot, schedule.map))
        return [dpreact, a, sums.sum(0) if real else sums]

    def wgrad(p: Tensor, p_top_k: int, q: Tensor, q_top_k: int, gathered: bool, dw: Tensor) -> List[Tensor]:
        dw = dw.transpose(1, 2) if t else dw
        return [gemm.launch_wgrad(p, p_top_k, q, q_top_k, row_to_slot if gathered else None, schedule.map, dw)]

    strides = gemm.nk_strides
    return {
        "up": up_proj,
        "down": lambda: [gemm.launch_gemm(act, down, strides(down, t), h, biases[1], schedule)],
        "down dgrad": down_dgrad,
        "dx": lambda: [gemm.launch_gemm(preact, up, strides(up, not t), h, None, schedule)],
        "up wgrad": lambda: wgrad(preact, 0, x, top_k, True, dup),
        "down wgrad": lambda: wgrad(dout, top_k, act, 0, True, ddown),
        "linear wgrad": lambda: wgrad(preact, 0, x_rows, 0, False, dup),
        "linear wgrad fp32": lambda: wgrad(preact, 0, x_rows, 0, False, wide),
    }


@functools.lru_cache(maxsize=1)
def compiler(gpu: Gpu) -> Table:
    """Makes this process one that compiles for the GPU."""
    import compile_check
    from triton.backends.compiler import GPUTarget

    shared_memory, num_sms = gpu.spec[1], gpu.spec[0]
    compile_check.TARGETS[gpu.name] = compile_check.Target(GPUTarget(*gpu.target), shared_memory, num_sms)
    torch.set_num_threads(1)
    return Table(gpu.spec)


@functools.lru_cache(maxsize=1)
def unwritten(layer: Layer, rows: int):
    """`make_products` on a CPU."""
    return make_products(layer, rows, "cpu")


def compile_case(gpu: Gpu, case: Case, changes: Dict[Key, Tile]) -> Tuple[str, List[Tuple[Key, Tile]]]:
    """Compiles into the cache on disk. Returns the error, if any, and which tiles were asked for."""
    table = compiler(gpu)
    import compile_check

    products = unwritten(case.layer, case.rows)
    table.asked.clear()
    table.take(changes, case)
    try:
        with compile_check.compiling_for(gpu.name, lambda function, kernel: None):
            products[case.product]()
    except Exception as error:  # no more than one candidate less
        return first_line(error), []
    return "", list(table.asked)


def neighbours(key: Key, tile: Dict[str, int], shared_memory: int) -> List[Tile]:
    """The tiles that differ from this one in one field and may fit; for a Gluon kernel also None."""
    kernel = key[0]
    if "hopper" in kernel:  # their blocks are those of the kernels
        choices = {"num_stages": (-1, 1), "group_m": (1, 4, 8, 16)}
    else:
        choices = {"block_n": (0.5, 2), "block_k": (0.5, 2), "num_warps": (0.5, 2), "num_stages": (-1, 1)}
        choices.update({"block_m": (0.5, 2), "programs_per_sm": (0, 1, 2)} if kernel.startswith("wgrad") else {})
        choices.update({"group_m": (4, 8, 16)} if kernel.startswith("up_proj") else {})
        choices.update({"programs_per_sm": (1, 2, 3)} if not kernel.startswith("wgrad") else {})
    limits = {"block_m": (64, 128), "block_n": (32, 256), "block_k": (32, 128), "num_warps": (4, 8)}
    found: List[Tile] = []
    for name, values in choices.items():
        low, high = limits.get(name, (2, 8) if name == "num_stages" else (0, 16))
        for value in values:
            if name in limits:
                value = int(tile[name] * value)
            elif name == "num_stages":
                value += tile[name]
            other = {**tile, name: value}
            if low <= value <= high and other != tile and fits(kernel, other, shared_memory):
                found.append(other)
    return found + ([None] if "hopper" in kernel else [])


def fits(kernel: str, tile: Dict[str, int], shared_memory: int) -> bool:
    """Whether its buffers have room, for a Gluon kernel beside results, and its sums 128 registers of each thread."""
    columns = tile["block_n"] * (2 if "gated" in kernel else 1)
    buffers = tile["num_stages"] * tile["block_k"] * (tile["block_m"] + columns) * 2
    if kernel.startswith("wgrad_hopper"):  # a whole tile of them
        return buffers + tile["block_m"] * columns * (4 if kernel.endswith("fp32") else 2) <= shared_memory
    if "hopper" in kernel:  # two boxes of 64 columns
        return buffers + 2 * tile["block_m"] * 64 * 2 <= shared_memory
    return buffers <= shared_memory and tile["block_m"] * columns <= 128 * 32 * tile["num_warps"]


def short(tile: Tile) -> str:
    """For a line of progress."""
    if tile is None:
        return "not by this kernel"
    return "x".join(str(tile[name]) for name in FIELDS[:3]) + "".join(f" {tile[name]}" for name in FIELDS[3:])


def as_json(device: str, tiles: Dict[Key, Tile]) -> str:
    """A file of the package, a tile a line, without what `tuned.read_tiles` fills in."""
    tuned = module("tuned")
    lines: Dict[str, List[str]] = {}
    for kernel in tuned.KERNELS:
        for (_, size), tile in sorted((item for item in tiles.items() if item[0][0] == kernel), key=lambda i: i[0]):
            fields = FIELDS if kernel.startswith("wgrad") else FIELDS[1:]
            given = tile and {name: tile[name] for name in fields if tile[name] != tuned.DEFAULTS.get(name)}
            lines.setdefault(kernel, []).append(f'      "{size}": {json.dumps(given)}')
    kernels = ",\n".join(f'    "{kernel}": {{\n' + ",\n".join(of) + "\n    }" for kernel, of in lines.items())
    return f'{{\n  "device": {json.dumps(device)},\n  "tiles": {{\n{kernels}\n  }}\n}}\n'
