"""Bad input: an error that names the argument, what came and what was expected, before anything is launched."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

T, TOP_K, E, H, I = 6, 2, 4, 16, 8  # noqa: E741
ROWS, G, N, K = 10, 3, 8, 4
META = torch.device("meta")


class Nothing(TorchDispatchMode):
    """Fails on any operation that reaches a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was launched before the error")


def raises(error, message, function, *args, **kwargs):
    """The error comes, its message matches, and nothing was launched."""
    with pytest.raises(error, match=message), Nothing():
        function(*args, **kwargs)


# Shapes of valid arguments.
VALID = {
    "grouped_mm_experts": {
        "hidden_states": (T, H), "top_k_index": (T, TOP_K), "top_k_weights": (T, TOP_K), "gate_up_proj": (E, 2 * I, H),
        "down_proj": (E, H, I), "gate_up_proj_bias": (E, 2 * I), "down_proj_bias": (E, H),
    },
    "grouped_mlp": {
        "x": (T, H), "splits": (E,), "activation_scales": (T,), "gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I),
    },
    "grouped_linear": {"x": (ROWS, K), "weight": (G, N, K), "splits": (G + 1,), "bias": (G, N)},
    "route": {"top_k_index": (T, TOP_K), "num_experts": E},
    "gather_rows": {"x": (T, H), "routing": None},
    "combine_rows": {"y": (T * TOP_K, H), "top_k_weights": (T, TOP_K), "routing": None},
}  # fmt: skip
NAMES = list(VALID["grouped_mm_experts"])
BIASES = ("gate_up_proj_bias", "down_proj_bias")
NOT_GATED = {"gated": False, "gate_up_proj": (E, I, H), "gate_up_proj_bias": (E, I)}
LINEAR = ("x", "weight", "bias")
NO_INDEX_DTYPES = (torch.float32, torch.bool, torch.int16, torch.uint8)
NO_COMPUTE_DTYPES = (torch.int64, torch.complex64, torch.float8_e4m3fn, torch.bool)
FLAGS = ("gated", "interleaved", "transposed", "recompute")
NO_BOOLS = ("yes", 1, 0, None, torch.tensor(True))


def arguments(package, op, device):
    """Valid arguments of an op by name."""
    given = {}
    for name, shape in VALID[op].items():
        dtype = torch.int64 if name in ("top_k_index", "splits") else torch.float32
        given[name] = torch.zeros(shape, dtype=dtype, device=device) if isinstance(shape, tuple) else shape
    if "routing" in given:
        given["routing"] = package.route(torch.zeros(T, TOP_K, dtype=torch.int64, device=device), E)
    return given


class Act(NamedTuple):
    """The fields of an `Activation`, which only the package can make."""

    name: str = "silu"
    alpha: object = 1.0
    limit: object = None
    up_offset: object = 0.0


def change(given, value, package):
    """An argument made wrong: of another shape, dtype or device, made by the package, or of another value."""
    if isinstance(given, torch.Tensor) and isinstance(value, tuple):
        return given.new_zeros(value)
    if isinstance(given, torch.Tensor) and isinstance(value, (torch.dtype, torch.device)):
        return given.to(value)
    return package.Activation(*value) if isinstance(value, Act) else value


# What is wrong: an argument, what it is changed to, and what the error says. Of (changed, named) the error names the
# second; of a dict of changes the argument that is named comes first.
BAD_ROUTING = [("routing", value, f"expected a Routing, got {type(value).__name__}$") for value in (None, (1, 2))]
BAD = {
    ("grouped_mm_experts", ValueError): [
        ("hidden_states", (T,), r"\(T, H\) = \(\?, \?\), got \(6,\)"),
        ("hidden_states", (2, 3, H), r"\(T, H\) = \(\?, \?\), got \(2, 3, 16\)"),
        (("hidden_states", "top_k_index"), (T + 1, H), r"\(T, top_k\) = \(7, \?\), got \(6, 2\)"),
        (("hidden_states", "gate_up_proj"), (T, H + 1), r"\(E, 2 I, H\) = \(4, 16, 17\), got \(4, 16, 16\)"),
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
        *((name, META, "expected on .* like hidden_states, got meta") for name in NAMES[1:]),
        (("hidden_states", "gate_up_proj"), META, "expected on meta like hidden_states, got "),
        *((name, None, "expected with the other bias") for name in BIASES),
        ("activation", "mish", "expected one of silu, gelu, gelu_tanh, relu, relu2, got 'mish'"),
        ("activation", "", "expected one of .*, got ''"),
        ("activation", Act("gelu", 1.702), "alpha applies to silu only, got alpha=1.702 with 'gelu'"),
        ("activation", Act("relu2", 0.5), "alpha applies to silu only, got alpha=0.5 with 'relu2'"),
        ("activation", Act("silu", 1.0, 0.0), "limit must be positive or None, got 0.0"),
        ("activation", Act("silu", 1.0, -7.0), "limit must be positive or None, got -7.0"),
        ("activation", Act("gelu", 1.0, float("nan")), "limit must be positive or None, got nan"),
        ("activation", Act("mish", 2.0), "expected one of .*, got 'mish'"),
        ("activation", Act("gelu_new", 2.0), "alpha applies to silu only, got alpha=2.0 with 'gelu_tanh'"),
        ("activation", Act("quick_gelu", 2.0), "alpha applies to silu only, got alpha=2.0 with 'quick_gelu'"),
        ("gated", {**NOT_GATED, "interleaved": True}, "expected True .*, got False"),
        ("gated", {**NOT_GATED, "activation": Act("silu", 1.0, None, 1.0)}, "expected True .*, got False"),
        ("gate_up_proj", {**NOT_GATED, "transposed": True}, r"\(E, H, I\) = \(4, 16, 16\), got \(4, 8, 16\)"),
        ("down_proj", {"transposed": True, "gate_up_proj": (E, H, 2 * I)}, r"\(E, I, H\) = \(4, 8, 16\), got \(4, 16"),
        ("gate_up_proj", {"gate_up_proj": (E, 0, H), "down_proj": (E, H, 0)}, "expected H and I above 0"),
        *(("capacity", value, f"expected above 0, got {value}") for value in (0, -1, -(2**40))),
    ],
    ("grouped_mm_experts", TypeError): [
        *((name, value, f"expected a tensor, got {type(value).__name__}$")
          for name in NAMES for value in (3, "tensor", [[1.0]], None) if not (value is None and name in BIASES)),
        *(("top_k_index", dtype, f"expected torch.int32 or torch.int64, got {dtype}$") for dtype in NO_INDEX_DTYPES),
        *((name, dtype, f"expected one of torch.bfloat16, torch.float16, torch.float32.*, got {dtype}$")
          for name in ("hidden_states", "top_k_weights") for dtype in NO_COMPUTE_DTYPES),
        *((name, torch.bfloat16, "expected torch.float32 like hidden_states, got torch.bfloat16$")
          for name in NAMES[3:]),
        ("hidden_states", torch.eye(H)[:T].to_sparse(), "expected a dense tensor"),
        ("activation", None, "expected a name or an Activation, got NoneType"),
        ("activation", torch.nn.SiLU(), "expected a name or an Activation, got SiLU"),
        ("activation", torch.nn.functional.silu, "expected a name or an Activation, got function"),
        ("activation", ("silu", 1.0, None, 0.0), "expected a name or an Activation, got tuple"),
        *(("activation", Act(**{field: "1"}), f"expected a number as {field}, got str")
          for field in ("alpha", "limit", "up_offset")),
        *((flag, value, "expected True or False, got ") for flag in FLAGS for value in NO_BOOLS),
        *(("capacity", value, f"expected an int or None, got {type(value).__name__}$")
          for value in (1.0, "8", True, torch.tensor(8))),
    ],
    ("grouped_linear", ValueError): [
        ("x", (K,), r"shape \(rows, K\) = \(\?, \?\), got \(4,\)"),
        (("x", "weight"), (ROWS, K + 1), r"shape \(G, N, K\) = \(\?, \?, 5\), got \(3, 8, 4\)"),
        ("weight", (N,), r"shape \(G, N, K\) = \(\?, \?, 4\), got \(8,\)"),
        ("weight", (), r"shape \(G, N, K\) = \(\?, \?, 4\), got \(\)"),
        ("weight", (N, K), r"shape \(G, N, K\) = \(\?, \?, 4\), got \(8, 4\)"),
        ("weight", (G, K, N), r"shape \(G, N, K\) = \(\?, \?, 4\), got \(3, 4, 8\)"),
        ("weight", (0, N, K), "1 to 1024 groups, got 0"),
        ("weight", (1025, N, K), "1 to 1024 groups, got 1025"),
        ("splits", (G + 2,), r"shape \(G,\) sizes or \(G \+ 1,\) offsets = \(3\), got \(5,\)"),
        ("splits", (G + 1, 1), r"shape \(G,\) sizes or .* = \(3\), got \(4, 1\)"),
        ("bias", (N,), r"shape \(G, N\) = \(3, 8\), got \(8,\)"),
        ("bias", (G, K), r"shape \(G, N\) = \(3, 8\), got \(3, 4\)"),
        *((name, META, "expected on .* like x, got meta") for name in ("weight", "splits", "bias")),
        (("x", "weight"), META, "expected on meta like x, got "),
        ("weight", {"transposed": True}, r"shape \(G, K, N\) = \(\?, 4, \?\), got \(3, 8, 4\)"),
    ],
    ("grouped_linear", TypeError): [
        *((name, [1.0], "expected a tensor, got list$") for name in LINEAR),
        *(("transposed", value, "expected True or False, got ") for value in NO_BOOLS),
        ("x", torch.int64, "expected one of .*, got torch.int64$"),
        ("weight", torch.float16, "expected torch.float32 like x, got torch.float16$"),
        ("bias", torch.bfloat16, "expected torch.float32 like x, got torch.bfloat16$"),
        ("splits", torch.float32, "expected torch.int32 or torch.int64, got torch.float32$"),
        ("splits", torch.bool, "expected torch.int32 or torch.int64, got torch.bool$"),
    ],
    ("route", ValueError): [
        ("top_k_index", (4,), r"expected shape \(T, top_k\).*got \(4,\)"),
        ("top_k_index", (4, 0), r".*top_k > 0, got \(4, 0\)"),
        *(("num_experts", value, f"expected 1 to 1024 experts, got {value}$") for value in (0, -1, 1025)),
    ],
    ("route", TypeError): [
        ("top_k_index", torch.float32, "expected torch.int32 or torch.int64, got torch.float32"),
        ("top_k_index", [[0, 1]], "expected a tensor, got list"),
        ("num_experts", "4", "expected an int, got str"),
    ],
    ("gather_rows", ValueError): [
        ("x", (T,), r"expected shape \(T, H\) = \(6, \?\), got \(6,\)"),
        ("x", (T + 1, H), r"expected shape \(T, H\) = \(6, \?\), got \(7, 16\)"),
        ("x", META, "expected on .* like routing, got meta"),
        (("routing.top_k", "routing"), 0, "expected top_k to divide 12 slots, got 0"),
        (("routing.top_k", "routing"), 5, "expected top_k to divide 12 slots, got 5"),
        ("routing.row_to_slot", (11,), r".*got \(11,\)"),
        ("routing.expert_offsets", META, ""),
    ],
    ("combine_rows", ValueError): [
        ("y", (12,), r"expected shape \(S, H\) = \(12, \?\), got \(12,\)"),
        ("y", (11, H), r"expected shape \(S, H\) = \(12, \?\), got \(11, 16\)"),
        ("top_k_weights", (12,), r".*\(T, top_k\) = \(6, 2\), got \(12,\)"),
        ("top_k_weights", (2, 6), r".*\(T, top_k\) = \(6, 2\), got \(2, 6\)"),
        *((name, META, "expected on .* like routing, got meta") for name in ("y", "top_k_weights")),
    ],
    ("gather_rows", TypeError): [
        ("routing.row_to_slot", torch.float32, "expected torch.int32 .*got torch.float32"),
        ("x", torch.int32, "expected one of .*, got torch.int32"),
        ("x", [1.0], "expected a tensor, got list"),
        *BAD_ROUTING,
    ],
    ("combine_rows", TypeError): [
        *((name, torch.int64, "expected one of .*, got torch.int64") for name in ("y", "top_k_weights")),
        ("y", None, "expected a tensor, got NoneType"),
        ("top_k_weights", 1.0, "expected a tensor, got float"),
        *BAD_ROUTING,
    ],
    ("grouped_mlp", TypeError): [
        (flag, value, "expected True or False, got ") for flag in FLAGS for value in NO_BOOLS
    ],
}  # fmt: skip
ALL = [(*key, *row) for key, rows in BAD.items() for row in rows]
ALL += [
    pytest.param("grouped_mm_experts", TypeError, name, torch.float64, "expected one of .*", marks=pytest.mark.gpu)
    for name in ("hidden_states", "top_k_weights")
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("op, error, name, value, message", ALL)
def test_bad_input(grouped_moe, device, op, error, name, value, message):
    """With biases and, where they do not matter, without: plain blocks have checks of their own."""
    changed, named = name if isinstance(name, tuple) else (name, name)
    changes = value if isinstance(value, dict) else {changed: value}
    for without in ((), ("gate_up_proj_bias", "down_proj_bias", "bias")):
        given = {key: each for key, each in arguments(grouped_moe, op, device).items() if key not in without}
        if changes.keys().isdisjoint(without) or not without:
            for key, each in changes.items():
                key, _, field = key.partition(".")
                if field:
                    each = replace(given[key], **{field: change(getattr(given[key], field), each, grouped_moe)})
                given[key] = change(given.get(key), each, grouped_moe)
            raises(error, f"^{named}: .*{message}", getattr(grouped_moe, op), **given)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("op, names", [("grouped_mm_experts", NAMES), ("grouped_linear", LINEAR)])
def test_not_a_tensor_under_autocast(grouped_moe, device, op, names):
    for name in names:
        given = {**arguments(grouped_moe, op, device), name: [1.0]}
        message = f"^{name}: expected a tensor, got list$"
        with pytest.raises(TypeError, match=message), torch.autocast(device, torch.bfloat16):
            getattr(grouped_moe, op)(**given)


def test_options_are_keyword_only(grouped_moe, device):
    given = arguments(grouped_moe, "grouped_mm_experts", device)
    raises(TypeError, "positional", grouped_moe.grouped_mm_experts, *[given[name] for name in NAMES[:5]], None)


def test_too_many_slots(grouped_moe, device):
    ids = torch.zeros(1, dtype=torch.int32, device=device).expand(2**24 - 1, 128)
    raises(ValueError, "^top_k_index: expected at most 2147483519 slots, got 2147483520", grouped_moe.route, ids, 4)
