"""What only a GPU can show: graphs, streams, syncs, peak memory, more than 2^31 elements, other processes, tf32, a
second device.

Shapes are few on purpose: every new one compiles kernels.
"""

import importlib
import subprocess
import sys

import pytest
import torch
from block import call, with_leaves
from cases import Case, Inputs, make_ids, make_inputs
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
CASES = pytest.mark.parametrize("case", [SMALL, MEDIUM, BIAS, WIDE, WIDE_BIAS, DEEP], ids=lambda case: case.id)
GIB = 2**30


def step(grouped_moe, case: Case, inputs: Inputs, recompute: bool = False) -> list:
    """[output, gradients]. The inputs are leaves."""
    out = call(grouped_moe, case, inputs, recompute=recompute)
    return [out, *torch.autograd.grad(out, list(inputs.floating().values()), inputs.dout)]


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


def random_inputs(case: Case, device: str, ids: torch.Tensor) -> Inputs:
    """bf16 inputs made on the device, for sizes that take too long on a CPU; no biases."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    weights = torch.rand((case.T, case.top_k), device=device).to(torch.bfloat16)
    up = randn(case.E, case.preact_width, case.H).mul_(case.H**-0.5)
    down = randn(case.E, case.H, case.I).mul_(case.I**-0.5)
    return with_leaves(Inputs(randn(case.T, case.H), ids, weights, up, down, None, None, randn(case.T, case.H)))


def reference_step(grouped_moe, inputs: Inputs, rows: torch.Tensor) -> list:
    """[output, gradients] in fp64 of these tokens alone."""
    tensors = [inputs.hidden_states[rows], inputs.top_k_weights[rows], inputs.gate_up_proj, inputs.down_proj]
    tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
    x, weights, up, down = tensors
    out = grouped_moe.reference.grouped_mm_experts(x, inputs.top_k_index[rows], weights, up, down)
    return [out.detach(), *torch.autograd.grad(out, tensors, inputs.dout[rows].double())]


def need_memory(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < gib * GIB:
        pytest.skip(f"needs {gib:.0f} GiB of free device memory, there are {free / GIB:.0f}")


def check_long_step(grouped_moe, case: Case, device: str) -> None:
    """A step with so many tokens that a reference has to do with a sample of them.

    The cotangent is 0 but for the sample, so that the weights' gradients can be had from the sample, too.
    """
    ids = torch.randint(0, case.E, (case.T, case.top_k), device=device)
    inputs = random_inputs(case, device, ids)
    ends = torch.cat([torch.arange(64, device=device), torch.arange(case.T - 192, case.T, device=device)])
    rows = torch.cat([ends, torch.randint(64, case.T - 192, (256,), device=device)]).unique()
    dout = torch.zeros_like(inputs.dout)
    dout[rows] = inputs.dout[rows]
    inputs = inputs._replace(dout=dout)
    want = reference_step(grouped_moe, inputs, rows)
    out, dx, dweights, dup, ddown = step(grouped_moe, case, inputs)
    assert int(out.isfinite().all(1).sum()) == case.T
    assert int(dx.ne(0).any(1).sum()) == len(rows)
    got = [out.detach()[rows], dx[rows], dweights[rows], dup, ddown]
    for name, a, b in zip(("out", "dx", "dweights", "dup", "ddown"), got, want):
        assert_close(name, a, b, torch.bfloat16, inner_products=name == "dweights")


def test_more_steps_than_the_ring_has(grouped_moe, device):
    check_long_step(grouped_moe, DEEP._replace(T=1 << 15, top_k=1), device)


def skip_without_shared_tiles(grouped_moe, rows: int, groups: int, n: int, k: int) -> None:
    """Unless two warp groups share the tiles of such a grouped GEMM."""
    tuning = importlib.import_module(f"{grouped_moe.__name__}.tuning")
    spec = tuning.device_spec("cuda", torch.cuda.current_device())
    config, _ = tuning.hopper_gemm_config(128, rows, groups, n, k, spec, True)
    if not spec.hopper or spec.num_sms > 132:
        pytest.skip("other tiles on this GPU")
    assert config.block_n == 256


def test_experts_whose_tiles_two_warp_groups_share(grouped_moe, device):
    """Those of the down-projection, with a tail of K, and of the gradient of hidden states."""
    case = Case("long", T=2048, top_k=1, E=16, H=2048, I=4104)
    for k in (case.I, 2 * case.I):
        skip_without_shared_tiles(grouped_moe, case.T, case.E, case.H, k)
    need_memory(16)
    check_long_step(grouped_moe, case, device)


@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
def test_tiles_that_two_warp_groups_share(grouped_moe, device, transposed):
    """Of a long K, with its tail, next to rows of no group, empty groups and one of one row."""
    rows, groups, n, k = 2048, 16, 4096, 4104
    skip_without_shared_tiles(grouped_moe, rows, groups, n, k)
    need_memory(16)
    sizes = torch.tensor([700, 0, 1, 1000, 199] + [0] * 11, device=device)
    x, dy = (torch.randn((rows, width), device=device, dtype=torch.bfloat16) for width in (k, n))
    for tensor in (x, dy):
        tensor[int(sizes.sum()) :] = float("nan")
    weight = torch.randn((groups, k, n) if transposed else (groups, n, k), device=device, dtype=torch.bfloat16)
    bias, scales = torch.randn((groups, n), device=device), torch.rand(rows, device=device)
    given = [x, weight.mul_(k**-0.5), bias.to(torch.bfloat16), scales.to(torch.bfloat16)]
    ours, true = ([tensor.to(dtype).requires_grad_() for tensor in given] for dtype in (torch.bfloat16, torch.float64))
    with poisoned_allocations():
        y = grouped_moe.grouped_linear(ours[0], ours[1], sizes, *ours[2:], transposed=transposed)
        got = [y, *torch.autograd.grad(y, ours, dy)]
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    out = grouped_moe.reference.grouped_linear(true[0], true[1], offsets, *true[2:], transposed=transposed)
    want = [out.detach(), *torch.autograd.grad(out, true, dy.double().nan_to_num(0.0))]
    for name, a, b in zip(("y", "dx", "dweight", "dbias", "dscales"), got, want):
        assert_close(name, a, b, torch.bfloat16, inner_products=name == "dscales")


def test_more_than_2_to_31_elements(grouped_moe, device):
    """Hidden states, pre-activation, rows, output and their gradients all exceed 2^31 elements."""
    case = Case("huge", T=(1 << 20) + 77, top_k=1, E=3, H=2112, I=1056)
    assert min(case.T * case.H, case.T * case.preact_width) > 2**31
    need_memory(52)
    check_long_step(grouped_moe, case, device)


@pytest.fixture
def busy_neighbour():
    """Another process that keeps the GPU busy: it is taken from kernels of a millisecond and given back to them.

    Not so under CUDA's MPS, which runs both at once.
    """
    program = """if True:
        import torch
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        print("ready", flush=True)
        while True:
            for _ in range(8):
                a @ a
            torch.cuda.synchronize()
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n", "the GPU takes no second process, or that one failed"
            yield
        finally:
            process.kill()


def test_experts_next_to_another_process(grouped_moe, device, busy_neighbour):
    need_memory(14)
    check_long_step(grouped_moe, Case("long", T=1 << 18, top_k=1, E=3, H=2112, I=1056), device)


def test_linear_next_to_another_process(grouped_moe, device, busy_neighbour):
    need_memory(14)
    sizes = [87000, 90000, 85144]
    x, dy = (torch.randn((1 << 18, 2112), device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn((3, 2112, 2112), device=device, dtype=torch.bfloat16).mul_(2112**-0.5)
    leaves = x.requires_grad_(), weight.requires_grad_()
    y = grouped_moe.grouped_linear(*leaves, torch.tensor(sizes, device=device))
    dx, dw = torch.autograd.grad(y, leaves, dy)
    rows = (tensor.detach().split(sizes) for tensor in (x, dy, y, dx))
    for x_g, dy_g, y_g, dx_g, weight_g, dw_g in zip(*rows, weight.detach(), dw):
        x_g, dy_g, weight_g = x_g.double(), dy_g.double(), weight_g.double()
        assert_close("y", y_g, x_g @ weight_g.t(), torch.bfloat16)
        assert_close("dx", dx_g, dy_g @ weight_g, torch.bfloat16)
        assert_close("dw", dw_g, dy_g.t() @ x_g, torch.bfloat16)


def test_more_tokens_than_a_small_grid_dimension(grouped_moe, device):
    """65535 is the limit of a grid's second and third dimension."""
    case = Case("many-tokens", T=70000, top_k=2, E=6, H=64, I=48)
    inputs = random_inputs(case, device, make_ids(case).to(device))
    want = reference_step(grouped_moe, inputs, torch.arange(case.T, device=device))
    names = ("out", "dx", "dweights", "dup", "ddown")
    for name, a, b in zip(names, step(grouped_moe, case, inputs), want):
        assert_close(name, a, b, torch.bfloat16, inner_products=name == "dweights")
    routing = grouped_moe.route(inputs.top_k_index, case.E)
    rows = grouped_moe.gather_rows(inputs.hidden_states.detach(), routing)
    ones = torch.ones_like(inputs.top_k_weights)
    local = ((inputs.top_k_index >= 0) & (inputs.top_k_index < case.E)).sum(1, keepdim=True)
    want = local * inputs.hidden_states.detach().double()
    assert_close("gathered and combined", grouped_moe.combine_rows(rows, ones, routing), want, torch.bfloat16)


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


@pytest.mark.parametrize("case", [LARGE, FEW_COLUMNS], ids=lambda case: case.id)
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
@pytest.mark.parametrize("local", [True, False], ids=["all-local", "all-sentinels"])
def test_peak_memory_is_what_the_docstring_says(grouped_moe, device, case, recompute, local):
    """Whatever the routing: buffers depend on S. Small index tensors are within the 2 %."""
    ids = torch.randint(0, case.E, (case.T, case.top_k), device=device) + (0 if local else case.E)
    inputs = random_inputs(case, device, ids)
    tensors = list(inputs.floating().values())
    step(grouped_moe, case, inputs, recompute)  # compiles
    s, h, i, p = case.T * case.top_k, case.H, case.I, case.preact_width
    saved = 0 if recompute else s * p  # hidden_states are there already
    expected_forward = saved + max(s * i, s * (i + h)) + case.T * h
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
    want = reference_step(grouped_moe, inputs, torch.arange(case.T, device=device))
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
    pack_kind = importlib.import_module(grouped_moe.__name__ + ".experts").pack_kind
    kind = pack_kind(grouped_moe.Activation(), True, False, False, False)
    torch.library.opcheck(experts, (*inputs[:5], None, None, *kind, True))


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
    routing = grouped_moe.route(moved.top_k_index, BIAS.E)
    rows = grouped_moe.gather_rows(moved.hidden_states, routing)
    out = grouped_moe.combine_rows(rows, torch.ones_like(moved.top_k_weights), routing)
    local = ((moved.top_k_index >= 0) & (moved.top_k_index < BIAS.E)).sum(1, keepdim=True)
    assert_close("gathered and combined", out, local * moved.hidden_states.double(), torch.bfloat16)
