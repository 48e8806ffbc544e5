"""Kernel launches at a fraction of the host time: what Triton works out per call is looked up, or done once.

`Kernel` binds a kernel's constants and finds its compiled variants. `Launch` binds all else but the addresses of the
tensors, `plan.Plan` several launches and the tensors they make, in the end as one function. Launchers and ops keep one
for each set of forms (`Form`) that they were called with, so that a call is: look it up, allocate, launch.
"""

import logging
import sys
from functools import lru_cache
from inspect import getclosurevars
from types import FunctionType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .tuning import triton_version

_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
ALIGNMENT = 16  # bytes: that of pointers which Triton's variants tell apart, and of what descriptors take

# How the launchers in C of Triton 3.5 and 3.6 parse what comes before a kernel's arguments: grid, stream, function,
# cooperative and dependent launch, two scratch buffers, metadata of the kernel and of the launch, two hooks.
_C_FORMAT = "iiiKKppOOOOOO"
# Later ones have the scratch buffers last, then annotations and signature, and take the arguments as one tuple. They
# are known by their version and by what their launchers in Python have, lest one of a fork is called with too little.
_TUPLE_VERSIONS = ((3, 7), (3, 8), (3, 9))
_BEFORE_TUPLE = 15
_TUPLE_FIELDS = frozenset(("arg_annotations", "kernel_signature"))
_KNOWN_FIELDS = _TUPLE_FIELDS | {
    "num_ctas", "launch", "global_scratch_size", "global_scratch_align", "profile_scratch_size",
    "profile_scratch_align", "launch_cooperative_grid", "launch_pdl", "gsan_enabled",
}  # fmt: skip
_STREAM = 3  # its place in all of them
_MAX_MAPS = 256  # of a descriptor, for as many addresses
MAX_KEPT = 1024  # launches of a launcher, since the number of rows may change with every call

_log = logging.getLogger("grouped_moe")
_new = tuple.__new__


class Form(NamedTuple):
    """Of a tensor what a launcher may decide by: all but the address, which is a multiple of 16 bytes or is not."""

    dtype: torch.dtype
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    aligned: bool


def form_of(tensor: Optional[Tensor]) -> Optional[Form]:
    """The form of a tensor, None of None."""
    if tensor is None:
        return None
    # A third of the time that Form(...) takes.
    return _new(Form, (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGNMENT == 0))


class Ref(NamedTuple):
    """An argument of a kernel: that tensor of a call, by pointer or, with a box, by descriptor (`descriptors.Box`).

    offset: elements of a contiguous tensor before what the kernel gets.
    """

    tensor: int
    box: Any = None
    offset: int = 0

    def of(self, tensors: Sequence[Optional[Tensor]]) -> Any:
        """What Triton takes."""
        tensor = tensors[self.tensor].view(-1)[self.offset :] if self.offset else tensors[self.tensor]
        return tensor if self.box is None else self.box.describe(tensor)


def ref(index: int, form: Optional[Form]) -> Optional[Ref]:
    """By pointer, or None for a tensor that is not there."""
    return None if form is None else Ref(index)


def bias_operand(index: int, bias: Optional[Form]) -> Tuple[Optional[Ref], int, int]:
    """A bias (E, N) and its strides as arguments of a kernel; zeros without one. index: of the bias in a call."""
    return (None, 0, 0) if bias is None else (Ref(index), *bias.strides)


class Kernel:
    """A kernel with its constants bound: called with a grid and the arguments before them.

    Triton specializes a variant on more than the constants: dtypes and 16-byte alignment of pointers, and whether an
    int is 1, a multiple of 16 or needs 64 bits. That is the key to its compiled variants here. Backends other than CUDA
    look at more: their launches go through Triton, as do each variant's first and those that a profiler's hook watches.
    """

    def __init__(self, kernel, choice: Optional[str] = None, **constants):
        """choice: path and config, to be logged by the first call.

        constants: in the order of the kernel's parameters, then Triton's options.
        """
        from triton import knobs

        names = [name for name in constants if name not in _OPTIONS]
        if kernel.arg_names[len(kernel.arg_names) - len(names) :] != names:
            raise TypeError(f"{kernel.__name__}: expected the constants {kernel.arg_names}, got {names}")
        self.kernel = kernel
        self.choice = choice
        self.constants = constants
        self.values = [constants[name] for name in names]
        self.variants: Dict[tuple, Any] = {}
        self.runtime = knobs.runtime

    def is_watched(self) -> bool:
        """Whether a profiler wants to see launches."""
        enter, leave = self.runtime.launch_enter_hook, self.runtime.launch_exit_hook
        return bool(enter and getattr(enter, "calls", True) or leave and getattr(leave, "calls", True))

    def __call__(self, grid: Tuple[int, int, int], *args) -> Any:
        """The first argument is a tensor or a descriptor. Returns the compiled variant, None other than on CUDA."""
        first = args[0] if isinstance(args[0], Tensor) else args[0].base
        device = first.get_device()
        key, operands = [device], []
        for arg in args:
            if type(arg) is int:
                key += (-1 if arg == 1 else arg % 16, arg >> 31)
            elif arg is None:
                key.append(None)
            elif isinstance(arg, Tensor):
                address = arg.data_ptr()
                key += (arg.dtype, address % ALIGNMENT)
                arg = address  # which Triton's launcher would ask for again
            else:
                key.append(arg.base.dtype)  # a descriptor's block is among the constants, or part of the choice
            operands.append(arg)
        key = tuple(key)
        variant = self.variants.get(key)
        if variant is not None and not self.is_watched():
            stream = torch._C._cuda_getCurrentRawStream(device)
            launch_arguments = (stream, variant.function, variant.packed_metadata, None, None, None)
            variant.run(*grid, *launch_arguments, *operands, *self.values)
            return variant
        if self.choice is not None and _log.isEnabledFor(logging.INFO):
            _log_once(f"{self.kernel.__name__} on {_name_of(first)}: {self.choice}")
            self.choice = None
        compiled = self.kernel[grid](*args, **{**_launch_options(device), **self.constants})
        if not _keeps_variants(first):
            return None
        self.variants[key] = compiled
        return compiled


class Launch:
    """A kernel with its grid and all its arguments but the addresses of tensors of given forms on a given device.

    Where Triton's launcher is as in versions 3.5 to 3.9, calls go to its function in C, which takes a list that is
    ready but for the stream, addresses and, encoded once per address, descriptors. Other launchers, pointers that are
    not aligned, hooks of profilers: by `Kernel`, as is the first call.
    """

    def __init__(self, device: torch.device, kernel: Kernel, grid: Tuple[int, int, int], *arguments):
        """arguments: before the constants: ints, None, or a `Ref` to a tensor of a call. Its dtype, too, is given."""
        self.device, self.kernel, self.grid, self.arguments = device, kernel, grid, arguments
        self.function: Optional[Callable] = None

    def numbered(self, *numbers: Optional[int]) -> "Launch":
        """The same for tensors that have these numbers in a longer sequence."""
        arguments = [a._replace(tensor=numbers[a.tensor]) if isinstance(a, Ref) else a for a in self.arguments]
        return Launch(self.device, self.kernel, self.grid, *arguments)

    def shifted(self, tensor: int, offset: int) -> "Launch":
        """The same for what begins so many elements into the contiguous tensor of that number."""
        arguments = [
            a._replace(offset=a.offset + offset) if isinstance(a, Ref) and a.tensor == tensor else a
            for a in self.arguments
        ]
        return Launch(self.device, self.kernel, self.grid, *arguments)

    def refs(self) -> List[Ref]:
        """Its arguments that are tensors."""
        return [arg for arg in self.arguments if isinstance(arg, Ref)]

    def __call__(self, tensors: Sequence[Optional[Tensor]]) -> None:
        """Tensors that no argument refers to may be None."""
        if self.function is not None and not self.kernel.is_watched():
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            if are_aligned(addresses):
                self.direct(addresses, torch._C._cuda_getCurrentRawStream(self.device.index))
                return
        self.by_kernel(tensors)

    def direct(self, addresses: Sequence[int], stream: int) -> None:
        """By the function in C, if there is one: with the addresses, all aligned, of the tensors."""
        values = self.values.copy()
        values[_STREAM] = stream
        for number, offset, place, maps in self.places:
            address = addresses[number] + offset
            values[place] = address if maps is None else maps[address]
        head = self.head
        self.function(*values) if head is None else self.function(*values[:head], tuple(values[head:]))

    def source(self, name: Callable[[Any], str], addresses: Dict[int, str], stream: str) -> str:
        """`direct` as an expression of what these are called; name: how a constant is."""
        values = [name(value) for value in self.values]
        values[_STREAM] = stream
        for number, offset, place, maps in self.places:
            address = f"{addresses[number]} + {offset}" if offset else addresses[number]
            values[place] = address if maps is None else f"{name(maps)}[{address}]"
        if self.head is not None:
            values[self.head :] = [f"({', '.join(values[self.head :])},)"]
        return f"{name(self.function)}({', '.join(values)})"

    def by_kernel(self, tensors: Sequence[Optional[Tensor]]) -> None:
        """By Triton; makes the direct way ready."""
        compiled = self.kernel(self.grid, *(arg.of(tensors) if isinstance(arg, Ref) else arg for arg in self.arguments))
        if compiled is not None and self.function is None:
            if are_aligned([tensors[ref.tensor].data_ptr() for ref in self.refs()]):
                self._prepare(compiled, tensors)

    def _prepare(self, compiled, tensors: Sequence[Optional[Tensor]]) -> None:
        """Makes the list for the function in C, if it is one that is known."""
        found = _c_launcher(compiled.run)
        boxes = [ref.box for ref in self.refs() if ref.box is not None]
        if found is None or len(found.maps) != len(boxes):
            return
        run, encoders = compiled.run, iter(found.maps)
        options = run.launch_cooperative_grid, run.launch_pdl
        values, places = [*self.grid, 0, compiled.function, *options, *found.describe(compiled.packed_metadata)], []
        for arg in self.arguments:
            if not isinstance(arg, Ref):
                values.append(arg)
                continue
            maps = None if arg.box is None else _Maps(arg.box, next(encoders))
            places.append((arg.tensor, arg.offset * tensors[arg.tensor].element_size(), len(values), maps))
            values.append(None)
            if arg.box is not None:
                values += (*arg.box.shape, *arg.box.strides)
        values += self.kernel.values
        self.values, self.places = values, places
        self.compiled = compiled  # what is collected unloads its function, from Triton 3.8 on
        self.function, self.head = found.function, found.head


def are_aligned(addresses: Sequence[int]) -> bool:
    """Whether all are those that Triton's variants for aligned pointers take."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGNMENT == 0


class _CLauncher(NamedTuple):
    """A variant's launcher in C, and for each of its descriptors the function that encodes it at an address.

    head: how many arguments come before those that it takes as one tuple, None if it takes none so. describe: the
    kernel's metadata -> what comes after grid, stream, function, cooperative and dependent launch and before the
    kernel's arguments: neither scratch buffers nor hooks.
    """

    function: Callable
    head: Optional[int]
    maps: Sequence[Callable]
    describe: Callable[[Any], tuple]


@lru_cache(maxsize=None)
def _c_launcher(run) -> Optional[_CLauncher]:
    """What is behind the launcher in Python of a compiled variant, None if it is not one of a known version."""
    module, version = sys.modules[type(run).__module__], triton_version()
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    launch, maps = run.launch, []
    if isinstance(launch, FunctionType):  # one that encodes descriptors, then calls the launcher
        inner = getclosurevars(launch).nonlocals
        metas, encode = inner.get("tensordesc_meta"), getattr(module, "make_tensordesc_arg", None)
        if "launcher" not in inner or not metas or None in metas or encode is None:
            return None
        launch, rest = inner["launcher"], (None,) if version >= (3, 8) else ()  # by which that takes more than it uses
        maps = [lambda descriptor, meta=meta: encode(descriptor, meta, *rest)[0] for meta in metas]
    if getattr(module, "_BASE_ARGS_FORMAT", None) == _C_FORMAT:
        return _CLauncher(launch, None, maps, lambda metadata: (None, None, metadata, None, None, None))
    if version not in _TUPLE_VERSIONS or not _TUPLE_FIELDS <= vars(run).keys() <= _KNOWN_FIELDS:
        return None
    kernel = run.arg_annotations, run.kernel_signature
    return _CLauncher(launch, _BEFORE_TUPLE, maps, lambda metadata: (metadata, *(None,) * 5, *kernel))


class _Maps(dict):
    """Address -> the box's tensor map there, as the hardware wants it: a value of nothing else.

    Layout in shared memory and type of the elements are the variant's.
    """

    def __init__(self, box, encode: Callable):
        super().__init__()
        self.box, self.encode = box, encode

    def __missing__(self, address: int):
        if len(self) >= _MAX_MAPS:
            self.clear()
        self[address] = made = self.encode(_Placed(self.box, address))
        return made


class _Placed:
    """A descriptor of what lies at an address, as Triton reads it."""

    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, box, address: int):
        self.shape, self.strides, self.address, self.base = box.shape, box.strides, address, self

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=None)
def _launch_options(device: int) -> Dict[str, bool]:
    """Triton's options for launches on a GPU of that index, -1 for what is none: dependent ones, where it has them.

    All kernels of the package wait as these ask for: `_triton.dependent`. That multiplications and additions are fused
    is said, as Triton 3.9 warns where it is left open, and 3.10 will not do it by itself. A kernel's own options win.
    """
    options = {"enable_fp_fusion": True}
    if device < 0 or not torch.cuda.is_available() or torch.version.hip is not None:
        return options
    return {**options, "launch_pdl": True} if torch.cuda.get_device_capability(device) >= (9, 0) else options


def _keeps_variants(tensor: Tensor) -> bool:
    """Whether Triton specializes kernels on its device by no more than `Kernel` does."""
    return tensor.is_cuda and torch.version.hip is None


@lru_cache(maxsize=None)
def _log_once(line: str) -> None:
    """Other shapes make the same choice, which is worth one line."""
    _log.info(line)


def _name_of(tensor: Tensor) -> str:
    """Of the device that holds it."""
    name_of = getattr(getattr(torch, tensor.device.type), "get_device_name", None)
    return name_of(tensor.device) if name_of else str(tensor.device)


@lru_cache(maxsize=None)
def _bound(kernel, choice: Optional[str], names: Tuple[str, ...], values: Tuple[Any, ...]) -> Kernel:
    return Kernel(kernel, choice, **dict(zip(names, values)))


def bind(kernel, choice: Optional[str] = None, **constants) -> Kernel:
    """The `Kernel` of these constants, one for all who ask."""
    return _bound(kernel, choice, tuple(constants), tuple(constants.values()))


def launch(kernel, grid: Tuple[int, ...], *args, **constants) -> None:
    """kernel[grid](*args, **constants), through a `Kernel` that is kept."""
    bind(kernel, **constants)((*grid, 1, 1)[:3], *args)
