"""GroupedLinear: gradients that backward_dw computes later."""

import weakref
from unittest.mock import Mock

import layers
import pytest
import torch
from layers import Form, assert_matches, form_of, make, make_batch, make_module, reference, run
from torch.nn.utils import parametrize, prune

SCALED = Form(kind="scaled")


@pytest.mark.parametrize("order", ["F0 F1 B0 B1 W W", "F0 F1 B1 B0 W W", "F0 F1 B0 W B1 W", "F0 B0 F1 B1 W W"])
@layers.by_main
@layers.by_two_places
@layers.by_delay
def test_microbatches_in_flight(grouped_moe, device, delay, place, main, order):
    """As pipelines interleave them. Each backward_dw is for the oldest backward; gradients add up."""
    form, options = form_of(place), {"accumulate_into_main_grad": main, "delay_wgrad": delay}
    module, batches = make_module(grouped_moe, form, device, **options), {i: make_batch(form, device) for i in "01"}
    before = layers.give_main_grads(module, place, value=0.0)
    outputs, waiting, done = {}, [], []
    for part in order.split():
        index = part[1:]
        if part[0] == "F":
            outputs[index] = module(*batches[index][:3])
        elif part[0] == "B":
            outputs.pop(index).backward(batches[index].dy)
            waiting.append(reference(grouped_moe, module, batches[index]))
        else:
            module.backward_dw()
        if part[0] == ("W" if delay else "B"):
            done.append(waiting.pop(0))
            assert_matches(layers.parameter_grads(module), layers.total(before, False, *done))


@layers.by_two_places
def test_delayed_gradients_are_added(grouped_moe, device, place):
    """To a gradient that is there, in place; of discrete weights only some may have one."""
    module, batch = make(grouped_moe, form_of(place), device, delay_wgrad=True)
    kept = {}
    for name, parameter in module.named_parameters():
        if name not in ("weight0", "weight2", "bias1"):
            parameter.grad = kept[name] = torch.randn_like(parameter)
    before = {name: grad.double() for name, grad in kept.items()}
    want = reference(grouped_moe, module, batch)
    run(module, batch)
    module.backward_dw()
    for name, parameter in module.named_parameters():
        expected = want[name.rstrip("0123456789")]
        expected = (expected[int(name[-1])] if name[-1].isdigit() else expected) + before.get(name, 0.0)
        assert_matches({"grad": parameter.grad[None]}, {"grad": expected[None]})
        assert name not in kept or parameter.grad is kept[name]


@pytest.mark.parametrize("failing", ["accumulate", "run_bias_backward"])
@layers.by_two_places
def test_a_backward_dw_that_failed_leaves_no_gradient(grouped_moe, module, device, place, failing, monkeypatch):
    """As for want of memory: another call would add to it, which may be unwritten or all of this one's."""
    layer, batch = make(grouped_moe, form_of(place), device, delay_wgrad=True)
    want = reference(grouped_moe, layer, batch)
    run(layer, batch)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(module("nn.grouped_linear"), failing, Mock(side_effect=MemoryError))
        layer.backward_dw()
    assert all(parameter.grad is None for parameter in layer.parameters())
    layer.backward_dw()
    assert_matches(layers.parameter_grads(layer), want)


@layers.by_two_places
def test_a_backward_dw_without_memory_for_dummies_adds_nothing(grouped_moe, module, device, place, monkeypatch):
    given = {"delay": True, "value": 0.0, "grad_added_to_main_grad": False}
    layer, batch, before = layers.make_with_main_grads(grouped_moe, device, place, **given)
    run(layer, batch)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(module("nn.main_grad"), "torch", Mock(wraps=torch, **{"empty_like.side_effect": MemoryError}))
        layer.backward_dw()
    assert torch.equal(layers.main_grads(layer), before)
    layer.backward_dw()
    assert_matches(layers.parameter_grads(layer), reference(grouped_moe, layer, batch))


def test_hooks_run_after_each_delayed_gradient(grouped_moe, device):
    module, batch = make(grouped_moe, Form(), device, delay_wgrad=True)
    seen = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(module.weight.grad is not None))
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(module.discard_delayed_wgrad()))
    run(module, batch)
    assert seen == []
    module.backward_dw()
    assert seen == [True, 0]


def test_never_called(grouped_moe, device):
    """Neither an error out of memory nor a layer that is silently not trained."""
    module, batch = make(grouped_moe, Form(), device, delay_wgrad=True)
    for _ in range(64):
        run(module, batch)
    with pytest.raises(RuntimeError, match="64 backwards wait for backward_dw"):
        run(module, batch)
    with torch.no_grad():
        module(*batch[:3])
    module.backward_dw()
    run(module, batch)
    assert module.discard_delayed_wgrad() == 64
    run(module, batch)


def test_nothing_stored(grouped_moe, device):
    module, batch = make(grouped_moe, Form(), device, delay_wgrad=True)
    with pytest.raises(RuntimeError, match="nothing is stored"):
        module.backward_dw()
    with torch.no_grad():
        module(*batch[:3])
    module(*batch[:3])
    assert module.discard_delayed_wgrad() == 0
    run(module, batch)
    assert module.need_backward_dw() and module.discard_delayed_wgrad() == 1
    with pytest.raises(RuntimeError, match="nothing is stored"):
        module.backward_dw()
    run(module, batch)
    module.backward_dw()
    with pytest.raises(RuntimeError, match="nothing is stored"):
        module.backward_dw()
    run(module, batch)
    module.requires_grad_(False)
    assert module.need_backward_dw()
    module.backward_dw()
    assert not module.need_backward_dw() and module.discard_delayed_wgrad() == 0


COMPUTED = {
    "parametrization": lambda module, name: parametrize.register_parametrization(module, name, torch.nn.Tanh()),
    "pruning": lambda module, name: prune.random_unstructured(module, name, 0.5),
}


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("change", COMPUTED.values(), ids=COMPUTED)
def test_parameters_that_are_computed_are_refused(grouped_moe, device, change, name):
    """Their gradients would have to go on from there, which no backward does any more."""
    module, batch = make(grouped_moe, Form(), device, delay_wgrad=True)
    change(module, name)
    with pytest.raises(RuntimeError, match=f"^delay_wgrad: {name} is computed from other tensors"):
        module(*batch[:3])


def test_other_parameters_than_the_forwards_are_refused(grouped_moe, device):
    module, batch = make(grouped_moe, Form(), device, delay_wgrad=True)
    others = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    torch.func.functional_call(module, others, batch[:3]).backward(batch.dy)
    with pytest.raises(RuntimeError, match="^backward_dw: the parameters are others .*; discard_delayed_wgrad"):
        module.backward_dw()
    assert module.discard_delayed_wgrad() == 1


class Memory(bytearray):
    """Bytes that tell when they are gone."""


def _watched(tensor, refs):
    """The same values in memory that refs sees the end of."""
    memory = Memory(tensor.numel() * tensor.element_size())
    refs.append(weakref.ref(memory))
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("end", ["backward_dw", "discard", "deletion"])
@layers.by_two_places
def test_nothing_stays_in_memory(grouped_moe, place, end):
    module, batch = make(grouped_moe, form_of(place), "cpu", delay_wgrad=True)
    refs, token = [], Memory()  # of which the autograd graph keeps the latter
    x, offsets, scales, dy = (_watched(tensor, refs) for tensor in batch)
    x, graph = x.requires_grad_().view_as(x), weakref.ref(token)
    x.register_hook(lambda dx, token=token: dx)
    module(x, offsets, scales).backward(dy)
    del x, offsets, scales, dy, token
    assert graph() is None, "what is stored keeps the graph that x hangs on"
    assert all(ref() is not None for ref in refs), "stored, so the case shows something"
    if end == "backward_dw":
        module.backward_dw()
    elif end == "discard":
        module.discard_delayed_wgrad()
    else:
        del module
    assert all(ref() is None for ref in refs)


@pytest.mark.parametrize("frozen, kept", [("weight", [False, True, True, True]), ("bias", [True, True, False, True])])
def test_stores_only_what_is_needed(grouped_moe, frozen, kept):
    module, batch = make(grouped_moe, SCALED, "cpu", delay_wgrad=True)
    module.get_parameter(frozen).requires_grad_(False)
    refs = []
    x, offsets, scales, dy = (_watched(tensor, refs) for tensor in batch)
    module(x, offsets, scales).backward(dy)
    del x, offsets, scales, dy
    assert [ref() is not None for ref in refs] == kept


@pytest.mark.parametrize("at, name", list(enumerate(["x", "splits", "bias_scales", "the gradient of the output"])))
def test_modified_before_backward_dw_is_refused(grouped_moe, device, at, name):
    module, batch = make(grouped_moe, SCALED, device, delay_wgrad=True)
    module(*batch[:3]).backward(batch.dy)
    batch[at].mul_(1)
    with pytest.raises(RuntimeError, match=f"^{name}: modified in place"):
        module.backward_dw()
    assert module.discard_delayed_wgrad() == 1
