"""Kernels that gather, sort and combine rows."""

import pytest
import torch
from cases import Case, make_ids
from compare import assert_bitwise, assert_close
from loops import differentiate, loop_combine, loop_gather
from poison import guarded, is_sentinel

NAN = float("nan")
PERMUTES = [Case("plain"), Case("sentinels-only", T=4, sentinels=1.0), Case("top-1", T=9, top_k=1)]
PERMUTES += [Case("no-token", T=0), Case("odd", T=9, H=35), Case("one", T=9, H=1), Case("wide", T=4, top_k=2, H=2100)]
PERMUTES += [Case("top-6", T=9, top_k=6, E=16), Case("mostly-sentinels", T=9, top_k=6, E=16, sentinels=0.8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("case", PERMUTES, ids=lambda case: case.id)
def test_permute(module, grouped_moe, kernels, case, dtype):
    """gather, combine and the gradients of combine, with NaN in rows past R and in weights of sentinels."""
    ids = make_ids(case)
    routing = grouped_moe.route(ids, case.E)
    offsets, row_to_slot, slot_to_row = routing.expert_offsets, routing.row_to_slot, routing.slot_to_row
    x, dout = (torch.randn(case.T, case.H).to(dtype) for _ in range(2))
    y, weights = torch.randn(case.T * case.top_k, case.H).to(dtype), torch.rand(case.T, case.top_k)
    with torch.enable_grad():
        leaves = [y.double(), weights.double()]
        want, want_dy, want_dw = differentiate(lambda y, w: loop_combine(y, w, routing), leaves, dout.double())
        plain = loop_combine(y.double(), torch.ones_like(leaves[1]), routing)
    sentinel = is_sentinel(ids, case.E)
    y[int(offsets[-1]) :], weights[sentinel], dout[sentinel.all(1)] = NAN, NAN, NAN
    row_to_slot = torch.where(torch.arange(len(row_to_slot)) < offsets[-1], row_to_slot, 2**30).int()
    x, y, weights, dout = (guarded(t) for t in (x, y, weights, dout))
    rows = module("routing").rows_of(offsets, row_to_slot, slot_to_row, case.top_k)
    gathered = kernels.gather_rows(x, rows)
    out, unweighted = kernels.combine(y, weights, rows), kernels.combine(y, None, rows)
    dy, dw = kernels.combine_grad(dout, y, weights, rows, True)
    assert_bitwise("gather", gathered, loop_gather(x, routing))
    for name, got, wanted in (("out", out, want), ("unweighted", unweighted, plain), ("dy", dy, want_dy)):
        assert_close(name, got, wanted, dtype)
    assert_close("dweights", dw, want_dw, dtype, inner_products=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("case", [*PERMUTES, Case("top-8", T=9, top_k=8)], ids=lambda case: case.id)
def test_combine_sums_dots(kernels, case, dtype):
    """Bitwise the sums of `sum_dots`, one part after the other, with NaN in dots past R; the rows are as without."""
    ids = make_ids(case)
    y = guarded(torch.randn(case.T * case.top_k, case.H).to(dtype))
    dots = torch.randn(5, case.T * case.top_k) * torch.tensor([[1.0], [1e4], [-1e4], [1e-3], [1e3]])
    rows = kernels.route(ids, case.E, dtype)
    end = int(rows.group_offsets[-1])
    dots[:, end:] = NAN
    want, dots = sum(dots[:, :end], torch.zeros(end)).to(dtype), guarded(dots)
    dscales, alone = (torch.empty(case.T, case.top_k, dtype=dtype) for _ in range(2))
    out = kernels.combine(y, None, rows, dots, dscales)
    kernels.sum_dots(dots, rows, alone)
    assert_bitwise("out", out, kernels.combine(y, None, rows))
    routed = rows.slot_to_row.view_as(ids) >= 0
    assert_bitwise("dscales", dscales[routed], want[rows.slot_to_row.view_as(ids)[routed].long()])
    assert not dscales[~routed].any()
    assert_bitwise("dscales by sum_dots", dscales, alone)


@pytest.mark.parametrize("case", [Case("plain"), Case("one-token", T=1, top_k=8, E=16), Case("odd-extent", H=1035)])
def test_sort_rows(module, kernels, case):
    """Rows of tokens go where their slots are; what no row comes from is not read, what no row goes to not written."""
    ids = make_ids(case)
    rows = kernels.route(ids, case.E, torch.float32)
    x = guarded(torch.randn(case.T, case.H))
    x[is_sentinel(ids, case.E).all(1)] = NAN
    out = module("backends.triton.permute").sort_rows(x, rows)
    routed = int(rows.group_offsets[-1])
    assert out.shape == (ids.numel(), case.H)
    assert torch.equal(out[:routed], x[rows.row_to_slot[:routed].long() // case.top_k])
    assert out[routed:].isnan().all()
