"""gather_rows and combine_rows against loops over tokens, forward and backward, and what they must not read."""

import pytest
import torch
from cases import Case, make_ids
from compare import assert_bitwise, assert_close
from poison import dirty_allocator, guarded, is_sentinel, poisoned_allocations

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def make(grouped_moe, case, device):
    """(ids, routing) of a case."""
    ids = make_ids(case).to(device)
    return ids, grouped_moe.route(ids, case.E)


def loop_gather(x, routing):
    """(S, H) in fp64, differentiable."""
    rows = int(routing.expert_offsets[-1])
    picked = x[routing.row_to_slot[:rows].long() // routing.top_k]
    return torch.cat([picked, x.new_zeros(routing.row_to_slot.shape[0] - rows, x.shape[1])])


def loop_combine(y, weights, routing):
    """(T, H) in fp64, differentiable."""
    places = routing.slot_to_row.view(-1, routing.top_k).tolist()
    parts = [[weights[t, k] * y[row] for k, row in enumerate(line) if row >= 0] for t, line in enumerate(places)]
    zero = y.new_zeros(1, y.shape[1])
    return torch.stack([sum(line, zero[0]) for line in parts]) if parts else zero[:0]


def differentiate(function, tensors, dout):
    """(output, gradients), zeros for what takes no part."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    if not out.requires_grad:
        return out, [torch.zeros_like(t) for t in leaves]
    return out.detach(), torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)


@by_dtype
@by_case
def test_gather_matches_loop(grouped_moe, device, case, dtype):
    """Values are copied: bitwise. The gradient sums the rows of a token."""
    _, routing = make(grouped_moe, case, device)
    x = torch.randn(case.T, case.H).to(device, dtype)
    dout = torch.randn(case.T * case.top_k, case.H).to(device, dtype)
    with poisoned_allocations():
        out, (dx,) = differentiate(lambda x: grouped_moe.gather_rows(x, routing), [x], dout)
    want, (want_dx,) = differentiate(lambda x: loop_gather(x, routing), [x.double()], dout.double())
    assert_bitwise("out", out, want.to(dtype))
    assert dx.dtype == dtype
    assert_close("dx", dx, want_dx, dtype)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=["fp32-weights", "bf16-weights"])
@by_dtype
@by_case
def test_combine_matches_loop(grouped_moe, device, case, dtype, weights_dtype):
    """Also with NaN in every row past R and in the routing weights of sentinels."""
    ids, routing = make(grouped_moe, case, device)
    y = torch.randn(case.T * case.top_k, case.H).to(device, dtype)
    weights = torch.rand(case.T, case.top_k).to(device, weights_dtype)
    dout = torch.randn(case.T, case.H).to(device, dtype)
    reference = [y.double(), weights.double()]
    want, want_grads = differentiate(lambda y, w: loop_combine(y, w, routing), reference, dout.double())
    y[int(routing.expert_offsets[-1]) :] = NAN
    weights[is_sentinel(ids, case.E)] = NAN
    dout[is_sentinel(ids, case.E).all(1)] = NAN
    with poisoned_allocations():
        out, (dy, dw) = differentiate(lambda y, w: grouped_moe.combine_rows(y, w, routing), [y, weights], dout)
    assert (out.dtype, dy.dtype, dw.dtype) == (dtype, dtype, weights_dtype)
    coarse = torch.bfloat16 if weights_dtype == torch.bfloat16 else dtype
    assert_close("out", out, want, dtype)
    assert_close("dy", dy, want_grads[0], dtype)
    assert_close("dweights", dw, want_grads[1], coarse, inner_products=True)


def test_gather_and_combine_are_adjoint_in_fp64(grouped_moe):
    """gradcheck of both, one after the other, with sentinels."""
    _, routing = make(grouped_moe, Case("small", T=4, top_k=3, E=3, sentinels=0.3), "cpu")
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)

    def function(x, weights):
        return grouped_moe.combine_rows(grouped_moe.gather_rows(x, routing).sin(), weights, routing)

    assert torch.autograd.gradcheck(function, [x, weights])


@by_dtype
def test_layouts_and_dirty_memory(grouped_moe, device, dtype):
    """Strided and misaligned operands with NaN around them, after memory full of NaN was given back."""
    case = CASES[0]
    _, routing = make(grouped_moe, case, device)
    x, dout = (torch.randn(case.T, case.H).to(device, dtype) for _ in range(2))
    weights = torch.rand(case.T, case.top_k).to(device, dtype)

    def block(x, weights):
        return grouped_moe.combine_rows(grouped_moe.gather_rows(x, routing), weights, routing)

    want, want_grads = differentiate(block, [x, weights], dout)
    layouts = (guarded, lambda t: t.t().contiguous().t(), lambda t: t.repeat_interleave(2, 1)[:, ::2])
    for layout in layouts:
        dirty_allocator(device)
        got, got_grads = differentiate(block, [layout(x), layout(weights)], layout(dout))
        assert_bitwise("out", got, want)
        for name, a, b in zip(("dx", "dweights"), got_grads, want_grads):
            assert_bitwise(name, a, b)


@pytest.mark.kernels_ci
def test_strided_rows(grouped_moe, device):
    """Rows transposed in memory and an expanded cotangent."""
    case = CASES[0]
    _, routing = make(grouped_moe, case, device)
    y, weights = torch.randn(case.T * case.top_k, case.H, device=device), torch.rand(case.T, case.top_k, device=device)
    dout = torch.randn(1, 1, device=device).expand(case.T, case.H)
    wide = [y.double(), weights.double()]
    want = differentiate(lambda y, w: loop_combine(y, w, routing), wide, dout.double())
    strided = y.t().contiguous().t()
    got = differentiate(lambda y, w: grouped_moe.combine_rows(y, w, routing), [strided, weights], dout)
    assert_close("out", got[0], want[0], torch.float32)
    assert_close("dy", got[1][0], want[1][0], torch.float32)
    assert_close("dweights", got[1][1], want[1][1], torch.float32, inner_products=True)


@pytest.mark.parametrize("wanted", [0, 1], ids=["y", "weights"])
def test_only_gradients_asked_for(grouped_moe, device, wanted):
    case = CASES[0]
    _, routing = make(grouped_moe, case, device)
    tensors = [torch.randn(case.T * case.top_k, case.H, device=device), torch.rand(case.T, case.top_k, device=device)]
    dout = torch.randn(case.T, case.H, device=device)
    _, full = differentiate(lambda y, w: grouped_moe.combine_rows(y, w, routing), tensors, dout)
    leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
    grouped_moe.combine_rows(*leaves, routing).backward(dout)
    assert_bitwise("grad", leaves[wanted].grad, full[wanted])
    assert leaves[1 - wanted].grad is None


@pytest.mark.kernels_ci
def test_experts_block_from_its_parts(grouped_moe, device):
    """route, gather, two grouped linears and combine make the block, output and gradients."""
    case = Case("parts", H=32, I=24)
    ids, routing = make(grouped_moe, case, device)
    shapes = ((case.T, 32), (case.E, 48, 32), (case.E, 32, 24))
    tensors = [torch.randn(shape).to(device) / shape[-1] ** 0.5 for shape in shapes]
    tensors.append(torch.rand(case.T, case.top_k).to(device))
    dout = torch.randn(case.T, case.H).to(device)

    def parts(x, up, down, weights):
        offsets = routing.expert_offsets
        gate, value = grouped_moe.grouped_linear(grouped_moe.gather_rows(x, routing), up, offsets).chunk(2, 1)
        y = grouped_moe.grouped_linear(torch.nn.functional.silu(gate) * value, down, offsets)
        return grouped_moe.combine_rows(y, weights, routing)

    def reference(x, up, down, weights):
        return grouped_moe.reference.grouped_mm_experts(x, ids, weights, up, down)

    got, grads = differentiate(parts, tensors, dout)
    want, want_grads = differentiate(reference, [t.double() for t in tensors], dout.double())
    assert_close("out", got, want, torch.float32)
    for name, a, b in zip(("dx", "dup", "ddown", "dweights"), grads, want_grads):
        assert_close(name, a, b, torch.float32, inner_products=name == "dweights")


def test_differentiates_once(grouped_moe, device):
    """A second derivative raises instead of being wrong."""
    routing = grouped_moe.route(torch.tensor([[0, 1], [1, 2]], device=device), 3)
    x = torch.randn(2, 4, device=device, requires_grad=True)
    weights = torch.rand(2, 2, device=device, requires_grad=True)
    out = grouped_moe.combine_rows(grouped_moe.gather_rows(x, routing), weights, routing)
    (dx,) = torch.autograd.grad(out, x, torch.randn_like(out).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(dx.sum(), weights)


def saved_bytes(function) -> int:
    """Bytes of the distinct storages that a forward keeps for its backward."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(kept.values())


def test_frozen_weights_keep_no_rows(grouped_moe, device):
    """Rows that only the gradient of a weight reads are not saved for a frozen one."""
    routing = grouped_moe.route(torch.arange(64, device=device)[:, None] % 3, 3)
    rows = torch.randn(64, 512, device=device, requires_grad=True)
    weight, ones = torch.randn(3, 2, 512, device=device), torch.ones(64, 1, device=device)
    row_bytes = rows.untyped_storage().nbytes()
    linear = saved_bytes(lambda: grouped_moe.grouped_linear(rows, weight, routing.expert_offsets))
    assert linear < weight.untyped_storage().nbytes() + row_bytes // 4
    assert saved_bytes(lambda: grouped_moe.combine_rows(rows, ones, routing)) < row_bytes // 4
    assert saved_bytes(lambda: grouped_moe.combine_rows(rows, ones.requires_grad_(), routing)) > row_bytes
