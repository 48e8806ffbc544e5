"""Bad input: an error that names the argument, what came and what was expected, before anything is launched."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

T, TOP_K, E, H, I = 6, 2, 4, 16, 8  # noqa: E741


class Nothing(TorchDispatchMode):
    """Fails on any operation that reaches a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was launched before the error")


def raises(error, message, function, *args, **kwargs):
    """The error comes, its message matches, and nothing was launched."""
    with pytest.raises(error, match=message), Nothing():
        function(*args, **kwargs)


def arguments(device, gated=True, transposed=False, biases=False):
    """Valid arguments of grouped_mm_experts by name."""
    p = 2 * I if gated else I
    tensors = {
        "hidden_states": torch.randn(T, H, device=device),
        "top_k_index": torch.zeros(T, TOP_K, dtype=torch.int64, device=device),
        "top_k_weights": torch.rand(T, TOP_K, device=device),
        "gate_up_proj": torch.randn(*((E, H, p) if transposed else (E, p, H)), device=device),
        "down_proj": torch.randn(*((E, I, H) if transposed else (E, H, I)), device=device),
    }
    if biases:
        tensors["gate_up_proj_bias"] = torch.randn(E, p, device=device)
        tensors["down_proj_bias"] = torch.randn(E, H, device=device)
    return {**tensors, "gated": gated, "transposed": transposed}


NAMES = [name for name, value in arguments("meta", biases=True).items() if isinstance(value, torch.Tensor)]
FLOATING = [name for name in NAMES if name != "top_k_index"]
SHAPES = [  # (argument, shape, what the message says was expected)
    ("hidden_states", (T,), r"\(T, H\) = \(\?, \?\), got \(6,\)"),
    ("hidden_states", (2, 3, H), r"\(T, H\) = \(\?, \?\), got \(2, 3, 16\)"),
    ("hidden_states", (T + 1, H), r"\(T, top_k\) = \(7, \?\), got \(6, 2\)"),
    ("hidden_states", (T, H + 1), r"\(E, 2 I, H\) = \(4, 16, 17\), got \(4, 16, 16\)"),
    ("top_k_index", (T,), r"\(T, top_k\) with top_k > 0, got \(6,\)"),
    ("top_k_index", (T, 1, 2), r"\(T, top_k\) with top_k > 0, got \(6, 1, 2\)"),
    ("top_k_index", (T, 0), r"\(T, top_k\) with top_k > 0, got \(6, 0\)"),
    ("top_k_index", (T + 1, TOP_K), r"\(T, top_k\) = \(6, \?\), got \(7, 2\)"),
    ("top_k_weights", (T,), r"\(T, top_k\) = \(6, 2\), got \(6,\)"),
    ("top_k_weights", (T, TOP_K + 1), r"\(T, top_k\) = \(6, 2\), got \(6, 3\)"),
    ("top_k_weights", (T, TOP_K, 1), r"\(T, top_k\) = \(6, 2\), got \(6, 2, 1\)"),
    ("gate_up_proj", (2 * I, H), r"got \(16, 16\)"),
    ("gate_up_proj", (E, 2 * I, H, 1), r"got \(4, 16, 16, 1\)"),
    ("gate_up_proj", (E, 2 * I, H - 1), r"\(E, 2 I, H\) = \(4, 16, 16\), got \(4, 16, 15\)"),
    ("gate_up_proj", (E, 2 * I + 1, H), r"an even number of gate and up columns, got \(4, 17, 16\)"),
    ("gate_up_proj", (0, 2 * I, H), "1 to 1024 experts, got 0"),
    ("gate_up_proj", (1025, 2 * I, H), "1 to 1024 experts, got 1025"),
    ("down_proj", (H, I), r"\(E, H, I\) = \(4, 16, 8\), got \(16, 8\)"),
    ("down_proj", (E + 1, H, I), r"\(E, H, I\) = \(4, 16, 8\), got \(5, 16, 8\)"),
    ("down_proj", (E, H, I + 1), r"\(E, H, I\) = \(4, 16, 8\), got \(4, 16, 9\)"),
    ("down_proj", (E, I, H), r"\(E, H, I\) = \(4, 16, 8\), got \(4, 8, 16\)"),
    ("gate_up_proj_bias", (2 * I,), r"\(E, 2 I\) = \(4, 16\), got \(16,\)"),
    ("gate_up_proj_bias", (E, I), r"\(E, 2 I\) = \(4, 16\), got \(4, 8\)"),
    ("down_proj_bias", (E, I), r"\(E, H\) = \(4, 16\), got \(4, 8\)"),
    ("down_proj_bias", (E + 1, H), r"\(E, H\) = \(4, 16\), got \(5, 16\)"),
]
AT_FAULT = {("hidden_states", (T + 1, H)): "top_k_index", ("hidden_states", (T, H + 1)): "gate_up_proj"}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name, shape, message", SHAPES, ids=lambda value: str(value) if len(value) < 20 else "")
def test_shape(grouped_moe, device, name, shape, message):
    given = arguments(device, biases=True)
    given[name] = torch.zeros(shape, dtype=given[name].dtype, device=device)
    where = AT_FAULT.get((name, shape), name)
    raises(ValueError, rf"^{where}: expected .*{message}", grouped_moe.grouped_mm_experts, **given)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_shape_of_the_other_layout(grouped_moe, device, name):
    given, other = arguments(device, transposed=True, gated=False), arguments(device, gated=False)
    message = {"gate_up_proj": r"\(E, H, I\) = \(4, 16, 16\)", "down_proj": r"\(E, I, H\) = \(4, 8, 16\)"}[name]
    raises(ValueError, f"^{name}: expected .*{message}", grouped_moe.grouped_mm_experts, **{**given, name: other[name]})


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [3, "tensor", [[1.0]]], ids=["int", "str", "list"])
def test_not_a_tensor(grouped_moe, device, name, value):
    given = {**arguments(device, biases=True), name: value}
    message = f"^{name}: expected a tensor, got {type(value).__name__}$"
    raises(TypeError, message, grouped_moe.grouped_mm_experts, **given)
    with pytest.raises(TypeError, match=message), torch.autocast(device, torch.bfloat16):
        grouped_moe.grouped_mm_experts(**given)


@pytest.mark.parametrize("name", NAMES[:5])
def test_none(grouped_moe, device, name):
    given = {**arguments(device), name: None}
    raises(TypeError, f"^{name}: expected a tensor, got NoneType$", grouped_moe.grouped_mm_experts, **given)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", NAMES)
def test_other_device(grouped_moe, device, name):
    """An argument on another device than the hidden states, whichever it is."""
    given = arguments(device, biases=True)
    given[name] = given[name].to("meta")
    if name == "hidden_states":
        message = f"^gate_up_proj: expected on meta like hidden_states, got {device}"
    else:
        message = f"^{name}: expected on {device}.* like hidden_states, got meta"
    raises(ValueError, message, grouped_moe.grouped_mm_experts, **given)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.uint8], ids=str)
def test_dtype_of_ids(grouped_moe, device, dtype):
    given = arguments(device)
    given["top_k_index"] = given["top_k_index"].to(dtype)
    message = f"^top_k_index: expected torch.int32 or torch.int64, got {dtype}$"
    raises(TypeError, message, grouped_moe.grouped_mm_experts, **given)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["hidden_states", "top_k_weights"])
def test_unsupported_dtype(grouped_moe, device, name, dtype):
    given = arguments(device)
    given[name] = torch.empty_like(given[name], dtype=dtype)
    message = f"^{name}: expected one of torch.bfloat16, torch.float16, torch.float32.*, got {dtype}$"
    raises(TypeError, message, grouped_moe.grouped_mm_experts, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hidden_states", "top_k_weights"])
def test_fp64_on_an_accelerator(grouped_moe, device, name):
    given = arguments(device)
    given[name] = given[name].double()
    raises(TypeError, f"^{name}: expected one of .*, got torch.float64$", grouped_moe.grouped_mm_experts, **given)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", NAMES[3:])
def test_dtype_differs_from_hidden_states(grouped_moe, device, name):
    given = arguments(device, biases=True)
    given[name] = given[name].bfloat16()
    message = f"^{name}: expected torch.float32 like hidden_states, got torch.bfloat16$"
    raises(TypeError, message, grouped_moe.grouped_mm_experts, **given)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("missing", ["gate_up_proj_bias", "down_proj_bias"])
def test_gate_takes_both_biases(grouped_moe, device, missing):
    given = arguments(device, biases=True)
    del given[missing]
    raises(ValueError, f"^{missing}: expected with the other bias", grouped_moe.grouped_mm_experts, **given)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "value, error, message",
    [
        ("mish", ValueError, "expected one of silu, gelu, gelu_tanh, relu, relu2, got 'mish'"),
        ("", ValueError, "expected one of .*, got ''"),
        (None, TypeError, "expected a name or an Activation, got NoneType"),
        (torch.nn.SiLU(), TypeError, "expected a name or an Activation, got SiLU"),
        (torch.nn.functional.silu, TypeError, "expected a name or an Activation, got function"),
        (("silu", 1.0, None, 0.0), TypeError, "expected a name or an Activation, got tuple"),
    ],
    ids=["unknown", "empty", "none", "module", "function", "tuple"],
)
def test_activation(grouped_moe, device, value, error, message):
    given = {**arguments(device), "activation": value}
    raises(error, f"^activation: {message}", grouped_moe.grouped_mm_experts, **given)


@pytest.mark.parametrize(
    "fields, message",
    [
        (("gelu", 1.702), "alpha applies to silu only, got alpha=1.702 with 'gelu'"),
        (("relu2", 0.5), "alpha applies to silu only, got alpha=0.5 with 'relu2'"),
        (("silu", 1.0, 0.0), "limit must be positive or None, got 0.0"),
        (("silu", 1.0, -7.0), "limit must be positive or None, got -7.0"),
        (("gelu", 1.0, float("nan")), "limit must be positive or None, got nan"),
        (("mish", 2.0), "expected one of .*, got 'mish'"),
        (("gelu_new", 2.0), "alpha applies to silu only, got alpha=2.0 with 'gelu_tanh'"),
        (("quick_gelu", 2.0), "alpha applies to silu only, got alpha=2.0 with 'quick_gelu'"),
    ],
    ids=str,
)
def test_activation_parameters(grouped_moe, device, fields, message):
    given = {**arguments(device), "activation": grouped_moe.Activation(*fields)}
    raises(ValueError, f"^activation: {message}", grouped_moe.grouped_mm_experts, **given)


@pytest.mark.parametrize("value", ["yes", 1, 0, None, torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("name", ["gated", "interleaved", "transposed", "recompute"])
def test_flags_are_bools(grouped_moe, device, name, value):
    given = {**arguments(device), name: value}
    raises(TypeError, f"^{name}: expected True or False, got ", grouped_moe.grouped_mm_experts, **given)
    mlp = {"x": given.pop("hidden_states"), "splits": given.pop("top_k_index"), "activation_scales": None, **given}
    del mlp["top_k_weights"]
    raises(TypeError, f"^{name}: expected True or False, got ", grouped_moe.grouped_mlp, **mlp)
    if name == "transposed":
        linear = (mlp["x"], mlp["gate_up_proj"], torch.tensor([1, 2, 3, 0], device=device))
        raises(TypeError, "^transposed: expected True or False", grouped_moe.grouped_linear, *linear, transposed=value)


def test_options_are_keyword_only(grouped_moe, device):
    given = arguments(device)
    raises(TypeError, "positional", grouped_moe.grouped_mm_experts, *[given[name] for name in NAMES[:5]], None)


@pytest.mark.parametrize("changes", [{"interleaved": True}, {"activation": (1.0,)}], ids=["interleaved", "up_offset"])
def test_gate_options_need_a_gate(grouped_moe, device, changes):
    if "activation" in changes:
        changes = {"activation": grouped_moe.Activation("silu", up_offset=1.0)}
    given = {**arguments(device, gated=False), **changes}
    raises(ValueError, "^gated: expected True .*, got False", grouped_moe.grouped_mm_experts, **given)


@pytest.mark.parametrize("field", ["alpha", "limit", "up_offset"])
def test_activation_numbers(grouped_moe, device, field):
    given = {**arguments(device), "activation": grouped_moe.Activation("silu")._replace(**{field: "1"})}
    raises(TypeError, f"^activation: expected a number as {field}, got str", grouped_moe.grouped_mm_experts, **given)


def test_empty_extents(grouped_moe, device):
    given = arguments(device)
    given["gate_up_proj"], given["down_proj"] = given["gate_up_proj"][:, :0], given["down_proj"][:, :, :0]
    raises(ValueError, "^gate_up_proj: expected H and I above 0", grouped_moe.grouped_mm_experts, **given)


def test_sparse(grouped_moe, device):
    given = {**arguments(device), "hidden_states": torch.eye(H, device=device)[:T].to_sparse()}
    raises(TypeError, "^hidden_states: expected a dense tensor", grouped_moe.grouped_mm_experts, **given)
