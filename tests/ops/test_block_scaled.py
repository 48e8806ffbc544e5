"""Block-scaled weights: what they are, and blocks and layers with them against the reference on the same values."""

from functools import partial

import pytest
import torch
from block import call, make, run, run_reference
from cases import BY_ID, make_inputs
from compare import assert_bitwise, assert_close, assert_part, assert_same
from errors import raises
from marks import by_fp32_and_bf16
from operations import record
from pairs import Pairs, make_loras
from poison import poisoned_allocations
from scaled import WEIGHTS, Blocks, check, with_scales

FP32, BF16, E8M0 = torch.float32, torch.bfloat16, torch.float8_e8m0fnu
NAN = float("nan")
SMALL = Blocks((16, 32))
CASES = {
    "one-block": ("silu", Blocks()),
    "blocks": ("silu", SMALL),
    "apart": ("silu-bias", Blocks((16, 16), apart=True)),
    "per-expert": ("silu-recompute", Blocks(None, apart=True)),
    "not-gated": ("relu2-not-gated", SMALL),
    "interleaved": ("gpt-oss", Blocks((32, 16))),
    "exponents": ("silu-mostly-sentinels", Blocks((16, 16), dtype=E8M0)),
    "bf16-scales": ("silu", Blocks((16, 16), dtype=BF16)),
    "exponents-up": ("silu", Blocks((16, 16), dtype=E8M0, down_dtype=FP32)),
    "exponents-down": ("silu", Blocks((16, 16), dtype=FP32, down_dtype=E8M0)),
    "views": ("silu-bias", Blocks((16, 32), views=True)),
    "up-alone": ("silu", Blocks((16, 32), kept=("down_proj",))),
    "down-alone": ("silu-recompute", Blocks((16, 32), kept=("gate_up_proj",))),
    "one-token": ("one-token", SMALL),
    "many-experts": ("many-experts", Blocks()),
    "odd-extents": ("odd-extents", Blocks((16, 16), apart=True)),
    "extents-of-one": ("extents-of-one", Blocks()),
    "tall-wide": ("tall-wide", Blocks(apart=True)),
    "tall-wide-gpt-oss": ("tall-wide-gpt-oss", Blocks()),
}
by_case = pytest.mark.parametrize("case_id, blocks", CASES.values(), ids=CASES)
some = pytest.mark.parametrize("case_id, blocks", [CASES[name] for name in ("apart", "interleaved", "tall-wide")])


@by_fp32_and_bf16
@by_case
def test_matches_reference(grouped_moe, device, case_id, blocks, dtype):
    """Output and the gradients of all but the weights, which have none."""
    case, inputs = make(case_id, device, dtype)
    if dtype == BF16:  # kinks would need a pre-activation that two bytes hold exactly
        name, alpha, _, up_offset = case.activation
        case = case._replace(activation=(name, alpha, None, up_offset))
    check(grouped_moe, case, inputs, blocks)


@pytest.mark.parametrize("tokens", [1, 3])
@some
def test_without_gradients(grouped_moe, device, case_id, blocks, tokens):
    """A few tokens have kernels of their own on an accelerator."""
    case, given, wide = with_scales(grouped_moe, *make(case_id, device, BF16, T=tokens, top_k=2, E=24), blocks)
    want = run_reference(grouped_moe, case, wide)
    with torch.no_grad():
        assert_close("out", call(grouped_moe, case, given), want["out"], BF16)


@some
def test_nothing_else_is_read(grouped_moe, device, case_id, blocks):
    """Codes and scales of experts without rows are NaN, and so is fresh memory."""
    case, inputs = make(case_id, device, BF16, E=7)
    inputs = inputs._replace(top_k_index=torch.where(inputs.top_k_index == 2, 7, inputs.top_k_index))
    case, given, _ = with_scales(grouped_moe, case, inputs, blocks)
    want = run(grouped_moe, case, given)
    poisoned = {}
    for name in WEIGHTS:
        data, scales = getattr(given, name).data.clone(), getattr(given, name).scale_inv.clone()
        data.view(torch.uint8)[2], scales[2] = 0x7F, NAN
        poisoned[name] = getattr(given, name)._replace(data=data, scale_inv=scales)
    with poisoned_allocations():
        got = run(grouped_moe, case, given._replace(**poisoned))
    assert_same(got, want)


def test_forward_mode_is_refused(grouped_moe, device):
    weight, x = grouped_moe.quantize_blocks(torch.randn(2, 16, 32, device=device)), torch.randn(4, 32, device=device)
    ids, sizes = torch.zeros(4, 1, dtype=torch.int64, device=device), torch.tensor([4, 0], device=device)
    with torch.autograd.forward_ad.dual_level():
        scales = torch.autograd.forward_ad.make_dual(weight.scale_inv, torch.ones_like(weight.scale_inv))
        weight, down = weight._replace(scale_inv=scales), torch.randn(2, 32, 8, device=device)
        for name, *given in (
            ("grouped_linear", x, weight, sizes),
            ("grouped_mm_experts", x, ids, x[:, :1], weight, down),
        ):
            with pytest.raises(NotImplementedError, match=f"^{name}: .*jvp"):
                getattr(grouped_moe, name)(*given)


@pytest.mark.parametrize("value", [NAN, float("inf")], ids=str)
def test_what_is_not_finite_stays_in_its_token(grouped_moe, device, value):
    case, given, _ = with_scales(grouped_moe, *make("silu", device, BF16), SMALL)
    with torch.no_grad():
        want = call(grouped_moe, case, given)
        x = given.hidden_states.clone()
        x[3] = value
        got = call(grouped_moe, case, given._replace(hidden_states=x))
    others = torch.arange(case.T, device=device) != 3
    assert_bitwise("other tokens", got[others], want[others])


def test_every_code(grouped_moe, device):
    """All 256 of them, exactly, with scales of zero, subnormal and large ones."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).expand(2, 16, 256)
    scales = torch.tensor([0.0, 2.0**-130, 2.0**10, 1.0], device=device).view(2, 1, 2)
    weight = grouped_moe.BlockScaled(codes, scales, (16, 128))
    x = torch.eye(256, device=device).repeat(2, 1)
    y = grouped_moe.grouped_linear(x, weight, [256, 256])
    factors = scales.view(2, 2).repeat_interleave(128, 1)
    nan = codes[0, 0].float().isnan()
    got, want = y.view(2, 256, 16)[..., 0], codes[0, 0].float() * factors
    # A row of the identity times NaN is NaN in every sum.
    assert got[:, ~nan].isnan().all() and nan.sum() == 2
    clean = torch.where(codes.float().isnan(), 0.0, codes.float()).to(torch.float8_e4m3fn)
    y = grouped_moe.grouped_linear(x, weight._replace(data=clean), [256, 256]).view(2, 256, 16)
    assert torch.equal(y[..., 5], torch.where(nan, 0.0, want))


@pytest.mark.parametrize("pairs", [Pairs(rank=3), Pairs(rank=8, adapters=3), Pairs(shared="a")], ids=str)
@by_fp32_and_bf16
def test_lora_on_top(grouped_moe, device, pairs, dtype):
    """Gradients of factors and of all but the weights, as of the sum of both weights."""
    case, inputs = make("silu-bias", device, dtype)
    arguments = make_loras(grouped_moe, case, inputs, pairs, FP32)
    check(grouped_moe, case, inputs, SMALL, **arguments)


def test_grouped_mlp_is_the_block(grouped_moe, device):
    """One expert per row: the same bits as the experts block's."""
    case, given, _ = with_scales(grouped_moe, *make("silu", device, BF16, top_k=1, sentinels=0.0), SMALL)
    order = given.top_k_index[:, 0].argsort(stable=True)
    sizes = given.top_k_index[:, 0].bincount(minlength=case.E)
    with torch.no_grad():
        ones = torch.ones_like(given.top_k_weights)
        want = call(grouped_moe, case, given._replace(top_k_weights=ones))
        got = grouped_moe.grouped_mlp(given.hidden_states[order], sizes, None, *(getattr(given, n) for n in WEIGHTS))
    assert_close("rows", got, want[order].double(), BF16)


def test_compiles_in_one_graph(grouped_moe, device):
    case, given, _ = with_scales(grouped_moe, *make("silu", device, BF16), SMALL)
    got = run(grouped_moe, case, given, ("top_k_weights",), around=partial(torch.compile, fullgraph=True))
    assert_part(got, run(grouped_moe, case, given))


def test_autocast_leaves_them(grouped_moe, device):
    """fp32 hidden states are cast, codes and scales stay."""
    case, given, _ = with_scales(grouped_moe, *make("silu", device, FP32), SMALL)
    cast = call(grouped_moe, case, given._replace(hidden_states=given.hidden_states.to(BF16)))
    trained = given._replace(hidden_states=given.hidden_states.detach().requires_grad_())
    with torch.autocast(device, BF16):
        assert_bitwise("out", call(grouped_moe, case, given), cast)
        _, saved = record(lambda: call(grouped_moe, case, trained))
    codes = given.gate_up_proj.data
    assert {tensor.dtype for tensor in saved if tensor.shape == codes.shape} == {codes.dtype}


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_which_scale_an_element_has(grouped_moe, device, parts):
    """By loops, with blocks at the end of each part that are not whole, scales that are a view, and E = 1."""
    n, k, block = 66, 40, (16, 32)
    rows = -(-n // parts // block[0])
    scales = (1.0 + torch.arange(parts * rows * 2, dtype=FP32)).view(1, 2, parts * rows).mT.expand(1, -1, -1)
    codes = torch.randint(1, 0x38, (1, n, k), dtype=torch.uint8).view(torch.float8_e4m3fn)
    want = torch.empty(n, k)
    for row in range(n):
        part, within = divmod(row, n // parts)
        for column in range(k):
            scale = scales[0, part * rows + within // block[0], column // block[1]]
            want[row, column] = codes[0, row, column].float() * scale
    weight = grouped_moe.BlockScaled(codes.to(device), scales.to(device), block, parts)
    assert torch.equal(weight.dequantize(FP32)[0].cpu(), want)
    for dtype in (torch.int32, torch.float8_e4m3fn, "float32"):
        with pytest.raises(TypeError, match="^dtype: expected bf16, fp16, fp32 or fp64, got "):
            weight.dequantize(dtype)
    y = grouped_moe.grouped_linear(torch.eye(k, device=device), weight, [k])
    assert torch.equal(y.T.cpu(), want)


def test_products_are_a_choice(grouped_moe, device):
    """One that is not known is refused; on a CPU rows stay as they are, whatever is chosen."""
    weight = grouped_moe.quantize_blocks(torch.randn(2, 32, 16, device=device))
    x = torch.randn(8, 16, device=device)
    sizes = grouped_moe.GroupSizes(torch.tensor([4, 4], device=device))
    want = grouped_moe.grouped_linear(x, weight, sizes)
    for products in ("auto", "w8a16", "w8a8"):
        assert_bitwise(products, grouped_moe.grouped_linear(x, weight._replace(products=products), sizes), want)
    with pytest.raises(ValueError, match="weight.products: expected one of auto, w8a16, w8a8, got 'fp8'"):
        grouped_moe.grouped_linear(x, weight._replace(products="fp8"), sizes)


def test_quantize_what_has_no_scale(grouped_moe):
    """Numbers so small or large that fp32 has no scale for them, and none at all."""
    weight = torch.zeros(1, 16, 64, dtype=torch.float64)
    weight[0, 0, :16], weight[0, 0, 16:32], weight[0, 0, 32:48] = 1e-300, 1e300, 1.0
    weight[0, 1, 32], weight[0, 1, 33], weight[0, 1, 48] = float("inf"), NAN, -float("inf")
    scaled = grouped_moe.quantize_blocks(weight, (16, 16))
    assert scaled.scale_inv.flatten().tolist() == [1.0, 1.0, torch.tensor(1 / 448).item(), 1.0]
    back = scaled.dequantize(FP32)[0]
    assert not back[0, :16].any() and (back[0, 16:32] == 448).all() and (back[0, 32:48] == 1).all()
    assert back[1, 32] == 1 and back[1, 33].isnan() and back[1, 48] == -448 and back.isnan().sum() == 1
    small = torch.full((1, 16, 16), 1e-43)
    assert torch.equal(grouped_moe.quantize_blocks(small, (16, 16)).dequantize(FP32), torch.zeros_like(small))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("block", [(128, 128), (16, 32), (200, 70)], ids=str)
def test_quantize(grouped_moe, block, parts):
    """Each block reaches the largest code; values are off by half a step of a code at most."""
    weight = torch.randn(3, 200, 70, dtype=torch.float64) * torch.rand(3, 1, 1, dtype=torch.float64) * 10
    weight[1, 16:32, :32] = 0
    block = (block[0] // parts, block[1]) if block[0] == 200 else block
    scaled = grouped_moe.quantize_blocks(weight, block, parts)
    assert scaled.data.dtype == torch.float8_e4m3fn and scaled.scale_inv.dtype == FP32
    assert scaled.scale_inv.shape == (3, parts * -(-200 // parts // block[0]), -(-70 // block[1]))
    back = scaled.dequantize(torch.float64)
    largest = scaled.scale_inv.double() * 448
    limits = grouped_moe.BlockScaled(torch.ones_like(scaled.data), largest, block, parts).dequantize(torch.float64)
    assert ((back - weight).abs() <= (weight.abs() / 16).maximum(limits / 448 * 2.0**-10) * (1 + 1e-6)).all()
    assert (weight.abs() <= limits * (1 + 1e-6)).all()
    assert (scaled.scale_inv > 0).all()
    assert torch.equal(grouped_moe.quantize_blocks(back, block, parts).dequantize(torch.float64).float(), back.float())
    low = weight.to(torch.bfloat16)
    low, wide = (grouped_moe.quantize_blocks(each, block, parts).dequantize(FP32) for each in (low, low.float()))
    assert torch.equal(low, wide)


def test_errors(grouped_moe):
    scaled = grouped_moe.quantize_blocks(torch.randn(2, 64, 32), (16, 16))
    x = torch.randn(8, 32)

    def linear(weight, **options):
        return lambda: grouped_moe.grouped_linear(x, weight, [4, 4], **options)

    raises(TypeError, "weight: expected torch.float32 like x", linear(scaled.data))
    raises(TypeError, "weight.data: expected torch.float8_e4m3fn", linear(scaled._replace(data=scaled.data.float())))
    raises(ValueError, "weight.scale_inv: expected shape", linear(scaled._replace(block=(32, 16))))
    raises(ValueError, "weight.block: expected multiples of 16", linear(scaled._replace(block=(8, 16))))
    for block in (16, (16.0, 16), (16,), (16, True)):
        raises(TypeError, "weight.block: expected two ints", linear(scaled._replace(block=block)))
    for name in ("data", "scale_inv"):
        elsewhere = scaled._replace(**{name: getattr(scaled, name).to("meta")})
        raises(ValueError, f"weight.{name}: expected on cpu like x, got meta", linear(elsewhere))
    raises(ValueError, "weight.block: expected multiples of 16 below 2", linear(scaled._replace(block=(64, 1 << 63))))
    raises(ValueError, "weight.parts: expected an int that divides", linear(scaled._replace(parts=3)))
    raises(ValueError, "transposed: expected False", linear(scaled, transposed=True))
    asks = scaled.scale_inv.clone().requires_grad_()
    raises(ValueError, "weight.scale_inv: expected a frozen tensor", linear(scaled._replace(scale_inv=asks)))
    raises(TypeError, "weight.scale_inv: expected one of", linear(scaled._replace(scale_inv=scaled.scale_inv.half())))
    raises(
        ValueError, r"weight: expected shape \(G, N, K\)", linear(grouped_moe.quantize_blocks(torch.randn(2, 64, 48)))
    )
    for weight in (scaled.data, torch.ones(2, 64, 32, dtype=torch.int32)):
        raises(TypeError, "weight: expected bf16, fp16, fp32 or fp64", lambda: grouped_moe.quantize_blocks(weight))
    raises(TypeError, "weight: expected a tensor, got list", lambda: grouped_moe.quantize_blocks([1.0]))
    raises(ValueError, r"weight: expected shape \(E, N, K\)", lambda: grouped_moe.quantize_blocks(x))
    for shape in ((2, 0, 16), (2, 16, 0)):
        empty = torch.empty(shape)
        raises(ValueError, "weight: expected N and K above 0", lambda: grouped_moe.quantize_blocks(empty))
    case = BY_ID["silu"]
    given = make_inputs(case, FP32, "cpu")
    up = grouped_moe.quantize_blocks(given.gate_up_proj)
    wrong = given._replace(gate_up_proj=up._replace(scale_inv=up.scale_inv[:, :0]))
    raises(ValueError, "gate_up_proj.scale_inv: expected shape", lambda: call(grouped_moe, case, wrong))
