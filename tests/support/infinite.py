"""Infinite routing weights: what they make of an output, and that those of sentinels make nothing of it."""

from typing import Callable

import torch
from cases import Inputs
from compare import assert_bitwise
from poison import is_sentinel
from torch import Tensor


def check_infinite_weights(run: Callable[[Inputs], Tensor], inputs: Inputs, num_experts: int) -> None:
    """In every other token one routed slot has an infinite weight: the output is that times the slot's product.

    run: the block, as a function of its inputs. Other tokens keep their bits.
    """
    sentinel = is_sentinel(inputs.top_k_index, num_experts)
    tokens = (~sentinel).any(1).nonzero().flatten()[::2]
    slots = (~sentinel)[tokens].int().argmax(1)
    ones, weights = torch.zeros_like(inputs.top_k_weights), inputs.top_k_weights.masked_fill(sentinel, float("nan"))
    ones[tokens, slots] = 1.0
    signs = torch.where(tokens % 4 == 0, 1.0, -1.0)
    weights[tokens, slots] = (signs * torch.inf).to(weights.dtype)
    weights[sentinel.nonzero(as_tuple=True)[0][::3], sentinel.nonzero(as_tuple=True)[1][::3]] = torch.inf
    want, products = run(inputs), run(inputs._replace(top_k_weights=ones))
    want[tokens] = products[tokens].sign() * signs[:, None].to(want.dtype) * torch.inf
    assert len(tokens) and not want.isnan().any()
    assert_bitwise("out", run(inputs._replace(top_k_weights=weights)), want)
