"""GroupedLinear: gradients that backward_dw computes later."""

import weakref

import pytest
import torch
from linear_modules import (
    FLOAT,
    Form,
    assert_matches,
    by_form,
    by_single,
    form_of,
    give_main_grads,
    grads,
    main_grads,
    make_batch,
    make_module,
    reference,
    run,
)
from poison import poisoned_allocations


@pytest.mark.parametrize("order", ["F0 F1 B0 B1 W W", "F0 F1 B1 B0 W W", "F0 F1 B0 W B1 W", "F0 B0 F1 B1 W W"])
@pytest.mark.parametrize("main", [False, True], ids=["grad", "main_grad"])
@by_single
def test_microbatches_in_flight(grouped_moe, device, single, main, order):
    """As pipelines interleave them. Each backward_dw is for the oldest backward; gradients add up."""
    place = "single" if single else "packed"
    form = form_of(place)
    now = make_module(grouped_moe, form, device, accumulate_into_main_grad=main)
    later = make_module(grouped_moe, form, device, accumulate_into_main_grad=main, delay_wgrad=True)
    later.load_state_dict(now.state_dict())
    batches = [make_batch(form, device) for _ in range(2)]
    wants = [reference(grouped_moe, now, batch) for batch in batches]
    for module in (now, later):
        give_main_grads(module, place, value=0.0)
        outputs, total, done = {}, 0.0, []
        for step, index in (part.ljust(2)[:2] for part in order.split()):
            if step == "F":
                outputs[index] = module(*batches[int(index)][:3])
            elif step == "B":
                outputs.pop(index).backward(batches[int(index)].dy)
                done.append(wants[int(index)])
            if step == "W" and module is later:
                module.backward_dw()
            if step == ("W" if module is later else "B"):
                want = done.pop(0)
                total = {kind: want[kind] + (total[kind] if total else 0) for kind in ("weight", "bias")}
                got = {"weight": main_grads(module) if main else grads(module, "weight"), "bias": grads(module, "bias")}
                assert_matches(got, total, FLOAT)


@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias", "x", "weight1", "bias1"])
@by_form
def test_delayed(grouped_moe, device, form, frozen):
    """The backward gives what the inputs get, backward_dw the rest; frozen parameters and their hooks stay alone."""
    module, batch = make_module(grouped_moe, form, device, delay_wgrad=True), make_batch(form, device)
    for name, parameter in module.named_parameters():
        assert parameter.skip_backward_post_hook is True
        parameter.register_hook(lambda grad: pytest.fail("a hook of a parameter ran in the backward"))
        parameter.requires_grad_(name.rstrip("0123456789") != frozen and name != frozen)
    want = reference(grouped_moe, module, batch)
    with poisoned_allocations():
        if frozen == "x":
            module(batch.x, batch.offsets, batch.scales).backward(batch.dy)
        else:
            assert_matches(run(module, batch), want, form.dtype)
        assert all(parameter.grad is None for parameter in module.parameters())
        assert module.need_backward_dw() == any(parameter.requires_grad for parameter in module.parameters())
        module.backward_dw()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        group = name.lstrip("weightbias")
        expected = want[name.rstrip("0123456789")]
        got, expected = (parameter.grad[None], expected[int(group)][None]) if group else (parameter.grad, expected)
        assert parameter.grad.dtype == form.dtype
        assert_matches({"grad": got}, {"grad": expected}, form.dtype)
    assert module.discard_delayed_wgrad() == 0


@by_single
def test_delayed_gradients_are_added(grouped_moe, device, single):
    """To a gradient that is there, in place; of discrete weights only some may have one."""
    form = Form(single, single, "scaled")
    module, batch = make_module(grouped_moe, form, device, delay_wgrad=True), make_batch(form, device)
    before = {}
    for name, parameter in module.named_parameters():
        if name not in ("weight0", "weight2", "bias1"):
            parameter.grad = before[name] = torch.randn_like(parameter)
    before = {name: grad.clone() for name, grad in before.items()}
    kept = {name: parameter.grad for name, parameter in module.named_parameters() if name in before}
    want = reference(grouped_moe, module, batch)
    run(module, batch)
    module.backward_dw()
    for name, parameter in module.named_parameters():
        expected = want[name.rstrip("0123456789")]
        expected = expected if single else expected[int(name[-1])]
        expected = expected + before[name].double() if name in before else expected
        assert_matches({"grad": parameter.grad[None]}, {"grad": expected[None]}, FLOAT)
        assert name not in kept or parameter.grad is kept[name]


def test_hooks_run_after_each_delayed_gradient(grouped_moe, device):
    module, batch = make_module(grouped_moe, Form(), device, delay_wgrad=True), make_batch(Form(), device)
    seen = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(module.weight.grad is not None))
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(module.discard_delayed_wgrad()))
    run(module, batch)
    assert seen == []
    module.backward_dw()
    assert seen == [True, 0]


def test_never_called(grouped_moe, device):
    """Neither an error out of memory nor a layer that is silently not trained."""
    batch = make_batch(Form(), device)
    module = make_module(grouped_moe, Form(), device, delay_wgrad=True)
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
    batch = make_batch(Form(), device)
    module = make_module(grouped_moe, Form(), device, delay_wgrad=True)
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
    now = make_module(grouped_moe, Form(), device)
    run(now, batch)
    assert not now.need_backward_dw()
    now.backward_dw()


class Memory(bytearray):
    """Bytes that tell when they are gone."""


class Token:
    """Something that the autograd graph keeps."""


class KeepToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, None


def _watched(tensor, refs):
    """The same values in memory that refs sees the end of."""
    memory = Memory(tensor.numel() * tensor.element_size())
    refs.append(weakref.ref(memory))
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("end", ["backward_dw", "discard", "deletion"])
@by_single
def test_nothing_stays_in_memory(grouped_moe, single, end):
    form = Form(single, single, "scaled")
    module, batch = make_module(grouped_moe, form, "cpu", delay_wgrad=True), make_batch(form, "cpu")
    refs, token = [], Token()
    x, offsets, scales, dy = (_watched(tensor, refs) for tensor in batch)
    graph = weakref.ref(token)
    y = module(KeepToken.apply(x.requires_grad_(), token), offsets, scales)
    y.backward(dy)
    del x, offsets, scales, dy, y, token
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
    module, batch = (
        make_module(grouped_moe, Form(kind="scaled"), "cpu", delay_wgrad=True),
        make_batch(Form(kind="scaled"), "cpu"),
    )
    module.get_parameter(frozen).requires_grad_(False)
    refs = []
    x, offsets, scales, dy = (_watched(tensor, refs) for tensor in batch)
    module(x, offsets, scales).backward(dy)
    del x, offsets, scales, dy
    assert [ref() is not None for ref in refs] == kept


@pytest.mark.parametrize("name", ["x", "splits", "bias_scales", "the gradient of the output"])
def test_modified_before_backward_dw_is_refused(grouped_moe, device, name):
    form = Form(kind="scaled")
    module, batch = make_module(grouped_moe, form, device, delay_wgrad=True), make_batch(form, device)
    module(*batch[:3]).backward(batch.dy)
    dict(zip(("x", "splits", "bias_scales", "the gradient of the output"), batch))[name].mul_(1)
    with pytest.raises(RuntimeError, match=f"^{name}: modified in place"):
        module.backward_dw()
    assert module.discard_delayed_wgrad() == 1
