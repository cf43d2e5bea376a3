"""What minimum risk and policy gradient share: candidates sampled from the model, losses averaged over rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn
from transformers import GenerationConfig

from hf_ebm.trainers.sequence_pairs import SequencePairs
from hf_ebm.trainers.task_loss import TaskLossConfig, TaskLossTrainer


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
        if self.num_candidates < 1:
            raise ValueError(f"num_candidates must be 1 or more, got {self.num_candidates}")
        if not 0 <= self.cross_entropy_weight < math.inf:
            raise ValueError(f"cross_entropy_weight must not be negative, got {self.cross_entropy_weight}")


class SampledRiskTrainer(TaskLossTrainer):
    """Base of the trainers on sampled sequences: the loss is a mean over rows, whatever the accumulation."""

    config_class: ClassVar[type[SampledRiskConfig]] = SampledRiskConfig
    args: SampledRiskConfig

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        rows = torch.tensor(sum(len(batch.get("labels", ())) for batch in batch_samples), device=device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            rows = self.accelerator.gather(rows).sum()
        return rows

    def sample(self, pairs: SequencePairs, count: int, temperature: float = 1.0) -> list[list[torch.Tensor]]:
        """`count` sequences for each row from the model's distribution, at a temperature.

        Nothing is cut off or penalized, whatever the decoder's configuration says; a forced first token, which is a
        language or a start, stays forced.
        """
        decoder = self.decoder(pairs)
        kept = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id", "max_new_tokens")
        config = GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, pad_token_id=self.pad_id, use_cache=True,
            **{name: getattr(decoder, name) for name in kept},
        )  # fmt: skip
        seed = self.next_batch_seed(self.accelerator.process_index)
        return self.decode(pairs, config, seed, count)

    def score(
        self, model: nn.Module, pairs: SequencePairs, candidates: list[list[torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log probabilities of candidates, (B, S) with 0 where a row has fewer, and the cross entropy of each row.

        All in one forward pass, as data parallelism wants it. The cross entropy, a mean over tokens (B,), is None where
        it has no weight.
        """
        rows = [row for row, found in enumerate(candidates) for _ in found]
        flat = [ids for found in candidates for ids in found]
        everyone = list(range(len(pairs))) if self.args.cross_entropy_weight else []
        scores = pairs.log_probs(model, rows + everyone, flat + [pairs.targets[row] for row in everyone])
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
