"""GroupedLinear with a frozen block-scaled weight: output and gradients, checkpoints, copies, conversions, errors."""

import copy

import compare
import layers
import pytest
import test_lora_layers as pairs_of_layers
import torch
from compare import assert_bitwise, assert_same
from copies import COPIES
from errors import raises
from layers import FLOAT, HALF, ROWS, Form, G, K, N, assert_matches
from marks import by_fp32_and_bf16
from pairs import Pairs
from poison import poisoned_allocations
from scaled import Blocks, scale
from sorted_rows import run, run_reference
from torch import nn

CODES, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SMALL = Blocks((16, 32))
BLOCKS = {
    "blocks": SMALL,
    "one-block": Blocks(),
    "apart": Blocks((16, 16), apart=True),
    "per-group": Blocks(None),
    "exponents": Blocks((16, 16), dtype=E8M0),
    "bf16-scales": Blocks((16, 16), dtype=HALF),
    "views": Blocks((16, 32), views=True),
}
by_blocks = pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
by_kind = pytest.mark.parametrize("kind", ["none", "bias", "scaled"])
NAMES = "weight", "weight_scale_inv"


def make(grouped_moe, device, blocks=SMALL, kind="bias", dtype=FLOAT, weight=None):
    """(layer, the same layer with a plain weight in fp64)."""
    weight = torch.randn(G, N, K, device=device) / K**0.5 if weight is None else weight
    scaled = scale(grouped_moe, weight, blocks, gated=True)
    bias = None if kind == "none" else torch.randn(G, N, device=device, dtype=dtype)
    layer = grouped_moe.GroupedLinear.from_block_scaled(scaled, bias, scale_bias=kind == "scaled")
    plain = layers.make_module(grouped_moe, Form(kind=kind, dtype=torch.float64), "cpu")
    values = {"weight": scaled.dequantize(torch.float64), **({} if bias is None else {"bias": bias})}
    plain.load_state_dict(values)
    return layer, plain.to(device)


def reference(grouped_moe, plain, batch):
    """Of what is differentiable of the frozen layer."""
    want = layers.reference(grouped_moe, plain, batch)
    return {name: tensor for name, tensor in want.items() if name != "weight"}


def step(layer, batch, **options):
    """Output and gradients; the weight has none."""
    got = layers.run(layer, batch, **options)
    assert layer.weight.grad is None and layer.weight_scale_inv.grad is None
    return got if layer.bias is None else {**got, "bias": layer.bias.grad}


def state_of(layer):
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def integers(tensor):
    """Its bits, which may be NaN."""
    return tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@by_fp32_and_bf16
@by_kind
@by_blocks
def test_matches_the_dequantized_weight(grouped_moe, device, blocks, kind, dtype):
    """Next to NaN in rows of no group; the same bits twice, and without gradients."""
    layer, plain = make(grouped_moe, device, blocks, kind, dtype)
    batch = layers.make_batch(Form(kind=kind, dtype=dtype), device)
    want = reference(grouped_moe, plain, batch)
    with poisoned_allocations():
        got = step(layer, batch)
        assert got.keys() == want.keys()
        assert_matches(got, want)
        layer.zero_grad()
        again = step(layer, batch)
        with torch.no_grad():
            again["y"] = layer(*batch[:3])
    assert_same(again, got)


@pytest.mark.parametrize("adapters", [0, 3])
@by_fp32_and_bf16
def test_lora_on_top(grouped_moe, device, adapters, dtype):
    """Gradients of x, of the bias and its scales and of the factors, as of the sum of both weights."""
    pairs = Pairs(rank=5, adapters=adapters)
    linear, inputs, arguments = pairs_of_layers.make(grouped_moe, pairs, dtype, device)
    layer, plain = make(grouped_moe, device, SMALL, "scaled", dtype, inputs.tensors["weight"].float())
    layer.load_state_dict({"bias": inputs.tensors["bias"]}, strict=False)
    want = run_reference(grouped_moe, linear, inputs.replace(weight=plain.weight.detach()), **arguments)
    given = inputs.replace(weight=None, bias=None)
    got = {**run(grouped_moe, pairs_of_layers.Layer(layer), given, **arguments), "bias": layer.bias.grad}
    del want["weight"]
    compare.assert_matches(got, want, dtype)
    assert layer.weight.grad is None


def test_quantize_blocks(grouped_moe, device):
    """In place: the codes and scales of `quantize_blocks`, of parameters that train nothing."""
    layer = layers.make_module(grouped_moe, Form(), device)
    weight, bias = layer.weight.detach().clone(), layer.bias
    want = grouped_moe.quantize_blocks(weight, (16, 32), 2)
    assert layer.quantize_blocks_((16, 32), parts=2) is layer
    assert_bitwise("codes", layer.weight.detach(), want.data)
    assert_bitwise("scales", layer.weight_scale_inv.detach(), want.scale_inv)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias", "weight_scale_inv"]
    assert [p for p in layer.parameters() if p.requires_grad] == [bias] == [layer.bias]
    x = torch.randn(ROWS, K, device=device, requires_grad=True)
    y, like = layer(x, layers.SIZES), grouped_moe.grouped_linear(x, want, layers.SIZES, bias)
    assert_bitwise("y", y, like)
    before = state_of(layer)
    y.backward(torch.randn_like(y))
    torch.optim.AdamW(layer.parameters(), lr=1.0, weight_decay=0.5).step()
    assert all(torch.equal(getattr(layer, name), before[name]) for name in NAMES)
    assert not torch.equal(layer.bias, before["bias"])


def test_the_whole_block_by_default(grouped_moe):
    layer = grouped_moe.GroupedLinear(2, 200, 136, bias=False).quantize_blocks_()
    assert layer.weight_scale_inv.shape == (2, 2, 2)
    assert repr(layer).endswith("bias=False, block=(128, 128))")
    weight = grouped_moe.quantize_blocks(torch.randn(2, 32, 16), (16, 16), 2)._replace(products="w8a16")
    layer, like = grouped_moe.GroupedLinear.from_block_scaled(weight), grouped_moe.GroupedLinear(2, 16, 32, bias=False)
    assert repr(layer).endswith("bias=False, block=(16, 16), parts=2, products='w8a16')")
    assert repr(like.quantize_blocks_((16, 16), 2, "w8a16")) == repr(layer)
    assert layer.weight.data_ptr() == weight.data.data_ptr()
    bias = nn.Parameter(torch.zeros(2, 32))
    assert grouped_moe.GroupedLinear.from_block_scaled(weight, bias).bias is bias


CASTS = {
    "half": (lambda layer: layer.half(), torch.float16),
    "bfloat16": (lambda layer: layer.bfloat16(), HALF),
    "double": (lambda layer: layer.double(), torch.float64),
    "to": (lambda layer: layer.to(HALF), HALF),
    "to-device": (lambda layer: layer.to(layer.weight.device, HALF), HALF),
    "type": (lambda layer: layer.type(torch.float64), torch.float64),
    "parent": (lambda layer: nn.Sequential(layer).to(HALF)[0], HALF),
}


@pytest.mark.parametrize("how", CASTS)
@by_blocks
def test_casts_leave_codes_and_scales(grouped_moe, device, blocks, how):
    """Of parameters that stay the same ones, with the strides that they had; the bias is cast."""
    layer, _ = make(grouped_moe, device, blocks)
    cast, dtype = CASTS[how]
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    parameters, strides = dict(layer.named_parameters()), layer.weight.stride()
    assert cast(layer) is layer
    for name in NAMES:
        assert getattr(layer, name) is parameters[name] and not parameters[name].requires_grad
        assert_bitwise(name, integers(getattr(layer, name)), integers(before[name]))
        assert getattr(layer, name).dtype == before[name].dtype
    assert layer.weight.stride() == strides
    assert_bitwise("bias", layer.bias.detach(), before["bias"].to(dtype))


@by_blocks
def test_moves(grouped_moe, device, blocks):
    """To the device and back, and to one without memory."""
    layer, _ = make(grouped_moe, "cpu", blocks, dtype=HALF)
    before, batch = state_of(layer), layers.make_batch(Form(dtype=HALF), "cpu")
    want = step(layer, batch)
    layer.to(device)
    assert {parameter.device.type for parameter in layer.parameters()} == {device}
    y = layer(batch.x.to(device), batch.offsets.to(device))
    assert_matches({"y": y.cpu()}, {"y": want["y"].double()})
    assert_same(layer.to("cpu").state_dict(), before)
    empty = copy.deepcopy(layer).to("meta")
    assert empty(batch.x.to("meta"), batch.offsets.to("meta")).is_meta
    assert {name: t.dtype for name, t in empty.to_empty(device="cpu").state_dict().items()} == {
        name: t.dtype for name, t in before.items()
    }
    assert empty.load_state_dict(before, strict=True) == ([], [])
    assert_same(empty.state_dict(), before)


@pytest.mark.parametrize("how", COPIES)
@by_blocks
def test_copies(grouped_moe, blocks, how):
    layer, _ = make(grouped_moe, "cpu", blocks)
    batch = layers.make_batch(Form(), "cpu")
    twin = COPIES[how](layer)
    assert_same(twin.state_dict(), state_of(layer))
    assert repr(twin) == repr(layer)
    for name, parameter in twin.named_parameters():
        assert parameter.requires_grad == (name == "bias")
        assert parameter.data_ptr() != getattr(layer, name).data_ptr()
    assert_bitwise("y", step(twin, batch)["y"], step(layer, batch)["y"])


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@by_blocks
def test_checkpoints(grouped_moe, tmp_path, blocks, assign):
    """By a file of torch.save, nested, into a layer that quantized other values without memory for the plain ones."""
    layer, _ = make(grouped_moe, "cpu", blocks)
    torch.save(nn.ModuleDict({"a": layer}).state_dict(), tmp_path / "layer.pt")
    block, parts = layer._scaled["block"], layer._scaled["parts"]
    with torch.device("meta"):
        twin = grouped_moe.GroupedLinear(G, K, N).quantize_blocks_(block, parts)
    assert twin.weight.is_meta and twin.weight_scale_inv.shape == layer.weight_scale_inv.shape
    twin = twin if assign else twin.to_empty(device="cpu")
    checkpoint = torch.load(tmp_path / "layer.pt")
    assert nn.ModuleDict({"a": twin}).load_state_dict(checkpoint, strict=True, assign=assign) == ([], [])
    kept = state_of(layer)
    scales = layer.weight_scale_inv.detach() if assign else layer.weight_scale_inv.detach().float()
    assert_same(twin.state_dict(), {**kept, "weight_scale_inv": scales})
    assert [p.requires_grad for p in twin.parameters()] == [False, True, False]
    batch = layers.make_batch(Form(), "cpu")
    assert_bitwise("y", step(twin, batch)["y"], step(layer, batch)["y"])


def test_a_file_of_safetensors(grouped_moe, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    layer, _ = make(grouped_moe, "cpu")
    safetensors.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    twin, _ = make(grouped_moe, "cpu")
    assert twin.load_state_dict(safetensors.load_file(tmp_path / "layer.safetensors")) == ([], [])
    assert_same(twin.state_dict(), state_of(layer))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("strict", [False, True], ids=["some", "strict"])
def test_checkpoints_of_other_values_are_refused(grouped_moe, strict, assign):
    """Codes for a plain weight, the opposite, and scales that would be rounded; the module stays as it is."""
    (layer, _), (exponents, _) = make(grouped_moe, "cpu"), make(grouped_moe, "cpu", BLOCKS["exponents"])
    plain, single = layers.make_module(grouped_moe, Form(), "cpu"), grouped_moe.GroupedLinear(1, 32, 16)
    fine = {**exponents.state_dict(), "weight_scale_inv": exponents.weight_scale_inv.detach().float() * 1.3}
    bytes_ = torch.full_like(layer.weight_scale_inv, 118, dtype=torch.uint8, requires_grad=False)
    for module, checkpoint, message in (
        (plain, layer.state_dict(), "weight: expected a plain weight, or quantize_blocks_"),
        (layer, plain.state_dict(), "weight: expected codes in torch.float8_e4m3fn, .* got torch.float32"),
        (exponents, fine, "weight_scale_inv: expected scales in torch.float8_e8m0fnu, got torch.float32"),
        (single, {"weight": torch.ones(1, 16, 32).to(CODES)}, "weight: expected a plain weight"),
        (
            layer,
            {**layer.state_dict(), "weight_scale_inv": bytes_},
            "weight_scale_inv: expected floating-point scales .* got torch.uint8",
        ),
    ):
        before = {name: module.state_dict()[name].clone() for name in module.state_dict() if name != "bias"}
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict(checkpoint, strict=strict, assign=assign)
        assert_same(module.state_dict(), {**state_of(module), **before})
    discrete = layers.make_module(grouped_moe, Form(False, False), "cpu")
    with pytest.raises(RuntimeError, match="weight3: expected a plain weight"):
        discrete.load_state_dict(layer.state_dict(), strict=strict, assign=assign)


def test_compiles_in_one_graph(grouped_moe, device, fresh_compiler):
    layer, _ = make(grouped_moe, device)
    batch = layers.make_batch(Form(), device)
    want = step(layer, batch)
    layer.zero_grad()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(step(layer, batch, function=lambda *args: compiled(*args)), want)


def test_autocast(grouped_moe, device):
    """x and the bias are cast, codes and scales stay."""
    layer, _ = make(grouped_moe, device)
    batch = layers.make_batch(Form(), device)
    with torch.autocast(device, HALF):
        got = step(layer, batch._replace(dy=batch.dy.to(HALF)))
    low = step(copy.deepcopy(layer).to(HALF), batch._replace(x=batch.x.to(HALF), dy=batch.dy.to(HALF)))
    assert_bitwise("y", got["y"], low["y"])
    assert_bitwise("x", got["x"], low["x"].float())


def test_quantizes_under_autocast(grouped_moe, device):
    layer = layers.make_module(grouped_moe, Form(), device)
    want = copy.deepcopy(layer).quantize_blocks_()
    with torch.autocast(device, HALF):
        assert_same(layer.quantize_blocks_().state_dict(), want.state_dict())


OPTIONS = {"accumulate_into_main_grad": True, "delay_wgrad": True, "single_grouped_weight": False}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_does_not_go_with_a_frozen_weight(grouped_moe, name):
    layer = grouped_moe.GroupedLinear(2, 32, 16, **{name: OPTIONS[name]})
    before = state_of(layer)
    raises(ValueError, f"^{name}: expected {not OPTIONS[name]}.* block-scaled weight", layer.quantize_blocks_)
    assert_same(layer.state_dict(), before)


def test_errors(grouped_moe, device):
    layer, _ = make(grouped_moe, device)
    x, low = torch.randn(ROWS, K, device=device), torch.zeros(ROWS, K, device=device, dtype=torch.float16)
    raises(RuntimeError, "^quantize_blocks_: the weight is block-scaled already", layer.quantize_blocks_)
    raises(RuntimeError, "^reset_parameters: the weight is block-scaled", layer.reset_parameters)
    raises(TypeError, "^bias: expected torch.float16 like x", lambda: layer(low, layers.SIZES))
    layer.requires_grad_()
    raises(ValueError, "^weight.data: expected a frozen tensor.*freezes it", lambda: layer(x, layers.SIZES))
    with torch.no_grad():
        layer(x, layers.SIZES)
    plain = grouped_moe.GroupedLinear(2, 32, 16)
    with pytest.raises(ValueError, match="^block: expected multiples of 16"):
        plain.quantize_blocks_((8, 16))
    with pytest.raises(ValueError, match="^products: expected one of auto, w8a16, w8a8, got 'w4a4'"):
        plain.quantize_blocks_(products="w4a4")
    with pytest.raises(ValueError, match="^parts: expected an int that divides"):
        plain.quantize_blocks_((16, 16), 3)
    assert plain.weight.dtype == FLOAT and plain.weight.requires_grad
    plain.register_buffer("weight_scale_inv", torch.ones(2))
    weight_norm = nn.utils.parametrizations.weight_norm(grouped_moe.GroupedLinear(2, 32, 16))
    for name, layer in (("weight_scale_inv", plain), ("weight", weight_norm)):
        before = dict(layer.named_parameters())
        with pytest.raises(ValueError, match=f"^{name}: expected a parameter, got what a parametrization, pruning or"):
            layer.quantize_blocks_()
        assert all(layer.get_parameter(name) is parameter for name, parameter in before.items())


def test_a_sharded_weight_is_not_quantized(grouped_moe, device, two_ranks):
    from torch.distributed.fsdp import fully_shard

    layer = grouped_moe.GroupedLinear(2, 32, 16, device=device)
    fully_shard(layer, mesh=two_ranks)
    before = layer.weight
    with pytest.raises(ValueError, match="^weight: expected a whole tensor, got a DTensor; .*before .*fully_shard"):
        layer.quantize_blocks_()
    assert layer.weight is before


def test_sums_of_codes_are_refused(grouped_moe, device):
    """peft adds adapters to the codes, as if these had no scales."""
    peft = pytest.importorskip("peft")
    holder = nn.Module()
    holder.layer, _ = make(grouped_moe, device)
    peft.get_peft_model(holder, peft.LoraConfig(target_modules=[], target_parameters=["layer.weight"]))
    with torch.no_grad(), pytest.raises(ValueError, match="^weight: expected a parameter, got a parametrization"):
        holder.layer(torch.randn(ROWS, K, device=device), layers.SIZES)


def test_wrong_tensors_are_named(grouped_moe):
    scaled = grouped_moe.quantize_blocks(torch.randn(2, 64, 32), (16, 16))
    make_layer, bias = grouped_moe.GroupedLinear.from_block_scaled, torch.zeros(2, 64)
    for error, message, args in (
        (TypeError, "^weight: expected a BlockScaled, got Tensor", (scaled.dequantize(),)),
        (TypeError, "^weight.data: expected torch.float8_e4m3fn", (scaled._replace(data=scaled.data.float()),)),
        (ValueError, "^weight.scale_inv: expected shape", (scaled._replace(block=(32, 16)),)),
        (ValueError, "^weight.products: expected one of", (scaled._replace(products="w4a4"),)),
        (TypeError, "^weight.data: expected a", (scaled._replace(data=[1]),)),
        (ValueError, "^bias: expected shape", (scaled, bias[:1])),
        (TypeError, "^bias: expected one of", (scaled, bias.long())),
        (TypeError, "^bias: expected a", (scaled, 1.0)),
        (ValueError, "^bias: expected on", (scaled, bias.to("meta"))),
    ):
        raises(error, message, make_layer, *args)
    raises(ValueError, "^scale_bias: expected False without a bias", lambda: make_layer(scaled, scale_bias=True))
