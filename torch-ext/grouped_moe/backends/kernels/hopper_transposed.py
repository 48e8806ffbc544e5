"""A producer for weights (E, K, N) of 8-bit floats for Hopper in Gluon: it transposes codes in the ring.

wgmma reads 8-bit floats along K alone, so the blocks of such a weight are turned where they have landed, in shared
memory. That takes four warps, 64 KB of its traffic for a step beside 96 of the products, and no memory elsewhere.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.runtime.jit import constexpr_function

from .hopper import reinterpret
from .hopper_pipeline import find_tile, load_step, share_zeros, zero_blocks
from .hopper_ring import Ring, next_slot, num_steps, slot_at

SIDE = gl.constexpr(128)  # rows and columns of a block of codes


@constexpr_function
def words_by_diagonals(OF_COLUMNS):
    """The layout of a block of codes in shared memory, as words of four codes (4, 2, 2, 16, 16), swizzled by 128 bytes.

    The block (K, N) is seen in squares (k, n) of 8 x 8 codes. Word [i, k0, n0, (k ^ n), n] has row 8 k + 4 k0 + i of
    columns 8 n + 4 n0 to 8 n + 4 n0 + 3; OF_COLUMNS, of the transposed one, rows 8 k + 4 k0 to 8 k + 4 k0 + 3 of column
    8 n + 4 n0 + i. Two words lie side by side in either. So half a warp that takes all n for some k ^ n finds its pairs
    in different banks in both.
    """
    bases = []
    for bit in range(12):
        row, place = divmod(1 << bit, 32)
        word = place ^ ((row % 8) << 2)  # of the row
        k, n = (word, row // 4) if OF_COLUMNS else (row // 4, word)  # of squares of 4 x 4
        bases.append([row % 4, k % 2, n % 2, (k ^ n) // 2, n // 2])
    return gl.SharedLinearLayout(bases)


_TRANSPOSE_4X4 = gl.constexpr(
    """
    {
    .reg .b32 a, b, c, d;
    prmt.b32 a, $4, $5, 0x5140;
    prmt.b32 b, $6, $7, 0x5140;
    prmt.b32 c, $4, $5, 0x7362;
    prmt.b32 d, $6, $7, 0x7362;
    prmt.b32 $0, a, b, 0x5410;
    prmt.b32 $1, a, b, 0x7632;
    prmt.b32 $2, c, d, 0x5410;
    prmt.b32 $3, c, d, 0x7632;
    }
    """
)


@gluon.jit
def transpose_block(codes, DIAGONALS: gl.constexpr):
    """Transposes a block (128, 128) of codes in place, by squares of 8 x 8. codes: any view of its shared memory.

    DIAGONALS: of the 16, how many a warp has in registers at once, two at least. The warps meet between loads and
    stores, which is less often with more diagonals at once.
    """
    PIECE: gl.constexpr = DIAGONALS * gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [4, 2, 2, DIAGONALS // 2, 1], [1, 1, 1, 2, 16], [1, 1, 1, gl.num_warps(), 1], [4, 3, 2, 1, 0]
    )
    all_rows = reinterpret(codes, gl.int32, [4, 2, 2, 16, 16], words_by_diagonals(False))
    all_columns = reinterpret(codes, gl.int32, [4, 2, 2, 16, 16], words_by_diagonals(True))
    for i in gl.static_range(16 // PIECE):
        rows, columns = all_rows.slice(i * PIECE, PIECE, dim=3), all_columns.slice(i * PIECE, PIECE, dim=3)
        even, odd = rows.load(LAYOUT).reshape([2, 2, 2, 2, PIECE, 16]).permute((2, 3, 4, 5, 0, 1)).split()
        row0, row2 = even.split()
        row1, row3 = odd.split()
        column0, column1, column2, column3 = gl.inline_asm_elementwise(
            _TRANSPOSE_4X4, "=&r,=&r,=&r,=&r,r,r,r,r", [row0, row1, row2, row3],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        words = gl.join(gl.join(column0, column2), gl.join(column1, column3))
        columns.store(words.permute((4, 5, 0, 1, 2, 3)).reshape([4, 2, 2, PIECE, 16]))


@gluon.jit
def hand_over(ring, landed, number, PRODUCT: gl.constexpr):
    """Transposes the weights of the program's step `number` when they have landed, and lets consumers read its slot.

    Nothing is done for a negative number. Factors of a low-rank part stay as they are.
    """
    if PRODUCT.R > 0:
        RANK_STEPS: gl.constexpr = num_steps(PRODUCT.R, 0, ring.ranks.rows_desc.block_type.shape[1])
    else:
        RANK_STEPS: gl.constexpr = 0
    STEPS: gl.constexpr = num_steps(PRODUCT.K, 0, SIDE) + RANK_STEPS
    if number >= 0:
        slot, phase = slot_at(number, ring.lhs.shape[0])
        mbarrier.wait(landed.index(slot), phase)
        if number % STEPS >= RANK_STEPS:
            LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], ring.rhs.dtype)
            blocks = reinterpret(ring.rhs.index(slot), ring.rhs.dtype, [2, SIDE, SIDE], LAYOUT)
            for i in gl.static_range(2):
                transpose_block(blocks.index(i), 4 if PRODUCT.R == 0 else 2)
        fence_async_shared()
        mbarrier.arrive(ring.full.index(slot), count=1)


@gluon.jit
def produce_transposed(x_desc, w_desc, ring, landed, schedule, zeros, TILING: gl.constexpr, PRODUCT: gl.constexpr):
    """The producer warps: fill the ring with rows and weights of each tile, and transpose weights one step later.

    With more steps between, the consumers could wait for slots that wait for theirs (`multiply_promoted`).
    landed: barriers of one arrival, for the loads of each slot. zeros: as of `produce`. The next tile is located
    meanwhile.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    loads = Ring(ring.lhs, ring.rhs, landed, ring.empty, ring.ranks)
    step = gl.num_programs(0)
    if zeros is not None:
        first_row, last_row, blocks, blocks_per_tile = share_zeros(zeros, schedule, TILING, PRODUCT)
        block = gl.program_id(0) + 0  # Triton 3.6 does not carry a variable that begins as a copy of another one
    slot = 0
    phase = 1
    filled = 0
    expert, row, end, n_tile = find_tile(gl.program_id(0), schedule, TILING)
    for number in range(gl.program_id(0), schedule.num_tiles, step):
        this_expert, this_row, this_n_tile = expert + 0, row + 0, n_tile + 0  # Triton 3.6 does not carry a plain copy
        expert, row, end, n_tile = find_tile(number + step, schedule, TILING)
        if PRODUCT.R > 0:
            rows_desc, factor_desc = ring.ranks
            for k in range(0, PRODUCT.R, rows_desc.block_type.shape[1]):
                load_step(
                    rows_desc, factor_desc, this_expert, this_row, this_n_tile, k, loads, slot, phase,
                    PRODUCT.BLOCK_N, PRODUCT.FACTOR_KN,
                )  # fmt: skip
                hand_over(ring, landed, filled - 1, PRODUCT)
                filled += 1
                slot, phase = next_slot(slot, phase, STAGES)
        for k in range(0, PRODUCT.K, SIDE):
            load_step(
                x_desc, w_desc, this_expert, this_row, this_n_tile, k, loads, slot, phase, PRODUCT.BLOCK_N, PRODUCT.W_KN
            )
            hand_over(ring, landed, filled - 1, PRODUCT)
            filled += 1
            slot, phase = next_slot(slot, phase, STAGES)
        if zeros is not None:
            last = gl.minimum(block + blocks_per_tile, blocks)
            zero_blocks(zeros, block, last, first_row, last_row, PRODUCT.N)
            block += blocks_per_tile
    hand_over(ring, landed, filled - 1, PRODUCT)
    if zeros is not None:
        zero_blocks(zeros, block, blocks, first_row, last_row, PRODUCT.N)
        tma.store_wait(0)
