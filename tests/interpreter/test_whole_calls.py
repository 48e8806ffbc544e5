"""What kernels get from public functions and hooks: tensors of other strides, and buffers of callers."""

import pytest
import torch
from poison import LAYOUTS


def test_routing_of_any_strides(grouped_moe):
    """Maps that are columns of a tensor, with other numbers between."""
    routing = grouped_moe.route(torch.tensor([[1, 0], [2, 1], [0, -1], [1, 0]]), 2)
    maps = routing.expert_offsets, routing.row_to_slot, routing.slot_to_row
    strided = grouped_moe.Routing(*(torch.stack([part, part + 1000], 1)[:, 0] for part in maps), routing.top_k)
    x, weights = torch.randn(4, 16), torch.rand(4, 2)
    rows = grouped_moe.gather_rows(x, routing)
    assert torch.equal(grouped_moe.gather_rows(x, strided), rows)
    out = grouped_moe.combine_rows(rows, weights, routing)
    assert torch.equal(grouped_moe.combine_rows(rows, weights, strided), out)


@pytest.mark.parametrize("op", ["gather_rows", "combine_rows", "grouped_linear", "exchange"])
def test_saved_tensors_of_other_strides(grouped_moe, exchange, op):
    """As hooks with a pool of memory may give them back."""
    x, weights, ids = torch.randn(9, 16), torch.rand(9, 2), torch.randint(0, 4, (9, 2))
    adapters, lora = torch.randint(-1, 2, (9,)), [torch.randn(2, 4, 3, 16), torch.randn(2, 4, 24, 3)]
    routing = grouped_moe.route(ids, 4)

    def linear(x, weight, a, b):
        sizes = torch.tensor([2, 3, 0, 4])
        return grouped_moe.grouped_linear(x, weight, sizes, lora=grouped_moe.LoRA(a, b), adapter_index=adapters)

    def there_and_back(x, weights):
        arrived = exchange.dispatch(x, weights, ids, 4, 1, 12, None)
        return exchange.combine(arrived.x * arrived.weights.sum(1, keepdim=True), arrived.plan, None)

    function, given = {
        "gather_rows": (lambda x: grouped_moe.gather_rows(x, routing), [x]),
        "combine_rows": (lambda y, w: grouped_moe.combine_rows(y, w, routing), [torch.randn(18, 16), weights]),
        "grouped_linear": (linear, [x, torch.randn(4, 24, 16), *lora]),
        "exchange": (there_and_back, [x, weights]),
    }[op]
    leaves, results = [tensor.requires_grad_() for tensor in given], []
    for pack in (lambda tensor: LAYOUTS["columns-apart"](tensor.detach()), torch.detach):
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = function(*leaves)
        dout = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append(torch.autograd.grad(out, leaves, dout))
    torch.testing.assert_close(*results)


def test_buffers_count_as_modified(grouped_moe):
    """Autograd sees that kernels write to what a caller gave."""
    dbias, dscales = torch.zeros(2, 16), torch.zeros(8)
    inputs = torch.randn(8, 16), torch.rand(8), torch.randn(2, 16), torch.tensor([3, 5])
    grouped_moe.grouped_dbias_dscales(*inputs, dbias=dbias, dscales=dscales)
    assert dbias._version > 0 and dscales._version > 0
