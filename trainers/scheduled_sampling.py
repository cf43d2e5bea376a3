"""Scheduled sampling, hard and differentiable: `ScheduledSamplingConfig`, `ScheduledSamplingTrainer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_ebm.checks import check_choice
from hf_ebm.objectives.losses import IGNORED, cross_entropy_sum, num_tokens
from hf_ebm.objectives.schedules import (
    check_teacher_forcing,
    teacher_forcing_probability,
)
from hf_ebm.publishing import citations
from hf_ebm.relaxations.soft_choices import INPUTS, token_weights
from hf_ebm.relaxations.stepwise import StepwiseDecoder
from hf_ebm.trainers.objective import LossTerms
from hf_ebm.trainers.seq2seq import Seq2SeqObjectiveTrainer
from hf_ebm.trainers.sequence_pairs import encoder_inputs
from hf_ebm.trainers.stepwise import Steps, StepwiseConfig, check_decodes_stepwise

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
    bibtex = (citations.GOYAL_2017, citations.GOYAL_2021)

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
