"""GroupedLinear: its parameters and where their data lies, its output and every gradient, its errors."""

import copy

import pytest
import torch
from compare import assert_bitwise
from linear_modules import (
    LAYOUTS,
    SIZES,
    G,
    K,
    N,
    assert_matches,
    by_form,
    by_layout,
    is_packed,
    make_batch,
    make_module,
    packed,
    parameter_grads,
    reference,
    run,
)
from poison import poisoned_allocations


@pytest.mark.kernels_ci
@by_form
def test_matches_reference(grouped_moe, device, form):
    module, batch = make_module(grouped_moe, form, device), make_batch(form, device)
    with poisoned_allocations():
        got = {**run(module, batch), **parameter_grads(module)}
    want = reference(grouped_moe, module, batch)
    assert got.keys() == want.keys()
    assert_matches(got, want, form.dtype)


@pytest.mark.parametrize("single", [True, False], ids=["single", "discrete"])
def test_one_group(grouped_moe, device, single):
    """nn.Linear on the rows of the group."""
    options = {"single_grouped_weight": single, "single_grouped_bias": single, "device": device}
    torch.manual_seed(7)
    module = grouped_moe.GroupedLinear(1, K, N, **options)
    torch.manual_seed(7)
    linear = torch.nn.Linear(K, N, device=device)
    x, dy = torch.randn(9, K, device=device), torch.randn(9, N, device=device)
    y, want = module(x, [9]), linear(x)
    y.backward(dy)
    want.backward(dy)
    for (name, got), parameter in zip(module.named_parameters(), linear.parameters()):
        assert_bitwise(name, got.detach().view_as(parameter), parameter.detach())
        grad = {name: got.grad.view_as(parameter)}
        assert_matches(grad, {name: parameter.grad.double()}, torch.float32)
    assert_matches({"y": y}, {"y": want.double()}, torch.float32)


def test_gradients_add_up(grouped_moe, device):
    """Over two backwards, in discrete parameters, whose gradients are views of one tensor."""
    module = make_module(grouped_moe, LAYOUTS[-1], device)
    batches = [make_batch(LAYOUTS[-1], device) for _ in range(2)]
    want = [reference(grouped_moe, module, batch) for batch in batches]
    for batch in batches:
        run(module, batch)
    for kind, grad in parameter_grads(module).items():
        assert_matches({kind: grad}, {kind: want[0][kind] + want[1][kind]}, torch.float32)


@by_layout
def test_splits_in_every_form(grouped_moe, device, form):
    module, batch = make_module(grouped_moe, form, device), make_batch(form, device)
    sizes = torch.tensor(SIZES, device=device)
    offsets = torch.tensor((0, *SIZES), device=device).cumsum(0)
    want = module(batch.x, offsets, batch.scales)
    kinds = [sizes, sizes.int(), list(SIZES), grouped_moe.GroupSizes(sizes), grouped_moe.GroupOffsets(offsets)]
    for splits in kinds:
        assert_bitwise("y", module(batch.x, splits, batch.scales), want)


@pytest.mark.parametrize("frozen", ["weight", "bias", "weight1", "bias1", "both", "x"])
@by_layout
def test_frozen(grouped_moe, device, form, frozen):
    """What is not frozen has the same gradient to the bit, the rest has none."""
    module, batch = make_module(grouped_moe, form, device), make_batch(form, device)
    run(module, batch)
    full = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    for name, parameter in module.named_parameters():
        if name == frozen or frozen == "both" or name[:-1] == frozen:
            parameter.requires_grad_(False)
    if frozen == "x":
        module(batch.x, batch.offsets, batch.scales).backward(batch.dy)
    else:
        assert_matches(run(module, batch), reference(grouped_moe, module, batch), form.dtype)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert_bitwise(name, parameter.grad, full[name])
        else:
            assert parameter.grad is None, name


@by_layout
def test_no_grad(grouped_moe, device, form):
    module, batch = make_module(grouped_moe, form, device), make_batch(form, device)
    with torch.no_grad():
        y = module(batch.x, batch.offsets, batch.scales)
    assert not y.requires_grad
    assert_matches({"y": y}, reference(grouped_moe, module, batch), form.dtype)


@by_layout
def test_autocast(grouped_moe, device, form):
    """As a module in bf16, its gradients in the dtype of the parameters."""
    module, batch = make_module(grouped_moe, form, device), make_batch(form, device)
    low = copy.deepcopy(module).bfloat16()
    batch = batch._replace(dy=batch.dy.bfloat16())
    want = run(low, batch._replace(x=batch.x.bfloat16()))
    with torch.autocast(device, torch.bfloat16):
        got = run(module, batch)
    assert_bitwise("y", got["y"], want["y"])
    assert_bitwise("x", got["x"], want["x"].float())
    for name, grad in parameter_grads(low).items():
        assert_bitwise(name, parameter_grads(module)[name], grad.float())


@by_layout
def test_parameters(grouped_moe, device, form):
    """The same values in every layout; views of one storage; drawn as by nn.Linear."""
    torch.manual_seed(5)
    module = make_module(grouped_moe, form, device)
    torch.manual_seed(5)
    single = make_module(grouped_moe, LAYOUTS[0], device)
    weights = ["weight"] if form.weight else [f"weight{group}" for group in range(G)]
    biases = ["bias"] if form.bias else [f"bias{group}" for group in range(G)]
    assert [name for name, _ in module.named_parameters()] == weights + biases == list(module.state_dict())
    assert_bitwise("weight", packed(module, "weight"), single.weight.detach())
    assert_bitwise("bias", packed(module, "bias"), single.bias.detach())
    assert form.weight or is_packed(module)
    bound = K**-0.5
    for name, parameter in module.named_parameters():
        assert 0.8 * bound < parameter.abs().max() <= bound, name
        assert parameter.is_leaf and parameter.requires_grad and not hasattr(parameter, "skip_backward_post_hook")


@by_layout
def test_init_method(grouped_moe, form):
    shapes = []

    def init(weight):
        shapes.append(tuple(weight.shape))
        weight.fill_(len(shapes))

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
    form = LAYOUTS[-1]
    module, batch = make_module(grouped_moe, form, device), make_batch(form, device)
    want = {**run(module, batch), **parameter_grads(module)}
    module.zero_grad()
    flat = _scatter(module, order, transposed=transposed)
    got = {**run(module, batch), **parameter_grads(module)}
    for name, tensor in want.items():
        assert_bitwise(name, got[name], tensor)
    flat.fill_(0.0)
    y = module(batch.x, batch.offsets, batch.scales)
    assert_matches({"y": y}, reference(grouped_moe, module, batch), torch.float32)


def test_no_copy_of_packed_weights(grouped_moe):
    """The bytes that a forward allocates do not hold the weights."""
    module, batch = make_module(grouped_moe, LAYOUTS[-1], "cpu"), make_batch(LAYOUTS[-1], "cpu")

    def largest():
        with torch.profiler.profile(profile_memory=True) as profile:
            module(batch.x, batch.offsets, batch.scales)
        return max(event.self_cpu_memory_usage for event in profile.key_averages())

    assert largest() < N * K * G
    _scatter(module, (3, 2, 1, 0))
    assert largest() >= N * K * G


@pytest.mark.parametrize("name", ["weight0", "weight3"])
def test_weights_modified_before_the_backward_are_refused(grouped_moe, device, name):
    module, batch = make_module(grouped_moe, LAYOUTS[-1], device), make_batch(LAYOUTS[-1], device)
    for twin in (module, copy.deepcopy(module)):
        y = twin(batch.x.clone().requires_grad_(), batch.offsets, batch.scales)
        with torch.no_grad():
            getattr(twin, name).mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            y.backward(batch.dy)


@by_layout
def test_meta_and_fake(grouped_moe, form):
    batch = make_batch(form, "cpu")
    meta = make_module(grouped_moe, form, "meta")
    y = meta(*(t.to("meta") for t in (batch.x, batch.offsets, batch.scales)))
    assert y.shape == batch.dy.shape and y.device.type == "meta"
    with torch._subclasses.FakeTensorMode() as mode:
        fake = make_module(grouped_moe, form, "cpu")
        y = fake(*(mode.from_tensor(t) for t in (batch.x, batch.offsets, batch.scales)))
    assert y.shape == batch.dy.shape


def test_repr(grouped_moe):
    module = grouped_moe.GroupedLinear(3, 4, 5)
    assert repr(module) == "GroupedLinear(num_groups=3, in_features=4, out_features=5, bias=True)"
    module = grouped_moe.GroupedLinear(3, 4, 5, scale_bias=True, single_grouped_weight=False, delay_wgrad=True)
    changed = "scale_bias=True, single_grouped_weight=False, delay_wgrad=True"
    assert repr(module) == f"GroupedLinear(num_groups=3, in_features=4, out_features=5, bias=True, {changed})"


WRONG = {
    "num_groups": [((0, 4, 5), {}, ValueError), ((1025, 4, 5), {}, ValueError), ((2.0, 4, 5), {}, TypeError)],
    "in_features": [((3, 0, 5), {}, ValueError), ((3, "4", 5), {}, TypeError)],
    "out_features": [((3, 4, -1), {}, ValueError), ((3, 4, True), {}, TypeError)],
    "scale_bias": [((3, 4, 5), {"scale_bias": True, "bias": False}, ValueError)],
    "dtype": [((3, 4, 5), {"dtype": torch.int32}, TypeError), ((3, 4, 5), {"dtype": "bf16"}, TypeError)],
    "init_method": [((3, 4, 5), {"init_method": "normal"}, TypeError)],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(grouped_moe, name):
    for args, options, error in WRONG[name]:
        with pytest.raises(error, match=f"^{name}: "):
            grouped_moe.GroupedLinear(*args, **options)


def test_wrong_inputs_are_named(grouped_moe, device):
    for form in LAYOUTS:
        for options in ({}, {"delay_wgrad": True}):
            module, (x, offsets, scales, _) = (
                make_module(grouped_moe, form, device, **options),
                make_batch(form, device),
            )
            for name, args, error in (
                ("x", (x.tolist(), offsets, scales), TypeError),
                ("x", (x.long(), offsets, scales), TypeError),
                ("weight", (x.half(), offsets, scales), TypeError),
                ("x", (x[:, 1:], offsets, scales), ValueError),
                ("splits", (x, offsets[:2], scales), ValueError),
                ("splits", (x, offsets.float(), scales), TypeError),
                ("bias_scales", (x, offsets), ValueError),
                ("bias_scales", (x, offsets, scales[1:]), ValueError),
            ):
                with pytest.raises(error, match=f"^{name}: "):
                    module(*args)
    plain = grouped_moe.GroupedLinear(G, K, N, device=device)
    with pytest.raises(ValueError, match="^bias_scales: "):
        plain(x, offsets, scales)
