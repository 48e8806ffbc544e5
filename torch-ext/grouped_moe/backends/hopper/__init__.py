"""Products by Gluon kernels for Hopper: warps that load, multiply and store at once."""
