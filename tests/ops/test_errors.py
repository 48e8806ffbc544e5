"""Bad input: an error that names the argument, what came and what was expected, before anything is launched."""

import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from errors import raises

T, TOP_K, E, H, I = 6, 2, 4, 16, 8  # noqa: E741
ROWS, G, N, K = 10, 3, 8, 4
META = torch.device("meta")


# Shapes of valid arguments.
VALID = {
    "grouped_mm_experts": {
        "hidden_states": (T, H), "top_k_index": (T, TOP_K), "top_k_weights": (T, TOP_K), "gate_up_proj": (E, 2 * I, H),
        "down_proj": (E, H, I), "gate_up_proj_bias": (E, 2 * I), "down_proj_bias": (E, H),
    },
    "grouped_mlp": {
        "splits": (E,), "x": (T, H), "activation_scales": (T,), "bias_scales": (T,), "gate_up_proj": (E, 2 * I, H),
        "down_proj": (E, H, I), "gate_up_proj_bias": (E, 2 * I), "down_proj_bias": (E, H),
    },
    "grouped_linear": {
        "x": (ROWS, K), "weight": (G, N, K), "splits": (G + 1,), "bias": (G, N), "bias_scales": (ROWS,),
    },
    "route": {"top_k_index": (T, TOP_K), "num_experts": E},
    "gather_rows": {"x": (T, H), "routing": None},
    "combine_rows": {"y": (T * TOP_K, H), "top_k_weights": (T, TOP_K), "routing": None},
}  # fmt: skip
NAMES = list(VALID["grouped_mm_experts"])
MLP = list(VALID["grouped_mlp"])
BIASES = ("gate_up_proj_bias", "down_proj_bias")
NOT_GATED = {"gated": False, "gate_up_proj": (E, I, H), "gate_up_proj_bias": (E, I)}
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


# By op and error: arguments, what each is changed to in turn, and what the error says of it. Of "changed > named" it
# names the second; of a dict of changes, the argument that is given.
BAD = {
    ("grouped_mm_experts", ValueError): [
        (["hidden_states"], [(T,), (2, 3, H)], r"\(T, H\), got {value}"),
        (["hidden_states > top_k_index"], [(T + 1, H)], r"\(T, top_k\) = \(7, \?\), got \(6, 2\)"),
        (["hidden_states > gate_up_proj"], [(T, H + 1)], r"\(E, 2 I, H\) = \(4, 16, 17\), got \(4, 16, 16\)"),
        (["top_k_index"], [(T,), (T, 1, 2), (T, 0)], r"\(T, top_k\) with top_k > 0, got {value}"),
        (["top_k_index"], [(T + 1, TOP_K)], r"\(T, top_k\) = \(6, \?\), got {value}"),
        (["top_k_weights"], [(T,), (T, TOP_K + 1), (T, TOP_K, 1)], r"\(T, top_k\) = \(6, 2\), got {value}"),
        (["gate_up_proj"], [(2 * I, H), (E, 2 * I, H, 1)], "got {value}"),
        (["gate_up_proj"], [(E, 2 * I, H - 1)], r"\(E, 2 I, H\) = \(4, 16, 16\), got {value}"),
        (["gate_up_proj"], [(E, 2 * I + 1, H)], "an even number of gate and up columns, got {value}"),
        (["gate_up_proj"], [(0, 2 * I, H)], "1 to 1024 experts, got 0"),
        (["gate_up_proj"], [(1025, 2 * I, H)], "1 to 1024 experts, got 1025"),
        (["down_proj"], [(H, I), (E + 1, H, I), (E, H, I + 1), (E, I, H)], r"\(E, H, I\) = \(4, 16, 8\), got {value}"),
        (["gate_up_proj_bias"], [(2 * I,), (E, I)], r"\(E, 2 I\) = \(4, 16\), got {value}"),
        (["down_proj_bias"], [(E, I), (E + 1, H)], r"\(E, H\) = \(4, 16\), got {value}"),
        (NAMES[1:], [META], "expected on .* like hidden_states, got meta"),
        (["hidden_states > gate_up_proj"], [META], "expected on meta like hidden_states, got "),
        (BIASES, [None], "expected with the other bias"),
        (["activation"], ["mish", ""], "expected one of silu, gelu, gelu_tanh, relu, relu2, got '{value}'"),
        (["activation"], [Act("mish", 2.0)], "expected one of .*, got 'mish'"),
        (["activation"], [Act("gelu", 1.702)], "alpha applies to silu only, got alpha=1.702 with 'gelu'"),
        (["activation"], [Act("relu2", 0.5)], "alpha applies to silu only, got alpha=0.5 with 'relu2'"),
        (["activation"], [Act("gelu_new", 2.0)], "alpha applies to silu only, got alpha=2.0 with 'gelu_tanh'"),
        (["activation"], [Act("quick_gelu", 2.0)], "alpha applies to silu only, got alpha=2.0 with 'quick_gelu'"),
        (["activation"], [Act("silu", 1.0, 0.0)], "limit must be positive or None, got 0.0"),
        (["activation"], [Act("silu", 1.0, -7.0)], "limit must be positive or None, got -7.0"),
        (["activation"], [Act(alpha=float("nan"))], "expected a number as alpha, got nan"),
        (["activation"], [Act(limit=float("nan"))], "expected a number as limit, got nan"),
        (["activation"], [Act(up_offset=float("nan"))], "expected a number as up_offset, got nan"),
        (["activation"], [Act(limit=10**4000), Act(limit=-(10**400))], "expected limit as a number that a float holds"),
        (["activation"], [Act(alpha=10**400)], "expected alpha as a number that a float holds, got a larger int"),
        (["gated"], [{**NOT_GATED, "interleaved": True}, {**NOT_GATED, "activation": Act(up_offset=1.0)}],
         "expected True .*, got False"),
        (["gate_up_proj"], [{**NOT_GATED, "transposed": True}], r"\(E, H, I\) = \(4, 16, 16\), got \(4, 8, 16\)"),
        (["gate_up_proj"], [{"gate_up_proj": (E, 0, H), "down_proj": (E, H, 0)}], "expected H and I above 0"),
        (["down_proj"], [{"transposed": True, "gate_up_proj": (E, H, 2 * I)}],
         r"\(E, I, H\) = \(4, 8, 16\), got \(4, 16, 8\)"),
        (["capacity"], [0, -1, -(2**40)], "expected above 0, got {value}$"),
    ],
    ("grouped_mm_experts", TypeError): [
        (NAMES, [3, "tensor", [[1.0]]], "expected a tensor, got {type}$"),
        (NAMES[:5], [None], "expected a tensor, got {type}$"),
        (["hidden_states"], [torch.eye(H)[:T].to_sparse()], "expected a dense tensor"),
        (["hidden_states"], [torch.nested.nested_tensor([torch.eye(H)])], "dense tensor, got a nested one"),
        (["top_k_index"], [torch.float32, torch.bool, torch.int16, torch.uint8],
         "expected torch.int32 or torch.int64, got {value}$"),
        (["hidden_states", "top_k_weights"], [torch.int64, torch.complex64, torch.float8_e4m3fn, torch.bool],
         "expected one of torch.bfloat16, torch.float16, torch.float32.*, got {value}$"),
        (NAMES[3:], [torch.bfloat16], "expected torch.float32 like hidden_states, got {value}$"),
        (NAMES[3:5], [torch.float8_e4m3fn], "expected torch.float32 like .*, got {value}; .* BlockScaled$"),
        (NAMES[5:], [torch.float8_e4m3fn], "expected torch.float32 like .*, got {value}$"),
        (["activation"], [None, torch.nn.SiLU(), torch.nn.functional.silu, ("silu", 1.0, None, 0.0)],
         "expected a name or an Activation, got {type}"),
        (["activation"], [Act(alpha="1")], "expected a number as alpha, got str"),
        (["activation"], [Act(limit="1")], "expected a number as limit, got str"),
        (["activation"], [Act(up_offset=True)], "expected a number as up_offset, got bool"),
        (["activation"], [Act(up_offset="1")], "expected a number as up_offset, got str"),
        (FLAGS, NO_BOOLS, "expected True or False, got "),
        (["capacity"], [1.0, "8", True, torch.tensor(8)], "expected an int or None, got {type}$"),
    ],
    ("grouped_linear", ValueError): [
        (["x"], [(K,)], r"shape \(rows, K\), got {value}"),
        (["x > weight"], [(ROWS, K + 1)], r"shape \(G, N, K\) = \(\?, \?, 5\), got \(3, 8, 4\)"),
        (["weight"], [(N,), (), (N, K), (G, K, N)], r"shape \(G, N, K\) = \(\?, \?, 4\), got {value}"),
        (["weight"], [{"transposed": True}], r"shape \(G, K, N\) = \(\?, 4, \?\), got \(3, 8, 4\)"),
        (["weight"], [(0, N, K)], "1 to 1024 groups, got 0"),
        (["weight"], [(1025, N, K)], "1 to 1024 groups, got 1025"),
        (["splits"], [(G + 2,), (G + 1, 1)], r"shape \(G \+ 1,\) offsets or \(G,\) sizes = \(3,\), got {value}"),
        (["bias"], [(N,), (G, K)], r"shape \(G, N\) = \(3, 8\), got {value}"),
        (["bias_scales"], [(ROWS - 1,)], r"\(rows,\) = \(10,\), got {value}"),
        (["bias_scales"], [{"bias": None}], "expected None without a bias"),
        (["splits"], [[1, 2]], "expected 3 sizes, got 2"),
        (["weight", "splits", "bias"], [META], "expected on .* like x, got meta"),
        (["x > weight"], [META], "expected on meta like x, got "),
    ],
    ("grouped_linear", TypeError): [
        (["x", "weight", "bias"], [[1.0]], "expected a tensor, got list$"),
        (["x"], [torch.int64], "expected one of .*, got torch.int64$"),
        (["weight", "bias"], [torch.float16, torch.bfloat16], "expected torch.float32 like x, got {value}$"),
        (["splits"], [torch.float32, torch.bool], "expected torch.int32 or torch.int64, got {value}$"),
        (["weight"], [torch.float8_e4m3fn], "expected torch.float32 like x, got {value}; .* BlockScaled$"),
        (["splits"], [[1.0, 2, 3], [True, 2, 3]], "expected a list of ints"),
        (["splits"], [torch.nested.nested_tensor([torch.ones(1).long()])], "a dense tensor, got a nested one"),
        (["splits"], [None, 3], "expected GroupSizes, GroupOffsets, a tensor or a list of ints, got {type}$"),
        (["transposed"], NO_BOOLS, "expected True or False, got "),
    ],
    ("grouped_mlp", ValueError): [
        (["x"], [(H,), (1, T, H)], "got {value}"),
        (["activation_scales", "bias_scales"], [(T + 1,), (T - 1,), (T, 1), (1,), ()], "got {value}"),
        (["gate_up_proj"], [(2 * I, H), (E, 2 * I - 1, H), (E, 2 * I, H + 1), (0, 2 * I, H), (1025, 2 * I, H)], "got "),
        (["down_proj"], [(H, I), (E + 1, H, I), (E, H, I + 1), (E, H + 1, I), (E, I, H)], "got {value}"),
        (["gate_up_proj_bias"], [(2 * I,), (E, I), (E + 1, 2 * I)], "got {value}"),
        (["down_proj_bias"], [(H,), (E, I), (E + 1, H)], "got {value}"),
        (["splits", *MLP[2:]], [META], "expected on .* like x, got meta"),
        (["splits"], [(E + 2,), (E - 1,), (1, E)], r"shape \(G \+ 1,\) offsets or \(G,\) sizes = \(4,\), got {value}"),
        (["splits"], [[1, 1, 1, 1, 1], [2, T, 0, 0], [2, -1, 3, 0]], "expected .*sizes"),
        (["bias_scales"], [{"gate_up_proj_bias": None, "down_proj_bias": None}], "expected None without"),
        (["gated"], [{**NOT_GATED, "interleaved": True}], "expected True .*, got False"),
        (["activation"], ["mish"], "expected one of .*, got 'mish'"),
    ],
    ("grouped_mlp", TypeError): [
        (MLP[1:], [1.0, [1.0]], "expected a tensor, got {type}$"),
        (MLP[1:], [torch.int64], "got {value}$"),
        (MLP[4:], [torch.float16], "expected torch.float32 like x, got {value}$"),
        (["splits"], [torch.float32, torch.int16], "expected torch.int32 or torch.int64, got {value}$"),
        (["splits"], [None, [2.0, 3.0, 1.0, 0.0]], "expected "),
        (FLAGS, NO_BOOLS, "expected True or False, got "),
    ],
    ("route", ValueError): [
        (["top_k_index"], [(4,), (4, 0)], r"expected shape \(T, top_k\) with top_k > 0, got {value}"),
        (["num_experts"], [0, -1, 1025], "expected 1 to 1024 experts, got {value}$"),
    ],
    ("route", TypeError): [
        (["top_k_index"], [torch.float32], "expected torch.int32 or torch.int64, got {value}"),
        (["top_k_index"], [[[0, 1]]], "expected a tensor, got list"),
        (["num_experts"], ["4"], "expected an int, got str"),
        (["num_experts"], [True], "expected an int, got bool"),
    ],
    ("gather_rows", ValueError): [
        (["x"], [(T,), (T + 1, H)], r"expected shape \(T, H\) = \(6, \?\), got {value}"),
        (["x"], [META], "expected on .* like routing, got meta"),
        (["routing.top_k > routing"], [0, 5], "expected top_k to divide 12 slots, got {value}"),
        (["routing.row_to_slot"], [(11,)], "got {value}"),
        (["routing.slot_to_row"], [(), (3, 4)], r"shape \(S,\), got {value}"),
        (["routing.expert_offsets"], [(0,), (1,)], r"shape \(E \+ 1,\).*got {value}"),
        (["routing.expert_offsets"], [META], ""),
    ],
    ("gather_rows", TypeError): [
        (["x"], [torch.int32], "expected one of .*, got torch.int32"),
        (["x"], [[1.0]], "expected a tensor, got list"),
        (["routing"], [None, (1, 2)], "expected a Routing, got {type}$"),
        (["routing.row_to_slot", "routing.slot_to_row"], [torch.float32], "expected torch.int32 .*got torch.float32"),
        (["routing.top_k"], [2.0, None, True], "expected an int, got {type}$"),
    ],
    ("combine_rows", ValueError): [
        (["y"], [(12,), (11, H)], r"expected shape \(S, H\) = \(12, \?\), got {value}"),
        (["top_k_weights"], [(12,), (2, 6)], r"\(T, top_k\) = \(6, 2\), got {value}"),
        (["y", "top_k_weights"], [META], "expected on .* like routing, got meta"),
    ],
    ("combine_rows", TypeError): [
        (["y", "top_k_weights"], [torch.int64], "expected one of .*, got torch.int64"),
        (["y", "top_k_weights"], [None, 1.0], "expected a tensor, got {type}"),
        (["routing"], [None, (1, 2)], "expected a Routing, got {type}$"),
    ],
}  # fmt: skip
ALL = [
    (*key, name, value, message)
    for key, rows in BAD.items() for names, values, message in rows for name in names for value in values
]  # fmt: skip
ALL += [
    pytest.param("grouped_mm_experts", TypeError, name, torch.float64, "expected one of .*", marks=pytest.mark.gpu)
    for name in ("hidden_states", "top_k_weights")
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("op, error, name, value, message", ALL)
def test_bad_input(grouped_moe, device, op, error, name, value, message):
    """With biases and, where they do not matter, without: plain blocks have checks of their own."""
    changed, *named = name.split(" > ")
    changes = value if isinstance(value, dict) else {changed: value}
    message = message.format(value=re.escape(str(value)), type=type(value).__name__)
    for without in ((), ("gate_up_proj_bias", "down_proj_bias", "bias", "bias_scales")):
        given = {key: each for key, each in arguments(grouped_moe, op, device).items() if key not in without}
        if changes.keys().isdisjoint(without) or not without:
            for key, each in changes.items():
                key, _, field = key.partition(".")
                if field:
                    each = replace(given[key], **{field: change(getattr(given[key], field), each, grouped_moe)})
                given[key] = change(given.get(key), each, grouped_moe)
            raises(error, f"^{(named or [changed])[0]}: .*{message}", getattr(grouped_moe, op), **given)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("op, names", [("grouped_mm_experts", NAMES), ("grouped_linear", ["x", "weight", "bias"])])
def test_not_a_tensor_under_autocast(grouped_moe, device, op, names):
    for name in names:
        given = {**arguments(grouped_moe, op, device), name: [1.0]}
        message = f"^{name}: expected a tensor, got list$"
        with pytest.raises(TypeError, match=message), torch.autocast(device, torch.bfloat16):
            getattr(grouped_moe, op)(**given)


def test_options_are_keyword_only(grouped_moe, device):
    given = arguments(grouped_moe, "grouped_mm_experts", device)
    raises(TypeError, "positional", grouped_moe.grouped_mm_experts, *[given[name] for name in NAMES[:5]], None)


def test_too_many_slots_or_rows(grouped_moe, device):
    ids = torch.zeros(1, dtype=torch.int32, device=device).expand(2**24 - 1, 128)
    raises(ValueError, "^top_k_index: expected at most 2147483519 slots, got 2147483520", grouped_moe.route, ids, 4)
    given = arguments(grouped_moe, "grouped_linear", device)
    given["x"] = given["x"][:1].expand(2**31 - 128, -1)
    raises(ValueError, "^x: expected at most 2147483519 rows, got 2147483520", grouped_moe.grouped_linear, **given)
