"""Gradients through products with rows of 8-bit floats, and low-rank pairs beside them: fp64 on the same codes."""

import pytest
import torch
from compare import assert_bitwise
from pairs import Pairs, make_lora
from poison import poisoned_allocations
from quantized import BF16, CASES, ROWS, error, float8, make, run
from quantized_steps import RANKS, gradients, linear, make_pairs, references, with_leaves

pytestmark = [pytest.mark.gpu, float8, pytest.mark.usefixtures("kernels_of_codes")]

# Relative errors in norm, against the same codes. Of a product, tensor cores keep 14 bits of a sum. What is rounded to
# bf16 in a backward, the pre-activation and the activation's gradient, makes one code in fifty another one.
PRODUCT, GRADIENT = 1.6e-2, 2.5e-2


# Of a single step of K, pairs have no kernel.
PAIRED = [("even", kind) for kind in RANKS if kind != "none"]
PAIRED += [(name, "16") for name in CASES if name not in ("even", "short-k")]


@pytest.mark.parametrize("name, kind", [*((name, "none") for name in CASES), *PAIRED])
def test_gradients(grouped_moe, name, kind):
    """Two calls, and one that recomputes, give the same bits; poisoned memory and unread tokens do not matter."""
    case, given = CASES[name], make(grouped_moe, CASES[name])
    pairs, dout = make_pairs(grouped_moe, given, RANKS[kind]), torch.randn_like(given.x)
    unread = (given.ids >= case.E).all(1)
    poisoned = torch.where(unread[:, None], float("nan"), dout)
    results = []
    for recompute in (False, False, True):
        leaves = with_leaves(given)
        with poisoned_allocations():
            out = run(grouped_moe, case, leaves, recompute=recompute, **pairs)
            results.append({"out": out.detach(), **gradients(out, leaves, pairs, poisoned)})
    for again in results[1:]:
        for key, value in again.items():
            assert_bitwise(key, value, results[0][key])
    wants = references(case, given, pairs, dout)
    # Those of factors are made of rows as they are, but b's of down_lora. Where I is no multiple of 128, so is dx.
    rounds_dx = case.I % 128 == 0
    for key, got in results[0].items():
        errors = error(got, wants[0][key]), error(got, wants[1][key])
        if key == "out":
            assert errors[0] < PRODUCT, (key, errors)
        if case.limit is not None:  # rounded rows reach it elsewhere
            continue
        assert errors[1] < 1.5 * ROWS, (key, errors)
        if key == "dx" and rounds_dx:
            assert errors[0] < GRADIENT, (key, errors)
            assert errors[0] < 0.7 * errors[1], (key, errors)
    assert (results[0]["dx"][unread] == 0).all()


@pytest.mark.parametrize("rank", [None, 16, 136], ids=str)
def test_linear(grouped_moe, rank):
    """`grouped_linear`, some of whose rows have no group, with gate and up scaled apart."""
    groups, n, k, rows, bounds = 4, 512, 384, 900, [30, 400, 400, 420, 800]
    weight = grouped_moe.quantize_blocks(torch.randn(groups, n, k, device="cuda") / k**0.5, parts=2)
    x = torch.randn(rows, k, device="cuda", dtype=BF16, requires_grad=True)
    dy = torch.randn(rows, n, device="cuda", dtype=BF16)
    lora = None if rank is None else make_lora(grouped_moe, Pairs(rank), weight.data, False, 0.5, BF16)
    offsets = grouped_moe.GroupOffsets(torch.tensor(bounds, device="cuda"))
    leaves = (x,) if lora is None else (x, lora.a.requires_grad_(), lora.b.requires_grad_())
    with poisoned_allocations():
        y = grouped_moe.grouped_linear(x, weight, offsets, lora=lora)
        got = y.detach(), *torch.autograd.grad(y, leaves, dy)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wide_lora = lora and lora._replace(a=wide[1], b=wide[2])
    want = linear(wide[0], weight.dequantize(torch.float64), bounds, lora=wide_lora)
    wanted = want.detach(), *torch.autograd.grad(want, wide, dy.double())
    for name, each, expected in zip(("y", "dx", "da", "db"), got, wanted):
        assert error(each, expected) < PRODUCT, name
    assert (got[0][:30] == 0).all() and (got[1][800:] == 0).all()


@pytest.mark.parametrize("rows", [900, 4000], ids=["few-rows", "many-rows"])
@pytest.mark.parametrize("rank", [None, 16], ids=str)
def test_layouts_of_codes(grouped_moe, rank, rows):
    """The gradient of rows has the same bits for codes that lie along N and along K, where no product turns them.

    On Hopper those along K are transposed in shared memory for few rows, and copied for many (`transposing_pays`).
    """
    groups, n, k = 4, 640, 400
    weight = grouped_moe.quantize_blocks(torch.randn(groups, n, k, device="cuda") / k**0.5)
    along_n = weight._replace(data=weight.data.mT.contiguous().mT)
    x = torch.randn(rows, k, device="cuda", dtype=BF16, requires_grad=True)
    dy = torch.randn(rows, n, device="cuda", dtype=BF16)
    lora = None if rank is None else make_lora(grouped_moe, Pairs(rank), weight.data, False, 0.5, BF16)
    offsets = grouped_moe.GroupOffsets(torch.tensor([7, 300, 300, 420, rows - 60], device="cuda"))
    grads = []
    for each in (weight, along_n):
        with poisoned_allocations():
            grads += torch.autograd.grad(grouped_moe.grouped_linear(x, each, offsets, lora=lora), x, dy)
    assert_bitwise("dx", *grads)
    assert grads[0][7 : rows - 60].abs().amax(1).min() > 0 and (grads[0][rows - 60 :] == 0).all()
