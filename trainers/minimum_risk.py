"""Minimum risk training: `MinimumRiskConfig`, `MinimumRiskTrainer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn
from transformers.utils import logging

from hf_ebm.checks import as_truth
from hf_ebm.objectives.losses import minimum_risk
from hf_ebm.plain_values import as_number
from hf_ebm.publishing import citations
from hf_ebm.trainers.objective import LossTerms
from hf_ebm.trainers.sequence_pairs import SequencePairs
from hf_ebm.trainers.task_loss import SampledRiskConfig, TaskLossTrainer

logger = logging.get_logger(__name__)

_HARDLY_MORE, _BATCHES = 1.5, 10  # candidates, and batches in a row with fewer effective ones, after which it warns


@dataclass
class MinimumRiskConfig(SampledRiskConfig):
    """Arguments of `MinimumRiskTrainer`, beside those of `SampledRiskConfig`.

    Args:
        sharpness: α, the power to which probabilities are raised before they are renormalized over the candidates. The
            default is that of Shen et al. 2016. Log probabilities of sequences differ by tens of nats, so that at 1 one
            candidate has all the weight and the others no gradient; sequences of a few tokens need a larger α, by the
            logged `effective_candidates`. The gradient of the risk is proportional to α: weigh `cross_entropy_weight`
            against it.
        sampling_temperature: of the candidates.
        include_target: put the target among the candidates.

    Raises:
        ValueError: for a sharpness or a temperature that isn't positive.
    """

    sharpness: float = field(default=0.005, metadata={"help": "Power of the probabilities of candidates."})
    sampling_temperature: float = field(default=1.0, metadata={"help": "Temperature at which candidates are sampled."})
    include_target: bool = field(default=True, metadata={"help": "Put the target among the candidates."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.include_target = as_truth("include_target", self.include_target)
        for name in ("sharpness", "sampling_temperature"):
            setattr(self, name, as_number(name, getattr(self, name), above=0))
        if self.num_candidates == 1 and not self.include_target:
            raise ValueError("num_candidates must be 2 or more without include_target: one candidate has no gradient")


class MinimumRiskTrainer(TaskLossTrainer):
    """`Σ_y q(y) c(y)`, `q ∝ p^α` over sampled candidates (Shen et al. 2016; Welleck and Cho 2020, equation 6).

    Candidates that are equal count once. Logs `risk`, `candidate_cost` (the unweighted mean), `num_distinct` (mean
    number of different candidates of a row), `effective_candidates` (mean of 1 / Σ q²), `decoded_length` and
    `cut_share` of the samples, and `cross_entropy` where it has a weight. Warns once where ten batches in a row have
    fewer than 1.5 effective candidates.

    Raises:
        ValueError: for several ids as the forced first or last token: which of them it is would be drawn, not by the
            model.
    """

    config_class: ClassVar[type[MinimumRiskConfig]] = MinimumRiskConfig
    args: MinimumRiskConfig
    bibtex = (citations.SHEN_2016, citations.WELLECK_2021)
    _near_one: int | None = 0  # batches in a row with hardly more than one effective candidate; None: has warned

    mean_over = "rows"

    def set_up(self) -> None:
        super().set_up()
        self.candidates.check_sampling()

    def check_memory(self, labels: torch.Tensor) -> None:
        """Logits are kept of every candidate."""
        self.candidates.check_scores_fit(labels, self.args.num_candidates)

    def training_terms(self, model: nn.Module, pairs: SequencePairs) -> LossTerms:
        args, decoder = self.args, self.candidates
        drawn, _ = decoder.sample(pairs, args.num_candidates, args.sampling_temperature)
        targets = [[target] if args.include_target else [] for target in pairs.targets]
        candidates = [distinct([*gold, *found]) for gold, found in zip(targets, drawn, strict=True)]
        log_probs, cross_entropy = decoder.score(model, pairs, candidates, with_targets=args.cross_entropy_weight > 0)
        costs = decoder.candidate_costs(pairs, candidates)
        sizes = torch.tensor([len(found) for found in candidates], device=costs.device)
        valid = torch.arange(costs.shape[1], device=costs.device) < sizes[:, None]
        risk, weights = minimum_risk(log_probs, costs, valid, args.sharpness)
        rows = torch.tensor(len(pairs), device=costs.device)
        effective = 1 / weights.detach().square().sum(-1)
        self._watch(float(effective.mean()), float(sizes.float().mean()))
        logged = {
            "risk": (risk.sum(), rows),
            "effective_candidates": (effective.sum(), rows),
            "candidate_cost": (costs.sum(), sizes.sum()),
            "num_distinct": (sizes.sum(), rows),
            **decoder.length_terms([ids for found in drawn for ids in found], decoder.settings(pairs)),
        }
        loss = risk.sum()
        if cross_entropy is not None:
            loss = loss + args.cross_entropy_weight * cross_entropy.sum()
            logged["cross_entropy"] = (cross_entropy.sum(), rows)
        return LossTerms(loss, rows, logged)

    def _watch(self, effective: float, different: float) -> None:
        """Warns once of weights that stay on one candidate a row."""
        if self._near_one is None or not self.is_world_process_zero():
            return
        self._near_one = self._near_one + 1 if effective < _HARDLY_MORE else 0
        if self._near_one < _BATCHES:
            return
        self._near_one = None
        cause = f"lower sharpness, which is {self.args.sharpness:g}"
        if different < 2:
            cause = "the model draws one over and over; raise num_candidates or sampling_temperature"
        logger.warning(
            f"{_BATCHES} batches in a row had {effective:.2f} effective candidates a row, of {different:.1f}: the risk "
            f"is that of one sequence and has hardly a gradient; {cause}"
        )


def distinct(sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each different sequence once, in the order of their first appearance."""
    found: dict[tuple, torch.Tensor] = {}
    for ids in sequences:
        found.setdefault(tuple(ids.tolist()), ids)
    return list(found.values())
