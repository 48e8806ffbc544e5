"""Expert parallelism in transformers: how `DistributedConfig(ep_implementation=...)` brings tokens to their experts."""

from __future__ import annotations  # PyTorch may be built without torch.distributed

from typing import Mapping, NamedTuple, NoReturn, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .. import exchange
from ..common import _compat
from ..common.autograd import refuse_forward_mode
from ..common.checks import MAX_SLOTS, check_choices, check_count, wrong_shape
from ..common.numbers import as_fraction
from ..operands import LoRA
from ..places import TOO_MANY
from .peft import take

FORMAT = 2  # of what ranks send to each other
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # by the numbers that ranks compare


def _place_of(dtype: torch.dtype) -> int:
    """In DTYPES, or behind all of them."""
    return DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)


class Limits(NamedTuple):
    """What the user says about tokens. max_tokens: of a call on any rank. capacity_factor: see `capacity_of`."""

    max_tokens: Optional[int]
    capacity_factor: Optional[float]

    def check(self) -> None:
        """Raises TypeError or ValueError that names the argument of `register_experts_implementation` at fault."""
        most, factor = self
        check_count("ep_max_tokens", most)
        if most is not None and most > MAX_SLOTS:
            raise ValueError(f"ep_max_tokens: expected at most {MAX_SLOTS}, got {most}")
        if factor is not None and (not isinstance(factor, (int, float)) or isinstance(factor, bool)):
            raise TypeError(f"ep_capacity_factor: expected a float or None, got {type(factor).__name__}")
        if factor is not None and not 0 < factor < float("inf"):
            raise ValueError(f"ep_capacity_factor: expected above 0 and finite, got {factor}")

    def capacity_of(self, tokens: int, top_k: int, ranks: int) -> int:
        """Places for each pair of ranks, where no rank has more tokens; tokens may be symbolic.

        Without a capacity_factor there is one for each token. With it there are so many times those that are filled if
        each token goes to min(top_k, ranks) ranks and all ranks get equally many.
        """
        if self.capacity_factor is None:
            return max(1, tokens)
        numerator, denominator = as_fraction(min(self.capacity_factor, ranks))
        places, of_tokens = numerator * min(top_k, ranks), denominator * ranks
        if places >= of_tokens:
            return max(1, tokens)
        return max(1, -(-tokens * places // of_tokens))


class FixedSizeExchange:
    """What transformers' EPImplementation leaves open; `register_ep` adds it as the base class and sets the limits.

    The limits may change later, on all ranks at the same call: before it they compare them.
    The experts module gets `ep_loras`, by which low-rank pairs of the experts of all ranks are handed over for a call.
    Their gradient is the mean over the batches that the ranks have, the same on all, as if it had been averaged.
    With a capacity_factor it gets `ep_dropped_slots`, () int64 on its device: how many slots of this rank's tokens were
    dropped up to now. A forward that is recomputed counts them again.
    """

    limits: Limits

    def __init__(self, experts: torch.nn.Module, ep_mesh: dist.DeviceMesh, tp_mesh: dist.DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.agreed_rows = set()
        experts.ep_loras = {}
        self._agree_on_limits()

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: (T, H), this rank's. top_k_index, top_k_weights: (T, top_k), ids of all ranks. Returns (T, H).

        Ranks of a tp_mesh have the same tokens, of which each takes its part. Raises TypeError or ValueError that names
        the argument, also for more tokens than ep_max_tokens, and RuntimeError where ranks would have to compare
        numbers under torch.compile or CUDA graph capture.
        """
        if hidden_states.dim() != 2:
            raise wrong_shape("hidden_states", hidden_states, (None, None), "(T, H)")
        check_choices(hidden_states, top_k_index, top_k_weights)
        refuse_forward_mode("grouped_moe", hidden_states, top_k_weights)
        sharing, num_tokens = self.tp_mesh.size(), hidden_states.shape[0]
        if self.agreed != self.limits:
            self._agree_on_limits()
        if self.limits.max_tokens is not None and num_tokens > self.limits.max_tokens:
            self._refuse(hidden_states, top_k_index, top_k_weights)
        if sharing == 1:
            return self._exchange(hidden_states, top_k_index, top_k_weights)
        more, group = -num_tokens % sharing, self.tp_mesh.get_group()
        x, weights = (F.pad(whole, (0, 0, 0, more)) for whole in (hidden_states, top_k_weights))
        ids = F.pad(top_k_index, (0, 0, 0, more), value=-1)
        out = self._exchange(*(exchange.OwnPart.apply(whole, group, 1) for whole in (x, ids, weights)))
        return exchange.AllParts.apply(out, group)[:num_tokens]

    def _agree_on_limits(self) -> None:
        """Raises ValueError on all ranks of the expert group unless they have the same ones."""
        factor = self.limits.capacity_factor
        numerator, denominator = (0, 1) if factor is None else as_fraction(min(factor, 1e6))
        same = {
            "format of grouped_moe's exchange": FORMAT,
            "experts of a rank": self.num_local_experts,
            "ep_max_tokens": self.limits.max_tokens or 0,
            "numerator of ep_capacity_factor": numerator,
            "denominator of ep_capacity_factor": denominator,
        }
        self._check_eager("after a change of the limits")
        exchange.agree(same, self.ep_mesh.get_group(), self.ep_mesh.device_type)
        self.agreed = self.limits
        if self.limits.capacity_factor is not None and getattr(self.experts, "ep_dropped_slots", None) is None:
            # Not at the first count, which a CUDA graph may capture, and so set to 0 at each replay.
            with torch.inference_mode(False):
                zero = torch.zeros((), dtype=torch.int64, device=self.ep_mesh.device_type)
                self.experts.ep_dropped_slots = zero

    def _is_eager(self) -> bool:
        """Whether the host can wait for other ranks."""
        if torch.compiler.is_compiling():
            return False
        return self.ep_mesh.device_type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def _check_eager(self, when: str) -> None:
        """Raises RuntimeError where the host cannot wait for other ranks."""
        if not self._is_eager():
            raise RuntimeError(
                f"ep_max_tokens: {when} ranks compare their numbers, for which the host waits, so that the call cannot "
                "be in torch.compile or CUDA graph capture"
            )

    def _exchange(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """(T, H), of this rank's part of the tokens."""
        group = self.ep_mesh.get_group()
        sizes = self.num_local_experts, self.ep_mesh.size(), self._capacity(x, ids, weights)
        arrived = exchange.dispatch(x, weights, ids, *sizes, group)
        if self.limits.capacity_factor is not None:
            self.experts.ep_dropped_slots.add_(arrived.plan.dropped.sum())
        if self.limits.max_tokens is not None and _compat.has_device_assertions():
            message = "ep_max_tokens: another rank of the expert group has more tokens, and says how many"
            _compat.assert_on_device(arrived.fits, message)
        loras = {name: self._own(take(given)) for name, given in self.experts.ep_loras.items()}
        rows = self.experts_forward(arrived.x, arrived.ids, arrived.weights, **loras)
        if torch.is_grad_enabled() and not rows.requires_grad:
            rows = self._in_graph(rows, arrived.x)
        return exchange.combine(rows, arrived.plan, group)

    def _in_graph(self, rows: Tensor, x: Tensor) -> Tensor:
        """The same rows, with a gradient to hand on if anything is trained.

        Eager experts without a row give an output without a graph, but other ranks wait for this one's backward.
        """
        for tensor in (x, *self.experts.parameters()):
            if tensor.requires_grad:
                return rows + tensor.reshape(-1)[:0].sum()
        return rows

    def _own(self, lora: LoRA) -> LoRA:
        """The pairs of this rank's experts."""
        group, batches = self.ep_mesh.get_group(), self.ep_mesh.size() // self.tp_mesh.size()
        a, b = (exchange.OwnPart.apply(factor, group, batches) for factor in (lora.a, lora.b))
        return LoRA(a, b, lora.scaling)

    def _capacity(self, x: Tensor, ids: Tensor, weights: Tensor) -> int:
        """The same on all ranks of the expert group."""
        tokens, top_k = ids.shape
        if self.shares_batch:  # as many tokens on each rank
            pass
        elif self.limits.max_tokens is not None:
            tokens = -(-self.limits.max_tokens // self.tp_mesh.size())
            row = x.shape[1], x.dtype, top_k, weights.dtype
            if not torch.compiler.is_compiling() and row not in self.agreed_rows and self._is_eager():
                self._agree_on_row(x, top_k, weights)
                self.agreed_rows.add(row)
        else:
            self._check_eager("without it")
            tokens = self._agree_on_row(x, top_k, weights, tokens)
        return self.limits.capacity_of(tokens, top_k, self.ep_mesh.size())

    def _agree_on_row(self, x: Tensor, top_k: int, weights: Tensor, tokens: int = 0) -> int:
        """The most tokens of any rank. Raises ValueError on all ranks unless their rows have the same parts."""
        same = {
            "hidden size": x.shape[1], "top_k": top_k, f"dtype of hidden states, of {DTYPES}": _place_of(x.dtype),
            f"dtype of routing weights, of {DTYPES}": _place_of(weights.dtype),
        }  # fmt: skip
        return exchange.agree(same, self.ep_mesh.get_group(), self.ep_mesh.device_type, tokens)

    def _refuse(self, x: Tensor, ids: Tensor, weights: Tensor) -> NoReturn:
        """Tells the other ranks, which wait for this one's tokens, that it has too many, and raises ValueError."""
        most = self.limits.max_tokens
        sizes = self.num_local_experts, self.ep_mesh.size(), self._capacity(x, ids, weights)
        with torch.no_grad():
            none = x[:0], weights[:0], ids[:0]
            exchange.dispatch(*none, *sizes, self.ep_mesh.get_group(), TOO_MANY)
        raise ValueError(f"hidden_states: expected at most ep_max_tokens = {most} tokens, got {x.shape[0]}")


def ep_implementations() -> Mapping[str, type]:
    """transformers' own and those that were registered, by name; none before transformers 5.23."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        return {}
    return EPImplementationInterface()


def register_ep(name: str, limits: Limits) -> None:
    """Registers the exchange with transformers under this name; if it is there already, changes its limits.

    Raises ImportError for limits where transformers has no place for the exchange; without limits nothing is done.
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError as error:
        if limits == Limits(None, None):
            return
        raise ImportError(
            "register_experts_implementation: expected transformers 5.23 or later for ep_max_tokens and "
            "ep_capacity_factor"
        ) from error
    known = EPImplementationInterface().get(name)
    if isinstance(known, type) and issubclass(known, FixedSizeExchange):
        known.limits = limits  # for models that are there, too
        return
    namespace = {"limits": limits, "__module__": __name__, "__doc__": FixedSizeExchange.__doc__}
    EPImplementationInterface.register(name, type("GroupedMoeEP", (FixedSizeExchange, EPImplementation), namespace))
