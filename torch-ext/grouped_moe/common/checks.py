"""Checks of arguments. Every error names the argument, what came and what was expected, before anything is launched."""

from typing import Optional, Sequence

import torch
from torch import Tensor

from .device import device_type

MAX_EXPERTS = 1024
MAX_SLOTS = 2**31 - 129  # or rows: kernels count them, and up to 128 past the last one, in int32

_DENSE = torch.strided
_DEVICE_TYPES = ("cpu", "cuda", "xpu", "meta")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CPU_DTYPES = (*_DTYPES, torch.float64)
_INDEX_DTYPES = (torch.int32, torch.int64)


def check_flags(**flags: object) -> None:
    """Raises TypeError that names the flag unless every one is a bool."""
    for name, value in flags.items():
        if value is not True and value is not False:
            raise TypeError(f"{name}: expected True or False, got {value!r}")


def check_tensor(name: str, value: object) -> None:
    """Raises TypeError unless value is a dense tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.layout is not _DENSE or value.is_nested:
        found = "a nested one" if value.is_nested else f"layout {value.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {found}")


def wrong_shape(name: str, tensor: Tensor, shape: Sequence[Optional[int]], legend: str) -> ValueError:
    """The error for a tensor of another shape, in which None stands for any extent; legend spells it for the reader."""
    extents = ", ".join("?" if want is None else str(want) for want in shape)
    known = any(want is not None for want in shape)
    wanted = f" = ({extents}{',' * (len(shape) == 1)})" if known else ""
    return ValueError(f"{name}: expected shape {legend}{wanted}, got {tuple(tensor.shape)}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[Optional[int]], legend: str) -> None:
    """Raises `wrong_shape` unless tensor has this shape."""
    found = tensor.shape
    if found == shape:
        return
    if len(found) != len(shape) or any(want is not None and have != want for have, want in zip(found, shape)):
        raise wrong_shape(name, tensor, shape, legend)


def check_device(name: str, tensor: Tensor, device: torch.device, owner: str) -> None:
    """Raises ValueError unless tensor is on the device of the argument `owner`."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected on {device} like {owner}, got {tensor.device}")


def wrong_dtype(name: str, tensor: Tensor, dtype: torch.dtype, owner: str) -> TypeError:
    """The error for a tensor of another dtype than the argument `owner`."""
    is_coded_weight = tensor.dtype is torch.float8_e4m3fn and tensor.dim() == 3  # biases have two dimensions
    hint = "; codes take their scales along in a BlockScaled" if is_coded_weight else ""
    return TypeError(f"{name}: expected {dtype} like {owner}, got {tensor.dtype}{hint}")


def check_compute_dtype(name: str, tensor: Tensor) -> None:
    """Raises TypeError unless the kernels compute in the dtype of tensor: bf16, fp16, fp32; on CPU fp64, too.

    Raises ValueError for devices that the package has no kernels for.
    """
    if tensor.is_cpu:
        dtypes = _CPU_DTYPES
    elif tensor.is_cuda or tensor.device.type in _DEVICE_TYPES:  # the type is a new string, which takes the host longer
        dtypes = _DTYPES
    else:
        raise ValueError(f"{name}: expected on one of {', '.join(_DEVICE_TYPES)}, got {tensor.device}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected one of {', '.join(map(str, dtypes))}, got {tensor.dtype}")


def check_index_dtype(name: str, tensor: Tensor) -> None:
    """Raises TypeError unless tensor is int32 or int64."""
    if tensor.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name}: expected torch.int32 or torch.int64, got {tensor.dtype}")


def check_count(name: str, count: object) -> None:
    """Raises TypeError or ValueError that names the argument unless it is None or an int above 0."""
    if count is None:
        return
    if not isinstance(count, (int, torch.SymInt)) or isinstance(count, bool):
        raise TypeError(f"{name}: expected an int or None, got {type(count).__name__}")
    if count < 1:
        raise ValueError(f"{name}: expected above 0, got {count}")


def autocast_dtype(tensor: Tensor) -> Optional[torch.dtype]:
    """The dtype to compute in under an active autocast on the tensor's device, else None."""
    kind = device_type(tensor)
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # meta: asking would raise
        return None
    return torch.get_autocast_dtype(kind)


def autocast(tensor: Optional[Tensor], dtype: Optional[torch.dtype]) -> Optional[Tensor]:
    """tensor as `F.linear` would see it under autocast: floating point is cast, fp64 and what is no tensor stay.

    So do 8-bit floats, which mean nothing without their scales.
    """
    if dtype is None or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype == torch.float64 or tensor.dtype.itemsize == 1 else tensor.to(dtype)


def check_num_groups(name: str, groups: int, what: str = "groups") -> None:
    """Raises ValueError that names the argument unless there are 1 to MAX_EXPERTS groups."""
    if not 1 <= groups <= MAX_EXPERTS:
        raise ValueError(f"{name}: expected 1 to {MAX_EXPERTS} {what}, got {groups}")


def check_matrix(name: str, x: Tensor, legend: str) -> None:
    """Raises TypeError or ValueError unless x is (rows, columns) of a dtype to compute in, with rows that fit int32.

    x: a dense tensor.
    """
    check_compute_dtype(name, x)
    if x.dim() != 2:
        raise wrong_shape(name, x, (None, None), legend)
    if x.shape[0] > MAX_SLOTS:
        raise ValueError(f"{name}: expected at most {MAX_SLOTS} rows, got {x.shape[0]}")


def check_operand(
    name: str,
    tensor: Tensor,
    shape: Sequence[Optional[int]],
    legend: str,
    device: torch.device,
    dtype: Optional[torch.dtype],
    owner: str,
) -> None:
    """Raises TypeError or ValueError unless tensor has this shape, and device and dtype of the argument `owner`.

    dtype None: any that kernels compute in.
    """
    check_tensor(name, tensor)
    if tensor.shape != shape:
        check_shape(name, tensor, shape, legend)
    if tensor.device != device:
        raise ValueError(f"{name}: expected on {device} like {owner}, got {tensor.device}")
    if tensor.dtype is not dtype:
        if dtype is not None:
            raise wrong_dtype(name, tensor, dtype, owner)
        check_compute_dtype(name, tensor)


def check_scales(name: str, scales: Tensor, x: Tensor, owner: str = "x") -> None:
    """Raises TypeError or ValueError unless scales has one factor per row of x, named `owner`, in a floating dtype."""
    check_operand(name, scales, (x.shape[0],), "(rows,)", x.device, None, owner)


def check_ids(top_k_index: Tensor) -> None:
    """Raises TypeError or ValueError unless they are the expert ids of the slots, of as many as kernels can count."""
    check_tensor("top_k_index", top_k_index)
    check_index_dtype("top_k_index", top_k_index)
    if top_k_index.dim() != 2 or top_k_index.shape[1] == 0:
        raise ValueError(f"top_k_index: expected shape (T, top_k) with top_k > 0, got {tuple(top_k_index.shape)}")
    if top_k_index.numel() > MAX_SLOTS:
        raise ValueError(f"top_k_index: expected at most {MAX_SLOTS} slots, got {top_k_index.numel()}")


def check_experts(owner, x, up, down, up_bias, down_bias, gated, transposed, scaled) -> None:
    """Raises TypeError or ValueError that names what of the weights, or of x, named `owner`, is at fault.

    scaled: which of the two weights have a dtype of their own, that is known to be right.
    """
    check_matrix(owner, x, "(T, H)" if owner == "hidden_states" else "(rows, H)")
    check_tensor("gate_up_proj", up)
    if up.dim() != 3:
        raise wrong_shape("gate_up_proj", up, (None, None, None), "(E, 2 I, H), (E, I, H) or transposed")
    h, (e, p, k) = x.shape[1], up.shape
    if transposed:
        p, k = k, p
    check_num_groups("gate_up_proj", e, "experts")
    if gated and p % 2:
        raise ValueError(f"gate_up_proj: expected an even number of gate and up columns, got {tuple(up.shape)}")
    i, p_legend = (p // 2, "2 I") if gated else (p, "I")
    if h == 0 or i == 0:
        raise ValueError(f"gate_up_proj: expected H and I above 0, got {tuple(up.shape)}")
    device, dtype = x.device, x.dtype
    up_scaled, down_scaled = scaled
    up_dtype, down_dtype = up.dtype if up_scaled else dtype, down.dtype if down_scaled else dtype
    if transposed:
        check_operand("gate_up_proj", up, (e, h, p), f"(E, H, {p_legend})", device, up_dtype, owner)
        check_operand("down_proj", down, (e, i, h), "(E, I, H)", device, down_dtype, owner)
    else:
        check_operand("gate_up_proj", up, (e, p, h), f"(E, {p_legend}, H)", device, up_dtype, owner)
        check_operand("down_proj", down, (e, h, i), "(E, H, I)", device, down_dtype, owner)
    if up_bias is not None:
        check_operand("gate_up_proj_bias", up_bias, (e, p), f"(E, {p_legend})", device, dtype, owner)
    if down_bias is not None:
        check_operand("down_proj_bias", down_bias, (e, h), "(E, H)", device, dtype, owner)


def check_choices(x, top_k_index, top_k_weights) -> None:
    """Raises TypeError or ValueError that names which choice of experts for x, the hidden states, is at fault."""
    check_ids(top_k_index)
    if top_k_index.shape[0] != x.shape[0]:
        raise wrong_shape("top_k_index", top_k_index, (x.shape[0], None), "(T, top_k)")
    device, owner = x.device, "hidden_states"
    check_device("top_k_index", top_k_index, device, owner)
    check_operand("top_k_weights", top_k_weights, top_k_index.shape, "(T, top_k)", device, None, owner)


def check_linear(x, weight, bias, bias_scales, transposed, scaled) -> None:
    """Raises TypeError or ValueError that names the argument of `grouped_linear` at fault. scaled: `check_experts`'."""
    check_matrix("x", x, "(rows, K)")
    k = x.shape[1]
    if weight.dim() != 3 or weight.shape[1 if transposed else 2] != k:
        shape, legend = ((None, k, None), "(G, K, N)") if transposed else ((None, None, k), "(G, N, K)")
        raise wrong_shape("weight", weight, shape, legend)
    groups, n = weight.shape[0], weight.shape[2 if transposed else 1]
    check_num_groups("weight", groups)
    if k == 0 or n == 0:
        raise ValueError(f"weight: expected N and K above 0, got {tuple(weight.shape)}")
    check_device("weight", weight, x.device, "x")
    if not scaled and weight.dtype is not x.dtype:
        raise wrong_dtype("weight", weight, x.dtype, "x")
    if bias is None and bias_scales is not None:
        raise ValueError("bias_scales: expected None without a bias, which they scale")
    if bias is not None:
        check_operand("bias", bias, (groups, n), "(G, N)", x.device, x.dtype, "x")
    if bias_scales is not None:
        check_scales("bias_scales", bias_scales, x)
