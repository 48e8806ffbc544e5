"""The kernels for rows and weights of 8-bit floats, for any GPU with e4m3: against fp64 on the same codes."""

import pytest
import torch
from compare import assert_bitwise, assert_close
from pairs import Pairs
from poison import turned
from quantized import ROWS, SAME_CODES, Case, error, make, rounded, run
from quantized_steps import Ranks, gradients, make_pairs, references, with_leaves
from torch.nn.functional import silu

from interpreter.test_quantized_kernels import rounded_by_torch  # noqa: F401

FP16, NAN = torch.float16, float("nan")
SHAPE = {"E": 2, "top_k": 2, "T": 150, "dtype": FP16}  # tall tiles, the second one of an expert not full
CASES = {
    "blocks": (Case(H=256, I=128, **SHAPE), None),
    "pairs": (Case(H=256, I=256, **SHAPE), Ranks(Pairs(16))),
    "as-peft": (Case(H=256, I=256, **SHAPE), Ranks(Pairs(16), layout="peft")),
    "adapters": (Case(H=256, I=256, **SHAPE), Ranks(Pairs(8, adapters=2))),
    "odd-extents": (Case(H=144, I=208, parts=2, **SHAPE), None),
    "half-blocks": (Case(H=256, I=192, **SHAPE), Ranks(Pairs(8))),
    "few-rows": (Case(H=256, I=256, **{**SHAPE, "T": 60}, products="w8a8"), Ranks(Pairs(8))),
    "exponents": (Case(H=128, I=256, scales=torch.float8_e8m0fnu, **SHAPE), None),
}


@pytest.fixture(params=[True, False], ids=["wide", "narrow"], autouse=True)
def spec(request, module, monkeypatch):
    """A GPU with e4m3, whose matrix instructions read operands from shared memory, or from registers."""
    device = module("common.device")
    found = device.DeviceSpec(2, 101376, wide_tiles=request.param, float8=True, capability=(12, 0))
    monkeypatch.setattr(device, "device_spec", lambda device: found)


@pytest.mark.parametrize("case, ranks", CASES.values(), ids=CASES)
def test_steps(grouped_moe, case, ranks):
    """Output and every gradient; NaN in what no expert reads."""
    given = make(grouped_moe, case, device="cpu")
    given.ids[3], pairs = case.E, make_pairs(grouped_moe, given, ranks)
    unread, dout = (given.ids >= case.E).all(1)[:, None], torch.randn_like(given.x)
    with torch.enable_grad():
        leaves = with_leaves(given._replace(x=torch.where(unread, NAN, given.x)))
        out = run(grouped_moe, case, leaves, **pairs)
        got = gradients(out, leaves, pairs, torch.where(unread, NAN, dout))
        wants = references(case, given, pairs, dout)
    assert error(out.detach(), wants[0]["out"]) < SAME_CODES
    assert error(out.detach(), wants[1]["out"]) > 1e-2  # rows were quantized, indeed
    assert (got["dx"][unread[:, 0]] == 0).all()
    for name, grad in got.items():
        assert error(grad, wants[1][name]) < 1.5 * ROWS, name
    if case.I % 128 == 0:
        assert error(got["dx"], wants[0]["dx"]) < 0.5 * error(got["dx"], wants[1]["dx"])


BOUNDS = [5, 150, 150, 290]  # of three groups, of which one is empty, in 300 rows


def values_of(rows):
    """Codes times their scales, in fp64."""
    return rows.codes.double() * rows.scales.double().repeat_interleave(128, 1)[:, : rows.shape[1]]


def block_of(module, grouped_moe, up, bias, gated):
    activation = grouped_moe.Activation("silu" if gated else "relu2", up_offset=float(gated))
    down = grouped_moe.quantize_blocks(torch.randn(3, 256, up.shape[1] // (1 + gated)))
    return module("block").Block(up, down, bias, None, None, None, activation, gated, False, False, False)


@pytest.mark.parametrize("n, parts, gated", [
    (128, 2, True), (128, 1, False), (192, 2, True), (192, 1, False), (80, 2, True), (80, 1, False), (96, 1, True),
])  # fmt: skip
def test_up_proj(module, grouped_moe, kernels, quantize, n, parts, gated):
    """Rows in place, with biases and scales: the codes of the activation, and the pre-activation.

    Of one part, tiles of up may cross a block.
    """
    width = n * (1 + gated)
    up = grouped_moe.quantize_blocks(torch.randn(3, width, 144) / 12, parts=parts)
    bias, scales, x = torch.randn(3, width).half(), torch.rand(300), torch.randn(300, 144).half()
    up.scale_inv[0, 0] = 0
    block = block_of(module, grouped_moe, up, bias, gated)
    x[:5], x[290:], scales[290:] = NAN, NAN, NAN
    rows = kernels.split_rows(torch.tensor(BOUNDS), 3, 300, FP16)
    preact, act = kernels.up_proj(block, x, rows, scales, save=True, activate=True)
    none, alone = kernels.up_proj(block, x, rows, scales, save=False, activate=True)
    saved, nothing = kernels.up_proj(block, x, rows, scales, save=True, activate=False)
    assert none is nothing is None and isinstance(act, quantize.QuantizedRows)
    for codes in (act.codes, alone.codes):
        assert codes.float()[:5].isnan().all() and codes.float()[290:].isnan().all()
    assert preact[:5].isnan().all() and preact[290:].isnan().all() and act.scales[:5].isnan().all()
    operands = values_of(quantize.quantize_rows(x)), up.dequantize(torch.float64), torch.tensor(BOUNDS), bias.double()
    want = grouped_moe.reference.grouped_linear(*operands)
    value = silu(want[:, :n]) * (want[:, n:] + 1) if gated else want.relu().square()
    value = (value * scales[:, None].double())[5:290]
    values = values_of(act)[5:290]
    assert_close("preact", preact[5:290], want[5:290], FP16)
    assert error(values, rounded(value)) < SAME_CODES and error(values, value) < ROWS
    for again, first in ((alone.codes, act.codes), (alone.scales, act.scales), (saved, preact)):
        assert_bitwise("again", again.float()[5:290], first.float()[5:290])


@pytest.mark.parametrize("n, parts", [(256, 1), (72, 1), (300, 2), (384, 2)])
@pytest.mark.parametrize("zero_rest", [True, False], ids=["zeros", "unwritten"])
def test_gemm(grouped_moe, kernels, quantize, n, parts, zero_rest):
    """Of rows in place, with a bias times scales."""
    weight = grouped_moe.quantize_blocks(torch.randn(3, n, 272) / 16, parts=parts)
    bias, scales, x = torch.randn(3, n).half(), torch.rand(300), torch.randn(300, 272).half()
    x[:5], x[290:] = NAN, NAN
    rows = kernels.split_rows(torch.tensor(BOUNDS), 3, 300, FP16)
    codes = quantize.quantize_rows(x)
    y = kernels.gemm(codes, weight, rows, bias=bias, scales=scales, zero_rest=zero_rest)
    operands = values_of(codes), weight.dequantize(torch.float64), torch.tensor(BOUNDS), bias.double(), scales.double()
    want = grouped_moe.reference.grouped_linear(*operands)
    for rest in (y[:5], y[290:]):
        assert (rest == 0).all() if zero_rest else rest.isnan().all()
    assert_close("y", y[5:290], want[5:290], FP16)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("sorts", [False, True], ids=["tokens", "rows"])
def test_rows_without_a_routed_slot_stay_unwritten(kernels, quantize, top_k, sorts):
    """Nor are such tokens read, and the others become what all do without sentinels."""
    ids = torch.randint(0, 3, (37, top_k))
    ids[5], ids[30:], ids[7, 0] = 3, -1, 3
    x, is_local = torch.randn(37, 656).half(), (ids >= 0) & (ids < 3)  # more columns than a program takes
    want = quantize.quantize_rows(x)
    assert_bitwise("of other strides", quantize.quantize_rows(turned(x)).codes.float(), want.codes.float())
    x[~is_local.any(1)] = NAN
    rows = kernels.route(ids, 3, FP16)
    made = quantize.quantize_rows(x, rows, sorts=sorts)
    routed, tokens = is_local.any(1), torch.arange(37)
    if sorts:
        routed = torch.arange(37 * top_k) < is_local.sum()
        tokens = torch.where(routed, rows.row_to_slot // top_k, 0)
    assert 0 < routed.sum() < len(routed) == made.shape[0]
    for some, all_of_them in ((made.codes.float(), want.codes.float()), (made.scales, want.scales)):
        assert some[~routed].isnan().all()
        assert_bitwise("routed", some[routed], all_of_them[tokens[routed]])
