"""The search for tiles of `benchmarks/tune.py`: its candidates, its cases, and products that take the tiles given."""

import math
import sys

import pytest
import torch

pytest.importorskip("triton")

import tune
from tuned import A100, GPU, H200, TILE
from workload import QWEN3_30B, SMOKE, SMOKE_GPT_OSS

pytest_plugins = ["tuned"]


def test_candidates_are_valid_entries(package, tmp_path):
    """Each differs in one field from the tile, and can be written to a file."""
    files = package["tuning.files"]
    ours = files.read_table(files.CONFIGS / "nvidia_h200.json")
    for key, tile in ours.tiles.items():
        for number, candidate in enumerate(tune.neighbours(key, tile, H200["shared_memory"]) if tile else ()):
            path = tmp_path / f"{key[0]}_{key[1]}_{number}.json"
            path.write_text(tune.as_json(package, ours._replace(tiles={key: candidate})))
            assert files.read_table(path) == ours._replace(tiles={key: candidate})
            assert candidate is None or sum(candidate[name] != tile[name] for name in tile) == 1


class Pretended(tune.Bench):
    """Times in ms from a formula: deeper is faster, 4 stages are wrong, 32 columns do not compile."""

    def __init__(self):
        self.asked = []

    def times(self, case, key, candidates):
        self.asked.append((case, len(candidates)))
        wrong = (tile["num_stages"] == 4 or tile["block_n"] == 32 for tile in candidates)
        return [math.inf if bad else 1 / tile["block_k"] for bad, tile in zip(wrong, candidates)]


@pytest.mark.parametrize("steps, depth", [(6, 128), (1, 64), (0, 32)])
def test_search_goes_to_the_fastest(steps, depth):
    """Over all cases; what was found wrong in one is not timed in the next one."""
    tile, bench = {"block_m": 64, **TILE, "num_stages": 3, "group_m": 8, "programs_per_sm": 1}, Pretended()
    cases, compiled = [tune.Case(SMOKE, 64, "up"), tune.Case(SMOKE, 64, "down")], []
    found, gain = tune.search(("gemm", 64), tile, cases, bench, compiled.extend, H200["shared_memory"], steps)
    assert found == {**tile, "block_k": depth} and gain == pytest.approx(32 / depth)
    assert bool(compiled) == bool(steps) == bool(bench.asked)
    if steps:
        first = len([job for job in compiled if job[0] == cases[0]][: bench.asked[0][1] - 1])
        assert bench.asked[0] == (cases[0], first + 1) and bench.asked[1] == (cases[1], first + 1 - 2)


def test_cases_are_grouped_by_the_tile_that_they_take(capsys):
    cases = [tune.Case(SMOKE, 64, name) for name in ("up", "dx", "down", "up wgrad")]
    wide, gemm = (("gemm_hopper_wide", 128), None), (("gemm", 64), TILE)
    compiled = [("", [wide, gemm]), ("", []), ("", [gemm]), ("does not fit", [])]
    assert tune.group(cases, compiled) == {gemm[0]: (TILE, [cases[0], cases[2]])}
    assert capsys.readouterr().out == "smoke 64 dx: no tile\nsmoke 64 up wgrad: does not fit\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would tune")
def test_tune_says_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune.py"])
    assert tune.main() == 1
    assert "no GPU" in capsys.readouterr().err


def test_tune_refuses_words_of_no_layer(monkeypatch, capsys):
    """Ahead of all that takes a GPU; nothing would be tuned."""
    monkeypatch.setattr(sys, "argv", ["tune.py", "--layers", "Qwen3", "Mixtrel"])
    with pytest.raises(SystemExit) as ended:
        tune.main()
    assert ended.value.code == 2 and "--layers: expected words of Qwen3-30B" in capsys.readouterr().err


WITHOUT_TILES = {"hopper_gathered_up_proj_kernel", "hopper_down_dgrad_kernel"}  # of choice


@pytest.mark.parametrize("limits", [H200, A100], ids=["sm90", "sm80"])
@pytest.mark.parametrize(
    "layer, rows", [(SMOKE, 64), (SMOKE_GPT_OSS, 64), (QWEN3_30B, 256)], ids=["smoke", "oss", "large"]
)
def test_products_ask_for_their_tiles(package, device_spec, monkeypatch, layer, rows, limits):
    """What a GPU would run, on a CPU, without running it. Another table is asked again, and what it says is taken."""
    launched, spec = [], device_spec(**limits, name=GPU)
    launch = package["backends.triton.launch"]
    monkeypatch.setattr(package["common.device"], "device_spec", lambda *_: spec)
    monkeypatch.setattr(launch.Kernel, "__call__", lambda kernel, *_: launched.append(kernel))
    products = tune.make_products(package, layer, rows, "cpu")
    assert tuple(products) == tune.PRODUCTS
    for _ in range(2):
        with tune.replaced(package, spec) as tiles:
            for name, call in products.items():
                tiles.take({})
                call(0)
                kernel = launched.pop().function.__name__
                asked, tile = tiles.asked[-1] if tiles.asked else (None, None)
                assert (asked is None) == (kernel in WITHOUT_TILES), (name, kernel, asked)
                if asked is None:
                    continue
                assert asked[0].split("_")[0] in kernel and ("hopper" in asked[0]) == ("hopper" in kernel), name
                changed = next(t for t in tune.neighbours(asked, tile, 10**6) if t and t["group_m"] == tile["group_m"])
                tiles.take({asked: changed})
                call(0)
                assert tiles.asked[-1] == (asked, changed) and launched.pop().function.__name__ == kernel


def test_a_case_is_compiled_with_its_tile(grouped_moe, package, device_spec, monkeypatch):
    """Into Triton's cache, by the launchers; a tile that cannot be compiled is an error, not an end."""
    monkeypatch.setattr(tune, "load_kernel", lambda: grouped_moe)
    gpu, case = tune.Gpu(("cuda", 80, 32), tune.astuple(device_spec(**A100, name=GPU))), tune.Case(SMOKE, 64, "down")
    error, ((key, tile),) = tune.compile_case(gpu, case, {})
    assert error == "" and key == ("gemm", 64)
    assert tune.compile_case(gpu, case, {key: {**tile, "block_k": 32}}) == ("", [(key, {**tile, "block_k": 32})])
    error, asked = tune.compile_case(gpu, case, {key: {**tile, "block_k": 48}})
    assert "Error" in error and asked == []


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [SMOKE, SMOKE_GPT_OSS], ids=lambda layer: layer.name)
def test_products_of_candidates_agree(package, layer, device):
    """With the tiles in use and with the first that fits beside them."""
    spec = package["common.device"].device_spec(torch.device("cuda", 0))
    with tune.replaced(package, spec) as tiles:
        for name, call in tune.make_products(package, layer, 64, device).items():
            tiles.take({})
            wanted = [result.clone() for result in call(0)]
            key, tile = tiles.asked[-1]
            tiles.take({key: tune.neighbours(key, tile, spec.shared_memory)[0]})
            assert all(map(tune.agrees, call(0), wanted)), name
