"""The fused experts kernels: output and every gradient against the reference."""

import pytest
import torch
from block import call, check, run
from cases import BY_ID, CASES, make_inputs
from compare import assert_part, assert_same
from loops import loop_route
from poison import LAYOUTS, guarded, poison_sentinels


def resized(suffix, *kinds, **sizes):
    """Cases of other sizes."""
    return [BY_ID[kind]._replace(id=f"{kind}-{suffix}", **sizes) for kind in kinds]


# fp32 has tiles of 16 to 64 rows, 64 columns (32 gated) and 32 along K; fp16 of 16 to 128, 32 to 256 and 64 or 128.
SMALL = {"many-experts": {"E": 70, "T": 12, "top_k": 4}, "tall": {"T": 150}}
SMALL.update({case.id: {"T": 180} for case in CASES if case.id.startswith("tall-wide")})  # 84 rows of each expert
SHAPES = [case._replace(**SMALL.get(case.id, {})) for case in CASES]
SHAPES += resized("no-token", "gpt-oss", "silu-recompute", T=0)
SHAPES += resized("no-row", "gpt-oss", "silu-recompute", T=3, sentinels=1.0)
# Rows, columns and K of more than one tile, none of them a multiple; two programs loop over the tiles.
SHAPES += resized("tiles", "silu-transposed", "gpt-oss", "relu2-not-gated", T=60, top_k=3, E=2, H=70, I=75)
# H and I are multiples of every tile: the branches without masks along K.
WHOLE = resized("whole", "silu-interleaved", "silu-not-gated-limit", T=20, H=128, I=128)
FP16 = ["silu-interleaved", "gpt-oss", "silu-bias", "relu2-not-gated", "gelu-not-gated", "gelu-tanh-limit"]
FP16 += ["odd-extents", "aligned-extents", "one-token", "relu-not-gated-limit"]
KINDS = [(case, torch.float32) for case in SHAPES + WHOLE]
KINDS += [(case, torch.float16) for case in [BY_ID[case_id] for case_id in FP16] + WHOLE]
SOME = ["silu-recompute", "gpt-oss", "relu2-not-gated", "odd-extents"]


def guarded_inputs(inputs):
    """Each tensor in the middle of NaN."""
    tensors = {**inputs.floating(), "dout": inputs.dout}
    return inputs._replace(**{name: guarded(tensor) for name, tensor in tensors.items()})


def check_poisoned(grouped_moe, case, dtype, index_dtype=torch.int64, weights_dtype=None):
    """Against the reference, with NaN in all that must not be read."""
    inputs = make_inputs(case, dtype, "cpu", index_dtype, weights_dtype)
    check(grouped_moe, case, inputs, guarded_inputs(poison_sentinels(inputs, case.E)))


@pytest.mark.parametrize("case, dtype", KINDS, ids=lambda value: getattr(value, "id", str(value)))
def test_matches_reference(grouped_moe, case, dtype):
    check_poisoned(grouped_moe, case, dtype)


@pytest.mark.parametrize("case", [case for case in SHAPES if case.id.startswith("tall-wide")], ids=lambda case: case.id)
def test_reads_weights_by_descriptor(grouped_moe, descriptors, case):
    """Aligned ones of tall tiles: by each fused product, and by the others, whose rows come so, too."""
    inputs = make_inputs(case, torch.float16, "cpu")
    check(grouped_moe, case, inputs, poison_sentinels(inputs, case.E))
    assert len(descriptors) == 6 + case.recompute


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float16], ids=["fp32-weights", "fp16-weights"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_dtypes_of_routing(grouped_moe, weights_dtype, index_dtype):
    check_poisoned(grouped_moe, BY_ID["silu-bias"], torch.float16, index_dtype, weights_dtype)


def test_no_gradient_past_the_limit(grouped_moe):
    """Of experts without a gate, also where the gradient that comes in is infinite."""
    case = BY_ID["silu-not-gated-limit"]._replace(T=4, top_k=1, E=1, sentinels=0.0)
    inputs = make_inputs(case, torch.float32, "cpu")
    ones = {name: torch.ones_like(getattr(inputs, name)) for name in ("hidden_states", "gate_up_proj")}
    inputs = inputs._replace(**ones, dout=torch.full_like(inputs.dout, float("inf")))
    got = run(grouped_moe, case, inputs)
    assert not any(got[name].any() for name in ones)


HALVES = "gpt-oss-halves-recompute"


@pytest.mark.parametrize("case_id, half", [("relu-not-gated-limit", 0), (HALVES, 0), (HALVES, 1)])
def test_nan_stays_one(grouped_moe, case_id, half):
    """Past limits and kinks, of gate and of up."""
    case = BY_ID[case_id]._replace(T=2, top_k=1, E=1, sentinels=0.0)
    inputs = make_inputs(case, torch.float32, "cpu")
    inputs.gate_up_proj[:, half * case.I : (half + 1) * case.I] = float("nan")
    assert call(grouped_moe, case, inputs).isnan().all()


@pytest.mark.parametrize("case_id", [*SOME, "silu", "silu-bias", "silu-transposed"])
def test_bitwise_the_same(grouped_moe, case_id):
    """With recomputing and without; in a second backward of one forward; without gradients."""
    case = BY_ID[case_id]
    inputs = make_inputs(case, torch.float32, "cpu")
    want = run(grouped_moe, case, inputs)
    assert_same(run(grouped_moe, case._replace(recompute=not case.recompute), inputs), want)
    assert_same(run(grouped_moe, case, inputs, before=1), want)
    assert torch.equal(call(grouped_moe, case, inputs), want["out"])


NAMES = ("hidden_states", "top_k_weights", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
UP = ("hidden_states", "gate_up_proj", "gate_up_proj_bias")  # whose gradients are made of that of the pre-activation
FROZEN = [(), UP[1:2], UP[:2], UP, (*UP, "down_proj"), (*UP, "top_k_weights")]
FROZEN += [tuple(other for other in NAMES if other != name) for name in NAMES]


@pytest.fixture(scope="module")
def full_run(grouped_moe):
    """A case, its inputs, and the output with all gradients."""
    case = BY_ID["gpt-oss"]
    torch.manual_seed(0)
    inputs = make_inputs(case, torch.float32, "cpu")
    return case, inputs, run(grouped_moe, case, inputs)


@pytest.mark.parametrize("frozen", FROZEN, ids=",".join)
def test_only_gradients_asked_for(grouped_moe, full_run, frozen):
    """Bitwise those of the full run, also if what was saved must not be overwritten."""
    case, inputs, full = full_run
    for keep in (False, True):
        assert_part(run(grouped_moe, case, inputs, frozen, keep=keep), full)


CAPPED = ["silu", "silu-mostly-sentinels", "silu-recompute", "gpt-oss", "gpt-oss-halves-recompute", "relu2-not-gated"]
CAPPED += ["silu-transposed", "not-gated-up-bias-only", "odd-extents"]


@pytest.mark.parametrize("fits", [True, False], ids=["exact", "overflow"])
@pytest.mark.parametrize("case_id", CAPPED)
def test_capacity(grouped_moe, unchecked, case_id, fits):
    """Just enough changes nothing. With less, every kernel stays in bounds, and the slots that have room are computed
    as if the others were not: that is no result that anybody sees, but it is made of nothing that is not written.
    """
    case = BY_ID[case_id]
    inputs = make_inputs(case, torch.float32, "cpu")
    offsets, _, places = loop_route(inputs.top_k_index, case.E)
    capacity = offsets[-1] if fits else max(1, offsets[-1] // 2)
    poisoned = guarded_inputs(poison_sentinels(inputs, case.E))
    got = run(grouped_moe, case, poisoned, capacity=capacity)
    assert [counted for counted, _ in unchecked] == [fits] and f"got {capacity}" in unchecked[0][1]
    has_room = torch.tensor([0 <= row < capacity for row in places]).view(inputs.top_k_index.shape)
    inputs = inputs._replace(top_k_index=inputs.top_k_index.masked_fill(~has_room, -1))
    assert_same(got, run(grouped_moe, case, inputs))


def strided(inputs):
    """All but the routing transposed in memory, with NaN between the elements; routing weights come contiguous."""
    view, routing = LAYOUTS["transposed-apart"], ("top_k_index", "top_k_weights")
    given = {name: t for name, t in inputs._asdict().items() if t is not None and name not in routing}
    return inputs._replace(**{name: view(tensor) for name, tensor in given.items()})


def expanded(inputs):
    """With one number for the whole cotangent."""
    return inputs._replace(dout=inputs.dout[:1, :1].expand(inputs.dout.shape))


@pytest.mark.parametrize("case_id, change", [*((case_id, strided) for case_id in SOME), ("gpt-oss", expanded)])
def test_strides(grouped_moe, case_id, change):
    check(grouped_moe, BY_ID[case_id], change(make_inputs(BY_ID[case_id], torch.float32, "cpu")))
