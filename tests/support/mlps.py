"""The cases of grouped_mlp, one line each, and the builder of their inputs.

Legend as in the package: rows (of groups and of none), G groups, H hidden, I intermediate.
"""

from typing import NamedTuple, Optional, Tuple, Union

import torch
from cases import BY_ID, Case, make_inputs
from pairs import WEIGHTS, merged, over_adapters
from sorted_rows import PER_ROW, Inputs
from torch import Tensor

PER_GROUP = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
NAMES = (*PER_ROW, *PER_GROUP)


class Mlp(NamedTuple):
    """One grouped MLP. kind: a case, or the id of one. sizes: rows of each group; head, tail: rows of no group.

    scales: "", "activation", "bias", "two" or, the very same tensor for both, "same".
    """

    id: str
    kind: Union[str, Case] = "silu-bias"
    scales: str = "two"
    sizes: Tuple[int, ...] = (7, 0, 19, 5)
    tail: int = 6
    head: int = 0

    @property
    def rows(self) -> int:
        return self.head + sum(self.sizes) + self.tail

    @property
    def case(self) -> Case:
        """The kind, with a token per row and a routing weight per row and scale."""
        kind = self.kind if isinstance(self.kind, Case) else BY_ID[self.kind]
        return kind._replace(T=self.rows, top_k=2, E=len(self.sizes), sentinels=0.0)

    def make(self, dtype: torch.dtype, device: str, scales_dtype: Optional[torch.dtype] = None) -> Inputs:
        """Inputs of `cases.make_inputs`, which see to kinks; scales are in [-0.5, 0.5], in dtype if not given one."""
        made = make_inputs(self.case, dtype, device, weights_dtype=scales_dtype)
        first, second = ((0.6 - made.top_k_weights)[:, i].contiguous() for i in range(2))
        tensors = {name: getattr(made, name) for name in PER_GROUP}
        tensors["x"] = made.hidden_states
        tensors["activation_scales"] = None if self.scales in ("", "bias") else first
        tensors["bias_scales"] = {"same": first, "two": second, "bias": second}.get(self.scales)
        offsets = torch.tensor((self.head, *self.sizes)).cumsum(0).to(device)
        return Inputs(tensors, offsets, made.dout)

    def call(self, grouped_moe, inputs: Inputs, splits, **changes) -> Tensor:
        kind = {**self.case.kind(grouped_moe), **changes}
        return grouped_moe.grouped_mlp(splits=splits, **inputs.tensors, **kind)

    def reference(self, grouped_moe, inputs: Inputs, **loras) -> Tensor:
        """With weights that LoRAs are merged into."""
        mlp, tensors, case = grouped_moe.reference.grouped_mlp, inputs.tensors, self.case

        def part(adapter, chosen):
            pairs = ((weight, loras.get(lora)) for lora, weight in WEIGHTS.items())
            weights = {weight: merged(tensors[weight], lora, adapter, case.transposed) for weight, lora in pairs}
            y = mlp(group_offsets=inputs.offsets, **{**tensors, **weights}, **case.reference_kind())
            return y if chosen is None else y * chosen[:, None]

        return over_adapters(part, loras)


TALL = (150, 0, 260, 90)
MLPS = [
    Mlp("no-scales", scales=""),
    Mlp("activation-scales", scales="activation"),
    Mlp("bias-scales", scales="bias"),
    Mlp("two-scales"),
    Mlp("same-scales", scales="same"),
    Mlp("no-bias-no-scales", "silu", ""),
    Mlp("no-bias", "silu", "activation"),
    Mlp("recompute", "silu-recompute", "activation"),
    Mlp("transposed", "silu-transposed", "activation"),
    Mlp("interleaved", "silu-interleaved", "activation"),
    Mlp("interleaved-transposed-recompute", "silu-interleaved-transposed-recompute", "activation"),
    Mlp("not-gated-limit", "silu-not-gated-limit", "activation"),
    Mlp("gpt-oss", "gpt-oss", "two"),
    Mlp("gpt-oss-recompute", "gpt-oss-halves-recompute", "same"),
    Mlp("gelu", "gelu", "activation"),
    Mlp("gelu-not-gated", "gelu-not-gated", "two"),
    Mlp("gelu-tanh-limit", "gelu-tanh-limit", ""),
    Mlp("relu-gated", "relu-gated", "same"),
    Mlp("relu2-gated-recompute", "relu2-gated", "activation"),
    Mlp("relu2-not-gated", "relu2-not-gated", "two"),
    Mlp("no-tail", tail=0),
    Mlp("head-and-tail", scales="same", head=11),
    Mlp("no-rows", sizes=(0, 0, 0), tail=0),
    Mlp("tail-only", sizes=(0, 0, 0), tail=9),
    Mlp("one-group", "gpt-oss", sizes=(33,)),
    Mlp("one-row", "relu2-not-gated", sizes=(0, 1), tail=0),
    Mlp("first-and-last-empty", "gpt-oss", "same", sizes=(0, 0, 21, 0, 3, 0)),
    Mlp("tall-wide", "tall-wide", "activation", sizes=TALL),
    Mlp("tall-wide-bias", "tall-wide-bias-limit-recompute", "two", sizes=TALL, head=11),
    Mlp("tall-wide-interleaved", "tall-wide-interleaved", "activation", sizes=TALL),
    Mlp("tall-wide-not-gated", "tall-wide-not-gated", "activation", sizes=TALL),
    Mlp("tall-wide-not-gated-transposed", "tall-wide-not-gated-transposed-bias-limit-recompute", "two", TALL, head=11),
    Mlp("tall-wide-gpt-oss", "tall-wide-gpt-oss", "two", sizes=TALL, head=11),
    Mlp("odd-extents", "odd-extents", "activation"),
    Mlp("extents-of-one", "extents-of-one", "activation"),
    Mlp("aligned-extents", "aligned-extents", "activation", sizes=(64, 16, 128), tail=32),
    Mlp("tall", "silu-bias", sizes=(200, 1, 130), tail=70),
    Mlp("many-groups", "many-experts", "activation", sizes=(0, 1, 2, 0) * 256, tail=3),
]
BY_MLP = {mlp.id: mlp for mlp in MLPS}
assert len(BY_MLP) == len(MLPS), "two cases of one id"
