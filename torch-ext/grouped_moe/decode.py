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

_MAX_TOP_K = 32  # sums of all choices of a token lie in the registers of one program
_MAX_SHARED_BYTES = 28 << 20  # of weights that slots read again, on average: in as much time slots are routed


def is_decode(block: Block, num_tokens: int, top_k: int) -> bool:
    """Whether the kernels for a few tokens win: slots hardly ever share an expert; weights are contiguous along K.

    Of wide types the sums of long rows do not fit the registers everywhere.
    """
    k = 1 if block.transposed else 2
    if top_k > _MAX_TOP_K or block.up.dtype.itemsize != 2 or block.up.stride(k) != 1 or block.down.stride(k) != 1:
        return False
    if num_tokens == 1:
        return True
    # Two tokens of random routing share top_k^2 / E experts.
    shared = num_tokens * (num_tokens - 1) // 2 * top_k * top_k
    weights = (block.up.numel() + block.down.numel()) * block.up.dtype.itemsize
    few = 4 * num_tokens * top_k <= block.num_experts
    return few and shared * weights <= _MAX_SHARED_BYTES * block.num_experts**2


def _up_tile(k: int) -> Tuple[int, int, int]:
    """BLOCK_N, BLOCK_K, num_warps: long steps, but where they would leave a long tail."""
    return (4, 1024, 2) if k > 2048 and k % 2048 else (4, 2048, 4)


def _down_tile(k: int, choices: int) -> Tuple[int, int, int]:
    """The same, of BLOCK_N columns for each choice: fewer in a program where K is long or has a tail.

    A thread has 128 products or fewer.
    """
    rows, block_k = (32, 256) if k % 256 == 0 and k <= 1536 else (8, 512 if choices <= 8 else 256)
    block_n = max(1, rows // choices)
    return block_n, block_k, max(1, choices * block_n * block_k // 4096)


def _narrowed(block_k: int, k: int) -> int:
    """No more than K needs, nor less than the kernels add up at once."""
    return min(block_k, max(8, 1 << (k - 1).bit_length()))


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
    block_n, block_k, warps = _up_tile(h)
    block_k = _narrowed(block_k, h)
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
    choices = 1 << (top_k - 1).bit_length()
    block_n, block_k, warps = _down_tile(i, choices)
    block_k = _narrowed(block_k, i)
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
