"""Plans: what a call launches and allocates, worked out once for each set of forms that it comes with."""

import math
from functools import lru_cache, partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from .launch import MAX_KEPT, Form, Launch, are_aligned

_PIECE = 512  # bytes, of which pieces of scratch memory are multiples


def unwritten(dtype: torch.dtype, *shape: int) -> Form:
    """The form of a contiguous tensor of new memory."""
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= max(1, extent)
    return Form(dtype, shape, tuple(reversed(strides)), True)


@lru_cache(maxsize=MAX_KEPT)
def like(form: Form) -> Form:
    """The form of `torch.empty_like` of such a tensor."""
    made = torch.empty_like(torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta"))
    return Form(form.dtype, form.shape, made.stride(), True)


class Within(NamedTuple):
    """What begins so many elements into a contiguous tensor that a plan makes."""

    number: int
    offset: int


class Plan:
    """Launches in a row over the tensors given to a call and those that it makes, numbered in this order.

    What PyTorch allocates is aligned to more than Triton and descriptors ask for; what is given is looked at.
    """

    def __init__(self, device: torch.device, num_given: int):
        self.device, self.num_given = device, num_given
        self.forms: Dict[int, Form] = {}  # of the tensors that are made
        self.pieces: Dict[int, int] = {}  # of those in scratch memory their places
        self.scratch_bytes = 0
        self.unused: List[int] = []
        self.steps: List[_Step] = []
        self.ready = False
        self.empty = partial(_empty_strided, device)
        self.fast_empty = _fast_allocator(device) or self.empty

    def make(self, form: Optional[Form], scratch: bool = False) -> int:
        """Numbers a tensor that comes, unwritten, with the first launch that refers to it; None: that is not made.

        scratch: it is contiguous, lives until the end and is not asked for: all such may be one piece of memory.
        """
        number = self.num_given + len(self.forms)
        # The fast allocator takes no torch.Size.
        self.forms[number] = form and form._replace(shape=tuple(form.shape), strides=tuple(form.strides))
        if form is not None:
            self.unused.append(number)
            if scratch:
                self.pieces[number] = self.scratch_bytes
                self.scratch_bytes += -(-math.prod(form.shape) * form.dtype.itemsize // _PIECE) * _PIECE
        return number

    @property
    def last(self) -> int:
        """The number of the last tensor."""
        return self.num_given + len(self.forms) - 1

    def add(self, launch: Launch, *numbers: Optional[int]) -> None:
        """Appends a launch over the tensors of these numbers."""
        makes = [number for number in self.unused if number in numbers]
        self.unused = [number for number in self.unused if number not in makes]
        self.steps.append(_Step(makes, launch.numbered(*numbers), (), ()))

    def drop(self, *numbers: int) -> None:
        """What was made is not needed after the last launch so far, and makes room for what comes next."""
        if self.steps:
            self.steps[-1] = self.steps[-1]._replace(drop=(*self.steps[-1].drop, *numbers))

    def give_back(self, number: int) -> None:
        """The same of what was given, by whoever still refers to it, for good: its storage becomes empty."""
        if self.steps:
            self.steps[-1] = self.steps[-1]._replace(give_back=(*self.steps[-1].give_back, number))

    def include(
        self, plan: "Plan", *given: Union[int, Within, None], keep: Sequence[int] = ()
    ) -> List[Optional[int]]:  # fmt: skip
        """Appends a plan that drops nothing, for the tensors of these numbers. Returns the numbers of all its tensors.

        keep: of what it makes the numbers, there, of what is asked for; the rest is scratch memory.
        """
        offsets = {place: within.offset for place, within in enumerate(given) if isinstance(within, Within)}
        numbers = [within.number if isinstance(within, Within) else within for within in given]
        numbers += [self.make(form, scratch=number not in keep) for number, form in plan.forms.items()]
        for _, launch, *_ in plan.steps:
            used = {numbers[ref.tensor] for ref in launch.refs()}
            makes = [number for number in self.unused if number in used]
            self.unused = [number for number in self.unused if number not in makes]
            for place, offset in offsets.items():
                launch = launch.shifted(place, offset)
            self.steps.append(_Step(makes, launch.numbered(*numbers), (), ()))
        return numbers

    def __call__(self, *given: Optional[Tensor]) -> List[Optional[Tensor]]:
        """All tensors, None for those that were dropped, not made or scratch. The device is the current one."""
        tensors = [*given, *(None,) * len(self.forms)]
        if not self.ready or self.steps[0].launch.kernel.is_watched():
            return self._by_kernels(tensors)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        if not are_aligned(addresses):
            return self._by_kernels(tensors)
        addresses += (0,) * len(self.forms)  # of scratch memory without elements it stays so
        # The fast one does not fill memory as `torch.utils.deterministic` asks.
        empty = self.empty if torch._C._get_deterministic_algorithms() else self.fast_empty
        if self.scratch_bytes:
            scratch = empty((self.scratch_bytes,), (1,), torch.uint8)
            start = scratch.data_ptr()
            for number, place in self.pieces.items():
                addresses[number] = start + place
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        for makes, launch, drop, give_back in self.steps:
            for number in makes:
                if number not in self.pieces:
                    dtype, shape, strides, _ = self.forms[number]
                    tensors[number] = made = empty(shape, strides, dtype)
                    addresses[number] = made.data_ptr()
            launch.direct(addresses, stream)
            for number in drop:
                tensors[number] = None
            for number in give_back:
                tensors[number].untyped_storage().resize_(0)
        for number in self.unused:
            tensors[number] = self._make(number)
        return tensors

    def _make(self, number: int) -> Tensor:
        dtype, shape, strides, _ = self.forms[number]
        return self.empty(shape, strides, dtype)

    def _by_kernels(self, tensors: List[Optional[Tensor]]) -> List[Optional[Tensor]]:
        """A tensor at a time, a launch at a time."""
        for makes, launch, drop, give_back in self.steps:
            for number in makes:
                tensors[number] = self._make(number)
            launch(tensors)
            for number in drop:
                tensors[number] = None
            for number in give_back:
                tensors[number].untyped_storage().resize_(0)
        for number in self.unused:
            tensors[number] = self._make(number)
        self.ready = bool(self.steps) and all(step.launch.function is not None for step in self.steps)
        return tensors


def _empty_strided(device: torch.device, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _fast_allocator(device: torch.device) -> Optional[Callable[..., Tensor]]:
    """The same on the current CUDA device, at less of the host's time: what Inductor's code calls, if it is there."""
    if device.type != "cuda":
        return None
    return getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


class Plans(dict):
    """The plans of an op, or what holds them, by `define.plan_key`."""

    def keep(self, key: tuple, plan: Any) -> Any:
        """Returns the plan."""
        if len(self) >= MAX_KEPT:
            self.clear()
        self[key] = plan
        return plan


class _Step(NamedTuple):
    """A launch of a plan: which tensors come with it, which go after it, and of which the memory does."""

    makes: Sequence[int]
    launch: Launch
    drop: Sequence[int]
    give_back: Sequence[int]
