"""Plans: what a call launches and allocates, worked out once for each set of forms that it comes with."""

import contextlib
import math
from functools import lru_cache, partial
from typing import Any, Callable, Dict, Hashable, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch._C import _get_function_stack_at, _len_torch_dispatch_stack, _len_torch_function_stack
from torch.autograd import _profiler_enabled
from torch.compiler import is_compiling
from torch.utils._device import DeviceContext

from .launch import ALIGNMENT, MAX_KEPT, Form, Launch, are_aligned

_Direct = Callable[..., Optional[List[Optional[Tensor]]]]
_NOTHING = None, None
_PIECE = 512  # bytes, of which pieces of scratch memory are multiples


def has_function_mode() -> bool:
    """Whether a mode of functions is on, but for default devices: whatever the package makes has its device named."""
    count = _len_torch_function_stack()
    return count > 0 and any(type(_get_function_stack_at(number)) is not DeviceContext for number in range(count))


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
        self.direct: Optional[_Direct] = None  # there once all launches have a direct way
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
        if self.direct is not None and not self.steps[0].launch.kernel.is_watched():
            tensors = self.direct(*given)
            if tensors is not None:
                return tensors
        return self._by_kernels(given)

    def _make(self, number: int) -> Tensor:
        dtype, shape, strides, _ = self.forms[number]
        return self.empty(shape, strides, dtype)

    def _by_kernels(self, given: Sequence[Optional[Tensor]]) -> List[Optional[Tensor]]:
        """A tensor at a time, a launch at a time; makes the direct way ready."""
        tensors = [*given, *(None,) * len(self.forms)]
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
        if self.direct is None and self.steps and all(step.launch.function is not None for step in self.steps):
            self.direct = self._compiled([number for number, tensor in enumerate(given) if tensor is not None])
        return tensors

    def _compiled(self, given: Sequence[int]) -> _Direct:
        """`__call__` by direct launches: None, before all else, if a pointer is not aligned or the device not current.

        given: the numbers of what a call gives, the same in all.
        It is written out as Python's source, once: its loops, unpacking and lookups took the host a quarter of a call.
        """
        source = _Source({"raw_stream": torch._C._cuda_getCurrentRawStream, "slow": self.empty, "fast": self.fast_empty,
                          "must_fill": torch._C._get_deterministic_algorithms})  # fmt: skip
        add, live = source.lines.append, set(given)
        addresses = {number: f"a{number}" for number in given}
        for number, address in addresses.items():
            add(f"{address} = t{number}.data_ptr()")
        add(f"if ({' | '.join(addresses.values())}) % {ALIGNMENT}: return None")
        if self.device.type == "cuda":
            add(f"if {source.name(torch._C._cuda_getDevice)}() != {self.device.index}: return None")
        # The fast one does not fill memory as `torch.utils.deterministic` asks.
        add("empty = slow if must_fill() else fast")
        add(f"stream = raw_stream({self.device.index})")
        # Of scratch memory without elements the address is 0.
        addresses.update(dict.fromkeys(self.pieces, "0"))
        if self.scratch_bytes:
            add(f"scratch = empty(({self.scratch_bytes},), (1,), {source.name(torch.uint8)})")
            add("start = scratch.data_ptr()")
            addresses.update((number, f"start + {place}") for number, place in self.pieces.items())
        for makes, launch, drop, give_back in self.steps:
            for number in makes:
                if number not in self.pieces:
                    add(f"t{number} = {source.empty(self.forms[number])}")
                    add(f"a{number} = t{number}.data_ptr()")
                    addresses[number] = f"a{number}"
                    live.add(number)
            add(launch.source(source.name, addresses, "stream"))
            for number in drop:
                add(f"t{number} = None")
                live.discard(number)
            for number in give_back:
                add(f"t{number}.untyped_storage().resize_(0)")
        for number in self.unused:
            add(f"t{number} = {source.empty(self.forms[number])}")
            live.add(number)
        add(f"return [{', '.join(f't{number}' if number in live else 'None' for number in range(self.last + 1))}]")
        return source.function([f"t{number}" for number in range(self.num_given)])


class _Source:
    """Lines of a function in Python, and what their names stand for."""

    def __init__(self, names: Dict[str, Any]):
        self.names, self.lines = names, []

    def name(self, value: Any) -> str:
        """How a constant is called."""
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def empty(self, form: Form) -> str:
        """A tensor of new memory."""
        return f"empty({form.shape}, {form.strides}, {self.name(form.dtype)})"

    def function(self, parameters: Sequence[str]) -> Callable:
        """The function of these parameters."""
        exec("\n ".join([f"def direct({', '.join(parameters)}):", *self.lines]), self.names)
        return self.names["direct"]


def _empty_strided(device: torch.device, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _fast_allocator(device: torch.device) -> Optional[Callable[..., Tensor]]:
    """The same on the current CUDA device, at less of the host's time: what Inductor's code calls, if it is there."""
    if device.type != "cuda":
        return None
    return _dynamo_guards("_empty_strided_cuda")


def _dynamo_guards(name: str) -> Any:
    """What PyTorch's compiler calls by that name, None if it is not there."""
    return getattr(getattr(torch._C._dynamo, "guards", None), name, None)


class Plans(dict):
    """The plans of an op, or what holds them, by `define.plan_key`; of calls that repeat without one."""

    def __init__(self):
        super().__init__()
        self.repeated: Dict[Hashable, Tuple[Any, Plan]] = {}

    def keep(self, key: tuple, plan: Any) -> Any:
        """Returns the plan."""
        if len(self) >= MAX_KEPT:
            self.clear()
        self[key] = plan
        return plan

    def note(self, options: Hashable, named: Tensor, tensors: Sequence[Tensor], plan: Plan) -> None:
        """For `again`: a call's tensors, which with the options are all that it depends on, and its key's plan.

        named: one of them that such calls have in common, as a layer's weight.
        """
        name, guards = (id(named), options), _dynamo_guards("TensorGuards")
        if len(self.repeated) >= MAX_KEPT:
            self.repeated.clear()
        if self.repeated.get(name, _NOTHING)[1] is not plan:  # it may not repeat
            self.repeated[name] = None, plan
        # The precision of fp32 can be set at any time. Aligned tensors are those that the direct way takes.
        elif guards and plan.direct and tensors[0].dtype is not torch.float32:
            if are_aligned(map(Tensor.data_ptr, tensors)):
                sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
                with contextlib.suppress(TypeError):  # another version's may take something else
                    guard = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
                    self.repeated[name] = guard, plan

    def again(
        self, options: Hashable, named: Tensor, tensors: Sequence[Tensor], given: Sequence[Optional[Tensor]]
    ) -> Optional[List[Optional[Tensor]]]:
        """What the plan makes, directly, of what it is given; None if the tensors are not like those last noted.

        The guard is Dynamo's: type, dtype, device, sizes, strides, requires_grad and dispatch keys, the thread's among
        them, hence also tracing, functorch's transforms and autocast, in a tenth of the time that a key takes. It lets
        PyTorch's own modes of dispatch pass.
        """
        if is_compiling() or _len_torch_dispatch_stack():
            return None
        guard, plan = self.repeated.get((id(named), options), _NOTHING)
        if guard is None or not guard.check(*tensors) or has_function_mode() or _profiler_enabled():
            return None
        return None if plan.steps[0].launch.kernel.is_watched() else plan.direct(*given)


class _Step(NamedTuple):
    """A launch of a plan: which tensors come with it, which go after it, and of which the memory does."""

    makes: Sequence[int]
    launch: Launch
    drop: Sequence[int]
    give_back: Sequence[int]
