"""Masked rows: the unit of work of every energy and proposal.

A row is one copy of one sequence with some positions masked and some positions read. Rows of all sequences form one
pool, which a runner runs: a model's (`masked_batches`), or one that knows some of the logits (`logits_cache`).
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hf_ebm.renamed import warn_of_rename

# `(logits (n, P, V), row numbers (n,), ids (n, L) as masked) -> tensor (n, …)`, see `Runner.__call__`.
Reducer = Callable[[Tensor, Tensor, Tensor], Tensor]


class Sequences(NamedTuple):
    """Sequences to make rows of.

    Attributes:
        ids: (B, T) token ids. Only columns `start[b]` to `stop[b]` of a row are ever shown to the model.
        start, stop: (B,) bounds of each sequence, on the CPU.
        context: what the model reads beside the tokens, or `None`.
        numbers: (B,) what tells the sequences apart over several pools, and what errors call them; by default a
            sequence's row, in this pool alone.
    """

    ids: Tensor
    start: Tensor
    stop: Tensor
    context: Context | None = None
    numbers: Tensor | None = None

    def attended(self, source: Tensor, values: Tensor) -> Tensor:
        """The columns that the model is shown (n, L, …) of `values` (n, T, …).

        Args:
            source: (n,) which sequences the values are of, all of one length, on the CPU.
        """
        start = self.start[source]
        length = int(self.stop[source[0]] - start[0])
        if bool((start == start[0]).all()):
            return values[:, int(start[0]) : int(start[0]) + length]
        columns = start.to(values.device)[:, None] + torch.arange(length, device=values.device)
        return values[torch.arange(len(values), device=values.device)[:, None], columns]

    def of_one_length(self, source: Tensor) -> list[Tensor]:
        """Row numbers grouped so that the rows of a group have one length, and contexts of one length.

        Args:
            source: (N,) the sequence of each row, as the numbers on the CPU.
        """
        length = (self.stop - self.start)[source]
        if self.context is not None and self.context.lengths is not None:
            length = torch.stack([length, self.context.lengths[source]], 1)
        else:
            length = length[:, None]
        if bool((length == length[0]).all()):
            return [torch.arange(len(source))]
        by_length: dict[tuple, list[int]] = defaultdict(list)
        for number, key in enumerate(map(tuple, length.tolist())):
            by_length[key].append(number)
        return [torch.tensor(by_length[key]) for key in sorted(by_length)]


class BadLogitsError(ValueError):
    """The model returned NaN or infinite logits, for sequence `row` at column `position`."""

    def __init__(self, row: int, position: int, name: str = "row"):
        super().__init__(f"the model returned NaN or infinite logits for {name} {row}, position {position}")
        self.row, self.position = row, position


class Context(NamedTuple):
    """What a model reads of B sequences beside their tokens.

    Attributes:
        by_token: inputs (B, T, …), a value for each token: languages, segments, boxes.
        by_sequence: inputs (B, …): languages of whole sequences, entities.
        states: (B, S, d) encoder states that an encoder-decoder model conditions on.
        lengths: (B,) their lengths, on the CPU.
    """

    by_token: dict[str, Tensor]
    by_sequence: dict[str, Tensor]
    states: Tensor | None = None
    lengths: Tensor | None = None

    def rows(self, which: Tensor, on_cpu: Tensor) -> Context:
        """That of the sequences `which` (n,), given on the device and on the CPU."""
        own = self._each(lambda value: value[which])
        return own._replace(lengths=None if self.lengths is None else self.lengths[on_cpu])

    def expanded(self, count: int) -> Context:
        """That of one sequence for `count`, without copies."""
        own = self._each(lambda value: value.expand(count, *value.shape[1:]))
        return own._replace(lengths=None if self.lengths is None else self.lengths.expand(count))

    def to(self, device: torch.device) -> Context:
        """On a device, but for the lengths."""
        return self._each(lambda value: value.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Context:
        """Every tensor on the device changed."""
        by_token = {name: change(value) for name, value in self.by_token.items()}
        by_sequence = {name: change(value) for name, value in self.by_sequence.items()}
        return Context(by_token, by_sequence, None if self.states is None else change(self.states), self.lengths)


class MaskedRows(NamedTuple):
    """Rows to run: row n is sequence `source[n]` with `masked[n]` masked, read at `read[n]`.

    Attributes:
        source: (N,) indices into the sequences.
        masked: (N, M) columns that are replaced by the mask token; M may be 0, repeats are allowed.
        read: (N, P) columns at which logits are wanted; repeats are allowed.
    """

    source: Tensor
    masked: Tensor
    read: Tensor

    def some(self, numbers: Tensor) -> MaskedRows:
        """Those of some numbers."""
        return MaskedRows(*(part[numbers] for part in self))

    def shown(self, sequences: Sequences, source: Tensor, mask_token_id: int) -> Tensor:
        """What the model is shown of rows of one length (n, L); `source` on the CPU, too."""
        ids = sequences.ids[self.source]
        if self.masked.shape[1]:
            ids = ids.scatter(1, self.masked, mask_token_id)
        return sequences.attended(source, ids)


class Runner(Protocol):
    """What runs pools of masked rows."""

    @property
    def num_rows(self) -> int:
        """How many masked rows have been run through the model so far."""

    @property
    def mask_id(self) -> int:
        """The mask token's id. Raises `ValueError` where there is none."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the logits as the model returned them last."""

    def __call__(self, sequences: Sequences, rows: MaskedRows, reduce: Reducer) -> Tensor:
        """Runs every row and returns `reduce`'s results in the order of the rows.

        Args:
            reduce: `(logits (n, P, V) in float32 or float64, row numbers (n,), ids (n, L) as masked) -> tensor (n, …)`.
                Called for some rows at a time, so that logits of all are never held at once.

        Raises:
            BadLogitsError: for logits that are NaN or infinite, naming the sequence and the position.
        """


def in_order(results: list[Tensor], numbers: list[Tensor]) -> Tensor:
    """Results of some rows each as one tensor in the order of the rows' numbers, which are 0 to N - 1.

    Example:
        >>> in_order([torch.tensor([5.0, 7.0]), torch.tensor([6.0])], [torch.tensor([0, 2]), torch.tensor([1])])
        tensor([5., 6., 7.])
    """
    if len(results) == 1 and bool((numbers[0][1:] > numbers[0][:-1]).all()):
        return results[0]
    return torch.cat(results)[torch.cat(numbers).argsort().to(results[0].device)]


def attended_mask(start: Tensor, stop: Tensor, columns: int) -> Tensor:
    """(B, T) bool: columns from `start` (B,) to before `stop` (B,).

    Example:
        >>> attended_mask(torch.tensor([0, 1]), torch.tensor([2, 3]), 4).int()
        tensor([[1, 1, 0, 0],
                [0, 1, 1, 0]], dtype=torch.int32)
    """
    column = torch.arange(columns, device=start.device)
    return (column >= start[:, None]) & (column < stop[:, None])


def attended_spans(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """`(start, stop)`, each (B,) on the CPU, of the attended columns of `attention_mask` (B, T).

    Raises `ValueError` for a row with no attended column or with a hole between attended ones.

    Example:
        >>> attended_spans(torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]]))
        (tensor([0, 1]), tensor([2, 4]))
    """
    mask = attention_mask.bool().cpu()
    count = mask.sum(1)
    start = mask.long().argmax(1)
    stop = start + count
    solid = attended_mask(start, stop, mask.shape[1])
    for row in range(len(mask)):
        if count[row] == 0:
            raise ValueError(f"attention_mask: row {row} attends to no position")
        if not torch.equal(solid[row], mask[row]):
            raise ValueError(f"attention_mask: row {row} has a hole; padding is allowed only before and after the text")
    return start, stop


def __getattr__(name: str) -> object:
    if name != "RowRunner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = "hf_ebm.scoring.masked_batches"
    warn_of_rename(f"{__name__}.{name}", f"{new}.MaskedBatchRunner")
    return importlib.import_module(new).MaskedBatchRunner
