"""Minimum risk and policy gradient against brute force over an enumerable output space."""

import itertools

import pytest
import torch

from hf_ebm.objectives.losses import leave_one_out_baseline, minimum_risk, policy_gradient_loss

SYMBOLS, LENGTH, END = 3, 3, 0


def every_sequence(length=LENGTH):
    """All sequences that end, or are cut off, at the length."""
    found = set()
    for ids in itertools.product(range(SYMBOLS), repeat=length):
        found.add(ids[: ids.index(END) + 1] if END in ids else ids)
    return sorted(found)


def table_log_probs(table, length=LENGTH):
    """log p of every sequence under a model with one table of logits a step and previous symbol."""
    log_probs = torch.log_softmax(table, -1)
    return torch.stack(
        [
            sum(log_probs[t, ids[t - 1] if t else SYMBOLS, symbol] for t, symbol in enumerate(ids))
            for ids in every_sequence(length)
        ]
    )


@pytest.fixture
def space():
    table = torch.randn(LENGTH, SYMBOLS + 1, SYMBOLS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    costs = torch.rand(len(every_sequence()), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return table.requires_grad_(), costs


def test_probabilities_sum_to_one(space):
    assert table_log_probs(space[0]).exp().sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("sharpness", [0.005, 0.5, 1.0, 3.0])
def test_risk_over_the_whole_space(space, sharpness):
    """Its gradient is equation 7 of the paper; with α = 1 it is that of the expected cost."""
    table, costs = space
    log_probs = table_log_probs(table)
    powers = log_probs.exp() ** sharpness
    q = powers / powers.sum()
    (expected,) = torch.autograd.grad((q * costs).sum(), table, retain_graph=True)
    risk, weights = minimum_risk(log_probs[None], costs[None], torch.ones(1, len(costs), dtype=torch.bool), sharpness)
    (found,) = torch.autograd.grad(risk.sum(), table, retain_graph=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(weights[0], q)
    surrogate = sharpness * (q.detach() * (costs - (q.detach() * costs).sum()) * log_probs).sum()
    (by_equation,) = torch.autograd.grad(surrogate, table)
    torch.testing.assert_close(found, by_equation, rtol=1e-9, atol=1e-12)


def test_rows_with_fewer_candidates(space):
    log_probs, costs = torch.tensor([[-1.0, -2.0, 0.0], [-800.0, -900.0, -1000.0]]), torch.tensor([[1.0, 3.0, 9.0]] * 2)
    log_probs.requires_grad_()
    risk, weights = minimum_risk(log_probs, costs, torch.tensor([[True, True, False], [True, True, True]]), 1.0)
    p = torch.softmax(torch.tensor([-1.0, -2.0]), 0)
    torch.testing.assert_close(risk.detach(), torch.stack([p[0] + 3 * p[1], torch.tensor(1.0)]))
    assert float(weights[0, 2]) == 0
    risk.sum().backward()
    assert log_probs.grad.isfinite().all() and float(log_probs.grad[0, 2]) == 0


@pytest.mark.parametrize("baseline", [0.0, 0.37])
def test_policy_gradient_is_unbiased(space, baseline):
    """Its expectation over all sequences is the gradient of the expected cost, whatever the baseline."""
    table, costs = space
    log_probs = table_log_probs(table)
    probabilities = log_probs.exp()
    (expected,) = torch.autograd.grad((probabilities * costs).sum(), table, retain_graph=True)
    losses = policy_gradient_loss(log_probs[:, None], costs[:, None], torch.tensor([[baseline]]))
    (found,) = torch.autograd.grad((probabilities.detach() * losses).sum(), table)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [2, 3])
def test_leave_one_out_is_unbiased(count):
    """Its expectation over all `count`-tuples of sequences is the gradient of the expected cost."""
    table = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    log_probs = table_log_probs(table, 2)
    costs = torch.rand(len(log_probs), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad((log_probs.exp() * costs).sum(), table, retain_graph=True)
    drawn = torch.cartesian_prod(*[torch.arange(len(costs))] * count)
    losses = policy_gradient_loss(log_probs[drawn], costs[drawn], leave_one_out_baseline(costs[drawn]))
    (found,) = torch.autograd.grad((log_probs[drawn].sum(1).exp().detach() * losses).sum(), table)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_policy_gradient_averages_samples_and_leaves_costs_alone():
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    costs = torch.tensor([[1.0, 4.0]], requires_grad=True)
    policy_gradient_loss(log_probs, costs, torch.tensor([[2.0]])).sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-0.5, 1.0]]))
    assert costs.grad is None
