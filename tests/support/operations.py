"""Small calls of every differentiable op, for tests of what holds for all of them; and who watches what they call."""

from functools import partial
from typing import Callable, Dict, List, NamedTuple, Set, Tuple

import mlps
import torch
from block import call, count_routed, make
from pairs import Pairs, factors, make_index, make_lora, make_loras, with_factors
from poison import LAYOUTS
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

SIZES = (5, 0, 12)  # rows of each group of the linear layer; there are more


class Operation(NamedTuple):
    """function(*leaves) is the output, whose cotangent is dout."""

    function: Callable[..., Tensor]
    leaves: Dict[str, Tensor]
    dout: Tensor

    def step(self, retain_graph: bool = False) -> Dict[str, Tensor]:
        """The output, and the gradients of leaves that require one."""
        wanted = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        out = self.function(*self.leaves.values())
        grads = torch.autograd.grad(out, list(wanted.values()), self.dout, retain_graph=retain_graph) if wanted else ()
        return {"out": out.detach(), **dict(zip(wanted, grads))}


def _linear(transposed, pairs, package, device):
    shapes = {"x": (24, 16), "weight": (3, 16, 8) if transposed else (3, 8, 16), "bias": (3, 8), "bias_scales": (24,)}
    leaves = {name: torch.randn(shape).to(device) for name, shape in shapes.items()}
    sizes, arguments = torch.tensor(SIZES, device=device), {}
    if pairs is not None:
        sizes[-1] += 24 - sum(SIZES)  # what is projected of rows of no group would stay unwritten
        arguments["lora"] = make_lora(package, pairs, leaves["weight"], transposed, 0.7, torch.float32)
        arguments["adapter_index"] = make_index(pairs.adapters, 24).to(device) if pairs.adapters else None

    def function(x, weight, bias, scales, *named):
        loras = with_factors(arguments, dict(zip(factors(arguments), named)))
        return package.grouped_linear(x, weight, sizes, bias, scales, transposed=transposed, **loras)

    return function, {**leaves, **factors(arguments)}


def _experts(case_id, recompute, pairs, package, device):
    """With recompute also with sentinels, with a capacity without room for them, and weights of other strides."""
    case, inputs = make(case_id, device, recompute=recompute, sentinels=0.3 if recompute else 0.0)
    capacity = count_routed(case, inputs) if recompute else None
    strided = {key: LAYOUTS["transposed"](tensor) for key, tensor in inputs.floating().items() if tensor.dim() == 3}
    leaves = {**inputs.floating(), **(strided if recompute else {})}
    arguments = {} if pairs is None else make_loras(package, case, inputs, pairs)
    named = factors(arguments)

    def function(*tensors):
        given, loras = dict(zip(leaves, tensors)), dict(zip(named, tensors[len(leaves) :]))
        return call(package, case, inputs._replace(**given), capacity=capacity, **with_factors(arguments, loras))

    return function, {**leaves, **named}


def _mlp(recompute, package, device):
    mlp = mlps.BY_MLP["no-tail"]
    inputs = mlp.make(torch.float32, device)
    leaves = inputs.given()

    def function(*tensors):
        given, splits = inputs.replace(**dict(zip(leaves, tensors))), package.GroupOffsets(inputs.offsets)
        return mlp.call(package, given, splits, recompute=recompute)

    return function, leaves


def _parts(package, device):
    ids = torch.tensor([[0, 1], [1, -1], [2, 1]], device=device)
    shapes = {"x": (3, 4), "y": (6, 4), "top_k_weights": (3, 2)}
    leaves = {name: torch.randn(shape).to(device) for name, shape in shapes.items()}

    def function(x, y, weights):
        routing = package.route(ids, 3)
        return package.combine_rows(package.gather_rows(x, routing) + y, weights, routing)

    return function, leaves


# Every row has a group or an expert where a result would else be unwritten in part: some tests compare all of it.
PAIRS = {"lora": Pairs(rank=5), "adapters": Pairs(rank=4, given=("gate_up_lora",), shared="a", adapters=2)}
OPERATIONS = {"linear": partial(_linear, False, None), "linear-transposed": partial(_linear, True, None)}
OPERATIONS.update({f"linear-{name}": partial(_linear, False, pairs) for name, pairs in PAIRS.items()}, parts=_parts)
for recompute, suffix in ((False, ""), (True, "-recompute")):
    OPERATIONS[f"mlp{suffix}"] = partial(_mlp, recompute)
    for case_id in ("silu-bias", "gpt-oss", "relu2-not-gated"):
        OPERATIONS[f"experts-{case_id}{suffix}"] = partial(_experts, case_id, recompute, None)
    for name, pairs in PAIRS.items():
        OPERATIONS[f"experts-{name}{suffix}"] = partial(_experts, "silu", recompute, pairs)
# The ops that the work of an operation is made of, which a dispatch mode sees, and those that a compiler sees instead.
MADE_OF = {
    "linear": {"grouped_linear_forward", "grouped_linear_backward", "grouped_linear_bias_backward"},
    "mlp": {"experts_forward", "experts_backward"},
    "experts": {"experts_forward", "experts_backward"},
    "parts": {"route", "gather_rows_forward", "combine_rows_forward", "combine_rows_backward"},
}
SEEN = {kind: {op.partition("_forward")[0] for op in ops if "_forward" in op} for kind, ops in MADE_OF.items()}


def kind_of(name: str) -> str:
    """What kind of operation that is."""
    return name.partition("-")[0]


def make_operation(package, name: str, device: str, only: str = "") -> Operation:
    """only: the one leaf that requires a gradient; if empty, all do."""
    function, tensors = OPERATIONS[name](package, device)
    leaves = {key: tensor.detach().requires_grad_(only in ("", key)) for key, tensor in tensors.items()}
    out = function(*tensors.values())
    return Operation(function, leaves, torch.randn(out.shape).to(out))


def count_flops(function: Callable) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def record(function: Callable[[], Tensor]) -> Tuple[Tensor, List[Tensor]]:
    """(what the function returns, what is saved for its backward)."""
    saved: List[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.detach()) or saved[-1], lambda t: t):
        return function(), saved


class Log(TorchDispatchMode):
    """Within it the package's ops that do the work are noted in `calls`, each with copies of its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    @property
    def names(self) -> Set[str]:
        """Those that were called, whether they overwrite what was saved or not."""
        return {op.overloadpacket.__name__.replace("_overwriting", "") for op, _ in self.calls}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "grouped_moe" in func.namespace:
            self.calls.append((func, tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), args)))
        return func(*args, **(kwargs or {}))


class RecordedLog(TorchFunctionMode):
    """As `Log`, of the differentiable ops that compilers see, where autograd records them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        recorded = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        if recorded and "grouped_moe" in getattr(func, "namespace", ""):
            copies = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), args)
            self.calls.append((func, copies))
        return func(*args, **(kwargs or {}))
