"""Low-rank pairs in the native op for a few tokens: right wherever it takes them, and taken where they should be."""

import pytest
import torch
from block import call, reference_out
from cases import GPT_OSS, RELU2, make_inputs
from compare import assert_bitwise, assert_close
from native_op import CODED_CASES, FEW, ROUNDS, STEPS, WHOLE, decode, poison_scaled
from operations import Log
from pairs import LAYOUTS, Pairs, factors, make_loras, with_factors
from poison import dirty_allocator, guarded, poison_sentinels
from scaled import Blocks, with_scales

pytestmark = pytest.mark.gpu
ADAPTED = {
    "rank-1": (FEW._replace(T=7, sentinels=0.3), Pairs(rank=1)),
    "steps": (STEPS, Pairs(rank=16)),
    "whole": (WHOLE, Pairs(rank=64)),
    "adapters": (STEPS._replace(T=20, interleaved=True, activation=GPT_OSS), Pairs(rank=3, adapters=3)),
    "rounds": (ROUNDS[0], Pairs(rank=16, adapters=2)),
    "down": (FEW._replace(T=9, gated=False, activation=RELU2), Pairs(rank=40, given=("down_lora",), shared="b")),
    "up": (FEW, Pairs(rank=256, given=("gate_up_lora",), shared="ab")),
    "warps": (FEW._replace(T=70, sentinels=0.3), Pairs(rank=6)),
    "many": (FEW._replace(T=70, E=8, sentinels=0.5), Pairs(rank=256, shared="a", adapters=2)),
}


def assert_any_strides(native, grouped_moe, case, inputs, loras, out):
    """The same bits where b lies otherwise."""
    for name, layout in LAYOUTS.items():
        strided_b = {key: layout(factor) if key.endswith("b") else factor for key, factor in factors(loras).items()}
        assert_bitwise(name, decode(native, grouped_moe, case, inputs, with_factors(loras, strided_b)), out)


@pytest.mark.parametrize("case, pairs", ADAPTED.values(), ids=ADAPTED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_low_rank_pairs(native, grouped_moe, device, case, pairs, dtype, factor_dtype, transposed, way):
    """Nothing of a sentinel is read, nor of experts without rows, nor scratch that nobody wrote; b of any strides."""
    case = case._replace(transposed=transposed)
    inputs = make_inputs(case, dtype, device)
    loras = make_loras(grouped_moe, case, inputs, pairs, factor_dtype)
    want = reference_out(grouped_moe, case, inputs, loras)
    poisoned, named = poison_sentinels(inputs, case.E), factors(loras)
    idle = poisoned.down_proj.isnan().all(2).all(1)
    for factor in named.values():
        if factor.shape[-3] == case.E:
            factor.masked_fill_(idle[:, None, None], float("nan"))
    dirty_allocator(device)
    out = decode(native, grouped_moe, case, poisoned, loras)
    assert_close("out", out, want, dtype)
    assert_bitwise("once more", decode(native, grouped_moe, case, poisoned, loras), out)
    assert_any_strides(native, grouped_moe, case, poisoned, loras, out)


@pytest.mark.parametrize("case", CODED_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [20, 6])
def test_low_rank_pairs_of_scaled_weights(native, grouped_moe, device, case, factor_dtype, rank, way):
    case, inputs, wide = with_scales(grouped_moe, case, make_inputs(case, torch.bfloat16, device), Blocks())
    loras = make_loras(grouped_moe, case, wide, Pairs(rank=rank, adapters=3), factor_dtype)
    want = reference_out(grouped_moe, case, wide, loras)
    poisoned = poison_scaled(inputs, case.E)
    out = decode(native, grouped_moe, case, poisoned, loras)
    assert_close("out", out, want, torch.bfloat16)
    assert_bitwise("once more", decode(native, grouped_moe, case, poisoned, loras), out)
    assert_any_strides(native, grouped_moe, case, poisoned, loras, out)


@pytest.mark.parametrize("change", [
    lambda up, down, index: (up, down, None),
    lambda up, down, index: (None, None, index),
    lambda up, down, index: (up, down, index[1:]),
    lambda up, down, index: (up, down, index.short()),
    lambda up, down, index: (up, down, index.cpu()),
    lambda up, down, index: (up, down._replace(a=down.a[:1], b=down.b[:1]), index),
    lambda up, down, index: (up, down._replace(a=down.a[0], b=down.b[0]), index),
    lambda up, down, index: (up._replace(b=up.b[:, :2]), None, index),
    lambda up, down, index: (up._replace(b=up.b[:, :, 1:]), None, index),
    lambda up, down, index: (up._replace(b=up.b[..., 1:]), None, index),
    lambda up, down, index: (up._replace(b=up.b.double()), None, index),
    lambda up, down, index: (up._replace(a=up.a.cpu()), None, index),
    lambda up, down, index: (up._replace(a=up.a.repeat(1, 1, 33, 1), b=up.b.repeat(1, 1, 1, 33)), None, index),
    lambda up, down, index: (up._replace(a=up.a.mT.contiguous().mT), None, index),
    lambda up, down, index: (up._replace(a=guarded(up.a)), None, index),
], ids=range(15))  # fmt: skip
def test_low_rank_pairs_the_op_does_not_take(native, grouped_moe, device, change, way):
    """Whoever is wrong among them is told so by others."""
    inputs = make_inputs(STEPS, torch.bfloat16, device)
    loras = make_loras(grouped_moe, STEPS, inputs, Pairs(adapters=2))
    assert decode(native, grouped_moe, STEPS, inputs, loras) is not None
    assert decode(native, grouped_moe, STEPS, inputs, dict(zip(loras, change(*loras.values())))) is None


@pytest.mark.parametrize("tokens", [2, 30])
def test_low_rank_pairs_are_taken(grouped_moe, device, taken, tokens):
    """At once, trainable ones as well where no gradient is asked for."""
    case = FEW._replace(T=tokens)
    inputs = make_inputs(case, torch.bfloat16, device)
    loras = make_loras(grouped_moe, case, inputs, Pairs(adapters=3), torch.float32)
    plain = call(grouped_moe, case, inputs, **loras)
    assert_close("out", plain, reference_out(grouped_moe, case, inputs, loras), torch.bfloat16)
    assert taken == [(True, True)]
    with Log():
        assert_bitwise("watched", call(grouped_moe, case, inputs, **loras), plain)
    assert taken[1:] == [(False, True)]
    del taken[:]
    for factor in factors(loras).values():
        factor.requires_grad_()
    assert call(grouped_moe, case, inputs, **loras).requires_grad and taken == []
    with torch.no_grad():
        assert_bitwise("no_grad", call(grouped_moe, case, inputs, **loras), plain)
        assert taken == [(True, True)]
        for name, value, error in (
            ("adapter_index", None, ValueError), ("gate_up_lora", tuple(loras["gate_up_lora"]), TypeError),
            ("down_lora", loras["down_lora"]._replace(scaling="1"), TypeError),
            ("down_lora", loras["down_lora"]._replace(scaling=10**400), ValueError),
            ("down_lora", loras["down_lora"]._replace(scaling=1e39), ValueError),
            ("down_lora", loras["down_lora"]._replace(b=None), TypeError),
        ):  # fmt: skip
            with pytest.raises(error, match=f"^{name}"):
                call(grouped_moe, case, inputs, **{**loras, name: value})
