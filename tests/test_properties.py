"""Properties over random shapes and routings. In a file of its own: only this one needs hypothesis."""

import pytest
import torch
from block import assert_same, check, run
from cases import Case, make_inputs
from poison import poison_sentinels, poisoned_allocations
from test_routing import assert_routed

# The Hub's quick run (-m kernels_ci) imports every file and has no hypothesis; nothing in this file is marked for it.
hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

ids_of = st.sampled_from([-(2**63), -(2**31), -1, 2**31 - 1, 2**32, 2**63 - 1]) | st.integers(-2, 12)
activations = st.sampled_from(["silu", "gelu", "gelu_tanh", "relu2"])
extents = st.integers(1, 40)


def bounded(max_examples):
    """The same examples in every run."""
    checks = [hypothesis.HealthCheck.function_scoped_fixture]
    return hypothesis.settings(derandomize=True, deadline=None, max_examples=max_examples, suppress_health_check=checks)


@bounded(150)
@hypothesis.given(data=st.data(), tokens=st.integers(0, 50), top_k=st.integers(1, 6), experts=st.integers(1, 12))
def test_route(grouped_moe, device, data, tokens, top_k, experts):
    slots = data.draw(st.lists(ids_of, min_size=tokens * top_k, max_size=tokens * top_k))
    assert_routed(grouped_moe, torch.tensor(slots, dtype=torch.int64, device=device).view(tokens, top_k), experts)


@bounded(80)
@hypothesis.given(data=st.data(), seed=st.integers(0, 2**16), H=extents, I=extents, name=activations)
def test_experts(grouped_moe, device, data, seed, H, I, name):  # noqa: E741
    """Any shape and routing: the reference's result, bit-identical with and without poison."""
    flags = data.draw(st.lists(st.booleans(), min_size=4, max_size=4))
    gated, interleaved, transposed, recompute = flags
    shape = [data.draw(st.integers(low, high)) for low, high in ((0, 40), (1, 5), (1, 9))]
    bias = data.draw(st.sampled_from(["", "both"] if gated else ["", "both", "up", "down"]))
    share = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    case = Case(
        "property", *shape, H, I, gated=gated, interleaved=interleaved and gated, transposed=transposed, bias=bias,
        activation=(name, 1.0, None, 0.0), recompute=recompute, sentinels=share,
    )  # fmt: skip
    torch.manual_seed(seed)
    inputs = make_inputs(case, torch.float64 if device == "cpu" else torch.float32, device)
    got = check(grouped_moe, case, inputs)
    with poisoned_allocations():
        assert_same(run(grouped_moe, case, poison_sentinels(inputs, case.E)), got)
