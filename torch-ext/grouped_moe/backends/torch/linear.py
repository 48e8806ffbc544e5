"""Products and sums over the rows of each group on the CPU: one GEMM per group that has rows."""

from typing import Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ...block_scaled import BlockScaled, Weight, row_scales, spread
from ...common.numbers import wide_dtype
from ...operands import LowRank, pad_rank
from ...rows import Rows

_WIDENED_ROWS = 128  # of a weight's codes at a time: in fp32 they stay in the cache


def groups_with_rows(rows: Rows) -> Iterator[Tuple[int, int, int]]:
    """(group, first row, end row) of each group that has rows. Offsets are on the CPU: no sync."""
    bounds: List[int] = rows.group_offsets.tolist()
    for group, (start, end) in enumerate(zip(bounds, bounds[1:])):
        if end > start:
            yield group, start, end


def tokens_of(rows: Rows) -> Optional[Tensor]:
    """The token of each row, None where rows are in place."""
    return rows.row_to_slot // rows.top_k if rows.top_k else None


def take_rows(x: Tensor, tokens: Optional[Tensor], start: int, end: int) -> Tensor:
    """Rows [start, end) of x, gathered if x has one row per token."""
    return x[start:end] if tokens is None else x.index_select(0, tokens[start:end])


def scales_of(scales: Tensor, rows: Rows, start: int, end: int) -> Tensor:
    """The scales of some rows, which are per slot if rows are routed."""
    return scales.reshape(-1)[rows.row_to_slot[start:end]] if rows.top_k else scales[start:end]


def plain_weight(weight: Weight, group: int, dtype: torch.dtype) -> Tensor:
    """The weight of a group, (N, K) or as it is stored, in the dtype of the rows."""
    if not isinstance(weight, BlockScaled):
        return weight[group]
    codes, wide = weight.data[group], wide_dtype(dtype)
    scales = row_scales(weight, weight.scale_inv[group, None].to(wide))[0]
    out = codes.new_empty(codes.shape, dtype=dtype)
    for start in range(0, len(codes), _WIDENED_ROWS):
        some = slice(start, start + _WIDENED_ROWS)
        out[some] = widen(codes[some], wide).mul_(spread(weight, scales[some]))
    return out


def widen(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that codes stand for, in fp32 or fp64. PyTorch converts more slowly than it multiplies few rows.

    The seven bits of an e4m3 number without its sign, seven places up, are those of an fp16 number 2^-8 as large. NaN,
    with all seven set, would become a number: codes with one are left to PyTorch.
    """
    bits = codes.view(torch.int8)
    if int((bits & 127).max()) == 127:
        return codes.to(dtype)
    halves = bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))  # the sign was there and above
    return halves.view(torch.float16).to(dtype).mul_(256)


def group_factor(factor: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """A group's part of a factor (L, G, N, r) as (N, L r), the ranks of all adapters side by side.

    Contiguous: what a BLAS returns depends on strides.
    """
    return factor[:, group].movedim(0, 1).flatten(1).to(dtype).contiguous()


def products(
    x: Tensor, weight: Weight, rows: Rows, *, transposed: bool, bias: Optional[Tensor] = None,
    scales: Optional[Tensor] = None, of_tokens: bool = False, low_rank: Optional[LowRank] = None,
) -> Tensor:  # fmt: skip
    """y[r] = W[e] x[r] + scales[r] bias[e], (rows, N), of x[token of r] with of_tokens; rows of no group are unwritten.

    x: (rows, K) or (T, K). weight: (E, N, K) or, transposed, (E, K, N); scaled ones are made plain one after the other.
    bias: (E, N). scales: (rows,). low_rank: what is added to the product.
    """
    y, wide = x.new_empty((rows.num_rows, weight.shape[2 if transposed else 1])), wide_dtype(x.dtype)
    tokens = tokens_of(rows) if of_tokens else None
    for group, start, end in groups_with_rows(rows):
        operand, out = take_rows(x, tokens, start, end), y[start:end]
        own = plain_weight(weight, group, x.dtype)
        own = own if transposed else own.t()
        if bias is None:
            torch.mm(operand, own, out=out)
        else:
            added = bias[group]
            if scales is not None:
                added = torch.outer(scales[start:end].to(wide), added.to(wide)).to(x.dtype)
            torch.addmm(added, operand, own, out=out)
        if low_rank is not None:
            factor = group_factor(low_rank.factor, group, x.dtype)
            out.addmm_(low_rank.rows[start:end, : factor.shape[1]], factor.t())
    return y


def gemm(
    x: Tensor, weight: Weight, rows: Rows, *, transposed: bool = False, bias: Optional[Tensor] = None,
    scales: Optional[Tensor] = None, zero_rest: bool = False, low_rank: Optional[LowRank] = None,
    quantizes: bool = False,
) -> Tensor:  # fmt: skip
    """y[r] = W[e] x[r] + scales[r] bias[e], for rows in place, which never become 8-bit floats here."""
    y = products(x, weight, rows, transposed=transposed, bias=bias, scales=scales, low_rank=low_rank)
    if zero_rest:
        y[: rows.group_offsets[0]] = 0
        y[rows.group_offsets[-1] :] = 0
    return y


def pack_factors(factors: Sequence[Optional[Tensor]], rows: Rows, dtype: torch.dtype) -> List[Optional[Tensor]]:
    """The factors (L, E, N, r) themselves: each is read once for each expert."""
    return list(factors)


def unpack_grads(packed: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Writes gradients of factors from packed ones of the same shapes."""
    for source, grad in zip(packed, grads):
        grad.copy_(source)


def project(
    x: Tensor, factor: Tensor, rows: Rows, *, scaling: float, of_tokens: bool = False,
    scales: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """z[r] = scaling factor[l, e]^T x[r] for each adapter l, of x[token of r] with of_tokens; and z times scales."""
    num_adapters, _, _, rank = factor.shape
    z = x.new_empty((rows.num_rows, pad_rank(num_adapters * rank)))
    scaled, wide = None if scales is None else torch.empty_like(z), wide_dtype(x.dtype)
    columns, tokens = torch.arange(num_adapters * rank) // rank, tokens_of(rows)
    for group, start, end in groups_with_rows(rows):
        out = z[start:end, : num_adapters * rank]
        z[start:end, num_adapters * rank :] = 0
        operand = take_rows(x, tokens if of_tokens else None, start, end)
        torch.addmm(out, operand, group_factor(factor, group, x.dtype), beta=0, alpha=scaling, out=out)
        if rows.adapters is not None:
            out.masked_fill_(take_rows(rows.adapters, tokens, start, end)[:, None] != columns, 0.0)
        if scaled is not None:
            scaled[start:end] = z[start:end].to(wide) * scales_of(scales, rows, start, end)[:, None].to(wide)
    return z, scaled


def wgrad(
    lhs: Tensor, rhs: Tensor, rows: Rows, out: Tensor, *, lhs_of_tokens: bool = False, rhs_of_tokens: bool = False,
    accumulate: bool = False,
) -> None:  # fmt: skip
    """out[g] = sum over the rows r of group g of lhs[r] rhs[r]^T, 0 for a group without rows; or is added to out[g]."""
    if not accumulate:  # one by one: an assignment through a mask goes through all of out
        for group in (rows.group_offsets.diff() == 0).nonzero().flatten().tolist():
            out[group].zero_()
    tokens = tokens_of(rows)
    for group, start, end in groups_with_rows(rows):
        left = take_rows(lhs, tokens if lhs_of_tokens else None, start, end)
        right = take_rows(rhs, tokens if rhs_of_tokens else None, start, end)
        if out.dtype != lhs.dtype:
            wide = wide_dtype(lhs.dtype)
            product = left.t().to(wide) @ right.to(wide)
            out[group] = out[group] + product if accumulate else product
        elif accumulate:
            out[group].addmm_(left.t(), right)
        else:
            torch.mm(left.t(), right, out=out[group])


def project_backward(
    dy: Tensor, factor: Tensor, rows: Rows, *, scaling: float, of_tokens: bool = False,
    projected: Optional[Tensor] = None, grad: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    """z[r] = scaling factor[l, e]^T dy[r], and grad[e] = sum of dy[r] projected[r]^T over rows of e, any strides."""
    if grad is not None:
        wgrad(dy, projected, rows, grad, lhs_of_tokens=of_tokens)
    return project(dy, factor, rows, scaling=scaling, of_tokens=of_tokens)[0]


def num_bias_dots(n: int) -> int:
    """Into how many parts `bias_grads` cuts an inner product over N columns."""
    return 1


def bias_grads(
    dy: Tensor, rows: Rows, scales: Optional[Tensor], bias: Optional[Tensor], dbias: Optional[Tensor],
    dots: Optional[Tensor], accumulate: bool = False,
) -> None:  # fmt: skip
    """dbias[e] = sum over the rows r of e of scales[r] dy[r], or plus that; dots[:, r] = parts of <dy[r], bias[e]>."""
    if dbias is not None and not accumulate:
        dbias.zero_()
    wide, tokens = wide_dtype(dy.dtype), tokens_of(rows)
    for group, start, end in groups_with_rows(rows):
        grads = take_rows(dy, tokens, start, end).to(wide)
        if dots is not None:
            dots[0, start:end] = grads @ bias[group].to(wide)
        if dbias is not None:
            total = grads.sum(0) if scales is None else scales_of(scales, rows, start, end).to(wide) @ grads
            dbias[group] += total.to(dbias.dtype)


def sum_dots(dots: Tensor, rows: Rows, out: Tensor, accumulate: bool = False) -> None:
    """out[r] = sum of dots[:, r], or plus that; out[s] = that of the slot's row for routed rows; 0 without a row."""
    first, end = int(rows.group_offsets[0]), int(rows.group_offsets[-1])
    if not accumulate:
        out.zero_()
    index = rows.row_to_slot[first:end].to(torch.int64) if rows.top_k else torch.arange(first, end)
    sums = dots[:, first:end].sum(0)
    flat = out.view(-1)
    flat[index] = (flat[index] + sums if accumulate else sums).to(out.dtype)
