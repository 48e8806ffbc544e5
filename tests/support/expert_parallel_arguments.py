"""What the exchange between ranks is called with, and compiled with: checks that `ranks` runs."""

from functools import partial

import torch
from expert_parallel import SMALL, WITH_MOST, assert_same_bits, make_batches, make_module, prepare, raised, run
from ranks import device
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as size
from torch.distributed.device_mesh import init_device_mesh

__all__ = ["prepare"]


def check_compile_with_a_capacity_factor():
    """Fullgraph, with batches of their own and with one that ranks share: as in eager mode, and as much is dropped."""
    together = init_device_mesh(device(), (size(),), mesh_dim_names=("tp",))
    for meshes in ((), 2 * (together,)):
        torch.compiler.reset()
        eager, experts = make_module(SMALL, meshes), make_module(SMALL, meshes)
        experts.forward = torch.compile(experts.forward, fullgraph=True, backend="aot_eager")
        for tokens in (12, 5, 9):
            batch = make_batches([tokens] * size())[0 if meshes else rank()]
            assert_same_bits(f"{tokens} tokens", run(experts, batch, dynamic=True), run(eager, batch))
        assert torch.equal(experts.ep_dropped_slots, eager.ep_dropped_slots) and eager.ep_dropped_slots > 0
    torch.compiler.reset()


check_compile_with_a_capacity_factor.sizes = (2,)


def check_arguments_that_do_not_fit():
    """An error that names one, before anything is sent."""
    x, ids, weights, _ = make_batches([6])[0]
    wrong = {"hidden_states": (x[0], ids, weights), "top_k_index": (torch.cat((x, x)), ids, weights)}
    wrong["top_k_weights"] = x, ids[:, :1], weights
    for name in (WITH_MOST, SMALL):
        experts = make_module(name)
        for argument, given in wrong.items():
            assert raised(ValueError, partial(experts, *given)).startswith(f"{argument}: expected shape (T, ")
        assert raised(TypeError, partial(experts, x, weights, ids)).startswith("top_k_index: expected torch.int32 or ")
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            call = partial(experts, dual, ids, weights)
            assert "no forward-mode differentiation" in raised(NotImplementedError, call)
