"""Products with rows of 8-bit floats, on GPUs with e4m3: against fp64 on the same codes, and on the rows."""

import pytest
import torch
from compare import assert_bitwise, assert_close
from pairs import Pairs, make_lora
from poison import poisoned_allocations
from quantized import BF16, CASES, ROWS, Case, assert_of_same_codes, error, float8, hopper, make, run
from quantized_steps import gradients, linear, reference, references, with_leaves
from torch.nn.functional import pad, silu

pytestmark = pytest.mark.gpu
by_kernels = pytest.mark.usefixtures("kernels_of_codes")
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@float8
@by_kernels
@by_case
def test_products(grouped_moe, case):
    """Unwritten memory and unread tokens are NaN; a second call gives the same bits."""
    given = make(grouped_moe, case)
    want = reference(case, given)
    unread = (given.ids >= case.E).all(1)
    x = torch.where(unread[:, None], float("nan"), given.x)
    with poisoned_allocations(), torch.no_grad():
        out = run(grouped_moe, case, given._replace(x=x))
        again = run(grouped_moe, case, given)
    assert (out[unread] == 0).all()
    assert_of_same_codes(out, want)
    assert_bitwise("second call", again, out)
    assert 1e-2 < error(out, reference(case, given, quantizes=False)) < ROWS  # rows were quantized, indeed


@float8
@by_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_what_is_not_finite_stays_in_its_token(grouped_moe, value):
    case = Case()
    given = make(grouped_moe, case)
    x = given.x.clone()
    x[3, 5] = value
    with torch.no_grad():
        want, got = run(grouped_moe, case, given), run(grouped_moe, case, given._replace(x=x))
    others = torch.arange(case.T, device="cuda") != 3
    assert_bitwise("other tokens", got[others], want[others])
    assert (given.ids[3] >= case.E).all() or got[3].isnan().all()


@float8
@by_kernels
def test_ranges(grouped_moe):
    """Tokens of zeros, of tiny and of huge numbers, and scales of zero."""
    case = Case()
    given = make(grouped_moe, case)
    factors = 10.0 ** torch.randint(-30, 16, (case.T, 1), device="cuda")
    x = given.x * factors.to(BF16)
    x[::7] = 0
    given.up.scale_inv[1] = 0
    given = given._replace(x=x)
    with torch.no_grad():
        out = run(grouped_moe, case, given)
    want = reference(case, given)
    size = want.norm(dim=1)
    normal = (size > 1e-30) & (size < 1e30)
    assert normal.any()
    assert_of_same_codes(out[normal], want[normal])
    assert (out[::7] == 0).all()


@hopper
def test_few_rows(grouped_moe):
    """Without gradients tall tiles pay from 16 rows of an expert on; below, and if asked, rows stay as they are.

    Or are always rounded if asked, with gradients to the same bits.
    """
    case = Case(T=40)  # 20 slots of an expert
    given = make(grouped_moe, case)
    exact = reference(case, given, quantizes=False)
    with torch.no_grad():
        assert error(run(grouped_moe, case, given), exact) > 1e-2
        few = given._replace(x=given.x[:20], ids=given.ids[:20], weights=given.weights[:20])
        assert error(run(grouped_moe, case, few), exact[:20]) < 1e-2
        kept = [weight._replace(products="w8a16") for weight in (given.up, given.down)]
        assert error(run(grouped_moe, case, given._replace(up=kept[0], down=kept[1])), exact) < 1e-2
        up, down = (weight._replace(products="w8a8") for weight in (given.up, given.down))
        rounded_few = run(grouped_moe, case, few._replace(up=up, down=down))
    assert error(rounded_few, exact[:20]) > 1e-2
    for weights, want in (((up, down), rounded_few), ((given.up, down), None)):
        leaves = few._replace(x=few.x.clone().requires_grad_(), up=weights[0], down=weights[1])
        out = run(grouped_moe, case, leaves).detach()
        if want is None:
            assert error(out, exact[:20]) < 1e-2
        else:
            assert_bitwise("with gradients", out, want)


@float8
@by_kernels
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_sorted_rows(grouped_moe, bias):
    """`grouped_mlp` and `grouped_linear`: an empty group, rows of no group, which are 0, scales and biases."""
    case = Case(E=6, H=512, I=384)
    given = make(grouped_moe, case)
    bounds = [20, 300, 301, 301, 700, 1100, 1300]
    rows, offsets = 1500, grouped_moe.GroupOffsets(torch.tensor(bounds, device="cuda"))
    x, scales = torch.randn(rows, case.H, device="cuda", dtype=BF16), torch.rand(rows, device="cuda")
    up_bias, down_bias = (torch.randn(case.E, n, device="cuda", dtype=BF16) for n in (2 * case.I, case.H))
    biases = {"gate_up_proj_bias": up_bias, "down_proj_bias": down_bias} if bias else {}
    with poisoned_allocations(), torch.no_grad():
        out = grouped_moe.grouped_mlp(x, offsets, scales, given.up, given.down, **biases)
        y = grouped_moe.grouped_linear(x, given.up, offsets, up_bias if bias else None)
    up, down = given.up.dequantize(torch.float64), given.down.dequantize(torch.float64)
    preact = linear(x, up, bounds, up_bias if bias else None)
    gate, value = preact.chunk(2, 1)
    want = linear(silu(gate) * value * scales[:, None].double(), down, bounds, down_bias if bias else None)
    for got, wanted in ((out, want), (y, preact)):
        assert (got[:20] == 0).all() and (got[1300:] == 0).all()
        assert_of_same_codes(got[20:1300], wanted[20:1300])


@hopper
@pytest.mark.parametrize("name", ["even", "sentinels", "fp16-exponents", "long-k"])
def test_plain_rows(grouped_moe, name):
    """Rows that stay as they are, with tall tiles, for which weights are made plain: as far from fp64 as others."""
    case = CASES[name]._replace(products="w8a16")
    given = make(grouped_moe, case)
    leaves, dout = with_leaves(given), torch.randn_like(given.x)
    with poisoned_allocations():
        out = run(grouped_moe, case, leaves)
        got = {"out": out, **gradients(out, leaves, {}, dout)}
    _, want = references(case, given, {}, dout)
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], case.dtype, inner_products=name == "dweights")


@hopper
@pytest.mark.parametrize("rank", [None, 16, 40, 72], ids=str)
def test_plain_rows_of_linear(grouped_moe, rank):
    """With a bias and a low-rank pair, of rows some of which have no group, forward and backward."""
    groups, n, k, rows, offsets = 4, 384, 320, 900, torch.tensor([30, 400, 400, 420, 800], device="cuda")
    weight = grouped_moe.quantize_blocks(torch.randn(groups, n, k, device="cuda") / k**0.5)._replace(products="w8a16")
    x = torch.randn(rows, k, device="cuda", dtype=BF16, requires_grad=True)
    bias, dy = (torch.randn(*shape, device="cuda", dtype=BF16) for shape in ((groups, n), (rows, n)))
    lora = None if rank is None else make_lora(grouped_moe, Pairs(rank), weight.data, False, 0.5, BF16)
    with poisoned_allocations():
        y = grouped_moe.grouped_linear(x, weight, offsets, bias, lora=lora)
        (dx,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().requires_grad_()
    merged = weight.dequantize(torch.float64) + (0.0 if lora is None else 0.5 * lora.b.double() @ lora.a.double())
    want = grouped_moe.reference.grouped_linear(wide, merged, offsets, bias.double())
    assert_close("y", y, want.detach(), BF16)
    assert_close("dx", dx, *torch.autograd.grad(want, wide, dy.double()), BF16)


@float8
@pytest.mark.parametrize("shape", [(3, 128), (9, 700), (1, 16), (17, 1030)], ids=str)
def test_codes_and_scales(module, shape):
    """Each code is the nearest of the value over its scale; the largest magnitude of a block becomes 448."""
    x = torch.randn(shape, device="cuda") * 10.0 ** torch.randint(-4, 4, (shape[0], 1), device="cuda")
    x[0, :2], x[-1, -1] = 0.0, float("nan")
    strided = torch.empty(shape[0], 2 * shape[1], device="cuda")[:, ::2].copy_(x)
    codes, scales, dtype = module("backends.triton.quantize").quantize_rows(strided)
    blocks = pad(x, (0, -shape[1] % 128)).unflatten(1, (-1, 128))
    largest = blocks.nan_to_num(0.0).abs().amax(2).clamp_min(2.0**-110)
    assert dtype == x.dtype and scales.shape == largest.shape
    torch.testing.assert_close(scales, largest / 448, rtol=1e-6, atol=0)
    want = (x.double() / scales.double().repeat_interleave(128, 1)[:, : shape[1]]).clamp(-448, 448)
    # Half a step of three bits of mantissa, or of the subnormal codes.
    off, finite = (codes.double() - want).abs(), ~x.isnan()
    assert (off <= want.abs() * 2.0**-4 * (1 + 1e-6) + 2.0**-10)[finite].all()
    assert codes.float().isnan()[~finite].all()
