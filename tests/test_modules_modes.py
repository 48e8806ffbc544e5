"""GroupedLinear under torch.compile, autocast, activation checkpointing, modes of dispatch and in CUDA graphs."""

import contextlib
import copy

import pytest
import torch
from compare import assert_bitwise
from linear_modules import (
    FLOAT,
    HALF,
    SIZES,
    Form,
    assert_matches,
    by_delay,
    by_place,
    by_single,
    form_of,
    give_main_grads,
    grads,
    leaves,
    main_grads,
    make_batch,
    make_module,
    parameter_grads,
    reference,
    run,
    wanted_main_grad,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("how", ["marked", "automatic"])
@by_single
def test_compiles_once(grouped_moe, device, single, how):
    """Rows marked dynamic: one graph for all splits and numbers of rows. Else a second one for all but the first."""
    form = Form(single, single, "scaled")
    module = make_module(grouped_moe, form, device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for rows in (40, 23, 61, 17):
        batch = make_batch(form, device, rows)
        want = {**run(module, batch), **parameter_grads(module)}
        module.zero_grad()
        x, scales = (t.clone().requires_grad_() for t in (batch.x, batch.scales))
        if how == "marked":
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(scales, 0)
        y = compiled(x, batch.offsets, scales)
        y.backward(batch.dy)
        got = {"y": y.detach(), "x": x.grad, "scales": scales.grad, **parameter_grads(module)}
        module.zero_grad()
        for name, tensor in want.items():
            assert_bitwise(name, got[name], tensor)
    assert counter.frame_count == {"marked": 1, "automatic": 2}[how]


@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
@by_delay
@pytest.mark.parametrize("main", [False, True], ids=["grad", "main_grad"])
@by_single
def test_activation_checkpointing(grouped_moe, device, single, main, delay, reentrant):
    place = "single" if single else "packed"
    options = {"accumulate_into_main_grad": main, "delay_wgrad": delay}
    module, batch = make_module(grouped_moe, form_of(place), device, **options), make_batch(form_of(place), device)
    give_main_grads(module, place, value=0.0, grad_added_to_main_grad=False)
    want = reference(grouped_moe, module, batch)
    x, offsets, scales, dy = leaves(batch)
    checkpoint(module, x, offsets, scales, use_reentrant=reentrant).backward(dy)
    if delay:
        module.backward_dw()
        assert module.discard_delayed_wgrad() == 0
    got = {"x": x.grad, "scales": scales.grad, "bias": grads(module, "bias")}
    assert_matches({**got, "weight": main_grads(module) if main else grads(module, "weight")}, want, FLOAT)


@by_delay
@by_single
def test_offloaded_activations(grouped_moe, device, single, delay):
    """What is saved goes to the host and comes back."""
    form = form_of("single" if single else "packed")
    module, batch, results = make_module(grouped_moe, form, device, delay_wgrad=delay), make_batch(form, device), []
    for offload in (contextlib.nullcontext(), torch.autograd.graph.save_on_cpu()):
        module.zero_grad()
        x, offsets, scales, dy = leaves(batch)
        with offload:
            y = module(x, offsets, scales)
        y.backward(dy)
        if delay:
            module.backward_dw()
        results.append((y, x.grad, *(parameter.grad for parameter in module.parameters())))
    for want, got in zip(*results, strict=True):
        assert_bitwise("offloaded", got, want)


@by_single
def test_inference_mode(grouped_moe, device, single):
    form = form_of("single" if single else "packed")
    module, batch = make_module(grouped_moe, form, device), make_batch(form, device)
    want = module(*batch[:3])
    for _ in range(4):
        with torch.inference_mode():
            got = module(*batch[:3])
        assert got.is_inference() and torch.equal(got, want)
    assert_bitwise("y", module(*batch[:3]), want)


@by_place
@by_delay
def test_autocast(grouped_moe, device, place, delay):
    """Operands are cast as by F.linear, main_grad gets the sum of their exact products; backward_dw may be inside."""
    form = form_of(place)
    module = make_module(grouped_moe, form, device, accumulate_into_main_grad=True, delay_wgrad=delay)
    before, batch = give_main_grads(module, place), make_batch(form, device)
    batch = batch._replace(dy=batch.dy.bfloat16())
    want = reference(grouped_moe, copy.deepcopy(module).bfloat16(), batch._replace(x=batch.x.bfloat16()))
    with torch.autocast(device, HALF):
        got = run(module, batch)
        if delay:
            module.backward_dw()
    assert (got["y"].dtype, got["x"].dtype, got["scales"].dtype) == (HALF, FLOAT, FLOAT)
    assert_matches({"y": got["y"], "x": got["x"], "bias": grads(module, "bias")}, want, HALF)
    assert_matches({"weight": main_grads(module)}, {"weight": wanted_main_grad(before, False, want)}, FLOAT)


@by_place
@by_delay
def test_backward_within_autocast_stays_wide(grouped_moe, device, place, delay):
    """A forward in fp32 has a backward in fp32, also where that runs under autocast."""
    form = form_of(place)
    module = make_module(grouped_moe, form, device, accumulate_into_main_grad=True, delay_wgrad=delay)
    before, batch = give_main_grads(module, place), make_batch(form, device)
    y = module(*batch[:3])
    with torch.autocast(device, HALF):
        y.backward(batch.dy)
        if delay:
            module.backward_dw()
    want = reference(grouped_moe, module, batch)
    assert_matches({"bias": grads(module, "bias")}, want, FLOAT)
    assert_matches({"weight": main_grads(module)}, {"weight": wanted_main_grad(before, False, want)}, FLOAT)


@pytest.mark.parametrize("flight", [False, True], ids=["one-by-one", "in-flight"])
@pytest.mark.parametrize(
    "place, overwrite, dummies",
    [("single", False, True), ("single", True, False), ("packed", False, False), ("apart", True, True)],
)
def test_compiled_into_main_grad(grouped_moe, device, place, overwrite, dummies, flight):
    """Two graphs, the second for any number of rows; other splits and other main_grads need no other."""
    form = form_of(place)
    module = make_module(grouped_moe, form, device, accumulate_into_main_grad=True)
    attributes = {"grad_added_to_main_grad": False, "zero_out_wgrad": True} if dummies else {}
    before = give_main_grads(module, place, overwrite_main_grad=overwrite, **attributes)
    weights = [p for name, p in module.named_parameters() if name.startswith("weight")]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    batches = [make_batch(form, device, rows) for rows in (40, 23, 61)]
    wants = [reference(grouped_moe, module, batch) for batch in batches]
    outputs = []
    for index, batch in enumerate(batches):
        outputs.append((compiled(*leaves(batch)[:3]), batch.dy))
        if not flight:
            outputs.pop()[0].backward(batch.dy)
            expected = {"weight": wanted_main_grad(before, overwrite, *wants[: index + 1])}
            assert_matches({"weight": main_grads(module)}, expected, FLOAT)
    for y, dy in outputs:
        y.backward(dy)
    assert_matches({"weight": main_grads(module)}, {"weight": wanted_main_grad(before, overwrite, *wants)}, FLOAT)
    for weight in weights:
        assert weight.grad_added_to_main_grad and not weight.grad.any() if dummies else weight.grad is None
    assert counter.frame_count == 2
    before = give_main_grads(module, place)
    compiled(*leaves(batches[2])[:3]).backward(batches[2].dy)
    assert_matches({"weight": main_grads(module)}, {"weight": wanted_main_grad(before, overwrite, wants[2])}, FLOAT)


def test_compile_refuses_to_delay(grouped_moe, device):
    module, batch = make_module(grouped_moe, Form(), device, delay_wgrad=True), make_batch(Form(), device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="delay_wgrad: torch.compile"):
        compiled(*batch[:3])
    with torch.no_grad():
        assert_bitwise("y", compiled(*batch[:3]), module(*batch[:3]))
    torch.compile(module, backend="aot_eager")(*batch[:3]).backward(batch.dy)
    module.backward_dw()
    assert_matches({"weight": module.weight.grad}, reference(grouped_moe, module, batch), FLOAT)


@pytest.mark.gpu
@by_delay
@by_place
def test_graph_replays_with_other_splits(grouped_moe, device, place, delay):
    """Forward, backward and backward_dw into main_grad in one CUDA graph."""
    form = form_of(place, HALF)
    module = make_module(grouped_moe, form, device, accumulate_into_main_grad=True, delay_wgrad=delay)
    give_main_grads(module, place, value=0.0)
    static = leaves(make_batch(form, device))

    def step():
        static.x.grad = static.scales.grad = None
        for name, parameter in module.named_parameters():
            if name.startswith("bias"):
                parameter.grad = None
        y = module(*static[:3])
        y.backward(static.dy)
        if delay:
            module.backward_dw()
        return y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for sizes in (SIZES, (0, 0, 0, 0), (1, 30, 0, 9), (40, 0, 0, 0)):
        before = _refill(module)
        batch = make_batch(form, device)
        offsets = torch.tensor((0, *sizes), device=device).cumsum(0)
        batch = batch._replace(offsets=offsets)
        with torch.no_grad():
            for target, source in zip(static, batch):
                target.copy_(source)
        graph.replay()
        want = reference(grouped_moe, module, batch)
        got = {"y": y, "x": static.x.grad, "scales": static.scales.grad, "bias": grads(module, "bias")}
        assert_matches({name: tensor.detach() for name, tensor in got.items()}, want, HALF)
        assert_matches({"weight": main_grads(module)}, {"weight": wanted_main_grad(before, False, want)}, FLOAT)


def _refill(module):
    """New values in the main_grads that a graph has captured."""
    for name, parameter in module.named_parameters():
        if name.startswith("weight"):
            parameter.main_grad.normal_()
    return main_grads(module).clone()


class Watch(TorchDispatchMode):
    """Keeps the names of the ops that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@by_delay
@by_place
def test_main_grad_changes_in_place(grouped_moe, device, place, delay):
    """As autograd counts it, too; by an op, with the same result where a mode watches."""
    form, watch, results = form_of(place), Watch(), []
    for context in (contextlib.nullcontext(), watch):
        torch.manual_seed(3)
        layer = make_module(grouped_moe, form, device, accumulate_into_main_grad=True, delay_wgrad=delay)
        give_main_grads(layer, place)
        weights = [p for name, p in layer.named_parameters() if name.startswith("weight")]
        batch, versions = make_batch(form, device), [weight.main_grad._version for weight in weights]
        with context, torch.autograd.set_multithreading_enabled(False):
            layer(*batch[:3]).backward(batch.dy)
            layer.backward_dw()
        assert all(weight.main_grad._version > version for weight, version in zip(weights, versions))
        results.append(main_grads(layer))
    assert_bitwise("main_grad", *results)
    assert any("accumulate_wgrad" in name for name in watch.seen)
