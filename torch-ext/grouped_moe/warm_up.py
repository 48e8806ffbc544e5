"""Compiles the kernels of a model before its first batches need them: `warm_up`."""

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Callable, Dict, Hashable, Iterable, Iterator, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from .common import checks
from .common.device import spec_of
from .integrations.peft import loras_of
from .integrations.transformers import capacity_of, experts_forward
from .integrations.transformers_fp8 import has_scales
from .integrations.transformers_gate import fused_activation, local_part, post_expert
from .integrations.transformers_load import share_of
from .nn import GroupedLinear
from .nn.main_grad import buffer_of
from .nn.packing import as_one
from .operands import LoRA
from .packed import PackedRow
from .places import place_rows, receive, send, sum_places, take_slots
from .tuning import heuristic

# What modules and their configs call the number of experts that a token takes.
_TOP_K_NAMES = (
    "top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "experts_per_token",
    "num_selected_experts",
)  # fmt: skip


class _Layer(NamedTuple):
    """A layer to run.

    kind: equal for layers of the same kernels. choice: numbers of tokens for which it is equal have the same kernels.
    run: runs it on so many random tokens, and trains it where gradients are enabled.
    """

    kind: Hashable
    choice: Callable[[int], Hashable]
    run: Callable[[int], None]


def warm_up(
    target: nn.Module,
    num_tokens: Tuple[int, int] = (1, 4096),
    *,
    backward: bool = False,
    top_k: Optional[int] = None,
    progress: bool = True,
) -> int:
    """Compiles all variants of kernels that `target` needs for a range of token counts, and returns how many.

    target: a module with experts as transformers lays them out, or with `GroupedLinear` layers, on the device and in
    the dtype of later calls, with those LoRAs of peft active that these will have. num_tokens: the smallest and the
    largest number of tokens of a call; a `GroupedLinear` is run on as many rows and, with top_k, on top_k times as
    many; for experts behind the package's exchange under expert parallelism, give the places of all ranks. backward:
    also compiles what training needs, the gradients of the parameters that require one, with and without those of
    hidden states and of routing weights. top_k: experts of a token, by default as the experts module or a config says.
    progress: whether to show a bar, which needs tqdm.

    Of layers of the same shape and kind one is run, under the autocast there is, on random tokens: once for each set of
    kernels, at the smallest number of tokens that needs it, with the memory that a call of it takes. Threads compile
    several kernels at once. Parameters, `.grad` and `main_grad` stay as they are. Routing weights count as fp32 or of
    the layer's dtype. Triton keeps on disk what it has compiled, for the next process. On a CPU there is nothing to
    compile: 0.

    Raises TypeError or ValueError that names the argument.
    """
    checks.check_flags(backward=backward, progress=progress)
    _check_arguments(target, num_tokens, top_k)
    layers = {layer.kind: layer for layer in _find_layers(target, top_k, backward)}.values()
    if not layers:
        return 0
    from .backends.triton.launch import COMPILED, compile_together

    count, (first, last) = len(COMPILED), num_tokens
    smallest = [{layer.choice(tokens): tokens for tokens in range(last, first - 1, -1)}.values() for layer in layers]

    def run_all() -> None:
        for layer, numbers in zip(layers, smallest):
            for tokens, trains in itertools.product(sorted(numbers), (False, True) if backward else (False,)):
                with torch.set_grad_enabled(trains):
                    layer.run(tokens)

    # Whatever modes the caller is in. Outside inference mode `_twin` fails with parameters that were made in it.
    with torch.inference_mode(not backward), torch.autograd.set_detect_anomaly(False):
        with _CompilingThreads(progress) as threads, torch.autograd.set_multithreading_enabled(False):
            compile_together(threads, run_all)
        run_all()
    return len(COMPILED) - count


class _CompilingThreads(ThreadPoolExecutor):
    """Threads that compile kernels, and a bar of how many they have to compile and have compiled."""

    def __init__(self, progress: bool):
        super().__init__()
        try:
            from tqdm.auto import tqdm
        except ImportError:
            progress = False
        self._bar = tqdm(desc="grouped_moe: compiling", unit="kernel", total=0) if progress else None

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        future = super().submit(*args, **kwargs)
        if self._bar is not None:
            self._bar.total += 1
            future.add_done_callback(lambda future: future.cancelled() or self._bar.update())
        return future

    def __exit__(self, kind: Optional[type], *_: Any) -> None:
        self.shutdown(cancel_futures=kind is not None)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        super().shutdown(*args, **kwargs)
        if self._bar is not None:
            self._bar.close()


def _check_arguments(target: nn.Module, num_tokens: Tuple[int, int], top_k: Optional[int]) -> None:
    """Raises what `warm_up` raises."""
    if not isinstance(target, nn.Module):
        raise TypeError(f"target: expected a torch.nn.Module, got {type(target).__name__}")
    if not isinstance(num_tokens, (tuple, list)) or not all(type(number) is int for number in num_tokens):
        raise TypeError(f"num_tokens: expected a pair of ints, got {num_tokens!r}")
    if len(num_tokens) != 2 or not 1 <= num_tokens[0] <= num_tokens[1]:
        raise ValueError(f"num_tokens: expected the first and the last number of tokens, 1 or more, got {num_tokens!r}")
    checks.check_count("top_k", top_k)


def _needs_kernels(tensor: Tensor) -> bool:
    """Whether what computes with it is compiled."""
    return tensor.device.type != "cpu"


def _find_layers(target: nn.Module, top_k: Optional[int], trains: bool) -> Iterator[_Layer]:
    """The layers of a module, those on CPU apart."""
    found, loras = False, loras_of(target)
    for name, module in target.named_modules():
        if isinstance(module, GroupedLinear):
            weight, make = next(module.parameters()), partial(_linear_layer, name, module, target, top_k or 1, trains)
        elif _is_experts(module):
            own = loras.get(module, {})
            weight, make = module.down_proj, partial(_experts_layer, name, module, target, top_k, trains, own)
        else:
            continue
        found = True
        if weight.device.type == "meta":
            raise ValueError(f"target: expected parameters in memory, got one on the meta device in {name!r}")
        if _needs_kernels(weight):
            yield make()
    if not found:
        raise ValueError(f"target: expected experts or GroupedLinear layers in it, got {type(target).__name__}")


def _check_whole(name: str, is_whole: bool) -> None:
    """Raises ValueError unless parameters are as a forward has them: between forwards FSDP keeps a part of each."""
    if not is_whole:
        hint = "under fully_shard call unshard() of what it was applied to before, and reshard() after"
        raise ValueError(f"target: expected whole parameters in {name!r}, as a forward has them, got parts; {hint}")


def _twin(module: nn.Module, state: Dict[str, Any]) -> nn.Module:
    """A module of that state over the same memory, whose parameters have no hooks and gradients of their own.

    What parametrizations compute are parameters of it.
    """
    kind, computed = type(module), {}
    if is_parametrized(module):  # whose class is one of its own, derived from the one that it had before
        kind = type(kind.__name__, (type_before_parametrizations(module),), {})
        computed = {name: getattr(module, name) for name in module.parametrizations}
    twin = object.__new__(kind)
    twin.__dict__.update(state)
    twin._parameters = {
        name: None if parameter is None else parameter.detach().requires_grad_(parameter.requires_grad)
        for name, parameter in {**module._parameters, **computed}.items()
    }
    return twin


def _random(like: Tensor, *shape: int, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Random numbers. The generators of others stay as they are."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.rand(shape, generator=generator, device=like.device, dtype=torch.float32).to(dtype or like.dtype)


def _differentiate(out: Tensor, inputs: Sequence[Optional[Tensor]]) -> None:
    """Computes the gradients of those inputs that need one, if any does, and drops them."""
    if not out.requires_grad:
        return
    leaves = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)


def _describe(named: Iterable[Tuple[str, Tensor]]) -> Tuple[Hashable, ...]:
    """Of parameters what kernels depend on."""
    parts = [(name, p.requires_grad, local_part(p.detach())) for name, p in named]
    return tuple((*rest, p.shape, p.stride(), p.dtype, p.device, p.data_ptr() % 16) for *rest, p in parts)


def _detached(lora: LoRA, num_own: Optional[int]) -> LoRA:
    """A LoRA whose factors have gradients of their own: whole, or contiguous factors of so many experts.

    The latter is what an exchange between ranks hands to the experts of a rank.
    """
    own = [factor.detach()[:num_own] for factor in (lora.a, lora.b)]
    a, b = own if num_own is None else [factor.contiguous() for factor in own]
    return LoRA(a.requires_grad_(lora.a.requires_grad), b.requires_grad_(lora.b.requires_grad), lora.scaling)


def _input_dtype(weight: Tensor, is_scaled: bool, *owners: nn.Module) -> torch.dtype:
    """The dtype of a layer's input: its weight's own or, with scales, that of the owners' first parameter without."""
    if not is_scaled:
        return weight.dtype
    named = itertools.chain.from_iterable(owner.named_parameters() for owner in owners)
    others = (p.dtype for name, p in named if not name.endswith(("_scale_inv", "activation_scale")))
    return next((dtype for dtype in others if dtype.is_floating_point and dtype.itemsize > 1), torch.bfloat16)


def _products(
    groups: int, shapes: Sequence[Tuple[int, int]], like: Tensor, dtype: torch.dtype, trains: bool, is_scaled: bool
) -> Callable[[int, int], Hashable]:
    """What (rows, slots) choose of the products, which are made for so many slots. shapes: their N and K.

    is_scaled: whether weights are in 8-bit floats.
    """
    spec = spec_of(like)
    return lambda rows, slots: (
        heuristic.choose_block_m(slots, groups, dtype),
        is_scaled and heuristic.quantizing_pays(rows, groups, spec),
        is_scaled and trains and heuristic.transposing_pays(rows, groups, spec),
        trains and heuristic.rows_per_group(rows, groups),
        *(heuristic.wide_pays(rows, groups, n, k, spec) for n, k in shapes),
    )


def _is_experts(module: nn.Module) -> bool:
    """Whether its attributes are those of a transformers experts module, with weights in the layout that these say.

    Wrappers, as of torch.compile and of peft's modules_to_save, have those of a module within by a method of theirs.
    """
    if type(module).__getattr__ is not nn.Module.__getattr__ or not hasattr(module, "num_experts"):
        return False
    names = ("down_proj", "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj")
    down, up = tensors = [getattr(module, name, None) for name in names]
    h = 1 if getattr(module, "is_transposed", False) else 2  # of up; llama4's is transposed and does not say so
    return all(isinstance(t, Tensor) and t.dim() == 3 for t in tensors) and up.shape[h] == down.shape[-h]


def _top_k_of(name: str, module: nn.Module, target: nn.Module) -> int:
    """What the module or a config says."""
    configs = [getattr(owner, "config", None) for owner in (module, target)]
    configs += [getattr(config, "text_config", None) for config in configs]
    for owner in (module, *configs):
        for attribute in _TOP_K_NAMES:
            value = getattr(owner, attribute, None)
            if isinstance(value, (list, tuple)) and len(set(value)) == 1:  # one per layer
                value = value[0]
            if type(value) is int and value > 0:
                return value
    raise ValueError(f"top_k: expected the number of experts of a token, which neither {name!r} nor a config says")


def _experts_layer(
    name: str, module: nn.Module, target: nn.Module, top_k: Optional[int], trains: bool, loras: Dict[str, LoRA]
) -> _Layer:
    """A layer of an experts module, which is run as the implementation for transformers runs it, with its LoRAs."""
    from .backends.native.decode import groups_slots
    from .backends.native.fakes import IS_BUILT
    from .backends.native.routing import takes_slots
    from .backends.triton.routing import launches_of

    top_k = _top_k_of(name, module, target) if top_k is None else top_k
    gated, transposed = getattr(module, "has_gate", True), getattr(module, "is_transposed", False)
    exchanged = hasattr(module, "ep_loras")
    interleaved, share = gated and not getattr(module, "is_concatenated", True), share_of(module)
    up, down = map(local_part, (module.gate_up_proj if gated else module.up_proj, module.down_proj))
    activation = fused_activation(module, interleaved) if post_expert(module) is None else None
    scaled = has_scales(module, "down_proj")
    own_dtype = _input_dtype(module.down_proj, scaled, target)
    dtype = checks.autocast_dtype(up) or own_dtype
    e, h, i = up.shape[0], *down.shape[1:][:: -1 if transposed else 1]
    p, up_h = up.shape[1:][:: -1 if transposed else 1]
    _check_whole(name, down is module.down_proj or (e, up_h) == (module.num_experts, h))  # FSDP's are DTensors
    products = _products(e, ((h, i), (h, p), (p, h), (i, h)), up, dtype, trains, scaled)

    def num_rows(num_slots: int) -> int:
        return num_slots if share is None or activation is None else min(num_slots, capacity_of(num_slots, share))

    def choice(num_tokens: int) -> Hashable:
        slots = num_tokens * top_k
        rows = num_rows(slots)
        # Native ops, which compile nothing, take few tokens without gradients, and route.
        by_ops = IS_BUILT and (groups_slots(num_tokens, top_k, e, scaled), takes_slots(slots, spec_of(up).num_sms))
        routes = heuristic.decode_pays(num_tokens, top_k, up, down), by_ops, launches_of(slots), rows < slots
        return *routes, bool(loras) and rows >= e, products(rows, slots)  # `pack_factors` copies factors

    def run(num_tokens: int) -> None:
        twin, generator = _twin(module, module.__dict__), torch.Generator(up.device).manual_seed(0)
        ids = torch.randint(e, (num_tokens, top_k), device=up.device, generator=generator)
        ids.view(-1)[num_rows(ids.numel()) :] = e  # sentinels, for which there is no room
        own = {each: _detached(lora, e if exchanged else None) for each, lora in loras.items()}
        leaves = *twin._parameters.values(), *(factor for lora in own.values() for factor in (lora.a, lora.b))
        # In a model's first layer hidden states, and routing weights if the router is frozen, may need no gradient.
        needs = (False, True) if torch.is_grad_enabled() else (False,)
        for weights_dtype, x_needs, weights_need in itertools.product({own_dtype, dtype, torch.float32}, needs, needs):
            x = _random(up, num_tokens, h, dtype=own_dtype)
            weights, here = _random(up, num_tokens, top_k, dtype=weights_dtype), ids
            if exchanged:
                x, here, weights = _sent_to_itself(x, ids, weights, e)
            x, weights = x.requires_grad_(x_needs), weights.requires_grad_(weights_need)
            out = experts_forward(twin, x, here, weights, share, **own)
            _differentiate(out, (x, weights, *leaves))

    factors = [(each, factor) for each, lora in loras.items() for factor in (lora.a, lora.b)]
    flags = type(module), gated, interleaved, transposed, getattr(module, "has_bias", False), activation, top_k, share
    flags += exchanged, _describe(factors)
    return _Layer((*flags, _describe(module.named_parameters())), choice, run)


def _sent_to_itself(x: Tensor, ids: Tensor, weights: Tensor, num_local: int) -> Tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights as expert-parallel ranks get them; the way back is compiled as well."""
    num_tokens, trains = x.shape[0], torch.is_grad_enabled()
    row = PackedRow(x.shape[1], x.dtype, ids.shape[1], weights.dtype)
    with torch.no_grad():
        rows, source, places, _ = send(x, weights, ids, num_local, 1, num_tokens, num_local)
        x, (weights, ids, _) = row.hidden_states(rows), receive(rows, num_tokens, *row)
        sum_places(x, places)
        if trains:
            place_rows(x.contiguous(), source)
            take_slots(weights, places)
    return x, ids, weights


def _linear_layer(name: str, module: GroupedLinear, target: nn.Module, top_k: int, trains: bool) -> _Layer:
    """A layer of a linear module, with as many rows as tokens and top_k times as many."""
    _check_whole(name, all(local_part(parameter) is parameter for parameter in module.parameters()))
    weight, n, k, groups = next(module.parameters()), module.out_features, module.in_features, module.num_groups
    own_dtype = _input_dtype(weight, module._scaled is not None, module, target)
    dtype = checks.autocast_dtype(weight) or own_dtype
    products = _products(groups, ((n, k), (k, n)), weight, dtype, trains, module._scaled is not None)

    def choice(num_tokens: int) -> Hashable:
        return products(num_tokens, num_tokens), products(num_tokens * top_k, num_tokens * top_k)

    def run(num_tokens: int) -> None:
        for num_rows in {num_tokens, num_tokens * top_k}:
            _run_linear(module, num_rows, weight, own_dtype)

    flags = module.scale_bias, module.accumulate_into_main_grad, module.delay_wgrad, own_dtype, str(module._scaled)
    buffers = (_main_grad_of(weight),) if module.accumulate_into_main_grad else ()
    flags += n, k, groups, *((b.dtype, b.stride()) for b in buffers)
    return _Layer((*flags, _describe(module.named_parameters())), choice, run)


def _main_grad_of(weight: Tensor) -> Tensor:
    """The buffer of a weight, or one like the weight in fp32 where there is none yet."""
    buffer = buffer_of(weight)
    return torch.empty_like(weight, device="meta", dtype=torch.float32) if buffer is None else buffer


def _run_linear(module: GroupedLinear, num_rows: int, weight: Tensor, dtype: torch.dtype) -> None:
    """Runs it with splits of each kind, or trains it with scales of each kind, in each way to keep gradients.

    dtype: of the rows.
    """
    twin, groups, trains = _twin(module, module._state()), module.num_groups, torch.is_grad_enabled()
    sizes = torch.full((groups,), -(-num_rows // groups), device=weight.device)
    offsets = (torch.arange(groups + 1, device=weight.device) * sizes[0]).clamp(max=num_rows)
    kinds = [sizes] if trains else [s.to(kind) for s in (sizes, offsets) for kind in (torch.int64, torch.int32)]
    to_main_grad = trains and module.accumulate_into_main_grad
    # Without main_grad the first delayed gradient is written, others are added to it.
    overwrites = {False, hasattr(weight, "overwrite_main_grad")} if to_main_grad else range(1 + module.delay_wgrad)
    scales_kinds = itertools.product({dtype, torch.float32}, {False, trains}) if module.scale_bias else [(None, False)]
    for (scales_dtype, need), overwrite, splits in itertools.product(scales_kinds, overwrites, kinds):
        if to_main_grad:
            _give_main_grads(module, twin, overwrite)
        x = _random(weight, num_rows, module.in_features, dtype=dtype).requires_grad_(trains)
        scales = None if scales_dtype is None else _random(weight, num_rows, dtype=scales_dtype).requires_grad_(need)
        y = type(twin).forward(twin, x, splits, scales)  # not what others put in its place
        if trains:
            _differentiate(y, (x, scales, *twin._parameters.values()))
            twin.backward_dw()


def _give_main_grads(module: GroupedLinear, twin: GroupedLinear, overwrite: bool) -> None:
    """Gives the twin's weights buffers that lie as those of the module do: in one piece, or each for itself."""
    weights = module._of("weight")
    buffers = [_main_grad_of(weight) for weight in weights]
    alone = buffers[0].device.type != "meta" and not module.single_grouped_weight and as_one(buffers) is None
    shape, device = (len(buffers), *buffers[0].shape), weights[0].device
    new = map(torch.empty_like, buffers) if alone else buffers[0].new_empty(shape, device=device)
    for weight, buffer in zip(twin._of("weight"), new):
        weight.main_grad, weight.overwrite_main_grad = buffer, overwrite
