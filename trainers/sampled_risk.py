"""What minimum risk and policy gradient share: candidates sampled from the model, losses averaged over rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn
from transformers import GenerationConfig

from hf_ebm.checks import shown
from hf_ebm.memory import check_fits
from hf_ebm.objectives.token_losses import IGNORED
from hf_ebm.plain_values import as_number, as_whole
from hf_ebm.trainers.sequence_pairs import RuledOutTokens, SequencePairs, num_rows
from hf_ebm.trainers.task_loss import TaskLossConfig, TaskLossTrainer

# What the decoder's configuration says of samples too: where they end, and what it forces or forbids.
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")
_OF_SAMPLES = (
    "eos_token_id", "max_new_tokens", *_FORCED, "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip


@dataclass
class SampledRiskConfig(TaskLossConfig):
    """Arguments of the trainers on sampled sequences, beside those of `TaskLossConfig`.

    Args:
        num_candidates: sequences sampled for each row.
        cross_entropy_weight: weight of the cross entropy that is added, as a mean over each row's target tokens; 0
            leaves it out.

    Raises:
        ValueError: for fewer than one candidate or a negative weight.
    """

    num_candidates: int = field(default=4, metadata={"help": "Sequences sampled for each row."})
    cross_entropy_weight: float = field(default=0.0, metadata={"help": "Weight of the cross entropy that is added."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_candidates = as_whole("num_candidates", self.num_candidates, 1)
        check_fits(
            8 * self.num_candidates, f"num_candidates: {shown(self.num_candidates)} sequences are sampled for each row"
        )
        self.cross_entropy_weight = as_number("cross_entropy_weight", self.cross_entropy_weight, least=0)


class SampledRiskTrainer(TaskLossTrainer):
    """Base of the trainers on sampled sequences: the loss is a mean over rows, whatever the accumulation.

    Raises:
        ValueError: for several ids as the forced first or last token: which of them it is would be drawn, not by the
            model.
    """

    config_class: ClassVar[type[SampledRiskConfig]] = SampledRiskConfig
    args: SampledRiskConfig

    def set_up(self) -> None:
        super().set_up()
        for name in _FORCED:
            ids = getattr(self.decoding_config, name)
            if ids is not None and torch.tensor(ids).numel() != 1:
                raise ValueError(f"{name} must be one token for a model to be sampled from, got {ids}")

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        rows = torch.tensor(sum(map(num_rows, batch_samples)), device=device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            rows = self.accelerator.gather(rows).sum()
        return rows

    memory_settings = "per_device_train_batch_size, num_candidates, max_length_ratio"

    def scored_at_once(self, labels: torch.Tensor) -> tuple[int, int]:
        """Every candidate, as long as it may get."""
        targets = int((labels != IGNORED).sum(1).max())
        prompts = 0 if self.module.config.is_encoder_decoder else labels.shape[1] - targets
        longest = prompts + max(1, self.new_tokens([range(targets)], prompts or 1))
        return len(labels) * self.args.num_candidates, longest

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
        decoder = self.decoder(pairs)
        config = GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, pad_token_id=self.pad_id, use_cache=True,
            **{name: getattr(decoder, name) for name in _OF_SAMPLES},
        )  # fmt: skip
        seed = self.next_batch_seed(self.accelerator.process_index)
        ruled_out = RuledOutTokens([] if self.pad_id in self.end_ids else [self.pad_id])
        samples = self.decode(pairs, config, seed, count, ruled_out)
        return samples, ruled_out.of(samples)

    def score(
        self,
        model: nn.Module,
        pairs: SequencePairs,
        candidates: list[list[torch.Tensor]],
        ruled_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log probabilities of candidates, (B, S) with 0 where a row has fewer, and the cross entropy of each row.

        All in one forward pass, as data parallelism wants it. The cross entropy, a mean over tokens (B,), is None where
        it has no weight.

        Args:
            ruled_out: as for `token_log_probs`, for the tokens of all candidates.
        """
        rows = [row for row, found in enumerate(candidates) for _ in found]
        flat = [ids for found in candidates for ids in found]
        everyone = list(range(len(pairs))) if self.args.cross_entropy_weight else []
        gold = [pairs.targets[row] for row in everyone]
        if ruled_out is not None:
            ruled_out = torch.cat([ruled_out, ruled_out.new_zeros(sum(map(len, gold)), ruled_out.shape[1])])
        scores = pairs.log_probs(model, rows + everyone, flat + gold, ruled_out)
        log_probs = by_row(scores[: len(flat)], candidates)
        if not everyone:
            return log_probs, None
        lengths = torch.tensor([len(ids) for ids in pairs.targets], device=scores.device)
        return log_probs, -scores[len(flat) :] / lengths

    def candidate_costs(self, pairs: SequencePairs, candidates: list[list[torch.Tensor]]) -> torch.Tensor:
        """Costs of candidates, (B, S), 0 where a row has fewer."""
        rows = [row for row, found in enumerate(candidates) for _ in found]
        return by_row(self.costs(pairs, rows, [ids for found in candidates for ids in found]), candidates)


def by_row(values: torch.Tensor, candidates: list[list[torch.Tensor]]) -> torch.Tensor:
    """One value a candidate as (B, S), with 0 where a row has fewer."""
    return torch.nn.utils.rnn.pad_sequence(values.split([len(found) for found in candidates]), batch_first=True)
