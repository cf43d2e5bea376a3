"""Logits of masked rows that will be read again: those of each chain's present sequence with one position masked.

A chain evaluates the energy of its sequence by masking every position alone; a proposal for a single position reads the
very same row. Logits of the sequence a chain is at are kept; those of a sequence that is tried become the kept ones if
it is accepted. A row is found only for exactly its masked tokens, so what is found is what would be computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT, _TRIED = 0, 1
_BYTES_PER_LOGIT, _BYTES_PER_ID = 4, 8
_MOST_BYTES_ON_CPU = 2**29


class RowMemory:
    """Room for the logits of B sequences of T columns, V logits each, twice.

    Args:
        shape: (B, T, V).
    """

    def __init__(self, shape: tuple[int, int, int], device: torch.device):
        count, columns, _ = self.shape = shape
        self.rows = torch.full((2, count, columns, columns), -1, device=device)
        self.logits: Tensor | None = None  # once their type is known

    @classmethod
    def if_it_fits(cls, shape: tuple[int, int, int], device: torch.device) -> RowMemory | None:
        """`None` where it would take more than half a GiB, or on a GPU an eighth of its free memory."""
        most = torch.cuda.mem_get_info(device)[0] // 8 if device.type == "cuda" else _MOST_BYTES_ON_CPU
        count, columns, vocab_size = shape
        row = vocab_size * _BYTES_PER_LOGIT + columns * _BYTES_PER_ID
        return cls(shape, device) if 2 * count * columns * row <= most else None

    def find(self, number: Tensor, column: Tensor, masked_ids: Tensor) -> Tensor:
        """(n,) bool: whether the rows `masked_ids` (n, T), sequence `number[n]` with `column[n]` masked, are kept."""
        return (self.rows[_KEPT, number, column] == masked_ids).all(1)

    def read(self, number: Tensor, column: Tensor) -> Tensor:
        """(n, V) logits of rows that were found."""
        assert self.logits is not None  # nothing is found before something was written
        return self.logits[_KEPT, number, column]

    def write(self, number: Tensor, column: Tensor, masked_ids: Tensor, logits: Tensor) -> None:
        """Takes note of the logits (n, V) of rows that were run, of sequences that are tried."""
        if self.logits is None:
            self.logits = torch.empty((2, *self.shape), dtype=logits.dtype, device=logits.device)
        self.rows[_TRIED, number, column] = masked_ids
        self.logits[_TRIED, number, column] = logits

    def keep(self, number: Tensor, ids: Tensor, mask_token_id: int) -> None:
        """The sequences `number` (n,) are now at `ids` (n, T): what was noted of these is kept from now on."""
        if self.logits is None:
            return
        columns = torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
        masked = ids[:, None, :].masked_fill(columns, mask_token_id)
        which, column = (self.rows[_TRIED, number] == masked).all(2).nonzero(as_tuple=True)
        for stored in (self.rows, self.logits):
            stored[_KEPT, number[which], column] = stored[_TRIED, number[which], column]
