"""Schedules, token losses and costs, against values worked out by hand."""

import math

import pytest
import torch

from hf_ebm.objectives.costs import HammingCost, check_costs, cost_of_tokens
from hf_ebm.objectives.losses import cross_entropy_sum, log_normalizers
from hf_ebm.relaxations.soft_choices import inverse_temperature, teacher_forcing_probability

LABELS = torch.tensor([[1, 2, -100], [0, -100, -100]])


def test_inverse_sigmoid():
    probabilities = [teacher_forcing_probability(e, "inverse_sigmoid", decay_strength=4.0) for e in range(6)]
    assert probabilities[0] == 1.0  # the first epoch is all gold
    for epoch, probability in enumerate(probabilities[1:], 1):
        assert probability == pytest.approx(4 / (4 + math.exp(epoch / 4)))
    gentle = [teacher_forcing_probability(e, "inverse_sigmoid", decay_strength=100.0) for e in range(6)]
    assert all(a > b for a, b in zip(gentle[1:], probabilities[1:], strict=True))
    assert teacher_forcing_probability(10_000, "inverse_sigmoid", decay_strength=0.01) == pytest.approx(0)


def test_other_schedules():
    linear = [teacher_forcing_probability(e, "linear", probability=0.2, last=4) for e in range(7)]
    assert linear == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    constant = [teacher_forcing_probability(e, "constant", probability=0.3) for e in range(3)]
    assert constant == [1.0, 0.3, 0.3]
    assert [teacher_forcing_probability(e, "always") for e in range(3)] == [0.0, 0.0, 0.0]


def test_inverse_temperature():
    assert [inverse_temperature(e, 2.0, 1.0) for e in range(3)] == pytest.approx([2, 2, 2])
    assert [inverse_temperature(e, 1.0, 1.5) for e in range(3)] == pytest.approx([1, 1.5, 2.25])
    assert inverse_temperature(5000, 1.0, 1.6) == pytest.approx(1e6)  # would overflow float32, then float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: teacher_forcing_probability(1, "exponential"), "teacher_forcing_schedule must be one of"),
        (lambda: teacher_forcing_probability(1, "constant", probability=1.2), "must be a number from 0 to 1, got 1.2"),
        (
            lambda: teacher_forcing_probability(1, "linear", decay_strength=0),
            "decay_strength must be a number above 0, got 0",
        ),
        (lambda: inverse_temperature(1, 0.0, 1.0), "alpha must be a number above 0, got 0.0"),
        (lambda: inverse_temperature(1, math.inf, 1.0), "alpha must be a number above 0, got inf"),
        (lambda: inverse_temperature(1, 1.0, math.nan), "alpha_growth must be a number above 0, got nan"),
        (lambda: HammingCost([1.0, -1.0]), "token_weights must be a number from 0 up"),
        (lambda: HammingCost([1.0])(LABELS, 3), "one weight for each of 3 tokens, got 1"),
        (lambda: check_costs(torch.ones(2), LABELS, 3), "shape"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_token_losses_by_hand():
    logits = torch.tensor(
        [[[1.0, 2.0, 0.0], [0.0, 0.0, 3.0], [9.0, 9.0, 9.0]], [[2.0, 1.0, 1.0], [0.0] * 3, [0.0] * 3]]
    )
    log_z = [math.log(sum(map(math.exp, row))) for row in ([1, 2, 0], [0, 0, 3], [2, 1, 1])]
    expected = (log_z[0] - 2) + (log_z[1] - 3) + (log_z[2] - 2)
    assert float(cross_entropy_sum(logits, LABELS)) == pytest.approx(expected)
    assert cross_entropy_sum(logits.bfloat16(), LABELS).dtype == torch.float32
    found = log_normalizers(logits, LABELS)
    assert float(found.sum) == pytest.approx(sum(log_z))
    assert float(found.sum_of_squares) == pytest.approx(sum(z * z for z in log_z))


def test_hamming_costs_by_hand():
    plain = HammingCost()(LABELS, 4)
    assert cost_of_tokens(plain, LABELS, 0, 4).tolist() == [[1, 0, 1, 1], [0, 1, 1, 1]]
    weighted = HammingCost([2.0, 1.0, 1.0, 0.5])(LABELS, 4)
    assert cost_of_tokens(weighted, LABELS, 0, 4).tolist() == [[2, 0, 1, 0.5], [0, 1, 1, 0.5]]
    assert cost_of_tokens(weighted, LABELS, 1, 4)[0].tolist() == [2, 1, 0, 0.5]
