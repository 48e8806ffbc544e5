"""grouped_mm_experts: output and every gradient against the reference in fp64, and what must not change them."""

import contextlib

import pytest
import torch
from block import assert_same, call, check, checkpointed, count_routed, make, run, with_leaves
from cases import BY_ID, CASES, make_inputs
from compare import assert_bitwise
from poison import LAYOUTS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
FLOATING = ("hidden_states", "top_k_weights", *WEIGHTS, *BIASES)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
by_recompute = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_reference(grouped_moe, device, case, dtype):
    check(grouped_moe, case, make_inputs(case, dtype, "cpu" if dtype == torch.float64 else device))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case_id", ["silu", "gpt-oss", "relu2-not-gated"])
def test_quick(grouped_moe, device, case_id):
    """Few shapes: on a GPU each one compiles its kernels."""
    check(grouped_moe, *make(case_id, device, torch.bfloat16))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=["fp32-weights", "bf16-weights"])
@by_dtype
def test_routing_weights_keep_their_dtype(grouped_moe, device, dtype, weights_dtype):
    case = BY_ID["silu-bias"]
    check(grouped_moe, case, make_inputs(case, dtype, device, weights_dtype=weights_dtype))


WAYS = {  # arguments of `run`, of R and S
    "recompute": lambda *_: {"recompute": True},
    "checkpoint": lambda *_: {"around": checkpointed},
    "checkpoint-recompute-capacity": lambda rows, _: {"around": checkpointed, "recompute": True, "capacity": rows},
    "exact-capacity": lambda rows, _: {"capacity": rows},
    "exact-capacity-recompute": lambda rows, _: {"recompute": True, "capacity": rows},
    "capacity-with-room": lambda rows, slots: {"capacity": (rows + slots) // 2},
    "capacity-of-all": lambda _, slots: {"capacity": slots},
    "capacity-of-more": lambda _, slots: {"capacity": slots + 1},
    "capacity-above-int32": lambda *_: {"capacity": 2**40},
}
SOME = ["silu-bias", "gpt-oss", "relu2-not-gated", "silu-transposed", "silu-mostly-sentinels", "silu-recompute", "tall"]


@pytest.mark.parametrize("way", WAYS)
@by_dtype
@pytest.mark.parametrize("case_id", SOME)
def test_ways_agree(grouped_moe, device, case_id, dtype, way):
    """Whether or what is saved, in how much room, and for int32 ids."""
    case = BY_ID[case_id]
    inputs = make_inputs(case, dtype, device, index_dtype=torch.int32)
    changes = WAYS[way](count_routed(case, inputs), case.T * case.top_k)
    want = run(grouped_moe, case, inputs._replace(top_k_index=inputs.top_k_index.long()), recompute=False)
    assert_same(run(grouped_moe, case, inputs, **changes), want)


@by_dtype
@pytest.mark.parametrize("case_id", ["silu-bias", "tall-wide", "tall-wide-gpt-oss", "tall-wide-not-gated"])
def test_no_gradient_asked_for(grouped_moe, device, case_id, dtype):
    case, inputs = make(case_id, device, dtype)
    leaves, want = with_leaves(inputs), run(grouped_moe, case, inputs).out
    for capacity in (None, count_routed(case, inputs)):
        with torch.no_grad():
            without = call(grouped_moe, case, leaves, capacity=capacity)
        for out in (without, call(grouped_moe, case, inputs, capacity=capacity)):
            assert not out.requires_grad
            assert_bitwise("out", out, want)


FROZEN = [tuple(name for name in FLOATING if name != only) for only in FLOATING] + [WEIGHTS, (*WEIGHTS, *BIASES)]
FROZEN += [("hidden_states",), ("top_k_weights",), ("hidden_states", "gate_up_proj"), ("down_proj", "top_k_weights")]


@by_recompute
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
    case, inputs = make(case_id, device, dtype, recompute=recompute)
    want = run(grouped_moe, case, inputs)
    for capacity in (None, count_routed(case, inputs)):
        assert_same(run(grouped_moe, case, inputs, frozen, capacity=capacity), want, frozen)


@by_recompute
@pytest.mark.parametrize("case_id", ["silu", "gpt-oss", "aligned-extents", "tall"])
def test_repeats_bitwise(grouped_moe, device, case_id, recompute):
    case, inputs = make(case_id, device, torch.bfloat16, recompute=recompute)
    first = run(grouped_moe, case, inputs)
    for _ in range(19):
        assert_same(run(grouped_moe, case, inputs), first)


@pytest.mark.parametrize("case_id", ["silu", "gpt-oss"])
def test_gradients_accumulate_and_inputs_stay(grouped_moe, device, case_id):
    """Two uses of one weight in a graph add up: gradients are fresh tensors, not views of a shared buffer."""
    case, inputs = make(case_id, device)
    inputs = with_leaves(inputs)
    before = [None if tensor is None else tensor.detach().clone() for tensor in inputs]
    once = run(grouped_moe, case, inputs)
    for _ in range(2):
        call(grouped_moe, case, inputs).backward(inputs.dout)
    for name, tensor in inputs.floating().items():
        assert_bitwise(name, tensor.grad, 2 * once.grads[name])
    for name, tensor, copy in zip(inputs._fields, inputs, before):
        if tensor is not None:
            assert_bitwise(name, tensor.detach(), copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case_id", ["silu-bias", "gpt-oss", "aligned-extents", "relu2-not-gated"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(grouped_moe, device, layout, case_id, dtype):
    """Views of other strides, with NaN between their elements, and a start that is not aligned."""
    case, inputs = make(case_id, device, dtype)
    views = {name: LAYOUTS[layout](tensor) for name, tensor in inputs._asdict().items() if tensor is not None}
    check(grouped_moe, case, inputs, inputs._replace(**views))


EXPANDED = {
    "cotangent": lambda inputs: {"dout": inputs.dout[:1, :1].expand_as(inputs.dout)},
    "ids": lambda inputs: {"top_k_index": inputs.top_k_index[:, :1].expand_as(inputs.top_k_index)},
    "weights": lambda inputs: {name: getattr(inputs, name)[:1].expand_as(getattr(inputs, name)) for name in WEIGHTS},
}


@pytest.mark.parametrize("what", EXPANDED)
@pytest.mark.parametrize("case_id", ["silu-bias", "gpt-oss"])
def test_strides_of_0(grouped_moe, device, case_id, what):
    """`out.sum().backward()` and friends give them; the gradient of an expanded weight must not alias itself."""
    case, inputs = make(case_id, device)
    check(grouped_moe, case, inputs._replace(**EXPANDED[what](inputs)))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=["fp32-weights", "bf16-weights"])
@by_recompute
@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_autocast(grouped_moe, device, backward_inside, recompute, weights_dtype):
    """As `F.linear`: fp32 operands are cast, gradients come back in fp32; routing weights are left alone."""
    case = BY_ID["silu-bias"]._replace(recompute=recompute)
    inputs = make_inputs(case, torch.float32, device, weights_dtype=weights_dtype)
    cast = {name: t.bfloat16() for name, t in inputs.floating().items() if name != "top_k_weights"}
    want = run(grouped_moe, case, inputs._replace(dout=inputs.dout.bfloat16(), **cast))
    for capacity in (None, count_routed(case, inputs)):
        leaves = with_leaves(inputs)
        with torch.autocast(device, torch.bfloat16):
            out = call(grouped_moe, case, leaves, capacity=capacity)
            linear = torch.nn.functional.linear(inputs.hidden_states, inputs.hidden_states)
        with torch.autocast(device, torch.bfloat16, enabled=backward_inside):
            out.backward(inputs.dout.bfloat16())
        assert out.dtype == linear.dtype == torch.bfloat16
        assert_bitwise("out", out.detach(), want.out)
        for name, leaf in leaves.floating().items():
            assert_bitwise(name, leaf.grad, want.grads[name].to(leaf.dtype))


@pytest.mark.parametrize("disabled", [False, True], ids=["fp64", "disabled-inside"])
def test_autocast_that_does_not_apply(grouped_moe, device, disabled):
    case, inputs = make("silu-bias", device) if disabled else make("silu-bias", "cpu", torch.float64)
    device = inputs.dout.device.type
    inside = torch.autocast(device, enabled=False) if disabled else contextlib.nullcontext()
    with torch.autocast(device, torch.bfloat16), inside:
        got = run(grouped_moe, case, inputs)
    assert_same(got, run(grouped_moe, case, inputs))
