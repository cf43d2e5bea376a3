"""Training candidates into the order of their costs: `RankingTrainer` (BRIO, SLiC-HF)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from hf_ebm.checks import as_number, as_truth
from hf_ebm.objectives.ranking import margin_ranking
from hf_ebm.publishing.cards import CITATIONS
from hf_ebm.trainers.objective import LossTerms
from hf_ebm.trainers.sampled_risk import CandidateSetConfig, candidate_sets
from hf_ebm.trainers.sequence_pairs import SequencePairs
from hf_ebm.trainers.task_loss import TaskLossTrainer


@dataclass
class RankingConfig(CandidateSetConfig):
    """Arguments of `RankingTrainer`, beside those of `CandidateSetConfig`, of which some have other defaults.

    The defaults are of BRIO: log probabilities per token (the paper tunes the length penalty), a margin of 0.001 for
    each rank, and a cross entropy that weighs a hundredth of the ranking. SLiC-HF has a `length_penalty` of 0, a
    `margin` of whole nats, and `margin_by_rank=False`.

    Args:
        margin: m, in units of scores: nats, or nats per token with a `length_penalty` of 1.
        margin_by_rank: times the difference of ranks.

    Raises:
        ValueError: for a negative margin.
    """

    cross_entropy_weight: float = field(default=0.01, metadata={"help": "Weight of the cross entropy that is added."})
    include_target: bool = field(default=False, metadata={"help": "Put the target among the candidates."})
    length_penalty: float = field(
        default=1.0, metadata={"help": "Power of the length by which log probabilities of candidates are divided."}
    )
    margin: float = field(default=0.001, metadata={"help": "By how much scores of a better candidate are to be above."})
    margin_by_rank: bool = field(default=True, metadata={"help": "Multiply the margin by the difference of ranks."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.margin = as_number("margin", self.margin, least=0)
        self.margin_by_rank = as_truth("margin_by_rank", self.margin_by_rank)


class RankingTrainer(TaskLossTrainer):
    """`Σ max(0, s_j - s_i + m_ij)` over pairs of which i costs less than j (BRIO, Liu et al. 2022; SLiC-HF, Zhao 2023).

    The scores s are log probabilities of candidates, by a power of their length. Candidates are those of the present
    model (the papers' are of a model that was trained before and stays); those that are equal count once, and those
    of one cost are no pair. The cross entropy keeps the model a language model: a row whose order is right has no
    other gradient.

    Logs `ranking_loss` (mean sum of a row), `in_order` (share of pairs), `candidate_cost`, `num_distinct`,
    `decoded_length` and `cut_share` of what was decoded, and `cross_entropy` where it has a weight.

    Raises:
        ValueError: for several ids as the forced first or last token: which of them it is would be drawn, not by the
            model.
    """

    config_class: ClassVar[type[RankingConfig]] = RankingConfig
    args: RankingConfig
    bibtex = (CITATIONS["LIU_2022"], CITATIONS["ZHAO_2023"])
    mean_over = "rows"

    def set_up(self) -> None:
        super().set_up()
        self.candidates.check_sampling()

    def check_memory(self, labels: torch.Tensor) -> None:
        self.candidates.check_scores_fit(labels, self.args.num_candidates)

    def training_terms(self, model: nn.Module, pairs: SequencePairs) -> LossTerms:
        args = self.args
        found = candidate_sets(self.candidates, model, pairs, args)
        ranking = margin_ranking(found.scores, found.costs, found.valid, args.margin, args.margin_by_rank)
        rows = torch.tensor(len(pairs), device=found.costs.device)
        loss = ranking.loss.sum()
        logged = {
            "ranking_loss": (loss, rows),
            "in_order": (ranking.in_order.sum(), ranking.pairs.sum()),
            **found.logged,
        }
        if found.cross_entropy is not None:
            loss = loss + args.cross_entropy_weight * found.cross_entropy.sum()
        return LossTerms(loss, rows, logged)
