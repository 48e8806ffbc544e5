"""Fresh memory full of NaN with guard bands around it: a kernel that leaves its bounds is caught."""

import torch
from torch.overrides import TorchFunctionMode

MARGIN = 517
ALLOCATIONS = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


def poison_value(dtype: torch.dtype):
    """NaN, or an index that leads far away."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max // 2


class GuardedAllocations(TorchFunctionMode):
    """What Python code allocates within it is poisoned, and so is the memory before and behind it.

    Leaving it fails if a guard band was written to. Launchers must be called directly: an op runs below this mode.
    """

    def __init__(self):
        super().__init__()
        self.bands = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return self._guarded(result) if function in ALLOCATIONS and result.numel() else result

    def _guarded(self, tensor):
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        value = poison_value(tensor.dtype)
        memory = torch.full((size + 2 * MARGIN,), value, dtype=tensor.dtype)
        self.bands += [memory[:MARGIN], memory[-MARGIN:]]
        return memory.as_strided(tensor.shape, tensor.stride(), MARGIN)

    def __exit__(self, *exception):
        result = super().__exit__(*exception)
        if exception[0] is None:
            assert self.bands, "nothing was allocated under guard"
            for band in self.bands:
                value = poison_value(band.dtype)
                untouched = band.isnan() if band.dtype.is_floating_point else band == value
                where = (~untouched).nonzero()[:4].tolist()
                assert not where, f"{band.dtype}: wrote out of bounds, {where} in the guard band"
        return result
