"""Bounds of log Z, weights and effective sample sizes against arbitrary precision and by hand."""

import math

import mpmath
import pytest
import torch

from hf_ebm.objectives.losses import (
    effective_sample_size,
    log_importance_weights,
    log_partition_bounds,
)


def bounds_in_high_precision(energies: list[float]) -> tuple[float, float]:
    """Theorem 2, as it is printed."""
    with mpmath.workdps(60 if max(energies) - min(energies) < 100 else 400):  # the sum of all but one must not vanish
        weights = [mpmath.exp(-mpmath.mpf(e)) for e in energies]
        total, n = mpmath.fsum(weights), len(weights)
        t_n = mpmath.log(total / n)
        left_out = [mpmath.log((total - w) / (n - 1)) for w in weights]
        upper = (2 * n - 1) * t_n - 2 * (n - 1) * mpmath.fsum(left_out) / n
        return float(t_n), float(upper)


@pytest.mark.parametrize("count", [2, 3, 100, 10_000])
@pytest.mark.parametrize("scale, shift", [(0.01, 0.0), (3.0, 0.0), (30.0, 1000.0), (1.0, -5000.0)])
def test_bounds_equal_those_of_arbitrary_precision(count, scale, shift):
    generator = torch.Generator().manual_seed(count)
    energies = torch.randn(count, dtype=torch.float64, generator=generator) * scale + shift
    lower, upper = bounds_in_high_precision(energies.tolist())
    found = log_partition_bounds(energies)
    assert float(found.lower) == pytest.approx(lower, rel=1e-13, abs=1e-12)
    assert float(found.upper) == pytest.approx(upper, rel=1e-12, abs=1e-10)


def test_one_sample_with_all_the_weight():
    # The others' sum is 1e-300 of the whole: total - weight would be 0 in float64.
    energies = torch.tensor([0.0, 690.0, 691.0], dtype=torch.float64)
    lower, upper = bounds_in_high_precision(energies.tolist())
    found = log_partition_bounds(energies)
    assert float(found.lower) == pytest.approx(lower, rel=1e-13)
    assert float(found.upper) == pytest.approx(upper, rel=1e-12)


def test_bounds_of_rows_are_those_of_each():
    energies = torch.randn(4, 5, 7, dtype=torch.float64)
    found = log_partition_bounds(energies)
    assert found.lower.shape == (4, 5)
    for i, j in ((0, 0), (3, 4)):
        own = log_partition_bounds(energies[i, j])
        assert float(own.lower) == float(found.lower[i, j]) and float(own.upper) == float(found.upper[i, j])


def test_equal_energies_leave_no_gap_and_lower_is_never_above():
    found = log_partition_bounds(torch.full((1000,), 7.25))
    assert float(found.lower) == pytest.approx(-7.25) and float(found.upper) == pytest.approx(-7.25, abs=1e-9)
    energies = torch.randn(500, 6, dtype=torch.float64) * torch.rand(500, 1, dtype=torch.float64) * 20
    found = log_partition_bounds(energies)
    assert bool((found.lower <= found.upper).all())


def test_infinite_energies_have_no_weight():
    found = log_partition_bounds(torch.tensor([0.0, math.inf, 0.0, math.inf]))
    expected = bounds_in_high_precision([0.0, 1e5, 0.0, 1e5])
    assert float(found.lower) == pytest.approx(expected[0]) and float(found.upper) == pytest.approx(expected[1])
    assert float(log_partition_bounds(torch.full((3,), math.inf)).lower) == -math.inf
    # Without the only sample that has weight, nothing is known.
    assert float(log_partition_bounds(torch.tensor([0.0, math.inf])).upper) == math.inf


def test_the_bounds_enclose_log_z_in_expectation():
    # A distribution of weights whose log Z is known: E = 0 or 2 with probability .7 and .3.
    log_z = math.log(0.7 + 0.3 * math.exp(-2))
    generator = torch.Generator().manual_seed(0)
    for count in (20, 200):
        energies = 2.0 * (torch.rand(40_000, count, generator=generator, dtype=torch.float64) < 0.3)
        found = log_partition_bounds(energies)
        for side, sign in ((found.lower, 1), (found.upper, -1)):
            error = float(side.std()) / 200
            assert sign * (log_z - float(side.mean())) > -3 * error
            assert abs(float(side.mean()) - log_z) < 1 / count + 3 * error
    # For one row of samples the pair need not enclose it; how often it does is what a user should know.
    enclosed = ((found.lower <= log_z) & (log_z <= found.upper)).double().mean()
    assert 0.02 < float(enclosed) < 0.6


@pytest.mark.parametrize("energies", [[0.0, math.nan], [0.0, -math.inf]])
def test_energies_that_are_none_are_refused(energies):
    for function in (log_partition_bounds, log_importance_weights):
        with pytest.raises(ValueError, match="row 1 has the energy"):
            function(torch.tensor(energies))


def test_one_sample_is_too_few():
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        log_partition_bounds(torch.zeros(3, 1))


def test_weights_and_effective_sample_size():
    energies = torch.tensor([[0.0, 1.0, 2.0], [5000.0, 5000.0, 5000.0]])
    log_weights = log_importance_weights(energies)
    weights = torch.tensor([1.0, math.exp(-1), math.exp(-2)], dtype=torch.float64)
    torch.testing.assert_close(log_weights[0].exp(), weights / weights.sum())
    size = effective_sample_size(log_weights)
    assert float(size[0]) == pytest.approx(float(weights.sum() ** 2 / weights.square().sum()))
    assert float(size[1]) == pytest.approx(3)
    with pytest.raises(ValueError, match="all samples of a row have infinite energy"):
        log_importance_weights(torch.full((2, 3), math.inf))
