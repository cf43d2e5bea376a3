"""What the trainers that decode step by step share: `StepwiseConfig`, `StepwiseTrainer`, the time of schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length
from transformers.utils import logging

from hf_ebm.checks import check_choice
from hf_ebm.objectives.schedules import SCHEDULE_UNITS, check_inverse_temperature
from hf_ebm.relaxations.stepwise import StepwiseDecoder, check_layers_stay
from hf_ebm.trainers.search_aware import SearchAwareConfig, SearchAwareTrainer

logger = logging.get_logger(__name__)


@dataclass
class StepwiseConfig(SearchAwareConfig):
    """Arguments of the trainers that decode step by step, beside those of `Seq2SeqTrainingArguments`.

    Args:
        alpha: inverse temperature of the relaxation at the start.
        alpha_growth: its factor from one unit of the schedule to the next; 1 keeps it constant.
        schedule_unit: what schedules count: `epoch`, `step` (updates of the weights) or `percent` (hundredths of the
            training, whatever its length). Within an epoch nothing changes; percents have fractions.

    Raises:
        ValueError: for a value that is not allowed.
    """

    smooths_labels: ClassVar[bool] = False
    alpha: float = field(default=1.0, metadata={"help": "Inverse temperature of the relaxation at the start."})
    alpha_growth: float = field(default=1.0, metadata={"help": "Factor of alpha from unit to unit; 1: constant."})
    schedule_unit: str = field(
        default="epoch", metadata={"help": "What schedules count: epoch, step, or percent (of the training)."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alpha, self.alpha_growth = check_inverse_temperature(self.alpha, self.alpha_growth)
        check_choice("schedule_unit", self.schedule_unit, SCHEDULE_UNITS)

    @property
    def has_schedule(self) -> bool:
        """Whether the objective changes during training."""
        return self.alpha_growth != 1


class StepwiseTrainer(SearchAwareTrainer):
    """Base of the trainers that decode step by step: they have a `StepwiseDecoder`.

    Before training there is a warning of a schedule that would change nothing.

    Raises:
        ValueError: with activation (gradient) checkpointing, of the arguments or the model, which drops the decoder's
            cache without saying so; for a stream with schedules that count epochs; or for a model that
            `StepwiseDecoder` refuses.
    """

    config_class: ClassVar[type[StepwiseConfig]] = StepwiseConfig
    args: StepwiseConfig

    def check_arguments(self, args: Any, compute_metrics: Callable | None) -> None:
        super().check_arguments(args, compute_metrics)
        if args.activation_checkpointing:
            raise ValueError(self._no_checkpointing)

    def set_up(self) -> None:
        super().set_up()
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process must have one GPU, got {self.args.n_gpu}: caches cannot be gathered; start a process for "
                "each with accelerate launch or torchrun"
            )
        stream = self.train_dataset is not None and not has_length(self.train_dataset)
        if stream and self.args.has_schedule and self.args.schedule_unit == "epoch":
            raise ValueError(
                "train_dataset must have a length, got a stream, which has no epochs, with schedules that count them; "
                "set schedule_unit='step' or 'percent'"
            )
        self._decoder = StepwiseDecoder(self.accelerator.unwrap_model(self.model))
        self.add_callback(_BeforeTraining(self))

    _no_checkpointing = (
        "activation_checkpointing (gradient_checkpointing) must be off, of the model too: it drops the decoder's "
        "cache, with which this trainer decodes"
    )

    def check_model(self, model: PreTrainedModel) -> None:
        """Sequence-to-sequence models that keep their cache in training."""
        super().check_model(model)
        if model.is_activation_checkpointing:
            raise ValueError(self._no_checkpointing)
        check_layers_stay(model)

    @property
    def decoder(self) -> StepwiseDecoder:
        """The decoder of the present model, which `model_init` may have replaced."""
        model = self.accelerator.unwrap_model(self.model)
        if self._decoder.model is not model:
            self._decoder = StepwiseDecoder(model)
        return self._decoder

    @property
    def schedule_time(self) -> float:
        """Units of the schedule before the present step, from 0; in evaluation before the step that was the last."""
        epoch, step, training = self.state.epoch or 0.0, self.state.global_step, self.model.training
        if self.args.schedule_unit == "epoch":
            return int(epoch + 1e-6) if training else max(0, math.ceil(epoch - 1e-6) - 1)
        return self._units(step if training else max(0, step - 1))

    @property
    def last_schedule_time(self) -> float:
        """`schedule_time` of the last step of the run."""
        if self.args.schedule_unit == "epoch":
            return max(0, self.state.num_train_epochs - 1)
        return self._units(max(0, self.state.max_steps - 1))

    def _units(self, steps: int) -> float:
        return steps if self.args.schedule_unit == "step" else 100 * steps / max(1, self.state.max_steps)

    def unused_schedules(self) -> list[str]:
        """What stays as it is for the whole run, though a schedule is there to change it, and why."""
        args = self.args
        if args.alpha_growth == 1 or self.last_schedule_time > 0:
            return []
        return [f"alpha stays at {args.alpha}, as alpha_growth={args.alpha_growth} counts by {args.schedule_unit}"]


class _BeforeTraining(TrainerCallback):
    """Warns of schedules that change nothing, once the length of the run is known."""

    def __init__(self, trainer: StepwiseTrainer):
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for found in self.trainer.unused_schedules() if state.is_world_process_zero else []:
            logger.warning(
                f"{found}, and the run has {state.max_steps} steps in {state.num_train_epochs} epochs; train longer, "
                "or set schedule_unit='percent' (or 'step')"
            )
