"""Triton kernels, one file per op. Nothing here allocates, checks or chooses a tile: launchers do (one level up)."""
