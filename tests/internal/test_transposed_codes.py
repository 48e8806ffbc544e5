"""How blocks of 8-bit codes are transposed in shared memory: the two views of the words, with NumPy in the GPU's place.

The kernel itself runs on Hopper alone (`test_layouts_of_codes`); these are its addresses.
"""

import itertools

import numpy as np
import pytest

SIDE = 128  # rows and bytes of a block
WORD = 4
EXTENTS = 4, 2, 2, 16, 16


@pytest.fixture
def words_by_diagonals(module):
    pytest.importorskip("triton.experimental.gluon.language")
    return module("backends.kernels.hopper_transposed").words_by_diagonals


def swizzled(block):
    """The bytes of a block as TMA writes it, swizzled by 128 bytes.

    The 16 bytes c of row r are at place c ^ (r % 8) of the row. Source: CUDA C++ Programming Guide, swizzle modes.
    """
    memory = np.empty_like(block)
    for row, piece in itertools.product(range(SIDE), range(8)):
        place = (piece ^ row % 8) * 16
        memory[row, place : place + 16] = block[row, 16 * piece : 16 * piece + 16]
    return memory.reshape(-1)


def offsets_of(layout):
    """The offset in words of each word of a view. The bits of an offset name the bases whose sum is its place there."""
    offsets = np.full(EXTENTS, -1)
    for offset in range(SIDE * SIDE // WORD):
        coordinates = [0] * len(EXTENTS)
        for bit, basis in enumerate(layout.offset_bases):
            if offset >> bit & 1:
                coordinates = [a ^ b for a, b in zip(coordinates, basis)]
        offsets[tuple(coordinates)] = offset
    return offsets


def test_blocks_are_transposed(words_by_diagonals):
    """Squares of 4 x 4 codes, each transposed by itself, are read from a block and written to its transpose."""
    block = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
    rows, columns = (offsets_of(words_by_diagonals(of_columns)) for of_columns in (False, True))
    words = swizzled(block).reshape(-1, WORD)[rows]
    memory = np.empty((SIDE * SIDE // WORD, WORD), np.uint8)
    memory[columns] = words.swapaxes(0, -1)  # the words of a square are along the first dimension
    assert np.array_equal(memory.reshape(-1), swizzled(block.T))


@pytest.mark.parametrize("of_columns", (False, True))
def test_pairs_of_half_a_warp_are_in_different_banks(words_by_diagonals, of_columns):
    """Sixteen lanes that differ in their square alone take two words each, side by side: all 32 banks."""
    offsets = offsets_of(words_by_diagonals(of_columns))
    pairs = np.moveaxis(offsets, 1 if of_columns else 2, 0)  # k0 or n0 first
    assert np.array_equal(pairs[1], pairs[0] + 1) and not (pairs[0] % 2).any()
    banks = np.sort(pairs[0] % 32, axis=-1)
    assert np.array_equal(banks, np.broadcast_to(np.arange(0, 32, 2), banks.shape))
