"""Shared memory beside low-rank pairs of many ranks, of kernels that are compiled for GPUs that are not here."""

import pytest
import torch

pytest.importorskip("triton")

from compile_check import TARGETS, Package, compiling_for

BF16 = torch.bfloat16
GROUPS, N = 8, 256


def weight_of(package, k, parts):
    """(G, N, K), plain without parts; else block-scaled and transposed, (G, K, N) as it is stored, in parts of K."""
    if not parts:
        return torch.empty(GROUPS, N, k, dtype=BF16)
    codes, scales = torch.empty(GROUPS, k, N, dtype=torch.float8_e4m3fn), torch.empty(GROUPS, parts, 2)
    return package["block_scaled"].BlockScaled(codes, scales, (128, 128), parts)


@pytest.mark.parametrize("target, rows, k, parts, rank", [
    ("sm89", 32, 64, 0, 256), ("gfx942", 128, 64, 0, 64), ("sm89", 16, 128, 1, 256), ("sm120", 16, 192, 2, 256),
])  # fmt: skip
def test_ranks_beside_one_step_of_k_fit(grouped_moe, target, rows, k, parts, rank):
    """Or one of each part of K. Without a loop along K Triton would pipeline the loop over tiles."""
    package, found, (gpu, limit, _) = Package(grouped_moe), [], TARGETS[target]
    x, splits = torch.empty(GROUPS * rows, k, dtype=BF16), torch.empty(GROUPS, dtype=torch.int64)
    factor = torch.empty(1, GROUPS, N, rank)  # fp32, as peft has it
    ranks = package["operands"].LowRank(torch.empty(GROUPS * rows, rank, dtype=BF16), factor)
    kernels, weight = package["backends.triton"], weight_of(package, k, parts)
    with compiling_for(package, gpu, package.spec("", TARGETS[target]), lambda _, kernel: found.append(kernel)):
        rows = kernels.split_rows(splits, GROUPS, GROUPS * rows, BF16)
        kernels.gemm(x, weight, rows, transposed=bool(parts), low_rank=ranks)
    assert found[-1].name.endswith("gemm_kernel") and found[-1].metadata.shared <= limit


@pytest.mark.parametrize("k, rank, stages", [(96, 64, 3), (96, 512, 1), (256, 512, 3), (96, 0, 3)])
def test_ranks_that_fit_leave_the_pipeline(grouped_moe, k, rank, stages):
    """On an H200, of a part of a layer that eight of them share."""
    package = Package(grouped_moe)
    factor = package["backends.triton.factors"].factor_of(torch.empty(1, GROUPS, N, rank) if rank else None)
    problem = package["backends.problems"].GemmProblem(
        package.spec("", TARGETS["sm90"]), BF16, "ieee", GROUPS, 16, N, k, False, False, factor, False, False
    )
    assert package["backends.triton.launchers"].Gemm(problem).config.num_stages == stages
