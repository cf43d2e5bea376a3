"""Logits of masked rows that will be read again: those of each chain's present sequence with one position masked.

A chain evaluates the energy of its sequence by masking every position alone; a proposal for a single position reads the
very same row, and so does the way back of a sequentially filled block's last position. Logits of the sequence a chain
is at are kept; those of a sequence that is tried become the kept ones if it is accepted. A row is found only if all
tokens but the masked one are those it was run with.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_BYTES_ON_CPU = 2**29


class RowMemory:
    """Room for the logits of B sequences, V at each of their free positions, twice.

    Args:
        free: (B, T) bool, the positions whose rows are kept.
        dtype: of the logits.
    """

    def __init__(self, free: Tensor, vocab_size: int, dtype: torch.dtype):
        self.free = free
        # Logits lie in slots, numbered along the free positions of a sequence, whatever is between them.
        self.slot = free.long().cumsum(1) - 1
        width = int(free.sum(1).max())
        shape = (len(free), width, vocab_size)
        self.kept = _Rows(free.shape, shape, dtype, free.device)
        self.tried = _Rows(free.shape, shape, dtype, free.device)

    @classmethod
    def if_it_fits(cls, free: Tensor, vocab_size: int, dtype: torch.dtype) -> RowMemory | None:
        """`None` where it would take more than half a GiB, or on a GPU an eighth of its free memory."""
        most = torch.cuda.mem_get_info(free.device)[0] // 8 if free.is_cuda else _MOST_BYTES_ON_CPU
        if 2 * len(free) * int(free.sum(1).max()) * vocab_size * dtype.itemsize > most:
            return None
        try:
            return cls(free, vocab_size, dtype)
        except torch.OutOfMemoryError:
            return None

    def find(self, number: Tensor, column: Tensor, ids: Tensor) -> Tensor:
        """(n,) bool: whether the row of sequence `number[n]`, `ids[n]` (n, T) with `column[n]` masked, is kept.

        Here and below `column` (n,) is a free position.
        """
        same = self.kept.ids[number] == ids
        same.scatter_(1, column[:, None], True)
        return same.all(1) & self.kept.known[number, self.slot[number, column]]

    def read(self, number: Tensor, column: Tensor) -> Tensor:
        """(n, V) logits of rows that were found."""
        return self.kept.logits[number, self.slot[number, column]]

    def write(self, number: Tensor, column: Tensor, ids: Tensor, logits: Tensor) -> None:
        """Notes logits (n, V) of rows that were run. In one call a sequence has one `ids`, and a row stands once."""
        tried = self.tried
        holding = self._holding(tried, number, ids)
        tried.ids[number], tried.known[number] = ids, False
        tried.known[self._slots(holding, number)] = True
        slot = self.slot[number, column]
        tried.known[number, slot] = True
        tried.logits[number, slot] = logits

    def keep(self, number: Tensor, ids: Tensor) -> None:
        """The sequences `number` (n,), each once, are now at `ids` (n, T); what was noted of them is kept."""
        kept, tried = self.kept, self.tried
        holding, fresh = self._holding(kept, number, ids), self._holding(tried, number, ids)
        which, slot = self._slots(fresh, number)
        kept.logits[which, slot] = tried.logits[which, slot]
        kept.ids[number], kept.known[number] = ids, False
        kept.known[self._slots(holding | fresh, number)] = True

    def _holding(self, rows: _Rows, number: Tensor, ids: Tensor) -> Tensor:
        """(n, T) bool: the columns whose rows are known and hold for `ids`: no token differs but the one masked."""
        changed = rows.ids[number] != ids
        known = rows.known[number].gather(1, self.slot[number].clamp_min(0)) & self.free[number]
        return known & (changed.sum(1, keepdim=True) == changed.long())

    def _slots(self, columns: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """Sequence and slot of each of some columns (n, T)."""
        which, column = columns.nonzero(as_tuple=True)
        return number[which], self.slot[number[which], column]


class _Rows:
    """Rows of one sequence each: its tokens, which of its rows are known, and their logits."""

    def __init__(
        self, ids_shape: torch.Size, logits_shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ):
        self.ids = torch.full(ids_shape, -1, device=device)
        self.known = torch.zeros(logits_shape[:2], dtype=torch.bool, device=device)
        self.logits = torch.empty(logits_shape, dtype=dtype, device=device)
