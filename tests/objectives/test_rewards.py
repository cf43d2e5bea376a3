"""Rewards as pure functions, against plain loops."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from hf_ebm.objectives.rewards import (
    CostReward,
    Decoded,
    RewardFunction,
    fill_skipped,
    group_deviations,
    reward_values,
    total_rewards,
)
from hf_ebm.objectives.sequence_costs import COSTS, as_cost

NAN = math.nan


def test_the_sum_is_that_of_a_plain_loop():
    torch.manual_seed(0)
    values, weights = torch.randn(7, 3, dtype=torch.float64), torch.tensor([2.0, -0.5, 1.5], dtype=torch.float64)
    values[torch.rand(7, 3) < 0.4] = NAN
    values[3] = NAN
    for row, found in zip(values.tolist(), total_rewards(values, weights).tolist(), strict=True):
        known = [value * weight for value, weight in zip(row, weights.tolist(), strict=True) if not math.isnan(value)]
        assert found == pytest.approx(sum(known))
    assert total_rewards(values, weights)[3] == 0


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5, -2, 1],
        (1, Fraction(1, 2), Decimal(-2), True),
        [np.float32(1), np.float64(0.5), np.int8(-2), np.bool_(True)],
        [torch.tensor(1), torch.tensor(0.5), -2, 1],
        np.array([1, 0.5, -2, 1], dtype=np.float16),
        np.array([1, 0.5, -2, 1], dtype=object),
        torch.tensor([1, 0.5, -2, 1], dtype=torch.bfloat16, requires_grad=True),
        (value for value in (1, 0.5, -2, 1)),
    ],
)
def test_numbers_of_any_type_are_read(returned):
    values, missing, wrong = reward_values("mine", returned, 4)
    assert values.tolist() == [1, 0.5, -2, 1] and values.dtype == torch.float64
    assert not bool(missing.any()) and wrong is None


def test_nothing_is_not_negative():
    values, _, _ = reward_values("mine", [-0.0], 1)
    assert not bool(values.signbit().any())


def test_none_is_not_applicable_and_no_error():
    values, missing, wrong = reward_values("mine", [None, 2], 2)
    assert math.isnan(values[0]) and values[1] == 2 and not bool(missing.any()) and wrong is None


@pytest.mark.parametrize(
    "bad", [NAN, math.inf, -math.inf, 1e39, "0.5", [1.0], 1j, torch.tensor(NAN), np.float32(math.inf)]
)
def test_what_is_no_number_names_function_and_row(bad):
    values, missing, wrong = reward_values("mine", [1.0, None, bad, 2.0], 4)
    assert missing.tolist() == [False, False, True, False]
    assert values[[0, 3]].tolist() == [1, 2] and bool(values[1:3].isnan().all())
    assert isinstance(wrong, ValueError) and "mine" in str(wrong) and "row 2" in str(wrong)


@pytest.mark.parametrize("returned", [[1.0], [1.0] * 4, 1.0, None, "abc", {0, 1, 2}, torch.tensor(1.0), []])
def test_another_number_of_values_names_the_function(returned):
    values, missing, wrong = reward_values("mine", returned, 3)
    assert bool(missing.all()) and bool(values.isnan().all())
    assert "mine" in str(wrong) and "3" in str(wrong)


def test_a_skipped_value_gains_nothing_over_the_others():
    """Its advantage over the mean of its group is 0, and theirs are what they are without it."""
    values, groups = torch.tensor([1.0, NAN, 4.0, 5.0, 7.0, NAN]), torch.tensor([0, 0, 0, 1, 1, 2])
    filled = fill_skipped(values, values.isnan(), groups)
    own = filled[:3] - filled[:3].mean()
    assert own[1] == 0
    without = torch.tensor([1.0, 4.0])
    torch.testing.assert_close(own[[0, 2]], without - without.mean())
    assert filled[5] == pytest.approx((1 + 4 + 5 + 7) / 4)  # it has no others: that of all that were known
    nothing = torch.full((2,), NAN)
    assert bool(fill_skipped(nothing, nothing.isnan(), torch.tensor([0, 1])).isnan().all())
    kept = fill_skipped(torch.tensor([NAN, NAN, 1.0]), torch.tensor([False, True, False]), torch.tensor([0, 0, 0]))
    assert math.isnan(kept[0]) and kept[1] == 1  # what isn't applicable stays so


def test_deviations_of_groups():
    torch.manual_seed(1)
    rewards, groups = torch.randn(9), torch.tensor([2, 0, 0, 1, 1, 1, 0, 3, 3])
    rewards[3:6], rewards[7:] = 0.1, torch.tensor([0.1, 0.3])
    found = group_deviations(rewards, groups)
    expected = [
        np.std([r for r, g in zip(rewards.tolist(), groups.tolist(), strict=True) if g == at]) for at in range(4)
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert (found == 0).tolist() == [False, True, True, False]


def decoded(decode=None, **options):
    return Decoded([[5, 6], [7]], [[5], []], [[8], [9]], {"topic": ["x", "y"]}, decode, **options)


def as_text(rows):
    return [" ".join(map(str, ids)) for ids in rows]


def test_a_function_is_given_what_it_takes():
    seen = {}

    def everything(completions, completion_ids, references, prompt_ids, topic, scale=2.0, **rest):
        seen.update(locals())
        return [1, 2]

    assert RewardFunction("mine", everything)(decoded(as_text)) == [1, 2]
    assert seen["completions"] == ["5 6", "7"] and seen["completion_ids"] == [[5, 6], [7]]
    assert seen["references"] == ["5", ""] and seen["prompt_ids"] == [[8], [9]]
    assert seen["topic"] == ["x", "y"] and seen["scale"] == 2.0
    assert seen["rest"] == {"prompts": ["8", "9"], "reference_ids": [[5], []]}
    RewardFunction("mine", lambda completions, **rest: seen.update(rest))(decoded(as_text, prompt_texts=["P", "Q"]))
    assert seen["prompts"] == ["P", "Q"] and seen["topic"] == ["x", "y"]
    assert RewardFunction("ids", lambda completion_ids, **rest: list(rest))(decoded()) == [
        "topic", "prompt_ids", "reference_ids"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="processing_class"):
        RewardFunction("texts", lambda completions: [1, 2])(decoded())
    with pytest.raises(ValueError, match="the reward mine reads the column 'weight'"):
        RewardFunction("mine", lambda completions, weight: [1, 2])(decoded(as_text))
    with pytest.raises(ValueError, match="the reward 'mine' reads prompts"):
        RewardFunction("mine", lambda prompts: [1, 2])(Decoded([[5]], [[5]], None, {}, as_text))


def test_what_a_function_needs():
    assert RewardFunction("mine", lambda completions, references: 0).needs_references
    assert RewardFunction("mine", lambda completion_ids, reference_ids: 0).needs_references
    assert not RewardFunction("mine", lambda completions, references=None, **rest: 0).needs_references
    assert RewardFunction("mine", lambda completions: 0).needs_texts
    assert not RewardFunction("mine", lambda completion_ids, prompts=None, **rest: 0).needs_texts
    assert {name: cost.needs_references for name, cost in COSTS.items() if not cost.needs_references} == {
        "repetition": False
    }


@pytest.mark.parametrize("reads", ["ids", "texts"])
def test_a_cost_is_its_negative(reads):
    def cost(predictions, references, prompts, topic):
        return [len(a) + 10 * len(b) + 100 * (c == "y") for a, b, c in zip(predictions, prompts, topic, strict=True)]

    cost.reads = reads
    lengths = [[2, 1], [1, 1]] if reads == "ids" else [[3, 1], [1, 1]]
    expected = [-(lengths[0][0] + 10), -(lengths[0][1] + 10 + 100)]
    assert CostReward("mine", as_cost(cost))(decoded(as_text)).tolist() == expected
