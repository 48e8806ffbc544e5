"""Kernels that `warm_up` has compiled together: by other threads, once all are known."""

import importlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial, partialmethod

import pytest
import torch
from calls import KINDS

pytest_plugins = ["driver_stub"]
pytestmark = pytest.mark.slow


def test_kernels_compile_together(grouped_moe, compiling_stub, monkeypatch):
    """By the executor, none before all are known; launches run nothing, nor do those of kernels that are compiled."""
    threads, futures = ThreadPoolExecutor(2), []
    submit, source, parsed = threads.submit, importlib.import_module("triton.compiler").ASTSource, []
    threads.submit = lambda *args: futures.append(submit(*args)) or futures[-1]
    make_ir = source.make_ir
    monkeypatch.setattr(source, "make_ir", lambda *args: parsed.append(args[0]) or make_ir(*args))
    KINDS["linear-64-nk-bias"](grouped_moe)
    count = len(compiling_stub.variants)
    del compiling_stub.launches[:], parsed[:]

    def run():
        for kind in ("linear-64-nk-bias", "linear-2048-kn-plain", "linear-2048-kn-plain"):
            KINDS[kind](grouped_moe)
        time.sleep(0.5)
        assert not parsed

    with threads:
        compiling_stub.module("backends.triton.launch").compile_together(threads, run)
    assert futures and not any(future.exception() for future in futures)
    assert not compiling_stub.launches
    compiled = len(compiling_stub.variants)
    KINDS["linear-2048-kn-plain"](grouped_moe)
    assert compiling_stub.launches and len(compiling_stub.variants) == compiled > count


def test_what_fails_to_be_parsed_is_tried_again(grouped_moe, compiling_stub, monkeypatch):
    """As it may while another thread parses. Triton 3.8 would raise the error at each launch from then on."""
    source, failed = importlib.import_module("triton.compiler").ASTSource, []
    make_ir = source.make_ir

    def fail_once(self, *args):
        if self.fn not in failed:
            failed.append(self.fn)
            raise SystemError("AST constructor recursion depth mismatch")
        return make_ir(self, *args)

    monkeypatch.setattr(source, "make_ir", fail_once)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    with ThreadPoolExecutor(1) as threads:
        run = partial(KINDS["linear-64-nk-bias"], grouped_moe)
        compiling_stub.module("backends.triton.launch").compile_together(threads, run)
    compiled = len(compiling_stub.variants)
    KINDS["linear-64-nk-bias"](grouped_moe)
    assert failed and len(compiling_stub.variants) == compiled


def test_what_others_launch_runs_while_kernels_compile_together(compiling_stub):
    """As the activation of a user's layer may: its launch waits for a variant, which must not wait for the launch."""
    x, slots, out = torch.ones(4, 64), torch.arange(8, dtype=torch.int32), torch.empty(8, 64)
    sort = compiling_stub.module("backends.triton.permute")._kernel("sort_rows", 64, 2, 64)
    done, threads = threading.Event(), ThreadPoolExecutor(1)

    def launch():
        run = partial(sort.compile_and_launch, (4, 1, 1), x, (x, x.stride(0), slots, out))
        compiling_stub.module("backends.triton.launch").compile_together(threads, run)
        done.set()

    threading.Thread(target=launch, daemon=True).start()
    assert done.wait(120) and len(compiling_stub.launches) == 1


def test_an_interrupt_ends_warm_up(grouped_moe, compiling_stub, monkeypatch):
    """Without compiling the rest. Later launches, and another `warm_up`, compile what they need."""

    def interrupt(*_):
        raise KeyboardInterrupt

    layer = grouped_moe.GroupedLinear(4, 256, 512, dtype=torch.bfloat16)
    monkeypatch.setattr(compiling_stub.module("warm_up"), "_needs_kernels", lambda tensor: True)
    with monkeypatch.context() as during:
        during.setattr(ThreadPoolExecutor, "__init__", partialmethod(ThreadPoolExecutor.__init__, 1))
        during.setattr(importlib.import_module("triton.runtime._async_compile"), "as_completed", interrupt)
        source, parsed = importlib.import_module("triton.compiler").ASTSource, []
        make_ir = source.make_ir
        during.setattr(source, "make_ir", lambda *args: parsed.append(args[0]) or make_ir(*args))
        during.setenv("TRITON_ALWAYS_COMPILE", "1")
        with pytest.raises(KeyboardInterrupt):
            grouped_moe.warm_up(layer, (1, 64), progress=False)
    assert len(parsed) < 3 < len(compiling_stub.variants)
    KINDS["linear-64-nk-bias"](grouped_moe)
    assert compiling_stub.launches and grouped_moe.warm_up(layer, (1, 64), progress=False) > 0
