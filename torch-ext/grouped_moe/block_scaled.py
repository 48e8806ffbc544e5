"""Weights of 8-bit floats with a scale per block, as FP8 checkpoints hold them."""

from typing import NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from .common import checks
from .common.numbers import wide_dtype

CODES = torch.float8_e4m3fn
PRODUCTS = ("auto", "w8a16", "w8a8")
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
MULTIPLE = 16  # of blocks: steps of a product do not cross them
_LARGEST = 448.0  # of the codes


class BlockScaled(NamedTuple):
    """A weight (E, N, K) of 8-bit floats, each times the scale of its block: frozen, it takes no gradient.

    data: (E, N, K) float8_e4m3fn, of any strides; a weight that is stored as (E, K, N) can be given as a view.
    scale_inv: (E, ceil(N / n), ceil(K / k)) of blocks (n, k), fp32, bf16 or float8_e8m0fnu: value = code * scale_inv.
    parts: how many equal parts of N have blocks of their own: 2 where gate and up were scaled apart, with
    (E, 2 ceil(N / 2 / n), ...) scales. An extent of blocks is a multiple of 16, or all of K, or all of N or of a part
    of it: with block=(N, K) an expert has one scale.
    products: "w8a16" never rounds rows or their gradients; "auto", the default, makes products with rows of 8-bit
    floats, each times the scale of its 128 columns, where that takes less time (W8A8). "w8a8" makes those of an experts
    block so wherever there are kernels for it, with few rows in training, too, but not those of a few tokens without
    gradients, which wait for weights; in `grouped_linear` it is "auto".

    DeepSeek-V3's checkpoints have experts in this form. Source: DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report",
    section 3.3.2.
    """

    data: Tensor
    scale_inv: Tensor
    block: Tuple[int, int] = (128, 128)
    parts: int = 1
    products: str = "auto"

    @property
    def shape(self) -> torch.Size:
        """(E, N, K)."""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The plain weight, (E, N, K), in bf16, fp16, fp32 or fp64: products in fp32, or fp64. Else TypeError."""
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
            raise TypeError(f"dtype: expected bf16, fp16, fp32 or fp64, got {dtype!r}")
        wide = wide_dtype(dtype)
        return (self.data.to(wide) * spread(self, row_scales(self, self.scale_inv.to(wide)))).to(dtype)


Weight = Union[Tensor, BlockScaled]


def row_scales(weight: BlockScaled, scales: Tensor) -> Tensor:
    """The scales of the blocks that each row lies in, (E, N, ceil(K / k)), of scales per block as in scale_inv."""
    part = weight.shape[1] // weight.parts
    rows = scales.unflatten(1, (weight.parts, -1)).repeat_interleave(min(weight.block[0], part), 2)
    return rows[:, :, :part].flatten(1, 2)


def spread(weight: BlockScaled, scales: Tensor) -> Tensor:
    """The scale of each element, (..., K), of the scales (..., ceil(K / k)) of rows."""
    k = weight.shape[2]
    return scales.repeat_interleave(min(weight.block[1], k), -1)[..., :k]


def quantize_blocks(weight: Tensor, block: Tuple[int, int] = (128, 128), parts: int = 1) -> BlockScaled:
    """A weight (E, N, K) in blocks, with scales that let each block reach the largest code.

    weight: bf16, fp16, fp32 or fp64. block, parts: as of `BlockScaled`. Scales are fp32: the largest finite magnitude
    of a block over 448, or 1 if fp32 has no such number, as for a block of zeros. Inf becomes the largest code, NaN
    stays. Raises TypeError or ValueError that names the argument.
    """
    checks.check_tensor("weight", weight)
    if weight.dim() != 3:
        raise checks.wrong_shape("weight", weight, (None, None, None), "(E, N, K)")
    if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
        raise TypeError(f"weight: expected bf16, fp16, fp32 or fp64, got {weight.dtype}")
    _, n, k = weight.shape
    if n == 0 or k == 0:
        raise ValueError(f"weight: expected N and K above 0, got {tuple(weight.shape)}")
    n_block, k_block = _checked_block("block", "parts", block, parts, n, k)
    rows, columns = -(-n // parts // n_block), -(-k // k_block)
    n_extent, k_extent = min(n_block, n // parts), min(k_block, k)
    wide = weight.detach().to(wide_dtype(weight.dtype)).unflatten(1, (parts, -1))
    finite = torch.where(wide.isfinite(), wide.abs(), 0.0)
    padded = torch.nn.functional.pad(finite, (0, columns * k_extent - k, 0, rows * n_extent - n // parts))
    largest = padded.unflatten(3, (columns, k_extent)).unflatten(2, (rows, n_extent)).amax((3, 5))
    scales = (largest / _LARGEST).float().flatten(1, 2)
    scales = torch.where((scales > 0) & scales.isfinite(), scales, 1.0)
    scaled = BlockScaled(weight.new_empty(weight.shape, dtype=CODES), scales, (n_block, k_block), parts)
    values = wide.flatten(1, 2) / spread(scaled, row_scales(scaled, scales.to(wide.dtype)))
    return scaled._replace(data=values.clamp(-_LARGEST, _LARGEST).to(CODES))


def _checked_block(name: str, parts_name: str, block: object, parts: object, n: int, k: int) -> Tuple[int, int]:
    """The extents of a block. Raises TypeError or ValueError unless they, and the parts of N, are what kernels take."""
    if type(parts) is not int or parts < 1 or n % parts:
        raise ValueError(f"{parts_name}: expected an int that divides N = {n}, got {parts!r}")
    if not isinstance(block, (tuple, list)) or [*map(type, block)] != [int, int]:
        raise TypeError(f"{name}: expected two ints, got {block!r}")
    for extent, whole in zip(block, (n // parts, k)):
        if not 0 < extent < 1 << 63 or (extent % MULTIPLE and extent < whole):
            wanted = f"multiples of {MULTIPLE} below 2^63, or what spans the weight"
            raise ValueError(f"{name}: expected {wanted}, got {tuple(block)}")
    return tuple(block)


def check_scaled(name: str, weight: object, x: Tensor, owner: str, transposed: bool) -> bool:
    """Whether a weight is block-scaled. Raises TypeError or ValueError that names what of it is at fault.

    x: the rows, an argument called `owner`. transposed: of the caller's plain weights.
    """
    if not isinstance(weight, BlockScaled):
        return False
    data, scales, block, parts, products = weight
    for field, tensor in (("data", data), ("scale_inv", scales)):
        checks.check_tensor(f"{name}.{field}", tensor)
        checks.check_device(f"{name}.{field}", tensor, x.device, owner)
        if tensor.requires_grad:
            hint = "requires_grad_(False) freezes it"
            raise ValueError(f"{name}.{field}: expected a frozen tensor, got one that requires a gradient; {hint}")
    if transposed:
        raise ValueError(f"transposed: expected False with a BlockScaled {name}, whose data may be a view (E, N, K)")
    if data.dtype is not CODES:
        raise TypeError(f"{name}.data: expected {CODES}, got {data.dtype}")
    if scales.dtype not in _SCALE_DTYPES:
        raise TypeError(f"{name}.scale_inv: expected one of {', '.join(map(str, _SCALE_DTYPES))}, got {scales.dtype}")
    if data.dim() != 3:
        raise checks.wrong_shape(f"{name}.data", data, (None, None, None), "(E, N, K)")
    num_experts, n, k = data.shape
    n_block, k_block = _checked_block(f"{name}.block", f"{name}.parts", block, parts, n, k)
    shape = num_experts, parts * -(-n // parts // n_block), -(-k // k_block)
    checks.check_shape(f"{name}.scale_inv", scales, shape, "(E, parts ceil(N / parts / n), ceil(K / k))")
    if products not in PRODUCTS:
        raise ValueError(f"{name}.products: expected one of {', '.join(PRODUCTS)}, got {products!r}")
    return True


def parts_of(weight: Weight) -> Tuple[Tensor, Optional[Tensor], Tuple[int, ...]]:
    """A weight as arguments of ops: values, scales, and the rest as numbers; of a plain one the values alone."""
    if not isinstance(weight, BlockScaled):
        return weight, None, ()
    return weight.data, weight.scale_inv, (*weight.block, weight.parts, PRODUCTS.index(weight.products))


def as_weight(values: Tensor, scales: Optional[Tensor], block: Optional[Sequence[int]]) -> Weight:
    """The inverse of `parts_of`. block: None, too, without scales."""
    if scales is None:
        return values
    n_block, k_block, parts, products = block
    return BlockScaled(values, scales, (n_block, k_block), parts, PRODUCTS[products])
