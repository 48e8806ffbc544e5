"""The capacity of grouped_mm_experts: buffers of fewer rows, the same results, and an error instead of wrong ones."""

import os
import subprocess
import sys

import pytest
import torch
from block import assert_same, call, run, with_leaves
from cases import BY_ID, CASES, make_inputs
from compare import assert_bitwise
from poison import allocated_by, is_sentinel, poison_sentinels, poisoned_allocations
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

SOME = ["silu", "silu-bias", "silu-mostly-sentinels", "gpt-oss", "relu2-not-gated", "silu-recompute", "tall"]
some_cases = pytest.mark.parametrize("case_id", SOME)
by_recompute = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])


def routed(case, inputs) -> int:
    """R, the slots of local experts."""
    return int((~is_sentinel(inputs.top_k_index, case.E)).sum())


def make(case_id, device, dtype=torch.float32):
    """(case, its inputs, R): with sentinels, so that there is room to save."""
    case = BY_ID[case_id]
    inputs = make_inputs(case, dtype, device)
    return case, inputs, routed(case, inputs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_exact_capacity_changes_nothing(grouped_moe, device, case):
    """R == capacity, with NaN in all fresh memory and in all that the contract says is not read."""
    inputs = make_inputs(case, torch.float32, device)
    want = run(grouped_moe, case, inputs)
    with poisoned_allocations():
        capacity = max(1, routed(case, inputs))
        got = run(grouped_moe, case, poison_sentinels(inputs, case.E), capacity=capacity)
    assert_same(got, want)


@some_cases
def test_room_to_spare_changes_nothing(grouped_moe, device, case_id):
    """Between R and S, at S and above: of these the latter two are what there is without a capacity."""
    case, inputs, num_routed = make(case_id, device)
    want, num_slots = run(grouped_moe, case, inputs), case.T * case.top_k
    for capacity in ((num_routed + num_slots) // 2, num_slots, num_slots + 1, 2**40):
        assert_same(run(grouped_moe, case, inputs, capacity=capacity), want)


@pytest.mark.parametrize("tokens", [0, 3])
@by_recompute
def test_no_routed_row(grouped_moe, device, tokens, recompute):
    case = BY_ID["gpt-oss"]._replace(T=tokens, recompute=recompute)
    inputs = make_inputs(case, torch.float32, device)
    inputs = inputs._replace(top_k_index=torch.full_like(inputs.top_k_index, case.E))
    assert_same(run(grouped_moe, case, inputs, capacity=1), run(grouped_moe, case, inputs))


def test_without_gradient(grouped_moe, device):
    case, inputs, num_routed = make("silu-bias", device)
    assert_bitwise("out", call(grouped_moe, case, inputs, capacity=num_routed), call(grouped_moe, case, inputs))


@by_recompute
def test_frozen_weights(grouped_moe, device, recompute):
    case, inputs, num_routed = make("gpt-oss", device)
    frozen = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    got = run(grouped_moe, case, inputs, frozen, recompute=recompute, capacity=num_routed)
    want = run(grouped_moe, case, inputs, frozen, recompute=recompute)
    assert_bitwise("out", got.out, want.out)
    for name in ("hidden_states", "top_k_weights"):
        assert_bitwise(name, got.grads[name], want.grads[name])


@pytest.mark.parametrize("gradient", [True, False], ids=["with-gradient", "without-gradient"])
@pytest.mark.parametrize("missing", [1, 5])
def test_overflow_raises(grouped_moe, missing, gradient):
    """On the CPU at once, with both numbers."""
    case, inputs, num_routed = make("silu", "cpu")
    inputs = with_leaves(inputs) if gradient else inputs
    message = rf"^capacity: expected at least the {num_routed} slots .* local experts, got {num_routed - missing}$"
    with pytest.raises(RuntimeError, match=message):
        call(grouped_moe, case, inputs, capacity=num_routed - missing)


@pytest.mark.parametrize("value", [0, -1, -(2**40)])
def test_capacity_below_one(grouped_moe, device, value):
    case, inputs, _ = make("silu", device)
    with pytest.raises(ValueError, match=f"^capacity: expected above 0, got {value}$"):
        call(grouped_moe, case, inputs, capacity=value)


@pytest.mark.parametrize("value", [1.0, "8", True, torch.tensor(8)], ids=lambda value: type(value).__name__)
def test_capacity_is_an_int(grouped_moe, device, value):
    case, inputs, _ = make("silu", device)
    with pytest.raises(TypeError, match=f"^capacity: expected an int or None, got {type(value).__name__}$"):
        call(grouped_moe, case, inputs, capacity=value)


def saved_shapes(grouped_moe, case, inputs, **changes):
    """Shapes of what a forward saves beside its inputs, in order."""
    saved = []
    given = {t.data_ptr() for t in inputs if t is not None}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call(grouped_moe, case, with_leaves(inputs), **changes)
    return [tuple(t.shape) for t in saved if t.data_ptr() not in given]


@by_recompute
def test_what_is_saved_has_room_for_the_capacity(grouped_moe, device, recompute):
    """Whatever the routing."""
    case, inputs, num_routed = make("tall", device)
    schedule_size = sys.modules[grouped_moe.__name__ + ".rows"].schedule_size
    capacity = num_routed + 3
    preact = (0,) if recompute else (capacity, case.preact_width)
    want = [preact, (schedule_size(capacity, case.E),), (capacity,), (case.T * case.top_k,)]
    assert capacity < case.T * case.top_k
    for ids in (inputs.top_k_index, torch.full_like(inputs.top_k_index, -1)):
        given = inputs._replace(top_k_index=ids)
        assert saved_shapes(grouped_moe, case, given, capacity=capacity, recompute=recompute) == want


@by_recompute
def test_activation_checkpointing(grouped_moe, device, recompute):
    case, inputs, num_routed = make("gpt-oss", device)
    want = run(grouped_moe, case, inputs)
    leaves = with_leaves(inputs)
    out = checkpoint(
        lambda: call(grouped_moe, case, leaves, capacity=num_routed, recompute=recompute), use_reentrant=False
    )
    out.backward(inputs.dout)
    assert_bitwise("out", out.detach(), want.out)
    for name, leaf in leaves.floating().items():
        assert_bitwise(name, leaf.grad, want.grads[name])


def test_autocast(grouped_moe, device):
    case, inputs, num_routed = make("silu-bias", device)
    with torch.autocast(device, torch.bfloat16):
        got, want = (call(grouped_moe, case, inputs, capacity=capacity) for capacity in (num_routed, None))
    assert got.dtype == torch.bfloat16
    assert_bitwise("out", got, want)


@by_recompute
def test_opcheck(grouped_moe, device, recompute):
    case = BY_ID["silu-bias"]._replace(sentinels=0.0)  # rows past R are unspecified, and compared
    inputs = make_inputs(case, torch.float32, device)
    ops = sys.modules[grouped_moe.__name__ + "._ops"].ops
    kind_arguments = sys.modules[grouped_moe.__name__ + ".block"].kind_arguments
    kind = kind_arguments(grouped_moe.Activation(*case.activation), True, False, False, recompute)
    num_slots = case.T * case.top_k
    for capacity in (num_slots, num_slots + 1):
        x, ids, weights, *rest, _ = with_leaves(inputs)
        torch.library.opcheck(ops.experts.default, (x, ids, weights, None, *rest, *kind, capacity))
        x, ids, weights, *rest, _ = inputs
        with poisoned_allocations():  # what of the schedule is not written is compared as well
            torch.library.opcheck(ops.experts_forward.default, (x, ids, weights, None, *rest, *kind, capacity, True))


@pytest.mark.parametrize("kind", ["number", "share"])
@by_recompute
def test_dynamic_tokens_compile_once(grouped_moe, device, kind, recompute):
    """One graph more after the first T that differs, on both sides of T top_k == capacity; also if it grows with T."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def block(*tensors):
        num_slots = tensors[1].shape[0] * tensors[1].shape[1]
        capacity = 85 if kind == "number" else -(-9 * num_slots // 10)
        return call(grouped_moe, case, inputs._replace(**dict(zip(inputs._fields, tensors))), capacity=capacity)

    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for tokens in (37, 20, 7, 33, 40, 3):
        case = BY_ID["gpt-oss"]._replace(T=tokens, recompute=recompute, sentinels=0.5)
        inputs = make_inputs(case, torch.float32, device)
        inputs.top_k_index[:, :1] = -1  # never more than two thirds are local
        inputs = with_leaves(inputs)
        out = compiled(*inputs[:-1])
        out.backward(inputs.dout)
        want = run(grouped_moe, case, inputs)
        assert_bitwise("out", out.detach(), want.out)
        for name, leaf in inputs.floating().items():
            assert_bitwise(name, leaf.grad, want.grads[name])
    assert counter.frame_count == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA graphs")
@by_recompute
def test_graph_replays_with_other_routing(grouped_moe, recompute):
    """The check of the count captures; every routing that fits replays as eager does."""
    case, inputs, _ = make("tall", "cuda")
    capacity = 3 * case.T * case.top_k // 4
    inputs.top_k_index[:, :1] = -1
    leaves = list(with_leaves(inputs).floating())
    static = with_leaves(inputs)

    def step():
        out = call(grouped_moe, case, static, recompute=recompute, capacity=capacity)
        return out, torch.autograd.grad(out, [getattr(static, name) for name in leaves], inputs.dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grads = step()
    for _ in range(3):
        ids = make_inputs(case, torch.float32, "cuda").top_k_index
        ids[:, :1] = -1
        inputs.top_k_index.copy_(ids)
        graph.replay()
        want = run(grouped_moe, case, inputs, recompute=recompute)
        assert_bitwise("out", out, want.out)
        for name, grad in zip(leaves, grads):
            assert_bitwise(name, grad, want.grads[name])


OVERFLOW = """
import kernels, torch
grouped_moe = kernels.get_kernel({!r}, version={})
x, weights = torch.randn(64, 32, device="cuda"), torch.rand(64, 2, device="cuda")
up, down = torch.randn(4, 48, 32, device="cuda"), torch.randn(4, 32, 24, device="cuda")
ids = torch.arange(128, device="cuda").view(64, 2) % 8  # of 128 slots 64 are local
grouped_moe.grouped_mm_experts(x, ids, weights, up, down, capacity=64)
torch.cuda.synchronize()
print("fits", flush=True)
grouped_moe.grouped_mm_experts(x, ids, weights, up, down, capacity=63)
print("no sync", flush=True)
torch.cuda.synchronize()
print("not reached", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None, reason="needs CUDA's device-side assertions"
)
def test_overflow_on_the_device(hub):
    """An assertion, which ends the process's use of the device: hence a process of its own."""
    code = OVERFLOW.format(hub.repo_id, hub.version)
    result = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0 and result.stdout.split("\n")[:2] == ["fits", "no sync"], result.stderr
    assert "not reached" not in result.stdout and "device-side assert" in result.stderr
    assert "grouped_mm_experts: capacity" in result.stderr and "got 63" in result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA's memory statistics")
@by_recompute
def test_peak_memory(grouped_moe, recompute):
    """An eighth of the slots is local: what the docstring says, of an eighth of the rows."""
    tokens, top_k, experts, h, i = 8192, 8, 16, 1024, 384
    rows, p = tokens * top_k // 8, 2 * i
    x, up, down = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for shape in ((tokens, h), (experts, p, h), (experts, h, i))
    )
    ids = torch.arange(tokens * top_k, device="cuda").view(tokens, top_k) % (8 * experts)
    weights = torch.rand(tokens, top_k, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def forward():
        return grouped_moe.grouped_mm_experts(x, ids, weights, up, down, recompute=recompute, capacity=rows)

    dout = torch.randn_like(x)
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(forward(), (x, weights, up, down), dout)  # compiles
    taken, out = allocated_by(forward)
    saved = 0 if recompute else rows * p
    assert taken == pytest.approx(2 * (saved + max(rows * (i + h), rows * h + tokens * h)), rel=0.05)
    taken, _ = allocated_by(lambda: torch.autograd.grad(out, (x, weights, up, down), dout))
    made = rows * p if recompute else 0
    gradients = sum(t.numel() for t in (x, weights, up, down))
    stages = (x.numel() + rows * (i + h), gradients - down.numel() + rows * i, gradients + rows * (i - p))
    assert taken == pytest.approx(2 * (made + max(stages)), rel=0.05)
