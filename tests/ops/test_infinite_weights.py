"""A slot with an infinite routing weight: the output is infinite, of the sign of the slot's product, not NaN."""

import pytest
import torch
from block import call, make
from cases import make_inputs
from infinite import check_infinite_weights
from native_op import CODED_CASES, FEW, ROUNDS, STEPS, WHOLE, decode
from pairs import Pairs, make_loras
from scaled import Blocks, with_scales

LORAS = [None, Pairs(rank=6), Pairs(rank=40, adapters=3, given=("down_lora",))]


@pytest.mark.parametrize("case_id", ["silu", "gpt-oss", "relu2-not-gated"])
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks(grouped_moe, device, case_id, tokens, dtype):
    case, inputs = make(case_id, device, dtype, T=tokens)
    check_infinite_weights(lambda given: call(grouped_moe, case, given), inputs, case.E)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [FEW._replace(T=7, sentinels=0.3), STEPS, WHOLE, *ROUNDS], ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pairs", LORAS, ids=["plain", "lora", "adapters"])
@pytest.mark.parametrize("transposed", [False, True])
def test_native(native, grouped_moe, device, case, dtype, pairs, transposed, way):
    """With a bias or a low-rank pair that belongs to the product as well."""
    case = case._replace(transposed=transposed)
    inputs = make_inputs(case, dtype, device)
    loras = pairs and make_loras(grouped_moe, case, inputs, pairs)
    check_infinite_weights(lambda given: decode(native, grouped_moe, case, given, loras), inputs, case.E)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CODED_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pairs", LORAS, ids=["plain", "lora", "adapters"])
def test_native_with_scaled_weights(native, grouped_moe, device, case, dtype, pairs, way):
    case, inputs, wide = with_scales(grouped_moe, case, make_inputs(case, dtype, device), Blocks())
    loras = pairs and make_loras(grouped_moe, case, wide, pairs, dtype)
    check_infinite_weights(lambda given: decode(native, grouped_moe, case, given, loras), inputs, case.E)
