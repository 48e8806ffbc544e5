"""Whether there are native ops, and what they return to those who trace: tensors of the right shapes alone."""

from typing import Tuple

import torch
from torch import Tensor

from ..._ops import add_op_namespace_prefix, ops

IS_BUILT = hasattr(ops, "decode_experts")


def _decode_experts(x: Tensor, *_) -> Tensor:
    return x.new_empty(x.shape)


def _route_rows(ids: Tensor, num_experts: int, num_rows: int, block_m: int, schedule_size: int) -> Tuple[Tensor, ...]:
    sizes = schedule_size, num_rows, ids.numel(), int(num_rows < ids.numel())
    return tuple(ids.new_empty(size, dtype=torch.int32) for size in sizes)


def _split_rows(splits: Tensor, num_groups: int, num_rows: int, block_m: int, schedule_size: int) -> Tensor:
    return splits.new_empty(schedule_size, dtype=torch.int32)


if IS_BUILT:
    for name, fake in (
        ("decode_experts", _decode_experts),
        ("decode_lora_experts", _decode_experts),
        ("decode_plain_experts", _decode_experts),
        ("route_rows", _route_rows),
        ("split_rows", _split_rows),
    ):
        torch.library.register_fake(add_op_namespace_prefix(name))(fake)
