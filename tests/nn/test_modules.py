"""GroupedLinear: its parameters and where their data lies, its output and every gradient, its errors."""

import copy
import itertools

import group_splits
import layers
import pytest
import torch
from compare import assert_bitwise, assert_same
from layers import LAYOUTS, ROWS, SIZES, G, K, N, assert_matches, make, make_module, packed, reference, run, step
from poison import poisoned_allocations
from torch.distributed.fsdp import fully_shard


@pytest.mark.kernels_ci
@layers.by_form
def test_matches_reference(grouped_moe, device, form):
    """Next to NaN, whether rows have a group or not; gradients add up over backwards."""
    (module, first), second = make(grouped_moe, form, device), layers.make_batch(form, device)
    want, other = (reference(grouped_moe, module, batch) for batch in (first, second))
    with poisoned_allocations():
        got = step(module, first)
        assert got.keys() == want.keys()
        assert_matches(got, want)
        got = {**step(module, second), **step(module, layers.without_groups(first, ROWS))}
    total = layers.parameter_grads(module)
    assert_matches(total, {kind: want[kind] + other[kind] for kind in total})
    assert not any(tensor.any() for name, tensor in got.items() if name not in ("weight", "bias"))


@pytest.mark.parametrize("place", ["single", "packed", "apart"])
@layers.by_main
@layers.by_delay
def test_splits(grouped_moe, device, delay, main, place):
    """In every form, and wrong ones as what they are clamped to."""
    options = {"accumulate_into_main_grad": main, "delay_wgrad": delay}
    module = make_module(grouped_moe, layers.form_of(place), device, **options)
    batch = layers.make_batch(layers.form_of(place), device, rest=1.0)
    forms = group_splits.forms(grouped_moe, torch.tensor(SIZES, device=device))
    every = [(splits, SIZES) for splits in forms.values()]
    every += [(torch.tensor(wrong, device=device), wrong) for wrong in group_splits.WRONG.values()]
    for splits, numbers in every:
        right = torch.tensor(group_splits.clamped(numbers, ROWS))
        module.zero_grad()
        before = layers.give_main_grads(module, place)
        want = reference(grouped_moe, module, batch._replace(offsets=right), before if main else None)
        assert_matches(step(module, batch._replace(offsets=splits)), want)


@layers.by_two_places
@layers.by_delay
def test_two_layers(grouped_moe, device, delay, place):
    """In a row, with an activation in between and the same scales: an MLP."""
    form, options = layers.form_of(place), {"accumulate_into_main_grad": True, "delay_wgrad": delay}
    up, batch = make(grouped_moe, form, device, **options)
    down, dy = make_module(grouped_moe, form, device, (G, N, K), **options), torch.randn(ROWS, K, device=device)
    start, other = (layers.give_main_grads(module, place) for module in (up, down))
    got = run(up, batch._replace(dy=dy), function=lambda x, *args: down(up(x, *args).tanh(), *args))
    a = reference(grouped_moe, up, batch)["y"].tanh()
    second = reference(grouped_moe, down, batch._replace(x=a, dy=dy), other)
    first = reference(grouped_moe, up, batch._replace(dy=second["x"] * (1 - a * a)), start)
    for layer, want in ((up, first), (down, second)):
        layer.backward_dw()
        assert_matches(layers.parameter_grads(layer), want)
    assert_matches(got, {"y": second["y"], "x": first["x"], "scales": first["scales"] + second["scales"]})


@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias", "both", "x", "weight1", "bias1"])
@layers.by_delay
@layers.by_form
def test_frozen(grouped_moe, device, form, delay, frozen):
    """What is not frozen has the same gradient to the bit, the rest has none, and hooks of parameters run in time."""
    module, batch = make(grouped_moe, form, device, delay_wgrad=delay)
    want = reference(grouped_moe, module, batch)
    assert_matches(step(module, batch), want)
    full = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    hooked = []
    for name, parameter in module.named_parameters():
        assert hasattr(parameter, "skip_backward_post_hook") == delay
        parameter.register_hook(lambda grad, name=name: hooked.append(name))
        parameter.requires_grad_(frozen not in (name, name.rstrip("0123456789"), "both"))
    wanted = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    with poisoned_allocations():
        if frozen != "x":
            assert_matches(run(module, batch), want)
        elif wanted:
            module(*batch[:3]).backward(batch.dy)
        assert sorted(hooked) == ([] if delay else sorted(wanted))
        assert not delay or all(parameter.grad is None for parameter in module.parameters())
        assert module.need_backward_dw() == (delay and bool(wanted))
        module.backward_dw()
    assert module.discard_delayed_wgrad() == 0
    for name, parameter in module.named_parameters():
        if name in wanted:
            assert_bitwise(name, parameter.grad, full[name])
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@layers.by_layout
def test_no_grad(grouped_moe, device, form, mode):
    """Of what the parameters hold now; the same as with gradients, before and after."""
    module, batch = make(grouped_moe, form, device)
    for _ in range(2):
        want = module(*batch[:3])
        for _ in range(4):
            with mode():
                y = module(*batch[:3])
            assert not y.requires_grad and y.is_inference() == (mode is torch.inference_mode)
            assert_bitwise("y", y, want.detach())
        assert_matches({"y": y}, reference(grouped_moe, module, batch))
        assert_bitwise("after", module(*batch[:3]), want)
        for parameter in module.parameters():
            parameter.detach().mul_(-3)


@layers.by_layout
def test_parameters(grouped_moe, device, form):
    """The same values in every layout; views of one storage."""
    torch.manual_seed(5)
    module = make_module(grouped_moe, form, device)
    torch.manual_seed(5)
    single = make_module(grouped_moe, LAYOUTS[0], device)
    weights = ["weight"] if form.weight else [f"weight{group}" for group in range(G)]
    biases = ["bias"] if form.bias else [f"bias{group}" for group in range(G)]
    assert [name for name, _ in module.named_parameters()] == weights + biases == list(module.state_dict())
    assert_bitwise("weight", packed(module, "weight"), single.weight.detach())
    assert_bitwise("bias", packed(module, "bias"), single.bias.detach())
    assert form.weight or layers.is_packed(module)
    bound = K**-0.5
    for name, parameter in module.named_parameters():
        assert 0.8 * bound < parameter.abs().max() <= bound, name
        assert parameter.is_leaf and parameter.requires_grad and not hasattr(parameter, "skip_backward_post_hook")


@layers.by_layout
def test_parameters_that_are_sharded(grouped_moe, device, form, two_ranks):
    """A module that FSDP2 has sharded on the meta device is drawn when it has memory."""
    module = fully_shard(make_module(grouped_moe, form, "meta"), mesh=two_ranks).to_empty(device=device)
    for parameter in module.parameters():
        parameter.detach().to_local().zero_()
    module.reset_parameters()
    for name, parameter in module.named_parameters():
        local = parameter.detach().to_local()
        assert 0.8 * K**-0.5 < local.abs().max() <= K**-0.5 and (local != 0).all(), name


@pytest.mark.parametrize("of_one", [True, False])
def test_sharded_state_dicts_of_either_form_load(grouped_moe, device, two_ranks, of_one):
    """Of FSDP2; what the other rank has does not arrive here."""
    forms = LAYOUTS[0], LAYOUTS[-1]  # weight and bias of all groups, or of each
    one, many = (fully_shard(make_module(grouped_moe, form, device), mesh=two_ranks) for form in forms)
    source, target = (one, many) if of_one else (many, one)
    assert target.load_state_dict(source.state_dict()).missing_keys == []


@layers.by_single
def test_one_group_is_drawn_as_nn_linear(grouped_moe, device, single):
    torch.manual_seed(7)
    module = grouped_moe.GroupedLinear(1, K, N, single_grouped_weight=single, single_grouped_bias=single, device=device)
    torch.manual_seed(7)
    linear = torch.nn.Linear(K, N, device=device)
    for (name, got), want in zip(module.named_parameters(), linear.parameters(), strict=True):
        assert_bitwise(name, got.detach().view_as(want), want.detach())


@layers.by_layout
def test_init_method(grouped_moe, form):
    shapes, trained = [], torch.zeros(N, K, requires_grad=True)

    def init(weight):
        shapes.append(tuple(weight.shape))
        weight.copy_(trained + len(shapes))

    module = make_module(grouped_moe, form, "cpu", init_method=init)
    assert shapes == [(N, K)] * G
    assert packed(module, "weight")[:, 0, 0].tolist() == [1, 2, 3, 4]
    module.reset_parameters()
    assert packed(module, "weight")[:, 0, 0].tolist() == [5, 6, 7, 8]


def _scatter(module, order, gap=8, transposed=None):
    """Moves the weights' data into one flat buffer, in this order, as a training framework does."""
    flat = torch.full((G * (N * K + gap),), float("nan"), device=module.weight0.device)
    for place, group in enumerate(order):
        weight = getattr(module, f"weight{group}")
        start = place * (N * K + gap)
        data = flat[start : start + N * K]
        data = data.view(K, N).t() if group == transposed else data.view(N, K)
        weight.data = data.copy_(weight.detach())
    return flat


@pytest.mark.parametrize(
    "order, transposed",
    [((0, 1, 2, 3), None), ((3, 2, 1, 0), None), ((0, 1, 3, 2), None), ((0, 2, 1, 3), None), ((0, 1, 2, 3), 2)],
)
def test_data_moved_elsewhere(grouped_moe, device, order, transposed):
    """Data that others placed: seen without a copy if equally spaced and ascending, right in any case."""
    module, batch = make(grouped_moe, LAYOUTS[-1], device)
    want = step(module, batch)
    module.zero_grad()
    flat = _scatter(module, order, transposed=transposed)
    assert_same(step(module, batch), want)
    flat.fill_(0.0)
    y = module(*batch[:3])
    assert_matches({"y": y}, reference(grouped_moe, module, batch))


def test_data_of_several_storages(grouped_moe):
    """Equally spaced and ascending, as allocations next to each other are."""
    module, batch = make(grouped_moe, LAYOUTS[-1], "cpu")
    want, memory = step(module, batch), bytearray(4 * G * N * K)
    module.zero_grad()
    for group in range(G):
        weight = getattr(module, f"weight{group}")
        data = torch.frombuffer(memory, dtype=weight.dtype, count=N * K, offset=4 * group * N * K)
        weight.data = data.view(N, K).copy_(weight.detach())
    assert_same(step(module, batch), want)


def test_no_copy_of_packed_weights(grouped_moe):
    """The bytes that a forward allocates do not hold the weights."""
    module, batch = make(grouped_moe, LAYOUTS[-1], "cpu")

    def largest():
        with torch.profiler.profile(profile_memory=True) as profile:
            module(*batch[:3])
        return max(event.self_cpu_memory_usage for event in profile.key_averages())

    assert largest() < N * K * G
    _scatter(module, (3, 2, 1, 0))
    assert largest() >= N * K * G


@pytest.mark.parametrize("option", ["", "delay_wgrad", "accumulate_into_main_grad"])
@pytest.mark.parametrize("name", ["weight0", "weight3"])
def test_weights_modified_before_the_backward_are_refused(grouped_moe, device, name, option):
    """Also by a backward of the input alone, and where weights are frozen. Copies have weights that are no views."""
    options = {option: True} if option else {}
    module, batch = make(grouped_moe, LAYOUTS[-1], device, **options)
    for twin, trained, alone in itertools.product((module, copy.deepcopy(module)), (True, False), (False, True)):
        layers.give_main_grads(twin.requires_grad_(trained), "packed")
        x = batch.x.clone().requires_grad_()
        y = twin(x, batch.offsets, batch.scales)
        with torch.no_grad():
            getattr(twin, name).mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            y.backward(batch.dy, inputs=[x] if alone else None)


def test_copied_weights_may_be_modified(grouped_moe, device):
    """Weights with memory of their own, as `functional_call` may be given: the product is made of a copy."""
    module, batch = make(grouped_moe, LAYOUTS[-1], device)
    weights = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    x = batch.x.clone().requires_grad_()
    want = torch.autograd.grad(module(x, *batch[1:3]), x, batch.dy)
    y = torch.func.functional_call(module, weights, (x, *batch[1:3]))
    weights["weight0"].mul_(2)
    assert_bitwise("x", *torch.autograd.grad(y, x, batch.dy), *want)


@pytest.mark.parametrize("option", ["", "delay_wgrad", "accumulate_into_main_grad"])
@pytest.mark.parametrize("copied_by", ["the module", "autocast"])
def test_a_copy_is_not_modified(grouped_moe, device, copied_by, option):
    """Weights that do not lie as one, or that autocast casts, may change before the backward."""
    module, batch = make(grouped_moe, LAYOUTS[-1], device, **({option: True} if option else {}))
    layers.give_main_grads(module, "packed")
    if copied_by == "the module":
        _scatter(module, (3, 2, 1, 0))
    grads = []
    for changes in (False, True):
        x = batch.x.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=copied_by == "autocast"):
            y = module(x, *batch[1:3])
        with torch.no_grad():
            module.weight3.mul_(1 + changes)
        grads += torch.autograd.grad(y, x, batch.dy.to(y.dtype))
    assert_bitwise("x", *grads)


def test_discrete_weights_below_autograd(grouped_moe, device):
    """As an op is called that autograd has dealt with, though gradients are enabled: it records nothing here."""
    module, batch = make(grouped_moe, LAYOUTS[-1], device)
    with torch._C._AutoDispatchBelowAutograd():
        y = module(batch.x.clone().requires_grad_(), *batch[1:3])
    assert not y.requires_grad
    assert_bitwise("y", y, module(*batch[:3]).detach())


@layers.by_delay
@layers.by_form
def test_meta_and_fake(grouped_moe, device, form, delay):
    """Modules without storage. One made on the meta device computes once it has some."""
    module, batch = make_module(grouped_moe, form, "meta", delay_wgrad=delay), layers.make_batch(form, "cpu")
    given = [tensor for tensor in batch[:3] if tensor is not None]
    x, offsets, *scales = (tensor.to("meta") for tensor in given)
    for y in (module(x, offsets, *scales), module(x, list(SIZES), *scales)):
        assert y.shape == batch.dy.shape and y.is_meta and all(parameter.is_meta for parameter in module.parameters())
        y.sum().backward()
        module.backward_dw()
        assert all(parameter.grad.is_meta for parameter in module.parameters())
        module.zero_grad()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = make_module(grouped_moe, form, "cpu", delay_wgrad=delay)
        assert fake(*map(mode.from_tensor, given)).shape == batch.dy.shape
    module, batch = module.to_empty(device=device), layers.make_batch(form, device)
    assert form.weight or layers.is_packed(module)
    assert not delay or all(parameter.skip_backward_post_hook for parameter in module.parameters())
    module.reset_parameters()
    assert_matches(step(module, batch), reference(grouped_moe, module, batch))


@layers.by_delay
def test_the_bias_may_be_set(grouped_moe, device, delay):
    """To None, and to a parameter where there was none, as that of `nn.Linear`."""
    forms = layers.Form(), layers.Form(kind="none")
    (module, batch), (bare, _) = (make(grouped_moe, form, device, delay_wgrad=delay) for form in forms)
    bare.bias, module.bias = module.bias, None
    for each in (module, copy.deepcopy(module), bare):
        each.reset_parameters()
        want = reference(grouped_moe, each, batch)
        assert_matches(step(each, batch), want)
        with torch.no_grad():
            assert_matches({"y": each(*batch[:2])}, want)
    assert "bias=False" in repr(module) and "bias=True" in repr(bare)


FLAGS = {  # and what they are not by default
    "scale_bias": True, "single_grouped_weight": False, "single_grouped_bias": False, "accumulate_into_main_grad": True,
    "delay_wgrad": True,
}  # fmt: skip


def test_repr(grouped_moe):
    module = grouped_moe.GroupedLinear(3, 4, 5)
    assert repr(module) == "GroupedLinear(num_groups=3, in_features=4, out_features=5, bias=True)"
    module = grouped_moe.GroupedLinear(3, 4, 5, **FLAGS)
    changed = ", ".join(f"{flag}={value}" for flag, value in FLAGS.items())
    assert repr(module) == f"GroupedLinear(num_groups=3, in_features=4, out_features=5, bias=True, {changed})"


WRONG = {
    **{flag: [((3, 4, 5), {flag: 1}, TypeError)] for flag in FLAGS},
    "num_groups": [((0, 4, 5), {}, ValueError), ((1025, 4, 5), {}, ValueError), ((2.0, 4, 5), {}, TypeError)],
    "in_features": [((3, 0, 5), {}, ValueError), ((3, "4", 5), {}, TypeError)],
    "out_features": [((3, 4, -1), {}, ValueError), ((3, 4, True), {}, TypeError)],
    "scale_bias": [
        ((3, 4, 5), {"scale_bias": True, "bias": False}, ValueError),
        ((3, 4, 5), {"scale_bias": torch.ones(2), "bias": False}, TypeError),
    ],
    "dtype": [((3, 4, 5), {"dtype": dtype}, TypeError) for dtype in (torch.int32, torch.float8_e4m3fn, "bf16")],
    "bias": [((3, 4, 5), {"bias": "False"}, TypeError)],
    "init_method": [((3, 4, 5), {"init_method": "normal"}, TypeError)],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(grouped_moe, name):
    for args, options, error in WRONG[name]:
        with pytest.raises(error, match=f"^{name}: "):
            grouped_moe.GroupedLinear(*args, **options)


@layers.by_delay
@layers.by_layout
def test_wrong_inputs_are_named(grouped_moe, device, form, delay):
    module, (x, offsets, scales, _) = make(grouped_moe, form, device, delay_wgrad=delay)
    for name, args, error in (
        ("x", (x.tolist(), offsets, scales), TypeError),
        ("x", (x.long(), offsets, scales), TypeError),
        ("weight", (x.half(), offsets, scales), TypeError),
        ("x", (x[:, 1:], offsets, scales), ValueError),
        ("splits", (x, offsets[:2], scales), ValueError),
        ("splits", (x, offsets.float(), scales), TypeError),
        ("splits", (x, offsets.to("meta" if device == "cpu" else "cpu"), scales), ValueError),
        ("bias_scales", (x, offsets), ValueError),
        ("bias_scales", (x, offsets, scales[1:]), ValueError),
    ):
        with pytest.raises(error, match=f"^{name}: "):
            module(*args)
    with pytest.raises(ValueError, match="^bias_scales: "):
        grouped_moe.GroupedLinear(G, K, N, device=device, delay_wgrad=delay)(x, offsets, scales)
