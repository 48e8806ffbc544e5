"""What the tests re-expressed from TransformerEngine share: tolerances, random splits, and a layer's step."""

import pytest
import torch
from compare import assert_bitwise, assert_close

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BOTH = (False, True)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
by_main_grad = pytest.mark.parametrize("main_grad", BOTH, ids=["grad", "main-grad"])
by_delay = pytest.mark.parametrize("delay", BOTH, ids=["now", "delayed"])
by_single = pytest.mark.parametrize("single", BOTH, ids=["discrete", "single"])
by_bias = pytest.mark.parametrize("bias", BOTH, ids=["no-bias", "bias"])
on_gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="uses torch.cuda")

# |got - want| <= atol + rtol |want|, element by element, as TransformerEngine compares: (rtol, atol) of ours, to which
# `agrees` adds the norm-wise bounds of `compare`. "linear": one rounding of an fp32 sum of a few hundred small terms;
# "sums": of up to thousands that cancel; "mlp": four roundings in a row; "same": two ways of ours, `same`.
OURS = {
    "linear": {torch.float32: (1e-5, 1e-5), torch.float16: (7.5e-4, 1e-5), torch.bfloat16: (6e-3, 1e-5)},
    "sums": {torch.float32: (1e-5, 1e-3), torch.float16: (7.5e-4, 1e-3), torch.bfloat16: (6e-3, 1e-3)},
    "mlp": {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 4e-3), torch.bfloat16: (3e-2, 3e-2)},
    "activation": {torch.float32: (1.3e-6, 1e-5)},
    "same": {torch.float16: (0.0, 0.0), torch.bfloat16: (0.0, 0.0)},
}


def agrees(what, got, want, inner_products=("bias_scales", "activation_scales"), slack=None, terms=0):
    """Every tensor of got is that of want, which is in fp64, within the tolerances of its own dtype.

    slack: by name, what an element may be off in addition. terms: the longest sum.
    """
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], tensor.dtype, name in inner_products, terms)
        rtol, atol = OURS[what][tensor.dtype]
        excess = (tensor.double() - want[name]).abs() - atol - rtol * want[name].abs() - (slack or {}).get(name, 0.0)
        if not bool((excess <= 0).all()):
            at = int(excess.nan_to_num(torch.inf).argmax())
            raise AssertionError(
                f"{name}: {int((~(excess <= 0)).sum())} of {excess.numel()} elements are off; the worst is"
                f" {float(tensor.flatten()[at])}, expected {float(want[name].flatten()[at])}"
            )


def same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_bitwise(name, tensor, want[name])


def uniform(low, high, *shape):
    return torch.empty(shape, dtype=torch.float64).uniform_(low, high)


def cut(rows, groups, empty=False):
    """Random sizes of groups that sum to rows; with empty, the last but one is."""
    if groups == 1:
        return [rows]
    cuts = torch.randperm(rows - 1)[: groups - 1 - empty].sort().values + 1
    cuts = [0, *cuts.tolist(), rows]
    sizes = [end - start for start, end in zip(cuts, cuts[1:])]
    return [*sizes[:-1], 0, sizes[-1]] if empty else sizes


def shuffled(sizes):
    return [sizes[i] for i in torch.randperm(len(sizes)).tolist()]


def parameters(module, kind):
    """Of a kind, "weight" or "bias"."""
    return [parameter for name, parameter in module.named_parameters() if name.startswith(kind)]


def packed(module, kind, read=lambda parameter: parameter.detach()):
    """What `read` says of the parameters of a kind, as one tensor."""
    tensors = [read(parameter) for parameter in parameters(module, kind)]
    return tensors[0] if getattr(module, f"single_grouped_{kind}") else torch.stack(tensors)


def fill(module, kind, values):
    with torch.no_grad():
        own = parameters(module, kind)
        for parameter, value in zip(own, [values] if getattr(module, f"single_grouped_{kind}") else values):
            parameter.copy_(value)


def give_main_grads(module, start, dtype=torch.float32, **attributes):
    """A main_grad of its own to each weight, with values of start (G, N, K), and attributes as Megatron-LM's."""
    weights = parameters(module, "weight")
    for weight, values in zip(weights, [start] if module.single_grouped_weight else start):
        weight.main_grad = values.to(dtype).clone()
        for name, value in attributes.items():
            setattr(weight, name, value)


def step(module, x, splits, dy, scales=None, frozen=()):
    """{"y", "x", "weight", "bias", "bias_scales"}: output and gradients, a weight's from main_grad if it goes there."""
    x = x.detach().requires_grad_("x" not in frozen)
    scales = None if scales is None else scales.detach().requires_grad_()
    y = module(x, splits) if scales is None else module(x, splits, scales)
    y.backward(dy)
    if module.delay_wgrad:
        module.backward_dw()
    got = {"y": y.detach(), "x": x.grad, "bias_scales": None if scales is None else scales.grad}
    for kind in ("weight", "bias"):
        to_main = kind == "weight" and module.accumulate_into_main_grad
        if any(parameter.requires_grad for parameter in parameters(module, kind)):
            got[kind] = packed(module, kind, lambda p: (p.main_grad if to_main else p.grad).clone())
    return {name: tensor for name, tensor in got.items() if tensor is not None}


def expected(grouped_moe, module, x, sizes, dy, scales=None, frozen=(), start=0.0):
    """As `step`, by the reference. start: what was in main_grad."""
    leaves = {"x": x, "weight": packed(module, "weight"), "bias_scales": scales}
    leaves["bias"] = packed(module, "bias") if parameters(module, "bias") else None
    leaves = {n: t.detach().double().requires_grad_(n not in frozen) for n, t in leaves.items() if t is not None}
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    y = grouped_moe.reference.grouped_linear(group_offsets=offsets, **leaves)
    y.backward(dy.double())
    want = {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items() if name not in frozen}}
    return {**want, "weight": want["weight"] + start} if "weight" in want else want


def captured(run):
    """(graph, what `run` returned in it)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def replays(run, static, sizes, rows, reset=lambda: None):
    """Captures `run` and replays it with fresh numbers and splits, padding of NaN: (sizes, results), bitwise eager's.

    static: the tensors that change, the splits among them by their name.
    """
    graph, results = captured(run)
    every = [sizes, sizes[::-1], [0] * len(sizes), [0, rows, 0, 0], [1, 0, 2, 5]]
    for other in every:
        for name, tensor in static.items():
            with torch.no_grad():
                fresh = torch.tensor(other) if name == "splits" else uniform(-0.25, 0.25, *tensor.shape)
                if name != "splits":
                    fresh[sum(other) :] = float("nan")
                tensor.copy_(fresh)
        for tensor in results.values():
            tensor.detach().fill_(float("nan"))
        reset()
        graph.replay()
        got = {name: tensor.detach().clone() for name, tensor in results.items()}
        reset()
        same(got, {name: tensor.detach().clone() for name, tensor in run().items()})
        yield other, got
