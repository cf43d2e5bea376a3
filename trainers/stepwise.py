"""Trainers that decode step by step: what they share, the time of schedules, and scheduled sampling, hard and soft."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length
from transformers.utils import logging

from hf_ebm.checks import check_choice
from hf_ebm.objectives.losses import IGNORED, cross_entropy_sum, num_tokens
from hf_ebm.publishing.cards import CITATIONS
from hf_ebm.relaxations.soft_choices import (
    INPUTS,
    SCHEDULE_UNITS,
    check_inverse_temperature,
    check_teacher_forcing,
    inverse_temperature,
    teacher_forcing_probability,
    token_weights,
)
from hf_ebm.relaxations.stepwise import StepwiseDecoder, check_layers_stay
from hf_ebm.trainers.objective import LossTerms, check_sharding
from hf_ebm.trainers.seq2seq import GenerationTrainingConfig, Seq2SeqObjectiveTrainer
from hf_ebm.trainers.targets import check_one_gpu, encoder_inputs

logger = logging.get_logger(__name__)


@dataclass
class StepwiseConfig(GenerationTrainingConfig):
    """Arguments of the trainers that decode step by step, beside those of `Seq2SeqTrainingArguments`.

    Args:
        alpha: inverse temperature of the relaxation at the start.
        alpha_growth: its factor from one unit of the schedule to the next; 1 keeps it constant.
        schedule_unit: what schedules count: `epoch`, `step` (updates of the weights) or `percent` (hundredths of the
            training, whatever its length). Within an epoch nothing changes; percents have fractions.

    Raises:
        ValueError: for a value that is not allowed, FSDP and ZeRO-3 of DeepSpeed, and activation (gradient)
            checkpointing, which drops the decoder's cache without saying so.
    """

    no_checkpointing: ClassVar[str] = (
        "activation_checkpointing (gradient_checkpointing) must be off, of the model too: it drops the decoder's "
        "cache, with which this trainer decodes"
    )
    no_sharding: ClassVar[str] = "steps read whole weights outside of the model's forward"
    alpha: float = field(default=1.0, metadata={"help": "Inverse temperature of the relaxation at the start."})
    alpha_growth: float = field(default=1.0, metadata={"help": "Factor of alpha from unit to unit; 1: constant."})
    schedule_unit: str = field(
        default="epoch", metadata={"help": "What schedules count: epoch, step, or percent (of the training)."}
    )

    def __post_init__(self) -> None:
        check_sharding(self, bool(self.deepspeed) and HfDeepSpeedConfig(self.deepspeed).is_zero3())
        super().__post_init__()
        self.alpha, self.alpha_growth = check_inverse_temperature(self.alpha, self.alpha_growth)
        check_choice("schedule_unit", self.schedule_unit, SCHEDULE_UNITS)
        if self.activation_checkpointing:
            raise ValueError(self.no_checkpointing)
        check_sharding(self, bool(self.fsdp))

    @property
    def has_schedule(self) -> bool:
        """Whether the objective changes during training."""
        return self.alpha_growth != 1


def check_decodes_stepwise(model: PreTrainedModel, no_checkpointing: str) -> None:
    """Raises `ValueError` for a model that doesn't keep its cache in training."""
    if model.is_activation_checkpointing:
        raise ValueError(no_checkpointing)
    check_layers_stay(model)


class Steps(TrainerCallback):
    """The `StepwiseDecoder` of a trainer's present model, and the time of its schedules.

    Before training there is a warning of a schedule that would change nothing.

    Args:
        trainer: that decodes step by step; it gets this as a callback.

    Raises:
        ValueError: for several GPUs in one process, a stream with schedules that count epochs, or a model that
            `StepwiseDecoder` refuses.
    """

    def __init__(self, trainer: Seq2SeqObjectiveTrainer, args: StepwiseConfig):
        check_one_gpu(trainer, ": caches cannot be gathered")
        stream = trainer.train_dataset is not None and not has_length(trainer.train_dataset)
        if stream and args.has_schedule and args.schedule_unit == "epoch":
            raise ValueError(
                "train_dataset must have a length, got a stream, which has no epochs, with schedules that count them; "
                "set schedule_unit='step' or 'percent'"
            )
        self.trainer, self.args = trainer, args
        self._decoder = StepwiseDecoder(trainer.module)
        # Each says what stays as it is for the whole run, though a schedule is there to change it, and why.
        self.unused_schedules: list[Callable[[], str | None]] = [self._constant_alpha]
        trainer.add_callback(self)

    @property
    def decoder(self) -> StepwiseDecoder:
        """The decoder of the present model, which `model_init` may have replaced."""
        model = self.trainer.module
        if self._decoder.model is not model:
            self._decoder = StepwiseDecoder(model)
        return self._decoder

    @property
    def time(self) -> float:
        """Units of the schedule before the present step, from 0; in evaluation before the step that was the last."""
        state, training = self.trainer.state, self.trainer.model.training
        epoch, step = state.epoch or 0.0, state.global_step
        if self.args.schedule_unit == "epoch":
            return int(epoch + 1e-6) if training else max(0, math.ceil(epoch - 1e-6) - 1)
        return self._units(step if training else max(0, step - 1))

    @property
    def last_time(self) -> float:
        """`time` of the last step of the run."""
        if self.args.schedule_unit == "epoch":
            return max(0, self.trainer.state.num_train_epochs - 1)
        return self._units(max(0, self.trainer.state.max_steps - 1))

    def _units(self, steps: int) -> float:
        return steps if self.args.schedule_unit == "step" else 100 * steps / max(1, self.trainer.state.max_steps)

    @property
    def alpha(self) -> float:
        """The inverse temperature of the present step."""
        return inverse_temperature(self.time, self.args.alpha, self.args.alpha_growth)

    def _constant_alpha(self) -> str | None:
        args = self.args
        if args.alpha_growth == 1 or self.last_time > 0:
            return None
        return f"alpha stays at {args.alpha}, as alpha_growth={args.alpha_growth} counts by {args.schedule_unit}"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Warns of schedules that change nothing, once the length of the run is known."""
        for unused in self.unused_schedules if state.is_world_process_zero else []:
            if (found := unused()) is not None:
                logger.warning(
                    f"{found}, and the run has {state.max_steps} steps in {state.num_train_epochs} epochs; train "
                    "longer, or set schedule_unit='percent' (or 'step')"
                )


_ALL_GOLD = 0.99  # probability of gold inputs from which on training is teacher forcing for all practical purposes


@dataclass
class ScheduledSamplingConfig(StepwiseConfig):
    """Arguments of `ScheduledSamplingTrainer`, beside those of `StepwiseConfig`.

    Args:
        inputs: what the decoder reads where it doesn't read gold: `argmax`, `sample` (Bengio et al. 2015), or their
            relaxations `soft_argmax`, `soft_sample` (Goyal, Dyer and Berg-Kirkpatrick 2017).
        teacher_forcing_schedule: `inverse_sigmoid`, `linear`, `constant` or `always` (the model's inputs from the first
            step on), by `schedule_unit`; all but the last begin with one unit of gold inputs.
        decay_strength: k of the inverse sigmoid, which is at 1/2 after `k log k` units.
        teacher_forcing_probability: of `constant`, and at the end of `linear`.

    Raises:
        ValueError: for a value that is not allowed.
    """

    inputs: str = field(default="soft_argmax", metadata={"help": f"One of {', '.join(INPUTS)}."})
    teacher_forcing_schedule: str = field(
        default="inverse_sigmoid", metadata={"help": "inverse_sigmoid, linear, constant or always."}
    )
    decay_strength: float = field(default=10.0, metadata={"help": "k of the inverse sigmoid; larger is gentler."})
    teacher_forcing_probability: float = field(
        default=0.5, metadata={"help": "Probability of gold inputs: of constant, and at the end of linear."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("inputs", self.inputs, INPUTS)
        self.decay_strength, self.teacher_forcing_probability = check_teacher_forcing(
            self.teacher_forcing_schedule, self.decay_strength, self.teacher_forcing_probability
        )

    @property
    def has_schedule(self) -> bool:
        """Whether the objective changes during training."""
        return self.teacher_forcing_schedule != "always" or self.alpha_growth != 1


class ScheduledSamplingTrainer(Seq2SeqObjectiveTrainer):
    """Cross entropy at every token, with the decoder's inputs gold or its own by a coin for each token.

    Logs `teacher_forcing_probability`, `alpha` and `model_input_share`, the share of tokens after the first whose input
    was the model's. Coins and noise come from a generator of the seed, the step and the process, so that a resumed run
    is the same run. Evaluation is teacher-forced: `eval_loss` is the cross entropy, comparable between epochs and runs.
    """

    config_class: ClassVar[type[ScheduledSamplingConfig]] = ScheduledSamplingConfig
    args: ScheduledSamplingConfig
    bibtex = (CITATIONS["GOYAL_2017"], CITATIONS["GOYAL_2021"])

    def check_model(self, model: PreTrainedModel) -> None:
        """Sequence-to-sequence models that keep their cache in training."""
        super().check_model(model)
        check_decodes_stepwise(model, self.config_class.no_checkpointing)

    def set_up(self) -> None:
        super().set_up()
        self.steps = Steps(self, self.args)
        self.steps.unused_schedules.append(self._always_gold)

    def _probability(self, time: float) -> float:
        """Of gold inputs."""
        return teacher_forcing_probability(
            time,
            self.args.teacher_forcing_schedule,
            decay_strength=self.args.decay_strength,
            probability=self.args.teacher_forcing_probability,
            last=self.steps.last_time,
        )

    def _always_gold(self) -> str | None:
        lowest = self._probability(self.steps.last_time)  # no schedule rises
        if lowest < _ALL_GOLD:
            return None
        return (
            f"the decoder reads gold with a probability of at least {lowest:.3g} in the whole run, as "
            f"teacher_forcing_schedule={self.args.teacher_forcing_schedule!r} counts by {self.args.schedule_unit}"
        )

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any]) -> LossTerms:
        if not self.model.training:
            return LossTerms(cross_entropy_sum(model(**inputs).logits, inputs["labels"]), num_tokens(inputs["labels"]))
        args, labels = self.args, inputs["labels"]
        probability, alpha = self._probability(self.steps.time), self.steps.alpha
        seed = self.next_batch_seed(self.accelerator.process_index)
        generator = torch.Generator(labels.device).manual_seed(seed)
        coins = torch.rand(labels.shape, generator=generator, device=labels.device)
        use_gold = coins < probability
        later = (labels != IGNORED)[:, 1:]
        logged = {"model_input_share": ((~use_gold[:, 1:] & later).sum(), later.sum())}
        constants = {"teacher_forcing_probability": probability, "alpha": alpha}
        if probability == 1.0:  # no model input anywhere: one parallel pass is the same law
            logits = model(**inputs).logits
        else:
            logits = scheduled_sampling_logits(
                self.steps.decoder, inputs, use_gold, args.inputs, alpha, generator, model=model
            )
        return LossTerms(cross_entropy_sum(logits, labels), num_tokens(labels), logged, constants)


def scheduled_sampling_logits(
    decoder: StepwiseDecoder,
    inputs: dict,
    use_gold: torch.Tensor,
    model_inputs: str,
    alpha: float,
    generator: torch.Generator | None = None,
    model: nn.Module | None = None,
) -> torch.Tensor:
    """Logits of every step, (B, T, V), where step t reads the gold token if `use_gold[:, t]`, else the model's choice.

    Args:
        inputs: a batch of the model, with `labels` (B, T).
        use_gold: bool, (B, T); its first column is not used, as the first input is the start token.
        model_inputs: one of `hf_ebm.relaxations.soft_choices.INPUTS`.
        model: see `StepwiseDecoder.begin`.
    """
    labels = inputs["labels"]
    gold = decoder.embed(decoder.gold_ids(labels))
    logits, state = decoder.begin(gold[:, 0], model=model, **encoder_inputs(inputs))
    every = [logits]
    for step in range(1, labels.shape[1]):
        chosen = decoder.expected_embedding(token_weights(logits, model_inputs, alpha, generator))
        embeddings = torch.where(use_gold[:, step, None], gold[:, step], chosen.to(gold.dtype))
        logits, state = decoder.step(embeddings, state)
        every.append(logits)
    return torch.stack(every, 1)
