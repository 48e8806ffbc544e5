"""What only a GPU can show: graphs, streams, syncs, peak memory, tf32, assertions, a second device.

Shapes are few on purpose: every new one compiles kernels.
"""

import os
import subprocess
import sys
import threading

import layers
import pytest
import torch
from block import call, parts_of, random_inputs, run, run_reference, with_leaves
from cases import CLAMPED, GPU_CASES, MEDIUM, RELU2, WIDE, Case, make_ids, make_inputs
from compare import assert_bitwise, assert_same
from marks import by_recompute, on_cuda
from operations import OPERATIONS, make_operation
from timing import allocated_by, graph_of

pytestmark = on_cuda
by_case = pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.id)


@by_case
@pytest.mark.parametrize("way", ["forward", "saved", "recompute"])
@pytest.mark.parametrize("capacity", [False, True], ids=["", "capacity"])
def test_graph_replays_with_other_routing(grouped_moe, device, case, way, capacity):
    """One capture, then batches with other routing, all sentinels among them: each bitwise equal to eager.

    So it is with a capacity, whose check captures, for every routing that fits.
    """
    inputs = make_inputs(case, torch.bfloat16, device)
    options = {"recompute": way == "recompute", "capacity": 3 * case.T * case.top_k // 4 if capacity else None}

    def results() -> dict:
        if way == "forward":
            return {"out": call(grouped_moe, case, inputs, **options)}
        return run(grouped_moe, case, inputs, **options)

    def fill(ids: torch.Tensor) -> None:
        """Other numbers for everything that changes from one batch to the next."""
        ids[:, : int(capacity)] = -1
        inputs.top_k_index.copy_(ids)
        for tensor in (inputs.hidden_states, inputs.top_k_weights, inputs.dout):
            tensor.normal_()

    fill(make_ids(case))
    graph, captured = graph_of(results)
    routings = [make_ids(case._replace(sentinels=share)) for share in (0.0, 0.3, 0.9)]
    routings += [torch.full_like(routings[0], value) for value in (case.E, -1, case.E - 1)]
    for ids in routings:
        fill(ids)
        for tensor in captured.values():
            tensor.fill_(float("nan"))
        graph.replay()
        assert_same({name: tensor.clone() for name, tensor in captured.items()}, results())


@by_case
def test_no_host_sync(grouped_moe, device, case):
    """Of the experts block and of the building blocks, in both directions."""
    inputs = make_inputs(case, torch.bfloat16, device)
    not_gated, others = GPU_CASES[-1], make_inputs(GPU_CASES[-1], torch.bfloat16, device)

    def everything() -> None:
        run(grouped_moe, case, inputs)
        run(grouped_moe, case, inputs, recompute=True)
        run(grouped_moe, not_gated, others, around=lambda _: parts_of(grouped_moe, not_gated))

    everything()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams_do_not_share_buffers(grouped_moe, device):
    """Steps that run at once on several streams give what they give alone."""
    batches = [make_inputs(MEDIUM, torch.bfloat16, device) for _ in range(4)]
    want = [run(grouped_moe, MEDIUM, inputs) for inputs in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for stream, inputs in zip(streams, batches):
            with torch.cuda.stream(stream):
                got.append(run(grouped_moe, MEDIUM, inputs))
        torch.cuda.synchronize()
        for a, b in zip(got, want):
            assert_same(a, b)
        del got


def test_backward_dw_on_another_stream(grouped_moe, device):
    """The backward's stream makes nothing anew in memory that the other one has still to read."""
    layer, batch = layers.make(grouped_moe, layers.Form(), device, delay_wgrad=True)
    want, slow = layers.reference(grouped_moe, layer, batch), torch.ones(8192, 8192, device=device)
    stream = torch.cuda.Stream()
    layers.run(layer, batch)
    layer.backward_dw()  # compiles
    layer.zero_grad()
    layer(*batch[:3]).backward(batch.dy.clone())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            slow = slow @ slow
        layer.backward_dw()
    taken = [torch.full_like(batch.dy, float("nan")) for _ in range(50)]
    assert not stream.query()
    torch.cuda.synchronize()
    layers.assert_matches(layers.parameter_grads(layer), want)
    del taken


LARGE = Case("large", T=8192, top_k=8, E=16, H=1024, I=384, sentinels=0.0)
FEW_COLUMNS = LARGE._replace(id="wide-intermediate", H=256, I=768)
LARGE_NOT_GATED = FEW_COLUMNS._replace(id="not-gated", gated=False, activation=RELU2)
ROUTINGS = [(case, local) for case in (LARGE, FEW_COLUMNS, LARGE_NOT_GATED) for local in ("all", "none")]


@by_recompute
@pytest.mark.parametrize(
    "case, local", [*ROUTINGS, (LARGE, "an-eighth")], ids=lambda value: getattr(value, "id", value)
)
def test_peak_memory_is_what_the_docstring_says(grouped_moe, device, case, local, recompute):
    """Whatever the routing: buffers depend on S or, of an eighth of the slots, on a capacity for exactly these.

    Small index tensors are within the 2 %, or 5 % with a capacity.
    """
    s, h, i, p = case.T * case.top_k, case.H, case.I, case.preact_width
    ids = torch.arange(s, device=device).view(case.T, case.top_k)
    ids = {"all": ids % case.E, "none": ids % case.E + case.E, "an-eighth": ids % (8 * case.E)}[local]
    s, capacity, error = (s // 8, s // 8, 0.05) if local == "an-eighth" else (s, None, 0.02)
    inputs = with_leaves(random_inputs(case, device, ids))
    tensors = list(inputs.floating().values())

    def forward():
        return call(grouped_moe, case, inputs, recompute=recompute, capacity=capacity)

    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(forward(), tensors, inputs.dout)  # compiles
    saved = 0 if recompute else s * p  # hidden_states are there already
    expected_forward = saved + max(s * (i + h), s * h + case.T * h)
    gradients = sum(tensor.numel() for tensor in tensors)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    made = s * p if recompute else 0  # the pre-activation, before it gives way to the last gradient
    stages = (
        made + s * (i + h * hopper),
        made + inputs.top_k_weights.numel() + s * (i + h) + case.T * h,
        made + gradients - inputs.down_proj.numel() + s * i,
        made + gradients + s * (i - p),
    )
    peak, out = allocated_by(forward)
    assert peak == pytest.approx(2 * expected_forward, rel=error)
    peak, _ = allocated_by(lambda: torch.autograd.grad(out, tensors, inputs.dout))
    assert peak == pytest.approx(2 * max(stages), rel=error)


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
    inputs = make_inputs(case, torch.float32, device)
    want, results = run_reference(grouped_moe, case, inputs), {}
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        results[allowed] = [*run(grouped_moe, case, inputs).values()]
    for exact, rough, true in zip(results[False], results[True], want.values()):
        assert float((exact.double() - true).norm() / true.norm()) < 1e-6
        assert float((rough.double() - true).norm() / true.norm()) < 3 * 2**-10
    if torch.version.hip is None:  # tf32 is a mode of NVIDIA's matrix units
        assert not torch.equal(results[False][0], results[True][0])


@pytest.mark.skipif(sys.platform == "win32", reason="inductor needs a C++ compiler")
def test_compiles_whole_without_recompiling_over_tokens(grouped_moe, device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: grouped_moe.grouped_mm_experts(*inputs) * 2, fullgraph=True, dynamic=True)
    for number, tokens in enumerate((300, 17, 64, 1023)):
        inputs = make_inputs(MEDIUM._replace(T=tokens), torch.bfloat16, device)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            got = run(grouped_moe, MEDIUM, inputs, around=lambda _: lambda *tensors: compiled(*tensors[:5]))
        assert_same(got, run(grouped_moe, MEDIUM, inputs, around=lambda block: lambda *tensors: block(*tensors) * 2))


@pytest.mark.parametrize("index", range(1, torch.cuda.device_count()))
def test_on_a_device_that_is_not_the_current_one(grouped_moe, index):
    """Kernels run where the tensors are, and the current device stays what it was; twice, by kernels that are kept."""
    results = {}
    for device in ("cuda:0", f"cuda:{index}", f"cuda:{index}"):
        torch.manual_seed(0)
        found = [make_operation(grouped_moe, name, device).step() for name in OPERATIONS]
        for case in (GPU_CASES[0], CLAMPED):
            found.append(run(grouped_moe, case, make_inputs(case, torch.bfloat16, device)))
        assert torch.cuda.current_device() == 0
        for got, want in zip(found, results.setdefault("cuda:0", found)):
            for name, tensor in got.items():
                assert tensor.device == torch.device(device)
                assert_bitwise(name, tensor.to("cuda:0"), want[name])


def test_first_call_of_a_thread(grouped_moe, device):
    """Nothing else has been run on the GPU by that thread."""
    inputs, got = make_inputs(WIDE, torch.bfloat16, device), []
    want = call(grouped_moe, WIDE, inputs)
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: got.append(call(grouped_moe, WIDE, inputs)))
    thread.start()
    thread.join()
    assert torch.equal(got[0], want)


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


@pytest.mark.skipif(torch.version.hip is not None, reason="needs CUDA's device-side assertions")
def test_overflow_on_the_device(hub):
    """An assertion, which ends the process's use of the device: hence a process of its own."""
    code = OVERFLOW.format(hub.repo_id, hub.version)
    result = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0 and result.stdout.split("\n")[:2] == ["fits", "no sync"], result.stderr
    assert "not reached" not in result.stdout and "device-side assert" in result.stderr
    assert "grouped_mm_experts: capacity" in result.stderr and "got 63" in result.stderr
