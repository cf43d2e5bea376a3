"""Chains against the exact distribution: every option keeps the target, every broken variant misses it."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from hf_ebm.sampling import kernels
from hf_ebm.sampling.proposals import BlockProposal
from hf_ebm.sampling.target import ChainState, Target
from hf_ebm.scoring.logits_cache import MaskedLogitsCache
from tests.conftest import tiny_energy_model
from tests.sampling.oracle import exact_target, total_variation_limit

pytestmark = pytest.mark.slow

WORDS = [5, 6, 7, 8]
CHAINS = 1000
SETTINGS = {
    "single_site": {},
    "sequential_order": {"order": "sequential"},
    "block": {"block_size": 2},
    "whole_block": {"block_size": 3, "num_epochs": 12},  # one step an epoch
    "contiguous": {"block_size": 2, "block_layout": "contiguous"},
    "contiguous_left_to_right": {"block_size": 2, "block_layout": "contiguous", "order": "sequential"},
    "scattered_left_to_right": {"block_size": 2, "order": "sequential"},
    "annealed_block": {"block_size": 3, "final_block_size": 1},
    "mixed_blocks": {"block_size": [1, 3]},
    "sequential_fill": {"block_size": 2, "block_fill": "sequential"},
    "sequential_fill_contiguous": {"block_size": 3, "block_fill": "sequential", "block_layout": "contiguous"},
    "tempered": {"energy_temperature": 1.7},
    "cooled": {"energy_temperature": 1.2, "energy_temperature_decay": 0.1, "min_energy_temperature": 0.8},
    "hot_proposal": {"proposal_temperature": 2.0},
    "top_k": {"proposal_top_k": 2, "proposal_epsilon": 0.2, "num_epochs": 10},
    "top_p": {"proposal_top_p": 0.7, "proposal_epsilon": 0.1, "block_size": 2},
    "top_k_sequential_fill": {
        "proposal_top_k": 2, "proposal_epsilon": 0.2, "block_size": 2, "block_fill": "sequential", "num_epochs": 10,
    },
    "delayed": {"delayed_acceptance": 0},
    "delayed_block": {"delayed_acceptance": 1, "block_size": 2, "block_fill": "sequential"},
    "exclude_current": {"exclude_current": True},
    "exclude_current_block": {"exclude_current": True, "block_size": 2},
    "exclude_current_sequential_fill": {"exclude_current": True, "block_size": 2, "block_fill": "sequential"},
    "everything": {
        "exclude_current": True, "block_size": [3, 2], "block_fill": "sequential", "block_layout": "contiguous",
        "delayed_acceptance": 0, "proposal_temperature": 1.3, "proposal_top_k": 3, "proposal_epsilon": 0.2,
    },
}  # fmt: skip
# What makes terms of the energy itself, or leaves some out, is run with both energies; the others with one, in turn.
WITH_BOTH = {
    "single_site", "block", "sequential_fill", "top_k_sequential_fill", "delayed_block", "exclude_current",
    "exclude_current_sequential_fill", "everything",
}  # fmt: skip
CASES = [
    (energy, name)
    for number, name in enumerate(SETTINGS)
    for energy in (("raw", "local") if name in WITH_BOTH else (("raw", "local")[number % 2],))
]
_exact = {}


def exact_for(energy: str, temperature: float = 1.0):
    key = (energy, temperature)
    if key not in _exact:
        model = tiny_energy_model(energy)
        _exact[key] = (model, exact_target(model, WORDS, 3, temperature=temperature))
    return _exact[key]


def distance(model, exact, **settings) -> tuple[float, float]:
    """Total variation of the last states of independent chains, and what exact draws stay below."""
    settings = {"lengths": 3, "num_chains": CHAINS, "num_epochs": 6, "seed": 0, **settings}
    out = model.generate(**settings)
    return exact.total_variation(out.sequences[:, 1:-1]), total_variation_limit(exact.log_probabilities.exp(), CHAINS)


@pytest.mark.parametrize(("energy", "name"), CASES)
def test_chains_reach_the_exact_distribution(energy, name):
    settings = dict(SETTINGS[name])
    temperature = settings.get("energy_temperature", 1.0)
    if "energy_temperature_decay" in settings:  # stays at the floor long enough to be there at the end
        temperature, settings["num_epochs"] = settings["min_energy_temperature"], 10
    model, exact = exact_for(energy, temperature)
    found, limit = distance(model, exact, **settings)
    assert found < limit


def test_context_and_several_prompts(energy):
    """Fixed words are context; each prompt of a batch, of different lengths, has its own target."""
    model = tiny_energy_model(energy, seed=3)
    prompts = torch.tensor([[1, 5, 3, 3, 8, 2, 0], [1, 3, 7, 3, 6, 5, 2]])
    mask = (prompts != 0).long()
    out = model.generate(input_ids=prompts, attention_mask=mask, num_chains=CHAINS, num_epochs=6, seed=1, block_size=2)
    for number, (template, free) in enumerate([([1, 5, -1, -1, 8, 2], [2, 3]), ([1, -1, 7, -1, 6, 5, 2], [1, 3])]):
        exact = exact_target(model, WORDS, 2, template)
        sequences = out.sequences[out.prompt_indices == number]
        assert exact.total_variation(sequences[:, free]) < total_variation_limit(exact.log_probabilities.exp(), CHAINS)
        fixed = [i for i, token in enumerate(template) if token != -1]
        assert (sequences[:, fixed] == torch.tensor(template)[fixed]).all()


def test_extra_energies_soft_and_hard(energy):
    """A weighted soft preference and a hard constraint that fixes a keyword both become part of the target."""
    model, _ = exact_for(energy)

    def dislikes_repeats(ids):
        return (ids[:, 1:] == ids[:, :-1]).sum(1).double()

    def must_contain_five(ids):
        return torch.where((ids == 5).any(1), 0.0, torch.inf).double()

    def both(ids):
        return 0.7 * dislikes_repeats(ids) + must_contain_five(ids)

    exact = exact_target(model, WORDS, 3, extra=both)
    terms = [(0.7, dislikes_repeats), (1.0, must_contain_five)]
    for settings in ({"block_size": 2}, {"delayed_acceptance": 0}):
        found, limit = distance(model, exact, extra_energies=terms, **settings)
        assert found < limit


def test_a_classifier_as_an_attribute_model(energy):
    """A Transformers classifier's energy, minus the log probability of a class, as a term of the target."""
    model, _ = exact_for(energy)
    torch.manual_seed(2)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    classifier = BertForSequenceClassification(BertConfig(vocab_size=9, pad_token_id=0, **sizes)).eval()
    for parameter in classifier.parameters():  # so that the class depends on the words
        parameter.data.normal_(0, 0.5)

    @torch.no_grad()
    def not_class_one(ids):
        return -classifier(input_ids=ids).logits.log_softmax(-1)[:, 1].double()

    exact = exact_target(model, WORDS, 3, extra=lambda ids: 2.0 * not_class_one(ids))
    found, limit = distance(model, exact, extra_energies=[(2.0, not_class_one)])
    assert found < limit
    plain = exact_for(energy)[1]
    assert float((exact.log_probabilities.exp() - plain.log_probabilities.exp()).abs().sum() / 2) > limit


@pytest.mark.parametrize(
    "saving", [kernels.WorkSaving(False, False), kernels.WorkSaving(True, False), kernels.WorkSaving(False, True)]
)
def test_work_saving_changes_no_draw(energy, saving, monkeypatch):
    """With a device switched off the same random numbers give the same chains, for more rows."""
    model, _ = exact_for(energy)
    settings = dict(lengths=3, num_chains=50, num_epochs=6, seed=2)
    plain = kernels.metropolis_hastings
    monkeypatch.setattr(MaskedLogitsCache, "around", lambda runner, *_: runner)  # it would save the same rows and more

    def without(*arguments, **settings):
        return plain(*arguments, saving=saving, **settings)

    for extra in ({}, {"block_size": 2, "block_fill": "sequential"}, {"delayed_acceptance": 0}):
        fast = model.generate(**settings, **extra)
        with monkeypatch.context() as patch:
            replace_step(patch, without)
            slow = model.generate(**settings, **extra)
        assert torch.equal(fast.samples, slow.samples)
        torch.testing.assert_close(fast.energies, slow.energies, atol=1e-6, rtol=1e-6)  # of logits in float32
        assert fast.num_masked_rows < slow.num_masked_rows


@pytest.mark.parametrize(
    "extra",
    [{}, {"block_size": [1, 2], "block_fill": "sequential"}, {"block_size": [1, 2]}, {"delayed_acceptance": 0},
     {"block_size": 2, "block_fill": "sequential"},
     {"block_size": 3, "block_fill": "sequential", "delayed_acceptance": 0},
     {"exclude_current": True, "proposal_top_k": 2}, {"lengths": [2, 3]}, {"accept_all_epochs": 2},
     {"block_size": 3, "final_block_size": 1}],
)  # fmt: skip
def test_kept_rows_change_no_draw(energy, extra, monkeypatch):
    """Proposals from rows that are read again give the same chains as from rows that are run again."""
    model, _ = exact_for(energy)
    settings = dict(lengths=3, num_chains=40, num_epochs=6, seed=2) | extra
    fast = model.generate(**settings)
    monkeypatch.setattr(MaskedLogitsCache, "around", lambda runner, *_: runner)
    slow = model.generate(**settings)
    assert torch.equal(fast.samples, slow.samples)
    torch.testing.assert_close(fast.energies, slow.energies, atol=1e-6, rtol=1e-6)  # of logits in float32
    assert fast.num_masked_rows < slow.num_masked_rows


def test_rows_of_other_states_are_never_found(monkeypatch):
    """Rows that are found whatever the other tokens are would be those of another state: the chains then differ."""
    model, _ = exact_for("local")
    settings = dict(lengths=3, num_chains=40, num_epochs=6, seed=2)
    right = model.generate(**settings)

    def careless(self, ids, source, column):
        return self.known[self.present[source], source, column]

    monkeypatch.setattr(MaskedLogitsCache, "find", careless)
    assert not torch.equal(model.generate(**settings).samples, right.samples)


def test_single_site_step_runs_as_many_rows_as_free_positions(monkeypatch):
    """One row to propose, L - 1 for the other terms; none of the latter where nothing would change."""
    model, _ = exact_for("local")
    settings = dict(lengths=3, num_chains=20, num_epochs=10, seed=3, exclude_current=True)
    start = 20 * 3 + 20 * 3  # the fill and the energies of the start
    # The row to propose is at hand, and so are all of a state that is tried twice in succession.
    assert start + 10 * 3 * 20 < model.generate(**settings).num_masked_rows <= start + 10 * 3 * 20 * 2
    monkeypatch.setattr(MaskedLogitsCache, "around", lambda runner, *_: runner)
    assert model.generate(**settings).num_masked_rows == start + 10 * 3 * 20 * 3
    fewer = model.generate(lengths=3, num_chains=20, num_epochs=10, seed=3)
    unchanged = 10 * 3 * 20 - _proposals_that_differ(fewer)
    assert fewer.num_masked_rows <= start + 10 * 3 * 20 * 3 - 2 * (unchanged - _rejected(fewer))


def _rejected(out) -> int:
    return round(float(((1 - out.trace.acceptance_rate) * 3).sum()))


def _proposals_that_differ(out) -> int:
    return round(float((out.trace.novel_rate * 3).sum()))


def replace_step(patch, step):
    """Another step in the place of Metropolis–Hastings."""
    patch.setitem(kernels.KERNELS, "metropolis_hastings", kernels.KERNELS["metropolis_hastings"]._replace(step=step))


def replace_proposal(patch, change):
    """Proposals with one thing changed."""
    propose = BlockProposal.__call__
    patch.setattr(BlockProposal, "__call__", lambda *arguments: change(propose(*arguments)))


def broken_sign(patch):
    terms = Target.terms
    patch.setattr(Target, "terms", lambda self, *arguments: -terms(self, *arguments))
    replace_proposal(patch, lambda proposed: proposed._replace(known_terms=-proposed.known_terms))


def broken_reverse(patch):
    replace_proposal(patch, lambda proposed: proposed._replace(log_reverse=torch.zeros_like(proposed.log_reverse)))


def broken_rejection(patch):
    def always(state, block, target, proposal, temperature, **settings):
        state, info = kernels.gibbs(state, block, target, proposal)
        return target.state(state.ids), info

    replace_step(patch, always)


def broken_stale(patch):
    step = kernels.metropolis_hastings

    def forget_energy(state, *arguments, **settings):
        new, info = step(state, *arguments, **settings)
        return ChainState(new.ids, state.token_energies, state.extra_energy), info

    replace_step(patch, forget_energy)


@pytest.mark.parametrize("broken", [broken_sign, broken_reverse, broken_rejection, broken_stale])
def test_broken_variants_miss_the_exact_distribution(energy, broken, monkeypatch):
    model, exact = exact_for(energy)
    broken(monkeypatch)
    found, limit = distance(model, exact, block_size=2)
    assert found > limit


def test_special_tokens_allowed_is_noticed(energy):
    """With the special tokens proposable, states leave the space."""
    model = tiny_energy_model(energy)
    exact = exact_for(energy)[1]
    model.config.special_token_ids, model.config.excluded_token_ids = [], []
    with pytest.raises(ValueError, match="outside the space"):
        distance(model, exact)


def test_gibbs_misses_the_target(energy):
    """Degenerate Gibbs samples something else, visibly."""
    model, exact = exact_for(energy)
    found, limit = distance(model, exact, kernel="gibbs")
    assert found > 1.5 * limit
