"""Kernels of low-rank pairs, with NaN in what is not read."""

import pytest
import torch
from block import call, check, reference_out, run
from cases import BY_ID, make_inputs
from compare import assert_bitwise, assert_close, assert_same
from pairs import LAYOUTS, Pairs, factors, make_loras, with_factors
from poison import poison_sentinels, turned

SMALL = {"T": 20, "E": 3}
ROUTED = {
    "rank-3": ("silu", Pairs(rank=3)),
    "rank-40": ("silu-recompute", Pairs(rank=40)),
    "gpt-oss": ("gpt-oss", Pairs()),
    "transposed": ("silu-transposed", Pairs(rank=17, shared="a")),
    "not-gated": ("relu2-not-gated", Pairs(rank=5, shared="b")),
    "rank-130": ("silu-transposed", Pairs(rank=130)),
    "adapters": ("silu-bias", Pairs(rank=5, adapters=3)),
}
FEW = {
    "one-token": ("silu", Pairs(rank=3), 1, "peft"),
    "rank-70": ("silu-bias", Pairs(rank=70, shared="ab"), 2, "transposed"),
    "interleaved": ("silu-interleaved", Pairs(rank=16), 3, None),
    "adapters": ("silu", Pairs(rank=2, adapters=2), 3, "apart"),
}
STRIDED = {
    "peft": ("silu", Pairs(rank=3), "peft"),
    "rank-130": ("silu-transposed", Pairs(rank=130), "transposed"),
    "shared": ("silu-transposed", Pairs(rank=3, shared="ab"), "apart"),
    "adapters": ("silu-bias", Pairs(rank=3, adapters=3), "transposed"),
    "adapters-shared": ("silu", Pairs(rank=130, shared="b", adapters=2), "peft"),
    "adapters-apart": ("silu-transposed", Pairs(rank=16, adapters=5), "apart"),
}
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


@pytest.mark.parametrize("layout, adapters, rank, num_rows, copied", [
    ("peft", 1, 3, 40, True), ("peft", 1, 16, 99, True), ("peft", 1, 1, 40, True), ("peft", 2, 3, 40, False),
    ("peft", 1, 3, 39, False), ("transposed", 1, 3, 40, False), ("apart", 1, 3, 40, False),
])  # fmt: skip
@pytest.mark.parametrize("others", [[], [53], [None]], ids=["alone", "of-two", "none-of-two"])
def test_factors_whose_experts_lie_side_by_side_are_copied(
    kernels, module, layout, adapters, rank, num_rows, copied, others
):
    """Of several programs in each direction; of one adapter, if there are as many rows as experts."""
    sizes = [37, *others]
    factors = [None if n is None else LAYOUTS[layout](torch.randn(adapters, 40, n, rank)) for n in sizes]
    packed = kernels.pack_factors(factors, module("rows").Rows(None, 40, num_rows), torch.float16)
    for factor, got in zip(factors, packed):
        assert (got is not factor) is (copied and factor is not None)
        if got is not factor:
            assert got.is_contiguous() and got.dtype == torch.float16
            assert torch.equal(got, torch.nn.functional.pad(factor, (0, -rank % 8)).half())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("adapters, rank, sizes", [(1, 3, [37]), (1, 16, [37, 53]), (1, 9, [37, 53]), (2, 3, [37])])
def test_gradients_get_the_layout_of_factors(kernels, layout, adapters, rank, sizes):
    """From packed ones, whose ranks lie side by side, padded."""
    padded = [torch.randn(adapters, 40, n, -(-rank // 8) * 8).half() for n in sizes]
    packed = [each[..., :rank] for each in padded]
    grads = [LAYOUTS[layout](torch.full(each.shape, float("nan"))) for each in packed]
    kernels.unpack_grads(packed, grads)
    for got, want in zip(grads, packed):
        assert torch.equal(got, want.float())


@by_dtype
@pytest.mark.parametrize("case_id, pairs", ROUTED.values(), ids=ROUTED)
def test_routed_rows(grouped_moe, case_id, pairs, dtype):
    case = BY_ID[case_id]._replace(**SMALL, activation=("silu", 1.0, None, 0.0))
    inputs = make_inputs(case, dtype, "cpu")
    arguments = make_loras(grouped_moe, case, inputs, pairs, torch.float32)
    check(grouped_moe, case, inputs, poison_sentinels(inputs, case.E), **arguments)


@pytest.mark.parametrize("case_id, pairs, layout", STRIDED.values(), ids=STRIDED)
def test_strided_factors(grouped_moe, case_id, pairs, layout):
    """fp32 factors on fp16 rows: bitwise what contiguous ones give."""
    case = BY_ID[case_id]._replace(**SMALL)
    inputs = make_inputs(case, torch.float16, "cpu")
    arguments = make_loras(grouped_moe, case, inputs, pairs, torch.float32)
    strided = with_factors(arguments, {name: LAYOUTS[layout](t) for name, t in factors(arguments).items()})
    poisoned = poison_sentinels(inputs, case.E)
    assert_same(run(grouped_moe, case, poisoned, **strided), run(grouped_moe, case, poisoned, **arguments))


def test_adapters_of_no_row_are_not_projected(grouped_moe):
    """Of a tile of rows: NaN in their a, whose columns are a tile, reaches none."""
    case, pairs = BY_ID["silu"]._replace(**SMALL), Pairs(rank=16, adapters=3)
    inputs = make_inputs(case, torch.float16, "cpu")
    arguments = {**make_loras(grouped_moe, case, inputs, pairs), "adapter_index": torch.tensor([1, -1] * 10)}
    want = call(grouped_moe, case, inputs, **arguments)
    assert_close("out", want, reference_out(grouped_moe, case, inputs, arguments), torch.float16)
    for name, factor in factors(arguments).items():
        if name.endswith(".a"):
            factor[::2] = float("nan")
    assert_bitwise("out", call(grouped_moe, case, inputs, **arguments), want)


def test_rows_of_any_strides(kernels):
    x, factor = torch.randn(40, 300).half(), torch.randn(1, 3, 300, 5)
    rows = kernels.split_rows(torch.tensor([10, 0, 25]), 3, 40, x.dtype)
    want, got = (kernels.project(each, factor, rows, scaling=2.0)[0][:35] for each in (x, turned(x)))
    assert_bitwise("projected", got, want)


@pytest.mark.parametrize("case_id, pairs, tokens, layout", FEW.values(), ids=FEW)
def test_few_tokens(grouped_moe, module, monkeypatch, case_id, pairs, tokens, layout):
    case = BY_ID[case_id]._replace(T=tokens, top_k=2, E=32)
    inputs = make_inputs(case, torch.float16, "cpu")
    arguments = make_loras(grouped_moe, case, inputs, pairs, torch.float32)
    if layout:
        arguments = with_factors(arguments, {name: LAYOUTS[layout](t) for name, t in factors(arguments).items()})
    if pairs.adapters:
        arguments["adapter_index"] = torch.tensor([1, -1, 2])  # two have none
    kernels, taken = module("backends.triton"), []
    decode = kernels.decode
    monkeypatch.setattr(kernels, "decode", lambda *args: taken.append(1) or decode(*args))
    want = reference_out(grouped_moe, case, inputs, arguments)
    out = call(grouped_moe, case, poison_sentinels(inputs, case.E), **arguments)
    assert taken, "another path"
    assert_close("out", out, want, torch.float16)


# Rows of groups in chunks of 128: several of two groups, as many as there can be; exactly one of a group; none at all.
MANY_CHUNKS, ONE_CHUNK, NO_ROWS = [8, 0, 260, 129, 0, 9, 0], [8, 0, 260, 128, 0, 9, 0], [0] * 7


@pytest.mark.parametrize("routed, of_tokens", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("n, rank, adapters, sizes", [
    (200, 3, 0, MANY_CHUNKS), (600, 16, 0, ONE_CHUNK), (600, 5, 3, MANY_CHUNKS), (200, 3, 0, NO_ROWS),
])  # fmt: skip
def test_both_results_of_a_gradient(kernels, module, monkeypatch, n, rank, adapters, sizes, routed, of_tokens):
    """Rows projected by b, and b's gradient, in one kernel: one or two blocks of columns, groups without rows.

    Rows are apart in memory; those in place begin past the first one.
    """
    torch.manual_seed(0)
    num_groups, top_k, num_rows, dtype = 7, 2, 500, torch.float16
    sizes, first = torch.tensor(sizes), 0 if routed else 7
    launchers = module("backends.triton.low_rank")
    monkeypatch.setattr(launchers, "_LEAST_CHUNK", 64)
    # Not kept beside those of real chunks.
    monkeypatch.setattr(launchers, "_backward_kernels", launchers._backward_kernels.__wrapped__)
    last, num_tokens = first + int(sizes.sum()), num_rows // top_k if routed else num_rows
    if routed:
        expert = torch.repeat_interleave(torch.arange(num_groups + 1), torch.tensor([*sizes, num_rows - last]))
        rows = kernels.route(expert[torch.randperm(num_rows)].view(-1, top_k), num_groups, dtype)
        tokens = rows.row_to_slot[:last].long() // top_k
    else:
        offsets = torch.cat([torch.tensor([first]), first + sizes.cumsum(0)])
        rows, tokens = kernels.split_rows(offsets, num_groups, num_rows, dtype), torch.arange(first, last)
    if adapters:
        rows = rows._replace(adapters=torch.randint(-1, adapters, (num_tokens,)))
    ranks = max(1, adapters) * rank
    factor, columns = torch.randn(max(1, adapters), num_groups, n, rank), -(-ranks // 8) * 8
    projected = torch.full((num_rows, columns), float("nan"), dtype=dtype)
    projected[first:last] = torch.randn(last - first, columns).to(dtype)
    dy = torch.full((num_tokens if of_tokens else num_rows, n + 8), float("nan"), dtype=dtype)[:, :n]
    read = tokens if of_tokens else torch.arange(first, last)
    dy[read] = torch.randn(last - first, n).to(dtype)
    grad = torch.full((num_groups, n, columns), float("nan"))
    for name in ("wgrad", "project"):  # which two kernels would be
        monkeypatch.setattr(launchers, name, None)
    given = {"scaling": 0.5, "of_tokens": of_tokens}
    z = kernels.project_backward(dy, factor, rows, **given, projected=projected, grad=grad)
    alone = kernels.project_backward(dy, factor, rows, **given)
    assert_bitwise("without the gradient", alone[first:last], z[first:last])
    assert bool(z[:first].isnan().all()) and bool(z[last:].isnan().all())
    for group, size in enumerate(sizes.tolist()):
        own, part = dy[read][:size].double(), slice(first, first + size)
        wide = factor[:, group].to(dtype).double().movedim(0, 1).flatten(1)
        want = torch.zeros(size, columns, dtype=torch.float64)
        want[:, :ranks] = 0.5 * own @ wide
        if adapters:
            want[:, :ranks] *= rows.adapters[tokens[:size], None] == torch.arange(ranks) // rank
        assert_close("projected", z[part], want, dtype, terms=n)
        assert_close("grad", grad[group], own.T @ projected[part].double(), dtype, terms=size)
        read, tokens, first = read[size:], tokens[size:], first + size
