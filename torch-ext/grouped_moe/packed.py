"""Rows that travel between ranks: a token's hidden state, routing weights and expert ids, side by side."""

from typing import NamedTuple, Tuple

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: where each part of a row starts
WORD = 8  # bytes


class PackedRow(NamedTuple):
    """The form of a row: hidden numbers of dtype, then top_k routing weights of weights_dtype, then top_k int32 ids."""

    hidden: int
    dtype: torch.dtype
    top_k: int
    weights_dtype: torch.dtype

    @property
    def starts(self) -> Tuple[int, int, int]:
        """Bytes before the weights, before the ids, and of the row."""
        sizes = self.hidden * self.dtype.itemsize, self.top_k * self.weights_dtype.itemsize, self.top_k * 4
        weights, ids, row = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        return weights, weights + ids, weights + ids + row

    @property
    def words(self) -> int:
        """How many int64 a row takes."""
        _, _, num_bytes = self.starts
        return num_bytes // WORD

    def parts(self, rows: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Hidden states (places, H), routing weights and ids (places, top_k), as views of rows (places, words)."""
        weights, ids, _ = self.starts
        return (
            self.hidden_states(rows),
            rows[:, weights // WORD : ids // WORD].view(self.weights_dtype)[:, : self.top_k],
            rows[:, ids // WORD :].view(torch.int32)[:, : self.top_k],
        )

    def hidden_states(self, rows: Tensor) -> Tensor:
        """(places, H) of rows (places, words) int64, as a view."""
        return rows.view(self.dtype)[:, : self.hidden]
