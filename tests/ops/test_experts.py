"""grouped_mm_experts: output and every gradient against the reference in fp64, and what must not change them."""

import contextlib
import itertools
import random

import pytest
import torch
from block import call, check, checkpointed, count_routed, make, parts_of, run, with_leaves
from cases import BY_ID, CASES, Case, Inputs, make_inputs
from compare import assert_bitwise, assert_part, assert_same
from leaves import leaves_of
from marks import DTYPES, by_dtype, by_fp32_and_bf16, by_recompute
from pairs import Pairs, factors, make_loras, with_factors
from poison import LAYOUTS, is_sentinel, poison_sentinels, poisoned_allocations
from torch.overrides import BaseTorchFunctionMode

NAN, INF = float("nan"), float("inf")
WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
FLOATING = ("hidden_states", "top_k_weights", *WEIGHTS, *BIASES)


def random_case(seed: int) -> Case:
    """Of any shape, kind and routing."""
    draw = random.Random(seed)
    gated, flag = draw.random() < 0.5, (False, True)
    return Case(
        f"random-{seed}", draw.randint(0, 40), draw.randint(1, 5), draw.randint(1, 9), draw.randint(1, 40),
        draw.randint(1, 40), gated, gated and draw.choice(flag), draw.choice(flag),
        draw.choice(["", "both"] if gated else ["", "both", "up", "down"]),
        (draw.choice(["silu", "gelu", "gelu_tanh", "relu2"]), 1.0, None, 0.0), draw.choice(flag),
        draw.choice([0.0, 0.3, 0.9]),
    )  # fmt: skip


QUICK = [BY_ID[name] for name in ("silu", "gpt-oss", "relu2-not-gated")]  # on a GPU each shape compiles its kernels
ALL = [
    *((case, dtype, None) for case in CASES for dtype in (*DTYPES, torch.float64)),
    *((random_case(seed), torch.float32, None) for seed in range(80)),
    *((BY_ID["silu-bias"], dtype, other) for dtype in DTYPES for other in (torch.float32, torch.bfloat16)),
    *(pytest.param(case, torch.bfloat16, torch.float32, marks=pytest.mark.kernels_ci) for case in QUICK),
]


@pytest.mark.parametrize("case, dtype, weights_dtype", ALL, ids=lambda value: getattr(value, "id", str(value)))
def test_matches_reference(grouped_moe, device, case, dtype, weights_dtype):
    """With routing weights of another dtype, too. And the same bits with NaN or infinities in what must not be read by
    the sentinel contract, and in buffers without a row to spare.

    The gradient of a sentinel's routing weight is exactly 0; what else must be, is so in the reference.
    """
    device = "cpu" if dtype == torch.float64 else device
    inputs = make_inputs(case, dtype, device, weights_dtype=weights_dtype)
    got = check(grouped_moe, case, inputs)
    assert not got["top_k_weights"][is_sentinel(inputs.top_k_index, case.E)].any()
    for value, capacity in itertools.product((NAN, INF, -INF), (None, max(1, count_routed(case, inputs)))):
        with poisoned_allocations():
            poisoned = run(grouped_moe, case, poison_sentinels(inputs, case.E, value), capacity=capacity)
        assert_same(poisoned, got)


@pytest.mark.kernels_ci
def test_experts_block_from_its_parts(grouped_moe, device):
    """route, gather, two grouped linears and combine make the block, output and gradients."""
    case, inputs = make("relu2-not-gated", device)
    check(grouped_moe, case, inputs, around=lambda _: parts_of(grouped_moe, case))


def by_op(function):
    """The function where a mode takes note of ops, so that the block is one."""

    def call_noted(*tensors):
        with BaseTorchFunctionMode():
            return function(*tensors)

    return call_noted


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
    "capacity-above-int64": lambda *_: {"around": by_op, "capacity": 2**64},
}
SOME = ["silu-bias", "gpt-oss", "relu2-not-gated", "silu-transposed", "silu-mostly-sentinels", "silu-recompute", "tall"]
SOME += ["aligned-extents"]


@pytest.mark.parametrize("way", WAYS)
@by_dtype
@pytest.mark.parametrize("case_id", SOME)
def test_ways_agree(grouped_moe, device, case_id, dtype, way):
    """Whatever is saved, in how much room, for int32 ids, and each time."""
    case = BY_ID[case_id]
    inputs = make_inputs(case, dtype, device, index_dtype=torch.int32)
    changes = WAYS[way](count_routed(case, inputs), case.T * case.top_k)
    want = run(grouped_moe, case, inputs._replace(top_k_index=inputs.top_k_index.long()), recompute=False)
    for _ in range(2):
        assert_same(run(grouped_moe, case, inputs, **changes), want)


@pytest.mark.parametrize("missing", [1, 5])
def test_capacity_that_does_not_do_raises(grouped_moe, missing):
    """On the CPU at once, with both numbers."""
    case, inputs = make("silu", "cpu")
    rows = count_routed(case, inputs)
    message = rf"^capacity: expected at least the {rows} slots .* local experts, got {rows - missing}$"
    for given in (inputs, with_leaves(inputs)):
        with pytest.raises(RuntimeError, match=message):
            call(grouped_moe, case, given, capacity=rows - missing)


@by_dtype
@pytest.mark.parametrize("case_id", ["silu-bias", "tall-wide", "tall-wide-gpt-oss", "tall-wide-not-gated"])
def test_no_gradient_asked_for(grouped_moe, device, case_id, dtype):
    """Of so many tokens that no kernel for few of them is taken."""
    case, inputs = make(case_id, device, dtype, T=300)
    leaves, want = with_leaves(inputs), run(grouped_moe, case, inputs)["out"]
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
@pytest.mark.parametrize("case_id, dtype", [
    ("gpt-oss", torch.float32),
    ("tall-wide-gpt-oss", torch.bfloat16),
    ("tall-wide-not-gated-transposed-bias-limit-recompute", torch.bfloat16),
], ids=["small", "tall-wide", "tall-wide-not-gated"])  # fmt: skip
def test_frozen_inputs(grouped_moe, device, case_id, dtype, frozen, recompute):
    """A gradient does not depend on which others are asked for; what is frozen gets none."""
    case, inputs = make(case_id, device, dtype, recompute=recompute)
    want = run(grouped_moe, case, inputs)
    for capacity in (None, count_routed(case, inputs)):
        assert_part(run(grouped_moe, case, inputs, frozen, capacity=capacity), want)


VIEWS = {  # of a case's inputs, and their names
    **{layout: (view, Inputs._fields) for layout, view in LAYOUTS.items()},
    "expanded-cotangent": (lambda tensor: tensor[:1, :1].expand_as(tensor), ("dout",)),
    "expanded-ids": (lambda tensor: tensor[:, :1].expand_as(tensor), ("top_k_index",)),
    "expanded-weights": (lambda tensor: tensor[:1].expand_as(tensor), WEIGHTS),
}


@by_fp32_and_bf16
@pytest.mark.parametrize("case_id", ["silu-bias", "gpt-oss", "aligned-extents", "relu2-not-gated"])
@pytest.mark.parametrize("view", VIEWS)
def test_strides(grouped_moe, device, view, case_id, dtype):
    """Any, with NaN between the elements, and a start that is not aligned.

    Strides of 0 come from `out.sum().backward()` and friends; the gradient of an expanded weight must not alias itself.
    """
    case, inputs = make(case_id, device, dtype)
    function, names = VIEWS[view]
    tensors = {name: tensor for name, tensor in inputs._asdict().items() if tensor is not None and name in names}
    check(grouped_moe, case, inputs._replace(**{name: function(tensor) for name, tensor in tensors.items()}))


@by_dtype
def test_limit_that_no_number_reaches(grouped_moe, device, dtype):
    """One beyond fp32, in which activations are computed, clamps nothing."""
    case, inputs = make("silu-bias", device, dtype)
    cases = (case._replace(activation=("silu", 1.0, limit, 0.0)) for limit in (1e39, None))
    assert_same(*(run(grouped_moe, case, inputs) for case in cases))


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=["fp32-weights", "bf16-weights"])
@by_recompute
@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_autocast(grouped_moe, device, backward_inside, recompute, weights_dtype, lora):
    """As `F.linear`: fp32 operands are cast, gradients come back in fp32; routing weights are left alone.

    Factors are not: of their gradients nothing is rounded to bf16.
    """
    case = BY_ID["silu-bias"]._replace(recompute=recompute)
    inputs = make_inputs(case, torch.float32, device, weights_dtype=weights_dtype)
    cast = {name: t.bfloat16() for name, t in inputs.floating().items() if name != "top_k_weights"}
    loras = make_loras(grouped_moe, case, inputs, Pairs()) if lora else {}
    want = run(grouped_moe, case, inputs._replace(dout=inputs.dout.bfloat16(), **cast), **loras)
    for capacity in (None, count_routed(case, inputs)):
        leaves, named = with_leaves(inputs), leaves_of(factors(loras))
        with torch.autocast(device, torch.bfloat16):
            out = call(grouped_moe, case, leaves, capacity=capacity, **with_factors(loras, named))
            linear = torch.nn.functional.linear(inputs.hidden_states, inputs.hidden_states)
        with torch.autocast(device, torch.bfloat16, enabled=backward_inside):
            out.backward(inputs.dout.bfloat16())
        assert out.dtype == linear.dtype == torch.bfloat16
        assert_bitwise("out", out.detach(), want["out"])
        for name, leaf in {**leaves.floating(), **named}.items():
            assert_bitwise(name, leaf.grad, want[name].to(leaf.dtype))


@pytest.mark.parametrize("disabled", [False, True], ids=["fp64", "disabled-inside"])
def test_autocast_that_does_not_apply(grouped_moe, device, disabled):
    case, inputs = make("silu-bias", device) if disabled else make("silu-bias", "cpu", torch.float64)
    device = inputs.dout.device.type
    inside = torch.autocast(device, enabled=False) if disabled else contextlib.nullcontext()
    with torch.autocast(device, torch.bfloat16), inside:
        got = run(grouped_moe, case, inputs)
    assert_same(got, run(grouped_moe, case, inputs))
