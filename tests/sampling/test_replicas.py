"""Replica exchange: what it leaves as it is, seen in full matrices and in chains; fitted ladders; runs that go on."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from hf_ebm import EnergyTarget
from hf_ebm.models.energy import saved_runs
from hf_ebm.models.energy.saved_runs import SavedRun
from hf_ebm.sampling import configuration, replicas
from hf_ebm.sampling.replicas import Replicas, fitted_ladder, rejection_rates, round_trips, swap_rates
from hf_ebm.sampling.target import ChainState
from tests.conftest import tiny_energy_model
from tests.models.test_families import wrap
from tests.sampling.chains import BASE, StopAfter, equal
from tests.sampling.oracle import exact_target, total_variation_limit
from tests.sampling.test_transitions import Kernel

WORDS, CHAINS = [5, 6, 7, 8], 700
LADDER = [1.0, 1.6, 2.5, 5.0]
FITTED = {"lengths": 2, "num_chains": 2, "replica_temperatures": 3, "burn_in": 7, "num_epochs": 9}


@pytest.fixture
def quickly_fitted(monkeypatch):
    """Two rounds, which end at epochs 2 and 6, are enough to fit a ladder."""
    monkeypatch.setattr(configuration, "LEAST_TO_FIT", 6)


def swap_matrix(energies: list[float], temperatures: list[float], temperature: float, epoch: int) -> torch.Tensor:
    """Transition matrix of a swap on the product space, each of whose states is a chain.

    Each pair swaps with a probability of its own, found by bisection, whatever order the rows are in.
    """
    count, chosen = len(temperatures), torch.Generator().manual_seed(0)
    product = torch.tensor(list(itertools.product(range(len(energies)), repeat=count)))
    level = torch.rand(product.shape, generator=chosen).argsort(1)
    own = Replicas.begin(temperatures, len(product))._replace(level=level)
    where = product.gather(1, level)  # the state of each replica
    terms = torch.tensor(energies, dtype=torch.float64)[where].T.flatten()[:, None]
    rows = ChainState(where.T.flatten()[:, None], terms, torch.zeros(len(terms), dtype=torch.float64))

    def after(uniforms: torch.Tensor) -> torch.Tensor:
        moved = own.swapped(rows, temperature, uniforms, epoch)
        return rows.ids[moved.rows, 0]

    low, high = torch.zeros(2, len(product), count - 1, dtype=torch.float64)
    high += 1
    for _ in range(40):
        middle = (low + high) / 2
        found = after(middle)
        # A pair of equal states may swap or not: nothing is to be seen of it.
        yes = (found[:, :-1] == product[:, 1:]) & (found[:, 1:] == product[:, :-1])
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    matrix = torch.zeros(len(product), len(product), dtype=torch.float64)
    number = torch.tensor([len(energies) ** place for place in reversed(range(count))])
    for swaps in itertools.product([False, True], repeat=count - 1):
        asked = torch.tensor(swaps)
        share = torch.where(asked, low, 1 - low).prod(1)
        goal = after(torch.where(asked, low / 2, (1 + low) / 2)) @ number
        matrix[torch.arange(len(product)), goal] += share
    return matrix


def product_law(laws: list[torch.Tensor]) -> torch.Tensor:
    law = torch.ones(1, dtype=torch.float64)
    for own in laws:
        law = (law[:, None] * own).flatten()
    return law


ENERGIES = [0.3, 1.7, 2.6, 0.9]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_swap_leaves_the_product_of_the_laws_as_it_is(epoch, temperature):
    """With detailed balance, and it does swap; which row has which temperature doesn't matter."""
    matrix = swap_matrix(ENERGIES, LADDER, temperature, epoch)
    energies = torch.tensor(ENERGIES, dtype=torch.float64)
    law = product_law([(-energies / (temperature * tau)).softmax(0) for tau in LADDER])
    torch.testing.assert_close(matrix.sum(1), torch.ones_like(law))
    flow = law[:, None] * matrix
    torch.testing.assert_close(flow, flow.T, rtol=0, atol=1e-9)
    assert float((1 - matrix.diagonal()).max()) > 0.5


def unlike(ratios):
    """The log ratio of a swap, changed."""
    plain = replicas.swap_log_ratios
    return lambda beta, *energies: ratios(plain(beta, *energies), beta)


BROKEN = {
    "sign": unlike(lambda ratios, beta: -ratios),
    "always": unlike(lambda ratios, beta: torch.zeros_like(ratios)),
    "without_the_difference_of_temperatures": unlike(lambda ratios, beta: ratios / (beta[:, :-1] - beta[:, 1:])),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_swaps_are_noticed(broken, monkeypatch):
    monkeypatch.setattr(replicas, "swap_log_ratios", BROKEN[broken])
    with pytest.raises(AssertionError):
        test_a_swap_leaves_the_product_of_the_laws_as_it_is(0, 1.0)


@pytest.mark.slow
def test_an_epoch_leaves_the_product_of_the_laws_as_it_is():
    """Metropolis-Hastings steps of two replicas, each at its temperature, and a swap, on 27² states."""
    cold, hot = Kernel("local"), Kernel("local", temperature=2.0)
    steps = torch.kron(cold.transition_matrix([1, 3]), hot.transition_matrix([1, 3]))
    laws = [kernel.exact.log_probabilities.exp().double() for kernel in (cold, hot)]
    energies = -laws[0].log()
    matrix = steps @ swap_matrix(energies.tolist(), [1.0, 2.0], 1.0, 0)
    law = product_law(laws)
    torch.testing.assert_close(law @ matrix, law, rtol=0, atol=1e-7)
    wrong = steps @ swap_matrix(energies.tolist(), [1.0, 3.0], 1.0, 0)
    assert float((law @ wrong - law).abs().sum()) > 1e-3


def dislikes_repeats(ids):
    return (ids[:, 1:] == ids[:, :-1]).sum(1).double()


def must_contain_five(ids):
    return torch.where((ids == 5).any(1), 0.0, torch.inf).double()


def both(ids):
    return 0.7 * dislikes_repeats(ids) + must_contain_five(ids)


SETTINGS = {
    "single_site": {},
    "blocks": {"block_size": [1, 2], "block_fill": "sequential", "block_layout": "contiguous"},
    "delayed": {"delayed_acceptance": 0, "block_size": 2},
    "warped": {"proposal_top_k": 2, "proposal_epsilon": 0.3, "exclude_current": True, "num_epochs": 15},
    "cooled": {
        "energy_temperature": 1.5, "energy_temperature_decay": 0.25, "min_energy_temperature": 0.75,
        "block_size": 3, "final_block_size": 1, "accept_all_epochs": 2,
    },
    "extra": {"extra_energies": [(0.7, dislikes_repeats), must_contain_five], "num_epochs": 12},
    "fitted": {"replica_temperatures": 3, "burn_in": 7, "num_epochs": 9},
}  # fmt: skip


@cache
def exact_at_one(with_extra: bool):
    return exact_target(tiny_energy_model(), WORDS, 3, extra=both if with_extra else None)


def distances(**settings) -> list[tuple[float, float]]:
    """At each temperature of a ladder: total variation of the last states, and what exact draws stay below."""
    settings = {
        "lengths": 3, "num_chains": CHAINS, "num_epochs": 6, "seed": 0, "replica_temperatures": [1.0, 2.0, 4.0],
        **settings,
    }  # fmt: skip
    out = tiny_energy_model().generate(**settings)
    rows, ladder, found = out.run.replicas.rows, out.replicas.temperatures, []
    assert torch.equal(out.sequences, out.run.state.ids[rows[:, 0]])
    own = exact_at_one("extra_energies" in settings)
    for place in range(1 if isinstance(settings["replica_temperatures"], int) else ladder.shape[1]):
        tau = float(ladder[0, place]) * float(out.trace.temperature[0, -1])
        exact = replace(own, log_probabilities=(own.log_probabilities / tau).log_softmax(0))
        limit = total_variation_limit(exact.log_probabilities.exp(), len(rows))
        found.append((exact.total_variation(out.run.state.ids[rows[:, place], 1:-1]), limit))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_replicas_reach_the_law_of_each_temperature(name, quickly_fitted):
    assert all(found < limit for found, limit in distances(**SETTINGS[name]))


def wrong_rows(patch):
    """Rows stay at the temperatures that they began with."""
    patch.setattr(Replicas, "temperatures", lambda self, tau: tau * self.ladder.T.flatten())


def wrong_swaps(patch):
    patch.setattr(replicas, "swap_log_ratios", BROKEN["sign"])


def careless_swaps(patch):
    patch.setattr(replicas, "swap_log_ratios", BROKEN["always"])


@pytest.mark.slow
@pytest.mark.parametrize("broken", [wrong_rows, wrong_swaps, careless_swaps])
def test_broken_replicas_miss_the_law(broken, monkeypatch):
    broken(monkeypatch)
    assert any(found > limit for found, limit in distances())


def test_a_state_that_violates_a_constraint_goes_up_the_ladder():
    extra = torch.tensor([[torch.inf, 0.0], [0.0, torch.inf], [torch.inf, torch.inf]])
    found = replicas.swap_log_ratios(torch.tensor([[1.0, 0.5]] * 3), torch.tensor([[1.0, 3.0]] * 3), extra)
    assert found[:, 0].tolist() == [torch.inf, -torch.inf, -1.0]


@pytest.mark.parametrize("extra", [{"replica_temperatures": [1, 2, 4], "block_size": 2}, FITTED])
def test_replicas_depend_on_nothing_beside_their_chain(extra, quickly_fitted):
    model = tiny_energy_model(scale=0.5)
    together = model.generate(**BASE | extra, token_budget=9)
    for chain in range(2):
        alone = model.generate(**BASE | extra, chain_keys=[(0, chain)])
        assert torch.equal(alone.samples[0], together.samples[chain])
        for own, all_of_them in zip(alone.replicas, together.replicas, strict=True):
            torch.testing.assert_close(own[0], all_of_them[chain], equal_nan=True, atol=1e-4, rtol=1e-4)


def same_replicas(one, other) -> bool:
    return equal(one, other) and all(
        torch.allclose(*pair, equal_nan=True, rtol=1e-4) for pair in zip(one.replicas, other.replicas, strict=True)
    )


@pytest.mark.parametrize("at", [1, 5, 12, 15])
def test_a_run_goes_on_with_its_replicas(at, tmp_path, monkeypatch, quickly_fitted):
    """Also from within an epoch of two steps, and while the ladder is fitted."""
    model, saves = tiny_energy_model(scale=0.5), 0
    whole = model.generate(**BASE | FITTED)

    def killed(self, run):
        nonlocal saves
        saves += 1
        if saves == at + 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(saved_runs.Saver, "save_if_due", killed)
        model.generate(**BASE | FITTED, save_state_to=tmp_path)
    saved = SavedRun.load(tmp_path)
    assert (saved.epoch, saved.step) == divmod(at, 2) and saved.replicas.energy.shape == (2, 3, at // 2)
    rest = model.generate(resume_from=tmp_path, save_state_to=tmp_path)
    assert same_replicas(whole, rest) and len(rest.replicas.temperatures[:, 1].unique()) == 2
    longer = model.generate(**BASE | FITTED | {"num_epochs": 11})
    assert same_replicas(longer, model.generate(resume_from=tmp_path, num_epochs=11))
    with pytest.raises(ValueError, match="saved run has replica_temperatures=3, not 4"):
        model.generate(resume_from=tmp_path, replica_temperatures=4)


def test_what_comes_back_is_of_the_coldest(tmp_path):
    model = tiny_energy_model(scale=0.5)
    seen: list[torch.Tensor] = []

    class Recorder:
        put = put_draft = lambda self, ids: seen.append(ids.clone())
        end = lambda self: None  # noqa: E731

    settings = BASE | {"num_epochs": 12, "burn_in": 4, "replica_temperatures": [1.0, 1.3, 1.7]}
    out = model.generate(**settings, streamer=Recorder(), stopping_criteria=StopAfter(100))
    assert out.sequences.shape == (3, 6) and out.samples.shape == (3, 8, 6) and out.trace.energy.shape == (3, 12)
    assert torch.equal(out.samples[:, -1], out.sequences) and torch.equal(out.energies[:, -1], out.trace.energy[:, -1])
    torch.testing.assert_close(model(out.sequences, out.attention_mask).energy, out.energies[:, -1], check_dtype=False)
    assert all(ids.shape == (3, 6) for ids in seen) and torch.equal(seen[-1], out.sequences)
    assert all((one != next).any() for one, next in itertools.pairwise(seen))
    own = out.replicas
    assert torch.equal(own.energies[:, 0], out.trace.energy) and own.temperatures.tolist() == [[1.0, 1.3, 1.7]] * 3
    final = torch.stack([model(out.run.state.ids[own.levels[..., -1].argsort(1)[:, k] * 3 + torch.arange(3)]).energy
                         for k in range(3)], 1)  # fmt: skip
    torch.testing.assert_close(own.energies[..., -1], final.double(), atol=1e-4, rtol=1e-4)
    assert out.to_inference_data().posterior["energy"].shape == (3, 8, 1)
    assert model.generate(**BASE).replicas is None


def test_replicas_carry_chains_between_modes_of_any_energy():
    """Two modes ten nats apart from all else: chains that start in one see the other as often, and alone never do."""
    modes = torch.tensor([[5, 5, 5], [8, 8, 8]])
    target = EnergyTarget(lambda ids: 10.0 * (ids[:, None] != modes).any(2).all(1).double(), WORDS, 3)
    settings = dict(num_chains=60, num_epochs=80, burn_in=50, seed=0)
    alone = target.generate(modes[:1], **settings)
    out = target.generate(modes[:1], replica_temperatures=[1, 1.7, 3, 6], **settings)
    for run, low, high in ((alone, 0.0, 0.1), (out, 0.35, 0.65)):
        first, second = ((run.samples == mode).all(2).double().mean() for mode in modes)
        assert low <= float(second / (first + second)) <= high


def test_encoder_decoder_chains_have_replicas_with_their_context(tmp_path):
    model, settings = wrap("bart"), dict(lengths=3, num_chains=2, seed=0, replica_temperatures=[1.0, 1.5])
    context = {"encoder_input_ids": torch.tensor([[7, 8, 9]])}
    whole = model.generate(num_epochs=5, **settings, **context)
    found = model(whole.sequences, encoder_input_ids=torch.tensor([[7, 8, 9]] * 2)).energy
    torch.testing.assert_close(found.double(), whole.energies[:, -1], atol=1e-4, rtol=1e-4)
    model.generate(num_epochs=2, save_state_to=tmp_path, **settings, **context)
    assert same_replicas(whole, model.generate(resume_from=tmp_path, num_epochs=5))


def test_swap_rates_and_round_trips_are_those_of_a_plain_loop():
    draw, chains, count, epochs, first = np.random.default_rng(0), 3, 4, 60, 7
    levels = torch.zeros(chains, count, epochs, dtype=torch.long)
    accepted, tried, trips = np.zeros((chains, count - 1)), np.zeros((chains, count - 1)), [0] * chains
    for chain in range(chains):
        at, ends = list(range(count)), [""] * count  # the replica at each place; each replica's visits to both ends
        for epoch in range(epochs):
            for pair in range(epoch % 2, count - 1, 2):
                yes = draw.random() < 0.7
                if yes:
                    at[pair], at[pair + 1] = at[pair + 1], at[pair]
                if epoch >= first:
                    tried[chain, pair] += 1
                    accepted[chain, pair] += yes
            for place, replica in enumerate(at):
                levels[chain, replica, epoch] = place
            if epoch >= first:
                ends[at[0]] += "c" * (not ends[at[0]].endswith("c"))
                ends[at[-1]] += "h" * (not ends[at[-1]].endswith("h"))
        trips[chain] = sum(max(0, own.count("c") - 1) for own in ends)  # both ends follow each other
    np.testing.assert_allclose(swap_rates(levels, first).numpy(), accepted / tried)
    assert round_trips(levels[..., first:]).tolist() == trips and min(trips) > 1
    assert swap_rates(levels, epochs).isnan().all()


def test_rejection_rates_are_those_of_a_plain_loop():
    draw = torch.Generator().manual_seed(0)
    ladder = torch.tensor([[1.0, 1.4, 2.0], [1.0, 1.1, 3.0]], dtype=torch.float64)
    temperature, energy = torch.tensor([[1.0, 0.9]] * 2).double(), 3 * torch.rand(2, 3, 2, generator=draw).double()
    expected = np.zeros((2, 2))
    for chain, pair, epoch in itertools.product(range(2), range(2), range(2)):
        betas = [1 / float(ladder[chain, pair + k] * temperature[chain, epoch]) for k in (0, 1)]
        gap = float(energy[chain, pair, epoch] - energy[chain, pair + 1, epoch])
        expected[chain, pair] += (1 - min(1.0, np.exp((betas[0] - betas[1]) * gap))) / 2
    np.testing.assert_allclose(rejection_rates(ladder, temperature, energy).numpy(), expected)


@pytest.mark.parametrize(("shape", "count", "hottest", "rejected"), [(4.0, 4, 2.0, None), (60.0, 5, None, 0.5)])
def test_a_fitted_ladder_rejects_all_swaps_alike(shape, count, hottest, rejected):
    """Energies of the Gamma law, as those of Gaussians: ratios of temperatures alone matter, so all must be equal."""
    draw, ladder = np.random.default_rng(0), Replicas.begin(count, 1).ladder
    for _ in range(8):
        energy = torch.from_numpy(draw.gamma(shape, ladder[0].numpy(), (4000, count)).T[None])
        rejection = rejection_rates(ladder, torch.ones(1, 4000).double(), energy)
        ladder = fitted_ladder(ladder, rejection)
    ratios = ladder[0, 1:] / ladder[0, :-1]
    torch.testing.assert_close(ratios, ratios.mean().expand(count - 1), rtol=0.04, atol=0)
    assert rejection[0].tolist() == pytest.approx([rejected or float(rejection.mean())] * (count - 1), abs=0.04)
    assert rejected or float(rejection.mean()) < 0.4
    assert 1.1 < float(ladder[0, -1]) < 2 if hottest is None else float(ladder[0, -1]) == pytest.approx(hottest)


def test_a_ladder_becomes_narrow_and_wide_again():
    wide = torch.tensor([[1.0, 1.5, 2.0]])
    narrow = fitted_ladder(wide, torch.ones(1, 2))
    assert float(narrow[0, -1]) == pytest.approx(1.5)
    assert float(fitted_ladder(narrow, torch.full((1, 2), 0.01))[0, -1]) == pytest.approx(2.0)
    assert fitted_ladder(wide, torch.zeros(1, 2))[0].diff().min() > 0
