"""Low-rank pairs of grouped_linear, GroupedLinear and grouped_mlp against merged weights in fp64; errors of all."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_part, assert_same
from errors import raises
from leaves import leaves_of
from linears import Linear
from marks import by_recompute
from mlps import BY_MLP
from operations import count_flops, record
from pairs import WEIGHTS, Pairs, factors, make_index, make_lora, with_factors
from poison import poisoned_allocations
from sorted_rows import check, run

NAN = float("nan")
FP32, BF16 = torch.float32, torch.bfloat16
SIZES, TAIL = (7, 0, 150, 5), 6
ROWS, G, N, K = sum(SIZES) + TAIL, len(SIZES), 40, 48

PAIRS = {
    "rank-1": Pairs(rank=1),
    "rank-8": Pairs(),
    "rank-40": Pairs(rank=40),
    "a-shared": Pairs(rank=3, shared="a"),
    "b-shared": Pairs(shared="b"),
    "both-shared": Pairs(rank=3, shared="ab"),
    "adapters": Pairs(rank=5, adapters=3),
    "adapters-shared": Pairs(rank=16, shared="b", adapters=2),
}
by_pairs = pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
by_dtypes = pytest.mark.parametrize(
    "dtype, factor_dtype", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=["fp32", "bf16", "fp32-on-bf16"]
)
by_transposed = pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])


def make(grouped_moe, pairs, dtype, device, transposed=False, factor_dtype=None):
    """(the layer, its inputs, the arguments of its LoRA)."""
    linear = Linear("pairs", SIZES, TAIL, N=N, K=K, transposed=transposed, bias=True, scales=True)
    inputs = linear.make(dtype, device)
    weight, factor_dtype = inputs.tensors["weight"], factor_dtype or dtype
    arguments = {"lora": make_lora(grouped_moe, pairs, weight, transposed, 0.7, factor_dtype)}
    if pairs.adapters:
        arguments["adapter_index"] = make_index(pairs.adapters, ROWS).to(device)
    return linear, inputs, arguments


@by_dtypes
@by_transposed
@by_pairs
def test_linear_matches_merged_weights(grouped_moe, device, pairs, transposed, dtype, factor_dtype):
    linear, inputs, arguments = make(grouped_moe, pairs, dtype, device, transposed, factor_dtype)
    sizes = inputs.offsets.diff()
    got = check(grouped_moe, linear, inputs, splits=sizes, **arguments)
    for frozen in (("weight", "bias", "bias_scales"), ("x", "lora.a"), ("x", "weight", "lora.b")):
        assert_part(run(grouped_moe, linear, inputs, frozen, sizes, **arguments), got)


@by_pairs
def test_linear_reads_nothing_else(grouped_moe, device, pairs):
    """NaN in rows of no group, in the weight and factors of a group without rows, and in fresh memory."""
    linear, inputs, arguments = make(grouped_moe, pairs, FP32, device)
    want = run(grouped_moe, linear, inputs, **arguments)
    wide = {name: factor.clone() for name, factor in factors(arguments).items()}
    for factor in wide.values():
        if factor.shape[-3] > 1:
            factor[..., 1, :, :] = NAN
    with poisoned_allocations():
        assert_same(run(grouped_moe, linear, inputs.poisoned(), **with_factors(arguments, wide)), want)


@pytest.mark.parametrize("leaf", ["x", "b"])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("weight", "lora.a")], ids=["none", "weight", "weight-a"])
def test_linear_differentiable_once(grouped_moe, device, frozen, leaf):
    """By x as well where it is not saved; the first loss is linear, so that its gradient depends on that alone."""
    _, inputs, arguments = make(grouped_moe, Pairs(), FP32, device)
    leaves = leaves_of({**inputs.tensors, **factors(arguments)}, frozen)
    y = grouped_moe.grouped_linear(leaves["x"], leaves["weight"], inputs.offsets, **with_factors(arguments, leaves))
    of = {"x": leaves["x"], "b": leaves["lora.b"]}
    (grad,) = torch.autograd.grad(y.sum(), of[leaf], create_graph=True)
    other = of["b" if leaf == "x" else "x"]
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad.square().sum() + other.sum(), other)


def test_parts_of_a_shared_factor_that_cancel(grouped_moe, device):
    """Their sum over the groups is made before it is rounded to the dtype of the factor."""
    x, dy = (torch.randn(1, n, device=device).expand(2, n) for n in (K, N))
    dy = dy * torch.tensor([[1.0], [-0.999]], device=device)
    factors = [torch.randn(1, *shape, device=device, dtype=BF16) for shape in ((4, K), (N, 4))]
    a, b = (factor.requires_grad_() for factor in factors)
    weight = torch.zeros(2, N, K, device=device)
    grads = torch.autograd.grad(grouped_moe.grouped_linear(x, weight, [1, 1], lora=grouped_moe.LoRA(a, b)), (a, b), dy)
    wants = torch.autograd.grad(x.double() @ (b[0].double() @ a[0].double()).t(), (a, b), dy.double())
    for name, grad, want in zip("ab", grads, wants):
        assert_close(name, grad[0], want[0].double(), BF16)


@pytest.mark.parametrize("adapters", [0, 3])
def test_linear_frozen(grouped_moe, device, adapters):
    """A gradient does not depend on which others are asked for."""
    linear, inputs, arguments = make(grouped_moe, Pairs(adapters=adapters), FP32, device)
    full = run(grouped_moe, linear, inputs, **arguments)
    names = full.keys() - {"y"}
    assert names >= {"x", "weight", "bias", "bias_scales", "lora.a", "lora.b"}
    for only in names:
        assert_part(run(grouped_moe, linear, inputs, names - {only}, **arguments), full)


@pytest.mark.parametrize("frozen", ["a", "b"])
def test_linear_keeps_projected_rows_for_b_alone(grouped_moe, device, frozen):
    _, inputs, arguments = make(grouped_moe, Pairs(), FP32, device)
    for name, factor in factors(arguments).items():
        factor.requires_grad_(name[-1] != frozen)
    x, weight = inputs.tensors["x"], inputs.tensors["weight"]
    _, saved = record(lambda: grouped_moe.grouped_linear(x, weight, [*SIZES], **arguments))
    assert any(tensor.shape == (ROWS, 8) for tensor in saved) == (frozen == "a")


@pytest.mark.parametrize("adapters", [0, 2])
def test_linear_flops(grouped_moe, device, adapters):
    linear, inputs, arguments = make(grouped_moe, Pairs(rank=4, adapters=adapters), FP32, device)
    ranks = 4 * max(1, adapters)
    pair = ranks * (N + K)
    for frozen, products in (
        ((), 3 * (N * K + pair)),
        (("weight", "x"), N * K + 2 * pair + ranks * N),
        (("weight", "x", "lora.a"), N * K + pair + 2 * ranks * N),  # b alone: its rows are projected all the same
        (("x", "lora.a", "lora.b"), 2 * N * K + pair),
    ):
        assert count_flops(lambda: run(grouped_moe, linear, inputs, frozen, **arguments)) == 2 * ROWS * products


class Layer(NamedTuple):
    """A module in the place of grouped_linear, whose weight and bias are its own."""

    module: torch.nn.Module

    def call(self, grouped_moe, inputs, splits, **lora):
        return self.module(inputs.tensors["x"], splits, inputs.tensors["bias_scales"], **lora)


MODES = {
    "plain": {},
    "main-grad": {"accumulate_into_main_grad": True},
    "delayed": {"delay_wgrad": True},
    "delayed-main-grad": {"delay_wgrad": True, "accumulate_into_main_grad": True},
    "discrete": {"single_grouped_weight": False, "single_grouped_bias": False},
    "discrete-delayed": {"single_grouped_weight": False, "single_grouped_bias": False, "delay_wgrad": True},
}


@pytest.mark.parametrize("adapters", [0, 2])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("mode", MODES)
def test_modules_pass_pairs_on(grouped_moe, device, mode, frozen, adapters):
    """In each mode: the output and the gradients of x and of the factors are grouped_linear's, weights get theirs."""
    linear, inputs, arguments = make(grouped_moe, Pairs(rank=3, adapters=adapters), FP32, device)
    want, tensors = run(grouped_moe, linear, inputs, **arguments), inputs.tensors
    layer = grouped_moe.GroupedLinear(G, K, N, scale_bias=True, device=device, **MODES[mode])
    layer.load_state_dict({name: tensors[name] for name in ("weight", "bias")})
    layer.requires_grad_(not frozen)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    assert_part(run(grouped_moe, Layer(layer), inputs.replace(weight=None, bias=None), **arguments), want)
    layer.backward_dw()
    for name, parameter in layer.named_parameters():
        in_main_grad = "main-grad" in mode and name.startswith("weight")
        grad = parameter.main_grad if in_main_grad else parameter.grad
        kind, group = name.rstrip("0123456789"), name.lstrip("abcdefghijklmnopqrstuvwxyz")
        assert grad is not None or frozen
        if not frozen:
            assert_bitwise(name, grad, want[kind][int(group)] if group else want[kind])


@by_dtypes
@by_recompute
@pytest.mark.parametrize("mlp", ["two-scales", "same-scales", "transposed", "relu2-not-gated", "head-and-tail"])
@pytest.mark.parametrize("pairs", [Pairs(), Pairs(rank=3, shared="a", adapters=2)], ids=["one", "adapters"])
def test_mlp_matches_merged_weights(grouped_moe, device, pairs, mlp, recompute, dtype, factor_dtype):
    mlp = BY_MLP[mlp]
    inputs = mlp.make(dtype, device)
    arguments = {
        name: make_lora(grouped_moe, pairs, inputs.tensors[weight], mlp.case.transposed, scaling, factor_dtype)
        for (name, weight), scaling in zip(WEIGHTS.items(), (0.7, 1.25))
    }
    if pairs.adapters:
        arguments["adapter_index"] = make_index(pairs.adapters, mlp.rows).to(device)
    check(grouped_moe, mlp, inputs, recompute=recompute, **arguments)


T, H, I, L = 6, 16, 8, 3  # noqa: E741
# What becomes of a valid LoRA, the error, and its message after the argument's name.
ERRORS = {
    "no-lora": (tuple, TypeError, ": expected a LoRA or None, got tuple"),
    "scaling": (lambda p: p._replace(scaling=p.a), TypeError, ".scaling: expected a number, got Tensor"),
    "huge-scaling": (lambda p: p._replace(scaling=10**400), ValueError, ".scaling: expected a finite number"),
    "scaling-beyond-fp32": (lambda p: p._replace(scaling=1e39), ValueError, ".scaling: .* of torch.float32, got 1e"),
    "nan-as-scaling": (lambda p: p._replace(scaling=NAN), ValueError, ".scaling: expected a finite number"),
    "flag-as-scaling": (lambda p: p._replace(scaling=True), TypeError, ".scaling: expected a number, got bool"),
    "a-no-tensor": (lambda p: p._replace(a=None), TypeError, ".a: expected a tensor, got NoneType"),
    "b-of-ints": (lambda p: p._replace(b=p.b.int()), TypeError, ".b: expected one of torch.bfloat16, "),
    "a-elsewhere": (lambda p: p._replace(a=p.a.to("meta")), ValueError, ".a: expected on .*, got meta"),
    "a-of-two": (lambda p: p._replace(a=p.a[0, 0]), ValueError, r".a: expected shape \(E, r, K\) or \(L, E, r"),
    "rank-0": (lambda p: p._replace(a=p.a[:, :, :0]), ValueError, ".a: expected a rank from 1 to 256, got 0"),
    "rank-257": (lambda p: p._replace(a=p.a.expand(-1, -1, 257, -1)), ValueError, ".a: expected a rank .* 257"),
    "a-columns": (lambda p: p._replace(a=p.a[..., :-1]), ValueError, r".a: .* \(L, E or 1, r, K\)"),
    "a-experts": (lambda p: p._replace(a=p.a[:, :2]), ValueError, r".a: expected shape .*got \(3, 2, 1, "),
    "b-of-two": (lambda p: p._replace(b=p.b[0, 0]), ValueError, r".b: expected shape \(L, E or 1, N, r\)"),
    "b-rows": (lambda p: p._replace(b=p.b[:, :, :-1]), ValueError, r".b: .* \(L, E or 1, N, r\)"),
    "b-rank": (lambda p: p._replace(b=p.b.expand(-1, -1, -1, 2)), ValueError, r".b: .* \(L, E or 1, N, r\)"),
    "b-of-one": (lambda p: p._replace(b=p.b[0]), ValueError, r".b: expected shape \(L, E or 1, N, r\)"),
    "b-of-fewer": (lambda p: p._replace(b=p.b[:2]), ValueError, r".b: expected shape \(L, E or 1, N, r\)"),
}
INDICES = {
    "of-one-adapter": (lambda lora, index: (lora._replace(a=lora.a[0], b=lora.b[0]), index), ValueError, "same number"),
    "missing": (lambda lora, index: (lora, None), ValueError, "a tensor for the 3 adapters, got None"),
    "without-a-lora": (lambda lora, index: (None, index), ValueError, "expected with factors .* same number"),
    "shape": (lambda lora, index: (lora, index[:-1]), ValueError, r"\(rows of the input,\) = \(6,\), got \(5,\)"),
    "dtype": (lambda lora, index: (lora, index.float()), TypeError, "torch.int32 or torch.int64, got torch.float32"),
    "no-tensor": (lambda lora, index: (lora, [0] * T), TypeError, "expected a tensor, got list"),
    "elsewhere": (lambda lora, index: (lora, index.to("meta")), ValueError, "expected on .* got meta"),
}


@pytest.fixture(params=["experts-up", "experts-down", "linear", "module", "mlp"])
def target(request, grouped_moe, device):
    """(function of a LoRA and an index, the LoRA's argument; valid ones of three adapters)."""
    x, up, down = (torch.zeros(s, device=device) for s in ((T, H), (G, 2 * I, H), (G, H, I)))
    sizes = torch.ones(G, dtype=torch.int64, device=device)
    ids, scales = torch.zeros(T, 2, dtype=torch.int64, device=device), torch.zeros(T, 2, device=device)
    layer = grouped_moe.GroupedLinear(G, H, 2 * I, device=device)
    experts = partial(grouped_moe.grouped_mm_experts, x, ids, scales, up, down)
    function, name, weight = {
        "experts-up": (experts, "gate_up_lora", up),
        "experts-down": (experts, "down_lora", down),
        "linear": (partial(grouped_moe.grouped_linear, x, up, sizes), "lora", up),
        "module": (partial(layer, x, sizes), "lora", up),
        "mlp": (partial(grouped_moe.grouped_mlp, x, sizes, None, up, down), "down_lora", down),
    }[request.param]
    lora = make_lora(grouped_moe, Pairs(rank=1, adapters=L), weight, False, 1.0, FP32)
    return function, name, lora, torch.zeros(T, dtype=torch.int64, device=device)


@pytest.mark.parametrize("change, error, message", ERRORS.values(), ids=ERRORS)
def test_errors_name_the_factor(target, change, error, message):
    function, name, lora, index = target
    raises(error, f"^{name}{message}", function, **{name: change(lora)}, adapter_index=index)


@pytest.mark.parametrize("change, error, message", INDICES.values(), ids=INDICES)
def test_errors_name_the_index(target, change, error, message):
    function, name, *given = target
    lora, index = change(*given)
    raises(error, f"^adapter_index: .*{message}", function, **{name: lora}, adapter_index=index)


def test_both_loras_have_as_many_adapters(grouped_moe, device):
    x, up, down = (torch.zeros(s, device=device) for s in ((T, H), (G, 2 * I, H), (G, H, I)))
    ids, scales = torch.zeros(T, 2, dtype=torch.int64, device=device), torch.zeros(T, 2, device=device)
    first = make_lora(grouped_moe, Pairs(rank=1, adapters=2), up, False, 1.0, FP32)
    for other in (Pairs(rank=1, adapters=3), Pairs(rank=1)):
        loras = {"gate_up_lora": first, "down_lora": make_lora(grouped_moe, other, down, False, 1.0, FP32)}
        with pytest.raises(ValueError, match="^adapter_index: .* L of adapters in each of gate_up_lora, down_lora"):
            grouped_moe.grouped_mm_experts(x, ids, scales, up, down, **loras, adapter_index=ids[:, 0])


def test_no_forward_mode(target):
    function, name, lora, index = target
    with torch.autograd.forward_ad.dual_level():
        dual = lora._replace(b=torch.autograd.forward_ad.make_dual(lora.b, torch.ones_like(lora.b)))
        with pytest.raises(NotImplementedError, match="no forward-mode differentiation"):
            function(**{name: dual}, adapter_index=index)
