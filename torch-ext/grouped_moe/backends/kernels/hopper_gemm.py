"""Grouped GEMM for Hopper in Gluon: loads, products and stores overlap (`.hopper_pipeline`).

The two consumer warp groups take tiles in turn, or share tiles of twice as many rows, for which less is read.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .dependent import wait_for_stream
from .hopper import allocate_barriers, allocate_blocks, ragged_coordinates, tma_store, write_staging
from .hopper_pipeline import Bias, Schedule, Zeros, add_bias, allocate_zeros, consume, produce
from .hopper_ring import Ranks, Ring, allocate_slots, finish_products
from .tiles import column_pieces, num_row_tiles


class Output(NamedTuple):
    """What the epilogue of a GEMM needs."""

    desc: object  # the descriptor of y, ragged
    staging: gl.shared_memory_descriptor  # a block of y
    bias: Bias
    scales_ptr: gl.tensor  # factors of the bias, (rows,), or None


@gluon.jit
def store_rows(acc, output, tile, column, N: gl.constexpr):
    """Stores a tile's rows plus their bias, in pieces of as many columns as the staging tile has."""
    COLUMNS: gl.constexpr = acc.shape[1]
    if COLUMNS > output.staging.shape[3]:
        left, right = column_pieces(acc, 2)
        store_rows(left, output, tile, column, N)
        store_rows(right, output, tile, column + COLUMNS // 2, N)
    else:
        acc = add_bias(acc, output.bias, tile, column, N, scales_ptr=output.scales_ptr)
        tma.store_wait(0)  # until the earlier store has read the staging tile
        write_staging(acc, output.staging)
        tma_store(output.desc, ragged_coordinates(tile.row, tile.end, column), output.staging)


@gluon.jit
def gemm_epilogue(GROUP: gl.constexpr, acc, ring, slot, tile, turn, output, N: gl.constexpr):
    """Stores a tile or, of a shared one, the group's half, whose first row is then tile.row."""
    acc = finish_products(acc, ring, slot)
    store_rows(acc, output, tile, tile.n_tile * acc.shape[1], N)


@gluon.jit
def consume_gemm(
    GROUP: gl.constexpr, ring, pingpong, y_desc, staging, bias_ptr, stride_be, stride_bn, scales_ptr, schedule,
    TILING: gl.constexpr, PRODUCT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """A consumer warp group."""
    # Made here: in the kernel, strides that are constants would become arguments of the partition.
    output = Output(y_desc, staging.index(GROUP), Bias(bias_ptr, stride_be, stride_bn), scales_ptr)
    consume(
        GROUP, ring, pingpong, schedule, TILING, PRODUCT, gemm_epilogue, output, PRODUCT.N, PREFETCH=True, SHARED=SHARED
    )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total_rows"])
def hopper_gemm_kernel(
    x_desc,  # (rows, K), blocks of (BLOCK_M, BLOCK_K)
    w_desc,  # (E, K, N), blocks of (1, BLOCK_K, BLOCK_N), if W_KN; else (E, N, K), blocks of (1, BLOCK_N, BLOCK_K)
    bias_ptr, stride_be, stride_bn,  # (E, N) or None
    scales_ptr,  # (rows,) or None
    projected_desc, factor_desc,  # the low-rank part: (rows, R), (E, N, R) or, W_KN, (E, R, N); or None
    y_desc,  # (rows, N), out; ragged, blocks of some columns and BLOCK_M rows or, of shared tiles, half of them
    schedule_ptr,
    total_rows,
    ZERO_UNGROUPED: gl.constexpr, TILING: gl.constexpr, PRODUCT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """y[r] = W[e] x[r] + scales[r] bias[e] for the rows r of expert e.

    The low-rank part is in W. Rows of no expert are set to 0 if ZERO_UNGROUPED, else not written.
    Grid: (programs,), persistent.
    The caller guarantees a schedule made for BLOCK_M, and four warps.
    """
    wait_for_stream()
    ROWS: gl.constexpr = y_desc.block_type.shape[2]
    SHARED: gl.constexpr = ROWS < TILING.BLOCK_M
    lhs, rhs, full, empty = allocate_slots(x_desc, w_desc, STAGES, 2 if SHARED else 1)
    ring = Ring(lhs, rhs, full, empty, Ranks(projected_desc, factor_desc))
    staging = allocate_blocks(y_desc, 2)
    pingpong = allocate_barriers(2, 1)
    if ZERO_UNGROUPED:
        zeros = Zeros(y_desc, allocate_zeros(y_desc), total_rows)
    else:
        zeros: gl.constexpr = None
    schedule = Schedule(schedule_ptr, num_row_tiles(schedule_ptr, TILING.NUM_EXPERTS) * TILING.NUM_N_TILES)
    # Registers of a thread: a consumer's holds 128 sums of products.
    gl.warp_specialize([
        (consume_gemm, (0, ring, pingpong, y_desc, staging, bias_ptr, stride_be, stride_bn, scales_ptr, schedule,
                        TILING, PRODUCT, SHARED)),
        (consume_gemm, (1, ring, pingpong, y_desc, staging, bias_ptr, stride_be, stride_bn, scales_ptr, schedule,
                        TILING, PRODUCT, SHARED)),
        (produce, (x_desc, w_desc, ring, schedule, zeros, TILING, PRODUCT)),
    ], [4, 1], [232, 40])  # fmt: skip
