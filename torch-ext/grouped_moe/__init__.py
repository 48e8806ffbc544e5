"""Mixture-of-experts on grouped GEMM, for training and inference, tolerant of expert-parallel sentinels.

Legend, everywhere in the package: T tokens, S = T * top_k slots, R <= S routed rows (known on the device only),
E local experts, G groups of rows, H hidden, I intermediate, P columns of the pre-activation; M, N, K are dimensions of
a GEMM. Of LoRAs: L adapters, r the rank of one; in their products R is the ranks of all adapters side by side.
"""

from . import layers, reference
from .bias_grads import grouped_dbias_dscales
from .block_scaled import BlockScaled, quantize_blocks
from .common.activation import Activation
from .experts import grouped_mm_experts
from .flops import register_formulas
from .grouped_linear import grouped_linear
from .grouped_mlp import grouped_mlp
from .integrations.transformers import register_experts_implementation
from .nn import GroupedLinear
from .operands import LoRA
from .permute import combine_rows, gather_rows
from .routing import Routing, route
from .splits import GroupOffsets, GroupSizes
from .warm_up import warm_up

register_formulas()

__all__ = [
    "Activation",
    "BlockScaled",
    "GroupOffsets",
    "GroupSizes",
    "GroupedLinear",
    "LoRA",
    "Routing",
    "combine_rows",
    "gather_rows",
    "grouped_dbias_dscales",
    "grouped_linear",
    "grouped_mlp",
    "grouped_mm_experts",
    "layers",
    "quantize_blocks",
    "reference",
    "register_experts_implementation",
    "route",
    "warm_up",
]
