"""Direct launches hand the launcher in C what Triton's own path hands it, and nothing of another tensor.

Runs Triton's own code without a GPU: a stub stands in for the driver and takes what the launcher would get.
"""

import ctypes
import gc
import sys
import weakref
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
    monkeypatch.setattr(module("plan").Plan, "__call__", lambda self, *given: self._by_kernels(given))
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


def assert_plan(sent, plan, given):
    """A plan's direct launches are those that Triton makes of the tensors at its addresses; its memory is its own."""
    launched, empty, fast_empty, plan.direct = [], plan.empty, plan.fast_empty, None
    plan.fast_empty = lambda *form: launched.append(empty(*form)) or launched[-1]
    plan(*given)
    assert plan.direct is not None and not launched
    sent.clear()
    result = plan(*given)
    got, tensors = list(sent), [*given, *(None for _ in plan.forms)]
    if plan.scratch_bytes:
        scratch = launched.pop(0)
        assert scratch.nbytes == plan.scratch_bytes
        for number, place in plan.pieces.items():
            tensors[number] = at(scratch.data_ptr() + place, plan.forms[number])
    for number in [n for step in plan.steps for n in step.makes if n not in plan.pieces] + plan.unused:
        tensors[number] = launched.pop(0)
    assert not launched
    sent.clear()
    for step in plan.steps:
        step.launch.by_kernel(tensors)
    assert got == list(sent) and len(got) == len(plan.steps)
    for made, tensor in zip(result, tensors, strict=True):
        assert made is None or made is tensor
    gone = {number for step in plan.steps for number in step.drop} | plan.pieces.keys()
    assert all((made is None) == (number in gone or tensors[number] is None) for number, made in enumerate(result))
    pieces = sorted((tensors[n].data_ptr(), tensors[n].nbytes) for n in plan.pieces)
    assert all(start + size <= later for (start, size), (later, _) in zip(pieces, pieces[1:]))
    assert not pieces or pieces[-1][0] + pieces[-1][1] <= pieces[0][0] + plan.scratch_bytes
    plan.fast_empty, plan.direct = fast_empty, None


@pytest.fixture
def called(module, monkeypatch):
    """All plans that were called, each with what it was given."""
    called, call = [], module("plan").Plan.__call__
    monkeypatch.setattr(
        module("plan").Plan, "__call__", lambda self, *given: called.append((self, given)) or call(self, *given)
    )
    return called


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")
@pytest.mark.parametrize("tokens", [1, 40, 2048])
@pytest.mark.parametrize("record", [False, True])
def test_plan_of_experts(module, sent, tokens, kind, record):
    for _ in range(2):
        inputs = experts_inputs(tokens, **kind)
        call = module("experts_plans").call_plan(block_of(module, inputs, kind), *inputs[:3], record)
        assert len(call.saved) == 4 * record
        assert_plan(sent, call.plan, inputs)


def test_memory_is_given_back_either_way(module, sent, monkeypatch):
    """By the first call, through Triton, and by direct ones; by none that is not told to."""
    experts, plans, by_triton = module("experts"), module("plan").Plan, []
    call = plans._by_kernels
    monkeypatch.setattr(plans, "_by_kernels", lambda self, given: by_triton.append(self) or call(self, given))
    x, ids, weights, *tensors = inputs = experts_inputs(40)
    block = block_of(module, inputs, {})
    routing = experts._route_tiles(block, x, ids, specified=True)
    needs, counts = experts.Needs(*[True] * 4, False, False), []
    module("experts_plans").backward_plan.cache_clear()  # other tests' plans are ready
    for spent in (False, True, True, False):
        preact = torch.zeros(80, 192, dtype=BF16)
        by_triton.clear(), sent.clear()
        experts.backward_triton(block, torch.zeros_like(x), x, weights, preact, routing, needs, spent)
        assert preact.untyped_storage().nbytes() == (0 if spent else preact.nbytes)
        counts.append((len(by_triton), len(sent)))
    assert counts == [(1, 6), (1, 6), (0, 6), (0, 6)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind) or "plain")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", [(), ("x", "up", "down_bias"), ("up", "down", "up_bias")], ids="-".join)
def test_plan_of_experts_backward(module, sent, called, kind, recompute, frozen):
    inputs, experts = experts_inputs(40, **kind), module("experts")
    block = block_of(module, inputs, kind)._replace(recompute=recompute)
    x, ids, weights = inputs[:3]
    routing = experts._route_tiles(block, x, ids, specified=True)
    _, preact = experts.forward_triton(block, x, weights, routing, save=True)
    has = {"up_bias": bool(kind.get("bias")), "down_bias": bool(kind.get("bias"))}
    needs = experts.Needs(**{name: has.get(name, True) and name not in frozen for name in experts.Needs._fields})
    called.clear()
    experts.backward_triton(block, torch.zeros_like(x), x, weights, preact, routing, needs)
    (plan, given), *_ = called
    assert_plan(sent, plan, given)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("needs", [(True,) * 4, (True, False, False, False), (False, True, False, True)], ids=str)
def test_plan_of_linear(module, sent, called, transposed, needs):
    x, dy, sizes = torch.zeros(2048, 256, dtype=BF16), torch.zeros(2048, 512, dtype=BF16), torch.tensor([512] * 4)
    weight = torch.zeros((4, 256, 512) if transposed else (4, 512, 256), dtype=BF16)
    bias, scales, linear = torch.zeros(4, 512, dtype=BF16), torch.zeros(2048), module("grouped_linear")
    _, tile_map = linear.forward_triton(x, weight, sizes, bias, scales, transposed)
    for splits in (tile_map, sizes):
        linear.backward_triton(dy, x, weight, splits, bias, scales, transposed, needs)
    assert len(called) >= 3
    for plan, given in called[:]:
        assert_plan(sent, plan, given)


def test_what_is_dropped_goes_either_way(module, sent, called):
    """Of what a plan makes as much is alive at each allocation as where a launch follows the other in a loop."""
    inputs, experts = experts_inputs(40), module("experts")
    block, (x, ids, weights) = block_of(module, inputs, {}), inputs[:3]
    routing = experts._route_tiles(block, x, ids, specified=True)
    _, preact = experts.forward_triton(block, x, weights, routing, save=True)
    called.clear()
    experts.backward_triton(block, x, x, weights, preact, routing, experts.Needs(*[True] * 4, False, False))
    (plan, given), *_ = called
    made, alive, empty, fast_empty = [], [], plan.empty, plan.fast_empty

    def counting(*form):
        alive.append(sum(reference() is not None for reference in made))
        tensor = empty(*form)
        made.append(weakref.ref(tensor))
        return tensor

    plan.empty = plan.fast_empty = counting
    plan.direct = None
    for _ in range(2):  # the first by Triton
        del plan(*given)[:]
    plan.empty, plan.fast_empty, plan.direct = empty, fast_empty, None
    half = len(alive) // 2
    assert alive[:half] == alive[half:] and max(alive) < half - 1


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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("record", [False, True])
def test_determinism_fills_what_a_plan_makes(module, sent, monkeypatch, record, deterministic):
    """All memory, scratch too, of direct launches is PyTorch's own then, which fills it if it is told to."""
    inputs = experts_inputs(40)
    plan = module("experts_plans").call_plan(block_of(module, inputs, {}), *inputs[:3], record).plan
    plan.direct, fast, slow = None, [], []
    empty = plan.empty
    plan.fast_empty = lambda *form: fast.append(form) or empty(*form)
    plan.empty = lambda *form: slow.append(form) or empty(*form)
    for _ in range(2):  # the first by Triton
        fast.clear(), slow.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, "_get_deterministic_algorithms", lambda: deterministic)
            plan(*inputs)
    assert plan.direct is not None and bool(plan.scratch_bytes)
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
    found = launch._c_launcher(known)
    assert found.function is sent and found.head == (15 if sent.in_tuple else None)
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
