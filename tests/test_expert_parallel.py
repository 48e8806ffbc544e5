"""Expert parallelism on groups of gloo ranks; what they check is in expert_parallel.py."""

import pytest
import ranks

pytest.importorskip("transformers.distributed.expert_parallel", reason="needs a transformers with EPImplementation")


@pytest.mark.parametrize("module, size", [("expert_parallel", 2), ("expert_parallel", 4)])
def test_ranks(module, size):
    """All checks of a module."""
    errors = ranks.start(module, [size], timeout=300)[str(size)]
    said = [f"{check}, rank {rank}: {e}" for check, found in errors.items() for rank, e in enumerate(found) if e]
    assert errors and not said, "\n".join(said)
