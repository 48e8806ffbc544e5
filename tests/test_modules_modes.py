"""GroupedLinear under torch.compile, autocast, activation checkpointing and modes of dispatch."""

import contextlib
import copy
import functools

import pytest
import torch
from compare import assert_bitwise
from linear_modules import (
    FLOAT,
    HALF,
    Form,
    assert_matches,
    by_delay,
    by_main,
    by_place,
    by_single,
    form_of,
    give_main_grads,
    leaves,
    main_grad_layer,
    main_grads,
    make_batch,
    make_module,
    parameter_grads,
    parameters,
    reference,
    step,
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
        want = step(module, batch)
        module.zero_grad()
        x, offsets, scales, dy = leaves(batch)
        if how == "marked":
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(scales, 0)
        y = compiled(x, offsets, scales)
        y.backward(dy)
        got = {"y": y.detach(), "x": x.grad, "scales": scales.grad, **parameter_grads(module)}
        module.zero_grad()
        for name, tensor in want.items():
            assert_bitwise(name, got[name], tensor)
    assert counter.frame_count == {"marked": 1, "automatic": 2}[how]


def offloaded(module, *args):
    with torch.autograd.graph.save_on_cpu():
        return module(*args)


CALLS = {
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "checkpoint-reentrant": functools.partial(checkpoint, use_reentrant=True),
    "offloaded": offloaded,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@by_delay
@by_main
@by_single
def test_activations_that_are_not_kept(grouped_moe, device, single, main, delay, call):
    """What is saved is recomputed, or goes to the host and comes back: the same bits."""
    place = "single" if single else "packed"
    form = form_of(place)
    module = make_module(grouped_moe, form, device, accumulate_into_main_grad=main, delay_wgrad=delay)
    batch, flags = make_batch(form, device), {"grad_added_to_main_grad": False, "value": 0.0}
    give_main_grads(module, place, **flags)
    want = {name: tensor.clone() for name, tensor in step(module, batch).items()}
    module.zero_grad()
    give_main_grads(module, place, **flags)
    x, offsets, scales, dy = leaves(batch)
    y = call(module, x, offsets, scales)
    y.backward(dy)
    module.backward_dw()
    assert module.discard_delayed_wgrad() == 0
    got = {"y": y.detach(), "x": x.grad, "scales": scales.grad, **parameter_grads(module)}
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_bitwise(name, tensor, want[name])


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
    module, batch, before = main_grad_layer(grouped_moe, device, place, delay)
    batch = batch._replace(dy=batch.dy.bfloat16())
    low = copy.deepcopy(module).bfloat16()
    want = reference(grouped_moe, low, batch._replace(x=batch.x.bfloat16()), before)
    with torch.autocast(device, HALF):
        got = step(module, batch)
    assert (got["y"].dtype, got["x"].dtype, got.pop("scales").dtype) == (HALF, FLOAT, FLOAT)
    assert_matches({"weight": got.pop("weight")}, want)
    assert_matches(got, want, HALF)


@by_place
@by_delay
def test_backward_within_autocast_stays_wide(grouped_moe, device, place, delay):
    """A forward in fp32 has a backward in fp32, also where that runs under autocast."""
    module, batch, before = main_grad_layer(grouped_moe, device, place, delay)
    y = module(*batch[:3])
    with torch.autocast(device, HALF):
        y.backward(batch.dy)
        module.backward_dw()
    assert_matches(parameter_grads(module), reference(grouped_moe, module, batch, before))


@pytest.mark.parametrize("flight", [False, True], ids=["one-by-one", "in-flight"])
@pytest.mark.parametrize(
    "place, overwrite, dummies",
    [("single", False, True), ("single", True, False), ("packed", False, False), ("apart", True, True)],
)
def test_compiled_into_main_grad(grouped_moe, device, place, overwrite, dummies, flight):
    """Two graphs, the second for any number of rows; other splits and other main_grads need no other."""
    attributes = {"grad_added_to_main_grad": False, "zero_out_wgrad": True} if dummies else {}
    module, _, before = main_grad_layer(grouped_moe, device, place, overwrite_main_grad=overwrite, **attributes)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    batches = [make_batch(form_of(place), device, rows) for rows in (40, 23, 61)]
    wants = [reference(grouped_moe, module, batch) for batch in batches]
    outputs = []
    for index, batch in enumerate(batches):
        outputs.append((compiled(*leaves(batch)[:3]), batch.dy))
        if not flight:
            outputs.pop()[0].backward(batch.dy)
            expected = {"weight": wanted_main_grad(before, overwrite, *wants[: index + 1])}
            assert_matches({"weight": main_grads(module)}, expected)
    for y, dy in outputs:
        y.backward(dy)
    assert_matches({"weight": main_grads(module)}, {"weight": wanted_main_grad(before, overwrite, *wants)})
    for weight in parameters(module, "weight"):
        assert weight.grad_added_to_main_grad and not weight.grad.any() if dummies else weight.grad is None
    assert counter.frame_count == 2
    before = give_main_grads(module, place)
    compiled(*leaves(batches[2])[:3]).backward(batches[2].dy)
    assert_matches({"weight": main_grads(module)}, {"weight": wanted_main_grad(before, overwrite, wants[2])})


def test_compile_refuses_to_delay(grouped_moe, device):
    module, batch = make_module(grouped_moe, Form(), device, delay_wgrad=True), make_batch(Form(), device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="delay_wgrad: torch.compile"):
        compiled(*batch[:3])
    with torch.no_grad():
        assert_bitwise("y", compiled(*batch[:3]), module(*batch[:3]))
    torch.compile(module, backend="aot_eager")(*batch[:3]).backward(batch.dy)
    module.backward_dw()
    assert_matches({"weight": module.weight.grad}, reference(grouped_moe, module, batch))


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
    watch, results = Watch(), []
    for context in (contextlib.nullcontext(), watch):
        torch.manual_seed(3)
        module, batch, _ = main_grad_layer(grouped_moe, device, place, delay)
        weights = parameters(module, "weight")
        versions = [weight.main_grad._version for weight in weights]
        with context, torch.autograd.set_multithreading_enabled(False):
            module(*batch[:3]).backward(batch.dy)
            module.backward_dw()
        assert all(weight.main_grad._version > version for weight, version in zip(weights, versions))
        results.append(main_grads(module))
    assert_bitwise("main_grad", *results)
    assert any("accumulate_wgrad" in name for name in watch.seen)
