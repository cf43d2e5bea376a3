"""Logits of masked rows that will be read again: a runner around a runner.

A chain evaluates the energy of its sequence by masking every position alone; a proposal for a single position reads the
very same row, and so does the way back of a sequentially filled block's last position. So logits of rows with a single
position, masked and read, are kept for two states of each sequence: the one it is at, and the last one that was tried.
Nobody says which of them was accepted: a sequence is at the state it was last given as. A row is found only if all
tokens but the masked one are those it was run with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_ebm.scoring.rows import MaskedRows, Reducer, Runner, Sequences, in_order

_MOST_BYTES_ON_CPU = 2**29
_BATCH = 256  # rows that are found: their logits are given on so many at a time


class MaskedLogitsCache:
    """Runs masked rows through a runner, but for those whose logits it has: a `Runner`.

    It looks at `Sequences.numbers`; no pool may hold two sequences of one number. What has none is passed on.

    Args:
        runner: runs the other rows.
        free: (B, T) bool, the positions whose rows are kept, for each number.
        vocab_size: V.
        dtype: of the logits, float32 or float64.
    """

    def __init__(self, runner: Runner, free: Tensor, vocab_size: int, dtype: torch.dtype):
        self.runner, self.free = runner, free
        # Logits lie in slots, numbered along the free positions of a sequence, whatever is between them.
        self.slot = free.long().cumsum(1) - 1
        shape = (2, len(free), int(free.sum(1).max()))
        self.ids = torch.full((2, *free.shape), -1, device=free.device)
        self.known = torch.zeros(shape, dtype=torch.bool, device=free.device)
        self.logits = torch.empty((*shape, vocab_size), dtype=dtype, device=free.device)
        self.present = torch.zeros(len(free), dtype=torch.long, device=free.device)

    @classmethod
    def around(cls, runner: Runner, free: Tensor, vocab_size: int, dtype: torch.dtype) -> Runner:
        """The runner itself where logits would take more than half a GiB, or on a GPU an eighth of its free memory."""
        most = torch.cuda.mem_get_info(free.device)[0] // 8 if free.is_cuda else _MOST_BYTES_ON_CPU
        if 2 * len(free) * int(free.sum(1).max()) * vocab_size * dtype.itemsize > most:
            return runner
        try:
            return cls(runner, free, vocab_size, dtype)
        except torch.OutOfMemoryError:
            return runner

    @property
    def num_rows(self) -> int:
        return self.runner.num_rows

    @property
    def mask_id(self) -> int:
        return self.runner.mask_id

    @property
    def dtype(self) -> torch.dtype | None:
        return self.runner.dtype

    def __call__(self, sequences: Sequences, rows: MaskedRows, reduce: Reducer) -> Tensor:
        if sequences.numbers is None:
            return self.runner(sequences, rows, reduce)
        self.turn_to(sequences.numbers, sequences.ids)
        if rows.read.shape[1] != 1 or not rows.masked.shape[1]:
            return self.runner(sequences, rows, reduce)
        number, column, ids = sequences.numbers[rows.source], rows.read[:, 0], sequences.ids[rows.source]
        # Short blocks repeat their last column.
        single = (rows.masked == rows.read).all(1) & self.free[number, column]
        found = single & self.find(number, column, ids)
        missing = (~found).nonzero()[:, 0]

        def noting(logits: Tensor, n: Tensor, shown: Tensor) -> Tensor:
            n = missing[n]
            kept = single[n].nonzero()[:, 0]
            if len(kept):
                self.write(number[n[kept]], column[n[kept]], ids[n[kept]], logits[kept, 0])
            return reduce(logits, n, shown)

        results, order = [], []
        if len(missing):
            results.append(self.runner(sequences, rows.some(missing), noting))
            order.append(missing)
        if len(missing) < len(found):
            hits = found.nonzero()[:, 0]
            source = rows.source[hits].cpu()
            for group in sequences.of_one_length(source):
                for on_cpu in group.split(_BATCH):
                    n = hits[on_cpu.to(hits.device)]
                    shown = rows.some(n).shown(sequences, source[on_cpu], self.mask_id)
                    results.append(reduce(self.read(number[n], column[n])[:, None], n, shown))
                    order.append(n)
        return in_order(results, order)

    def turn_to(self, number: Tensor, ids: Tensor) -> None:
        """Sequences `number` (n,), each once, are given as `ids` (n, T): at the state they were at or, maybe, tried."""
        here = self.present[number]
        same = self.ids[:, number] == ids
        turned = (same[1 - here, torch.arange(len(here), device=here.device)].all(1)).nonzero()[:, 0]
        turned = turned[~same[here[turned], turned].all(1)]
        if not len(turned):
            return
        number, ids, old = number[turned], ids[turned], here[turned]
        # Rows of the other state may hold here, too.
        which, column = (self._holding(old, number, ids) & ~self._holding(1 - old, number, ids)).nonzero(as_tuple=True)
        at, slot, old_at = number[which], self.slot[number[which], column], old[which]
        self.logits[1 - old_at, at, slot] = self.logits[old_at, at, slot]
        self.known[1 - old_at, at, slot] = True
        self.present[number] = 1 - old

    def find(self, number: Tensor, column: Tensor, ids: Tensor) -> Tensor:
        """(n,) bool: whether the row of sequence `number[n]`, `ids[n]` (n, T) with `column[n]` masked, is there.

        Only what the sequence's present state has is found. Here and below `column` (n,) is a free position.
        """
        here = self.present[number]
        same = self.ids[here, number] == ids
        same.scatter_(1, column[:, None], True)
        return same.all(1) & self.known[here, number, self.slot[number, column]]

    def read(self, number: Tensor, column: Tensor) -> Tensor:
        """(n, V) logits of rows that were found."""
        return self.logits[self.present[number], number, self.slot[number, column]]

    def write(self, number: Tensor, column: Tensor, ids: Tensor, logits: Tensor) -> None:
        """Notes logits (n, V) of rows that were run. In one call a sequence has one `ids`, and a row stands once."""
        here = self.present[number]
        state = torch.where((self.ids[here, number] == ids).all(1), here, 1 - here)
        holding = self._holding(state, number, ids)
        self.ids[state, number], self.known[state, number] = ids, False
        which, held = holding.nonzero(as_tuple=True)
        self.known[state[which], number[which], self.slot[number[which], held]] = True
        slot = self.slot[number, column]
        self.known[state, number, slot] = True
        self.logits[state, number, slot] = logits

    def _holding(self, state: Tensor, number: Tensor, ids: Tensor) -> Tensor:
        """(n, T) bool: the columns whose rows are known and hold for `ids`: no token differs but the one masked."""
        changed = self.ids[state, number] != ids
        known = self.known[state, number].gather(1, self.slot[number].clamp_min(0)) & self.free[number]
        return known & (changed.sum(1, keepdim=True) == changed.long())
