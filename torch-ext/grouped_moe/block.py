"""What the two ops of the experts block and its two implementations share: the block, and which gradients it owes."""

import math
from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .activation import Activation
from .tuning import DeviceSpec, dot_precision


class Kind(NamedTuple):
    """What of a block a kernel is compiled for. precision: of products, as `dot_precision` says."""

    gated: bool
    interleaved: bool
    activation: Activation
    precision: str


class Block(NamedTuple):
    """The weights and the kind of an experts block, as both directions need them.

    up: (E, P, H) or, transposed, (E, H, P), with P = 2 I if gated, else I. down: (E, H, I) or (E, I, H).
    """

    up: Tensor
    down: Tensor
    up_bias: Optional[Tensor]
    down_bias: Optional[Tensor]
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
        return self.down.shape[1] if self.transposed else self.down.shape[2]

    @property
    def preact_width(self) -> int:
        """P, the columns of the pre-activation."""
        return self.up.shape[2] if self.transposed else self.up.shape[1]

    def up_nk(self) -> Tensor:
        """The up-projection as a view (E, P, H)."""
        return self.up.transpose(1, 2) if self.transposed else self.up

    def down_nk(self) -> Tensor:
        """The down-projection as a view (E, H, I)."""
        return self.down.transpose(1, 2) if self.transposed else self.down

    def kind(self, spec: DeviceSpec) -> Kind:
        """What of the block a kernel is compiled for."""
        return Kind(self.gated, self.interleaved, self.activation, dot_precision(self.up.dtype, spec))


def pack_kind(
    activation: Activation,
    gated: bool,
    interleaved: bool,
    transposed: bool,
    recompute: bool,
    capacity: Optional[int] = None,
) -> Tuple[str, List[float], List[int]]:
    """What kind of block it is, in the three arguments of the ops (autograd's cost per call grows with their number):

    the activation's name; its alpha, limit (infinity: none) and up_offset; gated, interleaved, transposed, recompute
    and, if there is one, the capacity.
    """
    limit = math.inf if activation.limit is None else activation.limit
    parameters = [float(activation.alpha), float(limit), float(activation.up_offset)]
    flags = [gated, interleaved, transposed, recompute]
    return activation.name, parameters, flags if capacity is None else [*(int(flag) for flag in flags), capacity]


def make_block(
    up: Tensor,
    down: Tensor,
    up_bias: Optional[Tensor],
    down_bias: Optional[Tensor],
    name: str,
    parameters: Sequence[float],
    flags: Sequence[int],
) -> Block:
    """The inverse of `pack_kind`, with the weights."""
    alpha, limit, up_offset = parameters
    activation = Activation(name, alpha, None if limit == math.inf else limit, up_offset)
    return Block(up, down, up_bias, down_bias, activation, *map(bool, flags[:4]), *flags[4:])


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weights: bool
    up: bool
    down: bool
    up_bias: bool
    down_bias: bool


class Grads(NamedTuple):
    """The gradients; an empty tensor stands for one that is not asked for."""

    x: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor
    down_bias: Tensor


def empty_grads(needs: Needs, block: Block, dout: Tensor, weights: Tensor) -> Grads:
    """Unwritten gradients. A weight's keeps its strides; the others are contiguous, which is what the kernels write."""

    def rows(tensor: Optional[Tensor], need: bool) -> Tensor:
        return tensor.new_empty(tensor.shape) if need else dout.new_empty(0)

    def weight(tensor: Tensor, need: bool) -> Tensor:
        return torch.empty_like(tensor) if need else dout.new_empty(0)

    return Grads(
        x=rows(dout, needs.x),
        weights=rows(weights, needs.weights),
        up=weight(block.up, needs.up),
        down=weight(block.down, needs.down),
        up_bias=rows(block.up_bias, needs.up_bias),
        down_bias=rows(block.down_bias, needs.down_bias),
    )
