"""Triton kernels, one file per op; those of hopper_*.py are in Gluon.

Nothing here allocates, checks or chooses a tile: launchers do (one level up).
"""
