"""Expert parallelism on ranks: expert_parallel.py, _models.py and _lora.py have the checks that they run."""

import importlib.util
import sys

import pytest
import ranks
import torch

pytest.importorskip("transformers.distributed.expert_parallel", reason="needs a transformers with EPImplementation")

MODULES = ["expert_parallel", "expert_parallel_models"]
MODULES += ["expert_parallel_lora"] if importlib.util.find_spec("peft") else []


@pytest.mark.slow
@pytest.mark.parametrize(
    "device, size", [("cpu", 2), ("cpu", 4), *(pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (2, 4))]
)
def test_ranks_compute_what_one_process_computes(device, size):
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    ranks.start(device, size, *MODULES)


NAME = "of these tests"  # so that no other test's limits change


@pytest.mark.parametrize("given, error, message", [
    ({"name": "all_to_all"}, ValueError, "name: expected .* transformers does not use itself, got 'all_to_all'"),
    ({"ep_max_tokens": 2.0}, TypeError, "ep_max_tokens: expected an int or None, got float"),
    ({"ep_max_tokens": True}, TypeError, "ep_max_tokens: expected an int or None, got bool"),
    ({"ep_max_tokens": 0}, ValueError, "ep_max_tokens: expected above 0, got 0"),
    ({"ep_max_tokens": 2**63}, ValueError, "ep_max_tokens: expected at most 2147483519, got 9223372036854775808"),
    ({"ep_capacity_factor": "1"}, TypeError, "ep_capacity_factor: expected a float or None, got str"),
    ({"ep_capacity_factor": 0.0}, ValueError, "ep_capacity_factor: expected above 0 and finite, got 0.0"),
    ({"ep_capacity_factor": float("nan")}, ValueError, "ep_capacity_factor: expected above 0 and finite, got nan"),
])  # fmt: skip
def test_names_and_limits_that_are_refused(grouped_moe, given, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        grouped_moe.register_experts_implementation(**{"name": NAME, **given})


def test_older_transformers_has_no_place_for_it(grouped_moe, monkeypatch):
    """The experts register all the same; limits are an error there."""
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    assert grouped_moe.register_experts_implementation(NAME) == NAME
    with pytest.raises(ImportError, match="expected transformers 5.23 or later for ep_max_tokens"):
        grouped_moe.register_experts_implementation(NAME, ep_max_tokens=8)


@pytest.mark.parametrize(
    "factor, tokens, top_k, size, places",
    [(None, 7, 2, 4, 7), (None, 0, 2, 4, 1), (1.0, 64, 8, 64, 8), (1.25, 4096, 8, 256, 160), (2.0, 64, 8, 4, 64),
     (1e-9, 64, 8, 4, 1), (1e-9, 2**20, 8, 4, 16), (0.1, 10, 1, 1, 1), (0.35, 10, 1, 1, 4)],
)  # fmt: skip
def test_places(module, factor, tokens, top_k, size, places):
    limits = module("integrations.transformers_ep").Limits(None, factor)
    assert limits.capacity_of(tokens, top_k, size) == places
