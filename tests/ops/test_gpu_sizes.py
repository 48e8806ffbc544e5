"""What takes sizes that only a GPU does: shared tiles, more than 2^31 elements, kernels of milliseconds next to other
processes. Tokens are many or columns wide, and references on the GPU.
"""

import subprocess
import sys

import pytest
import sorted_rows
import torch
from block import call, check, parts_of, random_inputs, run, run_reference
from cases import RELU2, Case, make_ids, make_inputs
from compare import assert_close, assert_matches
from linears import Linear
from marks import on_cuda
from pairs import Pairs, make_loras
from poison import poisoned_allocations

pytestmark = on_cuda

GIB = 2**30


def need_memory(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < gib * GIB:
        pytest.skip(f"needs {gib:.0f} GiB of free device memory, there are {free / GIB:.0f}")


def check_long_step(grouped_moe, case: Case, device: str) -> None:
    """A step with so many tokens that a reference has to do with a sample of them.

    The cotangent is 0 but for the sample, so that the weights' gradients can be had from the sample, too.
    """
    inputs = random_inputs(case, device, torch.randint(0, case.E, (case.T, case.top_k), device=device))
    ends = torch.cat([torch.arange(64, device=device), torch.arange(case.T - 192, case.T, device=device)])
    rows = torch.cat([ends, torch.randint(64, case.T - 192, (256,), device=device)]).unique()
    dout = torch.zeros_like(inputs.dout)
    dout[rows] = inputs.dout[rows]
    inputs = inputs._replace(dout=dout)
    want, got = run_reference(grouped_moe, case, inputs.take(rows)), run(grouped_moe, case, inputs)
    assert int(got["out"].isfinite().all(1).sum()) == case.T
    assert int(got["hidden_states"].ne(0).any(1).sum()) == len(rows)
    sampled = {name: got[name][rows] for name in ("out", "hidden_states", "top_k_weights")}
    assert_matches({**got, **sampled}, want, torch.bfloat16)


LONG = [
    # More steps than the ring of the up-projection has, and several tiles for each program.
    Case("deep", T=1 << 15, top_k=1, E=6, H=392, I=136),
    Case("deep-not-gated", T=1 << 15, top_k=1, E=6, H=392, I=392, gated=False, activation=RELU2),
    # Hidden states, pre-activation, rows, output and their gradients all exceed 2^31 elements.
    Case("huge", T=(1 << 20) + 77, top_k=1, E=3, H=2112, I=1056),
]


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.id)
def test_long_steps(grouped_moe, case, device):
    if case.id == "huge":
        assert min(case.T * case.H, case.T * case.preact_width) > 2**31
        need_memory(52)
    check_long_step(grouped_moe, case, device)


def need_shared_tiles(module, rows: int, groups: int, n: int, k: int) -> None:
    """Two warp groups share the tiles of such a grouped GEMM on a Hopper; other GPUs have no such tiles."""
    heuristic = module("tuning.heuristic")
    spec = module("common.device").device_spec(torch.device("cuda", torch.cuda.current_device()))
    if not spec.hopper:
        pytest.skip("other tiles on this GPU")
    wide = heuristic.wide_pays(rows, groups, n, k, spec)
    config = heuristic.hopper_gemm_config(128, n, k, spec, wide)
    assert config.block_n == 256


def test_experts_whose_tiles_two_warp_groups_share(grouped_moe, module, device):
    """Those of the down-projection, with a tail of K, and of the gradient of hidden states."""
    case = Case("long", T=2048, top_k=1, E=16, H=2048, I=4104)
    for k in (case.I, 2 * case.I):
        need_shared_tiles(module, case.T, case.E, case.H, k)
    need_memory(16)
    check_long_step(grouped_moe, case, device)


@pytest.mark.parametrize("rank", [5, 16, 64])  # a part of a step of K, or a whole one
def test_shared_tiles_with_low_rank_pairs(grouped_moe, module, device, rank):
    case = Case("long", T=2048, top_k=1, E=16, H=2048, I=4104)
    need_shared_tiles(module, case.T, case.E, case.H, case.I)
    need_memory(24)
    inputs = make_inputs(case, torch.bfloat16, device)
    pairs = make_loras(grouped_moe, case, inputs, Pairs(rank=rank))
    check(grouped_moe, case, inputs, **pairs)


@pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
def test_tiles_that_two_warp_groups_share(grouped_moe, module, device, transposed):
    """Of a long K, with its tail, next to rows of no group, empty groups and one of one row."""
    rows, groups, n, k = 2048, 16, 4096, 4104
    need_shared_tiles(module, rows, groups, n, k)
    need_memory(16)
    sizes = (700, 0, 1, 1000, 199, *[0] * (groups - 5))
    linear = Linear("long", sizes, rows - sum(sizes), N=n, K=k, transposed=transposed, bias=True, scales=True)
    inputs = linear.make(torch.bfloat16, device)
    with poisoned_allocations():
        sorted_rows.check(grouped_moe, linear, inputs, inputs.poisoned())


def test_a_row_that_is_short_in_32_bits(grouped_moe, device):
    """Of 2^32 columns more than weights have, by which an op counts its own."""
    case = Case("short", T=1, top_k=2, E=8, H=64, I=48)
    need_memory(9)
    inputs = make_inputs(case, torch.bfloat16, device)
    long = torch.empty(1, (1 << 32) + case.H, dtype=torch.bfloat16, device=device)
    with torch.no_grad(), pytest.raises(ValueError, match="^gate_up_proj: expected shape"):
        call(grouped_moe, case, inputs._replace(hidden_states=long))


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
    check(grouped_moe, case, random_inputs(case, device, make_ids(case).to(device)))
    case = case._replace(gated=False, activation=RELU2)
    inputs = random_inputs(case, device, make_ids(case).to(device))
    check(grouped_moe, case, inputs, around=lambda _: parts_of(grouped_moe, case))
