"""Ranking losses and length-normalized risks against plain loops."""

import math

import pytest
import torch

from hf_ebm.objectives.losses import length_normalized, minimum_risk
from hf_ebm.objectives.ranking import margin_ranking

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(3, 5, dtype=torch.float64, generator=GENERATOR)
COSTS = torch.tensor([[0.1, 0.5, 0.3, 0.9, 0.7], [0.5, 0.5, 0.2, 0.2, 0.9], [1.0, 0.4, 0.0, 0.0, 0.0]])
SIZES = (5, 5, 2)


@pytest.mark.parametrize("by_rank", [True, False])
def test_pairs_one_by_one(by_rank):
    """The first row has no ties, and a margin of (j - i) m for its sorted candidates."""
    scores = SCORES.clone().requires_grad_()
    valid = torch.arange(5) < torch.tensor(SIZES)[:, None]
    found = margin_ranking(scores, COSTS, valid, 0.3, by_rank)
    for row, size in enumerate(SIZES):
        loss, pairs, in_order, slope = 0.0, 0, 0, [0.0] * 5
        for i in range(size):
            for j in range(size):
                if not COSTS[row, i] < COSTS[row, j]:
                    continue
                ranks = [sum(float(COSTS[row, k]) < float(COSTS[row, one]) for k in range(size)) for one in (i, j)]
                margin = 0.3 * (ranks[1] - ranks[0]) if by_rank else 0.3
                hinge = float(SCORES[row, j] - SCORES[row, i]) + margin
                pairs, in_order = pairs + 1, in_order + bool(SCORES[row, i] > SCORES[row, j])
                if hinge > 0:
                    loss, slope[i], slope[j] = loss + hinge, slope[i] - 1, slope[j] + 1
        assert (found.loss[row].item(), int(found.pairs[row]), int(found.in_order[row])) == (
            pytest.approx(loss), pairs, in_order,
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(found.loss[row], scores, retain_graph=True)
        assert gradient[row].tolist() == slope
    assert found.pairs.tolist() == [10, 8, 1]


def test_candidates_in_order_and_apart_have_no_loss():
    costs = torch.arange(4.0)[None]
    valid = torch.ones(1, 4, dtype=torch.bool)
    for by_rank, apart in ((True, 0.5), (False, 0.5)):
        scores = -apart * costs
        assert float(margin_ranking(scores, costs, valid, 0.5, by_rank).loss) == 0
        assert float(margin_ranking(scores, costs, valid, 0.6, by_rank).loss) > 0


def test_risks_of_log_probabilities_per_token():
    log_probs, lengths = torch.tensor([[-2.0, -9.0, -4.0]], dtype=torch.float64), torch.tensor([[1, 9, 2]])
    costs, valid = torch.tensor([[0.0, 1.0, 0.5]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    for penalty in (0.0, 0.6, 1.0):
        scores = [
            value / length**penalty for value, length in zip(log_probs[0].tolist(), lengths[0].tolist(), strict=True)
        ]
        weights = [math.exp(0.5 * score) for score in scores]
        risk, _ = minimum_risk(length_normalized(log_probs, lengths, penalty), costs, valid, 0.5)
        expected = (weights[1] + 0.5 * weights[2]) / sum(weights)
        assert risk.item() == pytest.approx(expected)
    assert torch.equal(length_normalized(log_probs, lengths, 0.0), log_probs)
