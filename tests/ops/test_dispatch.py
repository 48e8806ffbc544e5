"""Ops, the dispatcher and autograd: whoever watches ops sees them, and all are differentiable once, in reverse mode."""

import contextlib

import pytest
import torch
from block import checkpointed
from compare import assert_bitwise, assert_differentiable_once, assert_same
from operations import MADE_OF, OPERATIONS, SEEN, SIZES, Log, Operation, count_flops, kind_of, make_operation


@pytest.fixture(params=OPERATIONS)
def name(request) -> str:
    return request.param


@pytest.fixture
def operation(grouped_moe, device, name) -> Operation:
    """Each one in turn; all of its leaves require gradients."""
    return make_operation(grouped_moe, name, device)


def test_a_mode_and_a_profiler_see_the_ops(operation, name):
    plain, made_of = operation.step(), MADE_OF[kind_of(name)]
    with Log() as log:
        assert_same(operation.step(), plain)
    assert made_of <= log.names
    with torch.profiler.profile() as profile:
        assert_same(operation.step(), plain)
    names = {event.key.rpartition("::")[2].replace("_overwriting", "") for event in profile.key_averages()}
    assert made_of | SEEN[kind_of(name)] <= names


def test_no_gradient_makes_nothing_for_a_backward(operation, name):
    """Watched or not, where gradients are disabled and where no leaf requires one; the output is the same."""
    function, leaves, _ = operation
    with torch.no_grad():
        plain = function(*leaves.values())
        with Log() as log:
            watched = function(*leaves.values())
    without = function(*(leaf.detach() for leaf in leaves.values()))
    assert not without.requires_grad
    for out in (watched, without, operation.step()["out"]):
        assert_bitwise("out", out, plain)
    forward = {each for each in MADE_OF[kind_of(name)] if "_backward" not in each}
    forward = {"experts_inference"} if "experts_forward" in forward else forward
    assert forward <= log.names and "experts_forward" not in log.names


def test_gradients_accumulate_and_inputs_stay(operation):
    """Two uses of one leaf add up, and gradients of another cotangent leave earlier ones as they are."""
    given = (*operation.leaves.values(), operation.dout)
    before, once = [tensor.detach().clone() for tensor in given], operation.step()
    copies = {key: tensor.clone() for key, tensor in once.items()}
    operation._replace(dout=-operation.dout).step()
    assert_same(once, copies)
    for _ in range(2):
        operation.function(*operation.leaves.values()).backward(operation.dout)
    for key, leaf in operation.leaves.items():
        assert_bitwise(key, leaf.grad, 2 * copies[key])
    for tensor, kept in zip(given, before):
        assert_bitwise("input", tensor.detach(), kept)


@pytest.mark.parametrize("how", ["watched-forward", "watched-backward", "graph"])
def test_checkpoints(grouped_moe, device, name, how):
    """What is saved is the same whether a mode sees the op or not. A graph of the gradients changes nothing."""
    for only in ("", next(iter(make_operation(grouped_moe, name, device).leaves))):
        operation = make_operation(grouped_moe, name, device, only)
        want, wanted = operation.step(), {key: leaf for key, leaf in operation.leaves.items() if leaf.requires_grad}
        with Log() if how == "watched-forward" else contextlib.nullcontext():
            out = checkpointed(operation.function)(*operation.leaves.values())
        with Log() if how == "watched-backward" else contextlib.nullcontext():
            grads = torch.autograd.grad(out, list(wanted.values()), operation.dout, create_graph=how == "graph")
        assert_same({"out": out.detach(), **dict(zip(wanted, grads))}, want)


@pytest.mark.parametrize("values", [[5, 0, 12], [3, 8, 8, 20]], ids=["sizes", "offsets"])
def test_splits_may_change_before_the_backward(grouped_moe, device, values):
    """The gradients are those of the splits that the forward has read."""
    operation, results = make_operation(grouped_moe, "linear", device), []
    for change in (False, True):
        splits, leaves = torch.tensor(values, device=device), list(operation.leaves.values())
        y = grouped_moe.grouped_linear(*leaves[:2], splits, *leaves[2:])
        splits -= int(change)
        results.append(torch.autograd.grad(y, leaves, operation.dout))
    assert_same(*(dict(enumerate(grads)) for grads in results))


def test_a_negative_view(grouped_moe, device):
    """Its memory holds the values with the other sign."""
    function, leaves, _ = make_operation(grouped_moe, "linear", device)
    x, *others = leaves.values()
    view = torch.complex(torch.zeros_like(x), x).detach().conj().imag
    assert view.is_neg()
    assert_bitwise("y", function(view, *others), function(-x, *others))


def test_a_default_device_changes_nothing(grouped_moe, device):
    """What calls make is where their inputs are."""
    dy, x, scales = (torch.randn(shape, device=device) for shape in ((24, 8), (24, 16), (24,)))
    layer = grouped_moe.GroupedLinear(3, 16, 8, delay_wgrad=True, device=device)
    operations = [make_operation(grouped_moe, name, device) for name in OPERATIONS]

    def results():
        for operation in operations:
            yield from operation.step().values()
        layer(x, [5, 0, 12]).backward(dy)
        layer.backward_dw()
        yield from (parameter.grad.clone() for parameter in layer.parameters())
        layer.zero_grad()
        yield from grouped_moe.grouped_dbias_dscales(
            dy, scales, layer.bias.detach(), torch.tensor(SIZES, device=device)
        )

    want = list(results())
    with torch.device("meta"):
        got = list(results())
    assert_same(dict(enumerate(got)), dict(enumerate(want)))


def test_flops(operation, name):
    """`FlopCounterMode` counts the products: 2 M N K each, every slot taken for routed."""
    slots = operation.leaves["top_k_weights"].numel() if name.startswith("experts") else len(operation.dout)
    # Of weights (E, N, K) and of factors, those of all adapters (L, E, r, K) at once.
    flops = {key: 2 * slots * t.numel() // t.shape[-3] for key, t in operation.leaves.items() if t.dim() > 2}
    forward = sum(flops.values())
    again = sum(flops[key] for key in flops if key.startswith("gate_up")) if name.endswith("recompute") else 0
    assert count_flops(operation.step) == 3 * forward + again
    weights = [key for key in flops if "lora" not in key]
    frozen = {key: leaf.detach().requires_grad_(key not in weights) for key, leaf in operation.leaves.items()}
    of_weights = sum(flops[key] for key in weights)
    assert count_flops(operation._replace(leaves=frozen).step) == 3 * forward - of_weights + again
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert count_flops(lambda: operation.function(*operation.leaves.values())) == forward


def test_an_op_below_autograd_records_nothing(grouped_moe, device):
    """As what PyTorch's own functions do in a custom op whose arguments need no gradient: weights may."""
    function, leaves, _ = make_operation(grouped_moe, "experts-silu-bias", device)

    @torch.library.custom_op("grouped_moe_tests::below_autograd", mutates_args=())
    def below(x: torch.Tensor) -> torch.Tensor:
        return function(x, *list(leaves.values())[1:])

    x = next(iter(leaves.values())).detach()
    out = below(x)
    assert not out.requires_grad
    assert_bitwise("out", out, function(x, *list(leaves.values())[1:]).detach())


@pytest.mark.parametrize("single", [True, False], ids=["packed", "discrete"])
def test_flops_of_main_grads(grouped_moe, device, single):
    options = {"bias": False, "single_grouped_weight": single, "accumulate_into_main_grad": True}
    layer = grouped_moe.GroupedLinear(3, 16, 8, **options, device=device)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    x, sizes = torch.rand(24, 16, device=device, requires_grad=True), torch.tensor(SIZES, device=device)
    assert count_flops(lambda: layer(x, sizes).sum().backward()) == 3 * 2 * 24 * 16 * 8


@pytest.mark.parametrize("curved", [False, True], ids=["linear-loss", "curved-loss"])
@pytest.mark.parametrize("backward", [False, True], ids=["grad", "backward"])
@pytest.mark.parametrize("way", ["plain", "watched", "checkpoint"])
def test_differentiable_once(grouped_moe, device, name, way, curved, backward):
    """A second derivative raises, also where all else is frozen: what it depends on may not be among what is saved.

    Of the linear layer and the parts the gradient is a constant then, for a loss that is linear.
    """
    constant = () if curved or name.startswith(("mlp", "experts")) else make_operation(grouped_moe, name, device).leaves
    for only in ("", *make_operation(grouped_moe, name, device).leaves):
        function, leaves, _ = make_operation(grouped_moe, name, device, only)
        if only in (*constant, "down_proj_bias", "bias_scales"):
            continue
        with Log() if way == "watched" else contextlib.nullcontext():
            out = (checkpointed(function) if way == "checkpoint" else function)(*leaves.values())
            assert_differentiable_once(out, leaves[only or next(iter(leaves))], curved, backward)


def test_forward_mode_is_refused(operation):
    leaves = {key: leaf.detach() for key, leaf in operation.leaves.items()}
    for key, leaf in leaves.items():

        def function(tensor):
            return operation.function(*{**leaves, key: tensor}.values())

        with pytest.raises(NotImplementedError, match=r"\(jvp\)|by transforms of torch\.func"):
            torch.func.jvp(function, (leaf,), (torch.ones_like(leaf),))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            function(torch.autograd.forward_ad.make_dual(leaf, torch.ones_like(leaf)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_by_torch_jit(operation):
    """Also of a block, which has flags, and of parts, which hand on a size."""
    function, leaves, _ = operation
    traced = torch.jit.trace(function, tuple(leaves.values()), check_trace=False)
    others = [2.0 * leaf.detach() for leaf in leaves.values()]
    assert_bitwise("traced", traced(*others), function(*others))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("size, num_ids", [("capacity", 3), ("num_experts", 4)])
def test_sizes_are_traced(grouped_moe, device, size, num_ids):
    """`torch.jit.trace` has tensors for them. A capacity has room for all slots of any number of tokens."""
    shapes = (12, 16), (12, 2), (3, 8, 16), (3, 16, 4)
    x, weights, up, down = (torch.randn(shape, device=device) for shape in shapes)
    ids = torch.arange(24, device=device).reshape(12, 2) % num_ids

    def function(x, ids, weights, up):
        if size == "capacity":
            return grouped_moe.grouped_mm_experts(x, ids, weights, up, down, capacity=2 * x.shape[0])
        routing = grouped_moe.route(ids, up.shape[0])
        return grouped_moe.grouped_linear(grouped_moe.gather_rows(x, routing), up, routing.expert_offsets)

    traced = torch.jit.trace(function, (x[:5], ids[:5], weights[:5], up), check_trace=False)
    assert_bitwise("traced", traced(x, ids, weights, up), function(x, ids, weights, up))


@pytest.mark.filterwarnings("ignore:There is a performance drop.*:UserWarning")
def test_batched_gradients(operation, device):
    """`is_grads_batched`, as vectorized Jacobians ask for it, gives each gradient; the graph of them it cannot."""
    function, leaves, dout = operation
    out, leaves = function(*leaves.values()), list(leaves.values())
    douts = torch.randn(3, *dout.shape, device=device)
    want = [torch.autograd.grad(out, leaves, each, retain_graph=True) for each in douts]
    got = torch.autograd.grad(out, leaves, douts, retain_graph=True, is_grads_batched=True)
    for index, grads in enumerate(zip(*want)):
        assert_bitwise(f"gradient {index}", got[index], torch.stack(grads))
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(out, leaves, douts, create_graph=True, is_grads_batched=True)


def test_gradient_transforms_are_refused(operation):
    """By an error that says what works instead, which PyTorch's does not."""
    x, *others = (leaf.detach() for leaf in operation.leaves.values())

    def function(x):
        return operation.function(x, *others).sum()

    of_each = torch.func.vmap(torch.func.grad(function))
    for transformed, tensor in ((torch.func.grad(function), x), (torch.func.jacrev(function), x), (of_each, x[None])):
        with pytest.raises(NotImplementedError, match=r"torch\.func.*torch\.autograd\.grad"):
            transformed(tensor)


@pytest.mark.filterwarnings("ignore:There is a performance drop.*:UserWarning")
def test_vmap(operation, device):
    """A batch of inputs one by one, gradients too, though inside of vmap nothing says that they will be asked for."""
    x, *others = (leaf.detach() for leaf in operation.leaves.values())

    def function(x):
        return operation.function(x, *others)

    batch = torch.randn(3, *x.shape, device=device).requires_grad_()
    out, want = torch.func.vmap(function)(batch), torch.stack([function(x) for x in batch])
    assert_bitwise("out", out, want)
    dout = torch.randn_like(out)
    (got,), (want,) = (torch.autograd.grad(result, batch, dout) for result in (out, want))
    assert_bitwise("grad", got, want)


def test_decomposed_programs(operation):
    """An exported program has gradients. Decomposed, it runs where these are enabled, but to ask for one raises."""
    function, leaves, _ = operation

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    exported, want = torch.export.export(Module(), tuple(leaves.values())), operation.step()
    decomposed = exported.run_decompositions().module()
    assert_same(operation._replace(function=exported.module()).step(), want)
    assert_bitwise("out", decomposed(*leaves.values()), want["out"])
    with torch.no_grad():
        assert not decomposed(*leaves.values()).requires_grad
    for only in leaves:
        given = {key: leaf.detach().requires_grad_(key == only) for key, leaf in leaves.items()}
        with pytest.raises(RuntimeError, match="the program was decomposed, so .* has no gradients"):
            decomposed(*given.values()).sum().backward()
