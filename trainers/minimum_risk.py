"""Minimum risk training: `MinimumRiskConfig`, `MinimumRiskTrainer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from hf_ebm.checks import as_truth
from hf_ebm.objectives.sequence_risk import minimum_risk
from hf_ebm.plain_values import as_number
from hf_ebm.publishing import citations
from hf_ebm.trainers.sampled_risk import SampledRiskConfig, SampledRiskTrainer
from hf_ebm.trainers.search_aware import LossTerms
from hf_ebm.trainers.sequence_pairs import SequencePairs


@dataclass
class MinimumRiskConfig(SampledRiskConfig):
    """Arguments of `MinimumRiskTrainer`, beside those of `SampledRiskConfig`.

    Args:
        sharpness: α, the power to which probabilities are raised before they are renormalized over the candidates.
        sampling_temperature: of the candidates.
        include_target: put the target among the candidates.

    Raises:
        ValueError: for a sharpness or a temperature that isn't positive.
    """

    sharpness: float = field(default=1.0, metadata={"help": "Power of the probabilities of candidates."})
    sampling_temperature: float = field(default=1.0, metadata={"help": "Temperature at which candidates are sampled."})
    include_target: bool = field(default=True, metadata={"help": "Put the target among the candidates."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.include_target = as_truth("include_target", self.include_target)
        for name in ("sharpness", "sampling_temperature"):
            setattr(self, name, as_number(name, getattr(self, name), above=0))
        if self.num_candidates == 1 and not self.include_target:
            raise ValueError("num_candidates must be 2 or more without include_target: one candidate has no gradient")


class MinimumRiskTrainer(SampledRiskTrainer):
    """`Σ_y q(y) c(y)`, `q ∝ p^α` over sampled candidates (Shen et al. 2016; Welleck and Cho 2020, equation 6).

    Candidates that are equal count once. Logs `risk`, `candidate_cost` (the unweighted mean) and `num_distinct` (mean
    number of different candidates of a row), and `cross_entropy` where it has a weight.
    """

    config_class: ClassVar[type[MinimumRiskConfig]] = MinimumRiskConfig
    args: MinimumRiskConfig
    bibtex = (citations.SHEN_2016, citations.WELLECK_2021)

    def training_terms(self, model: nn.Module, pairs: SequencePairs) -> LossTerms:
        args = self.args
        drawn, _ = self.sample(pairs, args.num_candidates, args.sampling_temperature)
        targets = [[target] if args.include_target else [] for target in pairs.targets]
        candidates = [distinct([*gold, *found]) for gold, found in zip(targets, drawn, strict=True)]
        log_probs, cross_entropy = self.score(model, pairs, candidates)
        costs = self.candidate_costs(pairs, candidates)
        sizes = torch.tensor([len(found) for found in candidates], device=costs.device)
        valid = torch.arange(costs.shape[1], device=costs.device) < sizes[:, None]
        risk, _ = minimum_risk(log_probs, costs, valid, args.sharpness)
        rows = torch.tensor(len(pairs), device=costs.device)
        logged = {
            "risk": (risk.sum(), rows),
            "candidate_cost": (costs.sum(), sizes.sum()),
            "num_distinct": (sizes.sum(), rows),
        }
        loss = risk.sum()
        if cross_entropy is not None:
            loss = loss + args.cross_entropy_weight * cross_entropy.sum()
            logged["cross_entropy"] = (cross_entropy.sum(), rows)
        return LossTerms(loss, rows, logged)


def distinct(sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each different sequence once, in the order of their first appearance."""
    found: dict[tuple, torch.Tensor] = {}
    for ids in sequences:
        found.setdefault(tuple(ids.tolist()), ids)
    return list(found.values())
