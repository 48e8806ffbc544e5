"""The public ops as functions that draw a case: tensors, routings, options, how it is called and what is right."""

import contextlib
from typing import Dict, List, Sequence

import torch
from fuzz_cases import BIASES, CONTEXTS, Case, PerGroup, expect, is_sentinel, per_group, sort_slots
from quantized import has_float8
from torch import Tensor

SCALING = 0.5  # of low-rank pairs
MODULE_FLAGS = ("single_grouped_weight", "single_grouped_bias", "accumulate_into_main_grad", "delay_wgrad")


def draw_pairs(case: Case, weights: Dict[str, str], transposed: bool) -> None:
    """Draws a LoRA for some of the weights or for none. weights: names of arguments, and those of their pairs."""
    draw, experts = case.draw, case.layer.E
    chosen = [] if case.exact else case.choose("adapted", [], [], [name for name in weights if draw.chance(0.8)])
    rank, dtype = case.choose("rank", 1, 4, 8, 20), draw.one(case.dtype, torch.float32)
    for name in chosen:
        n, k = case.values[name].shape[1:][:: -1 if transposed else 1]
        for factor, extents in (("a", (rank, k)), ("b", (n, rank))):
            case.values[f"{name}_{factor}"] = draw.normal(experts, *extents) / extents[1] ** 0.5
            case.dtypes[f"{name}_{factor}"] = dtype
    case.pairs = {name: weights[name] for name in chosen}


def draw_scaled(case: Case, names: Sequence[str], transposed: bool) -> None:
    """Puts some weights or none in FP8, with scales that are powers of two: every dtype holds their values exactly.

    Where rows may become codes, too, results have the roundings of codes.
    """
    if case.exact or transposed:
        return
    draw, case.products = case.draw, case.choose("products", "w8a16", "auto", "w8a8")
    for name in case.choose("scaled", [], [], [name for name in names if draw.chance(0.8)]):
        experts, n, k = case.values[name].shape
        block = case.options.get("block") or draw.one((16, 16), (32, 128), (128, 128), (n, k))
        scales = 2.0 ** draw.integers(-11, -7, experts, -(-n // block[0]), -(-k // block[1])).double()
        each = scales.repeat_interleave(block[0], 1)[:, :n].repeat_interleave(block[1], 2)[:, :, :k]
        codes = (case.values[name] / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        case.values[name] = codes.double() * each
        case.scaled[name] = codes, scales.float(), block
    has_blocks_of_rows = any(block == (128, 128) for _, _, block in case.scaled.values())
    if has_blocks_of_rows and case.products != "w8a16" and case.dtype.itemsize == 2 and has_float8():
        case.computed_in = torch.float8_e4m3fn


def with_operands(case: Case, package, tensors: Dict[str, Tensor]) -> dict:
    """The tensors as arguments of the package."""
    found = dict(tensors)
    for name, argument in case.pairs.items():
        found[argument] = package.LoRA(found.pop(f"{name}_a"), found.pop(f"{name}_b"), SCALING)
    for name, (codes, scales, block) in case.scaled.items():
        device = found[name].device
        if codes.device != device:  # once: a graph that is captured later cannot copy from the host
            codes, scales = codes.to(device), scales.to(device)
            case.scaled[name] = codes, scales, block
        found[name] = package.BlockScaled(codes, scales, block, products=case.products)
    return found


def adapted(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """(N, K)"""
    return weight + scaling * (b @ a)


def merged(case: Case, reference, tensors: Dict[str, Sequence[Tensor]], transposed: bool) -> dict:
    """The tensors as arguments of the reference: weights and pairs in one, in its own way if it has one."""
    found, join = dict(tensors), getattr(reference, "Adapted", adapted)
    for name in case.pairs:
        shape, factors = found[name].shape, zip(found[name], found.pop(f"{name}_a"), found.pop(f"{name}_b"))
        if transposed:
            found[name] = PerGroup((join(w.t(), a, b, SCALING).t() for w, a, b in factors), shape)
        else:
            found[name] = PerGroup((join(w, a, b, SCALING) for w, a, b in factors), shape)
    return found


def draw_experts(case: Case) -> None:
    draw, layer, tokens = case.draw, case.layer, case.draw_tokens()
    case.draw_block("hidden_states", tokens, (), BIASES, *([] if layer.gated else [BIASES[:1], BIASES[1:]]))
    case.draw_scales("top_k_weights", tokens, layer.top_k)
    draw_pairs(case, {"gate_up_proj": "gate_up_lora", "down_proj": "down_lora"}, layer.transposed)
    local = max(int((~is_sentinel(ids, layer.E)).sum()) for ids in case.routings)
    capacity = case.choose("capacity", None, None, max(1, local), local + draw.randint(1, 40))
    draw_scaled(case, ("gate_up_proj", "down_proj"), layer.transposed)
    case.call = lambda package, tensors, routings: package.grouped_mm_experts(
        top_k_index=routings[0], capacity=capacity, **with_operands(case, package, tensors),
        **case.block_options(package),
    )  # fmt: skip
    case.want = lambda reference, tensors, routings: reference.grouped_mm_experts(
        top_k_index=routings[0], **merged(case, reference, tensors, layer.transposed), **case.block_options()
    )


def draw_parts(case: Case) -> None:
    """route, gather_rows, grouped_linear and combine_rows in a row."""
    draw, layer, tokens = case.draw, case.layer, case.draw_tokens()
    case.draw_weight("hidden_states", tokens, layer.transposed)
    case.draw_scales("top_k_weights", tokens, layer.top_k)
    if case.choose("bias", False, True):
        case.values["bias"] = draw.normal(layer.E, layer.I)

    def call(package, tensors: Dict[str, Tensor], routings: List[Tensor]) -> Tensor:
        routing = package.route(routings[0], layer.E)
        rows = package.gather_rows(tensors["hidden_states"], routing)
        offsets = package.GroupOffsets(routing.expert_offsets)
        weight, bias = tensors["weight"], tensors.get("bias")
        rows = package.grouped_linear(rows, weight, offsets, bias, transposed=layer.transposed)
        return package.combine_rows(rows, tensors["top_k_weights"], routing)

    def want(reference, tensors: Dict[str, Tensor], routings: List[Tensor]) -> Tensor:
        x, (offsets, slots) = tensors["hidden_states"], sort_slots(routings[0], layer.E)
        given, some = (tensors["weight"], offsets, tensors.get("bias")), slots // layer.top_k
        rows = reference.grouped_linear(x[some], *given, transposed=layer.transposed)
        rows = reference.scale_rows(rows, tensors["top_k_weights"].flatten()[slots])
        return x.new_zeros(tokens, layer.I).index_add(0, some, rows)

    case.call, case.want = call, want


def draw_route(case: Case) -> None:
    layer, case.differentiable = case.layer, False
    case.draw_tokens()

    def call(package, tensors: Dict[str, Tensor], routings: List[Tensor]) -> Dict[str, Tensor]:
        found = package.route(routings[0], layer.E)
        rows = found.row_to_slot[: int(found.expert_offsets[-1])]
        return {"expert_offsets": found.expert_offsets, "row_to_slot": rows, "slot_to_row": found.slot_to_row}

    def want(reference, tensors: Dict[str, Tensor], routings: List[Tensor]) -> Dict[str, Tensor]:
        offsets, rows = sort_slots(routings[0], layer.E)
        slots = torch.full_like(routings[0], -1, dtype=torch.int64).flatten()
        slots[rows] = torch.arange(len(rows), device=slots.device)
        return {"expert_offsets": offsets, "row_to_slot": rows, "slot_to_row": slots}

    case.call, case.want = call, want


def draw_linear(case: Case, discrete: bool = False) -> None:
    """discrete: weights (N, K) that a module can take."""
    layer, draw, rows = case.layer, case.draw, case.draw_rows()
    transposed = layer.transposed and not discrete
    case.draw_weight("x", rows, transposed)
    bias = case.choose("bias", "none", "plain", "scaled")
    if bias != "none":
        case.values["bias"] = draw.normal(layer.E, layer.I)
    if bias == "scaled":
        case.draw_scales("bias_scales", rows)
    draw_pairs(case, {} if discrete else {"weight": "lora"}, transposed)
    draw_scaled(case, () if discrete else ("weight",), transposed)
    case.call = lambda package, tensors, routings: package.grouped_linear(
        splits=case.splits(package, routings[0]), transposed=transposed, **with_operands(case, package, tensors)
    )
    case.want = lambda reference, tensors, routings: reference.grouped_linear(
        group_offsets=case.offsets(routings[0]), transposed=transposed, **merged(case, reference, tensors, transposed)
    )


def draw_mlp(case: Case) -> None:
    rows = case.draw_rows()
    case.draw_block("x", rows, (), BIASES, BIASES[:1], BIASES[1:])
    scales = case.choose("scales", "none", "activation", "bias", "both", "same")
    if scales in ("activation", "both", "same"):
        case.draw_scales("activation_scales", rows)
    if scales in ("bias", "both") and BIASES[1] in case.values:
        case.draw_scales("bias_scales", rows)

    def given(tensors: Dict[str, Tensor]) -> dict:
        """One tensor may be the scales of the activation and of the bias."""
        found = {"activation_scales": None, **tensors}
        same = scales == "same" and BIASES[1] in tensors
        return {**found, "bias_scales": found["activation_scales"]} if same else found

    case.call = lambda package, tensors, routings: package.grouped_mlp(
        splits=case.splits(package, routings[0]), **given(tensors), **case.block_options(package)
    )
    case.want = lambda reference, tensors, routings: reference.grouped_mlp(
        group_offsets=case.offsets(routings[0]), **given(tensors), **case.block_options()
    )


def draw_bias_grads(case: Case) -> None:
    case.differentiable, case.written = False, ("dbias", "dscales")
    draw, rows, shape = case.draw, case.draw_rows(), (case.layer.E, case.layer.I)
    case.values = {"dy": draw.normal(rows, case.layer.I), "bias": draw.normal(*shape)}
    case.draw_scales("bias_scales", rows)
    case.computed_in = torch.promote_types(case.dtype, torch.float32)
    for name, size in (("dbias", shape), ("dscales", (rows,))):
        if case.choose(name, False, True):
            case.values[name], case.dtypes[name] = draw.normal(*size), case.computed_in

    def call(package, tensors: Dict[str, Tensor], routings: List[Tensor]) -> Dict[str, Tensor]:
        grads = package.grouped_dbias_dscales(splits=case.splits(package, routings[0]), **tensors)
        return dict(zip(case.written, grads))

    def want(reference, tensors: Dict[str, Tensor], routings: List[Tensor]) -> Dict[str, Tensor]:
        dy, scales, bias = (tensors[name] for name in ("dy", "bias_scales", "bias"))
        dbias, dscales = (0 * t + tensors.get(name, 0) for name, t in zip(case.written, (bias, scales)))
        ends = case.offsets(routings[0]).tolist()
        for group, (start, end) in enumerate(zip(ends, ends[1:])):
            dbias[group] += reference.linear(scales[None, start:end], dy[start:end].t())[0]
            dscales[start:end] += reference.linear(dy[start:end], bias[None, group])[:, 0]
        return {"dbias": dbias, "dscales": dscales}

    case.call, case.want = call, want


class Module:
    """Cases of GroupedLinear: parameters in one piece or not, main_grad, delayed gradients, one or two microbatches."""

    def __init__(self, case: Case) -> None:
        case.differentiable, case.written = False, ("main_grad",)
        draw_linear(case, discrete=True)
        self.case, self.options, self.linear = case, case.options, case.want
        for name in (*MODULE_FLAGS, "zero_out_wgrad", "data_replaced", "main_grads_apart", "marked"):
            case.choose(name, False, True)
        case.choose("overwrite_main_grad", False, False, True)
        case.choose("microbatches", 1, 2)
        case.choose("frozen", [case.draw.chance(0.3) for _ in range(case.layer.E)])
        case.values["main_grad"] = case.draw.normal(*case.values["weight"].shape)
        case.dtypes["main_grad"] = case.choose("main_grad_dtype", torch.float32, torch.float32, case.dtype)
        self.kinds = [kind for kind in ("weight", "bias") if kind in case.values]
        case.call, case.want = self.call, self.want

    def pieces(self, kind: str, tensor: Tensor) -> List[Tensor]:
        """What of a tensor belongs to each of the module's weights or biases."""
        return [tensor] if self.options[f"single_grouped_{kind}"] else list(tensor.unbind(0))

    def has_grad(self, kind: str) -> Tensor:
        """(E,) bool: of which groups the weights or biases get a gradient. Frozen are discrete ones alone."""
        frozen = torch.tensor(self.options["frozen"]) & (not self.options[f"single_grouped_{kind}"])
        return ~frozen & (self.case.mode == "grad" and kind in self.case.wanted)

    def make(self, package, tensors: Dict[str, Tensor]):
        """(module, its parameters by kind), which hold copies of the tensors or the tensors themselves."""
        layer, options, parameters = self.case.layer, self.options, {}
        given = {"bias": "bias" in tensors, "scale_bias": "bias_scales" in tensors}
        given.update({name: options[name] for name in MODULE_FLAGS}, device=tensors["x"].device, dtype=layer.dtype)
        module = package.GroupedLinear(layer.E, layer.H, layer.I, **given)
        for kind in self.kinds:
            values = self.pieces(kind, tensors[kind])
            names = [kind] if options[f"single_grouped_{kind}"] else [f"{kind}{group}" for group in range(layer.E)]
            parameters[kind] = [getattr(module, name) for name in names]
            for parameter, value, wanted in zip(parameters[kind], values, self.has_grad(kind).tolist()):
                if options["data_replaced"]:
                    parameter.data = value
                else:
                    parameter.data.copy_(value)
                parameter.requires_grad_(wanted)
        if options["accumulate_into_main_grad"]:
            for weight, buffer in zip(parameters["weight"], self.pieces("weight", tensors["main_grad"])):
                weight.main_grad = buffer.clone() if options["main_grads_apart"] else buffer
                vars(weight).update({name: options[name] for name in ("overwrite_main_grad", "zero_out_wgrad")})
                if options["marked"]:
                    weight.grad_added_to_main_grad = False
        return module, parameters

    def grad_of(self, parameter, main: bool, wanted: bool) -> Tensor:
        """The gradient of a parameter, or its main_grad; 0 where there is none. Fails if another one is there."""
        marked = main and self.options["marked"]
        if marked:
            added = parameter.grad_added_to_main_grad
            expect(added == wanted, f"grad_added_to_main_grad: {added}, wanted: {wanted}")
        if marked and wanted and self.options["zero_out_wgrad"]:
            expect(not parameter.grad.any(), "weight: a dummy gradient that is not 0")
        expected = wanted and (marked or not main)
        expect((parameter.grad is not None) == expected, f"{tuple(parameter.shape)}: a gradient is wanted: {expected}")
        grad = parameter.main_grad if main else parameter.grad
        return torch.zeros_like(parameter) if grad is None else grad

    def call(self, package, tensors: Dict[str, Tensor], routings: List[Tensor]) -> Dict[str, Tensor]:
        """Outputs and gradients of inputs of each microbatch; the gradients of the parameters after the last."""
        case, microbatches, results = self.case, self.options["microbatches"], {}
        module, parameters = self.make(package, tensors)
        inputs = [name for name in ("x", "bias_scales") if name in tensors]
        for number, routing in enumerate(routings[:microbatches]):
            leaves = {name: tensors[name].detach().requires_grad_(name in case.wanted) for name in inputs}
            with CONTEXTS.get(case.mode, contextlib.nullcontext)():
                y = module(leaves["x"], case.splits(package, routing), leaves.get("bias_scales"))
            results[f"y{number}"] = y.detach()
            if y.requires_grad:
                y.backward(tensors["dout"])
            for name, leaf in leaves.items():
                wanted = case.mode == "grad" and name in case.wanted
                expect((leaf.grad is not None) == wanted, f"grad of {name}: wanted are {case.wanted}")
                results.update({f"grad{number} of {name}": leaf.grad} if wanted else {})
        if self.options["delay_wgrad"] and case.mode == "grad":
            expect(all(w.grad is None for w in parameters["weight"]), "weight: a gradient before backward_dw()")
            for _ in range(microbatches):
                module.backward_dw()
            expect(module.discard_delayed_wgrad() == 0, "GroupedLinear: something is left to backward_dw()")
        for kind, some in parameters.items():
            main = kind == "weight" and self.options["accumulate_into_main_grad"]
            grads = [self.grad_of(p, main, wanted) for p, wanted in zip(some, self.has_grad(kind).tolist())]
            results[f"grad of {kind}"] = torch.cat(grads)
        return results

    def want(self, reference, tensors: Dict[str, Tensor], routings: List[Tensor]) -> Dict[str, Tensor]:
        case, results, grads = self.case, {}, []
        names = [name for name in ("x", "weight", "bias", "bias_scales") if name in tensors]
        for number, routing in enumerate(routings[: self.options["microbatches"]]):
            leaves = {name: tensors[name].detach().requires_grad_() for name in names}
            y = self.linear(reference, per_group(leaves), [routing])
            results[f"y{number}"] = y.detach()
            grads.append(dict(zip(names, torch.autograd.grad(y, list(leaves.values()), tensors["dout"]))))
            for name in ("x", "bias_scales"):
                if case.mode == "grad" and name in case.wanted:
                    results[f"grad{number} of {name}"] = grads[-1][name]
        for kind in self.kinds:
            total = sum(of[kind] for of in grads)
            before = torch.zeros_like(total)
            if kind == "weight" and self.options["accumulate_into_main_grad"]:
                before = tensors["main_grad"]
                total = grads[-1][kind] if self.options["overwrite_main_grad"] else before + total
            mask = self.has_grad(kind).to(total.device).view(-1, *[1] * (total.dim() - 1))
            results[f"grad of {kind}"] = torch.cat(self.pieces(kind, torch.where(mask, total, before)))
        return results


OPS = {  # and how often each is drawn
    "grouped_mm_experts": (draw_experts, 8),
    "grouped_linear": (draw_linear, 3),
    "grouped_mlp": (draw_mlp, 3),
    "GroupedLinear": (Module, 3),
    "route, gather_rows, combine_rows": (draw_parts, 2),
    "route": (draw_route, 1),
    "grouped_dbias_dscales": (draw_bias_grads, 1),
}
