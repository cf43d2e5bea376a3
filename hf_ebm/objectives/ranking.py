"""Ranking losses: scores of a row's candidates in the order of their costs, with a margin."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PairwiseRanking(NamedTuple):
    """Of each row, (B,): the loss summed over its pairs, how many these are, and how many scores are in order."""

    loss: torch.Tensor
    pairs: torch.Tensor
    in_order: torch.Tensor


def margin_ranking(
    scores: torch.Tensor, costs: torch.Tensor, valid: torch.Tensor, margin: float, by_rank: bool
) -> PairwiseRanking:
    """`Σ max(0, s_j - s_i + m_ij)` over pairs of candidates of which i costs less than j.

    With `by_rank` the margin is m times the difference of their ranks, as in BRIO (Liu et al. 2022), whose scores are
    log probabilities by a power of the length; without it m for every pair, as in SLiC-HF (Zhao et al. 2023), whose
    scores are log probabilities. Candidates of one cost are no pair and have one rank: the number of those that cost
    less.

    Args:
        scores: (B, S), with their gradient.
        costs: (B, S).
        valid: (B, S) bool, False where a row has fewer candidates.
        margin: m >= 0.

    Example:
        >>> scores, costs = torch.tensor([[-1.0, -3.0, -2.0]]), torch.tensor([[0.0, 0.5, 1.0]])
        >>> margin_ranking(scores, costs, torch.ones(1, 3, dtype=torch.bool), margin=0.1, by_rank=True)
        PairwiseRanking(loss=tensor([1.1000]), pairs=tensor([3]), in_order=tensor([2]))
    """
    better = (costs[:, :, None] < costs[:, None, :]) & valid[:, :, None] & valid[:, None, :]
    gaps = scores[:, None, :] - scores[:, :, None]  # of j over i
    ranks = better.sum(1)
    margins = margin * (ranks[:, None, :] - ranks[:, :, None]) if by_rank else margin
    hinges = (gaps + margins).clamp_min(0).masked_fill(~better, 0)
    return PairwiseRanking(hinges.sum((1, 2)), better.sum((1, 2)), (better & (gaps < 0)).sum((1, 2)))
