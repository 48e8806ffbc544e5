"""Layers as modules."""

from .grouped_linear import GroupedLinear

__all__ = ["GroupedLinear"]
