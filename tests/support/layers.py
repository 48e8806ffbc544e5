"""GroupedLinear modules of every form, their inputs, and what the reference makes of them."""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import pytest
import torch
from compare import assert_close
from torch import Tensor, nn

SIZES = (7, 0, 19, 5)
HEAD, TAIL = 3, 9
ROWS = HEAD + sum(SIZES) + TAIL
G, N, K = len(SIZES), 40, 48
NAN = float("nan")
FLOAT, HALF = torch.float32, torch.bfloat16
PLACES = ["single", "transposed", "packed", "padded", "descending", "apart"]  # of the main_grads of a module
by_place = pytest.mark.parametrize("place", PLACES)
by_two_places = pytest.mark.parametrize("place", ["single", "packed"])
by_single = pytest.mark.parametrize("single", [True, False], ids=["single", "discrete"])
by_delay = pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
by_main = pytest.mark.parametrize("main", [False, True], ids=["grad", "main_grad"])


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


LAYOUTS = [Form(weight, bias, "scaled") for weight in (True, False) for bias in (True, False)]
FORMS = [
    *LAYOUTS,
    Form(),
    Form(kind="none"),
    Form(False, False),
    Form(False, kind="none"),
    Form(kind="scaled", dtype=torch.bfloat16),
    Form(False, False, "scaled", torch.bfloat16),
]
by_form = pytest.mark.parametrize("form", FORMS, ids=str)
by_layout = pytest.mark.parametrize("form", LAYOUTS, ids=str)


class Batch(NamedTuple):
    """What goes in, and the cotangent of what comes out."""

    x: Tensor
    offsets: Tensor
    scales: Optional[Tensor]
    dy: Tensor


def make_module(grouped_moe, form: Form, device: str, shape=(G, K, N), **options):
    """A module of this form; the same parameters whatever the layout, for one state of the generator."""
    return grouped_moe.GroupedLinear(
        *shape, bias=form.kind != "none", scale_bias=form.kind == "scaled", single_grouped_weight=form.weight,
        single_grouped_bias=form.bias, dtype=form.dtype, device=device, **options,
    )  # fmt: skip


def make_batch(form: Form, device: str, rows: int = ROWS, rest: float = NAN) -> Batch:
    """Rows of no group, filled with rest, before the first and after the last. Scales are fp32."""
    x, dy, scales = torch.randn(rows, K), torch.randn(rows, N), torch.randn(rows)
    offsets = torch.tensor((HEAD, *SIZES)).cumsum(0)
    if rows != ROWS:
        offsets = torch.linspace(HEAD, rows - TAIL, G + 1).long()
    for tensor in (x, dy, scales):
        tensor[:HEAD], tensor[rows - TAIL :] = rest, rest
    x, dy = x.to(device, form.dtype), dy.to(device, form.dtype)
    return Batch(x, offsets.to(device), scales.to(device) if form.kind == "scaled" else None, dy)


def make(grouped_moe, form: Form, device: str, **options) -> Tuple[nn.Module, Batch]:
    """(a module of this form, a batch for it)."""
    return make_module(grouped_moe, form, device, **options), make_batch(form, device)


def without_groups(batch: Batch, rows: int) -> Batch:
    """The first rows of a batch, NaN, and none of them of a group."""
    x, scales, dy = (None if t is None else t[:rows] * NAN for t in (batch.x, batch.scales, batch.dy))
    return Batch(x, torch.zeros_like(batch.offsets), scales, dy)


def leaves(batch: Batch, frozen: Sequence[str] = ()) -> Batch:
    """x, unless it is frozen, and the scales anew, as leaves of autograd."""
    scales = None if batch.scales is None else batch.scales.detach().clone().requires_grad_()
    return batch._replace(x=batch.x.detach().clone().requires_grad_("x" not in frozen), scales=scales)


def parameters(module, kind: str) -> List[nn.Parameter]:
    """Those of a kind, "weight" or "bias"."""
    return [parameter for name, parameter in module.named_parameters() if name.startswith(kind)]


def packed(module, kind: str, get=lambda parameter: parameter.detach()) -> Optional[Tensor]:
    """(G, N, K) or (G, N): get(parameter) of all parameters of a kind. None where get gives None or there is none."""
    tensors = [get(parameter) for parameter in parameters(module, kind)]
    if not tensors or any(tensor is None for tensor in tensors):
        return None
    return tensors[0] if getattr(module, f"single_grouped_{kind}") else torch.stack(tensors)


def is_packed(module) -> bool:
    """Whether discrete weights are views of one (G, N, K) storage."""
    weights = parameters(module, "weight")
    step = N * K * module.weight0.element_size()
    one_storage = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    starts = [weight.data_ptr() for weight in weights]
    return one_storage and starts == [starts[0] + group * step for group in range(G)]


def grads(module, kind: str) -> Optional[Tensor]:
    return packed(module, kind, lambda p: p.grad)


def main_grads(module) -> Optional[Tensor]:
    return packed(module, "weight", lambda p: p.main_grad)


def parameter_grads(module) -> Dict[str, Tensor]:
    """{"weight", "bias"}: gradients, where there are any, those of weights where the module puts them."""
    weight = main_grads(module) if module.accumulate_into_main_grad else grads(module, "weight")
    found = {"weight": weight, "bias": grads(module, "bias")}
    return {kind: grad for kind, grad in found.items() if grad is not None}


def run(module, batch: Batch, frozen: Sequence[str] = (), function: Optional[Callable] = None) -> Dict[str, Tensor]:
    """The output, and the gradients of the inputs; those of the parameters are where the module puts them.

    function: what is called in the module's place.
    """
    batch = leaves(batch, frozen)
    y = (function or module)(batch.x, batch.offsets, batch.scales)
    assert y.dtype == batch.dy.dtype
    y.backward(batch.dy)
    inputs = {"x": batch.x, "scales": batch.scales}
    return {"y": y.detach(), **{name: t.grad for name, t in inputs.items() if t is not None and t.requires_grad}}


def step(module, batch: Batch, frozen: Sequence[str] = (), function: Optional[Callable] = None) -> Dict[str, Tensor]:
    """As `run`, with the gradients of the parameters, also if they are delayed."""
    got = run(module, batch, frozen, function)
    module.backward_dw()
    return {**got, **parameter_grads(module)}


def reference(grouped_moe, module, batch: Batch, start: Optional[Tensor] = None) -> Dict[str, Tensor]:
    """Output and every gradient in fp64, of what the module holds now. start: what is in main_grad before."""
    tensors = {"x": batch.x, "scales": batch.scales, "weight": packed(module, "weight"), "bias": packed(module, "bias")}
    wide = {k: None if t is None else t.detach().double().requires_grad_() for k, t in tensors.items()}
    y = grouped_moe.reference.grouped_linear(wide["x"], wide["weight"], batch.offsets, wide["bias"], wide["scales"])
    y.backward(batch.dy.double())
    want = {"y": y.detach(), **{name: t.grad for name, t in wide.items() if t is not None}}
    return want if start is None else {**want, "weight": want["weight"] + start.double()}


def assert_matches(got: Dict[str, Optional[Tensor]], want: Dict[str, Tensor], dtype=None) -> None:
    """Every entry of got, within the tolerances of its own dtype or, but for the scales' gradient, of the one given."""
    for name, tensor in got.items():
        assert tensor is not None, name
        tolerance = tensor.dtype if dtype is None or name == "scales" else dtype
        assert_close(name, tensor, want[name], tolerance, inner_products=name == "scales")


def form_of(place: str, dtype=FLOAT, kind: str = "scaled") -> Form:
    """Of a module whose main_grads lie like this: in one tensor for the two first places, else in one per group."""
    single = place in PLACES[:2]
    return Form(single, single, kind, dtype)


def give_main_grads(module, place: str, dtype=FLOAT, value=None, **attributes) -> Tensor:
    """Gives every weight these attributes and a main_grad, random unless a value is given. Returns a copy of all."""
    weights = parameters(module, "weight")
    (groups, n, k), device = (module.num_groups, module.out_features, module.in_features), weights[0].device
    if place == "single":
        buffers = [torch.empty((groups, n, k), dtype=dtype, device=device)]
    elif place == "transposed":
        buffers = [torch.empty((groups, k, n), dtype=dtype, device=device).transpose(1, 2)]
    elif place == "apart":
        buffers = [torch.empty((n, k), dtype=dtype, device=device) for _ in weights]
    else:
        flat = torch.full((groups, n + (place == "padded"), k), NAN, dtype=dtype, device=device)
        buffers = [flat[groups - 1 - group if place == "descending" else group, :n] for group in range(groups)]
    for weight, buffer in zip(weights, buffers):
        weight.main_grad = buffer.normal_() if value is None else buffer.fill_(value)
        for name, attribute in attributes.items():
            setattr(weight, name, attribute)
    return main_grads(module).clone()


def make_with_main_grads(
    grouped_moe, device: str, place: str, delay: bool = False, dtype=FLOAT, main_dtype=FLOAT, **attributes
) -> Tuple[nn.Module, Batch, Tensor]:
    """(a module that accumulates into main_grads, a batch for it, a copy of main_grads). See `give_main_grads`."""
    options = {"accumulate_into_main_grad": True, "delay_wgrad": delay}
    module, batch = make(grouped_moe, form_of(place, dtype), device, **options)
    return module, batch, give_main_grads(module, place, main_dtype, **attributes)


def total(before: Tensor, overwrite: bool, *references: Dict[str, Tensor]) -> Dict[str, Tensor]:
    """The gradients of the parameters in fp64, after one microbatch or more. before: what is in main_grad."""
    weight, bias = (sum(reference[kind] for reference in references) for kind in ("weight", "bias"))
    return {"weight": references[-1]["weight"] if overwrite else before.double() + weight, "bias": bias}
