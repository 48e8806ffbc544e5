"""What tools/fuzz.py draws: the layers, one class of cases for each public op, and what the reference makes of them.

Legend as in the package: T tokens, top_k slots per token, E experts or groups, H hidden, I intermediate.
"""

import contextlib
import random
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

EXTENTS = (1, 3, 8, 21, 24, 35, 40, 64, 72, 128, 136, 200, 256, 384, 512)
EXPERTS = (1, 2, 3, 5, 8, 16, 60, 128, 256, 1024)
MAX_WEIGHT = 2**20  # E H I
MAX_WORK = {"cpu": 2**24, "cuda": 2**27}  # S H I, which bounds the time of the reference
# With a limit or relu the derivative jumps: see Case.block_values.
ACTIVATIONS = (
    ("silu", 1.0, None, 0.0),
    ("silu", 1.702, 0.5625, 1.0),
    ("gelu", 1.0, None, 0.0),
    ("gelu_tanh", 1.0, 0.5625, 0.5),
    ("relu", 1.0, None, 0.0),
    ("relu2", 1.0, None, 0.0),
)
LAYOUTS = ("offset1", "offset8", "padded1", "padded16", "apart", "strided", "transposed")
CONTEXTS = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
WEIGHTS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias", "weight", "bias")
BLOCK_INPUTS = ("hidden_states", "x", "gate_up_proj", "gate_up_proj_bias")  # what a pre-activation is made of


class Draw:
    """Random choices and numbers that depend on the key alone, not on the machine."""

    def __init__(self, *key) -> None:
        self.random = random.Random("/".join(map(str, key)))
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(60))

    def one(self, *choices):
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def between(self, low: int, high: int) -> int:
        """Both ends included."""
        return self.random.randint(low, max(low, high))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """high excluded."""
        return torch.randint(low, high, shape, generator=self.generator)


class Layer(NamedTuple):
    """What the cases of one layer share, since each choice compiles kernels on a GPU. rows: per expert, about.

    slots: the most of a case.
    """

    dtype: torch.dtype
    E: int
    top_k: int
    H: int
    I: int  # noqa: E741
    rows: int
    slots: int
    gated: bool
    interleaved: bool
    transposed: bool
    scales_dtype: torch.dtype
    activations: Sequence[Tuple[str, float, Optional[float], float]]
    layouts: Sequence[str]


def draw_layer(draw: Draw, device: str) -> Layer:
    """fp64 and the fewer slots on a CPU only; what else is drawn does not depend on the device."""
    two_bytes = torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float16
    dtype = draw.one(*two_bytes, torch.float32, torch.float32, torch.float64)
    dtype = torch.bfloat16 if dtype == torch.float64 and device != "cpu" else dtype
    h, i = draw.one(*EXTENTS), draw.one(*EXTENTS)
    gated = draw.chance(0.75)
    experts = draw.one(*(e for e in EXPERTS if e * h * i <= MAX_WEIGHT))
    # The backward of the reference's loop writes whole tensors of rows for each expert.
    most = min(MAX_WORK[device] // (h * i), 64 * MAX_WORK[device] // (experts * (h + 2 * i)))
    return Layer(
        dtype=dtype,
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
        return layer.top_k * draw.between(1, 8)
    rows = draw.between(1, 16) if kind == "few" else draw.between(layer.rows // 2 + 1, layer.rows)
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
    ids = torch.where(draw.uniform(*shape) < share, chosen, ids)
    if share:
        whole = draw.uniform(tokens) < 0.1  # tokens with nothing but sentinels
        ids[whole] = chosen[whole]
    return ids.to(dtype)


def is_sentinel(ids: Tensor, num_experts: int) -> Tensor:
    return (ids < 0) | (ids >= num_experts)


def draw_splits(draw: Draw, groups: int, rows: int, kind: str, valid: bool) -> Tensor:
    """Sizes (G,) or offsets (G + 1,); kind: "offsets" or other. Unless valid, they may be of any values."""
    shares = draw.uniform(groups) ** draw.one(0.2, 1, 4)
    shares = shares * (draw.uniform(groups) >= draw.one(0.0, 0.3, 0.9))
    used = int(rows * draw.one(1.0, 1.0, 0.9, 0.5, 0.0))
    sizes = (shares / shares.sum().clamp_min(1e-9) * used).long()
    sizes[draw.between(0, groups - 1)] += used - int(sizes.sum())
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    splits = sizes
    if kind == "offsets":
        splits = offsets + draw.between(0, rows - used)
    dtype = draw.one(torch.int32, torch.int64)
    if not valid:
        wild = torch.tensor([-1, -rows - 1, rows + 5, 2**31 - 1, -(2**31)])[draw.integers(0, 5, len(splits))]
        wild = draw.integers(0, rows + 1, len(splits)) if draw.chance(0.5) else wild
        splits = torch.where(draw.uniform(len(splits)) < 0.3, wild, splits)
    return splits.to(dtype)


def bounds(splits: Tensor, groups: int, rows: int) -> Tensor:
    """(G + 1,) int64: where the groups really start and end."""
    ends = splits.tolist()
    if len(ends) == groups:
        ends = [0, *(max(0, size) for size in ends)]
        for group in range(groups):
            ends[group + 1] += ends[group]
    found = []
    for end in ends:
        found.append(min(rows, max(0, end, *found[-1:])))
    return torch.tensor(found)


def expect(condition: bool, message: str) -> None:
    """Raises AssertionError, also under python -O."""
    if not condition:
        raise AssertionError(message)


class PerGroup(tuple):
    """A tensor's entries, for the reference's loop over groups: autograd joins their gradients at once."""

    def __new__(cls, tensor: Tensor) -> "PerGroup":
        entries = super().__new__(cls, tensor.unbind(0))
        entries.shape = tensor.shape
        return entries


def per_group(tensors: Dict[str, Tensor]) -> Dict[str, Union[Tensor, PerGroup]]:
    return {name: PerGroup(t) if name in WEIGHTS else t for name, t in tensors.items()}


class Case:
    """One call of a public op that is differentiable: its tensors in fp64, by name, its routings and its options.

    routings: ids or splits, that of the call and another, which a graph is replayed with.
    """

    op = ""
    replayable = True
    written = ()  # of the tensors, those that the op writes to

    def __init__(self, draw: Draw, layer: Layer, device: str) -> None:
        self.draw, self.layer, self.dtype = draw, layer, layer.dtype
        self.values: Dict[str, Tensor] = {}
        self.dtypes: Dict[str, torch.dtype] = {}
        self.routings: List[Tensor] = []
        self.options: Dict[str, object] = {}
        self.exact: Tuple[str, ...] = ()
        modes = ["grad"] * 6 + ["retain", "no_grad", "no_grad", "inference", "replay", "replay"]
        self.mode = draw.one(*modes)
        if self.mode == "replay" and not (self.replayable and device == "cuda"):
            self.mode = "grad"
        self.make()
        names = [name for name in self.values if name != "dout" and name not in self.written]
        self.wanted = [name for name in names if draw.chance(0.6)] if draw.chance(0.6) else names
        self.layouts = self.draw_layouts()

    def draw_layouts(self) -> Dict[str, str]:
        """Of every tensor and the routing. Either all are plain or most are one of the layer's."""
        plain, layouts = self.draw.chance(0.5), {}
        for name in [*self.values, "routing"]:
            layouts[name] = "plain" if plain else self.draw.one("plain", *self.layer.layouts)
        for name in self.written:
            layouts[name] = self.draw.one("plain", "offset1")
        if self.draw.chance(0.1) and "dout" in layouts and self.values["dout"].shape[0]:
            layouts["dout"] = "expanded"
            self.values["dout"] = self.values["dout"][:1].expand_as(self.values["dout"]).clone()
        return layouts

    def make(self) -> None:
        """Fills in values, dtypes, routings and options."""
        raise NotImplementedError

    def call(self, package, tensors: Dict[str, Tensor], routing: Tensor) -> Tensor:
        """The op itself."""
        raise NotImplementedError

    def want(self, reference, tensors: Dict[str, Tensor], routing: Tensor) -> Tensor:
        """What `call` should return."""
        raise NotImplementedError

    def dead(self) -> Dict[str, Tensor]:
        """Masks over the first dimensions of what is never read."""
        raise NotImplementedError

    @property
    def computed_in(self) -> torch.dtype:
        """The dtype whose roundings the results have."""
        return self.dtype

    def scales(self, name: str, *shape: int) -> None:
        """Factors between 0.1 and 1.1, of a dtype of their own."""
        self.values[name] = self.draw.uniform(*shape) + 0.1
        self.dtypes[name] = self.draw.one(self.dtype, self.layer.scales_dtype)

    def block_values(self, x_name: str, rows: int, biases: Sequence[str]) -> None:
        """x, both weights, biases and dout; unit-scale, as weights are divided by sqrt(fan_in).

        A rounding may carry a pre-activation across a kink, where the derivative jumps: no tolerance is right for that.
        There it is a sum of eighths, which every dtype holds exactly, and limits are odd sixteenths.
        """
        layer, draw = self.layer, self.draw
        name, _, limit, _ = activation = draw.one(*layer.activations)
        activation = (*activation[:3], activation[3] if layer.gated else 0.0)
        kinked = limit is not None or name == "relu"
        numbers = (lambda *shape: draw.integers(-1, 2, *shape).double()) if kinked else draw.normal
        self.exact = BLOCK_INPUTS if kinked else ()
        p, scale = layer.I * (1 + layer.gated), 8.0 if kinked else layer.H**0.5
        up, down = (layer.E, p, layer.H), (layer.E, layer.H, layer.I)
        if layer.transposed:
            up, down = (up[0], up[2], up[1]), (down[0], down[2], down[1])
        self.values[x_name] = numbers(rows, layer.H)
        self.values["gate_up_proj"] = numbers(*up) / scale
        self.values["down_proj"] = draw.normal(*down) / layer.I**0.5
        if "gate_up_proj_bias" in biases:
            self.values["gate_up_proj_bias"] = numbers(layer.E, p) / (8.0 if kinked else 1.0)
        if "down_proj_bias" in biases:
            self.values["down_proj_bias"] = draw.normal(layer.E, layer.H)
        self.values["dout"] = draw.normal(rows, layer.H)
        kind = {name: getattr(layer, name) for name in ("gated", "interleaved", "transposed")}
        self.options = {**kind, "activation": activation, "recompute": draw.chance(0.3)}

    def package_options(self, package) -> Dict[str, object]:
        return {**self.options, "activation": package.Activation(*self.options["activation"])}

    def reference_options(self) -> Dict[str, object]:
        kind = {name: self.options[name] for name in ("gated", "interleaved", "transposed")}
        return {**kind, **dict(zip(("name", "alpha", "limit", "up_offset"), self.options["activation"]))}

    def run(self, package, tensors: Dict[str, Tensor], routings: Sequence[Tensor]) -> Dict[str, Tensor]:
        """The output, and the gradients that are wanted. Fails if another one comes."""
        leaves = {n: t if n == "dout" else t.detach().requires_grad_(n in self.wanted) for n, t in tensors.items()}
        with CONTEXTS.get(self.mode, contextlib.nullcontext)():
            out = self.call(package, leaves, routings[0])
        results, wanted = {"out": out.detach()}, [] if self.mode in CONTEXTS else self.wanted
        expect(out.dtype == self.dtype, f"out: expected {self.dtype}, got {out.dtype}")
        expect(out.requires_grad == bool(wanted), f"out: requires_grad is {out.requires_grad}, wanted are {wanted}")
        if wanted and self.mode == "retain":
            chosen = [leaves[name] for name in wanted]
            first = torch.autograd.grad(out, chosen, tensors["dout"], retain_graph=True)
            for name, one, two in zip(wanted, first, torch.autograd.grad(out, chosen, tensors["dout"])):
                expect(torch.equal(one, two), f"grad of {name}: another one in the second backward of a graph")
                results[f"grad of {name}"] = two
        elif wanted:
            out.backward(tensors["dout"])
            for name, leaf in leaves.items():
                expect((leaf.grad is not None) == (name in wanted), f"grad of {name}: wanted are {wanted}")
            results.update({f"grad of {name}": leaves[name].grad for name in wanted})
        return results

    def expected(self, reference, tensors: Dict[str, Tensor], routings: Sequence[Tensor]) -> Dict[str, Tensor]:
        """What `run` should return, in fp64."""
        leaves = {n: t.detach().requires_grad_(n in self.wanted) for n, t in tensors.items()}
        out = self.want(reference, per_group(leaves), routings[0])
        results = {"out": out.detach()}
        if self.wanted and self.mode not in CONTEXTS:
            chosen = [leaves[name] for name in self.wanted]
            out = out + 0 * sum(leaf.sum() for leaf in chosen)  # the loop leaves out what has no rows
            grads = torch.autograd.grad(out, chosen, tensors["dout"])
            results.update({f"grad of {name}": grad for name, grad in zip(self.wanted, grads)})
        return results
