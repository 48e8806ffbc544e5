"""Tuned tiles: read, checked, and taken where they are; the heuristic elsewhere; and what the log says of it."""

import importlib.util
import itertools
import json
import logging
import math
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import tiles  # noqa: E402
import tune  # noqa: E402
from workload import QWEN3_30B, SMOKE, SMOKE_GPT_OSS  # noqa: E402

H200 = (132, 232448, 32, True, True, True)  # a DeviceSpec without its name
A100 = (108, 166912, 32, False, True, False)
MI300 = (304, 65536, 64, False, True, False)
NAME = "NVIDIA H200"
TILE = {"block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2}


@pytest.fixture
def tuning(module):
    return module("tuning")


@pytest.fixture
def tuned(module, tmp_path, monkeypatch):
    """The module that reads the files, which it looks for in tmp_path."""
    found = module("tuned")
    monkeypatch.setattr(found, "CONFIGS", tmp_path)
    found.tiles_of.cache_clear()
    yield found
    found.tiles_of.cache_clear()


@pytest.fixture
def gpu(request):
    """A name of its own for each test: choices are kept by it."""
    return request.node.name


def write(path, tiles):
    path.write_text(json.dumps({"device": "Some GPU", "tiles": tiles}))


def all_configs(tuning, spec, dtype):
    """Every choice, by what it was asked."""
    found = {}
    by_descriptor = spec.wide_tiles and dtype.itemsize == 2
    for block_m, n in itertools.product((16, 32, 64, 128) if dtype.itemsize == 2 else (16, 32, 64), (24, 768, 4096)):
        for flag, tma in itertools.product((False, True), (False, True)):
            if not tma or (by_descriptor and block_m == 128):
                found["up", block_m, n, flag, tma] = tuning.up_config(block_m, n, dtype, spec, flag, tma)
                found["dgrad", block_m, n, flag, tma] = tuning.dgrad_config(block_m, n, dtype, spec, flag, tma)
        for tma in (False, True) if by_descriptor and block_m >= 64 else (False,):
            found["gemm", block_m, n, tma] = tuning.gemm_config(block_m, n, dtype, spec, tma)
        for rows, k in itertools.product((1024, 65536), (2048, 8192)):
            found["hopper", block_m, rows, n, k] = tuning.hopper_gemm_config(block_m, rows, 8, n, k, spec, False)
    for rows, flag, m in itertools.product((16, 32, 64, 128, 256, 512, 1024), (False, True), (32, 2048)):
        found["wgrad", rows, flag, m] = tuning.wgrad_config(m, 768, rows, dtype, spec, flag)
        for size in (2, 4):
            found["hopper wgrad", rows, flag, m, size] = tuning.hopper_wgrad_config(m, 768, rows, size, flag, spec)
        if by_descriptor:
            found["wgrad tma", rows, m] = tuning.wgrad_config(m, 768, rows, dtype, spec, False, True)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_file_of_the_h200_holds_the_heuristic(tuning, dtype):
    """It was tuned on one. A file that `benchmarks/tune.py` wrote anew would change this."""
    plain = all_configs(tuning, tuning.DeviceSpec(*H200), dtype)
    tuned = all_configs(tuning, tuning.DeviceSpec(*H200, NAME), dtype)
    assert tuned == plain
    assert not any(config.tuned for key, config in plain.items() if config and key[0] != "hopper")
    if dtype == torch.bfloat16:
        assert all(config.tuned for key, config in tuned.items() if config and key[0] != "hopper")


def test_files_of_the_package_are_valid(module):
    tuned = module("tuned")
    files = list(tuned.CONFIGS.glob("*.json"))
    assert files
    for path in files:
        assert tuned.file_of(json.loads(path.read_text())["device"]) == path
        assert tuned.read_tiles(path)


def test_files_are_found_through_links(grouped_moe, tmp_path):
    """As the Hub's cache has them: a snapshot of links to files of other names elsewhere."""
    package = Path(grouped_moe.__file__).parent
    blobs, copy = tmp_path / "blobs", tmp_path / "snapshots" / "linked_package"
    blobs.mkdir()
    for number, path in enumerate(path for path in sorted(package.rglob("*")) if path.suffix in (".py", ".json")):
        link = copy / path.relative_to(package)
        link.parent.mkdir(parents=True, exist_ok=True)
        (blobs / str(number)).write_bytes(path.read_bytes())
        link.symlink_to(blobs / str(number))
    spec = importlib.util.spec_from_file_location("linked_tuned", copy / "tuned.py")
    linked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(linked)
    assert linked.tiles_of(NAME)


def test_tune_writes_the_files_as_they_are(module, monkeypatch):
    tuned = module("tuned")
    monkeypatch.setattr(tiles, "module", module)
    for path in tuned.CONFIGS.glob("*.json"):
        text = path.read_text()
        assert tiles.as_json(json.loads(text)["device"], tuned.read_tiles(path)) == text


def test_candidates_are_valid_entries(module, monkeypatch, tmp_path):
    """Each differs in one field from the tile, and can be written to a file."""
    tuned = module("tuned")
    monkeypatch.setattr(tiles, "module", module)
    for key, tile in tuned.tiles_of(NAME).items():
        for candidate in tiles.neighbours(key, tile, H200[1]) if tile else ():
            (tmp_path / "file.json").write_text(tiles.as_json("x", {key: candidate}))
            assert tuned.read_tiles(tmp_path / "file.json") == {key: candidate}
            assert candidate is None or sum(candidate[name] != tile[name] for name in tile) == 1


class Inline:
    """A pool whose compiler takes all but tiles of 32 columns; every case but "dx" asks for the same kernel."""

    def submit(self, function, gpu, case, changes):
        future, key = Future(), ("gemm", 64)
        tile = changes.get(key, {"block_m": 64, **TILE, "group_m": 8, "programs_per_sm": 1})
        asked = [] if case.product == "dx" else [(key, tile)]
        future.set_result(("does not fit" if tile["block_n"] == 32 else "", asked))
        return future


class Pretended:
    """Times in ms from a formula: deeper is faster, 4 stages are wrong."""

    def times(self, case, current, candidates):
        given = [tile for changes in (current, *candidates) for tile in changes.values()]
        return [math.inf if tile["num_stages"] == 4 else 1 / tile["block_k"] for tile in given]


@pytest.mark.parametrize("seconds, depth", [(100, 128), (-1, None)], ids=["to the end", "past the budget"])
def test_search_goes_to_the_fastest(seconds, depth):
    gpu = tiles.Gpu("x", ("cuda", 90, 32), (*H200, "x"))
    search = tune.Search(gpu, Pretended(), Inline(), tune.time.monotonic() + seconds)
    search.group([tiles.Case(SMOKE, 64, "up"), tiles.Case(SMOKE, 64, "dx"), tiles.Case(SMOKE, 64, "down")])
    written = []
    search.run(6, lambda found: written.append(dict(found)))
    tile = search.found.get(("gemm", 64))
    assert (tile and tile["block_k"]) == depth and written == ([search.found] if depth else [])
    assert tile is None or tile["num_stages"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would tune")
def test_tune_says_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune.py"])
    assert tune.main() == 1
    assert "no GPU" in capsys.readouterr().err


@pytest.fixture
def tables(module, monkeypatch):
    """`tiles.Table`, of which the package knows nothing when the test is over."""
    tuning = module("tuning")
    for name in ("choose_tile", "tiles_of", "device_spec"):
        monkeypatch.setattr(tuning, name, getattr(tuning, name))
    monkeypatch.setattr(tiles, "module", module)
    return tiles.Table


WITHOUT_TILES = "hopper_gathered_up_proj_kernel"  # of choice


@pytest.mark.parametrize("limits", [H200, A100], ids=["sm90", "sm80"])
@pytest.mark.parametrize(
    "layer, rows", [(SMOKE, 64), (SMOKE_GPT_OSS, 64), (QWEN3_30B, 256)], ids=["smoke", "oss", "large"]
)
def test_products_ask_for_their_tiles(module, tables, monkeypatch, layer, rows, limits):
    """And launch once. What a GPU would run, on a CPU, without running it. Another table is asked again."""
    launched = []
    monkeypatch.setattr(module("launch").Launch, "__call__", lambda launch, _: launched.append(launch))
    for _ in range(2):
        table = tables((*limits, "products"))
        for name, call in tiles.make_products(layer, rows, "cpu").items():
            table.asked.clear()
            table.take({}, tiles.Case(layer, rows, name))
            call()
            kernel = launched.pop().kernel.kernel.__name__
            asked = table.asked[-1][0][0] if table.asked else None
            assert not launched and (asked is None) == (kernel == WITHOUT_TILES), (name, kernel, asked)
            assert asked is None or asked.split("_")[0] in kernel and ("hopper" in asked) == ("hopper" in kernel), name


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [SMOKE, SMOKE_GPT_OSS], ids=lambda layer: layer.name)
def test_products_of_candidates_agree(module, tables, layer, device):
    """With the tiles in use and with the first that fits beside them."""
    table = tables(tuple(module("tuning").device_spec("cuda", 0)))
    table.take({})
    for name, call in tiles.make_products(layer, 64, device).items():
        table.asked.clear()
        table.take({}, tiles.Case(layer, 64, name))
        wanted = [result.clone() for result in call()]
        key, tile = table.asked[-1]
        table.take({key: tiles.neighbours(key, tile, table.spec.shared_memory)[0]})
        assert all(map(tune.agrees, call(), wanted)), name


def test_names_of_files(module):
    file_of = module("tuned").file_of
    assert file_of("NVIDIA H200").name == "nvidia_h200.json"
    assert file_of("NVIDIA H100 80GB HBM3").name == "nvidia_h100_80gb_hbm3.json"
    assert file_of("AMD Instinct MI300X OAM").name == "amd_instinct_mi300x_oam.json"


@pytest.mark.parametrize("limits", [H200, A100, MI300], ids=["sm90", "sm80", "gfx942"])
def test_no_file_no_entry(tuned, tuning, gpu, limits):
    """Both give the heuristic's choice."""
    write(tuned.file_of(gpu), {"wgrad": {}})
    plain = all_configs(tuning, tuning.DeviceSpec(*limits), torch.bfloat16)
    for name in ("No such GPU", gpu):
        assert all_configs(tuning, tuning.DeviceSpec(*limits, name), torch.bfloat16) == plain


def test_an_entry_replaces_that_tile_alone(tuned, tuning, gpu):
    write(tuned.file_of(gpu), {"gemm": {"64": {**TILE, "group_m": 4}}, "gemm_hopper": {"128": None}})
    spec = tuning.DeviceSpec(*H200, gpu)
    config = tuning.gemm_config(64, 4096, torch.float16, spec)
    assert config == tuning.GemmConfig(64, 64, 32, 4, 2, group_m=4) and config.tuned
    assert not tuning.gemm_config(32, 4096, torch.float16, spec).tuned
    assert not tuning.gemm_config(64, 4096, torch.float32, spec).tuned
    assert not tuning.up_config(64, 4096, torch.float16, spec, False, False).tuned
    assert tuning.hopper_gemm_config(128, 65536, 8, 4096, 2048, spec, False) is None
    assert tuning.hopper_gemm_config(128, 65536, 8, 4096, 2048, tuning.DeviceSpec(*H200), False) is not None


@pytest.mark.parametrize(
    "rows, groups, n, k, block_n",
    [
        (32768, 8, 4096, 14336, 256),  # Mixtral's down-projection
        (65536, 128, 2048, 1536, 128),  # K is short
        (65536, 128, 2880, 5760, 128),  # gpt-oss' dx: wide tiles would have 7 % more columns than there are
        (1024, 8, 4096, 4096, 256),  # groups of 128 rows stream their weights
        (8192, 8, 4096, 14336, 128),  # few rounds: a last one of wide tiles may be nearly empty
        (512, 8, 1024, 8192, 128),  # 32 wide tiles for 132 processors
    ],
)
def test_which_tiles_two_warp_groups_share(tuning, rows, groups, n, k, block_n):
    config, _ = tuning.hopper_gemm_config(128, rows, groups, n, k, tuning.DeviceSpec(*H200), False)
    assert config.block_n == block_n


def test_a_null_of_either_hopper_tile_leaves_the_other(tuned, tuning, gpu):
    def chosen(tiles):
        write(tuned.file_of(gpu), tiles)
        tuned.tiles_of.cache_clear()
        tuning.hopper_gemm_config.cache_clear()
        return tuning.hopper_gemm_config(128, 32768, 8, 4096, 14336, tuning.DeviceSpec(*H200, gpu), False)

    narrow, wide = {"gemm_hopper": {"128": None}}, {"gemm_hopper_wide": {"128": None}}
    assert chosen(narrow)[0].block_n == 256
    assert chosen(wide)[0].block_n == 128
    assert chosen({**narrow, **wide}) is None


def test_a_tuned_tile_still_has_to_fit(tuned, tuning, gpu):
    """The shared memory, and the columns there are."""
    write(tuned.file_of(gpu), {"gemm": {"128": {**TILE, "block_n": 256, "block_k": 128, "num_stages": 8}}})
    config = tuning.gemm_config(128, 4096, torch.bfloat16, tuning.DeviceSpec(*H200, gpu))
    assert config.num_stages == 2 and config.tuned
    assert tuning.gemm_config(128, 60, torch.bfloat16, tuning.DeviceSpec(*H200, gpu)).block_n == 64


WRONG = {
    "kernel": ({"gem": {}}, "tiles: expected one of gemm,"),
    "size": ({"gemm": {"48": TILE}}, "tiles.gemm: expected one of 16, 32, 64, 128, got '48'"),
    "sizes": ({"gemm": [TILE]}, "tiles.gemm: expected an object"),
    "tile": ({"gemm": {"64": 3}}, "tiles.gemm.64: expected an object, got 3"),
    "null": ({"gemm": {"64": None}}, "tiles.gemm.64: expected an object, got None"),
    "missing field": ({"wgrad": {"64": TILE}}, "tiles.wgrad.64: expected the field block_m"),
    "unknown field": ({"gemm": {"64": {**TILE, "block_m": 64}}}, "tiles.gemm.64: expected the fields block_n,"),
    "not an integer": ({"gemm": {"64": {**TILE, "block_k": "64"}}}, "tiles.gemm.64.block_k: expected an integer"),
    "a boolean": ({"gemm": {"64": {**TILE, "num_warps": True}}}, "tiles.gemm.64.num_warps: expected an integer"),
    "too small": ({"gemm": {"64": {**TILE, "num_stages": 0}}}, "tiles.gemm.64.num_stages: expected an integer, 1 or"),
    "no power": ({"gemm": {"64": {**TILE, "block_n": 96}}}, "tiles.gemm.64.block_n: expected a power of two, got 96"),
    "no programs": ({"gemm": {"64": {**TILE, "programs_per_sm": 0}}}, "tiles.gemm.64.programs_per_sm"),
    "a ring too short": (
        {"wgrad_hopper_gathered": {"64": {**TILE, "block_m": 128, "num_stages": 1}}},
        "tiles.wgrad_hopper_gathered.64.num_stages: expected an integer, 2 or more, got 1",
    ),
    "warps of Gluon": (
        {"gemm_hopper": {"128": {**TILE, "num_warps": 8}}},
        "tiles.gemm_hopper.128.num_warps: expected 4",
    ),
    "columns of Gluon": ({"gemm_hopper": {"128": TILE}}, "tiles.gemm_hopper.128.block_n: expected 128, got 64"),
    "tiles": ([], "tiles: expected an object, got []"),
}


@pytest.mark.parametrize("tiles, message", WRONG.values(), ids=WRONG)
def test_errors_name_file_and_key(tuned, tuning, gpu, tiles, message):
    write(tuned.file_of(gpu), tiles)
    with pytest.raises(ValueError) as error:
        tuning.gemm_config(64, 4096, torch.bfloat16, tuning.DeviceSpec(*H200, gpu))
    assert str(error.value).startswith(f"{tuned.file_of(gpu).name}: {message}")


@pytest.mark.parametrize("text", ["{", "[]", '{"tiles": {}}', '{"device": "x", "tiles": {}, "tile": {}}'])
def test_errors_of_the_whole_file(tuned, tmp_path, text):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match="^file.json: "):
        tuned.read_tiles(tmp_path / "file.json")


class Recorder:
    """Stands in for a kernel of Triton's: takes every launch."""

    __name__ = "some_kernel"
    arg_names = ["x", "BLOCK_M"]

    def __init__(self):
        self.launches = 0

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.launches += 1

        return run


def test_one_line_says_what_runs(module, tuning, caplog):
    """Once per kernel and config, by the first launch; none below INFO, none for kernels without a choice."""
    pytest.importorskip("triton")
    launch, kernel, x = module("launch"), Recorder(), torch.zeros(1)
    launch._log_once.cache_clear()
    choices = [tuning.GemmConfig(128, 64, 32, 4, 3, tuned=tuned).describe("a path") for tuned in (False, True)]

    def lines(level):
        caplog.clear()
        with caplog.at_level(level, logger="grouped_moe"):
            for choice in (*choices, choices[0], None):
                bound = launch.Kernel(kernel, choice, BLOCK_M=1)
                bound((1, 1, 1), x)
                bound((1, 1, 1), x)
        return [(record.name, record.levelno, record.getMessage()) for record in caplog.records]

    assert lines(logging.WARNING) == []
    start = "some_kernel on cpu: a path, tile 128x64x32, 4 warps, 3 stages, "
    assert lines(logging.INFO) == [("grouped_moe", logging.INFO, start + how) for how in ("heuristic", "tuned")]
    assert lines(logging.INFO) == []
    assert kernel.launches == 24
