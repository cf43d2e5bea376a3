"""What the trainers share: normalization of losses, logged terms, evaluation by generation."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from hf_ebm.memory import check_fits, logit_bytes
from hf_ebm.model_facts import num_outputs, special_ids, target_length
from hf_ebm.model_modes import state_kept
from hf_ebm.objectives.completions import ends_at
from hf_ebm.objectives.cost_columns import NamedParameters
from hf_ebm.objectives.token_losses import IGNORED, cross_entropy_sum, num_tokens
from hf_ebm.plain_values import as_number
from hf_ebm.trainers.columns import ColumnsApart, column_names, without_columns
from hf_ebm.trainers.loss_terms import LossTerms, LossTermsMixin
from hf_ebm.trainers.sequence_pairs import DEFAULT_LENGTH, encoder_inputs, length_terms, new_token_limit


@dataclass
class SearchAwareConfig(Seq2SeqTrainingArguments):
    """Arguments of every sequence-to-sequence trainer here; adds nothing to `Seq2SeqTrainingArguments` but checks.

    Raises:
        ValueError: for label smoothing outside [0, 1), or of another objective than cross entropy.
    """

    smooths_labels: ClassVar[bool] = True  # in the cross entropy; configurations of other objectives say no

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "label_smoothing_factor"
        self.label_smoothing_factor = as_number(name, self.label_smoothing_factor, least=0, below=1)
        if self.label_smoothing_factor and not self.smooths_labels:
            raise ValueError(
                f"{name} must be 0, got {self.label_smoothing_factor}: {type(self).__name__} has its own objective; "
                "CrossEntropyTrainer smooths labels"
            )


class SearchAwareTrainer(LossTermsMixin, Seq2SeqTrainer):
    """Base of the trainers: subclasses give `loss_terms`.

    The loss is the mean over target tokens, whatever the accumulation, the batch sizes and the number of processes: the
    same update as one large batch (of several processes with `average_tokens_across_devices`, the default). The terms
    of the objective are logged under their names, averaged over what was trained since the last log. `eval_loss` is the
    objective itself, averaged over the tokens of the evaluation set (several processes repeat a few rows where their
    number doesn't divide that of the rows). Predictions are padded with the pad token alone, labels with -100; data
    without labels is decoded, too. They are as long as the `generation_config` allows (`max_new_tokens`, or else
    `max_length`; `generation_max_length` goes before the latter). Their `decoded_length` and `cut_share` are logged:
    the mean number of tokens, ends included, and the share that was cut off at the greatest length.

    Raises:
        ValueError: for a model that isn't sequence-to-sequence; arguments that aren't those of the trainer; a
            `compute_loss_func`; `compute_metrics` without `predict_with_generate`.
    """

    config_class: ClassVar[type[SearchAwareConfig]] = SearchAwareConfig
    args: SearchAwareConfig
    reads_columns: ClassVar[bool] = False  # of the data set, beside those that the model takes: a cost does
    memory_settings = "per_device_train_batch_size, max_target_length"  # that logits grow with
    row_must_have = f"labels: row {{row}} must have a target (a label that isn't {IGNORED})"

    def check_arguments(self, args: Any, compute_metrics: Callable | None) -> None:
        super().check_arguments(args, compute_metrics)
        if compute_metrics is not None and not args.predict_with_generate:
            raise ValueError("compute_metrics needs predict_with_generate=True: its predictions are generated tokens")

    def check_model(self, model: PreTrainedModel) -> None:
        """Raises `ValueError` for a model of another kind."""
        if not getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
            raise ValueError(
                f"model must be a sequence-to-sequence model (AutoModelForSeq2SeqLM), got {type(model).__name__}"
            )

    def check_columns(self, cost: str, parameters: NamedParameters, given: Collection[str] = ()) -> None:
        """Raises `ValueError` if a cost reads columns of the data set that would be removed."""
        there = column_names(self.train_dataset)
        named = {name: needed for name, needed in parameters.others.items() if name not in given}
        read = [name for name, needed in named.items() if needed or name in there]
        if read and self.args.remove_unused_columns:
            raise ValueError(
                f"remove_unused_columns must be False, got True: the cost {cost} reads {', '.join(read)} of the data"
            )

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """The Trainer's; columns that the model doesn't take never get into its forward."""
        collator = self.data_collator
        if not self.args.remove_unused_columns:
            self._set_signature_columns_if_needed()
            self.data_collator = ColumnsApart(collator, self._signature_columns or (), self.reads_columns)
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.data_collator = collator

    def check_batch(self, inputs: dict) -> None:
        """Raises `ValueError` for a batch without labels, or with some that the model cannot predict."""
        if inputs.get("labels") is None:
            raise ValueError(f"inputs must have labels, got {', '.join(inputs)}")
        if inputs["labels"].numel():
            _check_targets(self.model, inputs)
            self.check_positions(inputs)
        if self.model.training:
            sequences, tokens = self.scored_at_once(inputs["labels"])
            ids = num_outputs(self.model)
            what = (
                f"{self.memory_settings}: logits of {sequences} sequences of {tokens} tokens for {ids} ids are kept "
                "for a batch"
            )
            check_fits(logit_bytes(sequences, tokens, ids), what, inputs["labels"].device)

    def check_positions(self, inputs: dict) -> None:
        """Raises `ValueError` for a row that the decoder reads and has no positions for."""
        labels, mask = inputs["labels"], inputs.get("attention_mask")
        limit = target_length(self.accelerator.unwrap_model(self.model))
        if limit is None:
            return
        if self.model.config.is_encoder_decoder:
            name, lengths = "labels", (labels != IGNORED).sum(1)
        else:
            name, lengths = "input_ids", torch.ones_like(labels).sum(1) if mask is None else mask.sum(1)
        if int(lengths.max()) > limit:
            row = int(lengths.argmax())
            raise ValueError(
                f"{name}: row {row} has {int(lengths[row])} tokens, the model has positions for {limit}; shorten it"
            )

    def scored_at_once(self, labels: torch.Tensor) -> tuple[int, int]:
        """Sequences, and tokens of each, whose logits are held with their gradients for a batch's labels (B, T)."""
        return labels.shape[0], labels.shape[1]

    def scored_rows(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Rows with a label."""
        return (inputs["labels"] != IGNORED).any(1)

    @functools.cached_property
    def pad_id(self) -> int:
        """What predictions are padded with: the tokenizer's pad token, else the model's, else an end token."""
        for name in ("pad_token_id", "eos_token_id"):
            for found in special_ids(name, self.processing_class, self.model):
                return found
        raise ValueError("generation_config must have a pad_token_id to pad predictions with, got none")

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The Trainer's loop, but for its -100 in predictions, which no tokenizer decodes."""
        compute_metrics, preprocess = self.compute_metrics, self.preprocess_logits_for_metrics

        # Batches are put together, and padded with -100, between the step and what is called here.
        if compute_metrics is not None:
            self.compute_metrics = functools.partial(_metrics_of_ids, compute_metrics, self.pad_id)
        if preprocess is not None:
            self.preprocess_logits_for_metrics = lambda found, labels: preprocess(
                _without_ignored(found, self.pad_id), labels
            )
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess
        return output._replace(predictions=_without_ignored(output.predictions, self.pad_id))

    def prediction_step(  # type: ignore[override]  # annotated as a float, which it never is
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The objective as the loss, and generated tokens if `predict_with_generate`."""
        inputs = {name: value for name, value in self._prepare_inputs(inputs).items() if value is not None}
        loss, labels = None, inputs.get("labels")
        if labels is not None:
            if not labels.shape[1]:  # of rows that have none: a column at least
                labels = inputs["labels"] = labels.new_full((len(labels), 1), IGNORED)
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs).detach()
        if prediction_loss_only or not self.args.predict_with_generate:
            return loss, None, None
        # What a collator makes of labels would be a prompt that gives them away.
        unlabeled = without_columns(inputs) if labels is None else encoder_inputs(inputs)
        # The stock step fills the model's generation config with defaults, max_length=20 among them, which would be
        # saved with the model and obeyed.
        generation_config = copy.deepcopy(self.model.generation_config)
        try:
            with state_kept(self.model):
                _, generated, _ = super().prediction_step(model, unlabeled, False, ignore_keys, **gen_kwargs)
        finally:
            self.model.generation_config = generation_config
        assert generated is not None
        self._add(False, self._length_terms(generated, gen_kwargs or getattr(self, "_gen_kwargs", {})))
        return loss, generated, labels

    def _length_terms(self, generated: torch.Tensor, asked: dict[str, Any]) -> dict[str, tuple]:
        """What is logged of the lengths of `generate`'s output, (B, L), start tokens in front."""
        config, given = copy.deepcopy(self.model.generation_config), asked.get("generation_config")
        config.update(**({} if given is None else given.to_diff_dict()))
        config.update(**{name: value for name, value in asked.items() if value is not None})
        most = new_token_limit(config, 1)
        config.update(max_new_tokens=DEFAULT_LENGTH if most is None else most)
        end_ids = special_ids("eos_token_id", config)
        # The stock step pads to a length of its own.
        return length_terms(ends_at(generated[:, 1 : 1 + config.max_new_tokens], end_ids), end_ids, config)


def _metrics_of_ids(compute_metrics: Callable[..., dict], pad_id: int, found: EvalPrediction, **options: Any) -> dict:
    predictions = _without_ignored(found.predictions, pad_id)
    return compute_metrics(EvalPrediction(predictions, found.label_ids, found.inputs, found.losses), **options)


def _without_ignored(predictions: Any, pad_id: int) -> Any:
    """Arrays or tensors of ids, or lists of them, with the pad token where they have -100."""
    if isinstance(predictions, (list, tuple)):
        return type(predictions)(_without_ignored(one, pad_id) for one in predictions)
    if predictions is not None:
        predictions[predictions == IGNORED] = pad_id
    return predictions


def _check_targets(model: PreTrainedModel, inputs: dict) -> None:
    """Raises `ValueError` that names the row for labels the model cannot predict, or that aren't one sequence."""
    labels = inputs["labels"]
    if model.config.is_encoder_decoder:
        goes_on = (labels[:, :-1] == IGNORED) & (labels[:, 1:] != IGNORED)
        if bool(goes_on.any()):
            row = int(goes_on.any(1).nonzero()[0])
            raise ValueError(
                f"labels: row {row} has {IGNORED} before its end; it stands behind targets alone, so pad on the right"
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


class CrossEntropyTrainer(SearchAwareTrainer):
    """Teacher forcing, the baseline of the others: cross entropy per token.

    As the stock trainer's, but the same for every accumulation and number of processes, and with an exact `eval_loss`.
    With `label_smoothing_factor` the targets are mixed with the uniform distribution, in evaluation too, as there.
    """

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any]) -> LossTerms:
        logits, labels = model(**inputs).logits, inputs["labels"]
        return LossTerms(cross_entropy_sum(logits, labels, self.args.label_smoothing_factor), num_tokens(labels))
