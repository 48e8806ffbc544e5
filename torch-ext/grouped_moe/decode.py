"""The forward of the experts block for a few tokens, without gradients: two launches that stream weights."""

from functools import lru_cache
from typing import Optional, Tuple

import torch
from torch import Tensor

from .activation import Activation
from .block import Block
from .gemm import unit_rows
from .launch import MAX_KEPT, Form, Launch, Ref, bias_operand, bind, form_of
from .plan import Plan, unwritten

_UP_TILE = (4, 2048, 4)  # BLOCK_N, BLOCK_K, num_warps
_DOWN_TILE = (32, 256, 2)  # rows (BLOCK_N times the choices), BLOCK_K, num_warps
_MAX_TOP_K = 32  # sums of all choices of a token lie in the registers of one program


def is_decode(block: Block, num_tokens: int, top_k: int) -> bool:
    """Whether the kernels for a few tokens win: slots hardly ever share an expert; weights are contiguous along K.

    Of wide types the sums of long rows do not fit the registers everywhere.
    """
    k = 1 if block.transposed else 2
    few = (num_tokens == 1 or 4 * num_tokens * top_k <= block.num_experts) and top_k <= _MAX_TOP_K
    return few and block.up.dtype.itemsize == 2 and block.up.stride(k) == 1 and block.down.stride(k) == 1


def _describe(block_n: int, block_k: int, warps: int) -> str:
    return f"Triton for a few tokens, tile {block_n}x{block_k}, {warps} warps, heuristic"


@lru_cache(maxsize=MAX_KEPT)
def decode_plan(
    x: Form,
    ids: Form,
    weights: Form,
    up: Form,
    down: Form,
    up_bias: Optional[Form],
    down_bias: Optional[Form],
    kind: Tuple[Activation, bool, bool, bool],
    device: torch.device,
) -> Plan:
    """x, ids, routing weights, up, down and their biases -> out, the last.

    kind: activation, gated, interleaved, transposed.
    """
    from ._triton import decode as kernels

    (num_tokens, top_k), (activation, gated, interleaved, transposed) = ids.shape, kind
    num_experts, h, i = up.shape[0], x.shape[1], down.shape[1 if transposed else 2]
    block_n, block_k, warps = _UP_TILE
    block_k = min(block_k, 1 << (h - 1).bit_length())
    kernel = bind(
        kernels.slot_up_proj_kernel, _describe(block_n, block_k, warps),
        NUM_EXPERTS=num_experts, N=i, K=h, TOP_K=top_k, GATED=gated, INTERLEAVED=interleaved,
        ACTIVATION=activation.name, ALPHA=activation.alpha, LIMIT=activation.limit, UP_OFFSET=activation.up_offset,
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip
    up_launch = Launch(
        device, kernel, (-(-i // block_n), num_tokens * top_k, 1),
        Ref(0), x.strides[0], Ref(1), Ref(2), *_column_strides(up, transposed), *bias_operand(3, up_bias), Ref(4),
    )  # fmt: skip
    rows, block_k, warps = _DOWN_TILE
    block_k = min(block_k, 1 << (i - 1).bit_length())
    choices = 1 << (top_k - 1).bit_length()
    block_n = max(1, rows // choices)
    kernel = bind(
        kernels.slot_down_proj_kernel, _describe(block_n, block_k, warps),
        NUM_EXPERTS=num_experts, N=h, K=i, TOP_K=top_k, TOP_K_POW2=choices, BLOCK_N=block_n,
        BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip
    down_launch = Launch(
        device, kernel, (-(-h // block_n), num_tokens, 1),
        Ref(0), Ref(1), Ref(2), Ref(3), *_column_strides(down, transposed), *bias_operand(4, down_bias), Ref(5),
    )  # fmt: skip
    plan = Plan(device, 7)
    act = plan.make(unwritten(x.dtype, num_tokens * top_k, i), scratch=True)
    out = plan.make(unwritten(x.dtype, num_tokens, h))
    plan.add(up_launch, 0, 1, 3, 5, act)
    plan.add(down_launch, act, 1, 2, 4, 6, out)
    return plan


def _column_strides(weight: Form, transposed: bool) -> Tuple[int, int]:
    """Strides over experts and columns of the result."""
    return weight.strides[0], weight.strides[2 if transposed else 1]


def decode_triton(block: Block, x: Tensor, top_k_index: Tensor, weights: Tensor) -> Tensor:
    """out (T, H) by the Triton kernels, for blocks that `is_decode` takes; T above 0."""
    x = unit_rows(x)
    ids = top_k_index if top_k_index.is_contiguous() else top_k_index.contiguous()
    kind = block.activation, block.gated, block.interleaved, block.transposed
    tensors = x, ids, weights, *block[:4]
    return decode_plan(*map(form_of, tensors), kind, x.device)(*tensors)[-1]
