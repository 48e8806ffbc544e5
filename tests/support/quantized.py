"""Products with rows of 8-bit floats, on GPUs with e4m3: blocks, their inputs, and how far they may be off."""

from typing import NamedTuple, Tuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

BF16, E8M0 = torch.bfloat16, torch.float8_e8m0fnu
# Relative errors. Of the same codes: the result is rounded to bf16, tensor cores keep 14 bits of a sum of codes, and a
# code of the activation is another one where that decides. Of the rows as they are: each code has three bits.
SAME_CODES, SAME_CODES_ROW, ROWS = 8e-3, 5e-2, 6e-2


def capability() -> Tuple[int, int]:
    """Of the GPU; less than any for others than NVIDIA's."""
    given = torch.cuda.is_available() and torch.version.hip is None
    return torch.cuda.get_device_capability() if given else (0, 0)


def has_float8() -> bool:
    """Whether the GPU has kernels for rows of 8-bit floats."""
    return capability() >= (8, 9)


hopper = pytest.mark.skipif(capability() != (9, 0), reason="needs a GPU of compute capability 9.0")
float8 = pytest.mark.skipif(not has_float8(), reason="needs a GPU of compute capability 8.9 or later")


class Case(NamedTuple):
    """T tokens that choose top_k of E experts, of which the first `local` are here."""

    E: int = 6
    top_k: int = 3
    H: int = 384
    I: int = 256  # noqa: E741
    T: int = 400
    local: int = 6
    parts: int = 1
    dtype: torch.dtype = BF16
    scales: torch.dtype = torch.float32
    limit: float = None
    products: str = "auto"


CASES = {
    "even": Case(),
    "odd-extents": Case(H=272, I=208, parts=2),
    "sentinels": Case(E=4, local=4, T=900, top_k=2),
    "fp16-exponents": Case(dtype=torch.float16, scales=E8M0),
    "long-k": Case(E=3, top_k=1, H=1024, I=640, T=500),
    "many-rows": Case(E=2, local=2, top_k=1, H=256, T=1300),  # whose backward copies codes on Hopper
    "short-k": Case(H=128, I=128, T=700),
    "limit": Case(limit=1.0),
    "few-rows": Case(T=40, products="w8a8"),
    "half-blocks": Case(I=192, parts=2),
}


class Inputs(NamedTuple):
    x: Tensor
    ids: Tensor
    weights: Tensor
    up: object  # a BlockScaled, as down
    down: object


def make(grouped_moe, case: Case, device: str = "cuda") -> Inputs:
    def scaled(n: int, k: int, parts: int):
        weight = grouped_moe.quantize_blocks(torch.randn(case.E, n, k, device=device) / k**0.5, parts=parts)
        scales = weight.scale_inv.log2().round().exp2() if case.scales is E8M0 else weight.scale_inv
        return weight._replace(scale_inv=scales.to(case.scales), products=case.products)

    x = torch.randn(case.T, case.H, device=device).to(case.dtype)
    ids = torch.rand(case.T, case.E + case.E // 2, device=device).argsort(1)[:, : case.top_k]  # some are sentinels
    weights = torch.rand(case.T, case.top_k, device=device)
    return Inputs(x, ids, weights, scaled(2 * case.I, case.H, case.parts), scaled(case.H, case.I, 1))


def rounded(rows: Tensor) -> Tensor:
    """Rows as codes times the scales of 128 columns, in fp64."""
    columns = rows.shape[1]
    blocks = pad(rows.float(), (0, -columns % 128)).unflatten(1, (-1, 128))
    scales = blocks.abs().amax(2, keepdim=True).clamp_min(2.0**-110) / 448
    return ((blocks / scales).to(torch.float8_e4m3fn).double() * scales.double()).flatten(1)[:, :columns]


def run(grouped_moe, case: Case, given: Inputs, **changes) -> Tensor:
    activation = "silu" if case.limit is None else grouped_moe.Activation("silu", limit=case.limit)
    return grouped_moe.grouped_mm_experts(*given, activation=activation, **changes)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def assert_of_same_codes(got: Tensor, want: Tensor) -> None:
    rows, errors = want.norm(dim=1), (got.double() - want).norm(dim=1)
    assert error(got, want) <= SAME_CODES
    assert (errors <= SAME_CODES_ROW * rows).all(), float((errors / rows.clamp_min(1e-300)).max())
