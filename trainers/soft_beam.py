"""Relaxed beam search as a training objective: `SoftBeamConfig`, `SoftBeamTrainer`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Unpack

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_ebm.checks import as_callable, as_truth, as_whole, check_choice, name_of
from hf_ebm.objectives.costs import DecomposableCost, HammingCost, NamedParameters, columns_for
from hf_ebm.objectives.losses import num_tokens
from hf_ebm.publishing.cards import CITATIONS
from hf_ebm.relaxations.soft_beam import (
    SoftBeamSettings,
    direct_loss,
    gold_scores,
    hinge_loss,
    relaxed_beam_search,
    soft_beam_search,
)
from hf_ebm.trainers.costs import COLUMNS, check_columns, without_columns
from hf_ebm.trainers.objective import LossTerms, StockArguments, takes_stock_arguments
from hf_ebm.trainers.seq2seq import Seq2SeqObjectiveTrainer
from hf_ebm.trainers.stepwise import Steps, StepwiseConfig, check_decodes_stepwise
from hf_ebm.trainers.targets import check_labels, check_logits_fit, check_positions, encoder_inputs

LOSSES = ("direct", "hinge")


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
