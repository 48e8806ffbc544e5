"""Tuned tiles: read, checked, and taken where they are; the heuristic elsewhere; and what the log says of it."""

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import tune
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tuned import A100, GPU, H200, TILE

pytest_plugins = ["tuned"]

B200 = {"num_sms": 148, "shared_memory": 232448, "capability": (10, 0)}
MI300 = {"num_sms": 304, "shared_memory": 65536, "warp_size": 64, "wide_tiles": False}
NAME = "NVIDIA H200"
HEAD = {"device": GPU, "capability": [9, 0], "num_sms": 132, "bandwidth": 4917}


@pytest.fixture
def tuning(package):
    return package["tuning.heuristic"]


@pytest.fixture
def files(package, tmp_path, monkeypatch):
    """The module that reads the files, which it looks for in tmp_path."""
    found = package["tuning.files"]
    monkeypatch.setattr(found, "CONFIGS", tmp_path)
    yield found
    found.read_table.cache_clear()


def write(path, tiles, **head):
    path.write_text(json.dumps({**HEAD, **head, "tiles": tiles}))


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
        for wide, k in itertools.product((False, True), (2048, 8192)):
            found["hopper", block_m, wide, n, k] = tuning.hopper_gemm_config(block_m, n, k, spec, wide)
    for rows, flag, m in itertools.product((16, 32, 64, 128, 256, 512, 1024), (False, True), (32, 2048)):
        found["wgrad", rows, flag, m] = tuning.wgrad_config(m, 768, rows, dtype, spec, flag)
        for size in (2, 4):
            found["hopper wgrad", rows, flag, m, size] = tuning.hopper_wgrad_config(m, 768, rows, size, flag, spec)
        if by_descriptor:
            found["wgrad tma", rows, m] = tuning.wgrad_config(m, 768, rows, dtype, spec, False, True)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_file_of_the_h200_holds_the_heuristic(tuning, device_spec, dtype):
    """It was tuned on one. A file that `benchmarks/tune.py` wrote anew would change this."""
    plain = all_configs(tuning, device_spec(**H200), dtype)
    tuned = all_configs(tuning, device_spec(**H200, name=NAME), dtype)
    assert tuned == plain
    assert not any(config.tuned for key, config in plain.items() if config and key[0] != "hopper")
    if dtype == torch.bfloat16:
        assert all(config.tuned for key, config in tuned.items() if config and key[0] != "hopper")


def test_files_of_the_package_are_valid(package):
    """And as `tune.py` would write them."""
    files = package["tuning.files"]
    paths = list(files.CONFIGS.glob("*.json"))
    assert paths
    for path in paths:
        table = files.read_table(path)
        assert table.tiles and files.file_of(table.device) == path
        assert tune.as_json(package, table) == path.read_text()


def test_files_are_found_through_links(grouped_moe, tmp_path, monkeypatch):
    """As the Hub's cache has them: a snapshot of links to files of other names elsewhere."""
    source = Path(grouped_moe.__file__).parent
    blobs, copy = tmp_path / "blobs", tmp_path / "snapshots" / "linked_package"
    blobs.mkdir()
    for number, path in enumerate(path for path in sorted(source.rglob("*")) if path.suffix in (".py", ".json")):
        link = copy / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        (blobs / str(number)).write_bytes(path.read_bytes())
        link.symlink_to(blobs / str(number))
    linked = ModuleType("linked_package")  # whose __init__ would register the ops once more
    linked.__path__ = [str(copy)]
    monkeypatch.setitem(sys.modules, "linked_package", linked)
    files = importlib.import_module("linked_package.tuning.files")
    assert files.tiles_of(importlib.import_module("linked_package.common.device").DeviceSpec(**H200, name=NAME))


def test_names_of_files(package):
    file_of = package["tuning.files"].file_of
    assert file_of("NVIDIA H200").name == "nvidia_h200.json"
    assert file_of("NVIDIA H100 80GB HBM3").name == "nvidia_h100_80gb_hbm3.json"
    assert file_of("AMD Instinct MI300X OAM").name == "amd_instinct_mi300x_oam.json"


@pytest.mark.parametrize("limits", [H200, A100, MI300], ids=["sm90", "sm80", "gfx942"])
def test_no_file_no_entry(files, tuning, device_spec, limits):
    """Both give the heuristic's choice."""
    plain = all_configs(tuning, device_spec(**limits), torch.bfloat16)
    assert all_configs(tuning, device_spec(**limits, name=GPU), torch.bfloat16) == plain
    write(files.file_of(GPU), {"wgrad": {}}, capability=list(limits.get("capability", (0, 0))))
    for name in ("No such GPU", GPU):
        assert all_configs(tuning, device_spec(**limits, name=name), torch.bfloat16) == plain


@pytest.mark.parametrize(
    "name, bandwidth, nearest", [("NVIDIA H100 NVL", 3938, "NVIDIA H100 80GB HBM3"), ("NVIDIA GH200 144G", 4915, NAME)]
)
def test_tables_of_the_package(package, tuning, device_spec, name, bandwidth, nearest):
    """A GPU without a file takes that of the nearest one of its capability, and without any what the heuristic says."""
    tiles_of = package["tuning.files"].tiles_of
    spec = device_spec(**{**H200, "bandwidth": bandwidth}, name=name)
    assert tiles_of(spec) == tiles_of(device_spec(**H200, name=nearest)) != {}
    assert tiles_of(spec) != tiles_of(device_spec(**H200, name=({NAME, "NVIDIA H100 80GB HBM3"} - {nearest}).pop()))
    assert tuning.gemm_config(64, 4096, torch.bfloat16, spec).tuned
    a100 = device_spec(**A100, name="NVIDIA A100-SXM4-80GB")
    assert tiles_of(a100) == {} and not tuning.gemm_config(64, 4096, torch.bfloat16, a100).tuned


@pytest.mark.parametrize("maker", ["AMD", "Intel"])
def test_tables_are_of_one_maker(package, monkeypatch, maker):
    """ROCm says of an MI210 what CUDA says of an H100: 9.0. AMD's Triton does not know dependent launches either."""
    device, files = package["common.device"], package["tuning.files"]
    mi210 = SimpleNamespace(
        name="AMD Instinct MI210", gcnArchName="gfx90a:sramecc+:xnack-", major=9, minor=0, multi_processor_count=104,
        shared_memory_per_block=65536, warp_size=64,
    )  # fmt: skip
    ponte = {"multiprocessor_count": 448, "max_shared_mem": 131072}
    utils = SimpleNamespace(get_device_properties=lambda index: ponte)
    active = SimpleNamespace(utils=utils, get_current_target=lambda: GPUTarget("xpu", {}, 32))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: mi210)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda index: "Intel(R) Data Center GPU Max 1550")
    monkeypatch.setattr(driver, "_active", active)
    spec = device.device_spec.__wrapped__(torch.device({"AMD": "cuda", "Intel": "xpu"}[maker], 0))
    assert spec.name.startswith(maker) and spec.capability == (0, 0) and files.tiles_of(spec) == {}
    assert not (spec.wide_tiles or spec.hopper or spec.float8)


NEAR = {"near": (132, 4917), "slow": (132, 2039), "small": (78, 4917), "other": (132, 4917)}
DEPTHS = dict(zip(NEAR, (32, 64, 128, 16)))


@pytest.mark.parametrize("num_sms, bandwidth, name, taken", [
    (132, 4800, "new", "near"), (132, 2400, "new", "slow"), (90, 4000, "new", "small"), (90, 0, "new", "small"),
    (114, 2039, "new", "slow"), (132, 4917, "small", "small"), (78, 4917, "slow", "slow"),
])  # fmt: skip
def test_the_nearest_table_of_the_capability_is_taken(files, tuning, device_spec, num_sms, bandwidth, name, taken):
    """By processors and bandwidth, the one of its own name before any other; never one of another capability."""
    for device, (sms, speed) in NEAR.items():
        head = {"device": device, "num_sms": sms, "bandwidth": speed, "capability": [8 if device == "other" else 9, 0]}
        write(files.file_of(device), {"gemm": {"64": {**TILE, "block_k": DEPTHS[device]}}}, **head)
    spec = device_spec(**{**H200, "num_sms": num_sms, "bandwidth": bandwidth}, name=name)
    config = tuning.gemm_config(64, 4096, torch.bfloat16, spec)
    assert config.tuned and config.block_k == DEPTHS[taken]


def test_an_entry_replaces_that_tile_alone(files, tuning, device_spec):
    write(files.file_of(GPU), {"gemm": {"64": {**TILE, "group_m": 4}}, "gemm_hopper": {"128": None}})
    spec = device_spec(**H200, name=GPU)
    config = tuning.gemm_config(64, 4096, torch.float16, spec)
    assert config == tuning.GemmConfig(64, 64, 32, 4, 2, group_m=4) and config.tuned
    assert not tuning.gemm_config(32, 4096, torch.float16, spec).tuned
    assert not tuning.gemm_config(64, 4096, torch.float32, spec).tuned
    assert not tuning.up_config(64, 4096, torch.float16, spec, False, False).tuned
    assert tuning.hopper_gemm_config(128, 4096, 2048, spec, False) is None
    assert tuning.hopper_gemm_config(128, 4096, 2048, device_spec(**H200), False) is not None


@pytest.mark.parametrize("rows, groups, n, k, block_n", [
    (32768, 8, 4096, 14336, 256),  # Mixtral's down-projection
    (65536, 128, 2048, 1536, 128),  # K is short
    (65536, 128, 2880, 5760, 128),  # gpt-oss' dx: wide tiles would have 7 % more columns than there are
    (1024, 8, 4096, 4096, 256),  # groups of 128 rows stream their weights
    (8192, 8, 4096, 14336, 128),  # few rounds: a last one of wide tiles may be nearly empty
    (512, 8, 1024, 8192, 128),  # 32 wide tiles for 132 processors
])  # fmt: skip
def test_which_tiles_two_warp_groups_share(tuning, device_spec, rows, groups, n, k, block_n):
    spec = device_spec(**H200)
    config = tuning.hopper_gemm_config(128, n, k, spec, tuning.wide_pays(rows, groups, n, k, spec))
    assert config.block_n == block_n


@pytest.mark.parametrize("bandwidth, rows", [(0, 600), (4917, 600), (3352, 880)])
def test_up_to_how_many_rows_codes_are_not_copied(tuning, device_spec, bandwidth, rows):
    """On average of a group: fewer where memory is faster. Unknown bandwidth counts as an H200's."""
    spec = device_spec(**{**H200, "bandwidth": bandwidth})
    assert tuning.transposing_pays(8 * rows, 8, spec) and not tuning.transposing_pays(8 * (rows + 1), 8, spec)


@pytest.mark.parametrize("gpu, block_m, by_tma, tuned, columns, beside", [
    (B200, 128, True, None, 256, 128), (B200, 128, False, None, 128, 128), (B200, 64, False, None, 64, 64),
    (H200, 128, True, None, 256, 128), (H200, 64, False, None, 128, 128), (A100, 128, False, None, 64, 64),
    (A100, 128, True, None, 64, 64),  # which has no wide tiles
    (B200, 64, False, 128, 128, 64), (H200, 64, False, 256, 256, 128), (B200, 64, False, 32, 32, 32),
])  # fmt: skip
def test_a_low_rank_pair_limits_the_columns_of_the_dgrad(
    files, package, device_spec, gpu, block_m, by_tma, tuned, columns, beside
):
    """Of the heuristic's tile and of a tuned one, for the launcher that adds the pair."""
    spec, factor = device_spec(**gpu, name=GPU), package["backends.triton.factors"].factor_of
    if tuned:
        tile = {**TILE, "block_n": tuned}
        write(files.file_of(GPU), {"down_dgrad": {str(block_m): tile}}, capability=list(gpu["capability"]))
    activation, pair = package["common.activation"].Activation("silu"), torch.empty(1, 8, 768, 16)
    for given, wanted in ((None, columns), (pair, beside)):
        problem = package["backends.problems"].BlockProblem(
            spec, torch.bfloat16, "ieee", 8, block_m, 768, 2048, 2, by_tma, False, factor(given), False, True, False,
            activation, False,
        )  # fmt: skip
        launcher = package["backends.triton.launchers"].DownDgrad(problem)
        assert launcher.by_tma is (by_tma and spec.wide_tiles) and launcher.config.block_n == wanted
        assert launcher.config.tuned is bool(tuned) and launcher.n_tiles == 768 // wanted


def test_a_null_of_either_hopper_tile_leaves_the_other(files, tuning, device_spec):
    def chosen(tiles):
        write(files.file_of(GPU), tiles)
        files.read_table.cache_clear()
        return tuning.hopper_gemm_config(128, 4096, 14336, device_spec(**H200, name=GPU), True)

    narrow, wide = {"gemm_hopper": {"128": None}}, {"gemm_hopper_wide": {"128": None}}
    assert chosen({}).block_n == chosen(narrow).block_n == 256
    assert chosen(wide).block_n == 128
    assert chosen({**narrow, **wide}) is None


def test_a_tuned_tile_still_has_to_fit(files, tuning, device_spec):
    """The shared memory, and the columns there are."""
    write(files.file_of(GPU), {"gemm": {"128": {**TILE, "block_n": 256, "block_k": 128, "num_stages": 8}}})
    config = tuning.gemm_config(128, 4096, torch.bfloat16, device_spec(**H200, name=GPU))
    assert config.num_stages == 2 and config.tuned
    assert tuning.gemm_config(128, 60, torch.bfloat16, device_spec(**H200, name=GPU)).block_n == 64


def tiles(**kernels):
    """The file's text with these tiles."""
    return {**HEAD, "tiles": kernels}


WRONG = [
    (tiles(gem={}), "tiles: expected one of gemm,"),
    (tiles(gemm={"48": TILE}), "tiles.gemm: expected one of 16, 32, 64, 128, got '48'"),
    (tiles(gemm=[TILE]), "tiles.gemm: expected an object"),
    (tiles(gemm={"64": 3}), "tiles.gemm.64: expected an object, got 3"),
    (tiles(gemm={"64": None}), "tiles.gemm.64: expected an object, got None"),
    (tiles(wgrad={"64": TILE}), "tiles.wgrad.64: expected the field block_m"),
    (tiles(gemm={"64": {**TILE, "block_m": 64}}), "tiles.gemm.64: expected the fields block_n,"),
    (tiles(gemm={"64": {**TILE, "block_k": "64"}}), "tiles.gemm.64.block_k: expected an integer"),
    (tiles(gemm={"64": {**TILE, "num_warps": True}}), "tiles.gemm.64.num_warps: expected an integer"),
    (tiles(gemm={"64": {**TILE, "num_stages": 0}}), "tiles.gemm.64.num_stages: expected an integer, 1 or"),
    (tiles(gemm={"64": {**TILE, "block_n": 96}}), "tiles.gemm.64.block_n: expected a power of two, got 96"),
    (tiles(gemm={"64": {**TILE, "programs_per_sm": 0}}), "tiles.gemm.64.programs_per_sm"),
    (
        tiles(wgrad_hopper_gathered={"64": {**TILE, "block_m": 128, "num_stages": 1}}),  # a ring too short
        "tiles.wgrad_hopper_gathered.64.num_stages: expected an integer, 2 or more, got 1",
    ),
    (tiles(gemm_hopper={"128": {**TILE, "num_warps": 8}}), "tiles.gemm_hopper.128.num_warps: expected 4"),
    (tiles(gemm_hopper={"128": TILE}), "tiles.gemm_hopper.128.block_n: expected 128, got 64"),
    ({**HEAD, "tiles": []}, "tiles: expected an object, got []"),
    (HEAD, "tiles: expected an object, got None"),
    ([], "the file: expected an object"),
    ({"tiles": {}}, "device: expected a name"),
    ({**tiles(), "tile": {}}, "its keys: expected device, capability,"),
    ({**tiles(), "capability": "9.0"}, "capability: expected major and minor, got '9.0'"),
    ({**tiles(), "num_sms": 0}, "num_sms: expected an integer above 0, got 0"),
    ({**tiles(), "bandwidth": 4.8}, "bandwidth: expected an integer above 0, got 4.8"),
]


@pytest.mark.parametrize(
    "capability, warp_size, late", [((8, 0), 32, 2), ((9, 0), 32, 2), ((0, 0), 32, 0), ((0, 0), 64, 0)]
)
def test_loads_that_wait_for_their_rows_are_late_on_nvidia(tuning, device_spec, capability, warp_size, late):
    spec = device_spec(132, 232448, warp_size=warp_size, capability=capability)
    gathered, in_place = (tuning.wgrad_config(2048, 768, 512, torch.bfloat16, spec, flag) for flag in (True, False))
    assert gathered.num_stages - in_place.num_stages == late


@pytest.mark.parametrize("content, message", WRONG, ids=[message for _, message in WRONG])
def test_errors_name_file_and_key(files, tuning, device_spec, content, message):
    """Of its own file, and of the nearest one."""
    files.file_of(GPU).write_text(json.dumps(content))
    for name in (GPU, "another"):
        with pytest.raises(ValueError) as error:
            tuning.gemm_config(64, 4096, torch.bfloat16, device_spec(**H200, name=name))
        assert str(error.value).startswith(f"{files.file_of(GPU).name}: {message}")


def test_a_file_that_is_not_json(files, tmp_path):
    (tmp_path / "file.json").write_text("{")
    with pytest.raises(ValueError, match="^file.json: not JSON"):
        files.read_table(tmp_path / "file.json")
