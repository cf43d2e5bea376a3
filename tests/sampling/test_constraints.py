"""Chains within constraints: the exact restricted distribution by every kernel and fill, and what is refused."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

from hf_ebm.models.energy import chains
from hf_ebm.sampling.constraints import at_most_changes
from hf_ebm.sampling.kernels import KERNELS
from tests.conftest import plain_token_energies, tiny_energy_model
from tests.sampling.chains import StopAfter, equal
from tests.sampling.oracle import total_variation_limit
from tests.sampling.test_tables import TABLES, toys  # noqa: F401  a fixture

WORDS, CHAINS = [5, 6, 7], 500
START = [1, 5, 6, 7, 2]
AVOID = [[1, 6, 6, 6, 2], [1, 7, 5, 5, 2], [5, 6, 7]]


class Rule(NamedTuple):
    """Settings, and what they say of a sequence; `free` are the positions whose terms make the energy."""

    settings: dict
    allows: Callable[[Sequence[int]], bool]
    free: tuple[int, ...] = (1, 2, 3)


def changes(ids, others=START) -> int:
    return sum(one != other for one, other in zip(ids, others, strict=True))


RULES = {
    "max_changes": Rule({"max_changes": 1}, lambda ids: changes(ids) <= 1),
    "allowed_tokens": Rule(
        {"allowed_tokens": {2: [6, 5], 3: [7, 6]}}, lambda ids: ids[2] != 7 and ids[3] != 5
    ),
    "protected_positions": Rule({"protected_positions": [2]}, lambda ids: ids[2] == START[2], (1, 3)),
    "avoid": Rule({"avoid": AVOID[:1]}, lambda ids: list(ids) != AVOID[0]),
    "min_distance": Rule(
        {"avoid": AVOID, "min_distance": 2}, lambda ids: all(changes(ids, own) > 1 for own in AVOID[:2])
    ),
}  # fmt: skip
RULES["all"] = Rule(
    {name: value for rule in RULES.values() for name, value in rule.settings.items()}
    | {"max_changes": 2, "protected_positions": [1]},
    lambda ids: ids[1] == START[1] and changes(ids) <= 2
    and RULES["allowed_tokens"].allows(ids) and RULES["min_distance"].allows(ids),
    (2, 3),
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny_energy_model(vocab_size=8, scale=0.22)  # so flat that chains forget their start soon


def sampled(model, rule: str, **more):
    settings = {"num_chains": CHAINS, "num_epochs": 15, "seed": 1, **RULES[rule].settings, **more}
    return model.generate(input_ids=torch.tensor([START]), **settings)


def check_law(model, rule: str, out) -> None:
    """The last samples are as many exact draws would be, from energies of one masked position at a time."""
    space = [ids for words in itertools.product(WORDS, repeat=3) if RULES[rule].allows(ids := (1, *words, 2))]
    energies = [sum(plain_token_energies(model, torch.tensor(ids), RULES[rule].free)) for ids in space]
    exact, shares = (-torch.tensor(energies)).softmax(0), torch.zeros(len(space))
    for ids in map(tuple, out.sequences.tolist()):
        assert ids in space
        shares[space.index(ids)] += 1 / CHAINS
    assert float((shares - exact).abs().sum() / 2) < total_variation_limit(exact, CHAINS)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kernel", [*KERNELS, "toy"])
def test_every_kernel_keeps_the_law(kernel, rule, model, toys):  # noqa: F811
    """Kernels that sample the target sample it restricted, and none ever leaves the set."""
    out = sampled(model, rule, kernel=kernel)
    assert all(RULES[rule].allows(ids) for ids in out.samples.flatten(0, 1).unique(dim=0).tolist())
    if (KERNELS | {"toy": TABLES["kernel"].toy})[kernel].leaves_invariant:
        check_law(model, rule, out)


@pytest.mark.parametrize(
    "more",
    [
        {"block_size": 2}, {"block_size": [1, 2], "block_fill": "sequential"}, {"exclude_current": True},
        {"delayed_acceptance": 0, "block_size": 2, "block_layout": "contiguous"}, {"accept_all_epochs": 3},
        {"block_fill": "toy", "block_size": 2, "num_epochs": 25}, {"proposal_top_k": 2, "proposal_epsilon": 0.6},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rule", ["max_changes", "all"])
def test_every_proposal_keeps_the_law(rule, more, model, toys):  # noqa: F811
    check_law(model, rule, sampled(model, rule, **more))


def test_a_budget_that_follows_the_chain_is_noticed(model, monkeypatch):
    """Changes counted from where a chain is, not from where it began."""

    def following(start, most):
        seen = [start]

        def near(ids):
            kept = at_most_changes(seen[0], most)(ids)
            seen[0] = torch.where(kept[:, None], ids, seen[0])
            return kept

        return near

    monkeypatch.setattr(chains, "at_most_changes", following)
    with pytest.raises(AssertionError):
        check_law(model, "max_changes", sampled(model, "max_changes"))


def test_starts_that_are_filled_keep_constraints(model):
    """By every warm start and decoder; a fill that breaks one is drawn again, and other chains keep theirs."""
    settings = dict(input_ids=torch.tensor([[1, 3, 3, 2]]), num_chains=30, num_epochs=1, seed=0)
    avoid = [[1, one, other, 2] for one in WORDS for other in WORDS if one != other]
    out = model.generate(**settings, avoid=avoid, allowed_tokens={2: [5, 6]}, kernel="gibbs")
    assert {tuple(ids) for ids in out.run.state.ids.tolist()} <= {(1, 5, 5, 2), (1, 6, 6, 2)}
    for more in ({"warm_start": "greedy"}, {"decoder": "mask_predict"}):
        out = model.generate(**settings, allowed_tokens={1: [7], 2: [5, 6]}, **more)
        assert (out.samples[..., 1] == 7).all() and (out.samples[..., 2] < 7).all()
    with pytest.raises(ValueError, match="avoid: none of"):
        model.generate(
            **settings | {"num_chains": 1}, avoid=[[1, *words, 2] for words in itertools.product(WORDS, repeat=2)]
        )


def test_prompts_of_several_lengths_count_from_their_own_beginning(model):
    ids = torch.tensor([[0, 1, 5, 6, 2], [1, 5, 6, 7, 2]])
    settings = dict(attention_mask=(ids > 0).long(), num_chains=20, num_epochs=8, seed=2)
    out = model.generate(ids, max_changes=1, protected_positions=[1], allowed_tokens={2: [5, 6]}, **settings)
    first, second = out.sequences[out.prompt_indices == 0], out.sequences[out.prompt_indices == 1]
    assert first[:, 3].unique().tolist() == second[:, 2].unique().tolist() == [5, 6]
    assert (first[:, 2] == 5).all() and (second[:, 1] == 5).all()
    assert ((first != ids[0]).sum(1) <= 1).all() and ((second != ids[1]).sum(1) <= 1).all()
    away = model.generate(ids, avoid=[[1, 5, 7, 2]], **settings)
    assert not (away.samples[:20] == torch.tensor([0, 1, 5, 7, 2])).all(-1).any()


@pytest.mark.parametrize("rule", ["max_changes", "all"])
def test_a_resumed_run_counts_from_where_it_began(rule, model, tmp_path):
    whole = sampled(model, rule, num_chains=20)
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            torch.tensor([START]), num_chains=20, num_epochs=15, seed=1, save_state_to=tmp_path,
            stopping_criteria=[StopAfter(5, KeyboardInterrupt)], **RULES[rule].settings,
        )  # fmt: skip
    assert equal(whole, model.generate(resume_from=tmp_path))
    with pytest.raises(ValueError, match="resume_from: the saved run has max_changes="):
        model.generate(resume_from=tmp_path, max_changes=3)


@pytest.mark.parametrize(("avoid", "told"), [([START[1:-1]], True), ([START[1:-1], [1, 6, 6, 6, 2]], False)])
def test_sequences_of_which_none_is_as_long_as_a_chain_are_told_of(avoid, told, model, caplog):
    chains.logger.warning_once.cache_clear()
    model.generate(torch.tensor([START]), avoid=avoid, num_epochs=1, seed=0)
    assert ("avoid" in caplog.text) == told


def test_a_budget_above_the_length_is_none(model):
    few = {"num_chains": 2, "num_epochs": 2}
    assert equal(
        sampled(model, "max_changes", max_changes=10**30, **few), sampled(model, "max_changes", max_changes=3, **few)
    )


def test_refused_moves_cost_no_rows(model):
    """Once the budget is spent, only the positions that differ from the start are tried."""
    out = sampled(model, "max_changes", num_chains=50)
    assert out.num_masked_rows < sampled(model, "max_changes", num_chains=50, max_changes=3).num_masked_rows
    assert float(out.trace.acceptance_rate.mean()) < 0.9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_changes": 0}, "max_changes must be"),
        ({"max_changes": 1, "input_ids": torch.tensor([[1, 3, 6, 2]])}, "prompt 0 holds one at position 1"),
        ({"max_changes": 1, "input_ids": None, "lengths": 3}, "max_changes counts from where a chain starts"),
        ({"max_changes": 1, "allowed_tokens": {1: [6], 2: [7]}}, "prompt 0 holds 2 tokens"),
        ({"max_changes": 1, "decoder": "mask_predict"}, "max_changes has no effect with decoder"),
        ({"avoid": [START]}, "avoid: prompt 0 starts at fewer than 1"),
        ({"avoid": [[1, 5, 6, 6, 2]], "min_distance": 2}, "avoid: prompt 0 starts at fewer than 2"),
        ({"avoid": [[1, 99, 6, 6, 2]]}, "avoid: 99 is no id"),
        ({"avoid": [5, 6]}, "avoid: entry 0 must be"),
        ({"avoid": []}, "avoid must be"),
        ({"avoid": [[1, 5, 2], [1, 5, 2, 0]]}, "avoid: entry 1 is padded"),
        ({"avoid": [[0, 1, 5, 2]]}, "avoid: entry 0 is padded"),
        ({"avoid": [[1, 6, 6, 6, 2]], "min_distance": 10**30}, "avoid: prompt 0 starts at fewer than"),
        ({"avoid": [[6]], "decoder": "mask_predict"}, "avoid has no effect with decoder"),
        ({"min_distance": 2}, "min_distance has no effect without avoid"),
        ({"allowed_tokens": {0: [5]}}, "allowed_tokens: position 0, .* isn't free in prompt 0"),
        ({"allowed_tokens": {9: [5]}}, "allowed_tokens: position 9"),
        ({"allowed_tokens": {10**30: [5]}}, "allowed_tokens: position 10+, "),
        ({"allowed_tokens": {1: [5], 2: [4]}}, r"allowed_tokens: position 2 lists \[4\]"),
        ({"allowed_tokens": {1: [5], 2: [6]}, "suppress_tokens": [6]}, r"allowed_tokens: position 2 lists \[6\]"),
        ({"allowed_tokens": {1: []}}, "allowed_tokens: position 1 must hold"),
        ({"allowed_tokens": [5]}, "allowed_tokens must be"),
        ({"allowed_tokens": {"one": [5]}}, "allowed_tokens: positions"),
        ({"allowed_tokens": {1: [5], "1": [6]}}, "allowed_tokens: a position is there twice"),
        ({"protected_positions": [5]}, "protected_positions: position 5"),
        ({"protected_positions": [10**30]}, "protected_positions: position 10+, "),
        ({"protected_positions": [-1]}, "protected_positions must be a list of positions"),
        ({"protected_positions": [1, 2, 3]}, "no free position"),
        ({"protected_positions": [1], "input_ids": torch.tensor([[1, 3, 3, 2]])}, "mask token at fixed position 1"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused_before_any_work(settings, message, model, rows_run):
    with pytest.raises(ValueError, match=message):
        model.generate(**{"input_ids": torch.tensor([START]), "num_epochs": 2, "seed": 0} | settings)
    assert not rows_run
