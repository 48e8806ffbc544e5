"""grouped_mlp: each scale's gradient, gradients that are not asked for, recompute; see test_sorted_rows.py."""

import pytest
import torch
from cases import BY_ID
from compare import assert_bitwise, assert_close, assert_part, assert_same
from marks import by_dtype, by_recompute
from mlps import BY_MLP, NAMES, PER_GROUP, Mlp, call
from operations import record
from sorted_rows import SCALES, run, run_reference, with_leaves

SOME = [BY_MLP[name] for name in ("two-scales", "gpt-oss", "relu2-not-gated")]
some = pytest.mark.parametrize("mlp", SOME, ids=lambda mlp: mlp.id)


@pytest.mark.parametrize("scales", ["two", "same"])
@pytest.mark.parametrize("kind", ["silu-bias", "gpt-oss", "gelu-not-gated", "relu2-not-gated"])
def test_gradcheck(grouped_moe, kind, scales):
    """Finite differences in fp64, independent of the reference's autograd."""
    mlp = Mlp("gradcheck", BY_ID[kind]._replace(H=4, I=3), scales, sizes=(2, 0, 3), tail=2, head=1)
    inputs = with_leaves(mlp.make(torch.float64, "cpu"))

    def function(*leaves):
        changed = dict(zip(inputs.given(), leaves))
        return call(grouped_moe, mlp, inputs.map(lambda name, _: changed[name]))

    assert torch.autograd.gradcheck(function, list(inputs.given().values()))


@by_recompute
@pytest.mark.parametrize("name", SCALES)
def test_scales_are_not_rounded(grouped_moe, device, name, recompute):
    """Neither an fp32 scale nor its gradient passes through the bf16 of the operands."""
    mlp = BY_MLP["two-scales"]
    inputs = mlp.make(torch.bfloat16, device, torch.float32)
    rounded = inputs.replace(**{name: inputs.tensors[name].bfloat16().float()})
    got, other = (run(grouped_moe, mlp, given, recompute=recompute) for given in (inputs, rounded))
    assert not torch.equal(got["y"], other["y"])
    assert not torch.equal(got[name], got[name].bfloat16().float())
    if name == "bias_scales":
        want = run_reference(grouped_moe, mlp, inputs)[name]
        assert_close(name, got[name], want, torch.float32, inner_products=True)


def test_scales_of_two_dtypes(grouped_moe, device):
    inputs = BY_MLP["two-scales"].make(torch.bfloat16, device)
    wide = inputs.replace(bias_scales=inputs.tensors["bias_scales"].float())
    got, same = run(grouped_moe, BY_MLP["two-scales"], wide), run(grouped_moe, BY_MLP["two-scales"], inputs)
    assert got["bias_scales"].dtype == torch.float32
    assert_bitwise("bias_scales", got["bias_scales"].bfloat16(), same["bias_scales"])
    assert_same({**got, "bias_scales": same["bias_scales"]}, same)


FROZEN = [tuple(name for name in NAMES if name != only) for only in NAMES] + [(name,) for name in NAMES]
FROZEN += [SCALES, PER_GROUP, PER_GROUP[:2], PER_GROUP[2:], ("x", "gate_up_proj"), ("down_proj", "activation_scales")]


@by_recompute
@pytest.mark.parametrize("frozen", FROZEN, ids="-".join)
def test_only_gradients_asked_for(grouped_moe, device, frozen, recompute):
    """A gradient does not depend on which others are asked for; what is frozen gets none."""
    mlp = BY_MLP["gpt-oss"]
    inputs = mlp.make(torch.float32, device)
    want = run(grouped_moe, mlp, inputs, recompute=recompute)
    got = run(grouped_moe, mlp, inputs, frozen=frozen, recompute=recompute)
    assert want.keys() - got.keys() == set(frozen)
    assert_part(got, want)


@by_dtype
@some
def test_recompute_changes_nothing(grouped_moe, device, mlp, dtype):
    inputs = mlp.make(dtype, device)
    assert_same(run(grouped_moe, mlp, inputs, recompute=True), run(grouped_moe, mlp, inputs, recompute=False))


@some
def test_recompute_saves_inputs_alone(grouped_moe, device, mlp):
    inputs = with_leaves(mlp.make(torch.float32, device))
    _, saved = record(lambda: call(grouped_moe, mlp, inputs, recompute=True))
    given = {tensor.data_ptr() for tensor in inputs.given().values()}
    assert not [t.shape for t in saved if t.data_ptr() not in given and t.is_floating_point() and t.numel()]
