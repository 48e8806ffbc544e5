"""Checks of arguments. Every error names the argument, what came and what was expected, before anything is launched."""

from functools import lru_cache
from typing import Optional, Sequence

import torch

from . import _compat

MAX_EXPERTS = 1024
MAX_SLOTS = 2**31 - 129  # kernels count them, and up to 128 past the last one, in int32

_ACCELERATOR_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DEVICE_TYPES = ("cpu", "cuda", "xpu", "meta")
_INDEX_DTYPES = (torch.int32, torch.int64)
_CPU_DTYPES = _ACCELERATOR_DTYPES + (torch.float64,)


def check_flags(**flags: object) -> None:
    """Raises TypeError that names the flag unless every one is a bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {value!r}")


def check_tensor(name: str, value: object) -> None:
    """Raises TypeError unless value is a dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {value.layout}")


def check_no_operations(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError for a parameter of a subclass with operations of its own, as those for quantization have.

    torchao's for FP8 training replace one operation, which is never called here, and pass for plain in all others.
    """
    kind = type(tensor)
    if kind is not torch.nn.Parameter and kind is not torch.Tensor and _has_operations(kind):
        raise TypeError(
            f"{name}: expected a plain tensor or a DTensor, got {kind.__name__}, whose own operations (quantization, "
            "FP8 training) are not supported; leave this parameter out of the conversion, dequantize it, or choose "
            "another experts_implementation, such as 'grouped_mm'"
        )


@torch.compiler.assume_constant_result
def _has_operations(kind: type) -> bool:
    return _overrides_operations(kind)


@lru_cache(maxsize=None)
def _overrides_operations(kind: type) -> bool:
    """Whether a class of tensors, but PyTorch's own for tracing and sharding, overrides what operations do."""
    if _compat.is_transparent(kind):
        return False
    # Tensor's keeps the class of results; Parameter's does nothing.
    function, *plain = (
        getattr(each.__torch_function__, "__func__", each.__torch_function__)
        for each in (kind, torch.Tensor, torch.nn.Parameter)
    )
    return function not in plain or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[Optional[int]], legend: str) -> None:
    """Raises ValueError unless tensor has this shape, None standing for any extent; legend spells it for the reader."""
    if tensor.shape == shape:
        return
    if tensor.dim() == len(shape):
        for have, want in zip(tensor.shape, shape):
            if want is not None and have != want:
                break
        else:
            return
    wanted = ", ".join("?" if want is None else str(want) for want in shape)
    raise ValueError(f"{name}: expected shape {legend} = ({wanted}), got {tuple(tensor.shape)}")


def check_device(name: str, tensor: torch.Tensor, device: torch.device, owner: str) -> None:
    """Raises ValueError unless tensor is on the device of the argument `owner`."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected on {device} like {owner}, got {tensor.device}")


def check_same_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype, owner: str) -> None:
    """Raises TypeError unless tensor has the dtype of the argument `owner`."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype} like {owner}, got {tensor.dtype}")


def check_compute_dtype(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError unless the kernels compute in the dtype of tensor: bf16, fp16, fp32; on CPU fp64, too.

    Raises ValueError for devices that the package has no kernels for.
    """
    if tensor.device.type not in _DEVICE_TYPES:
        raise ValueError(f"{name}: expected on one of {', '.join(_DEVICE_TYPES)}, got {tensor.device}")
    dtypes = _CPU_DTYPES if tensor.device.type == "cpu" else _ACCELERATOR_DTYPES
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected one of {', '.join(map(str, dtypes))}, got {tensor.dtype}")


def check_index_dtype(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError unless tensor is int32 or int64."""
    if tensor.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name}: expected torch.int32 or torch.int64, got {tensor.dtype}")


def autocast_dtype(device_type: str) -> Optional[torch.dtype]:
    """The dtype to compute in under an active autocast, else None."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta: asking would raise
        return None
    return torch.get_autocast_dtype(device_type)


def autocast(tensor: Optional[torch.Tensor], dtype: Optional[torch.dtype]) -> Optional[torch.Tensor]:
    """tensor as `F.linear` would see it under autocast: floating point is cast, fp64 and what is no tensor stay."""
    if dtype is None or not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor if tensor.dtype == torch.float64 or not tensor.is_floating_point() else tensor.to(dtype)


def check_routing(top_k_index: torch.Tensor, num_experts: int, owner: str = "num_experts") -> None:
    """Raises TypeError or ValueError that names top_k_index, or the argument `owner` that gives the experts."""
    check_tensor("top_k_index", top_k_index)
    check_index_dtype("top_k_index", top_k_index)
    if top_k_index.dim() != 2 or top_k_index.shape[1] == 0:
        raise ValueError(f"top_k_index: expected shape (T, top_k) with top_k > 0, got {tuple(top_k_index.shape)}")
    num_slots = top_k_index.shape[0] * top_k_index.shape[1]
    if num_slots > MAX_SLOTS:
        raise ValueError(f"top_k_index: expected at most {MAX_SLOTS} slots, got {num_slots}")
    if not isinstance(num_experts, (int, torch.SymInt)):
        raise TypeError(f"{owner}: expected an int, got {type(num_experts).__name__}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"{owner}: expected 1 to {MAX_EXPERTS} experts, got {num_experts}")


def check_experts(owner, x, up, down, up_bias, down_bias, gated, transposed) -> None:
    """Raises TypeError or ValueError that names what of the weights, or of x, named `owner`, is at fault."""
    named = {owner: x, "gate_up_proj": up, "down_proj": down}
    named.update({"gate_up_proj_bias": up_bias, "down_proj_bias": down_bias})
    named = {name: tensor for name, tensor in named.items() if tensor is not None or "bias" not in name}
    for name, tensor in named.items():
        check_tensor(name, tensor)
    check_compute_dtype(owner, x)
    check_shape(owner, x, (None, None), "(T, H)" if owner == "hidden_states" else "(rows, H)")
    check_shape("gate_up_proj", up, (None, None, None), "(E, 2 I, H), (E, I, H) or transposed")
    check_rows(owner, x.shape[0])
    h, num_experts = x.shape[1], up.shape[0]
    check_num_groups("gate_up_proj", num_experts, "experts")
    p = up.shape[2] if transposed else up.shape[1]
    if gated and p % 2:
        raise ValueError(f"gate_up_proj: expected an even number of gate and up columns, got {tuple(up.shape)}")
    i = p // 2 if gated else p
    if h == 0 or i == 0:
        raise ValueError(f"gate_up_proj: expected H and I above 0, got {tuple(up.shape)}")
    p_legend = "2 I" if gated else "I"
    if transposed:
        check_shape("gate_up_proj", up, (num_experts, h, p), f"(E, H, {p_legend})")
        check_shape("down_proj", down, (num_experts, i, h), "(E, I, H)")
    else:
        check_shape("gate_up_proj", up, (num_experts, p, h), f"(E, {p_legend}, H)")
        check_shape("down_proj", down, (num_experts, h, i), "(E, H, I)")
    if up_bias is not None:
        check_shape("gate_up_proj_bias", up_bias, (num_experts, p), f"(E, {p_legend})")
    if down_bias is not None:
        check_shape("down_proj_bias", down_bias, (num_experts, h), "(E, H)")
    for name, tensor in named.items():
        check_device(name, tensor, x.device, owner)
        check_same_dtype(name, tensor, x.dtype, owner)


def is_right_block(x, top_k_index, top_k_weights, up, down, up_bias, down_bias, gated, transposed) -> bool:
    """Whether `check_block` would pass, for blocks without biases of plain tensors: in a fourth of its time."""
    if not (type(x) is type(top_k_index) is type(top_k_weights) is torch.Tensor and up_bias is None is down_bias):
        return False
    if not (isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor)):
        return False
    if not (x.dim() == 2 and top_k_index.dim() == 2 and up.dim() == 3):
        return False
    (num_tokens, h), (slots_of, top_k), (num_experts, *up_shape) = x.shape, top_k_index.shape, up.shape
    p = up_shape[1 if transposed else 0]
    i, odd = (p // 2, p % 2) if gated else (p, 0)  # torch.compile of PyTorch 2.11 knows no divmod of symbols
    device, dtype, dense = x.device, x.dtype, torch.strided
    return (
        dense is x.layout is up.layout is down.layout is top_k_index.layout is top_k_weights.layout
        and num_tokens == slots_of
        and top_k_weights.shape == top_k_index.shape
        and up_shape == ([h, p] if transposed else [p, h])
        and down.shape == ((num_experts, i, h) if transposed else (num_experts, h, i))
        and not odd
        and h > 0 < i
        and top_k > 0
        and 1 <= num_experts <= MAX_EXPERTS
        and num_tokens * top_k <= MAX_SLOTS
        and dtype is up.dtype is down.dtype
        and dtype in _ACCELERATOR_DTYPES
        and top_k_weights.dtype in _ACCELERATOR_DTYPES
        and top_k_index.dtype in _INDEX_DTYPES
        and device == up.device == down.device == top_k_index.device == top_k_weights.device
        and device.type in _DEVICE_TYPES
    )


def check_block(x, top_k_index, top_k_weights, up, down, up_bias, down_bias, gated, transposed) -> None:
    """Raises TypeError or ValueError that names the argument of `grouped_mm_experts` at fault."""
    if is_right_block(x, top_k_index, top_k_weights, up, down, up_bias, down_bias, gated, transposed):
        return
    if gated and (up_bias is None) != (down_bias is None):
        missing = "gate_up_proj_bias" if up_bias is None else "down_proj_bias"
        raise ValueError(f"{missing}: expected with the other bias; a gated block takes both biases or none")
    check_tensor("top_k_weights", top_k_weights)
    check_experts("hidden_states", x, up, down, up_bias, down_bias, gated, transposed)
    check_routing(top_k_index, up.shape[0], "gate_up_proj")
    check_compute_dtype("top_k_weights", top_k_weights)
    check_shape("top_k_index", top_k_index, (x.shape[0], None), "(T, top_k)")
    check_shape("top_k_weights", top_k_weights, tuple(top_k_index.shape), "(T, top_k)")
    check_device("top_k_index", top_k_index, x.device, "hidden_states")
    check_device("top_k_weights", top_k_weights, x.device, "hidden_states")


def check_capacity(name: str, capacity: object) -> None:
    """Raises TypeError or ValueError that names the argument unless it is None or an int above 0."""
    if capacity is None:
        return
    if not isinstance(capacity, (int, torch.SymInt)) or isinstance(capacity, bool):
        raise TypeError(f"{name}: expected an int or None, got {type(capacity).__name__}")
    if capacity < 1:
        raise ValueError(f"{name}: expected above 0, got {capacity}")


def check_scales(name: str, scales: torch.Tensor, x: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless scales has one factor per row of x, in a floating dtype."""
    check_tensor(name, scales)
    check_compute_dtype(name, scales)
    check_shape(name, scales, (x.shape[0],), "(rows,)")
    check_device(name, scales, x.device, "x")


def check_num_groups(name: str, groups: int, what: str = "groups") -> None:
    """Raises ValueError that names the argument unless there are 1 to MAX_EXPERTS groups."""
    if not 1 <= groups <= MAX_EXPERTS:
        raise ValueError(f"{name}: expected 1 to {MAX_EXPERTS} {what}, got {groups}")


def check_rows(name: str, rows: int) -> None:
    """Raises ValueError that names the argument unless row numbers fit in int32."""
    if rows >= 2**31:
        raise ValueError(f"{name}: expected fewer than 2^31 rows, got {rows}")


def is_right_linear(x, weight, bias, bias_scales, transposed) -> bool:
    """Whether `check_linear` would pass, for a layer without a bias: in a fourth of its time."""
    if not (bias is None is bias_scales and x.dim() == 2 and weight.dim() == 3):
        return False
    (rows, depth), (groups, n, k), dtype, device = x.shape, weight.shape, x.dtype, x.device
    if transposed:
        n, k = k, n
    return (
        depth == k > 0 < n
        and rows < 2**31
        and 1 <= groups <= MAX_EXPERTS
        and dtype is weight.dtype
        and dtype in _ACCELERATOR_DTYPES
        and device == weight.device
        and device.type in _DEVICE_TYPES
    )


def check_linear(x, weight, bias, bias_scales, transposed) -> None:
    """Raises TypeError or ValueError that names the argument of `grouped_linear` at fault."""
    if is_right_linear(x, weight, bias, bias_scales, transposed):
        return
    check_compute_dtype("x", x)
    check_shape("x", x, (None, None), "(rows, K)")
    check_rows("x", x.shape[0])
    k = x.shape[1]
    if transposed:
        check_shape("weight", weight, (None, k, None), "(G, K, N)")
    else:
        check_shape("weight", weight, (None, None, k), "(G, N, K)")
    groups, n = weight.shape[0], weight.shape[2 if transposed else 1]
    check_num_groups("weight", groups)
    if k == 0 or n == 0:
        raise ValueError(f"weight: expected N and K above 0, got {tuple(weight.shape)}")
    if bias is None and bias_scales is not None:
        raise ValueError("bias_scales: expected None without a bias, which they scale")
    if bias is not None:
        check_shape("bias", bias, (groups, n), "(G, N)")
    if bias_scales is not None:
        check_scales("bias_scales", bias_scales, x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_same_dtype(name, tensor, x.dtype, "x")
            check_device(name, tensor, x.device, "x")
