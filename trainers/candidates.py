"""Candidates of a batch's rows: decoded or sampled from a trainer's model, costed, and scored."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from hf_ebm.model_facts import generation_limit, special_ids
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.objectives.rewards import Decoded
from hf_ebm.random_state import seeded
from hf_ebm.renamed import renamed_attributes
from hf_ebm.trainers.completion_log import CompletionLog
from hf_ebm.trainers.costs import COLUMNS, columns_at
from hf_ebm.trainers.objective import ObjectiveTrainer
from hf_ebm.trainers.rewards import RewardTerms, Scores, Sums
from hf_ebm.trainers.sequence_pairs import RuledOutTokens, SequencePairs, decodes_as_scored
from hf_ebm.trainers.targets import DEFAULT_LENGTH, check_logits_fit, decoding_length, length_terms, new_token_limit

if TYPE_CHECKING:
    from hf_ebm.trainers.task_loss import TaskLossConfig

logger = logging.get_logger(__name__)

NO_ROOM = "max_length must leave room behind a prompt of {} tokens, got {}"

# What the decoder's configuration says of samples too: where they end, and what it forces or forbids.
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")
_OF_SAMPLES = (
    "eos_token_id", "max_new_tokens", *_FORCED, "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip


class CandidateDecoder:
    """Decodes, samples, costs and scores candidates with the present model of a trainer.

    Args:
        trainer: whose model and processing class are used.
        args: its arguments.
        config: how is decoded; of its special tokens those that are open are the model's.
        rewards: of sequences; a cost is `-reward`.
        text_columns: those of prompts and references, of a data set of texts; else none.
        scores_its_samples: whether log probabilities must be those that samples are drawn by.

    Raises:
        ValueError: for no end token, a model that can't be tried, and with `scores_its_samples` for a model whose
            tokens have other probabilities in decoding than in one pass over a sequence, or whose experts have a
            capacity.
    """

    def __init__(
        self,
        trainer: ObjectiveTrainer,
        args: TaskLossConfig,
        config: GenerationConfig,
        rewards: RewardTerms,
        text_columns: Sequence[str],
        scores_its_samples: bool,
    ):
        self.trainer, self.args, self.config, self.rewards = trainer, args, config, rewards
        self.text_columns, self.scores_its_samples = text_columns, scores_its_samples
        self.completions = (
            CompletionLog(trainer, rewards, args.num_completions_to_print) if args.log_completions else None
        )
        self.end_ids = special_ids("eos_token_id", config, trainer.model)
        if not self.end_ids:
            raise ValueError("generation_config must have an eos_token_id, got none: decoding could not end")
        config.eos_token_id = self.end_ids
        self.pad_id = config.pad_token_id = [*special_ids("pad_token_id", config, trainer.model), *self.end_ids][0]
        self._told_short = False  # that the configuration cuts off before targets end
        self._tried, self._by_length = trainer.module, self._try_decoding(trainer.module)

    @property
    def by_length(self) -> bool:
        """Whether prompts of unequal length are decoded apart, as padding changes what the present model decodes."""
        module = self.trainer.module
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
        limit = generation_limit(model)
        agrees = functools.partial(decodes_as_scored, model, self.pad_id, self.end_ids, limit=limit)
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

    def pairs(self, inputs: dict) -> SequencePairs:
        """A batch as prompts and targets."""
        pairs = SequencePairs.of(self.trainer.module, inputs, self.pad_id, self.end_ids)
        pairs.by_length, pairs.columns = self.by_length, inputs.get(COLUMNS, {})
        return pairs

    def settings(self, pairs: SequencePairs, **changes: Any) -> GenerationConfig:
        """How a batch is decoded, with the length that its targets and the `generation_config` allow."""
        config = copy.deepcopy(self.config)
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
        trainer = self.trainer
        seed = self.args.seed if seed is None else seed
        with seeded(seed, pairs.targets[0].device), trainer.accelerator.autocast():
            return pairs.decode(trainer.module, config, num_samples, processor, further)

    def new_tokens(self, targets: Sequence[Sized], start: int) -> int:
        """The most tokens that are decoded behind `start`, by the targets and `generation_config`; may be below 1."""
        by_targets = decoding_length(targets, self.args.max_length_ratio) or None  # of a batch without any
        limits = (by_targets, new_token_limit(self.config, start))
        return min((limit for limit in limits if limit is not None), default=DEFAULT_LENGTH)

    def start(self, pairs: SequencePairs) -> int:
        """The tokens that stand before what is decoded, in the longest row."""
        return 1 if self.trainer.module.config.is_encoder_decoder else max(map(len, pairs.prompts))

    def _max_new_tokens(self, pairs: SequencePairs) -> int:
        start = self.start(pairs)
        length = self.new_tokens(pairs.targets, start)
        if length < 1:
            raise ValueError(NO_ROOM.format(start, self.config.max_length))
        longest, own = max(map(len, pairs.targets)), new_token_limit(self.config, start)
        if own is not None and own < longest and not self._told_short:
            self._told_short = True
            logger.warning(
                f"the generation_config ends decoding after {own} tokens, and a target has {longest}; raise its "
                "max_new_tokens or max_length, if that isn't meant"
            )
        limit = generation_limit(self.trainer.module)
        if limit is None:
            return length
        room = limit - start
        if room < 1:
            raise ValueError(f"prompts must leave room for a token, got one of {start} with {limit} positions")
        return min(length, room)  # a position that the model lacks would be an error in the middle of decoding

    def length_terms(self, sequences: list[torch.Tensor], config: GenerationConfig) -> dict[str, tuple]:
        """What is logged of the lengths of sequences that were decoded so."""
        return length_terms(sequences, self.end_ids, config)

    def costs(self, pairs: SequencePairs, rows: list[int], sequences: list[torch.Tensor]) -> torch.Tensor:
        """Costs of sequences, each of a row of the batch: (N,) float32 on the device of the batch."""
        return self.scores(pairs, rows, sequences).costs.to(pairs.targets[0].device)

    def scores(self, pairs: SequencePairs, rows: list[int], sequences: list[torch.Tensor]) -> Scores:
        """Rewards of sequences, each of a row of the batch, on the CPU."""
        columns = columns_at(pairs.columns, rows)
        texts = {name: columns.pop(name) for name in self.text_columns if name in columns}
        prompts, references = [texts.get(name) for name in self.text_columns] or (None, None)
        decoded = Decoded(
            _lists(sequences),
            _lists([pairs.targets[row] for row in rows]),
            _lists([pairs.prompts[row] for row in rows]) if pairs.prompts else None,
            columns,
            self._texts if self.trainer.processing_class is not None else None,
            prompts,
            references,
            texts,
        )
        # Models that score compute as precisely in every objective.
        with torch.autocast(pairs.targets[0].device.type, enabled=False):
            return self.rewards(decoded, rows)

    def _texts(self, ids: list[list[int]]) -> list[str]:
        processing = self.trainer.processing_class
        decode = getattr(processing, "batch_decode", None)
        if decode is None:
            raise ValueError(f"processing_class must decode ids, got {type(processing).__name__}")
        return decode(ids, skip_special_tokens=True)

    def reward_terms(self, scores: Scores, rows: Sequence[int] | None = None) -> Sums:
        """What is logged of rewards, as `RewardTerms.sums` gives it; the table of completions gets these."""
        if self.completions is not None:
            self.completions.add(scores)
        return self.rewards.sums(scores, self.trainer.args.device, rows)

    def candidate_costs(self, pairs: SequencePairs, candidates: list[list[torch.Tensor]]) -> torch.Tensor:
        """Costs of candidates, (B, S), 0 where a row has fewer; what is to be logged of their rewards is."""
        rows = [row for row, found in enumerate(candidates) for _ in found]
        scores, device = (
            self.scores(pairs, rows, [ids for found in candidates for ids in found]),
            pairs.targets[0].device,
        )
        self.trainer.add_terms(True, self.reward_terms(scores, rows))
        return by_row(scores.costs.to(device), candidates)

    def check_sampling(self) -> None:
        """Raises `ValueError` for several ids as the forced first or last token.

        Which of them it is would be drawn, not by the model.
        """
        for name in _FORCED:
            ids = getattr(self.config, name)
            if ids is not None and torch.tensor(ids).numel() != 1:
                raise ValueError(f"{name} must be one token for a model to be sampled from, got {ids}")

    def check_scores_fit(self, labels: torch.Tensor, count: int) -> None:
        """Raises `ValueError` where `count` scored candidates a row, as long as they may get, don't fit into memory."""
        module = self.trainer.module
        targets = int((labels != IGNORED).sum(1).max())
        prompts = 0 if module.config.is_encoder_decoder else labels.shape[1] - targets
        longest = prompts + max(1, self.new_tokens([range(targets)], prompts or 1))
        settings = "per_device_train_batch_size, num_candidates, max_length_ratio"
        check_logits_fit(settings, (len(labels) * count, longest), module)

    def sample(
        self, pairs: SequencePairs, count: int, temperature: float = 1.0
    ) -> tuple[list[list[torch.Tensor]], torch.Tensor | None]:
        """`count` sequences for each row from the model's distribution, at a temperature, and what was ruled out.

        Nothing is cut off or penalized, whatever the decoder's configuration says: temperature, top-k and the like,
        beams, repetition, least lengths and biases are left out. What it forces (a first token, which is a language or
        a start; the last where a sequence reaches the greatest length) or forbids (bad words, suppressed tokens) stays,
        and so do the rules of a model of its own. The pad token, where it ends nothing, is forbidden
        unless nothing else is possible: some models count positions by it.

        Returns:
            The samples, and for each of their tokens those that couldn't have stood in its place, as `token_log_probs`
            takes it: with these `score` gives log probabilities under the distribution that was drawn from (for a
            temperature of 1).
        """
        decoder = self.settings(pairs)
        config = GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, pad_token_id=self.pad_id, use_cache=True,
            **{name: getattr(decoder, name) for name in _OF_SAMPLES},
        )  # fmt: skip
        seed = self.trainer.next_batch_seed(self.trainer.accelerator.process_index)
        ruled_out = RuledOutTokens([] if self.pad_id in self.end_ids else [self.pad_id])
        samples = self.decode(pairs, config, seed, count, ruled_out)
        return samples, ruled_out.of(samples)

    def score(
        self,
        model: nn.Module,
        pairs: SequencePairs,
        candidates: list[list[torch.Tensor]],
        ruled_out: torch.Tensor | None = None,
        with_targets: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log probabilities of candidates, (B, S) with 0 where a row has fewer, and the cross entropy of each row.

        All in one forward pass, as data parallelism wants it. The cross entropy is a mean over tokens, (B,).

        Args:
            ruled_out: as for `token_log_probs`, for the tokens of all candidates.
            with_targets: whether the cross entropy is wanted; else it is None.
        """
        rows, sequences, ruled_out = _with_targets(pairs, candidates, ruled_out, with_targets)
        scores = pairs.log_probs(model, rows, sequences, ruled_out)
        count = sum(map(len, candidates))
        cross_entropy = _per_token(-scores[count:], pairs) if with_targets else None
        return by_row(scores[:count], candidates), cross_entropy

    def score_tokens(
        self,
        model: nn.Module,
        pairs: SequencePairs,
        candidates: list[list[torch.Tensor]],
        ruled_out: torch.Tensor | None = None,
        with_targets: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `score`, but log probabilities of all the candidates' tokens, candidate after candidate, (n,)."""
        rows, sequences, ruled_out = _with_targets(pairs, candidates, ruled_out, with_targets)
        scores = pairs.token_log_probs(model, rows, sequences, ruled_out)
        if not with_targets:
            return scores, None
        lengths = [len(ids) for ids in pairs.targets]
        of_candidates, of_targets = scores.split([len(scores) - sum(lengths), sum(lengths)])
        sums = torch.nn.utils.rnn.pad_sequence(of_targets.split(lengths), batch_first=True).sum(1)
        return of_candidates, _per_token(-sums, pairs)


def _with_targets(
    pairs: SequencePairs, candidates: list[list[torch.Tensor]], ruled_out: torch.Tensor | None, with_targets: bool
) -> tuple[list[int], list[torch.Tensor], torch.Tensor | None]:
    """Rows, sequences, and what was ruled out, of all candidates, and behind them of the targets, if wanted."""
    rows = [row for row, found in enumerate(candidates) for _ in found]
    flat = [ids for found in candidates for ids in found]
    everyone = list(range(len(pairs))) if with_targets else []
    gold = [pairs.targets[row] for row in everyone]
    if ruled_out is not None:
        ruled_out = torch.cat([ruled_out, ruled_out.new_zeros(sum(map(len, gold)), ruled_out.shape[1])])
    return rows + everyone, flat + gold, ruled_out


def _per_token(sums: torch.Tensor, pairs: SequencePairs) -> torch.Tensor:
    """Sums over each row's target as means over its tokens, (B,)."""
    return sums / torch.tensor([len(ids) for ids in pairs.targets], device=sums.device)


def by_row(values: torch.Tensor, candidates: list[list[torch.Tensor]]) -> torch.Tensor:
    """One value a candidate as (B, S), with 0 where a row has fewer."""
    return torch.nn.utils.rnn.pad_sequence(values.split([len(found) for found in candidates]), batch_first=True)


def _lists(sequences: list[torch.Tensor]) -> list[list[int]]:
    return [ids.tolist() for ids in sequences]


__getattr__ = renamed_attributes(__name__, {"TaskLossConfig": "hf_ebm.trainers.task_loss:TaskLossConfig"})
