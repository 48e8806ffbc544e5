"""What no result shows, found without a GPU: how kernels are launched, which ones are, and what the log says of them.

Hopper's own kernels give what Triton's give, so that only speed would tell if they were not taken.
"""

import ast
import logging
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

ROWS, TOP_K, EXPERTS, HIDDEN = 4096, 2, 4, 256
HOPPER = ("hopper_gathered_up_proj_kernel", "hopper_up_proj_kernel", "hopper_down_dgrad_kernel")
TRITON = ("up_proj_kernel", "up_proj_kernel", "down_dgrad_kernel")


@pytest.fixture
def load(module):
    """A module of the package, which may need Triton, by its name."""
    pytest.importorskip("triton")
    return module


def is_compiled(function: ast.FunctionDef) -> bool:
    """Whether Triton or Gluon compiles it."""
    return any(".jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_every_kernel_waits_for_the_stream(grouped_moe):
    """Before all else, as a dependent launch must: the kernel before it may still run.

    Those that a projection of rows lets start early do so later; `tools/compile_check.py` sees that they write nothing.
    """
    count, early = 0, []
    for path in Path(grouped_moe.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and is_compiled(node):
                first = ast.unparse(node.body[1])
                if first == "if projected_ptr is None:\n    wait_for_stream()":
                    early.append(node.name)
                else:
                    assert first == "wait_for_stream()", f"{path.name}: {node.name}"
                count += 1
    assert count > 20 and early == ["slot_up_proj_kernel", "slot_down_proj_kernel"]


def test_native_backend_does_what_tritons_does(load):
    """It is there without native ops, too, though nobody takes it."""
    assert sorted(load("backends.native.backend").__all__) == sorted(load("backends.triton").__all__)


@pytest.mark.parametrize("scaling, taken", [
    (2, True), (-3e38, True), (1e39, False), (10**400, False), (float("nan"), False), (True, False), ("1", False),
])  # fmt: skip
def test_scalings_that_native_ops_take(grouped_moe, load, scaling, taken):
    """All others are left to the checks, which refuse them."""
    factors = load("backends.native.decode")._factors_of(None, grouped_moe.LoRA(None, None, scaling))
    assert (factors is not None) is taken


@pytest.mark.parametrize("capability, dependent", [((9, 0), True), ((12, 0), True), ((8, 9), False), ((0, 0), False)])
def test_who_launches_dependently(load, capability, dependent):
    """NVIDIA's GPUs from Hopper on. All fuse, whatever Triton's default."""
    options = {"enable_fp_fusion": True, **({"launch_pdl": True} if dependent else {})}
    assert load("common._compat").launch_options(capability) == options


@pytest.mark.parametrize("n, kind, taken", [
    *((136, kind, (True, True, True)) for kind in (
        {}, {"interleaved": True}, {"interleaved": True, "transposed": True}, {"gated": False},
        {"gated": False, "transposed": True}, {"gated": False, "activation": "relu2"}, {"activation": "gelu"},
    )),
    # A box of both halves of (E, H, 2 I) would be no operand of the matrix instructions.
    (136, {"transposed": True}, (False, False, True)),
    (136, {"gated": False, "activation": "gelu"}, (False, False, False)),
    # Enough columns for a tile, and rows of 16 bytes.
    (72, {}, (True, True, True)), (64, {}, (False, True, False)), (56, {}, (False, False, False)),
    (132, {}, (False, False, False)), (136, {"gated": False}, (True, True, True)),
    (128, {"gated": False}, (False, True, True)), (120, {"gated": False}, (False, False, True)),
    # As many rows as ragged descriptors count.
    (136, {"num_rows": 2**30}, (True, True, True)), (136, {"num_rows": 2**30 + 1}, (False, False, False)),
], ids=str)  # fmt: skip
def test_which_kernels_hopper_takes(grouped_moe, load, monkeypatch, n, kind, taken):
    """For the up-projection of gathered rows and of rows in place, and for the dgrad in place."""
    spec = load("common.device").DeviceSpec(132, 232448, hopper=True, name="stub")
    monkeypatch.setattr(load("common.device"), "device_spec", lambda device: spec)
    launcher_of, problem_of = load("backends.table").launcher_of, load("backends.triton.experts").problem_of
    kind = {"gated": True, "interleaved": False, "transposed": False, "activation": "silu", "num_rows": ROWS, **kind}
    transposed, p = kind["transposed"], 2 * n if kind["gated"] else n
    shapes = (ROWS, HIDDEN), (EXPERTS, p, HIDDEN), (EXPERTS, HIDDEN, n)
    x, up, down = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    if transposed:
        up, down = (weight.mT.contiguous() for weight in (up, down))
    activation = grouped_moe.Activation(kind.pop("activation"))
    in_place = load("rows").Rows(torch.empty(0), EXPERTS, kind.pop("num_rows"), block_m=128)
    block = load("block").Block(up, down, *[None] * 4, activation, **kind, recompute=False)
    found = [
        launcher_of("up_proj", problem_of(block, x, up, None, in_place._replace(top_k=TOP_K), True, transposed)),
        launcher_of("up_proj", problem_of(block, x, up, None, in_place, True, transposed)),
        launcher_of("down_dgrad", problem_of(block, x, down, None, in_place, False, not transposed)),
    ]
    want = [hopper if take else other for hopper, other, take in zip(HOPPER, TRITON, taken)]
    assert [launcher.kernel.function.__name__ for launcher in found] == want


NONE, FORWARD, BACKWARD, BOTH = (False, False), (True, False), (False, True), (True, True)


def scaled(load, n, k, parts=1, block=(128, 128), lies="nk", **kept):
    """A weight of codes that nobody reads."""
    codes = torch.empty((EXPERTS, k, n) if lies == "kn" else (EXPERTS, n, k), dtype=torch.float8_e4m3fn)
    codes = codes.mT if lies == "kn" else codes
    return load("block_scaled").BlockScaled(codes, torch.empty(EXPERTS, 1, 1), block, parts, **kept)


@pytest.fixture(params=["hopper", "other"])
def kind_of_gpu(request, load, monkeypatch):
    """The name of a GPU with kernels for rows of 8-bit floats."""
    spec = load("common.device").DeviceSpec(132, 232448, hopper=request.param == "hopper", float8=True, name="stub")
    monkeypatch.setattr(load("common.device"), "device_spec", lambda device: spec)
    monkeypatch.setattr(load("backends.triton.codes"), "reinterpret_method", lambda: object)
    return request.param


@pytest.mark.parametrize("kind, hopper, other", [
    ({}, BOTH, BOTH), ({"I": 192}, NONE, FORWARD), ({"I": 192, "up": {"parts": 2}}, FORWARD, FORWARD),
    ({"up": {"parts": 4}}, NONE, BOTH), ({"down": {"parts": 4}}, NONE, FORWARD),
    ({"I": 200}, NONE, NONE), ({"H": 264}, NONE, NONE), ({"gated": False}, NONE, BOTH),
    ({"interleaved": True}, NONE, NONE), ({"block_m": 64}, NONE, NONE), ({"dtype": torch.float32}, NONE, NONE),
    ({"num_rows": 2**30 + 1}, NONE, BOTH),
    *(({name: change}, NONE, NONE) for name in ("up", "down")
      for change in ({"products": "w8a16"}, {"block": (64, 128)}, {"lies": "kn"})),
    ({"up": {"lies": "kn"}, "down": {"lies": "kn"}, "contiguous": True}, BOTH, BOTH),
    ({"I": 200, "contiguous": True}, NONE, NONE),
    # Beside a pair each sum has several blocks, in a backward that over the columns of the other side.
    ({"pairs": "up"}, BOTH, BOTH), ({"pairs": "down"}, BOTH, BOTH), ({"pairs": "up", "H": 128}, NONE, NONE),
    ({"pairs": "down", "H": 128}, FORWARD, FORWARD), ({"pairs": "down", "I": 128}, NONE, NONE),
    ({"pairs": "up", "I": 128}, BOTH, BOTH), ({"pairs": "up", "I": 128, "gated": False}, NONE, FORWARD),
], ids=str)  # fmt: skip
def test_which_blocks_take_codes(grouped_moe, load, kind_of_gpu, kind, hopper, other):
    """In the forward, and in the backward."""
    kind = {"H": 256, "I": 256, "dtype": torch.bfloat16, "num_rows": ROWS, "up": {}, "down": {}, "pairs": "", **kind}
    h, i, gated, interleaved = kind["H"], kind["I"], kind.pop("gated", True), kind.pop("interleaved", False)
    weights = scaled(load, 2 * i if gated else i, h, **kind["up"]), scaled(load, h, i, **kind["down"])
    pairs = (grouped_moe.LoRA(None, None) if name in kind["pairs"] else None for name in ("up", "down"))
    kept = grouped_moe.Activation(), gated, interleaved, False, False
    block = load("block").Block(*weights, None, None, *pairs, *kept)
    options = {name: kind[name] for name in ("num_rows", "block_m", "contiguous") if name in kind}
    takes, x = load("backends.triton.codes").takes_codes, torch.empty(0, dtype=kind["dtype"])
    found = takes(block, x, **options), takes(block, x, **options, backward=True)
    assert found == (hopper if kind_of_gpu == "hopper" else other)


@pytest.mark.parametrize("n, k, kind, hopper, other", [
    (256, 256, {}, BOTH, BOTH), (12, 256, {}, NONE, BOTH), (24, 256, {}, FORWARD, BOTH),
    (256, 24, {}, BACKWARD, BACKWARD), (256, 20, {}, NONE, BACKWARD), (300, 256, {"parts": 2}, NONE, FORWARD),
    (512, 256, {"parts": 2}, BOTH, BOTH), (256, 256, {"lies": "kn"}, BACKWARD, BACKWARD),
    (256, 256, {"products": "w8a16"}, NONE, NONE),
], ids=str)  # fmt: skip
def test_which_linear_layers_take_codes(load, kind_of_gpu, n, k, kind, hopper, other):
    """In the forward, and in the backward, which multiplies with the transpose."""
    weight, rows = scaled(load, n, k, **kind), load("rows").Rows(torch.empty(0), EXPERTS, ROWS, block_m=128)
    takes, spec = load("backends.triton.codes").gemm_takes_codes, load("common.device").device_spec(torch.device("cpu"))
    found = tuple(takes(weight, torch.bfloat16, rows, spec, transposed, None) for transposed in (False, True))
    assert found == (hopper if kind_of_gpu == "hopper" else other)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("adapters, rank, dtype, copied", [
    (1, 8, torch.float16, False), (1, 3, torch.float16, True), (1, 8, torch.float32, True), (3, 5, torch.float16, True),
])  # fmt: skip
def test_what_hopper_packs(load, layout, adapters, rank, dtype, copied):
    """The ranks of all adapters side by side, zeros up to R; what descriptors can read as it is, is not copied."""
    factor, padded = torch.randn(adapters, EXPERTS, 16, rank).to(dtype), -(-adapters * rank // 8) * 8
    if layout == "kn":
        factor = factor.mT.contiguous().mT
    low_rank = load("operands").LowRank(torch.empty(ROWS, padded, dtype=torch.float16), factor)
    packed = load("backends.hopper.descriptors").pack(low_rank, layout == "kn")
    assert (packed.data_ptr() != factor.data_ptr()) is copied and packed.is_contiguous()
    want = torch.nn.functional.pad(torch.cat(factor.half().unbind(), -1), (0, padded - adapters * rank))
    assert torch.equal(packed.mT if layout == "kn" else packed, want)


def test_one_line_says_what_runs(load, caplog, monkeypatch):
    """Once per kernel and config, by the first launch; none below INFO, none for kernels without a choice."""
    launch, config, device = load("backends.triton.launch"), load("tuning.heuristic").GemmConfig, load("common.device")
    monkeypatch.setattr(device, "device_spec", lambda _: device.DeviceSpec(132, 232448))
    kernel = MagicMock(fn=lambda x_ptr, y_ptr, BLOCK_M: None, __name__="some_kernel")  # takes every launch
    launch._log_once.cache_clear()
    choices = [config(128, 64, 32, 4, 3, tuned=tuned).describe("a path") for tuned in (False, True)]

    def lines(level):
        caplog.clear()
        with caplog.at_level(level, logger="grouped_moe"):
            for choice in (*choices, choices[0], None):
                bound = launch.Kernel(kernel, {"BLOCK_M": 1}, None, choice)
                for _ in range(2):
                    bound((1, 1, 1), torch.zeros(1))
        return [(record.name, record.levelno, record.getMessage()) for record in caplog.records]

    assert lines(logging.WARNING) == []
    start = "some_kernel on cpu: a path, tile 128x64x32, 4 warps, 3 stages, "
    assert lines(logging.INFO) == [("grouped_moe", logging.INFO, start + how) for how in ("heuristic", "tuned")]
    assert lines(logging.INFO) == []
    assert kernel[1, 1, 1].call_count == 24
