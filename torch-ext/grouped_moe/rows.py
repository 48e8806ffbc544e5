"""Rows: how the rows of a grouped GEMM are sorted into groups, and which tokens they come from."""

from typing import NamedTuple, Optional

from torch import Tensor

_MIN_BLOCK_M = 16  # the fewest rows of a tile


class Rows(NamedTuple):
    """Rows that are sorted by group, for every product of a call.

    schedule: int32 on the device, in one piece: group offsets (G + 1,), rows [o[g], o[g + 1]) are those of group g;
    tile offsets (G + 1,), the tiles of block_m rows before each group; the group of each tile. What no tile needs is
    unwritten. On a CPU the group offsets alone are written.
    num_groups: G. num_rows: an upper bound of the rows of all groups, by which buffers are made: the rows that are
    routed are known on the device only. block_m: rows of a tile; 0 where nothing needs tiles, as on a CPU.
    top_k: slots of a token where row r is that of token row_to_slot[r] // top_k; 0 where rows are in place.
    row_to_slot: (rows,) int32, row -> slot. slot_to_row: (S,) int32, slot -> row, -1 for a sentinel. Both None where
    rows are in place.
    adapters: which adapter of a LoRA each token, or each row in place, has: int32 or int64, any other number for none.
    None where all have the only one.
    """

    schedule: Tensor
    num_groups: int
    num_rows: int
    block_m: int = 0
    top_k: int = 0
    row_to_slot: Optional[Tensor] = None
    slot_to_row: Optional[Tensor] = None
    adapters: Optional[Tensor] = None

    @property
    def group_offsets(self) -> Tensor:
        """(G + 1,)"""
        return self.schedule[: self.num_groups + 1]


def max_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """An upper bound of the number of tiles that holds for any sizes of groups."""
    return -(-num_rows // block_m) + max(0, min(num_groups, num_rows) - 1)


def schedule_size(num_rows: int, num_groups: int) -> int:
    """Entries of a schedule that has room for tiles of any block_m: an expression in num_rows without a branch."""
    return 2 * (num_groups + 1) + -(-num_rows // _MIN_BLOCK_M) + num_groups


def unit_rows(x: Tensor) -> Tensor:
    """x itself if its columns are contiguous, else a contiguous copy."""
    return x if x.stride()[-1] == 1 or x.shape[-1] == 1 else x.contiguous()
