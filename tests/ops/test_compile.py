"""torch.library.opcheck of every op, and torch.compile: whole graphs, equal to eager, no recompiles for dynamic T."""

import contextlib
import shutil
import subprocess
import sys
from functools import partial

import compare
import pytest
import torch
from block import call, make, parts_of, run, with_leaves
from cases import BY_ID, GPU_PARAMS, Inputs, make_inputs
from compare import assert_bitwise, assert_same
from operations import MADE_OF, OPERATIONS, SEEN, SIZES, Log, RecordedLog, kind_of, make_operation
from pairs import LAYOUTS, Pairs, factors, make_loras, with_factors
from poison import poisoned_allocations
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("fresh_compiler")
LORAS = "gate_up_lora", "down_lora"
by_operation = pytest.mark.parametrize("name", OPERATIONS)


def opcheck(step, kind: str = "") -> set:
    """`torch.library.opcheck` of the ops that a step calls, whose names have `kind` in them. Returns the names.

    Fresh memory is poisoned: what results leave unwritten is the same each time. Those that give memory back are left
    out: they cannot be called twice.
    """
    names = set()
    with poisoned_allocations():
        with RecordedLog() as recorded, Log() as log:
            step()
        for op, args in recorded.calls + log.calls:
            name = op.overloadpacket.__name__
            if kind in name and not name.endswith("overwriting"):
                names.add(name)
                torch.library.opcheck(op, args)
    return names


@by_operation
def test_opcheck(grouped_moe, device, name):
    """Of a backward that leaves what was saved, for all gradients and for some alone."""
    operation = make_operation(grouped_moe, name, device)
    assert opcheck(lambda: operation.step(retain_graph=True)) == SEEN[kind_of(name)] | MADE_OF[kind_of(name)]
    for only in dict.fromkeys(list(operation.leaves)[:3] + list(operation.leaves)[-2:]):
        operation = make_operation(grouped_moe, name, device, only)
        assert opcheck(lambda: operation.step(retain_graph=True), "backward")


@pytest.mark.parametrize("case", [BY_ID["silu-bias"], *GPU_PARAMS[:2]], ids=lambda case: case.id)
def test_opcheck_with_and_without_gradients(grouped_moe, device, case):
    inputs = make_inputs(case._replace(sentinels=0.0), torch.float32, device)
    leaves, num_slots = with_leaves(inputs), case.T * case.top_k
    assert opcheck(lambda: call(grouped_moe, case, leaves, capacity=num_slots)) == {"experts", "experts_forward"}
    assert opcheck(lambda: call(grouped_moe, case, inputs)) == {"experts_inference"}
    with RecordedLog() as recorded:
        call(grouped_moe, case, leaves)
    ((experts, args),) = recorded.calls
    torch.library.opcheck(experts, tree_map_only(torch.Tensor, torch.detach, args))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("adapters", [0, 2])
def test_opcheck_of_factors_by_strides(grouped_moe, device, layout, adapters):
    """Of which gradients lie as they do."""
    case = BY_ID["silu"]
    inputs = make_inputs(case, torch.float32, device)
    loras = make_loras(grouped_moe, case, inputs, Pairs(rank=3, adapters=adapters))
    named = {name: layout(factor).requires_grad_() for name, factor in factors(loras).items()}
    loras = with_factors(loras, named)
    index, sizes = loras.get("adapter_index"), torch.full((case.E,), case.T // case.E, device=device)
    steps = {
        "experts_backward": lambda: call(grouped_moe, case, inputs, **loras),
        "grouped_linear_backward": lambda: grouped_moe.grouped_linear(
            inputs.hidden_states, inputs.gate_up_proj, sizes, lora=loras["gate_up_lora"], adapter_index=index
        ),
    }

    def check(op):
        out, leaves = steps[op](), [*named.values()]
        grads = torch.autograd.grad(out, leaves, torch.randn_like(out), retain_graph=True, allow_unused=True)
        for grad, factor in zip(grads, leaves):
            assert grad is None or grad.stride() == torch.empty_like(factor).stride()

    for op in steps:
        assert opcheck(partial(check, op), op) == {op}


def test_opcheck_of_what_is_not_differentiable(grouped_moe, device):
    x, sizes = torch.randn(24, 16, device=device), torch.tensor(SIZES, device=device)
    bias, scales = torch.randn(3, 16, device=device), torch.rand(24, device=device)
    buffers = {"dbias": torch.zeros_like(bias), "dscales": torch.zeros_like(scales)}
    for given in ({}, buffers, {"dscales": buffers["dscales"]}):
        assert opcheck(lambda: grouped_moe.grouped_dbias_dscales(x, scales, bias, sizes, **given)) == {"dbias_dscales"}
    layer = grouped_moe.GroupedLinear(3, 16, 8, bias=False, accumulate_into_main_grad=True, device=device)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    for overwrite in (False, True):
        layer.weight.overwrite_main_grad = overwrite
        assert "accumulate_wgrad" in opcheck(lambda: layer(x, sizes).sum().backward())


@by_operation
def test_compiled_equals_eager(grouped_moe, device, name):
    """For all gradients, one, and none. With dynamic=True the extents of weights are symbols, too."""
    one = next(iter(make_operation(grouped_moe, name, device).leaves))
    for only, dynamic in (("", None), (one, None), ("", True), ("nothing", True)):
        operation = make_operation(grouped_moe, name, device, only)
        function = torch.compile(operation.function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        assert_same(operation._replace(function=function).step(), operation.step())


@pytest.mark.parametrize("of", ["name", "activation", "lora"])
def test_compiled_checkpoints_with_dynamic_numbers(grouped_moe, device, of):
    """Those of an activation or a LoRA are not variables of the graph, which two checkpoints could not share."""
    case, inputs = make("silu-bias", device)
    x, *rest = inputs[:5]
    pair = make_loras(grouped_moe, case, inputs, Pairs(rank=3))["down_lora"][:2]

    def block(x):
        activation = grouped_moe.Activation("silu", limit=2.0) if of == "activation" else "quick_gelu"
        lora = grouped_moe.LoRA(*pair) if of == "lora" else None
        return grouped_moe.grouped_mm_experts(x, *rest, activation=activation, down_lora=lora)

    def twice(x):
        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=False)
        return x

    got = torch.compile(twice, fullgraph=True, dynamic=True, backend="aot_eager")(x.requires_grad_())
    assert_bitwise("out", got, twice(x))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") or torch.cuda.is_available()), reason="inductor needs a C++ compiler")
def test_compiled_by_inductor(grouped_moe, device):
    """With elementwise work on both sides that inductor may fuse, and a view that it may re-stride."""
    case, inputs = make("gpt-oss", device)

    def surrounded(block):
        return lambda x, ids, weights, *rest: block(x * 2.0 + 1.0, ids, torch.softmax(weights, -1), *rest).sin()

    got = run(grouped_moe, case, inputs, around=lambda block: torch.compile(surrounded(block), fullgraph=True))
    want = run(grouped_moe, case, inputs, around=surrounded)
    compare.assert_matches(got, {name: tensor.double() for name, tensor in want.items()}, torch.float32)


@by_operation
def test_compiled_backward_of_an_eager_forward(grouped_moe, device, name):
    """By compiled autograd, as behind a graph break in a step that is compiled."""
    function, leaves, dout = operation = make_operation(grouped_moe, name, device)
    want = operation.step()
    eagerly = torch.compiler.disable(function)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: eagerly(*leaves.values()).backward(dout), backend="aot_eager")()
    compare.assert_part({key: leaf.grad for key, leaf in leaves.items()}, want)


DYNAMIC = [(case_id, way) for case_id in ("silu", "gpt-oss", "relu2-not-gated", "gpt-oss-halves-recompute")
           for way in ("marked", "automatic", "capacity", "capacity-share")]  # fmt: skip
ADAPTED = {"lora": Pairs(rank=3), "adapters": Pairs(rank=3, adapters=2)}
MADE = [("relu2-not-gated", "parts"), *(("silu", way) for way in ADAPTED)]


@pytest.mark.parametrize("case_id, way", DYNAMIC + MADE)
def test_dynamic_tokens_compile_once(grouped_moe, device, case_id, way):
    """T marked dynamic: one graph for every T > 1. Automatic: one more after the first T that differs, and for 1 and 0.

    With a capacity on both sides of T top_k == capacity, also if it grows with T. And made of the building blocks, or
    with low-rank pairs.
    """
    case, counter = BY_ID[case_id]._replace(sentinels=0.5), CompileCounterWithBackend("aot_eager")
    some = make_inputs(case, torch.float32, device)
    loras = make_loras(grouped_moe, case, some, ADAPTED[way]) if way in ADAPTED else {}
    loras.pop("adapter_index", None)
    is_marked, named = way in ("marked", *ADAPTED), [factor.requires_grad_() for factor in factors(loras).values()]

    def block(*tensors):
        capacity = {"capacity": 85, "capacity-share": -(-9 * tensors[1].numel() // 10)}.get(way)
        adapters = {"adapter_index": tensors[1][:, 1].clamp(-1, 2)} if way == "adapters" else {}
        return call(grouped_moe, case, Inputs(*tensors, None), capacity=capacity, **loras, **adapters)

    block = parts_of(grouped_moe, case) if way == "parts" else block
    function = torch.compile(block, fullgraph=True, backend=counter)

    def marked(*tensors):
        for tensor in tensors[:3] if is_marked else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        return function(*tensors)

    def check(tokens):
        inputs = make_inputs(case._replace(T=tokens), torch.float32, device)
        inputs.top_k_index[:, :1] = -1  # never more than two thirds are local
        results = []
        for each in (marked, block):
            results.append(run(grouped_moe, case, inputs, around=lambda _: each))
            results[-1].update({str(number): factor.grad for number, factor in enumerate(named)})
            for factor in named:
                factor.grad = None
        assert_same(*results)

    for tokens in (37, 20, 7, 33, 3, 40 if way == "capacity" else 1023):
        check(tokens)
    assert counter.frame_count == (1 if is_marked else 2)
    for tokens in (1, 0) if way == "automatic" else ():
        check(tokens)


@pytest.mark.parametrize("kind", ["saved", "recompute", "meta"])
def test_tensors_without_data(grouped_moe, device, kind):
    """Shapes and dtypes alone, as for export and memory planning, or on the meta device."""
    case, inputs = make("silu-bias", device, recompute=kind == "recompute")
    want, mode = run(grouped_moe, case, inputs), torch._subclasses.FakeTensorMode()
    as_data = (lambda t: t.to("meta")) if kind == "meta" else mode.from_tensor
    empty = inputs._replace(**{name: as_data(t) for name, t in inputs._asdict().items() if t is not None})
    with contextlib.nullcontext() if kind == "meta" else mode:
        got = run(grouped_moe, case, empty)
    for a, b in zip(got.values(), want.values()):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert a.device.type == ("meta" if kind == "meta" else b.device.type)


by_strict = pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])


@by_strict
def test_export_of_sizes_made_of_extents(grouped_moe, device, strict):
    """A list of sizes may have symbolic ones."""

    class Layer(torch.nn.Module):
        def forward(self, x, weight):
            return grouped_moe.grouped_linear(x, weight, [x.shape[0] - 3, 0, 3])

    x, weight = torch.randn(20, 8, device=device), torch.randn(3, 4, 8, device=device)
    dynamic = {0: torch.export.Dim("rows", min=4, max=99)}, None
    program = torch.export.export(Layer(), (x[:12], weight), dynamic_shapes=dynamic, strict=strict).module()
    for rows in (12, 20, 4):
        assert_bitwise(f"{rows} rows", program(x[:rows], weight), Layer()(x[:rows], weight))


@by_strict
def test_export_with_any_number_of_adapters(grouped_moe, device, strict):
    """A program is exported with two, and called with three."""
    case, inputs = make("silu", device)

    class Block(torch.nn.Module):
        def forward(self, up_a, up_b, down_a, down_b, adapters):
            pairs = grouped_moe.LoRA(up_a, up_b), grouped_moe.LoRA(down_a, down_b)
            return call(grouped_moe, case, inputs, **dict(zip(LORAS, pairs)), adapter_index=adapters)

    def arguments(adapters):
        loras = make_loras(grouped_moe, case, inputs, Pairs(adapters=adapters))
        return *(factor for name in LORAS for factor in loras[name][:2]), loras["adapter_index"]

    dynamic = *({0: torch.export.Dim.AUTO},) * 4, None
    with torch.no_grad():
        program = torch.export.export(Block(), arguments(2), dynamic_shapes=dynamic, strict=strict).module()
        given = arguments(3)
        assert_bitwise("out", program(*given), Block()(*given))


@by_strict
def test_export_with_any_number_of_choices(grouped_moe, device, strict):
    """And of tokens: the building blocks tell them apart by a symbolic top_k."""

    class Blocks(torch.nn.Module):
        def forward(self, x, ids, weights):
            routing = grouped_moe.route(ids, 4)
            return grouped_moe.combine_rows(grouped_moe.gather_rows(x, routing).sin(), weights, routing)

    def arguments(tokens, top_k):
        ids, weights = torch.randint(-1, 5, (tokens, top_k)), torch.rand(tokens, top_k)
        return torch.randn(tokens, 8, device=device), ids.to(device), weights.to(device)

    tokens, top_k = torch.export.Dim("tokens", min=2), torch.export.Dim("top_k", min=2)
    dynamic = {0: tokens}, {0: tokens, 1: top_k}, {0: tokens, 1: top_k}
    program = torch.export.export(Blocks(), arguments(6, 3), dynamic_shapes=dynamic, strict=strict).module()
    given = arguments(9, 2)
    assert_bitwise("out", program(*given), Blocks()(*given))


LOADS_RELU = """
import torch
x, block = torch.ones(2, device="{device}"), torch.nn.ReLU()
path = torch._inductor.aoti_compile_and_package(torch.export.export(block, (x,)), package_path="{path}")
torch._inductor.aoti_load_package(path)(x)
"""


@pytest.fixture(scope="module")
def loads_models(device, tmp_path_factory) -> None:
    """Skips where PyTorch cannot load what AOTInductor makes of a relu: with some C++ libraries it ends the process."""
    program = LOADS_RELU.format(device=device, path=tmp_path_factory.mktemp("relu") / "relu.pt2")
    if device != "cpu" and subprocess.run([sys.executable, "-c", program], capture_output=True).returncode:
        pytest.skip("AOTInductor cannot load a relu here")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.parametrize("limit", [None, 7.0, float("inf")], ids=["no-limit", "limit", "infinite"])
def test_aot_inductor(grouped_moe, device, tmp_path, limit, loads_models):
    """A block is compiled, saved, loaded and called; without a limit, too, which is no number in what is saved."""

    class Block(torch.nn.Module):
        def forward(self, *tensors):
            return grouped_moe.grouped_mm_experts(*tensors, activation=grouped_moe.Activation(limit=limit))

    block, tensors = Block().eval(), make("silu", device)[1][:5]
    with torch.no_grad():
        program = torch.export.export(block, tensors)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "block.pt2"))
        assert_bitwise("out", torch._inductor.aoti_load_package(path)(*tensors), block(*tensors))
