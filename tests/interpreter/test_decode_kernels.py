"""The kernels for a few tokens: output against the reference."""

import pytest
import torch
from block import run_reference
from cases import BY_ID, make_inputs
from compare import assert_close
from poison import poison_sentinels

from interpreter.test_experts_kernels import guarded_inputs

FEW = [case._replace(T=min(case.T, 3), E=min(case.E, 12)) for case in BY_ID.values() if case.T and not case.transposed]
FP16 = [BY_ID[kind]._replace(T=3, transposed=False) for kind in ("silu-interleaved", "gpt-oss", "relu2-not-gated")]
FP16 += [BY_ID["odd-extents"]._replace(T=3)]
# Steps of the sizes that K asks for, with a rest.
FP16 += [
    BY_ID["silu-bias"]._replace(id=f"silu-bias-{h}", T=1, top_k=top_k, E=2, H=h, I=i)
    for top_k, h, i in ((2, 2050, 700), (32, 70, 264), (5, 9, 1025))
]
FP16 += [BY_ID["silu-bias"]._replace(id="transposed-views", T=2, transposed=True)]
CASES = [(case, torch.float32) for case in FEW] + [(case, torch.float16) for case in FP16]


def block_of(module, grouped_moe, case, inputs):
    """The package's block of a case."""
    weights = inputs.gate_up_proj, inputs.down_proj, inputs.gate_up_proj_bias, inputs.down_proj_bias
    return module("block").Block(*weights, None, None, **case.kind(grouped_moe))


def check(module, grouped_moe, kernels, case, dtype):
    """Weights that are transposed are views, contiguous along K all the same."""
    inputs = make_inputs(case, dtype, "cpu")
    given = guarded_inputs(poison_sentinels(inputs, case.E))
    if case.transposed:
        views = {name: getattr(given, name).mT.contiguous().mT for name in ("gate_up_proj", "down_proj")}
        given = given._replace(**views)
    out = kernels.decode(block_of(module, grouped_moe, case, given), *given[:3])
    assert out.dtype == dtype
    assert_close("out", out, run_reference(grouped_moe, case, inputs)["out"], dtype)


@pytest.mark.parametrize("case, dtype", CASES, ids=lambda value: getattr(value, "id", str(value)))
def test_matches_reference(module, grouped_moe, kernels, case, dtype):
    check(module, grouped_moe, kernels, case, dtype)


@pytest.mark.parametrize("case_id", ["silu-bias", "silu-interleaved", "relu2-not-gated"])
def test_several_tiles(module, grouped_moe, kernels, small_decode_tiles, case_id):
    """And a number of choices that is no power of two."""
    case = BY_ID[case_id]._replace(T=2, top_k=3, E=5, H=70, I=45, transposed=False)
    check(module, grouped_moe, kernels, case, torch.float32)


def test_which_calls_are_taken(module, grouped_moe, kernels):
    """One token always, more while slots are few next to experts; no weights strided along K, no wide types.

    Fewer where experts are large: two tokens of 128 experts share half an expert's weights, four share three of them.
    """
    case, is_decode = BY_ID["silu-bias"]._replace(E=32, bias=None), kernels.is_decode
    block = block_of(module, grouped_moe, case, make_inputs(case, torch.float16, "cpu"))
    assert is_decode(block, 1, 32) and is_decode(block, 4, 2)
    assert not is_decode(block, 5, 2)
    assert not is_decode(block, 1, 33) and not is_decode(block._replace(up=block.up.float()), 1, 2)
    assert not is_decode(block._replace(down=block.down.mT.contiguous().mT), 1, 2)
    assert is_decode(block._replace(up=block.up.mT, down=block.down.mT, transposed=True), 1, 2)
    for intermediate, tokens, taken in ((768, 4, 1), (1536, 2, 1), (14336, 1, 1), (1024, 4, 0), (14336, 2, 0)):
        up, down = (128, 2 * intermediate, 2048), (128, 2048, intermediate)
        up, down = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in (up, down))
        assert is_decode(block._replace(up=up, down=down), tokens, 8) == bool(taken)
