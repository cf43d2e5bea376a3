"""Sequential Monte Carlo against enumeration: Z without bias, weights to the digit, and what breaks either."""

import math

import numpy as np
import pytest
import torch

from hf_ebm.models.energy.smc_energy import particles_of
from hf_ebm.sampling import smc
from hf_ebm.sampling.smc import Particles, log_mean_weight
from tests.conftest import plain_token_energies, tiny_energy_model
from tests.sampling.oracle import exact_target
from tests.sampling.test_warm_start import plain_log_prob

WORDS = [5, 6, 7, 8]
SETTINGS = dict(lengths=2, num_particles=8, num_runs=150, seed=0)
LADDER = [0.1, 0.4, 1.0]


@pytest.fixture(scope="module")
def model():
    return tiny_energy_model(scale=0.3)


@pytest.fixture(scope="module")
def exact(model):
    return exact_target(model, WORDS, 2)


def deviation(out, log_partition: float) -> float:
    """How many standard errors the mean of the runs' estimates of Z is from Z."""
    ratios = (log_mean_weight(out.log_weights) - log_partition).exp()
    return float((ratios.mean() - 1) / (ratios.std() / len(ratios) ** 0.5))


@pytest.mark.parametrize(
    "settings",
    [{"ladder": LADDER}, {}, {"ladder": LADDER, "block_size": 2, "exclude_current": True, "proposal_top_k": 2}],
    ids=["ladder", "pilot", "blocks"],
)
def test_estimates_of_z_have_no_bias(model, exact, settings):
    out = model.sample_smc(**SETTINGS | settings)
    assert abs(deviation(out, float(exact.log_partition))) < 3
    assert abs(float(out.log_partition - exact.log_partition)) < 3.5 * float(out.error) < 0.5
    mean = float((exact.log_probabilities.exp() * exact.energy).sum())
    assert abs(out.mean_energy() - mean) < 0.15
    assert exact.total_variation(out.draw(4000)[:, 1:-1]) < 0.1


def without_the_proposal(patch):
    fill = smc.fill_sequentially

    def careless(*arguments):
        found = fill(*arguments)
        return found._replace(log_probs=torch.zeros_like(found.log_probs))

    patch.setattr(smc, "fill_sequentially", careless)


def without_resetting_weights(patch):
    """A particle keeps the weight that it was drawn by."""
    resampled = Particles.resampled

    def carried(self, chosen, which):
        found = resampled(self, chosen, which)
        own = torch.where(which[:, None], self.log_weights.gather(1, chosen), self.log_weights)
        return Particles(found.state, own, found.ancestors)

    patch.setattr(Particles, "resampled", carried)


def moves_at_the_last_temperature(patch):
    moved = smc.Annealing._moved
    patch.setattr(
        smc.Annealing, "_moved", lambda self, state, beta, which, level: moved(self, state, beta**0, which, level)
    )


@pytest.mark.parametrize(
    "broken",
    [without_the_proposal, without_resetting_weights, moves_at_the_last_temperature],
)
def test_broken_variants_miss_z(model, exact, broken, monkeypatch):
    broken(monkeypatch)
    out = model.sample_smc(**SETTINGS | {"ladder": LADDER})
    assert abs(deviation(out, float(exact.log_partition))) > 4


def backwards(model, starts: torch.Tensor) -> torch.Tensor:
    """Log estimates of 1/Z by annealing from states (150 * 8, 2) to the fill."""
    inputs = dict.fromkeys(("input_ids", "attention_mask", "free_mask", "encoder_input_ids", "encoder_attention_mask"))
    numbers = dict(num_particles=8, num_runs=150, run_keys=None, num_moves=1)
    asked = particles_of(model, inputs, None, {"lengths": 2, "seed": 3}, None, None, **numbers)
    annealing, chains = asked.prepared(asked.keys, 3)
    ids = chains.ids.clone()
    ids[:, 1:-1] = starts
    ladders = smc.falling(torch.tensor([LADDER]).double().expand(150, -1))
    particles, _ = annealing.annealed(annealing.started(ids), 1.0, 0.0, smc.fixed(ladders))
    return log_mean_weight(annealing.back_to_fill(particles).log_weights)


def test_the_way_back_from_exact_samples_estimates_one_over_z(model, exact):
    """Without bias, so that estimates of log Z lie on either side in the mean; from other samples they don't."""
    log_z = float(exact.log_partition)
    logs = backwards(model, exact.sample(1200, torch.Generator().manual_seed(0)))
    ratios = (logs + log_z).exp()
    assert abs(float((ratios.mean() - 1) / (ratios.std() / 150**0.5))) < 3
    below = log_mean_weight(model.sample_smc(**SETTINGS | {"ladder": LADDER}).log_weights)
    assert float(below.mean()) < log_z < float(-logs.mean())
    likeliest = exact.sequences[exact.log_probabilities.argmax()].expand(1200, 2)
    ratios = (backwards(model, likeliest) + log_z).exp()
    assert abs(float((ratios.mean() - 1) / (ratios.std() / 150**0.5))) > 4


def test_weights_of_particles_that_never_move(energy, monkeypatch):
    """They are `exp(-E/τ) / q` of the start, whatever the ladder; and their mean of those that are resampled."""
    model, orders, fill = tiny_energy_model(energy), [], smc.fill_sequentially

    def watched(*arguments):
        found = fill(*arguments)
        orders.extend(zip(found.ids, found.orders, strict=True))
        return found

    monkeypatch.setattr(smc, "fill_sequentially", watched)
    monkeypatch.setattr(smc, "RESAMPLED_BELOW", 0.0)
    settings = dict(lengths=3, num_particles=4, num_runs=2, num_moves=0, ladder=LADDER, energy_temperature=1.5, seed=1)
    out = model.sample_smc(**settings)
    expected = [
        -sum(plain_token_energies(model, ids, [1, 2, 3])) / 1.5 - plain_log_prob(model, ids, order)
        for ids, order in orders
    ]
    torch.testing.assert_close(out.log_weights.flatten(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-5)
    monkeypatch.setattr(smc, "RESAMPLED_BELOW", 1.1)
    again = model.sample_smc(**settings | {"ladder": [1.0]})
    mean = log_mean_weight(out.log_weights)[:, None].expand(2, 4)
    torch.testing.assert_close(again.log_weights, mean)
    assert again.levels.resampled.all() and not out.levels.resampled.any()
    assert (again.surviving_ancestors() <= 4).all() and (out.surviving_ancestors() == 4).all()


def test_a_run_is_the_same_beside_others_and_alone(model):
    """Of several prompts of other lengths, divided over calls; and of another token budget."""
    settings = dict(lengths=[2, 3], num_particles=4, num_moves=2, block_size=[1, 2], seed=5)
    whole = model.sample_smc(**settings, num_runs=2)
    assert whole.log_partition.shape == (2,) and whole.prompt_indices.tolist() == [0, 0, 1, 1]
    for keys, rows in (([(1, 1)], [3]), ([(0, 1), (1, 0)], [1, 2])):
        part = model.sample_smc(**settings, run_keys=keys, token_budget=64)
        torch.testing.assert_close(part.log_weights, whole.log_weights[rows], atol=1e-5, rtol=1e-5)
        here = sorted({prompt for prompt, _ in keys})
        assert part.log_partition.isfinite().nonzero()[:, 0].tolist() == here and part.error.isnan().all()
        assert torch.equal(part.ancestors, whole.ancestors[rows])
        length = part.sequences.shape[1]
        ids = whole.sequences.view(4, 4, -1)[rows].flatten(0, 1)[:, :length]
        assert torch.equal(part.sequences, ids)


def test_particles_of_a_prompt_share_rows(model, exact, monkeypatch):
    """Many cost hardly more than all rows that there are, and are what they are without."""
    from hf_ebm.scoring.logits_cache import EachRowOnce

    settings = SETTINGS | dict(num_particles=400, num_runs=1, num_moves=0, ladder=[1.0])
    out = model.sample_smc(**settings)
    assert out.num_masked_rows <= 2 + 8 + 8  # contexts of two positions of four words
    monkeypatch.setattr(EachRowOnce, "alike", lambda self, sequences, rows: [np.arange(len(rows.source))] * 2)
    alone = model.sample_smc(**settings)
    assert alone.num_masked_rows == 4 * 400 and torch.equal(alone.sequences, out.sequences)
    torch.testing.assert_close(alone.log_weights, out.log_weights, atol=1e-5, rtol=1e-5)


def test_constraints_and_hard_energies():
    """Particles that break them weigh nothing; Z is that of what is left."""
    model = tiny_energy_model()
    template = [1, 5, -1, -1, 8, 2]

    def not_twice(ids):
        return torch.where(((ids[:, :-1] == 6) & (ids[:, 1:] == 6)).any(1), torch.inf, 0.0).double()

    def rules(ids):
        forbidden = ~torch.isin(ids[:, 2], torch.tensor([5, 6])) | ((ids[:, 2] == 5) & (ids[:, 3] == 7))
        return not_twice(ids).masked_fill(forbidden, torch.inf)

    exact = exact_target(model, WORDS, 2, template, extra=rules)
    prompts = torch.tensor([[0, 1, 5, 3, 3, 8, 2], [1, 5, 3, 3, 8, 2, 0]])
    given = dict(
        input_ids=prompts, attention_mask=prompts.ne(0).long(), allowed_tokens={2: [5, 6]}, avoid=[[1, 5, 5, 7, 8, 2]]
    )

    listed = model.log_partition(**given, method="exact", extra_energies=not_twice)
    torch.testing.assert_close(listed.log_partition, exact.log_partition.expand(2), atol=1e-5, rtol=1e-5)
    out = model.sample_smc(**given, num_particles=8, num_runs=100, extra_energies=not_twice, seed=0)
    for prompt in (0, 1):
        assert abs(float(out.log_partition[prompt] - exact.log_partition)) < 4 * float(out.error[prompt]) < 0.4
    free = out.draw(500, prompt=1)[:, [2, 3]]
    assert exact.total_variation(free) < 0.1


def test_runs_without_a_particle_are_zero(model):
    out = model.sample_smc(
        lengths=2, num_particles=4, num_runs=3, seed=0, extra_energies=lambda ids: torch.full((len(ids),), torch.inf)
    )
    assert out.log_partition.item() == -torch.inf and out.error.isnan() and not out.surviving_ancestors().any()
    with pytest.raises(ValueError, match="prompt"):
        out.draw(3)
    with pytest.raises(ValueError, match="prompt"):
        out.mean_energy()


def test_means_of_prompts_that_are_not_there(model):
    out = model.sample_smc(lengths=1, num_particles=2, num_runs=1, seed=0)
    for prompt in (7, -1, "a"):
        with pytest.raises(ValueError, match="prompt"):
            out.mean_energy(prompt)


@pytest.mark.parametrize(
    "extra,message",
    [
        ({"num_epochs": 3}, "num_epochs"),
        ({"decoder": "mask_predict"}, "decoder"),
        ({"kernel": "gibbs"}, "gibbs"),
        ({"max_changes": 1}, "max_changes"),
        ({"lengths": {3: 0.5, 2: 0.5}}, "lengths"),
        ({"num_particles": 1}, "num_particles"),
        ({"num_runs": 0}, "num_runs"),
        ({"num_particles": 10**12}, "num_particles"),
        ({"num_runs": 10**12}, "num_runs"),
        ({"run_keys": [(1, 0)]}, "run_keys"),
        ({"ladder": [0.5, 0.4, 1.0]}, "ladder"),
        ({"ladder": [0.5]}, "ladder"),
        ({"ladder": [0.0, 1.0]}, "ladder"),
        ({"ladder": [1e-310, 1.0]}, "ladder"),
        ({"ladder": [0.95, math.nextafter(0.95, 1), 1.0]}, "ladder"),
        ({"target_cess": 1.0}, "target_cess"),
        ({"num_moves": -1}, "num_moves"),
        ({"speed": 1}, "unknown"),
    ],
)
def test_refusals(model, extra, message, rows_run):
    with pytest.raises(ValueError, match=message):
        model.sample_smc(**{"lengths": 2, **extra})
    assert not rows_run


def test_next_inverse_temperature_keeps_the_conditional_sample_size():
    generator = torch.Generator().manual_seed(0)
    energies = 20 * torch.rand(3, 50, generator=generator, dtype=torch.float64)
    energies[:, 0] = torch.inf
    log_weights = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    log_weights[:, 0] = -torch.inf
    beta = torch.tensor([0.1, 0.2, 0.99], dtype=torch.float64)
    new = smc.next_inverse_temperature(log_weights, energies, beta, 0.8)
    assert (new > beta).all() and new[2] == 1
    for row in range(2):
        weights, factors = log_weights[row].softmax(0), (-(new - beta)[row] * energies[row]).exp()
        plain = float((weights * factors).sum() ** 2 / (weights * factors**2).sum())
        assert math.isclose(plain, 0.8, rel_tol=1e-6)


def test_systematic_resampling_takes_expected_numbers():
    weights = torch.tensor([[0.5, 0.2, 0.0, 0.3], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    counts = torch.zeros(2, 4)
    for step in range(200):
        chosen = smc.systematic(weights.log(), torch.full((2,), (step + 0.5) / 200), 6)
        own = torch.stack([row.bincount(minlength=4) for row in chosen])
        assert ((own - 6 * weights).abs() < 1).all()
        counts += own
    torch.testing.assert_close(counts.double() / 1200, weights, atol=1e-3, rtol=0)
