"""Launches of Triton's kernels: which compiled variant a call needs is looked up, not worked out anew.

`kernel[grid](...)` takes the host 18 to 29 us, most of them to bind arguments and to find the variant.
`compiled[grid](...)`, as Triton's tutorial on fused softmax launches what it has compiled, takes 8 to 11.
"""

import contextvars
import inspect
import logging
import threading
from concurrent.futures import CancelledError, Executor, Future
from functools import lru_cache
from operator import itemgetter
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import triton
from torch import Tensor

from ...common import _compat
from ...common.device import spec_of
from ...rows import max_tiles
from ...tuning.heuristic import GemmConfig, fitted_to_ranks
from ..kernels.tiles import Tiling

ALIGNMENT = 16  # bytes: the alignment of pointers that Triton compiles variants for
# Parameters that change with the number of rows, which fits 32 bits, and the scaling of low-rank pairs: every kernel
# marks those it has `do_not_specialize`.
VARYING = frozenset(
    ("total_rows", "num_slots", "num_rows", "num_chunks", "num_tokens", "capacity", "stride_pn", "scaling")
)
COMPILED = set()  # the variants that were ever launched, which `warm_up` counts

_log = logging.getLogger("grouped_moe")
_compiles_only: contextvars.ContextVar[bool] = contextvars.ContextVar("grouped_moe_compiles_only", default=False)


class _Held(Executor):
    """Hands on to an executor what runs once `started` is set or a result is asked for."""

    def __init__(self, executor: Executor):
        self.executor, self.started = executor, threading.Event()

    def submit(self, function: Any, *args: Any, **kwargs: Any) -> Future:
        def run() -> Any:
            self.started.wait()
            return call()

        def call() -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:  # of CPython's parser, see below; Triton 3.8 would raise it at each launch from then on
                return function(*args, **kwargs)

        def result(timeout: Optional[float] = None) -> Any:
            self.started.set()
            try:
                return wait(timeout)
            except CancelledError:  # by whoever shut the executor down; a launch needs the variant nevertheless
                return call()

        future = self.executor.submit(run)
        wait, future.result = future.result, result
        return future


def compile_together(executor: Executor, run: Callable[[], None]) -> None:
    """Calls `run`, in which launches run nothing; the executor compiles the variants that they lack, before this ends.

    It holds for this thread alone, so backwards have to run in it (`torch.autograd.set_multithreading_enabled`). What
    kernels would have written stays unwritten. A variant that fails to compile does so again when it is launched. After
    an error or an interrupt nothing is waited for.
    """

    def in_context() -> None:
        _compiles_only.set(True)
        held = _Held(executor)
        mode = triton.AsyncCompileMode(held, ignore_errors=True)
        mode.__enter__()  # not by `with`, whose end would wait for all kernels after an error, too
        try:
            run()
        finally:
            # Not earlier: CPython before 3.11.8 and 3.12.2 may fail to parse a kernel while another thread parses
            # (python/cpython#106905). Others' launches in this context, as of a layer's own activation, do not wait
            # for its end.
            held.started.set()
        mode.__exit__(None, None, None)

    # The modes are variables of the context, and go with it: Triton 3.6 does not leave its own at an interrupt.
    contextvars.copy_context().run(in_context)


def runs_nothing() -> bool:
    """Whether launches only compile."""
    return _compiles_only.get()


class Kernel:
    """A kernel with its constexprs and options bound: called with a grid and the arguments before the constexprs.

    At least two of the arguments are pointers.

    variants: the compiled kernels, by what Triton specializes on besides constexprs: the device, the dtype and
    alignment of each pointer (called *_ptr or *_desc), and the value of each int that is not in VARYING.
    """

    def __init__(
        self, function: Any, constants: Dict[str, Any], options: Optional[Dict[str, Any]] = None, tile: Any = None
    ):
        """tile: how the log describes the choice."""
        self.function, self.tile = function, tile
        self.constants, self.options = constants, options or {}
        parameters = inspect.signature(function.fn).parameters
        self.values = tuple(constants[name] for name in parameters if name in constants)
        arguments = [name for name in parameters if name not in constants]
        pointers = [place for place, name in enumerate(arguments) if name.endswith(("_ptr", "_desc"))]
        sizes = [place for place, name in enumerate(arguments) if place not in pointers and name not in VARYING]
        self.pointers_of = itemgetter(*pointers)
        self.sizes_of = itemgetter(*sizes, slice(0))  # the slice is for kernels without sizes
        self.variants: Dict[tuple, Any] = {}

    def __call__(self, grid: Tuple[int, ...], *args: Any) -> None:
        """The first argument is a tensor or a descriptor. Descriptors have the same dtypes and blocks in all calls."""
        first = args[0] if isinstance(args[0], Tensor) else args[0].base
        if _compiles_only.get():
            self.function.warmup(*args, grid=grid, **self._named(first))
            return
        if not self.variants and not _compat.keeps_variants(first.is_cuda):  # where there are some, they are kept
            self.compile_and_launch(grid, first, args)
            return
        key, addresses = [first.get_device(), self.sizes_of(args)], 0
        for pointer in self.pointers_of(args):
            if pointer is None:
                key.append(None)
            elif isinstance(pointer, Tensor):
                addresses |= pointer.data_ptr()
                key.append(pointer.dtype)
            else:
                key.append("descriptor")
        if addresses % ALIGNMENT:
            key += (arg.data_ptr() % ALIGNMENT == 0 for arg in args if isinstance(arg, Tensor))
        key = tuple(key)
        compiled = self.variants.get(key)
        if compiled is None:
            self.variants[key] = self.compile_and_launch(grid, first, args)
        else:
            compiled[grid](*args, *self.values)

    def compile_and_launch(self, grid: Tuple[int, ...], first: Tensor, args: Tuple[Any, ...]) -> Any:
        """By Triton's own way, which compiles a variant that is not there. Returns the variant."""
        if self.tile is not None and _log.isEnabledFor(logging.INFO):
            _log_once(f"{self.function.__name__} on {first.device}: {self.tile}")
        compiled = self.function[grid](*args, **self._named(first))
        if isinstance(compiled, triton.FutureKernel):  # which `compile_together` may leave, done, in Triton's cache
            compiled = compiled.result()
        COMPILED.add(compiled)
        return compiled

    def _named(self, first: Tensor) -> Dict[str, Any]:
        """The constexprs, and the options for the device of a tensor."""
        return {**self.constants, **_compat.launch_options(spec_of(first).capability), **self.options}


@lru_cache(maxsize=None)
def _log_once(line: str) -> None:
    """Other shapes make the same choice, which is worth one line."""
    _log.info(line)


class Launcher:
    """The persistent kernel for a problem of a product: made once, then called with tensors, some of which it writes.

    What a call takes, whatever the backend (the modules of `backends.triton` say what it means):
        gemm        x, weight, bias, scales, low_rank, y, rows
        up_proj     x, weight, bias, scales, low_rank, preact, act, rows
        down_dgrad  dout, weight, scales, low_rank, preact, dpreact, act, dots, rows
        wgrad       lhs, rhs, out, rows
    constants: the constexprs besides TILING, and STAGES in Gluon, else BLOCK_N. columns: of the result. path: how the
    log calls the kernel.
    """

    gluon = False  # whether the kernel is in Gluon
    reads_sorted_rows = False  # whether routed rows of dout have to be in place

    def __init__(
        self, problem: NamedTuple, config: GemmConfig, function: Any, constants: Dict[str, Any], columns: int, path: str
    ):
        factor = getattr(problem, "low_rank", None)  # a weight gradient has none
        if factor is not None and not self.gluon:
            parts = 1 if problem.scales is None else problem.scales.K_PARTS
            config = fitted_to_ranks(config, problem.k, parts, factor.R, problem.spec)
        self.problem, self.config = problem, config
        self.n_tiles = -(-columns // config.block_n)
        tiling = Tiling(problem.num_groups, self.n_tiles, config.block_m, config.group_m)
        tile = {"STAGES": config.num_stages} if self.gluon else {"BLOCK_N": config.block_n}
        constants = {**constants, "TILING": tiling, **tile}
        self.kernel = Kernel(function, constants, config.options(self.gluon), config.describe(path))

    @staticmethod
    def supports(problem: NamedTuple) -> bool:
        """Whether there is a kernel for the problem."""
        return True

    def grid(self, num_rows: int) -> Tuple[int, int, int]:
        """One program per tile of a result of so many rows, not empty, up to what the device holds at once."""
        p = self.problem
        tiles = max_tiles(num_rows, p.num_groups, p.block_m) * self.n_tiles
        return min(tiles, p.spec.num_sms * self.config.programs_per_sm), 1, 1
