"""Triton kernels, one file per op, and the device functions they share; files hopper_*.py are in Gluon.

Nothing here allocates tensors, checks arguments or chooses tile sizes: the launchers do, one level up.
"""
