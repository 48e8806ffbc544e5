"""Kernels around products with rows of 8-bit floats, alone: bounds are checked, fresh memory is NaN."""

import importlib

import pytest
import torch
from compare import assert_bitwise

from interpreter.guard import GuardedAllocations

U8 = torch.uint8


@pytest.fixture(scope="session")
def transpose(kernels):
    """The module of launchers."""
    return importlib.import_module(f"{kernels.__name__}.transpose")


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
@pytest.mark.parametrize(
    "shape, block, parts",
    [
        ((2, 256, 128), (128, 128), 2),
        ((3, 150, 275), (128, 128), 1),
        ((1, 75, 51), (75, 51), 1),
        ((2, 64, 40), (16, 32), 2),
    ],
)
def test_transpose_codes(transpose, grouped_moe, shape, block, parts, layout):
    weight = scaled_weight(grouped_moe, shape, block, parts, layout)
    assert transpose.can_transpose(weight)
    with GuardedAllocations(weight.data, weight.scale_inv):
        got = transpose.transpose_codes(weight)
    assert got.data.is_contiguous() and got.scale_inv.data_ptr() == weight.scale_inv.data_ptr()
    assert (got.block, got.parts, got.products) == (block[::-1], 1, "w8a16")
    assert_bitwise("codes", got.data.view(U8), weight.data.mT.contiguous().view(U8))
    assert_bitwise("values", got.dequantize(torch.float32), weight.dequantize(torch.float32).mT)


@pytest.mark.parametrize("n, block_n", [(320, 128), (150, 75)], ids=["ragged", "odd-span"])
def test_parts_that_do_not_transpose(transpose, grouped_moe, n, block_n):
    """Blocks of gate and up that were one dimension of blocks no more, or that steps along K would cross."""
    weight = scaled_weight(grouped_moe, (1, n, 128), (block_n, 128), 2)
    assert not transpose.can_transpose(weight)
    with pytest.raises(ValueError, match="^weight: "):
        transpose.transpose_codes(weight)
