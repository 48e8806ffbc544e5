"""GroupedLinear under torch.compile, autocast, activation checkpointing and modes of dispatch."""

import contextlib
import copy
import functools

import layers
import pytest
import torch
from compare import assert_bitwise, assert_same
from layers import HALF, Form, assert_matches, form_of, leaves, main_grads, make, make_with_main_grads, reference, step
from operations import Log
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("how", ["marked", "automatic"])
@layers.by_two_places
def test_compiles_once(grouped_moe, device, place, how):
    """Rows marked dynamic: one graph for all splits and numbers of rows. Else a second one for all but the first."""
    form, counter = form_of(place), CompileCounterWithBackend("aot_eager")
    module = layers.make_module(grouped_moe, form, device)
    compiled = torch.compile(module, fullgraph=True, backend=counter)

    def function(x, offsets, scales):
        for tensor in (x, scales) if how == "marked" else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(x, offsets, scales)

    for rows in (40, 23, 61, 17):
        batch = layers.make_batch(form, device, rows)
        want = step(module, batch)
        module.zero_grad()
        assert_same(step(module, batch, function=function), want)
        module.zero_grad()
    assert counter.frame_count == {"marked": 1, "automatic": 2}[how]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@layers.by_two_places
def test_traced_by_torch_jit(grouped_moe, device, place, frozen):
    """PyTorch compares the trace with one that it makes without gradients."""
    module, batch = make(grouped_moe, form_of(place), device)
    if frozen and module.single_grouped_weight:
        module.quantize_blocks_()
    given = tuple(tensor for tensor in batch[:3] if tensor is not None)
    assert_bitwise("traced", torch.jit.trace(module, given)(*given), module(*given))


def offloaded(module, *args):
    with torch.autograd.graph.save_on_cpu():
        return module(*args)


def keep_our_ops(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "grouped_moe" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy, module, *args):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(module, *args, use_reentrant=False, context_fn=contexts)


CALLS = {
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "checkpoint-selective": functools.partial(selective, keep_our_ops),
    "checkpoint-selective-all": functools.partial(selective, lambda *_, **__: CheckpointPolicy.MUST_SAVE),
    "checkpoint-reentrant": functools.partial(checkpoint, use_reentrant=True),
    "offloaded": offloaded,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@layers.by_delay
@layers.by_main
@layers.by_two_places
def test_activations_that_are_not_kept(grouped_moe, device, place, main, delay, call):
    """What is saved is recomputed, or goes to the host and comes back: the same bits."""
    options = {"accumulate_into_main_grad": main, "delay_wgrad": delay}
    module, batch = make(grouped_moe, form_of(place), device, **options)
    results = []
    for function in (module, functools.partial(call, module)):
        module.zero_grad()
        layers.give_main_grads(module, place, value=0.0, grad_added_to_main_grad=False)
        results.append(step(module, batch, function=function))
        assert module.discard_delayed_wgrad() == 0
    want, got = results
    assert got.keys() == want.keys()
    assert_same(got, want)


@layers.by_single
def test_vmap(grouped_moe, device, single):
    """Inputs of a batch one by one, with gradients of each, and an ensemble of modules whose parameters are stacked."""
    form = Form(weight=single, bias=single)
    modules = [layers.make_module(grouped_moe, form, device) for _ in range(3)]
    module, offsets = modules[0], layers.make_batch(form, device).offsets
    xs = torch.randn(3, layers.ROWS, layers.K, device=device)
    y = torch.func.vmap(lambda x: module(x, offsets))(xs)
    want = torch.stack([module(x, offsets) for x in xs])
    assert_bitwise("y", y, want)
    dy, parameters = torch.randn_like(y), [*module.parameters()]
    for got, right in zip(*(torch.autograd.grad(out, parameters, dy) for out in (y, want))):
        torch.testing.assert_close(got, right)
    stacked, _ = torch.func.stack_module_state(modules)
    call = functools.partial(torch.func.functional_call, module)
    y = torch.func.vmap(lambda state, x: call(state, (x, offsets)))(stacked, xs)
    assert_bitwise("ensemble", y, torch.stack([one(x, offsets) for one, x in zip(modules, xs)]))
    x = xs[0].requires_grad_()
    y = torch.func.vmap(lambda state: call(state, (x, offsets)))(stacked)
    want = torch.stack([one(x, offsets) for one in modules])
    assert_bitwise("one input", y, want)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, dy)[0] for out in (y, want)))


@pytest.mark.parametrize("option", ["accumulate_into_main_grad", "delay_wgrad"])
def test_vmap_refuses_other_ways_for_gradients(grouped_moe, device, option):
    module, batch, _ = layers.make_with_main_grads(grouped_moe, device, "single", option == "delay_wgrad")
    with pytest.raises(NotImplementedError, match=f"^{option}: "):
        torch.func.vmap(lambda x: module(x, *batch[1:3]))(batch.x[None])


@pytest.mark.parametrize("kind", ["weight", "bias"])
@layers.by_single
def test_forward_mode_without_gradients_is_refused(grouped_moe, device, single, kind):
    """Which `torch.no_grad` leaves on: detached parameters would silently have derivatives of 0."""
    module, batch = make(grouped_moe, Form(weight=single, bias=single), device)
    tangents = {name: torch.ones_like(p) for name, p in module.named_parameters() if name.startswith(kind)}
    parameters = {name: module.get_parameter(name).detach() for name in tangents}
    call = functools.partial(torch.func.functional_call, module, args=batch[:3])
    with torch.no_grad(), pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(call, (parameters,), (tangents,))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        call({name: torch.autograd.forward_ad.make_dual(p, tangents[name]) for name, p in parameters.items()})


@layers.by_delay
def test_forward_mode_of_a_frozen_weight_is_refused(grouped_moe, device, delay):
    """Where others are trained, whose gradients take another way."""
    module, batch, _ = make_with_main_grads(grouped_moe, device, "packed", delay)
    weight = module.weight1.requires_grad_(False)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="^GroupedLinear: .*jvp"):
        dual = torch.autograd.forward_ad.make_dual(weight, torch.ones_like(weight))
        torch.func.functional_call(module, {"weight1": dual}, batch[:3])


@layers.by_place
@layers.by_main
@layers.by_delay
def test_autocast(grouped_moe, device, place, main, delay):
    """Operands are cast as by F.linear, main_grad gets the sum of their exact products; backward_dw may be inside."""
    options = {"accumulate_into_main_grad": main, "delay_wgrad": delay}
    module, batch = make(grouped_moe, form_of(place), device, **options)
    start, batch = layers.give_main_grads(module, place), batch._replace(dy=batch.dy.bfloat16())
    low = copy.deepcopy(module).bfloat16()
    want = reference(grouped_moe, low, batch._replace(x=batch.x.bfloat16()), start if main else None)
    with torch.autocast(device, HALF):
        got = step(module, batch)
    assert {name: tensor.dtype for name, tensor in got.items()} == {**dict.fromkeys(got, layers.FLOAT), "y": HALF}
    assert_matches({"weight": got.pop("weight")}, want, None if main else HALF)
    assert_matches(got, want, HALF)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype, other", [(torch.float16, HALF), (HALF, torch.float16)], ids=str)
def test_autocast_to_the_other_dtype_of_two_bytes(grouped_moe, device, dtype, other, compiled):
    """Of parameters that are stacked, in the forward or of a checkpoint."""
    form = Form(False, False, dtype=dtype)
    module, batch = make(grouped_moe, form, device)
    single = layers.make_module(grouped_moe, Form(dtype=dtype), device)
    want = copy.deepcopy(module).to(other)(batch.x.to(other), *batch[1:3])
    function = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    with torch.autocast(device, other):
        assert_bitwise("y", function(*batch[:3]), want)
        single.load_state_dict(module.state_dict())
        twin = copy.deepcopy(module)
    assert_bitwise("weight", single.weight.detach(), layers.packed(twin, "weight"))


@layers.by_place
@layers.by_delay
def test_backward_within_autocast_stays_wide(grouped_moe, device, place, delay):
    """A forward in fp32 has a backward in fp32, also where that runs under autocast."""
    module, batch, before = make_with_main_grads(grouped_moe, device, place, delay)
    y = module(*batch[:3])
    with torch.autocast(device, HALF):
        y.backward(batch.dy)
        module.backward_dw()
    assert_matches(layers.parameter_grads(module), reference(grouped_moe, module, batch, before))


@pytest.mark.parametrize("flight", [False, True], ids=["one-by-one", "in-flight"])
@pytest.mark.parametrize(
    "place, overwrite, dummies",
    [("single", False, True), ("single", True, False), ("packed", False, False), ("apart", True, True)],
)
def test_compiled_into_main_grad(grouped_moe, device, place, overwrite, dummies, flight):
    """Two graphs, the second for any number of rows; other splits and other main_grads need no other."""
    attributes = {"grad_added_to_main_grad": False, "zero_out_wgrad": True} if dummies else {}
    module, _, before = make_with_main_grads(grouped_moe, device, place, overwrite_main_grad=overwrite, **attributes)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    batches = [layers.make_batch(form_of(place), device, rows) for rows in (40, 23, 61)]
    wants = [reference(grouped_moe, module, batch) for batch in batches]
    outputs = []
    for index, batch in enumerate(batches):
        outputs.append((compiled(*leaves(batch)[:3]), batch.dy))
        if not flight:
            outputs.pop()[0].backward(batch.dy)
            assert_matches({"weight": main_grads(module)}, layers.total(before, overwrite, *wants[: index + 1]))
    for y, dy in outputs:
        y.backward(dy)
    assert_matches({"weight": main_grads(module)}, layers.total(before, overwrite, *wants))
    for weight in layers.parameters(module, "weight"):
        assert weight.grad_added_to_main_grad and not weight.grad.any() if dummies else weight.grad is None
    assert counter.frame_count == 2
    before = layers.give_main_grads(module, place)
    compiled(*leaves(batches[2])[:3]).backward(batches[2].dy)
    assert_matches({"weight": main_grads(module)}, layers.total(before, overwrite, wants[2]))


@layers.by_single
def test_compiled_backward_of_an_eager_forward(grouped_moe, device, single):
    """By compiled autograd, which has no versions of weights to compare; a weight that has changed is still seen."""
    module, batch = make(grouped_moe, Form(single, single), device)
    module = copy.deepcopy(module)  # whose discrete weights are no views of each other
    x, *rest = leaves(batch)[:3]

    def train(changes=False):
        y = torch.compiler.disable(module)(x, *rest)
        if changes:
            with torch.no_grad():
                layers.parameters(module, "weight")[-1].mul_(2)
        y.backward(batch.dy)

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(train, backend="aot_eager")
        for _ in range(2):
            module.zero_grad()
            compiled()
            assert_matches(layers.parameter_grads(module), reference(grouped_moe, module, batch))
            with torch.no_grad():
                torch._foreach_mul_([*module.parameters()], 0.5)
        with pytest.raises(RuntimeError, match="modified"):
            compiled(changes=True)


def test_compile_refuses_to_delay(grouped_moe, device):
    module, batch = make(grouped_moe, Form(), device, delay_wgrad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="delay_wgrad: torch.compile"):
        compiled(*batch[:3])
    with torch.no_grad():
        assert_bitwise("y", compiled(*batch[:3]), module(*batch[:3]))
    torch.compile(module, backend="aot_eager")(*batch[:3]).backward(batch.dy)
    module.backward_dw()
    assert_matches({"weight": module.weight.grad}, reference(grouped_moe, module, batch))


@layers.by_delay
@layers.by_place
def test_main_grad_changes_in_place(grouped_moe, device, place, delay):
    """As autograd counts it, too; by an op, with the same result where a mode watches."""
    log, results = Log(), []
    for context in (contextlib.nullcontext(), log):
        torch.manual_seed(3)
        module, batch, _ = make_with_main_grads(grouped_moe, device, place, delay)
        weights = layers.parameters(module, "weight")
        versions = [weight.main_grad._version for weight in weights]
        with context, torch.autograd.set_multithreading_enabled(False):
            module(*batch[:3]).backward(batch.dy)
            module.backward_dw()
        assert all(weight.main_grad._version > version for weight, version in zip(weights, versions))
        results.append(main_grads(module))
    assert_bitwise("main_grad", *results)
    assert "accumulate_wgrad" in log.names
