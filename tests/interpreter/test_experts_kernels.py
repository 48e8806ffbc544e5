"""The fused experts kernels: output and every gradient against the reference, under poison, bounds checked."""

import pytest
import torch
from block import Result, assert_matches, assert_same, run_reference
from cases import BY_ID, CASES, make_inputs
from poison import guarded, poison_sentinels

from interpreter.guard import GuardedAllocations

# fp32 has tiles of 16 to 64 rows, 64 columns (32 gated) and 32 along K; fp16 of 16 to 128, 32 to 256 and 64 or 128.
SMALL = {"many-experts": {"E": 70, "T": 5, "top_k": 4}, "tall": {"T": 150}}
SHAPES = [case._replace(**SMALL.get(case.id, {})) for case in CASES]
FP16 = ["silu-interleaved", "gpt-oss", "silu-bias", "relu2-not-gated", "gelu-not-gated", "gelu-tanh-limit"]
FP16 += ["odd-extents", "aligned-extents", "one-token", "relu-not-gated-limit"]
SOME = ["silu-recompute", "gpt-oss", "relu2-not-gated", "odd-extents"]
# The pipeline's gradients, and the inputs that they are of in the order of `Inputs`.
GRADIENTS = {
    "x": "hidden_states", "act_scales": "top_k_weights", "up": "gate_up_proj", "down": "down_proj",
    "up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias",
}  # fmt: skip


def block_of(module, grouped_moe, case, inputs):
    """The package's block of a case."""
    weights = inputs.gate_up_proj, inputs.down_proj, inputs.gate_up_proj_bias, inputs.down_proj_bias
    kind = grouped_moe.Activation(*case.activation), case.gated, case.interleaved, case.transposed, case.recompute
    return module("block").Block(*weights, *kind)


def run_kernels(module, grouped_moe, case, inputs, frozen=(), passes=1, capacity=None, spent=False):
    """Forward and backward by the backend; with more passes, the last of several backward passes.

    spent: it may overwrite what was saved, and has to give back its memory.
    """
    pipeline, kernels = module("pipeline"), module("backends.triton")
    block = block_of(module, grouped_moe, case, inputs)
    x, ids, weights, dout = inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights, inputs.dout
    asked = [name for name in inputs.floating() if name not in frozen]
    needs = {field: name in asked for field, name in GRADIENTS.items()}
    needs = module("block").Needs(**needs, bias_scales=False)
    with GuardedAllocations(*inputs):
        rows = kernels.route(ids, case.E, x.dtype, capacity)
        out, preact = pipeline.forward(kernels, block, x, rows, weights, None, save=not case.recompute)
        for _ in range(passes):
            given = preact.clone() if spent else preact
            grads = pipeline.backward(kernels, block, dout, x, rows, weights, None, given, needs, overwrite=spent)
            assert not spent or given.untyped_storage().nbytes() == 0
        out, grads = out.clone(), {name: getattr(grads, field) for field, name in GRADIENTS.items()}
        assert [name for name, grad in grads.items() if grad is not None] == asked
        return Result(out, {name: grads[name].clone() for name in asked})


def guarded_inputs(inputs):
    """Each tensor in the middle of NaN."""
    tensors = {name: t for name, t in inputs._asdict().items() if t is not None and t.is_floating_point()}
    return inputs._replace(**{name: guarded(t) for name, t in tensors.items()})


def check(module, grouped_moe, case, dtype):
    """Against the reference, with NaN in all that the contract says is not read."""
    inputs = make_inputs(case, dtype, "cpu")
    got = run_kernels(module, grouped_moe, case, guarded_inputs(poison_sentinels(inputs, case.E)))
    with torch.enable_grad():
        want = run_reference(grouped_moe, case, inputs)
    assert_matches(got, want, dtype)


def test_no_gradient_past_the_limit(module, grouped_moe):
    """Of experts without a gate, also where the gradient that comes in is infinite."""
    case = BY_ID["silu-not-gated-limit"]._replace(T=4, top_k=1, E=1, sentinels=0.0)
    inputs = make_inputs(case, torch.float32, "cpu")
    ones = {name: torch.ones_like(getattr(inputs, name)) for name in ("hidden_states", "gate_up_proj")}
    inputs = inputs._replace(**ones, dout=torch.full_like(inputs.dout, float("inf")))
    got = run_kernels(module, grouped_moe, case, inputs)
    assert not any(got.grads[name].any() for name in ones)


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.id)
def test_fp32_matches_reference(module, grouped_moe, case):
    check(module, grouped_moe, case, torch.float32)


@pytest.mark.parametrize("case_id", FP16)
def test_fp16_matches_reference(module, grouped_moe, case_id):
    check(module, grouped_moe, BY_ID[case_id], torch.float16)


@pytest.mark.parametrize("case_id", ["silu-transposed", "gpt-oss", "relu2-not-gated"])
def test_several_tiles_in_every_direction(module, grouped_moe, case_id):
    """Rows, columns and K of more than one tile, none of them a multiple; two programs loop over the tiles."""
    case = BY_ID[case_id]._replace(T=60, top_k=3, E=2, H=70, I=75)
    check(module, grouped_moe, case, torch.float32)


@pytest.mark.parametrize("case_id", ["silu-interleaved", "silu-not-gated-limit"])
def test_multiples_of_tiles(module, grouped_moe, case_id):
    """H and I are multiples of every tile: the branches without masks along K."""
    check(module, grouped_moe, BY_ID[case_id]._replace(T=20, H=128, I=128), torch.float32)
    check(module, grouped_moe, BY_ID[case_id]._replace(T=20, H=128, I=128), torch.float16)


def test_route_in_three_launches(module, grouped_moe, monkeypatch):
    """The sort for many slots feeds the block."""
    monkeypatch.setattr(module("backends.triton.routing"), "_FEW_SLOTS", 0)
    case = BY_ID["gpt-oss"]._replace(T=300, top_k=2, E=3, H=20, I=12)
    check(module, grouped_moe, case, torch.float32)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("case_id", ["gpt-oss", "silu-recompute"])
def test_no_routed_row(module, grouped_moe, case_id, tokens):
    case = BY_ID[case_id]._replace(T=tokens)
    inputs = make_inputs(case, torch.float32, "cpu")
    inputs = inputs._replace(top_k_index=torch.full_like(inputs.top_k_index, case.E))
    got = run_kernels(module, grouped_moe, case, poison_sentinels(inputs, case.E))
    for name, tensor in (("out", got.out), *got.grads.items()):
        assert not tensor.any(), name
    assert got.out.shape == (tokens, case.H)


@pytest.mark.parametrize("case_id", SOME)
def test_recompute_changes_nothing(module, grouped_moe, case_id):
    case = BY_ID[case_id]
    inputs = make_inputs(case, torch.float32, "cpu")
    runs = [run_kernels(module, grouped_moe, case._replace(recompute=flag), inputs) for flag in (False, True)]
    assert_same(*runs)


@pytest.mark.parametrize("case_id", SOME + ["silu"])
def test_backward_leaves_what_was_saved(module, grouped_moe, case_id):
    """A second backward pass of one forward (retain_graph) finds the pre-activation as it was."""
    case = BY_ID[case_id]
    inputs = make_inputs(case, torch.float32, "cpu")
    runs = [run_kernels(module, grouped_moe, case, inputs, passes=passes) for passes in (1, 2)]
    assert_same(*runs)


UP = ("hidden_states", "gate_up_proj", "gate_up_proj_bias")  # whose gradients are made of that of the pre-activation


@pytest.mark.parametrize("frozen", [(), UP[1:2], UP[:2], UP, (*UP, "down_proj"), (*UP, "top_k_weights")], ids=str)
def test_what_was_saved_may_be_overwritten(module, grouped_moe, frozen):
    case = BY_ID["gpt-oss"]
    inputs = make_inputs(case, torch.float32, "cpu")
    runs = [run_kernels(module, grouped_moe, case, inputs, frozen, spent=spent) for spent in (False, True)]
    assert_same(*runs)


@pytest.mark.parametrize("only", [0, 1, 2, 3, 4, 5])
def test_only_gradients_asked_for(module, grouped_moe, only):
    """Each alone: bitwise that of the full run."""
    case = BY_ID["gpt-oss"]
    inputs = make_inputs(case, torch.float32, "cpu")
    full = run_kernels(module, grouped_moe, case, inputs)
    name = list(full.grads)[only]
    got = run_kernels(module, grouped_moe, case, inputs, frozen=[other for other in full.grads if other != name])
    assert_same(got, Result(full.out, {name: full.grads[name]}))


def _strided(tensor):
    """Transposed in memory, with NaN between the elements."""
    wide = torch.full((*tensor.shape, 2), float("nan"), dtype=tensor.dtype).transpose(-2, -3).contiguous()
    wide.transpose(-2, -3)[..., 0] = tensor
    return wide.transpose(-2, -3)[..., 0]


@pytest.mark.parametrize("case_id", SOME)
def test_strides(module, grouped_moe, case_id):
    """Any strides of hidden states, weights, biases and cotangent; routing weights come contiguous."""
    case = BY_ID[case_id]
    inputs = make_inputs(case, torch.float32, "cpu")
    names = ["hidden_states", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias", "dout"]
    changed = {name: _strided(getattr(inputs, name)) for name in names if getattr(inputs, name) is not None}
    got = run_kernels(module, grouped_moe, case, inputs._replace(**changed))
    with torch.enable_grad():
        assert_matches(got, run_reference(grouped_moe, case, inputs), torch.float32)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float16], ids=["fp32-weights", "fp16-weights"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_dtypes_of_routing(module, grouped_moe, weights_dtype, index_dtype):
    case = BY_ID["silu-bias"]
    inputs = make_inputs(case, torch.float16, "cpu", index_dtype, weights_dtype)
    got = run_kernels(module, grouped_moe, case, poison_sentinels(inputs, case.E))
    with torch.enable_grad():
        want = run_reference(grouped_moe, case, inputs)
    assert_matches(got, want, torch.float16, weights_dtype)


def test_expanded_cotangent(module, grouped_moe):
    case = BY_ID["gpt-oss"]
    inputs = make_inputs(case, torch.float32, "cpu")
    inputs = inputs._replace(dout=inputs.dout[:1, :1].expand(case.T, case.H))
    got = run_kernels(module, grouped_moe, case, inputs)
    with torch.enable_grad():
        assert_matches(got, run_reference(grouped_moe, case, inputs), torch.float32)
