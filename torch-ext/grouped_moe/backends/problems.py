"""What decides how a product is computed: all that kernels are compiled for, nothing that changes from call to call.

No field depends on the number of rows but for classes of it, of which there are few: a number of rows that was not seen
before finds the launcher of an earlier one.
"""

from typing import NamedTuple, Optional

import torch

from ..common.activation import Activation
from ..common.device import DeviceSpec
from .kernels.activation import Options
from .kernels.block_scaled import ScaleBlocks
from .kernels.low_rank import Factor


class GemmProblem(NamedTuple):
    """y[r] = W[e] x[r] + scales[r] bias[e].

    by_tma: whether x and the weight can be read by descriptor. transposed: whether the weight is (E, K, N). low_rank:
    the factor of the low-rank part. zero_rest: rows of no group are written as 0. wide: tiles of 256 columns take less
    time (`tuning.heuristic.wide_pays`), asked of plain weights alone. scales: which scale a weight's element has, None
    for plain weights.
    """

    spec: DeviceSpec
    dtype: torch.dtype
    precision: str
    num_groups: int
    block_m: int
    n: int
    k: int
    by_tma: bool
    transposed: bool
    low_rank: Factor
    zero_rest: bool
    wide: bool
    scales: Optional[ScaleBlocks] = None


class BlockProblem(NamedTuple):
    """One of the two fused products of the experts block: the up-projection, or the dgrad of the down-projection.

    n: I. k: H. top_k: slots of a token where rows are routed, else 0. weight_by_tma, rows_by_tma: whether the weight,
    and x or dout, can be read by descriptor. transposed, low_rank, scales: as in `GemmProblem`. saves_preact: whether
    the up-projection also returns the pre-activation.
    """

    spec: DeviceSpec
    dtype: torch.dtype
    precision: str
    num_groups: int
    block_m: int
    n: int
    k: int
    top_k: int
    weight_by_tma: bool
    transposed: bool
    low_rank: Factor
    rows_by_tma: bool
    gated: bool
    interleaved: bool
    activation: Activation
    saves_preact: bool
    scales: Optional[ScaleBlocks] = None

    @property
    def width(self) -> int:
        """Columns of the pre-activation."""
        return 2 * self.n if self.gated else self.n

    @property
    def options(self) -> Options:
        """The activation, as kernels take it."""
        return Options(self.n, self.gated, self.interleaved, *self.activation)


class WgradProblem(NamedTuple):
    """dw[e] = sum over the rows r of e of lhs[r] rhs[r]^T, (E, M, N).

    gathered: "lhs" or "rhs" for the operand that is read at the tokens of the rows, else None. rows_per_group: the
    class of the average (`tuning.heuristic.rows_per_group`). rows_by_tma: whether both operands can be read by
    descriptor, out_by_tma: whether dw can be written so; neither is asked of N up to `tuning.heuristic.THIN`.
    row_unit: 8 if that divides both row strides and 16 does not, else 1.
    """

    spec: DeviceSpec
    dtype: torch.dtype
    out_dtype: torch.dtype
    precision: str
    num_groups: int
    m: int
    n: int
    top_k: int
    gathered: Optional[str]
    rows_per_group: int
    rows_by_tma: bool
    row_unit: int
    out_by_tma: bool
    accumulate: bool
