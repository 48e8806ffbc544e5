"""A class of cases for each public op: what it draws, how the package is called and what the reference makes of it."""

import contextlib
from typing import Dict, List, Sequence

import torch
from fuzz_cases import (
    CONTEXTS,
    WEIGHTS,
    Case,
    bounds,
    draw_ids,
    draw_slots,
    draw_splits,
    expect,
    is_sentinel,
    per_group,
)
from torch import Tensor

BIASES = ("gate_up_proj_bias", "down_proj_bias")


class Routed(Case):
    """Tensors of tokens, and ids."""

    def draw_routings(self) -> int:
        """The tokens."""
        tokens = draw_slots(self.draw, self.layer) // self.layer.top_k
        first = draw_ids(self.draw, self.layer, tokens)
        self.routings = [first, draw_ids(self.draw, self.layer, tokens).clamp(-1, self.layer.E).to(first.dtype)]
        return tokens

    def dead(self) -> Dict[str, Tensor]:
        sentinel = is_sentinel(self.routings[0], self.layer.E)
        idle = torch.ones(self.layer.E, dtype=torch.bool)
        idle[self.routings[0][~sentinel].long()] = False
        rows = sentinel.all(1)
        masks = {"hidden_states": rows, "dout": rows, "top_k_weights": sentinel, **dict.fromkeys(WEIGHTS, idle)}
        return {name: masks[name] for name in self.values}


class Experts(Routed):
    op = "grouped_mm_experts"

    def make(self) -> None:
        layer, draw = self.layer, self.draw
        tokens = self.draw_routings()
        biases = draw.one((), BIASES) if layer.gated else draw.one((), BIASES, BIASES[:1], BIASES[1:])
        self.block_values("hidden_states", tokens, biases)
        self.scales("top_k_weights", tokens, layer.top_k)
        local = max(int((~is_sentinel(ids, layer.E)).sum()) for ids in self.routings)
        self.options["capacity"] = draw.one(None, None, max(1, local), local + draw.between(1, 40))

    def call(self, package, tensors, routing):
        tensors = {name: t for name, t in tensors.items() if name != "dout"}
        return package.grouped_mm_experts(top_k_index=routing, **tensors, **self.package_options(package))

    def want(self, reference, tensors, routing):
        tensors = {name: t for name, t in tensors.items() if name != "dout"}
        return reference.grouped_mm_experts(top_k_index=routing, **tensors, **self.reference_options())


class Blocks(Routed):
    """route, gather_rows, grouped_linear and combine_rows in a row."""

    op = "route, gather_rows, combine_rows"

    def make(self) -> None:
        layer, draw = self.layer, self.draw
        tokens = self.draw_routings()
        shape = (layer.E, layer.H, layer.I) if layer.transposed else (layer.E, layer.I, layer.H)
        self.values = {"hidden_states": draw.normal(tokens, layer.H), "weight": draw.normal(*shape) / layer.H**0.5}
        if draw.chance(0.5):
            self.values["bias"] = draw.normal(layer.E, layer.I)
        self.values["dout"] = draw.normal(tokens, layer.I)
        self.scales("top_k_weights", tokens, layer.top_k)

    def call(self, package, tensors, routing):
        routing = package.route(routing, self.layer.E)
        rows = package.gather_rows(tensors["hidden_states"], routing)
        weight, bias = tensors["weight"], tensors.get("bias")
        offsets = package.GroupOffsets(routing.expert_offsets)
        rows = package.grouped_linear(rows, weight, offsets, bias, transposed=self.layer.transposed)
        return package.combine_rows(rows, tensors["top_k_weights"], routing)

    def want(self, reference, tensors, routing):
        out, bias = torch.zeros_like(tensors["dout"]), tensors.get("bias", [None] * self.layer.E)
        for e in range(self.layer.E):
            tokens, ks = (routing == e).nonzero(as_tuple=True)
            weight = tensors["weight"][e].t() if self.layer.transposed else tensors["weight"][e]
            y = reference.linear(tensors["hidden_states"][tokens], weight, bias[e])
            out = out.index_add(0, tokens, y * tensors["top_k_weights"][tokens, ks, None])
        return out


class Route(Routed):
    """Integers, which have to be those of a stable sort."""

    op = "route"
    replayable = False

    def make(self) -> None:
        self.draw_routings()

    def run(self, package, tensors, routings):
        found = package.route(routings[0], self.layer.E)
        rows = found.row_to_slot[: int(found.expert_offsets[-1])]
        return {"expert_offsets": found.expert_offsets, "row_to_slot": rows, "slot_to_row": found.slot_to_row}

    def expected(self, reference, tensors, routings):
        ids = routings[0].flatten().long()
        ids = torch.where(is_sentinel(ids, self.layer.E), self.layer.E, ids)
        counts = torch.bincount(ids, minlength=self.layer.E + 1)[: self.layer.E]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows = ids.argsort(stable=True)[: int(offsets[-1])]
        slots = torch.full_like(ids, -1)
        slots[rows] = torch.arange(len(rows), device=ids.device)
        return {"expert_offsets": offsets, "row_to_slot": rows, "slot_to_row": slots}


class Grouped(Case):
    """Tensors of rows, and splits."""

    def draw_routings(self) -> int:
        """The rows."""
        draw, groups = self.draw, self.layer.E
        rows = draw_slots(draw, self.layer)
        self.kind = draw.one("sizes", "offsets", "tensor", "list")
        shape = draw.one("sizes", "offsets") if self.kind == "tensor" else self.kind
        self.kind = "tensor" if self.kind == "list" and self.mode == "replay" else self.kind
        valid = self.kind == "list" or draw.chance(0.8)
        splits = draw_splits(draw, groups, rows, shape, valid)
        self.routings = [splits, draw_splits(draw, groups, rows, shape, valid).to(splits.dtype)]
        self.rows = rows
        return rows

    def splits(self, package, routing: Tensor):
        makers = {"sizes": package.GroupSizes, "offsets": package.GroupOffsets, "list": Tensor.tolist}
        return makers.get(self.kind, lambda tensor: tensor)(routing)

    def offsets(self, routing: Tensor) -> Tensor:
        return bounds(routing, self.layer.E, self.rows)

    def dead(self) -> Dict[str, Tensor]:
        rows, idle = torch.ones(self.rows, dtype=torch.bool), torch.ones(self.layer.E, dtype=torch.bool)
        for routing in self.called():
            offsets = self.offsets(routing)
            rows[int(offsets[0]) : int(offsets[-1])] = False
            idle &= offsets[1:] == offsets[:-1]
        return {name: idle if name in WEIGHTS else rows for name in self.values if name not in self.written}

    def called(self) -> Sequence[Tensor]:
        """The routings that one run uses."""
        return self.routings[:1]


class Linear(Grouped):
    op = "grouped_linear"

    def make(self) -> None:
        layer, draw, rows = self.layer, self.draw, self.draw_routings()
        self.transposed = self.op == "grouped_linear" and layer.transposed
        shape = (layer.E, layer.H, layer.I) if self.transposed else (layer.E, layer.I, layer.H)
        self.values = {"x": draw.normal(rows, layer.H), "weight": draw.normal(*shape) / layer.H**0.5}
        if draw.chance(0.6):
            self.values["bias"] = draw.normal(layer.E, layer.I)
            if draw.chance(0.5):
                self.scales("bias_scales", rows)
        self.values["dout"] = draw.normal(rows, layer.I)

    def call(self, package, tensors, routing):
        bias, scales = tensors.get("bias"), tensors.get("bias_scales")
        splits = self.splits(package, routing)
        return package.grouped_linear(tensors["x"], tensors["weight"], splits, bias, scales, transposed=self.transposed)

    def want(self, reference, tensors, routing):
        bias, scales = tensors.get("bias"), tensors.get("bias_scales")
        offsets = self.offsets(routing)
        return reference.grouped_linear(tensors["x"], tensors["weight"], offsets, bias, scales, self.transposed)


class Mlp(Grouped):
    op = "grouped_mlp"

    def make(self) -> None:
        draw, rows = self.draw, self.draw_routings()
        biases = draw.one((), BIASES, BIASES[:1], BIASES[1:])
        self.block_values("x", rows, biases)
        if draw.chance(0.7):
            self.scales("activation_scales", rows)
        self.same = "activation_scales" in self.values and BIASES[1] in biases and draw.chance(0.3)
        if BIASES[1] in biases and not self.same and draw.chance(0.6):
            self.scales("bias_scales", rows)

    def arguments(self, tensors: Dict[str, Tensor]) -> Dict[str, Tensor]:
        """One tensor may be the scales of both."""
        found = {"activation_scales": None, **tensors}
        del found["dout"]
        return {**found, "bias_scales": found["activation_scales"]} if self.same else found

    def call(self, package, tensors, routing):
        options = self.package_options(package)
        return package.grouped_mlp(splits=self.splits(package, routing), **self.arguments(tensors), **options)

    def want(self, reference, tensors, routing):
        options = self.reference_options()
        return reference.grouped_mlp(group_offsets=self.offsets(routing), **self.arguments(tensors), **options)


class Module(Linear):
    """GroupedLinear, one or two microbatches: its parameters in one piece or not, main_grad, delayed gradients."""

    op = "GroupedLinear"
    replayable = False
    written = ("main_grad",)

    def make(self) -> None:
        super().make()
        draw, values = self.draw, self.values
        self.mode = "grad" if self.mode == "retain" else self.mode
        flags = ("single_grouped_weight", "single_grouped_bias", "accumulate_into_main_grad", "delay_wgrad")
        self.options = {name: draw.chance(0.5) for name in flags}
        values["main_grad"] = draw.normal(*values["weight"].shape)
        self.dtypes["main_grad"] = draw.one(torch.float32, torch.float32, self.dtype)
        self.attributes = {"overwrite_main_grad": draw.chance(0.3), "zero_out_wgrad": draw.chance(0.5)}
        if draw.chance(0.5):
            self.attributes["grad_added_to_main_grad"] = False
        self.microbatches, self.replaced, self.apart = draw.one(1, 2), draw.chance(0.5), draw.chance(0.5)
        self.frozen_groups = [draw.chance(0.3) for _ in range(self.layer.E)]

    def called(self) -> Sequence[Tensor]:
        return self.routings[: self.microbatches]

    def parameters(self, module, kind: str) -> List[Tensor]:
        single = self.options[f"single_grouped_{kind}"]
        return [getattr(module, name) for name in ([kind] if single else [f"{kind}{g}" for g in range(self.layer.E)])]

    def pieces(self, tensor: Tensor, kind: str) -> List[Tensor]:
        """What belongs to each parameter."""
        return [tensor] if self.options[f"single_grouped_{kind}"] else list(tensor.unbind(0))

    def build(self, package, tensors: Dict[str, Tensor]):
        """The module, which holds copies of the tensors or the tensors themselves; some of it is frozen."""
        layer, given = self.layer, {"scale_bias": "bias_scales" in tensors, "bias": "bias" in tensors}
        like = {"device": tensors["x"].device, "dtype": self.dtype}
        module = package.GroupedLinear(layer.E, layer.H, layer.I, **given, **like, **self.options)
        for kind in ("weight", "bias")[: 1 + given["bias"]]:
            parameters = self.parameters(module, kind)
            for number, (parameter, value) in enumerate(zip(parameters, self.pieces(tensors[kind], kind))):
                if self.replaced:
                    parameter.data = value
                else:
                    parameter.data.copy_(value)
                parameter.requires_grad_(kind in self.wanted and not self.is_frozen(kind, number))
        if self.options["accumulate_into_main_grad"]:
            for weight, buffer in zip(self.parameters(module, "weight"), self.pieces(tensors["main_grad"], "weight")):
                weight.main_grad = buffer.clone() if self.apart else buffer
                vars(weight).update(self.attributes)
        return module

    def is_frozen(self, kind: str, number: int) -> bool:
        """Of a kind that is wanted, the parameters that are not."""
        return not self.options[f"single_grouped_{kind}"] and self.frozen_groups[number]

    def run(self, package, tensors, routings):
        module = self.build(package, tensors)
        inputs = [name for name in ("x", "bias_scales") if name in tensors]
        results, graded = {}, self.mode == "grad"
        for number, routing in enumerate(routings[: self.microbatches]):
            leaves = {name: tensors[name].detach().requires_grad_(name in self.wanted) for name in inputs}
            with CONTEXTS.get(self.mode, contextlib.nullcontext)():
                y = module(leaves["x"], self.splits(package, routing), leaves.get("bias_scales"))
            results[f"y{number}"] = y.detach()
            if y.requires_grad:
                y.backward(tensors["dout"])
            for name, leaf in leaves.items():
                wanted = graded and name in self.wanted
                expect((leaf.grad is not None) == wanted, f"grad of {name}: wanted are {self.wanted}")
                results.update({f"grad{number} of {name}": leaf.grad} if wanted else {})
        if self.options["delay_wgrad"] and graded:
            for weight in self.parameters(module, "weight"):
                expect(weight.grad is None, "weight: a gradient before backward_dw()")
            for _ in range(self.microbatches):
                module.backward_dw()
            expect(module.discard_delayed_wgrad() == 0, "GroupedLinear: something is left to backward_dw()")
        return {**results, **self.parameter_results(module, graded)}

    def parameter_results(self, module, graded: bool) -> Dict[str, Tensor]:
        results = {}
        for kind in ("weight", "bias")[: 1 + ("bias" in self.values)]:
            main = kind == "weight" and self.options["accumulate_into_main_grad"]
            for number, parameter in enumerate(self.parameters(module, kind)):
                wanted = graded and parameter.requires_grad
                if main:
                    results[f"main_grad{number}"] = parameter.main_grad
                    if "grad_added_to_main_grad" in self.attributes:
                        added = parameter.grad_added_to_main_grad
                        expect(added == wanted, f"grad_added_to_main_grad: {added}, wanted: {wanted}")
                    wanted = wanted and "grad_added_to_main_grad" in self.attributes
                    if wanted and self.attributes["zero_out_wgrad"]:
                        expect(not parameter.grad.any(), "weight: a dummy gradient that is not 0")
                elif wanted:
                    results[f"grad of {kind}{number}"] = parameter.grad
                expect((parameter.grad is not None) == wanted, f"{kind}{number}: a gradient is wanted: {wanted}")
        return results

    def expected(self, reference, tensors, routings):
        names = [name for name in ("x", "weight", "bias", "bias_scales") if name in tensors]
        results, sums, graded = {}, {}, self.mode == "grad"
        for number, routing in enumerate(routings[: self.microbatches]):
            leaves = {name: tensors[name].detach().requires_grad_() for name in names}
            y = self.want(reference, per_group(leaves), routing)
            results[f"y{number}"] = y.detach()
            grads = dict(zip(names, torch.autograd.grad(y, list(leaves.values()), tensors["dout"])))
            for name in ("x", "bias_scales"):
                if graded and name in self.wanted and name in names:
                    results[f"grad{number} of {name}"] = grads[name]
            for kind in ("weight", "bias"):
                sums.setdefault(kind, []).append(grads.get(kind))
        return {**results, **self.expected_of_parameters(tensors, sums, graded)}

    def expected_of_parameters(self, tensors, sums, graded: bool) -> Dict[str, Tensor]:
        results = {}
        for kind in ("weight", "bias")[: 1 + ("bias" in tensors)]:
            total = self.pieces(sum(sums[kind]), kind)
            main = kind == "weight" and self.options["accumulate_into_main_grad"]
            if main:
                before = self.pieces(tensors["main_grad"], kind)
                last = self.pieces(sums[kind][-1], kind)
                total = last if self.attributes["overwrite_main_grad"] else [b + t for b, t in zip(before, total)]
            for number, value in enumerate(total):
                wanted = graded and kind in self.wanted and not self.is_frozen(kind, number)
                if main:
                    results[f"main_grad{number}"] = value if wanted else before[number]
                elif wanted:
                    results[f"grad of {kind}{number}"] = value
        return results


class BiasGrads(Grouped):
    op = "grouped_dbias_dscales"
    replayable = False
    written = ("dbias", "dscales")

    def make(self) -> None:
        draw, rows, groups = self.draw, self.draw_routings(), self.layer.E
        self.values = {"dy": draw.normal(rows, self.layer.I), "bias": draw.normal(groups, self.layer.I)}
        self.scales("bias_scales", rows)
        for name, shape in (("dbias", (groups, self.layer.I)), ("dscales", (rows,))):
            if draw.chance(0.5):
                self.values[name], self.dtypes[name] = draw.normal(*shape), self.computed_in

    @property
    def computed_in(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def run(self, package, tensors, routings):
        dbias, dscales = package.grouped_dbias_dscales(splits=self.splits(package, routings[0]), **tensors)
        return {"dbias": dbias, "dscales": dscales}

    def expected(self, reference, tensors, routings):
        dy, scales, bias = (tensors[name] for name in ("dy", "bias_scales", "bias"))
        dbias, dscales = (0 * t + tensors.get(name, 0) for name, t in (("dbias", bias), ("dscales", scales)))
        ends = self.offsets(routings[0]).tolist()
        for group, (start, end) in enumerate(zip(ends, ends[1:])):
            dbias[group] += scales[start:end] @ dy[start:end]
            dscales[start:end] += dy[start:end] @ bias[group]
        return {"dbias": dbias, "dscales": dscales}


# How often each is drawn.
OPS = [Experts] * 8 + [Linear] * 3 + [Mlp] * 3 + [Module] * 3 + [Blocks] * 2 + [Route, BiasGrads]
