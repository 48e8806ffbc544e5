"""Which blocks the Gluon kernels for Hopper take: a kernel's name, found without a GPU.

Their results are those of Triton's kernels, so that only speed would tell if they were not taken.
"""

import importlib

import pytest
import torch

ROWS, TOP_K, EXPERTS, HIDDEN = 4096, 2, 4, 256


@pytest.fixture
def names(grouped_moe, monkeypatch):
    """The names of the kernels for the up-projection, of gathered rows and in place, and for the dgrad in place."""
    pytest.importorskip("triton")

    def module(name):
        return importlib.import_module(f"{grouped_moe.__name__}.{name}")

    spec = module("common.device").DeviceSpec(132, 232448, hopper=True, name="stub")
    monkeypatch.setattr(module("common.device"), "device_spec", lambda device_type, index: spec)
    launcher_of, problem_of = module("backends.table").launcher_of, module("backends.triton.up_proj").problem_of

    def find(n: int, gated: bool = True, activation: str = "silu", **changes) -> tuple:
        transposed, interleaved = (changes.get(name, False) for name in ("transposed", "interleaved"))
        p = 2 * n if gated else n
        up, down = (EXPERTS, p, HIDDEN), (EXPERTS, HIDDEN, n)
        if transposed:
            up, down = (EXPERTS, HIDDEN, p), (EXPERTS, n, HIDDEN)
        x, up, down = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((ROWS, HIDDEN), up, down))
        kind = grouped_moe.Activation(activation), gated, interleaved, transposed, False
        block = module("block").Block(up, down, None, None, *kind)
        in_place = module("rows").Rows(torch.empty(0), EXPERTS, ROWS, block_m=128)
        routed = in_place._replace(top_k=TOP_K)
        found = [
            launcher_of("up_proj", problem_of(block, x, up, routed, True, transposed)),
            launcher_of("up_proj", problem_of(block, x, up, in_place, True, transposed)),
            launcher_of("down_dgrad", problem_of(block, x, down, in_place, False, not transposed)),
        ]
        return tuple(launcher.kernel.function.__name__ for launcher in found)

    return find


HOPPER = ("hopper_gathered_up_proj_kernel", "hopper_up_proj_kernel", "hopper_down_dgrad_kernel")
TRITON = ("up_proj_kernel", "up_proj_kernel", "down_dgrad_kernel")


@pytest.mark.parametrize("kind", [
    {}, {"interleaved": True}, {"interleaved": True, "transposed": True}, {"gated": False},
    {"gated": False, "transposed": True}, {"gated": False, "activation": "relu2"}, {"activation": "gelu"},
], ids=str)  # fmt: skip
def test_taken(names, kind):
    assert names(136, **kind) == HOPPER


def test_gate_and_up_of_transposed_halves_are_not(names):
    """A box of both halves of (E, H, 2 I) would be no operand of the matrix instructions."""
    assert names(136, transposed=True) == (*TRITON[:2], HOPPER[2])


def test_the_exact_gelu_without_a_gate_is_not(names):
    assert names(136, gated=False, activation="gelu") == TRITON


@pytest.mark.parametrize("n, gated, taken", [
    (72, True, (True, True, True)), (64, True, (False, True, False)), (56, True, (False, False, False)),
    (136, False, (True, True, True)), (128, False, (False, True, True)), (120, False, (False, False, True)),
    (132, True, (False, False, False)),
])  # fmt: skip
def test_columns(names, n, gated, taken):
    """Enough of them for a tile, and rows of 16 bytes."""
    assert names(n, gated) == tuple(hopper if take else other for hopper, other, take in zip(HOPPER, TRITON, taken))
