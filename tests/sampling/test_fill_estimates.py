"""Draws of fills and conditionals of samples against what enumeration gives."""

import pytest
import torch

from hf_ebm.sampling.fill_estimates import chain_estimate, drawn_fills, left_out, log_weights, slot_conditionals
from hf_ebm.scoring.joint_fills import FillSpace, Slot, joint_tables, sequential_tables
from tests.conftest import tiny_energy_model

WORDS = torch.arange(4, 9)[:, None]
SPACE = FillSpace(torch.tensor([1, 3, 6, 3, 7, 3, 2]), tuple(Slot(torch.tensor([p]), WORDS) for p in (1, 3, 5)))


@pytest.fixture(scope="module")
def exact():
    """A model with the energies and the left-to-right probabilities of all fills."""
    model = tiny_energy_model(scale=0.25)
    runner = model.masked_batch_runner()
    with torch.no_grad():
        energies = torch.cat(list(joint_tables(runner, SPACE, "local", torch.float64)))
        log_probs = -torch.cat(list(sequential_tables(runner, SPACE, [torch.arange(5)] * 3)))
    return model, energies, log_probs


def test_draws_are_of_the_probability_they_say(exact):
    model, _, log_probs = exact
    uniforms = torch.rand(2_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        draws = drawn_fills(model.masked_batch_runner(), SPACE, uniforms, range(3))
    assert torch.allclose(draws.log_probs, log_probs[tuple(draws.choices.T)], atol=1e-5)
    for slot in range(3):
        own = log_probs.exp().sum([axis for axis in range(3) if axis != slot])
        counts = draws.choices[:, slot].bincount(minlength=5) / 2_000
        assert (counts - own).abs().max() < 0.04 and (draws.means[slot] - own).abs().max() < 0.02


def test_what_candidate_sets_leave_out_is_estimated_without_bias(exact):
    """Over many draws the estimates' mean is the ratio, and their spread what they say."""
    model, energies, _ = exact
    weights = (-energies / 0.8).exp()
    inside = torch.zeros(5, 5, 5, dtype=torch.bool)
    inside[:3, 1:, :4] = True
    truth = float(weights[~inside].sum() / weights[inside].sum())
    uniforms = torch.rand(4_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    penalty = lambda ids: 0.5 * (ids[:, 1] == 5).double()  # noqa: E731
    with torch.no_grad():
        draws = drawn_fills(model.masked_batch_runner(), SPACE, uniforms, [2, 0, 1])
        logs = log_weights(model.masked_batch_runner(), SPACE, draws, "local", 0.8, None)
        added = log_weights(model.masked_batch_runner(), SPACE, draws, "local", 0.8, penalty)
    held = inside[tuple(draws.choices.T)]
    parts = [left_out(*own, weights[inside].sum().log()) for own in zip(logs.split(200), held.split(200), strict=True)]
    ratios, errors = torch.tensor(parts).T
    assert abs(ratios.mean() - truth) < 4 * ratios.std() / 20**0.5 and ratios.std() < 0.3 * truth
    assert 0.6 < errors.mean() / ratios.std() < 1.6
    assert torch.allclose(logs - added, 0.5 / 0.8 * (draws.choices[:, 0] == 1).double())
    # That none was outside says little: the error is what one more draw could bring.
    assert left_out(torch.zeros(10), torch.ones(10, dtype=torch.bool), torch.tensor(0.0)) == (0, pytest.approx(0.1))


def test_conditionals_of_samples_keep_every_expectation(exact):
    """Each fill weighed by its probability, and replaced by its conditionals, gives the same marginals and joint."""
    model, energies, _ = exact
    penalty = lambda ids: 0.3 * (ids[:, 1] == ids[:, 5]).double()  # noqa: E731
    choices = torch.cartesian_prod(*[torch.arange(5)] * 3)
    ids = SPACE.filled(choices)
    probabilities = (-(energies.flatten() + penalty(ids)) / 0.8).softmax(0)
    for slot in range(3):
        with torch.no_grad():
            found = slot_conditionals(model.masked_batch_runner(), SPACE, slot, ids, "local", 0.8, 2, penalty)
        assert torch.allclose(found.weights.sum(1), torch.ones(125, dtype=torch.float64))
        assert 0 < int((found.weights[:, -1] == 1).sum()) < 125
        total = torch.zeros(125, dtype=torch.float64)
        numbers = (found.ids[..., [1, 3, 5]] - 4) @ torch.tensor([25, 5, 1])
        total.index_add_(0, numbers.flatten(), (found.weights * probabilities[:, None]).flatten())
        assert torch.allclose(total, probabilities, atol=1e-6)


def test_errors_are_those_between_chains_and_no_less_than_of_independent_samples():
    ids = torch.tensor([7, 7, 8, 8, 7, 8, 7, 8])[:, None, None]
    stuck = chain_estimate(ids, torch.ones(8, 1), torch.tensor([0, 0, 1, 1, 0, 1, 0, 1]))
    assert stuck.probabilities.tolist() == [0.5, 0.5] and stuck.errors.tolist() == pytest.approx([0.5, 0.5])
    even = chain_estimate(ids, torch.ones(8, 1), torch.tensor([0, 1, 0, 1, 0, 0, 1, 1]))
    assert even.errors.tolist() == pytest.approx([(0.25 / 8) ** 0.5] * 2)


def test_what_a_sample_says_twice_of_a_thing_is_one_number():
    """As conditionals of two slots do, which both hold the sample itself."""
    once = torch.tensor([0.5, 0.0, 0.25, 1.0, 0.0, 0.25], dtype=torch.float64)
    ids = torch.tensor([[7, 8]]).expand(6, 2)[..., None]
    single = chain_estimate(ids, torch.stack([once, 1 - once], 1), torch.tensor([0, 1, 0, 1, 0, 1]))
    halves = torch.cat([ids, ids], 1), torch.stack([once, 1 - once], 1).repeat(1, 2) / 2
    double = chain_estimate(*halves, torch.tensor([0, 1, 0, 1, 0, 1]))
    assert torch.equal(single.probabilities, double.probabilities)
    assert torch.allclose(single.errors, double.errors)
    assert float(single.errors[0]) >= float(once.std(correction=0) / 6**0.5) - 1e-12
