"""Targets and what is decoded, alike for the trainers of models that generate: checks, lengths, predictions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from transformers import EvalPrediction, GenerationConfig, PreTrainedModel, Trainer

from hf_ebm.model_facts import num_outputs, source_length, target_length
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.runtime import check_fits, logit_bytes
from hf_ebm.trainers.costs import COLUMNS

MUST_HAVE_TARGET = f"labels: row {{row}} must have a target (a label that isn't {IGNORED})"
DEFAULT_LENGTH = 20  # of `generate`: tokens, where nothing says how many
_NOT_ENCODED = (COLUMNS, "labels", "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds")


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


def check_sources(model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a source that the encoder has no positions for, padding included."""
    ids: torch.Tensor | None = inputs.get("input_ids")
    if ids is None or not model.config.is_encoder_decoder:
        return
    limit = source_length(model)
    if limit is not None and ids.shape[1] > limit:
        mask = inputs.get("attention_mask")
        row = 0 if mask is None else int(mask.sum(1).argmax())
        raise ValueError(
            f"input_ids: row {row} makes the batch {ids.shape[1]} tokens long, the encoder has positions for {limit}; "
            "shorten it"
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
