"""GroupedLinear: gradients that go into main_grad, now or later, with Megatron-LM's hooks and without."""

import copy
from collections import Counter

import pytest
import torch
from compare import assert_bitwise
from linear_modules import (
    FLOAT,
    HALF,
    HEAD,
    NAN,
    ROWS,
    SIZES,
    TAIL,
    G,
    assert_matches,
    by_delay,
    by_overwrite,
    by_place,
    by_single,
    form_of,
    give_main_grads,
    grads,
    leaves,
    main_grads,
    make_batch,
    make_module,
    packed,
    reference,
    run,
    wanted_main_grad,
)
from poison import poisoned_allocations
from test_dispatch import assert_differentiable_once, by_entry, by_loss


@pytest.mark.parametrize("dtypes", [(FLOAT, FLOAT), (FLOAT, HALF), (HALF, FLOAT), (HALF, HALF)], ids=str)
@by_delay
@by_overwrite
@by_place
def test_main_grad(grouped_moe, device, place, overwrite, delay, dtypes):
    """Accurate to main_grad's dtype even if operands have fewer bits: what is added is never rounded to theirs."""
    form = form_of(place, dtypes[0])
    module = make_module(grouped_moe, form, device, accumulate_into_main_grad=True, delay_wgrad=delay)
    before = give_main_grads(module, place, dtypes[1], overwrite_main_grad=overwrite)
    batch = make_batch(form, device)
    want = reference(grouped_moe, module, batch)
    with poisoned_allocations():
        got = run(module, batch)
        if delay:
            assert_bitwise("main_grad", main_grads(module), before)
            assert grads(module, "bias") is None
            module.backward_dw()
    assert_matches({**got, "bias": grads(module, "bias")}, want, dtypes[0])
    expected = {"weight": wanted_main_grad(before, overwrite, want)}
    assert_matches({"weight": main_grads(module)}, expected, dtypes[1])
    assert all(p.grad is None for name, p in module.named_parameters() if name.startswith("weight"))


@pytest.mark.parametrize("splits", ["sizes", "wrong-sizes", "offsets", "wrong-offsets", "list"])
@by_delay
def test_main_grads_apart_get_what_packed_ones_get(grouped_moe, device, delay, splits):
    """One launch per group where main_grads lie apart, whatever the splits hold."""
    splits = {
        "sizes": torch.tensor(SIZES, device=device),
        "wrong-sizes": torch.tensor((9, -4, 50, 7), device=device),
        "offsets": torch.tensor((0, *SIZES), device=device).cumsum(0).int(),
        "wrong-offsets": torch.tensor((5, 11, 8, 99, 20), device=device),
        "list": list(SIZES),
    }[splits]
    got, batch = [], make_batch(form_of("apart"), device)
    for place in ("packed", "apart"):
        torch.manual_seed(3)
        options = {"accumulate_into_main_grad": True, "delay_wgrad": delay}
        module = make_module(grouped_moe, form_of(place), device, **options)
        give_main_grads(module, place)
        module(batch.x, splits, batch.scales).backward(batch.dy)
        if delay:
            module.backward_dw()
        got.append(main_grads(module))
    assert_matches({"weight": got[1]}, {"weight": got[0].double()}, FLOAT)


@by_delay
@by_overwrite
@by_place
def test_no_rows(grouped_moe, device, place, overwrite, delay):
    form = form_of(place)
    module = make_module(grouped_moe, form, device, accumulate_into_main_grad=True, delay_wgrad=delay)
    before, batch = give_main_grads(module, place, overwrite_main_grad=overwrite), make_batch(form, device)
    y = module(batch.x[:0], torch.zeros(G, dtype=torch.int64, device=device), batch.scales[:0])
    y.backward(batch.dy[:0])
    if delay:
        module.backward_dw()
    assert_bitwise("main_grad", main_grads(module), torch.zeros_like(before) if overwrite else before)
    assert not grads(module, "bias").any()


@by_delay
@by_place
def test_strides(grouped_moe, device, place, delay):
    """x and scales with gaps, a cotangent that is one row for all."""
    module = make_module(grouped_moe, form_of(place), device, accumulate_into_main_grad=True, delay_wgrad=delay)
    before, batch = give_main_grads(module, place), make_batch(form_of(place), device)
    x, scales = (
        torch.stack([batch.x, batch.x * NAN], -1)[..., 0],
        torch.stack([batch.scales, batch.scales * NAN], -1)[:, 0],
    )
    dy = batch.dy[:1].expand_as(batch.dy)
    want = reference(grouped_moe, module, batch._replace(dy=dy))
    module(x, batch.offsets, scales).backward(dy)
    if delay:
        module.backward_dw()
    assert_matches({"weight": main_grads(module)}, {"weight": wanted_main_grad(before, False, want)}, FLOAT)
    assert_matches({"bias": grads(module, "bias")}, want, FLOAT)


@by_delay
@by_place
def test_rows_of_no_group_may_hold_nan(grouped_moe, device, place, delay):
    form = form_of(place)
    module = make_module(grouped_moe, form, device, accumulate_into_main_grad=True, delay_wgrad=delay)
    batch, results = make_batch(form, device), []
    for value in (1.0, NAN):
        for tensor in batch[:1] + batch[2:]:
            tensor[:HEAD], tensor[ROWS - TAIL :] = value, value
        give_main_grads(module, place, value=0.5)
        module.zero_grad()
        run(module, batch)
        if delay:
            module.backward_dw()
        results.append({"weight": main_grads(module), "bias": grads(module, "bias")})
    for name, tensor in results[0].items():
        assert_bitwise(name, results[1][name], tensor)


@pytest.mark.parametrize("zero_out", [False, True], ids=["empty", "zeros"])
@by_delay
@by_place
def test_dummy_gradients(grouped_moe, device, place, delay, zero_out):
    module = make_module(grouped_moe, form_of(place), device, accumulate_into_main_grad=True, delay_wgrad=delay)
    give_main_grads(module, place, grad_added_to_main_grad=False, zero_out_wgrad=zero_out)
    batch = make_batch(form_of(place), device)
    weights = [p for name, p in module.named_parameters() if name.startswith("weight")]
    with torch.no_grad():
        module(batch.x, batch.offsets, batch.scales)
    assert not any(weight.grad_added_to_main_grad for weight in weights)
    with poisoned_allocations():
        run(module, batch)
        if delay:
            assert all(weight.grad is None for weight in weights)
            module.backward_dw()
    for weight in weights:
        assert weight.grad_added_to_main_grad is True
        assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
        assert not weight.grad.any() if zero_out else weight.grad.isnan().all()
    assert not hasattr(next(p for name, p in module.named_parameters() if name.startswith("bias")), "main_grad")


@by_delay
@by_place
def test_frozen_weights_keep_their_main_grad(grouped_moe, device, place, delay):
    """One frozen group, then all; no gradient asked for at all."""
    form = form_of(place)
    module = make_module(grouped_moe, form, device, accumulate_into_main_grad=True, delay_wgrad=delay)
    before = give_main_grads(module, place, grad_added_to_main_grad=False)
    batch = make_batch(form, device)
    weights = {name: p for name, p in module.named_parameters() if name.startswith("weight")}
    frozen = [name for name in weights if name in ("weight", "weight2")]
    for name in frozen:
        weights[name].requires_grad_(False)
        weights[name].main_grad.fill_(NAN)
    want = reference(grouped_moe, module, batch)
    got = run(module, batch)
    if delay:
        module.backward_dw()
    assert_matches({**got, "bias": grads(module, "bias")}, want, FLOAT)
    for group, (name, weight) in enumerate(weights.items()):
        if name in frozen:
            assert weight.main_grad.isnan().all() and weight.grad is None and not weight.grad_added_to_main_grad
        else:
            expected = before[group : group + 1].double() + want["weight"][group : group + 1]
            assert_matches({"weight": weight.main_grad[None]}, {"weight": expected}, FLOAT)
    module.requires_grad_(False)
    for weight in weights.values():
        del weight.main_grad
    module(batch.x.clone().requires_grad_(), batch.offsets, batch.scales).backward(batch.dy)
    assert not module.need_backward_dw() and module.discard_delayed_wgrad() == 0
    module.backward_dw()


@by_delay
def test_weights_need_not_agree(grouped_moe, device, delay):
    """Discrete weights of which some are overwritten, some have dummies, and one asks get_main_grad()."""
    form = form_of("packed")
    module = make_module(grouped_moe, form, device, accumulate_into_main_grad=True, delay_wgrad=delay)
    before, batch = give_main_grads(module, "packed"), make_batch(form, device)
    module.weight2.overwrite_main_grad = True
    module.weight3.grad_added_to_main_grad, module.weight3.zero_out_wgrad = False, True
    buffer = module.weight0.main_grad
    module.weight0.get_main_grad = lambda: buffer
    module.weight0.main_grad = None
    want = reference(grouped_moe, module, batch)
    run(module, batch)
    if delay:
        module.backward_dw()
    module.weight0.main_grad = buffer
    before[2] = 0
    assert_matches({"weight": main_grads(module)}, {"weight": wanted_main_grad(before, False, want)}, FLOAT)
    assert [getattr(module, f"weight{group}").grad is None for group in range(G)] == [True, True, True, False]


class MegatronHooks:
    """What Megatron-LM's data-parallel wrapper does with gradients, as far as a layer sees it."""

    def __init__(self, module, delay):
        self.accumulators, self.calls = [], Counter()
        for name, parameter in module.named_parameters():
            parameter.grad_added_to_main_grad = False
            hook = self.make_hook(name, parameter)
            if delay and getattr(parameter, "skip_backward_post_hook", False):
                module.register_wgrad_accumulation_and_reduce_hooks(hook)
            else:
                accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                accumulator.register_hook(hook)
                self.accumulators.append(accumulator)

    def make_hook(self, name, parameter):
        def hook(*_):
            assert parameter.grad is not None, f"{name}: Megatron asserts that there is a gradient"
            if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            self.calls[name] += 1

        return hook


@pytest.mark.parametrize("zero_out", [False, True], ids=["empty", "zeros"])
@by_delay
@by_place
def test_with_the_hooks_of_megatron(grouped_moe, device, place, delay, zero_out):
    """Two microbatches; no gradient is added twice, none is lost, and no dummy is added."""
    form = form_of(place)
    module = make_module(grouped_moe, form, device, accumulate_into_main_grad=True, delay_wgrad=delay)
    before = give_main_grads(module, place, zero_out_wgrad=zero_out)
    for name, parameter in module.named_parameters():
        if name.startswith("bias"):
            parameter.main_grad = torch.zeros(parameter.shape, device=device)
    hooks = MegatronHooks(module, delay)
    batches = [make_batch(form, device) for _ in range(2)]
    wants = [reference(grouped_moe, module, batch) for batch in batches]
    with poisoned_allocations():
        for batch in batches:
            run(module, batch)
        for _ in batches if delay else ():
            module.backward_dw()
    got = {"weight": main_grads(module), "bias": packed(module, "bias", lambda p: p.main_grad)}
    expected = {"weight": wanted_main_grad(before, False, *wants), "bias": wants[0]["bias"] + wants[1]["bias"]}
    assert_matches(got, expected, FLOAT)
    assert hooks.calls == {name: 2 for name, _ in module.named_parameters()}
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("option", ["delay_wgrad", "accumulate_into_main_grad"])
@pytest.mark.parametrize("name", ["weight0", "weight3"])
def test_weights_modified_before_the_backward_are_refused(grouped_moe, device, name, option):
    form = form_of("packed")
    module = copy.deepcopy(make_module(grouped_moe, form, device, **{option: True}))
    give_main_grads(module, "packed")
    batch = leaves(make_batch(form, device))
    y = module(*batch[:3])
    with torch.no_grad():
        getattr(module, name).mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        y.backward(batch.dy)


@by_delay
@pytest.mark.parametrize("main", [False, True], ids=["grad", "main_grad"])
@by_single
def test_output_may_be_modified_in_place(grouped_moe, device, single, main, delay):
    """Even where nothing that the layer computes with wants a gradient through it."""
    place = "single" if single else "packed"
    options = {"accumulate_into_main_grad": main, "delay_wgrad": delay}
    form = form_of(place, kind="none")
    module, batch = make_module(grouped_moe, form, device, **options), make_batch(form, device)
    give_main_grads(module, place, value=0.0)
    y = module(*batch[:3])
    y.mul_(2.0)
    y.backward(batch.dy / 2)
    if delay:
        module.backward_dw()
    want = reference(grouped_moe, module, batch)
    assert_matches({"weight": main_grads(module) if main else grads(module, "weight")}, want, FLOAT)


@by_delay
@by_single
def test_wrong_main_grads_are_named(grouped_moe, device, single, delay):
    place, name = ("single", "weight") if single else ("packed", "weight2")
    module = make_module(grouped_moe, form_of(place), device, accumulate_into_main_grad=True, delay_wgrad=delay)
    give_main_grads(module, place)
    batch, weight = make_batch(form_of(place), device), getattr(module, name)
    wrong = {
        AttributeError: [None],
        TypeError: [[0.0], weight.main_grad.int(), weight.main_grad.to(torch.complex64)],
        ValueError: [weight.main_grad[1:], weight.main_grad.flatten(), weight.main_grad.to("meta")],
    }
    for error, buffers in wrong.items():
        for buffer in buffers:
            weight.main_grad = buffer
            with pytest.raises(error, match=rf"^{name}\.main_grad: "):
                module(*batch[:3]).backward(batch.dy)
                module.backward_dw()
            module.discard_delayed_wgrad()
    del weight.main_grad
    with pytest.raises(AttributeError, match=rf"^{name}\.main_grad: "):
        module(*batch[:3]).backward(batch.dy)
        module.backward_dw()


@by_single
def test_main_grads_that_were_right_before(grouped_moe, device, single):
    """Others in their place are checked by the forward; what became of the same ones, by the backward."""
    place, name = ("single", "weight") if single else ("packed", "weight2")
    form = form_of(place)
    module, batch = make_module(grouped_moe, form, device, accumulate_into_main_grad=True), make_batch(form, device)
    give_main_grads(module, place)
    weight, said = getattr(module, name), rf"^{name}\.main_grad: "
    for _ in range(2):
        module(*batch[:3]).backward(batch.dy)
    right, weight.main_grad = weight.main_grad.clone(), None
    with pytest.raises(AttributeError, match=said):
        module(*batch[:3])
    weight.main_grad = right[1:]
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            module(*batch[:3])
    weight.main_grad = right
    y = module(*batch[:3])
    right.data = right[1:]
    with pytest.raises(ValueError, match=said):
        y.backward(batch.dy)


@pytest.mark.parametrize("place", ["single", "packed", "apart"])
def test_main_grad_is_that_of_the_backward(grouped_moe, device, place):
    """Replaced, and its flag reset, after the forward: the new buffer gets the gradient, the flag is set."""
    form = form_of(place)
    module, batch = make_module(grouped_moe, form, device, accumulate_into_main_grad=True), make_batch(form, device)
    old = give_main_grads(module, place, grad_added_to_main_grad=False, zero_out_wgrad=True)
    held = [weight.main_grad for name, weight in module.named_parameters() if name.startswith("weight")]
    y = module(*batch[:3])
    torch.manual_seed(5)
    new = give_main_grads(module, place, grad_added_to_main_grad=False)
    y.backward(batch.dy)
    want = reference(grouped_moe, module, batch)
    assert_matches({"weight": main_grads(module)}, {"weight": wanted_main_grad(new, False, want)}, FLOAT)
    for name, weight in module.named_parameters():
        if name.startswith("weight"):
            assert weight.grad_added_to_main_grad and not weight.grad.any()
    assert_bitwise("old", torch.stack(held).reshape(old.shape), old)


def test_main_grad_that_overlaps_itself_is_refused(grouped_moe, device):
    form = form_of("single")
    module, batch = make_module(grouped_moe, form, device, accumulate_into_main_grad=True), make_batch(form, device)
    module.weight.main_grad = torch.zeros((), device=device).expand(module.weight.shape)
    with pytest.raises(ValueError, match="^weight.main_grad: expected memory of its own for each element"):
        module(*batch[:3]).backward(batch.dy)


@by_loss
@by_entry
@pytest.mark.parametrize("option", ["accumulate_into_main_grad", "delay_wgrad"])
def test_differentiable_once(grouped_moe, device, option, curved, backward):
    module = grouped_moe.GroupedLinear(3, 8, 6, device=device, dtype=torch.float32, **{option: True})
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    x = torch.randn(10, 8, device=device, requires_grad=True)
    y = module(x, torch.tensor([3, 4, 3], device=device))
    assert_differentiable_once(y, x, curved, backward)
