"""grouped_mm_experts: output and every gradient against the reference in fp64, for each case, dtype and layout."""

import pytest
import torch
from block import assert_matches, assert_same, call, run, run_reference, with_leaves
from cases import BY_ID, CASES, make_inputs
from compare import assert_bitwise, assert_close
from poison import guarded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WEIGHTS = ("gate_up_proj", "down_proj")

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
some_cases = pytest.mark.parametrize("case_id", ["silu-bias", "gpt-oss", "relu2-not-gated", "silu-transposed"])


@by_dtype
@by_case
def test_matches_reference(grouped_moe, device, case, dtype):
    inputs = make_inputs(case, dtype, device)
    assert_matches(run(grouped_moe, case, inputs), run_reference(grouped_moe, case, inputs), dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case_id", ["silu", "gpt-oss", "relu2-not-gated"])
def test_quick(grouped_moe, device, case_id):
    """Few shapes: on a GPU each one compiles its kernels."""
    inputs = make_inputs(BY_ID[case_id], torch.bfloat16, device)
    want = run_reference(grouped_moe, BY_ID[case_id], inputs)
    assert_matches(run(grouped_moe, BY_ID[case_id], inputs), want, torch.bfloat16)


@by_case
def test_fp64_on_cpu_matches_reference(grouped_moe, case):
    inputs = make_inputs(case, torch.float64, "cpu")
    assert_matches(run(grouped_moe, case, inputs), run_reference(grouped_moe, case, inputs), torch.float64)


@pytest.mark.parametrize("case_id", ["silu-bias", "gpt-oss", "gelu-not-gated", "gelu-tanh-limit", "relu2-gated"])
def test_gradcheck(grouped_moe, case_id):
    """Finite differences in fp64, independent of the reference's autograd."""
    case = BY_ID[case_id]._replace(T=4, top_k=2, E=3, H=4, I=3)
    inputs = with_leaves(make_inputs(case, torch.float64, "cpu"))
    names = list(inputs.floating())

    def function(*tensors):
        return call(grouped_moe, case, inputs._replace(**dict(zip(names, tensors))))

    assert torch.autograd.gradcheck(function, list(inputs.floating().values()))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@by_dtype
def test_routing_weights_keep_their_dtype(grouped_moe, device, dtype, weights_dtype):
    """A gradient is rounded to the dtype of its input: the bound is that of the wider roundoff."""
    case = BY_ID["silu-bias"]
    inputs = make_inputs(case, dtype, device, weights_dtype=weights_dtype)
    got, want = run(grouped_moe, case, inputs), run_reference(grouped_moe, case, inputs)
    grad = got.grads.pop("top_k_weights")
    assert grad.dtype == weights_dtype
    coarse = weights_dtype if weights_dtype.itemsize < dtype.itemsize else dtype
    coarse = torch.bfloat16 if torch.bfloat16 in (dtype, weights_dtype) else coarse
    assert_close("grad of top_k_weights", grad, want.grads.pop("top_k_weights"), coarse, inner_products=True)
    assert_matches(got, want, dtype)


FLOATING = ("hidden_states", "top_k_weights", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
FROZEN = [tuple(name for name in FLOATING if name != only) for only in FLOATING]
FROZEN += [("gate_up_proj", "down_proj"), ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")]
FROZEN += [("hidden_states",), ("top_k_weights",), ("hidden_states", "gate_up_proj"), ("down_proj", "top_k_weights")]


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
@pytest.mark.parametrize("frozen", FROZEN, ids="-".join)
@pytest.mark.parametrize(
    "case_id, dtype",
    [
        ("gpt-oss", torch.float32),
        ("tall-wide-gpt-oss", torch.bfloat16),
        ("tall-wide-not-gated-transposed-bias-limit-recompute", torch.bfloat16),
    ],
    ids=["small", "tall-wide", "tall-wide-not-gated"],
)
def test_frozen_inputs(grouped_moe, device, case_id, dtype, frozen, recompute):
    """A gradient does not depend on which others are asked for; what is frozen gets none."""
    case = BY_ID[case_id]._replace(recompute=recompute)
    inputs = make_inputs(case, dtype, device)
    full, part = run(grouped_moe, case, inputs), run(grouped_moe, case, inputs, frozen=frozen)
    assert_bitwise("out", part.out, full.out)
    for name, grad in part.grads.items():
        if name in frozen:
            assert grad is None, name
        else:
            assert_bitwise(name, grad, full.grads[name])


@by_dtype
@pytest.mark.parametrize("case_id", ["silu-bias", "tall-wide", "tall-wide-gpt-oss", "tall-wide-not-gated"])
def test_no_gradient_asked_for(grouped_moe, device, case_id, dtype):
    case = BY_ID[case_id]
    inputs = make_inputs(case, dtype, device)
    out = call(grouped_moe, case, inputs)
    assert not out.requires_grad
    with torch.no_grad():
        without = call(grouped_moe, case, with_leaves(inputs))
    assert not without.requires_grad
    assert_bitwise("out", without, out)
    assert_bitwise("out", call(grouped_moe, case, with_leaves(inputs)).detach(), out)


@by_dtype
@some_cases
def test_recompute_changes_nothing(grouped_moe, device, case_id, dtype):
    case = BY_ID[case_id]
    inputs = make_inputs(case, dtype, device)
    assert_same(run(grouped_moe, case, inputs, recompute=True), run(grouped_moe, case, inputs, recompute=False))


@some_cases
def test_recompute_saves_no_preactivation(grouped_moe, device, case_id):
    case = BY_ID[case_id]
    inputs = with_leaves(make_inputs(case, torch.float32, device))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call(grouped_moe, case, inputs, recompute=True)
    given = {t.data_ptr() for t in inputs if t is not None}
    own = [t for t in saved if t.data_ptr() not in given and t.is_floating_point()]
    assert sum(t.numel() for t in own) == 0


@by_dtype
def test_index_dtypes_agree(grouped_moe, device, dtype):
    case = BY_ID["silu"]
    inputs = make_inputs(case, dtype, device, index_dtype=torch.int32)
    wide = inputs._replace(top_k_index=inputs.top_k_index.long())
    assert_same(run(grouped_moe, case, inputs), run(grouped_moe, case, wide))


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
@pytest.mark.parametrize("case_id", ["silu", "gpt-oss", "aligned-extents", "tall"])
def test_repeats_bitwise(grouped_moe, device, case_id, recompute):
    case = BY_ID[case_id]
    inputs = make_inputs(case, torch.bfloat16, device)
    first = run(grouped_moe, case, inputs, recompute=recompute)
    for _ in range(19):
        assert_same(run(grouped_moe, case, inputs, recompute=recompute), first)


def test_gradients_accumulate(grouped_moe, device):
    """Two uses of one weight in a graph add up: gradients are fresh tensors, not views of a shared buffer."""
    case = BY_ID["silu"]
    inputs = with_leaves(make_inputs(case, torch.float32, device))
    once = run(grouped_moe, case, inputs)
    for _ in range(2):
        call(grouped_moe, case, inputs).backward(inputs.dout)
    for name, tensor in inputs.floating().items():
        assert_bitwise(name, tensor.grad, 2 * once.grads[name])


def _transposed_storage(tensor):
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _nan(tensor, *shape):
    return torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)


def _stride_two(tensor):
    wide = _nan(tensor, *tensor.shape[:-1], 2 * tensor.shape[-1])
    wide[..., ::2] = tensor
    return wide[..., ::2]


def _stride_two_rows(tensor):
    tall = _nan(tensor, 2 * tensor.shape[0], *tensor.shape[1:])
    tall[::2] = tensor
    return tall[::2]


def _padded_rows(tensor):
    wide = _nan(tensor, *tensor.shape[:-1], tensor.shape[-1] + 3)
    wide[..., 2:-1] = tensor
    return wide[..., 2:-1]


LAYOUTS = [_transposed_storage, _stride_two, _stride_two_rows, _padded_rows, guarded]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case_id", ["silu-bias", "gpt-oss", "aligned-extents", "relu2-not-gated"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__.strip("_"))
def test_strides(grouped_moe, device, layout, case_id, dtype):
    """Views of other strides, with NaN between their elements, and a start that is not aligned."""
    case = BY_ID[case_id]
    inputs = make_inputs(case, dtype, device)
    changed = {name: layout(t) for name, t in inputs._asdict().items() if t is not None and t.is_floating_point()}
    got = run(grouped_moe, case, inputs._replace(**changed))
    assert_matches(got, run_reference(grouped_moe, case, inputs), dtype)


@pytest.mark.parametrize("case_id", ["silu-bias", "gpt-oss"])
def test_expanded_cotangent_and_ids(grouped_moe, device, case_id):
    """`out.sum().backward()` and friends give strides of 0."""
    case = BY_ID[case_id]
    inputs = make_inputs(case, torch.float32, device)
    dout, ids = inputs.dout[:1, :1].expand(case.T, case.H), inputs.top_k_index[:, :1].expand(case.T, case.top_k)
    views = inputs._replace(dout=dout, top_k_index=ids)
    plain = inputs._replace(dout=dout.contiguous(), top_k_index=ids.contiguous())
    assert_matches(run(grouped_moe, case, views), run_reference(grouped_moe, case, plain), torch.float32)


def test_expanded_weights(grouped_moe, device):
    """One weight expanded over the experts: a gradient must not alias itself."""
    case = BY_ID["silu"]
    inputs = make_inputs(case, torch.float32, device)
    inputs = inputs._replace(**{name: getattr(inputs, name)[:1].expand(case.E, -1, -1) for name in WEIGHTS})
    assert_matches(run(grouped_moe, case, inputs), run_reference(grouped_moe, case, inputs), torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__.strip("_"))
def test_strides_of_ids(grouped_moe, device, layout):
    case = BY_ID["silu"]
    inputs = make_inputs(case, torch.float32, device)
    ids = inputs.top_k_index
    views = {"stride_two": ids.repeat_interleave(2, 1)[:, ::2], "guarded": torch.cat([ids[:1], ids])[1:]}
    view = views.get(layout.__name__.strip("_"), ids.t().contiguous().t())
    assert_same(run(grouped_moe, case, inputs._replace(top_k_index=view)), run(grouped_moe, case, inputs))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=["fp32-weights", "bf16-weights"])
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_autocast(grouped_moe, device, backward_inside, recompute, weights_dtype):
    """As `F.linear`: fp32 operands are cast, gradients come back in fp32; routing weights are left alone."""
    case = BY_ID["silu-bias"]._replace(recompute=recompute)
    inputs = make_inputs(case, torch.float32, device, weights_dtype=weights_dtype)
    cast = {name: t.bfloat16() for name, t in inputs.floating().items() if name != "top_k_weights"}
    want = run(grouped_moe, case, inputs._replace(dout=inputs.dout.bfloat16(), **cast))
    leaves = with_leaves(inputs)
    with torch.autocast(device, torch.bfloat16):
        out = call(grouped_moe, case, leaves)
        linear = torch.nn.functional.linear(inputs.hidden_states, inputs.hidden_states)
    with torch.autocast(device, torch.bfloat16, enabled=backward_inside):
        out.backward(inputs.dout.bfloat16())
    assert out.dtype == linear.dtype == torch.bfloat16
    assert_bitwise("out", out.detach(), want.out)
    for name, leaf in leaves.floating().items():
        assert_bitwise(name, leaf.grad, want.grads[name].to(leaf.dtype))


def test_autocast_leaves_fp64(grouped_moe):
    case = BY_ID["silu-bias"]
    inputs = make_inputs(case, torch.float64, "cpu")
    want = run(grouped_moe, case, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(grouped_moe, case, inputs)
    assert_same(got, want)


def test_autocast_disabled_inside(grouped_moe, device):
    case = BY_ID["silu-bias"]
    inputs = make_inputs(case, torch.float32, device)
    with torch.autocast(device, torch.bfloat16), torch.autocast(device, enabled=False):
        got = run(grouped_moe, case, inputs)
    assert_same(got, run(grouped_moe, case, inputs))


def test_inputs_are_left_as_they_were(grouped_moe, device):
    case = BY_ID["gpt-oss"]
    inputs = make_inputs(case, torch.float32, device)
    before = [t if t is None else t.clone() for t in inputs]
    run(grouped_moe, case, inputs)
    for name, tensor, copy in zip(inputs._fields, inputs, before):
        if tensor is not None:
            assert_bitwise(name, tensor, copy)
