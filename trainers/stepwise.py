"""What the trainers that decode step by step share: `StepwiseConfig`, their decoder, and the time of schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length
from transformers.utils import logging

from hf_ebm.checks import check_choice
from hf_ebm.objectives.schedules import SCHEDULE_UNITS, check_inverse_temperature, inverse_temperature
from hf_ebm.relaxations.stepwise import StepwiseDecoder, check_layers_stay
from hf_ebm.trainers.labels import check_one_gpu
from hf_ebm.trainers.seq2seq import GenerationTrainingConfig, Seq2SeqObjectiveTrainer

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
        ValueError: for a value that is not allowed, FSDP, and activation (gradient) checkpointing, which drops the
            decoder's cache without saying so.
    """

    no_checkpointing: ClassVar[str] = (
        "activation_checkpointing (gradient_checkpointing) must be off, of the model too: it drops the decoder's "
        "cache, with which this trainer decodes"
    )
    no_fsdp: ClassVar[str] = "fsdp must be off: steps read whole weights outside of the model's forward"
    alpha: float = field(default=1.0, metadata={"help": "Inverse temperature of the relaxation at the start."})
    alpha_growth: float = field(default=1.0, metadata={"help": "Factor of alpha from unit to unit; 1: constant."})
    schedule_unit: str = field(
        default="epoch", metadata={"help": "What schedules count: epoch, step, or percent (of the training)."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alpha, self.alpha_growth = check_inverse_temperature(self.alpha, self.alpha_growth)
        check_choice("schedule_unit", self.schedule_unit, SCHEDULE_UNITS)
        if self.activation_checkpointing:
            raise ValueError(self.no_checkpointing)
        if self.fsdp:
            raise ValueError(self.no_fsdp)

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
        ValueError: for several GPUs in one process, FSDP, a stream with schedules that count epochs, or a model that
            `StepwiseDecoder` refuses.
    """

    def __init__(self, trainer: Seq2SeqObjectiveTrainer, args: StepwiseConfig):
        check_one_gpu(trainer, ": caches cannot be gathered")
        if trainer.is_fsdp_enabled:  # by accelerate's settings
            raise ValueError(args.no_fsdp)
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
