"""What must not be read is made NaN: fresh memory, rows, weights and the memory around a tensor."""

import contextlib
import gc
import warnings
from typing import Callable, Dict, Iterator, Optional

import torch
from torch import Tensor


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within it every torch.empty, also of the package, is NaN (or the largest integer)."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The mode warns of operations that it would otherwise refuse.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            assert bool(torch.empty(3).isnan().all()), "this torch does not fill fresh memory"
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def is_sentinel(top_k_index: Tensor, num_experts: int) -> Tensor:
    """(T, top_k) bool."""
    return (top_k_index < 0) | (top_k_index >= num_experts)


def poison_sentinels(inputs, num_experts: int, value: float = float("nan")):
    """A copy of `cases.Inputs` with `value` in everything that the contract says is never read.

    That is: routing weights of sentinels; hidden rows and output cotangents of tokens with nothing but sentinels;
    weights and biases of experts without rows.
    """
    sentinel = is_sentinel(inputs.top_k_index, num_experts)
    local = inputs.top_k_index[~sentinel].long()
    idle = torch.ones(num_experts, dtype=torch.bool, device=local.device)
    idle[local] = False
    unrouted = sentinel.all(1)
    masks = {"hidden_states": unrouted, "dout": unrouted, "top_k_weights": sentinel}
    for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        masks[name] = idle
    changed = {}
    for name, mask in masks.items():
        tensor = getattr(inputs, name)
        changed[name] = tensor if tensor is None else tensor.detach().clone()
        if tensor is not None:
            changed[name][mask] = value
    return inputs._replace(**changed)


def fill_of(tensor: Tensor) -> float:
    """What stands where nothing must be read: NaN or, among ids, a local expert's."""
    return float("nan") if tensor.is_floating_point() else 0


def guarded(tensor: Tensor, value: Optional[float] = None, margin: int = 1031) -> Tensor:
    """A copy of tensor (contiguous) in the middle of memory full of `value`, else `fill_of` it, at an odd offset."""
    storage = tensor.new_full((tensor.numel() + 2 * margin,), fill_of(tensor) if value is None else value)
    view = storage[margin : margin + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    return view


def apart(tensor: Tensor, rows: int = 1, columns: int = 1, margin: int = 0) -> Tensor:
    """A copy of tensor in every so many rows and columns of memory full of NaN, but for margins on both sides.

    A vector is a column.
    """
    if tensor.dim() == 1:
        return apart(tensor[:, None], rows, columns, margin)[:, 0]
    first, *middle, last = tensor.shape
    memory = tensor.new_full((rows * first, *middle, columns * last + 2 * margin), fill_of(tensor))
    return memory[::rows, ..., margin : margin + columns * last : columns].copy_(tensor)


def turned(tensor: Tensor, columns: int = 1, outer: bool = False) -> Tensor:
    """A copy of tensor whose next to last dimension, or its outermost one, lies innermost, with gaps if columns > 1."""
    dim = 0 if outer else max(-2, -tensor.dim())
    return apart(tensor.transpose(dim, -1), columns=columns).transpose(dim, -1)


# Views of other strides or alignment.
LAYOUTS: Dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": turned,
    "transposed-apart": lambda tensor: turned(tensor, columns=2),
    "outermost-innermost": lambda tensor: turned(tensor, columns=2, outer=True),
    "columns-apart": lambda tensor: apart(tensor, columns=2),
    "rows-apart": lambda tensor: apart(tensor, rows=2),
    "padded": lambda tensor: apart(tensor, margin=1),
    "guarded": guarded,
}


def dirty_allocator(device: str, floats: int = 1 << 20) -> None:
    """Fills and frees memory of many sizes, so that the next torch.empty finds NaN in it."""
    blocks = [torch.full((floats >> shift,), float("nan"), device=device) for shift in range(0, 20)]
    del blocks


@contextlib.contextmanager
def no_memory(device):
    """Neither of the GPU nor in PyTorch's cache."""
    taken = []
    gc.collect()  # now, not within
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)
    try:
        for size in (1 << 21, 1 << 9):  # large blocks and small ones have caches of their own
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(size, dtype=torch.uint8, device=device))
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
