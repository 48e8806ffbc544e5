"""What every expert-parallel rank computes is what one process computes: checks that `ranks` runs."""

import sys
from functools import lru_cache, partial
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist
from cases import kept
from compare import assert_close, assert_same
from machine import load_kernel
from poison import poisoned_allocations
from ranks import device
from timing import graph_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as size
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

grouped_moe = load_kernel()
exchange = sys.modules[f"{grouped_moe.__name__}.exchange"]

E, H, INNER, TOP_K, MOST = 8, 32, 16, 3, 12  # experts of all ranks; MOST: tokens of a rank
OURS, WITH_MOST, SMALL, PROMISED = "grouped_moe", "with ep_max_tokens", "with ep_capacity_factor", "with capacity"
PLAN = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm", "experts": "ep_dispatch_experts"}
WEIGHTS = ("gate_up_proj", "down_proj")


@lru_cache(maxsize=None)
def meshes_of_their_own() -> Sequence[DeviceMesh]:
    """Of EP and TP, for ranks with batches of their own."""
    mesh = init_device_mesh(device(), (size(), 1), mesh_dim_names=("ep", "tp"))
    return mesh["ep"], mesh["tp"]


def prepare() -> None:
    grouped_moe.register_experts_implementation(OURS)
    grouped_moe.register_experts_implementation(WITH_MOST, ep_max_tokens=MOST)
    grouped_moe.register_experts_implementation(SMALL, ep_max_tokens=MOST, ep_capacity_factor=0.5)
    grouped_moe.register_experts_implementation(PROMISED, ep_max_tokens=MOST, capacity=0.75)


class Batch(NamedTuple):
    """What a rank has: hidden states, ids over all ranks, routing weights, the output's gradient."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dout: Tensor


def make_weights(dtype: torch.dtype = torch.float32) -> List[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (E, 2 * INNER, H), (E, H, INNER)
    return [(torch.randn(shape, generator=generator) / shape[2] ** 0.5).to(device(), dtype) for shape in shapes]


def make_batches(
    tokens: Sequence[int], ids: Optional[Tensor] = None, dtype: torch.dtype = torch.float32
) -> List[Batch]:
    """The batch of each rank, alike on all of them. ids: one row for all tokens; drawn without."""
    generator, batches = torch.Generator().manual_seed(2), []
    for count in tokens:
        x, dout = (torch.randn((count, H), generator=generator).to(dtype) for _ in range(2))
        chosen = torch.rand((count, E), generator=generator).topk(TOP_K).indices
        weights = torch.rand((count, TOP_K), generator=generator) + 0.1
        batch = x, chosen if ids is None else ids.repeat(count, 1), weights, dout
        batches.append(Batch(*(tensor.to(device()) for tensor in batch)))
    return batches


def make_module(name: str, meshes: Sequence[DeviceMesh] = (), dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """This rank's experts of a Qwen3-MoE, reached by the EPImplementation of that name. meshes: of EP and TP."""
    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=INNER, num_experts=E)
    config._experts_implementation = name if name in (WITH_MOST, SMALL, PROMISED) else OURS
    root = torch.nn.Module()
    root.experts = Qwen3MoeExperts(config).to(device(), dtype)
    for weight, value in zip(WEIGHTS, make_weights(dtype)):
        getattr(root.experts, weight).data.copy_(value)
    apply_expert_parallelism(root, *(meshes or meshes_of_their_own()), PLAN, name)
    return root.experts


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(experts: torch.nn.Module, batch: Batch, dynamic: bool = False) -> Dict[str, Tensor]:
    """The output and the gradients by name; those of weights, unless they are frozen, of the rank's own experts.

    dynamic: for torch.compile the number of tokens may change.
    """
    x, weights = batch.x.detach().requires_grad_(), batch.weights.detach().requires_grad_()
    for tensor in (x, weights, batch.ids) if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    out = experts(x, batch.ids, weights)
    leaves = {"x": x, "weights": weights, **{name: getattr(experts, name) for name in WEIGHTS}}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(out, list(leaves.values()), batch.dout)
    return {"out": out.detach(), **dict(zip(leaves, map(local, grads)))}


def expected(batches: Sequence[Batch], mine: int, weights: Sequence[Tensor] = ()) -> Dict[str, Tensor]:
    """In fp64, by one process: of the tokens of all ranks the gradients of weights, of rank `mine` the rest."""
    weights = [weight.double().requires_grad_() for weight in weights or make_weights(batches[0].x.dtype)]
    grads = [torch.zeros_like(weight) for weight in weights]
    for place, batch in enumerate(batches):
        leaves = batch.x.double().requires_grad_(), batch.weights.double().requires_grad_()
        out = grouped_moe.reference.grouped_mm_experts(leaves[0], batch.ids, leaves[1], *weights) + 0 * leaves[0]
        found = torch.autograd.grad(out, (*leaves, *weights), batch.dout.double(), allow_unused=True)
        found = [torch.zeros_like(t) if f is None else f for f, t in zip(found, (*leaves, *weights))]
        grads = [total + more for total, more in zip(grads, found[2:])]
        if place == mine:
            own_part = dict(zip(("out", "x", "weights"), (out.detach(), *found[:2])))
    here = slice(rank() * E // size(), (rank() + 1) * E // size())
    return {**own_part, **{name: grad[here] for name, grad in zip(WEIGHTS, grads)}}


def compare(what: str, got: Dict[str, Tensor], want: Dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    for name, value in got.items():
        assert_close(f"{what}, {name}", value, want[name], dtype, inner_products=name == "weights")


UNEVEN = [12, 5, 9, 1]
CASES: Dict[str, tuple] = {
    "even": ([8] * 4, None),
    "uneven": (UNEVEN, None),
    "a rank without tokens": ([7, 0, 3, 0], None),
    "no tokens": ([0] * 4, None),
    "one expert": (UNEVEN, torch.tensor([5, 5, 5])),
    "one rank": (UNEVEN, torch.tensor([1, 0, 1])),
    "sentinels": (UNEVEN, torch.tensor([-1, 6, E])),
    "sentinels alone": (UNEVEN, torch.tensor([E, -5, 2**40])),
}


def check_batches_of_their_own():
    for name in (OURS, WITH_MOST, PROMISED, "all_to_all"):
        experts = make_module(name)
        for case, (tokens, ids) in CASES.items():
            if name == "all_to_all" and case.startswith("sentinels"):  # transformers' own takes none
                continue
            batches = make_batches(tokens[: size()], ids)
            with poisoned_allocations():
                got = run(experts, batches[rank()])
            compare(f"{name}, {case}", got, expected(batches, rank()))
            if name != "all_to_all":
                assert_same(run(experts, batches[rank()]), got, f"{name}, {case}, ")


def check_shared_batches():
    """Ranks that all have the same tokens, which they can share evenly or not; on four ranks pairs that do."""
    together = init_device_mesh(device(), (size(),), mesh_dim_names=("tp",))
    for name in (OURS, WITH_MOST, "all_reduce", "all_to_all"):
        experts = make_module(name, (together, together))
        for tokens in (8, 7, 1, 0):
            batches = make_batches([tokens])
            compare(f"{name}, {tokens} tokens", run(experts, batches[0]), expected(batches, 0))
        if name in (OURS, WITH_MOST):  # transformers' own outputs cannot be changed in place
            x = make_batches([7])[0].x.requires_grad_()
            experts(x, *make_batches([7])[0][1:3]).add_(1).sum().backward()
    if size() == 4:
        pairs = init_device_mesh(device(), (2, 2), mesh_dim_names=("dp", "tp"))
        for name in (OURS, WITH_MOST, "all_to_all"):
            experts, batches = make_module(name, (meshes_of_their_own()[0], pairs["tp"])), make_batches([7, 4])
            compare(f"{name}, pairs", run(experts, batches[rank() // 2]), expected(batches, rank() // 2))


def check_what_is_dropped():
    capacity = -(-MOST * min(TOP_K, size()) // (2 * size()))
    experts, batches = make_module(SMALL), make_batches([12, 5, 9, 0][: size()])
    batches = [batch._replace(ids=kept(batch.ids, E, size(), capacity)) for batch in batches]
    given = make_batches([12, 5, 9, 0][: size()])[rank()]
    dropped = int((batches[rank()].ids == E).sum())
    assert rank() or dropped
    for times in (1, 2):
        compare("what is kept", run(experts, given), expected(batches, rank()))
        assert experts.ep_dropped_slots.item() == times * dropped
    count = experts.ep_dropped_slots
    for most in (MOST + 1, MOST):
        grouped_moe.register_experts_implementation(SMALL, ep_max_tokens=most, ep_capacity_factor=0.5)
        run(experts, given)
        assert experts.ep_dropped_slots is count, "other limits end the count"


def check_what_is_compared():
    """With ep_max_tokens nothing after the first call: the host would wait. Without it the tokens of each call."""
    usual, calls = exchange.agree, []
    exchange.agree = lambda *args: calls.append(args) or usual(*args)
    for name, times in ((WITH_MOST, 1), (OURS, 2)):
        experts, batch = make_module(name), make_batches(UNEVEN[: size()])[rank()]
        calls.clear()
        run(experts, batch)
        run(experts, batch)
        assert len(calls) == times, name
    exchange.agree = usual


def raised(kind: type, call: Callable) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def check_too_many_tokens():
    """An error on every rank, in every call, and the next call is right. (On GPUs it is an assertion of the device.)"""
    experts, tokens = make_module(WITH_MOST), [MOST + 1, 5, 9, 1][: size()]
    for _ in range(2):
        call = partial(run, experts, make_batches(tokens)[rank()])
        if rank() == 0:
            assert raised(ValueError, call).endswith(f"at most ep_max_tokens = {MOST} tokens, got {MOST + 1}")
        else:
            assert "ep_max_tokens: another rank of the expert group has more" in raised(RuntimeError, call)
        batches = make_batches(UNEVEN[: size()])
        compare("after the error", run(experts, batches[rank()]), expected(batches, rank()))


check_too_many_tokens.devices = ("cpu",)


def check_ranks_that_disagree():
    """What differs is named on every rank."""
    grouped_moe.register_experts_implementation(WITH_MOST, ep_max_tokens=MOST + rank())
    message = (
        f"ep_max_tokens: expected the same on all ranks {list(range(size()))}, got from {MOST} to {MOST + size() - 1}"
    )
    assert raised(ValueError, lambda: make_module(WITH_MOST)) == message
    tiny = None if rank() else 1e-9
    grouped_moe.register_experts_implementation(WITH_MOST, ep_max_tokens=MOST, ep_capacity_factor=tiny)
    assert "ep_capacity_factor: expected the same" in raised(ValueError, lambda: make_module(WITH_MOST))
    grouped_moe.register_experts_implementation(WITH_MOST, ep_max_tokens=MOST)
    shim = sys.modules[f"{grouped_moe.__name__}.integrations.transformers_ep"]
    shim.FORMAT += rank()
    assert "format of grouped_moe's exchange" in raised(ValueError, lambda: make_module(WITH_MOST))
    shim.FORMAT -= rank()
    batch, columns = make_batches([4])[0], H if rank() else H - 1
    for name in (OURS, WITH_MOST):
        experts = make_module(name)
        assert "hidden size" in raised(ValueError, lambda: experts(batch.x[:, :columns], batch.ids, batch.weights))
        x = batch.x.to(torch.float16 if rank() else torch.bfloat16)
        assert "dtype of hidden states" in raised(ValueError, lambda: experts(x, batch.ids, batch.weights))


def check_limits_that_change():
    """For a module that is there: other limits, and again the first ones."""
    experts, batches = make_module(WITH_MOST), make_batches([MOST + 5, 1, 0, 3][: size()])
    grouped_moe.register_experts_implementation(WITH_MOST, ep_max_tokens=MOST + 5)
    compare("more tokens", run(experts, batches[rank()]), expected(batches, rank()))
    grouped_moe.register_experts_implementation(WITH_MOST, ep_max_tokens=MOST + rank())
    assert "ep_max_tokens: expected the same" in raised(ValueError, partial(run, experts, batches[rank()]))
    grouped_moe.register_experts_implementation(WITH_MOST, ep_max_tokens=MOST)
    batches = make_batches(UNEVEN[: size()])
    compare("as before", run(experts, batches[rank()]), expected(batches, rank()))


def check_dtypes():
    """bf16 with fp32 routing weights; fp64 on CPUs; int32 ids; hidden states that autograd does not record."""
    for dtype in (torch.bfloat16, torch.float64)[: 2 if device() == "cpu" else 1]:
        batches = make_batches(UNEVEN[: size()], dtype=dtype)
        mine = batches[rank()]._replace(ids=batches[rank()].ids.int())
        got = run(make_module(OURS, dtype=dtype), mine)
        assert (got["out"].dtype, got["weights"].dtype) == (dtype, torch.float32)
        compare(str(dtype), got, expected(batches, rank()), dtype if dtype == torch.bfloat16 else torch.float32)


def check_only_what_is_asked_for():
    experts, batches = make_module(WITH_MOST), make_batches(UNEVEN[: size()])
    batch, want = batches[rank()], expected(batches, rank())
    x, weights = batch.x.clone().requires_grad_(), batch.weights.clone().requires_grad_()
    with torch.inference_mode():
        assert_close("inference", experts(batch.x, batch.ids, batch.weights), want["out"], torch.float32)
    experts.requires_grad_(False)
    for leaf, other, right in ((x, batch.weights, want["x"]), (weights, batch.x, want["weights"])):
        args = (x, batch.ids, other) if leaf is x else (other, batch.ids, weights)
        (grad,) = torch.autograd.grad(experts(*args), leaf, batch.dout)
        assert_close("one gradient", grad, right, torch.float32, inner_products=leaf is weights)
    assert not experts(batch.x, batch.ids, batch.weights).requires_grad


def check_rows_of_any_width():
    """Hidden states whose rows do not end where the next part may start, in memory that begins within a word."""
    for columns, dtype in ((1, torch.bfloat16), (32, torch.bfloat16), (31, torch.bfloat16), (5, torch.float32)):
        batch = make_batches([6])[0]
        x = torch.empty(6 * columns + 1, dtype=dtype, device=device())[1:].view(6, columns).copy_(batch.x[:, :columns])
        there = exchange.dispatch(x, batch.weights, batch.ids, E // size(), size(), 6, dist.group.WORLD)
        mine = batch.ids - rank() * E // size()
        mine = torch.where((mine >= 0) & (mine < E // size()), mine, E // size())
        here = (mine < E // size()).any(1).nonzero().flatten()
        for sender in range(size()):
            part = slice(sender * 6, sender * 6 + len(here))
            assert torch.equal(there.x[part], x[here]) and torch.equal(there.weights[part], batch.weights[here])
            assert torch.equal(there.ids[part], mine[here])
            assert (there.ids[part.stop : (sender + 1) * 6] == E // size()).all()


def check_fp8():
    """FP8 experts, whose scales are split with them."""
    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=INNER, num_experts=E)
    config._experts_implementation = OURS
    scaled = [grouped_moe.quantize_blocks(weight, (16, 16)) for weight in make_weights()]
    fp8_class = use_experts_implementation(experts_class=FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    for name in (WITH_MOST, "all_to_all"):
        root, plan = torch.nn.Module(), {**PLAN, **{f"{each}_scale_inv": "grouped_gemm" for each in list(PLAN)[:2]}}
        root.experts = fp8_class(config, block_size=(16, 16))
        for weight, value in zip(WEIGHTS, scaled):
            setattr(root.experts, weight, torch.nn.Parameter(value.data, requires_grad=False))
            setattr(root.experts, f"{weight}_scale_inv", torch.nn.Parameter(value.scale_inv, requires_grad=False))
        apply_expert_parallelism(root, *meshes_of_their_own(), plan, name)
        batches = make_batches(UNEVEN[: size()])
        want = expected(batches, rank(), [value.dequantize(torch.float64) for value in scaled])
        got = run(root.experts, batches[rank()])
        compare(f"FP8, {name}", got, want)


def check_compile():
    """Fullgraph, forward and backward, one compilation for all numbers of tokens: the bits of eager mode.

    Where capacity is short as much is dropped. Without ep_max_tokens only a batch that ranks share is compiled.
    """
    shared = 2 * (init_device_mesh(device(), (size(),), mesh_dim_names=("tp",)),)
    for name, meshes in ((WITH_MOST, ()), (OURS, shared), (SMALL, ()), (SMALL, shared)):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        eager, experts = (make_module(name, meshes) for _ in range(2))
        experts.forward = torch.compile(experts.forward, fullgraph=True, backend=counter)
        for tokens in ([12, 5, 9, 2], [6, 9, 5, 12], [9, 7, 6, 5]):
            batch = make_batches(tokens[: size()])[0 if meshes else rank()]
            assert_same(run(experts, batch, dynamic=True), run(eager, batch), f"{name}, {tokens}, ")
        assert counter.frame_count == 1
        if name == SMALL:
            assert torch.equal(experts.ep_dropped_slots, eager.ep_dropped_slots) and eager.ep_dropped_slots > 0
    torch.compiler.reset()
    experts = make_module(OURS)
    experts.forward = torch.compile(experts.forward, fullgraph=True, backend="eager")
    assert "without it ranks compare their numbers" in raised(Exception, partial(run, experts, batch))


check_compile.sizes = (2,)


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


def check_graphs():
    """A captured step gives for other tokens and routings, bit by bit, what an eager one gives."""
    experts = make_module(WITH_MOST)
    static = make_batches([9] * size())[rank()]
    step = partial(run, experts, static)
    graph, found = graph_of(step)
    for ids in (None, torch.tensor([-1, 6, E]), torch.tensor([5, 5, 5])):
        batch = make_batches([9] * size(), ids)[-1 - rank()]
        for tensor, value in zip(static, batch):
            tensor.copy_(value)
        graph.replay()
        assert_same(found, step(), "replay, ")


check_graphs.devices = ("cuda",)


def check_strict_determinism():
    torch.use_deterministic_algorithms(True)
    batches = make_batches(UNEVEN[: size()])
    compare("deterministic", run(make_module(OURS), batches[rank()]), expected(batches, rank()))
    torch.use_deterministic_algorithms(False)
