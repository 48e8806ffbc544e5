"""gather_rows and combine_rows against loops over tokens, forward and backward, and what they must not read."""

import pytest
import torch
from cases import Case, make_ids
from compare import assert_bitwise, assert_close, assert_matches, assert_same
from loops import differentiate, loop_combine, loop_gather
from marks import by_dtype
from poison import LAYOUTS, dirty_allocator, is_sentinel, poisoned_allocations

NAN = float("nan")
CASES = [
    Case("plain", E=5, H=48),
    Case("no-sentinels", sentinels=0.0),
    Case("sentinels-only", sentinels=1.0),
    Case("no-token", T=0),
    Case("one-token", T=1, top_k=8, E=16),
    Case("top-1", top_k=1),
    Case("one-expert", E=1, top_k=2),
    Case("odd-extent", H=35),
    Case("extent-of-one", H=1),
    Case("wide", T=5, H=2500),
    Case("many-experts", T=200, top_k=6, E=1024, H=8),
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def make(grouped_moe, case, device, dtype=torch.float32, weights_dtype=None):
    """(ids, routing, x, y, weights, a cotangent per token) of a case."""
    ids = make_ids(case).to(device)
    shapes = (case.T, case.H), (case.T * case.top_k, case.H), (case.T, case.top_k), (case.T, case.H)
    x, y, weights, dout = (torch.randn(shape).to(device, dtype) for shape in shapes)
    return ids, grouped_moe.route(ids, case.E), x, y, weights.to(weights_dtype or dtype), dout


@by_dtype
@by_case
def test_gather_matches_loop(grouped_moe, device, case, dtype):
    """Values are copied: bitwise. The gradient sums the rows of a token."""
    _, routing, x, dout, *_ = make(grouped_moe, case, device, dtype)
    with poisoned_allocations():
        out, dx = differentiate(lambda x: grouped_moe.gather_rows(x, routing), [x], dout)
    want, want_dx = differentiate(lambda x: loop_gather(x, routing), [x.double()], dout.double())
    assert_bitwise("out", out, want.to(dtype))
    assert dx.dtype == dtype
    assert_close("dx", dx, want_dx, dtype)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=["fp32-weights", "bf16-weights"])
@by_dtype
@by_case
def test_combine_matches_loop(grouped_moe, device, case, dtype, weights_dtype):
    """Also with NaN in every row past R and in the routing weights of sentinels, and for each gradient alone."""
    ids, routing, _, y, weights, dout = make(grouped_moe, case, device, dtype, weights_dtype)
    reference, names = [y.double(), weights.double()], ("out", "dy", "top_k_weights")
    want = differentiate(lambda y, w: loop_combine(y, w, routing), reference, dout.double())
    y[int(routing.expert_offsets[-1]) :] = NAN
    weights[is_sentinel(ids, case.E)] = NAN
    dout[is_sentinel(ids, case.E).all(1)] = NAN
    with poisoned_allocations():
        got = differentiate(lambda y, w: grouped_moe.combine_rows(y, w, routing), [y, weights], dout)
        _, dy_alone = differentiate(lambda y: grouped_moe.combine_rows(y, weights, routing), [y], dout)
        _, dw_alone = differentiate(lambda w: grouped_moe.combine_rows(y, w, routing), [weights], dout)
    assert_matches(dict(zip(names, got)), dict(zip(names, want)), dtype, {"top_k_weights": weights_dtype})
    assert_bitwise("dy alone", dy_alone, got[1])
    assert_bitwise("dweights alone", dw_alone, got[2])


VIEWS = {**LAYOUTS, "expanded": lambda tensor: tensor[:1, :1].expand_as(tensor)}


@by_dtype
@pytest.mark.parametrize("view", VIEWS)
def test_strides_and_dirty_memory(grouped_moe, device, view, dtype):
    """Strided and misaligned operands with NaN around them, after memory full of NaN was given back."""
    _, routing, x, y, weights, dout = make(grouped_moe, CASES[0], device, dtype)
    for function, *tensors in (
        (lambda x: grouped_moe.gather_rows(x, routing), x, y),
        (lambda y, weights: grouped_moe.combine_rows(y, weights, routing), y, weights, dout),
    ):
        views = [VIEWS[view](tensor) for tensor in tensors]
        dirty_allocator(device)
        got, want = (
            differentiate(function, operands, cotangent)
            for *operands, cotangent in (views, [each.contiguous() for each in views])
        )
        assert_same(dict(enumerate(got)), dict(enumerate(want)))


def test_weights_are_not_rounded(grouped_moe, device):
    """fp32 weights of bf16 rows, whose products cancel but for a part that bf16 weights have not."""
    ids = torch.tensor([[0, 1]] * 3, device=device)
    routing = grouped_moe.route(ids, 2)
    y = torch.ones(6, 16, device=device, dtype=torch.bfloat16)
    y[3:] = -1.0
    weights = torch.tensor([[1 + 2.0**-12, 1.0]] * 3, device=device)
    assert (grouped_moe.combine_rows(y, weights, routing) == 2.0**-12).all()


def test_rows_without_columns(grouped_moe, device, set_threads):
    """There and back. PyTorch's embedding_bag raises an error for them, but not on one thread."""
    set_threads(2)
    _, routing, x, y, weights, dout = make(grouped_moe, CASES[0], device, torch.float32)
    x, y, dout = x[:, :0], y[:, :0], dout[:, :0]
    out, dx = differentiate(lambda x: grouped_moe.gather_rows(x, routing), [x], y)
    assert out.shape == y.shape and dx.shape == x.shape
    out, dy, dweights = differentiate(lambda *two: grouped_moe.combine_rows(*two, routing), [y, weights], dout)
    assert out.shape == dout.shape and dy.shape == y.shape and not dweights.any()
