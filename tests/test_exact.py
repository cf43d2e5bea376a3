"""The oracle itself, against sums done by hand."""

import itertools
import math

import pytest
import torch

from hf_ebm.exact import enumerate_distribution


def energy(ids: torch.Tensor) -> torch.Tensor:
    return (ids[:, 0] * 0.5 + (ids[:, 1] == ids[:, 2]) * 1.25).double()


@pytest.mark.parametrize("temperature,chunk_size", [(1.0, 65_536), (0.5, 5)])
def test_partition_probabilities_and_marginals(temperature, chunk_size):
    exact = enumerate_distribution(energy, [4, 2, 7], 3, temperature=temperature, chunk_size=chunk_size)
    weights = {
        y: math.exp(-(0.5 * y[0] + 1.25 * (y[1] == y[2])) / temperature) for y in itertools.product([2, 4, 7], repeat=3)
    }
    total = sum(weights.values())
    assert float(exact.log_partition) == pytest.approx(math.log(total))
    assert [tuple(row) for row in exact.sequences.tolist()] == list(weights)
    assert exact.log_probabilities.exp().tolist() == pytest.approx([w / total for w in weights.values()])
    seven_first = sum(w for y, w in weights.items() if y[0] == 7) / total
    assert float(exact.marginals()[0, 2]) == pytest.approx(seven_first)
    torch.testing.assert_close(exact.marginals().sum(1), torch.ones(3, dtype=torch.float64))


def test_sampling_and_total_variation():
    exact = enumerate_distribution(energy, [2, 4, 7], 3)
    draws = exact.sample(20_000, torch.Generator().manual_seed(0))
    assert exact.total_variation(draws) < 0.03
    assert exact.total_variation(torch.full((10, 3), 7)) == pytest.approx(
        1 - float(exact.log_probabilities.exp()[exact.index(torch.full((1, 3), 7))])
    )
    with pytest.raises(ValueError, match="outside the space"):
        exact.total_variation(torch.tensor([[2, 4, 5]]))


def test_energies_of_any_size_stay_finite():
    exact = enumerate_distribution(lambda ids: 5_000.0 * ids.sum(1).double(), [0, 1], 4)
    assert exact.log_probabilities.isfinite().all() and float(exact.log_probabilities[0]) == pytest.approx(0.0)


def test_a_space_too_large_says_how_large():
    with pytest.raises(ValueError, match=r"10\^7 sequences, above the limit of 1000"):
        enumerate_distribution(energy, list(range(10)), 7, limit=1000)
    with pytest.raises(ValueError, match=r"are 10\^5000 sequences, above"):
        enumerate_distribution(energy, list(range(10)), 5000)


@pytest.mark.parametrize(
    "argument,value,message",
    [
        ("energy", None, "must be callable, got None"),
        ("energy", lambda ids: None, "returned None, must return a number for each row"),
        ("energy", lambda ids: torch.ones(len(ids) + 1), "returned a tensor of shape .5,"),
        ("energy", lambda ids: torch.full((len(ids),), torch.nan), "returned NaN"),
        ("tokens", "ab", "must be a list of one or more token ids, got 'ab'"),
        ("length", 1.5, "must be a whole number"),
        ("temperature", "hot", "must be a number above 0"),
        ("device", "somewhere", "'somewhere' cannot be used"),
    ],
)
def test_arguments_of_a_wrong_kind(argument, value, message):
    with pytest.raises(ValueError, match=f"{argument}.*{message}"):
        enumerate_distribution(**{"energy": lambda ids: ids.sum(1), "tokens": [1, 2], "length": 2, argument: value})


@pytest.mark.parametrize(
    "sequences", [None, [[1, 2]], torch.tensor([1, 2]), torch.rand(1, 2), torch.tensor([[1, 2, 1]])]
)
def test_sequences_of_a_wrong_kind(sequences):
    exact = enumerate_distribution(lambda ids: ids.sum(1), [1, 2], 2)
    for method in (exact.index, exact.total_variation):
        with pytest.raises(ValueError, match="sequences must"):
            method(sequences)
    with pytest.raises(ValueError, match="count must be a whole number"):
        exact.sample("ten")
    with pytest.raises(ValueError, match=r"generator must be a torch\.Generator, got 7"):
        exact.sample(1, 7)
