"""The choice of the least expected cost against enumeration and a plain loop."""

import pytest
import torch

from hf_ebm.objectives.bayes_risk import mbr_choice, pairwise_costs
from hf_ebm.objectives.sequence_costs import COSTS, as_cost
from tests.objectives.test_losses import every_sequence, table_log_probs


def test_the_choice_among_samples_is_that_of_enumeration():
    """Expected costs lie within the Monte Carlo error; the likeliest sequence is another one."""
    table = torch.randn(3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(191))
    probabilities, space = table_log_probs(table).exp(), [list(ids) for ids in every_sequence()]
    cost, count = COSTS["edit_distance"], 400
    exact = torch.stack([(probabilities * cost([one] * len(space), space)).sum() for one in space])
    drawn = torch.multinomial(probabilities, count, replacement=True, generator=torch.Generator().manual_seed(0))
    costs, counted = pairwise_costs(cost, [[space[index] for index in drawn.tolist()]], count)
    choice = mbr_choice(-costs, counted)
    errors = (-choice.expected[0] - exact[drawn]).abs()
    assert bool((errors < 5 * costs[0].std(1) / count**0.5).all())
    assert int(drawn[choice.chosen]) == int(exact.argmin()) != int(probabilities.argmax())


def test_pairs_one_by_one():
    texts = [["a b", "a", "a b", "c"], ["x", "", "x y", "x"]]
    cost = as_cost(lambda predictions, references: [
        abs(len(one) - len(other)) / len(other) for one, other in zip(predictions, references, strict=True)
    ])  # fmt: skip
    costs, counted = pairwise_costs(cost, texts, 3)
    choice = mbr_choice(-costs, counted)
    for row, found in enumerate(texts):
        means = []
        for k, one in enumerate(found):
            others = [other for n, other in enumerate(found[:3]) if n != k and other]
            means.append(sum(abs(len(one) - len(other)) / len(other) for other in others) / len(others))
        assert (-choice.expected[row]).tolist() == pytest.approx(means)
        assert int(choice.chosen[row]) == means.index(min(means))


def test_equal_pairs_are_computed_once_and_nothing_is_compared_with_nothing():
    asked = []
    cost = as_cost(
        lambda predictions, references: (
            asked.extend(zip(predictions, references, strict=True)) or [0.0] * len(references)
        )
    )
    pairwise_costs(cost, [["a", "a", "b"], ["b", "a", "b"]], 3)
    assert sorted(asked) == [("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]
    costs, counted = pairwise_costs(cost, [["", ""]], 2)
    choice = mbr_choice(-costs, counted)
    assert int(choice.chosen) == 0 and choice.expected.tolist() == [[-torch.inf, -torch.inf]]
