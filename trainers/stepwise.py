"""Trainers that decode step by step: the time of schedules; scheduled sampling, hard and soft; relaxed beam search."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Unpack

import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length
from transformers.utils import logging

from hf_ebm.checks import as_callable, as_truth, as_whole, check_choice, name_of
from hf_ebm.objectives.costs import DecomposableCost, HammingCost, NamedParameters, columns_for
from hf_ebm.objectives.losses import IGNORED, cross_entropy_sum, num_tokens
from hf_ebm.publishing.cards import CITATIONS
from hf_ebm.relaxations.soft_beam import (
    SoftBeamSettings,
    direct_loss,
    gold_scores,
    hinge_loss,
    relaxed_beam_search,
    soft_beam_search,
)
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
from hf_ebm.trainers.costs import COLUMNS, check_columns, without_columns
from hf_ebm.trainers.objective import LossTerms, StockArguments, check_sharding, takes_stock_arguments
from hf_ebm.trainers.seq2seq import GenerationTrainingConfig, Seq2SeqObjectiveTrainer
from hf_ebm.trainers.targets import (
    check_labels,
    check_logits_fit,
    check_one_gpu,
    check_positions,
    check_sources,
    encoder_inputs,
)

logger = logging.get_logger(__name__)

LOSSES = ("direct", "hinge")  # of `SoftBeamTrainer`


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


@dataclass
class SoftBeamConfig(StepwiseConfig):
    """Arguments of `SoftBeamTrainer`, beside those of `StepwiseConfig`.

    Args:
        beam_size: k.
        alpha_growth: as in `StepwiseConfig`, but not constant by default.
        normalization: `local` (log-probabilities; start from cross entropy) or `global` (logits; start from a
            self-normalized model).
        loss: `direct` (expected cost of what the search finds) or `hinge` (cost-augmented margin).
        max_search_steps: search, and count costs, over the first so many positions of each target only.
        checkpoint_steps: recompute each step's activations in the backward pass: less memory, one more forward pass.

    Raises:
        ValueError: for a value that is not allowed.
    """

    no_checkpointing = f"{StepwiseConfig.no_checkpointing}; checkpoint_steps recomputes whole steps instead"
    beam_size: int = field(default=3, metadata={"help": "Number of beams."})
    alpha_growth: float = field(default=1.6, metadata={"help": "Factor of alpha from unit to unit; 1: constant."})
    normalization: str = field(default="local", metadata={"help": "local (log-probabilities) or global (logits)."})
    loss: str = field(default="direct", metadata={"help": "direct or hinge."})
    max_search_steps: int | None = field(default=None, metadata={"help": "Steps of the search; default: all."})
    checkpoint_steps: bool = field(default=False, metadata={"help": "Recompute activations, step by step."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.checkpoint_steps = as_truth("checkpoint_steps", self.checkpoint_steps)
        check_choice("loss", self.loss, LOSSES)
        if self.max_search_steps is not None:
            self.max_search_steps = as_whole("max_search_steps", self.max_search_steps, 1)
        self.beam_size = as_whole("beam_size", self.beam_size, 1)
        SoftBeamSettings(self.beam_size, self.alpha, self.normalization)


class SoftBeamTrainer(Seq2SeqObjectiveTrainer):
    """Minimises what beam search finds, through its continuous relaxation (thesis, chapters 4 and 5).

    The loss is the expected cost of the relaxed beams (`direct`) or the margin between the best cost-augmented beam and
    the gold sequence (`hinge`), summed over sequences and divided by the number of target tokens: under the Hamming
    cost the direct loss is a rate of wrong tokens. Logs `alpha`, in evaluation as `eval_alpha`: that of the step
    trained last, so that losses of different times are comparable only if alpha is constant.

    Evaluation generates, if asked to, with hard beam search over scores normalized as in training.

    Args:
        cost: see `hf_ebm.objectives.costs`; default: Hamming. It also gets every column of the data set
            that it has a parameter for, with `remove_unused_columns=False`.

    Raises:
        ValueError: for a beam that is larger than the decoder's vocabulary.
    """

    config_class: ClassVar[type[SoftBeamConfig]] = SoftBeamConfig
    args: SoftBeamConfig
    bibtex = (CITATIONS["GOYAL_2019"], CITATIONS["GOYAL_2021"])
    reads_columns = True

    @takes_stock_arguments
    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: SoftBeamConfig | None = None,
        *,
        cost: DecomposableCost | None = None,
        **kwargs: Unpack[StockArguments],
    ):
        self.cost = HammingCost() if cost is None else as_callable("cost", cost)
        super().__init__(model, args, **kwargs)

    def check_model(self, model: PreTrainedModel) -> None:
        """Sequence-to-sequence models that keep their cache in training."""
        super().check_model(model)
        check_decodes_stepwise(model, self.config_class.no_checkpointing)

    def set_up(self) -> None:
        super().set_up()
        self.steps = Steps(self, self.args)
        if self.args.max_search_steps is not None:
            self.evaluated_terms = ("searched_share",)
        check_columns(self, name_of(self.cost), NamedParameters.of(self.cost))
        vocab_size = len(self.steps.decoder.embedding_weight)
        beams = self.args.beam_size
        if beams > vocab_size:
            raise ValueError(f"beam_size must be at most the vocabulary of {vocab_size} tokens, got {beams}")

    def check_batch(self, inputs: dict) -> None:
        """Only the hinge reads targets beyond `max_search_steps`; logits are kept of every beam."""
        check_labels(self.module, inputs)
        check_sources(self.module, inputs)
        args, searched = self.args, inputs["labels"][:, : self.args.max_search_steps]
        read = searched if args.loss == "direct" else inputs["labels"]
        check_positions(self.module, read, inputs.get("attention_mask"))
        if self.model.training:
            settings = "per_device_train_batch_size, beam_size, checkpoint_steps, max_search_steps"
            tokens = min(1, searched.shape[1]) if args.checkpoint_steps else searched.shape[1]
            check_logits_fit(settings, (len(searched) * args.beam_size, tokens), self.module)

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any]) -> LossTerms:
        args = self.args
        alpha, decoder = self.steps.alpha, self.steps.decoder
        labels = inputs["labels"][:, : args.max_search_steps]
        cost, inputs = self._cost_of(inputs.get(COLUMNS, {})), without_columns(inputs)
        start = decoder.embed(decoder.gold_ids(inputs["labels"])[:, 0])
        settings = SoftBeamSettings(args.beam_size, alpha, args.normalization, args.checkpoint_steps)
        hinge = args.loss == "hinge"
        begin = {"model": model, **encoder_inputs(inputs)}
        result = relaxed_beam_search(decoder, start, begin, labels, cost, settings, hinge)
        if hinge:
            logits = self.model(**inputs).logits[:, : args.max_search_steps]
            losses = hinge_loss(result, gold_scores(logits, labels, args.normalization), alpha)
        else:
            losses = direct_loss(result, alpha)
        tokens = num_tokens(inputs["labels"])
        logged = {} if args.max_search_steps is None else {"searched_share": (num_tokens(labels), tokens)}
        return LossTerms(losses.sum(), tokens, logged, {"alpha": alpha})

    def _cost_of(self, columns: Mapping[str, Any]) -> DecomposableCost:
        """The cost, given the columns that it reads."""
        given = columns_for(name_of(self.cost), NamedParameters.of(self.cost), columns)
        return functools.partial(self.cost, **given) if given else self.cost

    def prediction_step(  # type: ignore[override]  # annotated as a float, which it never is
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Decodes as the model was trained to be decoded, unless told otherwise."""
        asked = gen_kwargs or getattr(self, "_gen_kwargs", {})
        asked = {name: value for name, value in asked.items() if value is not None}
        defaults: dict[str, Any] = {"num_beams": self.args.beam_size}
        if "custom_generate" not in asked:
            search = functools.partial(soft_beam_search, alpha=math.inf, normalization=self.args.normalization)
            defaults["custom_generate"] = search
        elif asked["custom_generate"] is soft_beam_search:
            defaults["normalization"] = self.args.normalization
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **{**defaults, **asked})
