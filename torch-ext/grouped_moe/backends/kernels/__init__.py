"""Triton kernels, one file per op, and the device functions they share; files hopper_*.py are in Gluon.

Nothing here allocates tensors, checks arguments or chooses tile sizes: the launchers do, one level up.

Compile-time values that belong together come as one NamedTuple, which the launchers make:
    TILING   `tiles.Tiling`, `hopper_scheduler.WgradTiling`
    PRODUCT  `products.Product`, `block_scaled.ScaledProduct`, `hopper_ring.Product`
    SCALES   `block_scaled.ScaleBlocks`
    FACTOR   `low_rank.Factor`
    OPTIONS  `activation.Options`
In a kernel their fields are plain values, no constexprs. So device functions take the whole tuple where they need a
string, or what may be None, and `static_range` takes a field that was assigned to a constexpr before.
"""
