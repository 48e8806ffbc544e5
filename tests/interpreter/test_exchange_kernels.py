"""Kernels of the exchange against the CPU's backend."""

import pytest
import torch
from compare import assert_bitwise
from poison import guarded, turned

# tokens, top_k, experts of a rank, ranks, capacity, hidden. With a top_k of 20 a chunk has 128 tokens, and places are
# filled up 128 at a time: 300 take more than two, of which the last one has a rest. With one of 2100 it has 2 of 17.
CASES = [
    (6, 3, 2, 4, 6, 40), (0, 3, 2, 4, 2, 8), (9, 1, 1, 3, 4, 35), (5, 8, 3, 5, 2, 1), (1, 2, 4, 1, 3, 64),
    (300, 20, 2, 3, 100, 2), (3, 2, 1, 2, 3, 2100), (2, 20, 70, 2, 300, 3), (17, 2100, 1, 1, 5, 4),
]  # fmt: skip


@pytest.mark.parametrize("ids_dtype, weights_dtype", [(torch.int64, torch.float32), (torch.int32, torch.float16)])
@pytest.mark.parametrize("tokens, top_k, num_local, ranks, capacity, hidden", CASES)
def test_exchange(module, kernels, tokens, top_k, num_local, ranks, capacity, hidden, ids_dtype, weights_dtype):
    """Plan, rows that travel, what is read of them, and the gradients' ways back."""
    plain = module("backends.torch")
    row = module("packed").PackedRow(hidden, torch.float16, top_k, weights_dtype)
    ids = torch.randint(-1, num_local * ranks + 1, (tokens, top_k), dtype=ids_dtype)
    ids[::5, 0], ids[1::5, -1] = torch.iinfo(ids_dtype).max, torch.iinfo(ids_dtype).min
    x = guarded(torch.randn(tokens, hidden + 1).half())[:, :hidden]
    weights = torch.rand(tokens, top_k).to(weights_dtype)
    sizes = num_local, ranks, capacity
    plan = kernels.plan_exchange(ids, *sizes)
    rows = kernels.pack_rows(x, weights, ids, plan[0], num_local, capacity, num_local)
    received = kernels.unpack_rows(rows, row, capacity, -1)
    placed, taken = kernels.place_rows(turned(x), plan[0]), kernels.take_slots(received[0], plan[1])
    source, places, dropped = plain.plan_exchange(ids, *sizes)
    for name, got, want in zip(("source", "places", "dropped"), plan, (source, places, dropped)):
        assert_bitwise(name, got, want)
    packed = plain.pack_rows(x, weights, ids, source, num_local, capacity, num_local)
    for got, want in zip(row.parts(rows), row.parts(packed)):
        assert_bitwise("packed", got, want)
    for got, want in zip(received, plain.unpack_rows(packed, row, capacity, -1)):
        assert_bitwise("received", got, want)
    assert_bitwise("placed", placed, plain.place_rows(x, source))
    assert_bitwise("taken", taken, plain.take_slots(received[0], places))


def test_refusal(module, kernels):
    """A rank without room says so in all of its places, and any rank's are seen."""
    row, none = module("packed").PackedRow(8, torch.float32, 2, torch.float32), torch.zeros(0, 2, dtype=torch.int64)
    rows = torch.zeros((700 * 3, row.words), dtype=torch.int64)
    source = kernels.plan_exchange(none, 4, 2, 3)[0]
    refused = kernels.pack_rows(torch.zeros(0, 8), torch.zeros(0, 2), none, source, 4, 3, -1)
    assert kernels.unpack_rows(rows, row, 3, -1)[2] == 1
    for rank in (0, 511, 512, 699):
        some = rows.clone()
        some[rank * 3 : rank * 3 + 3] = refused[3:]
        assert kernels.unpack_rows(some, row, 3, -1)[2] == 0
