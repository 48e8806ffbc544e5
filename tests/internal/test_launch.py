"""Kept variants: their launches hand over what Triton's own do, and which one a call takes is Triton's choice."""

import dataclasses
import importlib
import pkgutil
import random
import re
import sys
from collections import Counter

import pytest
import torch
from calls import BF16, KINDS, SMALL, layer_of, scaled
from compile_check import TARGETS, Package
from driver_stub import _forget
from workload import QWEN3_30B, Layer

pytest_plugins = ["driver_stub"]

VARIANTS = 38  # of QWEN3_30B's kernels, for all numbers of tokens, without gradients and in training


def launch_both(stub, compared):
    """A `Kernel.__call__` that launches what a kept variant has launched by Triton's own path, too, and compares."""
    call = stub.module("backends.triton.launch").Kernel.__call__

    def both(self, grid, *args):
        count = len(self.variants)
        del stub.launches[:]
        call(self, grid, *args)
        if len(self.variants) > count:
            return
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0].base
        variant = self.compile_and_launch(grid, first, args)
        kept, by_triton = stub.launches
        assert kept == by_triton
        assert any(variant is known for known in self.variants.values()), "Triton has another variant for the arguments"
        compared.append(self.function.__name__)

    return both


@pytest.fixture
def compared(stub, monkeypatch):
    """The names of kernels whose launches were compared, one for each launch."""
    names = []
    monkeypatch.setattr(stub.module("backends.triton.launch").Kernel, "__call__", launch_both(stub, names))
    return names


@pytest.mark.parametrize("name", ["sm90", "sm100"])
@pytest.mark.parametrize("kind", KINDS)
def test_later_launches_are_tritons_own(grouped_moe, stub, compared, monkeypatch, kind, name):
    """On a Hopper, and where Triton's kernels read by descriptor."""
    if name in OTHERS:
        become(stub, monkeypatch, name)
    KINDS[kind](grouped_moe)
    compiled = stub.names()
    KINDS[kind](grouped_moe)
    assert stub.names() == compiled
    assert {*compiled} == {*compared}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL)
def test_compiled_kernels_get_what_triton_hands_them(grouped_moe, compiling_stub, monkeypatch, kind):
    """What comes to the launcher in C: also the maps of descriptors, and that launches are dependent ones."""
    compared, Kernel = [], compiling_stub.module("backends.triton.launch").Kernel
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "__call__", launch_both(compiling_stub, compared))
        for _ in range(2):
            KINDS[kind](grouped_moe)
    assert {*compared} == {*compiling_stub.names()}
    del compiling_stub.launches[:]
    KINDS[kind](grouped_moe)
    assert compiling_stub.launches and all(args[6] is True for args in compiling_stub.launches), (
        "not a dependent launch"
    )


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])  # a table of tuned tiles may say any
def test_shared_tiles_release_a_slot_once(compiling_stub, monkeypatch, stages):
    """Also where ranks, fewer than a step, are all that the second warp group multiplies after it has waited."""
    load = compiling_stub.module
    if not load("common._compat").has_gluon():
        pytest.skip("needs Gluon")
    config = load("tuning.heuristic").GemmConfig(128, 256, 64, 4, stages)
    monkeypatch.setattr(load("backends.hopper.launchers"), "hopper_gemm_config", lambda *_: config)
    experts, n, k, num_rows, kernels = 4, 512, 4096, 2048, load("backends.triton")
    rows = kernels.split_rows(torch.zeros(experts, dtype=torch.int64), experts, num_rows, BF16)
    x, weight = torch.empty(num_rows, k, dtype=BF16), torch.empty(experts, n, k, dtype=BF16)
    ranks = torch.empty(num_rows, 16, dtype=BF16), torch.empty(1, experts, n, 16, dtype=BF16)
    kernels.gemm(x, weight, rows, low_rank=load("operands").LowRank(*ranks))
    (variant,) = (each for each in compiling_stub.variants if each.name == "hopper_gemm_kernel")
    for partition in variant.asm["ttgir"].partition("ttg.warp_specialize(")[2].split(" num_warps("):
        released = re.findall(r"arrive_barrier (%\S+), 1, %true", partition)
        assert len(released) == len(set(released))


def kernels_of(stub):
    """All kernels of the package by name. Functions that kernels call have other names."""
    from triton.runtime.jit import JITFunction

    found, package = {}, sys.modules[stub.package]
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                found[name] = value
    return found


OTHERS = ("sm89", "sm100", "sm120")  # GPUs with e4m3 that are no Hopper


def become(stub, monkeypatch, name, **changes):
    """Makes the stub's GPU another one."""
    spec = dataclasses.replace(Package(sys.modules[stub.package]).spec(name, TARGETS[name]), **changes)
    monkeypatch.setattr(stub.module("common.device"), "device_spec", lambda device: spec)


def test_the_kinds_launch_all_kernels(grouped_moe, stub, monkeypatch):
    for kind in KINDS:
        KINDS[kind](grouped_moe)
    become(stub, monkeypatch, "sm89")
    KINDS["small-2048-experts-plain"](grouped_moe)
    assert {*stub.names()} == {*kernels_of(stub)}


def rounds_rows(stub):
    """Whether all products of the latest calls are of rows of 8-bit floats; else none of them may be."""
    names = {*stub.names()}
    rounded = {name for name in names if name.startswith(("quantize", "hopper_quantized"))}
    others = {name for name in names if name.endswith(("gemm_kernel", "up_proj_kernel", "dgrad_kernel"))} - rounded
    assert names and not (rounded and others - {"scaled_gemm_kernel"}), names  # which takes rows of either kind
    return bool(rounded)


@pytest.mark.parametrize("kind", ["", "loras"])
@pytest.mark.parametrize("name", OTHERS)
def test_rows_become_codes_elsewhere(grouped_moe, stub, compared, monkeypatch, name, kind):
    """By Triton's kernels, forward and backward, where tiles are tall anyway; nowhere without e4m3."""
    become(stub, monkeypatch, name)
    for _ in range(2):
        scaled(grouped_moe, 2048, kind, extent=256)
    names = {*stub.names()}
    assert rounds_rows(stub) and {"scaled_gemm_kernel", "quantized_up_proj_kernel"} <= names & {*compared}
    assert not any(each.startswith("hopper") for each in names)
    for tokens, changes in ((256, {}), (2048, {"float8": False})):  # 32 slots of an expert
        del stub.variants[:]
        become(stub, monkeypatch, name, **changes)
        scaled(grouped_moe, tokens, kind, extent=256)
        assert not rounds_rows(stub)


def test_few_rows_become_codes_on_hopper(grouped_moe, stub):
    """Without gradients, by tall tiles."""
    scaled(grouped_moe, 256)
    assert "hopper_quantized_up_proj_kernel" in stub.names()


@pytest.mark.parametrize("kind", ["gate_up_lora", "down_lora", "loras"])
def test_rows_become_codes_beside_pairs(grouped_moe, stub, monkeypatch, kind):
    """Forward and backward; not where Gluon cannot see shared memory as another dtype, nor for a single step of K."""
    scaled(grouped_moe, 2048, kind, extent=256)
    assert rounds_rows(stub)
    for extent in (128, 256):
        _forget(grouped_moe.__name__)
        del stub.variants[:]
        if extent == 256:
            monkeypatch.setattr(stub.module("backends.triton.codes"), "reinterpret_method", lambda: None)
        scaled(grouped_moe, 2048, kind, extent=extent)
        assert not rounds_rows(stub)


def test_codes_are_copied_where_no_kernel_transposes_them(grouped_moe, stub, monkeypatch):
    """In a backward on Hopper, where Gluon cannot see shared memory as another dtype."""
    for copied in (False, True):
        scaled(grouped_moe, 2048)
        assert rounds_rows(stub) and ("transpose_kernel" in stub.names()) == copied
        _forget(grouped_moe.__name__)
        monkeypatch.setattr(stub.module("backends.triton.codes"), "reinterpret_method", lambda: None)


def test_varying_parameters_are_those_not_specialized(stub):
    varying, found = stub.module("backends.triton.launch").VARYING, set()
    for name, kernel in kernels_of(stub).items():
        marked = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        assert marked == varying & {*kernel.arg_names}, name
        found |= marked
    assert found == varying


# Of those that vary, the ones that fit 32 bits.
SIZES = (0, 1, 2, 15, 16, 17, 48, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1, 2**40, 2**62, -1, -16, -(2**40))
DTYPES = (BF16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
TRIED = ("schedule_kernel", "sum_partials_kernel", "bias_grads_kernel", "grouped_gemm_kernel", "combine_grad_kernel")


def random_arguments(draw, memory, like, varies):
    """Tensors of any dtype and alignment, or None; any size in place of another. varies: of each, whether it varies."""
    arguments = []
    for number, (arg, is_varying) in enumerate(zip(like, varies)):
        if isinstance(arg, int):
            arguments.append(draw.choice([size for size in SIZES if not is_varying or abs(size) < 2**31]))
        elif number and draw.random() < 0.2:
            arguments.append(None)
        else:
            dtype = draw.choice(DTYPES)
            start = draw.choice((0, 0, 1, 2, 3, 4, 8)) * dtype.itemsize
            arguments.append(memory[start : start + 64].view(dtype))
    return arguments


@pytest.mark.parametrize("name", TRIED)
def test_each_call_takes_the_variant_that_triton_would(grouped_moe, stub, monkeypatch, name):
    """Of random arguments, most of which differ in one place from earlier ones."""
    Kernel, seen, compared = stub.module("backends.triton.launch").Kernel, [], []
    call = Kernel.__call__
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "__call__", lambda self, *args: (seen.append((self, args)), call(self, *args)))
        for kind in ("fp32", "linear-64-nk-bias", "small-40-experts-bias"):
            KINDS[kind](grouped_moe)
    old, (grid, *like) = next((kernel, args) for kernel, args in seen if kernel.function.__name__ == name)
    kernel, draw, memory = Kernel(old.function, old.constants, old.options), random.Random(name), torch.zeros(512)
    monkeypatch.setattr(Kernel, "__call__", launch_both(stub, compared))
    memory, arguments = memory.view(torch.uint8), like
    varies = [argument in stub.module("backends.triton.launch").VARYING for argument in old.function.arg_names]
    for _ in range(600):
        fresh = random_arguments(draw, memory, like, varies)
        place = draw.randrange(len(like))
        arguments = fresh if draw.random() < 0.1 else [*arguments[:place], fresh[place], *arguments[place + 1 :]]
        for _ in range(2):
            kernel(grid, *arguments)
    assert len(compared) >= 600 and len({*map(id, kernel.variants.values())}) > 20


@pytest.mark.parametrize("when", ["enter", "exit"])
def test_hooks_see_all_launches(grouped_moe, stub, when):
    from triton import knobs

    seen, hooks = [], getattr(knobs.runtime, f"launch_{when}_hook")

    def hook(metadata):
        seen.append(metadata.get()["name"])

    KINDS["experts-2048"](grouped_moe)
    hooks.add(hook)
    try:
        counts = []
        for _ in range(2):
            del seen[:], stub.launches[:]
            KINDS["experts-2048"](grouped_moe)
            counts.append((len(seen), len(stub.launches)))
    finally:
        hooks.remove(hook)
    assert counts[0] == counts[1] and counts[0][0] == counts[0][1] > 8
    assert {*seen} == {*stub.names()}


@pytest.mark.parametrize("top_k, bias", [(8, False), (8, True), (2, True), (1, True)])
@pytest.mark.parametrize("first, last", [(130, 255), (513, 1023)])
def test_new_numbers_of_tokens_compile_nothing(grouped_moe, stub, first, last, top_k, bias):
    step = layer_of(Layer("", 8 * top_k, top_k, 256, 192, bias=bias))
    launchers = stub.module("backends.table").launcher_of
    counts = []
    for tokens in (first, last, *range(first, last, 7)):
        for backward in (False, True):
            step(grouped_moe, tokens, backward)
        counts.append((len(stub.variants), launchers.cache_info().currsize))
    assert {*counts[2:]} == {counts[0]}


def numbers_of_tokens():
    """From 1 to 65536: powers of two with their neighbours, and others between them."""
    draw, found = random.Random(0), {*range(1, 20)}
    for power in range(4, 17):
        found |= {2**power - 1, 2**power, 2**power + 1, *(draw.randrange(2**power) + 1 for _ in range(4))}
    return sorted(number for number in found if number <= 65536)


def test_a_layer_has_few_variants(grouped_moe, stub):
    step = layer_of(QWEN3_30B)
    for backward in (False, True):
        for tokens in numbers_of_tokens():
            step(grouped_moe, tokens, backward)
    assert len(stub.variants) == VARIANTS, sorted(Counter(stub.names()).items())


def test_column_major_rows_take_kept_variants(grouped_moe, stub, compared):
    """The stride of their columns is the number of rows, which no launch may depend on."""
    weight, sizes = torch.zeros(4, 512, 256, dtype=BF16), torch.full((4,), 16)
    for rows in range(130, 255, 7):
        del compared[:]
        x = torch.zeros(256, rows, dtype=BF16).t()
        grouped_moe.grouped_linear(x, weight, sizes)
        grouped_moe.grouped_mlp(x, sizes, None, weight, weight.mT[:, :, :256].contiguous())
        assert rows == 130 or {"grouped_gemm_kernel", "up_proj_kernel"} <= {*compared}


def test_unaligned_memory_has_variants_of_its_own(grouped_moe, stub, compared):
    memory, weight = torch.zeros(64 * 256 + 1, dtype=BF16), torch.zeros(4, 512, 256, dtype=BF16)
    sizes, counts = torch.full((4,), 16), []
    for start in (0, 1, 0, 1, 1):
        grouped_moe.grouped_linear(memory[start:][: 64 * 256].view(64, 256), weight, sizes)
        counts.append(Counter(stub.names())["grouped_gemm_kernel"])
    assert counts == [1, 2, 2, 2, 2]
    assert Counter(compared) == {"grouped_gemm_kernel": 3, "schedule_kernel": 4}


def test_unknown_versions_launch_by_tritons_own_path(grouped_moe, stub, monkeypatch):
    launch, kinds, counts = stub.module("backends.triton.launch"), ("experts-1-bias", "linear-64-nk-bias"), []
    for keeps in (False, True):
        monkeypatch.setattr(stub.module("common._compat"), "keeps_variants", lambda is_cuda, keeps=keeps: keeps)
        for kind in kinds:
            KINDS[kind](grouped_moe)
        by_triton, compile_and_launch = [], launch.Kernel.compile_and_launch
        with monkeypatch.context() as patch:
            patch.setattr(
                launch.Kernel,
                "compile_and_launch",
                lambda self, *args: by_triton.append(self) or compile_and_launch(self, *args),
            )
            del stub.launches[:]
            for kind in kinds:
                KINDS[kind](grouped_moe)
        counts.append((len(by_triton), len(stub.launches), len(stub.variants)))
    (_, launches, variants), *_ = counts
    assert counts == [(launches, launches, variants), (0, launches, variants)]


@pytest.mark.parametrize("stored, restored", [("kn", "nk"), ("nk", "kn"), ("nk", "a byte on")])
def test_a_backward_has_the_tiles_of_its_forward(grouped_moe, stub, monkeypatch, stored, restored):
    """Though hooks on saved tensors return codes in other strides or at an address that other kernels take."""
    kernel, heights = stub.module("backends.triton.launch").Kernel, {}
    call = kernel.__call__

    def record(self, grid, *args):
        by_row = "quantize_rows_kernel", "activation_grad_kernel"  # which ask for no tiles
        height = getattr(self.constants.get("TILING"), "BLOCK_M", self.constants.get("BLOCK_M"))
        if self.function.__name__ not in by_row and height is not None:
            heights.setdefault(height, []).append(self.function.__name__)
        call(self, grid, *args)

    def lie(codes, layout):
        if layout == "kn":
            return codes.mT.contiguous().mT
        memory = codes.new_empty(codes.numel() + 1)[int(layout != "nk") :]
        return memory[: codes.numel()].view(codes.shape).copy_(codes)

    def unpack(tensor):
        return lie(tensor, restored) if tensor.dtype == torch.float8_e4m3fn else tensor

    monkeypatch.setattr(kernel, "__call__", record)
    weights = [grouped_moe.quantize_blocks(torch.randn(8, n, 256, dtype=BF16)) for n in (512, 256)]
    weights = [weight._replace(data=lie(weight.data, stored), products="w8a8") for weight in weights]
    x, scales = torch.randn(128, 256, dtype=BF16, requires_grad=True), torch.rand(128, 2, requires_grad=True)
    ids = torch.randint(0, 8, (128, 2))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        out = grouped_moe.grouped_mm_experts(x, ids, scales, *weights)
    out.backward(torch.randn_like(out))
    assert [*heights] == [128], heights
