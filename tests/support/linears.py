"""The cases of grouped_linear, one line each, and the builder of their inputs."""

from typing import NamedTuple, Optional

import torch
from pairs import merged, over_adapters
from sorted_rows import Inputs


class Linear(NamedTuple):
    """One grouped linear layer: rows of each group, rows of no group before and after them, N, K, layout.

    scales: whether its bias is scaled.
    """

    id: str
    sizes: tuple = (7, 0, 19, 5)
    tail: int = 6
    head: int = 0
    N: int = 40
    K: int = 48
    transposed: bool = False
    bias: bool = False
    scales: bool = False

    def make(self, dtype: torch.dtype, device: str, scales_dtype: Optional[torch.dtype] = None) -> Inputs:
        """At unit scale, made on the CPU; scales are in [-0.5, 0.5], in dtype unless theirs is given."""
        groups, rows = len(self.sizes), self.head + sum(self.sizes) + self.tail
        shape = (groups, self.K, self.N) if self.transposed else (groups, self.N, self.K)
        tensors = {"x": torch.randn(rows, self.K), "weight": torch.randn(shape) / self.K**0.5}
        tensors["bias"], dy = torch.randn(groups, self.N), torch.randn(rows, self.N)
        tensors = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
        tensors["bias"] = tensors["bias"] if self.bias else None
        scales = (torch.rand(rows) - 0.5).to(device, scales_dtype or dtype) if self.scales else None
        offsets = torch.tensor((self.head, *self.sizes)).cumsum(0).to(device)
        return Inputs({**tensors, "bias_scales": scales}, offsets, dy.to(device, dtype))

    def call(self, grouped_moe, inputs: Inputs, splits, **lora) -> torch.Tensor:
        return grouped_moe.grouped_linear(splits=splits, transposed=self.transposed, **inputs.tensors, **lora)

    def reference(self, grouped_moe, inputs: Inputs, **lora) -> torch.Tensor:
        """With a weight that the LoRA is merged into."""
        linear, tensors = grouped_moe.reference.grouped_linear, inputs.tensors

        def part(adapter, chosen):
            weight = merged(tensors["weight"], lora.get("lora"), adapter, self.transposed)
            y = linear(group_offsets=inputs.offsets, transposed=self.transposed, **{**tensors, "weight": weight})
            return y if chosen is None else y * chosen[:, None]

        return over_adapters(part, lora)


LINEARS = [
    Linear("plain"),
    Linear("bias", bias=True),
    Linear("transposed", transposed=True),
    Linear("transposed-bias", transposed=True, bias=True),
    Linear("no-tail", tail=0, bias=True),
    Linear("head-and-tail", head=11, bias=True),
    Linear("head-only", sizes=(0, 0), head=9, tail=0),
    Linear("no-rows", sizes=(0, 0, 0), tail=0, bias=True),
    Linear("tail-only", sizes=(0, 0, 0), tail=9, bias=True),
    Linear("one-group", sizes=(33,), transposed=True),
    Linear("first-and-last-empty", sizes=(0, 0, 21, 0, 3, 0), bias=True),
    Linear("tall", sizes=(200, 1, 130), tail=70),
    Linear("odd-extents", N=21, K=35, bias=True),
    Linear("extents-of-one", N=1, K=1, bias=True),
    Linear("aligned-extents", sizes=(64, 16, 128), tail=32, N=128, K=64),
    Linear("many-tiles", sizes=(300, 0, 129, 64, 191, 128), head=37, tail=150, N=264, K=200, bias=True),
    Linear("many-tiles-transposed", sizes=(65, 1, 640, 0, 127), tail=300, N=520, K=72, transposed=True),
    Linear("1024-groups", sizes=(0, 1, 2, 0) * 256, tail=3, N=8, K=8, bias=True),
]
# Not a single column: a row of y is then one number, of two that may cancel.
SCALED = [linear._replace(id=f"{linear.id}-scales", scales=True) for linear in LINEARS if linear.bias and linear.N > 1]
BY_LINEAR = {linear.id: linear for linear in LINEARS + SCALED}
