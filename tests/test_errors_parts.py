"""Bad input of route, grouped_linear, gather_rows and combine_rows; see test_errors.py."""

import dataclasses

import pytest
import torch
from test_errors import raises

ROWS, G, N, K = 10, 3, 8, 4


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "ids, experts, error, message",
    [
        (torch.zeros(4, dtype=torch.int64), 4, ValueError, r"top_k_index: expected shape \(T, top_k\).*got \(4,\)"),
        (torch.zeros(4, 0, dtype=torch.int64), 4, ValueError, r"top_k_index: .*top_k > 0, got \(4, 0\)"),
        (torch.zeros(4, 2), 4, TypeError, "top_k_index: expected torch.int32 or torch.int64, got torch.float32"),
        (torch.zeros(4, 2, dtype=torch.int64), 0, ValueError, "num_experts: expected 1 to 1024 experts, got 0"),
        (torch.zeros(4, 2, dtype=torch.int64), -1, ValueError, "num_experts: expected 1 to 1024 experts, got -1"),
        (torch.zeros(4, 2, dtype=torch.int64), 1025, ValueError, "num_experts: expected 1 to 1024 experts, got 1025"),
        ([[0, 1]], 4, TypeError, "top_k_index: expected a tensor, got list"),
        (torch.zeros(4, 2, dtype=torch.int64), "4", TypeError, "num_experts: expected an int, got str"),
    ],
    ids=["rank", "top-0", "float", "no-experts", "negative", "1025-experts", "list", "text"],
)
def test_route(grouped_moe, device, ids, experts, error, message):
    ids = ids.to(device) if isinstance(ids, torch.Tensor) else ids
    raises(error, f"^{message}", grouped_moe.route, ids, experts)


def test_route_too_many_slots(grouped_moe, device):
    ids = torch.zeros(1, dtype=torch.int32, device=device).expand(2**24 - 1, 128)
    raises(ValueError, "^top_k_index: expected at most 2147483519 slots, got 2147483520", grouped_moe.route, ids, 4)


def linear_arguments(device):
    """Valid arguments of grouped_linear by name."""
    return {
        "x": torch.randn(ROWS, K, device=device),
        "weight": torch.randn(G, N, K, device=device),
        "splits": torch.tensor([0, 2, 5, 9], device=device),
        "bias": torch.randn(G, N, device=device),
    }


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("x", (K,), r"x: expected shape \(rows, K\) = \(\?, \?\), got \(4,\)"),
        ("x", (ROWS, K + 1), r"weight: expected shape \(G, N, K\) = \(\?, \?, 5\), got \(3, 8, 4\)"),
        ("weight", (N,), r"weight: expected shape \(G, N, K\) = \(\?, \?, 4\), got \(8,\)"),
        ("weight", (), r"weight: expected shape \(G, N, K\) = \(\?, \?, 4\), got \(\)"),
        ("weight", (N, K), r"weight: expected shape \(G, N, K\) = \(\?, \?, 4\), got \(8, 4\)"),
        ("weight", (G, K, N), r"weight: expected shape \(G, N, K\) = \(\?, \?, 4\), got \(3, 4, 8\)"),
        ("weight", (0, N, K), "weight: expected 1 to 1024 groups, got 0"),
        ("weight", (1025, N, K), "weight: expected 1 to 1024 groups, got 1025"),
        ("splits", (G + 2,), r"splits: expected shape \(G,\) sizes or \(G \+ 1,\) offsets = \(3\), got \(5,\)"),
        ("splits", (G + 1, 1), r"splits: expected shape \(G,\) sizes or .* = \(3\), got \(4, 1\)"),
        ("bias", (N,), r"bias: expected shape \(G, N\) = \(3, 8\), got \(8,\)"),
        ("bias", (G, K), r"bias: expected shape \(G, N\) = \(3, 8\), got \(3, 4\)"),
    ],
)
def test_grouped_linear_shape(grouped_moe, device, name, shape, message):
    given = linear_arguments(device)
    given[name] = torch.zeros(shape, dtype=given[name].dtype, device=device)
    raises(ValueError, f"^{message}", grouped_moe.grouped_linear, **given)


def test_grouped_linear_shape_transposed(grouped_moe, device):
    message = r"^weight: expected shape \(G, K, N\) = \(\?, 4, \?\), got \(3, 8, 4\)"
    raises(ValueError, message, grouped_moe.grouped_linear, **linear_arguments(device), transposed=True)


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_grouped_linear_not_a_tensor(grouped_moe, device, name):
    given = {**linear_arguments(device), name: [1.0]}
    raises(TypeError, f"^{name}: expected a tensor, got list$", grouped_moe.grouped_linear, **given)
    with pytest.raises(TypeError, match=f"^{name}: expected a tensor"), torch.autocast(device, torch.bfloat16):
        grouped_moe.grouped_linear(**given)


@pytest.mark.parametrize(
    "name, dtype, message",
    [
        ("x", torch.int64, "x: expected one of .*, got torch.int64"),
        ("weight", torch.float16, "weight: expected torch.float32 like x, got torch.float16"),
        ("bias", torch.bfloat16, "bias: expected torch.float32 like x, got torch.bfloat16"),
        ("splits", torch.float32, "splits: expected torch.int32 or torch.int64, got torch.float32"),
        ("splits", torch.bool, "splits: expected torch.int32 or torch.int64, got torch.bool"),
    ],
)
def test_grouped_linear_dtype(grouped_moe, device, name, dtype, message):
    given = linear_arguments(device)
    given[name] = given[name].to(dtype)
    raises(TypeError, f"^{message}$", grouped_moe.grouped_linear, **given)


@pytest.mark.parametrize("name", ["x", "weight", "splits", "bias"])
def test_grouped_linear_device(grouped_moe, device, name):
    given = linear_arguments(device)
    given[name] = given[name].to("meta")
    message = f"^{name}: expected on {device}.* like x, got meta"
    if name == "x":
        message = f"^weight: expected on meta like x, got {device}"
    raises(ValueError, message, grouped_moe.grouped_linear, **given)


@pytest.fixture
def routing(grouped_moe, device):
    """T = 5, top_k = 2, E = 3."""
    return grouped_moe.route(torch.zeros(5, 2, dtype=torch.int64, device=device), 3)


@pytest.mark.parametrize(
    "x, error, message",
    [
        (torch.zeros(5), ValueError, r"x: expected shape \(T, H\) = \(5, \?\), got \(5,\)"),
        (torch.zeros(6, 4), ValueError, r"x: expected shape \(T, H\) = \(5, \?\), got \(6, 4\)"),
        (torch.zeros(5, 4, dtype=torch.int32), TypeError, "x: expected one of .*, got torch.int32"),
        (torch.zeros(5, 4, device="meta"), ValueError, "x: expected on .* like routing, got meta"),
        ([1.0], TypeError, "x: expected a tensor, got list"),
    ],
    ids=["rank", "tokens", "dtype", "device", "list"],
)
def test_gather_rows(grouped_moe, device, routing, x, error, message):
    x = x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
    raises(error, f"^{message}", grouped_moe.gather_rows, x, routing)


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("y", torch.zeros(10), ValueError, r"y: expected shape \(S, H\) = \(10, \?\), got \(10,\)"),
        ("y", torch.zeros(9, 4), ValueError, r"y: expected shape \(S, H\) = \(10, \?\), got \(9, 4\)"),
        ("y", torch.zeros(10, 4).long(), TypeError, "y: expected one of .*, got torch.int64"),
        ("y", torch.zeros(10, 4, device="meta"), ValueError, "y: expected on .* like routing, got meta"),
        ("y", None, TypeError, "y: expected a tensor, got NoneType"),
        ("top_k_weights", torch.ones(10), ValueError, r"top_k_weights: .*\(T, top_k\) = \(5, 2\), got \(10,\)"),
        ("top_k_weights", torch.ones(2, 5), ValueError, r"top_k_weights: .*\(T, top_k\) = \(5, 2\), got \(2, 5\)"),
        ("top_k_weights", torch.ones(5, 2).int(), TypeError, "top_k_weights: expected one of .*, got torch.int32"),
        ("top_k_weights", torch.ones(5, 2, device="meta"), ValueError, "top_k_weights: expected on .*, got meta"),
        ("top_k_weights", 1.0, TypeError, "top_k_weights: expected a tensor, got float"),
    ],
)
def test_combine_rows(grouped_moe, device, routing, name, value, error, message):
    given = {"y": torch.zeros(10, 4, device=device), "top_k_weights": torch.ones(5, 2, device=device)}
    given[name] = value.to(device) if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value
    raises(error, f"^{message}", grouped_moe.combine_rows, **given, routing=routing)


@pytest.mark.parametrize("value", [None, (1, 2)], ids=["none", "tuple"])
def test_routing_of_another_type(grouped_moe, device, value):
    message = f"^routing: expected a Routing, got {type(value).__name__}$"
    raises(TypeError, message, grouped_moe.gather_rows, torch.zeros(5, 4, device=device), value)
    weights = torch.ones(5, 2, device=device)
    raises(TypeError, message, grouped_moe.combine_rows, torch.zeros(10, 4, device=device), weights, value)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"top_k": 0}, ValueError, "routing: expected top_k to divide 10 slots, got 0"),
        ({"top_k": 3}, ValueError, "routing: expected top_k to divide 10 slots, got 3"),
        ({"row_to_slot": torch.zeros(9, dtype=torch.int32)}, ValueError, r"routing.row_to_slot: .*got \(9,\)"),
        ({"row_to_slot": torch.zeros(10)}, TypeError, "routing.row_to_slot: expected torch.int32 .*got torch.float32"),
        ({"expert_offsets": torch.zeros(4, dtype=torch.int32, device="meta")}, ValueError, "routing.expert_offsets: "),
    ],
    ids=["no-top-k", "top-k", "rows", "dtype", "device"],
)
def test_routing_form(grouped_moe, device, routing, changes, error, message):
    moved = {k: v.to(device) if torch.is_tensor(v) and v.device.type == "cpu" else v for k, v in changes.items()}
    made_by_hand = dataclasses.replace(routing, **moved)
    raises(error, f"^{message}", grouped_moe.gather_rows, torch.zeros(5, 4, device=device), made_by_hand)
