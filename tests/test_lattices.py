"""Ising and Potts models: the transfer matrix against enumeration and a plain loop."""

import math

import pytest
import torch

from hf_ebm import enumerate_distribution
from hf_ebm.lattices import Lattice, ising, potts


def plain_energy(model, ids):
    """Site by site."""
    rows, columns, _ = model.field.shape
    total = 0.0
    for r in range(rows):
        for c in range(columns):
            own = ids[r * columns + c]
            total -= float(model.field[r, c, own])
            for down, right in ((1, 0), (0, 1)):
                if model.periodic or (r + down < rows and c + right < columns):
                    other = (r + down) % rows * columns + (c + right) % columns
                    total -= float(model.pair[own, ids[other]])
    return total


def field(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


MODELS = {
    "ising": ising(3, 3, 0.3), "ising in a field": ising(3, 4, 0.3, field(3, 4)), "repelling": ising(4, 2, -0.5),
    "torus": ising(3, 3, 0.2, field(3, 3), periodic=True), "chain": ising(1, 5, 0.4, field(1, 5)),
    "potts": potts(3, 2, 3, 0.4, field(3, 2, 3)), "potts torus": potts(3, 3, 2, 0.3, periodic=True),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_transfer_matrix_against_enumeration(name):
    model, temperature = MODELS[name], 1.3
    exact = enumerate_distribution(model, range(model.states), model.length, temperature)
    some = exact.sequences[:: len(exact.sequences) // 7]
    torch.testing.assert_close(model(some), torch.tensor([plain_energy(model, ids) for ids in some.tolist()]).double())
    torch.testing.assert_close(model.log_partition(temperature), exact.log_partition)
    torch.testing.assert_close(model.marginals(temperature), exact.marginals())
    mean = (exact.energy * exact.log_probabilities.exp()).sum()
    torch.testing.assert_close(model.mean_energy(temperature), mean)


def test_one_row_of_spins_in_closed_form():
    """An open chain of T spins has `Z = 2 (2 cosh 2λ)^(T - 1)`, however it lies."""
    expected = math.log(2) + 99 * math.log(2 * math.cosh(2 * 0.3))
    assert float(ising(100, 1, 0.3).log_partition()) == pytest.approx(expected)
    assert float(ising(10, 10, 0.0).log_partition()) == pytest.approx(100 * math.log(2))


def test_a_transfer_without_edges_between_rows_is_noticed(monkeypatch):
    plain = Lattice._log_partition
    uncoupled = lambda self, pair, field: sum(plain(ising(1, 3, 0.3), pair, row[None]) for row in field)  # noqa: E731
    monkeypatch.setattr(Lattice, "_log_partition", uncoupled)
    with pytest.raises(AssertionError):
        test_the_transfer_matrix_against_enumeration("ising")


@pytest.mark.parametrize(
    ("make", "named"),
    [(lambda: ising(0, 2, 1.0), "rows"), (lambda: potts(2, 2, 1, 1.0), "states"),
     (lambda: ising(2, 2, "x"), "strength"), (lambda: ising(3, 2, 1.0, periodic=True), "columns"),
     (lambda: ising(2, 2, 1.0, torch.ones(2)), "field"), (lambda: ising(2, 2, 1.0).log_partition(0), "temperature"),
     (lambda: ising(60, 60, 1.0).marginals(), "rows of 60"),
     (lambda: ising(1, 2, 1.0)(torch.tensor([[0, 2]])), "ids .* from 0 to 1, got 2"),
     (lambda: potts(1, 2, 3, 1.0)(torch.tensor([[0, -1]])), "ids .* from 0 to 2, got -1"),
     (lambda: ising(1, 2, 1.0)(torch.tensor([[0, 1, 1]])), "ids"), (lambda: ising(1, 2, 1.0)([[0, 1]]), "ids")],
)  # fmt: skip
def test_what_cannot_be_is_refused(make, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        make()
