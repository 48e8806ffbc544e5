"""GroupedLinear modules of every form, their inputs, and what the reference makes of them."""

from typing import Dict, NamedTuple, Optional

import pytest
import torch
from compare import assert_close
from torch import Tensor

SIZES = (7, 0, 19, 5)
HEAD, TAIL = 3, 6
ROWS = HEAD + sum(SIZES) + TAIL
G, N, K = len(SIZES), 40, 48
NAN = float("nan")
FLOAT, HALF = torch.float32, torch.bfloat16
PLACES = ["single", "transposed", "packed", "padded", "descending", "apart"]  # of the main_grads of a module
by_place = pytest.mark.parametrize("place", PLACES)
by_single = pytest.mark.parametrize("single", [True, False], ids=["single", "discrete"])
by_delay = pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
by_overwrite = pytest.mark.parametrize("overwrite", [False, True], ids=["add", "overwrite"])


class Form(NamedTuple):
    """A module's parameters: single or discrete, with a bias or without or scaled, and in which dtype."""

    weight: bool = True
    bias: bool = True
    kind: str = "bias"  # "none", "bias" or "scaled"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        names = ["single" if self.weight else "discrete", self.kind, str(self.dtype)[6:]]
        if self.bias != self.weight:
            names.append("bias-" + ("single" if self.bias else "discrete"))
        return "-".join(names)


FORMS = [
    Form(),
    Form(kind="scaled"),
    Form(kind="none"),
    Form(False, False),
    Form(False, False, "scaled"),
    Form(False, True, "scaled"),
    Form(True, False, "scaled"),
    Form(False, kind="none"),
    Form(kind="scaled", dtype=torch.bfloat16),
    Form(False, False, "scaled", torch.bfloat16),
]
LAYOUTS = [Form(weight, bias, "scaled") for weight in (True, False) for bias in (True, False)]
by_form = pytest.mark.parametrize("form", FORMS, ids=str)
by_layout = pytest.mark.parametrize("form", LAYOUTS, ids=str)


class Batch(NamedTuple):
    """What goes in, and the cotangent of what comes out."""

    x: Tensor
    offsets: Tensor
    scales: Optional[Tensor]
    dy: Tensor


def make_module(grouped_moe, form: Form, device: str, **options):
    """A module of this form; the same parameters whatever the layout, for one state of the generator."""
    return grouped_moe.GroupedLinear(
        G, K, N, bias=form.kind != "none", scale_bias=form.kind == "scaled", single_grouped_weight=form.weight,
        single_grouped_bias=form.bias, dtype=form.dtype, device=device, **options,
    )  # fmt: skip


def make_batch(form: Form, device: str, rows: int = ROWS) -> Batch:
    """Rows of no group before the first and after the last. Scales are fp32, x is of the module's dtype."""
    x, dy, scales = torch.randn(rows, K), torch.randn(rows, N), torch.randn(rows)
    offsets = torch.tensor((HEAD, *SIZES)).cumsum(0)
    if rows != ROWS:
        offsets = torch.linspace(HEAD, rows - TAIL, G + 1).long()
    x, dy = x.to(device, form.dtype), dy.to(device, form.dtype)
    return Batch(x, offsets.to(device), scales.to(device) if form.kind == "scaled" else None, dy)


def leaves(batch: Batch) -> Batch:
    """x and the scales anew, as leaves of autograd."""
    scales = None if batch.scales is None else batch.scales.detach().clone().requires_grad_()
    return batch._replace(x=batch.x.detach().clone().requires_grad_(), scales=scales)


def packed(module, kind: str, get=lambda parameter: parameter.detach()) -> Optional[Tensor]:
    """(G, N, K) or (G, N): get(parameter) of all parameters of a kind. None where get gives None or there is none."""
    named = {name: get(p) for name, p in module.named_parameters() if name.startswith(kind)}
    if not named or any(tensor is None for tensor in named.values()):
        return None
    return named[kind] if kind in named else torch.stack([named[f"{kind}{group}"] for group in range(G)])


def is_packed(module) -> bool:
    """Whether discrete weights are views of one (G, N, K) storage."""
    starts = [getattr(module, f"weight{group}").data_ptr() for group in range(G)]
    step = N * K * module.weight0.element_size()
    one_storage = len({getattr(module, f"weight{group}").untyped_storage().data_ptr() for group in range(G)}) == 1
    return one_storage and starts == [starts[0] + group * step for group in range(G)]


def parameter_grads(module) -> Dict[str, Tensor]:
    """{"weight", "bias"}: gradients, where there are such parameters."""
    found = {kind: grads(module, kind) for kind in ("weight", "bias")}
    return {kind: grad for kind, grad in found.items() if grad is not None}


def run(module, batch: Batch) -> Dict[str, Tensor]:
    """The output, and the gradients of the inputs; those of the parameters are where the module puts them."""
    batch = leaves(batch)
    y = module(batch.x, batch.offsets, batch.scales)
    y.backward(batch.dy)
    grads = {"y": y.detach(), "x": batch.x.grad}
    return grads if batch.scales is None else {**grads, "scales": batch.scales.grad}


def reference(grouped_moe, module, batch: Batch) -> Dict[str, Tensor]:
    """Output and every gradient in fp64, of what the module holds now."""
    tensors = {"x": batch.x, "scales": batch.scales, "weight": packed(module, "weight"), "bias": packed(module, "bias")}
    wide = {k: None if t is None else t.detach().double().requires_grad_() for k, t in tensors.items()}
    y = grouped_moe.reference.grouped_linear(wide["x"], wide["weight"], batch.offsets, wide["bias"], wide["scales"])
    y.backward(batch.dy.double())
    return {"y": y.detach(), **{name: t.grad for name, t in wide.items() if t is not None}}


def assert_matches(got: Dict[str, Optional[Tensor]], want: Dict[str, Tensor], dtype: torch.dtype) -> None:
    """Every entry of got, within the tolerances of dtype; the scales' gradient within those of its own."""
    for name, tensor in got.items():
        assert tensor is not None, name
        tolerance = tensor.dtype if name == "scales" else dtype
        assert_close(name, tensor, want[name], tolerance, inner_products=name == "scales")


def form_of(place, dtype=FLOAT, kind="scaled"):
    """Of a module whose main_grads lie like this: in one tensor for the two first places, else in one per group."""
    single = place in PLACES[:2]
    return Form(single, single, kind, dtype)


def give_main_grads(module, place, dtype=FLOAT, value=None, **attributes):
    """Gives every weight these attributes and a main_grad, random unless a value is given. Returns a copy of all."""
    weights = [p for name, p in module.named_parameters() if name.startswith("weight")]
    shape, device = (G, N, K), weights[0].device
    if place == "single":
        buffers = [torch.empty(shape, dtype=dtype, device=device)]
    elif place == "transposed":
        buffers = [torch.empty((G, K, N), dtype=dtype, device=device).transpose(1, 2)]
    elif place == "apart":
        buffers = [torch.empty(shape[1:], dtype=dtype, device=device) for _ in weights]
    else:
        flat = torch.full((G, N + (place == "padded"), K), NAN, dtype=dtype, device=device)
        buffers = [flat[G - 1 - group if place == "descending" else group, :N] for group in range(G)]
    for weight, buffer in zip(weights, buffers):
        weight.main_grad = buffer.normal_() if value is None else buffer.fill_(value)
        for name, attribute in attributes.items():
            setattr(weight, name, attribute)
    return packed(module, "weight", lambda p: p.main_grad.clone())


def main_grads(module):
    return packed(module, "weight", lambda p: p.main_grad)


def grads(module, kind):
    return packed(module, kind, lambda p: p.grad)


def wanted_main_grad(before, overwrite, *references):
    """fp64, after one microbatch or more."""
    total = references[-1]["weight"] if overwrite else sum(r["weight"] for r in references)
    return total if overwrite else before.double() + total
