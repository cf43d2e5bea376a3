"""What the trainers share: normalization of losses, logged terms, evaluation by generation."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_utils import has_length

from hf_ebm.objectives.token_losses import IGNORED, cross_entropy_sum, num_tokens
from hf_ebm.relaxations.stepwise import StepwiseDecoder
from hf_ebm.trainers.sequence_pairs import encoder_inputs


@dataclass
class SearchAwareConfig(Seq2SeqTrainingArguments):
    """Arguments of every sequence-to-sequence trainer here; adds nothing to `Seq2SeqTrainingArguments` but checks.

    Raises:
        ValueError: for label smoothing, which these objectives don't define.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor must be 0, got {self.label_smoothing_factor}: {type(self).__name__} has its "
                "own objective"
            )


@dataclass
class LossTerms:
    """What an objective gives for one batch.

    `loss` is the sum over the batch's items (tokens, or rows), with its gradient; it is divided by the number of items
    of the whole accumulated batch, over all processes. `logged` maps a name to a sum and the count it is divided by;
    `constants` maps a name to a value that is logged as it is.
    """

    loss: torch.Tensor
    items: torch.Tensor
    logged: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)


class SearchAwareTrainer(Seq2SeqTrainer):
    """Base of the trainers: subclasses give `objective`.

    The loss is the mean over target tokens, whatever the accumulation, the batch sizes and the number of processes: the
    same update as one large batch (of several processes with `average_tokens_across_devices`, the default). The terms
    of the objective are logged under their names, averaged over what was trained since the last log. `eval_loss` is the
    objective itself, averaged over the tokens of the evaluation set (several processes repeat a few rows where their
    number doesn't divide that of the rows).

    Raises:
        ValueError: for a model that isn't sequence-to-sequence; arguments that aren't those of the trainer; a
            `compute_loss_func`; `compute_metrics` without `predict_with_generate`.
    """

    config_class = SearchAwareConfig
    loss_is_scaled_for_ga = True  # the loss is divided by `num_items_in_batch` here

    def __init__(self, model=None, args=None, **kwargs):
        if not isinstance(args, self.config_class):
            raise ValueError(f"args must be a {self.config_class.__name__}, got {type(args).__name__}")
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(f"compute_loss_func must be None: {type(self).__name__} has its own objective")
        if isinstance(model, PreTrainedModel):
            self.check_model(model)
        if kwargs.get("compute_metrics") is not None and not args.predict_with_generate:
            raise ValueError("compute_metrics needs predict_with_generate=True: its predictions are generated tokens")
        super().__init__(model=model, args=args, **kwargs)
        # So that the Trainer counts the tokens of the accumulated batch, whether or not the model's forward would
        # take the number: the losses here are sums that are divided by it.
        self.model_accepts_loss_kwargs = True
        self._sums: dict[bool, dict[str, torch.Tensor]] = {True: {}, False: {}}
        self._constants: dict[bool, dict[str, float]] = {True: {}, False: {}}
        self._batches_seen = (-1, 0)  # global step, batches of it so far

    def check_model(self, model: PreTrainedModel) -> None:
        """Raises `ValueError` for a model of another kind."""
        if not getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"model must be a sequence-to-sequence model (AutoModelForSeq2SeqLM), got {type(model).__name__}"
            )

    def objective(self, model: torch.nn.Module, inputs: dict) -> LossTerms:
        """The objective of a batch; `model` may be a data-parallel wrapper of `self.model`."""
        raise NotImplementedError

    @property
    def epoch_index(self) -> int:
        """The epoch being trained, from 0; in evaluation the one that was trained last."""
        epoch = self.state.epoch or 0.0
        if self.model.training:
            return int(epoch + 1e-6)
        return max(0, math.ceil(epoch - 1e-6) - 1)

    def train(self, *args, **kwargs):
        """The Trainer's; nothing is left over from a run before."""
        self._sums[True] = {}
        self._batches_seen = (-1, 0)
        return super().train(*args, **kwargs)

    def next_batch_seed(self, *key: int) -> int:
        """A seed for the random draws of the next batch, from the seed, the step and `key`: a resumed run is the same.

        To be called once a batch.
        """
        step, batches = self._batches_seen
        batches = batches + 1 if step == self.state.global_step else 0
        self._batches_seen = (self.state.global_step, batches)
        return hash((self.args.seed, self.state.global_step, batches, *key)) % 2**63

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The objective's sum over the number of tokens."""
        self.check_batch(inputs)
        terms = self.objective(model, inputs)
        training = self.model.training
        self._add(training, {"loss": (terms.loss, terms.items), **terms.logged})
        self._constants[training] = terms.constants
        loss = terms.loss / (terms.items if num_items_in_batch is None else num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes, this undoes it
        return (loss, {}) if return_outputs else loss

    def check_batch(self, inputs: dict) -> None:
        """Raises `ValueError` for a batch without labels, or with some that the model cannot predict."""
        if "labels" not in inputs:
            raise ValueError(f"inputs must have labels, got {', '.join(inputs)}")
        _check_targets(self.model, inputs)

    def _add(self, training: bool, terms: dict) -> None:
        sums = self._sums[training]
        for name, (value, count) in terms.items():
            pair = torch.stack([value.detach().double(), torch.as_tensor(count, device=value.device).double()])
            sums[name] = sums[name] + pair if name in sums else pair

    def _averages(self, training: bool) -> dict[str, float]:
        """Averages since the last call, over all processes."""
        sums, self._sums[training] = self._sums[training], {}
        averages = {}
        for name in sorted(sums):
            total, count = self.accelerator.reduce(sums[name], "sum").tolist()
            averages[name] = total / max(count, 1.0)
        return self.derived_logs(averages)

    def derived_logs(self, averages: dict[str, float]) -> dict[str, float]:
        """What is logged, from the averages of the terms."""
        return averages

    def log(self, logs, *args, **kwargs):
        """Adds the terms of the objective to the Trainer's training logs."""
        if "loss" in logs and self._sums[True]:
            averages = self._averages(training=True)
            averages.pop("loss")
            logs = {**logs, **averages, **self._constants[True]}
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        """The Trainer's loop; losses are averaged over tokens, not over batches."""
        self._sums[False] = {}
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        averages = {**self._averages(training=False), **self._constants[False]} if self._sums[False] else {}
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in averages.items()})
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        """The objective as the loss, and generated tokens if `predict_with_generate`."""
        inputs = self._prepare_inputs(inputs)
        loss, labels = None, inputs.get("labels")
        if labels is not None:
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs).detach()
        if prediction_loss_only or not self.args.predict_with_generate:
            return loss, None, None
        # What a collator makes of labels would be a prompt that gives them away.
        unlabeled = inputs if labels is None else encoder_inputs(inputs)
        # The stock step fills the model's generation config with defaults, max_length=20 among them, which would be
        # saved with the model and obeyed.
        generation_config = copy.deepcopy(self.model.generation_config)
        try:
            _, generated, _ = super().prediction_step(model, unlabeled, False, ignore_keys, **gen_kwargs)
        finally:
            self.model.generation_config = generation_config
        return loss, generated, labels


def _check_targets(model: PreTrainedModel, inputs: dict) -> None:
    """Raises `ValueError` that names the row for labels the model cannot predict."""
    labels = inputs["labels"]
    if hasattr(model, "check_targets"):  # the recurrent model, whose lengths may have to agree
        model.check_targets(labels, inputs.get("attention_mask"))
        return
    head = model.get_output_embeddings()
    size = model.config.get_text_config(decoder=True).vocab_size if head is None else head.weight.shape[0]
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= size))
    if bool(wrong.any()):
        row, position = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"labels: row {row} has {int(labels[row, position])}, must be from 0 to {size - 1}, or {IGNORED} where "
            "there is no target"
        )


class StepwiseTrainer(SearchAwareTrainer):
    """Base of the trainers that decode step by step: they have a `StepwiseDecoder`.

    Raises:
        ValueError: with activation (gradient) checkpointing, which drops the decoder's cache without saying so; or for
            a model that `StepwiseDecoder` refuses.
    """

    def __init__(self, model=None, args=None, **kwargs):
        if args is not None and args.activation_checkpointing:
            raise ValueError(
                "activation_checkpointing (gradient_checkpointing) must be off: it drops the decoder's cache, with "
                "which this trainer decodes; SoftBeamConfig has checkpoint_steps to save memory"
            )
        super().__init__(model=model, args=args, **kwargs)
        if args.n_gpu > 1:
            raise ValueError(
                f"one process must have one GPU, got {args.n_gpu}: caches cannot be gathered; start a process for each "
                "with accelerate launch or torchrun"
            )
        if self.train_dataset is not None and not has_length(self.train_dataset) and args.depends_on_epoch:
            raise ValueError(
                "train_dataset must have a length, got a stream, which has no epochs, with schedules that change by "
                "epoch; set alpha_growth=1 and, for scheduled sampling, teacher_forcing_schedule='always'"
            )
        self._decoder = StepwiseDecoder(self.accelerator.unwrap_model(self.model))

    @property
    def decoder(self) -> StepwiseDecoder:
        """The decoder of the present model, which `model_init` may have replaced."""
        model = self.accelerator.unwrap_model(self.model)
        if self._decoder.model is not model:
            self._decoder = StepwiseDecoder(model)
        return self._decoder


class CrossEntropyTrainer(SearchAwareTrainer):
    """Teacher forcing, the baseline of the others: cross entropy per token.

    As the stock trainer's, but the same for every accumulation and number of processes, and with an exact `eval_loss`.
    """

    def objective(self, model, inputs):
        outputs = model(**inputs)
        return LossTerms(cross_entropy_sum(outputs.logits, inputs["labels"]), num_tokens(inputs["labels"]))
