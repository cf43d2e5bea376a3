"""Pools of masked rows through a model, in batches.

Rows of equal length pass through the encoder together, and several such passes through the head, under a token budget.
Rows are never padded, so no value can depend on what else is in the batch, and models that take no attention mask work
like the others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from hf_ebm.checks import as_whole
from hf_ebm.runtime import BYTES_PER_LOGIT, device_memory, where_float64_is
from hf_ebm.scoring.passes import Pass
from hf_ebm.scoring.rows import Index, MaskedRows, Reducer, Runner, Sequences, to_device

logger = logging.get_logger(__name__)

# What a token in flight is taken to weigh in memory.
_BYTES_PER_TOKEN = 65_536

# A token whose gradient is wanted: every layer keeps something of it for the way back.
_BYTES_PER_TOKEN_WITH_GRADIENT = 1_048_576

# Rows from which on a head takes as long as its products, and not as its weights take to read: no more passes are
# held back for it.
_ENOUGH_FOR_A_HEAD = 256


class _Batch(NamedTuple):
    """Rows of one length that pass through the encoder together.

    Attributes:
        numbers: which of the rows of the pool they are.
        rows: these rows.
        source: (n,) `rows.source` on the host.
        shown: (n, L) what the model is shown.
    """

    numbers: Index
    rows: MaskedRows
    source: NDArray
    shown: Tensor


class MaskedBatchRunner(Runner):
    """Runs pools of masked rows through a model: a `Runner`.

    Args:
        position_logits: `(ids (n, L), positions (n, P), **inputs) -> logits (n, P, V)`. If it has a method `together`,
            that takes a list of `Pass` and returns the logits of each.
        mask_token_id: the id written at masked positions.
        vocab_size: V, for the memory that logits take.
        token_budget: tokens per forward pass; `None` derives it from free memory at first use. A shortage of memory
            lowers it.
        prepare: turns a batch's ids and the encoder states of its context into model inputs `(ids, inputs)`, for
            encoder-decoder models.
        device: where the model takes its inputs; by default where the sequences are.
    """

    def __init__(
        self,
        position_logits: Callable[..., Tensor],
        mask_token_id: int | None,
        vocab_size: int,
        token_budget: int | None = None,
        prepare: Callable[[Tensor, Tensor | None], tuple[Tensor, dict]] | None = None,
        device: torch.device | None = None,
    ):
        self.position_logits = position_logits
        self.mask_token_id = mask_token_id
        self.vocab_size = vocab_size
        self.prepare = prepare or (lambda ids, states: (ids, {}))
        self.device = device
        given = None if token_budget is None else as_whole("token_budget", token_budget, 1)
        self._budgets = {} if given is None else dict.fromkeys((False, True), given)  # without and with gradient
        self.num_rows = 0
        self.dtype: torch.dtype | None = None

    def from_zero(self, mask_token_id: int | None, device: torch.device | None = None) -> Self:
        """A runner that counts anew and shares what this one has found out of the model and of memory."""
        own = copy.copy(self)
        own.num_rows, own.mask_token_id, own.device = 0, mask_token_id, device
        return own

    @property
    def mask_id(self) -> int:
        if self.mask_token_id is None:
            raise ValueError("mask_token_id is not set, so nothing can be masked")
        return self.mask_token_id

    def parts(self, sequences: Sequences, rows: MaskedRows, reduce: Reducer) -> tuple[list[Tensor], list[NDArray]]:
        """See `Runner`.

        Where gradients are wanted and the budget doesn't hold all rows at once, what it does hold is run again on the
        way back: the gradients are the same, and only one share of the rows has its activations in memory.
        """
        if len(rows.source) == 0:
            raise ValueError("rows: there is nothing to run")
        results: list[Tensor] = []
        order: list[NDArray] = []
        source, device = rows.source.cpu().numpy(), self.device or sequences.ids.device
        waiting = sequences.of_one_length(source)
        while waiting:
            budget = self.token_budget(device)
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
            lower = max(1, min(budget, self._cost(sequences, rows, source, passes)) // 2)
            self._budgets.update(dict.fromkeys((False, True), lower))
            logger.warning(f"Out of memory: going on with a token budget of {lower}.")
            if device_memory(device) is not None:
                torch.get_device_module(device).empty_cache()
        return results, order

    def token_budget(self, device: torch.device) -> int:
        """Tokens per forward pass on a device, as long as memory isn't short; fewer where gradients are enabled."""
        gradient = torch.is_grad_enabled()
        if gradient not in self._budgets:
            self._budgets[gradient] = default_token_budget(device, gradient)
        return self._budgets[gradient]

    def _next_passes(
        self, budget: int, sequences: Sequences, rows: MaskedRows, source: NDArray, waiting: list[NDArray]
    ) -> tuple[list[NDArray], list[NDArray]]:
        """Row numbers of the passes whose logits are taken together next, and what is left of the groups."""
        passes: list[NDArray] = []
        rest = list(waiting)
        room, held = max(1, budget // self._logits_cost(rows)), 0
        gradient, left = torch.is_grad_enabled(), budget
        enough = room if gradient else _ENOUGH_FOR_A_HEAD
        if sequences.context is not None and sequences.context.states is not None:
            enough = 1  # passes that are held back hold their inputs, which is nothing but for these
        while rest and held < min(room, enough):
            length = int(sequences.lengths[source[rest[0][0]]])
            if gradient and passes and length > left:
                break
            size = min(room - held, max(1, left // length), len(rest[0]))
            passes.append(rest[0][:size])
            rest[:1] = [rest[0][size:]] if size < len(rest[0]) else []
            held += size
            if gradient:  # all passes that are held back keep their activations
                left -= size * length
        return passes, rest

    def _cost(self, sequences: Sequences, rows: MaskedRows, source: NDArray, passes: list[NDArray]) -> int:
        """Tokens that passes whose logits are taken together count for: those of the largest, or of all logits."""
        longest = max(len(numbers) * int(sequences.lengths[source[numbers[0]]]) for numbers in passes)
        return max(longest, sum(map(len, passes)) * self._logits_cost(rows))

    def _logits_cost(self, rows: MaskedRows) -> int:
        """Tokens that weigh as much as a row's logits."""
        return max(1, math.ceil(rows.read.shape[1] * self.vocab_size * BYTES_PER_LOGIT / _BYTES_PER_TOKEN))

    def _run(
        self, sequences: Sequences, rows: MaskedRows, passes: list[NDArray], source: NDArray, reduce: Reducer
    ) -> list[Tensor]:
        """Results of some rows, by pass; `source` is that of all rows."""
        batches = [self._batch(sequences, rows, numbers, source[numbers]) for numbers in passes]
        inputs = [self._pass(sequences, batch) for batch in batches]
        together = getattr(self.position_logits, "together", None)
        if together is None:
            found = [self.position_logits(ids, positions, **given) for ids, positions, given in inputs]
        else:
            found = together(inputs)
        self.num_rows += sum(len(batch.shown) for batch in batches)
        self.dtype = found[0].dtype
        logits = [self._for_reducers(own, sequences) for own in found]
        return [reduce(own, batch.numbers) for own, batch in zip(logits, batches, strict=True)]

    def _batch(self, sequences: Sequences, rows: MaskedRows, numbers: NDArray, source: NDArray) -> _Batch:
        if len(numbers) == len(rows.source):  # numbers of one length ascend
            return _Batch(slice(None), rows, source, rows.shown(sequences, source, self.mask_id))
        on_device = to_device(torch.from_numpy(numbers), sequences.ids.device)
        some = rows.some(on_device)
        return _Batch(on_device, some, source, some.shown(sequences, source, self.mask_id))

    def _pass(self, sequences: Sequences, batch: _Batch) -> Pass:
        states, given = None, {}
        if sequences.context is not None:
            own = sequences.context.rows(batch.rows.source, torch.from_numpy(batch.source))
            given = {name: sequences.attended(batch.source, value) for name, value in own.by_token.items()}
            given |= own.by_sequence
            if own.states is not None and own.lengths is not None:
                states = own.states[:, : int(own.lengths[0])]
        shown, positions = batch.shown, sequences.columns_shown(batch.source, batch.rows.read)
        if self.device not in (None, shown.device):
            both = to_device(torch.cat([shown.flatten(), positions.flatten()]), self.device)  # in one copy
            shown, positions = both[: shown.numel()].view(shown.shape), both[shown.numel() :].view(positions.shape)
        ids, inputs = self.prepare(shown, states)
        return Pass(ids, positions, given | inputs)

    def _for_reducers(self, logits: Tensor, sequences: Sequences) -> Tensor:
        """Logits in float32 or float64 on the model's device; for chains, which draw in float64, where there is any."""
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        device = self.device or sequences.ids.device
        return logits.to(device if device == sequences.ids.device else where_float64_is(device))


def default_token_budget(device: torch.device, gradient: bool = False) -> int:
    """Tokens per forward pass: a quarter of the free memory; on a CPU 4,096, beyond which its caches gain nothing.

    With `gradient` tokens whose activations are kept: less on a GPU, half of that on a CPU.
    """
    own = device_memory(device)
    if own is not None:
        size = _BYTES_PER_TOKEN_WITH_GRADIENT if gradient else _BYTES_PER_TOKEN
        return max(512, min(own.free // 4 // size, 262_144))
    return 2048 if gradient else 4096


def _is_out_of_memory(error: Exception) -> bool:
    signs = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)
