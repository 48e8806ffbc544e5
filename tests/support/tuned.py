"""GPUs, a tile and fixtures for tests of tuned tiles. A GPU: fields of the package's DeviceSpec."""

import pytest
from compile_check import Package

H200 = {"num_sms": 132, "shared_memory": 232448, "hopper": True, "capability": (9, 0), "bandwidth": 4917}
A100 = {"num_sms": 108, "shared_memory": 166912, "wide_tiles": False, "capability": (8, 0)}
GPU = "Some GPU"
TILE = {"block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2}


@pytest.fixture
def package(grouped_moe) -> Package:
    """The package's modules by name."""
    return Package(grouped_moe)


@pytest.fixture
def device_spec(package):
    """The kind of a GPU's description."""
    return package["common.device"].DeviceSpec
