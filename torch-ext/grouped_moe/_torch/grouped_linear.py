"""Grouped linear layer on the CPU: one GEMM per group that has rows."""

from typing import Iterator, List, Optional, Tuple

import torch
from torch import Tensor


def groups_with_rows(offsets: Tensor) -> Iterator[Tuple[int, int, int]]:
    """(group, first row, end row) of each group that has rows. Offsets are on the CPU: no sync."""
    bounds: List[int] = offsets.tolist()
    for group, (start, end) in enumerate(zip(bounds, bounds[1:])):
        if end > start:
            yield group, start, end


def rows_of(x: Tensor, start: int, end: int, sources: Optional[Tensor]) -> Tensor:
    """Rows [start, end) of x or, with sources, the rows of x that those entries name, gathered."""
    return x[start:end] if sources is None else x.index_select(0, sources[start:end])


def matmul_groups(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Optional[Tensor],
    out: Tensor,
    sources: Optional[Tensor] = None,
    scales: Optional[Tensor] = None,
) -> Tensor:
    """out[r] = W[g] x[r] + scales[r] bias[g] for the rows r of group g; other rows of out are left as they are.

    x: (rows, K), or with sources (rows,) any number of rows, read at sources[r]. weight: (G, N, K) of any strides.
    bias: (G, N). out: (rows, N). scales: (rows,).
    """
    for group, start, end in groups_with_rows(offsets):
        rows, w = rows_of(x, start, end, sources), weight[group].t()
        if bias is None:
            torch.mm(rows, w, out=out[start:end])
            continue
        added = bias[group]
        if scales is not None:
            wide = torch.promote_types(x.dtype, torch.float32)
            added = torch.outer(scales[start:end].to(wide), added.to(wide)).to(x.dtype)
        torch.addmm(added, rows, w, out=out[start:end])
    return out


def zero_ungrouped(y: Tensor, offsets: Tensor) -> Tensor:
    """Writes 0 to the rows of y before the first group and after the last."""
    y[: offsets[0]] = 0
    y[offsets[-1] :] = 0
    return y


def wgrad_groups(
    p: Tensor,
    q: Tensor,
    offsets: Tensor,
    out: Tensor,
    p_sources: Optional[Tensor] = None,
    q_sources: Optional[Tensor] = None,
    accumulate: bool = False,
) -> Tensor:
    """out[g] = sum over the rows r of group g of p[r] q[r]^T, zero for a group without rows; or is added to out[g].

    p: (rows, M). q: (rows, N), each read at its sources if given. out: (G, M, N) of any strides and floating dtype.
    """
    if not accumulate:
        for group in (offsets[1:] == offsets[:-1]).nonzero().squeeze(1).tolist():
            out[group].zero_()
    for group, start, end in groups_with_rows(offsets):
        p_rows, q_rows = rows_of(p, start, end, p_sources), rows_of(q, start, end, q_sources)
        if out.dtype != p.dtype:
            wide = torch.promote_types(p.dtype, torch.float32)
            product = p_rows.t().to(wide) @ q_rows.to(wide)
            out[group] = out[group] + product if accumulate else product
        elif accumulate:
            out[group].addmm_(p_rows.t(), q_rows)
        else:
            torch.mm(p_rows.t(), q_rows, out=out[group])
    return out


def sum_groups(
    x: Tensor,
    offsets: Tensor,
    out: Tensor,
    sources: Optional[Tensor] = None,
    weights: Optional[Tensor] = None,
    accumulate: bool = False,
) -> Tensor:
    """out[g] = sum over the rows r of group g of weights[r] x[r], zero for a group without rows; or is added to out[g].

    x: (rows, N), read at sources if given. weights: (rows,), or None for ones. out: (G, N).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if not accumulate:
        out.zero_()
    for group, start, end in groups_with_rows(offsets):
        rows = rows_of(x, start, end, sources).to(wide)
        out[group] += (rows.sum(0) if weights is None else weights[start:end].to(wide) @ rows).to(out.dtype)
    return out


def dot_groups(
    x: Tensor, vectors: Tensor, offsets: Tensor, out: Tensor, sources: Optional[Tensor] = None, accumulate: bool = False
) -> Tensor:
    """out[r] = <x[r], vectors[g]> for the rows r of group g and 0 for others; or is added to out[r].

    x: (rows, N), read at sources if given. vectors: (G, N). out: (rows,).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if not accumulate:
        out.zero_()
    for group, start, end in groups_with_rows(offsets):
        out[start:end] += (rows_of(x, start, end, sources).to(wide) @ vectors[group].to(wide)).to(out.dtype)
    return out
