"""GroupedLinear: gradients that go into main_grad, now or later, with Megatron-LM's hooks and without."""

from collections import Counter

import layers
import pytest
import torch
from compare import assert_bitwise, assert_differentiable_once
from layers import FLOAT, HALF, assert_matches, main_grads, make_with_main_grads, parameters, reference, run
from poison import poisoned_allocations


def with_gaps(batch):
    """The same x and scales with NaN in between, and a cotangent that is one row for all."""
    x, scales = (torch.stack([t, t * layers.NAN], -1)[..., 0] for t in (batch.x, batch.scales))
    return batch._replace(x=x, scales=scales, dy=batch.dy[layers.ROWS // 2].expand_as(batch.dy))


BATCHES = {
    "plain": lambda batch: batch,
    "gaps": with_gaps,
    "no-groups": lambda batch: layers.without_groups(batch, layers.ROWS),
    "no-rows": lambda batch: layers.without_groups(batch, 0),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("dtypes", [(FLOAT, FLOAT), (FLOAT, HALF), (HALF, FLOAT), (HALF, HALF)], ids=str)
@layers.by_delay
@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])
@layers.by_place
def test_main_grad(grouped_moe, device, place, overwrite, delay, dtypes, kind):
    """Accurate to main_grad's dtype even if operands have fewer bits: what is added is never rounded to theirs."""
    flags = {"overwrite_main_grad": overwrite, "value": layers.NAN if overwrite else None}
    module, batch, before = make_with_main_grads(grouped_moe, device, place, delay, *dtypes, **flags)
    batch = BATCHES[kind](batch)
    want = reference(grouped_moe, module, batch, None if overwrite else before)
    with poisoned_allocations():
        got = run(module, batch)
        if delay:
            torch.testing.assert_close(main_grads(module), before, rtol=0, atol=0, equal_nan=True)
            assert layers.grads(module, "bias") is None
            module.backward_dw()
    got.update(layers.parameter_grads(module))
    assert got["weight"].dtype == dtypes[1]
    assert_matches(got, want)
    if kind.startswith("no"):
        assert_bitwise("main_grad", got["weight"], torch.zeros_like(before) if overwrite else before)
    for weight in parameters(module, "weight"):
        assert weight.grad is None and not hasattr(weight, "grad_added_to_main_grad")


@pytest.mark.parametrize("zero_out", [False, True], ids=["empty", "zeros"])
@layers.by_delay
@layers.by_place
def test_dummy_gradients(grouped_moe, device, place, delay, zero_out):
    flags = {"grad_added_to_main_grad": False, "zero_out_wgrad": zero_out}
    module, batch, _ = make_with_main_grads(grouped_moe, device, place, delay, **flags)
    weights = parameters(module, "weight")
    with torch.no_grad():
        module(*batch[:3])
    assert not any(weight.grad_added_to_main_grad for weight in weights)
    with poisoned_allocations():
        run(module, batch)
        assert not delay or all(weight.grad is None for weight in weights)
        module.backward_dw()
    for weight in weights:
        assert weight.grad_added_to_main_grad is True
        assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
        assert not weight.grad.any() if zero_out else weight.grad.isnan().all()
    assert not any(hasattr(bias, "main_grad") for bias in parameters(module, "bias"))


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@layers.by_place
def test_anomaly_mode_sees_no_nan_in_dummies(grouped_moe, device, place):
    module, batch, before = make_with_main_grads(grouped_moe, device, place, False, grad_added_to_main_grad=False)
    batch = batch._replace(dy=batch.dy.nan_to_num())
    with poisoned_allocations(), torch.autograd.detect_anomaly():
        got = run(module, batch)
    assert_matches({**got, **layers.parameter_grads(module)}, reference(grouped_moe, module, batch, before))
    assert all(weight.grad_added_to_main_grad for weight in parameters(module, "weight"))


@layers.by_delay
@layers.by_place
def test_frozen_weights_keep_their_main_grad(grouped_moe, device, place, delay):
    """One frozen group, then all; no gradient asked for at all."""
    module, batch, before = make_with_main_grads(grouped_moe, device, place, delay, grad_added_to_main_grad=False)
    weights = parameters(module, "weight")
    frozen = weights[-2:-1] or weights
    for weight in frozen:
        weight.requires_grad_(False)
        weight.main_grad.fill_(layers.NAN)
    want = reference(grouped_moe, module, batch, before)
    got = run(module, batch)
    module.backward_dw()
    assert_matches({**got, "bias": layers.grads(module, "bias")}, want)
    for weight, expected in zip(weights, want["weight"]):
        if any(weight is other for other in frozen):
            assert weight.main_grad.isnan().all() and weight.grad is None and not weight.grad_added_to_main_grad
        else:
            assert_matches({"weight": weight.main_grad}, {"weight": expected})
    module.requires_grad_(False)
    for weight in weights:
        del weight.main_grad
    module(batch.x.clone().requires_grad_(), batch.offsets, batch.scales).backward(batch.dy)
    assert not module.need_backward_dw() and module.discard_delayed_wgrad() == 0
    module.backward_dw()


@layers.by_delay
def test_weights_need_not_agree(grouped_moe, device, delay):
    """Discrete weights of which some are overwritten, some have dummies, and one asks get_main_grad()."""
    module, batch, before = make_with_main_grads(grouped_moe, device, "packed", delay)
    module.weight2.overwrite_main_grad = True
    module.weight3.grad_added_to_main_grad, module.weight3.zero_out_wgrad = False, True
    buffer = module.weight0.main_grad
    module.weight0.get_main_grad = lambda: buffer
    module.weight0.main_grad = None
    run(module, batch)
    module.backward_dw()
    module.weight0.main_grad = buffer
    before[2] = 0
    assert_matches({"weight": main_grads(module)}, reference(grouped_moe, module, batch, before))
    assert [weight.grad is None for weight in parameters(module, "weight")] == [True, True, True, False]


@pytest.mark.parametrize("there", [False, True], ids=["missing", "there"])
@layers.by_main
@layers.by_delay
def test_groups_that_share_a_weight(grouped_moe, device, delay, main, there):
    """It gets the sum of their gradients, added to what is there, or in the place of a main_grad."""
    options = {"delay_wgrad": delay, "accumulate_into_main_grad": main}
    module, batch = layers.make(grouped_moe, layers.Form(False, False, "scaled"), device, **options)
    shared = module.weight0
    with torch.no_grad():
        module.weight2.copy_(shared)
    want = reference(grouped_moe, module, batch)["weight"]
    module.weight2 = shared
    start = torch.randn_like(shared)
    if main:
        for weight in parameters(module, "weight"):
            weight.main_grad, weight.overwrite_main_grad = start.clone(), not there
    elif there:
        shared.grad = start.clone()
    run(module, batch)
    module.backward_dw()
    expected = want[0] + want[2] + (start.double() if there else 0)
    assert_matches({"weight": shared.main_grad if main else shared.grad}, {"weight": expected})


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
@layers.by_delay
@layers.by_place
def test_with_the_hooks_of_megatron(grouped_moe, device, place, delay, zero_out):
    """Two microbatches; no gradient is added twice, none is lost, and no dummy is added."""
    module, *batches, before = make_with_main_grads(grouped_moe, device, place, delay, zero_out_wgrad=zero_out)
    batches.append(layers.make_batch(layers.form_of(place), device))
    for bias in parameters(module, "bias"):
        bias.main_grad = torch.zeros_like(bias)
    hooks = MegatronHooks(module, delay)
    wants = [reference(grouped_moe, module, batch) for batch in batches]
    with poisoned_allocations():
        for batch in batches:
            run(module, batch)
        for _ in batches:
            module.backward_dw()
    got = {"weight": main_grads(module), "bias": layers.packed(module, "bias", lambda p: p.main_grad)}
    assert_matches(got, layers.total(before, False, *wants))
    assert hooks.calls == {name: 2 for name, _ in module.named_parameters()}
    assert all(parameter.grad is None for parameter in module.parameters())


@layers.by_delay
@layers.by_main
@layers.by_two_places
def test_output_may_be_modified_in_place(grouped_moe, device, place, main, delay):
    """Even where nothing that the layer computes with wants a gradient through it."""
    options = {"accumulate_into_main_grad": main, "delay_wgrad": delay}
    module, batch = layers.make(grouped_moe, layers.form_of(place, kind="none"), device, **options)
    layers.give_main_grads(module, place, value=0.0)
    y = module(*batch[:3])
    y.mul_(2.0)
    y.backward(batch.dy / 2)
    module.backward_dw()
    assert_matches(layers.parameter_grads(module), reference(grouped_moe, module, batch))


by_name = pytest.mark.parametrize("place, name", [("single", "weight"), ("packed", "weight2")])


@layers.by_delay
@by_name
def test_wrong_main_grads_are_named(grouped_moe, device, place, name, delay):
    module, batch, _ = make_with_main_grads(grouped_moe, device, place, delay)
    weight, said = getattr(module, name), rf"^{name}\.main_grad: "
    right = weight.main_grad
    wrong = [(AttributeError, None), (TypeError, [0.0]), (TypeError, right.int()), (TypeError, right.to(torch.cfloat))]
    wrong += [(ValueError, buffer) for buffer in (right[1:], right.flatten(), right.to("meta"))]
    wrong += [(ValueError, right.new_zeros(()).expand_as(right))]
    for error, buffer in wrong:
        weight.main_grad = buffer
        with pytest.raises(error, match=said):
            module(*batch[:3]).backward(batch.dy)
            module.backward_dw()
        module.discard_delayed_wgrad()
    del weight.main_grad
    with pytest.raises(AttributeError, match=said):
        module(*batch[:3]).backward(batch.dy)
        module.backward_dw()


@by_name
def test_main_grads_that_were_right_before(grouped_moe, device, place, name):
    """Others in their place are checked by the forward; what became of the same ones, by the backward."""
    module, batch, _ = make_with_main_grads(grouped_moe, device, place)
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
    flags = {"grad_added_to_main_grad": False, "zero_out_wgrad": True}
    module, batch, old = make_with_main_grads(grouped_moe, device, place, **flags)
    weights = parameters(module, "weight")
    held = [weight.main_grad for weight in weights]
    y = module(*batch[:3])
    new = layers.give_main_grads(module, place, **flags)
    y.backward(batch.dy)
    assert_matches({"weight": main_grads(module)}, reference(grouped_moe, module, batch, new))
    assert all(weight.grad_added_to_main_grad and not weight.grad.any() for weight in weights)
    assert_bitwise("old", torch.stack(held).reshape(old.shape), old)


@pytest.mark.parametrize("way", ["grad", "inputs"])
@layers.by_two_places
def test_a_backward_of_inputs_alone(grouped_moe, device, place, way):
    """It adds nothing; one of weights alone, as the second of a zero-bubble schedule, adds their gradients once."""
    module, batch, before = make_with_main_grads(grouped_moe, device, place, grad_added_to_main_grad=False)
    weights, x = parameters(module, "weight"), batch.x.detach().requires_grad_()
    y = module(x, *batch[1:3])
    if way == "grad":
        torch.autograd.grad(y, x, batch.dy, retain_graph=True)
    else:
        y.backward(batch.dy, retain_graph=True, inputs=[x])
    assert_bitwise("main_grad", main_grads(module), before)
    assert not any(weight.grad_added_to_main_grad or weight.grad is not None for weight in weights)
    if way == "grad":
        torch.autograd.grad(y, weights, batch.dy)
    else:
        y.backward(batch.dy, inputs=weights)
    assert_matches({"weight": main_grads(module)}, reference(grouped_moe, module, batch, before))
    assert all(weight.grad_added_to_main_grad for weight in weights)


@pytest.mark.parametrize("curved", [False, True], ids=["linear-loss", "curved-loss"])
@pytest.mark.parametrize("backward", [False, True], ids=["grad", "backward"])
@pytest.mark.parametrize("option", ["accumulate_into_main_grad", "delay_wgrad"])
def test_differentiable_once(grouped_moe, device, option, curved, backward):
    module = grouped_moe.GroupedLinear(3, 8, 6, device=device, dtype=torch.float32, **{option: True})
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    x = torch.randn(10, 8, device=device, requires_grad=True)
    y = module(x, torch.tensor([3, 4, 3], device=device))
    assert_differentiable_once(y, x, curved, backward)
