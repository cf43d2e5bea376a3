"""Logits of masked rows that will be read again: a runner around a runner.

A chain evaluates the energy of its sequence by masking every position alone; a proposal for a single position reads the
very same row, and so does the way back of a sequentially filled block's last position. So logits of rows with a single
position, masked and read, are kept for two states of each sequence: the one it is at, and the last one that was tried.
Nobody says which of them was accepted: a sequence is at the state it was last given as. A row is found only if all
tokens but the masked one are those it was run with.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_ebm.scoring.rows import Index, MaskedRows, Reducer, Runner, Sequences, to_device

_MOST_BYTES_ON_CPU = 2**29
# Rows whose logits are given on at a time: so many, or more of a small vocabulary.
_BATCH, _NUMBERS_AT_ONCE = 256, 2**24


class MaskedLogitsCache(Runner):
    """Runs masked rows through a runner, but for those whose logits it has.

    Every pool is of the same B sequences, on the host, where all is but these logits.

    Args:
        runner: runs the other rows.
        free: (B, T) bool, the positions whose rows are kept.
        vocab_size: V.
        like: an empty tensor of the logits' dtype, float32 or float64, where they lie.
    """

    def __init__(self, runner: Runner, free: Tensor, vocab_size: int, like: Tensor):
        self.runner, self.free = runner, free.numpy()
        # Logits lie in slots, numbered along the free positions of a sequence, whatever is between them.
        self.slot = self.free.cumsum(1) - 1
        self.slots = int(self.free.sum(1).max())
        self.ids = np.full((2, *free.shape), -1)
        self.known = np.zeros((2, *free.shape), dtype=bool)
        self.half = np.zeros((2, *free.shape), dtype=np.int64)  # which of a slot's two logits; states may share them
        self.present = np.zeros(len(free), dtype=np.int64)
        self.logits = like.new_empty(2 * len(free) * self.slots, vocab_size)

    @classmethod
    def around(cls, runner: Runner, free: Tensor, vocab_size: int, like: Tensor) -> Runner:
        """The runner itself where logits would take more than half a GiB, or on a GPU an eighth of its free memory."""
        most = torch.cuda.mem_get_info(like.device)[0] // 8 if like.is_cuda else _MOST_BYTES_ON_CPU
        if 2 * len(free) * int(free.sum(1).max()) * vocab_size * like.dtype.itemsize > most:
            return runner
        try:
            return cls(runner, free, vocab_size, like)
        except torch.OutOfMemoryError:
            return runner

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        return self.runner.num_rows

    @property
    def mask_id(self) -> int:
        return self.runner.mask_id

    @property
    def dtype(self) -> torch.dtype | None:  # type: ignore[override]
        return self.runner.dtype

    def parts(self, sequences: Sequences, rows: MaskedRows, reduce: Reducer) -> tuple[list[Tensor], list[Tensor]]:
        """Rows of single free positions are run as far as they are missing, then all of them are read."""
        ids, source, column = sequences.ids.numpy(), rows.source.numpy(), rows.read.numpy()[:, 0]
        self.turn_to(ids, source)
        if rows.read.shape[1] != 1 or not rows.masked.shape[1]:
            return self.runner.parts(sequences, rows, reduce)
        # Short blocks repeat their last column.
        kept = (rows.masked.numpy() == column[:, None]).all(1) & self.free[source, column]
        if not kept.any():
            return self.runner.parts(sequences, rows, reduce)
        found = kept & self.find(ids, source, column)
        tried = self.begin(ids, source[kept & ~found])
        state = np.where(found, self.present[source], tried[source])
        missing, results, order = torch.from_numpy((~found).nonzero()[0]), list[Tensor](), list[Tensor]()

        def noting(logits: Tensor, n: Index) -> Tensor:
            at = missing[n].numpy()
            own, others = kept[at].nonzero()[0], torch.from_numpy((~kept[at]).nonzero()[0])
            if len(own):
                values = logits if len(own) == len(at) else logits[to_device(torch.from_numpy(own), logits.device)]
                self.write(state[at[own]], source[at[own]], column[at[own]], values[:, 0])
            if len(others):
                order.append(missing[n][others])
                results.append(reduce(logits[to_device(others, logits.device)], order[-1]))
            return logits[:, 0, :0]

        if len(missing):
            self.runner.parts(sequences, rows if len(missing) == len(found) else rows.some(missing), noting)
        numbers = torch.from_numpy(kept.nonzero()[0])
        for group in sequences.of_one_length(rows.source[numbers]):
            for some in numbers[group].split(max(_BATCH, _NUMBERS_AT_ONCE // self.logits.shape[1])):
                at = some.numpy()
                n = slice(None) if len(some) == len(kept) else some
                results.append(reduce(self.read(state[at], source[at], column[at])[:, None], n))
                order.append(some)
        return results, order

    def turn_to(self, ids: NDArray, source: NDArray) -> None:
        """Some sequences, `source`, are given as `ids` (B, T): at the state they were at or, maybe, tried."""
        given = np.zeros(len(ids), dtype=bool)
        given[source] = True
        turned = given & self._changed(self.present, ids).any(1) & ~self._changed(1 - self.present, ids).any(1)
        if not turned.any():
            return
        # Rows of the other state may hold here, too.
        old = self.present
        b, column = ((self._holding(old, ids) & ~self._holding(1 - old, ids)) & turned[:, None]).nonzero()
        self.half[1 - old[b], b, column] = self.half[old[b], b, column]
        self.known[1 - old[b], b, column] = True
        self.present = np.where(turned, 1 - old, old)

    def find(self, ids: NDArray, source: NDArray, column: NDArray) -> NDArray:
        """(N,) bool: whether the rows of sequences `source`, among `ids` (B, T), with `column` masked are there.

        Only what a sequence's present state has is found.
        """
        return self._holding(self.present, ids)[source, column]

    def begin(self, ids: NDArray, source: NDArray) -> NDArray:
        """Rows of sequences `source` at `ids` (B, T) will be written.

        Returns:
            (B,) the state that a sequence is, or is from now on: the present one if `ids` are its, else the other.
        """
        b = np.unique(source)
        state = self.present ^ self._changed(self.present, ids).any(1)
        self.known[state[b], b] = self._holding(state, ids)[b]
        self.ids[state[b], b] = ids[b]
        return state

    def read(self, state: NDArray, source: NDArray, column: NDArray) -> Tensor:
        """(N, V) logits of rows."""
        return self.logits[self._places(state, source, column)]

    def write(self, state: NDArray, source: NDArray, column: NDArray, logits: Tensor) -> None:
        """Notes logits (N, V) of rows that were run, each once, of sequences that have been begun."""
        shared = self.known[1 - state, source, column] & (self.half[0, source, column] == self.half[1, source, column])
        self.half[state, source, column] ^= shared
        self.known[state, source, column] = True
        self.logits[self._places(state, source, column)] = logits

    def _places(self, state: NDArray, source: NDArray, column: NDArray) -> Tensor:
        """Where logits lie."""
        place = (2 * source + self.half[state, source, column]) * self.slots + self.slot[source, column]
        return to_device(torch.from_numpy(place), self.logits.device)

    def _changed(self, state: NDArray, ids: NDArray) -> NDArray:
        """(B, T) bool: where `ids` differs from the states (B,)."""
        return np.where(state[:, None], self.ids[1], self.ids[0]) != ids

    def _holding(self, state: NDArray, ids: NDArray) -> NDArray:
        """(B, T) bool: the columns whose rows are known and hold for `ids`: no token differs but the one masked."""
        changed = self._changed(state, ids)
        return np.where(state[:, None], self.known[1], self.known[0]) & (changed.sum(1, keepdims=True) == changed)
