"""Masked rows: the unit of work of every energy and proposal, and the packer that runs pools of them.

A row is one copy of one sequence with some positions masked and some positions read. Rows of all sequences form one
pool; rows of equal length pass through the encoder together, and several such passes through the head, under a token
budget. Rows are never padded, so no value can depend on what else is in the batch, and models that take no attention
mask work like the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from hf_ebm.memory import BYTES_PER_LOGIT
from hf_ebm.plain_values import as_whole
from hf_ebm.scoring.head import Pass
from hf_ebm.scoring.logits_cache import RowMemory

logger = logging.get_logger(__name__)

# What a token in flight is taken to weigh in memory.
_BYTES_PER_TOKEN = 65_536

# A token whose gradient is wanted: every layer keeps something of it for the way back.
_BYTES_PER_TOKEN_WITH_GRADIENT = 1_048_576

# Rows from which on a head takes as long as its products, and not as its weights take to read: no more passes are
# held back for it.
_ENOUGH_FOR_A_HEAD = 256


# `(logits (n, P, V), row numbers (n,), ids (n, L) as masked) -> tensor (n, …)`, see `RowRunner.__call__`.
Reducer = Callable[[Tensor, Tensor, Tensor], Tensor]


class Sequences(NamedTuple):
    """Sequences to make rows of.

    Attributes:
        ids: (B, T) token ids. Only columns `start[b]` to `stop[b]` of a row are ever shown to the model.
        start, stop: (B,) bounds of each sequence, on the CPU.
        context: what the model reads beside the tokens, or `None`.
        numbers: (B,) what a sequence is called in errors and in `memory`; by default its row.
        memory: where rows with a single position, masked and read, are looked up and noted, by `numbers`; no pool may
            then hold two sequences of one number.
    """

    ids: Tensor
    start: Tensor
    stop: Tensor
    context: Context | None = None
    numbers: Tensor | None = None
    memory: RowMemory | None = None


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


class _Piece(NamedTuple):
    """Rows of one length that pass through the encoder together.

    Attributes:
        numbers: (n,) which of the rows of the call they are.
        sequences: those of the call.
        rows: these rows.
        source: (n,) `rows.source` on the CPU.
        ids: (n, T) tokens before masking.
        shown: (n, L) what the model is shown.
    """

    numbers: Tensor
    sequences: Sequences
    rows: MaskedRows
    source: Tensor
    ids: Tensor
    shown: Tensor

    def names(self) -> Tensor:
        """What the sequence of each row is called, (n,)."""
        numbers = self.sequences.numbers
        return self.rows.source if numbers is None else numbers[self.rows.source]

    def part(self, which: Tensor) -> _Piece:
        """Some of the rows."""
        on_cpu = which.cpu()
        rows = MaskedRows(*(part[which] for part in self.rows))
        return _Piece(
            self.numbers[which], self.sequences, rows, self.source[on_cpu], self.ids[which], self.shown[which]
        )


class RowRunner:
    """Runs pools of masked rows through a model.

    Args:
        position_logits: `(ids (n, L), positions (n, P), **inputs) -> logits (n, P, V)`. If it has a method `together`,
            that takes a list of `Pass` and returns the logits of each.
        mask_token_id: the id written at masked positions.
        vocab_size: V, for the memory that logits take.
        token_budget: tokens per forward pass; `None` derives it from free memory at first use.
        prepare: turns a chunk's ids and the encoder states of its context into model inputs `(ids, inputs)`, for
            encoder-decoder models.

    Attributes:
        num_rows: how many masked rows this thread has run so far; those found in a memory don't count.
        dtype: of the logits as the model returned them last.
    """

    def __init__(
        self,
        position_logits: Callable[..., Tensor],
        mask_token_id: int | None,
        vocab_size: int,
        token_budget: int | None = None,
        prepare: Callable[[Tensor, Tensor | None], tuple[Tensor, dict]] | None = None,
    ):
        self.position_logits = position_logits
        self.mask_token_id = mask_token_id
        self.vocab_size = vocab_size
        self.token_budget = None if token_budget is None else as_whole("token_budget", token_budget, 1)
        self.prepare = prepare or (lambda ids, states: (ids, {}))
        self._default_budgets: dict[bool, int] = {}  # without and with gradient
        self._num_rows: dict[int, int] = defaultdict(int)  # by thread
        self.dtype: torch.dtype | None = None

    @property
    def num_rows(self) -> int:
        return self._num_rows[get_ident()]

    @property
    def known_mask_id(self) -> int:
        """The mask token's id. Raises `ValueError` where there is none."""
        if self.mask_token_id is None:
            raise ValueError("mask_token_id is not set, so nothing can be masked")
        return self.mask_token_id

    def __call__(self, sequences: Sequences, rows: MaskedRows, reduce: Reducer) -> Tensor:
        """Runs every row and returns `reduce`'s results in the order of the rows.

        Where gradients are wanted and the budget doesn't hold all rows at once, what it does hold is run again on the
        way back: the gradients are the same, and only one share of the rows has its activations in memory.

        Args:
            reduce: `(logits (n, P, V) in float32 or float64, row numbers (n,), ids (n, L) as masked) -> tensor (n, …)`.
                Called for some rows at a time, so that logits of all are never held at once.

        Raises:
            BadLogitsError: for logits that are NaN or infinite, naming the sequence and the position.
        """
        if len(rows.source) == 0:
            raise ValueError("rows: there is nothing to run")
        results: list[Tensor] = []
        order: list[Tensor] = []
        source = rows.source.cpu()  # once: every copy makes a GPU wait
        waiting = self._groups(sequences, source)
        while waiting:
            budget = self._budget(sequences.ids.device)
            passes, rest = self._next_passes(budget, sequences, rows, source, waiting)
            try:
                if torch.is_grad_enabled() and (order or rest):
                    results += checkpoint(self._run, sequences, rows, passes, source, reduce, use_reentrant=False)
                else:
                    results += self._run(sequences, rows, passes, source, reduce)
            except RuntimeError as error:
                if not _is_out_of_memory(error) or sum(map(len, passes)) == 1:
                    raise
            else:
                order += passes
                waiting = rest
                continue
            # Here, and not in the handler: there the traceback still holds the tensors of the passes.
            self.token_budget = max(1, min(budget, self._cost(sequences, rows, source, passes)) // 2)
            logger.warning(f"Out of memory: going on with a token budget of {self.token_budget}.")
            if sequences.ids.is_cuda:
                torch.cuda.empty_cache()
        stacked = torch.cat(results)
        if len(order) == 1 and torch.equal(order[0], torch.arange(len(rows.source))):
            return stacked
        return stacked[torch.cat(order).argsort().to(stacked.device)]

    def _groups(self, sequences: Sequences, source: Tensor) -> list[Tensor]:
        """Row numbers (on the CPU) grouped so that all rows of a group have the same length (and context length)."""
        length = (sequences.stop - sequences.start)[source]
        if sequences.context is not None and sequences.context.lengths is not None:
            length = torch.stack([length, sequences.context.lengths[source]], 1)
        else:
            length = length[:, None]
        if bool((length == length[0]).all()):
            return [torch.arange(len(source))]
        by_length: dict[tuple, list[int]] = defaultdict(list)
        for number, key in enumerate(map(tuple, length.tolist())):
            by_length[key].append(number)
        return [torch.tensor(by_length[key]) for key in sorted(by_length)]

    def _budget(self, device: torch.device) -> int:
        if self.token_budget is not None:
            return self.token_budget
        gradient = torch.is_grad_enabled()
        if gradient not in self._default_budgets:
            self._default_budgets[gradient] = default_token_budget(device, gradient)
        return self._default_budgets[gradient]

    def _next_passes(
        self, budget: int, sequences: Sequences, rows: MaskedRows, source: Tensor, waiting: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Row numbers of the passes whose logits are taken together next, and what is left of the groups."""
        passes: list[Tensor] = []
        rest = list(waiting)
        room, held = max(1, budget // self._logits_cost(rows)), 0
        gradient, left = torch.is_grad_enabled(), budget
        enough = room if gradient else _ENOUGH_FOR_A_HEAD
        if sequences.context is not None and sequences.context.states is not None:
            enough = 1  # passes that are held back hold their inputs, which is nothing but for these
        while rest and held < min(room, enough):
            length = _length(sequences, source, rest[0])
            if gradient and passes and length > left:
                break
            size = min(room - held, max(1, left // length), len(rest[0]))
            passes.append(rest[0][:size])
            rest[:1] = [rest[0][size:]] if size < len(rest[0]) else []
            held += size
            if gradient:  # all passes that are held back keep their activations
                left -= size * length
        return passes, rest

    def _cost(self, sequences: Sequences, rows: MaskedRows, source: Tensor, passes: list[Tensor]) -> int:
        """Tokens that passes whose logits are taken together count for: those of the largest, or of all logits."""
        longest = max(len(numbers) * _length(sequences, source, numbers) for numbers in passes)
        return max(longest, sum(map(len, passes)) * self._logits_cost(rows))

    def _logits_cost(self, rows: MaskedRows) -> int:
        """Tokens that weigh as much as a row's logits."""
        return max(1, math.ceil(rows.read.shape[1] * self.vocab_size * BYTES_PER_LOGIT / _BYTES_PER_TOKEN))

    def _run(
        self, sequences: Sequences, rows: MaskedRows, passes: list[Tensor], source: Tensor, reduce: Reducer
    ) -> list[Tensor]:
        """Results of some rows, by pass; `source` is that of all rows, on the CPU."""
        pieces = [self._piece(sequences, rows, numbers, source[numbers]) for numbers in passes]
        logits = self._logits(pieces)
        return [reduce(own, piece.numbers, piece.shown) for own, piece in zip(logits, pieces, strict=True)]

    def _piece(self, sequences: Sequences, rows: MaskedRows, numbers: Tensor, source: Tensor) -> _Piece:
        on_device = numbers.to(sequences.ids.device)
        some = MaskedRows(*(part[on_device] for part in rows))
        ids = sequences.ids[some.source]
        masked = ids.scatter(1, some.masked, self.known_mask_id) if some.masked.shape[1] else ids
        return _Piece(on_device, sequences, some, source, ids, _attended(sequences, source, masked))

    def _logits(self, pieces: list[_Piece]) -> list[Tensor]:
        """Logits (n, P, V) of each piece's rows, from the memory as far as they are in it."""
        memory, read, masked = pieces[0].sequences.memory, pieces[0].rows.read, pieces[0].rows.masked
        if memory is None or pieces[0].sequences.numbers is None or read.shape[1] != 1 or not masked.shape[1]:
            return self._forward(pieces)
        looked_up = [_Remembered.of(piece, memory) for piece in pieces]
        fresh = iter(self._forward([own.missing for own in looked_up if own.missing is not None]))
        return [own.logits(None if own.missing is None else next(fresh), memory) for own in looked_up]

    def _forward(self, pieces: list[_Piece]) -> list[Tensor]:
        if not pieces:
            return []
        passes = [self._pass(piece) for piece in pieces]
        together = getattr(self.position_logits, "together", None)
        if together is None:
            found = [self.position_logits(ids, positions, **inputs) for ids, positions, inputs in passes]
        else:
            found = together(passes)
        return [self._checked(piece, logits) for piece, logits in zip(pieces, found, strict=True)]

    def _pass(self, piece: _Piece) -> Pass:
        sequences, states, given = piece.sequences, None, {}
        if sequences.context is not None:
            own = sequences.context.rows(piece.rows.source, piece.source)
            given = {name: _attended(sequences, piece.source, value) for name, value in own.by_token.items()}
            given |= own.by_sequence
            if own.states is not None and own.lengths is not None:
                states = own.states[:, : int(own.lengths[0])]
        ids, inputs = self.prepare(piece.shown, states)
        positions = piece.rows.read - sequences.start[piece.source].to(ids.device)[:, None]
        return Pass(ids, positions, given | inputs)

    def _checked(self, piece: _Piece, logits: Tensor) -> Tensor:
        """Logits of a piece in float32 or float64, found to be finite."""
        logits = logits.to(piece.shown.device)
        self.dtype = logits.dtype
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        _check_finite(logits.detach(), piece.names(), piece.rows.read)
        self._num_rows[get_ident()] += len(piece.shown)
        return logits


class _Remembered(NamedTuple):
    """What a memory holds of a piece whose rows read one position.

    Attributes:
        piece: all of its rows.
        single: (n,) bool, rows with no more than that position masked.
        found: (n,) bool, rows in the memory.
        missing: the rows that aren't, if there are any.
    """

    piece: _Piece
    single: Tensor
    found: Tensor
    missing: _Piece | None

    @classmethod
    def of(cls, piece: _Piece, memory: RowMemory) -> _Remembered:
        names, column = piece.names(), piece.rows.read[:, 0]
        # Short blocks repeat their last column.
        single = (piece.rows.masked == piece.rows.read).all(1) & memory.free[names, column]
        found = single & memory.find(names, column, piece.ids)
        missing = (~found).nonzero()[:, 0]
        if len(missing) == len(found):
            return cls(piece, single, found, piece)
        return cls(piece, single, found, piece.part(missing) if len(missing) else None)

    def logits(self, fresh: Tensor | None, memory: RowMemory) -> Tensor:
        """Logits (n, 1, V) of all rows; those of `missing`, in `fresh`, are noted."""
        names, column = self.piece.names(), self.piece.rows.read[:, 0]
        hits, missing = self.found.nonzero()[:, 0], (~self.found).nonzero()[:, 0]
        if fresh is None:
            return memory.read(names, column)[:, None]
        noted = self.single[missing].nonzero()[:, 0]
        if len(noted):
            which = missing[noted]
            memory.write(names[which], column[which], self.piece.ids[which], fresh[noted, 0])
        if not len(hits):
            return fresh
        logits = fresh.new_empty((len(names), *fresh.shape[1:]))
        logits[missing], logits[hits] = fresh, memory.read(names[hits], column[hits])[:, None]
        return logits


def _length(sequences: Sequences, source: Tensor, numbers: Tensor) -> int:
    """Of rows `numbers` of one length, `source` being that of all rows, on the CPU."""
    first = source[numbers[0]]
    return int(sequences.stop[first] - sequences.start[first])


def _attended(sequences: Sequences, source: Tensor, ids: Tensor) -> Tensor:
    """Of `ids` (n, T, …) of the sequences `source` (n,), of one length, the columns the model is shown (n, L, …)."""
    start = sequences.start[source]
    length = int(sequences.stop[source[0]] - start[0])
    if bool((start == start[0]).all()):
        return ids[:, int(start[0]) : int(start[0]) + length]
    columns = start.to(ids.device)[:, None] + torch.arange(length, device=ids.device)
    return ids[torch.arange(len(ids), device=ids.device)[:, None], columns]


def _check_finite(logits: Tensor, numbers: Tensor, read: Tensor) -> None:
    low, high = torch.aminmax(logits, dim=-1)
    bad = ~(torch.isfinite(low) & torch.isfinite(high))
    if bool(bad.any()):
        row, place = bad.nonzero()[0].tolist()
        raise BadLogitsError(int(numbers[row]), int(read[row, place]))


def default_token_budget(device: torch.device, gradient: bool = False) -> int:
    """Tokens per forward pass: a quarter of the free memory; on a CPU 4,096, beyond which its caches gain nothing.

    With `gradient` tokens whose activations are kept: less on a GPU, half of that on a CPU.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        size = _BYTES_PER_TOKEN_WITH_GRADIENT if gradient else _BYTES_PER_TOKEN
        return max(512, min(free // 4 // size, 262_144))
    return 2048 if gradient else 4096


def _is_out_of_memory(error: Exception) -> bool:
    signs = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)
