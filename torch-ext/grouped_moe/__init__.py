"""Mixture-of-experts on grouped GEMM, for training and inference, tolerant of expert-parallel sentinels.

Legend, everywhere in the package: T tokens, S = T * top_k slots, R <= S routed rows (known on the device only),
E local experts, H hidden, I intermediate; M, N, K are GEMM dimensions.
"""

from . import layers, reference
from .activation import Activation
from .experts import grouped_mm_experts
from .grouped_linear import grouped_linear
from .permute import combine_rows, gather_rows
from .routing import Routing, route
from .transformers_shim import register_experts_implementation

__all__ = [
    "Activation",
    "Routing",
    "combine_rows",
    "gather_rows",
    "grouped_linear",
    "grouped_mm_experts",
    "layers",
    "reference",
    "register_experts_implementation",
    "route",
]
