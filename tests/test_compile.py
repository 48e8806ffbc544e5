"""torch.library.opcheck of every op, and torch.compile: whole graphs, equal to eager, no recompiles for dynamic T."""

import shutil
import sys

import pytest
import torch
from block import Result, assert_same, call, run, with_leaves
from cases import BY_ID, Case, Inputs, make_ids, make_inputs
from compare import assert_bitwise, assert_close
from poison import poisoned_allocations
from torch._dynamo.testing import CompileCounterWithBackend

some_cases = pytest.mark.parametrize("case_id", ["silu", "gpt-oss", "relu2-not-gated"])
by_recompute = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])


@pytest.fixture
def ops(grouped_moe):
    return sys.modules[grouped_moe.__name__ + "._ops"].ops


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def opcheck(op, arguments):
    """`torch.library.opcheck` of an op some of whose results are partly unwritten: that holds the same each time."""
    with poisoned_allocations():
        torch.library.opcheck(op, arguments)


def _local(case_id, device):
    """Inputs without sentinels: opcheck compares every output, and rows past R are unspecified."""
    case = BY_ID[case_id]._replace(sentinels=0.0)
    return case, make_inputs(case, torch.float32, device)


@pytest.fixture
def kind(grouped_moe):
    """The case's kind as the ops take it."""
    kind_arguments = sys.modules[grouped_moe.__name__ + ".block"].kind_arguments

    def arguments(case, recompute):
        activation = grouped_moe.Activation(*case.activation)
        return kind_arguments(activation, case.gated, case.interleaved, case.transposed, recompute)

    return arguments


def op_arguments(inputs, kind):
    """Of the op `experts`: without scales of the second bias, and without a capacity."""
    x, ids, weights, *weights_and_biases, _ = inputs
    return x, ids, weights, None, *weights_and_biases, *kind, None


@some_cases
@by_recompute
def test_opcheck_experts(ops, kind, device, case_id, recompute):
    case, inputs = _local(case_id, device)
    torch.library.opcheck(ops.experts.default, op_arguments(with_leaves(inputs), kind(case, recompute)))
    for save in (True, False):
        opcheck(ops.experts_forward.default, (*op_arguments(inputs, kind(case, recompute)), save))


def test_opcheck_experts_without_gradient(ops, kind, device):
    case, inputs = _local("silu", device)
    for op in (ops.experts, ops.experts_inference):
        torch.library.opcheck(op.default, op_arguments(inputs, kind(case, False)))


@some_cases
@by_recompute
@pytest.mark.parametrize("wanted", ["all", "hidden_states", "weights"])
def test_opcheck_experts_backward(ops, kind, device, case_id, recompute, wanted):
    case, inputs = _local(case_id, device)
    x, *_, up_bias, _, dout = inputs
    arguments = op_arguments(inputs, kind(case, recompute))
    _, *saved = ops.experts_forward(*arguments, not recompute)
    biases = up_bias is not None
    needs = {"all": [True, True, False, True, True, biases, biases], "hidden_states": [True] + [False] * 6}
    needs["weights"] = [False, False, False, True, True, biases, False]
    given = dout, x, *arguments[2:], *saved, needs[wanted]
    torch.library.opcheck(ops.experts_backward.default, given)


def test_opcheck_route(ops, device):
    torch.library.opcheck(ops.route.default, (torch.randint(0, 4, (9, 2), device=device), 4))


@pytest.mark.parametrize("transposed", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("bias_kind", ["no-bias", "bias", "scaled-bias"])
def test_opcheck_grouped_linear(ops, device, transposed, bias_kind):
    x, dy = torch.randn(20, 16, device=device, requires_grad=True), torch.randn(20, 24, device=device)
    weight = torch.randn(3, *((16, 24) if transposed else (24, 16)), device=device, requires_grad=True)
    bias = None if bias_kind == "no-bias" else torch.randn(3, 24, device=device, requires_grad=True)
    scales = torch.rand(20, device=device, requires_grad=True) if bias_kind == "scaled-bias" else None
    offsets = torch.tensor([0, 7, 7, 15], device=device)
    torch.library.opcheck(ops.grouped_linear.default, (x, weight, offsets, bias, scales, transposed))
    tensors = [t if t is None else t.detach() for t in (x, weight, offsets, bias, scales)]
    opcheck(ops.grouped_linear_forward.default, (*tensors, transposed))
    _, schedule = ops.grouped_linear_forward(*tensors, transposed)
    x, weight, _, bias, scales = tensors
    for splits in (offsets, schedule):
        for needs in ((True, True), (True, False), (False, True)):
            given = (dy, x, weight, splits, transposed, *needs)
            torch.library.opcheck(ops.grouped_linear_backward.default, given)
        for needs_bias in (True, False) if scales is not None else (True,) if bias is not None else ():
            given = (dy, splits, 3, None if scales is None else bias, scales, needs_bias)
            torch.library.opcheck(ops.grouped_linear_bias_backward.default, given)
    dw = torch.zeros(3, 24, 16, device=device)
    for overwrite in (False, True):
        torch.library.opcheck(ops.accumulate_wgrad.default, (dw, dy, tensors[0], offsets[1:], overwrite))


def test_opcheck_dbias_dscales(ops, device):
    dy, scales, bias = (torch.randn(shape, device=device) for shape in ((20, 24), (20,), (3, 24)))
    dbias, dscales = torch.zeros(3, 24, device=device), torch.zeros(20, device=device)
    for accumulate in ([True, True], [False, True]):
        given = (dy, scales, bias, torch.tensor([7, 0, 8], device=device), dbias, dscales, accumulate)
        torch.library.opcheck(ops.dbias_dscales.default, given)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_opcheck_grouped_mlp(ops, kind, device, recompute):
    shapes = ((20, 16), (20,), (20,), (3, 24, 16), (3, 16, 12), (3, 24), (3, 16))
    x, act_scales, bias_scales, up, down, up_bias, down_bias = (torch.randn(shape, device=device) for shape in shapes)
    leaves = [t.requires_grad_() for t in (act_scales, bias_scales, up, down, up_bias, down_bias)]
    splits, arguments = torch.tensor([7, 0, 13], device=device), (*kind(BY_ID["silu"], recompute), None)
    torch.library.opcheck(ops.experts.default, (x.requires_grad_(), splits, *leaves, *arguments))
    x, *leaves = (t.detach() for t in (x, *leaves))
    for save in (True, False):
        opcheck(ops.experts_forward.default, (x, splits, *leaves, *arguments, save))
    _, preact, schedule, *_ = ops.experts_forward(x, splits, *leaves, *arguments, not recompute)
    given = (torch.randn(20, 16, device=device), x, *leaves, *arguments, preact, schedule, None, None, [True] * 7)
    torch.library.opcheck(ops.experts_backward.default, given)


def test_opcheck_permute(ops, grouped_moe, device):
    routing = grouped_moe.route(make_ids(Case("permute", T=9, top_k=2)).to(device), 5)
    offsets, row_to_slot, slot_to_row = routing.expert_offsets, routing.row_to_slot, routing.slot_to_row
    x, y = torch.randn(9, 16, device=device), torch.randn(18, 16, device=device)
    weights = torch.rand(9, 2, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, y, weights)]
    maps = offsets, row_to_slot, slot_to_row, 2
    torch.library.opcheck(ops.gather_rows.default, (leaves[0], *maps))
    torch.library.opcheck(ops.gather_rows_forward.default, (x, *maps))
    torch.library.opcheck(ops.combine_rows.default, (*leaves[1:], *maps))
    for factors in (weights, None):
        torch.library.opcheck(ops.combine_rows_forward.default, (y, factors, *maps))
    for rows, needs_dy in ((y, True), (None, True), (y, False)):
        torch.library.opcheck(ops.combine_rows_backward.default, (x, rows, weights, *maps, needs_dy))


def _as_inputs(tensors):
    """`cases.Inputs` without a cotangent."""
    return Inputs(*tensors, None)


def _compiled(grouped_moe, case, backend, **options):
    """A compiled function of the tensors of a block, in one graph."""

    def block(*tensors):
        return call(grouped_moe, case, _as_inputs(tensors))

    return torch.compile(block, fullgraph=True, backend=backend, **options)


def _run_compiled(function, inputs, frozen=()):
    leaves = with_leaves(inputs, frozen)
    out = function(*leaves[:-1])
    out.backward(inputs.dout)
    return Result(out.detach(), {name: t.grad for name, t in leaves.floating().items()})


@by_recompute
@some_cases
def test_compiled_equals_eager(grouped_moe, device, case_id, recompute):
    case = BY_ID[case_id]._replace(recompute=recompute)
    inputs = make_inputs(case, torch.float32, device)
    got = _run_compiled(_compiled(grouped_moe, case, "aot_eager"), inputs)
    assert_same(got, run(grouped_moe, case, inputs))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") or torch.cuda.is_available()), reason="inductor needs a C++ compiler")
def test_compiled_by_inductor(grouped_moe, device):
    """With elementwise work on both sides that inductor may fuse, and a view that it may re-stride."""
    case = BY_ID["gpt-oss"]
    inputs = make_inputs(case, torch.float32, device)

    def block(*tensors):
        tensors = (tensors[0] * 2.0 + 1.0, tensors[1], torch.softmax(tensors[2], -1), *tensors[3:])
        return call(grouped_moe, case, _as_inputs(tensors)).sin()

    got = _run_compiled(torch.compile(block, fullgraph=True), inputs)
    want = _run_compiled(block, inputs)
    assert_close("out", got.out, want.out.double(), torch.float32)
    for name, grad in got.grads.items():
        assert_close(name, grad, want.grads[name].double(), torch.float32, inner_products=name == "top_k_weights")


@pytest.mark.parametrize("how", ["marked", "automatic"])
@some_cases
def test_dynamic_tokens_compile_once(grouped_moe, device, case_id, how):
    """T marked dynamic: one graph for every T > 1. Automatic: one more after the first T that differs."""
    case = BY_ID[case_id]
    counter = CompileCounterWithBackend("aot_eager")
    function = _compiled(grouped_moe, case, counter)
    for tokens in (37, 20, 7, 64, 3):
        shape = case._replace(T=tokens)
        inputs = with_leaves(make_inputs(shape, torch.float32, device))
        if how == "marked":
            for tensor in (inputs.hidden_states, inputs.top_k_index, inputs.top_k_weights):
                torch._dynamo.mark_dynamic(tensor, 0)
        out = function(*inputs[:-1])
        out.backward(inputs.dout)
        want = run(grouped_moe, shape, inputs)
        assert_bitwise("out", out.detach(), want.out)
        for name, leaf in inputs.floating().items():
            assert_bitwise(name, leaf.grad, want.grads[name])
    assert counter.frame_count == {"marked": 1, "automatic": 2}[how]


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

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    found, expected = ([*each(*tensors, ids, sizes)] for each in (compiled, function))
    if training:
        for outputs in (found, expected):
            outputs += torch.autograd.grad(outputs, tensors, [torch.ones_like(output) for output in outputs])
    for number, (one, other) in enumerate(zip(found, expected)):
        assert_bitwise(f"result {number}", one, other)


def test_no_tokens_in_a_dynamic_graph(grouped_moe, device):
    """T = 0 and 1 are sizes that torch.compile specialises on: they compile again, and are right."""
    case = BY_ID["silu"]
    function = _compiled(grouped_moe, case, "aot_eager")
    for tokens in (20, 7, 1, 0, 33):
        shape = case._replace(T=tokens)
        inputs = make_inputs(shape, torch.float32, device)
        assert_same(_run_compiled(function, inputs), run(grouped_moe, shape, inputs))


def test_frozen_weights_compiled(grouped_moe, device):
    case = BY_ID["silu-bias"]
    inputs = make_inputs(case, torch.float32, device)
    frozen = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    got = _run_compiled(_compiled(grouped_moe, case, "aot_eager"), inputs, frozen)
    want = run(grouped_moe, case, inputs)
    assert_bitwise("out", got.out, want.out)
    for name, grad in got.grads.items():
        if name in frozen:
            assert grad is None
        else:
            assert_bitwise(name, grad, want.grads[name])


def test_building_blocks_compile(grouped_moe, device):
    """route, gather, a grouped linear and combine in one graph, for several T."""

    def block(x, ids, weights, weight, bias):
        routing = grouped_moe.route(ids, 5)
        rows = grouped_moe.gather_rows(x, routing)
        rows = torch.relu(grouped_moe.grouped_linear(rows, weight, routing.expert_offsets, bias))
        return grouped_moe.combine_rows(rows, weights, routing)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for tokens in (20, 31, 9, 50):
        ids = make_ids(Case("blocks", T=tokens)).to(device)
        tensors = [torch.randn(s, device=device) for s in ((tokens, 16), (tokens, 3), (5, 24, 16), (5, 24))]
        dout = torch.randn(tokens, 24, device=device)
        results = []
        for function in (block, compiled):
            x, weights, weight, bias = leaves = [t.detach().requires_grad_() for t in tensors]
            out = function(x, ids, weights, weight, bias)
            results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
        for name, want, got in zip(("out", "dx", "dweights", "dweight", "dbias"), *results):
            assert_bitwise(name, got, want)
    assert counter.frame_count == 2


@by_recompute
def test_fake_tensors_propagate(grouped_moe, device, recompute):
    """Shapes and dtypes without data, as for export and memory planning."""
    case = BY_ID["silu-bias"]._replace(recompute=recompute)
    inputs = make_inputs(case, torch.float32, device)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = inputs._replace(**{n: mode.from_tensor(t) for n, t in inputs._asdict().items() if t is not None})
        got = run(grouped_moe, case, fake)
    want = run(grouped_moe, case, inputs)
    for a, b in zip((got.out, *got.grads.values()), (want.out, *want.grads.values())):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_meta_tensors(grouped_moe):
    """Shapes and dtypes on the meta device, where a model is laid out before it is loaded."""
    case = BY_ID["silu-bias"]
    inputs = make_inputs(case, torch.bfloat16, "cpu")
    meta = inputs._replace(**{name: t.to("meta") for name, t in inputs._asdict().items() if t is not None})
    got, want = run(grouped_moe, case, meta), run(grouped_moe, case, inputs)
    for a, b in zip((got.out, *got.grads.values()), (want.out, *want.grads.values())):
        assert (a.device.type, a.shape, a.dtype) == ("meta", b.shape, b.dtype)


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
