"""Batches of models that generate, alike for their trainers: columns apart, checks, predictions, lengths decoded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from transformers import EvalPrediction, GenerationConfig, PreTrainedModel, Trainer

from hf_ebm.model_facts import num_outputs, target_length
from hf_ebm.objectives.costs import NamedParameters
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.runtime import check_fits, logit_bytes

COLUMNS = "columns"  # where those of a data set that the model doesn't take are in a batch: values of all rows by name
MUST_HAVE_TARGET = f"labels: row {{row}} must have a target (a label that isn't {IGNORED})"
DEFAULT_LENGTH = 20  # of `generate`: tokens, where nothing says how many
_NOT_ENCODED = (COLUMNS, "labels", "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds")


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
        keep: as of `ColumnsApart`; None for collators that make no batches of the model's.
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


def check_columns(trainer: Trainer, cost: str, parameters: NamedParameters, given: Collection[str] = ()) -> None:
    """Raises `ValueError` if a cost reads columns of the data set that would be removed."""
    there = _column_names(trainer.train_dataset)
    named = {name: needed for name, needed in parameters.others.items() if name not in given}
    read = [name for name, needed in named.items() if needed or name in there]
    if read and trainer.args.remove_unused_columns:
        raise ValueError(
            f"remove_unused_columns must be False, got True: the cost {cost} reads {', '.join(read)} of the data"
        )


def _column_names(data: Any) -> list[str]:
    """Of a data set, where they can be known before it is read."""
    if isinstance(data, list):
        return list(data[0]) if data and isinstance(data[0], Mapping) else []
    return list(getattr(data, "column_names", None) or [])


def check_labels(model: PreTrainedModel, inputs: dict) -> None:
    """Raises `ValueError` for labels that aren't there, aren't one sequence a row, or can't be predicted."""
    labels = inputs.get("labels")
    if labels is None:
        raise ValueError(f"inputs must have labels, got {', '.join(inputs)}")
    if not labels.numel():
        return
    if model.config.is_encoder_decoder:
        goes_on = (labels[:, :-1] == IGNORED) & (labels[:, 1:] != IGNORED)
        if bool(goes_on.any()):
            row = int(goes_on.any(1).nonzero()[0])
            raise ValueError(
                f"labels: row {row} has {IGNORED} before its end; a target must be padded on the right alone"
            )
    check = getattr(model, "check_targets", None)  # of the recurrent model, whose lengths may have to agree
    if check is not None:
        check(labels, inputs.get("attention_mask"))
        return
    size = num_outputs(model)
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= size))
    if bool(wrong.any()):
        row, position = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"labels: row {row} has {int(labels[row, position])}, must be from 0 to {size - 1}, or {IGNORED} where "
            "there is no target"
        )


def check_positions(model: PreTrainedModel, labels: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Raises `ValueError` for a row that the decoder reads and has no positions for."""
    limit = target_length(model)
    if limit is None or not labels.numel():
        return
    if model.config.is_encoder_decoder:
        name, lengths = "labels", (labels != IGNORED).sum(1)
    elif attention_mask is None:
        name, lengths = "input_ids", torch.ones_like(labels).sum(1)
    else:
        name, lengths = "input_ids", attention_mask.sum(1)
    if int(lengths.max()) > limit:
        row = int(lengths.argmax())
        raise ValueError(
            f"{name}: row {row} has {int(lengths[row])} tokens, the model has positions for {limit}; shorten it"
        )


def check_logits_fit(settings: str, shape: Sequence[int], model: PreTrainedModel) -> None:
    """Raises `ValueError` where the logits of a batch, kept with their gradients, don't fit into memory.

    Args:
        settings: names of those that they grow with.
        shape: how many sequences, and how many tokens of each.
    """
    (sequences, tokens), ids = shape, num_outputs(model)
    what = f"{settings}: logits of {sequences} sequences of {tokens} tokens for {ids} ids are kept for a batch"
    check_fits(logit_bytes(sequences, tokens, ids), what, model.device)


def check_one_gpu(trainer: Trainer, reason: str = "") -> None:
    """Raises `ValueError` for several GPUs in one process."""
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"one process must have one GPU, got {trainer.args.n_gpu}{reason}; start a process for each with "
            "accelerate launch or torchrun"
        )


def given_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch without what is None in it, whose labels, where there are any, have a column at least."""
    found = {name: value for name, value in inputs.items() if value is not None}
    labels = found.get("labels")
    if labels is not None and not labels.shape[1]:
        found["labels"] = labels.new_full((len(labels), 1), IGNORED)
    return found


@contextmanager
def padded_metrics(trainer: Trainer, pad_id: int) -> Iterator[None]:
    """Inside, what a trainer's metrics are given has the pad token where the Trainer puts -100.

    Batches are put together, and padded with -100, between the step and what is called here.
    """
    compute_metrics, preprocess = trainer.compute_metrics, trainer.preprocess_logits_for_metrics
    if compute_metrics is not None:
        trainer.compute_metrics = functools.partial(_metrics_of_ids, compute_metrics, pad_id)
    if preprocess is not None:
        trainer.preprocess_logits_for_metrics = lambda found, labels: preprocess(without_ignored(found, pad_id), labels)
    try:
        yield
    finally:
        trainer.compute_metrics, trainer.preprocess_logits_for_metrics = compute_metrics, preprocess


def _metrics_of_ids(compute_metrics: Callable[..., dict], pad_id: int, found: EvalPrediction, **options: Any) -> dict:
    predictions = without_ignored(found.predictions, pad_id)
    return compute_metrics(EvalPrediction(predictions, found.label_ids, found.inputs, found.losses), **options)


def without_ignored(predictions: Any, pad_id: int) -> Any:
    """Arrays or tensors of ids, or lists of them, with the pad token where they have -100."""
    if isinstance(predictions, (list, tuple)):
        return type(predictions)(without_ignored(one, pad_id) for one in predictions)
    if predictions is not None:
        predictions[predictions == IGNORED] = pad_id
    return predictions


def encoder_inputs(inputs: dict) -> dict:
    """A batch without its labels, what collators make of them, and columns that aren't the model's."""
    return {name: value for name, value in inputs.items() if name not in _NOT_ENCODED}


def decoding_length(targets: Sequence[Sized], ratio: float) -> int:
    """The most tokens that are decoded for a batch: `ratio` times its longest target; 0 if it has none."""
    return math.ceil(ratio * max(map(len, targets)))


def new_token_limit(config: GenerationConfig, start: int) -> int | None:
    """The most tokens that a generation config allows behind `start` tokens, as `generate` counts; None for any."""
    if config.max_new_tokens is not None:  # which goes before, in `generate` as well
        return config.max_new_tokens
    return None if config.max_length is None else config.max_length - start


def length_terms(
    sequences: Sequence[torch.Tensor], end_ids: Sequence[int], config: GenerationConfig
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What is logged of sequences decoded up to `max_new_tokens`: their mean length, and the share that was cut off.

    A sequence is cut off that is as long as it may be and doesn't end, or ends there as the configuration forces it to.
    """
    device = sequences[0].device
    lengths = torch.tensor([len(ids) for ids in sequences], device=device)
    last = torch.stack([ids[-1] for ids in sequences])
    ended = torch.isin(last, last.new_tensor(list(end_ids)))
    cut = (lengths == config.max_new_tokens) & (~ended | (config.forced_eos_token_id is not None))
    count = torch.tensor(len(sequences), device=device)
    return {"decoded_length": (lengths.sum(), count), "cut_share": (cut.sum(), count)}


def num_rows(inputs: dict) -> int:
    """Rows of a batch, whatever is encoded."""
    if inputs.get("labels") is not None:
        return len(inputs["labels"])
    tensors = [value for value in inputs.values() if torch.is_tensor(value) and value.dim()]
    return len(tensors[0])
