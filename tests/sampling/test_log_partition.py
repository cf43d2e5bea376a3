"""log Z by every method against enumeration by the forward pass."""

from itertools import product

import pytest
import torch

from tests.conftest import tiny_energy_model

WORDS = [5, 6, 7, 8]
SETTINGS = dict(lengths=2, num_particles=8, num_runs=30, num_chains=4, num_epochs=6, seed=0)


@pytest.fixture(scope="module")
def model():
    return tiny_energy_model(scale=0.3)


def plain(model, length: int) -> torch.Tensor:
    ids = torch.tensor([[1, *words, 2] for words in product(WORDS, repeat=length)])
    return (-model(ids).energy.detach()).double().logsumexp(0)


def test_exact_of_several_lengths(energy):
    model = tiny_energy_model(energy)
    found = model.log_partition(lengths=[2, 3], method="exact")
    expected = torch.stack([plain(model, 2), plain(model, 3)])
    torch.testing.assert_close(found.log_partition, expected, atol=1e-5, rtol=1e-5)
    assert found.num_masked_rows == 2 * 4 + 3 * 16
    assert found.gap.tolist() == found.error.tolist() == [0, 0]
    colder = model.log_partition(lengths=2, method="exact", energy_temperature=0.5).log_partition
    ids = torch.tensor([[1, *words, 2] for words in product(WORDS, repeat=2)])
    torch.testing.assert_close(colder[0], (-model(ids).energy / 0.5).double().logsumexp(0), atol=1e-5, rtol=1e-5)


def test_estimates_enclose_log_partition(model):
    found, exact = model.log_partition(**SETTINGS), float(plain(model, 2))
    assert abs(float(found.log_partition) - exact) < 4 * float(found.error) < 0.6
    assert abs(float(found.upper) - exact) < 4 * float(found.upper_error) < 0.6
    assert float(found.error) > 0 and found.num_masked_rows > 0 and found.method == "smc"
    without = model.log_partition(**SETTINGS, upper=False)
    assert torch.equal(without.log_partition, found.log_partition) and without.upper.isnan().all()


def test_refusals(model, rows_run):
    for settings, message in (
        ({"method": "guess"}, "method"),
        ({"lengths": 17, "method": "exact"}, "method"),
        ({"max_changes": 1}, "max_changes"),
        ({"upper": 2}, "upper"),
    ):
        with pytest.raises(ValueError, match=message):
            model.log_partition(**{"lengths": 2, **settings})
    assert not rows_run
