"""log Z by every method against enumeration by the forward pass."""

import math
from itertools import product

import pytest
import torch

from hf_ebm import EnergyTarget
from hf_ebm.lattices import ising, potts
from hf_ebm.models.energy.chains import proposal_support
from hf_ebm.sampling.smc import stepping_stones
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
    lower = {name: value for name, value in SETTINGS.items() if name not in ("num_chains", "num_epochs")}
    without = model.log_partition(**lower, upper=False)
    assert torch.equal(without.log_partition, found.log_partition) and without.upper.isnan().all()


def test_stepping_stones_are_those_of_exact_means():
    """With samples at each β in their exact shares the estimate is exact."""
    energies, ladder = torch.tensor([0.0, 1.0, 3.0]).double(), torch.tensor([0.2, 0.5, 1.0]).double()
    log_z = torch.stack([(-beta * energies).logsumexp(0) for beta in ladder])
    counts = [(1000 * (-beta * energies).softmax(0)).round().long() for beta in ladder]
    samples = torch.stack(
        [energies.repeat_interleave(torch.cat([own[:2], 1000 - own[:2].sum()[None]])) for own in counts], 1
    )
    found = stepping_stones(ladder, samples[None])
    torch.testing.assert_close(found, (log_z[2] - log_z[0])[None], atol=2e-3, rtol=0)


def test_stepping_stone_of_several_lengths(model):
    """The fill's estimate at the ladder's first β, and replicas from there to 1; the chains' samples give the upper."""
    ladder = [0.3, 0.6, 1.0]
    settings = {**SETTINGS, "lengths": [2, 1], "num_runs": 5, "num_particles": 32, "num_epochs": 16, "ladder": ladder}
    found = model.log_partition(**settings, method="stepping_stone")
    for row, length in enumerate((2, 1)):
        exact = float(plain(model, length))
        assert abs(float(found.log_partition[row]) - exact) < 4 * float(found.error[row]) < 0.8
        assert abs(float(found.upper[row]) - exact) < 4 * float(found.upper_error[row]) < 0.8


def test_of_targets_given_their_sources():
    """An encoder-decoder's Z depends on the source of each prompt."""
    from tests.models.test_families import wrap

    model = wrap("bart")
    support = proposal_support(model, list(range(9, model.vocab_size)))
    words, sources = support.nonzero()[:, 0].tolist(), torch.tensor([[7, 8, 9], [9, 7, 0]])
    mask = model.config.mask_token_id
    prompts = torch.tensor([[1, 8, mask, 2], [1, mask, 7, 2]])
    given = dict(encoder_input_ids=sources, encoder_attention_mask=sources.ne(0).long())
    found = model.log_partition(prompts, method="exact", suppress_tokens=list(range(9, model.vocab_size)), **given)
    for row, prompt in enumerate(prompts):
        free = prompt == mask
        ids = prompt.repeat(len(words), 1)
        ids[:, free] = torch.tensor(words)[:, None]
        own = {name: values[row].repeat(len(words), 1) for name, values in given.items()}
        energies = model(ids, free_mask=free.repeat(len(words), 1), **own).energy.detach().double()
        torch.testing.assert_close(found.log_partition[row], (-energies).logsumexp(0), atol=1e-5, rtol=1e-5)
    out = model.sample_smc(prompts, num_particles=8, suppress_tokens=list(range(9, model.vocab_size)), **given, seed=0)
    torch.testing.assert_close(out.log_partition, found.log_partition, atol=0.4, rtol=0)


def test_fills_that_are_the_target_leave_no_gap():
    """Each weight is Z then, also on the way back, where weights at β = 0 alone are far from equal."""
    logits = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    target = EnergyTarget(lambda ids: -logits[ids].sum(1), range(400), 3, logits)
    found = target.log_partition(num_particles=16, num_runs=2, num_chains=4, num_epochs=2, seed=0)
    exact = 3 * logits.logsumexp(0)[None]
    torch.testing.assert_close(found.log_partition, exact)
    torch.testing.assert_close(found.upper, exact)


@pytest.mark.parametrize("lattice", [ising(3, 3, 0.25), potts(2, 3, 3, 0.5)], ids=["ising", "potts"])
def test_lattices_by_their_transfer_matrices(lattice):
    """Energies without token terms, proposals uniform; a position that is fixed leaves fewer sequences."""
    target, exact = EnergyTarget(lattice, range(lattice.states), lattice.length), float(lattice.log_partition())
    settings = dict(num_particles=16, num_runs=10, seed=0)
    assert float(target.log_partition(method="exact").log_partition) == pytest.approx(exact)
    found = target.log_partition(**settings, num_chains=2, num_epochs=16)
    assert abs(float(found.log_partition) - exact) < 3 * float(found.error) < 0.5
    assert abs(float(found.upper) - exact) < 3 * float(found.upper_error) < 0.5
    own = target.sample_smc(**settings)
    assert torch.equal(own.log_partition, found.log_partition) and torch.equal(own.error, found.error)
    assert abs(own.mean_energy() - float(lattice.mean_energy())) < 0.5
    ends = [[0] + [target.mask_token_id] * (lattice.length - 1), [target.mask_token_id] * (lattice.length - 1) + [0]]
    fixed = target.log_partition(torch.tensor(ends), method="exact").log_partition
    torch.testing.assert_close(fixed, torch.full((2,), exact - math.log(lattice.states)).double())  # all alike


def test_refusals(model, rows_run):
    for settings, message in (
        ({"method": "guess"}, "method"),
        ({"lengths": 17, "method": "exact"}, "method"),
        ({"max_changes": 1}, "max_changes"),
        ({"upper": 2}, "upper"),
        ({"num_chains": 3, "upper": False}, "num_chains"),
        ({"num_chains": 0}, "num_chains"),
        ({"num_epochs": 8, "burn_in": 8}, "burn_in"),
        ({"thinning": "often"}, "thinning"),
        ({"ladder": "steep"}, "ladder"),
        ({"num_epochs": 3, "method": "exact"}, "num_epochs"),
        ({"ladder": [1.0], "method": "exact"}, "ladder"),
        ({"target_cess": 2, "method": "exact"}, "target_cess"),
        ({"ladder": [1e-310, 1.0], "method": "stepping_stone"}, "ladder"),
        ({"num_chains": 10**12}, "num_chains"),
        ({"num_chains": 10**12, "method": "stepping_stone", "upper": False}, "num_chains"),
        ({"replica_temperatures": [1, 2], "method": "stepping_stone"}, "replica_temperatures"),
    ):
        with pytest.raises(ValueError, match=message):
            model.log_partition(**{"lengths": 2, **settings})
    assert not rows_run
    target = EnergyTarget(lambda ids: ids.sum(1).double(), [0, 1], 3)
    for settings in ({"lengths": 2}, {"delayed_acceptance": 1}, {"num_particles": 1}, {"run_keys": [(0, 0)]}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            target.log_partition(**settings)
