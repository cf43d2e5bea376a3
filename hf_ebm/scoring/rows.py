"""Masked rows: the unit of work of every energy and proposal.

A row is one copy of one sequence with some positions masked and some positions read. Rows of all sequences form one
pool, which a runner runs: a model's (`masked_batches`), or one that knows some of the logits (`logits_cache`).

Sequences and rows lie on the model's device, where gradients are wanted, or on the host, as those of chains do. Results
come back to where the sequences are. To the host that is one copy for each pool, and the only time it waits.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hf_ebm.renamed import warn_of_rename

# Numbers of rows (n,), or a slice of all.
Index = Tensor | slice
# `(logits (n, P, V), which rows) -> tensor (n, …)`, see `Runner.__call__`.
Reducer = Callable[[Tensor, Index], Tensor]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Values on a device, without waiting for what it is doing.

    Example:
        >>> to_device(torch.tensor([1, 2]), torch.device("cpu"))
        tensor([1, 2])
    """
    return values.to(device, non_blocking=values.device.type == "cpu")


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences to make rows of.

    Attributes:
        ids: (B, T) token ids. Only columns `start[b]` to `stop[b]` of a row are ever shown to the model.
        start, stop: (B,) bounds of each sequence, on the CPU.
        context: what the model reads beside the tokens, or `None`.
        numbers: (B,) what errors call the sequences; by default their rows.
    """

    ids: Tensor
    start: Tensor
    stop: Tensor
    context: Context | None = None
    numbers: Tensor | None = None

    def with_ids(self, ids: Tensor) -> Sequences:
        """Other tokens (B, T) within the same bounds, of which nothing is found out anew."""
        _ = self.lengths, self.common_start, self.kinds
        other = object.__new__(Sequences)
        other.__dict__.update(self.__dict__, ids=ids)
        return other

    @cached_property
    def lengths(self) -> NDArray:
        """(B,) how many columns of each are shown."""
        return (self.stop - self.start).numpy()

    @cached_property
    def common_start(self) -> int | None:
        """Where all sequences start, or `None` where some start elsewhere."""
        start = self.start.numpy()
        return int(start[0]) if (start == start[0]).all() else None

    @cached_property
    def kinds(self) -> NDArray | None:
        """(B, …) lengths of sequences and of their contexts, or `None` where all have the same."""
        lengths = self.lengths[:, None]
        if self.context is not None and self.context.lengths is not None:
            lengths = np.concatenate([lengths, self.context.lengths.numpy()[:, None]], 1)
        return None if (lengths == lengths[0]).all() else lengths

    def attended(self, source: NDArray, values: Tensor) -> Tensor:
        """The columns that the model is shown (n, L, …) of `values` (n, T, …).

        Args:
            source: (n,) which sequences the values are of, all of one length.
        """
        length, start = int(self.lengths[source[0]]), self.common_start
        if start is not None:
            return values if length == values.shape[1] else values[:, start : start + length]
        shift = to_device(self.start[torch.from_numpy(source)], values.device)[:, None]
        index = shift + torch.arange(length, device=values.device)
        return values[torch.arange(len(values), device=values.device)[:, None], index]

    def columns_shown(self, source: NDArray, columns: Tensor) -> Tensor:
        """Columns (n, P) of sequences `source`, as `attended` shows them."""
        start = self.common_start
        if start is not None:
            return columns - start if start else columns
        return columns - to_device(self.start[torch.from_numpy(source)], columns.device)[:, None]

    def of_one_length(self, source: NDArray) -> list[NDArray]:
        """Row numbers grouped so that the rows of a group have one length, and contexts of one length.

        Args:
            source: (N,) the sequence of each row, as the numbers on the CPU.
        """
        if self.kinds is None:
            return [np.arange(len(source))]
        by_length: dict[tuple, list[int]] = defaultdict(list)
        for number, key in enumerate(map(tuple, self.kinds[source].tolist())):
            by_length[key].append(number)
        return [np.array(by_length[key]) for key in sorted(by_length)]


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
        own = self._each(lambda value: value[to_device(which, value.device)])
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

    def some(self, numbers: Index) -> MaskedRows:
        """Those of some numbers."""
        return MaskedRows(*(part[numbers] for part in self))

    def shown(self, sequences: Sequences, source: NDArray, mask_token_id: int) -> Tensor:
        """What the model is shown of rows of one length (n, L); `source` on the CPU, too."""
        ids = sequences.ids.index_select(0, self.source)
        if self.masked.shape[1]:
            ids = ids.scatter(1, self.masked, mask_token_id)
        return sequences.attended(source, ids)


class Runner(ABC):
    """What runs pools of masked rows.

    Attributes:
        num_rows: how many masked rows have been run through the model so far.
        mask_id: the mask token's id. Raises `ValueError` where there is none.
        dtype: of the logits as the model returned them last.
    """

    num_rows: int
    dtype: torch.dtype | None

    @property
    def num_asked(self) -> int:
        """How many rows results were asked of so far: also of those that were kept from before and not run again."""
        return self.num_rows

    @property
    @abstractmethod
    def mask_id(self) -> int: ...

    @abstractmethod
    def parts(self, sequences: Sequences, rows: MaskedRows, reduce: Reducer) -> tuple[list[Tensor], list[NDArray]]:
        """Results of some rows each, where the logits are, and the numbers of these rows."""

    def __call__(self, sequences: Sequences, rows: MaskedRows, reduce: Reducer) -> Tensor:
        """Runs every row and returns `reduce`'s results in the order of the rows, where the sequences are.

        Args:
            reduce: `(logits (n, P, V) in float32 or float64, which rows) -> tensor (n, …)`, where the logits are; which
                rows is an index, where the sequences are. Called for some rows at a time, so that logits of all are
                never held at once.

        Raises:
            BadLogitsError: for logits that are NaN or infinite, naming the sequence and the position.
        """
        shape: tuple[int, ...] = ()

        def with_extremes(logits: Tensor, n: Index) -> Tensor:
            nonlocal shape
            found = reduce(logits, n)
            shape = found.shape[1:]
            return torch.cat([found.reshape(len(found), -1), *torch.aminmax(logits.detach(), dim=-1)], 1)

        found = in_order(*self.parts(sequences, rows, with_extremes), sequences.ids.device)
        width = found.shape[1] - 2 * rows.read.shape[1]
        results, extremes = found[:, :width], found[:, width:].detach()
        if not math.isfinite(float(extremes.sum())):
            bad = (~extremes.unflatten(1, (2, -1)).isfinite().all(1)).nonzero()
            if len(bad):
                row, place = bad[0].tolist()
                source = rows.source[row]
                number = source if sequences.numbers is None else sequences.numbers[source]
                raise BadLogitsError(int(number), int(rows.read[row, place]))
        return results.reshape(-1, *shape)


def in_order(results: list[Tensor], numbers: Sequence[ArrayLike], device: torch.device) -> Tensor:
    """Results of some rows each as one tensor on a device, in the order of the rows' numbers, which are 0 to N - 1.

    Example:
        >>> parts = [torch.tensor([5.0, 7.0]), torch.tensor([6.0])]
        >>> in_order(parts, [torch.tensor([0, 2]), torch.tensor([1])], torch.device("cpu"))
        tensor([5., 6., 7.])
    """
    if len(results) == 1:  # numbers of one length ascend
        return results[0].to(device)
    order, found = np.concatenate(numbers), torch.cat(results).to(device)
    if (order[1:] > order[:-1]).all():
        return found
    return found[to_device(torch.from_numpy(order.argsort()), device)]


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
