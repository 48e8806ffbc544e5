"""The cases of the experts block, one line each, and the builder of their inputs.

Legend as in the package: T tokens, top_k slots per token, E experts, H hidden, I intermediate.
"""

from typing import Dict, NamedTuple, Optional, Tuple

import pytest
import torch
from torch import Tensor

GPT_OSS = ("silu", 1.702, 0.5625, 1.0)  # its formula; the limit is low enough to clamp a third of unit-scale inputs
RELU2 = ("relu2", 1.0, None, 0.0)


class Case(NamedTuple):
    """One experts block. bias: which of the two, "both", "up", "down" or "". sentinels: the share of sentinel slots."""

    id: str
    T: int = 37
    top_k: int = 3
    E: int = 5
    H: int = 48
    I: int = 40  # noqa: E741
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    bias: str = ""
    activation: Tuple[str, float, Optional[float], float] = ("silu", 1.0, None, 0.0)
    recompute: bool = False
    sentinels: float = 0.3

    @property
    def preact_width(self) -> int:
        """Columns of the pre-activation."""
        return 2 * self.I if self.gated else self.I

    @property
    def kinked(self) -> bool:
        """Whether the derivative of the activation jumps somewhere."""
        return self.activation[2] is not None or self.activation[0] == "relu"

    def kind(self, grouped_moe) -> Dict[str, object]:
        """Arguments of the package's blocks."""
        flags = {name: getattr(self, name) for name in ("gated", "interleaved", "transposed", "recompute")}
        return {"activation": grouped_moe.Activation(*self.activation), **flags}

    def reference_kind(self) -> Dict[str, object]:
        """Arguments of the reference's."""
        flags = {name: getattr(self, name) for name in ("gated", "interleaved", "transposed")}
        return {**flags, **dict(zip(("name", "alpha", "limit", "up_offset"), self.activation))}


TALL = Case("tall-wide", T=300, top_k=2, E=3, H=72, I=136)  # which Hopper's own kernels take
NOT_GATED = TALL._replace(id="tall-wide-not-gated", gated=False, activation=RELU2)
LIMIT = TALL._replace(id="tall-wide-bias-limit-recompute", bias="both", activation=GPT_OSS, recompute=True)
CASES = [
    Case("silu"),
    Case("silu-recompute", recompute=True),
    Case("silu-no-sentinels", sentinels=0.0),
    Case("silu-mostly-sentinels", sentinels=0.9),
    Case("silu-transposed", transposed=True),
    Case("silu-interleaved", interleaved=True),
    Case("silu-bias", bias="both"),
    Case("silu-interleaved-transposed-recompute", interleaved=True, transposed=True, recompute=True),
    Case("silu-not-gated-limit", gated=False, activation=("silu", 1.5, 0.5625, 0.0)),
    Case("gpt-oss", interleaved=True, transposed=True, bias="both", activation=GPT_OSS),
    Case("gpt-oss-halves-recompute", bias="both", activation=GPT_OSS, recompute=True),
    Case("gelu", activation=("gelu", 1.0, None, 0.0)),
    Case("gelu-not-gated", gated=False, activation=("gelu", 1.0, None, 0.0), bias="both"),
    Case("gelu-tanh-limit", activation=("gelu_tanh", 1.0, 0.5625, 0.5), interleaved=True),
    Case("gelu-tanh-not-gated", gated=False, activation=("gelu_tanh", 1.0, None, 0.0), transposed=True),
    Case("relu-gated", activation=("relu", 1.0, None, 0.0), bias="both"),
    Case("relu-not-gated-limit", gated=False, activation=("relu", 1.0, 0.5625, 0.0)),
    Case("relu2-gated", activation=RELU2, recompute=True),
    Case("relu2-not-gated", gated=False, activation=RELU2, transposed=True, bias="both"),
    Case("not-gated-up-bias-only", gated=False, activation=RELU2, bias="up"),
    Case("not-gated-down-bias-only", gated=False, activation=("gelu", 1.0, None, 0.0), bias="down", recompute=True),
    Case("one-token", T=1, top_k=4, E=8),
    Case("top-1", top_k=1),
    Case("one-expert", E=1, top_k=2),
    Case("top-k-above-experts", E=2, top_k=5),
    Case("many-experts", T=9, top_k=8, E=1024, H=8, I=8, sentinels=0.1),
    Case("odd-extents", T=29, top_k=2, E=3, H=35, I=21),
    Case("extents-of-one", T=5, top_k=2, E=3, H=1, I=1, sentinels=0.0),
    Case("aligned-extents", T=64, top_k=2, E=4, H=128, I=64),
    Case("tall", T=300, top_k=2, E=2, H=40, I=24),
    TALL,
    TALL._replace(id="tall-wide-transposed", transposed=True),
    TALL._replace(id="tall-wide-interleaved", interleaved=True),
    NOT_GATED,
    LIMIT._replace(
        id="tall-wide-not-gated-transposed-bias-limit-recompute",
        gated=False,
        transposed=True,
        activation=("silu", 1.5, 0.5625, 0.0),
    ),
    LIMIT._replace(id="tall-wide-gpt-oss", interleaved=True, transposed=True, recompute=False),
    LIMIT,
]
# What a GPU is given besides: more than 2048 slots, where the routing takes three launches, and more steps along H than
# the ring of Hopper's up-projection has.
MEDIUM = Case("medium", T=600, top_k=4, E=6, H=64, I=48)
CLAMPED = MEDIUM._replace(id="medium-bias", bias="both", interleaved=True, activation=GPT_OSS)
WIDE = MEDIUM._replace(id="medium-wide", H=72, I=136)
GPU_CASES = [
    MEDIUM._replace(id="small", T=1),
    MEDIUM,
    CLAMPED,
    WIDE,
    CLAMPED._replace(id="medium-wide-bias", H=72, I=136, transposed=True),
    WIDE._replace(id="medium-deep", H=392),
    WIDE._replace(id="medium-wide-not-gated", gated=False, activation=RELU2),
]
GPU_PARAMS = [pytest.param(case, id=case.id, marks=pytest.mark.gpu) for case in GPU_CASES]
BY_ID: Dict[str, Case] = {case.id: case for case in CASES}
assert len(BY_ID) == len(CASES), "two cases of one id"


class Inputs(NamedTuple):
    """The tensors of one experts block and the cotangent of its output."""

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_proj_bias: Optional[Tensor]
    down_proj_bias: Optional[Tensor]
    dout: Tensor

    def floating(self) -> Dict[str, Tensor]:
        """The differentiable inputs that are there; block-scaled weights are not."""
        tensors = {name: t for name, t in self._asdict().items() if name not in ("top_k_index", "dout")}
        return {name: t for name, t in tensors.items() if isinstance(t, Tensor)}

    def take(self, tokens: Tensor) -> "Inputs":
        """The inputs of these tokens alone."""
        per_token = ("hidden_states", "top_k_index", "top_k_weights", "dout")
        return self._replace(**{name: getattr(self, name)[tokens] for name in per_token})


def make_ids(case: Case, dtype: torch.dtype = torch.int64) -> Tensor:
    """Random expert ids, repeats within a token allowed; with sentinels, two tokens have nothing else."""
    ids = torch.randint(0, case.E, (case.T, case.top_k))
    if case.sentinels:
        foreign = sentinel_ids(case.E, dtype)
        chosen = foreign[torch.randint(len(foreign), ids.shape)]
        ids = torch.where(torch.rand(ids.shape) < case.sentinels, chosen, ids)
        if case.T > 3:
            ids[[0, case.T // 2]] = chosen[[0, case.T // 2]]
    return ids.to(dtype)


def sentinel_ids(num_experts: int, dtype: torch.dtype) -> Tensor:
    """Ids that no local expert has, up to the ends of the dtype."""
    values = [-1, -7, num_experts, num_experts + 3, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:
        values += [2**31, 2**32, 2**40 + 1, 2**63 - 1, -(2**63)]
    return torch.tensor(values)


def kept(ids: Tensor, experts: int, ranks: int, capacity: int) -> Tensor:
    """Ids over the experts of all ranks, sentinels where tokens find no place on an expert's rank, token by token."""
    counts, found = [0] * ranks, []
    for row in ids.tolist():
        owners = [expert * ranks // experts if 0 <= expert < experts else -1 for expert in row]
        for owner in {*owners} - {-1}:
            counts[owner] += 1
        fits = [owner >= 0 and counts[owner] <= capacity for owner in owners]
        found.append([expert if fit else experts for expert, fit in zip(row, fits)])
    return ids.new_tensor(found).view_as(ids)


def _on_grid(*shape: int) -> Tensor:
    """-1, 0 or 1: over H of them times eighths, sums are eighths below 32, which bf16 and fp16 hold exactly."""
    return torch.randint(-1, 2, shape).double()


def make_inputs(
    case: Case, dtype: torch.dtype, device: str, index_dtype: torch.dtype = torch.int64, weights_dtype=None
) -> Inputs:
    """Unit-scale inputs: weights are divided by sqrt(fan_in). Made in fp64 on the CPU: equal on every machine.

    A two-byte dtype rounds the pre-activation, which may carry it across a kink (of relu, or of a clamp), where the
    derivative jumps: no tolerance is right for that. There the pre-activation is made of exact eighths, and limits
    are odd sixteenths, so no rounding takes place and none crosses a kink.
    """
    grid = case.kinked and dtype.itemsize == 2
    random = _on_grid if grid else lambda *shape: torch.randn(*shape, dtype=torch.float64)
    p, up_scale = case.preact_width, 8.0 if grid else case.H**0.5
    up_shape = (case.E, case.H, p) if case.transposed else (case.E, p, case.H)
    down_shape = (case.E, case.I, case.H) if case.transposed else (case.E, case.H, case.I)
    up_bias = random(case.E, p) / (8.0 if grid else 1.0)
    down_bias = torch.randn(case.E, case.H, dtype=torch.float64)
    tensors = {
        "hidden_states": random(case.T, case.H),
        "top_k_weights": torch.rand(case.T, case.top_k, dtype=torch.float64) + 0.1,
        "gate_up_proj": random(*up_shape) / up_scale,
        "down_proj": torch.randn(*down_shape, dtype=torch.float64) / case.I**0.5,
        "gate_up_proj_bias": up_bias if case.bias in ("both", "up") else None,
        "down_proj_bias": down_bias if case.bias in ("both", "down") else None,
        "dout": torch.randn(case.T, case.H, dtype=torch.float64),
    }
    cast = {name: t if t is None else t.to(device, dtype) for name, t in tensors.items()}
    if weights_dtype is not None:
        cast["top_k_weights"] = tensors["top_k_weights"].to(device, weights_dtype)
    return Inputs(top_k_index=make_ids(case, index_dtype).to(device), **cast)
