"""Energies of any kind as targets: their chains against enumeration, and what is refused."""

import pytest
import torch

from hf_ebm import EnergyTarget, enumerate_distribution
from hf_ebm.sampling.proposals import BlockProposal
from hf_ebm.scoring.rows import BadLogitsError
from tests.sampling.oracle import total_variation_limit

TOKENS, LENGTH, CHAINS = [2, 4, 5], 3, 1500
COUPLINGS = torch.randn(LENGTH, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 2
LOGITS = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(1)) / 2


def energy(ids):
    """Couplings of each position with the next one, around."""
    return sum(COUPLINGS[t][ids[:, t - 1], ids[:, t]] for t in range(LENGTH))


def by_neighbour(ids):
    """Logits of a position by the token on its left; 6 is the mask."""
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(2)) / 2
    return table[ids.roll(1, dims=1)]


EXACT = enumerate_distribution(energy, TOKENS, LENGTH)
GIVEN = {"uniform": None, "one": LOGITS[0], "each": LOGITS.tolist(), "callable": by_neighbour}
SETTINGS = {
    "single_site": {},
    "block": {"block_size": 2},
    "sequential_fill": {"block_size": 2, "block_fill": "sequential"},
    "exclude_current": {"exclude_current": True, "proposal_top_p": 0.9},
}


def distance(logits, **settings) -> tuple[float, float]:
    """Total variation of the last states of independent chains, and what exact draws stay below."""
    target = EnergyTarget(energy, TOKENS, LENGTH, logits)
    out = target.generate(num_chains=CHAINS, num_epochs=20, seed=0, **settings)
    return EXACT.total_variation(out.sequences), total_variation_limit(EXACT.log_probabilities.exp(), CHAINS)


@pytest.mark.parametrize(("logits", "settings"), list(zip(GIVEN, SETTINGS, strict=True)))
def test_chains_reach_the_exact_distribution(logits, settings):
    found, limit = distance(GIVEN[logits], **SETTINGS[settings])
    assert found < limit


def test_a_wrong_way_back_misses_it(monkeypatch):
    propose = BlockProposal.__call__

    def symmetric(*arguments):
        proposed = propose(*arguments)
        return proposed._replace(log_reverse=proposed.log_forward)

    monkeypatch.setattr(BlockProposal, "__call__", symmetric)
    found, limit = distance(2 * LOGITS)
    assert found > limit


def test_fixed_positions_and_extra_energies():
    """A fixed position conditions, its token may be any, and energies add up."""
    start = torch.tensor([[0, 6, 6]])
    further = lambda ids: (ids[:, 1] == ids[:, 2]).double()  # noqa: E731

    def conditional(ids):
        full = torch.cat([torch.zeros_like(ids[:, :1]), ids], 1)
        return energy(full) + 2 * further(full)

    exact = enumerate_distribution(conditional, TOKENS, 2)
    out = EnergyTarget(energy, TOKENS, LENGTH).generate(
        start, num_chains=CHAINS, num_epochs=10, seed=0, extra_energies=[(2.0, further)]
    )
    assert out.sequences[:, 0].eq(0).all()
    assert exact.total_variation(out.sequences[:, 1:]) < total_variation_limit(exact.log_probabilities.exp(), CHAINS)
    torch.testing.assert_close(out.energies[:, -1], energy(out.sequences) + 2 * further(out.sequences))


def test_a_chain_is_the_same_however_it_is_run(tmp_path):
    target = EnergyTarget(energy, TOKENS, LENGTH, by_neighbour)
    settings = dict(num_chains=4, num_epochs=6, seed=3, block_size=2)
    whole = target.generate(**settings)
    some = target.generate(chain_keys=[(0, 3), (0, 1)], num_epochs=6, seed=3, block_size=2)
    assert torch.equal(some.samples, whole.samples[[3, 1]])
    target.generate(**settings | {"num_epochs": 2}, save_state_to=tmp_path)
    resumed = target.generate(resume_from=tmp_path, num_epochs=6)
    assert torch.equal(resumed.samples, whole.samples)
    assert resumed.num_masked_rows == whole.num_masked_rows > 0
    with pytest.raises(ValueError, match="resume_from: the extra energies"):
        EnergyTarget(lambda ids: energy(ids) + 1, TOKENS, LENGTH).generate(resume_from=tmp_path, num_epochs=6)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"energy": 3}, "energy"), ({"tokens": []}, "tokens"), ({"length": 0}, "length"),
     ({"logits": torch.zeros(5)}, "logits"), ({"logits": torch.zeros(2, 6)}, "logits"),
     ({"logits": [[0.0] * 6] * 2}, r"logits .*\(3, 6\)"), ({"logits": [[0.0] * 6] * 2 + [[0.0]]}, "logits"),
     ({"logits": []}, "logits"),
     ({"logits": torch.full((6,), torch.inf)}, "logits"), ({"mask_token_id": 4}, "mask_token_id"),
     ({"device": "no"}, "device")],
)  # fmt: skip
def test_what_makes_no_target_is_refused(arguments, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        EnergyTarget(**{"energy": energy, "tokens": TOKENS, "length": LENGTH} | arguments)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"lengths": 3}, "lengths"), ({"delayed_acceptance": 0}, "delayed_acceptance"), ({"kernel": "gibbs"}, "kernel"),
     ({"decoder": "mask_predict"}, "decoder"), ({"input_ids": torch.zeros(1, 2).long()}, "input_ids"),
     ({"free_mask": torch.ones(1, 3)}, "free_mask"), ({"suppress_tokens": TOKENS}, "suppress_tokens"),
     ({"input_ids": torch.tensor([[6, 2, 2]]), "free_mask": torch.tensor([[0, 1, 1]])}, "free_mask"),
     ({"chain_keys": [(1, 0)]}, "chain_keys")],
)  # fmt: skip
def test_what_means_nothing_is_refused(settings, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        EnergyTarget(energy, TOKENS, LENGTH).generate(**settings)


def test_what_callables_return_is_checked():
    for wrong in (lambda ids: ids, lambda ids: torch.full((len(ids),), torch.nan)):
        with pytest.raises(ValueError, match=r"^energy: <lambda>"):
            EnergyTarget(wrong, TOKENS, LENGTH).generate(seed=0)
    with pytest.raises(ValueError, match=r"^logits: <lambda>"):
        EnergyTarget(energy, TOKENS, LENGTH, lambda ids: ids.double()).generate(seed=0)
    with pytest.raises(BadLogitsError, match="prompt 0, chain 0"):
        EnergyTarget(energy, TOKENS, LENGTH, lambda ids: torch.full((*ids.shape, 6), torch.nan)).generate(seed=0)
