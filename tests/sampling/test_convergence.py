"""R-hat, effective sample sizes and modes against formulas by hand, and what reports advise."""

import math
import re
import types

import arviz
import numpy as np
import pytest
import torch
from scipy.stats import norm, rankdata

from hf_ebm import EnergyTarget
from hf_ebm.sampling.convergence import (
    diagnosed,
    energy_and_tokens,
    energy_diagnostics,
    modes_of,
    pilot_of,
    r_hats_of,
    token_distances,
    worst_r_hat,
)
from hf_ebm.sampling.report import report_of
from tests.conftest import tiny_energy_model
from tests.sampling.chains import BASE, StopAfter


def walks(chains: int, draws: int, keep: float, apart: float, seed: int = 0) -> torch.Tensor:
    """Chains that keep a share of where they are, around centres that are `apart`."""
    rng = np.random.default_rng(seed)
    noise, found = rng.normal(size=(chains, draws)), np.zeros((chains, draws))
    for draw in range(1, draws):
        found[:, draw] = keep * found[:, draw - 1] + noise[:, draw]
    return torch.from_numpy(found + apart * np.arange(chains)[:, None])


def r_hat_by_hand(values: np.ndarray) -> float:
    """Vehtari et al. 2021: of halves of chains, of normal scores of values and of their distances from the median."""

    def split_r_hat(own: np.ndarray) -> float:
        scores = norm.ppf((rankdata(own).reshape(own.shape) - 3 / 8) / (own.size + 1 / 4))
        length = scores.shape[1]
        between, within = length * scores.mean(1).var(ddof=1), scores.var(1, ddof=1).mean()
        return math.sqrt(((length - 1) / length * within + between / length) / within)

    half = values.shape[1] // 2
    halves = np.concatenate([values[:, :half], values[:, -half:]])
    return max(split_r_hat(halves), split_r_hat(abs(halves - np.median(halves))))


@pytest.mark.parametrize("keep,apart", [(0.0, 0.0), (0.9, 0.0), (0.5, 2.0)])
def test_diagnostics_are_those_of_the_formulas(keep, apart):
    values = walks(4, 101, keep, apart)
    found = diagnosed(values)
    assert found.r_hat == pytest.approx(r_hat_by_hand(values.numpy()), abs=1e-12)
    assert found.ess_bulk == float(arviz.ess(values.numpy(), method="bulk"))
    assert found.ess_tail == float(arviz.ess(values.numpy(), method="tail"))
    assert diagnosed(values[:1])[1:] == (arviz.ess(values[:1].numpy()), arviz.ess(values[:1].numpy(), method="tail"))
    assert math.isnan(diagnosed(values[:1]).r_hat)
    # A difference of spread alone shows only in what is folded.
    wide = walks(4, 100, 0.0, 0.0) * torch.tensor([[1.0], [1.0], [1.0], [9.0]])
    assert diagnosed(wide).r_hat > 1.2 > float(arviz.rhat(wide.numpy(), method="split"))


def test_infinite_energies_are_the_largest():
    values = walks(4, 40, 0.5, 0.3)
    infinite = values.masked_fill(values > 1.5, torch.inf)
    largest = values.masked_fill(values > 1.5, 1e9)
    assert infinite.isinf().any() and diagnosed(infinite) == diagnosed(largest)
    assert math.isnan(diagnosed(torch.full((3, 9), torch.inf)).r_hat)


def test_rounding_of_floats_tells_no_samples_apart():
    """A text's energy is another in other batches by some 1e-6, and R-hat goes by ranks."""
    values = walks(4, 60, 0.5, 0.5).round()
    noisy = values + 1e-6 * torch.randn(4, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert energy_diagnostics(noisy) == energy_diagnostics(values) != diagnosed(noisy)
    tokens = values.long()[..., None]
    assert energy_and_tokens(tokens, noisy) == energy_and_tokens(tokens, values)


def test_what_cannot_be_told_is_nan():
    for values in (torch.zeros(4, 9), torch.randn(4, 3), torch.empty(4, 0)):
        assert all(map(math.isnan, diagnosed(values)))
    assert diagnosed(torch.tensor([[1.0], [2.0]]).expand(2, 9)).r_hat == math.inf  # each stays where it is


def test_tokens_are_compared_with_the_sample_of_the_least_energy():
    """Two chains of the same energies at different texts: their tokens tell what energies can't."""
    texts = torch.tensor([[[5, 6, 7], [5, 6, 8]], [[9, 9, 7], [9, 9, 8]]]).repeat(1, 10, 1)
    energies = torch.tensor([[2.0, 1.0]]).repeat(2, 10)
    assert pilot_of(texts, energies).tolist() == [5, 6, 8]
    assert token_distances(texts, pilot_of(texts, energies))[:, :2].tolist() == [[1, 0], [3, 2]]
    energy, tokens = energy_and_tokens(texts, energies)
    assert energy.r_hat < 1.01 and tokens.r_hat == pytest.approx(
        r_hat_by_hand(np.array([[1.0, 0.0], [3.0, 2.0]]).repeat(1, 1)[:, [0, 1] * 10])
    )
    assert worst_r_hat([energy, tokens]) == tokens.r_hat
    both = torch.cat([texts, texts]), torch.cat([energies, energies])
    found = r_hats_of(*both, torch.ones(4, 20), torch.tensor([4, 4, 7, 7]))
    assert found == {4: tokens.r_hat, 7: tokens.r_hat}


def test_modes_are_counted_by_who_has_been_there():
    around = {0: [5, 5, 5, 5, 5], 1: [8, 8, 8, 8, 8], 2: [6, 6, 6, 6, 6]}
    visits = [(0, 0, 1), (0, 1, 1), (1, 1, 1), (2, 2, 2)]
    samples = torch.tensor([[around[mode] for mode in own] for own in visits])
    energies = torch.tensor([[float(mode) for mode in own] for own in visits])
    assert modes_of(samples, energies) == (2, 1)
    fixed = torch.cat([torch.full((4, 3, 40), 9), samples], 2)  # where no sample differs counts for nothing
    assert modes_of(fixed, energies) == (2, 1)
    long = samples.repeat_interleave(200, 1), energies.repeat_interleave(200, 1)
    assert modes_of(*long) == (2, 1) and modes_of(samples[:, :0], energies[:, :0]) == (0, 0)


PAIRS = {"block_size": 2}


@pytest.mark.parametrize(
    "values,settings,advised",
    [
        (walks(4, 400, 0.0, 0.0), {}, "nothing needs"),
        (walks(4, 90, 0.0, 0.0), {}, "raise num_epochs or num_chains"),
        (walks(2, 400, 0.0, 0.0), {}, "num_chains to 4"),
        (walks(1, 400, 0.0, 0.0), {}, "num_chains to 4"),
        (walks(4, 3, 0.0, 0.0), {}, "raise num_epochs"),
        (walks(4, 0, 0.0, 0.0), {}, "above burn_in"),
        (walks(4, 60, 0.0, 1.0), {}, "block_layout='contiguous'"),
        (walks(4, 60, 0.0, 1.0), PAIRS, r"set num_epochs=\d+0"),
        (walks(4, 60, 0.0, 1.0), {**PAIRS, "target_rhat": 1.01, "max_rows": 70}, "raise max_rows above 70"),
        (walks(4, 60, 0.0, 9.0).round().clamp(0, 4), {}, "of 4 never moved"),
        (torch.cat([walks(4, 60, 0.0, 9.0), walks(4, 60, 0.0, 0.0)], 1), {"burn_in": 5}, "burn_in=65"),
        (walks(4, 60, 0.0, 0.0).masked_fill_(torch.eye(4, 60) > 0, torch.inf), {}, "4 of 4 chains .* forbid"),
        (torch.zeros(4, 60), {}, "the same text"),
        (torch.zeros(4, 1), {"decoder": "mask_predict"}, "decoder"),
    ],
)
def test_a_report_names_the_setting_to_change(values, settings, advised):
    """Texts of one token, which is the energy in tenths."""
    samples, rates = (values * 10).nan_to_num(posinf=99).round().long()[..., None], torch.full_like(values, 0.5)
    told = str(report_of(3, samples, values, rates, rates, settings))
    assert re.search(advised, told) and told.startswith(f"prompt 3: {len(values)} chains of {values.shape[1]} samples")


def test_round_trips_of_replicas_are_told():
    samples, values = walks(4, 60, 0.0, 1.0).round().long()[..., None], walks(4, 60, 0.0, 1.0)
    settings = {**PAIRS, "replica_temperatures": [1.0, 1.5, 2.0]}
    for trips, advised in ((0, "replica_temperatures=5"), (9, "num_epochs=")):
        report = report_of(0, samples, values, values, values, settings, round_trips=trips)
        assert f"round trips of replicas: {trips}" in str(report) and advised in report.advice
    out = tiny_energy_model().generate(**BASE, replica_temperatures=[1.0, 1.2])
    assert out.summary().prompts[0].round_trips == int(out.replicas.round_trips.sum())


def test_a_run_is_summed_up_by_prompt():
    model = tiny_energy_model()
    out = model.generate(**BASE | {"lengths": [2, 4], "num_epochs": 9, "burn_in": 2, "thinning": 2})
    first, second = out.summary().prompts
    own = out.prompt_indices == 1
    assert second.energy == energy_diagnostics(out.energies[own]) and (first.prompt, second.prompt) == (0, 1)
    assert second.tokens == diagnosed(token_distances(out.samples[own], pilot_of(out.samples[own], out.energies[own])))
    assert second.mean_energy == float(out.energies[own].mean()) and second.missed_by is None
    assert second.novel_rate == float(out.trace.novel_rate[own][:, 2::2].mean())
    assert str(second) in str(out.summary()) and f"{second.r_hat:.3f}" in str(second)
    drawn = model.generate(**BASE | {"lengths": {2: 0.5, 4: 0.5}, "num_chains": 8}).summary()
    assert "different lengths" in str(drawn)
    assert "A decoder" in str(model.generate(**BASE, decoder="mask_predict").summary())


# Chains of two positions mix at once, those that may hardly move don't.
JUDGED = dict(lengths=2, num_chains=4, num_epochs=8, burn_in=2, seed=4, target_rhat=1.1, max_rows=100_000)


def judged_by_hand(out, epochs: int) -> float:
    """The worst R-hat after some of the epochs."""
    kept = [number for number, epoch in enumerate(out.kept_epochs) if epoch < epochs]
    accepted = out.trace.acceptance_rate[:, [out.kept_epochs[number] for number in kept]]
    return max(r_hats_of(out.samples[:, kept], out.energies[:, kept], accepted, out.prompt_indices).values())


@pytest.mark.parametrize("extra", [{}, {"lengths": [2, 3]}, {"block_size": 2, "thinning": 2, "target_rhat": 1.05}])
def test_a_run_goes_on_until_its_r_hat_is_met(extra):
    model, settings = tiny_energy_model(), JUDGED | extra
    out = model.generate(**settings)
    done, target = out.run.epoch, settings.pop("target_rhat")
    assert done % 8 == 0 and done > 8 and judged_by_hand(out, done) <= target
    assert all(judged_by_hand(out, epochs) > target for epochs in range(8, done, 8))
    assert max(report.missed_by for report in out.summary().prompts) == 0
    settings.pop("max_rows")
    plain = model.generate(**settings | {"num_epochs": done})  # the rule says how long, and nothing else
    assert torch.equal(plain.samples, out.samples) and torch.equal(plain.energies, out.energies)
    assert plain.kept_epochs == out.kept_epochs and plain.num_masked_rows == out.num_masked_rows


def stuck(ids: torch.Tensor) -> torch.Tensor:
    """An energy of two valleys."""
    return 40.0 * torch.minimum((ids[:, 1:-1] != 5).sum(1), (ids[:, 1:-1] != 8).sum(1)).double()


def test_what_was_missed_is_told(caplog):
    from transformers.utils import logging

    model = tiny_energy_model()
    logging.enable_propagation()
    out = model.generate(**JUDGED | {"max_rows": 300}, extra_energies=stuck)
    logging.disable_propagation()
    rows = out.run.num_rows_asked
    assert rows >= 300 and out.run.epoch > 8
    shorter = model.generate(
        **JUDGED | {"target_rhat": None, "max_rows": None, "num_epochs": out.run.epoch - 8}, extra_energies=stuck
    )
    assert shorter.run.num_rows_asked < 300  # no round was begun after the limit
    (report,) = out.summary().prompts
    assert report.missed_by == report.r_hat - 1.1 > 0
    assert f"missed by {report.missed_by:.3f}" in str(report)
    assert any(f"missed by {report.missed_by:.3f}" in message for message in caplog.messages)


@pytest.mark.parametrize("extra", [{}, {"max_rows": 150, "extra_energies": stuck}])
def test_an_interruption_doesnt_change_when_a_run_ends(tmp_path, monkeypatch, extra):
    """Killed within an epoch, where rows that were kept are lost: met or missed, it ends where it would have."""
    from hf_ebm.models.energy import saved_runs

    model, settings = tiny_energy_model(), JUDGED | extra
    again = {"extra_energies": settings.get("extra_energies")}
    whole = model.generate(**settings)
    for killed in [(3, 1), (11, 1), (whole.run.epoch, 0)]:

        def at(self, run, killed=killed):
            if (run.epoch, run.step) == killed:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(saved_runs.Saver, "save_if_due", at)
            model.generate(**settings, save_state_to=tmp_path)
        rest = model.generate(resume_from=tmp_path, save_state_to=tmp_path, **again)
        assert torch.equal(whole.samples, rest.samples) and whole.run.epoch == rest.run.epoch
        assert whole.run.num_rows_asked == rest.run.num_rows_asked
    assert model.generate(resume_from=tmp_path, **again).run.epoch == whole.run.epoch  # it has ended
    longer = model.generate(resume_from=tmp_path, target_rhat=1.0001, max_rows=whole.run.num_rows_asked + 1, **again)
    assert longer.run.epoch == whole.run.epoch + 8


def test_criteria_constraints_and_other_targets_go_with_it():
    settings = JUDGED | {"target_rhat": 1.0001, "max_rows": 300}
    out = tiny_energy_model().generate(**settings, stopping_criteria=[StopAfter(11)], avoid=[[1, 5, 6, 2]])
    assert out.run.epoch == 11 and not (out.samples == torch.tensor([1, 5, 6, 2])).all(-1).any()
    seen = []
    stream = types.SimpleNamespace(put=lambda ids: seen.append(ids), end=lambda: seen.append(None))
    longer = tiny_energy_model().generate(**settings, streamer=stream)
    assert longer.run.epoch > 11 and seen[-1] is None and torch.equal(seen[-2], longer.sequences)
    del settings["lengths"]
    target = EnergyTarget(lambda ids: ids.sum(1).double(), tokens=range(3), length=3)
    out = target.generate(**settings | {"target_rhat": 1.1, "max_rows": 5_000})
    assert out.summary().prompts[0].r_hat <= 1.1 and out.run.epoch % 8 == 0


def test_a_prompt_of_one_text_is_done():
    """Only one sequence is allowed, so R-hat is undefined, and not missed; the other prompt goes by its own."""
    settings = JUDGED | {"lengths": [1, 2], "allowed_tokens": {1: [5]}}
    out = tiny_energy_model().generate(**settings)
    one, other = out.summary().prompts
    assert out.run.num_rows_asked < 10_000 and other.missed_by == 0 and other.r_hat <= 1.1
    assert one.missed_by == 0 and math.isnan(one.r_hat) and "nothing to mix" in str(one)


def test_chains_that_are_stuck_where_all_began_are_not_done():
    """Nothing was accepted, so that all samples are one says nothing."""
    start, settings = torch.tensor([[1, 5, 8, 2]]), JUDGED | {"max_rows": 300}
    del settings["lengths"]
    hole = lambda ids: 99.0 * (ids != start).any(1).double()  # noqa: E731
    out = tiny_energy_model().generate(start, **settings, extra_energies=hole)
    assert out.samples.eq(start[0]).all() and out.run.num_rows_asked >= 300
    (report,) = out.summary().prompts
    assert report.missed_by == math.inf and "other texts" in report.advice


@pytest.mark.parametrize(
    "tokens, how", [(range(3), {"logits": torch.tensor([100.0, 0, 0])}), ([2], {}), (range(3), {"logits": None})]
)
def test_a_run_whose_proposals_change_nothing_ends(tokens, how):
    """No energy is asked of them, and R-hat is not told before four samples are kept."""
    begun = []

    def criterion(ids, _):
        begun.append(len(ids))
        assert len(begun) <= 60, "the run goes on and on"
        return torch.zeros(len(ids), dtype=torch.bool)

    target = EnergyTarget(lambda ids: ids.sum(1).double() * 0, tokens, 2, **how)
    settings = dict(num_chains=2, num_epochs=5, thinning=20, target_rhat=1.0001, max_rows=50, seed=0)
    out = target.generate(**settings, stopping_criteria=[criterion])
    assert out.run.num_rows_asked >= 50 and out.run.epoch <= 15


def test_rows_are_counted_as_if_none_were_kept(monkeypatch):
    from hf_ebm.scoring import logits_cache

    settings = dict(lengths=4, num_chains=3, num_epochs=5, seed=0)
    kept = tiny_energy_model().generate(**settings)
    monkeypatch.setattr(logits_cache, "_MOST_BYTES_ON_CPU", 0)
    anew = tiny_energy_model().generate(**settings)
    assert kept.run.num_rows_asked == anew.run.num_rows_asked == anew.num_masked_rows > kept.num_masked_rows


@pytest.mark.parametrize(
    "extra,named",
    [
        ({"target_rhat": 1.0}, "target_rhat"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_rows": None}, "max_rows"),
        ({"target_rhat": None}, "target_rhat"),
        ({"decoder": "mask_predict"}, "decoder"),
        ({"kernel": "gibbs"}, "gibbs"),
        ({"final_block_size": 2}, "final_block_size"),
        ({"energy_temperature_decay": 0.1}, "energy_temperature_decay"),
        ({"lengths": {2: 0.5, 3: 0.5}}, "lengths"),
        ({"num_chains": 1}, "num_chains"),
        ({"chain_keys": [(0, 0), (0, 1), (1, 0)], "lengths": [2, 2]}, "prompt 1 has 1"),
    ],
)
def test_what_cannot_be_judged_is_refused(extra, named, rows_run):
    burn_in = {"burn_in": 0} if "decoder" in extra else {}
    with pytest.raises(ValueError, match=named):
        tiny_energy_model().generate(**JUDGED | burn_in | extra)
    assert not rows_run
