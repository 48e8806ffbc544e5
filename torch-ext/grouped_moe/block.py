"""The experts block: its weights and what kind it is, and which gradients it owes."""

from collections import namedtuple
from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .block_scaled import Weight, as_weight, check_scaled, parts_of
from .common import _compat, checks
from .common.activation import Activation
from .common.numbers import wide_dtype
from .operands import LoRA, check_loras

# In the schema of ops: the arguments of `make_block`. A call's cost on the host grows with the number of arguments.
# AOTInductor hands over None for an empty list, which the dispatcher takes for optional ones alone. `torch.jit.trace`
# takes no list of bools.
BLOCK_SCHEMA = (
    "Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, Tensor? up_a, Tensor? up_b, Tensor? down_a,"
    " Tensor? down_b, Tensor? up_scale, Tensor? down_scale, str activation, float[] parameters, int[] flags,"
    " int[]? blocks, SymInt? capacity"
)

_MAX_INT64 = 2**63 - 1


class Block(NamedTuple):
    """The weights and the kind of an experts block. A weight may be `BlockScaled`, with transposed False.

    up: (E, P, H) or, transposed, (E, H, P), with P = 2 I if gated, else I. down: (E, H, I) or (E, I, H). up_bias:
    (E, P). down_bias: (E, H). up_lora, down_lora: what is added to the weights. recompute: the pre-activation is not
    saved. capacity: rows there is room for, None for all slots.
    """

    up: Weight
    down: Weight
    up_bias: Optional[Tensor]
    down_bias: Optional[Tensor]
    up_lora: Optional[LoRA]
    down_lora: Optional[LoRA]
    activation: Activation
    gated: bool
    interleaved: bool
    transposed: bool
    recompute: bool
    capacity: Optional[int] = None

    def num_rows(self, num_slots: int) -> int:
        """Rows of the buffers for so many slots; either may be symbolic."""
        return num_slots if self.capacity is None else torch.sym_min(num_slots, self.capacity)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.up.shape[0]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.down.shape[1 if self.transposed else 2]

    @property
    def preact_width(self) -> int:
        """P, the columns of the pre-activation."""
        return self.up.shape[2 if self.transposed else 1]


def check_and_pack(
    owner: str, x: Tensor, block: Block, adapter_index: Optional[Tensor]
) -> Tuple[Tensor, Optional[Tensor], List[Optional[Tensor]], Tuple[Any, ...]]:
    """Checks what a public function was given, casts it as autocast does, and packs it into arguments of ops.

    owner: what the function calls x. Returns x, adapter_index and `BLOCK_SCHEMA` in two parts, tensors and the rest.
    Scalings of LoRAs are among the activation's parameters. A limit of 0 stands for none: AOTInductor cannot load a
    program with an infinite one. Raises TypeError or ValueError that names the argument.
    """
    checks.check_tensor(owner, x)
    dtype = checks.autocast_dtype(x)
    x = checks.autocast(x, dtype)
    up, down, *biases, up_lora, down_lora, activation, gated, interleaved, transposed, recompute, capacity = block
    up_is_scaled = check_scaled("gate_up_proj", up, x, owner, transposed)
    scaled = up_is_scaled, check_scaled("down_proj", down, x, owner, transposed)
    (up, up_scale, up_block), (down, down_scale, down_block) = parts_of(up), parts_of(down)
    weights = [up, down, *biases]
    if dtype is not None:
        weights = [checks.autocast(tensor, dtype) for tensor in weights]
    checks.check_experts(owner, x, *weights, gated, transposed, scaled)
    up, down, *_ = weights
    check_loras({"gate_up_lora": (up_lora, up), "down_lora": (down_lora, down)}, transposed, x, adapter_index)
    adapters = None if adapter_index is None else adapter_index.contiguous()
    # Zeros that are no globals, of which a compiler makes variables with dynamic=True.
    up_a, up_b, up_scaling = up_lora or (None, None, 0.0)
    down_a, down_b, down_scaling = down_lora or (None, None, 0.0)
    weights += up_a, up_b, down_a, down_b, up_scale, down_scale
    name, alpha, limit, up_offset = activation
    clamps = limit is not None and limit <= torch.finfo(wide_dtype(x.dtype)).max  # else no number is above it
    limit = float(limit) if clamps else 0.0
    parameters = [float(alpha), limit, float(up_offset), float(up_scaling), float(down_scaling)]
    flags = [*map(int, (gated, interleaved, transposed, recompute))]
    if not x.is_cpu and not _compat.has_device_assertions():
        capacity = None  # an overflow would go unseen
    elif isinstance(capacity, int) and capacity > _MAX_INT64:
        capacity = None  # there is room for all slots, and ops hold no such number
    return x, adapters, weights, (name, parameters, flags, [*up_block, *down_block], capacity)


def make_block(
    up, down, up_bias, down_bias, up_a, up_b, down_a, down_b, up_scale, down_scale, activation, parameters, flags,
    blocks, capacity=None,
) -> Block:  # fmt: skip
    """The block of an op's arguments, `BLOCK_SCHEMA`: the inverse of `check_and_pack`."""
    alpha, limit, up_offset, up_scaling, down_scaling = parameters
    act = Activation(activation, alpha, limit or None, up_offset)
    up_lora = None if up_a is None else LoRA(up_a, up_b, up_scaling)
    down_lora = None if down_a is None else LoRA(down_a, down_b, down_scaling)
    blocks = blocks or ()  # of each scaled weight four numbers, those of `parts_of`
    weights = as_weight(up, up_scale, blocks[:4]), as_weight(down, down_scale, blocks[-4:])
    return Block(*weights, up_bias, down_bias, up_lora, down_lora, act, *map(bool, flags), capacity)


class Needs(NamedTuple):
    """Which gradients of a block are asked for.

    act_scales: of the factors of the activation's rows, in the experts block the routing weights. bias_scales: of the
    factors of the second bias, which in the experts block are the routing weights, too: their gradient is one.
    """

    x: bool
    act_scales: bool
    bias_scales: bool
    up: bool
    down: bool
    up_bias: bool
    down_bias: bool
    up_a: bool = False
    up_b: bool = False
    down_a: bool = False
    down_b: bool = False

    @property
    def beyond_x(self) -> bool:
        """Whether the gradient of the pre-activation leads to others than that of x."""
        return self.up or self.up_bias or self.up_a or self.up_b

    @property
    def act(self) -> bool:
        """Whether any of them is made of the activation."""
        return self.down or self.down_a

    @property
    def preact(self) -> bool:
        """Whether any is asked for but those of down_bias, bias_scales and down_b, which need no pre-activation."""
        return self.x or self.beyond_x or self.act or self.act_scales


class Saved(NamedTuple):
    """What a forward computes for its backward, None for what it does not.

    preact: (rows, P), not of a block that recomputes it. up_rows: (rows, R), x projected on the ranks of the first
    LoRA, not of a block that recomputes. down_rows: the same of the second LoRA, of the activation times its scales.
    """

    preact: Optional[Tensor]
    up_rows: Optional[Tensor]
    down_rows: Optional[Tensor]


# The gradients, None where not asked for. Those of weights and of factors of LoRA lie as these do (`torch.empty_like`),
# others are contiguous.
Grads = namedtuple("Grads", Needs._fields, defaults=(None,) * len(Needs._fields))
