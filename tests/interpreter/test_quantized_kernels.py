"""Kernels around products with rows of 8-bit floats, alone."""

from typing import NamedTuple

import pytest
import torch
from compare import assert_bitwise, assert_close
from torch import Tensor
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

U8, CODES, NAN = torch.uint8, torch.float8_e4m3fn, float("nan")


@pytest.fixture(autouse=True)
def rounded_by_torch(monkeypatch):
    """What becomes codes: the interpreter of Triton 3.6 to 3.9 forgets to carry into the exponent."""
    convert = InterpreterBuilder.create_fp_to_fp

    def rounded(builder, value, dtype, rounding_mode):
        if dtype.scalar != tl.float8e4nv:
            return convert(builder, value, dtype, rounding_mode)
        return TensorHandle(torch.from_numpy(value.data).to(CODES).view(U8).numpy(), dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", rounded)


def scaled_weight(grouped_moe, shape, block, parts=1, layout="nk"):
    """Random codes and scales; layout: nk, kn, or apart, with a byte between codes."""
    scaled = grouped_moe.quantize_blocks(torch.randn(shape), block, parts)
    scales, data = torch.rand_like(scaled.scale_inv), scaled.data
    if layout == "kn":
        data = data.mT.contiguous().mT
    elif layout == "apart":
        data = data.view(U8).repeat_interleave(2, 2)[:, :, ::2].view(data.dtype)
    return scaled._replace(data=data, scale_inv=scales, products="w8a16")


@pytest.mark.parametrize("layout", ["nk", "kn", "apart"])
@pytest.mark.parametrize("shape, block, parts", [
    ((2, 256, 128), (128, 128), 2), ((3, 150, 275), (128, 128), 1),
    ((1, 75, 51), (75, 51), 1), ((2, 64, 40), (16, 32), 2),
])  # fmt: skip
def test_transpose_codes(module, grouped_moe, shape, block, parts, layout):
    scales = module("backends.triton.scales")
    weight = scaled_weight(grouped_moe, shape, block, parts, layout)
    assert scales.can_transpose(weight)
    got = scales.transpose_codes(weight)
    assert got.data.is_contiguous() and got.scale_inv.data_ptr() == weight.scale_inv.data_ptr()
    assert (got.block, got.parts, got.products) == (block[::-1], 1, "w8a16")
    assert_bitwise("codes", got.data.view(U8), weight.data.mT.contiguous().view(U8))
    assert_bitwise("values", got.dequantize(torch.float32), weight.dequantize(torch.float32).mT)


@pytest.mark.parametrize("n, block_n", [(320, 128), (150, 75)], ids=["ragged", "odd-span"])
def test_parts_that_do_not_transpose(module, grouped_moe, n, block_n):
    """Blocks of gate and up that were one dimension of blocks no more, or that steps along K would cross."""
    weight = scaled_weight(grouped_moe, (1, n, 128), (block_n, 128), 2)
    assert not module("backends.triton.scales").can_transpose(weight)


class Kind(NamedTuple):
    """An activation of I columns. routed: rows come from slots; else they lie in place, some before the first group."""

    I: int = 256  # noqa: E741
    activation: tuple = ("silu", 1.0, None, 0.0)
    gated: bool = True
    interleaved: bool = False
    routed: bool = True


KINDS = {
    "routed": Kind(),
    "in-place": Kind(128, routed=False),
    "interleaved": Kind(256, ("silu", 1.702, 1.0, 1.0), interleaved=True),
    "not-gated": Kind(activation=("relu2", 1.0, 1.0, 0.0), gated=False, routed=False),
}
ODD = {
    "odd": Kind(75),
    "odd-interleaved": Kind(139, ("gelu", 1.0, None, 0.0), interleaved=True, routed=False),
    "odd-not-gated": Kind(51, ("gelu_tanh", 1.0, 1.0, 0.0), gated=False),
}
GRADS = {name: (kind, False) for name, kind in {**KINDS, **ODD}.items()}
GRADS.update({f"{name}-quantized": (kind, True) for name, kind in KINDS.items()})


def make_rows(kernels, dtype, routed, E=3, T=21, top_k=2):
    """(rows, which of them are an expert's, the slot of each one of these or itself)."""
    if routed:
        ids = torch.randint(0, E + 1, (T, top_k))  # some are sentinels
        rows = kernels.route(ids, E, dtype, T * top_k)
        grouped = torch.arange(rows.num_rows) < rows.group_offsets[-1]
        return rows, grouped, rows.row_to_slot[grouped].long()
    rows = kernels.split_rows(torch.tensor([5, 20, 20, 39]), E, 43, dtype)
    index = torch.arange(43)
    grouped = (index >= 5) & (index < 39)
    return rows, grouped, index[grouped]


def block_of(module, grouped_moe, kind: Kind):
    """A block of that kind, of which no weight is read."""
    activation = grouped_moe.Activation(*kind.activation)
    return module("block").Block(*(None,) * 6, activation, kind.gated, kind.interleaved, False, False)


def reference(module, block, dact, scales, preact):
    """(dpreact, act, dots) in fp64."""
    value, dpreact = module("common.activation").forward_and_vjp(
        preact.double(), dact.double() * scales.double()[:, None], block.activation, block.gated, block.interleaved
    )
    return dpreact, value * scales.double()[:, None], (value * dact.double()).sum(1, keepdim=True)


def assert_quantized(got, want: Tensor) -> None:
    """Each scale is the largest magnitude of its block over 448, and codes are off by half a step at most."""
    blocks = want.unflatten(1, (-1, 128))
    assert got.codes.dtype == CODES and got.shape == want.shape
    assert_close("scales", got.scales, blocks.abs().amax(2) / 448, torch.float32)
    values = got.codes.double().unflatten(1, (-1, 128)) * got.scales.double()[:, :, None]
    largest = blocks.abs().amax(2, keepdim=True)
    assert ((values - blocks).abs() <= 1.001 * (2.0**-4 * blocks.abs() + 2.0**-10 / 448 * largest)).all()


def needs_of(module, results: str):
    """Gradients that these results are for, and no others."""
    asked = {"codes": "x", "dpreact": "up", "act": "down", "dots": "act_scales"}
    needs = module("block").Needs
    return needs(*[False] * 7)._replace(**{asked[result]: True for result in results.split()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("kind, quantizes", GRADS.values(), ids=GRADS)
def test_activation_grad(module, grouped_moe, kernels, kind, quantizes, dtype):
    """Rows of no expert and their scales are NaN; what is not asked for is None."""
    activation_grad = module("backends.triton.experts").activation_grad
    block = block_of(module, grouped_moe, kind)
    rows, grouped, slots = make_rows(kernels, dtype, kind.routed)
    dact = torch.randn(rows.num_rows, kind.I).to(dtype)
    preact = torch.randn(rows.num_rows, kind.I * (2 if kind.gated else 1)).to(dtype)
    dact[~grouped], preact[~grouped] = NAN, NAN
    scales = torch.full((max(rows.num_rows, 42),), NAN).index_fill(0, slots, 0.0) + torch.rand(1)
    want = reference(module, block, dact[grouped], scales[slots], preact[grouped])

    def run(needs: str, more_dots: int = 0, overwrite: bool = False, given=preact):
        asked = needs_of(module, needs)
        return activation_grad(block, dact, rows, scales, given, asked, more_dots=more_dots, overwrite=overwrite)

    dpreact, codes, act, dots = run("dpreact codes act dots" if quantizes else "dpreact act dots", more_dots=2)
    assert_close("dpreact", dpreact[grouped], want[0], dtype)
    assert dpreact[~grouped].isnan().all()
    assert_close("act", act[grouped], want[1], dtype)
    assert act[~grouped].isnan().all()
    parts = -(-kind.I // 128)
    assert dots.shape == (parts + 2, rows.num_rows) and dots[parts:].isnan().all()
    assert_close("dots", dots[:parts, grouped].sum(0)[:, None], want[2], torch.float32, inner_products=True)
    assert run("") == (None, None, None, None)
    only, *others = run("dpreact", overwrite=True, given=preact.clone())
    assert others == [None, None, None]
    assert_bitwise("dpreact alone", only[grouped], dpreact[grouped])
    assert_bitwise("act alone", run("act")[2][grouped], act[grouped])
    assert_bitwise("dots alone", run("dots")[3][:, grouped], dots[:parts, grouped])
    if quantizes:
        assert_quantized(codes._replace(codes=codes.codes[grouped], scales=codes.scales[grouped]), want[0])
        none, only, *_ = run("codes")
        assert none is None
        assert_bitwise("codes alone", only.codes[grouped].view(U8), codes.codes[grouped].view(U8))


def test_activation_grad_overwrites(module, grouped_moe, kernels):
    """The gradient takes the memory of the pre-activation, of rows of an expert; codes have memory of their own."""
    activation_grad = module("backends.triton.experts").activation_grad
    block, (rows, grouped, _) = block_of(module, grouped_moe, Kind()), make_rows(kernels, torch.float16, True)
    dact, preact = torch.randn(rows.num_rows, 256).half(), torch.randn(rows.num_rows, 512).half()
    before = preact.clone()
    _, codes, _, _ = activation_grad(block, dact, rows, None, preact, needs_of(module, "codes"), overwrite=True)
    assert_bitwise("preact", preact, before)
    plain, *_ = activation_grad(block, dact, rows, None, preact, needs_of(module, "dpreact"), overwrite=True)
    assert plain.data_ptr() == preact.data_ptr()
    assert_bitwise("rows of no expert", preact[~grouped], before[~grouped])
    assert codes.dtype == torch.float16 and not torch.equal(preact[grouped], before[grouped])


@pytest.mark.parametrize("adapters", [1, 2], ids=["one-adapter", "adapters"])
@pytest.mark.parametrize("num_rows, k", [(43, 300), (43, 40), (300, 384), (300, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_projected_codes(kernels, quantize, dtype, num_rows, k, adapters):
    """Rows of codes against the plain rows that they stand for, rounded to the dtype; short and tall tiles."""
    offsets, rank = torch.tensor([5, 17, 17, num_rows - 4]), 5
    rows = kernels.split_rows(offsets, 3, num_rows, dtype)
    rows = rows._replace(adapters=torch.randint(0, adapters, (num_rows,)) if adapters > 1 else None)
    weights = None
    if adapters == 1:  # as of routed rows
        rows, weights = rows._replace(top_k=1, row_to_slot=torch.randperm(num_rows).int()), torch.randn(num_rows)
    codes, scales = torch.randn(num_rows, k).to(CODES), torch.rand(num_rows, -(-k // 128)) + 0.5
    plain = (codes.float() * scales.repeat_interleave(128, 1)[:, :k]).to(dtype)
    codes.view(U8)[:5], scales[-4:] = 0x7F, NAN
    factor = torch.randn(adapters, 3, k, rank)
    given = quantize.QuantizedRows(codes, scales, dtype)
    got, scaled = kernels.project(given, factor, rows, scaling=0.5, scales=weights)
    want = torch.zeros(num_rows, got.shape[1], dtype=torch.float64)
    for group, (first, last) in enumerate(zip(offsets[:-1], offsets[1:])):
        for adapter in range(adapters):
            product = 0.5 * plain[first:last].double() @ factor[adapter, group].to(dtype).double()
            if adapters > 1:
                product *= (rows.adapters[first:last] == adapter)[:, None]
            want[first:last, adapter * rank : (adapter + 1) * rank] = product
    assert got.dtype == dtype and got[:5].isnan().all() and got[-4:].isnan().all()
    assert_close("projected", got[5:-4], want[5:-4], dtype, terms=k)
    if weights is not None:
        want *= weights[rows.row_to_slot.long(), None].double()
        assert_close("times weights", scaled[5:-4], want[5:-4], dtype, terms=k)
