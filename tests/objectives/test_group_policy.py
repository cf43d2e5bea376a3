"""Group-relative advantages, clipped ratios and the KL estimate against enumeration and plain loops."""

import math

import pytest
import torch

from hf_ebm.objectives.group_policy import clipped_policy_loss, group_advantages, kl_from_samples, sequence_sums
from tests.objectives.test_losses import every_sequence, table_log_probs


@pytest.mark.parametrize("count", [2, 3])
def test_without_deviations_the_gradient_is_that_of_the_expected_reward(count):
    """Its expectation over all groups, by (S - 1) / S: a sample is in its own mean."""
    table = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    log_probs = table_log_probs(table, 2)
    rewards = torch.rand(len(log_probs), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad(-(log_probs.exp() * rewards).sum(), table, retain_graph=True)
    drawn = torch.cartesian_prod(*[torch.arange(len(rewards))] * count)
    advantages = group_advantages(rewards[drawn], scaled=False)
    losses, clipped = clipped_policy_loss(log_probs[drawn], log_probs[drawn].detach(), advantages, 0.2)
    (found,) = torch.autograd.grad((log_probs[drawn].sum(1).exp().detach() * losses.mean(1)).sum(), table)
    torch.testing.assert_close(found, expected * (count - 1) / count, rtol=1e-9, atol=1e-12)
    assert not clipped.any()


def test_scaled_advantages_have_no_unit():
    rewards = torch.rand(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e4
    found = group_advantages(rewards, scaled=True)
    for row, advantages in zip(rewards.tolist(), found.tolist(), strict=True):
        mean = sum(row) / 5
        deviation = math.sqrt(sum((one - mean) ** 2 for one in row) / 4)
        assert advantages == pytest.approx([(one - mean) / deviation for one in row], rel=1e-6)
    assert not group_advantages(torch.full((1, 4), 0.1), scaled=True).any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [(1.5, 2.0, -2.4, 0.0), (0.5, 2.0, -1.0, -1.0), (1.1, 2.0, -2.2, -2.2),
     (1.5, -2.0, 3.0, 3.0), (0.5, -2.0, 1.6, 0.0), (0.9, -2.0, 1.8, 1.8)],
)  # fmt: skip
def test_ratios_are_clipped_where_they_have_gone_the_right_way(ratio, advantage, loss, slope):
    log_probs = torch.tensor([math.log(0.4 * ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.4], dtype=torch.float64).log()
    found, clipped = clipped_policy_loss(log_probs, old, torch.tensor([advantage]), 0.2)
    found.sum().backward()
    assert (found.item(), log_probs.grad.item()) == (pytest.approx(loss), pytest.approx(slope))
    assert bool(clipped) == (slope == 0)


def test_the_estimate_s_mean_is_the_divergence():
    """Over all sequences, token by token; and no estimate is negative."""
    tables = [torch.randn(3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1)]
    own, reference = map(table_log_probs, tables)
    divergence = (own.exp() * (own - reference)).sum()
    estimates = kl_from_samples(own, reference)
    assert (own.exp() * estimates).sum() == pytest.approx(divergence.item())
    assert bool((estimates >= 0).all()) and len(estimates) == len(every_sequence())


def test_sums_of_sequences():
    values = torch.arange(6.0, requires_grad=True)
    sums = sequence_sums(values, torch.tensor([1, 3, 2]))
    assert sums.tolist() == [0.0, 6.0, 9.0]
    (sums * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert values.grad.tolist() == [1.0, 2.0, 2.0, 2.0, 3.0, 3.0]
