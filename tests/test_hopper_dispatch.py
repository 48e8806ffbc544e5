"""Which blocks the Gluon kernels for Hopper take: a kernel's name, found without a GPU.

Their results are those of Triton's kernels, so that only speed would tell if they were not taken.
"""

import sys

import pytest
import torch

ROWS, TOP_K, EXPERTS, HIDDEN = 4096, 2, 4, 256


@pytest.fixture
def names(grouped_moe):
    """The names of the kernels for the up-projection, of gathered rows and in place, and for the dgrad in place."""
    pytest.importorskip("triton")

    def module(name):
        return sys.modules[f"{grouped_moe.__name__}.{name}"]

    spec = module("tuning").DeviceSpec(132, 232448, hopper=True, name="stub")
    device = torch.device("cpu")

    def find(n: int, gated: bool = True, activation: str = "silu", **changes) -> tuple:
        transposed, interleaved = (changes.get(name, False) for name in ("transposed", "interleaved"))
        p = 2 * n if gated else n
        up, down = (EXPERTS, p, HIDDEN), (EXPERTS, HIDDEN, n)
        if transposed:
            up, down = (EXPERTS, HIDDEN, p), (EXPERTS, n, HIDDEN)
        form = module("plan").unwritten
        x, up, down = (form(torch.bfloat16, *shape) for shape in ((ROWS, HIDDEN), up, down))
        kind = module("block").Kind(gated, interleaved, module("activation").Activation(activation), "ieee")
        sizes = (EXPERTS, 128, ROWS // 128 + EXPERTS)
        found = []
        for top_k in (TOP_K, 0):
            given = (True, True, bool(top_k))
            launch = module("fused").up_launch(
                x, up, None, None, given, ROWS, n, top_k, transposed, kind, sizes, spec, device
            )  # fmt: skip
            found.append(launch.kernel.kernel.__name__)
        given = (True, True, True, False)
        launch, _ = module("fused").dgrad_launch(
            x, down, None, given, ROWS, n, 0, transposed, kind, sizes, spec, device
        )  # fmt: skip
        return (*found, launch.kernel.kernel.__name__)

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
