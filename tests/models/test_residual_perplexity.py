"""Perplexities of residual models against enumeration."""

import math

import pytest
import torch

from hf_ebm.models.residual.scoring_residual import (
    bounds_by_size,
    lm_log_probs,
    position_log_probs,
    residual_perplexity,
)
from tests.models.residual_models import (
    END,
    LENGTH,
    PAD,
    PREFIX,
    all_continuations,
    exact_energies,
    exact_log_probs,
    toy_residual,
)


@pytest.fixture(scope="module")
def toy():
    """A model with what enumeration says of it."""
    model = toy_residual("gpt2")
    log_probs, energies = exact_log_probs(model.lm, PREFIX), exact_energies(model, PREFIX)
    return model, log_probs, energies, float((log_probs - energies).logsumexp(0))


def test_the_range_encloses_the_true_perplexity(toy):
    model, log_probs, energies, log_z = toy
    chosen = [3, 20, 41, 77, 100]
    after = [list(all_continuations()[i]) for i in chosen]
    found = residual_perplexity(
        model, [PREFIX.tolist()] * 5, after, max_new_tokens=LENGTH, num_samples=[100, 4000], candidates_at_once=1000
    )
    torch.testing.assert_close(found.lm_log_prob, log_probs[chosen], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.energy, energies[chosen], rtol=1e-6, atol=1e-6)
    tokens = sum(map(len, after))
    true = math.exp(-float((log_probs - energies)[chosen].sum() - 5 * log_z) / tokens)
    assert found.base_perplexity == pytest.approx(math.exp(-float(log_probs[chosen].sum()) / tokens), rel=1e-6)
    assert bool((found.lower <= found.upper).all())
    assert float(found.upper[1] - found.lower[1]) < float(found.upper[0] - found.lower[0])
    for side in (found.lower, found.upper):
        assert float(side[1]) == pytest.approx(true, rel=0.02)
    assert bool((found.effective_sample_size > 100).all())


def test_bounds_from_many_repetitions_bracket_log_z(toy):
    _, log_probs, energies, log_z = toy
    generator = torch.Generator().manual_seed(0)
    index = torch.multinomial(log_probs.exp(), 3000 * 200, replacement=True, generator=generator)
    sampled = energies[index].view(3000, 200)
    bounds = bounds_by_size(sampled, [25, 50, 100, 200])
    gaps = []
    for number in range(4):
        low, high = bounds.lower[:, number], bounds.upper[:, number]
        error = float(low.std()) / 3000**0.5
        assert float(low.mean()) < log_z + 3 * error
        assert float(high.mean()) > log_z - 3 * float(high.std()) / 3000**0.5
        gaps.append(float(high.mean() - low.mean()))
    assert gaps == sorted(gaps, reverse=True)
    # Nearly all single pairs miss log Z: their gap is of the order 1/n, their error of 1/sqrt(n).
    missed = ((bounds.lower > log_z) | (bounds.upper < log_z)).double().mean(0)
    print(f"shares of pairs at n = 25, 50, 100, 200 that do not enclose log Z: {missed}")
    assert bool((missed > 0.9).all())


def test_the_sampling_error_is_that_of_repetitions(toy):
    model = toy[0]
    after = [list(all_continuations()[i]) for i in (3, 20, 41)]
    found = [
        residual_perplexity(model, [PREFIX.tolist()] * 3, after, max_new_tokens=LENGTH, num_samples=150, seed=seed)
        for seed in range(40)
    ]
    spread = torch.stack([one.lower[0] for one in found]).std()
    stated = sum(one.sampling_error for one in found) / 40
    assert stated == pytest.approx(float(spread), rel=0.4)


def test_positions_equal_enumeration_and_multiply_to_the_whole(toy):
    model, log_probs, energies, log_z = toy
    continuations = all_continuations()
    joint = dict(zip(continuations, (log_probs - energies - log_z).tolist(), strict=True))
    rows = [*[ids for ids in continuations if len(ids) == LENGTH][7:40:8], (4, END)]
    found = position_log_probs(
        model, [PREFIX.tolist()] * len(rows), [list(ids) for ids in rows], max_new_tokens=LENGTH, num_samples=1500,
        candidates_at_once=1500, enumerate_last=True,
    )  # fmt: skip

    def log_mass(start: tuple) -> float:
        return float(torch.tensor([joint[ids] for ids in continuations if ids[: len(start)] == start]).logsumexp(0))

    for row, ids in enumerate(rows):
        for t in range(len(ids)):
            exact = log_mass(ids[: t + 1]) - log_mass(ids[:t])
            assert float(found.lower[row, t]) - 0.1 < exact < float(found.upper[row, t]) + 0.1
            assert float(found.upper[row, t] - found.lower[row, t]) < 0.2
        assert bool(found.lower[row, len(ids) :].isnan().all())
        whole = float((found.lower[row] + found.upper[row]).nansum() / 2)
        assert whole == pytest.approx(joint[ids], abs=0.15)
        if len(ids) == LENGTH:
            exact = joint[ids] - log_mass(ids[:-1])
            assert float(found.last[row]) == pytest.approx(exact, abs=1e-5)
        else:
            assert math.isnan(float(found.last[row]))


def test_log_probs_of_a_language_model_do_not_depend_on_the_batch(toy):
    model, log_probs, _, _ = toy
    after = [torch.tensor(ids) for ids in all_continuations()]
    table = lm_log_probs(model.lm, [PREFIX] * len(after), after, PAD, batch_size=7)
    torch.testing.assert_close(table.nansum(1), log_probs, rtol=1e-6, atol=1e-6)
    assert table.isnan().sum(1).tolist() == [LENGTH - len(ids) for ids in after]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_samples=1), "num_samples must be a whole number from 2 up, got 1"),
        (dict(num_samples=[1, 10]), "num_samples must be a whole number from 2 up, got 1"),
        (dict(continuations=[[3, 4]]), "row 0 must end with an end token"),
        (dict(continuations=[[3, END, 4]]), "row 0 must end with an end token"),
        (dict(continuations=[[3, 4, 5, 3]]), "row 0 has 4 tokens, must have 1 to 3"),
        (dict(continuations=[[]]), "row 0 has 0 tokens"),
        (dict(continuations=[[3, 4, 77]]), "row 0 holds the id 77"),
        (dict(continuations=[]), "continuations must be one or more"),
        (dict(prefixes=[[3] * 31]), "with max_new_tokens 34; the language model has positions for 32"),
    ],
)
def test_rows_that_a_residual_model_cannot_have_are_refused(toy, changes, message):
    arguments = {"prefixes": [[0]], "continuations": [[3, 4, 5]], "num_samples": 4, **changes}
    with pytest.raises(ValueError, match=message):
        residual_perplexity(toy[0], max_new_tokens=LENGTH, **arguments)
