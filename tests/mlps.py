"""The cases of grouped_mlp, one line each, the builder of their inputs, and how the package or its reference runs them.

Legend as in the package: rows (of groups and of none), G groups, H hidden, I intermediate.
"""

from typing import Dict, NamedTuple, Optional, Tuple, Union

import torch
from cases import BY_ID, Case, make_inputs
from compare import assert_bitwise, assert_close
from torch import Tensor

SCALES = ("activation_scales", "bias_scales")
PER_ROW = ("x", *SCALES)
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


class Inputs(NamedTuple):
    """The floating tensors by argument, None for what a case has not; the offsets; the cotangent of the output."""

    tensors: Dict[str, Optional[Tensor]]
    offsets: Tensor
    dy: Tensor

    def replace(self, **tensors) -> "Inputs":
        return self._replace(tensors={**self.tensors, **tensors})

    def given(self) -> Dict[str, Tensor]:
        """The tensors that are there, one tensor that is given twice only once."""
        same = self.tensors["bias_scales"] is self.tensors["activation_scales"]
        return {n: t for n, t in self.tensors.items() if t is not None and not (same and n == "bias_scales")}

    def map(self, function) -> "Inputs":
        """function(name, tensor) of every tensor; one that is given twice stays one."""
        changed = {name: function(name, tensor) for name, tensor in self.given().items()}
        if self.tensors["bias_scales"] is self.tensors["activation_scales"]:
            changed["bias_scales"] = changed.get("activation_scales")
        return self.replace(**changed)


def make(mlp: Mlp, dtype: torch.dtype, device: str, scales_dtype: Optional[torch.dtype] = None) -> Inputs:
    """Inputs of `cases.make_inputs`, which see to kinks; scales are in [-0.5, 0.5]."""
    made = make_inputs(mlp.case, dtype, device, weights_dtype=scales_dtype)
    first, second = ((0.6 - made.top_k_weights)[:, i].contiguous() for i in range(2))
    tensors = {name: getattr(made, name) for name in PER_GROUP}
    tensors["x"] = made.hidden_states
    tensors["activation_scales"] = None if mlp.scales in ("", "bias") else first
    tensors["bias_scales"] = {"same": first, "two": second, "bias": second}.get(mlp.scales)
    offsets = torch.tensor((mlp.head, *mlp.sizes)).cumsum(0).to(device)
    return Inputs(tensors, offsets, made.dout)


def call(grouped_moe, mlp: Mlp, inputs: Inputs, splits=None, **changes) -> Tensor:
    """`grouped_mlp` of the kind of a case; splits: those of the inputs if not given."""
    tensors, case = dict(inputs.tensors), mlp.case
    kind = {name: getattr(case, name) for name in ("gated", "interleaved", "transposed", "recompute")}
    kind.update(activation=grouped_moe.Activation(*case.activation), **changes)
    x, scales, up, down = (tensors.pop(n) for n in ("x", "activation_scales", "gate_up_proj", "down_proj"))
    splits = grouped_moe.GroupOffsets(inputs.offsets) if splits is None else splits
    return grouped_moe.grouped_mlp(x, splits, scales, up, down, **tensors, **kind)


def with_leaves(inputs: Inputs, frozen=()) -> Inputs:
    return inputs.map(lambda name, tensor: tensor.detach().requires_grad_(name not in frozen))


def run(grouped_moe, mlp: Mlp, inputs: Inputs, frozen=(), splits=None, **changes) -> Dict[str, Optional[Tensor]]:
    """{"y": output, name: gradient or None}."""
    leaves = with_leaves(inputs, frozen)
    y = call(grouped_moe, mlp, leaves, splits, **changes)
    y.backward(inputs.dy)
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.given().items()}}


def run_reference(grouped_moe, mlp: Mlp, inputs: Inputs) -> Dict[str, Tensor]:
    """As `run`, by the reference in fp64, from the rounded inputs."""
    leaves, case = inputs.map(lambda _, tensor: tensor.detach().double().requires_grad_()), mlp.case
    name, alpha, limit, up_offset = case.activation
    y = grouped_moe.reference.grouped_mlp(
        group_offsets=inputs.offsets, transposed=case.transposed, gated=case.gated, interleaved=case.interleaved,
        name=name, alpha=alpha, limit=limit, up_offset=up_offset, **leaves.tensors,
    )  # fmt: skip
    y.backward(inputs.dy.double())
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.given().items()}}


def assert_matches(got, want, dtype: torch.dtype, scales_dtype: Optional[torch.dtype] = None) -> None:
    """Each in its own dtype and within the tolerances of dtype; a scale's gradient, of the coarser of its and dtype."""
    assert got.keys() == want.keys()
    coarse = max(dtype, scales_dtype or dtype, key=lambda d: torch.finfo(d).eps)
    for name, tensor in got.items():
        scale = name in SCALES
        assert tensor.dtype == (scales_dtype or dtype if scale else dtype), name
        assert_close(name, tensor, want[name], coarse if scale else dtype, inner_products=scale)


def assert_same(got, want) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_bitwise(name, tensor, want[name])
