"""The native ops of the CUDA build: right wherever they take a call, taken where they should be, and nowhere else.

All other tests run with this build as they do with the others, `make test-gpu BUILD=build-cuda`.
"""

import pytest
import torch
from block import call, run_reference
from cases import CASES, GPT_OSS, make_inputs
from compare import assert_bitwise, assert_close
from native_op import CODED, CODED_CASES, FEW, ROUNDS, STEPS, WHOLE, decode, poison_scaled
from operations import Log
from pairs import Pairs, make_loras
from poison import guarded, no_memory, poison_sentinels
from scaled import Blocks, with_scales
from timing import graph_of

pytestmark = pytest.mark.gpu
# Rows of 16 bytes, as the op asks for.
ALIGNED = [case for case in CASES if case.H % 8 == 0 and case.I % 8 == 0]
FP32, E8M0 = torch.float32, torch.float8_e8m0fnu
BLOCKS = [Blocks(), Blocks(apart=True), Blocks(dtype=E8M0), Blocks(dtype=torch.bfloat16, apart=True)]
BLOCKS += [Blocks(dtype=E8M0, down_dtype=FP32), Blocks(dtype=FP32, down_dtype=E8M0)]


@pytest.mark.parametrize("case", [*ALIGNED, STEPS, WHOLE, *ROUNDS], ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 100])
@pytest.mark.parametrize("transposed", [False, True])
def test_against_the_reference(native, grouped_moe, device, case, dtype, tokens, transposed, way):
    """By expert in one tile and in several. Transposed weights lie in memory as such, too."""
    case = case._replace(T=tokens, transposed=transposed)
    kinds = ((torch.int64, torch.float32), (torch.int32, dtype), (torch.int64, torch.float16))
    for index_dtype, weights_dtype in kinds:
        inputs = make_inputs(case, dtype, device, index_dtype, weights_dtype)
        want = run_reference(grouped_moe, case, inputs)["out"]
        poisoned = poison_sentinels(inputs, case.E)
        out = decode(native, grouped_moe, case, poisoned)
        assert_close("out", out, want, dtype)
        assert_bitwise("once more", decode(native, grouped_moe, case, poisoned), out)


@pytest.mark.parametrize("ids", [0, 3, 40, -1], ids=["first", "one", "none", "negative"])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_expert_or_none(native, grouped_moe, device, ids, transposed, way):
    """All slots on one expert, and no slot on any: its tokens are zeros, whatever is in memory that nobody wrote."""
    case = FEW._replace(T=70, H=136, I=72, bias="both", transposed=transposed)
    inputs = make_inputs(case, torch.bfloat16, device)
    inputs = inputs._replace(top_k_index=torch.full_like(inputs.top_k_index, ids))
    want = run_reference(grouped_moe, case, inputs)["out"]
    poisoned = poison_sentinels(inputs, case.E)
    scratch = [torch.full((1 << 16,), float("nan"), device=device) for _ in range(32)]
    del scratch  # it is made of this memory
    assert_close("out", decode(native, grouped_moe, case, poisoned), want, torch.bfloat16)


@pytest.mark.parametrize("name", ["hidden_states", "top_k_weights"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_not_finite_stays_in_its_token(native, grouped_moe, device, name, value, transposed, way):
    """Although it shares tiles with other tokens."""
    case = FEW._replace(T=12, E=4, transposed=transposed)
    inputs, token = make_inputs(case, torch.bfloat16, device), 5
    want, tensor = decode(native, grouped_moe, case, inputs), getattr(inputs, name).clone()
    tensor[token] = value
    out = decode(native, grouped_moe, case, inputs._replace(**{name: tensor}))
    others = torch.arange(case.T, device=device) != token
    assert_bitwise("others", out[others], want[others])
    assert not out[token].isfinite().any()


@pytest.mark.parametrize("case", CODED_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("blocks", BLOCKS, ids=range(len(BLOCKS)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scaled_weights(native, grouped_moe, device, case, blocks, dtype, way):
    case, inputs, wide = with_scales(grouped_moe, case, make_inputs(case, dtype, device), blocks)
    want = run_reference(grouped_moe, case, wide)["out"]
    poisoned = poison_scaled(inputs, case.E)
    out = decode(native, grouped_moe, case, poisoned)
    assert_close("out", out, want, dtype)
    assert_bitwise("once more", decode(native, grouped_moe, case, poisoned), out)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes(native, grouped_moe, device, name, code, way):
    """One in the weights of an expert: in the outputs of its tokens alone, of one row of down in that column alone."""
    case, inputs, _ = with_scales(grouped_moe, CODED, make_inputs(CODED, torch.bfloat16, device), Blocks())
    ids = torch.arange(case.T * case.top_k, device=device).view(case.T, case.top_k)
    codes = getattr(inputs, name).data.clone()
    codes.view(torch.uint8)[int(ids[1, 1]), 5, 3] = code
    scaled = getattr(inputs, name)._replace(data=codes)
    out = decode(native, grouped_moe, case, inputs._replace(top_k_index=ids, **{name: scaled}))
    rows = out.isnan()
    assert not rows[0].any() and (rows[1].all() if name == "gate_up_proj" else rows[1].nonzero().tolist() == [[5]])


@pytest.mark.parametrize("change", [
    lambda i: i._replace(gate_up_proj=i.gate_up_proj.dequantize()),
    lambda i: i._replace(gate_up_proj=i.gate_up_proj._replace(block=(128, 64))),
    lambda i: i._replace(down_proj=i.down_proj._replace(parts=2)),
    lambda i: i._replace(down_proj=i.down_proj._replace(scale_inv=i.down_proj.scale_inv[:, :1])),
    lambda i: i._replace(down_proj=i.down_proj._replace(scale_inv=i.down_proj.scale_inv.half())),
    lambda i: i._replace(down_proj=i.down_proj._replace(scale_inv=i.down_proj.scale_inv.to(torch.uint8))),
    lambda i: i._replace(down_proj=i.down_proj._replace(data=i.down_proj.data.mT.contiguous().mT)),
    lambda i: i._replace(down_proj=i.down_proj._replace(data=i.down_proj.data.view(torch.float8_e5m2))),
    lambda i: i._replace(gate_up_proj=i.gate_up_proj._replace(data=strided(i.gate_up_proj.data))),
], ids=range(9))  # fmt: skip
def test_scaled_weights_the_op_does_not_take(native, grouped_moe, device, change, way):
    case, inputs, _ = with_scales(grouped_moe, CODED, make_inputs(CODED, torch.bfloat16, device), Blocks())
    assert decode(native, grouped_moe, case, inputs) is not None
    assert decode(native, grouped_moe, case, change(inputs)) is None


def strided(tensor: torch.Tensor, by: int = 8) -> torch.Tensor:
    """In rows with room between them; NaN there."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + by)
    return torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)[..., :-by].copy_(tensor)


@pytest.mark.parametrize("transposed", [False, True])
def test_strides(native, grouped_moe, device, transposed, way):
    """Rows with room between them, also of weights that lie transposed, and biases, ids and weights of any."""
    case = STEPS._replace(sentinels=0.3, transposed=transposed)
    inputs = make_inputs(case, torch.bfloat16, device)
    want = decode(native, grouped_moe, case, inputs)
    names = ("hidden_states", "gate_up_proj", "down_proj")
    apart = inputs._replace(**{name: strided(getattr(inputs, name)) for name in names})
    names = ("top_k_index", "top_k_weights", "gate_up_proj_bias", "down_proj_bias")
    apart = apart._replace(**{name: getattr(inputs, name).t().contiguous().t() for name in names})
    assert_bitwise("strided", decode(native, grouped_moe, case, apart), want)


def without_a_name(tensor: torch.Tensor) -> torch.Tensor:
    """In a dtype that PyTorch 2.10's stable ABI does not know, of the same shape."""
    return torch.zeros_like(tensor, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("change", [
    lambda i: i._replace(gate_up_proj=i.gate_up_proj.mT.contiguous().mT),
    lambda i: i._replace(down_proj=i.down_proj.mT.contiguous().mT),
    lambda i: i._replace(down_proj=guarded(i.down_proj, margin=4)),  # half of 16 bytes behind such a boundary
    lambda i: i._replace(gate_up_proj=guarded(i.gate_up_proj, margin=4)),
    lambda i: i._replace(gate_up_proj=strided(i.gate_up_proj, by=4)),
    lambda i: i._replace(gate_up_proj_bias=None),
    lambda i: i._replace(hidden_states=i.hidden_states.float()),
    lambda i: i._replace(top_k_weights=i.top_k_weights.double()),
    lambda i: i._replace(top_k_weights=i.top_k_weights[:, 1:]),
    lambda i: i._replace(top_k_weights=without_a_name(i.top_k_weights)),
    lambda i: i._replace(gate_up_proj=without_a_name(i.gate_up_proj)),
    lambda i: i._replace(top_k_index=i.top_k_index.short()),
    lambda i: i._replace(top_k_index=i.top_k_index.repeat(1, 5), top_k_weights=i.top_k_weights.repeat(1, 5)),
    lambda i: i.take(torch.zeros(0, dtype=torch.int64, device=i.dout.device)),
], ids=range(14))  # fmt: skip
@pytest.mark.parametrize("transposed", [False, True])
def test_what_the_op_does_not_take(native, grouped_moe, device, change, transposed, way):
    case = STEPS._replace(transposed=transposed)
    inputs = make_inputs(case, torch.bfloat16, device)
    assert decode(native, grouped_moe, case, inputs) is not None
    assert decode(native, grouped_moe, case, change(inputs)) is None


@pytest.mark.parametrize("kind", [2 - 128, 2 + 5 * 128, 2 + 2**40])
def test_kinds_the_op_does_not_take(native, grouped_moe, module, device, kind):
    """Gated, by an activation that there is not."""
    op, inputs = module("_ops").ops.decode_plain_experts.default, make_inputs(FEW, torch.bfloat16, device)
    assert op(*inputs[:5], 2) is not None and op(*inputs[:5], kind) is None


@pytest.mark.parametrize("hidden, intermediate", [(16, 12), (20, 16)])
@pytest.mark.parametrize("transposed", [False, True])
def test_widths_the_op_does_not_take(native, grouped_moe, device, hidden, intermediate, transposed, way):
    """No whole pieces of 16 bytes, be it of a half alone."""
    case = FEW._replace(H=hidden, I=intermediate, transposed=transposed)
    assert decode(native, grouped_moe, case, make_inputs(case, torch.bfloat16, device)) is None


@pytest.mark.parametrize("case", [
    CODED._replace(interleaved=True, H=64, I=48), CODED._replace(gated=False, bias="", H=64, I=48),
], ids=["interleaved", "not-gated"])  # fmt: skip
def test_parts_that_are_not_gate_and_up(native, grouped_moe, device, case, way):
    """Halves of a weight with blocks of their own, where a tile would have columns of both."""
    inputs = make_inputs(case, torch.bfloat16, device)
    up, down = (grouped_moe.quantize_blocks(w, parts=p) for w, p in ((inputs.gate_up_proj, 2), (inputs.down_proj, 1)))
    direct = decode(native, grouped_moe, case, inputs._replace(gate_up_proj=up, down_proj=down))
    wide = inputs._replace(gate_up_proj=up.dequantize(torch.float64), down_proj=down.dequantize(torch.float64))
    want = run_reference(grouped_moe, case, wide)["out"]
    if way == "by-slot":
        assert_close("out of the op", direct, want, torch.bfloat16)
    else:
        assert direct is None
    out = call(grouped_moe, case, inputs._replace(gate_up_proj=up, down_proj=down))
    assert_close("out", out, want, torch.bfloat16)


def test_who_is_taken(native, grouped_moe, device, taken):
    """Few tokens without gradients; at once unless somebody watches."""
    inputs = make_inputs(FEW, torch.bfloat16, device)
    plain = call(grouped_moe, FEW, inputs)
    assert taken == [(True, True)]
    with Log() as log:
        assert_bitwise("watched", call(grouped_moe, FEW, inputs), plain)
    assert "experts_inference" in log.names and taken[1:] == [(False, True)]
    with torch.autocast("cuda", torch.bfloat16):
        assert_bitwise("autocast", call(grouped_moe, FEW, inputs), plain)
    assert taken[2:] == [(False, True)]
    del taken[:]
    leaf = inputs._replace(hidden_states=inputs.hidden_states.clone().requires_grad_())
    assert call(grouped_moe, FEW, leaf).requires_grad and taken == []
    with torch.no_grad():
        assert_bitwise("no_grad", call(grouped_moe, FEW, leaf), plain)
    assert taken == [(True, True)]
    most = max(tokens for tokens in range(100) if native.groups_slots(tokens, FEW.top_k, FEW.E, False))
    assert most >= 30
    for tokens in (30, most, most + 1):
        del taken[:]
        case = FEW._replace(T=tokens)
        inputs = make_inputs(case, torch.bfloat16, device)
        want = run_reference(grouped_moe, case, inputs)["out"]
        assert_close("out", call(grouped_moe, case, inputs), want, torch.bfloat16)
        assert taken == [(True, tokens <= most)]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_by_torch_jit(grouped_moe, device, taken):
    """A trace of few tokens is of the package's own op, which takes any number of them."""
    inputs = make_inputs(FEW, torch.bfloat16, device)
    few, many = (
        (some.hidden_states, some.top_k_index, some.top_k_weights)
        for some in (inputs, make_inputs(FEW._replace(T=3000), torch.bfloat16, device))
    )

    def function(x, ids, weights):
        return call(grouped_moe, FEW, inputs._replace(hidden_states=x, top_k_index=ids, top_k_weights=weights))

    traced = torch.jit.trace(function, few, check_trace=False)
    assert taken == [(False, True)]
    for tensors in (few, many):
        assert_bitwise("traced", traced(*tensors), function(*tensors))


@pytest.mark.parametrize("tokens, top_k", [(2, 3), (30, 3), (150, 1)])
def test_scaled_weights_are_taken(grouped_moe, device, taken, tokens, top_k):
    """At once, and where the package's own op comes first; other blocks are handed over."""
    case = FEW._replace(T=tokens, top_k=top_k, H=256, I=144)
    given = make_inputs(case, torch.bfloat16, device)
    _, inputs, wide = with_scales(grouped_moe, case, given, Blocks(apart=True))
    plain = call(grouped_moe, case, inputs)
    assert_close("out", plain, run_reference(grouped_moe, case, wide)["out"], torch.bfloat16)
    assert taken == [(True, True)]
    with Log():
        assert_bitwise("watched", call(grouped_moe, case, inputs), plain)
    assert taken[1:] == [(False, True)]
    _, other, wide = with_scales(grouped_moe, case, given, Blocks((64, 64)))
    want = run_reference(grouped_moe, case, wide)["out"]
    assert_close("other blocks", call(grouped_moe, case, other), want, torch.bfloat16)
    assert taken[2:] == [(True, False), (False, False)]


def test_what_is_handed_over(grouped_moe, device, taken):
    """To the Triton backend, or to all other checks, which raise."""
    wide = make_inputs(FEW, torch.float32, device)
    assert_close("fp32", call(grouped_moe, FEW, wide), run_reference(grouped_moe, FEW, wide)["out"], torch.float32)
    inputs = make_inputs(FEW, torch.bfloat16, device)
    transposed, views = FEW._replace(transposed=True), {w: getattr(inputs, w).mT for w in ("gate_up_proj", "down_proj")}
    out = call(grouped_moe, transposed, inputs._replace(**views))
    assert_bitwise("transposed views", out, call(grouped_moe, FEW, inputs))
    turned = inputs._replace(**{name: view.contiguous() for name, view in views.items()})
    out = call(grouped_moe, transposed, turned)
    assert_close("transposed", out, run_reference(grouped_moe, FEW, inputs)["out"], torch.bfloat16)
    assert taken[-3:] == [(True, True)] * 3 and not any(took for _, took in taken[:-3])
    with pytest.raises(ValueError, match="^down_proj: expected shape"):
        call(grouped_moe, FEW, inputs._replace(down_proj=inputs.down_proj[:, :, :8]))
    for name in ("hidden_states", "down_proj"):
        for case, dense, dims in ((FEW, inputs, {}), (transposed, turned, {"sparse_dim": 1})):
            sparse = getattr(dense, name).to_sparse(**dims)
            with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor"):
                call(grouped_moe, case, dense._replace(**{name: sparse}))
    with pytest.raises(TypeError, match="^hidden_states: expected a tensor"):
        call(grouped_moe, FEW, inputs._replace(hidden_states=None))
    for name in ("hidden_states", "top_k_index", "top_k_weights", "down_proj"):
        with pytest.raises(TypeError, match=f"^{name}: expected .* got torch.float8_e8m0fnu"):
            call(grouped_moe, FEW, inputs._replace(**{name: without_a_name(getattr(inputs, name))}))


@pytest.mark.parametrize("case", [
    FEW, FEW._replace(T=1, bias="both", interleaved=True, activation=GPT_OSS), FEW._replace(T=50, sentinels=0.3),
    FEW._replace(transposed=True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("pairs", [None, Pairs(adapters=3)], ids=["plain", "adapters"])
def test_compiled_and_captured(grouped_moe, device, case, pairs, taken):
    """Compiled and in a graph it is what it is without, and of the same kernels."""
    inputs = make_inputs(case, torch.bfloat16, device)
    loras = make_loras(grouped_moe, case, inputs, pairs, torch.float32) if pairs else {}
    plain = call(grouped_moe, case, inputs, **loras)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: call(grouped_moe, case, inputs._replace(hidden_states=x), **loras))
    assert_bitwise("compiled", compiled(inputs.hidden_states), plain)
    assert taken == [(True, True), (False, True)]
    graph, out = graph_of(lambda: call(grouped_moe, case, inputs, **loras))
    inputs.hidden_states.normal_()
    inputs.top_k_index.copy_(torch.randint(-1, case.E + 1, inputs.top_k_index.shape))
    if pairs:
        loras["adapter_index"].copy_(loras["adapter_index"].flip(0))
    graph.replay()
    assert_bitwise("replayed", out.clone(), call(grouped_moe, case, inputs, **loras))


def test_without_memory(native, grouped_moe, module, device):
    """The error is PyTorch's own, which the stable ABI has no type for."""
    inputs, ids = make_inputs(FEW, torch.bfloat16, device), torch.zeros(64, 2, dtype=torch.int64, device=device)
    splits, routing = torch.zeros(8, dtype=torch.int64, device=device), module("backends.native.routing")
    calls = (
        lambda: call(grouped_moe, FEW, inputs),
        lambda: routing.route(ids, 8, torch.bfloat16),
        lambda: routing.split_rows(splits, 8, 100, torch.bfloat16),
    )
    with no_memory(device):
        for each in calls:
            with pytest.raises(torch.OutOfMemoryError):
                each()
    for each in calls:
        each()
