"""What costs read beside predictions and references: columns of the data that the model doesn't take, and, of
`ScorerCost`, a language model that only scores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from hf_ebm.checks import as_whole, shown
from hf_ebm.model_facts import check_causal, max_length
from hf_ebm.model_modes import encoded_once, evaluation_mode, state_kept, without_adapters
from hf_ebm.models.adapters import check_in_layers
from hf_ebm.objectives.completions import completion_log_probs, pad_right, sequence_log_probs
from hf_ebm.objectives.costs import NamedParameters
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.objectives.sequence_costs import token_ids

COLUMNS = "columns"  # where those of a data set that the model doesn't take are in a batch: values of all rows by name


class ColumnsApart:
    """A collator that makes a batch of what the model takes and puts the rest under `COLUMNS`.

    Collators of Transformers know no other columns than the model's, so they are given these alone, and the others are
    kept as they are, lists with a value for each row. One of your own is given whole rows; what it makes of other names
    is kept as it made it.

    Args:
        collator: of rows.
        names: what the model takes.
        keep: whether the rest is wanted at all.
    """

    def __init__(self, collator: Callable[[list], Mapping[str, Any]], names: Collection[str], keep: bool):
        self.collator, self.names, self.keep = collator, frozenset(names), keep
        module = getattr(collator, "__module__", None) or type(collator).__module__
        self.knows_no_more = module.partition(".")[0] in ("transformers", "torch")

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self.knows_no_more:
            batch = dict(self.collator([self._own(row) for row in rows]))
            others = {name: [row.get(name) for row in rows] for name in rows[0] if name not in self.names}
        else:
            batch = dict(self.collator(list(rows)))
            others = {name: value for name, value in batch.items() if name not in self.names}
        return {**self._own(batch), **({COLUMNS: others} if others and self.keep else {})}

    def _own(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name in self.names}


@contextmanager
def columns_apart(trainer: Trainer, keep: bool | None) -> Iterator[None]:
    """Inside, data loaders are made with a collator that keeps out of a model's forward what it doesn't take.

    Args:
        keep: as of `ColumnsApart`; None for collators that see to columns themselves.
    """
    collator = trainer.data_collator
    if keep is not None and not trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        trainer.data_collator = ColumnsApart(collator, trainer._signature_columns or (), keep)
    try:
        yield
    finally:
        trainer.data_collator = collator


def without_columns(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the model is given of a batch."""
    return {name: value for name, value in inputs.items() if name != COLUMNS}


def columns_at(columns: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The values of some rows, which may repeat."""
    return {
        name: values[torch.tensor(rows, device=values.device)]
        if isinstance(values, torch.Tensor)
        else [values[row] for row in rows]
        for name, values in columns.items()
    }


def rows_of(inputs: dict[str, Any], kept: torch.Tensor) -> dict[str, Any]:
    """The rows of a batch that are kept."""
    rows = {
        name: value[kept] if torch.is_tensor(value) and value.shape[:1] == kept.shape else value
        for name, value in inputs.items()
    }
    if COLUMNS in inputs:
        rows[COLUMNS] = columns_at(inputs[COLUMNS], kept.nonzero()[:, 0].tolist())
    return rows


def check_columns(
    trainer: Trainer, cost: str, parameters: NamedParameters, given: Collection[str] = (), kind: str = "cost"
) -> None:
    """Raises `ValueError` if a cost, or a reward, reads columns of the data set that would be removed."""
    there = _column_names(trainer.train_dataset)
    named = {name: needed for name, needed in parameters.others.items() if name not in given}
    read = [name for name, needed in named.items() if needed or name in there]
    if read and trainer.args.remove_unused_columns:
        raise ValueError(
            f"remove_unused_columns must be False, got True: the {kind} {cost} reads {', '.join(read)} of the data"
        )


def _column_names(data: Any) -> list[str]:
    """Of a data set, where they can be known before it is read."""
    if isinstance(data, list):
        return list(data[0]) if data and isinstance(data[0], Mapping) else []
    return list(getattr(data, "column_names", None) or [])


class ScorerCost:
    """`-log p(prediction | prompt)` in nats, summed over the tokens of the prediction.

    A causal model reads the prompt followed by the prediction. An encoder-decoder reads the prompt in its encoder, and
    the prediction, which has no start token, as the labels that it shifts by itself. An end token counts where a
    prediction holds it; a prediction without tokens costs 0. Log probabilities are summed in float32 or better.

    Every call runs in evaluation mode and without a gradient, and leaves the model as it was, its mode included.

    Args:
        model: a module with a `config` whose forward takes `input_ids` and `attention_mask` (and `labels`, if
            `config.is_encoder_decoder`, else `use_cache`) and returns an output with `logits` (B, T, V).
        pad_token_id: fills rows up on the right, where nothing reads it; any id of the model will do for a causal one.
        batch_size: rows in a forward pass, at most.

    Raises:
        ValueError: for a `batch_size` below 1, no `pad_token_id`, a model that sees the tokens it scores, or adapters
            that aren't in its layers.
    """

    reads = "ids"

    def __init__(self, model: nn.Module, pad_token_id: int, batch_size: int = 64):
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise ValueError(f"model must be a language model, a module with a config, got {shown(model)}")
        check_in_layers("model", model)
        if (reads := getattr(model, "main_input_name", "input_ids")) != "input_ids":
            raise ValueError(f"model must read token ids, got {type(model).__name__}, which reads {reads}")
        base = without_adapters(model)
        if isinstance(base, PreTrainedModel) and not base.config.is_encoder_decoder:
            check_causal("model", base)
        if pad_token_id is None:
            raise ValueError("pad_token_id must be a token id, got None: any id of the model will do for a causal one")
        self.model = model
        self.pad_token_id = as_whole("pad_token_id", pad_token_id, 0)
        self.batch_size = as_whole("batch_size", batch_size, 1)

    def __call__(
        self, predictions: Sequence[Sequence[int]], references: object, prompts: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """(B,) float32 on the CPU; references aren't read.

        Raises:
            ValueError: for unequally many predictions and prompts, texts, an empty prompt, or a row with more tokens
                than the model has positions for.
        """
        predicted, given = token_ids(predictions, "predictions"), token_ids(prompts, "prompts")
        self._check(predicted, given)
        costs = torch.zeros(len(predicted), dtype=torch.float32)
        rows = [row for row, ids in enumerate(predicted) if ids]
        with torch.no_grad(), evaluation_mode(self.model):
            for start in range(0, len(rows), self.batch_size):
                batch = rows[start : start + self.batch_size]
                with state_kept(self.model):
                    costs[batch] = self._nats([predicted[row] for row in batch], [given[row] for row in batch])
        return costs

    def _check(self, predicted: list[list[int]], given: list[list[int]]) -> None:
        if len(predicted) != len(given):
            raise ValueError(f"predictions and prompts must be equally many, got {len(predicted)} and {len(given)}")
        limit = max_length(without_adapters(self.model))
        for row, (ids, prompt) in enumerate(zip(predicted, given, strict=True)):
            if not prompt:
                raise ValueError(f"prompts must hold a token each, got none in row {row}")
            longest = max(len(prompt), len(ids)) if self._encodes_prompts else len(prompt) + len(ids)
            if limit is not None and longest > limit:
                raise ValueError(
                    f"prompts and predictions must fit the scorer's {limit} positions, got a prompt of {len(prompt)} "
                    f"tokens and a prediction of {len(ids)} in row {row}"
                )

    @property
    def _encodes_prompts(self) -> bool:
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    def _nats(self, predicted: list[list[int]], given: list[list[int]]) -> torch.Tensor:
        device = next(self.model.parameters()).device
        prompts, sequences = ([torch.tensor(ids, device=device) for ids in rows] for rows in (given, predicted))
        if not self._encodes_prompts:
            return -completion_log_probs(self.model, prompts, sequences, self.pad_token_id).float().cpu()
        ids, mask = pad_right(prompts, self.pad_token_id)
        labels, _ = pad_right(sequences, IGNORED)
        with encoded_once(self.model, list(map(tuple, given))):
            logits = self.model(input_ids=ids, attention_mask=mask, labels=labels).logits
        return -sequence_log_probs(logits, labels).float().cpu()
