"""What only a GPU can show: graphs, streams, syncs, peak memory, tf32, a second device.

Shapes are few on purpose: every new one compiles kernels.
"""

import importlib
import sys
import threading

import pytest
import torch
from block import call, random_inputs, reference_step, step, with_leaves
from cases import RELU2, Case, Inputs, make_ids, make_inputs
from compare import assert_bitwise, assert_close
from poison import allocated_by, dirty_allocator, poisoned_allocations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="uses torch.cuda"),
]

SMALL = Case("small", T=1, top_k=4, E=6, H=64, I=48)
MEDIUM = Case("medium", T=600, top_k=4, E=6, H=64, I=48)  # more than 2048 slots: the routing that takes three launches
BIAS = MEDIUM._replace(id="bias", bias="both", interleaved=True, activation=("silu", 1.702, 0.5625, 1.0))
WIDE = MEDIUM._replace(id="wide", H=72, I=136)  # which Hopper's own kernels take
WIDE_BIAS = BIAS._replace(id="wide-bias", H=72, I=136, transposed=True)
DEEP = WIDE._replace(id="deep", H=392)  # more steps than the ring of the up-projection has
NOT_GATED = WIDE._replace(id="wide-not-gated", gated=False, activation=RELU2)
CASES = pytest.mark.parametrize(
    "case", [SMALL, MEDIUM, BIAS, WIDE, WIDE_BIAS, DEEP, NOT_GATED], ids=lambda case: case.id
)  # fmt: skip


def assert_same(got: list, want: list) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want)):
        assert_bitwise(f"result {i}", a, b)


def fresh(inputs: Inputs, ids: torch.Tensor) -> dict:
    """Other numbers for everything that changes from one batch to the next."""
    changing = ("hidden_states", "top_k_weights", "dout")
    return {"top_k_index": ids, **{name: torch.randn_like(getattr(inputs, name)) for name in changing}}


@CASES
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "step"])
def test_graph_replays_with_other_routing(grouped_moe, device, case, backward):
    """One capture, then batches with other routing, all sentinels among them: each bitwise equal to eager."""
    inputs = with_leaves(make_inputs(case, torch.bfloat16, device))

    def run() -> list:
        if backward:
            return step(grouped_moe, case, inputs)
        with torch.no_grad():
            return [call(grouped_moe, case, inputs)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [tensor.detach() for tensor in run()]
    routings = [make_ids(case._replace(sentinels=share)) for share in (0.0, 0.3, 0.9)]
    routings += [torch.full_like(routings[0], value) for value in (case.E, -1, case.E - 1)]
    for ids in routings:
        with torch.no_grad():
            for name, tensor in fresh(inputs, ids).items():
                getattr(inputs, name).copy_(tensor)
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        assert_same(replayed, [tensor.detach() for tensor in run()])


@CASES
def test_no_host_sync(grouped_moe, device, case):
    """Of the experts block and of the building blocks, in both directions."""
    inputs = with_leaves(make_inputs(case, torch.bfloat16, device))
    weight = (inputs.down_proj if case.transposed else inputs.down_proj.mT).detach().requires_grad_()  # (E, I, H)

    def building_blocks() -> None:
        routing = grouped_moe.route(inputs.top_k_index, case.E)
        rows = grouped_moe.gather_rows(inputs.hidden_states, routing)
        rows = grouped_moe.grouped_linear(rows, weight, routing.expert_offsets)
        rows = grouped_moe.grouped_linear(rows, weight, routing.expert_offsets, transposed=True)
        out = grouped_moe.combine_rows(rows, inputs.top_k_weights, routing)
        torch.autograd.grad(out, (inputs.hidden_states, inputs.top_k_weights, weight), inputs.dout)

    def everything() -> None:
        step(grouped_moe, case, inputs)
        step(grouped_moe, case, inputs, recompute=True)
        building_blocks()

    everything()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@CASES
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
def test_dirty_allocator(grouped_moe, device, case, recompute):
    """Steps one after the other, on memory full of NaN, repeat the first one bitwise."""
    inputs = with_leaves(make_inputs(case._replace(sentinels=0.7), torch.bfloat16, device))
    want = step(grouped_moe, case, inputs, recompute)
    assert all(bool(tensor.isfinite().all()) for tensor in want)
    for _ in range(3):
        dirty_allocator(device, 1 << 24)
        assert_same(step(grouped_moe, case, inputs, recompute), want)
    with poisoned_allocations():
        for _ in range(2):
            assert_same(step(grouped_moe, case, inputs, recompute), want)


def test_two_backwards_of_one_forward_on_dirty_memory(grouped_moe, device):
    inputs = with_leaves(make_inputs(BIAS._replace(sentinels=0.7), torch.bfloat16, device))
    tensors = list(inputs.floating().values())
    out = call(grouped_moe, BIAS, inputs)
    want = torch.autograd.grad(out, tensors, inputs.dout, retain_graph=True)
    dirty_allocator(device, 1 << 24)
    assert_same(torch.autograd.grad(out, tensors, inputs.dout), want)


def test_sentinels_cost_no_memory_access(grouped_moe, device):
    """Rows past the routed ones stay as they were allocated: nothing passed over them."""
    inputs = with_leaves(make_inputs(MEDIUM._replace(sentinels=0.7), torch.bfloat16, device))
    routed = int(((inputs.top_k_index >= 0) & (inputs.top_k_index < MEDIUM.E)).sum())
    preacts = []

    def pack(tensor):
        if tensor.dim() == 2 and tensor.shape[1] == MEDIUM.preact_width and tensor.shape[0] == MEDIUM.T * MEDIUM.top_k:
            preacts.append(tensor)
        return tensor

    with poisoned_allocations(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(grouped_moe, MEDIUM, inputs)
    (preact,) = preacts
    assert 0 < routed < len(preact)
    assert bool(preact[:routed].isfinite().all()) and bool(preact[routed:].isnan().all())


def test_streams_do_not_share_buffers(grouped_moe, device):
    """Steps that run at once on several streams give what they give alone."""
    batches = [with_leaves(make_inputs(MEDIUM, torch.bfloat16, device)) for _ in range(4)]
    want = [step(grouped_moe, MEDIUM, inputs) for inputs in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for stream, inputs in zip(streams, batches):
            with torch.cuda.stream(stream):
                got.append(step(grouped_moe, MEDIUM, inputs))
        torch.cuda.synchronize()
        for a, b in zip(got, want):
            assert_same(a, b)
        del got


LARGE = Case("large", T=8192, top_k=8, E=16, H=1024, I=384, sentinels=0.0)
FEW_COLUMNS = LARGE._replace(id="wide-intermediate", H=256, I=768)
LARGE_NOT_GATED = FEW_COLUMNS._replace(id="not-gated", gated=False, activation=RELU2)


@pytest.mark.parametrize("case", [LARGE, FEW_COLUMNS, LARGE_NOT_GATED], ids=lambda case: case.id)
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
@pytest.mark.parametrize("local", [True, False], ids=["all-local", "all-sentinels"])
def test_peak_memory_is_what_the_docstring_says(grouped_moe, device, case, recompute, local):
    """Whatever the routing: buffers depend on S. Small index tensors are within the 2 %."""
    ids = torch.randint(0, case.E, (case.T, case.top_k), device=device) + (0 if local else case.E)
    inputs = random_inputs(case, device, ids)
    tensors = list(inputs.floating().values())
    with torch.autograd.set_multithreading_enabled(False):
        step(grouped_moe, case, inputs, recompute)  # compiles
    s, h, i, p = case.T * case.top_k, case.H, case.I, case.preact_width
    saved = 0 if recompute else s * p  # hidden_states are there already
    expected_forward = saved + max(s * (i + h), s * h + case.T * h)
    sizes = {name: tensor.numel() for name, tensor in inputs.floating().items()}
    hopper = torch.cuda.get_device_capability() == (9, 0)
    made = s * p if recompute else 0  # the pre-activation, before it gives way to the last gradient
    stages = (
        made + s * (i + h * hopper),
        made + sizes["top_k_weights"] + s * (i + h) + case.T * h,
        made + sum(sizes.values()) - sizes["down_proj"] + s * i,
        made + sum(sizes.values()) + s * (i - p),
    )
    expected_backward = max(stages)
    peak, out = allocated_by(lambda: call(grouped_moe, case, inputs, recompute=recompute))
    assert peak == pytest.approx(2 * expected_forward, rel=0.02)
    peak, _ = allocated_by(lambda: torch.autograd.grad(out, tensors, inputs.dout))
    assert peak == pytest.approx(2 * expected_backward, rel=0.02)


@pytest.fixture
def tf32_flag():
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_tf32_only_where_the_flag_allows_it(grouped_moe, device, tf32_flag):
    """ieee fp32 by default: within 1e-6 of fp64. With the flag: other bits, at the precision of tf32.

    The matrix units truncate operands to 10 bits: up to 2^-10 each, both of a product the same way, and a gradient is
    up to three products deep. On average half of that: 3 * 2^-10.
    """
    case = Case("fp32", T=200, top_k=2, E=4, H=96, I=64, sentinels=0.3)
    inputs = with_leaves(make_inputs(case, torch.float32, device))
    want = reference_step(grouped_moe, case, inputs, torch.arange(case.T, device=device))
    results = {}
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        results[allowed] = [tensor.detach() for tensor in step(grouped_moe, case, inputs)]
    for exact, rough, true in zip(results[False], results[True], want):
        assert float((exact.double() - true).norm() / true.norm()) < 1e-6
        assert float((rough.double() - true).norm() / true.norm()) < 3 * 2**-10
    if torch.version.hip is None:  # tf32 is a mode of NVIDIA's matrix units
        assert not torch.equal(results[False][0], results[True][0])


@pytest.mark.parametrize("case", [SMALL, MEDIUM], ids=lambda case: case.id)
def test_opcheck(grouped_moe, device, case):
    """Without sentinels: rows that nothing writes would compare as different."""
    experts = importlib.import_module(grouped_moe.__name__ + "._ops").ops.experts.default
    inputs = with_leaves(make_inputs(case._replace(sentinels=0.0), torch.float32, device))
    kind_arguments = importlib.import_module(grouped_moe.__name__ + ".block").kind_arguments
    kind = kind_arguments(grouped_moe.Activation(), True, False, False, False)
    torch.library.opcheck(experts, (*inputs[:3], None, *inputs[3:5], None, None, *kind, None))


@pytest.mark.skipif(sys.platform == "win32", reason="inductor needs a C++ compiler")
def test_compiles_whole_without_recompiling_over_tokens(grouped_moe, device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: grouped_moe.grouped_mm_experts(*inputs) * 2, fullgraph=True, dynamic=True)
    for number, tokens in enumerate((300, 17, 64, 1023)):
        case = MEDIUM._replace(T=tokens)
        inputs = with_leaves(make_inputs(case, torch.bfloat16, device))
        tensors = list(inputs.floating().values())
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = compiled(*inputs[:5])
            grads = torch.autograd.grad(out, tensors, inputs.dout)
        eager = call(grouped_moe, MEDIUM, inputs) * 2
        assert_same([out, *grads], [eager, *torch.autograd.grad(eager, tensors, inputs.dout)])


@pytest.mark.parametrize("index", range(1, torch.cuda.device_count()))
def test_on_a_device_that_is_not_the_current_one(grouped_moe, index):
    """Kernels run where the tensors are, and the current device stays what it was."""
    there = f"cuda:{index}"
    for case in (SMALL, BIAS):
        inputs = make_inputs(case, torch.bfloat16, "cuda:0")
        want = step(grouped_moe, case, with_leaves(inputs))
        moved = Inputs(*(None if tensor is None else tensor.to(there) for tensor in inputs))
        got = step(grouped_moe, case, with_leaves(moved))
        assert torch.cuda.current_device() == 0
        assert all(tensor.device == torch.device(there) for tensor in got)
        assert_same([tensor.to("cuda:0") for tensor in got], want)
    x, weight, dy, sizes = torch.randn(64, 128), torch.randn(2, 256, 128), torch.randn(64, 256), torch.tensor([24, 40])
    want, first, second = [], [], []
    for results, device in ((want, "cuda:0"), (first, there), (second, there)):  # the last by plans that are kept
        leaves = [tensor.to(device).requires_grad_() for tensor in (x, weight)]
        y = grouped_moe.grouped_linear(*leaves, sizes.to(device))
        results += [y, *torch.autograd.grad(y, leaves, dy.to(device))]
    for results in (first, second):
        assert all(tensor.device == torch.device(there) for tensor in results)
        assert_same([tensor.to("cuda:0") for tensor in results], want)
    routing = grouped_moe.route(moved.top_k_index, BIAS.E)
    rows = grouped_moe.gather_rows(moved.hidden_states, routing)
    out = grouped_moe.combine_rows(rows, torch.ones_like(moved.top_k_weights), routing)
    local = ((moved.top_k_index >= 0) & (moved.top_k_index < BIAS.E)).sum(1, keepdim=True)
    assert_close("gathered and combined", out, local * moved.hidden_states.double(), torch.bfloat16)


def test_first_call_of_a_thread(grouped_moe, device):
    """Nothing else has been run on the GPU by that thread."""
    case = WIDE
    inputs = make_inputs(case, torch.bfloat16, device)
    with torch.no_grad():
        want, got = call(grouped_moe, case, inputs), []
        torch.cuda.synchronize()
        thread = threading.Thread(target=lambda: got.append(call(grouped_moe, case, inputs).detach()))
        thread.start()
        thread.join()
    assert torch.equal(got[0], want)
