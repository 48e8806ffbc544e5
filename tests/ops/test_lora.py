"""grouped_mm_experts with low-rank pairs: output and every gradient against the reference with merged weights in fp64.

Nothing of rows and experts that take no part is read, and no gradient depends on which others are asked for.
"""

import pytest
import torch
from block import call, check, count_routed, reference_out, run, with_leaves
from cases import BY_ID, Case, make_inputs
from compare import assert_close, assert_part, assert_same
from marks import by_fp32_and_bf16, by_recompute
from operations import count_flops, record
from pairs import LAYOUTS, Pairs, factors, make_loras, with_factors
from poison import dirty_allocator, poison_sentinels, poisoned_allocations

NAN = float("nan")
FP32, BF16 = torch.float32, torch.bfloat16
UP, DOWN = ("gate_up_lora",), ("down_lora",)

PAIRS = {
    "rank-1": ("silu", Pairs(rank=1)),
    "rank-3": ("silu", Pairs(rank=3)),
    "rank-8": ("silu-recompute", Pairs()),
    "rank-40": ("silu", Pairs(rank=40)),
    "up": ("silu", Pairs(given=UP)),
    "down": ("silu-recompute", Pairs(given=DOWN)),
    "a-shared": ("silu", Pairs(shared="a")),
    "b-shared": ("silu-transposed", Pairs(rank=3, shared="b")),
    "both-shared": ("silu", Pairs(shared="ab")),
    "transposed-bias": ("silu-interleaved-transposed-recompute", Pairs(rank=3)),
    "bias": ("silu-bias", Pairs()),
    "gpt-oss": ("gpt-oss", Pairs()),
    "not-gated": ("relu2-not-gated", Pairs(rank=3)),
    "one-bias": ("not-gated-up-bias-only", Pairs(given=DOWN)),
    "one-token": ("one-token", Pairs(rank=40)),
    "one-expert": ("one-expert", Pairs()),
    "many-experts": ("many-experts", Pairs(rank=3)),
    "odd-extents": ("odd-extents", Pairs(rank=5)),
    "extents-of-one": ("extents-of-one", Pairs(rank=1)),
    "adapters": ("silu", Pairs(adapters=3)),
    "adapters-of-one": ("silu-recompute", Pairs(rank=1, adapters=1)),
    "adapters-of-one-rank-8": ("silu", Pairs(adapters=1)),
    "adapters-up": ("silu-transposed", Pairs(rank=5, given=UP, adapters=2)),
    "adapters-shared": ("silu-bias", Pairs(rank=3, shared="a", adapters=2)),
    "adapters-gpt-oss": ("gpt-oss", Pairs(rank=16, adapters=5)),
    "adapters-one-token": ("one-token", Pairs(rank=3, adapters=2)),
    "tall-wide": ("tall-wide", Pairs(rank=16)),
    "tall-wide-rank-64": ("tall-wide-transposed", Pairs(rank=64)),
    "tall-wide-rank-256": ("tall-wide-not-gated", Pairs(rank=256)),
    "tall-wide-gpt-oss": ("tall-wide-gpt-oss", Pairs(rank=3, adapters=4)),
    "tall-wide-shared": ("tall-wide-interleaved", Pairs(shared="ab", adapters=2)),
}
by_pairs = pytest.mark.parametrize("case_id, pairs", PAIRS.values(), ids=PAIRS)
SOME = ("rank-3", "both-shared", "gpt-oss", "not-gated", "adapters", "tall-wide")
some_pairs = pytest.mark.parametrize("case_id, pairs", [PAIRS[name] for name in SOME], ids=SOME)


def make(grouped_moe, case_id, pairs, dtype, device, factor_dtype=None, **changes):
    """(case, inputs, the arguments of its LoRAs). Kinks would need a pre-activation that two bytes hold exactly.

    Results that are single numbers have positive terms alone: they would cancel.
    """
    case = BY_ID[case_id]._replace(**changes)
    if case.kinked and dtype.itemsize == 2:
        case = case._replace(activation=(*case.activation[:2], None, case.activation[3]))
    inputs = make_inputs(case, dtype, device)
    arguments = make_loras(grouped_moe, case, inputs, pairs, factor_dtype)
    if case.H == case.I == 1:
        positive = {name: tensor.abs() for name, tensor in (*inputs.floating().items(), ("dout", inputs.dout))}
        inputs = inputs._replace(**positive)
        arguments = with_factors(arguments, {name: factor.abs() for name, factor in factors(arguments).items()})
    return case, inputs, arguments


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64], ids=["fp32", "bf16", "fp64"])
@by_pairs
def test_matches_merged_weights(grouped_moe, device, case_id, pairs, dtype):
    """Also without gradients, where few tokens take kernels of their own. fp64 on the CPU alone."""
    device = "cpu" if dtype == torch.float64 else device
    case, inputs, arguments = make(grouped_moe, case_id, pairs, dtype, device)
    check(grouped_moe, case, inputs, **arguments)
    want = reference_out(grouped_moe, case, inputs, arguments)
    assert_close("inference", call(grouped_moe, case, inputs, **arguments), want, dtype)


@pytest.mark.parametrize("tokens", [37, 1])
def test_scaling_comes_before_rounding(grouped_moe, device, tokens):
    """Rows that `a` projects may be past the range of fp16, if their scaled ones are not."""
    case, inputs, arguments = make(grouped_moe, "silu", Pairs(), torch.float16, device, T=tokens)
    factor = 5e4
    for name, lora in arguments.items():
        arguments[name] = lora._replace(a=lora.a * factor, scaling=lora.scaling / factor)
    projected = torch.einsum("tk,erk->etr", inputs.hidden_states.double(), arguments["gate_up_lora"].a.double())
    assert projected.abs().max() > torch.finfo(torch.float16).max
    want = reference_out(grouped_moe, case, inputs, arguments)
    assert_close("out", call(grouped_moe, case, inputs, **arguments), want, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [Pairs(rank=16), Pairs(rank=64), Pairs(rank=5, adapters=3)], ids=str)
@pytest.mark.parametrize("skewed", [False, True])
def test_many_experts_of_many_rows(grouped_moe, device, pairs, skewed):
    """Of which one kernel may make b's gradient and what leads to the others: these are the same without b's.

    skewed: two experts have so many rows that several programs share them.
    """
    case = Case("many-rows", T=1040, top_k=8, E=128, H=520, I=72)
    inputs = make_inputs(case, BF16, device)
    if skewed:
        inputs.top_k_index[:, 0], inputs.top_k_index[::2, 1] = 5, 126
    arguments = make_loras(grouped_moe, case, inputs, pairs)
    got = check(grouped_moe, case, inputs, **arguments)
    frozen = ("gate_up_lora.b", "down_lora.b")
    assert_part(run(grouped_moe, case, inputs, frozen, **arguments), got)


@pytest.mark.parametrize("dtype, factor_dtype", [(BF16, FP32), (FP32, BF16)], ids=["fp32-on-bf16", "bf16-on-fp32"])
@some_pairs
def test_factors_of_another_dtype(grouped_moe, device, case_id, pairs, dtype, factor_dtype):
    """As peft makes them: their gradients come in their own dtype."""
    case, inputs, arguments = make(grouped_moe, case_id, pairs, dtype, device, factor_dtype)
    check(grouped_moe, case, inputs, **arguments)


@pytest.mark.parametrize("adapters", [0, 2])
def test_gradcheck(grouped_moe, adapters):
    """Finite differences in fp64, independent of the reference's autograd."""
    case = BY_ID["silu-bias"]._replace(T=4, top_k=2, E=3, H=4, I=3)
    inputs = make_inputs(case, torch.float64, "cpu")
    arguments = make_loras(grouped_moe, case, inputs, Pairs(rank=2, adapters=adapters))
    named = factors(arguments)

    def function(x, *changed):
        changed = with_factors(arguments, dict(zip(named, changed)))
        return call(grouped_moe, case, inputs._replace(hidden_states=x), **changed)

    tensors = [t.requires_grad_() for t in (inputs.hidden_states, *named.values())]
    assert torch.autograd.gradcheck(function, tensors)


BASE = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
ALL = ("hidden_states", "top_k_weights", *BASE, *(f"{n}.{f}" for n in (*UP, *DOWN) for f in "ab"))
FROZEN = {only: tuple(name for name in ALL if name != only) for only in ALL}
FROZEN.update({"factors": ALL[:-4], "as-peft": BASE, "no-factor": ALL[-4:], "no-a": ("gate_up_lora.a", "down_lora.a")})


@by_recompute
@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("case_id, adapters", [("silu-bias", 0), ("tall-wide-gpt-oss", 3)], ids=["one", "adapters"])
def test_frozen(grouped_moe, device, case_id, adapters, frozen, recompute):
    """A gradient does not depend on which others are asked for; what is frozen gets none."""
    case, inputs, arguments = make(grouped_moe, case_id, Pairs(adapters=adapters), FP32, device, recompute=recompute)
    full = run(grouped_moe, case, inputs, **arguments)
    assert_part(run(grouped_moe, case, inputs, frozen, **arguments), full)


@by_fp32_and_bf16
@some_pairs
def test_nothing_of_a_sentinel_is_read(grouped_moe, device, case_id, pairs, dtype):
    """NaN in rows and in experts that take no part, their factors included, and in all fresh memory."""
    case, inputs, arguments = make(grouped_moe, case_id, pairs, dtype, device, sentinels=0.6)
    inputs = inputs._replace(top_k_index=torch.where(inputs.top_k_index == 1, -1, inputs.top_k_index))
    want = run(grouped_moe, case, inputs, **arguments)
    wide = {name: t.clone() for name, t in factors(arguments).items()}
    for factor in wide.values():
        if factor.shape[-3] > 1:
            factor[..., 1, :, :] = NAN
    with poisoned_allocations():
        got = run(grouped_moe, case, poison_sentinels(inputs, case.E), **with_factors(arguments, wide))
    assert_same(got, want)
    for name, factor in wide.items():
        assert factor.shape[-3] == 1 or not got[name][..., 1, :, :].any(), name
    dirty_allocator(device)
    assert_same(run(grouped_moe, case, inputs, **arguments), want)


@pytest.mark.parametrize("adapters, rank", [(1, 3), (3, 5), (1, 40)])
def test_projected_rows_are_padded_with_zeros(module, device, adapters, rank):
    """In fresh memory, also times routing weights."""
    x, weights = torch.randn(6, 48, device=device), torch.rand(6, 3, device=device)
    kernels, ids = module("backends").backend_of(x), torch.randint(-1, 5, (6, 3), device=device)
    factor, ranks = torch.randn(adapters, 5, 48, rank, device=device), adapters * rank
    with poisoned_allocations():
        rows = kernels.route(ids, 5, x.dtype)
        if adapters > 1:
            rows = rows._replace(adapters=torch.arange(6, device=device) % adapters)
        projected = kernels.project(x, factor, rows, scaling=0.5, of_tokens=True, scales=weights)
    for z in projected:
        routed = z[: int(rows.group_offsets[-1])]
        assert z.shape[1] % 8 == 0 and routed[:, :ranks].any(1).all() and not routed[:, ranks:].any()


@pytest.mark.parametrize("adapters", [0, 2])
@pytest.mark.parametrize("tokens", [0, 6])
def test_no_routed_row(grouped_moe, device, tokens, adapters):
    """R = 0, T = 0 included: zeros everywhere, whatever the tensors hold."""
    case, inputs, arguments = make(grouped_moe, "silu", Pairs(rank=3, adapters=adapters), FP32, device, T=tokens)
    inputs = poison_sentinels(inputs._replace(top_k_index=torch.full_like(inputs.top_k_index, -1)), case.E)
    with poisoned_allocations():
        got = run(grouped_moe, case, inputs, **arguments)
    for name, tensor in got.items():
        assert not tensor.any(), name


def test_rows_without_an_adapter_are_those_of_the_base(grouped_moe, device):
    """Whatever number outside [0, L) says so; and int32 means the same."""
    case, inputs, arguments = make(grouped_moe, "silu", Pairs(adapters=2), FP32, device)
    index = arguments["adapter_index"]
    none = (index < 0) | (index >= 2)
    assert none.any() and not none.all()
    want = run(grouped_moe, case, inputs, **arguments)
    assert_close("base", want["out"][none], call(grouped_moe, case, inputs).double()[none], FP32)
    for other in (-7, 2, 2**31 - 1):
        changed = {**arguments, "adapter_index": index.masked_fill(none, other).int()}
        assert_same(run(grouped_moe, case, inputs, **changed), want)


@by_fp32_and_bf16
@some_pairs
def test_ways_agree(grouped_moe, device, case_id, pairs, dtype):
    """Whatever is saved, in how much room, and each time."""
    case, inputs, arguments = make(grouped_moe, case_id, pairs, dtype, device)
    want = run(grouped_moe, case, inputs, **arguments)
    for changes in ({"recompute": not case.recompute}, {"capacity": count_routed(case, inputs)}, *5 * [{}]):
        assert_same(run(grouped_moe, case, inputs, **arguments, **changes), want)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("adapters", [0, 2])
def test_strides(grouped_moe, device, layout, adapters):
    case, inputs, arguments = make(grouped_moe, "silu-bias", Pairs(adapters=adapters), FP32, device)
    changed = with_factors(arguments, {name: layout(t) for name, t in factors(arguments).items()})
    assert_same(run(grouped_moe, case, inputs, **changed), run(grouped_moe, case, inputs, **arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [5, 16])
def test_factors_as_peft_stores_them(grouped_moe, device, rank):
    """In fp32, beside bf16 rows: the results of contiguous ones."""
    case = Case("many-rows", T=1040, top_k=8, E=128, H=520, I=72)
    inputs = make_inputs(case, BF16, device)
    arguments = make_loras(grouped_moe, case, inputs, Pairs(rank=rank), FP32)
    changed = with_factors(arguments, {name: LAYOUTS["peft"](t) for name, t in factors(arguments).items()})
    assert_same(run(grouped_moe, case, inputs, **changed), run(grouped_moe, case, inputs, **arguments))


@pytest.mark.parametrize("pairs", [Pairs(rank=5), Pairs(rank=16, adapters=3), Pairs(given=DOWN)], ids=str)
@by_recompute
@pytest.mark.parametrize("frozen", ["", "b"], ids=["trained", "b-frozen"])
def test_saved_memory(grouped_moe, device, pairs, recompute, frozen):
    """With the base frozen: the hidden states, the pre-activation, and the rank columns of each b for each row.

    With recompute the hidden states and the columns of the second LoRA; nothing for a b that is frozen.
    """
    case, inputs, arguments = make(grouped_moe, "tall-wide", pairs, BF16, device, recompute=recompute)
    leaves = with_leaves(inputs, ("gate_up_proj", "down_proj"))
    named = {name: t.requires_grad_(name[-1] != frozen) for name, t in factors(arguments).items()}
    _, saved = record(lambda: call(grouped_moe, case, leaves, **with_factors(arguments, named)))
    given = {t.data_ptr() for t in (*leaves, *named.values()) if t is not None}
    own = [t for t in saved if t.is_floating_point() and t.numel() and t.data_ptr() not in given]
    rank = -(-pairs.rank * max(1, pairs.adapters) // 8) * 8
    trained = () if frozen else DOWN if recompute else pairs.given
    columns = case.preact_width * (not recompute) + rank * len(trained)
    assert sum(t.numel() for t in own) == case.T * case.top_k * columns


@by_recompute
@pytest.mark.parametrize("adapters", [0, 2])
@pytest.mark.parametrize("name", ["down_lora.b", "gate_up_lora.a"])
def test_flops_of_the_gradient_of_a_factor(grouped_moe, device, name, adapters, recompute):
    """2 M N K of each product: of both weights and pairs, of the gradient itself and of what comes before it.

    To the first a the gradient of the pre-activation leads, by way of b.
    """
    pairs, rank = Pairs(rank=4, adapters=adapters), 4 * max(1, adapters)
    case, inputs, arguments = make(grouped_moe, "silu", pairs, FP32, device, recompute=recompute)
    factor, h, i, width = factors(arguments)[name].requires_grad_(), case.H, case.I, case.preact_width
    flops = count_flops(lambda: torch.autograd.grad(call(grouped_moe, case, inputs, **arguments).sum(), factor))
    up, down, up_pair, down_pair = width * h, i * h, rank * (h + width), rank * (i + h)
    products = {
        "down_lora.b": up + down + up_pair + down_pair + 2 * rank * h,
        "gate_up_lora.a": (1 + recompute) * (up + up_pair) + 2 * (down + down_pair) + up_pair,
    }
    assert flops == 2 * case.T * case.top_k * products[name]
