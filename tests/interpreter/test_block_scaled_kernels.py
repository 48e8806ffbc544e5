"""The kernels for block-scaled weights: output and gradients against the reference on the same weights in fp64."""

import pytest
import torch
from block import call, run_reference
from cases import BY_ID, make_inputs
from compare import assert_close
from pairs import Pairs, make_loras
from poison import poison_sentinels
from scaled import Blocks, check, with_scales

from interpreter.test_experts_kernels import guarded_inputs

TILES = {"H": 70, "I": 72, "T": 40, "E": 3}
CASES = {
    "one-block": ("silu", {}, Blocks()),
    "blocks": ("silu", TILES, Blocks((16, 32))),
    "up-crosses-a-block": ("silu", {**TILES, "T": 12, "I": 80}, Blocks()),
    "up-crosses-a-block-of-32-rows": ("silu", {**TILES, "I": 112}, Blocks()),
    "apart": ("silu-bias", {**TILES, "I": 75}, Blocks((16, 64), apart=True)),
    "apart-in-half-steps": ("silu", TILES, Blocks((16, 64), apart=True)),
    "per-expert": ("silu-recompute", TILES, Blocks(None, apart=True)),
    "not-gated": ("relu2-not-gated", TILES, Blocks((32, 16))),
    "interleaved": ("gpt-oss", TILES, Blocks((32, 32))),
    "exponents": ("silu", TILES, Blocks((16, 16), dtype=torch.float8_e8m0fnu)),
    "views": ("silu-mostly-sentinels", TILES, Blocks((16, 32), views=True)),
    "one-of-two": ("silu", TILES, Blocks((16, 32), kept=("down_proj",))),
    "tall": ("tall", {"T": 150, "H": 136, "I": 136}, Blocks(apart=True)),
    "tall-of-whole-blocks": ("tall", {"T": 70, "H": 128, "I": 128}, Blocks()),
    "tall-of-small-blocks-of-K": ("tall", {"T": 70, "H": 128, "I": 128}, Blocks((64, 32))),
    "tall-of-small-blocks-of-N": ("tall", {"T": 70, "H": 128, "I": 128}, Blocks((32, 128))),
    "no-token": ("silu", {"T": 0}, Blocks()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("case_id, sizes, blocks", CASES.values(), ids=CASES)
def test_matches_reference(grouped_moe, case_id, sizes, blocks, dtype):
    """With NaN around all but scaled weights, and in what must not be read."""
    case = BY_ID[case_id]._replace(**sizes)
    inputs = make_inputs(case, dtype, "cpu")
    check(grouped_moe, case, inputs, blocks, guarded_inputs(poison_sentinels(inputs, case.E)))


FEW = {
    "blocks": ("silu", Blocks((16, 32))),
    "apart": ("silu-bias", Blocks((16, 64), apart=True)),
    "per-expert": ("silu", Blocks(None, apart=True)),
    "not-gated": ("relu2-not-gated", Blocks((32, 16))),
    "interleaved": ("gpt-oss", Blocks((32, 32), dtype=torch.float8_e8m0fnu)),
    "one-of-two": ("silu", Blocks(kept=("gate_up_proj",))),
    "none-routed": ("silu-mostly-sentinels", Blocks()),
}


@pytest.mark.usefixtures("small_decode_tiles")
@pytest.mark.parametrize("case_id, blocks", FEW.values(), ids=FEW)
def test_few_tokens(module, grouped_moe, monkeypatch, case_id, blocks):
    """The kernels for decode, with steps along K within a block, and columns that do not fill a tile."""
    launched = []
    monkeypatch.setattr(module("backends.triton"), "is_decode", lambda *_: launched.append(True) or True)
    case = BY_ID[case_id]._replace(T=3, E=12, H=70, I=39, recompute=False)
    case, given, wide = with_scales(grouped_moe, case, make_inputs(case, torch.float16, "cpu"), blocks)
    want = run_reference(grouped_moe, case, wide)["out"]
    assert_close("out", call(grouped_moe, case, given), want, torch.float16)
    assert launched


@pytest.mark.parametrize("case_id", ["silu-bias", "silu-interleaved"])
def test_low_rank_pairs(grouped_moe, case_id):
    case = BY_ID[case_id]._replace(**TILES)
    inputs = make_inputs(case, torch.float16, "cpu")
    loras = make_loras(grouped_moe, case, inputs, Pairs(rank=5), torch.float32)
    check(grouped_moe, case, inputs, Blocks((16, 32)), **loras)
