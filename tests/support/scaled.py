"""Block-scaled weights of the experts block and of grouped layers, and what they compute as plain weights."""

from typing import NamedTuple, Optional, Tuple

import torch
from block import assert_matches, run, run_reference
from cases import Case, Inputs
from pairs import factors
from torch import Tensor

WEIGHTS = ("gate_up_proj", "down_proj")


class Blocks(NamedTuple):
    """How weights are scaled. block: None for one scale per expert. apart: gate and up have blocks of their own.

    kept: of the weights, which stay plain. views: data lies as (E, K, N). down_dtype: of down's scales, if another.
    """

    block: Optional[Tuple[int, int]] = (128, 128)
    apart: bool = False
    dtype: torch.dtype = torch.float32
    kept: Tuple[str, ...] = ()
    views: bool = False
    down_dtype: Optional[torch.dtype] = None


def scale(grouped_moe, weight: Tensor, blocks: Blocks, gated: bool = False):
    """The BlockScaled of a weight (E, N, K) with scales that differ a lot from block to block, for plain rows."""
    n, k = weight.shape[1:]
    parts = 2 if gated and blocks.apart else 1
    block = (n // parts, k) if blocks.block is None else blocks.block
    scaled = grouped_moe.quantize_blocks(weight, block, parts)
    factors = 2.0 ** torch.randint(-2, 2, scaled.scale_inv.shape, device=weight.device)
    scales = torch.rand_like(scaled.scale_inv) if blocks.dtype == torch.float32 else 1.0
    scales = factors * (0.5 + scales) * scaled.scale_inv.mean()
    if blocks.dtype == torch.float8_e8m0fnu:
        scales = 2.0 ** scales.log2().round()
    data = scaled.data.mT.contiguous().mT if blocks.views else scaled.data
    return scaled._replace(data=data, scale_inv=scales.to(blocks.dtype), products="w8a16")


def with_scales(grouped_moe, case: Case, inputs: Inputs, blocks: Blocks) -> Tuple[Case, Inputs, Inputs]:
    """The case, not transposed, with scaled weights, and the inputs of the reference with the same weights in fp64."""
    given, wide, of_down = {}, {}, blocks._replace(dtype=blocks.down_dtype or blocks.dtype)
    for name, own in zip(WEIGHTS, (blocks, of_down)):
        weight = getattr(inputs, name)
        weight = weight.mT.contiguous() if case.transposed else weight
        given[name], wide[name] = weight, weight.double()
        if name not in blocks.kept:
            halves = name == "gate_up_proj" and case.gated and not case.interleaved
            given[name] = scale(grouped_moe, weight, own, halves)
            wide[name] = given[name].dequantize(torch.float64)
    return case._replace(transposed=False), inputs._replace(**given), inputs._replace(**wide)


def check(grouped_moe, case: Case, inputs: Inputs, blocks: Blocks, poisoned: Optional[Inputs] = None, **loras) -> None:
    """Output and the gradients of all but scaled weights are the reference's on the same weights in fp64.

    poisoned: the inputs, but for weights, that the package gets.
    """
    case, given, wide = with_scales(grouped_moe, case, inputs, blocks)
    given = (poisoned or inputs)._replace(**{name: getattr(given, name) for name in WEIGHTS})
    got, want = run(grouped_moe, case, given, **loras), run_reference(grouped_moe, case, wide, **loras)
    assert got.keys() == {"out", *given.floating(), *factors(loras)}
    assert_matches(got, {name: want[name] for name in got}, inputs, loras)
