"""What a random case is made of: the layer, routings, splits and tensors that tools/fuzz.py draws, and one call.

Legend as in the package: T tokens, top_k slots per token, E experts or groups, H hidden, I intermediate.
"""

import contextlib
import random
import sys
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from poison import is_sentinel  # noqa: E402

EXTENTS = (1, 3, 8, 21, 24, 35, 40, 64, 72, 128, 136, 200, 256, 384, 512)
EXPERTS = (1, 2, 3, 5, 8, 16, 60, 128, 256, 1024)
MAX_WEIGHT = 2**20  # E H I
MAX_WORK = {"cpu": 2**24, "cuda": 2**27}  # S H I, which bounds the time of the reference
SILU = ("silu", 1.0, None, 0.0)
# With a limit or relu the derivative jumps: see Case.draw_block.
ACTIVATIONS = (
    SILU,
    ("silu", 1.702, 0.5625, 1.0),
    ("gelu", 1.0, None, 0.0),
    ("gelu_tanh", 1.0, 0.5625, 0.5),
    ("relu", 1.0, None, 0.0),
    ("relu2", 1.0, None, 0.0),
)
LAYOUTS = ("offset1", "offset8", "padded1", "padded16", "apart", "strided", "transposed", "turned")
MODES = (*["grad"] * 6, "retain", "no_grad", "no_grad", "inference", "replay", "replay")
CONTEXTS = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
BIASES = ("gate_up_proj_bias", "down_proj_bias")
FACTORS = tuple(f"{name}_{factor}" for name in ("gate_up_proj", "down_proj", "weight") for factor in "ab")
WEIGHTS = ("gate_up_proj", "down_proj", *BIASES, "weight", "bias", *FACTORS)


def expect(condition: bool, message: str) -> None:
    """Raises AssertionError, also under python -O."""
    if not condition:
        raise AssertionError(message)


class Draw(random.Random):
    """Random choices and numbers that depend on the keys alone, not on the machine.

    key: of choices. numbers: what sizes, routings and numbers are drawn from, if not from this.
    """

    def __init__(self, key: str, numbers: Optional["Draw"] = None) -> None:
        super().__init__(key)
        self.numbers = numbers or self
        own = torch.Generator().manual_seed(self.getrandbits(60))
        self.generator: torch.Generator = numbers.generator if numbers else own

    def one(self, *choices):
        return self.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random() < share

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """high excluded."""
        return torch.randint(low, high, shape, generator=self.generator)


class Layer(NamedTuple):
    """What the cases of one layer share, since each choice compiles kernels on a GPU.

    rows: per expert, about. slots: the most of a case.
    """

    dtype: torch.dtype = torch.bfloat16
    E: int = 3
    top_k: int = 2
    H: int = 40
    I: int = 24  # noqa: E741
    rows: int = 16
    slots: int = 8192
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    scales_dtype: torch.dtype = torch.bfloat16
    activations: Sequence[Tuple[str, float, Optional[float], float]] = (SILU,)
    layouts: Sequence[str] = ("plain",)


def draw_layer(draw: Draw, device: str) -> Layer:
    """fp64 and the fewer slots on a CPU only; what else is drawn does not depend on the device."""
    dtype = draw.one(*[torch.bfloat16] * 3, *[torch.float16] * 2, *[torch.float32] * 2, torch.float64)
    h, i = draw.one(*EXTENTS), draw.one(*EXTENTS)
    experts = draw.one(*(e for e in EXPERTS if e * h * i <= MAX_WEIGHT))
    gated = draw.chance(0.75)
    # The backward of the reference's loop writes whole tensors of rows for each expert.
    most = min(MAX_WORK[device] // (h * i), 64 * MAX_WORK[device] // (experts * (h + 2 * i)))
    return Layer(
        dtype=torch.bfloat16 if dtype == torch.float64 and device != "cpu" else dtype,
        E=experts,
        top_k=draw.one(1, 2, 2, 3, 4, 8),
        H=h,
        I=i,
        rows=draw.one(16, 32, 64, 128),
        slots=min(8192, most),
        gated=gated,
        interleaved=gated and draw.chance(0.4),
        transposed=draw.chance(0.4),
        scales_dtype=draw.one(torch.float32, torch.float32, torch.bfloat16, torch.float16),
        activations=(draw.one(*ACTIVATIONS), draw.one(*ACTIVATIONS)),
        layouts=(draw.one(*LAYOUTS), draw.one(*LAYOUTS)),
    )


def draw_slots(draw: Draw, layer: Layer) -> int:
    """Slots, or rows of a grouped layer: none, of a few tokens, one small tile or less per expert, or layer.rows."""
    kind = draw.one("none", *["decode"] * 4, *["few"] * 4, *["rows"] * 11)
    if kind == "none":
        return 0
    if kind == "decode":
        return layer.top_k * draw.randint(1, 8)
    rows = draw.randint(1, 16) if kind == "few" else draw.randint(layer.rows // 2 + 1, layer.rows)
    return min(rows * layer.E, layer.slots)


def draw_ids(draw: Draw, layer: Layer, tokens: int) -> Tensor:
    """(T, top_k) of int32 or int64: balanced, skewed, on few experts or one, and a share of sentinels."""
    shape, e = (tokens, layer.top_k), layer.E
    kind = draw.one("balanced", "balanced", "skewed", "few", "one")
    ids = draw.integers(0, e, *shape)
    if kind == "skewed":
        ids = (draw.uniform(*shape) ** 4 * e).long()
    elif kind != "balanced":
        local = draw.integers(0, e, 1 if kind == "one" else 3)
        ids = local[draw.integers(0, len(local), *shape)]
    dtype = draw.one(torch.int32, torch.int64)
    foreign = [e, e + 3, -1, -7, torch.iinfo(dtype).max, torch.iinfo(dtype).min]
    foreign += [2**31, 2**32, 2**40 + 1, -(2**32)] if dtype == torch.int64 else []
    chosen = torch.tensor(foreign)[draw.integers(0, len(foreign), *shape)]
    share = draw.one(0.0, 0.0, 0.1, 0.5, 0.5, 0.9, 1.0)
    whole = draw.uniform(tokens, 1) < (0.1 if share else 0.0)  # tokens with nothing but sentinels
    return torch.where((draw.uniform(*shape) < share) | whole, chosen, ids).to(dtype)


def sort_slots(ids: Tensor, experts: int) -> Tuple[Tensor, Tensor]:
    """By a stable sort: the E + 1 offsets of experts' rows, and each row's slot."""
    ids = torch.where(is_sentinel(ids, experts), experts, ids).flatten().long()
    offsets = F.pad(torch.bincount(ids, minlength=experts + 1)[:experts].cumsum(0), (1, 0))
    return offsets, ids.argsort(stable=True)[: int(offsets[-1])]


def draw_splits(draw: Draw, groups: int, rows: int, kind: str, valid: bool) -> Tensor:
    """Sizes (G,) or offsets (G + 1,); kind: "offsets" or other. Unless valid, they may be of any values."""
    shares = draw.uniform(groups) ** draw.one(0.2, 1, 4)
    shares = shares * (draw.uniform(groups) >= draw.one(0.0, 0.3, 0.9))
    used = int(rows * draw.one(1.0, 1.0, 0.9, 0.5, 0.0))
    splits = (shares / shares.sum().clamp_min(1e-9) * used).long()
    splits[draw.randrange(groups)] += used - int(splits.sum())
    if kind == "offsets":
        splits = F.pad(splits.cumsum(0), (1, 0)) + draw.randint(0, rows - used)
    if not valid:
        wild = torch.tensor([-1, -rows - 1, rows + 5, 2**31 - 1, -(2**31)])[draw.integers(0, 5, len(splits))]
        wild = draw.integers(0, rows + 1, len(splits)) if draw.chance(0.5) else wild
        splits = torch.where(draw.uniform(len(splits)) < 0.3, wild, splits)
    return splits.to(draw.one(torch.int32, torch.int64))


class PerGroup(tuple):
    """The entries of a tensor of this shape, for the reference's loop over groups."""

    def __new__(cls, entries: Iterable, shape: torch.Size) -> "PerGroup":
        found = super().__new__(cls, entries)
        found.shape = shape
        return found


def per_group(tensors: Dict[str, Tensor]) -> dict:
    """The tensors, those of groups by group: autograd joins the gradients of a tensor's entries at once."""
    return {name: PerGroup(t.unbind(0), t.shape) if name in WEIGHTS else t for name, t in tensors.items()}


class Case:
    """One call of a public op: its tensors in fp64, by name, its routings and its options.

    draw_op(case) draws them and sets call(package, tensors, routings), which calls the op, and want(reference, tensors,
    routings), which is right: the output or, of an op that is not differentiable, a dict of all results. It may set
    written, the tensors that the op writes to. routings: ids or splits of the call, and others, which a graph is
    replayed with. options: by name, what is given and else is drawn.
    """

    def __init__(self, draw_op: Callable, layer: Layer, draw: Draw, device: str, routings=(), **options) -> None:
        self.layer, self.draw, self.routings, self.options = layer, draw, list(routings), options
        self.dtype = self.computed_in = layer.dtype  # computed_in: whose roundings the results have
        self.values: Dict[str, Tensor] = {}
        self.dtypes: Dict[str, torch.dtype] = {}
        self.exact = False  # what pre-activations are made of, which are sums of eighths then
        self.scaled: Dict[str, tuple] = {}  # weights in FP8: codes, scales and block
        self.products = "auto"  # how they are multiplied
        self.differentiable, self.written = True, ()
        self.mode = self.choose("mode", *MODES)
        draw_op(self)
        if self.mode == "replay" and device == "cpu" or self.mode in ("replay", "retain") and not self.differentiable:
            self.mode = "grad"
        no_leaves = "dout", *self.written, *self.scaled
        self.wanted = [name for name in self.values if name not in no_leaves]
        if self.choose("some_wanted", True, True, True, False, False):
            self.wanted = [name for name in self.wanted if draw.chance(0.6)]
        self.layouts = self.draw_layouts()

    def choose(self, name: str, *choices):
        """The option of this name: what was given, else one of the choices."""
        return self.options.setdefault(name, self.draw.one(*choices))

    def draw_layouts(self) -> Dict[str, str]:
        """Of every tensor and the routing. Either all are plain or most are one of the layer's."""
        some = ("plain",) if self.choose("plain", False, True) else ("plain", *self.layer.layouts)
        layouts = {name: self.draw.one(*some) for name in (*self.values, "routing")}
        layouts.update({name: self.draw.one("plain", "offset1") for name in self.written})
        if self.draw.chance(0.1) and "dout" in layouts and self.values["dout"].shape[0]:
            layouts["dout"] = "expanded"
            self.values["dout"] = self.values["dout"][:1].expand_as(self.values["dout"]).clone()
        return layouts

    def draw_tokens(self) -> int:
        """Fills in ids. Returns the number of tokens."""
        draw, layer = self.draw.numbers, self.layer
        tokens = self.choose("rows", draw_slots(draw, layer) // layer.top_k)
        if not self.routings:
            first, second = (draw_ids(draw, layer, tokens) for _ in range(2))
            self.routings = [first, second.clamp(-1, layer.E).to(first.dtype)]
        return tokens

    def draw_rows(self) -> int:
        """Fills in splits. Returns the number of rows."""
        draw, kind = self.draw.numbers, self.choose("splits", "sizes", "offsets", "tensor", "list")
        rows = self.choose("rows", draw_slots(draw, self.layer))
        if kind == "list" and self.mode == "replay":
            self.options["splits"] = "tensor"
        if not self.routings:
            shape = draw.one("sizes", "offsets") if kind == "tensor" else kind
            valid = kind == "list" or draw.chance(0.8)
            first, second = (draw_splits(draw, self.layer.E, rows, shape, valid) for _ in range(2))
            self.routings = [first, second.to(first.dtype)]
        return rows

    def splits(self, package, routing: Tensor):
        """Splits in the form that was chosen."""
        makers = {"sizes": package.GroupSizes, "offsets": package.GroupOffsets, "list": Tensor.tolist}
        return makers.get(self.options["splits"], lambda tensor: tensor)(routing)

    def offsets(self, routing: Tensor) -> Tensor:
        """(G + 1,) int64: where the groups of splits really start and end."""
        ends = routing.long()
        if len(ends) == self.layer.E:
            ends = F.pad(ends.clamp_min(0).cumsum(0), (1, 0))
        return ends.clamp(0, self.options["rows"]).cummax(0).values

    def draw_scales(self, name: str, *shape: int) -> None:
        """Factors between 0.1 and 1.1, of a dtype of their own."""
        self.values[name] = self.draw.uniform(*shape) + 0.1
        self.dtypes[name] = self.draw.one(self.dtype, self.layer.scales_dtype)

    def draw_weight(self, x_name: str, rows: int, transposed: bool) -> None:
        """x, the weight of a linear layer per group and dout."""
        layer, draw = self.layer, self.draw
        shape = (layer.E, layer.H, layer.I) if transposed else (layer.E, layer.I, layer.H)
        self.values = {x_name: draw.normal(rows, layer.H), "weight": draw.normal(*shape) / layer.H**0.5}
        self.values["dout"] = draw.normal(rows, layer.I)

    def draw_block(self, x_name: str, rows: int, *biases: Sequence[str]) -> None:
        """x, both weights, one choice of biases and dout; unit-scale, as weights are divided by sqrt(fan_in).

        A rounding may carry a pre-activation across a kink, where the derivative jumps: no tolerance is right for that.
        There it is a sum of eighths, which every dtype holds exactly, and limits are odd sixteenths.
        """
        layer, draw, values = self.layer, self.draw, self.values
        name, alpha, limit, up_offset = draw.one(*layer.activations)
        self.options["activation"] = (name, alpha, limit, up_offset if layer.gated else 0.0)
        self.choose("recompute", False, False, True)
        kinked = limit is not None or name == "relu"
        numbers = (lambda *shape: draw.integers(-1, 2, *shape).double()) if kinked else draw.normal
        self.exact = kinked
        p, scale = layer.I * (1 + layer.gated), 8.0 if kinked else layer.H**0.5
        up, down = ((layer.H, p), (layer.I, layer.H)) if layer.transposed else ((p, layer.H), (layer.H, layer.I))
        values[x_name] = numbers(rows, layer.H)
        values["gate_up_proj"] = numbers(layer.E, *up) / scale
        values["down_proj"] = draw.normal(layer.E, *down) / layer.I**0.5
        made = numbers(layer.E, p) / (8.0 if kinked else 1.0), draw.normal(layer.E, layer.H)
        chosen = self.choose("biases", *biases)
        values.update({name: bias for name, bias in zip(BIASES, made) if name in chosen})
        values["dout"] = draw.normal(rows, layer.H)

    def block_options(self, package=None) -> dict:
        """The kind of a block, as arguments of the package or, without one, of the reference."""
        kind = {name: getattr(self.layer, name) for name in ("gated", "interleaved", "transposed")}
        activation = self.options["activation"]
        if package is None:
            return {**kind, **dict(zip(("name", "alpha", "limit", "up_offset"), activation))}
        return {**kind, "activation": package.Activation(*activation), "recompute": self.options["recompute"]}

    def dead(self) -> Dict[str, Tensor]:
        """Masks over the first dimensions of what is never read."""
        unread, idle = torch.ones(self.options["rows"], dtype=torch.bool), torch.ones(self.layer.E, dtype=torch.bool)
        masks = {}
        for routing in self.routings[: self.options.get("microbatches", 1)]:
            if "splits" in self.options:
                offsets = self.offsets(routing)
                unread[int(offsets[0]) : int(offsets[-1])] = False
                idle &= offsets[1:] == offsets[:-1]
            else:
                sentinel = masks["top_k_weights"] = is_sentinel(routing, self.layer.E)
                unread = sentinel.all(1)
                idle[routing[~sentinel].long()] = False
        names = [name for name in self.values if name not in self.written]
        return {name: masks.get(name, idle if name in WEIGHTS else unread) for name in names}

    def run(
        self, call: Callable, tensors: Dict[str, Tensor], routings: Sequence[Tensor], mode: str = ""
    ) -> Dict[str, Tensor]:
        """The output of call(tensors, routings), and the gradients that are wanted. Fails if another one comes."""
        mode = mode or self.mode
        if not self.differentiable:
            return call(tensors, routings)
        leaves = {n: t.detach().requires_grad_(n in self.wanted) for n, t in tensors.items() if n != "dout"}
        with CONTEXTS.get(mode, contextlib.nullcontext)():
            out = call(leaves, routings)
        wanted: List[str] = [] if mode in CONTEXTS else self.wanted
        expect(out.requires_grad == bool(wanted), f"out: requires_grad is {out.requires_grad}, wanted are {wanted}")
        if wanted:
            out.backward(tensors["dout"], retain_graph=mode == "retain")
        for name, leaf in leaves.items():
            expect((leaf.grad is not None) == (name in wanted), f"grad of {name}: wanted are {wanted}")
        if wanted and mode == "retain":
            again = torch.autograd.grad(out, [leaves[name] for name in wanted], tensors["dout"])
            for name, grad in zip(wanted, again):
                expect(torch.equal(leaves[name].grad, grad), f"grad of {name}: another one in the second backward")
        return {"out": out.detach(), **{f"grad of {name}": leaves[name].grad for name in wanted}}

    def expected(self, reference, tensors: Dict[str, Tensor], routings: Sequence[Tensor]) -> Dict[str, Tensor]:
        """What `run` should return, in fp64."""

        def want(leaves: Dict[str, Tensor], routings: Sequence[Tensor]):
            if not self.differentiable:
                return self.want(reference, leaves, routings)
            out = self.want(reference, per_group(leaves), routings)
            return out + 0 * sum(leaf.sum() for leaf in leaves.values())  # the loop leaves out what has no rows

        return self.run(want, tensors, routings, mode="grad" if self.mode == "retain" else self.mode)
