"""Direct launches hand the launcher in C what Triton's own path hands it, and nothing of another tensor.

Runs Triton's own code without a GPU: a stub stands in for the driver and takes what the launcher would get.
"""

import ctypes
import gc
import sys
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

pytest_plugins = ["driver_stub"]
BF16 = torch.bfloat16


@pytest.fixture
def both(module, sent, monkeypatch):
    """Every direct launch is made Triton's way as well and compared; returns how many there were."""
    launch, counts = module("launch"), {"direct": 0, "first": 0, "maps": 0}
    direct = launch.Launch.__call__

    def call(self, tensors):
        sent.clear()
        if self.function is None:
            direct(self, tensors)
            counts["first"] += 1
            assert self.function is not None
        else:
            direct(self, tensors)
            self.by_kernel(tensors)
            with mock.patch.dict(self.kernel.variants, clear=True):  # by all of Triton's path
                self.by_kernel(tensors)
            assert len(sent) == 3 and sent[0] == sent[1] == sent[2]
            assert sent[0][6] is True, "not a dependent launch"
            counts["direct"] += 1
            counts["maps"] += sum(isinstance(arg, tuple) and arg[:1] == ("map",) for arg in sent[0])

    monkeypatch.setattr(launch.Launch, "__call__", call)
    monkeypatch.setattr(
        module("plan").Plan, "__call__", lambda self, *given: self._by_kernels([*given, *(None for _ in self.forms)])
    )
    return counts


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [64, 2048])
def test_linear(module, both, rows, transposed):
    linear = module("grouped_linear")
    x, dy, sizes = torch.zeros(rows, 256, dtype=BF16), torch.zeros(rows, 512, dtype=BF16), torch.tensor([rows // 4] * 4)
    weight = torch.zeros((4, 256, 512) if transposed else (4, 512, 256), dtype=BF16)
    for _ in range(3):
        _, tile_map = linear.forward_triton(x, weight, sizes, None, None, transposed)
        linear.backward_triton(dy, x, weight, tile_map, None, None, transposed, (True, True, False, False))
    assert both["direct"] == 2 * 4 and both["first"] == 4
    assert both["maps"] > 0


@pytest.mark.parametrize("sums", [False, True], ids=["dots", "dots-and-sums"])
def test_inner_products_with_a_bias_are_not_fused(module, sent, sums):
    """Lest the gradient of routing weights depends, in its last bits, on whether the bias wants one."""
    gemm, launch, schedule = module("gemm"), module("launch"), module("schedule")
    dy, bias, dbias = (launch.form_of(torch.zeros(rows, 64)) for rows in (96, 3, 3))
    sizes = schedule.schedule_sizes(96, 3, dy.dtype)
    kind = 0, None, bias, 96, False, dbias if sums else None, sizes, False
    plan = gemm.bias_grads_plan(dy, *kind, torch.device("cpu"))
    dots, tile_map = torch.zeros(1, 96), torch.zeros(schedule.map_form(sizes).shape, dtype=torch.int32)
    plan(torch.zeros(96, 64), None, torch.zeros(3, 64), dots, None, tile_map, torch.zeros(3, 64) if sums else None)
    variants = plan.steps[0].launch.kernel.variants.values()
    assert variants
    for variant in variants:
        assert "fma" not in variant.asm["ptx"].partition(".section")[0]
        assert variant.metadata.enable_fp_fusion is False  # nor does the assembler


def experts_inputs(tokens, gated=True, bias=False, transposed=False):
    e, h, i, top_k = 16, 128, 96, 2
    p = 2 * i if gated else i
    up = torch.zeros((e, h, p) if transposed else (e, p, h), dtype=BF16)
    down = torch.zeros((e, i, h) if transposed else (e, h, i), dtype=BF16)
    biases = (torch.zeros(e, p, dtype=BF16), torch.zeros(e, h, dtype=BF16)) if bias else (None, None)
    x, weights = torch.zeros(tokens, h, dtype=BF16), torch.zeros(tokens, top_k)
    return x, torch.zeros(tokens, top_k, dtype=torch.int64), weights, up, down, *biases


KINDS = [{}, {"gated": False}, {"bias": True}, {"transposed": True, "bias": True}]


def block_of(module, inputs, kind):
    flags = kind.get("gated", True), False, kind.get("transposed", False), False
    return module("block").Block(*inputs[3:], module("activation").Activation(), *flags)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")
@pytest.mark.parametrize("tokens", [1, 40, 2048])
def test_experts(module, both, tokens, kind):
    experts = module("experts")
    for _ in range(3):
        inputs = experts_inputs(tokens, **kind)
        x, ids, weights = inputs[:3]
        block = block_of(module, inputs, kind)
        routing = experts._route_tiles(block, x, ids, specified=True)
        _, preact = experts.forward_triton(block, x, weights, routing, save=True)
        needs = experts.Needs(*[True] * 4, *[bool(kind.get("bias"))] * 2)
        experts.backward_triton(block, torch.zeros_like(x), x, weights, preact, routing, needs)
    assert both["direct"] >= 2 * 8


def at(address, form):
    """The tensor of a form that lies there."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(form.shape, form.strides))
    memory = (ctypes.c_char * (span * form.dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=form.dtype).as_strided(form.shape, form.strides)


def assert_plan(module, sent, monkeypatch, plan, given):
    """A plan's direct launches are those that Triton makes of the tensors at its addresses; its memory is its own."""
    launch, seen = module("launch"), []
    direct = launch.Launch.direct
    plan(*given)
    assert plan.ready
    with monkeypatch.context() as patch:
        patch.setattr(
            launch.Launch, "direct", lambda self, places, stream: seen.append(places) or direct(self, places, stream)
        )
        sent.clear()
        result = plan(*given)
    got, addresses = list(sent), seen[-1]
    tensors = [*given, *(None if form is None else at(addresses[n], form) for n, form in plan.forms.items())]
    sent.clear()
    for step in plan.steps:
        step.launch.by_kernel(tensors)
    assert got == list(sent) and len(got) == len(plan.steps)
    for number, tensor in enumerate(result):
        assert tensor is None or tensor.data_ptr() == addresses[number]
    pieces = sorted((addresses[n], tensors[n].nbytes) for n in plan.pieces)
    assert all(start + size <= later for (start, size), (later, _) in zip(pieces, pieces[1:]))
    assert not pieces or pieces[-1][0] + pieces[-1][1] <= pieces[0][0] + plan.scratch_bytes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")
@pytest.mark.parametrize("tokens", [1, 40, 2048])
@pytest.mark.parametrize("record", [False, True])
def test_plan_of_experts(module, sent, monkeypatch, tokens, kind, record):
    for _ in range(2):
        inputs = experts_inputs(tokens, **kind)
        call = module("experts_plans").call_plan(block_of(module, inputs, kind), *inputs[:3], record)
        assert len(call.saved) == 4 * record
        assert_plan(module, sent, monkeypatch, call.plan, inputs)


def test_memory_is_given_back_either_way(module, sent, monkeypatch):
    """By the first call, through Triton, and by direct ones; by none that is not told to."""
    launch, experts, direct = module("launch"), module("experts"), []
    call = launch.Launch.direct
    monkeypatch.setattr(launch.Launch, "direct", lambda self, *args: direct.append(self) or call(self, *args))
    x, ids, weights, *tensors = inputs = experts_inputs(40)
    block = block_of(module, inputs, {})
    routing = experts._route_tiles(block, x, ids, specified=True)
    needs, counts = experts.Needs(*[True] * 4, False, False), []
    module("experts_plans").backward_plan.cache_clear()  # other tests' plans are ready
    for spent in (False, True, True, False):
        preact = torch.zeros(80, 192, dtype=BF16)
        direct.clear()
        experts.backward_triton(block, torch.zeros_like(x), x, weights, preact, routing, needs, spent)
        assert preact.untyped_storage().nbytes() == (0 if spent else preact.nbytes)
        counts.append(len(direct))
    assert counts == [0, 0, 6, 6]


def test_plan_of_linear(module, sent, monkeypatch):
    x, weight, sizes = torch.zeros(2048, 256, dtype=BF16), torch.zeros(4, 512, 256, dtype=BF16), torch.tensor([512] * 4)
    plan = module("grouped_linear")._plan_of(x, weight, sizes, None, None, False)
    assert_plan(module, sent, monkeypatch, plan, (x, weight, sizes, None, None))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")
def test_plans_of_no_rows(module, sent, kind):
    """Scratch memory that no tile needs has the address 0."""
    linear, experts, counts = module("grouped_linear"), module("experts"), []
    x, dy, weight = (
        torch.zeros(0, 256, dtype=BF16),
        torch.zeros(0, 512, dtype=BF16),
        torch.zeros(4, 512, 256, dtype=BF16),
    )
    bias, scales, sizes = torch.zeros(4, 512, dtype=BF16), torch.zeros(0), torch.zeros(4, dtype=torch.int64)
    inputs = experts_inputs(0, **kind)
    block, needs = block_of(module, inputs, kind), experts.Needs(*[True] * 4, *[bool(kind.get("bias"))] * 2)
    for _ in range(3):
        sent.clear()
        _, tile_map = linear.forward_triton(x, weight, sizes, bias, scales, False)
        linear.backward_triton(dy, x, weight, tile_map, bias, scales, False, (True,) * 4)
        routing = experts._route_tiles(block, *inputs[:2], specified=True)
        _, preact = experts.forward_triton(block, inputs[0], inputs[2], routing, save=True)
        experts.backward_triton(block, inputs[0], inputs[0], inputs[2], preact, routing, needs)
        counts.append(len(sent))
    assert counts[0] == counts[1] == counts[2] > 4


def test_a_step_keeps_its_plans(module, grouped_moe, sent, monkeypatch):
    """Later steps launch over their own tensors; what hooks return in other strides has a plan of its own, or none."""
    linear = module("grouped_linear")
    monkeypatch.setattr(module("define"), "is_accelerated", lambda tensor: True)
    monkeypatch.setattr(linear, "on_device_of", lambda tensor: nullcontext())
    monkeypatch.setattr(linear, "_plans", module("plan").Plans())
    monkeypatch.setattr(linear, "_backward_plans", module("plan").Plans())
    monkeypatch.setattr(linear, "_backward", linear.backward_triton)
    sizes = torch.tensor([512] * 4)

    def step(unpack=lambda tensor: tensor) -> int:
        """How many plans of backwards there are after it."""
        x, weight = torch.zeros(2048, 256, dtype=BF16), torch.zeros(4, 512, 256, dtype=BF16)
        leaves, dy = [x.requires_grad_(), weight.requires_grad_()], torch.zeros(2048, 512, dtype=BF16)
        sent.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
            y = grouped_moe.grouped_linear(x, weight, sizes)
        dx, dw = torch.autograd.grad(y, leaves, dy)
        places = [{arg for arg in args if isinstance(arg, int)} | {arg[1] for arg in args if isinstance(arg, tuple)}
                  for args in sent]  # fmt: skip
        assert len(places) == 4
        assert {dy.data_ptr(), weight.data_ptr(), dx.data_ptr()} <= places[2]
        assert {dy.data_ptr(), dw.data_ptr()} <= places[3]
        assert (x.data_ptr() in places[3]) == (unpack not in (wide, spaced))
        return len(linear._backward_plans)

    def wide(tensor):
        return tensor if tensor.dim() != 2 else tensor.repeat(1, 2)[:, : tensor.shape[1]]

    def spaced(tensor):
        return tensor if tensor.dim() != 2 else tensor.repeat_interleave(2, 1)[:, ::2]

    assert [step() for _ in range(3)] == [1, 1, 1]
    assert step(spaced) == 1
    assert step(wide) == 2


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("record", [False, True])
def test_determinism_fills_what_a_plan_makes(module, sent, monkeypatch, record, deterministic):
    """All memory, scratch too, of direct launches is PyTorch's own then, which fills it if it is told to."""
    inputs = experts_inputs(40)
    plan = module("experts_plans").call_plan(block_of(module, inputs, {}), *inputs[:3], record).plan
    fast, slow = [], []
    empty = plan.empty
    plan.fast_empty = lambda *form: fast.append(form) or empty(*form)
    plan.empty = lambda *form: slow.append(form) or empty(*form)
    for _ in range(2):  # the first by Triton
        fast.clear(), slow.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, "_get_deterministic_algorithms", lambda: deterministic)
            plan(*inputs)
    assert plan.ready and bool(plan.scratch_bytes)
    assert bool(slow) == deterministic and bool(fast) != deterministic


def test_what_is_called_stays_loaded(module, sent):
    """A compiled kernel unloads its function when it is collected: whoever calls that keeps it."""
    x, weight, sizes = torch.zeros(64, 256, dtype=BF16), torch.zeros(4, 512, 256, dtype=BF16), torch.tensor([16] * 4)
    plan = module("grouped_linear")._plan_of(x, weight, sizes, None, None, False)
    plan(x, weight, sizes, None, None)
    kernel = plan.steps[0].launch.kernel
    compiled = [weakref.ref(variant) for variant in kernel.variants.values()]
    kernel.variants.clear()
    kernel.kernel.device_caches.clear()
    gc.collect()
    assert compiled and all(variant() is not None for variant in compiled)


def test_one_address_in_many_forms(module, both):
    """Tensors of other shapes, strides and dtypes at the same addresses get other maps, and again their own."""
    linear, memory = module("grouped_linear"), torch.zeros(3 << 20, dtype=torch.uint8)
    sizes = torch.tensor([512] * 4)
    for _ in range(3):
        for dtype in (BF16, torch.float16):
            for k, stride in ((256, 256), (128, 128), (128, 256)):
                x = memory[: 1 << 21].view(dtype).as_strided((2048, k), (stride, 1))
                weight = memory[1 << 21 :].view(dtype).as_strided((4, 256, k), (256 * k, k, 1))
                linear.forward_triton(x, weight, sizes, None, None, False)
                linear.backward_triton(x[:, :k], x, weight[:, :k], sizes, None, None, False, (True, True, False, False))
    assert both["maps"] > 100


def test_misaligned_pointers_go_by_triton(module, both):
    linear, memory = module("grouped_linear"), torch.zeros(64 * 256 + 1, dtype=BF16)
    weight, sizes = torch.zeros(4, 512, 256, dtype=BF16), torch.tensor([16] * 4)
    plan = linear._plan_of(memory[1:].view(64, 256), weight, sizes, None, None, False)
    for x in (memory[1:].view(64, 256),) * 3:
        with pytest.raises(AssertionError):  # of `both`: no direct way
            plan(x, weight, sizes, None, None)


@pytest.mark.parametrize("change", ["version", "scratch", "closure", "field"])
def test_other_launchers_go_by_triton(module, sent, monkeypatch, change):
    """What does not look as the known versions do is not called directly."""
    nvidia, launch = sys.modules["triton.backends.nvidia.driver"], module("launch")
    known, launcher = (nvidia.CudaLauncher.__new__(nvidia.CudaLauncher) for _ in range(2))
    for made in (known, launcher):
        made.global_scratch_size = made.profile_scratch_size = 0
        made.arg_annotations = made.kernel_signature = ()
        made.launch = sent
    sent.clear()
    launch._c_launcher(known).function(*range(17))
    assert sent == [(*range(8), *range(11, 17)) if sent.in_tuple else (*range(10), *range(13, 17))]
    if change == "scratch":
        launcher.profile_scratch_size = 64
    elif change == "closure":
        launcher.launch = lambda *args: sent(*args)
    elif change == "field":
        if hasattr(nvidia, "_BASE_ARGS_FORMAT"):
            pytest.skip("known by its format")
        launcher.launch_cluster = False
    else:
        monkeypatch.setattr(nvidia, "_BASE_ARGS_FORMAT", "iiiKKppOOOOO", raising=False)
        monkeypatch.setattr(launch, "triton_version", lambda: (3, 10))
    assert launch._c_launcher(launcher) is None


@pytest.mark.parametrize("when", ["enter", "exit"])
def test_hooks_see_launches(module, sent, monkeypatch, when):
    from triton import knobs

    x, weight, sizes = torch.zeros(64, 256, dtype=BF16), torch.zeros(4, 512, 256, dtype=BF16), torch.tensor([16] * 4)
    plan, launch = module("grouped_linear")._plan_of(x, weight, sizes, None, None, False), module("launch")
    plan(x, weight, sizes, None, None)
    calls = []
    monkeypatch.setattr(launch.Launch, "by_kernel", lambda self, tensors: calls.append(self))
    plan(x, weight, sizes, None, None)
    assert not calls
    hook, hooks = lambda metadata: None, getattr(knobs.runtime, f"launch_{when}_hook")  # noqa: E731
    hooks.add(hook)
    try:
        plan(x, weight, sizes, None, None)
    finally:
        hooks.remove(hook)
    assert len(calls) == 2
