"""Logits of masked rows that will be read again, and rows that are alike: runners around a runner.

A chain evaluates the energy of its sequence by masking every position alone; a proposal for a single position reads the
very same row, and so does the way back of a sequentially filled block's last position. So logits of rows with a single
position, masked and read, are kept for two states of each sequence: the one it is at, and the last one that was tried.
Nobody says which of them was accepted: a sequence is at the state it was last given as. A row is found only if all
tokens but the masked one are those it was run with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_ebm.runtime import device_memory
from hf_ebm.scoring.rows import Index, MaskedRows, Reducer, Runner, Sequences, attended_mask, to_device

_MOST_BYTES_ON_CPU = 2**29
# Rows whose logits are given on at a time: so many, or more of a small vocabulary.
_BATCH, _NUMBERS_AT_ONCE = 256, 2**24


class _Compared(NamedTuple):
    """B sequences compared with both of their states, (2, B, …).

    Attributes:
        ids: (B, T) the sequences.
        changed: (2, B, T) bool, columns that differ.
        differs: (2, B) bool, whether any does.
        holding: (2, B, T) bool, columns whose row would be the same: no token differs but the one masked.
    """

    ids: NDArray
    changed: NDArray
    differs: NDArray
    holding: NDArray


class SparingRunner(Runner):
    """Runs rows through another runner, and not all that it is asked for.

    Args:
        runner: runs the others.
    """

    def __init__(self, runner: Runner):
        self.runner, self.asked = runner, 0

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        return self.runner.num_rows

    @property
    def num_asked(self) -> int:
        return self.asked

    @property
    def mask_id(self) -> int:
        return self.runner.mask_id

    @property
    def dtype(self) -> torch.dtype | None:  # type: ignore[override]
        return self.runner.dtype


class MaskedLogitsCache(SparingRunner):
    """Runs masked rows through a runner, but for those whose logits it has.

    Every pool is of the same B sequences, on the host, where all is but these logits.

    Args:
        runner: runs the other rows.
        free: (B, T) bool, the positions whose rows are kept.
        vocab_size: V.
        like: an empty tensor of the logits' dtype, float32 or float64, where they lie.
    """

    def __init__(self, runner: Runner, free: Tensor, vocab_size: int, like: Tensor):
        super().__init__(runner)
        self.free = free.numpy()
        # Logits lie in slots, numbered along the free positions of a sequence, whatever is between them.
        self.slots = int(self.free.sum(1).max())
        self.slot = self.free.cumsum(1) - 1 + 2 * self.slots * np.arange(len(free))[:, None]
        self.ids = np.full((2, *free.shape), -1)
        self.known = np.zeros((2, *free.shape), dtype=bool)
        self.half = np.zeros((2, *free.shape), dtype=np.int64)  # which of a slot's two logits; states may share them
        self.present = np.zeros(len(free), dtype=np.int64)
        self.sequence = np.arange(len(free))
        self.logits = like.new_empty(2 * len(free) * self.slots, vocab_size)

    @classmethod
    def around(cls, runner: Runner, free: Tensor, vocab_size: int, like: Tensor) -> Runner:
        """The runner itself where logits would take more than half a GiB, or on a GPU an eighth of its free memory."""
        own = device_memory(like.device)
        most = _MOST_BYTES_ON_CPU if own is None else own.free // 8
        if 2 * len(free) * int(free.sum(1).max()) * vocab_size * like.dtype.itemsize > most:
            return runner
        try:
            return cls(runner, free, vocab_size, like)
        except torch.OutOfMemoryError:
            return runner

    def parts(self, sequences: Sequences, rows: MaskedRows, reduce: Reducer) -> tuple[list[Tensor], list[NDArray]]:
        """Rows of single free positions are run as far as they are missing, then all of them are read."""
        ids, source, column = sequences.ids.numpy(), rows.source.numpy(), rows.read.numpy()[:, 0]
        self.asked += len(source)
        compared = self.compared(ids)
        self.turn_to(compared, source)
        if rows.read.shape[1] != 1 or not rows.masked.shape[1]:
            return self.runner.parts(sequences, rows, reduce)
        # Short blocks repeat their last column.
        kept = (rows.masked.numpy() == column[:, None]).all(1) & self.free[source, column]
        if not kept.any():
            return self.runner.parts(sequences, rows, reduce)
        found = kept & self.find(compared, source, column)
        missing, results, order = (~found).nonzero()[0], list[Tensor](), list[NDArray]()
        state = self.present[source]
        if len(missing):
            state[missing] = self.begin(compared, source[missing[kept[missing]]])[source[missing]]

        def noting(logits: Tensor, n: Index) -> Tensor:
            at = missing if isinstance(n, slice) else missing[n.numpy()]
            which = kept[at]
            if which.all():
                self.write(state[at], source[at], column[at], logits[:, 0])
            else:
                own, others = (torch.from_numpy(part.nonzero()[0]) for part in (which, ~which))
                mine = at[which]
                self.write(state[mine], source[mine], column[mine], logits[to_device(own, logits.device), 0])
                order.append(at[~which])
                results.append(reduce(logits[to_device(others, logits.device)], torch.from_numpy(order[-1])))
            return logits[:, 0, :0]

        if len(missing):
            some = rows if len(missing) == len(found) else rows.some(torch.from_numpy(missing))
            self.runner.parts(sequences, some, noting)
        numbers, most = kept.nonzero()[0], max(_BATCH, _NUMBERS_AT_ONCE // self.logits.shape[1])
        for group in sequences.of_one_length(source[numbers]):
            for first in range(0, len(group), most):
                at = numbers[group[first : first + most]]
                n = slice(None) if len(at) == len(kept) else torch.from_numpy(at)
                results.append(reduce(self.read(state[at], source[at], column[at])[:, None], n))
                order.append(at)
        return results, order

    def compared(self, ids: NDArray) -> _Compared:
        """Sequences (B, T) compared with both of their states."""
        changed = self.ids != ids
        count = changed.sum(2, keepdims=True)
        return _Compared(ids, changed, count[..., 0] > 0, count == changed)

    def turn_to(self, compared: _Compared, source: NDArray) -> None:
        """Some sequences, `source`, are given: at the state they were at or, maybe, tried."""
        other, differs = 1 - self.present, compared.differs
        turned = differs[self.present, self.sequence] & ~differs[other, self.sequence]
        if not turned.any():
            return
        given = np.zeros(len(turned), dtype=bool)
        given[source] = True
        b = (turned & given).nonzero()[0]
        # Rows of the other state may hold here, too.
        old, new = self.present[b], other[b]
        holding = self.known[:, b] & compared.holding[:, b]
        which = np.arange(len(b))
        more = holding[old, which] & ~holding[new, which]
        self.half[new, b] = np.where(more, self.half[old, b], self.half[new, b])
        self.known[new, b] |= more
        self.present[b] = new

    def find(self, compared: _Compared, source: NDArray, column: NDArray) -> NDArray:
        """(N,) bool: whether the rows of sequences `source` with `column` masked are there.

        Only what a sequence's present state has is found.
        """
        where = self.present[source], source, column
        return self.known[where] & compared.holding[where]

    def begin(self, compared: _Compared, source: NDArray) -> NDArray:
        """Rows of sequences `source` will be written.

        Returns:
            (B,) the state that a sequence is, or is from now on: the present one if it is as that, else the other.
        """
        state = self.present ^ compared.differs[self.present, self.sequence]
        b = source[state[source] != self.present[source]]  # the others are as they were
        self.known[state[b], b] &= compared.holding[state[b], b]
        self.ids[state[b], b] = compared.ids[b]
        return state

    def read(self, state: NDArray, source: NDArray, column: NDArray) -> Tensor:
        """(N, V) logits of rows."""
        return self.logits.index_select(0, self._places(state, source, column))

    def write(self, state: NDArray, source: NDArray, column: NDArray, logits: Tensor) -> None:
        """Notes logits (N, V) of rows that were run, each once, of sequences that have been begun."""
        half = self.half[:, source, column]
        self.half[state, source, column] ^= self.known[1 - state, source, column] & (half[0] == half[1])
        self.known[state, source, column] = True
        self.logits.index_copy_(0, self._places(state, source, column), logits)

    def _places(self, state: NDArray, source: NDArray, column: NDArray) -> Tensor:
        """Where logits lie."""
        place = self.half[state, source, column] * self.slots + self.slot[source, column]
        return to_device(torch.from_numpy(place), self.logits.device)


class EachRowOnce(SparingRunner):
    """Runs rows of a pool that are alike once: particles of one prompt begin with the same one.

    Alike are rows whose tokens, masks and read columns are the same, of sequences on the host that have no context.

    Args:
        runner: runs one of each.
    """

    def parts(self, sequences: Sequences, rows: MaskedRows, reduce: Reducer) -> tuple[list[Tensor], list[NDArray]]:
        """One of each is run, and its logits are given on for all that are like it."""
        self.asked += len(rows.source)
        first, like = self.alike(sequences, rows)
        if len(first) == len(like):
            return self.runner.parts(sequences, rows, reduce)
        results, order = list[Tensor](), list[NDArray]()

        def shared(logits: Tensor, n: Index) -> Tensor:
            place = np.full(len(first), -1)
            place[slice(None) if isinstance(n, slice) else n.numpy()] = np.arange(len(logits))
            numbers = (place[like] >= 0).nonzero()[0]
            most = max(_BATCH, _NUMBERS_AT_ONCE // logits[0].numel())
            for at in np.split(numbers, range(most, len(numbers), most)):
                own = to_device(torch.from_numpy(place[like[at]]), logits.device)
                results.append(reduce(logits.index_select(0, own), torch.from_numpy(at)))
                order.append(at)
            return logits[:, 0, :0]

        self.runner.parts(sequences, rows.some(torch.from_numpy(first)), shared)
        return results, order

    def alike(self, sequences: Sequences, rows: MaskedRows) -> tuple[NDArray, NDArray]:
        """The first (n,) of each kind of rows, in order, and of which of these each row (N,) is."""
        if sequences.context is not None:
            numbers = np.arange(len(rows.source))
            return numbers, numbers
        attended = attended_mask(sequences.start, sequences.stop, sequences.ids.shape[1])
        shown = sequences.ids.masked_fill(~attended, -1).index_select(0, rows.source)
        shown = shown.scatter(1, rows.masked, self.mask_id)
        keys = torch.cat([shown, rows.read], 1).numpy()
        kinds = keys.view(f"V{keys.dtype.itemsize * keys.shape[1]}")[:, 0]
        _, first, kind = np.unique(kinds, return_index=True, return_inverse=True)
        return np.sort(first), first.argsort().argsort()[kind]
