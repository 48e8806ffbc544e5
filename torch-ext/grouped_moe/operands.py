"""What a weight may carry besides its values: a low-rank pair (LoRA), as callers give it and as products read it."""

from types import ModuleType
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .common import checks
from .common.numbers import wide_dtype
from .rows import Rows

MAX_RANK = 256

_RANK_MULTIPLE = 8  # of two bytes each: tensor memory accelerators read rows in steps of 16 bytes


class LoRA(NamedTuple):
    """A low-rank pair that is added to the weights of all experts: W[e] + scaling b[e] a[e].

    a: (E, r, K). b: (E, N, r), with N and K of the weight, however that is laid out, and r from 1 to 256. Either
    expert dimension may be 1, for a factor that all experts share. Several adapters: a (L, E, r, K), b (L, E, N, r).
    Any strides and floating dtypes; products are made in the dtype of the rows. Source: Hu et al., 2021,
    "LoRA: Low-Rank Adaptation of Large Language Models".
    """

    a: Tensor
    b: Tensor
    scaling: float = 1  # as an int it is no variable of a graph with dynamic=True, which two checkpoints cannot share

    @property
    def num_adapters(self) -> int:
        """L."""
        return self.a.shape[0] if self.a.dim() == 4 else 1

    @property
    def rank(self) -> int:
        """r, the rank of one adapter."""
        return self.a.shape[-2]

    @property
    def padded_rank(self) -> int:
        """R, the ranks of all adapters side by side: L r, up to the next multiple of 8."""
        return pad_rank(self.num_adapters * self.rank)


class LowRank(NamedTuple):
    """The low-rank part of a product: for each adapter l, factor[l, e] times its columns of rows[r] is added to row r.

    rows: (rows, R), the ranks of all adapters side by side, 0 past the last one. factor: (L, E, N, r), of any strides
    and dtype; products round it to the dtype of the rows.
    """

    rows: Tensor
    factor: Tensor


def pad_rank(rank: int) -> int:
    """Up to the next multiple of 8."""
    return -(-rank // _RANK_MULTIPLE) * _RANK_MULTIPLE


def _as_factor(factor: Tensor, num_experts: int) -> Tensor:
    """A factor (E or 1, ., .) or (L, E or 1, ., .) as a view (L, E, ., .)."""
    factor = factor if factor.dim() == 4 else factor.unsqueeze(0)
    return factor if factor.shape[1] == num_experts else factor.expand(-1, num_experts, -1, -1)


class Factors(NamedTuple):
    """A LoRA as products read it, made by `read_factors`.

    a: (L, E, K, r), a view. b: (L, E, N, r), a view or, where that would be read badly, a packed copy.
    """

    a: Tensor
    b: Tensor
    lora: LoRA


def read_factors(
    kernels: ModuleType, loras: Sequence[Optional[LoRA]], rows: Rows, dtype: torch.dtype
) -> List[Optional[Factors]]:
    """The factors of the LoRAs of at most two products, None for None. dtype: of the rows."""
    if not any(loras):
        return [None] * len(loras)
    bs = kernels.pack_factors([lora and _as_factor(lora.b, rows.num_groups) for lora in loras], rows, dtype)
    return [
        None if lora is None else Factors(_as_factor(lora.a, rows.num_groups).transpose(2, 3), b, lora)
        for lora, b in zip(loras, bs)
    ]


def project(
    kernels: ModuleType,
    factors: Optional[Factors],
    x: Tensor,
    rows: Rows,
    of_tokens: bool = False,
    scales: Optional[Tensor] = None,
) -> Tuple[Optional[LowRank], Optional[Tensor]]:
    """What a LoRA adds to the product of x and its weight, and what the gradient of b is made of; None without a LoRA.

    scaling b[e] a[e] x[r] is scaling a[e] x[r], (rows, R), which is computed here, times b[e]. of_tokens: x has one row
    per token. scales: one per slot of routed rows, by which the product is multiplied later. The second result is the
    projected rows, times the scales if there are any.
    """
    if factors is None:
        return None, None
    a, b, lora = factors
    projected, scaled = kernels.project(x, a, rows, scaling=lora.scaling, of_tokens=of_tokens, scales=scales)
    return LowRank(projected, b), projected if scaled is None else scaled


def project_backward(
    kernels: ModuleType,
    factors: Optional[Factors],
    dy: Tensor,
    rows: Rows,
    projected: Optional[Tensor],
    of_tokens: bool = False,
) -> Tuple[Optional[LowRank], Optional[Tensor]]:
    """What a LoRA adds to the product of dy and its weight's transpose, None without a LoRA; and its gradient of b.

    scaling a[e]^T b[e]^T dy[r] is scaling b[e]^T dy[r], (rows, R), which is computed here, times a[e]^T. The gradient
    is packed, (E, N, R), for `unpack_grads`. projected: (rows, R), the second result of `project`, or None if the
    gradient is not asked for. of_tokens: dy has one row per token.
    """
    if factors is None:
        return None, None
    a, b, lora = factors
    grad = None if projected is None else _new_packed_grad(lora, "b", rows.num_groups)
    z = kernels.project_backward(dy, b, rows, scaling=lora.scaling, of_tokens=of_tokens, projected=projected, grad=grad)
    return LowRank(z, a), grad


def grad_of_a(
    kernels: ModuleType, lora: LoRA, low_rank: LowRank, x: Tensor, rows: Rows, of_tokens: bool = False
) -> Tensor:
    """The gradient of a: the sum over the rows r of an expert of z[r] x[r]^T, with what `project_backward` computed, z.

    x: the input of the product. of_tokens: it has one row per token.
    """
    packed = _new_packed_grad(lora, "a", rows.num_groups)
    kernels.wgrad(low_rank.rows, x, rows, packed, rhs_of_tokens=of_tokens)
    return unpack_grads(kernels, "a", [lora], [packed])[0]


def _new_packed_grad(lora: LoRA, name: str, num_experts: int) -> Tensor:
    """Memory for the gradient of each expert's factors, the ranks of all adapters side by side.

    (E, R, K) for a, (E, N, R) for b. Over the experts that share a factor the sum is made in fp32 or wider.
    """
    factor = getattr(lora, name)
    is_shared = factor.shape[-3] != num_experts
    dtype = wide_dtype(factor.dtype) if is_shared else factor.dtype
    height, width = factor.shape[-2:]
    shape = (lora.padded_rank, width) if name == "a" else (height, lora.padded_rank)
    return factor.new_empty(num_experts, *shape, dtype=dtype)


def unpack_grads(
    kernels: ModuleType, name: str, loras: Sequence[Optional[LoRA]], packed: Sequence[Optional[Tensor]]
) -> List[Optional[Tensor]]:
    """The gradients of a or b, as the name says, laid out like these, from packed ones; None for None."""
    grads, sources, targets = list(packed), [], []
    for i, (lora, grad) in enumerate(zip(loras, packed)):
        if grad is None:
            continue
        factor = getattr(lora, name)
        if factor.is_contiguous() and grad.shape == factor.shape[-3:]:
            grads[i] = grad if factor.dim() == 3 else grad.view_as(factor)
            continue
        grads[i] = torch.empty_like(factor)
        sources.append(_by_adapter(grad, lora, name, is_shared=factor.shape[-3] != grad.shape[0]))
        targets.append(grads[i].view_as(sources[-1]))
    kernels.unpack_grads(sources, targets)
    return grads


def _by_adapter(packed: Tensor, lora: LoRA, name: str, is_shared: bool) -> Tensor:
    """A packed gradient as (L, E or 1, ., .), a view unless it is that of a shared factor, a sum over the experts."""
    rank_dim = 1 if name == "a" else 2
    grad = packed.narrow(rank_dim, 0, lora.num_adapters * lora.rank)
    grad = grad.sum(0, keepdim=True) if is_shared else grad
    return grad.unflatten(rank_dim, (lora.num_adapters, lora.rank)).movedim(rank_dim, 0)


def check_loras(
    loras: Dict[str, Tuple[Optional[LoRA], Tensor]], transposed: bool, x: Tensor, adapter_index: Optional[Tensor]
) -> None:
    """Raises TypeError or ValueError that names the argument at fault.

    loras: by their names, each with its weight (E, N, K) or, transposed, (E, K, N). adapter_index: (rows of x,).
    """
    given = {name: both for name, both in loras.items() if both[0] is not None}
    for name, (lora, weight) in given.items():
        _check_lora(name, lora, weight.transpose(1, 2) if transposed else weight, x)
    counts = [lora.a.shape[0] for lora, _ in given.values() if lora.a.dim() == 4]  # symbolic ones do not go into a set
    if adapter_index is None and not counts:
        return
    if not given or len(counts) < len(given) or counts[0] != counts[-1]:
        raise ValueError(
            "adapter_index: expected with factors (L, E, r, K) and (L, E, N, r), of the same number L of adapters in "
            f"each of {', '.join(loras)} that is given"
        )
    if adapter_index is None:
        raise ValueError(f"adapter_index: expected a tensor for the {counts[0]} adapters, got None")
    checks.check_tensor("adapter_index", adapter_index)
    checks.check_index_dtype("adapter_index", adapter_index)
    checks.check_shape("adapter_index", adapter_index, (x.shape[0],), "(rows of the input,)")
    checks.check_device("adapter_index", adapter_index, x.device, "the input")


def _check_lora(name: str, lora: LoRA, weight: Tensor, x: Tensor) -> None:
    """weight: (E, N, K)."""
    if not isinstance(lora, LoRA):
        raise TypeError(f"{name}: expected a LoRA or None, got {type(lora).__name__}")
    if not isinstance(lora.scaling, (int, float)) or isinstance(lora.scaling, bool):
        raise TypeError(f"{name}.scaling: expected a number, got {type(lora.scaling).__name__}")
    wide = wide_dtype(x.dtype)
    if not abs(lora.scaling) <= torch.finfo(wide).max:  # nan, too
        raise ValueError(f"{name}.scaling: expected a finite number of {wide}, got {lora.scaling}")
    (num_experts, n, k), (a, b, _) = weight.shape, lora
    checks.check_tensor(f"{name}.a", a)
    checks.check_tensor(f"{name}.b", b)
    if a.dim() not in (3, 4):
        raise ValueError(f"{name}.a: expected shape (E, r, K) or (L, E, r, K), got {tuple(a.shape)}")
    rank, adapters = a.shape[-2], a.shape[:-3]
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"{name}.a: expected a rank from 1 to {MAX_RANK}, got {rank}")
    prefix = "L, " if adapters else ""
    for field, factor, shape, legend in (("a", a, (rank, k), "r, K"), ("b", b, (n, rank), "N, r")):
        experts = 1 if factor.dim() > 2 and factor.shape[-3] == 1 else num_experts
        shape, legend = (*adapters, experts, *shape), f"({prefix}E or 1, {legend})"
        checks.check_operand(f"{name}.{field}", factor, shape, legend, x.device, None, "the input")
