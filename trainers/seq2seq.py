"""Sequence-to-sequence models: the base of their trainers, and cross entropy, plain and self-normalized."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_ebm.checks import as_number
from hf_ebm.model_facts import special_ids
from hf_ebm.model_modes import state_kept
from hf_ebm.objectives.completions import ends_at
from hf_ebm.objectives.losses import IGNORED, cross_entropy_sum, log_normalizers, num_tokens
from hf_ebm.publishing.cards import CITATIONS
from hf_ebm.trainers.costs import without_columns
from hf_ebm.trainers.objective import LossTerms, ObjectiveTrainer
from hf_ebm.trainers.targets import (
    DEFAULT_LENGTH,
    MUST_HAVE_TARGET,
    check_labels,
    check_logits_fit,
    check_positions,
    check_sources,
    encoder_inputs,
    given_inputs,
    length_terms,
    new_token_limit,
)


@dataclass
class GenerationTrainingConfig(Seq2SeqTrainingArguments):
    """Arguments of every trainer whose model generates; adds nothing to `Seq2SeqTrainingArguments` but checks.

    Raises:
        ValueError: for label smoothing outside [0, 1), or of another objective than cross entropy.
    """

    smooths_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "label_smoothing_factor"
        self.label_smoothing_factor = as_number(name, self.label_smoothing_factor, least=0, below=1)
        if self.label_smoothing_factor and not self.smooths_labels:
            raise ValueError(
                f"{name} must be 0, got {self.label_smoothing_factor}: CrossEntropyTrainer alone smooths labels"
            )


class Seq2SeqObjectiveTrainer(ObjectiveTrainer, Seq2SeqTrainer):
    """Base of the trainers of sequence-to-sequence models: subclasses give `loss_terms`.

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

    config_class: ClassVar[type[GenerationTrainingConfig]] = GenerationTrainingConfig
    args: GenerationTrainingConfig
    mean_over = "tokens"
    reads_columns = False
    row_must_have = MUST_HAVE_TARGET

    def check_model(self, model: PreTrainedModel) -> None:
        """Raises `ValueError` for a model of another kind."""
        if not getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
            raise ValueError(
                f"model must be a sequence-to-sequence model (AutoModelForSeq2SeqLM), got {type(model).__name__}"
            )

    def check_batch(self, inputs: dict) -> None:
        """Raises `ValueError` for a batch without labels, or with some that the model cannot predict."""
        check_labels(self.module, inputs)
        check_sources(self.module, inputs)
        check_positions(self.module, inputs["labels"], inputs.get("attention_mask"))
        if self.model.training:
            check_logits_fit("per_device_train_batch_size, max_target_length", inputs["labels"].shape, self.module)

    def scored_rows(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Rows with a label."""
        return (inputs["labels"] != IGNORED).any(1)

    @property
    def pad_id(self) -> int:
        """What predictions are padded with: the tokenizer's pad token, else the model's, else an end token."""
        for name in ("pad_token_id", "eos_token_id"):
            for found in special_ids(name, self.processing_class, self.model):
                return found
        raise ValueError("generation_config must have a pad_token_id to pad predictions with, got none")

    def prediction_step(  # type: ignore[override]  # annotated as a float, which it never is
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The objective as the loss, and generated tokens if `predict_with_generate`."""
        inputs = given_inputs(self._prepare_inputs(inputs))
        labels = inputs.get("labels")
        loss = None if labels is None else self.evaluated_loss(model, inputs)
        if prediction_loss_only or not self.args.predict_with_generate:
            return loss, None, None
        # What a collator makes of labels would be a prompt that gives them away.
        unlabeled = without_columns(inputs) if labels is None else encoder_inputs(inputs)
        # The stock step fills the model's generation config with defaults, max_length=20 among them, which would be
        # saved with the model and obeyed.
        generation_config = copy.deepcopy(self.model.generation_config)
        try:
            with state_kept(self.model):
                _, generated, _ = Seq2SeqTrainer.prediction_step(
                    self, model, unlabeled, False, ignore_keys, **gen_kwargs
                )
        finally:
            self.model.generation_config = generation_config
        assert generated is not None
        self.add_terms(False, self._length_terms(generated, gen_kwargs or getattr(self, "_gen_kwargs", {})))
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


@dataclass
class CrossEntropyConfig(GenerationTrainingConfig):
    """Arguments of `CrossEntropyTrainer`: those of `Seq2SeqTrainingArguments`, label smoothing among them."""

    smooths_labels: ClassVar[bool] = True


class CrossEntropyTrainer(Seq2SeqObjectiveTrainer):
    """Teacher forcing, the baseline of the others: cross entropy per token.

    As the stock trainer's, but the same for every accumulation and number of processes, and with an exact `eval_loss`.
    With `label_smoothing_factor` the targets are mixed with the uniform distribution, in evaluation too, as there.
    """

    config_class: ClassVar[type[CrossEntropyConfig]] = CrossEntropyConfig
    args: CrossEntropyConfig

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any]) -> LossTerms:
        logits, labels = model(**inputs).logits, inputs["labels"]
        return LossTerms(cross_entropy_sum(logits, labels, self.args.label_smoothing_factor), num_tokens(labels))


@dataclass
class SelfNormalizedConfig(GenerationTrainingConfig):
    """Arguments of `SelfNormalizedTrainer`, beside those of `Seq2SeqTrainingArguments`.

    Args:
        log_z_weight: lambda, the weight of the squared log normalizer; 0 reports it without changing it.

    Raises:
        ValueError: for a negative weight.
    """

    log_z_weight: float = field(default=0.5, metadata={"help": "Weight of the squared local log normalizer."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.log_z_weight = as_number("log_z_weight", self.log_z_weight, least=0)


class SelfNormalizedTrainer(Seq2SeqObjectiveTrainer):
    """`cross entropy + lambda * (log Z)^2` at every token (Goyal, Dyer and Berg-Kirkpatrick 2019, section 3.2.1).

    Logs `cross_entropy`, `log_z_mean` and `log_z_variance`, in nats, in training and in evaluation.
    """

    config_class: ClassVar[type[SelfNormalizedConfig]] = SelfNormalizedConfig
    args: SelfNormalizedConfig
    bibtex = (CITATIONS["GOYAL_2019"],)
    evaluated_terms = ("cross_entropy", "log_z_mean", "log_z_square")

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any]) -> LossTerms:
        labels = inputs["labels"]
        logits = model(**inputs).logits
        cross_entropy, log_z = cross_entropy_sum(logits, labels), log_normalizers(logits, labels)
        tokens = num_tokens(labels)
        return LossTerms(
            cross_entropy + self.args.log_z_weight * log_z.sum_of_squares,
            tokens,
            {
                "cross_entropy": (cross_entropy, tokens),
                "log_z_mean": (log_z.sum, tokens),
                "log_z_square": (log_z.sum_of_squares, tokens),
            },
        )

    @classmethod
    def derived_logs(cls, averages: dict[str, float]) -> dict[str, float]:
        if "log_z_square" in averages:  # not of data without labels, of which lengths alone are logged
            variance = averages.pop("log_z_square") - averages["log_z_mean"] ** 2
            averages["log_z_variance"] = max(variance, 0.0)
        return averages
