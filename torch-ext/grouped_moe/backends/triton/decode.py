"""The forward of the experts block for a few tokens, without gradients: two launches that stream weights."""

from functools import lru_cache
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ...block import Block
from ...block_scaled import parts_of
from ...common.device import spec_of
from ...common.numbers import power_of_two
from ...operands import LoRA
from ...rows import unit_rows
from ...tuning.heuristic import decode_pays
from ..kernels.activation import Options
from ..kernels.block_scaled import ScaleBlocks
from ..kernels.decode import slot_down_proj_kernel, slot_up_proj_kernel
from ..kernels.low_rank import slot_project_kernel
from .launch import Kernel
from .launchers import bias_and_strides
from .scales import codes_and_scales, scale_blocks

_MAX_TOP_K = 32  # sums of all choices of a token lie in the registers of one program
_NO_SCALES = ScaleBlocks(0, 0, 1, 1)
_PROJECTED_RANKS = 2  # of a program: so few that a token's are all under way at once


def is_decode(block: Block, num_tokens: int, top_k: int) -> bool:
    """Whether the kernels for a few tokens win: slots hardly ever share an expert; weights are contiguous along K.

    Of wide types the sums of long rows do not fit the registers everywhere.
    """
    k, (up, *_), (down, *_) = 1 if block.transposed else 2, parts_of(block.up), parts_of(block.down)
    if top_k > _MAX_TOP_K or up.dtype.itemsize > 2 or up.stride(k) != 1 or down.stride(k) != 1:
        return False
    return decode_pays(num_tokens, top_k, up, down)


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
    return min(block_k, power_of_two(k, 8))


@lru_cache(maxsize=None)
def _up_kernel(
    num_experts: int, top_k: int, h: int, options: Options, ranks: Tuple[int, int], scales: Optional[ScaleBlocks]
) -> Kernel:
    constants = {"NUM_EXPERTS": num_experts, "TOP_K": top_k, "OPTIONS": options}
    return _kernel(slot_up_proj_kernel, constants, h, _up_tile(h), ranks, scales)


@lru_cache(maxsize=None)
def _down_kernel(
    num_experts: int, top_k: int, h: int, i: int, ranks: Tuple[int, int], scales: Optional[ScaleBlocks]
) -> Kernel:
    choices = power_of_two(top_k)
    constants = {"NUM_EXPERTS": num_experts, "N": h, "TOP_K": top_k, "TOP_K_POW2": choices}
    return _kernel(slot_down_proj_kernel, constants, i, _down_tile(i, choices), ranks, scales)


def _kernel(
    function: Any, constants: dict, k: int, tile: Tuple[int, int, int], ranks: Tuple[int, int],
    scales: Optional[ScaleBlocks],
) -> Kernel:  # fmt: skip
    """k: columns of the weight. ranks: adapters and rank of a LoRA. scales: None for a plain weight."""
    (block_n, block_k, warps), (num_adapters, rank) = tile, ranks
    block_k = _narrowed(block_k, k)
    constants = {
        **constants, "K": k, "SCALES": scales or _NO_SCALES, "NUM_ADAPTERS": num_adapters, "R": rank,
        "R_POW2": power_of_two(rank), "BLOCK_N": block_n, "BLOCK_K": block_k,
    }  # fmt: skip
    path = f"Triton for a few tokens, tile {block_n}x{block_k}, {warps} warps, heuristic"
    return Kernel(function, constants, {"num_warps": warps}, path)


@lru_cache(maxsize=None)
def _project_kernel(num_experts: int, ranks: Tuple[int, int], k: int, top_k: int, by_slot: bool) -> Kernel:
    num_adapters, rank = ranks
    constants = {
        "NUM_EXPERTS": num_experts, "NUM_ADAPTERS": num_adapters, "R": rank, "K": k, "TOP_K": top_k,
        "BY_SLOT": by_slot, "BLOCK_R": _PROJECTED_RANKS, "BLOCK_K": _narrowed(2048, k),
    }  # fmt: skip
    return Kernel(slot_project_kernel, constants)


def _ranks(lora: Optional[LoRA]) -> Tuple[int, int]:
    return (0, 0) if lora is None else (lora.num_adapters, lora.rank)


def _factor_and_strides(factor: Tensor) -> tuple:
    """A factor (E or 1, ., .) or (L, E or 1, ., .) and its strides along L, E, ., .: 0 where all share it."""
    *stride_l, stride_e, stride_n, stride_k = factor.stride()
    return factor, stride_l[0] if stride_l else 0, stride_e if factor.shape[-3] > 1 else 0, stride_n, stride_k


def _low_rank(
    lora: Optional[LoRA], x: Tensor, ids: Tensor, adapters: Optional[Tensor], num_experts: int, by_slot: bool
) -> tuple:
    """The projected rows, the factor b with its strides and the adapters, as the kernels take them.

    x: (T, K) or, by slot, (S, K), columns contiguous.
    """
    if lora is None:
        return None, None, 0, 0, 0, 0, None
    (num_tokens, top_k), rank = ids.shape, lora.rank
    projected = x.new_empty(num_tokens * top_k, rank, dtype=torch.float32)
    _project_kernel(num_experts, _ranks(lora), x.shape[1], top_k, by_slot)(
        (-(-rank // _PROJECTED_RANKS), num_tokens * top_k, 1), x, x.stride(0), ids, adapters,
        *_factor_and_strides(lora.a), projected, float(lora.scaling),
    )  # fmt: skip
    return projected, *_factor_and_strides(lora.b), adapters


def decode(block: Block, x: Tensor, top_k_index: Tensor, weights: Tensor, adapters: Optional[Tensor] = None) -> Tensor:
    """out (T, H) of the experts block, for calls that `is_decode` takes; T above 0. adapters: (T,), of LoRAs."""
    x, ids = unit_rows(x), top_k_index if top_k_index.is_contiguous() else top_k_index.contiguous()
    (num_tokens, top_k), h, i, transposed = ids.shape, x.shape[1], block.intermediate, block.transposed
    num_experts, up_lora, down_lora, spec = block.num_experts, block.up_lora, block.down_lora, spec_of(x)
    options = Options(i, block.gated, block.interleaved, *block.activation)
    up_kernel = _up_kernel(num_experts, top_k, h, options, _ranks(up_lora), scale_blocks(block.up, False))
    down_kernel = _down_kernel(num_experts, top_k, h, i, _ranks(down_lora), scale_blocks(block.down, False))
    up, stride_ue, stride_un, _, *up_scales = codes_and_scales(block.up, transposed, spec)
    down, stride_de, stride_dn, _, *down_scales = codes_and_scales(block.down, transposed, spec)
    act = x.new_empty(num_tokens * top_k, i)
    up_kernel(
        (-(-i // up_kernel.constants["BLOCK_N"]), num_tokens * top_k, 1), x, x.stride(0), ids, up, stride_ue, stride_un,
        *up_scales, *bias_and_strides(block.up_bias), *_low_rank(up_lora, x, ids, adapters, num_experts, False), act,
    )  # fmt: skip
    out = x.new_empty(num_tokens, h)
    down_kernel(
        (-(-h // down_kernel.constants["BLOCK_N"]), num_tokens, 1), act, ids, weights, down, stride_de, stride_dn,
        *down_scales, *bias_and_strides(block.down_bias), *_low_rank(down_lora, act, ids, adapters, num_experts, True),
        out,
    )  # fmt: skip
    return out
