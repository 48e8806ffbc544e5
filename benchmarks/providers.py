"""The experts block of every provider, on one module's weights, and their common reference.

Each provider takes the parameters of transformers' experts module as they lie (as views), so that all compute on the
same weights and nothing is converted. A peer that cannot be had is absent, with the reason.
"""

import math
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import torch
from timing import Call
from torch import Tensor
from workload import Cell, Inputs, Layer

Function = Callable[[Inputs], Tensor]

OURS, RECOMPUTE, GROUPED = "ours", "ours, recompute", "grouped_mm"
BATCHED, SONICMOE, DENSE = "batched_mm", "SonicMoE", "dense"
# Relative error in norm of a result against fp32. A lost row or term is far above.
MAX_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
FEW_ROWS = 256
EXPERTS_AT_A_TIME = 16  # of the reference in fp32
SONICMOE_ON_HUB = {"repo_id": "kernels-community/sonic-moe", "revision": "ep-support"}


class Unsupported(Exception):
    """What a provider cannot do, which is why it is absent from a cell."""


class Block(NamedTuple):
    """A layer's weights, in the experts module of transformers."""

    layer: Layer
    module: torch.nn.Module
    device: str

    @property
    def weights(self) -> Tuple[Tensor, ...]:
        """gate_up_proj, or up_proj without a gate, down_proj and, of gpt-oss, their biases."""
        up = "gate_up_proj" if self.layer.gated else "up_proj"
        names = (up, "down_proj", "gate_up_proj_bias", "down_proj_bias")
        return tuple(getattr(self.module, name) for name in names[: 4 if self.layer.gpt_oss else 2])

    @property
    def kind(self) -> dict:
        """Arguments of the package's experts block that say whether there is a gate and how the weights lie."""
        lies = {"transposed": True, "interleaved": True} if self.layer.gpt_oss else {}
        return lies if self.layer.gated else {**lies, "gated": False}

    @property
    def gate(self) -> dict:
        """The parameters of the activation."""
        clamp = {"alpha": self.module.alpha, "limit": self.module.limit, "up_offset": 1.0} if self.layer.gpt_oss else {}
        return {"name": self.layer.activation, **clamp}


def make_module(layer: Layer) -> torch.nn.Module:
    """transformers' experts module without weights."""
    if layer.gpt_oss:
        from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        config = GptOssConfig(
            num_local_experts=layer.experts, hidden_size=layer.hidden, intermediate_size=layer.intermediate
        )
        with torch.device("meta"):
            return GptOssExperts(config)
    act_fn = {"gelu_tanh": "gelu_pytorch_tanh"}.get(layer.activation, layer.activation)
    sizes = {"hidden_size": layer.hidden, "moe_intermediate_size": layer.intermediate}
    if not layer.gated:
        from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

        config = NemotronHConfig(n_routed_experts=layer.experts, mlp_hidden_act=act_fn, **sizes)
        with torch.device("meta"):
            return NemotronHExperts(config)
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(num_experts=layer.experts, hidden_act=act_fn, **sizes)
    with torch.device("meta"):
        return Qwen3MoeExperts(config)


def make_block(layer: Layer, device: str, dtype: torch.dtype = torch.bfloat16) -> Block:
    """Weights divided by the root of their fan-in, biases a tenth of unit scale."""
    module = make_module(layer)
    fan_in = {"gate_up_proj": layer.hidden, "up_proj": layer.hidden, "down_proj": layer.intermediate}
    for name, parameter in list(module.named_parameters()):
        scale = 1 / math.sqrt(fan_in[name]) if name in fan_in else 0.1
        weight = torch.randn(parameter.shape, device=device, dtype=dtype).mul_(scale)
        setattr(module, name, torch.nn.Parameter(weight))
    return Block(layer, module, device)


def make_ours(kernel: ModuleType, block: Block, recompute: bool = False) -> Function:
    """This package."""
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    arguments = {**dict(zip(names, block.weights)), **block.kind, "recompute": recompute}
    arguments["activation"] = kernel.Activation(**block.gate)
    return lambda s: kernel.grouped_mm_experts(s.x, s.ids, s.weights, **arguments)


def make_sonicmoe(sonic: ModuleType, block: Block) -> Function:
    """The Hub's build of SonicMoE, called as transformers calls it. It knows sentinels."""
    layer, (up, down) = block.layer, block.weights
    up, down = up.permute(1, 2, 0), down.permute(1, 2, 0)

    def forward(s: Inputs) -> Tensor:
        tokens = torch.arange(s.x.shape[0], device=s.x.device, dtype=torch.int32)
        out, _ = sonic.moe_general_routing_inputs(
            s.x, s.weights.reshape(-1), tokens.repeat_interleave(layer.top_k, output_size=s.ids.numel()),
            s.ids.reshape(-1).int(), up, None, down, None, E=layer.experts, stream_id=None,
            activation_type=sonic.enums.ActivationType.SWIGLU,
            is_inference_mode_enabled=not torch.is_grad_enabled(), concat_layout=True,
        )  # fmt: skip
        return out

    return forward


def show_to_workers(module: ModuleType, folder: str) -> None:
    """Lets processes that this one starts import a kernel of the Hub by name, which is not on Python's path.

    SonicMoE's tuner compiles in such processes. Where they cannot import it, it compiles one variant after the other.
    """
    name = module.__name__.partition(".")[0]
    (Path(folder) / name).symlink_to(Path(module.__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


class Providers:
    """Makes the functions of a cell's providers. kernels: our builds by the name that they have as a provider."""

    def __init__(self, kernels: Dict[str, ModuleType]) -> None:
        self.kernels = kernels
        self.sonicmoe: object = None
        self.links = tempfile.TemporaryDirectory()

    def load_sonicmoe(self) -> ModuleType:
        """From the Hub or LOCAL_KERNELS; tried once."""
        import kernels

        if self.sonicmoe is None:
            try:
                self.sonicmoe = kernels.get_kernel(**SONICMOE_ON_HUB, trust_remote_code=True)
                show_to_workers(self.sonicmoe, self.links.name)
            except Exception as error:  # of the network, the kernel or what it imports
                self.sonicmoe = error
        if isinstance(self.sonicmoe, Exception):
            raise self.sonicmoe
        return self.sonicmoe

    def make(self, name: str, block: Block, cell: Cell) -> Function:
        """The function of a provider; raises where it can't do the cell."""
        if hasattr(block.module, "_is_expert_parallel"):
            block.module._is_expert_parallel = cell.local < 1
        if name in self.kernels or name == RECOMPUTE:
            return make_ours(self.kernels.get(name) or self.kernels[OURS], block, name == RECOMPUTE)
        if name in (GROUPED, BATCHED):
            from transformers.integrations import moe

            function = getattr(moe, f"{name}_experts_forward")
            return lambda s: function(block.module, s.x, s.ids, s.weights)
        if block.device == "cpu":
            raise Unsupported("needs a GPU")
        if not block.layer.gated:
            raise Unsupported("no experts without a gate")
        if block.layer.gpt_oss:
            raise Unsupported("no clamped SwiGLU")
        return make_sonicmoe(self.load_sonicmoe(), block)


def make_call(function: Function, block: Block, sets: List[Inputs], backward: bool) -> Call:
    """call(i) on input set i: (out,) without a graph, or (out, gradients of x, routing weights and all weights)."""

    def forward(i: int) -> Sequence[Tensor]:
        with torch.no_grad():
            return (function(sets[i % len(sets)]),)

    def step(i: int) -> Sequence[Tensor]:
        s = sets[i % len(sets)]
        out = function(s)
        return (out, *torch.autograd.grad(out, (s.x, s.weights, *block.weights), s.dout))

    return step if backward else forward


def expected(kernel: ModuleType, block: Block, cell: Cell, inputs: Inputs) -> List[Tensor]:
    """The results of a call in fp32, by a loop over experts, a few at a time."""
    x, scales = (t.detach().float().requires_grad_(cell.backward) for t in (inputs.x, inputs.weights))
    totals: List[Tensor] = []
    parts: List[List[Tensor]] = []
    for first in range(0, block.layer.experts, EXPERTS_AT_A_TIME):
        some = [w.detach()[first : first + EXPERTS_AT_A_TIME].float() for w in block.weights]
        leaves = [x, scales, *(w.requires_grad_(cell.backward) for w in some)]
        out = kernel.reference.grouped_mm_experts(x, inputs.ids - first, scales, *some, **block.kind, **block.gate)
        results = [out.detach()]
        if cell.backward and out.requires_grad:  # else none of these experts has a row
            results += torch.autograd.grad(out, leaves, inputs.dout.float())
        elif cell.backward:
            results += [torch.zeros_like(leaf) for leaf in leaves]
        shared = results[:3]
        totals = [a + b for a, b in zip(totals, shared)] if totals else shared
        parts.append(results[3:])
    return [*totals, *(torch.cat(column) for column in zip(*parts))]


def check(results: Sequence[Tensor], wanted: List[Tensor], inputs: Inputs) -> Tuple[Dict[str, float], bool]:
    """||got - want|| / ||want|| for the output and each gradient, absolute where want is 0, and whether all are small.

    With few rows, the gradient of a routing weight is an inner product that may cancel: reported, not judged.
    """
    names = ("out", "d_hidden_states", "d_top_k_weights", "d_gate_up_proj", "d_down_proj", "d_up_bias", "d_down_bias")
    errors = {}
    for name, got, want in zip(names, results, wanted):
        errors[name] = (got.float() - want).norm().item() / (want.norm().item() or 1.0)
    few, most = int(inputs.weights.count_nonzero()) < FEW_ROWS, MAX_ERROR[inputs.x.dtype]
    return errors, all(error < most for name, error in errors.items() if not (few and name == "d_top_k_weights"))


def dense_products(block: Block, rows: List[int], backward: bool) -> Call:
    """The products of a call as plain matrix products over all its rows at once, with one weight for all.

    rows: of each input set.
    """
    h, i, width = block.layer.hidden, block.layer.intermediate, block.layer.preact_width
    options = {"device": block.device, "dtype": block.weights[0].dtype}
    up, down = torch.randn((width, h), **options), torch.randn((h, i), **options)
    x, p, a = (torch.randn((max(rows), columns), **options) for columns in (h, width, i))

    def call(n: int) -> Sequence[Tensor]:
        rows_x, rows_p, rows_a = (t[: rows[n % len(rows)]] for t in (x, p, a))
        forward = rows_x @ up.t(), rows_a @ down.t()
        if not backward:
            return forward
        return (*forward, rows_x @ down, rows_p @ up, rows_p.t() @ rows_x, rows_x.t() @ rows_a)

    return call
