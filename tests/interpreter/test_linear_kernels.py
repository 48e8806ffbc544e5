"""Kernels of grouped_linear, grouped_mlp and their gradients."""

import pytest
import sorted_rows
import torch
from compare import assert_close, assert_part, assert_same
from group_splits import WRONG_OFFSETS as WRONG
from linears import BY_LINEAR, LINEARS, Linear
from loops import loop_bias_grads
from mlps import BY_MLP
from poison import guarded
from sorted_rows import run

NAN = float("nan")
SIZES = (200, 0, 130, 64)  # whole row tiles, one that is cut, none
SMALL = [case if len(case.sizes) < 100 else case._replace(sizes=(0, 1, 2, 0) * 16) for case in LINEARS]
DEEP = [
    Linear("ten-row-tiles", sizes=(600, 3), tail=5, N=130, K=8, bias=True),
    Linear("ten-weight-tiles", sizes=(5, 0), tail=1, N=600, K=70),
    Linear("whole-columns", sizes=(20, 5), tail=1, N=64, K=40),
    Linear("deep", sizes=(20, 45), tail=3, N=70, K=200, transposed=True),
]
WIDE = [
    Linear("whole-tiles", SIZES, tail=70, N=256, K=128),
    Linear("cut-tiles", SIZES, tail=3, head=5, N=104, K=72, bias=True),
    Linear("transposed", SIZES, tail=70, N=136, K=72, transposed=True, bias=True),
    Linear("thin", SIZES, tail=3, head=5, N=40, K=72, bias=True),
    Linear("many-rows", (700, 0, 900), tail=10, N=136, K=200),
    Linear("many-rows-transposed", (1, 1700, 0), N=264, K=72, transposed=True),
]
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


def check(grouped_moe, case, dtype, scales_dtype=None, aligned=False):
    """Against the reference, with NaN in rows of no group, in weights and biases of groups without rows.

    aligned: all tensors lie where descriptors take them; else operands lie amid NaN, at an address that they do not.
    """
    inputs = case.make(dtype, "cpu", scales_dtype)
    sorted_rows.check(grouped_moe, case, inputs, inputs.poisoned() if aligned else inputs.poisoned().guarded())


@by_dtype
@pytest.mark.parametrize("linear", SMALL + DEEP, ids=lambda linear: linear.id)
def test_grouped_linear(grouped_moe, linear, dtype):
    check(grouped_moe, linear, dtype)


@pytest.mark.parametrize("name", ["plain", "transposed-bias-scales"])
def test_lists_of_sizes(grouped_moe, name):
    linear = BY_LINEAR[name]
    inputs = linear.make(torch.float32, "cpu")
    assert_same(run(grouped_moe, linear, inputs, splits=[*linear.sizes]), run(grouped_moe, linear, inputs))


@pytest.mark.parametrize("linear", WIDE, ids=lambda linear: linear.id)
def test_reads_by_descriptor(grouped_moe, descriptors, linear):
    """Aligned operands of enough rows: forward, dgrad and, but for thin weights, wgrad."""
    check(grouped_moe, linear, torch.float16, aligned=True)
    of_wgrad = 0 if linear.id == "thin" else 3 if linear.id.startswith("many-rows") else 2  # dw may be written by one
    assert len(descriptors) == 4 + of_wgrad


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.float16], ids=["fp32-scales", "fp16-scales"])
@by_dtype
def test_scaled_bias(grouped_moe, dtype, scales_dtype):
    linear = Linear("scaled", sizes=(7, 0, 119, 5), tail=6, head=3, N=70, bias=True, scales=True)
    check(grouped_moe, linear, dtype, scales_dtype)


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_offsets_stay_in_bounds(grouped_moe, kind):
    """And the result is that of the offsets that they are clamped to."""
    inputs, wrong = LINEARS[1].make(torch.float32, "cpu").guarded(), torch.tensor(WRONG[kind])
    clamped = wrong.clamp(0, len(inputs.dy)).cummax(0).values
    assert_same(*(run(grouped_moe, LINEARS[1], inputs._replace(offsets=each)) for each in (wrong, clamped)))


@pytest.mark.parametrize("only", ["x", "weight", "bias"])
def test_only_gradients_asked_for(grouped_moe, only):
    inputs = LINEARS[3].make(torch.float32, "cpu")
    got = run(grouped_moe, LINEARS[3], inputs, frozen={"x", "weight", "bias"} - {only})
    assert list(got) == ["y", only]
    assert_part(got, run(grouped_moe, LINEARS[3], inputs))


def test_strides_beyond_int32(kernels):
    """Column times stride passes 2^31: a weight whose columns lie 2^27 elements apart, in memory that is never touched
    but where it is read."""
    n, k, stride = 20, 16, 2**27
    storage = torch.UntypedStorage(2 * n * stride)
    weight = torch.empty(0, dtype=torch.float16).set_(storage, 0, (1, n, k), (16, stride, 1))
    values = torch.randn(1, n, k).half()
    weight.copy_(values)
    x, offsets = torch.randn(5, k).half(), torch.tensor([0, 5], dtype=torch.int32)
    y = kernels.gemm(x, weight, kernels.split_rows(offsets, 1, 5, x.dtype))
    assert_close("y", y, x.double() @ values[0].double().t(), torch.float16)


def test_rows_beyond_int32(kernels):
    """Row times width passes 2^31, in memory that is never touched but at its end."""
    num_rows, n, k = 2**21, 1032, 16
    x, weight = torch.empty(num_rows, k, dtype=torch.float16), torch.randn(1, n, k).half()
    x[-5:] = torch.randn(5, k)
    rows = kernels.split_rows(torch.tensor([num_rows - 5, num_rows], dtype=torch.int32), 1, num_rows, x.dtype)
    y, want = kernels.gemm(x, weight, rows), x[-5:].double() @ weight[0].double().t()
    assert_close("y", y[-5:], want, torch.float16)
    rows = rows._replace(top_k=1, slot_to_row=torch.tensor([num_rows - 1, -1, num_rows - 3], dtype=torch.int32))
    assert_close("out", kernels.combine(y, None, rows)[::2], y[[-1, -3]].double(), torch.float16)


@pytest.mark.parametrize("sizes", [(7, 0, 19), (200, 0, 130)], ids=["thin", "tall"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@by_dtype
def test_wgrad_accumulates(kernels, dtype, layout, sizes):
    """Into a buffer of its own dtype and strides; a group without rows keeps what it has, whatever that is."""
    rows = sum(sizes) + 9
    dy, x = torch.randn(rows, 40).half(), torch.randn(rows, 72).half()
    dy[-9:], x[-9:] = NAN, NAN
    dw = torch.randn(3, 40, 72).to(dtype)
    dw = dw.transpose(1, 2).contiguous().transpose(1, 2) if layout == "kn" else dw
    dw[1] = NAN
    want, bounds = dw.double(), torch.tensor((0, *sizes)).cumsum(0).tolist()
    for group, (start, end) in enumerate(zip(bounds, bounds[1:])):
        want[group] += dy[start:end].double().t() @ x[start:end].double()
    kernels.wgrad(dy, x, kernels.split_rows(torch.tensor(sizes), 3, rows, dy.dtype), dw, accumulate=True)
    for group in (0, 2):
        assert_close(f"dw[{group}]", dw[group], want[group], dtype)
    assert bool(dw[1].isnan().all())


def test_dbias_dscales_accumulate(grouped_moe):
    dy, scales, bias = torch.randn(40, 70), torch.rand(40) - 0.5, torch.randn(3, 70)
    dy[31:], scales[31:] = NAN, NAN
    given = dy, scales, bias, _ = guarded(dy), guarded(scales), guarded(bias), torch.tensor([12, 0, 19])
    dbias, dscales, sums = torch.randn(3, 70), torch.randn(40), loop_bias_grads(*given)
    want_bias, want_scales = dbias.double() + sums[0], dscales.double() + sums[1]
    grouped_moe.grouped_dbias_dscales(*given, dbias=dbias, dscales=dscales)
    assert_close("dbias", dbias, want_bias, torch.float32)
    assert_close("dscales", dscales, want_scales, torch.float32, inner_products=True)
    dbias, dscales = grouped_moe.grouped_dbias_dscales(*given)
    assert not dbias[1].any() and not dscales[31:].any()
    scales[30] = torch.inf  # which the rows of a tile past a group's last one repeat
    dbias, dscales = grouped_moe.grouped_dbias_dscales(*given)
    assert dbias[0].isfinite().all() and torch.equal(dbias[2], dy[30].sign() * torch.inf)


MLPS = ["no-scales", "two-scales", "same-scales", "recompute", "gpt-oss", "interleaved-transposed-recompute"]
MLPS += ["relu2-not-gated", "head-and-tail", "no-rows", "tail-only", "odd-extents", "tall"]


@by_dtype
@pytest.mark.parametrize("mlp_id", MLPS)
def test_grouped_mlp(grouped_moe, mlp_id, dtype):
    check(grouped_moe, BY_MLP[mlp_id], dtype)
