"""Expert parallelism on gloo ranks: expert_parallel.py and expert_parallel_models.py have the checks that they run."""

import pytest
import ranks

pytest.importorskip("transformers.distributed.expert_parallel", reason="needs a transformers with EPImplementation")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_process_computes(size):
    errors = ranks.start(size, "expert_parallel", "expert_parallel_models")
    said = [f"{check}, rank {rank}: {e}" for check, found in errors.items() for rank, e in enumerate(found) if e]
    assert errors and not said, "\n".join(said)
