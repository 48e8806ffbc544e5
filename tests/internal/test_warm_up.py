"""`warm_up` compiles all that later calls need, and leaves no trace but that."""

import itertools
import random

import pytest
import torch
from experts_modules import Ungated
from layers_to_warm import BF16, experts_of, fp8, gpt_oss, qwen3

pytest_plugins = ["driver_stub", "layers_to_warm"]


def call_experts(stub, model, tokens, top_k, backward, weights_dtype, share=None):
    """As the implementation for transformers does."""
    experts, forward = experts_of(model), stub.module("integrations.transformers").experts_forward
    hidden = experts.down_proj.shape[2 if getattr(experts, "is_transposed", False) else 1]
    x, weights = torch.zeros(tokens, hidden, dtype=BF16), torch.zeros(tokens, top_k, dtype=weights_dtype)
    with torch.set_grad_enabled(backward):
        x, weights = x.requires_grad_(backward), weights.requires_grad_(backward)
        out = forward(experts, x, torch.zeros(tokens, top_k, dtype=torch.int64), weights, share)
    if backward:
        leaves = [x, weights, *(p for p in experts.parameters() if p.requires_grad)]
        torch.autograd.grad(out, leaves, torch.zeros_like(out))


MODELS = {
    "qwen3": (qwen3, 8), "top-1": (lambda: qwen3(num_experts_per_tok=1), 1), "gpt-oss": (gpt_oss, 4),
    "fp8": (fp8, 8), "parts": (Ungated, 2),
    "long": (lambda: qwen3(num_experts=4, num_experts_per_tok=2, hidden_size=8192), 2),
}  # fmt: skip


def adapted(grouped_moe, model, *weights):
    """The model with a LoRA of peft on these weights of experts."""
    peft, targets = pytest.importorskip("peft"), [f"experts.{weight}" for weight in weights]
    experts_of(model).config._experts_implementation = grouped_moe.register_experts_implementation("grouped_moe_lora")
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=[], target_parameters=targets))


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_calls_behind_an_exchange(grouped_moe, compiles, exchange, lora):
    """Experts with `ep_loras` are those that an exchange reaches. Parts of factors are contiguous, not so peft's."""
    model, forward = qwen3(), compiles.module("integrations.transformers").experts_forward
    experts, factors = experts_of(model), []
    experts.ep_loras = {}
    if lora:
        adapted(grouped_moe, model, "gate_up_proj")
        (loras,) = compiles.module("integrations.peft").loras_of(model).values()
        factors = loras["gate_up_lora"][:2]
    count = grouped_moe.warm_up(model, (1, 600), backward=True, progress=False)
    for tokens, grad in itertools.product((1, 7, 9, 150), (False, True)):
        x, weights = (torch.zeros(tokens, n, dtype=BF16, requires_grad=grad) for n in (256, 8))
        parts = [factor.detach().contiguous().requires_grad_(grad) for factor in factors]
        options = {"gate_up_lora": grouped_moe.LoRA(*parts)} if lora else {}
        with torch.set_grad_enabled(grad):
            there = exchange.dispatch(x, weights, torch.zeros(tokens, 8, dtype=torch.int64), 64, 4, tokens, None)
            rows = forward(experts, there.x, there.ids, there.weights, **options)
            out = exchange.combine(rows, there.plan, None)
        if grad:
            torch.autograd.grad(out, (x, weights, *(parts or experts.parameters())), torch.zeros_like(out))
        assert len(compiles.variants) == count, f"{tokens} tokens: {compiles.names()[count:]}"


@pytest.mark.parametrize("name", MODELS)
def test_later_calls_compile_nothing(grouped_moe, compiles, name):
    make, top_k = MODELS[name]
    model, draw = make(), random.Random(name)
    count = grouped_moe.warm_up(model, (1, 4096), backward=True, progress=False)
    assert count == len(compiles.variants) > 15
    for tokens in [1, 2, 3, 4096, *(draw.choice((draw.randrange(1, 4097), draw.randrange(1, 300))) for _ in range(60))]:
        for backward in (False, True):
            call_experts(compiles, model, tokens, top_k, backward, draw.choice((BF16, torch.float32)))
        assert len(compiles.variants) == count, f"{tokens} tokens: {compiles.names()[count:]}"


@pytest.mark.parametrize("make, top_k, last", [(qwen3, 8, 2048), (gpt_oss, 4, 2048), (fp8, 8, 2048), (qwen3, 8, 12)])
def test_loras_of_peft(grouped_moe, compiles, make, top_k, last):
    """Of the active adapter, in decoding, in large batches and in training; of copies where rows are many enough."""
    model, draw = make(), random.Random(0)
    adapted(grouped_moe, model, "gate_up_proj", "down_proj")
    wrapper = next(each for each in model.modules() if type(each).__name__ == "ParamWrapper")
    count = grouped_moe.warm_up(model, (1, last), backward=True, progress=False)
    assert count == len(compiles.variants) and any("project" in name for name in compiles.names())
    for tokens in [*range(1, 12), last, *(draw.randrange(1, last + 1) for _ in range(30))]:
        for backward in (False, True):
            x, weights = (torch.zeros(tokens, n, dtype=BF16, requires_grad=backward) for n in (256, top_k))
            with torch.set_grad_enabled(backward):
                out = wrapper(x, torch.zeros(tokens, top_k, dtype=torch.int64), weights)
            if backward:
                out.backward(torch.zeros_like(out))
        assert len(compiles.variants) == count, f"{tokens} tokens: {compiles.names()[count:]}"


def compile_experts(model):
    model.layers[0].mlp.experts = torch.compile(model.layers[0].mlp.experts, backend="eager")


def save_experts(model):
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"]))


def parametrize_experts(model):
    for name in ("gate_up_proj", "down_proj"):
        torch.nn.utils.parametrize.register_parametrization(experts_of(model), name, torch.nn.Tanh())


@pytest.mark.parametrize("change", [compile_experts, save_experts, parametrize_experts])
def test_experts_within_others(grouped_moe, compiles, change):
    """Modules that pass on the attributes of experts, or experts whose weights are computed, need the same kernels."""
    model = qwen3()
    change(model)
    count = grouped_moe.warm_up(model, (1, 64), backward=True, progress=False)
    assert count > 15 and grouped_moe.warm_up(qwen3(), (1, 64), backward=True, progress=False) == 0


def test_how_many_tokens_a_native_op_takes(compiles):
    """As far as it was measured: with FP8 weights more."""
    takes = compiles.module("backends.native.decode").groups_slots
    for most, scaled in ((64, False), (256, True)):
        assert takes(most, 8, 512, scaled) and not takes(most + 1, 8, 512, scaled)
        assert takes(32, 8, 64, scaled) and not takes(33, 8, 64, scaled)


def test_calls_that_a_native_op_takes(grouped_moe, compiles, monkeypatch):
    """Nothing of theirs is compiled. Those of more tokens, and without gradients, are not left out for that."""
    groups_slots = compiles.module("backends.native.decode").groups_slots
    compiles.module("backends.native.routing")  # which looks its ops up as it is loaded

    def by_op(x, ids, *rest):
        return torch.zeros_like(x) if not torch.is_grad_enabled() and groups_slots(*ids.shape, 64, False) else None

    monkeypatch.setattr(compiles.module("backends.native.fakes"), "IS_BUILT", True)
    monkeypatch.setattr(compiles.module("experts"), "IS_BUILT", True)
    monkeypatch.setattr(compiles.module("experts"), "decode_directly", by_op)
    model = qwen3()
    count = grouped_moe.warm_up(model, (1, 200), backward=True, progress=False)
    for tokens, backward in itertools.product((1, 2, 16, 17, 32, 33, 64, 100, 200), (False, True)):
        call_experts(compiles, model, tokens, 8, backward, BF16)
        assert len(compiles.variants) == count, f"{tokens} tokens: {compiles.names()[count:]}"


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", ""])
@pytest.mark.parametrize("make, top_k", [(qwen3, 8), (gpt_oss, 4)])
def test_inputs_that_need_no_gradient(grouped_moe, compiles, make, top_k, frozen):
    """As those of a model's first layer, where all but its experts is frozen."""
    model = make()
    experts, forward = experts_of(model), compiles.module("integrations.transformers").experts_forward
    if frozen:
        getattr(experts, frozen).requires_grad_(False)
    count = grouped_moe.warm_up(model, (1, 1024), backward=True, progress=False)
    for tokens, needs in itertools.product((1, 9, 200, 1024), itertools.product((False, True), repeat=2)):
        x, weights = (torch.zeros(tokens, n, dtype=BF16, requires_grad=need) for n, need in zip((256, top_k), needs))
        out = forward(experts, x, torch.zeros(tokens, top_k, dtype=torch.int64), weights, None)
        leaves = [tensor for tensor in (x, weights, *experts.parameters()) if tensor.requires_grad]
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
        assert len(compiles.variants) == count, f"{tokens} tokens: {compiles.names()[count:]}"


def test_no_token_count_is_run_in_vain(grouped_moe, compiles, monkeypatch):
    """Each compiles something, where no native op comes first."""
    counts, model, warm_up = [], qwen3(), compiles.module("warm_up")
    monkeypatch.setattr(compiles.module("backends.native.fakes"), "IS_BUILT", False)
    forward = warm_up.experts_forward
    monkeypatch.setattr(
        warm_up,
        "experts_forward",
        lambda module, x, *rest: counts.append((x.shape[0], len(compiles.variants))) or forward(module, x, *rest),
    )
    total = warm_up.warm_up(model, (1, 65536), progress=False)
    before = sorted({tokens: count for tokens, count in reversed(counts)}.items())
    found = [count for _, count in before] + [total]
    assert len(before) > 4 and found == sorted({*found}), before


@pytest.mark.parametrize("make, top_k, share", [(qwen3, 8, (1, 4)), (gpt_oss, 4, (9, 10))])
def test_a_share_as_it_was_registered(grouped_moe, compiles, monkeypatch, make, top_k, share):
    """No more slots have an expert than there is room for, or the device would fail an assertion.

    Where there is room for all, as for four slots of nine tenths, no kernel counts them.
    """
    routed, route = [], compiles.module("backends.triton").route

    def counting(ids, num_experts, dtype, capacity, quantizes):
        routed.append((int((ids < num_experts).sum()), capacity))
        return route(ids, num_experts, dtype, capacity, quantizes)

    monkeypatch.setattr(compiles.module("backends.triton"), "route", counting)
    monkeypatch.setattr(compiles.module("common._compat"), "assert_on_device", lambda *args: None)
    name = grouped_moe.register_experts_implementation(f"grouped_moe_{share[1]}", capacity=share[0] / share[1])
    model = make()
    experts_of(model).config._experts_implementation = name
    count = grouped_moe.warm_up(model, (1, 2048), backward=True, progress=False)
    assert len(routed) > 10 and all(slots <= capacity for slots, capacity in routed)
    for tokens in (1, 5, 40, 300, 511, 1027, 2048):
        for backward in (False, True):
            call_experts(compiles, model, tokens, top_k, backward, BF16, share)
    assert len(compiles.variants) == count


@pytest.mark.parametrize("make, top_k, least, other", [
    # Wide tiles, rows that become codes, codes that are transposed.
    (lambda: Ungated(2, 2, 4096, 8192), 2, 2000, 4096), (lambda: Ungated(2, 2, 8192, 4096), 2, 2000, 4096),
    (fp8, 8, 127, 128), (fp8, 8, 4700, 4900),
])  # fmt: skip
def test_numbers_of_tokens_that_differ_in_one_thing(compiles, make, top_k, least, other):
    (layer,) = compiles.module("warm_up")._find_layers(make(), top_k, True)
    assert layer.choice(least - 1) == layer.choice(least) != layer.choice(other)


@pytest.mark.parametrize("kind", ["experts", "linear"])
def test_under_autocast(grouped_moe, compiles, kind):
    """Parameters in fp32 whose products are in bf16 have tiles as tall as these."""
    model = grouped_moe.GroupedLinear(8, 256, 384) if kind == "linear" else qwen3(dtype=torch.float32)
    with torch.autocast("cpu", BF16), torch.no_grad():
        count = grouped_moe.warm_up(model, (1, 4096), progress=False)
        for tokens in (1, 40, 300, 4096):
            if kind == "linear":
                model(torch.zeros(tokens, 256), torch.full((8,), tokens // 8))
            else:
                call_experts(compiles, model, tokens, 8, False, torch.float32)
            assert len(compiles.variants) == count, f"{tokens} tokens: {compiles.names()[count:]}"


def alike(grouped_moe, kind):
    """Two layers of one shape. The second one lacks kernels of the first one."""
    if kind == "main_grad":
        layers = [grouped_moe.GroupedLinear(8, 256, 384, accumulate_into_main_grad=True) for _ in range(2)]
        for layer, dtype in zip(layers, (BF16, torch.float32)):
            layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=dtype)
    elif kind == "lora":
        layers = [adapted(grouped_moe, qwen3(), "gate_up_proj"), qwen3().requires_grad_(False)]
    else:
        layers = [Ungated(), Ungated()]
    if kind == "exchanged":
        layers[0].ep_loras = {}
    elif kind == "frozen":
        layers[1].requires_grad_(False)
    elif kind == "unaligned":
        memory = torch.zeros(layers[0].up_proj.numel() + 1, dtype=BF16)[1:]
        layers[0].up_proj = torch.nn.Parameter(memory.view_as(layers[0].up_proj))
    return layers


@pytest.mark.parametrize("kind", ["exchanged", "frozen", "unaligned", "main_grad", "lora"])
def test_layers_that_differ_in_one_thing_are_both_run(grouped_moe, compiles, kind):
    layers = alike(grouped_moe, kind)
    assert grouped_moe.warm_up(torch.nn.ModuleList(layers), (1, 8), backward=True, progress=False) > 5
    assert grouped_moe.warm_up(layers[0], (1, 8), backward=True, progress=False) == 0


def test_layers_of_one_kind_are_run_once(grouped_moe, compiles):
    one = grouped_moe.warm_up(qwen3(), (1, 64), progress=False)
    launches = len(compiles.launches)
    assert one > 0 and grouped_moe.warm_up(qwen3(), (1, 64), progress=False) == 0
    del compiles.launches[:]
    assert grouped_moe.warm_up(qwen3(layers=3), (1, 64), progress=False) == 0
    assert len(compiles.launches) == launches


LINEARS = {
    "plain": {}, "no-bias": {"bias": False}, "scaled": {"scale_bias": True},
    "discrete": {"single_grouped_weight": False, "single_grouped_bias": False},
    "main_grad": {"accumulate_into_main_grad": True}, "overwritten": {"accumulate_into_main_grad": True},
    "delayed": {"delay_wgrad": True, "scale_bias": True}, "delayed-alone": {"delay_wgrad": True}, "top-k": {},
    "all": {"accumulate_into_main_grad": True, "delay_wgrad": True, "single_grouped_weight": False},
    "frozen": {}, "frozen-no-bias": {"bias": False}, "frozen-scaled": {"scale_bias": True},
}  # fmt: skip


@pytest.mark.parametrize("name", LINEARS)
def test_linear_layers(grouped_moe, compiles, name):
    layer, draw = grouped_moe.GroupedLinear(8, 256, 384, dtype=BF16, **LINEARS[name]), random.Random(name)
    if name.startswith("frozen"):
        layer.quantize_blocks_()
    if layer.accumulate_into_main_grad:
        for weight in layer._of("weight"):
            weight.main_grad = torch.zeros(weight.shape)
    if name == "overwritten":
        layer.weight.overwrite_main_grad = False
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    last, top_k = (100, 8) if name == "top-k" else (4096, 1)
    count = grouped_moe.warm_up(layer, (1, last), backward=True, top_k=top_k, progress=False)
    assert count == len(compiles.variants) > 5
    assert all(parameter.grad is None for parameter in layer.parameters()) and not layer._delayed
    assert not any(weight.main_grad.any() for weight in layer._of("weight") if layer.accumulate_into_main_grad)
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer.state_dict().items())
    for rows in (1, last * top_k, *(draw.randrange(1, last * top_k + 1) for _ in range(30))):
        x, splits = torch.zeros(rows, 256, dtype=BF16, requires_grad=True), torch.full((8,), rows // 8)
        splits = draw.choice((splits, torch.arange(9) * (rows // 8))).to(draw.choice((torch.int32, torch.int64)))
        if name == "overwritten":
            layer.weight.overwrite_main_grad = draw.random() < 0.5
        scales = torch.zeros(rows, requires_grad=rows == 1 or draw.random() < 0.5)
        y = layer(x, splits, *([scales] if layer.scale_bias else []))
        y.backward(torch.zeros_like(y))
        layer.backward_dw()
        assert len(compiles.variants) == count, f"{rows} rows: {compiles.names()[count:]}"


def test_nothing_but_kernels_is_left(grouped_moe, compiles):
    model, seen = gpt_oss(), []
    experts = experts_of(model)
    experts.gate_up_proj.grad = kept = torch.ones_like(experts.gate_up_proj)
    experts.down_proj.requires_grad_(False)
    experts.gate_up_proj.register_hook(seen.append)
    experts.register_forward_hook(lambda *args: seen.append(args))
    before, state = [parameter.clone() for parameter in model.parameters()], torch.get_rng_state()
    grouped_moe.warm_up(model, (1, 8), backward=True, progress=False)
    assert torch.equal(torch.get_rng_state(), state) and not seen
    assert experts.gate_up_proj.grad is kept and bool((kept == 1).all())
    assert all(p.grad is None for p in model.parameters() if p is not experts.gate_up_proj)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("progress", [False, True])
def test_progress(grouped_moe, compiles, capsys, progress):
    pytest.importorskip("tqdm")
    grouped_moe.warm_up(Ungated(), (1, 8), progress=progress)
    assert ("compiling" in capsys.readouterr().err) == progress


def test_the_bar_counts_kernels(compiles, capsys):
    pytest.importorskip("tqdm")
    with compiles.module("warm_up")._CompilingThreads(progress=True) as threads:
        made = [threads.submit(int, text) for text in "123"]
    assert [future.result() for future in made] == [1, 2, 3] and "3/3" in capsys.readouterr().err


def test_nothing_is_launched_before_all_is_compiled(grouped_moe, compiles, monkeypatch):
    """So that all can be compiled at once."""
    launched, model = [], qwen3()
    forward, routing = compiles.module("warm_up").experts_forward, compiles.module("backends.triton.routing")

    def counted(*args):
        launched.append((len(compiles.launches), len(compiles.variants)))
        return forward(*args)

    monkeypatch.setattr(compiles.module("warm_up"), "experts_forward", counted)
    count = grouped_moe.warm_up(model, (1, 512), backward=True, progress=False)
    dry, run = launched[: len(launched) // 2], launched[len(launched) // 2 :]
    assert all(launches == 0 for launches, _ in dry) and run[-1][0] > 0
    assert dry[-1][1] > 0 and all(variants == count for _, variants in run)
    # What nobody wrote.
    compiles.module("backends.triton.launch").compile_together(None, lambda: routing.assert_room(torch.tensor([2]), 1))
    with pytest.raises(RuntimeError, match="capacity"):
        routing.assert_room(torch.tensor([2]), 1)
