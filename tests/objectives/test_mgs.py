"""MGS on tensors: candidates from seeds, densities against float64, weights, directions, realistic dimensions."""

import math

import pytest
import torch

from hf_ebm.objectives.mgs import (
    Candidate,
    candidate_log_weights,
    combine_,
    draw_candidates,
    log_proposal_density,
    noise_of,
    noise_scales,
    perturb_,
    proposal_sums,
)

SHAPES = ((3, 4), (5,), (2, 2, 2))


def drawn(shapes=SHAPES, dtype=torch.float64, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def density_by_hand(delta, directions, scales, mixture):
    """log of π N(Δ; 0, Σ) + (1 - π) N(Δ; g, Σ), with torch's own normal distribution."""
    parts = []
    for weight, shift in ((mixture, 0.0), (1 - mixture, 1.0)):
        logs = [
            torch.distributions.Normal(shift * g, s).log_prob(d).sum()
            for d, g, s in zip(delta, directions, scales, strict=True)
        ]
        parts.append(math.log(weight) + sum(logs))
    return torch.logaddexp(*parts)


@pytest.mark.parametrize("mixture", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("noise", [0.5, 1.0, 30.0])
def test_full_density_is_that_of_the_mixture_at_the_actual_scale(mixture, noise):
    directions, originals = drawn(), drawn(seed=1)
    scales = noise_scales(directions, noise)
    proposal = proposal_sums(directions, scales)
    for candidate in draw_candidates(7, 6, 0.5):
        parameters = [tensor.clone() for tensor in originals]
        sums = perturb_(parameters, originals, directions, scales, candidate, "full")
        delta = [p - o for p, o in zip(parameters, originals, strict=True)]
        expected = density_by_hand(delta, directions, scales, mixture)
        found = log_proposal_density(candidate, sums, proposal, mixture, "full")
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-8)
        # Given the noise: the same without the density of the noise itself, up to what candidates share.
        given_noise = log_proposal_density(candidate, sums, proposal, mixture, "given_noise")
        noises = torch.cat([e.clone() for _, _, e in noise_of(candidate, directions)])
        log_normal = torch.distributions.Normal(0.0, 1.0).log_prob(noises).sum()
        shared = sum(tensor.numel() * math.log(scale) for tensor, scale in zip(directions, scales, strict=True))
        torch.testing.assert_close(given_noise, expected - log_normal + shared, rtol=1e-10, atol=1e-8)


def test_a_density_that_ignores_the_scale_would_be_noticed():
    directions = drawn()
    values = []
    for noise in (1.0, 2.0):
        scales = noise_scales(directions, noise)
        sums = perturb_(drawn(seed=1), drawn(seed=1), directions, scales, Candidate(False, 3), "full")
        values.append(log_proposal_density(Candidate(False, 3), sums, proposal_sums(directions, scales), 0.5, "full"))
    assert abs(float(values[0] - values[1])) > 1


def test_scales_are_mean_absolute_gradients_of_each_tensor():
    directions = [torch.tensor([1.0, -3.0]), torch.zeros(4)]
    assert noise_scales(directions, 0.5) == [1.0, 0.0]


def test_candidates_depend_on_the_seed_alone():
    first, more = draw_candidates(5, 4, 0.5), draw_candidates(5, 9, 0.5)
    assert first == more[:4] and len({candidate.seed for candidate in more}) == 9
    assert draw_candidates(6, 4, 0.5) != first
    assert not any(candidate.from_likelihood for candidate in draw_candidates(5, 50, 1.0))
    assert all(candidate.from_likelihood for candidate in draw_candidates(5, 50, 0.0))
    share = sum(candidate.from_likelihood for candidate in draw_candidates(1, 4000, 0.25)) / 4000
    assert share == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / 4000))
    noises = [torch.cat([e.clone() for _, _, e in noise_of(candidate, drawn())]) for candidate in more]
    again = torch.cat([e.clone() for _, _, e in noise_of(more[2], drawn(seed=9))])
    assert torch.equal(noises[2], again) and not torch.equal(noises[2], noises[3])


def test_tensors_larger_than_a_part_get_independent_noise():
    like = [torch.zeros(70_000, dtype=torch.float64), torch.zeros(300, 500)]
    noise = torch.cat([e.double() for _, _, e in noise_of(Candidate(True, 3), like) for e in [e.clone()]])
    assert len(noise) == 220_000 and len(noise.unique()) > 0.99 * len(noise)
    covered = [
        sum(part.stop - part.start for i, part, _ in noise_of(Candidate(True, 3), like) if i == k) for k in (0, 1)
    ]
    assert covered == [70_000, 150_000]
    assert abs(float(noise.mean())) < 5 / 220_000**0.5 and float(noise.std()) == pytest.approx(1, abs=0.01)


def test_tensors_without_a_gradient_stay():
    directions, originals = drawn(), drawn(seed=1)
    directions[1].zero_()
    scales = noise_scales(directions, 1.0)
    parameters = [tensor.clone() for tensor in originals]
    sums = perturb_(parameters, originals, directions, scales, Candidate(True, 1), "full")
    assert torch.equal(parameters[1], originals[1]) and not torch.equal(parameters[0], originals[0])
    found = log_proposal_density(Candidate(True, 1), sums, proposal_sums(directions, scales), 0.5, "full")
    kept = [0, 2]
    delta = [parameters[i] - originals[i] for i in kept]
    expected = density_by_hand(delta, [directions[i] for i in kept], [scales[i] for i in kept], 0.5)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-8)


def test_the_direction_is_the_weighted_mean_of_the_candidates():
    directions, originals = drawn(), drawn(seed=1)
    scales = noise_scales(directions, 0.7)
    candidates = [Candidate(True, 1), Candidate(False, 2), Candidate(True, 3)]
    weights = [0.5, 0.2, 0.3]
    expected = [torch.zeros_like(tensor) for tensor in originals]
    for candidate, weight in zip(candidates, weights, strict=True):
        parameters = [tensor.clone() for tensor in originals]
        perturb_(parameters, originals, directions, scales, candidate, "full")
        for total, parameter, original in zip(expected, parameters, originals, strict=True):
            total += weight * (parameter - original)
    combine_(directions, scales, candidates, weights)
    for found, wanted in zip(directions, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_weights_are_the_importance_weights():
    costs, cost = torch.tensor([1.0, 2.5, 0.3]), torch.tensor(1.2)
    densities = torch.tensor([-0.4, 0.1, -2.0], dtype=torch.float64)
    raw = torch.exp(0.7 * (cost - costs).double()) / densities.exp()
    found = candidate_log_weights(costs, cost, 0.7, densities)
    torch.testing.assert_close(found.exp(), raw / raw.sum(), rtol=1e-6, atol=0)


def test_the_search_approaches_the_target_of_the_paper():
    """Equation 2 by quadrature in one dimension: self-normalized importance sampling has the right limit."""
    direction, alpha, noise, mixture = torch.tensor([-0.8], dtype=torch.float64), 2.0, 1.5, 0.3
    scales = noise_scales([direction], noise)

    def cost(delta):
        return (delta - 0.5) ** 2

    grid = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    target = torch.softmax(alpha * (cost(torch.zeros(())) - cost(grid)), 0)
    expected = float((target * grid).sum())
    candidates = draw_candidates(0, 20000, mixture)
    original, parameter, deltas, densities = torch.zeros(1, dtype=torch.float64), torch.zeros(1).double(), [], []
    proposal = proposal_sums([direction], scales)
    for candidate in candidates:
        sums = perturb_([parameter], [original], [direction], scales, candidate, "full")
        deltas.append(float(parameter))
        densities.append(log_proposal_density(candidate, sums, proposal, mixture, "full"))
    deltas = torch.tensor(deltas, dtype=torch.float64)
    weights = candidate_log_weights(cost(deltas), cost(torch.zeros(())), alpha, torch.stack(densities)).exp()
    found, error = float((weights * deltas).sum()), float((weights * (deltas - expected)).square().sum().sqrt())
    assert found == pytest.approx(expected, abs=5 * error) and error < 0.02


def test_costs_of_a_thousand_nats_stay_finite():
    costs = torch.tensor([1000.0, 1100.0, 5.0])
    found = candidate_log_weights(costs, torch.tensor(1e4), 10.0, torch.full((3,), -1e8, dtype=torch.float64))
    assert found.isfinite().all() and float(found.exp().sum()) == pytest.approx(1)
    assert float(found[2]) == pytest.approx(0)


def test_the_printed_weight_collapses_in_high_dimension_and_the_default_does_not():
    directions = drawn([(1000, 1000)], torch.float32, size=1e-3)
    scales = noise_scales(directions, 1.0)
    proposal = proposal_sums(directions, scales)
    candidates = [Candidate(k % 2 == 0, k) for k in range(4)]
    original, parameter = torch.zeros(1000, 1000), torch.zeros(1000, 1000)
    sums = [perturb_([parameter], [original], directions, scales, candidate, "full") for candidate in candidates]
    equal = torch.ones(4)
    weights = {
        density: candidate_log_weights(
            equal,
            torch.tensor(1.0),
            1.0,
            torch.stack(
                [
                    log_proposal_density(candidate, noise, proposal, 0.5, density)
                    for candidate, noise in zip(candidates, sums, strict=True)
                ]
            ),
        ).exp()
        for density in ("full", "given_noise")
    }
    assert float(weights["full"].max()) > 1 - 1e-6
    torch.testing.assert_close(weights["given_noise"], torch.full((4,), 0.25, dtype=torch.float64))
