"""What the trainers for a cost of decoded sequences share: `TaskLossConfig`, `TaskLossTrainer`.

They take sequence-to-sequence and causal language models, adapters of PEFT on them included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Unpack

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Seq2SeqTrainer
from transformers.trainer_utils import EvalLoopOutput, align_special_tokens, has_length

from hf_ebm.checks import as_callables, as_list, as_number, as_string, as_truth, as_whole, check_choice, shown
from hf_ebm.model_facts import check_causal, check_not_block_sparse, check_weights_stay, refuse_needed_inputs
from hf_ebm.model_modes import encodes_ids
from hf_ebm.objectives.completions import pad_right
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.objectives.rewards import GIVEN, CostReward, RewardFunction
from hf_ebm.objectives.sequence_costs import SequenceCost, as_cost
from hf_ebm.renamed import renamed_attributes
from hf_ebm.trainers.candidates import NO_ROOM, CandidateDecoder
from hf_ebm.trainers.costs import check_columns
from hf_ebm.trainers.objective import LossTerms, ObjectiveTrainer, StockArguments, takes_stock_arguments
from hf_ebm.trainers.prompts import PromptCollator, data_sets, first_row, has_texts, text_collator
from hf_ebm.trainers.reward_functions import as_rewards
from hf_ebm.trainers.rewards import ERRORS, RewardTerms, with_deviations
from hf_ebm.trainers.seq2seq import GenerationTrainingConfig
from hf_ebm.trainers.sequence_pairs import SequencePairs
from hf_ebm.trainers.targets import (
    MUST_HAVE_TARGET,
    check_labels,
    check_logits_fit,
    check_one_gpu,
    check_positions,
    check_sources,
    given_inputs,
    num_rows,
)


@dataclass
class TaskLossConfig(GenerationTrainingConfig):
    """Arguments of the trainers for a cost, beside those of `Seq2SeqTrainingArguments`.

    `generation_config` says how is decoded (greedily, by beam search, by sampling); without it the model's own does.
    Of a `metric_for_best_model` that ends with "cost" less is better, unless `greater_is_better` says otherwise.

    Args:
        cost: name of a cost of `hf_ebm.objectives.sequence_costs.COSTS`; a trainer takes a callable as well.
        reward_funcs: names of rewards, in place of a cost, as of `hf_ebm.trainers.reward_functions.as_rewards`; a
            trainer takes functions, models and metrics as well. More is better; the cost is minus their weighted sum.
        reward_weights: one for each; by default 1.
        reward_errors: `"raise"` where a reward function raises or returns something else than a finite number or None
            for each completion, or `"skip"`: what it could not say counts as the mean of what it said of the row's
            other candidates, so that this one gains and loses nothing by it (of the batch's, where there is none; where
            there is none either, the function is left out of the sums), and the share is logged.
        prompt_column, reference_column: of a data set of texts; see `hf_ebm.trainers.prompts.PromptCollator`.
        max_length_ratio: decoding stops after this times the length of the batch's longest target (Welleck and Cho
            2020, appendix A.4), and before where the `generation_config` allows fewer tokens (`max_new_tokens`, or
            else `max_length`, which counts the prompt of a causal model and the start token of a decoder).
        log_completions: at every log of training print a table of the last update's candidates (of MGS what is decoded
            before it) with sources, references and rewards, write it into the folder `completions` of the output, and
            send it to the trackers of `report_to` that have tables; at every evaluation one of what is decoded. What
            lies in the output folder is uploaded with the model. See `hf_ebm.trainers.completion_log`.
        num_completions_to_print: rows that are printed of a table; 0 prints none.

    Raises:
        ValueError: for an unknown cost, one beside rewards, another value of `reward_errors`, or a ratio that isn't
            positive.
    """

    no_sharding: ClassVar[str] = "processes decode other numbers of steps, each of which would wait for all of them"
    cost: str = field(default="edit_distance", metadata={"help": "Name of the cost that is minimized."})
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Rewards in place of the cost: neg_COST, a metric of evaluate, a reward model."}
    )
    reward_weights: list[float] | None = field(default=None, metadata={"help": "A weight for each reward; default: 1."})
    reward_errors: str = field(default="raise", metadata={"help": "Of a reward function: raise, or skip and count."})
    prompt_column: str = field(default="prompt", metadata={"help": "Of a data set of texts, the prompts."})
    reference_column: str = field(default="reference", metadata={"help": "Of a data set of texts, the references."})
    max_length_ratio: float = field(
        default=1.3, metadata={"help": "Longest decoded sequence, by the longest target of the batch."}
    )
    log_completions: bool = field(default=False, metadata={"help": "Print and keep what is decoded, at every log."})
    num_completions_to_print: int = field(default=8, metadata={"help": "Rows of --log_completions that are printed."})

    def __post_init__(self) -> None:
        if self.greater_is_better is None and str(self.metric_for_best_model).endswith("cost"):
            self.greater_is_better = False
        super().__post_init__()
        if not isinstance(self.cost, str):
            raise ValueError(f"cost must be a name here, got {self.cost!r}; give a callable to the trainer")
        as_cost(self.cost)
        check_choice("reward_errors", self.reward_errors, ERRORS)
        if self.reward_funcs is not None:
            self.reward_funcs = [
                as_string("reward_funcs", name) for name in as_list("reward_funcs", self.reward_funcs, "names")
            ]
            if self.cost != TaskLossConfig.cost:
                raise ValueError(f"cost and reward_funcs must not both be given, got {self.cost!r} beside rewards")
        self.max_length_ratio = as_number("max_length_ratio", self.max_length_ratio, above=0)
        self.log_completions = as_truth("log_completions", self.log_completions)
        name = "num_completions_to_print"
        self.num_completions_to_print = as_whole(name, self.num_completions_to_print, 0)


class TaskLossTrainer(ObjectiveTrainer, Seq2SeqTrainer):
    """Base of the trainers that minimize a cost of decoded sequences, which `candidates` decodes, costs and scores.

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
        reward_funcs: one or a list, in place of `args.reward_funcs` and of a cost: functions, async ones too, names,
            sequence classifiers with one label, metrics of `evaluate`; see
            `hf_ebm.trainers.reward_functions.as_rewards`. A function is given what it has parameters for by name:
            `completions`, `prompts`, `references` (texts), `completion_ids`, `prompt_ids`, `reference_ids`, and columns
            as a cost is; it returns a number for each completion, or None where it has nothing to say and is left out
            of the sum. Of rewards are logged
            `rewards/NAME/mean` and `/std` of each, and `reward`, the mean of the sums; in training `reward_std` (mean
            deviation among the candidates of a row) and `zero_deviation_share` (share of rows where it is 0).
            Deviations are those of the population.

    Raises:
        ValueError: for a model that cannot decode or has no end token, a cost or a reward that reads texts without a
            `processing_class`, both a cost and rewards, a data set that has neither prompts nor what the model takes,
            several GPUs in one process, and what `ObjectiveTrainer` refuses.
    """

    config_class: ClassVar[type[TaskLossConfig]] = TaskLossConfig
    args: TaskLossConfig
    mean_over: ClassVar[Literal["rows", "tokens"]] = "tokens"
    row_must_have = MUST_HAVE_TARGET
    needs_every_row = True
    reads_columns: bool | None = True
    scores_its_samples: ClassVar[bool] = False  # whether log probabilities must be those that samples are drawn by
    evaluated_terms: tuple[str, ...] = ("cost", "decoded_length", "cut_share")

    @takes_stock_arguments
    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: TaskLossConfig | None = None,
        *,
        cost: str | Callable | SequenceCost | None = None,
        reward_funcs: Any = None,
        **kwargs: Unpack[StockArguments],
    ):
        if cost is not None and (reward_funcs is not None or getattr(args, "reward_funcs", None) is not None):
            raise ValueError(f"cost and reward_funcs must not both be given, got {shown(cost)} beside rewards")
        self._given_cost, self._given_rewards = cost, reward_funcs
        self._collates = kwargs.get("data_collator") is None
        self._own_generation_config = getattr(model, "generation_config", None)  # which the stock trainer replaces
        self._own_use_cache = getattr(getattr(model, "config", None), "use_cache", None)  # as well
        super().__init__(model, args, **kwargs)

    def set_up(self) -> None:
        super().set_up()
        check_one_gpu(self)
        if isinstance(self.processing_class, PreTrainedTokenizerBase) and self.model_init is None:
            align_special_tokens(self.model, self.processing_class)  # as `train` would do, but before they are read
        decoding, own = copy.deepcopy(self.model.generation_config), self._own_generation_config
        if self.args.generation_config is not None and own is not None:
            self.model.generation_config = own
            for name in ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id"):
                if getattr(decoding, name) is None:  # where decoding starts is the model's business
                    setattr(decoding, name, getattr(own, name))
        if self._own_use_cache is not None:  # whether to cache is said in every call here
            self.model.config.use_cache = self._own_use_cache
        data = self.eval_dataset if self.train_dataset is None else self.train_dataset
        of_texts = self._collates and has_texts(data, self.args.prompt_column)
        self._check_data(of_texts)
        rewards = self._reward_terms(of_texts)
        if rewards.needs_texts and self.processing_class is None:
            kind = "reward" if rewards.logs else "cost"
            raise ValueError(f"processing_class must be given: the {kind} {rewards.needs_texts[0]!r} reads texts")
        self.evaluated_terms = (*type(self).evaluated_terms, *rewards.names(grouped=False))
        logged = self.derived_logs(dict.fromkeys(self.evaluated_terms, 0.0))
        best = (self.args.metric_for_best_model or "").removeprefix("eval_")
        own = self.compute_metrics is None and best.partition("/")[0] in ("reward", "rewards")
        if own and best not in logged:
            raise ValueError(f"metric_for_best_model must be one of {', '.join(['loss', *logged])}, got {best!r}")
        self._decoded: list[torch.Tensor] = []  # of the rows with targets of the last evaluation batch
        columns = (self.args.prompt_column, self.args.reference_column) if of_texts else ()
        self.candidates = CandidateDecoder(self, self.args, decoding, rewards, columns, self.scores_its_samples)
        if of_texts:
            end_ids, pad_id = self.candidates.end_ids, self.candidates.pad_id
            self.data_collator = text_collator(self.processing_class, self.model, end_ids, pad_id, columns)
            self.reads_columns = None
            if self.accelerator.dispatch_batches is None:  # of a stream; texts can't be sent to other processes
                self.accelerator.dataloader_config.dispatch_batches = False
            self.row_must_have = f"{self.args.reference_column}: row {{row}} must have a text"

    def _check_data(self, of_texts: bool) -> None:
        """Raises `ValueError` for data sets with neither tokens nor prompts."""
        if not self._collates:
            return
        self._set_signature_columns_if_needed()
        known = {self.args.prompt_column, *(() if of_texts else self._signature_columns or ())}
        of_model = "" if of_texts else " or one that the model takes"
        for name, data in data_sets(self.train_dataset, self.eval_dataset).items():
            row = first_row(data)
            if row is not None and known.isdisjoint(row):
                raise ValueError(
                    f"{name} must have a column {self.args.prompt_column!r} (by prompt_column){of_model}, got "
                    f"{', '.join(row) or 'none'}"
                )

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The Trainer's; of texts all columns are kept, for the collator."""
        of_texts = isinstance(self.data_collator, PromptCollator)
        return dataset if of_texts else super()._remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(self, data_collator: Callable, description: str | None = None) -> Callable:
        """The Trainer's, of data sets that aren't of `datasets`; likewise."""
        of_texts = isinstance(data_collator, PromptCollator)
        return data_collator if of_texts else super()._get_collator_with_removed_columns(data_collator, description)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        """The Trainer's; of texts it is told the lengths, where it goes by them."""
        return super()._get_train_sampler(self._lengths(self.train_dataset if train_dataset is None else train_dataset))

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        """The Trainer's; likewise."""
        return super()._get_eval_sampler(self._lengths(eval_dataset))

    def _lengths(self, data: Any) -> Any:
        """A data set, or in place of texts the column of their lengths, which is all that stock samplers read."""
        by_length = self.args.train_sampling_strategy in ("group_by_length", "batch_rebalance") and has_length(data)
        name = self.args.length_column_name
        known = name in (getattr(data, "column_names", None) or ())
        if not by_length or known or not isinstance(self.data_collator, PromptCollator):
            return data
        return Dataset.from_dict({name: self.data_collator.lengths(data)})

    def _reward_terms(self, of_texts: bool) -> RewardTerms:
        """The reward functions; a cost is one, and isn't logged by name."""
        args = self.args
        given = args.reward_funcs if self._given_rewards is None else self._given_rewards
        terms: list[RewardFunction | CostReward]
        if given is None:
            cost = as_cost(args.cost if self._given_cost is None else self._given_cost)
            terms = [CostReward(cost.name, cost)]
        else:
            terms = as_rewards(given, self.model.config.is_encoder_decoder, args.device)
        for term in [] if of_texts else terms:
            of_cost = isinstance(term, CostReward)
            check_columns(
                self, term.name, term.parameters, ("prompts",) if of_cost else GIVEN, "cost" if of_cost else "reward"
            )
        return RewardTerms(terms, args.reward_weights, args.reward_errors, logs=given is not None)

    @classmethod
    def derived_logs(cls, averages: dict[str, float]) -> dict[str, float]:
        return with_deviations(super().derived_logs(averages))

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

    def check_batch(self, inputs: dict) -> None:
        """Raises `ValueError` for a batch without labels, or with some that the model cannot predict."""
        check_labels(self.module, inputs)
        check_sources(self.module, inputs)
        if self.reads_targets:
            check_positions(self.module, inputs["labels"], inputs.get("attention_mask"))
        if self.model.training:
            self.check_memory(inputs["labels"])

    @property
    def needs_targets(self) -> bool:
        """Whether every row that is trained on or evaluated must have a target: for a cost or a reward, or the loss."""
        return self.candidates.rewards.needs_references or getattr(self.args, "cross_entropy_weight", 0.0) > 0

    @property
    def reads_targets(self) -> bool:
        """Whether the model reads the targets of the present batch."""
        return True

    def check_memory(self, labels: torch.Tensor) -> None:
        """Raises `ValueError` for a batch whose logits, those of all scored candidates, don't fit into memory."""
        check_logits_fit("per_device_train_batch_size, max_target_length", labels.shape, self.module)

    def scored_rows(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Rows with a target, where one is needed; the first token of a causal row is none."""
        if not self.needs_targets:
            return torch.ones(num_rows(inputs), dtype=torch.bool, device=inputs["labels"].device)
        targets = self.candidates.pairs(inputs).targets
        return torch.tensor([len(ids) > 0 for ids in targets], device=targets[0].device)

    def num_rows(self, inputs: dict[str, Any]) -> int:
        """All rows: each has a target."""
        return num_rows(inputs)

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any]) -> LossTerms:
        """In evaluation the cross entropy, and the cost of what is decoded."""
        candidates = self.candidates
        pairs = candidates.pairs(inputs)
        if self.model.training:
            return self.training_terms(model, pairs)
        rows, device = list(range(len(pairs))), pairs.targets[0].device
        with_target = [row for row in rows if len(pairs.targets[row])]
        targets = [pairs.targets[row] for row in with_target]
        loss = -pairs.log_probs(model, with_target, targets).sum() if targets else torch.zeros((), device=device)
        config = candidates.settings(pairs)
        self._decoded = [found[0] for found in candidates.decode(pairs, config)]
        count = torch.tensor(len(pairs), device=device)
        scores = candidates.scores(pairs, rows, self._decoded)
        logged = {
            "cost": (scores.costs.sum().to(count.device), count),
            **candidates.reward_terms(scores),
        }
        logged |= candidates.length_terms(self._decoded, config)
        return LossTerms(loss, torch.tensor(sum(map(len, targets)), device=device), logged)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The base's; the table of its completions has its name."""
        if self.candidates.completions is not None:
            self.candidates.completions.begin_evaluation(kwargs.get("metric_key_prefix", "eval"))
        return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The base's, and the table of completions."""
        super().log(logs, *args, **kwargs)
        if self.candidates.completions is not None:
            self.candidates.completions.write(training="loss" in logs)

    def training_terms(self, model: nn.Module, pairs: SequencePairs) -> LossTerms:
        """The objective of a batch in training."""
        raise NotImplementedError

    @property
    def pad_id(self) -> int:
        """The pad token of the `generation_config` or of the model, else an end token."""
        return self.candidates.pad_id

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
        inputs = self._prepare_inputs(inputs)
        given = given_inputs(inputs)
        loss = None if given.get("labels") is None else self.evaluated_loss(model, given)
        if prediction_loss_only or not self.args.predict_with_generate:
            return loss, None, None
        candidates = self.candidates
        pairs = candidates.pairs(inputs)
        asked = gen_kwargs or getattr(self, "_gen_kwargs", {})
        asked = {name: value for name, value in asked.items() if value is not None}
        further = as_callables("logits_processor", asked.pop("logits_processor", None))
        if "max_length" in asked:
            most, start = asked.pop("max_length"), candidates.start(pairs)
            if most <= start:
                raise ValueError(NO_ROOM.format(start, most))
            asked.setdefault("max_new_tokens", most - start)
        decoded = self._decoded  # for the cost of this very batch, if all its rows had one
        if asked or further or len(decoded) < len(pairs):
            config = candidates.settings(pairs, **asked)
            decoded = [found[0] for found in candidates.decode(pairs, config, further=further)]
            if loss is None:  # else those of the cost are logged
                self.add_terms(False, candidates.length_terms(decoded, config))
        predictions, _ = pad_right(decoded, candidates.pad_id)
        if loss is None:
            return loss, predictions, None
        labels, _ = pad_right([*pairs.targets, pairs.targets[0].new_full((1,), IGNORED)], IGNORED)  # a column at least
        return loss, predictions, labels[:-1]


__getattr__ = renamed_attributes(__name__, {"SampledRiskConfig": "hf_ebm.trainers.sampled_risk:SampledRiskConfig"})
