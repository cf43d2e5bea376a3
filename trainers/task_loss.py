"""What the trainers for a cost of decoded sequences share: `TaskLossConfig`, `TaskLossTrainer`.

They take sequence-to-sequence and causal language models, adapters of PEFT on them included.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer_utils import EvalPrediction, align_special_tokens
from transformers.utils import logging

from hf_ebm.checks import as_callables
from hf_ebm.encoders import encodes_ids
from hf_ebm.model_facts import generation_limit, special_ids
from hf_ebm.models.energy.inputs import refuse_needed_inputs
from hf_ebm.models.probes import check_causal, check_not_block_sparse, check_weights_stay
from hf_ebm.objectives.completions import pad_right
from hf_ebm.objectives.sequence_costs import SequenceCost, as_cost
from hf_ebm.objectives.token_losses import IGNORED
from hf_ebm.plain_values import as_number
from hf_ebm.random_state import seeded
from hf_ebm.trainers.columns import COLUMNS, columns_at
from hf_ebm.trainers.decoding_trial import decodes_as_scored
from hf_ebm.trainers.search_aware import LossTerms, SearchAwareConfig, SearchAwareTrainer
from hf_ebm.trainers.sequence_pairs import (
    DEFAULT_LENGTH,
    RuledOutTokens,
    SequencePairs,
    decoding_length,
    length_terms,
    new_token_limit,
)

logger = logging.get_logger(__name__)

_NO_ROOM = "max_length must leave room behind a prompt of {} tokens, got {}"


@dataclass
class TaskLossConfig(SearchAwareConfig):
    """Arguments of the trainers for a cost, beside those of `Seq2SeqTrainingArguments`.

    `generation_config` says how is decoded (greedily, by beam search, by sampling); without it the model's own does.

    Args:
        cost: name of a cost of `hf_ebm.objectives.sequence_costs.COSTS`; a trainer takes a callable as well.
        max_length_ratio: decoding stops after this times the length of the batch's longest target (Welleck and Cho
            2020, appendix A.4), and before where the `generation_config` allows fewer tokens (`max_new_tokens`, or
            else `max_length`, which counts the prompt of a causal model and the start token of a decoder).

    Raises:
        ValueError: for an unknown cost or a ratio that isn't positive.
    """

    smooths_labels: ClassVar[bool] = False
    cost: str = field(default="edit_distance", metadata={"help": "Name of the cost that is minimized."})
    max_length_ratio: float = field(
        default=1.3, metadata={"help": "Longest decoded sequence, by the longest target of the batch."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.cost, str):
            raise ValueError(f"cost must be a name here, got {self.cost!r}; give a callable to the trainer")
        as_cost(self.cost)
        self.max_length_ratio = as_number("max_length_ratio", self.max_length_ratio, above=0)


class TaskLossTrainer(SearchAwareTrainer):
    """Base of the trainers that minimize a cost of decoded sequences.

    A batch is decoded up to `max_length_ratio` times its longest target, and never beyond what the `generation_config`
    allows, in evaluation too: `eval_cost` of sequences that don't end depends on what they are batched with, so compare
    it at one `per_device_eval_batch_size`. Logged are `decoded_length`, the mean number of tokens that were decoded,
    ends included, and `cut_share`, the share of sequences that were cut off at their greatest length.

    A causal batch has `input_ids` and `labels` that are -100 on the prompt; it may be padded on either side. In
    evaluation `eval_loss` is the cross entropy in nats per target token, and `eval_cost` the mean cost of what is
    decoded as in training, both over rows that have a target; in training every row must have one. A causal row without
    labels is a prompt. A batch without any is decoded to the length of the `generation_config`, by default 20 tokens.
    Decoding leaves the model's mode, cache setting and generation config as they were. Prompts of unequal length are
    decoded one length after another where a trial, when the trainer is made, shows that padding changes the model.

    Args:
        cost: a name, or a callable `cost(predictions, references) -> (B,)`; see `hf_ebm.objectives.sequence_costs`.
            In place of `args.cost`. It also gets what else it has a parameter for by name: `prompts`, and with
            `remove_unused_columns=False` every column of the data set that the model's forward doesn't take.

    Raises:
        ValueError: for a model that cannot decode or has no end token, a cost that reads texts without a
            `processing_class`, several GPUs in one process, and what `SearchAwareTrainer` refuses.
    """

    config_class: ClassVar[type[TaskLossConfig]] = TaskLossConfig
    args: TaskLossConfig
    needs_every_row = True
    reads_columns = True
    _told_short = False  # whether it was told that the generation config cuts off before targets end
    scores_its_samples: ClassVar[bool] = False  # whether log probabilities must be those that samples are drawn by
    evaluated_terms = ("cost", "decoded_length", "cut_share")

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: TaskLossConfig | None = None,
        *,
        cost: str | Callable | SequenceCost | None = None,
        data_collator: Callable[[list], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        model_init: Callable[..., PreTrainedModel] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list | None = None,
        **kwargs: Any,
    ):
        self._given_cost = cost
        self._own_generation_config = getattr(model, "generation_config", None)  # which the stock trainer replaces
        self._own_use_cache = getattr(getattr(model, "config", None), "use_cache", None)  # as well
        super().__init__(
            model, args, data_collator=data_collator, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=processing_class, model_init=model_init, compute_metrics=compute_metrics,
            callbacks=callbacks, **kwargs,
        )  # fmt: skip

    def set_up(self) -> None:
        super().set_up()
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process must have one GPU, got {self.args.n_gpu}; start a process for each with accelerate "
                "launch or torchrun"
            )
        if isinstance(self.processing_class, PreTrainedTokenizerBase) and self.model_init is None:
            align_special_tokens(self.model, self.processing_class)  # as `train` would do, but before they are read
        self.decoding_config = copy.deepcopy(self.model.generation_config)
        own = self._own_generation_config
        if self.args.generation_config is not None and own is not None:
            self.model.generation_config = own
            for name in ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id"):
                if getattr(self.decoding_config, name) is None:  # where decoding starts is the model's business
                    setattr(self.decoding_config, name, getattr(own, name))
        if self._own_use_cache is not None:  # whether to cache is said in every call here
            self.model.config.use_cache = self._own_use_cache
        self.cost = as_cost(self.args.cost if self._given_cost is None else self._given_cost)
        self.check_columns(self.cost.name, self.cost.parameters, ("prompts",))
        if self.cost.reads == "texts" and self.processing_class is None:
            raise ValueError(f"processing_class must be given: the cost {self.cost.name!r} reads texts")
        self.end_ids, self.pad_id = self._special_ids()
        self._decoded: list[torch.Tensor] = []  # of the rows with targets of the last evaluation batch
        self._tried, self._by_length = self.module, self._try_decoding(self.module)

    def check_model(self, model: PreTrainedModel) -> None:
        """Sequence-to-sequence and causal models."""
        if not model.can_generate():
            raise ValueError(
                "model must be a sequence-to-sequence or a causal language model (AutoModelForSeq2SeqLM, "
                f"AutoModelForCausalLM), got {type(model).__name__}"
            )
        if not model.config.is_encoder_decoder:
            check_not_block_sparse("model", model)
            check_weights_stay("model", model)
            refuse_needed_inputs("model", model)
            if not encodes_ids(model):
                raise ValueError(f"model: {type(model).__name__} goes on from {model.main_input_name}, must from ids")
            check_causal("model", model)

    def _special_ids(self) -> tuple[list[int], int]:
        config = self.decoding_config
        ends = special_ids("eos_token_id", config, self.model)
        if not ends:
            raise ValueError("generation_config must have an eos_token_id, got none: decoding could not end")
        config.eos_token_id = ends
        config.pad_token_id = [*special_ids("pad_token_id", config, self.model), *ends][0]
        return ends, config.pad_token_id

    @property
    def module(self) -> PreTrainedModel:
        """The model without data-parallel wrapper; inside autocast, where the arguments say so."""
        return self.accelerator.unwrap_model(self.model)

    def scored_rows(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Rows with a target; the first token of a causal row is none."""
        targets = self.pairs(inputs).targets
        return torch.tensor([len(ids) > 0 for ids in targets], device=targets[0].device)

    def pairs(self, inputs: dict) -> SequencePairs:
        """A batch as prompts and targets."""
        pairs = SequencePairs.of(self.module, inputs, self.pad_id, self.end_ids)
        pairs.by_length, pairs.columns = self.by_length, inputs.get(COLUMNS, {})
        return pairs

    @property
    def by_length(self) -> bool:
        """Whether prompts of unequal length are decoded apart, as padding changes what the present model decodes."""
        module = self.module
        if self._tried is not module:  # which `model_init` may have replaced
            self._tried, self._by_length = module, self._try_decoding(module)
        return self._by_length

    def _try_decoding(self, model: PreTrainedModel) -> bool:
        name = type(model).__name__
        if self.scores_its_samples and getattr(model.config, "expert_capacity", None) is not None:
            raise ValueError(
                f"model: an expert of {name} takes expert_capacity={model.config.expert_capacity} tokens, so that the "
                "probability of a sample depends on what stands beside it; MinimumRiskTrainer and MGSTrainer take it"
            )
        agrees = functools.partial(decodes_as_scored, model, self.pad_id, self.end_ids, limit=self._length_limit())
        if agrees():
            return False
        causal = not model.config.is_encoder_decoder
        if not causal or not agrees(by_length=True):
            found = f"model: {name} gives tokens other probabilities in decoding than in one pass over a sequence"
            if self.scores_its_samples:
                raise ValueError(
                    f"{found}, so that the gradient would be of another distribution than that of the samples; "
                    "MinimumRiskTrainer and MGSTrainer take it"
                )
            logger.warning(f"{found}: what is decoded comes from the former, its likelihood from the latter")
        return causal

    def decoder(self, pairs: SequencePairs, **changes: Any) -> GenerationConfig:
        """How a batch is decoded, with the length that its targets and the `generation_config` allow."""
        config = copy.deepcopy(self.decoding_config)
        config.update(max_length=None, max_new_tokens=self._max_new_tokens(pairs), use_cache=True)
        config.update(return_dict_in_generate=False, output_scores=False, output_logits=False)
        if unknown := config.update(**changes):
            raise ValueError(
                "arguments of generation must be those of GenerationConfig, or logits_processor, got "
                f"{', '.join(unknown)}"
            )
        return config

    def decode(
        self,
        pairs: SequencePairs,
        config: GenerationConfig,
        seed: int | None = None,
        num_samples: int = 1,
        processor: RuledOutTokens | None = None,
        further: Sequence[Callable] = (),
    ) -> list[list[torch.Tensor]]:
        """Decodes a batch with its own random numbers, as precisely as it is scored.

        Autocast is said here as PEFT's `generate` goes past the forward in which accelerate puts it.
        """
        with seeded(self.args.seed if seed is None else seed, pairs.targets[0].device), self.accelerator.autocast():
            return pairs.decode(self.module, config, num_samples, processor, further)

    def new_tokens(self, targets: Sequence[Sized], start: int) -> int:
        """The most tokens that are decoded behind `start`, by the targets and `generation_config`; may be below 1."""
        by_targets = decoding_length(targets, self.args.max_length_ratio) or None  # of a batch without any
        limits = (by_targets, new_token_limit(self.decoding_config, start))
        return min((limit for limit in limits if limit is not None), default=DEFAULT_LENGTH)

    def _start(self, pairs: SequencePairs) -> int:
        """The tokens that stand before what is decoded, in the longest row."""
        return 1 if self.module.config.is_encoder_decoder else max(map(len, pairs.prompts))

    def _max_new_tokens(self, pairs: SequencePairs) -> int:
        start = self._start(pairs)
        length = self.new_tokens(pairs.targets, start)
        if length < 1:
            raise ValueError(_NO_ROOM.format(start, self.decoding_config.max_length))
        longest, own = max(map(len, pairs.targets)), new_token_limit(self.decoding_config, start)
        if own is not None and own < longest and not self._told_short:
            self._told_short = True
            logger.warning(
                f"the generation_config ends decoding after {own} tokens, and a target has {longest}; raise its "
                "max_new_tokens or max_length, if that isn't meant"
            )
        limit = self._length_limit()
        if limit is None:
            return length
        room = limit - start
        if room < 1:
            raise ValueError(f"prompts must leave room for a token, got one of {start} with {limit} positions")
        return min(length, room)  # a position that the model lacks would be an error in the middle of decoding

    def _length_limit(self) -> int | None:
        return generation_limit(self.module)

    def costs(self, pairs: SequencePairs, rows: list[int], sequences: list[torch.Tensor]) -> torch.Tensor:
        """Costs of sequences, each of a row of the batch: (N,) float32 on the device of the batch."""
        references = [pairs.targets[row] for row in rows]
        wanted = self.cost.parameters.takes("prompts")
        if not pairs.prompts and self.cost.parameters.others.get("prompts"):
            raise ValueError(f"inputs must have input_ids: the cost {self.cost.name!r} reads prompts")
        prompts = [pairs.prompts[row] for row in rows] if wanted and pairs.prompts else None
        columns = columns_at(pairs.columns, rows)
        read = self._texts if self.cost.reads == "texts" else _lists
        device = pairs.targets[0].device
        with torch.autocast(device.type, enabled=False):  # a scorer computes as precisely in every objective
            costs = self.cost(read(sequences), read(references), read(prompts) if prompts else None, columns)
        return costs.to(device)

    def _texts(self, sequences: list[torch.Tensor]) -> list[str]:
        decode = getattr(self.processing_class, "batch_decode", None)
        if decode is None:
            raise ValueError(f"processing_class must decode ids, got {type(self.processing_class).__name__}")
        return decode(_lists(sequences), skip_special_tokens=True)

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any]) -> LossTerms:
        pairs = self.pairs(inputs)
        if self.model.training:
            return self.training_terms(model, pairs)
        rows = list(range(len(pairs)))
        log_probs = pairs.log_probs(model, rows, pairs.targets)
        config = self.decoder(pairs)
        self._decoded = [found[0] for found in self.decode(pairs, config)]
        count = torch.tensor(len(pairs), device=log_probs.device)
        logged = {"cost": (self.costs(pairs, rows, self._decoded).sum(), count)}
        logged |= self.length_terms(self._decoded, config)
        return LossTerms(-log_probs.sum(), _num_target_tokens(pairs), logged)

    def length_terms(self, sequences: list[torch.Tensor], config: GenerationConfig) -> dict[str, tuple]:
        """What is logged of the lengths of sequences that were decoded so."""
        return length_terms(sequences, self.end_ids, config)

    def training_terms(self, model: nn.Module, pairs: SequencePairs) -> LossTerms:
        """The objective of a batch in training."""
        raise NotImplementedError

    def prediction_step(  # type: ignore[override]  # annotated as a float, which it never is
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The predictions are what is decoded, without prompts: as in training, but for what `gen_kwargs` change.

        They are settings of a `GenerationConfig`, and `logits_processor`.
        """
        self._decoded = []
        loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        if prediction_loss_only or not self.args.predict_with_generate:
            return loss, None, None
        pairs = self.pairs(self._prepare_inputs(inputs))
        asked = gen_kwargs or getattr(self, "_gen_kwargs", {})
        asked = {name: value for name, value in asked.items() if value is not None}
        further = as_callables("logits_processor", asked.pop("logits_processor", None))
        if "max_length" in asked:
            most, start = asked.pop("max_length"), self._start(pairs)
            if most <= start:
                raise ValueError(_NO_ROOM.format(start, most))
            asked.setdefault("max_new_tokens", most - start)
        decoded = self._decoded  # for the cost of this very batch, if all its rows had one
        if asked or further or len(decoded) < len(pairs):
            config = self.decoder(pairs, **asked)
            decoded = [found[0] for found in self.decode(pairs, config, further=further)]
            if loss is None:  # else those of the cost are logged
                self._add(False, self.length_terms(decoded, config))
        predictions, _ = pad_right(decoded, self.pad_id)
        if loss is None:
            return loss, predictions, None
        labels, _ = pad_right([*pairs.targets, pairs.targets[0].new_full((1,), IGNORED)], IGNORED)  # a column at least
        return loss, predictions, labels[:-1]


def _num_target_tokens(pairs: SequencePairs) -> torch.Tensor:
    return torch.tensor(sum(map(len, pairs.targets)), device=pairs.targets[0].device)


def _lists(sequences: list[torch.Tensor]) -> list[list[int]]:
    return [ids.tolist() for ids in sequences]
