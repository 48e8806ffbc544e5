"""torch.library.opcheck of every op, and torch.compile: whole graphs, equal to eager, no recompiles for dynamic T."""

import contextlib
import shutil

import pytest
import torch
from block import assert_same, call, function_of, make, run, with_leaves
from cases import BY_ID, GPU_PARAMS, Case, Inputs, make_ids, make_inputs
from compare import assert_bitwise, assert_close
from operations import OPERATIONS, SIZES, make_operation
from poison import poisoned_allocations
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

by_operation = pytest.mark.parametrize("name", OPERATIONS)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def calls_of(step) -> list:
    """(op, copies of its arguments) of each call of an op of the package, a differentiable one or a part of one."""
    made = []

    def note(function, args, differentiable):
        if not isinstance(function, torch._ops.OpOverload) or "grouped_moe" not in function.namespace:
            return
        if not differentiable or any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            copies = tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), args)
            made.append((function, copies if differentiable else tree_map_only(torch.Tensor, torch.detach, copies)))

    class Outer(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            note(function, args, True)
            return function(*args, **(kwargs or {}))

    class Inner(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            note(function, args, False)
            return function(*args, **(kwargs or {}))

    with Outer(), Inner():
        step()
    return made


def opcheck(step, kind: str = "") -> set:
    """`torch.library.opcheck` of the ops that a step calls, whose names have `kind` in them. Returns the names.

    Fresh memory is poisoned: what results leave unwritten is the same each time. Those that give memory back are left
    out: they cannot be called twice.
    """
    names = set()
    with poisoned_allocations():
        for function, args in calls_of(step):
            name = function.overloadpacket.__name__
            if kind in name and not name.endswith("overwriting"):
                names.add(name)
                torch.library.opcheck(function, args)
    return names


CHECKED = {
    "linear": "grouped_linear grouped_linear_forward grouped_linear_backward grouped_linear_bias_backward",
    "mlp": "grouped_mlp grouped_mlp_forward grouped_mlp_backward",
    "experts": "experts experts_forward experts_backward",
    "parts": "gather_rows gather_rows_forward combine_rows combine_rows_forward combine_rows_backward",
}


@by_operation
def test_opcheck(grouped_moe, device, name):
    """Of a backward that leaves what was saved, for all gradients and for some alone."""
    operation = make_operation(grouped_moe, name, device)
    assert opcheck(lambda: operation.step(retain_graph=True)) == set(CHECKED[name.partition("-")[0]].split())
    for only in list(operation.leaves)[:3]:
        operation = make_operation(grouped_moe, name, device, only)
        assert opcheck(lambda: operation.step(retain_graph=True), "backward")


@pytest.mark.parametrize(
    "case", [BY_ID["silu-bias"], BY_ID["silu-recompute"], *GPU_PARAMS[:2]], ids=lambda case: case.id
)
def test_opcheck_with_a_capacity_and_without_gradients(grouped_moe, device, case):
    inputs = make_inputs(case._replace(sentinels=0.0), torch.float32, device)
    leaves = with_leaves(inputs)
    for spare in (0, 1):
        capacity = case.T * case.top_k + spare
        assert opcheck(lambda: call(grouped_moe, case, leaves, capacity=capacity)) == {"experts", "experts_forward"}
    assert opcheck(lambda: call(grouped_moe, case, inputs)) == {"experts_inference"}
    experts, args = calls_of(lambda: call(grouped_moe, case, leaves))[0]
    torch.library.opcheck(experts, tree_map_only(torch.Tensor, torch.detach, args))


def test_opcheck_of_what_is_not_differentiable(grouped_moe, device):
    x, sizes = torch.randn(24, 16, device=device), torch.tensor(SIZES, device=device)
    assert opcheck(lambda: grouped_moe.route(torch.randint(0, 4, (9, 2), device=device), 4)) == {"route"}
    bias, scales = torch.randn(3, 16, device=device), torch.rand(24, device=device)
    buffers = {"dbias": torch.zeros_like(bias), "dscales": torch.zeros_like(scales)}
    for given in ({}, buffers, {"dscales": buffers["dscales"]}):
        assert opcheck(lambda: grouped_moe.grouped_dbias_dscales(x, scales, bias, sizes, **given)) == {"dbias_dscales"}
    layer = grouped_moe.GroupedLinear(3, 16, 8, bias=False, accumulate_into_main_grad=True, device=device)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    for overwrite in (False, True):
        layer.weight.overwrite_main_grad = overwrite
        assert "accumulate_wgrad" in opcheck(lambda: layer(x, sizes).sum().backward())


def compiled(backend="aot_eager"):
    """What makes one graph of a function."""
    return lambda function: torch.compile(function, fullgraph=True, backend=backend)


@by_operation
def test_compiled_equals_eager(grouped_moe, device, name):
    """Also where all but one input are frozen."""
    for only in ("", *make_operation(grouped_moe, name, device).leaves)[:2]:
        operation = make_operation(grouped_moe, name, device, only)
        got = operation._replace(function=compiled()(operation.function)).step()
        for key, tensor in operation.step().items():
            assert_bitwise(key, got[key], tensor)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") or torch.cuda.is_available()), reason="inductor needs a C++ compiler")
def test_compiled_by_inductor(grouped_moe, device):
    """With elementwise work on both sides that inductor may fuse, and a view that it may re-stride."""
    case, inputs = make("gpt-oss", device)

    def surrounded(block):
        return lambda x, ids, weights, *rest: block(x * 2.0 + 1.0, ids, torch.softmax(weights, -1), *rest).sin()

    got = run(grouped_moe, case, inputs, around=lambda block: compiled("inductor")(surrounded(block)))
    want = run(grouped_moe, case, inputs, around=surrounded)
    assert_close("out", got.out, want.out.double(), torch.float32)
    for name, grad in got.grads.items():
        assert_close(name, grad, want.grads[name].double(), torch.float32, inner_products=name == "top_k_weights")


@pytest.mark.parametrize("way", ["marked", "automatic", "capacity", "capacity-share"])
@pytest.mark.parametrize("case_id", ["silu", "gpt-oss", "relu2-not-gated", "gpt-oss-halves-recompute"])
def test_dynamic_tokens_compile_once(grouped_moe, device, case_id, way):
    """T marked dynamic: one graph for every T > 1. Automatic: one more after the first T that differs.

    With a capacity on both sides of T top_k == capacity, also if it grows with T.
    """
    case, counter = BY_ID[case_id]._replace(sentinels=0.5), CompileCounterWithBackend("aot_eager")

    def block(*tensors):
        capacity = {"capacity": 85, "capacity-share": -(-9 * tensors[1].numel() // 10)}.get(way)
        return call(grouped_moe, case, Inputs(*tensors, None), capacity=capacity)

    function = compiled(counter)(block)

    def marked(*tensors):
        for tensor in tensors[:3] if way == "marked" else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        return function(*tensors)

    for tokens in (37, 20, 7, 33, 3, 40 if way == "capacity" else 1023):
        inputs = make_inputs(case._replace(T=tokens), torch.float32, device)
        inputs.top_k_index[:, :1] = -1  # never more than two thirds are local
        got, want = (run(grouped_moe, case, inputs, around=lambda _: each) for each in (marked, block))
        assert_same(got, want)
    assert counter.frame_count == (1 if way == "marked" else 2)


def test_no_tokens_in_a_dynamic_graph(grouped_moe, device):
    """T = 0 and 1 are sizes that torch.compile specialises on: they compile again, and are right."""
    case = BY_ID["silu"]
    function = compiled()(function_of(grouped_moe, case))
    for tokens in (20, 7, 1, 0, 33):
        inputs = make_inputs(case._replace(T=tokens), torch.float32, device)
        assert_same(run(grouped_moe, case, inputs, around=lambda _: function), run(grouped_moe, case, inputs))


@pytest.mark.parametrize("training", [False, True], ids=["forward", "step"])
def test_all_extents_dynamic(grouped_moe, device, training):
    """With dynamic=True the extents of weights are symbols, too."""
    shapes = ((12, 8), (12, 2), (4, 12, 8), (4, 8, 6), (12,))
    tensors = [torch.rand(shape, device=device).requires_grad_(training) for shape in shapes]
    ids, sizes = torch.randint(0, 5, (12, 2), device=device), torch.tensor([5, 0, 3, 2], device=device)

    def function(x, weights, up, down, scales, ids, sizes):
        y = grouped_moe.grouped_mm_experts(x, ids, weights, up, down)
        rows = grouped_moe.grouped_mlp(x, sizes, scales, up, down)
        return y + rows, grouped_moe.grouped_linear(x, up, sizes)

    dynamic = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    found, expected = ([*each(*tensors, ids, sizes)] for each in (dynamic, function))
    if training:
        for outputs in (found, expected):
            outputs += torch.autograd.grad(outputs, tensors, [torch.ones_like(output) for output in outputs])
    for number, (one, other) in enumerate(zip(found, expected)):
        assert_bitwise(f"result {number}", one, other)


def test_building_blocks_compile(grouped_moe, device):
    """route, gather, a grouped linear and combine in one graph, for several T."""

    def block(x, ids, weights, weight, bias):
        routing = grouped_moe.route(ids, 5)
        rows = grouped_moe.gather_rows(x, routing)
        rows = torch.relu(grouped_moe.grouped_linear(rows, weight, routing.expert_offsets, bias))
        return grouped_moe.combine_rows(rows, weights, routing)

    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(counter)(block)
    for tokens in (20, 31, 9, 50):
        ids = make_ids(Case("blocks", T=tokens)).to(device)
        shapes = ((tokens, 16), (tokens, 3), (5, 24, 16), (5, 24), (tokens, 24))
        *leaves, dout = (torch.randn(shape, device=device) for shape in shapes)
        x, *rest = leaves = [leaf.requires_grad_() for leaf in leaves]
        got, want = (each(x, ids, *rest) for each in (function, block))
        assert_bitwise("out", got, want)
        grads = (torch.autograd.grad(out, leaves, dout) for out in (got, want))
        for name, one, other in zip(("dx", "dweights", "dweight", "dbias"), *grads):
            assert_bitwise(name, one, other)
    assert counter.frame_count == 2


@pytest.mark.parametrize("kind", ["saved", "recompute", "meta"])
def test_tensors_without_data(grouped_moe, device, kind):
    """Shapes and dtypes alone, as for export and memory planning, or on the meta device."""
    case, inputs = make("silu-bias", device, recompute=kind == "recompute")
    want, mode = run(grouped_moe, case, inputs), torch._subclasses.FakeTensorMode()
    as_data = (lambda t: t.to("meta")) if kind == "meta" else mode.from_tensor
    empty = inputs._replace(**{name: as_data(t) for name, t in inputs._asdict().items() if t is not None})
    with contextlib.nullcontext() if kind == "meta" else mode:
        got = run(grouped_moe, case, empty)
    for a, b in zip((got.out, *got.grads.values()), (want.out, *want.grads.values())):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert a.device.type == ("meta" if kind == "meta" else b.device.type)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.parametrize("limit", [None, 7.0], ids=["no-limit", "limit"])
def test_aot_inductor(grouped_moe, device, tmp_path, limit):
    """A block is compiled, saved, loaded and called; without a limit, too, which is no number in what is saved."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = (
                torch.nn.Parameter(torch.randn(shape, device=device)) for shape in ((4, 32, 16), (4, 16, 16))
            )

        def forward(self, x, ids, weights):
            activation = grouped_moe.Activation(limit=limit)
            return grouped_moe.grouped_mm_experts(x, ids, weights, self.up, self.down, activation=activation)

    block, ids = Block().eval(), torch.randint(0, 5, (8, 2), device=device)
    x, weights = torch.randn(8, 16, device=device), torch.rand(8, 2, device=device)
    with torch.no_grad():
        program = torch.export.export(block, (x, ids, weights))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "block.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        assert_bitwise("out", loaded(x, ids, weights), block(x, ids, weights))
