"""The grouped linear layer as a module, with Megatron-LM's main_grad and delayed weight gradients."""

import copy
import math
import operator
import weakref
from collections import deque
from itertools import compress, repeat
from typing import Any, Callable, Deque, Dict, Iterable, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..block_scaled import BlockScaled, Weight
from ..common import _compat, checks
from ..common.autograd import is_plain, refuse_forward_mode
from ..grouped_linear import grouped_linear, run_bias_backward
from ..operands import LoRA
from ..splits import Splits, as_splits
from . import frozen
from .main_grad import Delayed, Later, MainGrad, Wanted, WgradTap, accumulate, check_leaves, main_grads_of, mark_added
from .packing import Pack, as_one, for_pickle, stack, watch
from .parameters import FLAGS, check_arguments, fit_checkpoint

_MAX_DELAYED = 64  # microbatches: more than a pipeline has in flight


class GroupedLinear(nn.Module):
    """One linear layer per group of consecutive rows, in one GEMM launch: y[r] = x[r] W_g^T + b_g for row r of group g.

    num_groups: G, 1 to 1024. in_features: K. out_features: N. bias: whether there is b_g. scale_bias: row r gets
    b_g * bias_scales[r]. device, dtype: of the parameters. init_method: called with each group's weight (N, K), to
    fill it; by default weights, and biases always, are drawn as by `nn.Linear`.

    Parameters are `weight` (G, N, K) and `bias` (G, N); without single_grouped_weight `weight0` to `weight{G-1}`
    (N, K), without single_grouped_bias `bias0` to `bias{G-1}` (N,). Discrete weights are views of one storage
    (G, N, K), also after `to`, loading or a copy, and then cost nothing. Where others replace their data, it still
    costs nothing if it lies equally spaced and ascending in one storage. Otherwise, and under `torch.compile` and
    `torch.func`, each forward copies the weights.

    The keys of `state_dict` are the names of the parameters; `load_state_dict` takes those of either form for either
    form, nested as well. The discrete keys are TransformerEngine's; its `_extra_state`, of quantization, is dropped
    unless a subclass has one. Discrete weights are views: safetensors' `save_file` writes them, its `save_model`
    and `load_model` refuse them, and accelerate's `save_state` and `save_model` leave out all but the first.

    accumulate_into_main_grad: the gradient of a weight is added to its attribute `main_grad`, or what its method
    `get_main_grad()` returns, in the backward: of the weight's shape, in bf16, fp16 or fp32. If its
    `overwrite_main_grad` is true, main_grad is overwritten. Autograd gets no gradient or, if the weight has
    `grad_added_to_main_grad`, which is set to True, a dummy, so that Megatron-LM's hooks run: unwritten memory or, if
    its `zero_out_wgrad` is true, zeros. A backward of inputs alone adds nothing. Biases have ordinary gradients. Under
    `torch.compile`, from PyTorch 2.11 on, the forward reads and sets these attributes.

    delay_wgrad: a backward only stores what the gradients of the parameters are made of; `backward_dw()` computes
    them. A forward raises RuntimeError while 64 backwards wait for that, where parameters are computed from other
    tensors, and under `torch.compile(fullgraph=True)`; without fullgraph it runs eagerly, between graphs. The
    parameters get `skip_backward_post_hook = True`. Copies and pickles of the module have nothing stored, and no hooks.
    A pickle of one parameter per group contains copies of the parameters, which modules that shared them no longer
    share.

    `quantize_blocks_()` and `from_block_scaled` make layers whose weight is frozen and block-scaled: `weight` holds its
    codes, the parameter `weight_scale_inv` its scales. `to`, `half` and the like move both, but do not cast them.
    Checkpoints hold both, not the extents of blocks, so that a module of the same blocks has to load them. If one of
    them is made to require a gradient, the forward raises ValueError.

    Raises TypeError or ValueError that names the argument.
    """

    def __init__(
        self, num_groups: int, in_features: int, out_features: int, *, bias: bool = True, scale_bias: bool = False,
        single_grouped_weight: bool = True, single_grouped_bias: bool = True, device: Any = None,
        dtype: Optional[torch.dtype] = None, init_method: Optional[Callable[[Tensor], Any]] = None,
        accumulate_into_main_grad: bool = False, delay_wgrad: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.use_bias, self.scale_bias, self.init_method = bias, scale_bias, init_method
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.accumulate_into_main_grad, self.delay_wgrad = accumulate_into_main_grad, delay_wgrad
        checks.check_flags(bias=bias, **{flag: getattr(self, flag) for flag in FLAGS})
        check_arguments(num_groups, in_features, out_features, bias, scale_bias, dtype, init_method)
        self._names: Dict[str, List[str]] = {"weight": [], "bias": ["bias"]}  # of parameters, by groups
        self._scaled: Optional[Dict[str, Any]] = None  # of a block-scaled weight what is no tensor
        self._delayed: Deque[Delayed] = deque()
        self._wgrad_hooks: List[Callable[[], Any]] = []
        self._checked_main_grads: List[weakref.ref] = []
        weight = torch.empty((num_groups, out_features, in_features), device=device, dtype=dtype)
        self._register("weight", weight, single_grouped_weight)
        if bias:
            self._register("bias", weight.new_empty((num_groups, out_features)), single_grouped_bias)
        else:
            self.register_parameter("bias", None)
        self._settle()
        self.reset_parameters()

    def _register(self, kind: str, packed: Tensor, single: bool) -> None:
        self._names[kind] = [kind] if single else [f"{kind}{group}" for group in range(self.num_groups)]
        for name, tensor in zip(self._names[kind], self._by_parameter(kind, packed)):
            self.register_parameter(name, nn.Parameter(tensor))

    def _by_parameter(self, kind: str, packed: Tensor) -> Iterable[Tensor]:
        """Of a tensor for all groups what belongs to each of the parameters of a kind, "weight" or "bias"."""
        return [packed] if self._names[kind] == [kind] else packed

    def _of(self, kind: str) -> List[nn.Parameter]:
        """The parameters of a kind; none where a bias is None, which others may set."""
        names = self._names[kind]
        try:
            found = [*map(self._parameters.__getitem__, names)]
        except KeyError:  # wrappers put properties and plain tensors in their place
            found = [getattr(self, name) for name in names]
        return found if kind == "weight" else [bias for bias in found if bias is not None]

    @classmethod
    def from_block_scaled(
        cls, weight: BlockScaled, bias: Optional[Tensor] = None, *, scale_bias: bool = False
    ) -> "GroupedLinear":
        """A layer over the memory of a weight (G, N, K), frozen, and of a bias (G, N), bf16, fp16, fp32 or fp64.

        The bias is on the weight's device and becomes a parameter that requires a gradient, or is one already. Raises
        TypeError or ValueError that names the argument.
        """
        frozen.check_given(weight, bias)
        groups, n, k = weight.shape
        layer = cls(groups, k, n, bias=bias is not None, scale_bias=scale_bias, device="meta")
        if bias is not None:
            layer.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        layer._scaled = frozen.register(layer, weight)
        return layer

    def quantize_blocks_(
        self, block: Tuple[int, int] = (128, 128), parts: int = 1, products: str = "auto"
    ) -> "GroupedLinear":
        """Turns the weight into a block-scaled one, in place of the parameter `weight`, and returns the module.

        block, parts: as `quantize_blocks` takes them. products: as of `BlockScaled`. On the meta device codes and
        scales have no memory either. Raises TypeError or ValueError that names the argument, or an option of the module
        that a frozen weight does not go with; RuntimeError if the weight is block-scaled already.
        """
        frozen.check_freezes(self, products)
        weight = frozen.quantize_groups(self.weight, block, parts)._replace(products=products)
        self._scaled = frozen.register(self, weight)
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all parameters anew, group by group: the same values whatever the layout.

        A DTensor of all groups, as FSDP2 makes, is drawn at once. `init_method` gets its groups, so PyTorch raises
        RuntimeError if its shards are groups. Raises RuntimeError if the weight is block-scaled: it is not trained.
        """
        if self._scaled is not None:
            raise RuntimeError("reset_parameters: the weight is block-scaled; load a state dict instead")
        bound = 1 / math.sqrt(self.in_features)
        for kind in filter(self._of, self._names):
            tensors = [parameter.detach() for parameter in self._of(kind)]
            init_method = None if kind == "bias" else self.init_method
            at_once = init_method is None and type(tensors[0]) is not Tensor
            for tensor in tensors[0] if self._names[kind] == [kind] and not at_once else tensors:
                if init_method is not None:
                    init_method(tensor)
                else:
                    nn.init.uniform_(tensor, -bound, bound)  # which nn.Linear's kaiming_uniform_ of weights comes to

    def _settle(self) -> None:
        """Makes discrete weights views of one storage again, and marks parameters whose gradients are delayed."""
        weights = self._of("weight")
        kinds = {(type(w.detach()), w.device, w.dtype, w.shape) for w in weights}
        real = len(kinds) == 1 and type(weights[0].detach()) is Tensor and weights[0].device.type != "meta"
        if real and as_one(weights) is None:
            for weight, data in zip(weights, stack([w.detach() for w in weights])):
                weight.data = data
        if self.delay_wgrad:
            for parameter in weights + self._of("bias"):
                parameter.skip_backward_post_hook = True

    def _apply(self, fn, recurse=True):
        kept = [self._parameters[name] for name in frozen.NAMES] if self._scaled else ()
        super()._apply(frozen.without_casts(fn, kept), recurse)
        self._settle()
        return self

    def _state(self) -> Dict[str, Any]:
        return {**super().__getstate__(), "_delayed": deque(), "_wgrad_hooks": [], "_checked_main_grads": []}

    def __copy__(self):
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self._state())
        return twin

    def __deepcopy__(self, memo):
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self._state(), memo))
        return twin

    def __getstate__(self) -> Dict[str, Any]:
        """For pickle, which would write the whole storage with each of the weights that share it, or 8-bit floats."""
        state = self._state()
        if not self.single_grouped_weight:
            state["_shared"], copies = for_pickle(self._of("weight"))
            state["_parameters"] = {**self._parameters, **dict(zip(self._names["weight"], copies))}
        return state if self._scaled is None else frozen.as_integers(state)

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(frozen.from_integers(state))
        shared = self.__dict__.pop("_shared", None)
        for weight, data in zip(self._of("weight"), () if shared is None else shared):
            weight.data = data
        self._settle()

    def _load_from_state_dict(self, state_dict, *args) -> None:
        hook = self.register_load_state_dict_pre_hook(fit_checkpoint)  # the last one: others may rename entries
        try:
            super()._load_from_state_dict(dict(state_dict), *args)
        finally:
            hook.remove()
        self._settle()

    def extra_repr(self) -> str:
        shape = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        changed = [f"{flag}={not default}" for flag, default in FLAGS.items() if getattr(self, flag) != default]
        return ", ".join([shape, f"bias={bool(self._of('bias'))}", *changed, *frozen.described(self._scaled or {})])

    def _packed(self, kind: str, detached: bool) -> Optional[Weight]:
        """(G, N, K) or (G, N): the parameters of a kind as one, differentiable unless detached."""
        parameters = self._of(kind)
        if not parameters:
            return None
        if self._names[kind] == [kind]:
            if kind == "weight" and self._scaled is not None:
                return frozen.weight_of(self, detached)
            return parameters[0].detach() if detached else parameters[0]
        traced = torch.compiler.is_compiling() or _compat.in_transform()  # by vmap, weights may have no addresses
        packed = None if traced or kind == "bias" else as_one(parameters)
        if packed is None:
            return stack([p.detach() for p in parameters] if detached else parameters)
        return packed if detached else Pack.apply(packed, *parameters)

    def _watched(self, x: Tensor, used: Weight) -> List[nn.Parameter]:
        """Weights whose changes autograd would miss: it sees those of the first one alone. None where x needs no
        gradient, or a copy of them is used.
        """
        if self.single_grouped_weight or torch.compiler.is_compiling() or not (x.requires_grad and is_plain(used)):
            return []
        weights = self._of("weight")
        return weights if used.data_ptr() == weights[0].data_ptr() else []

    def forward(
        self, x: Tensor, splits: Splits, bias_scales: Optional[Tensor] = None, lora: Optional[LoRA] = None,
        adapter_index: Optional[Tensor] = None,
    ) -> Tensor:  # fmt: skip
        """x: (rows, K). splits: as `grouped_linear` takes them. bias_scales: (rows,), with scale_bias and only then.

        lora, adapter_index: as `grouped_linear` takes them, with factors a (G, r, K) and b (G, N, r). Their gradients
        come in the backward, into `.grad`, also with main_grads and delayed weight gradients.

        Returns (rows, N); rows of no group are 0. Gradients, autocast, dtypes and errors are those of
        `grouped_linear`. Raises AttributeError if a weight lacks its main_grad, and NotImplementedError under
        transforms of torch.func with main_grads or delayed gradients.
        """
        if self.scale_bias and bias_scales is None:
            raise ValueError("bias_scales: expected with scale_bias=True, got None")
        if bias_scales is not None and not self.scale_bias:
            raise ValueError("bias_scales: expected None without scale_bias=True, got a value")
        checks.check_tensor("x", x)
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise checks.wrong_shape("x", x, (None, self.in_features), "(rows, in_features)")
        low_rank, grad = {"lora": lora, "adapter_index": adapter_index}, torch.is_grad_enabled()
        if grad and (self.delay_wgrad or self.accumulate_into_main_grad):
            wanted = [any(parameter.requires_grad for parameter in self._of(kind)) for kind in ("weight", "bias")]
            if any(wanted) if self.delay_wgrad else wanted[0]:
                return self._forward_tapped(x, splits, bias_scales, *wanted, **low_rank)
        # A trace is checked by another one, without gradients. Detached weights would lose their tangents.
        detached = not (grad or torch.jit.is_tracing() or _compat.has_tangents())
        dtype = None if self.single_grouped_weight else checks.autocast_dtype(x)
        weight = checks.autocast(self._packed("weight", detached), dtype)  # a copy need not be watched
        y = grouped_linear(x, weight, splits, self._packed("bias", detached), bias_scales, **low_rank)
        return watch(y, self._watched(x, weight)) if grad else y

    def _forward_tapped(
        self, x: Tensor, splits: Splits, bias_scales: Optional[Tensor], wants_weight: bool, wants_bias: bool,
        **low_rank: object,
    ) -> Tensor:  # fmt: skip
        """The same with gradients, of which some take another way than autograd's."""
        delayed, compiling = self.delay_wgrad, torch.compiler.is_compiling()
        refuse_forward_mode("GroupedLinear", *self._parameters.values())  # frozen ones, too, are detached
        if not compiling and _compat.in_transform(if_unknown=False):
            flag = "delay_wgrad" if delayed else "accumulate_into_main_grad"
            raise NotImplementedError(f"{flag}: not with the transforms of torch.func")
        if delayed:
            self._check_delay()
            parameters = self._of("weight") + self._of("bias")
            check_leaves(self._names["weight"] + self._names["bias"], parameters)
        else:
            wanted = self._wanted()
            if compiling:
                wanted = wanted._replace(targets=main_grads_of(wanted))
            else:
                self._check_main_grads(wanted)
        splits, dtype = as_splits(splits, self.num_groups, x.shape[0], x.device), checks.autocast_dtype(x)
        x, weight = (checks.autocast(each, dtype) for each in (x, self._packed("weight", True)))  # as they are used
        y = grouped_linear(x, weight, splits, self._packed("bias", delayed), bias_scales, **low_rank)
        if delayed:
            scales = bias_scales.contiguous() if wants_bias and self.scale_bias else None
            leaf = torch.empty(0, requires_grad=True, device=x.device)
            later = Later(self._delayed, wants_bias, parameters)
            return WgradTap.apply(y, x if wants_weight else None, splits, scales, later, self._watched(x, weight), leaf)
        if compiling:
            mark_added(wanted.weights)
        return WgradTap.apply(y, x, splits, None, wanted, self._watched(x, weight), *wanted.weights)

    def _wanted(self) -> Wanted:
        weights = self._of("weight")
        require = [*map(operator.attrgetter("requires_grad"), weights)]
        groups, *named = ([*compress(each, require)] for each in (range(len(weights)), self._names["weight"], weights))
        return Wanted(*named, self.num_groups, None if self.single_grouped_weight else groups)

    def _check_delay(self) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("delay_wgrad: torch.compile can't delay gradients; call this module outside of it")
        if len(self._delayed) >= _MAX_DELAYED:
            raise RuntimeError(
                f"delay_wgrad: {_MAX_DELAYED} backwards wait for backward_dw(), which has to be called once for each;"
                " discard_delayed_wgrad() drops what they stored"
            )

    def _check_main_grads(self, wanted: Wanted) -> None:
        """Raises what `main_grads_of` raises, but for buffers that were checked before: the backward does so again."""
        weights = wanted.weights
        if any(map(hasattr, weights, repeat("get_main_grad"))):  # it may make them only for the backward
            return
        buffers = [*map(getattr, weights, repeat("main_grad"), repeat(None))]
        checked = [buffer() for buffer in self._checked_main_grads]
        same = len(checked) == len(buffers) and all(map(operator.is_, buffers, checked))
        if not same or any(map(operator.is_, buffers, repeat(None))):
            main_grads_of(wanted)
            self._checked_main_grads = [*map(weakref.ref, buffers)]

    def need_backward_dw(self) -> bool:
        """Whether gradients of parameters are left to `backward_dw`: with delay_wgrad, unless all are frozen."""
        return self.delay_wgrad and (bool(self._delayed) or any(p.requires_grad for p in self.parameters()))

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Adds a hook that each `backward_dw` calls, without arguments, when the gradients are there."""
        self._wgrad_hooks.append(hook)

    def discard_delayed_wgrad(self) -> int:
        """Drops what backwards stored for `backward_dw` and it has not used, and returns of how many microbatches."""
        count = len(self._delayed)
        self._delayed.clear()
        return count

    def backward_dw(self) -> None:
        """Computes the parameters' gradients for the oldest microbatch whose backward has run, then calls the hooks.

        Weight gradients are added to main_grad, or overwrite it, with accumulate_into_main_grad; else, and those of
        biases always, they are added to `.grad`. One call per backward; what was stored lives until then, or until
        `discard_delayed_wgrad()` or the end of the module. Works on the current stream, which has to wait for that of
        the backward. Does nothing unless `need_backward_dw()`. Raises RuntimeError if no backward has stored anything,
        if what one stored was modified in place since, or if the parameters are not those of the forward.
        """
        if not self.need_backward_dw():
            return
        if not self._delayed:
            raise RuntimeError("backward_dw: nothing is stored; call it once after each backward through this module")
        self._finish(self._delayed[0])
        self._delayed.popleft().record_stream()
        for hook in self._wgrad_hooks:
            hook()

    @torch.no_grad()
    def _finish(self, delayed: Delayed) -> None:
        delayed.check()
        if not all(map(operator.is_, delayed.parameters, self._of("weight") + self._of("bias"))):
            reason = "the parameters are others than in the forward, as by functional_call"
            raise RuntimeError(f"backward_dw: {reason}; discard_delayed_wgrad() drops what is stored")
        dy, splits, wanted = delayed.dy, delayed.splits, self._wanted()
        biases, dbias = self._of("bias"), None
        if delayed.wants_bias and any(bias.requires_grad for bias in biases):  # nothing is added yet if this fails
            dbias, _ = run_bias_backward(dy, splits, self.num_groups, None, delayed.bias_scales, True)
        if delayed.x is not None and wanted.weights:
            to_main_grad = self.accumulate_into_main_grad
            targets = main_grads_of(wanted) if to_main_grad else self._grads(wanted.weights)
            dummies = accumulate(wanted, targets, dy, delayed.x, splits)
            if to_main_grad:
                mark_added(wanted.weights)
            for weight, target, dummy in zip(wanted.weights, targets, dummies):
                if weight.grad is None:
                    weight.grad = dummy if to_main_grad else target.buffer
        for bias, grad in zip(biases, () if dbias is None else self._by_parameter("bias", dbias)):
            if bias.requires_grad:
                bias.grad = grad.to(bias.dtype) if bias.grad is None else bias.grad.add_(grad)

    def _grads(self, weights: List[nn.Parameter]) -> List[MainGrad]:
        """Their `.grad` or, where that is missing, new memory, in one piece, to be overwritten."""
        missing = [*{id(weight): None for weight in weights if weight.grad is None}]  # groups may share a weight
        groups = len(missing) * (self.num_groups if self.single_grouped_weight else 1)
        made = weights[0].new_empty((groups, self.out_features, self.in_features))
        new = dict(zip(missing, self._by_parameter("weight", made)))
        return [MainGrad(new.get(id(weight), weight.grad), weight.grad is None) for weight in weights]
